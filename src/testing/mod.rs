//! Servers for tests. Each has a port and a database of its own, and is gone when its value is dropped.
//!
//! ```
//! use userd::testing::TestServer;
//!
//! let server = TestServer::start();
//! let ada = server.user("Ada Lovelace", "ada@example.com");
//! assert_eq!(ureq::get(server.url(&format!("/users/{}", ada.id))).call()?.status(), 200);
//! # Ok::<(), ureq::Error>(())
//! ```
//!
//! The machine needs PostgreSQL's server programs, version 13 or newer (on Debian: `apt-get install
//! postgresql`). Nothing has to run or be set up. If tests run as root, PostgreSQL runs as the user `postgres`.
//!
//! The first server starts a private cluster, which takes about a second. The cluster is in memory (`/dev/shm`) if 2
//! GiB are free there, else in the temporary directory. All processes of a user share the cluster, so that tests may
//! run in threads or in processes (`cargo nextest`). Every further server takes some hundredths of a second, because
//! its database is a clone of a migrated database. The cluster is gone ten seconds after the last process that used it.

mod databases;
mod requests;
mod running_service;
mod servers;
#[cfg(feature = "command")]
mod services;

use crate::error::StartError;
pub use crate::server::Fault;
pub use databases::ScratchDatabase;
pub use servers::TestServer;
#[cfg(feature = "command")]
pub(crate) use services::{Services, service_config};

/// A refused control (a request that steers a test's service): the status of its answer, and the message that says why.
#[derive(Debug)]
struct Refusal {
    status: u16,
    message: String,
}

impl Refusal {
    fn new(status: u16, message: impl ToString) -> Refusal {
        Refusal { status, message: message.to_string() }
    }
}

impl From<StartError> for Refusal {
    fn from(error: StartError) -> Refusal {
        let is_clients_fault = matches!(error, StartError::Config(_) | StartError::Listen(..));
        Refusal::new(if is_clients_fault { 400 } else { 503 }, error)
    }
}
