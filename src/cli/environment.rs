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

/// Variables that say which database is used. Those behind the first two have no effect beside one of them.
pub const OF_DATABASE: [&str; 10] = [
    "DATABASE_URL",
    "DATABASE_URL_FILE",
    "DB_HOST",
    "DB_PORT",
    "DB_NAME",
    "DB_USER",
    "DB_PASS",
    "DB_PASS_FILE",
    "DB_SSL",
    "DB_SSL_CA",
];

/// Variables that are read and are no settings.
const OF_THE_SYSTEM: [&str; 3] = ["HOME", "PATH", "TMPDIR"];

/// Returns the configuration that the variables make. Those without an effect are not judged.
pub fn config(given: &Given) -> Result<Config, ConfigError> {
    with_socket(given, false)
}

/// Returns the configuration of a service. `passed`: the socket to listen on is there already.
pub fn with_socket(given: &Given, passed: bool) -> Result<Config, ConfigError> {
    let mut config = Config::from_vars(lookup(given, passed))?;
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::effective()).ok().flatten();
    config.os_user = user.map(|user| user.name);
    Ok(config)
}

/// Returns a look-up of the variables that have an effect.
pub fn lookup(given: &Given, passed: bool) -> impl Fn(&str) -> Option<OsString> + use<> {
    let ineffective = ineffective(given.has("--embedded"), passed);
    move |name| value(name).filter(|_| !ineffective.iter().any(|(names, _)| names.contains(&name)))
}

/// Returns the value of a variable. An empty one counts as unset.
pub fn value(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns whether a variable has a value.
pub fn is_set(name: &str) -> bool {
    value(name).is_some()
}

/// Returns the level of the log, and whether its lines are JSON. A configuration has judged both variables.
pub fn log() -> (LevelFilter, bool) {
    let level = value("LOG_LEVEL").and_then(|level| level.to_str()?.parse().ok());
    (level.unwrap_or(LevelFilter::Info), value("LOG_FORMAT").is_some_and(|format| format == "json"))
}

/// Returns the variables that are set and have no effect, each group with the reason. `embedded`: the database is one that
/// the command starts. `passed`: the socket to listen on is there already.
fn ineffective(embedded: bool, passed: bool) -> Vec<(Vec<&'static str>, &'static str)> {
    let (url, parts) = OF_DATABASE.split_at(2);
    let on_unix_socket = value("HOST").is_some_and(|host| host.as_encoded_bytes().starts_with(b"unix:"));
    let has_port = value("PORT").is_some_and(|port| port != "0");
    let has_token = is_set("API_TOKEN") || is_set("API_TOKEN_FILE");
    let rules: [(bool, &[&str], &str); 5] = [
        (embedded, &OF_DATABASE, " with --embedded, which uses a database of its own"),
        (!embedded && url.iter().any(|name| is_set(name)), parts, " beside DATABASE_URL"),
        (passed, &["HOST", "PORT"], ": the socket that was passed is listened on"),
        (!passed && on_unix_socket && has_port, &["PORT"], ": HOST names a Unix socket"),
        (has_token, &["ALLOWED_HOSTS"], " beside API_TOKEN"),
    ];
    let applies = rules.into_iter().filter(|(applies, ..)| *applies);
    let set = applies.map(|(_, names, reason)| {
        (names.iter().copied().filter(|name| is_set(name)).collect::<Vec<_>>(), reason)
    });
    set.filter(|(names, _)| !names.is_empty()).collect()
}

/// Returns a line for each variable that may not do what a person expects of it.
pub fn warnings(given: &Given, passed: bool) -> Vec<String> {
    let ineffective = ineffective(given.has("--embedded"), passed).into_iter().map(|(names, reason)| {
        format!("{} {} no effect{reason}", names.join(", "), if names.len() == 1 { "has" } else { "have" })
    });
    let ssl = lookup(given, passed)("DB_SSL").filter(|text| text != "true" && text != "false");
    let ssl = ssl.map(|text| {
        format!("DB_SSL={text:?} leaves TLS to the database off: only the exact text `true` turns it on")
    });
    let unknown = given.named().filter(|(_, name)| !is_known(name));
    let unknown = unknown.map(|(place, name)| format!("{place}: {name} is no setting of userd"));
    ineffective.chain(ssl).chain(unknown).collect()
}

fn is_known(name: &str) -> bool {
    SETTINGS.iter().any(|setting| setting.variable == name) || OF_THE_SYSTEM.contains(&name)
}

/// Returns a line if a name is nearly that of a setting which is not set.
pub fn misspelt(name: &str) -> Option<String> {
    let meant = Some(name).filter(|name| !is_known(name)).and_then(near_miss)?;
    (!is_set(meant)).then(|| format!("{name} is no setting of userd: did you mean {meant}?"))
}

/// Returns a line for each variable of the environment whose name is nearly that of a setting.
pub fn misspelt_variables() -> Vec<String> {
    env::vars_os().filter_map(|(name, _)| misspelt(name.to_str()?)).collect()
}

/// Returns the socket that systemd, or another supervisor that speaks its protocol, listens on (`LISTEN_FDS`,
/// `LISTEN_PID`).
pub fn passed_socket() -> Result<Option<Arc<OwnedFd>>, Failure> {
    let mut passed = ListenFd::from_env();
    if passed.len() > 1 {
        let count = passed.len();
        return Err(Failure::usage(format!(
            "LISTEN_FDS: {count} sockets were passed, and one is served; pass one"
        )));
    }
    let tcp = passed.take_tcp_listener(0).map(|socket| socket.map(OwnedFd::from));
    let socket = tcp.or_else(|_| passed.take_unix_listener(0).map(|socket| socket.map(OwnedFd::from)));
    let socket = socket.map_err(|error| Failure::usage(format!("LISTEN_FDS: {error}")))?;
    Ok(socket.map(Arc::new))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_those_of_the_table() {
        let all = SETTINGS.iter().map(|setting| setting.variable);
        let parts = all.skip_while(|name| *name != "DB_HOST").take_while(|name| *name != "DB_POOL_SIZE");
        assert_eq!(parts.collect::<Vec<_>>(), OF_DATABASE[2..]);
    }
}
