-- What creates with an Idempotency-Key were answered, for 24 hours. Older rows count as absent, and the service removes
-- them.
--
-- A row is written by the statement that creates its user. It refers to no user: it outlives the user, whose values it
-- holds as they were answered. A delete of the user erases these: then the row only says that the key was used.

create table idempotency_keys (
    -- SHA-256 of the key.
    key bytea primary key,
    -- SHA-256 of the body without the password. Empty: the user was deleted.
    fingerprint bytea not null,
    -- The hash of the password in the body, as in credentials.
    password_hash varchar(512),
    id bigint not null,
    name varchar(1000) not null,
    email varchar(254) not null,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    version bigint not null,
    kept_since timestamptz not null default pg_catalog.now()
);

create index idempotency_keys_kept_since on idempotency_keys (kept_since);
create index idempotency_keys_id on idempotency_keys (id);

-- Makes the functions, as page_functions() does: after the schema was renamed, this has to be called again.
create function idempotency_functions() returns void language plpgsql as $make$
begin
    execute pg_catalog.format(
        'select %I.refuse_functions_of_others(%L)', pg_catalog.current_schema(),
        array['idempotency_erase', 'idempotency_erase_all']::text[]);
    execute pg_catalog.format($functions$

-- Also for those who may delete users and nothing else. A plan that was made for an empty table must use the index.
create or replace function idempotency_erase() returns trigger language plpgsql security definer
set enable_seqscan = off as $$
begin
    update %1$I.idempotency_keys set fingerprint = '', password_hash = null, name = '', email = ''
        where id operator(pg_catalog.=) any (array(select id from changed));
    return null;
end $$;

create or replace function idempotency_erase_all() returns trigger language plpgsql security definer as $$
begin
    update %1$I.idempotency_keys set fingerprint = '', password_hash = null, name = '', email = ''
        where fingerprint operator(pg_catalog.<>) '';
    return null;
end $$;

    $functions$, pg_catalog.current_schema());
end $make$;
select idempotency_functions();
revoke execute on function idempotency_functions(), idempotency_erase(), idempotency_erase_all() from public;

create trigger idempotency_erase after delete on users
    referencing old table as changed for each statement execute function idempotency_erase();
create trigger idempotency_erase_all after truncate on users
    for each statement execute function idempotency_erase_all();
