//! The process's environment as a configuration: the variables of the table, what libpq takes from its user and its
//! own variables, and a socket that a supervisor passes.

use super::{Failure, log::Format};
use listenfd::ListenFd;
use log::LevelFilter;
use std::{collections::BTreeSet, env, ffi::OsString, os::fd::OwnedFd, path::PathBuf, sync::Arc};
use userd::{Config, ConfigError, check, config::SETTINGS};

/// The configuration that the variables make.
pub fn config() -> Result<Config, ConfigError> {
    let mut config = Config::from_vars(|name| env::var_os(name))?;
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::effective()).ok().flatten();
    if config.pg_pass_file.is_none() {
        let home = value("HOME").map(PathBuf::from);
        let home = home.or_else(|| user.as_ref().map(|user| user.dir.clone()));
        config.pg_pass_file = home.map(|home| home.join(".pgpass")).filter(|file| file.is_file());
    }
    config.os_user = user.map(|user| user.name);
    Ok(config)
}

/// The same, and what the log is set by. The error names every variable that cannot be used.
pub fn with_log() -> Result<(Config, LevelFilter, Format), ConfigError> {
    match (config(), log_level(), log_format()) {
        (Ok(config), Ok(level), Ok(format)) => Ok((config, level, format)),
        (config, level, format) => {
            let errors = [config.err(), level.err(), format.err()].into_iter().flatten();
            Err(ConfigError::all(errors).expect("one of them is an error"))
        }
    }
}

/// A variable that is empty counts as unset.
pub fn value(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Whether a variable has a value.
pub fn is_set(name: &str) -> bool {
    value(name).is_some()
}

/// `LOG_LEVEL`.
pub fn log_level() -> Result<LevelFilter, ConfigError> {
    const VARIABLE: &str = "LOG_LEVEL";
    let level = value(VARIABLE).unwrap_or_else(|| "info".into());
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

/// The database as a connection string, and by its parts, which have no effect beside one.
const URL: [&str; 2] = ["DATABASE_URL", "DATABASE_URL_FILE"];
const PARTS: [&str; 8] =
    ["DB_HOST", "DB_PORT", "DB_NAME", "DB_USER", "DB_PASS", "DB_PASS_FILE", "DB_SSL", "DB_SSL_CA"];

/// Whether it is one of those that say which database, by a connection string or by its parts.
pub fn is_of_database(name: &str) -> bool {
    URL.contains(&name) || PARTS.contains(&name)
}

/// Which variables have no effect, where a person may think that they had: a line for each reason. `embedded`: the
/// database is one that the command starts. `passed`: the socket to listen on is there already.
pub fn ineffective(embedded: bool, passed: bool) -> Vec<String> {
    let set = |names: &[&'static str]| -> Vec<&'static str> {
        names.iter().copied().filter(|name| is_set(name)).collect()
    };
    let line = |names: &[&str], reason: &str| match names {
        [] => None,
        [name] => Some(format!("{name} has no effect{reason}")),
        names => Some(format!("{} have no effect{reason}", names.join(", "))),
    };
    let is_unix = value("HOST").is_some_and(|host| host.as_encoded_bytes().starts_with(b"unix:"));
    let listening = match passed {
        true => line(&set(&["HOST", "PORT"]), ": the socket that was passed is listened on"),
        // Any port will do.
        false if value("PORT").is_some_and(|port| port == "0") => None,
        false if is_unix => line(&set(&["PORT"]), ": HOST names a Unix socket"),
        false => None,
    };
    let token = set(&["API_TOKEN", "API_TOKEN_FILE"]);
    let hosts = token.first().and_then(|token| line(&set(&["ALLOWED_HOSTS"]), &format!(" beside {token}")));
    let rest = listening.into_iter().chain(hosts);
    if embedded {
        let reason = " with --embedded, which uses a database of its own";
        return line(&set(&[&URL[..], &PARTS].concat()), reason).into_iter().chain(rest).collect();
    }
    let ssl = value("DB_SSL");
    let database = match set(&URL).first() {
        Some(url) if ssl.as_ref().is_some_and(|text| text == "true") => {
            let roots = value("DB_SSL_CA").unwrap_or_else(|| "system".into());
            let tls = format!("sslmode=verify-full&sslrootcert={}", roots.display());
            line(
                &set(&PARTS),
                &format!(" beside {url}; {tls} in it verifies the server as DB_SSL=true would"),
            )
        }
        Some(url) => line(&set(&PARTS), &format!(" beside {url}")),
        None => ssl.filter(|text| text != "true" && text != "false").map(|text| {
            format!("DB_SSL={text:?} leaves TLS to the database off: only the exact text `true` turns it on")
        }),
    };
    let is_read = |name: &str| SETTINGS.iter().any(|setting| setting.variable == name);
    let known = env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok().filter(|name| !value.is_empty() && !is_read(name))?;
        Some((check::libpq_parameter(&name)?, name))
    });
    let (parameters, names): (BTreeSet<_>, BTreeSet<_>) = known.unzip();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let of_libpq = format!(
        ": of libpq's variables only PGPASSWORD and PGPASSFILE are read; DATABASE_URL takes {}",
        parameters.into_iter().collect::<Vec<_>>().join(", ")
    );
    database.into_iter().chain(line(&names, &of_libpq)).chain(rest).collect()
}

/// The socket that systemd, or another supervisor that speaks its protocol, listens on (`LISTEN_FDS`, `LISTEN_PID`).
pub fn passed_socket() -> Result<Option<Arc<OwnedFd>>, Failure> {
    let mut passed = ListenFd::from_env();
    let unusable = |problem: String| Failure::usage(format!("LISTEN_FDS: {problem}"));
    if passed.len() > 1 {
        return Err(unusable(format!("{} sockets were passed, and one is served; pass one", passed.len())));
    }
    let socket = match passed.take_tcp_listener(0) {
        Ok(socket) => socket.map(OwnedFd::from),
        Err(_) => {
            let socket = passed.take_unix_listener(0).map_err(|error| unusable(error.to_string()))?;
            socket.map(OwnedFd::from)
        }
    };
    Ok(socket.map(Arc::new))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_those_of_the_table() {
        let all = SETTINGS.iter().map(|setting| setting.variable);
        let parts = all.skip_while(|name| *name != "DB_HOST").take_while(|name| *name != "DB_POOL_SIZE");
        assert_eq!(parts.collect::<Vec<_>>(), PARTS);
    }
}
