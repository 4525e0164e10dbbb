//! The output of an export: standard output, a device or a pipe; or a file that appears under its name once it is
//! complete.

use super::{Failure, signals};
use parking_lot::Mutex;
use std::{
    fs::{self, File, OpenOptions, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tempfile::{Builder, TempPath};

/// The unfinished file. A signal removes it.
static UNFINISHED: Mutex<Option<TempPath>> = Mutex::new(None);

/// An open output. A file gets its name (`target`) at the end.
pub struct Output {
    pub to: File,
    target: Option<PathBuf>,
}

impl Output {
    /// Opens `file`, or standard output. With `secret`, a new file is for its owner alone. Takes SIGINT, SIGTERM and
    /// SIGHUP from now on: they end the process and leave nothing.
    pub fn open(file: Option<&Path>, secret: bool) -> Result<Output, Failure> {
        signals::on_signals(move |signal| {
            // Locked until the process ends, so that no other file is made.
            let mut unfinished = UNFINISHED.lock();
            drop(unfinished.take());
            signals::exit(128 + signal);
        })?;
        let as_it_is = |to: File| Output { to, target: None };
        let opened = match file {
            // An export writes whole blocks, so the output needs no buffer.
            None => nix::unistd::dup(io::stdout()).map(File::from).map(as_it_is).map_err(io::Error::from),
            Some(file) if fs::metadata(file).is_ok_and(|found| !found.is_file()) => {
                OpenOptions::new().write(true).open(file).map(as_it_is)
            }
            Some(file) => Output::beside(file, secret),
        };
        let name = file.unwrap_or(Path::new("-")).display();
        opened.map_err(|error| Failure::runtime(format!("cannot write {name}: {error}; name another FILE")))
    }

    /// Opens an unfinished file in the directory of `file`. The permissions of an existing file are kept, unless the
    /// content is secret. If `file` is a link, the file that it leads to is replaced.
    fn beside(file: &Path, secret: bool) -> io::Result<Output> {
        let target = fs::canonicalize(file).or_else(|_| std::path::absolute(file))?;
        let directory = target.parent().ok_or(io::ErrorKind::IsADirectory)?;
        let mode = fs::metadata(&target).map_or(0o666, |found| found.permissions().mode() & 0o777);
        let mode = Permissions::from_mode(if secret { 0o600 } else { mode });
        let mut unfinished = UNFINISHED.lock();
        let (to, path) = Builder::new().permissions(mode).tempfile_in(directory)?.into_parts();
        *unfinished = Some(path);
        Ok(Output { to, target: Some(target) })
    }

    /// Puts the file in its place, after it has reached the disk.
    pub fn finish(self) -> io::Result<()> {
        let Some(target) = &self.target else { return Ok(()) };
        self.to.sync_all()?;
        let mut unfinished = UNFINISHED.lock();
        unfinished.take().map_or(Ok(()), |path| path.persist(target).map_err(io::Error::from))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        drop(UNFINISHED.lock().take());
    }
}
