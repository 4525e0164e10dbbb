-- Creates users as create_once.sql does, each with a key of its own.
-- $1 bytea[]: digests of the keys, no two equal. $2 bytea[]: those of the bodies. $3, $4 text[]: names and addresses.
-- Answers a row for each that was created or whose key was kept: the user, the digest of the body where it was kept, the
-- hash of its password, and the position in the arrays. Those without a row have an address that is taken.
with given as materialized (
    select key, fingerprint, name, email, position
    from unnest($1::bytea[], $2::bytea[], $3::text[], $4::text[]) with ordinality
        as given (key, fingerprint, name, email, position)
), kept as materialized (
    select keys.id, keys.name, keys.email, keys.created_at, keys.updated_at, keys.version, keys.fingerprint,
        keys.password_hash, given.position
    from given join idempotency_keys keys on keys.key = given.key
    where kept_since > now() - interval '24 hours'
), expired as materialized (
    delete from idempotency_keys keys using given
    where keys.key = given.key and kept_since <= now() - interval '24 hours' returning keys.key
), new as materialized (
    select name, email, position from given
    where not exists (select from kept where kept.position = given.position) order by position
), created as (
    -- `returning` sees nothing of `new`. But an insert reads, stores and returns one row before it reads the next: the
    -- setting that reading a row writes is the one that `returning` finds.
    insert into users (name, email)
    select name, email from new where set_config('userd.position', position::text, true) <> ''
    on conflict do nothing
    returning id, name, email, created_at, updated_at, version, current_setting('userd.position')::bigint as position
), keeping as (
    insert into idempotency_keys (key, fingerprint, id, name, email, created_at, updated_at, version)
    select given.key, given.fingerprint, created.id, created.name, created.email, created.created_at,
        created.updated_at, created.version
    from created join given on given.position = created.position
    -- Before these rows are written, those that they replace are gone.
    where (select count(*) from expired) >= 0
)
select id, name, email, created_at, updated_at, version, null::bytea, null::text, position from created
union all
table kept
