-- Creates a user, unless a create with the same key was answered within the last 24 hours.
-- $1 bytea: the key's digest. $2 bytea: that of the body without its password. $3, $4 text: name and address. $5 text:
-- the hash of the password, or null.
-- Answers one row, the user as it was created, with the digest of the body and the hash of the password where it is a
-- row that was kept. Fails as a create does where the address is taken, or where another transaction keeps the same key
-- at the same time: then nothing is created.
with kept as materialized (
    select id, name, email, created_at, updated_at, version, fingerprint, password_hash
    from idempotency_keys where key = $1 and kept_since > now() - interval '24 hours'
), expired as materialized (
    delete from idempotency_keys where key = $1 and kept_since <= now() - interval '24 hours' returning key
), created as (
    insert into users (name, email) select $3, $4 where not exists (select from kept)
    returning id, name, email, created_at, updated_at, version
), credential as (
    insert into credentials (user_id, password_hash) select id, $5 from created where $5::text is not null
), keeping as (
    insert into idempotency_keys (key, fingerprint, password_hash, id, name, email, created_at, updated_at, version)
    select $1, $2, $5, id, name, email, created_at, updated_at, version from created
    -- Before this row is written, the one that it replaces is gone.
    where (select count(*) from expired) >= 0
)
select id, name, email, created_at, updated_at, version, null::bytea, null::text from created
union all
table kept
