-- Exact totals and the start of any page, from counts by block of 2^12 ids.
--
-- The rows of a block add up to the number of its users. Each statement appends its rows in its own transaction, so every
-- snapshot has both or neither, and writers never wait for each other. About one row in 500 is followed by a fold: the
-- rows of each block become one.

-- The functions find their tables in this schema, and never a temporary table of their caller.
select set_config('search_path', format('%I, pg_temp', current_schema()), true);

create table user_counts (
    block bigint not null,  -- id >> 12
    n int not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
-- Rows may be equal, and a publication refuses to delete rows that it cannot identify.
alter table user_counts replica identity full;

create function user_counts_record() returns trigger language plpgsql security definer set search_path from current as $$
declare appended float8;
begin
    insert into user_counts
        select id >> 12, case tg_op when 'INSERT' then count(*) else -count(*) end from changed group by 1;
    get diagnostics appended = row_count;
    -- A transaction that keeps one snapshot may not delete rows that others have added up since.
    if random() < appended * float8 '0.002' and current_setting('transaction_isolation') = 'read committed' then
        with gone as (
            delete from user_counts where ctid = any (array(
                select ctid from user_counts
                where block in (select block from user_counts group by block having count(*) > bigint '1')
                for update skip locked))
            returning block, n)
        insert into user_counts select block, sum(n) from gone group by block having sum(n) <> bigint '0';
    end if;
    return null;
end $$;

-- TRUNCATE empties users in every snapshot, so this empties the counts in every snapshot, too. Other triggers may have
-- inserted users since. For changes that no trigger has seen there is `userd recount`.
create function user_counts_reset() returns trigger language plpgsql security definer set search_path from current as $$
begin
    truncate user_counts;
    insert into user_counts select id >> 12, count(*) from users group by 1;
    return null;
end $$;

revoke execute on function user_counts_record(), user_counts_reset() from public;

create trigger user_counts_insert after insert on users
    referencing new table as changed for each statement execute function user_counts_record();
create trigger user_counts_delete after delete on users
    referencing old table as changed for each statement execute function user_counts_record();
create trigger user_counts_truncate after truncate on users for each statement execute function user_counts_reset();
