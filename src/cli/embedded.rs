//! The private cluster of `--embedded`: the options that it is started with, and how other verbs (export, import,
//! migrate, …) get at it: they join the server that runs, or start one.

use super::{
    Failure,
    arguments::{Given, format_of},
    import::{read_seed, seed},
    signals,
};
use std::hash::{DefaultHasher, Hash, Hasher};
use userd::{
    Config, Database, ScratchDatabase,
    private_postgres::{self, Cluster},
    transfer::Format,
};

/// Returns how many sessions a private cluster has: some beyond the pool's, for migrations and psql.
pub fn max_connections(config: &Config) -> u32 {
    config.db_pool_size + 10
}

/// Makes the private cluster of `--embedded` the database of `config`: joins the server that a service runs, or starts
/// one, for as long as the value is kept. `make`: a missing cluster is made. Blocks until the server accepts connections.
pub fn join(given: &Given, config: &mut Config, make: bool) -> Result<Option<Cluster>, Failure> {
    let Some(dir) = given.dir() else { return Ok(None) };
    // While this is locked, a signal waits: it ends the server, too.
    let mut remains = signals::REMAINS.lock();
    if !make {
        private_postgres::check(&dir).map_err(Failure::runtime)?;
    }
    let joined = Cluster::join(&dir, max_connections(config)).map_err(Failure::runtime)?;
    remains.server = joined.pid();
    config.database = Database::Url(joined.connection_string("postgres").into());
    Ok(Some(joined))
}

/// Creates the database of `--ephemeral`. With `--seed` it begins with the users of a file, which are imported once for all
/// services that begin with them.
pub fn scratch(given: &Given, config: &Config) -> Result<ScratchDatabase, Failure> {
    let dir = config.migrations_dir.as_deref();
    let Some(file) = given.value("--seed") else { return Ok(ScratchDatabase::with_migrations(dir)?) };
    let (users, format) = (read_seed(file)?, format_of(file).unwrap_or(Format::Ndjson));
    let mut hasher = DefaultHasher::new();
    (&users, format as u8, config.schema as u8).hash(&mut hasher);
    let database = ScratchDatabase::filled(dir, Some(hasher.finish()), |url| {
        seed(&Config { database: Database::Url(url.into()), ..config.clone() }, &users, format)
    })?;
    if given.has("--commands") {
        database.keep_seed()?;
    }
    log::info!("the database begins with the users of {}", file.display());
    Ok(database)
}
