-- An insert of one user, or of few, in less time, and less work at the end of each block. What is counted, and how, is as
-- in V2, and what a session keeps is as in V7.
--
-- PL/pgSQL compiles each expression anew in each transaction that evaluates it, and a query for each execution. So an
-- insert into a block that the session has seen open evaluates few expressions, of few operators: an insert of one user
-- takes 173,000 instructions instead of 188,000, and 178,000 instead of 199,000 with its share of the end of a block, of
-- which each has 512 users (callgrind, PostgreSQL 15).

-- Writers wait behind a waiting lock: this one gives up soon, and userd retries the migration. No writer uses the old
-- functions while another uses the new.
set local lock_timeout = '200ms';
lock table users in access exclusive mode;

create or replace function restore_guard() returns trigger language plpgsql as $$
begin
    -- Two statements: the conditions of the inner one are not compiled where the outer one's is false.
    if current_setting('check_function_bodies') = 'off' then
        if current_setting('search_path') = '' and coalesce(current_setting('userd.restore', true), '') <> 'on' then
            raise warning 'a dump can be restored into an empty database only, and % is there: the session is ended',
                tg_relid::regclass;
            perform pg_terminate_backend(pg_backend_pid());
            raise exception 'a dump can be restored into an empty database only'
                using errcode = 'object_not_in_prerequisite_state';
        end if;
    end if;
    return null;
end $$;

-- A script of INSERT statements has these before those of users, where there are no credentials and no keys.
create trigger restore_guard before insert on page_counts for each statement
    execute function restore_guard();
create trigger restore_guard before insert on page_open for each statement
    execute function restore_guard();

-- Records what is missing of block b. For who holds its lock; alone, where it is open.
create or replace function page_settle(b bigint) returns void language plpgsql as $$
declare
    -- One statement, and so one snapshot for both sums. Within the insert they would be executed twice.
    missing bigint := (select count(*) from users where id between b << 9 and b << 9 | 511)
                    - (select coalesce(sum(n), 0) from page_counts where level = 1 and block = b);
begin
    if missing <> 0 then
        insert into page_counts values (1, b, missing), (2, b >> 4, missing), (3, b >> 8, missing);
        perform page_fold(2, b >> 4), page_fold(3, b >> 8);
    end if;
end $$;

do $do$
begin
    execute format($format$
create function page_track_insert() returns trigger language plpgsql security definer as $$
declare
    -- The settings are not those of V7: sessions that began before this migration may have these, in another form. A
    -- setting is empty where the transaction that made it was rolled back.
    seen bigint := ('0' operator(pg_catalog.||) pg_catalog.current_setting('userd.page_seen', true))::bigint;
    other bigint;
    first bigint;
    last bigint;
    key pg_catalog.text;
    opened bigint[];
    blocks bigint[];
    counts bigint[];
begin
    -- Other levels may look at a past, that of an imported snapshot, where the block was not open.
    if pg_catalog.pg_try_advisory_xact_lock_shared(tg_relid::int, (seen operator(pg_catalog.&) 255)::int)
       and pg_catalog.current_setting('transaction_isolation') operator(pg_catalog.=) 'read committed'
       and pg_catalog.current_setting('userd.page_key', true) operator(pg_catalog.=) (%2$s)
    then
        -- Times are those of the defaults in most inserts: fewer operators than the condition below.
        perform from changed
            where id operator(pg_catalog.>>) 9 operator(pg_catalog.<>) seen or id operator(pg_catalog.<=) 0
               or created_at operator(pg_catalog.<>) pg_catalog.now() or updated_at operator(pg_catalog.<>) created_at;
        if not found then
            return null;
        end if;
    end if;
    -- An id in a path is the canonical decimal of a positive number; RFC 3339 writes four-digit years and knows no
    -- infinity.
    select id into other from changed
        where id operator(pg_catalog.<=) 0
           or created_at operator(pg_catalog.<) '0001-01-01T00:00:00Z'
           or created_at operator(pg_catalog.>=) '10000-01-01T00:00:00Z'
           or updated_at operator(pg_catalog.<) '0001-01-01T00:00:00Z'
           or updated_at operator(pg_catalog.>=) '10000-01-01T00:00:00Z';
    if found then
        raise exception 'a user has a positive id, and times of the years 1 to 9999'
            using errcode = 'check_violation', detail = pg_catalog.concat('The id is ', other, '.');
    end if;
    select pg_catalog.min(id) operator(pg_catalog.>>) 9, pg_catalog.max(id) operator(pg_catalog.>>) 9
        into first, last from changed;
    if first is null then
        return null;
    end if;
    if last operator(pg_catalog.<=) (first operator(pg_catalog.+) 1)
       and pg_catalog.current_setting('transaction_isolation') operator(pg_catalog.=) 'read committed'
       and pg_catalog.pg_try_advisory_xact_lock_shared(tg_relid::int, (first operator(pg_catalog.&) 255)::int)
       and pg_catalog.pg_try_advisory_xact_lock_shared(tg_relid::int, (last operator(pg_catalog.&) 255)::int)
    then  -- a statement after the locks sees all that was committed before them
        key := %2$s;
        opened := array(select block from %1$I.page_open where block operator(pg_catalog.>=) first);
        if first operator(pg_catalog.=) any (opened) and last operator(pg_catalog.=) any (opened)
           and last operator(pg_catalog.+) 2 operator(pg_catalog.=) any (opened) then
            -- Not what this transaction has opened: it may be prepared, and rolled back by another session.
            if not exists (
                select from %1$I.page_open
                where (block operator(pg_catalog.=) last
                       or block operator(pg_catalog.=) (last operator(pg_catalog.+) 2))
                  and pg_catalog.age(xmin) operator(pg_catalog.<=) pg_catalog.age((
                      pg_catalog.txid_current() operator(pg_catalog.&) 4294967295
                  )::pg_catalog.text::pg_catalog.xid)) then
                perform pg_catalog.set_config('userd.page_seen', last::pg_catalog.text, false),
                        pg_catalog.set_config('userd.page_key', key, false);
            end if;
            return null;
        end if;
    end if;
    select pg_catalog.array_agg(block), pg_catalog.array_agg(n) into blocks, counts from (
        select id operator(pg_catalog.>>) 9 as block, pg_catalog.count(*) as n from changed group by 1) c;
    perform %1$I.page_record(tg_relid, true, blocks, counts);
    return null;
end $$
    $format$, current_schema(),
    -- The number changes before a block is closed; of other tables it may be the same.
    format($key$pg_catalog.pg_sequence_last_value('%I.page_closings'::pg_catalog.regclass)::pg_catalog.text
               operator(pg_catalog.||) ' ' operator(pg_catalog.||) tg_relid::pg_catalog.text$key$, current_schema()));

    execute format($format$
create or replace function page_track() returns trigger language plpgsql security definer as $$
declare
    first bigint;
    last bigint;
    opened bigint[];
    blocks bigint[];
    counts bigint[];
begin  -- for deletes
    select pg_catalog.min(id) operator(pg_catalog.>>) 9, pg_catalog.max(id) operator(pg_catalog.>>) 9
        into first, last from changed;
    if first is null then
        return null;
    end if;
    if last operator(pg_catalog.<=) (first operator(pg_catalog.+) 1)
       and pg_catalog.current_setting('transaction_isolation') operator(pg_catalog.=) 'read committed'
       and pg_catalog.pg_try_advisory_xact_lock_shared(tg_relid::int, (first operator(pg_catalog.&) 255)::int)
       and pg_catalog.pg_try_advisory_xact_lock_shared(tg_relid::int, (last operator(pg_catalog.&) 255)::int)
    then  -- a statement after the locks sees all that was committed before them
        opened := array(select block from %1$I.page_open where block operator(pg_catalog.>=) first);
        if first operator(pg_catalog.=) any (opened) and last operator(pg_catalog.=) any (opened) then
            return null;
        end if;
    end if;
    select pg_catalog.array_agg(block), pg_catalog.array_agg(n) into blocks, counts from (
        select id operator(pg_catalog.>>) 9 as block, pg_catalog.count(*) as n from changed group by 1) c;
    perform %1$I.page_record(tg_relid, false, blocks, counts);
    return null;
end $$
    $format$, current_schema());
end $do$;
revoke execute on function page_track_insert() from public;

drop trigger page_insert on users;
create trigger page_insert after insert on users
    referencing new table as changed for each statement execute function page_track_insert();

-- What it calls is planned with this, too. The plans are the same for all values, and planning took 40 in 100 of its
-- instructions. A plan that was made while there were no users, for a session that lives on, must use their index; and
-- what is without an index then seems costly enough to be compiled.
alter function page_record(oid, boolean, bigint[], bigint[])
    set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off;

-- Read by releases that do not know this migration: they may use the database if they know the second one.
comment on table refinery_schema_history is 'migration 8 is compatible with migration 2';
