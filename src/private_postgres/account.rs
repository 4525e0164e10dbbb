//! The account that PostgreSQL runs as: never root, which it refuses. Checks and makes the directories and files that the
//! account owns or may enter. Knows nothing of clusters.

use super::{ClusterError, Result, User};
use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use nix::unistd::{Gid, Uid};
use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown, lchown};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::{env, io, path::Path};

/// The variables of our environment that PostgreSQL gets: no PG*, no LC_*, no secrets of userd's.
const ENVIRONMENT: [&str; 6] = ["PATH", "TZ", "TZDIR", "LD_LIBRARY_PATH", "LOCPATH", "LOCALE_ARCHIVE"];

/// The user that PostgreSQL runs as: this process's own, or another one if that is root.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    pub(super) uid: u32,
    gid: u32,
}

impl Account {
    /// Returns this process's user; of a process of root's the user `postgres`. Without such a user, a cluster that is not
    /// kept (`durable`: false) runs as `nobody`, which other programs of the machine may be, too.
    ///
    /// # Errors
    /// The process is root's, and there is no such user.
    pub fn find(durable: bool) -> Result<Account> {
        if !Uid::effective().is_root() {
            return Ok(Account { uid: Uid::effective().as_raw(), gid: Gid::effective().as_raw() });
        }
        let names: &[&str] = if durable { &["postgres"] } else { &["postgres", "nobody"] };
        let user = names.iter().find_map(|name| User::with_name(name));
        let user = user.ok_or_else(|| {
            ClusterError::new(
                "PostgreSQL refuses to run as root, and there is no user postgres to run it: \
                 create one (useradd --system postgres), or start userd as another user",
            )
        })?;
        Account { uid: user.uid, gid: user.gid }.checked()
    }

    /// Checks that root can become this account.
    fn checked(self) -> Result<Account> {
        let tried = self.command("/bin/sh").args(["-c", ":"]).current_dir("/").status();
        tried.map(|_| self).map_err(|error| {
            ClusterError::new(format!(
                "root cannot become user {} here ({error}), and PostgreSQL refuses to run as root: start userd as another \
                 user, give the user namespace more users (/etc/subuid), or the container SETUID and SETGID",
                name(self.uid)
            ))
        })
    }

    /// Returns the owner of `dir`, if this process is root's and the directory is not; else as [`Account::find`] for a
    /// cluster that is kept.
    pub(super) fn owner_of(dir: &Path) -> Result<Account> {
        let found = fs::metadata(dir).ok().filter(|found| Uid::effective().is_root() && found.uid() != 0);
        let Some(found) = found else { return Account::find(true) };
        let gid = User::with_uid(found.uid()).map_or(found.gid(), |user| user.gid);
        Account { uid: found.uid(), gid }.checked()
    }

    /// Returns user and group, if this process is root's: a program becomes them that needs root no longer once its
    /// cluster runs. All that a running [`Cluster`](super::Cluster) needs is this user's.
    pub fn instead_of_root(&self) -> Option<(u32, u32)> {
        Uid::effective().is_root().then_some((self.uid, self.gid))
    }

    /// Returns a command that runs a program as this account, with little of our environment.
    pub(super) fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.env_clear().envs(ENVIRONMENT.iter().filter_map(|name| Some((name, env::var_os(name)?))));
        if let Some((uid, gid)) = self.instead_of_root() {
            command.uid(uid).gid(gid);
        }
        command
    }

    /// Checks that the account may enter `dir`, which root would not notice.
    pub(super) fn check_way(&self, dir: &Path) -> Result<()> {
        const FIRST_CLOSED: &str = r#"for dir; do [ -x "$dir" ] || { printf %s "$dir"; exit; }; done"#;
        let mut way: Vec<&Path> = dir.ancestors().collect();
        way.reverse();
        let output =
            self.command("/bin/sh").args(["-c", FIRST_CLOSED, "sh"]).args(way).current_dir("/").output();
        match String::from_utf8_lossy(&output.map_err(ClusterError::io("run sh for", dir))?.stdout) {
            closed if closed.is_empty() => Ok(()),
            closed => Err(ClusterError::new(format!(
                "PostgreSQL runs as user {}, who may not enter {closed}: chmod a+x it, or choose another directory",
                name(self.uid)
            ))),
        }
    }

    /// Checks that `path` is the account's.
    pub(super) fn check_owner(&self, path: &Path) -> Result<()> {
        let owner = fs::metadata(path).map_err(ClusterError::io("read", path))?.uid();
        if owner == self.uid {
            return Ok(());
        }
        let (path, own, by) = (path.display(), name(self.uid), name(owner));
        let start = if owner == 0 { String::new() } else { format!("start userd as {by}, ") };
        Err(ClusterError::new(format!(
            "{path} belongs to user {by}, and PostgreSQL would run as {own}: give it to {own} (chown -R {own} {path}), \
             {start}or choose another directory"
        )))
    }

    /// Returns whether `dir` is a directory, no symbolic link, of this account's that no other account can enter.
    pub(super) fn keeps_private(&self, dir: &Path) -> bool {
        let found = fs::symlink_metadata(dir);
        found.is_ok_and(|dir| dir.is_dir() && dir.uid() == self.uid && dir.mode() & 0o777 == 0o700)
    }

    /// Makes a directory that no other account can enter, unless there is one. Returns whether there is one then.
    pub(super) fn makes_private(&self, dir: &Path) -> bool {
        let mut mkdir = self.command("mkdir");
        mkdir.args(["-m700", "--"]).arg(dir).stderr(Stdio::null());
        self.keeps_private(dir) || mkdir.status().is_ok() && self.keeps_private(dir)
    }

    /// Gives the account a directory of root's, and closes it to other accounts. Refuses a directory of another owner.
    pub(super) fn take_over(&self, dir: &Path) -> Result<()> {
        let is_roots = fs::metadata(dir).is_ok_and(|found| found.uid() == 0);
        if let Some((uid, gid)) = self.instead_of_root().filter(|_| is_roots) {
            lchown(dir, Some(uid), Some(gid)).map_err(ClusterError::io("give away", dir))?;
        }
        self.check_owner(dir)?;
        let open = || io::Error::other("it is a link, or its file system has no modes");
        let closed = fs::set_permissions(dir, Permissions::from_mode(0o700));
        let closed = closed.and_then(|()| self.keeps_private(dir).then_some(()).ok_or_else(open));
        closed.map_err(ClusterError::io("make private", dir))
    }

    /// Opens a file of the account's to append to, made if missing. It must be a regular file with one name, and no
    /// symbolic link is followed: an account that may write to the directory must not make root open, or give away,
    /// another file.
    pub(super) fn open(&self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        // A pipe would block until there is a reader.
        let file = options.custom_flags(O_NOFOLLOW | O_NONBLOCK).open(path)?;
        let found = file.metadata()?;
        if !found.is_file() || found.nlink() != 1 {
            return Err(io::Error::other("it is not a regular file with one name"));
        }
        // A umask may have closed a new file to its owner.
        file.set_permissions(Permissions::from_mode(0o600))?;
        if let Some((uid, gid)) = self.instead_of_root() {
            fchown(&file, Some(uid), Some(gid))?;
        }
        Ok(file)
    }
}

/// Returns the name of a user, or its number if it has none.
fn name(uid: u32) -> String {
    User::with_uid(uid).map_or_else(|| uid.to_string(), |user| user.name)
}
