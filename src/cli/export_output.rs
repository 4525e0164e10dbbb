//! The output of an export: standard output, a device, a pipe, or a file. A file gets its name once it is complete.

use super::{Failure, signals};
use std::fs::{self, File, OpenOptions, Permissions};
use std::path::{Path, PathBuf};
use std::{io, os::unix::fs::MetadataExt, os::unix::fs::PermissionsExt};
use tempfile::{Builder, TempPath};

/// The opened output of an export.
pub struct ExportOutput {
    pub file: File,
    /// The path of the temporary file that is open as `file`, and the path that it gets at the end. Dropping the
    /// `TempPath` removes the temporary file. `None` if the output is no new file.
    unfinished_file: Option<(TempPath, PathBuf)>,
}

impl ExportOutput {
    /// Opens `file`, or standard output if `file` is `None`. If `is_secret` is true, only the owner may read the new
    /// file.
    pub fn open(file: Option<&Path>, is_secret: bool) -> Result<ExportOutput, Failure> {
        let as_it_is = |file: File| ExportOutput { file, unfinished_file: None };
        let opened = refuse_unsafe_symlink(file).and_then(|()| match file {
            None => nix::unistd::dup(io::stdout()).map(File::from).map(as_it_is).map_err(io::Error::from),
            Some(file) if fs::metadata(file).is_ok_and(|found| !found.is_file()) => {
                OpenOptions::new().write(true).open(file).map(as_it_is)
            }
            Some(file) => ExportOutput::open_temporary(file, is_secret),
        });
        let name = file.unwrap_or(Path::new("-")).display();
        opened.map_err(|error| Failure::runtime(format!("cannot write {name}: {error}; name another FILE")))
    }

    /// Opens a temporary file in the directory of `file`, or of the file that `file` links to. The temporary file has
    /// the permissions of an existing `file`, unless the content is secret.
    fn open_temporary(file: &Path, is_secret: bool) -> io::Result<ExportOutput> {
        let target = fs::canonicalize(file).or_else(|_| std::path::absolute(file))?;
        let directory = target.parent().ok_or(io::ErrorKind::IsADirectory)?;
        let mode = fs::metadata(&target).map_or(0o666, |found| found.permissions().mode() & 0o777);
        let mode = Permissions::from_mode(if is_secret { 0o600 } else { mode });
        let mut cleanup = signals::CLEANUP.lock();
        let (file, path) = Builder::new().permissions(mode).tempfile_in(directory)?.into_parts();
        cleanup.temporary_file = Some(path.to_path_buf());
        Ok(ExportOutput { file, unfinished_file: Some((path, target)) })
    }

    /// Renames the temporary file to its final path once its content is on the disk.
    pub fn finish(self) -> io::Result<()> {
        let Some((path, target)) = self.unfinished_file else { return Ok(()) };
        self.file.sync_all()?;
        // Locks `CLEANUP`, for which a signal waits, so that no signal ends the process with a failure during the
        // rename.
        let _cleanup = signals::CLEANUP.lock();
        path.persist(target).map_err(io::Error::from)
    }
}

/// Fails if `file` is a symbolic link of another user, because that user could make an export of root replace any file.
/// Also fails if `file` links to a file that does not exist, because the export would replace the link.
fn refuse_unsafe_symlink(file: Option<&Path>) -> io::Result<()> {
    let trusted = [0, nix::unistd::Uid::effective().as_raw()];
    match file.map(fs::symlink_metadata) {
        Some(Ok(found)) if found.is_symlink() && !trusted.contains(&found.uid()) => {
            Err(io::Error::other(format!("it is a link of user {}", found.uid())))
        }
        Some(Ok(found)) if found.is_symlink() && file.is_some_and(|file| !file.exists()) => {
            Err(io::Error::other("it is a link to a file that does not exist"))
        }
        _ => Ok(()),
    }
}
