-- Users, and their credentials apart from them, so that no read of users can fetch a hash.

-- Functions find their names in this schema and in that of PostgreSQL, whatever their caller has set.
select set_config('search_path', format('%I, pg_temp', current_schema()), true);

create table users (
    id bigint generated always as identity primary key check (id > bigint '0'),
    -- Every row is small, so that every page is.
    name varchar(1000) not null,
    -- 254 octets is the longest address that mail can be sent to (RFC 5321, 4.5.3.1.3, less the brackets).
    email varchar(254) not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    -- Drawn anew by each change of the record, whoever makes it. An ETag is made of it and of updated_at, so that a user
    -- who is restored or inserted again under an old id has another one.
    version bigint not null default floor(random() * float8 '1e15')::bigint,
    -- RFC 3339 writes four-digit years and knows no infinity.
    check (created_at >= timestamptz '0001-01-01T00:00:00Z' and created_at < timestamptz '10000-01-01T00:00:00Z'),
    check (updated_at >= timestamptz '0001-01-01T00:00:00Z' and updated_at < timestamptz '10000-01-01T00:00:00Z')
);

-- Upper and lower case of ASCII letters are the same, nothing else is, whatever the locale of the database. The casts
-- give operands the exact types of PostgreSQL's functions, so that no function of another role fits better.
create unique index users_email_key on users (lower(email::text collate "C"));

create table credentials (
    user_id bigint primary key references users (id) on delete cascade,
    -- A PHC string: Argon2id or, until the first login of an imported user, another one.
    password_hash varchar(512) not null
);

create function user_version() returns trigger language plpgsql set search_path from current as $$
begin
    -- If the service changes a password, which no column of this table may show, it moves updated_at.
    new.version := case when new::text = old::text then old.version
        else floor(random() * float8 '1e15')::bigint end;
    return new;
end $$;

create function user_id_is_fixed() returns trigger language plpgsql as $$
begin
    raise exception 'the id of a user cannot be changed' using errcode = 'integrity_constraint_violation';
end $$;

-- Otherwise any role could make them triggers of a table of its own.
revoke execute on function user_version(), user_id_is_fixed() from public;

create trigger user_id_is_fixed after update on users
    for each row when (old.id <> new.id) execute function user_id_is_fixed();
-- Triggers run in the order of their names: this one sees what other triggers have made of the row.
create trigger zz_user_version before update on users for each row execute function user_version();
