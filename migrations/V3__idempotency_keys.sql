-- Answers of creates with an Idempotency-Key. Rows that have expired count as absent, and the service removes them.
--
-- A row is written by the statement that creates its user. It refers to no user: it outlives the user, whose values it
-- holds as they were answered. A delete of the user erases these: then the row only says that the key was used.

select set_config('search_path', format('%I, pg_temp', current_schema()), true);

create table idempotency_keys (
    key bytea primary key,  -- SHA-256 of the key
    user_id bigint not null,
    -- The user, the hash of its password, and the SHA-256 of the body without the password; null if the user was deleted.
    answer jsonb,
    expires_at timestamptz not null
);
create index idempotency_keys_expires_at on idempotency_keys (expires_at);
create index idempotency_keys_user_id on idempotency_keys (user_id);

-- Has the owner's rights, for roles that may delete users and nothing else. A plan that was made for an empty table must
-- use the index.
create function idempotency_erase() returns trigger language plpgsql security definer
set search_path from current set enable_seqscan = off as $$
begin
    if tg_op = 'DELETE' then
        update idempotency_keys set answer = null where user_id = any (array(select id from changed));
    else
        update idempotency_keys set answer = null where answer is not null;
    end if;
    return null;
end $$;
revoke execute on function idempotency_erase() from public;

create trigger idempotency_erase after delete on users
    referencing old table as changed for each statement execute function idempotency_erase();
create trigger idempotency_erase_all after truncate on users
    for each statement execute function idempotency_erase();
