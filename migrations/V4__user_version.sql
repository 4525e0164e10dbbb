-- The version of a user: each change of the record moves it, whoever makes the change. ETags are made of it and of
-- updated_at, so that a user who is restored or inserted again under an old id has another one.
--
-- A column with a constant default is added without rewriting the table.

-- Writers wait behind a waiting lock: this one gives up soon, and userd retries the migration.
set local lock_timeout = '200ms';

alter table users add column version bigint not null default 1;

create function user_version() returns trigger language plpgsql as $$
begin
    -- Not in a WHEN of the trigger: see V3. Writing the version itself counts as a change: the service does so where it
    -- changes a password, which the other columns may not show.
    new.version := old.version + (
        (new.name, new.email, new.created_at, new.updated_at, new.version)
        is distinct from (old.name, old.email, old.created_at, old.updated_at, old.version))::int;
    return new;
end $$;
revoke execute on function user_version() from public;

-- Triggers run in the order of their names: this one sees what others have made of the row.
create trigger zz_user_version before update on users for each row execute function user_version();

-- Read by releases that do not know this migration: they may use the database if they know the second one.
comment on table refinery_schema_history is 'migration 4 is compatible with migration 2';
