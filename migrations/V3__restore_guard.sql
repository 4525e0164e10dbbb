-- A dump of this schema is restored into an empty database only.
--
-- Run on a database that has these tables, psql reports an error for each of the script's CREATE statements and goes
-- on: the script gives the credentials of its users to other users with the same ids, adds its page counts to those
-- that the triggers record, and sets the sequence of ids back. So the script's first insert ends its session: an error
-- alone would not keep psql from the rest. A script of pg_dump or pg_restore is recognized by two settings together,
-- which other clients hardly make.
--
-- A restore of rows alone into these tables is allowed by: set userd.restore = on.
--
-- In an empty database the script creates the triggers last, after all rows.

-- Writers wait behind a waiting lock: this one gives up soon, and userd retries the migration.
set local lock_timeout = '200ms';

create function restore_guard() returns trigger language plpgsql as $$
begin
    -- Not in a WHEN of the triggers, which the executor compiles anew for each statement: that costs three times as much.
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

-- Read by releases that do not know this migration: they may use the database if they know the second one.
comment on table refinery_schema_history is 'migration 3 is compatible with migration 2';
