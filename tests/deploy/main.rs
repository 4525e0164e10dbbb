//! The service among several servers and other programs: standbys, restores, proxies, poolers, clusters, Prometheus and
//! Debian's packages; and the lines of the documents.
//!
//! `cargo test --test deploy` runs these; plain `cargo test` leaves them out. CONTRIBUTING.md says what they need.

mod backup;
mod deb;
mod documents;
mod failover;
mod figures;
mod listening;
mod machines;
mod poolers;
mod prometheus;
mod publication;
mod standby;
#[allow(dead_code, unused_imports, reason = "tests/it uses the rest")]
#[path = "../it/support/mod.rs"]
mod support;

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use support::Daemon;

/// Returns the path of a program, and panics with the name of its Debian package if it is not installed.
pub fn program(name: &str, package: &str) -> PathBuf {
    let mut paths = ["/usr/bin", "/usr/sbin"].into_iter().map(|dir| Path::new(dir).join(name));
    let path = paths.find(|path| path.exists());
    path.unwrap_or_else(|| panic!("the tests need {name}: apt-get install {package}"))
}

/// Starts a program that serves, and says nothing here.
pub fn serve(command: &mut Command, end: nix::sys::signal::Signal) -> Daemon {
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    Daemon::new(child.unwrap_or_else(|error| panic!("{command:?}: {error}")), end)
}
