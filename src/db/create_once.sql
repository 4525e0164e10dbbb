-- Creates a user, unless a create with the same key was answered within the last 24 hours.
-- $1 timestamptz: past this, nothing is created. $2 bytea: the key's digest. $3 bytea: that of the body without its
-- password. $4 text: the hash of the password, or null. Then the values.
-- Answers one row, the user as it was created, with the digest of the body and the hash of the password where it is a
-- row that was kept, and the database's clock. Fails as a create does where the address is taken, or where another
-- transaction keeps the same key at the same time: then nothing is created.
with kept as materialized (
    select {COLUMN}, fingerprint, password_hash
    from idempotency_keys
    where key operator(pg_catalog.=) $2
        and kept_since operator(pg_catalog.>) (pg_catalog.now() operator(pg_catalog.-) interval '24 hours')
), expired as materialized (
    delete from idempotency_keys
    where key operator(pg_catalog.=) $2
        and kept_since operator(pg_catalog.<=) (pg_catalog.now() operator(pg_catalog.-) interval '24 hours')
    returning key
), created as (
    insert into users ({GIVEN})
    select {VALUE} where not exists (select from kept) and pg_catalog.clock_timestamp() operator(pg_catalog.<) $1
    returning {COLUMN}
), credential as (
    insert into credentials (user_id, password_hash) select id, $4 from created where $4::text is not null
), keeping as (
    insert into idempotency_keys (key, fingerprint, password_hash, {COLUMN})
    select $2, $3, $4, {COLUMN} from created
    -- Before this row is written, the one that it replaces is gone.
    where (select pg_catalog.count(*) from expired) operator(pg_catalog.>=) 0
)
select {COLUMN}, null::bytea as fingerprint, null::text as password_hash, pg_catalog.clock_timestamp()
from created
union all
select *, pg_catalog.clock_timestamp() from kept
