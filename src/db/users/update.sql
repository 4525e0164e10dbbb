-- Changes a user, where the state of its record is one that the change is allowed for.
-- $1 timestamptz: past this, nothing is changed. $2 bigint: the user. $3 text: the hash of a new password, or null.
-- $4 bool: whether the password is removed. $5, $6 bytea[]: the states that the change is allowed for, or null for all
-- of them, and those that it is not, or null; a state is the version and the time of the last change, in 16 bytes. Then
-- the new values, or nulls.
-- Answers no row when there is no such user, or when it is late; else the user as it is after the change, whether its
-- state allowed the change, whether the statement was overtaken, and the database's clock. Where it was, or the state
-- did not allow it, nothing is changed.
--
-- Everything is compared with the locked row, which another transaction may have changed after this statement took its
-- snapshot. The joins have both changes of the credential made before the update, for which they count.
--
-- Overtaken: a deletion finds only what the snapshot has, so it misses a credential that another transaction has
-- inserted meanwhile. That transaction has changed the user, too, whose row is then another one than the snapshot's.
-- (`on conflict` has no such gap.)
with target as materialized (
    select {COLUMN},
        ctid operator(pg_catalog.<>) (select ctid from users where id operator(pg_catalog.=) $2) as moved,
        ($5::bytea[] is null or {STATE} operator(pg_catalog.=) any ($5))
            and ($6::bytea[] is null or {STATE} operator(pg_catalog.<>) all ($6)) as allowed
    from users
    where id operator(pg_catalog.=) $2 and pg_catalog.clock_timestamp() operator(pg_catalog.<) $1
    for no key update
), credential_set as (
    insert into credentials (user_id, password_hash)
    select id, $3 from target where $3::text is not null and allowed
    on conflict (user_id) do update set password_hash = excluded.password_hash
    returning user_id
), credential_removed as (
    delete from credentials where user_id operator(pg_catalog.=) any (array(select id from target where $4 and allowed))
    returning user_id
), change as materialized (
    select target.*,
        $4 and moved and credential_removed.user_id is null as overtaken,
        credential_set.user_id is not null or credential_removed.user_id is not null
            or {target.GIVEN::TYPE operator(pg_catalog.<>) coalesce(VALUE, target.GIVEN); or} as changed
    from target
        left join credential_set on credential_set.user_id operator(pg_catalog.=) target.id
        left join credential_removed on credential_removed.user_id operator(pg_catalog.=) target.id
), updated as (
    update users
    set {GIVEN = coalesce(VALUE, change.GIVEN)},
        version = change.version operator(pg_catalog.+) 1,
        updated_at = least(
            greatest(pg_catalog.now(), change.updated_at operator(pg_catalog.+) interval '1 microsecond'),
            timestamptz '9999-12-31T23:59:59.999999Z')
    from change where users.id operator(pg_catalog.=) $2 and changed and allowed and not overtaken
    returning {users.COLUMN}
)
select {COLUMN}, true as allowed, false as overtaken,
    pg_catalog.clock_timestamp()
from updated
union all
select {COLUMN}, allowed, overtaken, pg_catalog.clock_timestamp()
from change
where not exists (select from updated)
