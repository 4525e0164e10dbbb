-- An insert of one user, or of few, in less time. What is counted, and how, is as in V2.
--
-- Most inserts are into a block that an earlier insert of the same session found open. So the session keeps two
-- settings: that block, and the number that page_closings then had, which changes before a block is closed. While it
-- stays the same the block is open, and so is the one two further on. It is drawn by whoever closes a block, while they
-- hold its lock alone, and read by whoever inserts, after they share it. A sequence will do, although transactions do
-- not undo it: a number that was drawn for nothing costs another look.
--
-- They are settings because a dump must not have them: it has the sequence as it was at the dump's end, and the rows as
-- they were at its beginning. Whoever sets them by hand spoils the totals: see page_recount().
--
-- The checks of id and times move into the triggers: a constraint is read and compiled anew for each statement, which
-- took a sixth of an insert's instructions. Rows that come without triggers are not checked, either.

-- Writers wait behind a waiting lock: this one gives up soon, and userd retries the migration. No writer uses the old
-- functions while another uses the new.
set local lock_timeout = '200ms';
lock table users in access exclusive mode;

create sequence page_closings;

-- A number that was never drawn, even if a restore has set the sequence back: the microseconds since 1970.
create function page_forget() returns void language sql as $$
    select setval('page_closings', greatest((select last_value from page_closings) + 1,
                                            (extract(epoch from clock_timestamp()) * 1000000)::bigint))
$$;
select page_forget();

alter table users drop constraint if exists users_id_positive,
    drop constraint if exists users_times_in_rfc3339;

-- Called when inserts reach block b: opens it and the two after it, closes those behind.
create or replace function page_roll(users_oid oid, b bigint) returns void language plpgsql as $$
declare
    x bigint;
begin
    -- One at a time; and only where users end, not where somebody fills in old ids.
    if not pg_try_advisory_xact_lock(users_oid::int, -1 - (b & 255)::int)
       or exists (select from users where id between (b + 2) << 9 and (b + 2) << 9 | 511) then
        return;
    end if;
    insert into page_open select next from unnest(array[b, b + 1, b + 2]) next
        where next << 9 >> 9 = next  -- the last block of bigint has none after it
          and not exists (select from page_open o where o.block = next);
    for x in select distinct block from page_open where block not between b and b + 2
             and (block < b or (select count(*) > 16 from page_open)) loop
        continue when not pg_try_advisory_xact_lock(users_oid::int, (x & 255)::int);
        if not exists (select from page_held where lock = x & 255 and holder = txid_current()) then
            delete from page_held where lock = x & 255;
            insert into page_held values (x & 255, txid_current());
        end if;
        perform nextval('page_closings');
        perform page_settle(x);  -- a statement after the lock sees all that was committed before it
        delete from page_open where block = x;
    end loop;
end $$;

create or replace function page_clear() returns trigger language plpgsql security definer as $$
begin  -- TRUNCATE is alone on users until its end
    perform page_forget();
    if current_setting('transaction_isolation') = 'read committed' then
        delete from page_counts;  -- makes no reader wait
        delete from page_open;
    else
        truncate page_counts, page_open;  -- an older snapshot would not see every row to delete
    end if;
    perform page_count();  -- other triggers may have inserted users since
    return null;
end $$;

create or replace function page_recount() returns void language plpgsql as $$
begin
    if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
        raise exception 'page_recount() may see an old snapshot: call it in a read committed transaction'
            using errcode = 'invalid_transaction_state';
    end if;
    -- Keeps writers out, and is refused amid a statement that has yet to record what it changes.
    alter table users enable trigger page_insert;
    perform page_forget();
    delete from page_counts;
    delete from page_open;
    perform page_count();
end $$;

do $do$
begin
    execute format('alter function page_clear() set search_path = %I, pg_temp', current_schema());
    execute format('alter function page_recount() set search_path = %I, pg_temp', current_schema());
    execute format($format$
create or replace function page_track() returns trigger language plpgsql security definer as $$
declare
    seen pg_catalog.text;
    other bigint;
    first bigint;
    last bigint;
    closings pg_catalog.text;
    opened bigint[];
    blocks bigint[];
    counts bigint[];
begin
    if tg_op operator(pg_catalog.=) 'INSERT' then
        seen := pg_catalog.current_setting('userd.page_block', true);
        -- Other levels may look at a past, that of an imported snapshot, where the block was not open.
        if seen operator(pg_catalog.<>) ''
           and pg_catalog.current_setting('transaction_isolation') operator(pg_catalog.=) 'read committed'
           and pg_catalog.pg_try_advisory_xact_lock_shared(
               tg_relid::int, (seen::bigint operator(pg_catalog.&) 255)::int)
           and pg_catalog.current_setting('userd.page_closings', true) operator(pg_catalog.=) pg_catalog.concat(
               tg_relid, ' ', pg_catalog.pg_sequence_last_value('%1$I.page_closings'::pg_catalog.regclass))
        then
            select id into other from changed
                where id operator(pg_catalog.>>) 9 operator(pg_catalog.<>) seen::bigint
                   or %2$s;
            if not found then
                return null;
            end if;
        end if;
        select id into other from changed where %2$s;
        if found then
            raise exception 'a user has a positive id, and times of the years 1 to 9999'
                using errcode = 'check_violation', detail = pg_catalog.concat('The id is ', other, '.');
        end if;
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
        closings := pg_catalog.concat(
            tg_relid, ' ', pg_catalog.pg_sequence_last_value('%1$I.page_closings'::pg_catalog.regclass));
        opened := array(select block from %1$I.page_open where block operator(pg_catalog.>=) first);
        if first operator(pg_catalog.=) any (opened) and last operator(pg_catalog.=) any (opened) then
            if tg_op operator(pg_catalog.=) 'DELETE' then
                return null;
            elsif last operator(pg_catalog.+) 2 operator(pg_catalog.=) any (opened) then
                -- Not what this transaction has opened: it may be prepared, and rolled back by another session.
                if not exists (
                    select from %1$I.page_open
                    where (block operator(pg_catalog.=) last
                           or block operator(pg_catalog.=) (last operator(pg_catalog.+) 2))
                      and pg_catalog.age(xmin) operator(pg_catalog.<=) pg_catalog.age((
                          pg_catalog.txid_current() operator(pg_catalog.&) 4294967295
                      )::pg_catalog.text::pg_catalog.xid)) then
                    perform pg_catalog.set_config('userd.page_block', last::pg_catalog.text, false),
                            pg_catalog.set_config('userd.page_closings', closings, false);
                end if;
                return null;
            end if;
        end if;
    end if;
    select pg_catalog.array_agg(block), pg_catalog.array_agg(n) into blocks, counts from (
        select id operator(pg_catalog.>>) 9 as block, pg_catalog.count(*) as n from changed group by 1) c;
    perform %1$I.page_record(tg_relid, tg_op operator(pg_catalog.=) 'INSERT', blocks, counts);
    return null;
end $$
    $format$, current_schema(),
    -- An id in a path is the canonical decimal of a positive number; RFC 3339 writes four-digit years and knows no
    -- infinity.
    $refused$
                      id operator(pg_catalog.<=) 0
                   or created_at operator(pg_catalog.<) '0001-01-01T00:00:00Z'
                   or created_at operator(pg_catalog.>=) '10000-01-01T00:00:00Z'
                   or updated_at operator(pg_catalog.<) '0001-01-01T00:00:00Z'
                   or updated_at operator(pg_catalog.>=) '10000-01-01T00:00:00Z'$refused$);
end $do$;

create or replace function user_version() returns trigger language plpgsql as $$
begin
    -- Not in a WHEN of the trigger: see V3. Writing the version itself counts as a change: the service does so where it
    -- changes a password, which the other columns may not show.
    new.version := old.version + (
        (new.name, new.email, new.created_at, new.updated_at, new.version)
        is distinct from (old.name, old.email, old.created_at, old.updated_at, old.version))::int;
    if least(new.created_at, new.updated_at) < '0001-01-01T00:00:00Z'
       or greatest(new.created_at, new.updated_at) >= '10000-01-01T00:00:00Z' then
        raise exception 'a user has times of the years 1 to 9999'
            using errcode = 'check_violation', detail = format('The id is %s.', new.id);
    end if;
    return new;
end $$;

revoke execute on function page_forget() from public;

-- Read by releases that do not know this migration: they may use the database if they know the second one.
comment on table refinery_schema_history is 'migration 7 is compatible with migration 2';
