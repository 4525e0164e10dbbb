//! The service as its users meet it: real processes, real sockets, a real PostgreSQL.
//!
//! `contract` is what it answers, `changes` what a change leaves behind, `model` both for any history, `frontend` what
//! it withstands, `pages` what it counts, `faults` what breaks beneath it, `neighbours` who else works there, `machines`
//! several of it among others' programs, `backup` its dumps, `lifecycle` the command and its process, `embedding` the
//! library, `testing` and `harness` what tests of others stand on; `cluster` the private PostgreSQL, `tls` the way to
//! others.

mod backup;
mod changes;
mod cluster;
mod contract;
mod embedding;
mod faults;
mod frontend;
mod harness;
mod lifecycle;
mod machines;
mod model;
mod neighbours;
mod pages;
mod support;
mod testing;
mod tls;
