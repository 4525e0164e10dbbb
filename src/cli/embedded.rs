//! The private cluster of `--embedded`. The service starts its server; subcommands (export, import, migrate, …) join the
//! server that runs, or start one.

use super::{
    Failure,
    arguments::{Args, format_of},
    environment,
    import::{read_seed, seed},
    signals,
};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use userd::{
    Config, Database, ScratchDatabase,
    private_postgres::{self, Cluster},
    transfer::Format,
};

/// Opens the private cluster of `--embedded`, if that is given, and makes it the database of `config`. Its server runs for
/// as long as the value is kept. `make`: a missing cluster is made. Blocks until the server accepts connections.
pub fn open(args: &Args, config: &mut Config, make: bool) -> Result<Option<Cluster>, Failure> {
    let Some(dir) = args.dir() else { return Ok(None) };
    // While this is locked, a signal waits: it ends the server, too.
    let mut remains = signals::REMAINS.lock();
    if !make {
        private_postgres::check(&dir).map_err(Failure::runtime)?;
    }
    let open = if args.verb.is_empty() { Cluster::start } else { Cluster::join };
    // Some sessions beyond the pool's are for migrations and psql.
    let cluster = open(&dir, config.db_pool_size + 10).map_err(Failure::runtime)?;
    remains.server = cluster.pid();
    config.database = Database::Url(cluster.connection_string("postgres").into());
    Ok(Some(cluster))
}

/// Returns the configuration, and the private cluster that it needs, if one is given.
pub fn database(args: &Args, make: bool) -> Result<(Config, Option<Cluster>), Failure> {
    let mut config = environment::config(args).map_err(Failure::usage)?;
    let cluster = open(args, &mut config, make)?;
    Ok((config, cluster))
}

/// Creates the database of `--ephemeral`. With `--seed` it begins with the users of a file, which are imported once for all
/// services that begin with them.
pub fn scratch(args: &Args, config: &Config) -> Result<ScratchDatabase, Failure> {
    let dir = config.migrations_dir.as_deref();
    let Some(file) = args.value("--seed") else { return Ok(ScratchDatabase::with_migrations(dir)?) };
    let (users, format) = (read_seed(file)?, format_of(file).unwrap_or(Format::Ndjson));
    let hash = BuildHasherDefault::<DefaultHasher>::new().hash_one((&users, format as u8));
    let database = ScratchDatabase::filled(dir, Some(hash), |url| {
        seed(&Config { database: Database::Url(url.into()), ..config.clone() }, &users, format)
    })?;
    log::info!("the database begins with the users of {}", file.display());
    Ok(database)
}
