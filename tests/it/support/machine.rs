//! The machine that the tests run on: its ports, its files, its time. Knows nothing of what is tested.

use nix::sys::stat::{Mode, umask};
use socket2::{Domain, Socket, Type};
use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

/// Lets time pass: between two polls, or to reach a later moment of another process's work.
pub fn pause(time: Duration) {
    thread::sleep(time);
}

/// A port that no process listens on, and that the system does not assign to a process that asks for a free one.
pub fn free_port() -> u16 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    // Below the range of the ports that the system hands out; where another process looks is not where we do.
    let start = std::process::id() * 64;
    loop {
        let next = start.wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + u16::try_from(next % 20_000).expect("a remainder");
        // Not listened on: a process that another test starts just now has a copy of the socket for a moment.
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_reuse_address(true).expect("an option of every socket");
        if socket.bind(&SocketAddr::from(([127, 0, 0, 1], port)).into()).is_ok() {
            return port;
        }
    }
}

/// Where Debian keeps the server's programs, off the PATH; the newest version.
pub fn programs_of_postgres() -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").expect("apt-get install postgresql");
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
    let newest = versions.filter_map(|entry| number(entry.ok()?)).max();
    let newest = newest.expect("apt-get install postgresql");
    PathBuf::from(format!("/usr/lib/postgresql/{newest}/bin"))
}

const MIGRATIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations");

/// The number of the last migration of this release.
pub fn last_migration() -> u32 {
    let files = fs::read_dir(MIGRATIONS).expect("the repository has migrations").flatten();
    let names = files.map(|file| file.file_name().into_string().expect("names of migrations are ASCII"));
    let numbers = names.filter_map(|name| name.strip_prefix('V')?.split_once("__")?.0.parse().ok());
    numbers.max().expect("there is a migration")
}

/// A fresh directory, removed when dropped. Other accounts may enter it, as PostgreSQL's has to.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> TempDir {
        // PostgreSQL's account has to read what the tests write, whatever umask they are started with.
        umask(Mode::from_bits_truncate(0o022));
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(format!("userd-it-{process}-{count}"));
        fs::create_dir(&dir).expect("the temporary directory can be written to");
        TempDir(dir)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Holds the migrations of a release after this one: ours, and one more that executes `sql`. It says whether this
    /// release may use the database, too.
    pub fn next_release(sql: &str, is_compatible: bool) -> TempDir {
        let dir = TempDir::new();
        for file in fs::read_dir(MIGRATIONS).expect("ours").flatten() {
            fs::copy(file.path(), dir.0.join(file.file_name())).expect("a fresh directory can be written to");
        }
        let (last, next) = (last_migration(), last_migration() + 1);
        let oldest = if is_compatible { last } else { next };
        let mark = format!("'migration {next} is compatible with migration {oldest}'");
        let text = format!("{sql}; comment on table refinery_schema_history is {mark};");
        dir.write(&format!("V{next}__next.sql"), &text);
        dir
    }

    /// Its path, as variables take it.
    pub fn name(&self) -> &str {
        self.0.to_str().expect("a path of ours")
    }

    /// Writes a file into it.
    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).expect("a fresh directory can be written to");
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
