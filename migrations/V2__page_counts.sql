-- Exact totals, and the start of any page, without counting users one by one.
--
-- Ids are cut into blocks of 2^9 (level 1), of 2^13 (level 2) and of 2^17 (level 3). page_counts holds,
-- for each, rows whose sum is the number of users in it: a change adds a row a level (+n or -n), so
-- writers never wait for one another, and folding replaces rows by their sum.
--
-- Writing a row for every insert would still be dear, and leave dead rows behind. So the blocks at
-- the end of the table, where new ids arrive, are *open* (listed in page_open): inserts there record
-- nothing, and readers count the few users in them. Once a block is behind, it is counted and closed.
--
-- What must hold, in every snapshot:
--   a block that is not open: sum(n) = the users in it;
--   an open block:            readers count it, so sum(n) may be anything.
-- Who changes users without recording it therefore (1) shares the block's advisory lock to the end
-- of its transaction and (2) has seen, after that, that the block is open. Who closes a block holds
-- that lock alone, to the end of its transaction. Locks are only ever tried: whoever does not get
-- one records the change instead, or leaves the block open for the next to close. So no insert or
-- delete is meant to wait or fail because of the counts, in long and serializable transactions too.
--
-- One statement can change users several times (in its WITH, by MERGE, by triggers): whoever closes a
-- block may count changes of its own transaction whose page_track has yet to run, and would record them
-- again. So it notes in page_held that it holds the block's lock alone. From then on its transaction
-- records, for all blocks of that lock, only what is missing (page_settle): that is its own alone, as
-- nobody else can close them, nor change users in them without recording it.
--
-- Changes that run no triggers (session_replication_role, disabled triggers) are not counted, and a
-- data-only dump brings counts of its own: select page_recount() afterwards.

lock table users in share row exclusive mode;  -- nobody writes between the first count and the triggers

create table page_counts (
    level smallint not null,  -- 1: blocks, 2: of 16 blocks, 3: of 256
    block bigint   not null,  -- id >> 9, 13 or 17
    n     int      not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
create index page_counts_block on page_counts (level, block);

create table page_open (
    block bigint not null     -- twice is as good as once: a unique index would make writers wait
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- The locks of blocks, and which transaction last held each alone: it cannot cheaply ask what it holds.
create table page_held (
    lock   int not null,
    holder bigint not null    -- txid_current()
);
create index page_held_holder on page_held (holder);

-- Replaces the rows of one block by their sum; rows somebody else is folding are left to them.
create function page_fold(l int, b bigint) returns void language plpgsql as $$
begin
    with gone as (
        delete from page_counts where ctid = any (array(
            select ctid from page_counts where level = l and block = b for update skip locked))
        returning n)
    insert into page_counts select l, b, sum(n) from gone having sum(n) <> 0;
end $$;

-- Records what is missing of block b. For who holds its lock; alone, where it is open.
create function page_settle(b bigint) returns void language plpgsql as $$
begin
    insert into page_counts  -- one snapshot for both sums
        select l, b >> bits, missing
        from (select (select count(*) from users where id between b << 9 and b << 9 | 511)
                   - (select coalesce(sum(n), 0) from page_counts where level = 1 and block = b) as missing) m,
             (values (1, 0), (2, 4), (3, 8)) v (l, bits)
        where missing <> 0;
    if found then
        perform page_fold(2, b >> 4), page_fold(3, b >> 8);
    end if;
end $$;

-- Called when inserts reach block b: opens it and the two after it, closes those behind.
create function page_roll(users_oid oid, b bigint) returns void language plpgsql as $$
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
        perform page_settle(x);  -- a statement after the lock sees all that was committed before it
        delete from page_open where block = x;
    end loop;
end $$;

create function page_track() returns trigger language plpgsql security definer as $$
declare
    sign int := case tg_op when 'INSERT' then 1 else -1 end;
    -- Other levels look at the past, where a block may still be open: they always record.
    current boolean := current_setting('transaction_isolation') = 'read committed';
    first bigint;
    last bigint;
    opened bigint[] := '{}';
    held int[] := '{}';
    l int;
    b bigint;
begin
    select min(id) >> 9, max(id) >> 9 into first, last from changed;
    if first is null then
        return null;
    end if;
    -- 256 different locks at most (and 256 in page_roll), however much a transaction writes: the lock table is finite.
    if current and last <= first + 1
       and pg_try_advisory_xact_lock_shared(tg_relid::int, (first & 255)::int)
       and pg_try_advisory_xact_lock_shared(tg_relid::int, (last & 255)::int) then
        opened := array(select block from page_open where block between first and last + 2);
    end if;
    if not (first = any (opened) and last = any (opened)) then
        if current then  -- a lock that is ours is ours again; a note from a restored dump is not enough
            held := array(select lock from page_held where holder = txid_current()
                          and pg_try_advisory_xact_lock_shared(tg_relid::int, lock));
        end if;
        insert into page_counts
            select v.l, id >> v.bits, sign * count(*) from changed, (values (1, 9), (2, 13), (3, 17)) v (l, bits)
            where id >> 9 <> all (opened) and id >> 9 & 255 <> all (held) group by 1, 2;
        if held <> '{}' then
            for b in select distinct id >> 9 from changed
                     where id >> 9 <> all (opened) and id >> 9 & 255 = any (held) loop
                perform page_settle(b);
            end loop;
        end if;
        if current then  -- about every 32nd row is followed by a fold
            for l, b in select v.l, id >> v.bits from changed, (values (1, 9), (2, 13), (3, 17)) v (l, bits)
                        where id >> 9 <> all (opened) group by 1, 2 having random() < 1 / 32.0 loop
                perform page_fold(l, b);
            end loop;
        end if;
    end if;
    if current and tg_op = 'INSERT' and last + 2 <> all (opened) then
        perform page_roll(tg_relid, last);
    end if;
    return null;
end $$;

-- Records all users, where nothing is recorded.
create function page_count() returns void language sql as $$
    insert into page_counts
        select l, id >> bits, count(*) from users, (values (1, 9), (2, 13), (3, 17)) v (l, bits) group by 1, 2
$$;

create function page_clear() returns trigger language plpgsql security definer as $$
begin  -- TRUNCATE is alone on users until its end
    if current_setting('transaction_isolation') = 'read committed' then
        delete from page_counts;  -- makes no reader wait
        delete from page_open;
    else
        truncate page_counts, page_open;  -- an older snapshot would not see every row to delete
    end if;
    perform page_count();  -- other triggers may have inserted users since
    return null;
end $$;

-- Counts all users anew, whatever was recorded. For the owner: others have no right to it. Writers wait for
-- the end of its transaction, readers do not.
create function page_recount() returns void language plpgsql as $$
begin
    if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
        raise exception 'page_recount() may see an old snapshot: call it in a read committed transaction'
            using errcode = 'invalid_transaction_state';
    end if;
    -- Keeps writers out, and is refused amid a statement that has yet to record what it changes.
    alter table users enable trigger page_insert;
    delete from page_counts;
    delete from page_open;
    perform page_count();
end $$;

create function page_refuse() returns trigger language plpgsql as $$
begin
    raise exception 'the id of a user cannot be changed' using errcode = 'integrity_constraint_violation';
end $$;

-- The triggers run with the owner's rights, so that writing needs no rights but those on users; they
-- must then not find anything a writer could have put in the way, nor serve as triggers elsewhere (whether
-- a function may be executed is asked when a trigger is made of it, not when it runs).
do $$
declare f regprocedure;
begin
    foreach f in array array['page_track()', 'page_clear()', 'page_recount()']::regprocedure[] loop
        execute format('alter function %s set search_path = %I, pg_temp', f, current_schema());
    end loop;
end $$;
revoke execute on function page_fold(int, bigint), page_settle(bigint), page_roll(oid, bigint), page_track(),
    page_count(), page_clear(), page_recount(), page_refuse() from public;

create trigger page_insert after insert on users
    referencing new table as changed for each statement execute function page_track();
create trigger page_delete after delete on users
    referencing old table as changed for each statement execute function page_track();
create trigger page_truncate after truncate on users
    for each statement execute function page_clear();
create trigger page_update after update on users
    for each row when (old.id <> new.id) execute function page_refuse();

select page_count();
