//! A PostgreSQL as an administrator sets one up: it listens on an address, at the usual port, and asks for passwords.

use crate::support::{Daemon, LONG, TempDir, eventually, programs_of_postgres};
use nix::{
    sys::signal::Signal,
    unistd::{Uid, User},
};
use postgres::{Client, NoTls};
use std::{
    fs::File,
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

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

/// PostgreSQL's account, which is never root, with a directory of its own.
pub struct Account {
    uid: u32,
    gid: u32,
    pub name: String,
    dir: TempDir,
}

impl Account {
    pub fn new() -> Account {
        let user = match Uid::effective() {
            root if root.is_root() => User::from_name("postgres"),
            uid => User::from_uid(uid),
        };
        let user = user.ok().flatten().expect("the user postgres, or one of our own");
        let (uid, gid) = (user.uid.as_raw(), user.gid.as_raw());
        let dir = TempDir::new();
        chown(dir.path(), Some(uid), Some(gid)).expect("a fresh directory");
        Account { uid, gid, name: user.name, dir }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A file in the directory that only this account may read.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir().join(name);
        self.dir.write(name, text);
        chown(&path, Some(self.uid), Some(self.gid)).expect("our own file");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .expect("our own file");
        path
    }

    /// Runs lines of a shell in the directory, where `psql` looks for its server. Each must succeed.
    pub fn shell(&self, lines: &str) {
        let output =
            self.command("sh").args(["-ec", lines]).stderr(Stdio::piped()).output().expect("a shell");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{lines}: {said}");
    }

    /// A program, PostgreSQL's own among them.
    fn command(&self, program: &str) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", format!("{}:{path}", programs_of_postgres().display()))
            .env("PGHOST", self.dir())
            .env("PGUSER", "postgres")
            .env("HOME", self.dir())
            .env("LC_ALL", "C")
            .current_dir(self.dir())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .uid(self.uid)
            .gid(self.gid);
        command
    }
}
