-- Deletes users, and waits for none of their rows.
-- $1 timestamptz[]: past these, nothing is deleted. $2 bigint[]: the users, in the order of their ids, no two equal.
-- $3 bytea[]: the one state that each is deleted in, or null.
-- Answers a row for each: its position, the outcome, and the database's clock. Outcomes: 0: deleted. 1: the state does not
-- allow it. 3: the row is locked, or the delete is late. 4: there is no such row. See update_many.sql.
with given as materialized (
    select *
    from rows from (
        pg_catalog.unnest($1::timestamptz[]), pg_catalog.unnest($2::bigint[]), pg_catalog.unnest($3::bytea[])
    ) with ordinality as given (deadline, asked, state, position)
), target as materialized (
    select id,
        state is null or pg_catalog.int8send(version) operator(pg_catalog.||)
            pg_catalog.timestamptz_send(updated_at) operator(pg_catalog.=) state as allowed
    from given cross join lateral (
        select id, version, updated_at from users
        where id operator(pg_catalog.=) asked and pg_catalog.clock_timestamp() operator(pg_catalog.<) deadline
        limit 1 for update skip locked
    ) as locked
), deleted as (
    delete from users
    where id operator(pg_catalog.=) any (array(select id from target where allowed))
    returning id
)
select position,
    case
        when deleted.id is not null then 0
        when not allowed then 1
        -- A trigger has left it out.
        when allowed then 4
        else coalesce((select 3 from users where users.id operator(pg_catalog.=) asked limit 1), 4)
    end as outcome,
    pg_catalog.clock_timestamp()
from given
    left join deleted on deleted.id operator(pg_catalog.=) asked
    left join target on target.id operator(pg_catalog.=) asked
