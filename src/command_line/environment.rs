//! The process's environment as a configuration: the variables of the table, what libpq takes from its user and its
//! own variables, and a socket that a supervisor passes.

use super::{Failure, log_writer::Format};
use listenfd::ListenFd;
use log::LevelFilter;
use std::{env, ffi::OsString, os::fd::OwnedFd, path::PathBuf, sync::Arc};
use userd::{Config, ConfigError};

/// The configuration that the variables make, with `first` asked before the environment.
pub fn config(first: impl Fn(&str) -> Option<OsString>) -> Result<Config, ConfigError> {
    let mut config = Config::from_vars(|name| first(name).or_else(|| env::var_os(name)))?;
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::effective()).ok().flatten();
    if config.pg_pass_file.is_none() {
        let home = env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        let home = home.or_else(|| user.as_ref().map(|user| user.dir.clone()));
        config.pg_pass_file = home.map(|home| home.join(".pgpass")).filter(|file| file.is_file());
    }
    config.os_user = user.map(|user| user.name);
    Ok(config)
}

/// Whether a variable has a value.
pub fn is_set(name: &str) -> bool {
    env::var_os(name).is_some_and(|value| !value.is_empty())
}

/// `LOG_LEVEL`.
pub fn log_level() -> Result<LevelFilter, ConfigError> {
    const VARIABLE: &str = "LOG_LEVEL";
    let level = env::var_os(VARIABLE).filter(|level| !level.is_empty());
    let level = level.unwrap_or_else(|| "info".into());
    let levels = LevelFilter::iter().map(|level| level.as_str().to_ascii_lowercase());
    let known: Vec<String> = levels.collect();
    let found = level.to_str().filter(|text| known.iter().any(|known| known == text));
    found.and_then(|text| text.parse().ok()).ok_or_else(|| ConfigError {
        variable: VARIABLE,
        problem: format!("must be one of {}, not {level:?}", known.join(", ")),
    })
}

/// `LOG_FORMAT`.
pub fn log_format() -> Result<Format, ConfigError> {
    const VARIABLE: &str = "LOG_FORMAT";
    let format = env::var_os(VARIABLE).unwrap_or_default();
    match format.to_str() {
        Some("" | "text") => return Ok(Format::Text),
        Some("json") => return Ok(Format::Json),
        _ => {}
    }
    let problem = format!("must be one of text, json, not {format:?}");
    Err(ConfigError { variable: VARIABLE, problem })
}

/// Says which variables have no effect, where a person may think that they had.
pub fn warn_of_ineffective_variables(embedded: bool) {
    if let Some(text) =
        env::var_os("DB_SSL").filter(|text| !["", "true", "false"].iter().any(|known| text == known))
    {
        log::warn!("DB_SSL={text:?} leaves TLS to the database off: only the exact text `true` turns it on");
    }
    for variable in ["DATABASE_URL", "DATABASE_URL_FILE"] {
        if embedded && is_set(variable) {
            log::warn!("{variable} has no effect with --embedded, which uses a database of its own");
        }
    }
}

/// The socket that systemd, or another supervisor that speaks its protocol, listens on (`LISTEN_FDS`, `LISTEN_PID`).
pub fn passed_socket() -> Result<Option<Arc<OwnedFd>>, Failure> {
    let mut passed = ListenFd::from_env();
    if passed.len() > 1 {
        let count = passed.len();
        return Err(Failure::usage(format!("LISTEN_FDS: {count} sockets were passed, and one is served")));
    }
    let tcp = passed.take_tcp_listener(0).map(|socket| socket.map(OwnedFd::from));
    let socket = match tcp {
        Ok(socket) => socket,
        Err(_) => passed
            .take_unix_listener(0)
            .map_err(|error| Failure::usage(format!("LISTEN_FDS: {error}")))?
            .map(OwnedFd::from),
    };
    Ok(socket.map(Arc::new))
}
