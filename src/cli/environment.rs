//! The process's environment as a configuration: the variables of the table, what libpq takes from its user and its
//! own variables, and a socket that a supervisor passes.

use super::{Failure, arguments::Given, log::Format};
use listenfd::ListenFd;
use log::LevelFilter;
use std::{collections::BTreeSet, env, ffi::OsString, fmt, os::fd::OwnedFd, path::PathBuf, sync::Arc};
use userd::{
    Config, ConfigError, check,
    config::{SETTINGS, near_miss},
};

/// The database as a connection string, and by its parts, which have no effect beside one.
const URL: [&str; 2] = ["DATABASE_URL", "DATABASE_URL_FILE"];
const PARTS: [&str; 8] =
    ["DB_HOST", "DB_PORT", "DB_NAME", "DB_USER", "DB_PASS", "DB_PASS_FILE", "DB_SSL", "DB_SSL_CA"];

/// Variables that are read and are no settings.
const OF_THE_SYSTEM: [&str; 3] = ["HOME", "PATH", "TMPDIR"];

/// Returns the configuration that the variables make. Those without an effect are not judged.
pub fn config(given: &Given) -> Result<Config, ConfigError> {
    with_socket(given, false)
}

/// Returns the configuration of a service. `passed`: the socket to listen on is there already.
pub fn with_socket(given: &Given, passed: bool) -> Result<Config, ConfigError> {
    let mut config = Config::from_vars(lookup(&ineffective(given.has("--embedded"), passed)))?;
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::effective()).ok().flatten();
    if config.pg_pass_file.is_none() {
        let home = value("HOME").map(PathBuf::from);
        let home = home.or_else(|| user.as_ref().map(|user| user.dir.clone()));
        config.pg_pass_file = home.map(|home| home.join(".pgpass")).filter(|file| file.is_file());
    }
    config.os_user = user.map(|user| user.name);
    Ok(config)
}

/// Returns a look-up of the variables that have an effect.
pub fn lookup(ineffective: &[Ineffective]) -> impl Fn(&str) -> Option<OsString> + '_ {
    move |name| env::var_os(name).filter(|_| !ineffective.iter().any(|group| group.names.contains(&name)))
}

/// Returns the value of a variable. An empty one counts as unset.
pub fn value(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns whether a variable has a value.
pub fn is_set(name: &str) -> bool {
    value(name).is_some()
}

/// Returns the level and the format of the log, whose variables a configuration has judged.
pub fn log() -> (LevelFilter, Format) {
    let level = value("LOG_LEVEL").and_then(|level| level.to_str()?.parse().ok());
    let is_json = value("LOG_FORMAT").is_some_and(|format| format == "json");
    (level.unwrap_or(LevelFilter::Info), if is_json { Format::Json } else { Format::Text })
}

/// Returns whether a variable says which database is used.
pub fn is_of_database(name: &str) -> bool {
    URL.contains(&name) || PARTS.contains(&name)
}

/// Variables that are set and have no effect.
pub struct Ineffective {
    names: Vec<&'static str>,
    reason: String,
}

impl fmt::Display for Ineffective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.names.len() == 1 { "has" } else { "have" };
        write!(f, "{} {verb} no effect{}", self.names.join(", "), self.reason)
    }
}

/// Returns the variables that have no effect. `embedded`: the database is one that the command starts. `passed`: the
/// socket to listen on is there already.
pub fn ineffective(embedded: bool, passed: bool) -> Vec<Ineffective> {
    let first_of = |names: &[&'static str]| names.iter().copied().find(|name| is_set(name));
    let mut found = Vec::new();
    let mut add = |names: &[&'static str], reason: String| {
        let names: Vec<&str> = names.iter().copied().filter(|name| is_set(name)).collect();
        if !names.is_empty() {
            found.push(Ineffective { names, reason });
        }
    };
    if embedded {
        let reason = " with --embedded, which uses a database of its own";
        add(&[&URL[..], &PARTS].concat(), reason.to_owned());
    } else if let Some(url) = first_of(&URL) {
        let tls = value("DB_SSL").filter(|text| text == "true").map(|_| {
            let roots = value("DB_SSL_CA").unwrap_or_else(|| "system".into());
            let tls = format!("sslmode=verify-full&sslrootcert={}", roots.display());
            format!("; {tls} in it verifies the server as DB_SSL=true would")
        });
        add(&PARTS, format!(" beside {url}{}", tls.unwrap_or_default()));
    }
    if passed {
        add(&["HOST", "PORT"], ": the socket that was passed is listened on".to_owned());
    } else if value("HOST").is_some_and(|host| host.as_encoded_bytes().starts_with(b"unix:"))
        && value("PORT").is_some_and(|port| port != "0")
    {
        add(&["PORT"], ": HOST names a Unix socket".to_owned());
    }
    if let Some(token) = first_of(&["API_TOKEN", "API_TOKEN_FILE"]) {
        add(&["ALLOWED_HOSTS"], format!(" beside {token}"));
    }
    found
}

/// Returns a line for each variable that may not do what a person expects of it.
pub fn warnings(given: &Given, passed: bool) -> Vec<String> {
    let embedded = given.has("--embedded");
    let mut lines: Vec<String> = ineffective(embedded, passed).iter().map(ToString::to_string).collect();
    let ssl = value("DB_SSL").filter(|text| text != "true" && text != "false");
    if let Some(text) = ssl.filter(|_| !embedded && !URL.iter().any(|name| is_set(name))) {
        lines.push(format!(
            "DB_SSL={text:?} leaves TLS to the database off: only the exact text `true` turns it on"
        ));
    }
    let known = env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok().filter(|name| !value.is_empty() && !is_setting(name))?;
        Some((check::libpq_parameter(&name)?, name))
    });
    let (parameters, names): (BTreeSet<_>, BTreeSet<_>) = known.unzip();
    if !names.is_empty() && !embedded {
        let (names, parameters): (Vec<_>, Vec<_>) =
            (names.into_iter().collect(), parameters.into_iter().collect());
        lines.push(format!(
            "{} {} no effect: of libpq's variables only PGPASSWORD and PGPASSFILE are read; DATABASE_URL takes {}",
            names.join(", "),
            if names.len() == 1 { "has" } else { "have" },
            parameters.join(", ")
        ));
    }
    let unknown = given.named().filter(|(_, name)| !is_known(name));
    lines.extend(unknown.map(|(place, name)| format!("{place}: {name} is no setting of userd")));
    lines
}

fn is_setting(name: &str) -> bool {
    SETTINGS.iter().any(|setting| setting.variable == name)
}

fn is_known(name: &str) -> bool {
    is_setting(name) || OF_THE_SYSTEM.contains(&name) || check::libpq_parameter(name).is_some()
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
