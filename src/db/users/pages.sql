-- Pages of users in the order of their ids, for several requests at once, from one snapshot.
-- $1 bigint[]: positions of the first rows, from 0. $2 bigint[]: how many rows, at most. $3 int[]: bytes of the largest
-- user that is answered; a larger one has no texts. Same length.
-- Answers, by ordinal and id: the row, ordinal (1..), and total; an empty page is one row of nulls.
-- Looks up the block of each level, then the row: see V2__page_counts.sql.
with asked as materialized (
    select ordinal, greatest(first, 0) as first, greatest(most, 0) as most, largest
    from rows from (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::bigint[]), pg_catalog.unnest($3::int[]))
        with ordinality as a (first, most, largest, ordinal)
), opened as materialized (  -- what the open blocks hold beyond what is recorded of them
    select block, (
            (select pg_catalog.count(*) from users
                where id operator(pg_catalog.>=) (o.block operator(pg_catalog.<<) 9)
                    and id operator(pg_catalog.<=) (o.block operator(pg_catalog.<<) 9 operator(pg_catalog.|) 511))
            operator(pg_catalog.-)
            (select coalesce(pg_catalog.sum(c.n), 0) from page_counts c
                where c.level operator(pg_catalog.=) 1 and c.block operator(pg_catalog.=) o.block)
        )::int as n
    from (select distinct block from page_open) o
), top as materialized (
    select block, pg_catalog.sum(n) as n, pg_catalog.sum(pg_catalog.sum(n)::int) over (order by block) as upto
    from (select block, n from page_counts where level operator(pg_catalog.=) 3
          union all select block operator(pg_catalog.>>) 8, n from opened) t
    group by block
)
select {u.FIXED}, {case when u.bytes operator(pg_catalog.<=) a.largest then u.TEXT end},
       a.ordinal, (select coalesce(pg_catalog.max(upto), 0) from top) as total
from asked a
left join lateral (
    select block, a.first operator(pg_catalog.-) (upto operator(pg_catalog.-) n) as first from top
    where upto operator(pg_catalog.>) a.first order by block limit 1) t on true
left join lateral (
    select block, t.first operator(pg_catalog.-) (upto operator(pg_catalog.-) n) as first from (
        select block, pg_catalog.sum(n) as n, pg_catalog.sum(pg_catalog.sum(n)::int) over (order by block) as upto
        from (select block, n from page_counts
              where level operator(pg_catalog.=) 2 and block operator(pg_catalog.>=) (t.block operator(pg_catalog.<<) 4)
                  and block operator(pg_catalog.<=) (t.block operator(pg_catalog.<<) 4 operator(pg_catalog.|) 15)
              union all select block operator(pg_catalog.>>) 4, n from opened
              where (block operator(pg_catalog.>>) 8) operator(pg_catalog.=) t.block) c
        group by block) m
    where upto operator(pg_catalog.>) t.first order by block limit 1) m on true
left join lateral (
    select block, m.first operator(pg_catalog.-) (upto operator(pg_catalog.-) n) as first from (
        select block, pg_catalog.sum(n) as n, pg_catalog.sum(pg_catalog.sum(n)::int) over (order by block) as upto
        from (select block, n from page_counts
              where level operator(pg_catalog.=) 1 and block operator(pg_catalog.>=) (m.block operator(pg_catalog.<<) 4)
                  and block operator(pg_catalog.<=) (m.block operator(pg_catalog.<<) 4 operator(pg_catalog.|) 15)
              union all select block, n from opened
              where (block operator(pg_catalog.>>) 4) operator(pg_catalog.=) m.block) c
        group by block) b
    where upto operator(pg_catalog.>) m.first order by block limit 1) b on true
left join lateral (
    select *, {pg_catalog.octet_length(TEXT); operator(pg_catalog.+)} as bytes
    from users where id operator(pg_catalog.>=) (b.block operator(pg_catalog.<<) 9)
    order by id offset b.first limit a.most) u on true
order by a.ordinal, u.id
