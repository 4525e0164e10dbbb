//! Databases to be thrown away, in a cluster that all of a user's processes share while they want one.
//!
//! Each is a clone of a template that was migrated once, and is dropped with its value. What a process leaves when it
//! ends is dropped by the next one, or goes with the cluster, some seconds after its last user.

use super::cluster::{self, Options, Shared};
use crate::{
    config::{Config, Database},
    db::{blocking::outside_of_runtimes, explain, migrate::Migrations, scratch},
    error::StartError,
};
use parking_lot::Mutex;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use postgres::Client;
use std::{
    env, fs,
    path::{Path, PathBuf},
    thread,
};

/// Of the cluster's directory and everything in it: another one for each version that is not compatible.
const FORMAT: u32 = 3;

/// Test runners start as many processes as there are cores, each with some servers and their pools.
const MAX_CONNECTIONS: u32 = 1000;

/// Bytes, for a cluster of 60 MB, some 8 MB a database, and PostgreSQL's own log of changes.
const SPACE_NEEDED: u64 = 2 << 30;

/// This process's share. In a static, since it is to last as long as the process, and no longer.
static OWNER: Mutex<Option<Owner>> = Mutex::new(None);

/// A migrated database of its own, dropped with this value. In a private cluster, made from PostgreSQL's server
/// programs (version 13 or newer) on this machine, that all of a user's processes share while they want one.
///
/// ```
/// use userd::{App, Request, ScratchDatabase};
///
/// let database = ScratchDatabase::create()?;
/// let app = App::open(&database.config())?;
/// assert_eq!(app.handle(&Request::get("/users")).status, 200);
/// # Ok::<(), userd::StartError>(())
/// ```
#[derive(Debug)]
pub struct ScratchDatabase {
    name: String,
    url: String,
    /// Its owner's.
    session: i32,
}

impl ScratchDatabase {
    /// A database with the built-in migrations applied.
    ///
    /// Blocks: some 20 ms, about a second where the cluster has to be started first, and up to a minute when
    /// the machine is that slow. May be called from within an async runtime, whose thread it blocks as well.
    ///
    /// # Errors
    /// [`StartError::Cluster`]: one line that says what to do where PostgreSQL is missing or does not start.
    pub fn create() -> Result<ScratchDatabase, StartError> {
        ScratchDatabase::with_migrations(None)
    }

    /// The same, with the migrations of a directory, as `migrations_dir` has it in [`Config`].
    pub fn with_migrations(dir: Option<&Path>) -> Result<ScratchDatabase, StartError> {
        let create = || {
            let mut owner = OWNER.lock();
            if owner.as_ref().is_some_and(|owner| owner.client.is_closed()) {
                *owner = None;
            }
            match &mut *owner {
                Some(owner) => owner.create(dir),
                none => none.insert(Owner::join()?).create(dir),
            }
        };
        outside_of_runtimes(create).map_err(StartError::Cluster)
    }

    /// `postgresql://…`, as psql, libpq and the `postgres` crate take it. No password, no TLS.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Settings for a [`Server`](crate::Server) or an [`App`](crate::App) on it: the defaults, with two workers
    /// and two connections, since tests run many servers and ask each of them little.
    pub fn config(&self) -> Config {
        Config {
            database: Database::Url(self.url.as_str().into()),
            db_pool_size: 2,
            workers: 2,
            ..Config::default()
        }
    }
}

impl Drop for ScratchDatabase {
    fn drop(&mut self) {
        // Of every test of this crate that has not failed.
        #[cfg(test)]
        let compared = match std::thread::panicking() {
            true => Ok(String::new()),
            false => scratch::connect(&self.url)
                .map_or(Ok(String::new()), |mut client| crate::db::counts::compare(&mut client)),
        };
        outside_of_runtimes(|| {
            let mut owner = OWNER.lock();
            let owner = owner.as_mut().filter(|owner| owner.session == self.session);
            let dropped = owner.map(|owner| scratch::drop_with_sessions(&mut owner.client, &self.name));
            if let Some(Err(error)) = dropped {
                log::warn!("cannot drop {}: {}", self.name, explain(&error));
            }
        });
        #[cfg(test)]
        assert!(compared.is_ok(), "{compared:?}");
    }
}

struct Owner {
    shared: Shared,
    /// Its end says that our databases have no owner any more.
    client: Client,
    session: i32,
    count: u32,
    /// Templates known to be complete.
    templates: Vec<String>,
}

impl Owner {
    fn join() -> Result<Owner, String> {
        let options =
            Options { durable: false, max_connections: MAX_CONNECTIONS, ..Options::new(PathBuf::new()) };
        let shared = Shared::join(options, directory).map_err(|error| error.to_string())?;
        let socket_dir = shared.socket_dir().to_owned();
        Owner::connect(shared)
            .map_err(|error| format!("the cluster in {socket_dir} does not answer: {}", explain(&error)))
    }

    fn connect(shared: Shared) -> Result<Owner, postgres::Error> {
        let connection_string = shared.connection_string("postgres");
        let mut client = scratch::connect(&connection_string)?;
        scratch::drop_namesakes(&mut client)?;
        // Beside the start, which is to be quick. What this thread does not come to is left to the next process, and
        // all of it where there is no thread.
        let _ = thread::Builder::new().spawn(move || {
            if let Err(error) = scratch::drop_leftovers(&connection_string) {
                log::warn!("cannot drop what other processes left: {}", explain(&error));
            }
        });
        let (session, version) = scratch::session(&mut client)?;
        log::info!("PostgreSQL {version}, programs in {}", shared.programs().display());
        Ok(Owner { shared, client, session, count: 0, templates: Vec::new() })
    }

    fn create(&mut self, migrations: Option<&Path>) -> Result<ScratchDatabase, String> {
        let migrations = Migrations::load(migrations).map_err(|error| error.to_string())?;
        let template = format!("userd_template_{:016x}", migrations.fingerprint());
        if !self.templates.contains(&template) {
            let connection = self.shared.connection_string(&template);
            let connect = || scratch::connect(&connection);
            scratch::make_template(&mut self.client, &template, migrations, connect)?;
            self.templates.push(template.clone());
        }
        let name = format!("userd_scratch_{}_{}", self.session, self.count);
        self.count += 1;
        scratch::create_database(&mut self.client, &name, &template).map_err(|error| explain(&error))?;
        let url = self.url(&name);
        Ok(ScratchDatabase { name, url, session: self.session })
    }

    /// Host and port as a URL has them: the socket's directory is percent-encoded.
    fn url(&self, database: &str) -> String {
        const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');
        let host = utf8_percent_encode(self.shared.socket_dir(), PLAIN);
        format!("postgresql://postgres@{host}:5432/{database}")
    }
}

/// The directory of this user's shared cluster of these programs. In memory where 2 GiB are free there: to create a
/// database is to create 300 files, 12 ms there and up to 180 ms on a disk's file system. A directory that another user
/// has put there first is passed over.
fn directory(programs: &str) -> PathBuf {
    let name = format!("userd-scratch-{}-{FORMAT}-{programs}", nix::unistd::Uid::effective());
    let memory = Path::new("/dev/shm");
    let has_space = || {
        let found = nix::sys::statvfs::statvfs(memory);
        found.is_ok_and(|found| found.blocks_available() * found.fragment_size() >= SPACE_NEEDED)
    };
    match memory.join(&name) {
        dir if dir.exists() && cluster::can_share(&dir) => dir,
        dir if fs::symlink_metadata(&dir).is_err() && has_space() => dir,
        _ => env::temp_dir().join(name),
    }
}
