//! The private cluster of `--embedded`. The service starts the cluster's server. Subcommands (export, import, migrate,
//! …) use the server that runs, or start it.

use super::{Failure, arguments::Args, commands::Verb, environment, privileges, signals};
use crate::private_postgres::{self, Cluster};
use crate::{Config, Database};

/// Opens the private cluster, and makes it the database of `config`. Returns `None` without `--embedded`. The server
/// runs until the returned value is dropped. With `make`, a missing cluster is made. Blocks until the server accepts
/// connections.
///
/// A process of root's becomes the cluster's account, so that a socket which the account replaces leads root nowhere.
/// Only an export stays root, to finish its file, and connects within
/// [`Account::with_rights`](private_postgres::Account::with_rights).
pub fn open_cluster(args: &Args, config: &mut Config, make: bool) -> Result<Option<Cluster>, Failure> {
    let Some(dir) = args.embedded_dir() else { return Ok(None) };
    if !make {
        private_postgres::check_has_cluster(&dir).map_err(Failure::runtime)?;
    }
    // Tells the handler of signals which server runs, so that a signal which ends this process ends the server, too.
    let go_on = |server| {
        signals::EXIT_CLEANUP.lock().server = server;
        signals::interruption().is_none()
    };
    // The server allows ten more sessions than the pool has, for migrations and psql.
    let opened = Cluster::open(&dir, config.db_pool_size + 10, args.verb != Verb::Service, go_on);
    signals::EXIT_CLEANUP.lock().server = opened.as_ref().ok().and_then(Cluster::own_server_pid);
    let cluster =
        opened.map_err(|error| signals::interruption().unwrap_or_else(|| Failure::runtime(error)))?;
    if args.verb != Verb::Export {
        privileges::give_up_root(&cluster.account).map_err(Failure::runtime)?;
    }
    config.database = Database::Url(cluster.connection_string("postgres").into());
    Ok(Some(cluster))
}

/// Returns the configuration, and the private cluster if there is `--embedded`. Blocks as [`open_cluster`] does.
pub fn open_database(args: &Args, make: bool) -> Result<(Config, Option<Cluster>), Failure> {
    let mut config = environment::read_config(args).map_err(Failure::usage)?;
    let cluster = open_cluster(args, &mut config, make)?;
    Ok((config, cluster))
}
