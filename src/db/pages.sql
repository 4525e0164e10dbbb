-- Pages of users in the order of their ids, for several requests at once, from one snapshot.
-- $1 bigint[]: positions of the first rows, from 0. $2 bigint[]: how many rows, at most. $3 int[]: bytes of the largest
-- user that is answered; a larger one has neither name nor address. Same length.
-- Answers, by ordinal and id: ordinal (1..), total, and the row; an empty page is one row of nulls.
-- Looks up the block of each level, then the row: see V2__page_counts.sql.
with asked as materialized (
    select ordinal, greatest(first, 0) as first, greatest(most, 0) as most, largest
    from unnest($1::bigint[], $2::bigint[], $3::int[]) with ordinality as a (first, most, largest, ordinal)
), opened as materialized (  -- what the open blocks hold beyond what is recorded of them
    select block, ((select count(*) from users where id between o.block << 9 and o.block << 9 | 511)
          - (select coalesce(sum(c.n), 0) from page_counts c where c.level = 1 and c.block = o.block))::int as n
    from (select distinct block from page_open) o
), top as materialized (
    select block, sum(n) as n, sum(sum(n)::int) over (order by block) as upto
    from (select block, n from page_counts where level = 3
          union all select block >> 8, n from opened) t
    group by block
)
select a.ordinal, (select coalesce(max(upto), 0) from top) as total,
       u.id, case when u.bytes <= a.largest then u.name end, case when u.bytes <= a.largest then u.email end,
       u.created_at, u.updated_at
from asked a
left join lateral (
    select block, a.first - (upto - n) as first from top
    where upto > a.first order by block limit 1) t on true
left join lateral (
    select block, t.first - (upto - n) as first from (
        select block, sum(n) as n, sum(sum(n)::int) over (order by block) as upto
        from (select block, n from page_counts
              where level = 2 and block between t.block << 4 and t.block << 4 | 15
              union all select block >> 4, n from opened where block >> 8 = t.block) c
        group by block) m
    where upto > t.first order by block limit 1) m on true
left join lateral (
    select block, m.first - (upto - n) as first from (
        select block, sum(n) as n, sum(sum(n)::int) over (order by block) as upto
        from (select block, n from page_counts
              where level = 1 and block between m.block << 4 and m.block << 4 | 15
              union all select block, n from opened where block >> 4 = m.block) c
        group by block) b
    where upto > m.first order by block limit 1) b on true
left join lateral (
    select *, octet_length(name) + octet_length(email) as bytes
    from users where id >= b.block << 9 order by id offset b.first limit a.most) u on true
order by a.ordinal, u.id
