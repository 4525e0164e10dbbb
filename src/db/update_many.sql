-- Changes names and addresses of users, each as update.sql does, and waits for no row.
-- $1 bigint[]: the users, in the order of their ids, no two equal. $2, $3 text[]: new names, new addresses, or nulls.
-- $4 bytea[]: the one state that each change is allowed for, or null. $5 timestamptz[]: past these, nothing is
-- changed.
-- Answers a row for each: the user as it then is, or nulls; the id; the outcome; and the database's clock. Outcomes:
-- 0: as was asked for. 1: the state does not allow the change. 2: the address is to be another one, for which another
-- transaction may have to be waited for. 3: the row is locked, or the change is late. 4: there is no such row.
--
-- The limits make a look-up in the index of each, whenever the plan was made. A row that another transaction has
-- changed since the snapshot is locked, compared and changed as it is now.
with given as materialized (
    select *
    from rows from (
        pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::text[]), pg_catalog.unnest($3::text[]),
        pg_catalog.unnest($4::bytea[]), pg_catalog.unnest($5::timestamptz[])
    ) as given (asked, new_name, new_email, state, deadline)
), target as materialized (
    select locked.*, coalesce(new_name, name) as new_name, coalesce(new_email, email) as new_email,
        state is null or pg_catalog.int8send(version) operator(pg_catalog.||)
            pg_catalog.timestamptz_send(updated_at) operator(pg_catalog.=) state as allowed,
        pg_catalog.lower(email collate pg_catalog."C") operator(pg_catalog.<>)
            pg_catalog.lower(coalesce(new_email, email) collate pg_catalog."C") as moves
    from given cross join lateral (
        select id, name, email, created_at, updated_at, version from users
        where id operator(pg_catalog.=) asked and pg_catalog.clock_timestamp() operator(pg_catalog.<) deadline
        limit 1 for no key update skip locked
    ) as locked
), updated as (
    update users
    set name = new_name, email = new_email, version = target.version operator(pg_catalog.+) 1,
        updated_at = least(
            greatest(pg_catalog.now(), target.updated_at operator(pg_catalog.+) interval '1 microsecond'),
            timestamptz '9999-12-31T23:59:59.999999Z')
    from target
    where users.id operator(pg_catalog.=) any (array(
            select id from target
            where allowed and not moves
                and (name operator(pg_catalog.<>) new_name or email::text operator(pg_catalog.<>) new_email)))
        and target.id operator(pg_catalog.=) users.id
    returning users.id, users.name, users.email, users.created_at, users.updated_at, users.version
), changed as (
    select id, name, email, created_at, updated_at, version, 0 as outcome from updated
    union all
    select id, name, email, created_at, updated_at, version,
        case when not allowed then 1 when moves then 2 else 0 end
    from target where id operator(pg_catalog.<>) all (array(select id from updated))
)
select id, name, email, created_at, updated_at, version, asked,
    -- Not `exists`, which may be executed by a scan of all users.
    coalesce(outcome, (select 3 from users where users.id operator(pg_catalog.=) asked limit 1), 4),
    pg_catalog.clock_timestamp()
from given left join changed on id operator(pg_catalog.=) asked
