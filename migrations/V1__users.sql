-- Users, and their credentials apart from them, so that no read of users can fetch a hash.

create table users (
    id bigint generated always as identity primary key,
    name text not null,
    -- 254 octets is the longest address that mail can be sent to (RFC 5321, 4.5.3.1.3, less the brackets).
    email varchar(254) not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    -- An id in a path is the canonical decimal of a positive number.
    constraint users_id_positive check (id > 0),
    -- RFC 3339 writes four-digit years and knows no infinity.
    constraint users_times_in_rfc3339 check (
        created_at >= '0001-01-01T00:00:00Z' and created_at < '10000-01-01T00:00:00Z'
        and updated_at >= '0001-01-01T00:00:00Z' and updated_at < '10000-01-01T00:00:00Z'
    )
);

create unique index users_email_key on users (lower(email));

create table credentials (
    user_id bigint primary key references users (id) on delete cascade,
    -- Argon2id, as a PHC string.
    password_hash text not null
);
