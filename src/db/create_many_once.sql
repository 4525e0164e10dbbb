-- Creates users as create_once.sql does, each with a key of its own.
-- $1 bytea[]: digests of the keys, no two equal. $2 bytea[]: those of the bodies. $3, $4 text[]: names and addresses.
-- Answers a row for each that was created or whose key was kept: the user, the digest of the body where it was kept, the
-- hash of its password, and the position in the arrays. Those without a row have an address that is taken.
with given as materialized (
    select key, fingerprint, name, email, position
    from unnest($1::bytea[], $2::bytea[], $3::text[], $4::text[]) with ordinality
        as given (key, fingerprint, name, email, position)
), found as materialized (
    -- Its limit makes this a look-up in the index for each, even where the plan was made while the table was empty.
    select keys.*, given.position, keys.kept_since > now() - interval '24 hours' as is_kept
    from given cross join lateral (select * from idempotency_keys where key = given.key limit 1) as keys
), expired as materialized (
    -- Where none has expired, this scans nothing.
    delete from idempotency_keys
    where exists (select from found where not is_kept)
        and key = any (array(select key from found where not is_kept))
    returning key
), new as materialized (
    select name, email, position from given
    where not exists (select from found where found.position = given.position and is_kept) order by position
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
select id, name, email, created_at, updated_at, version, fingerprint, password_hash, position from found where is_kept
