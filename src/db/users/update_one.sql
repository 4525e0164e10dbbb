-- Changes the values of a user, in the most frequent case by one UPDATE.
-- $1 timestamptz: past this, nothing is changed. $2 bigint: the user. $3 bytea: the one state that the change is allowed
-- for, or null (see update.sql). Then the new values, or nulls.
-- Answers the user as it was stored; else, where the row of the snapshot tells why nothing was, that row and whether
-- its state allows the change; else that row and null, or no row where there is none; and the database's clock.
with updated as (
    update users
    set {GIVEN = coalesce(VALUE, GIVEN)}, version = version operator(pg_catalog.+) 1,
        updated_at = least(greatest(pg_catalog.now(), updated_at operator(pg_catalog.+) interval '1 microsecond'),
            timestamptz '9999-12-31T23:59:59.999999Z')
    where id operator(pg_catalog.=) $2 and pg_catalog.clock_timestamp() operator(pg_catalog.<) $1
        and ({GIVEN::TYPE operator(pg_catalog.<>) coalesce(VALUE, GIVEN); or})
        and ($3::bytea is null or {STATE} operator(pg_catalog.=) $3)
    returning {COLUMN}
)
select {COLUMN}, true as allowed, pg_catalog.clock_timestamp()
from updated
union all
select {COLUMN},
    case
        when $3::bytea is not null and {STATE} operator(pg_catalog.<>) $3 then false
        when {GIVEN::TYPE operator(pg_catalog.=) coalesce(VALUE, GIVEN); and} then true
    end as allowed,
    pg_catalog.clock_timestamp()
from users
where id operator(pg_catalog.=) $2 and not exists (select from updated)
