//! The output of an export: a file that is there once it is complete, or what is there already and is written to as it
//! is (standard output, a device, a pipe).

use super::{Failure, signals};
use parking_lot::Mutex;
use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tempfile::{Builder, TempPath};

/// The file beside the one that it is to become. A signal removes it.
static UNFINISHED: Mutex<Option<TempPath>> = Mutex::new(None);

/// An output, and the file that it is to become.
pub struct Output {
    to: File,
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
        let name = file.unwrap_or(Path::new("-"));
        let opened = match file {
            // Unbuffered: whole blocks come.
            None => nix::unistd::dup(io::stdout()).map(File::from).map_err(io::Error::from),
            Some(file) if fs::metadata(file).is_ok_and(|found| !found.is_file()) => {
                OpenOptions::new().write(true).open(file)
            }
            Some(file) => return Output::beside(file, secret).map_err(|error| unwritable(name, error)),
        };
        opened.map(|to| Output { to, target: None }).map_err(|error| unwritable(name, error))
    }

    /// Opens a file beside this one. An existing file's permissions are kept, but for rights of others to secrets; the
    /// file that a link leads to is replaced, not the link.
    fn beside(file: &Path, secret: bool) -> io::Result<Output> {
        let target = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
        let mode = if secret { 0o600 } else { 0o666 };
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(".");
        let directory = match target.parent() {
            Some(directory) if directory != Path::new("") => directory,
            _ => Path::new("."),
        };
        let mut unfinished = UNFINISHED.lock();
        let part = Builder::new()
            .prefix(&name)
            .suffix(".part")
            .permissions(Permissions::from_mode(mode))
            .tempfile_in(directory)?;
        if let Ok(found) = fs::metadata(&target) {
            let mode = found.permissions().mode() & if secret { 0o700 } else { 0o777 };
            part.as_file().set_permissions(Permissions::from_mode(mode))?;
        }
        let (to, path) = part.into_parts();
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

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        drop(UNFINISHED.lock().take());
    }
}

fn unwritable(file: &Path, error: io::Error) -> Failure {
    Failure::runtime(format!("cannot write {}: {error}; name another FILE", file.display()))
}
