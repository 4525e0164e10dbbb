//! A PostgreSQL as an administrator sets one up: it listens on an address, at the usual port, and asks for passwords.

use crate::support::{Account, Daemon, LONG, eventually};
use nix::sys::signal::Signal;
use postgres::{Client, NoTls};
use std::fs::File;

/// The account that runs it; its own directory, which no other account reads.
pub struct Listening {
    _server: Daemon,
    // Removed when the server is gone.
    account: Account,
}

impl Listening {
    /// Listens on `address`. Its own account is let in without a password, by the socket; no other client yet.
    pub fn start(address: &str) -> Listening {
        let account = Account::new();
        account.shell(
            "initdb -D data -U postgres --auth=trust -N >log; echo 'local all all trust' >data/pg_hba.conf",
        );
        let log = File::create(account.dir().join("server.log")).expect("a fresh directory");
        let server = account
            .command("postgres")
            .args(["-D", "data", "-c", "fsync=off", "-c"])
            .arg(format!("listen_addresses={address}"))
            .arg("-k")
            .arg(account.dir())
            .stderr(log)
            .spawn();
        let server = Daemon::new(server.expect("PostgreSQL's programs"), Signal::SIGQUIT);
        let listening = Listening { _server: server, account };
        let url = format!("{} dbname=postgres", listening.as_administrator());
        eventually(LONG, "it takes connections", || Client::connect(&url, NoTls).is_ok());
        listening
    }

    /// Runs lines of a shell as the server's account, in its directory, where `psql` reaches it. Each must succeed.
    pub fn shell(&self, lines: &str) {
        self.account.shell(lines);
    }

    /// A session of the administrator's.
    pub fn client(&self, database: &str) -> Client {
        let url = format!("{} dbname={database}", self.as_administrator());
        Client::connect(&url, NoTls).expect("it takes connections")
    }

    fn as_administrator(&self) -> String {
        format!("host={} user=postgres", self.account.dir().display())
    }
}
