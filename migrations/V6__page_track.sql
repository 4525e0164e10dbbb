-- What follows an insert or a delete of users, in less time. What is counted, and how, is as in V2.
--
-- Most statements change users in open blocks alone, and have nothing to record. That is found out first, by two small
-- queries. Setting search_path for the function would take as long as these: it names the schemas of what it uses
-- instead, operators included, as the rights are the owner's and the search_path is the writer's.

-- Writers wait behind a waiting lock: this one gives up soon, and userd retries the migration.
set local lock_timeout = '200ms';

-- Records that so many users were inserted into blocks, or deleted from them.
create function page_record(users_oid oid, inserted boolean, blocks bigint[], counts bigint[])
returns void language plpgsql as $$
declare
    sign int := case when inserted then 1 else -1 end;
    -- Other levels look at the past, where a block may still be open: they always record.
    current boolean := current_setting('transaction_isolation') = 'read committed';
    first bigint := (select min(block) from unnest(blocks) block);
    last bigint := (select max(block) from unnest(blocks) block);
    opened bigint[] := '{}';
    held int[] := '{}';
    l int;
    b bigint;
begin
    -- 256 different locks at most (and 256 in page_roll), however much a transaction writes: the lock table is finite.
    if current and last <= first + 1
       and pg_try_advisory_xact_lock_shared(users_oid::int, (first & 255)::int)
       and pg_try_advisory_xact_lock_shared(users_oid::int, (last & 255)::int) then
        opened := array(select block from page_open where block between first and last + 2);
    end if;
    if not (first = any (opened) and last = any (opened)) then
        if current then  -- a lock that is ours is ours again; a note from a restored dump is not enough
            held := array(select lock from page_held where holder = txid_current()
                          and pg_try_advisory_xact_lock_shared(users_oid::int, lock));
        end if;
        for l, b in
            insert into page_counts
                select v.l, block >> v.bits, sign * sum(n)
                from unnest(blocks, counts) c (block, n), (values (1, 0), (2, 4), (3, 8)) v (l, bits)
                where block <> all (opened) and block & 255 <> all (held) group by 1, 2
                returning level, block
        loop
            if current and random() < 1 / 32.0 then  -- about every 32nd row is followed by a fold
                perform page_fold(l, b);
            end if;
        end loop;
        for b in select block from unnest(blocks) block
                 where block <> all (opened) and block & 255 = any (held) loop
            perform page_settle(b);
        end loop;
    end if;
    if current and inserted and last + 2 <> all (opened) then
        perform page_roll(users_oid, last);
    end if;
end $$;

do $do$
begin
    execute format($format$
create or replace function page_track() returns trigger language plpgsql security definer as $$
declare
    first bigint;
    last bigint;
    opened bigint[];
    blocks bigint[];
    counts bigint[];
begin
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
        if first operator(pg_catalog.=) any (opened) and last operator(pg_catalog.=) any (opened)
           and (tg_op operator(pg_catalog.=) 'DELETE'
                or last operator(pg_catalog.+) 2 operator(pg_catalog.=) any (opened)) then
            return null;
        end if;
    end if;
    select pg_catalog.array_agg(block), pg_catalog.array_agg(n) into blocks, counts from (
        select id operator(pg_catalog.>>) 9 as block, pg_catalog.count(*) as n from changed group by 1) c;
    perform %1$I.page_record(tg_relid, tg_op operator(pg_catalog.=) 'INSERT', blocks, counts);
    return null;
end $$
    $format$, current_schema());
    -- Called with the owner's rights, by a writer with a search_path of its own.
    execute format('alter function page_record(oid, boolean, bigint[], bigint[]) set search_path = %I, pg_temp',
                   current_schema());
end $do$;
revoke execute on function page_record(oid, boolean, bigint[], bigint[]) from public;

-- Read by releases that do not know this migration: they may use the database if they know the second one.
comment on table refinery_schema_history is 'migration 6 is compatible with migration 2';
