//! The service as its users meet it: real processes, real sockets, a real PostgreSQL.
//!
//! Each module opens with what it tests. `support` starts what the tests use. What needs several servers, or more than
//! PostgreSQL, curl and jq, is in `tests/deploy`.

mod batches;
mod changes;
mod checking;
mod clients;
mod cluster;
mod commands;
mod contract;
mod cors;
mod databases;
mod description;
mod endings;
mod export;
mod faults;
mod fields;
mod figures;
mod finding;
mod harness;
mod health;
mod hostile;
mod import;
mod lanes;
mod lifecycle;
mod links;
mod listening;
mod memory;
mod model;
mod neighbours;
mod operating;
mod pages;
mod plans;
mod preconditions;
mod privileges;
mod programs;
mod repeating;
mod requests;
mod schemas;
#[allow(dead_code, unused_imports, reason = "tests/deploy uses the rest")]
mod support;
mod tables;
mod testing;
mod tls;
mod ui;
mod verbs;
