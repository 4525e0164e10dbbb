//! The private PostgreSQL cluster of `--embedded`. The service starts the cluster's server. A subcommand such as
//! `export` uses the server that runs, or starts it.

use super::{Failure, arguments::Args, commands::Subcommand, environment, privileges, signals};
use crate::private_postgres::{self, Cluster};
use crate::{Config, Database};

/// Opens the private cluster, and makes it the database of `config`. Returns `None` without `--embedded`. If `may_make`
/// is true, a missing cluster is made. The server runs until the returned value is dropped. Blocks until the server
/// accepts connections.
///
/// A process of root becomes the cluster's account, because the account could replace the server's socket and so make
/// root connect to something else. Only an export stays root, to finish its file, and connects within
/// [`Account::with_rights`](private_postgres::Account::with_rights).
pub fn open_cluster(args: &Args, config: &mut Config, may_make: bool) -> Result<Option<Cluster>, Failure> {
    let Some(dir) = args.embedded_dir() else { return Ok(None) };
    if !may_make {
        private_postgres::check_has_cluster(&dir).map_err(Failure::runtime)?;
    }
    // Stores the server's process id, so that a signal which ends this process ends the server, too.
    let go_on = |server| {
        signals::CLEANUP.lock().postgres_pid = server;
        signals::interruption().is_none()
    };
    // The server allows ten more sessions than the pool has, for migrations and psql.
    let opened = Cluster::open(&dir, config.db_pool_size + 10, args.subcommand != Subcommand::Service, go_on);
    signals::CLEANUP.lock().postgres_pid = opened.as_ref().ok().and_then(Cluster::own_server_pid);
    let cluster =
        opened.map_err(|error| signals::interruption().unwrap_or_else(|| Failure::runtime(error)))?;
    if args.subcommand != Subcommand::Export {
        privileges::give_up_root(&cluster.account).map_err(Failure::runtime)?;
    }
    config.database = Database::Url(cluster.connection_string("postgres").into());
    Ok(Some(cluster))
}

/// Returns the configuration, and the private cluster if the command line has `--embedded`. Blocks as [`open_cluster`]
/// does.
pub fn open_database(args: &Args, may_make: bool) -> Result<(Config, Option<Cluster>), Failure> {
    let mut config = environment::read_config(args).map_err(Failure::usage)?;
    let cluster = open_cluster(args, &mut config, may_make)?;
    Ok((config, cluster))
}
