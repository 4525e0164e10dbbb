//! The private cluster of `--embedded`. The service starts its server; subcommands (export, import, migrate, …) join the
//! server that runs, or start one.

use super::{Failure, arguments::Args, commands::Verb, environment, privileges, signals};
use crate::private_postgres::{self, Cluster};
use crate::{Config, Database};

/// Opens the private cluster of `--embedded`, if that is given, and makes it the database of `config`. Its server runs for
/// as long as the value is kept. `make`: a missing cluster is made. Blocks until the server accepts connections.
///
/// A process of root's is the cluster's account from then on: a socket that the account replaces leads it nowhere. An
/// export stays root, who finishes its file, and connects within [`Account::with_rights`](private_postgres::Account::with_rights).
pub fn open(args: &Args, config: &mut Config, make: bool) -> Result<Option<Cluster>, Failure> {
    let Some(dir) = args.dir() else { return Ok(None) };
    if !make {
        private_postgres::check(&dir).map_err(Failure::runtime)?;
    }
    // Keeps the server for the handler of signals: a signal ends the server, too.
    let go_on = |server| {
        signals::REMAINS.lock().server = server;
        signals::interruption().is_none()
    };
    // The server gets some more sessions than the pool, for migrations and psql.
    let opened = Cluster::open(&dir, config.db_pool_size + 10, args.verb != Verb::Service, go_on);
    signals::REMAINS.lock().server = opened.as_ref().ok().and_then(Cluster::pid);
    let cluster =
        opened.map_err(|error| signals::interruption().unwrap_or_else(|| Failure::runtime(error)))?;
    if args.verb != Verb::Export {
        privileges::give_up(&cluster.account).map_err(Failure::runtime)?;
    }
    config.database = Database::Url(cluster.connection_string("postgres").into());
    Ok(Some(cluster))
}

/// Returns the configuration, and the private cluster that it needs, if one is given.
pub fn database(args: &Args, make: bool) -> Result<(Config, Option<Cluster>), Failure> {
    let mut config = environment::config(args).map_err(Failure::usage)?;
    let cluster = open(args, &mut config, make)?;
    Ok((config, cluster))
}
