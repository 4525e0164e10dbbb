//! The output of an export: a file that is there once it is complete, or what is there already and is written to as it
//! is (standard output, a device, a pipe).

use super::{Failure, signals};
use parking_lot::Mutex;
use std::{
    fs::{self, File, OpenOptions, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tempfile::{Builder, TempPath};

/// The file beside the one that it is to become. A signal removes it.
static UNFINISHED: Mutex<Option<TempPath>> = Mutex::new(None);

/// An output, and the file that it is to become.
pub struct Output {
    pub to: File,
    target: Option<PathBuf>,
}

impl Output {
    /// Opens `file`, or standard output. With `secret`, a new file is for its owner alone. Takes SIGINT, SIGTERM and
    /// SIGHUP from now on: they end the process and leave nothing.
    pub fn open(file: Option<&Path>, secret: bool) -> Result<Output, Failure> {
        signals::on_signals(move |signal| {
            // Locked until the end: no file takes its place any more.
            let mut unfinished = UNFINISHED.lock();
            drop(unfinished.take());
            signals::exit(128 + signal);
        })?;
        let as_it_is = |to: File| Output { to, target: None };
        let opened = match file {
            // Unbuffered: whole blocks come.
            None => nix::unistd::dup(io::stdout()).map(File::from).map(as_it_is).map_err(io::Error::from),
            Some(file) if fs::metadata(file).is_ok_and(|found| !found.is_file()) => {
                OpenOptions::new().write(true).open(file).map(as_it_is)
            }
            Some(file) => Output::beside(file, secret),
        };
        let name = file.unwrap_or(Path::new("-")).display();
        opened.map_err(|error| Failure::runtime(format!("cannot write {name}: {error}; name another FILE")))
    }

    /// Opens a file beside this one. The permissions of an existing file are kept, unless the content is secret; the file
    /// that a link leads to is replaced, not the link.
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
