//! The account that PostgreSQL runs as. PostgreSQL refuses to run as root.
//!
//! Root opens files that the account could replace only within [`Account::with_rights`], where it has the account's
//! rights. If the account puts a link in place of a file, the link leads root to no file that the account could not
//! reach itself. This module knows nothing of clusters.

use super::{ClusterError, Result, User};
use nix::libc;
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{env, io, panic, path::Path, ptr, thread};

/// The variables of userd's environment that PostgreSQL gets. It gets no PG*, no LC_* and no secrets of userd's.
const PASSED_VARIABLES: [&str; 6] = ["PATH", "TZ", "TZDIR", "LD_LIBRARY_PATH", "LOCPATH", "LOCALE_ARCHIVE"];

/// The user that PostgreSQL runs as: this process's own user, unless it is root.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    pub(super) uid: u32,
    gid: u32,
}

impl Account {
    /// Returns this process's user, or the user `postgres` if the process is root's. If there is no user `postgres`, a
    /// cluster whose data are not kept (`durable` is false) may run as `nobody`, an account that other programs may use, too.
    ///
    /// # Errors
    /// The process is root's, and there is no such user or root cannot become the user.
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
        Account { uid: user.uid, gid: user.gid }.check_switch()
    }

    /// Checks that root can become this account, and keeps no capability afterwards. Returns the account.
    fn check_switch(self) -> Result<Account> {
        /// The bit with which a process keeps its capabilities when its user changes.
        const NO_SETUID_FIXUP: libc::c_int = 1 << 2;
        let tried = self.command("/bin/sh").args(["-c", ":"]).current_dir("/").status();
        // SAFETY: the call only reads a number of this thread.
        let is_kept = unsafe { libc::prctl(libc::PR_GET_SECUREBITS) } & NO_SETUID_FIXUP != 0;
        let kept = || io::Error::other("it could become root again");
        tried.and_then(|_| (!is_kept).then_some(self).ok_or_else(kept)).map_err(|error| {
            ClusterError::new(format!(
                "root cannot become user {} here ({error}), and PostgreSQL refuses to run as root: start userd as another \
                 user, give the user namespace more users (/etc/subuid), or the container SETUID and SETGID",
                user_name(self.uid)
            ))
        })
    }

    /// Returns the owner of `dir` if this process is root's and the directory is not. Otherwise returns the account of
    /// [`Account::find`] for a cluster that is kept.
    pub(super) fn owner_of(dir: &Path) -> Result<Account> {
        let found = fs::metadata(dir).ok().filter(|found| Uid::effective().is_root() && found.uid() != 0);
        let Some(found) = found else { return Account::find(true) };
        let gid = User::with_uid(found.uid()).map_or(found.gid(), |user| user.gid);
        Account { uid: found.uid(), gid }.check_switch()
    }

    /// Returns the account's user and group if this process is root's, else `None`. The process can become this user as
    /// soon as the [`Cluster`](super::Cluster) runs, because nothing needs root's rights any more.
    pub fn ids_if_root(&self) -> Option<(u32, u32)> {
        Uid::effective().is_root().then_some((self.uid, self.gid))
    }

    /// Runs a function with the account's rights to files. Threads and processes that the function starts have these
    /// rights, too.
    pub fn with_rights<T: Send>(&self, run: impl FnOnce() -> T + Send) -> T {
        let Some((uid, gid)) = self.ids_if_root() else { return run() };
        let run_as_account = || {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            // Makes the system call, because the C library's function would change all threads of the process.
            // SAFETY: the kernel reads no group, as their number is 0.
            unsafe { libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()) };
            // Calls `setfsgid` and `setfsuid` twice, because they return the identity before the call: the second call
            // tells whether the first call succeeded. Only files see the new identity, so that no other user can trace
            // the thread.
            setfsgid(gid);
            setfsuid(uid);
            assert_eq!((setfsgid(gid), setfsuid(uid)), (gid, uid), "root has become the account before");
            run()
        };
        let done = thread::scope(|scope| scope.spawn(run_as_account).join());
        done.unwrap_or_else(|panicked| panic::resume_unwind(panicked))
    }

    /// Returns a command that runs a program as this account, with few variables of userd's environment.
    pub(super) fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.env_clear().envs(PASSED_VARIABLES.iter().filter_map(|name| Some((name, env::var_os(name)?))));
        if let Some((uid, gid)) = self.ids_if_root() {
            command.uid(uid).gid(gid);
        }
        command
    }

    /// Checks that the account may enter `dir` and its ancestors. Must be called with the account's rights.
    pub(super) fn check_may_enter(&self, dir: &Path) -> Result<()> {
        let is_closed = |dir: &&Path| {
            let entered = fs::metadata(dir.join("."));
            entered.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
        };
        let Some(closed) = dir.ancestors().filter(is_closed).last() else { return Ok(()) };
        Err(ClusterError::new(format!(
            "PostgreSQL runs as user {}, who may not enter {}: chmod a+x it, or choose another directory",
            user_name(self.uid),
            closed.display()
        )))
    }

    /// Checks that the account owns `path`.
    pub(super) fn check_owner(&self, path: &Path) -> Result<()> {
        let owner = fs::metadata(path).map_err(ClusterError::cannot("read", path))?.uid();
        if owner == self.uid {
            return Ok(());
        }
        let (path, own, by) = (path.display(), user_name(self.uid), user_name(owner));
        let start = if owner == 0 { String::new() } else { format!("start userd as {by}, ") };
        Err(ClusterError::new(format!(
            "{path} belongs to user {by}, and PostgreSQL would run as {own}: give it to {own} (chown -R {own} {path}), \
             {start}or choose another directory, as one in it"
        )))
    }

    /// Returns a function for `map_err`, as [`ClusterError::cannot`] does. If `path` is another user's, the error says
    /// what to do.
    pub(super) fn cannot(&self, doing: &str, path: &Path) -> impl Fn(io::Error) -> ClusterError {
        move |error| self.check_owner(path).err().unwrap_or_else(|| ClusterError::cannot(doing, path)(error))
    }

    /// Returns whether `dir` is a directory of this account's that no other account can enter. A link is none.
    pub(super) fn has_private_dir(&self, dir: &Path) -> bool {
        let found = fs::symlink_metadata(dir);
        found.is_ok_and(|dir| dir.is_dir() && dir.uid() == self.uid && dir.mode() & 0o777 == 0o700)
    }

    /// Makes a directory that no other account can enter, unless the account has it already. Returns whether there is
    /// such a directory now.
    pub(super) fn make_private_dir(&self, dir: &Path) -> bool {
        self.has_private_dir(dir)
            || DirBuilder::new().mode(0o700).create(dir).is_ok() && self.restrict_to_owner(dir).is_ok()
    }

    /// Sets the mode of the account's directory to 0700, so that no other account can enter it.
    pub(super) fn restrict_to_owner(&self, dir: &Path) -> Result<()> {
        self.check_owner(dir)?;
        let open = || io::Error::other("it is a link, or its file system has no modes");
        let closed = fs::set_permissions(dir, Permissions::from_mode(0o700));
        let closed = closed.and_then(|()| self.has_private_dir(dir).then_some(()).ok_or_else(open));
        closed.map_err(ClusterError::cannot("make private", dir))
    }

    /// Opens a file of the account's to append to. Makes a missing file, and follows no link.
    pub(super) fn open(&self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(path)?;
        // A umask may have closed the new file to its owner.
        file.set_permissions(Permissions::from_mode(0o600))?;
        Ok(file)
    }
}

/// Returns the name of a user, or the user's number if it has no name.
fn user_name(uid: u32) -> String {
    User::with_uid(uid).map_or_else(|| uid.to_string(), |user| user.name)
}
