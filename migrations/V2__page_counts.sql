-- Exact totals, and the start of any page, without counting users one by one.
--
-- Ids are cut into blocks of 2^9 (level 1), 2^13 (level 2) and 2^17 (level 3). page_counts has rows for each block,
-- whose sum is the number of its users: a change adds a row a level (+n or -n), so writers never wait for each other;
-- folding replaces rows by their sum. The blocks in which ids end are open (page_open): inserts record nothing there,
-- and readers count their users one by one. In every snapshot, sum(n) of a block that is not open is the number of its
-- users; of an open one it is any number. So it is always right to record a change, and deletes always do.
--
-- An insert leaves it out where it (1) shares the block's advisory lock to the end of its transaction and (2) has seen,
-- after that, that the block is open. Closing a block holds the lock alone, to the end of the transaction, counts the
-- users and records what is missing. Locks are only tried: without one, an insert records, and a block stays open until
-- the next attempt. So no change of users waits or fails because of the counts. A session keeps the block that it saw
-- open, and the number that page_closings then had (userd.page_seen, userd.page_key): closing draws a number first, so
-- while it is the same, that block is open and so is the one two further on.
--
-- Closing may count changes of its own transaction whose triggers have yet to run (WITH, MERGE, other triggers). So it
-- notes the locks that it holds alone (userd.page_held), and then settles their blocks instead of recording changes.
-- Changes that run no triggers are not counted, and a data-only dump brings counts of its own: see page_recount().

create table page_counts (
    level smallint not null,  -- 1: blocks, 2: of 16 blocks, 3: of 256
    block bigint   not null,  -- id >> 9, 13 or 17
    n     int      not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
create index page_counts_block on page_counts (level, block);

create table page_open (
    block bigint not null     -- twice is as good as once: a unique index would make writers wait
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create index page_open_block on page_open (block);

-- Rows may be equal. A publication refuses to delete rows that it cannot identify.
alter table page_counts replica identity full;
alter table page_open replica identity full;

create sequence page_closings;

-- Makes the functions, for the tables of the current schema. They run in sessions of others, two of them with the
-- owner's rights, so that writing needs no rights but those on users. Their search_path has no schema in which others
-- may create, and tables are named with their schema: after the schema was renamed, this has to be called again. What
-- runs for each statement has no search_path of its own, which would take as long as a query, and names the schemas of
-- operators, too.
create function page_functions() returns void language plpgsql as $make$
begin
    execute pg_catalog.format(
        'select %I.refuse_functions_of_others(%L)', pg_catalog.current_schema(), array[
            'page_fold', 'page_settle', 'page_roll', 'page_record', 'page_insert', 'page_delete', 'page_reset',
            'page_truncate', 'page_recount']::text[]);
    execute pg_catalog.format($functions$

-- Replaces the rows of block b, and those of the blocks around it, by their sums; rows that another transaction is
-- folding are left to it. Plans are the same for all values; one that was made for an empty table must use the index.
create or replace function page_fold(b bigint) returns void language plpgsql
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set jit = off as $$
declare
    l int;
    at bigint;
begin
    for l, at in values (1, b), (2, b >> 4), (3, b >> 8) loop
        with gone as (
            delete from %1$I.page_counts where ctid = any (array(
                select ctid from %1$I.page_counts where level = l and block = at for update skip locked))
            returning n)
        insert into %1$I.page_counts select l, at, sum(n) from gone having sum(n) <> 0;
    end loop;
end $$;

-- Records what is missing of block b. For the holder of its lock; alone, where it is open.
create or replace function page_settle(b bigint) returns void language plpgsql
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    -- One statement, and so one snapshot for both sums. Within the insert they would be executed twice.
    missing bigint := (select count(*) from %1$I.users where id between b << 9 and b << 9 | 511)
                    - (select coalesce(sum(n), 0) from %1$I.page_counts where level = 1 and block = b);
begin
    if missing <> 0 then
        insert into %1$I.page_counts values (1, b, missing), (2, b >> 4, missing), (3, b >> 8, missing);
        perform %1$I.page_fold(b);
    end if;
end $$;

-- Called when inserts reach block b: opens it and the two after it, closes those behind.
create or replace function page_roll(users_oid oid, b bigint) returns void language plpgsql
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    x bigint;
    held int[];
begin
    -- One at a time; and only where users end, not where old ids are filled in.
    if not pg_try_advisory_xact_lock(users_oid::int, -1 - (b & 255)::int)
       or exists (select from %1$I.users where id between (b + 2) << 9 and (b + 2) << 9 | 511) then
        return;
    end if;
    insert into %1$I.page_open select next from unnest(array[b, b + 1, b + 2]) next
        where next << 9 >> 9 = next  -- the last block of bigint has none after it
          and not exists (select from %1$I.page_open o where o.block = next);
    for x in select distinct block from %1$I.page_open where block not between b and b + 2
             and (block < b or (select count(*) > 16 from %1$I.page_open)) loop
        continue when not pg_try_advisory_xact_lock(users_oid::int, (x & 255)::int);
        held := nullif(current_setting('userd.page_held', true), '')::int[];
        perform set_config('userd.page_held', (held || (x & 255)::int)::text, true), nextval(%2$L);
        perform %1$I.page_settle(x);  -- a statement after the lock sees all that was committed before it
        delete from %1$I.page_open where block = x;
    end loop;
end $$;

-- Records that so many users were inserted into blocks (sign 1), or deleted from them (-1).
create or replace function page_record(users_oid oid, sign int, blocks bigint[], counts bigint[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
set jit = off as $$
declare
    -- Other levels look at the past, where a block may still be open: they always record.
    current boolean := current_setting('transaction_isolation') = 'read committed';
    held int[] := coalesce(nullif(current_setting('userd.page_held', true), ''), '{}');
    first bigint := (select min(block) from unnest(blocks) block);
    last bigint := (select max(block) from unnest(blocks) block);
    opened bigint[] := '{}';
    key text;
    b bigint;
begin
    -- 256 different locks at most (and 256 in page_roll), however much a transaction writes: the lock table is finite.
    if sign = 1 and current and last <= first + 1
       and pg_try_advisory_xact_lock_shared(users_oid::int, (first & 255)::int)
       and pg_try_advisory_xact_lock_shared(users_oid::int, (last & 255)::int) then
        -- Statements after the locks see all that was committed before them.
        key := concat(pg_sequence_last_value(%2$L::regclass), ' ', users_oid);
        opened := array(select block from %1$I.page_open where block between first and last + 2);
        if first = any (opened) and last = any (opened) and last + 2 = any (opened) then
            -- Not what this transaction has opened: it may be prepared, and rolled back by another session.
            if not exists (select from %1$I.page_open where block in (last, last + 2)
                           and age(xmin) <= age((txid_current() & 4294967295)::text::xid)) then
                perform set_config('userd.page_seen', last::text, false), set_config('userd.page_key', key, false);
            end if;
            return;
        end if;
    end if;
    insert into %1$I.page_counts
        select v.l, block >> v.bits, sign * sum(n)
        from unnest(blocks, counts) c (block, n), (values (1, 0), (2, 4), (3, 8)) v (l, bits)
        where block <> all (opened) and (block & 255)::int <> all (held) group by 1, 2;
    for b in select block from unnest(blocks) block where block <> all (opened) loop
        if (b & 255)::int = any (held) then
            perform %1$I.page_settle(b);
        elsif current and random() < 1 / 32.0 then  -- about every 32nd row is followed by a fold
            perform %1$I.page_fold(b);
        end if;
    end loop;
    if sign = 1 and current and last + 2 <> all (opened) then
        perform %1$I.page_roll(users_oid, last);
    end if;
end $$;

-- Most inserts are into a block that the session has seen open. PL/pgSQL compiles each expression anew in each
-- transaction, and a query for each execution: so they evaluate few, of few operators.
create or replace function page_insert() returns trigger language plpgsql security definer as $$
declare
    -- A setting is empty where the transaction that made it was rolled back.
    seen bigint := ('0' operator(pg_catalog.||) pg_catalog.current_setting('userd.page_seen', true))::bigint;
    other bigint;
    blocks bigint[];
    counts bigint[];
begin
    -- Other levels may look at a past, that of an imported snapshot, where the block was not open.
    if pg_catalog.pg_try_advisory_xact_lock_shared(tg_relid::int, (seen operator(pg_catalog.&) 255)::int)
       and pg_catalog.current_setting('transaction_isolation') operator(pg_catalog.=) 'read committed'
       and pg_catalog.current_setting('userd.page_key', true) operator(pg_catalog.=) (
           pg_catalog.pg_sequence_last_value(%2$L::pg_catalog.regclass)::pg_catalog.text
           operator(pg_catalog.||) ' ' operator(pg_catalog.||) tg_relid::pg_catalog.text)
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
    select pg_catalog.array_agg(block), pg_catalog.array_agg(n) into blocks, counts from (
        select id operator(pg_catalog.>>) 9 as block, pg_catalog.count(*) as n from changed group by 1) c;
    if blocks is not null then
        perform %1$I.page_record(tg_relid, 1, blocks, counts);
    end if;
    return null;
end $$;

-- Most deletes are of one user, or of users of one block.
create or replace function page_delete() returns trigger language plpgsql security definer as $$
declare
    b bigint;
    last bigint;
    deleted int;
    blocks bigint[];
    counts bigint[];
begin
    select pg_catalog.min(id) operator(pg_catalog.>>) 9, pg_catalog.max(id) operator(pg_catalog.>>) 9,
           pg_catalog.count(*)
        into b, last, deleted from changed;
    if b operator(pg_catalog.=) last
       and coalesce(pg_catalog.current_setting('userd.page_held', true), '') operator(pg_catalog.=) '' then
        insert into %1$I.page_counts
            values (1, b, operator(pg_catalog.-) deleted),
                   (2, b operator(pg_catalog.>>) 4, operator(pg_catalog.-) deleted),
                   (3, b operator(pg_catalog.>>) 8, operator(pg_catalog.-) deleted);
        if pg_catalog.random() operator(pg_catalog.<) 0.03::pg_catalog.float8 then
            perform %1$I.page_fold(b);
        end if;
    elsif b is not null then
        select pg_catalog.array_agg(block), pg_catalog.array_agg(n) into blocks, counts from (
            select id operator(pg_catalog.>>) 9 as block, pg_catalog.count(*) as n from changed group by 1) c;
        perform %1$I.page_record(tg_relid, -1, blocks, counts);
    end if;
    return null;
end $$;

-- Counts all users, whatever was recorded; no other transaction may write meanwhile.
create or replace function page_reset() returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    -- A number that was never drawn, even if a restore has set the sequence back: the microseconds since 1970.
    perform setval(%2$L, greatest((select last_value from %1$I.page_closings) + 1,
                                                  (extract(epoch from clock_timestamp()) * 1000000)::bigint));
    if current_setting('transaction_isolation') = 'read committed' then
        delete from %1$I.page_counts;  -- makes no reader wait
        delete from %1$I.page_open;
    else
        truncate %1$I.page_counts, %1$I.page_open;  -- an older snapshot would not see every row to delete
    end if;
    insert into %1$I.page_counts
        select l, id >> bits, count(*) from %1$I.users, (values (1, 9), (2, 13), (3, 17)) v (l, bits) group by 1, 2;
end $$;

-- TRUNCATE is alone on users until its end; other triggers may have inserted users since.
create or replace function page_truncate() returns trigger language plpgsql security definer
set search_path = pg_catalog, pg_temp as $$
begin
    perform %1$I.page_reset();
    return null;
end $$;

-- Counts all users anew. For the owner: others have no right to it. Writers wait for the end of its transaction,
-- readers do not.
create or replace function page_recount() returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
        raise exception 'page_recount() may see an old snapshot: call it in a read committed transaction'
            using errcode = 'invalid_transaction_state';
    end if;
    lock table %1$I.users in share row exclusive mode;
    -- Leaves the trigger as it is, but is refused amid a statement that has yet to record what it changes.
    execute (select format('alter table %%s %%s trigger page_insert', %3$L,
                           case tgenabled when 'O' then 'enable' when 'A' then 'enable always'
                                          when 'R' then 'enable replica' else 'disable' end)
             from pg_trigger where tgrelid = %3$L::regclass and tgname = 'page_insert');
    perform %1$I.page_reset();
end $$;

    $functions$, pg_catalog.current_schema(), pg_catalog.format('%I.page_closings', pg_catalog.current_schema()),
    pg_catalog.format('%I.users', pg_catalog.current_schema()));
end $make$;
select page_functions();
-- A function that is made again keeps its rights. Whether one may be executed is asked when a trigger is made of it,
-- not when it runs.
revoke execute on function page_functions(), page_fold(bigint), page_settle(bigint), page_roll(oid, bigint),
    page_record(oid, int, bigint[], bigint[]), page_insert(), page_delete(), page_reset(), page_truncate(),
    page_recount() from public;

create trigger page_insert after insert on users
    referencing new table as changed for each statement execute function page_insert();
create trigger page_delete after delete on users
    referencing old table as changed for each statement execute function page_delete();
create trigger page_truncate after truncate on users for each statement execute function page_truncate();
-- A script of INSERT statements has these before those of users.
create trigger restore_guard before insert on page_counts for each statement execute function restore_guard();
create trigger restore_guard before insert on page_open for each statement execute function restore_guard();

select page_recount();
