//! Where an export goes: a file that is there once it is complete, or what is there already and is written to as it is
//! (standard output, a device, a pipe).

use super::{Failure, ending};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    process,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, SyncSender},
    },
    thread::{self, JoinHandle},
};

/// An output, and the file that it is to become.
pub struct Output {
    to: Box<dyn Write>,
    part: Option<(File, PathBuf)>,
    unfinished: Arc<Unfinished>,
    /// Bytes written since the disk was last told of them.
    unsynced: usize,
    syncer: Option<(SyncSender<()>, JoinHandle<io::Result<()>>)>,
}

/// Bytes after which the disk is told of them. What is left for the end is short.
const SYNC_AFTER: usize = 8 << 20;

/// The file beside the one that it is to become. A signal removes it.
#[derive(Default)]
struct Unfinished(Mutex<Option<PathBuf>>);

impl Unfinished {
    fn path(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(path: &mut Option<PathBuf>) {
        if let Some(path) = path.take() {
            // It may be gone with its directory.
            let _ = fs::remove_file(path);
        }
    }
}

impl Output {
    /// Opens `file`, or standard output. With `secret`, a new file is for its owner alone. Takes SIGINT, SIGTERM and
    /// SIGHUP from now on: they end the process and leave nothing.
    pub fn open(file: Option<&Path>, secret: bool) -> Result<Output, Failure> {
        let unfinished = Arc::new(Unfinished::default());
        let interrupted = unfinished.clone();
        ending::on_signals(move |signal| {
            // Held until the end: no file is put in its place any more.
            let mut path = interrupted.path();
            Unfinished::remove(&mut path);
            ending::exit(128 + signal);
        })?;
        let Some(file) = file else {
            // Unbuffered: whole blocks come.
            let stdout = io::stdout();
            let stdout =
                nix::unistd::dup(&stdout).map_err(|error| unwritable(Path::new("-"), error.into()))?;
            return Ok(Output::as_it_is(File::from(stdout), unfinished));
        };
        let found = fs::metadata(file);
        if found.as_ref().is_ok_and(|found| !found.is_file()) {
            let opened = OpenOptions::new().write(true).open(file);
            return Ok(Output::as_it_is(opened.map_err(|error| unwritable(file, error))?, unfinished));
        }
        // What a link leads to is replaced, not the link.
        let target = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.part", process::id()));
        let path = target.with_file_name(name);
        let mode = if secret { 0o600 } else { 0o666 };
        let mut unfinished_path = unfinished.path();
        let part = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path);
        let part = part.map_err(|error| unwritable(file, error))?;
        *unfinished_path = Some(path);
        drop(unfinished_path);
        if let Ok(found) = found {
            // As it was, but for others' rights to secrets.
            let mode = found.permissions().mode() & if secret { 0o700 } else { 0o777 };
            part.set_permissions(PermissionsExt::from_mode(mode)).map_err(|error| unwritable(file, error))?;
        }
        let to = Box::new(part.try_clone().map_err(Failure::runtime)?);
        let syncer = start_syncer(&part).map_err(Failure::runtime)?;
        Ok(Output { to, part: Some((part, target)), unfinished, unsynced: 0, syncer: Some(syncer) })
    }

    /// What is there already.
    fn as_it_is(to: File, unfinished: Arc<Unfinished>) -> Output {
        Output { to: Box::new(to), part: None, unfinished, unsynced: 0, syncer: None }
    }

    /// Puts the file in its place, after it has reached the disk.
    pub fn finish(mut self) -> io::Result<()> {
        self.to.flush()?;
        let Some((part, target)) = &self.part else {
            return Ok(());
        };
        if let Some((sender, thread)) = self.syncer.take() {
            drop(sender);
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))?;
        }
        part.sync_all()?;
        let mut unfinished = self.unfinished.path();
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
        self.unsynced += written;
        if self.unsynced >= SYNC_AFTER
            && let Some((sender, _)) = &self.syncer
        {
            self.unsynced = 0;
            // The thread is at it still.
            let _ = sender.try_send(());
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        Unfinished::remove(&mut self.unfinished.path());
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
