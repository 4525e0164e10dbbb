-- Users, and their credentials apart from them, so that no read of users can fetch a hash.

create table users (
    id bigint generated always as identity primary key,
    -- Every row is small, so that every page is. The limits are those of the types: PostgreSQL compiles a constraint
    -- anew for each statement.
    name varchar(1000) not null,
    -- 254 octets is the longest address that mail can be sent to (RFC 5321, 4.5.3.1.3, less the brackets).
    email varchar(254) not null,
    created_at timestamptz not null default pg_catalog.now(),
    updated_at timestamptz not null default pg_catalog.now(),
    -- Moved by each change of the record, whoever makes it. ETags are made of it and of updated_at, so that a user who
    -- is restored or inserted again under an old id has another one.
    version bigint not null default 1
);

-- Upper and lower case of ASCII letters are the same, nothing else is, whatever the locale of the database.
create unique index users_email_key on users (pg_catalog.lower(email collate pg_catalog."C"));

create table credentials (
    user_id bigint primary key references users (id) on delete cascade,
    -- Argon2id or, until the first login of an imported user, bcrypt, as a PHC string.
    password_hash varchar(512) not null
);

-- The triggers run in sessions of others, with the search_path of these. So they name the schemas of what they use,
-- operators included: an operator that somebody has made for exactly these types is found before that of pg_catalog. So
-- does whatever else is executed here as the owner.

create function user_version() returns trigger language plpgsql as $$
begin
    -- Writing the version itself counts as a change: the service does so where it changes a password, which no column
    -- of this table may show. Not in a WHEN of the trigger, which is compiled anew for each statement: that takes three
    -- times as long.
    new.version := old.version operator(pg_catalog.+) (new operator(pg_catalog.*<>) old)::int;
    if least(new.created_at, new.updated_at) operator(pg_catalog.<) '0001-01-01T00:00:00Z'
       or greatest(new.created_at, new.updated_at) operator(pg_catalog.>=) '10000-01-01T00:00:00Z' then
        raise exception 'a user has times of the years 1 to 9999'
            using errcode = 'check_violation', detail = pg_catalog.concat('The id is ', new.id, '.');
    end if;
    return new;
end $$;

create function user_id_is_fixed() returns trigger language plpgsql as $$
begin
    raise exception 'the id of a user cannot be changed' using errcode = 'integrity_constraint_violation';
end $$;

-- A dump of this schema is restored into an empty database only.
--
-- Run on a database that has these tables, psql reports an error for each of the script's CREATE statements and goes
-- on: the script gives the credentials of its users to other users with the same ids, adds its page counts to those
-- that the triggers record, and sets the sequence of ids back. So the script's first insert ends its session: an error
-- alone would not keep psql from the rest. A script of pg_dump or pg_restore is recognized by two settings together,
-- which other clients hardly make. A restore of rows alone into these tables is allowed by: set userd.restore = on.
--
-- In an empty database the script creates the triggers last, after all rows.
create function restore_guard() returns trigger language plpgsql as $$
begin
    -- Two statements: the conditions of the inner one are not compiled where the outer one's is false.
    if pg_catalog.current_setting('check_function_bodies') operator(pg_catalog.=) 'off' then
        if pg_catalog.current_setting('search_path') operator(pg_catalog.=) ''
           and coalesce(pg_catalog.current_setting('userd.restore', true), '') operator(pg_catalog.<>) 'on' then
            raise warning 'a dump can be restored into an empty database only, and % is there: the session is ended',
                tg_relid::pg_catalog.regclass;
            begin
                perform pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid());
            exception when insufficient_privilege then
                -- After `set role`, a session may be another role's: then the error below has to do.
            end;
            raise exception 'a dump can be restored into an empty database only'
                using errcode = 'object_not_in_prerequisite_state';
        end if;
    end if;
    return null;
end $$;

-- `create or replace` leaves a function to the role that has made it before, which may change it later.
create function refuse_functions_of_others(names text[]) returns void language plpgsql as $$
declare
    foreign_one text := (
        select p.oid::pg_catalog.regprocedure::text
        from pg_catalog.pg_proc p join pg_catalog.pg_class t on t.relnamespace operator(pg_catalog.=) p.pronamespace
        where t.oid operator(pg_catalog.=)
                pg_catalog.to_regclass(pg_catalog.format('%I.users', pg_catalog.current_schema()))
            and p.proname::text operator(pg_catalog.=) any (names) and p.proowner operator(pg_catalog.<>) t.relowner
        limit 1);
begin
    if foreign_one is not null then
        raise exception 'another role than the owner of the table users has made the function %', foreign_one
            using errcode = 'insufficient_privilege', hint = 'Drop it, and let no other role create in the schema.';
    end if;
end $$;

revoke execute on function user_version(), user_id_is_fixed(), restore_guard(), refuse_functions_of_others(text[])
    from public;

create trigger restore_guard before insert on users for each statement execute function restore_guard();
create trigger restore_guard before insert on credentials for each statement execute function restore_guard();
create trigger user_id_is_fixed after update on users
    for each row when (old.id operator(pg_catalog.<>) new.id) execute function user_id_is_fixed();
-- Triggers run in the order of their names: this one sees what others have made of the row.
create trigger zz_user_version before update on users for each row execute function user_version();
