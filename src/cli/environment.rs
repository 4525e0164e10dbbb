//! The process's environment as a configuration: the variables of the table, what libpq takes from its user, and a socket
//! that a supervisor passes.

use super::{Failure, arguments::Args, commands::VARIABLES, env_file};
use listenfd::ListenFd;
use log::LevelFilter;
use std::{env, ffi::OsString, os::fd::OwnedFd, sync::Arc};
use userd::config::{SETTINGS, near_miss};
use userd::{Config, ConfigError, Database};

const SSL_IS_OFF: &str = "has no effect: TLS to the database is on with the exact text `true`, and beside DATABASE_URL \
                          as its sslmode says";

/// Sets the variables that options stand for, and those that the environment lacks: of `--env-file`, and with
/// `--embedded` the `HOST` of this machine alone. To be called while this is the only thread.
pub fn set_variables(args: &mut Args) -> Result<(), Failure> {
    let options = VARIABLES
        .into_iter()
        .filter_map(|(option, name)| Some((name.to_owned(), args.value(option)?.into(), "argument")));
    let file = args.value("--env-file").map(env_file::read).transpose();
    let file = file.map_err(|problem| Failure::usage(format!("--env-file: {problem}")))?;
    let file = file.into_iter().flatten().map(|(name, value)| (name, value, "--env-file"));
    let host = args.has("--embedded").then(|| ("HOST".to_owned(), "127.0.0.1".into(), "--embedded"));
    for (name, text, place) in options.chain(file).chain(host).collect::<Vec<_>>() {
        if place == "argument" || value(&name).is_none() {
            // SAFETY: no other thread reads or writes the environment.
            unsafe { env::set_var(&name, text) };
            args.assigned.insert(name, place);
        }
    }
    Ok(())
}

/// Returns the configuration that the variables and `--migrate` make.
pub fn config(args: &Args) -> Result<Config, ConfigError> {
    let mut config = Config::from_vars(lookup(args))?;
    let user = userd::private_postgres::User::with_uid(nix::unistd::Uid::effective().as_raw());
    config.find_pooler = lookup(args)("DB_PREPARED").is_none();
    config.os_user = user.map(|user| user.name);
    config.migrate = args.value("--migrate").is_none_or(|value| value == "on");
    Ok(config)
}

/// Returns a look-up of the variables. With `--embedded` those that say which database is used have no effect.
pub fn lookup(args: &Args) -> impl Fn(&str) -> Option<OsString> + use<> {
    let variables = SETTINGS.iter().map(|setting| setting.variable);
    let of_database = variables.take_while(|name| *name != "DB_POOL_SIZE");
    let ignored: Vec<_> = of_database.filter(|_| args.has("--embedded")).collect();
    move |name| value(name).filter(|_| !ignored.contains(&name))
}

/// Returns the value of a variable. An empty one counts as unset.
pub fn value(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns the level of the log. [`config`] checks the variable.
pub fn log_level() -> LevelFilter {
    value("LOG_LEVEL").and_then(|level| level.to_str()?.parse().ok()).unwrap_or(LevelFilter::Info)
}

/// Returns whether the lines of the log are JSON.
pub fn logs_json() -> bool {
    value("LOG_FORMAT").is_some_and(|format| format == "json")
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

/// Returns the socket that systemd, or another supervisor that speaks its protocol, listens on (`LISTEN_FDS`,
/// `LISTEN_PID`).
pub fn passed_socket() -> Result<Option<Arc<OwnedFd>>, Failure> {
    let mut passed = ListenFd::from_env();
    if passed.len() > 1 {
        return Err(Failure::usage("LISTEN_FDS: more than one socket was passed; pass the one to serve"));
    }
    let tcp = passed.take_tcp_listener(0).map(|socket| socket.map(OwnedFd::from));
    let socket = tcp.or_else(|_| passed.take_unix_listener(0).map(|socket| socket.map(OwnedFd::from)));
    let socket = socket.map_err(|error| Failure::usage(format!("LISTEN_FDS: {error}")))?;
    Ok(socket.map(Arc::new))
}
