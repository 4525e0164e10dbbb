//! The process's environment as a configuration: the variables of the table, what libpq takes from its user, and sockets
//! that a supervisor passes.

use super::{
    Failure,
    arguments::Args,
    commands::{self, VARIABLES},
    env_file,
};
use crate::config::{SETTINGS, Scope, near_miss};
use crate::{Config, ConfigError, Database};
use listenfd::ListenFd;
use std::{env, ffi::OsString, os::fd::OwnedFd, sync::Arc};

const SSL_IS_OFF: &str = "has no effect: TLS to the database is on with the exact text `true`, and beside DATABASE_URL \
                          as its sslmode says";

/// Sets the variables that options stand for, and those of `--env-file` that the environment lacks. To be called while
/// this is the only thread.
pub fn set_variables(args: &mut Args) -> Result<(), Failure> {
    let options = VARIABLES
        .into_iter()
        .filter_map(|(option, name)| Some((name.to_owned(), args.value(option)?.into(), "argument")));
    let file = args.value(commands::ENV_FILE).map(env_file::read).transpose();
    let file = file.map_err(|problem| Failure::usage(format!("--env-file: {problem}")))?;
    let file = file.into_iter().flatten().map(|(name, value)| (name, value, "--env-file"));
    for (name, text, place) in options.chain(file).collect::<Vec<_>>() {
        if place == "argument" || value(&name).is_none() {
            // SAFETY: this is the only thread, so no other thread reads or writes the environment.
            unsafe { env::set_var(&name, text) };
            args.assigned.insert(name, place);
        }
    }
    Ok(())
}

/// Returns the configuration that the variables and `--migrate` make.
pub fn config(args: &Args) -> Result<Config, ConfigError> {
    let mut config = Config::from_vars(lookup(args))?;
    let user = crate::private_postgres::User::with_uid(nix::unistd::Uid::effective().as_raw());
    config.os_user = user.map(|user| user.name);
    config.migrate = args.value(commands::MIGRATE).is_none_or(|value| value == "on");
    Ok(config)
}

/// Returns a look-up of the variables. With `--embedded` those that say which database is used have no effect.
pub fn lookup(args: &Args) -> impl Fn(&str) -> Option<OsString> + use<> {
    let of_database = SETTINGS.iter().filter(|setting| setting.scope == Scope::Database);
    let names = of_database.map(|setting| setting.variable).filter(|name| *name != "POSTGRES_BIN");
    let ignored: Vec<_> = names.filter(|_| args.has(commands::EMBEDDED)).collect();
    move |name| value(name).filter(|_| !ignored.contains(&name))
}

/// Returns the value of a variable. An empty one counts as unset.
pub fn value(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns a line for each variable that may not do what a person expects of it: `DB_SSL` that leaves TLS off, and a name
/// that is nearly the name of a setting without a value.
pub fn warnings(args: &Args, config: &Config) -> Vec<String> {
    let is_on = matches!(config.database, Database::Parts { ssl: true, .. });
    let ssl = lookup(args)("DB_SSL").filter(|text| !is_on && text != "false");
    let ssl = ssl.map(|text| format!("DB_SSL={text:?} {SSL_IS_OFF}"));
    let misspelt = env::vars_os().filter_map(|(name, _)| {
        let name = name.to_str()?;
        let meant = near_miss(name).filter(|meant| *meant != name && value(meant).is_none())?;
        Some(format!("{name} is no setting of userd: did you mean {meant}?"))
    });
    ssl.into_iter().chain(misspelt).collect()
}

/// Returns the sockets that systemd, or another supervisor that speaks its protocol, listens on (`LISTEN_FDS`,
/// `LISTEN_PID`).
pub fn passed_sockets() -> Result<Vec<Arc<OwnedFd>>, Failure> {
    let mut passed = ListenFd::from_env();
    let count = passed.len();
    let take = |index| {
        let tcp = passed.take_tcp_listener(index).map(|socket| socket.map(OwnedFd::from));
        tcp.or_else(|_| passed.take_unix_listener(index).map(|socket| socket.map(OwnedFd::from))).transpose()
    };
    let sockets = (0..count).filter_map(take);
    let sockets = sockets.map(|socket| socket.map(Arc::new)).collect::<Result<_, _>>();
    sockets.map_err(|error| Failure::usage(format!("LISTEN_FDS: {error}")))
}
