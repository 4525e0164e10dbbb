//! The service as its users meet it: real processes, real sockets, a real PostgreSQL.
//!
//! `contract` is what it answers, `description` what it tells machines of that,
//! `tables` what becomes of the tables behind its back, `finding` lists and their queries, `preconditions` entity tags and
//! patches, `repeating` creates with a key, `changes` what a change leaves behind, `batches` changes of many users in one
//! statement, `model` all of them for any history,
//! `clients` what it withstands, `cors` which pages of browsers it answers, `ui` its own page, `pages` what it counts, `faults` what breaks beneath it, `sessions` how it uses its
//! sessions of the database, `lanes` what waits for what, `late` changes that are held back, `requests` their ids and lines of the log, `health` its
//! readiness, `figures` what it counts, `cores` what it leaves to other processes, `neighbours` other users of that
//! database, `machines` several services among other programs, `failover` three machines under Patroni, `prometheus`
//! what it makes of their figures, `backup` its dumps, `export` and `import` files of
//! users, `hostile` what another role puts into the schema, `plans` how statements are executed,
//! `publication` logical replication,
//! `lifecycle` the command and its process, `deb` the Debian package's lines, `embedding` the library, `testing` and `harness` what users' tests
//! stand on, `documents` the documents and their lines for curl; `cluster` the private PostgreSQL, `verbs` the command's other verbs on it, `programs` whose programs that takes, `privileges` whose process it is,
//! `tls` encrypted connections to it.

mod backup;
mod batches;
mod changes;
mod clients;
mod cluster;
mod contract;
mod cores;
mod cors;
mod deb;
mod description;
mod documents;
mod embedding;
mod endings;
mod export;
mod failover;
mod faults;
mod figures;
mod finding;
mod harness;
mod health;
mod hostile;
mod import;
mod lanes;
mod late;
mod lifecycle;
mod machines;
mod memory;
mod model;
mod neighbours;
mod operating;
mod pages;
mod plans;
mod preconditions;
mod privileges;
mod programs;
mod prometheus;
mod publication;
mod repeating;
mod requests;
mod sessions;
mod support;
mod tables;
mod testing;
mod tls;
mod ui;
mod verbs;
