-- What creates with an Idempotency-Key were answered, for 24 hours. Older rows count as absent; the service removes them.
--
-- A row is written by the statement that creates its user. It refers to no user: it outlives the user, whose values it
-- holds as they were answered.

create table idempotency_keys (
    -- SHA-256 of the key.
    key bytea primary key,
    -- SHA-256 of the body without the password.
    fingerprint bytea not null,
    -- The hash of the password in the body, as in credentials.
    password_hash text,
    id bigint not null,
    name text not null,
    email text not null,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    version bigint not null,
    kept_since timestamptz not null default now()
);

create index idempotency_keys_kept_since on idempotency_keys (kept_since);

-- Read by releases that do not know this migration: they may use the database if they know the second one.
comment on table refinery_schema_history is 'migration 5 is compatible with migration 2';
