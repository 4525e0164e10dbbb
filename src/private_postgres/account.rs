//! The account that PostgreSQL runs as. PostgreSQL refuses to run as root.
//!
//! To open files that the account could replace, root takes on the account's rights ([`Account::with_rights`]): a link
//! that the account puts in place of a file then leads root to no file that the account could not reach itself. This
//! module knows nothing of clusters.

use super::{ClusterError, Result, SystemUser};
use nix::libc;
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{env, io, panic, path::Path, ptr, thread};

/// The variables of userd's environment that PostgreSQL gets. PG* and LC_* would change its settings, and further
/// variables can be secrets.
const INHERITED_ENV: [&str; 6] = ["PATH", "TZ", "TZDIR", "LD_LIBRARY_PATH", "LOCPATH", "LOCALE_ARCHIVE"];

/// The user that PostgreSQL runs as: this process's own user, unless it is root.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    pub(super) uid: u32,
    gid: u32,
}

impl Account {
    /// Returns this process's user, or the user `postgres` if this process is root's. If there is no user `postgres`, a
    /// cluster whose data are not kept (`is_durable` is false) runs as `nobody`, whom other programs may use, too.
    ///
    /// # Errors
    /// The process is root's, and there is no such user or root cannot become the user.
    pub fn for_cluster(is_durable: bool) -> Result<Account> {
        if !Uid::effective().is_root() {
            return Ok(Account { uid: Uid::effective().as_raw(), gid: Gid::effective().as_raw() });
        }
        let names: &[&str] = if is_durable { &["postgres"] } else { &["postgres", "nobody"] };
        let user = names.iter().find_map(|name| SystemUser::with_name(name));
        let user = user.ok_or_else(|| {
            ClusterError::new(
                "PostgreSQL refuses to run as root, and there is no user postgres to run it: \
                 create one (useradd --system postgres), or start userd as another user",
            )
        })?;
        Account { uid: user.uid, gid: user.gid }.check_root_can_switch()
    }

    /// Checks that this process, which is root's, can start a program as this account, and that such a program loses
    /// all of root's capabilities. Returns the account.
    fn check_root_can_switch(self) -> Result<Account> {
        /// The secure bit with which a process keeps its capabilities when its user changes.
        const NO_SETUID_FIXUP: libc::c_int = 1 << 2;
        let tried = self.command("/bin/sh").args(["-c", ":"]).current_dir("/").status();
        // SAFETY: the call only reads the secure bits of this thread.
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

    /// Returns the owner of `dir`, if this process is root's and another user owns `dir`, so that all files there have
    /// one owner. Else returns the account of [`Account::for_cluster`].
    pub(super) fn owner_of(dir: &Path) -> Result<Account> {
        let found = fs::metadata(dir).ok().filter(|found| Uid::effective().is_root() && found.uid() != 0);
        let Some(found) = found else { return Account::for_cluster(true) };
        let gid = SystemUser::with_uid(found.uid()).map_or(found.gid(), |user| user.gid);
        Account { uid: found.uid(), gid }.check_root_can_switch()
    }

    /// Returns the ids of the account's user and group if this process is root's, else `None`. The process can become
    /// this user once the [`Cluster`](super::Cluster) runs, because nothing needs root's rights from then on.
    pub fn ids_to_switch_to(&self) -> Option<(u32, u32)> {
        Uid::effective().is_root().then_some((self.uid, self.gid))
    }

    /// Runs a function on a thread that has the account's rights to files. Threads and processes that the function
    /// starts have these rights, too.
    pub fn with_rights<T: Send>(&self, run: impl FnOnce() -> T + Send) -> T {
        let Some((uid, gid)) = self.ids_to_switch_to() else { return run() };
        let run_as_account = || {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            // Makes the system call, because the C library's `setgroups` would change all threads of the process.
            // SAFETY: the kernel reads nothing behind the pointer, as the number of groups is 0.
            unsafe { libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()) };
            // Calls `setfsgid` and `setfsuid` twice, because they return the identity before the call: the second call
            // tells whether the first call succeeded. They change only the identity for access to files: if the
            // account were the thread's real user, its processes could trace the thread.
            setfsgid(gid);
            setfsuid(uid);
            assert_eq!((setfsgid(gid), setfsuid(uid)), (gid, uid), "root has become the account before");
            run()
        };
        let done = thread::scope(|scope| scope.spawn(run_as_account).join());
        done.unwrap_or_else(|panicked| panic::resume_unwind(panicked))
    }

    /// Returns a command that runs a program as this account, with only the [`INHERITED_ENV`] of userd's
    /// environment.
    pub(super) fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.env_clear().envs(INHERITED_ENV.iter().filter_map(|name| Some((name, env::var_os(name)?))));
        if let Some((uid, gid)) = self.ids_to_switch_to() {
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

    /// Returns a function for `map_err` that makes the error "cannot `doing` `path`: reason". If another user owns
    /// `path`, the error says what to do about that instead.
    pub(super) fn cannot(&self, doing: &str, path: &Path) -> impl Fn(io::Error) -> ClusterError {
        move |error| self.check_owner(path).err().unwrap_or_else(|| ClusterError::cannot(doing, path)(error))
    }

    /// Returns whether `dir` is a directory, not a link to one, that this account owns and no other account can enter.
    pub(super) fn has_private_dir(&self, dir: &Path) -> bool {
        let found = fs::symlink_metadata(dir);
        found.is_ok_and(|dir| dir.is_dir() && dir.uid() == self.uid && dir.mode() & 0o777 == 0o700)
    }

    /// Makes the directory `dir` so that no other account can enter it, unless the account has such a directory
    /// already. Returns false if `dir` cannot be made or restricted.
    pub(super) fn ensure_private_dir(&self, dir: &Path) -> bool {
        self.has_private_dir(dir)
            || DirBuilder::new().mode(0o700).create(dir).is_ok() && self.restrict_to_owner(dir).is_ok()
    }

    /// Sets the mode of the account's directory `dir` to 0700, so that no other account can enter it.
    pub(super) fn restrict_to_owner(&self, dir: &Path) -> Result<()> {
        self.check_owner(dir)?;
        let open = || io::Error::other("it is a link, or its file system has no modes");
        let closed = fs::set_permissions(dir, Permissions::from_mode(0o700));
        let closed = closed.and_then(|()| self.has_private_dir(dir).then_some(()).ok_or_else(open));
        closed.map_err(ClusterError::cannot("make private", dir))
    }

    /// Opens a file to append to, with mode 0600. Makes a missing file, and refuses a link.
    pub(super) fn open_for_append(&self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(path)?;
        // Sets the mode again, because a umask may have taken the owner's rights to a new file.
        file.set_permissions(Permissions::from_mode(0o600))?;
        Ok(file)
    }
}

/// Returns the name of a user, or the user id if `/etc/passwd` has no name for it.
fn user_name(uid: u32) -> String {
    SystemUser::with_uid(uid).map_or_else(|| uid.to_string(), |user| user.name)
}
