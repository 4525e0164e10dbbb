-- Creates a user, unless a create with the same key was answered within the last 24 hours.
-- $1 bytea: the key's digest. $2 bytea: that of the body without its password. $3, $4 text: name and address. $5 text:
-- the hash of the password, or null. $6 timestamptz: past this, nothing is created.
-- Answers one row, the user as it was created, with the digest of the body and the hash of the password where it is a
-- row that was kept, and the database's clock. Fails as a create does where the address is taken, or where another
-- transaction keeps the same key at the same time: then nothing is created.
with kept as materialized (
    select id, name, email, created_at, updated_at, version, fingerprint, password_hash
    from idempotency_keys
    where key operator(pg_catalog.=) $1
        and kept_since operator(pg_catalog.>) (pg_catalog.now() operator(pg_catalog.-) interval '24 hours')
), expired as materialized (
    delete from idempotency_keys
    where key operator(pg_catalog.=) $1
        and kept_since operator(pg_catalog.<=) (pg_catalog.now() operator(pg_catalog.-) interval '24 hours')
    returning key
), created as (
    insert into users (name, email)
    select $3, $4 where not exists (select from kept) and pg_catalog.clock_timestamp() operator(pg_catalog.<) $6
    returning id, name, email, created_at, updated_at, version
), credential as (
    insert into credentials (user_id, password_hash) select id, $5 from created where $5::text is not null
), keeping as (
    insert into idempotency_keys (key, fingerprint, password_hash, id, name, email, created_at, updated_at, version)
    select $1, $2, $5, id, name, email, created_at, updated_at, version from created
    -- Before this row is written, the one that it replaces is gone.
    where (select pg_catalog.count(*) from expired) operator(pg_catalog.>=) 0
)
select id, name, email, created_at, updated_at, version, null::bytea, null::text, pg_catalog.clock_timestamp()
from created
union all
select *, pg_catalog.clock_timestamp() from kept
