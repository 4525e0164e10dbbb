//! Support of the tests: a throwaway cluster and databases in it, services and processes over them, and a client that
//! checks more of each answer than its status.
//!
//! Knows nothing of what is tested. The only place that sleeps (`machine::pause`).

mod account;
mod database;
mod described;
mod http;
mod load;
mod machine;
mod own;
mod page;
mod proxy;
mod service;
mod table;
pub mod tls_servers;
mod verbs;

pub use account::Account;
pub use database::{Compared, Database};
pub use described::{DESCRIPTION, check_described};
pub use http::{Answer, Client, connect_small};
pub use load::{Books, Event, Load};
pub use machine::{TempDir, free_port, last_migration, pause, programs_of_postgres};
pub use own::{Daemon, Own, children, is_root, memory_kib, postmaster, running, users};
pub use page::{Ended, blocks, shell};
pub use proxy::{Proxy, Weather};
pub use service::{Process, Service, Tested, by_default, control};
pub use table::{check, is_timestamp, masked};
pub use verbs::every_verb;

use argon2::Params;
use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};
use userd::internals::Hasher;

/// Longer than anything takes on a busy machine: a wait of this length would never end.
pub const LONG: Duration = Duration::from_secs(20);

/// Bound of a wait in which a cluster is made or recovered, which syncs each of its files.
pub const LONG_ON_DISK: Duration = Duration::from_secs(60);
/// Time that a busy machine may add to a wait.
pub const BUSY: Duration = Duration::from_secs(2);

/// The command.
pub const USERD: &str = env!("CARGO_BIN_EXE_userd");
/// Arguments for a service that is thrown away, and that a signal ends.
pub const UNTIL_SIGNAL: [&str; 2] = ["test", "--until-signal"];
/// Environment variables of a process.
pub type Variables<'a> = &'a [(&'a str, &'a str)];

/// Body of a create.
pub const ADA: &str = r#"{"name":"Ada","email":"ada@example.com"}"#;
/// The user that it creates, in an empty table, as tables of requests have it.
pub const ADA_1: &str = r#"{"id":"1","name":"Ada","email":"ada@example.com",<times>}"#;
/// Body of another create.
pub const GRACE: &str = r#"{"name":"Grace","email":"grace@example.com"}"#;

/// Password of the users in these tests.
pub const PASSWORD: &str = "correct horse";
/// A password other than `PASSWORD`.
pub const OTHER_PASSWORD: &str = "battery staple";
/// Value of `API_TOKEN`.
pub const TOKEN: &str = "t0ken-0f-the-tests";
/// A database's password.
pub const DATABASE_PASSWORD: &str = "pa55-of-the-database";

/// No answer, no log line and no output ever holds one of these.
pub const SECRETS: [&str; 5] = [PASSWORD, OTHER_PASSWORD, TOKEN, DATABASE_PASSWORD, "$argon2"];

/// Panics where `text` holds a secret.
pub fn assert_no_secret(text: &str) {
    for secret in SECRETS {
        assert!(!text.contains(secret), "{secret:?} was told: {text}");
    }
}

/// Polls until the condition holds; panics, saying `what`, where it does not within the time.
pub fn eventually(within: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {within:?}: {what}");
        pause(Duration::from_millis(5));
    }
}

/// Panics unless a promise was kept: the best of some tries within its time, and each of them within [`BUSY`] more.
#[track_caller]
pub fn keeps(promise: Duration, what: &str, tries: &[Duration]) {
    let is_kept = tries.iter().any(|took| *took <= promise);
    assert!(is_kept && tries.iter().all(|took| *took < promise + BUSY), "{what}: {promise:?}, {tries:?}");
}

/// Measures how long it takes until a condition holds.
pub fn time_until(what: &str, condition: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    eventually(LONG, what, condition);
    start.elapsed()
}

/// How many threads of tiny_http may be left by many starts. One that it starts with may miss the end of a server
/// that lives for a moment only: it is woken without the lock that it is about to wait with. Anything of ours
/// would be left by each.
pub const MISSED: usize = 2;

/// A hash of a password, to be stored behind the service's back.
pub fn hash(clear: &str) -> String {
    Hasher::new(Params::new(8, 1, 1, None).expect("they are allowed"))
        .hash(&clear.into())
        .expect("a hash")
        .as_text()
        .to_owned()
}

/// How long hashing a password takes now, at its best.
pub fn time_of_a_hash() -> Duration {
    let hasher = Hasher::new(Params::default());
    let times = (0..3).map(|_| {
        let start = Instant::now();
        hasher.hash(&"a password".into()).expect("a hash");
        start.elapsed()
    });
    times.min().expect("three")
}

/// Returns the prefix, such as `127.1.2.`, of loopback addresses that no other test uses. A client there has
/// the address 127.0.0.1.
pub fn loopback_network() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = std::process::id() * 4 + COUNT.fetch_add(1, Ordering::Relaxed);
    format!("127.{}.{}.", 1 + number / 256 % 250, number % 256)
}

/// A small generator, so that a failure can be repeated by its seed, which is not 0 (xorshift64).
pub struct Dice(pub u64);

impl Dice {
    /// A number below `sides`.
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}
