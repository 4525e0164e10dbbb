-- Changes users, each as update_one.sql does, and waits for no row.
-- $1 timestamptz[]: past these, nothing is changed. $2 bigint[]: the users, in the order of their ids, no two equal.
-- $3 bytea[]: the one state that each change is allowed for, or null. Then the new values, or nulls, as arrays.
-- Answers a row for each: the user as it then is, or nulls; its position; the outcome; and the database's clock. Outcomes:
-- 0: as was asked for. 1: the state does not allow the change. 2: to be changed by itself, as its address is to be another
-- one, for which another transaction may have to be waited for, or as a trigger has left it out. 3: the row is locked, or
-- has been changed meanwhile, or the change is late. 4: there is no such row.
--
-- Only rows that will be changed are locked, as a lock is written, and committed, like a change; the others are judged as
-- the snapshot has them. A row that another transaction has changed since the snapshot is compared as it is now, and
-- locked where it still may be changed. The limits make a look-up in the index of each, whenever the plan was made.
with given as materialized (
    select *
    from rows from (
        pg_catalog.unnest($1::timestamptz[]), pg_catalog.unnest($2::bigint[]), pg_catalog.unnest($3::bytea[]),
        {pg_catalog.unnest(VALUE::TYPE[])}
    ) with ordinality as given (deadline, asked, state, {new_GIVEN}, position)
), target as materialized (
    select locked.*, {coalesce(new_GIVEN, GIVEN) as new_GIVEN}
    from given cross join lateral (
        select {COLUMN} from users
        where id operator(pg_catalog.=) asked and pg_catalog.clock_timestamp() operator(pg_catalog.<) deadline
            and (state is null or {STATE} operator(pg_catalog.=) state)
            and ({GIVEN::TYPE operator(pg_catalog.<>) coalesce(new_GIVEN, GIVEN); or})
            and pg_catalog.lower(email collate pg_catalog."C") operator(pg_catalog.=)
                pg_catalog.lower(coalesce(new_email, email) collate pg_catalog."C")
        limit 1 for no key update skip locked
    ) as locked
), updated as (
    update users
    set {GIVEN = new_GIVEN}, version = target.version operator(pg_catalog.+) 1,
        updated_at = least(
            greatest(pg_catalog.now(), target.updated_at operator(pg_catalog.+) interval '1 microsecond'),
            timestamptz '9999-12-31T23:59:59.999999Z')
    from target
    where users.id operator(pg_catalog.=) any (array(select id from target))
        and target.id operator(pg_catalog.=) users.id
    returning {users.COLUMN}
)
select {coalesce(updated.COLUMN, seen.COLUMN) as COLUMN}, position,
    case when updated.id is not null then 0 else coalesce(outcome, 4) end as outcome,
    pg_catalog.clock_timestamp()
from given
    left join updated on updated.id operator(pg_catalog.=) asked
    left join lateral (
        select {COLUMN},
            case
                when {STATE} operator(pg_catalog.<>) state then 1
                when pg_catalog.lower(email collate pg_catalog."C") operator(pg_catalog.<>)
                    pg_catalog.lower(coalesce(new_email, email) collate pg_catalog."C") then 2
                when {GIVEN::TYPE operator(pg_catalog.=) coalesce(new_GIVEN, GIVEN); and} then 0
                when id operator(pg_catalog.=) any (array(select id from target)) then 2
                else 3
            end as outcome
        from users
        where updated.id is null and id operator(pg_catalog.=) asked
        limit 1
    ) as seen on true
