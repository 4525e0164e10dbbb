//! Whom PostgreSQL runs as: never root, which it refuses. Owns what that account may enter and what
//! belongs to it. Knows nothing of clusters.

use std::env;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, fchown, lchown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use nix::errno::Errno;
use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use nix::unistd::{AccessFlags, Gid, Uid, User};

use super::ClusterError;

/// What of our environment PostgreSQL gets: no PG*, no LC_*, no secrets of userd's.
const ENVIRONMENT: [&str; 6] = ["PATH", "TZ", "TZDIR", "LD_LIBRARY_PATH", "LOCPATH", "LOCALE_ARCHIVE"];

/// The user that PostgreSQL runs as: this process's own, or another one where that is root.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    uid: u32,
    gid: u32,
    /// We are root and act for this account.
    switch: bool,
}

impl Account {
    /// Reads the machine's list of users where this process is root's: it is `postgres` then. Where there is none, what
    /// is not kept (`durable`: false) runs as `nobody`, which other programs of the machine may be, too.
    ///
    /// # Errors
    /// One line: it is root's, and there is no such user.
    pub fn find(durable: bool) -> Result<Account, ClusterError> {
        let (uid, gid) = (Uid::effective(), Gid::effective());
        let names: &[&str] = if durable { &["postgres"] } else { &["postgres", "nobody"] };
        let user = || names.iter().find_map(|name| User::from_name(name).ok().flatten());
        let (uid, gid, switch) = match uid.is_root().then(user) {
            None => (uid, gid, false),
            Some(Some(user)) => (user.uid, user.gid, true),
            Some(None) => {
                return Err(ClusterError::new(
                    "PostgreSQL refuses to run as root, and there is no user postgres to run it: \
                     create one (useradd --system postgres), or start userd as another user",
                ));
            }
        };
        let (uid, gid) = (uid.as_raw(), gid.as_raw());
        Ok(Account { uid, gid, switch })
    }

    /// The owner of `dir`, where this process is root's and the directory another's; else as
    /// [`Account::find`] for what is kept.
    pub(super) fn owner_of(dir: &Path) -> Result<Account, ClusterError> {
        match fs::metadata(dir) {
            Ok(found) if Uid::effective().is_root() && found.uid() != 0 => {
                let user = User::from_uid(Uid::from_raw(found.uid())).ok().flatten();
                let gid = user.map_or(found.gid(), |user| user.gid.as_raw());
                Ok(Account { uid: found.uid(), gid, switch: true })
            }
            _ => Account::find(true),
        }
    }

    /// Its user and its group, where this process is root's: what a program becomes that needs root no longer once
    /// its cluster runs. All that a running [`Cluster`](super::Cluster) needs is this user's.
    pub fn instead_of_root(&self) -> Option<(u32, u32)> {
        self.switch.then_some((self.uid, self.gid))
    }

    /// A program of PostgreSQL's, run as this account, with little of our environment.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_clear().envs(ENVIRONMENT.iter().filter_map(|name| Some((name, env::var_os(name)?))));
        if self.switch {
            command.uid(self.uid).gid(self.gid);
        }
        command
    }

    /// That the account can get to `dir`, which root would not notice.
    pub(super) fn check_way(&self, dir: &Path) -> Result<(), ClusterError> {
        match if self.switch { self.closed_to(dir)? } else { None } {
            None => Ok(()),
            Some(closed) => Err(ClusterError::new(format!(
                "PostgreSQL runs as user {}, who may not enter {}: choose another directory, or chmod a+x this one",
                name(self.uid),
                closed.display()
            ))),
        }
    }

    /// The same of PostgreSQL's programs.
    pub(super) fn check_programs(&self, dir: &Path) -> Result<(), ClusterError> {
        match self.closed_to(dir)? {
            None => Ok(()),
            Some(closed) => Err(ClusterError::new(format!(
                "PostgreSQL's programs are in {}, and user {}, who would run them, may not enter {}: \
                 chmod a+x it, or put them elsewhere",
                dir.display(),
                name(self.uid),
                closed.display()
            ))),
        }
    }

    /// The first directory on the way to `dir` that the account may not enter. From the root on: of what is below one
    /// that is closed, nothing is known.
    fn closed_to<'a>(&self, dir: &'a Path) -> Result<Option<&'a Path>, ClusterError> {
        let above: Vec<_> = dir.ancestors().collect();
        for ancestor in above.into_iter().rev() {
            if !self.may_enter(ancestor)? {
                return Ok(Some(ancestor));
            }
        }
        Ok(None)
    }

    fn may_enter(&self, dir: &Path) -> Result<bool, ClusterError> {
        if !self.switch {
            return match nix::unistd::access(dir, AccessFlags::X_OK) {
                Ok(()) => Ok(true),
                Err(Errno::EACCES) => Ok(false),
                Err(error) => Err(ClusterError::io("read", dir)(error.into())),
            };
        }
        let metadata = fs::metadata(dir).map_err(ClusterError::io("read", dir))?;
        let bit = match (metadata.uid() == self.uid, metadata.gid() == self.gid) {
            (true, _) => 0o100,
            (_, true) => 0o010,
            _ => 0o001,
        };
        Ok(metadata.mode() & bit != 0)
    }

    /// What to do where `initdb` does not know the account's user, and does not start for that.
    pub(super) fn unknown_to_system(&self) -> Option<String> {
        let known = matches!(User::from_uid(Uid::from_raw(self.uid)), Ok(Some(_)));
        (!known).then(|| {
            format!(
                "user {} has no entry in /etc/passwd, which PostgreSQL's initdb needs: start userd as a user that has \
                 one (docker run --user nobody), or add one",
                self.uid
            )
        })
    }

    /// Whether the account may write to `dir`, so that it can remove there what is its own.
    pub(super) fn may_write(&self, dir: &Path) -> bool {
        let open = |found: Metadata| found.uid() == self.uid || found.mode() & 0o002 != 0;
        !self.switch || fs::metadata(dir).is_ok_and(open)
    }

    /// That `path` is the account's.
    pub(super) fn check_owner(&self, path: &Path, metadata: &Metadata) -> Result<(), ClusterError> {
        if metadata.uid() == self.uid {
            return Ok(());
        }
        let (path, own, owner) = (path.display(), name(self.uid), name(metadata.uid()));
        let remedy = match self.switch && metadata.uid() == 0 {
            true => format!("give it to {own} (chown -R {own} {path})"),
            false => format!("start userd as {owner}"),
        };
        Err(ClusterError::new(format!(
            "{path} belongs to user {owner}, and PostgreSQL would run as {own}: \
             {remedy}, or choose another directory"
        )))
    }

    /// Whether `dir` is a directory, no symbolic link, of this account's (or ours, a moment before it is given to the
    /// account), that no other account can enter.
    pub(super) fn keeps_private(&self, dir: &Path) -> bool {
        let own = [self.uid, Uid::effective().as_raw()];
        fs::symlink_metadata(dir)
            .is_ok_and(|found| found.is_dir() && own.contains(&found.uid()) && found.mode() & 0o777 == 0o700)
    }

    /// Makes a directory that only the account can enter.
    pub(super) fn create_dir(&self, dir: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o700).create(dir)?;
        self.take_over(dir, 0)
    }

    /// Gives the account what belongs to root, and nothing of another owner (`owner`).
    pub(super) fn take_over(&self, dir: &Path, owner: u32) -> io::Result<()> {
        match self.switch && owner == 0 {
            true => lchown(dir, Some(self.uid), Some(self.gid)),
            false => Ok(()),
        }
    }

    /// A file of the account's to append to, made if missing; close-on-exec, as all of std's are. It must be a regular
    /// file with one name, and no symbolic link is followed: an account that may write to the directory must not make
    /// root open, or give away, another file.
    pub(super) fn open(&self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        // A pipe would block until there is a reader.
        let file = options.custom_flags(O_NOFOLLOW | O_NONBLOCK).open(path)?;
        let found = file.metadata()?;
        if !found.is_file() || found.nlink() != 1 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is not a regular file with one name",
            ));
        }
        if self.switch {
            fchown(&file, Some(self.uid), Some(self.gid))?;
        }
        Ok(file)
    }
}

pub(super) fn name(uid: u32) -> String {
    match User::from_uid(Uid::from_raw(uid)) {
        Ok(Some(user)) => user.name,
        _ => uid.to_string(),
    }
}
