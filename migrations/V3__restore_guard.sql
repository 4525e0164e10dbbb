-- A dump of this schema is restored into an empty database only.
--
-- Restored over tables that are in use, pg_dump's script fails to create what is there, and goes on: it gives the
-- credentials of its users to other users with the same ids, records their numbers twice, and sets ids back. So the
-- first insert of such a script ends its session. That is told by two settings together, which pg_dump makes and hardly
-- anybody else: nothing is known yet of what the script will do next.
--
-- A restore of data alone into these tables is meant as it is: set userd.restore = on.
--
-- In an empty database the script creates the triggers last, when all rows are there.

-- Writers do not wait behind this migration for long; who applies it tries again.
set local lock_timeout = '200ms';

create function restore_guard() returns trigger language plpgsql as $$
begin
    -- Not in a WHEN of the triggers, which is compiled anew for each statement: that costs three times as much.
    if current_setting('check_function_bodies') = 'off' and current_setting('search_path') = ''
       and coalesce(current_setting('userd.restore', true), '') <> 'on' then
        raise warning 'a dump can be restored into an empty database only, and % is there: the session is ended',
            tg_relid::regclass;
        perform pg_terminate_backend(pg_backend_pid());
        raise exception 'a dump can be restored into an empty database only'
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    return null;
end $$;
revoke execute on function restore_guard() from public;

create trigger restore_guard before insert on users for each statement
    execute function restore_guard();
create trigger restore_guard before insert on credentials for each statement
    execute function restore_guard();

-- For older releases: which one has written this, and which migrations they must know to go on with it.
comment on table refinery_schema_history is 'migration 3 is compatible with migration 2';
