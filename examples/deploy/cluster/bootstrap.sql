-- Run once by Patroni, on the first primary.
create role app login password '@APP_PASSWORD@';
create database app owner app;
-- What userd would set itself, for its sessions through PgBouncer.
alter role app set statement_timeout = '10s';
alter role app set lock_timeout = '100ms';
