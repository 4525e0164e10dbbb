-- Answers of creates with an Idempotency-Key, for 24 hours. Older rows count as absent, and the service removes them.
--
-- A row is written by the statement that creates its user. It refers to no user: it outlives the user, whose values it
-- holds as they were answered. A delete of the user erases these: then the row only says that the key was used.

select set_config('search_path', format('%I, pg_temp', current_schema()), true);

create table idempotency_keys (
    key bytea primary key,       -- SHA-256 of the key
    fingerprint bytea not null,  -- SHA-256 of the body without the password; empty if the user was deleted
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
create index idempotency_keys_id on idempotency_keys (id);

-- Has the owner's rights, for roles that may delete users and nothing else. A plan that was made for an empty table must
-- use the index.
create function idempotency_erase() returns trigger language plpgsql security definer
set search_path from current set enable_seqscan = off as $$
begin
    if tg_op = 'DELETE' then
        update idempotency_keys set fingerprint = '', password_hash = null, name = '', email = ''
            where id = any (array(select id from changed));
    else
        update idempotency_keys set fingerprint = '', password_hash = null, name = '', email = ''
            where fingerprint <> bytea '';
    end if;
    return null;
end $$;
revoke execute on function idempotency_erase() from public;

create trigger idempotency_erase after delete on users
    referencing old table as changed for each statement execute function idempotency_erase();
create trigger idempotency_erase_all after truncate on users
    for each statement execute function idempotency_erase();
