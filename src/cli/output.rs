//! The output of an export: standard output, a device, a pipe, or a file. A file gets its name once it is complete.

use super::{Failure, signals};
use std::fs::{self, File, OpenOptions, Permissions};
use std::path::{Path, PathBuf};
use std::{io, os::unix::fs::MetadataExt, os::unix::fs::PermissionsExt};
use tempfile::{Builder, TempPath};

/// An open output.
pub struct Output {
    pub to: File,
    /// The temporary file, which is removed when it is dropped, and the path that it gets at the end.
    unfinished_file: Option<(TempPath, PathBuf)>,
}

impl Output {
    /// Opens `file`, or standard output if it is `None`. With `secret`, only its owner may read the file.
    pub fn open(file: Option<&Path>, secret: bool) -> Result<Output, Failure> {
        let as_it_is = |to: File| Output { to, unfinished_file: None };
        let opened = check_symlink_owner(file).and_then(|()| match file {
            None => nix::unistd::dup(io::stdout()).map(File::from).map(as_it_is).map_err(io::Error::from),
            Some(file) if fs::metadata(file).is_ok_and(|found| !found.is_file()) => {
                OpenOptions::new().write(true).open(file).map(as_it_is)
            }
            Some(file) => Output::open_beside(file, secret),
        });
        let name = file.unwrap_or(Path::new("-")).display();
        opened.map_err(|error| Failure::runtime(format!("cannot write {name}: {error}; name another FILE")))
    }

    /// Opens a temporary file in the directory of `file`, or of the file that `file` links to. Takes the permissions of
    /// an existing file, unless the content is secret.
    fn open_beside(file: &Path, secret: bool) -> io::Result<Output> {
        let target = fs::canonicalize(file).or_else(|_| std::path::absolute(file))?;
        let directory = target.parent().ok_or(io::ErrorKind::IsADirectory)?;
        let mode = fs::metadata(&target).map_or(0o666, |found| found.permissions().mode() & 0o777);
        let mode = Permissions::from_mode(if secret { 0o600 } else { mode });
        let mut cleanup = signals::EXIT_CLEANUP.lock();
        let (to, path) = Builder::new().permissions(mode).tempfile_in(directory)?.into_parts();
        cleanup.file = Some(path.to_path_buf());
        Ok(Output { to, unfinished_file: Some((path, target)) })
    }

    /// Gives the file its name after it has reached the disk.
    pub fn finish(self) -> io::Result<()> {
        let Some((path, target)) = self.unfinished_file else { return Ok(()) };
        self.to.sync_all()?;
        // Locks `EXIT_CLEANUP`, for which a signal waits, so that no signal ends the process after the file has got its
        // name.
        let _cleanup = signals::EXIT_CLEANUP.lock();
        path.persist(target).map_err(io::Error::from)
    }
}

/// Fails if `file` is a symbolic link of another user's, because that user could have root's export replace any file.
fn check_symlink_owner(file: Option<&Path>) -> io::Result<()> {
    let trusted = [0, nix::unistd::Uid::effective().as_raw()];
    match file.map(fs::symlink_metadata) {
        Some(Ok(found)) if found.is_symlink() && !trusted.contains(&found.uid()) => {
            Err(io::Error::other(format!("it is a link of user {}", found.uid())))
        }
        _ => Ok(()),
    }
}
