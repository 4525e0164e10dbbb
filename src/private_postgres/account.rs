//! The account that PostgreSQL runs as: never root, which it refuses. Checks and makes the directories and files that the
//! account owns or may enter. Knows nothing of clusters.
//!
//! A process of root's touches what the account can write within [`Account::act`] alone, which has the account's rights:
//! a link that the account puts there leads to nothing that the account could not reach itself.

use super::{ClusterError, Result, User};
use nix::libc;
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{env, io, panic, path::Path, ptr, thread};

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

    /// Checks that root can become this account, and keeps no capability then.
    fn checked(self) -> Result<Account> {
        /// The bit of a process that keeps its capabilities if its user changes.
        const NO_SETUID_FIXUP: libc::c_int = 1 << 2;
        let tried = self.command("/bin/sh").args(["-c", ":"]).current_dir("/").status();
        // SAFETY: the call only reads a number of this thread.
        let keeps = unsafe { libc::prctl(libc::PR_GET_SECUREBITS) } & NO_SETUID_FIXUP != 0;
        let fails = || io::Error::other("it could become root again");
        tried.and_then(|_| (!keeps).then_some(self).ok_or_else(fails)).map_err(|error| {
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

    /// Runs a function with the account's rights to files. The threads and processes that it starts have no others.
    pub fn act<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        let Some((uid, gid)) = self.instead_of_root() else { return act() };
        let act_as_account = || {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            // SAFETY: no group is read. The system call changes this thread; the C library's function changes all threads.
            unsafe { libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()) };
            // `setfsgid` and `setfsuid` return the former identity, so they are called twice: the second call tells
            // whether the first one succeeded. Other users can neither trace nor end the thread, which stays root's.
            setfsgid(gid);
            setfsuid(uid);
            assert_eq!((setfsgid(gid), setfsuid(uid)), (gid, uid), "root has become the account before");
            act()
        };
        let done = thread::scope(|scope| scope.spawn(act_as_account).join());
        done.unwrap_or_else(|panicked| panic::resume_unwind(panicked))
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

    /// Checks that the account may enter `dir`. To be called with the account's rights.
    pub(super) fn check_way(&self, dir: &Path) -> Result<()> {
        let is_closed = |dir: &&Path| {
            let entered = fs::metadata(dir.join("."));
            entered.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
        };
        let Some(closed) = dir.ancestors().filter(is_closed).last() else { return Ok(()) };
        Err(ClusterError::new(format!(
            "PostgreSQL runs as user {}, who may not enter {}: chmod a+x it, or choose another directory",
            name(self.uid),
            closed.display()
        )))
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
             {start}or choose another directory, as one in it"
        )))
    }

    /// Returns a function for `map_err`, as [`ClusterError::io`]. If `path` is another user's, the error says what to do.
    pub(super) fn io(&self, doing: &str, path: &Path) -> impl Fn(io::Error) -> ClusterError {
        move |error| self.check_owner(path).err().unwrap_or_else(|| ClusterError::io(doing, path)(error))
    }

    /// Returns why `initdb`, which asks for the name of its user, has failed.
    pub(super) fn explain_initdb_failure(&self, failure: ClusterError) -> ClusterError {
        if User::with_uid(self.uid).is_some() {
            return failure;
        }
        ClusterError::new(format!(
            "{failure}; user {} has no entry in /etc/passwd: mount a file that has one, or start userd as a user that has one",
            self.uid
        ))
    }

    /// Returns whether `dir` is a directory, no symbolic link, of this account's that no other account can enter.
    pub(super) fn keeps_private(&self, dir: &Path) -> bool {
        let found = fs::symlink_metadata(dir);
        found.is_ok_and(|dir| dir.is_dir() && dir.uid() == self.uid && dir.mode() & 0o777 == 0o700)
    }

    /// Makes a directory that no other account can enter, unless it exists. Returns false if it could not be made, or
    /// if another account can enter it.
    pub(super) fn makes_private(&self, dir: &Path) -> bool {
        self.keeps_private(dir)
            || DirBuilder::new().mode(0o700).create(dir).is_ok() && self.restrict_to_owner(dir).is_ok()
    }

    /// Sets the mode of the account's directory to 0700, so that no other account can enter it.
    pub(super) fn restrict_to_owner(&self, dir: &Path) -> Result<()> {
        self.check_owner(dir)?;
        let open = || io::Error::other("it is a link, or its file system has no modes");
        let closed = fs::set_permissions(dir, Permissions::from_mode(0o700));
        let closed = closed.and_then(|()| self.keeps_private(dir).then_some(()).ok_or_else(open));
        closed.map_err(ClusterError::io("make private", dir))
    }

    /// Opens a file of the account's to append to, made if missing. Follows no link.
    pub(super) fn open(&self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(path)?;
        // Sets the mode, as a umask may have closed a new file to its owner.
        file.set_permissions(Permissions::from_mode(0o600))?;
        Ok(file)
    }
}

/// Returns the name of a user, or its number if it has none.
fn name(uid: u32) -> String {
    User::with_uid(uid).map_or_else(|| uid.to_string(), |user| user.name)
}
