-- Creates users as create_once.sql does, each with a key of its own.
-- $1 timestamptz[]: past these, nothing is created. $2 bytea[]: digests of the keys, no two equal. $3 bytea[]: those of
-- the bodies. Then the values, as arrays.
-- Answers a row for each that was created or whose key was kept: the user, the digest of the body where it was kept,
-- the hash of its password, the position in the arrays, and the database's clock. Those without a row have an address
-- that is taken, or are late.
with given as materialized (
    select *
    from rows from (
        pg_catalog.unnest($1::timestamptz[]), pg_catalog.unnest($2::bytea[]), pg_catalog.unnest($3::bytea[]),
        {pg_catalog.unnest(VALUE::TYPE[])}
    ) with ordinality as given (deadline, key, fingerprint, {GIVEN}, position)
), found as materialized (
    -- Its limit makes this a look-up in the index for each, even where the plan was made while the table was empty.
    select keys.*, given.position,
        keys.kept_since operator(pg_catalog.>) (pg_catalog.now() operator(pg_catalog.-) interval '24 hours') as is_kept
    from given cross join lateral (
        select * from idempotency_keys where key operator(pg_catalog.=) given.key limit 1
    ) as keys
), expired as materialized (
    -- Where none has expired, this scans nothing.
    delete from idempotency_keys
    where exists (select from found where not is_kept)
        and key operator(pg_catalog.=) any (array(select key from found where not is_kept))
    returning key
), new as materialized (
    select {GIVEN}, deadline, position from given
    where not exists (select from found where found.position operator(pg_catalog.=) given.position and is_kept)
    order by position
), created as (
    -- `returning` sees nothing of `new`. But an insert reads, stores and returns one row before it reads the next: the
    -- setting that reading a row writes is the one that `returning` finds.
    insert into users ({GIVEN})
    select {GIVEN} from new
    where pg_catalog.clock_timestamp() operator(pg_catalog.<) deadline
        and pg_catalog.set_config('userd.position', position::text, true) operator(pg_catalog.<>) ''
    on conflict (pg_catalog.lower(email collate pg_catalog."C")) do nothing
    returning {COLUMN},
        pg_catalog.current_setting('userd.position')::bigint as position
), keeping as (
    insert into idempotency_keys (key, fingerprint, {COLUMN})
    select given.key, given.fingerprint, {created.COLUMN}
    from created join given on given.position operator(pg_catalog.=) created.position
    -- Before these rows are written, those that they replace are gone.
    where (select pg_catalog.count(*) from expired) operator(pg_catalog.>=) 0
)
select {COLUMN}, null::bytea as fingerprint, null::text as password_hash, position,
    pg_catalog.clock_timestamp()
from created
union all
select {COLUMN}, fingerprint, password_hash, position,
    pg_catalog.clock_timestamp()
from found where is_kept
