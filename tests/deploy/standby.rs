//! A streaming standby of a PostgreSQL.

use crate::support::{Daemon, LONG, Own, TempDir, eventually, program_of_postgres};
use nix::sys::signal::Signal;
use postgres::{Client, NoTls};
use std::{
    fs,
    os::unix::{
        fs::{MetadataExt, chown},
        process::CommandExt,
    },
    path::Path,
    process::{Command, Stdio},
};

/// A streaming standby, which may be promoted.
pub struct Standby {
    _server: Daemon,
    // Removed when the server is gone.
    dir: TempDir,
}

impl Standby {
    /// Starts a standby that follows the primary, on a Unix socket in a directory of its own.
    pub fn start(primary: &Own) -> Standby {
        let dir = TempDir::new();
        // PostgreSQL refuses to run as root: the standby runs under the account of the primary.
        let owner = fs::metadata(primary.data()).expect("a cluster has its files");
        let (uid, gid) = (owner.uid(), owner.gid());
        chown(dir.path(), Some(uid), Some(gid)).expect("a fresh directory");
        let data = dir.path().join("standby");
        let run = |program: &str| {
            let mut command = Command::new(program_of_postgres(program));
            command.env_clear().env("LC_ALL", "C").current_dir("/");
            command.uid(uid).gid(gid).stdin(Stdio::null()).stdout(Stdio::null());
            command
        };
        let copied = run("pg_basebackup")
            .args(["-U", "postgres", "-X", "stream", "-c", "fast", "-R", "-h"])
            .arg(primary.socket_dir())
            .arg("-D")
            .arg(&data)
            .status();
        assert!(copied.expect("PostgreSQL's programs").success());
        let log = fs::File::create(dir.path().join("log")).expect("a fresh directory");
        let server = run("postgres")
            .arg("-D")
            .arg(&data)
            .args(["-c", "listen_addresses=", "-c", "max_connections=100", "-k"])
            .arg(dir.path())
            .stderr(log)
            .spawn();
        let standby =
            Standby { _server: Daemon::new(server.expect("PostgreSQL's programs"), Signal::SIGQUIT), dir };
        eventually(LONG, "the standby takes connections", || Client::connect(&standby.url(), NoTls).is_ok());
        standby
    }

    pub fn socket_dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns true if everything that the primary has written by now can be read here.
    pub fn has_replayed(&self, primary: &Own) -> bool {
        let row = primary.client().query_one("select pg_current_wal_lsn()::text", &[]);
        let written: String = row.expect("a primary").get(0);
        let sql = "select pg_last_wal_replay_lsn() >= $1::text::pg_lsn";
        self.client().query_one(sql, &[&written]).expect("a standby").get(0)
    }

    /// Returns a value for `DATABASE_URL`.
    pub fn url(&self) -> String {
        format!("host='{}' user=postgres dbname=postgres", self.dir.path().display())
    }

    /// A session, to look behind the service's back.
    pub fn client(&self) -> Client {
        Client::connect(&self.url(), NoTls).expect("the standby takes connections")
    }
}
