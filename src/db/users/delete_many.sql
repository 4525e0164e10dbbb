-- Deletes users, and waits for none of their rows.
-- $1 timestamptz[]: past these, nothing is deleted. $2 bigint[]: the users, in the order of their ids, no two equal.
-- $3 bytea[]: the one state that each is deleted in, or null.
-- Answers a row for each: its position, the outcome, and the database's clock. Outcomes: 0: deleted. 1: the state does not
-- allow it. 3: the row is locked, or has been changed meanwhile, or the delete is late. 4: there is no such row, or a
-- trigger has kept it. See update_many.sql.
with given as materialized (
    select *
    from rows from (
        pg_catalog.unnest($1::timestamptz[]), pg_catalog.unnest($2::bigint[]), pg_catalog.unnest($3::bytea[])
    ) with ordinality as given (deadline, asked, state, position)
), target as materialized (
    select id
    from given cross join lateral (
        select id from users
        where id operator(pg_catalog.=) asked and pg_catalog.clock_timestamp() operator(pg_catalog.<) deadline
            and (state is null or {STATE} operator(pg_catalog.=) state)
        limit 1 for update skip locked
    ) as locked
), deleted as (
    delete from users
    where id operator(pg_catalog.=) any (array(select id from target))
    returning id
)
select position,
    case when deleted.id is not null then 0 else coalesce(outcome, 4) end as outcome,
    pg_catalog.clock_timestamp()
from given
    left join deleted on deleted.id operator(pg_catalog.=) asked
    left join lateral (
        select
            case
                when {STATE} operator(pg_catalog.<>) state then 1
                when id operator(pg_catalog.=) any (array(select id from target)) then 4
                else 3
            end as outcome
        from users
        where deleted.id is null and id operator(pg_catalog.=) asked
        limit 1
    ) as seen on true
