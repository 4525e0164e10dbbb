-- Changes name and address of a user, in the most frequent case by one UPDATE.
-- $1 bigint: the user. $2, $3 text: a new name, a new address, or null. $4 bytea: the one state that the change is
-- allowed for, or null (see update.sql). $5 timestamptz: past this, nothing is changed.
-- Answers the user as it was stored; else, where the row of the snapshot tells why nothing was, that row and whether
-- its state allows the change; else that row and null, or no row where there is none; and the database's clock.
with updated as (
    update users
    set name = coalesce($2, name), email = coalesce($3, email), version = version operator(pg_catalog.+) 1,
        updated_at = least(greatest(pg_catalog.now(), updated_at operator(pg_catalog.+) interval '1 microsecond'),
            timestamptz '9999-12-31T23:59:59.999999Z')
    where id operator(pg_catalog.=) $1 and pg_catalog.clock_timestamp() operator(pg_catalog.<) $5
        and (name operator(pg_catalog.<>) coalesce($2, name) or email::text operator(pg_catalog.<>) coalesce($3, email))
        and ($4::bytea is null or pg_catalog.int8send(version) operator(pg_catalog.||)
            pg_catalog.timestamptz_send(updated_at) operator(pg_catalog.=) $4)
    returning id, name, email, created_at, updated_at, version
)
select id, name, email, created_at, updated_at, version, true, pg_catalog.clock_timestamp()
from updated
union all
select id, name, email, created_at, updated_at, version,
    case
        when $4::bytea is not null and pg_catalog.int8send(version) operator(pg_catalog.||)
            pg_catalog.timestamptz_send(updated_at) operator(pg_catalog.<>) $4 then false
        when name operator(pg_catalog.=) coalesce($2, name) and email::text operator(pg_catalog.=) coalesce($3, email)
            then true
    end,
    pg_catalog.clock_timestamp()
from users
where id operator(pg_catalog.=) $1 and not exists (select from updated)
