//! Servers for tests: from nothing, each with a port and a database of its own, gone when dropped.
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
//! postgresql`), and nothing has to run or be set up. As root, PostgreSQL runs as the user `postgres`.
//!
//! The first server starts a private cluster, in memory (`/dev/shm`) if 2 GiB are free there, else in the
//! temporary directory: about a second. All processes of a user share it, so a process a test (`cargo nextest`) is as
//! good as a thread a test; every server after the first takes some hundredths of a second, for its database is a clone
//! of one that has been migrated already. The cluster is gone ten seconds after the last process that used it.

mod databases;
mod requests;
mod servers;
#[cfg(feature = "command")]
mod services;
mod states;

use crate::error::StartError;
pub use crate::server::Fault;
pub use databases::ScratchDatabase;
pub use servers::TestServer;
#[cfg(feature = "command")]
pub(crate) use services::{Services, config};

/// The reason why a control did nothing, with the status of its answer.
#[derive(Debug)]
struct Refused {
    status: u16,
    message: String,
}

impl Refused {
    fn new(status: u16, message: impl ToString) -> Refused {
        Refused { status, message: message.to_string() }
    }
}

impl From<StartError> for Refused {
    fn from(error: StartError) -> Refused {
        let is_ordered = matches!(error, StartError::Config(_) | StartError::Listen(..));
        Refused::new(if is_ordered { 400 } else { 503 }, error)
    }
}
