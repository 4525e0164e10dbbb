//! The private cluster of `--embedded`. The service starts its server; subcommands (export, import, migrate, …) join the
//! server that runs, or start one.

use super::{Failure, arguments::Args, environment, signals};
use userd::private_postgres::{self, Cluster};
use userd::{Config, Database};

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
