//! The process's environment as a configuration: the variables of the table, what libpq takes from its user, and a socket
//! that a supervisor passes.

use super::{Failure, arguments::Given};
use listenfd::ListenFd;
use log::LevelFilter;
use std::{env, ffi::OsString, os::fd::OwnedFd, sync::Arc};
use userd::{
    Config, ConfigError,
    config::{SETTINGS, near_miss},
};

/// Returns the configuration that the variables make.
pub fn config(given: &Given) -> Result<Config, ConfigError> {
    let mut config = Config::from_vars(lookup(given))?;
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::effective()).ok().flatten();
    config.os_user = user.map(|user| user.name);
    Ok(config)
}

/// Returns a look-up of the variables. With `--embedded` those of the database have no effect.
pub fn lookup(given: &Given) -> impl Fn(&str) -> Option<OsString> + use<> {
    let is_embedded = given.has("--embedded");
    move |name| value(name).filter(|_| !is_embedded || of_database().all(|other| other != name))
}

/// Returns the variables that say which database is used.
fn of_database() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().map(|setting| setting.variable).take_while(|name| *name != "DB_POOL_SIZE")
}

/// Returns the value of a variable. An empty one counts as unset.
pub fn value(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns the level of the log, and whether its lines are JSON. [`config`] has checked both variables.
pub fn log() -> (LevelFilter, bool) {
    let level = value("LOG_LEVEL").and_then(|level| level.to_str()?.parse().ok());
    (level.unwrap_or(LevelFilter::Info), value("LOG_FORMAT").is_some_and(|format| format == "json"))
}

/// Returns a line for each variable that may not do what a person expects of it.
pub fn warnings(given: &Given) -> Vec<String> {
    let is_url = |name: &str| name.starts_with("DATABASE_URL");
    let set: Vec<&str> = of_database().filter(|name| value(name).is_some()).collect();
    let (unused, reason) = match () {
        () if given.has("--embedded") => (set, "with --embedded, which uses a database of its own"),
        () if set.iter().any(|name| is_url(name)) => {
            (set.into_iter().filter(|name| !is_url(name)).collect(), "beside DATABASE_URL")
        }
        () => (Vec::new(), ""),
    };
    let unused = (!unused.is_empty()).then(|| format!("no effect {reason}: {}", unused.join(", ")));
    let ssl = lookup(given)("DB_SSL").filter(|text| text != "true" && text != "false");
    let ssl = ssl.map(|text| {
        format!("DB_SSL={text:?} leaves TLS to the database off: only the exact text `true` turns it on")
    });
    let misspelt = env::vars_os().filter_map(|(name, _)| misspelt(name.to_str()?));
    unused.into_iter().chain(ssl).chain(misspelt).collect()
}

/// Returns a line if a name is nearly the name of a setting, and that setting has no value.
pub fn misspelt(name: &str) -> Option<String> {
    let meant = near_miss(name).filter(|meant| *meant != name && value(meant).is_none())?;
    Some(format!("{name} is no setting of userd: did you mean {meant}?"))
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
