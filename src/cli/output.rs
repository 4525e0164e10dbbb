//! Where an export goes: a file that is there once it is complete, or what is there already and is written to as it is
//! (standard output, a device, a pipe).

use super::{Failure, signals};
use parking_lot::Mutex;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    process,
    sync::{
        Arc,
        mpsc::{self, SyncSender},
    },
    thread::{self, JoinHandle},
};

/// An output, and what it is to become.
pub struct Output {
    to: File,
    part: Option<Part>,
    unfinished: Unfinished,
}

/// The file beside the one that it is to become. A signal removes it.
type Unfinished = Arc<Mutex<Option<PathBuf>>>;

/// An output that is a file.
struct Part {
    target: PathBuf,
    /// Bytes written since the disk was last told of them.
    unsynced: usize,
    ask: SyncSender<()>,
    syncer: JoinHandle<io::Result<()>>,
}

/// Bytes after which the disk is told of them. What is left for the end is short.
const SYNC_AFTER: usize = 8 << 20;

fn remove(path: &mut Option<PathBuf>) {
    if let Some(path) = path.take() {
        // It may be gone with its directory.
        let _ = fs::remove_file(path);
    }
}

impl Output {
    /// Opens `file`, or standard output. With `secret`, a new file is for its owner alone. Takes SIGINT, SIGTERM and
    /// SIGHUP from now on: they end the process and leave nothing.
    pub fn open(file: Option<&Path>, secret: bool) -> Result<Output, Failure> {
        let unfinished = Unfinished::default();
        let interrupted = unfinished.clone();
        signals::on_signals(move |signal| {
            // Held until the end: no file is put in its place any more.
            let mut path = interrupted.lock();
            remove(&mut path);
            signals::exit(128 + signal);
        })?;
        let Some(file) = file else {
            // Unbuffered: whole blocks come.
            let stdout = io::stdout();
            let stdout =
                nix::unistd::dup(&stdout).map_err(|error| unwritable(Path::new("-"), error.into()))?;
            return Ok(Output { to: File::from(stdout), part: None, unfinished });
        };
        let found = fs::metadata(file);
        if found.as_ref().is_ok_and(|found| !found.is_file()) {
            let opened = OpenOptions::new().write(true).open(file);
            let to = opened.map_err(|error| unwritable(file, error))?;
            return Ok(Output { to, part: None, unfinished });
        }
        // What a link leads to is replaced, not the link.
        let target = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.part", process::id()));
        let path = target.with_file_name(name);
        let mode = if secret { 0o600 } else { 0o666 };
        let mut unfinished_path = unfinished.lock();
        let to = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path);
        let to = to.map_err(|error| unwritable(file, error))?;
        *unfinished_path = Some(path);
        drop(unfinished_path);
        if let Ok(found) = found {
            // As it was, but for others' rights to secrets.
            let mode = found.permissions().mode() & if secret { 0o700 } else { 0o777 };
            to.set_permissions(PermissionsExt::from_mode(mode)).map_err(|error| unwritable(file, error))?;
        }
        let (ask, syncer) = start_syncer(&to).map_err(Failure::runtime)?;
        Ok(Output { to, part: Some(Part { target, unsynced: 0, ask, syncer }), unfinished })
    }

    /// Puts the file in its place, after it has reached the disk.
    pub fn finish(mut self) -> io::Result<()> {
        let Some(Part { target, ask, syncer, .. }) = self.part.take() else {
            return Ok(());
        };
        drop(ask);
        syncer.join().unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))?;
        self.to.sync_all()?;
        let mut unfinished = self.unfinished.lock();
        if let Some(path) = unfinished.as_ref() {
            fs::rename(path, target)?;
            *unfinished = None;
        }
        Ok(())
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        if let Some(part) = &mut self.part {
            part.unsynced += written;
            if part.unsynced >= SYNC_AFTER {
                part.unsynced = 0;
                // The thread is at it still.
                let _ = part.ask.try_send(());
            }
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        remove(&mut self.unfinished.lock());
    }
}

/// A thread that waits for the disk while the export goes on.
fn start_syncer(part: &File) -> io::Result<(SyncSender<()>, JoinHandle<io::Result<()>>)> {
    let (sender, asked) = mpsc::sync_channel(1);
    let part = part.try_clone()?;
    let body = move || {
        while asked.recv().is_ok() {
            // The system tells an error once.
            part.sync_data()?;
        }
        Ok(())
    };
    Ok((sender, thread::Builder::new().name("sync".to_owned()).spawn(body)?))
}

fn unwritable(file: &Path, error: io::Error) -> Failure {
    Failure::runtime(format!("cannot write {}: {error}; name another FILE", file.display()))
}
