-- Run once by Patroni, on the first primary.
create role app login password '@APP_PASSWORD@';
create database app owner app;
-- What userd would set itself, for its sessions through PgBouncer.
alter role app set statement_timeout = '5s';
alter role app set lock_timeout = '100ms';
alter role app set default_transaction_isolation = 'read committed';
alter role app set plan_cache_mode = force_generic_plan;
alter role app set enable_seqscan = off;
alter role app set enable_bitmapscan = off;
alter role app set jit = off;
alter role app set search_path = public, pg_temp;
