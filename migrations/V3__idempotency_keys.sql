-- What creates with an Idempotency-Key were answered, for 24 hours. Older rows count as absent; the service removes
-- them.
--
-- A row is written by the statement that creates its user. It refers to no user: it outlives the user, whose values it
-- holds as they were answered.

create table idempotency_keys (
    -- SHA-256 of the key.
    key bytea primary key,
    -- SHA-256 of the body without the password.
    fingerprint bytea not null,
    -- The hash of the password in the body, as in credentials.
    password_hash varchar(512),
    id bigint not null,
    name varchar(1000) not null,
    email varchar(254) not null,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    version bigint not null,
    kept_since timestamptz not null default now()
);

create index idempotency_keys_kept_since on idempotency_keys (kept_since);
