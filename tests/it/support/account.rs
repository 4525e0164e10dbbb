//! The account that runs a PostgreSQL of a test.

use super::{TempDir, programs_of_postgres};
use nix::unistd::{Uid, User};
use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// PostgreSQL's account, which is never root, with a directory of its own.
pub struct Account {
    uid: u32,
    gid: u32,
    pub name: String,
    dir: TempDir,
}

impl Account {
    pub fn new() -> Account {
        let user = if Uid::effective().is_root() {
            User::from_name("postgres")
        } else {
            User::from_uid(Uid::effective())
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
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("our own file");
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
    pub fn command(&self, program: &str) -> Command {
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
