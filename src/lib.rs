//! A user-management HTTP service over PostgreSQL, to be started inside another program: synchronous, without
//! an async runtime, on a port of its own, stopped when it is dropped.
//!
//! # In a test
//!
//! [`testing::TestServer`] is a complete service: the machine needs PostgreSQL's programs (on Debian:
//! `apt-get install postgresql`). No server has to be running; there is nothing to configure or clean up.
//!
//! ```
//! use userd::testing::TestServer;
//!
//! let server = TestServer::start();
//! server.seed(20);
//! let ada = server.user("Ada Lovelace", "ada@example.com");
//!
//! let page: serde_json::Value = ureq::get(server.url("/users?perPage=5")).call()?.body_mut().read_json()?;
//! assert_eq!((&page["total"], page["data"].as_array().map(Vec::len)), (&21.into(), Some(5)));
//! let url = server.url(&format!("/users/{}", ada.id));
//! assert_eq!(ureq::delete(url).call()?.status(), 204);
//! # Ok::<(), ureq::Error>(())
//! ```
//!
//! The first server on a machine takes less than a second to start, and each further one some 30 ms, in a thread or in
//! a process of its own (`cargo nextest`). [`TestServer::with`](testing::TestServer::with) changes settings.
//!
//! # Without a socket
//!
//! [`App`] is the same service as a function from a [`Request`] to a [`Response`]: same checks, same
//! statements, same answers.
//!
//! ```
//! use serde_json::json;
//! use userd::{App, Request, ScratchDatabase};
//!
//! let database = ScratchDatabase::create()?;
//! let app = App::open(&database.config())?;
//!
//! let answer = app.handle(&Request::post("/users", &json!({"name": "Ada"})));
//! assert_eq!(answer.status, 400);
//! assert_eq!(answer.value()["error"], "Validation failed");
//! # Ok::<(), userd::StartError>(())
//! ```
//!
//! # In a program
//!
//! [`Server::start`] takes a [`Config`], whose default is a free port of the loopback:
//!
//! ```
//! use userd::{Config, Database, Server};
//! # let scratch = userd::ScratchDatabase::create()?;
//! # let database_url = scratch.url();
//!
//! let server = Server::start(Config {
//!     database: Database::Url(database_url.into()),
//!     api_token: Some("only with this".into()),
//!     workers: 4,
//!     ..Config::default()
//! })?;
//! println!("serving {}", server.base_url()); // http://127.0.0.1:41234
//! server.stop(); // answers the requests in flight, and frees the port
//! # Ok::<(), userd::StartError>(())
//! ```
//!
//! # What to rely on
//!
//! - Nothing but `cli`, the command, reads the environment, installs a logger or exits. Only [`testing`] looks for
//!   programs and directories as `POSTGRES_BIN`, `PATH` and `TMPDIR` say. Several servers run side by side, each with
//!   settings of its own. Log lines go to the [`log`] crate's facade under the target `userd`, and never have a
//!   password, a token or a body in them. A line about a request has `request_id`, `method`, `path`, `status`, … as
//!   key-values, too. Only one change affects the whole process: a server raises the limit of open descriptors to what
//!   `max_connections` needs.
//! - Everything blocks, and every wait has a bound that a setting names: [`Config`] and [`Limits`]; only
//!   migrations take as long as they take. All of it may be called from plain threads, from another runtime's
//!   blocking section, and even from its tasks, whose thread it then blocks.
//! - Every failure is a value: a [`StartError`] before the service runs, a status in its answers after that.
//! - Stopping, or dropping, gives back the port, the threads, the connections and the files. Each server leaks one
//!   value of tiny_http, whose four idle threads end within five seconds. tiny_http also logs one error at each start
//!   (target `tiny_http`): userd gives it a listening socket that accepts no second connection.
//!
//! # Features
//!
//! All are on by default. A program that embeds the service needs at most two of them:
//! `userd = { default-features = false, features = ["testing"] }`.
//!
//! - `testing`: the module [`testing`]. It brings no dependency, and nothing of it gets into a program that does not
//!   use it.
//! - `tls`: TLS to the database. Without it, a setting that requires TLS is refused at start.
//! - `command`: the binary `userd`. What the library documents is the same without it.
#![warn(missing_docs)]
#![cfg_attr(not(all(feature = "command", feature = "tls")), allow(dead_code, unused_imports))]

/// Has the README and docs/testing.md as its documentation, so that `cargo test` runs the Rust code in them.
#[cfg(doctest)]
#[doc = concat!(include_str!("../README.md"), include_str!("../docs/testing.md"))]
struct DocumentsDoctests;

mod app;
mod budget;
/// The commands `migrate`, `check`, `recount` and `grants`.
#[cfg(feature = "command")]
mod check;
#[cfg(feature = "command")]
mod cli;
mod config;
mod db;
mod error;
mod frontend;
mod http;
mod input;
/// Items that only this crate's `tests`, `benches` and `fuzz` use. They may change in any release.
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod internals {
    #[cfg(feature = "command")]
    pub use crate::check::compare_user_counts;
    pub use crate::config::{SETTINGS, Setting};
    pub use crate::error::Error;
    pub use crate::frontend::http1::framing::Framing;
    pub use crate::frontend::http1::{FramedRequest, Progress};
    pub use crate::operations::{Command, Create, Delete, Outcome, Update, list::FIND_PAGES};
    pub use crate::private_postgres::{Cluster, SharedServer, connection_string};
    pub use crate::users::idempotency::{BodyFingerprint, KeyDigest};
    pub use crate::users::password::Hasher;
    pub use crate::users::revision::{Condition, Revision};
    pub use crate::users::user::{MAX_USER_BYTES, NewUser, UserChanges};

    /// Returns the operations of a service, for tests that execute commands without HTTP.
    pub fn operations(app: &crate::App) -> &crate::operations::Operations {
        app.operations()
    }
}
mod metrics;
mod operations;
#[cfg(any(test, feature = "testing"))]
mod private_postgres;
mod secret;
mod server;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
/// Exports and imports of users.
#[cfg(feature = "command")]
mod transfer;
mod users;

pub use app::App;
#[cfg(feature = "command")]
#[doc(hidden)]
pub use cli::run;
pub use config::{Config, Database, Limits, PasswordHashing, Schema, TrustedProxies, Ui, Validation};
pub use error::{ConfigError, StartError};
pub use http::{Method, Request, Response};
pub use secret::Secret;
pub use server::{BoundServer, Server};
#[cfg(any(test, feature = "testing"))]
pub use testing::ScratchDatabase;
pub use users::user::User;
