-- Changes the values of users, each as update.sql does, and waits for no row.
-- $1 timestamptz[]: past these, nothing is changed. $2 bigint[]: the users, in the order of their ids, no two equal.
-- $3 bytea[]: the one state that each change is allowed for, or null. Then the new values, or nulls, as arrays.
-- Answers a row for each: the user as it then is, or nulls; its position; the outcome; and the database's clock. Outcomes:
-- 0: as was asked for. 1: the state does not allow the change. 2: the address is to be another one, for which another
-- transaction may have to be waited for. 3: the row is locked, or the change is late. 4: there is no such row.
--
-- The limits make a look-up in the index of each, whenever the plan was made. A row that another transaction has
-- changed since the snapshot is locked, compared and changed as it is now.
with given as materialized (
    select *
    from rows from (
        pg_catalog.unnest($1::timestamptz[]), pg_catalog.unnest($2::bigint[]), pg_catalog.unnest($3::bytea[]),
        {pg_catalog.unnest(VALUE::TYPE[])}
    ) with ordinality as given (deadline, asked, state, {new_GIVEN}, position)
), target as materialized (
    select locked.*, {coalesce(new_GIVEN, GIVEN) as new_GIVEN},
        state is null or pg_catalog.int8send(version) operator(pg_catalog.||)
            pg_catalog.timestamptz_send(updated_at) operator(pg_catalog.=) state as allowed,
        pg_catalog.lower(email collate pg_catalog."C") operator(pg_catalog.<>)
            pg_catalog.lower(coalesce(new_email, email) collate pg_catalog."C") as moves
    from given cross join lateral (
        select {COLUMN} from users
        where id operator(pg_catalog.=) asked and pg_catalog.clock_timestamp() operator(pg_catalog.<) deadline
        limit 1 for no key update skip locked
    ) as locked
), updated as (
    update users
    set {GIVEN = new_GIVEN}, version = target.version operator(pg_catalog.+) 1,
        updated_at = least(
            greatest(pg_catalog.now(), target.updated_at operator(pg_catalog.+) interval '1 microsecond'),
            timestamptz '9999-12-31T23:59:59.999999Z')
    from target
    where users.id operator(pg_catalog.=) any (array(
            select id from target
            where allowed and not moves
                and ({GIVEN::TYPE operator(pg_catalog.<>) new_GIVEN; or})))
        and target.id operator(pg_catalog.=) users.id
    returning {users.COLUMN}
), changed as (
    select {COLUMN}, 0 as outcome from updated
    union all
    select {COLUMN},
        case when not allowed then 1 when moves then 2 else 0 end
    from target where id operator(pg_catalog.<>) all (array(select id from updated))
)
select {COLUMN}, position,
    -- Not `exists`, which may be executed by a scan of all users.
    coalesce(outcome, (select 3 from users where users.id operator(pg_catalog.=) asked limit 1), 4) as outcome,
    pg_catalog.clock_timestamp()
from given left join changed on id operator(pg_catalog.=) asked
