//! The table of settings: the environment variable of each, its field, its bounds and its help. Their defaults are in
//! [`Config`] and `Config::cli_defaults`.
//!
//! To add a setting, write a field of [`Config`] with its default, a row of the table [`SETTINGS`], and a row in
//! docs/configuration.md. The row of [`SETTINGS`] parses and validates the variable, and `userd --help` prints it.

use super::Database::{self, Parts};
use super::{Config, TrustedProxies, origins::parse_origin, setters::*};
use crate::{error::ConfigError, secret};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A row of [`SETTINGS`]: an environment variable that the command `userd` reads.
#[derive(Debug)]
pub struct Setting {
    /// The name of the environment variable.
    pub variable: &'static str,
    /// The meaning of the variable in one line, for `userd --help`.
    pub help: &'static str,
    /// The part of the program that the variable concerns.
    pub scope: Scope,
    set: SetField,
}

/// The part of the program that a setting concerns. The request by which a test starts a service may only have settings
/// with the scope `Service`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scope {
    /// The address of the database, or the PostgreSQL programs for a database of the service's own.
    Database,
    /// The use of the machine: listening address, paths of files, number of database sessions, log.
    Machine,
    /// The rules and limits for the requests to one service, and its port.
    Service,
}

/// A function that parses the text of a variable into the variable's field of a [`Config`]. If the text is `None`, the
/// function checks the value that the field has. It returns the value of the field as text.
type SetField = fn(&mut Config, Option<&str>) -> ShownValue;

/// Returns a row of [`SETTINGS`]. `set` parses the text of the variable.
const fn setting(variable: &'static str, scope: Scope, set: SetField, help: &'static str) -> Setting {
    Setting { variable, help, scope, set }
}

/// The result for a setting that has no effect: `DB_HOST` and the like beside a connection string, or the port of a
/// service on a Unix socket.
const NO_EFFECT: ShownValue = Ok(None);

/// Every environment variable, in the order of `userd --help` and of docs/configuration.md. The variables are read in
/// this order.
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = &[
    setting("DATABASE_URL", Scope::Database, |c, text| set_secret(&mut c.database, text.filter(|text| !matches!(text.trim(), "\"\"" | "''"))),
        "Connection string as libpq takes it; used instead of `DB_HOST` to `DB_SSL_CA`"),
    setting("DATABASE_URL_FILE", Scope::Database, skip_field, "File that holds the connection string"),
    setting("DB_HOST", Scope::Database, |c, text| if let Parts { host: field, .. } = &mut c.database { set_database_host(field, text) } else { NO_EFFECT },
        "Database host, or the directory of a Unix socket"),
    setting("DB_PORT", Scope::Database, |c, text| if let Parts { port, .. } = &mut c.database { set_whole_number(port, text, 1..=65_535) } else { NO_EFFECT },
        "Database port"),
    setting("DB_NAME", Scope::Database, |c, text| if let Parts { name, .. } = &mut c.database { set_string(name, text) } else { NO_EFFECT },
        "Database name"),
    setting("DB_USER", Scope::Database, |c, text| if let Parts { user, .. } = &mut c.database { set_string(user, text) } else { NO_EFFECT },
        "Database user"),
    setting("DB_PASS", Scope::Database, |c, text| if let Parts { password, .. } = &mut c.database { set_secret(password, text) } else { NO_EFFECT },
        "Database password"),
    setting("DB_PASS_FILE", Scope::Database, skip_field, "File that holds the database password"),
    setting("DB_SSL", Scope::Database, |c, text| if let Parts { ssl, .. } = &mut c.database { set_switch(ssl, text, "true") } else { NO_EFFECT },
        "TLS to the database, on only when exactly `true`; certificate and host name are verified"),
    setting("DB_SSL_CA", Scope::Database, |c, text| set_path(&mut c.db_ssl_ca, text),
        "PEM file of the authorities that `DB_SSL` trusts instead of the system's"),
    setting("DB_POOL_SIZE", Scope::Machine, |c, text| set_whole_number(&mut c.db_pool_size, text, 1..=1000),
        "Most connections to the database"),
    setting("DB_CONNECT_TIMEOUT", Scope::Machine, |c, text| set_seconds(&mut c.db_connect_timeout, text, 0.001),
        "Seconds that start-up waits for the database"),
    setting("DB_ACQUIRE_TIMEOUT", Scope::Machine, |c, text| set_seconds(&mut c.db_acquire_timeout, text, 0.001),
        "Seconds that a request waits for a free connection"),
    setting("DB_PREPARED", Scope::Machine, |c, text| set_word(&mut c.db_prepared, text, &["true", "false"]),
        "`false` behind a pooler in transaction mode: sessions hold no state; otherwise a start looks for one"),
    setting("PGPASSWORD", Scope::Database, |c, text| set_secret(&mut c.pg_password, text),
        "Database password if the settings above have none"),
    setting("HOST", Scope::Machine, |c, text| set_host(&mut c.host, text),
        "Address or name to listen on: `localhost` is 127.0.0.1 and ::1, `0.0.0.0` lets other machines in; or `unix:/path`"),
    setting("PORT", Scope::Service, |c, text| if c.host.starts_with("unix:") { NO_EFFECT } else { set_whole_number(&mut c.port, text, 0..=65_535) },
        "Port to listen on; 0 takes a free one and prints it"),
    setting("NODE_ENV", Scope::Service, |c, text| set_switch(&mut c.production, text, "production"),
        "`production`: code that reads a relation which was not loaded fetches it; else that is an error. No request does so"),
    setting("WORKERS", Scope::Service, |c, text| set_whole_number(&mut c.workers, text, 1..=1000),
        "Threads that execute requests, no more than `DB_POOL_SIZE`; two more receive requests, others hash"),
    setting("SCHEMA", Scope::Service, |c, text| set_word(&mut c.schema, text, &["basic", "strict"]),
        "Create schema: `basic`, or `strict` (password required)"),
    setting("VALIDATION", Scope::Service, |c, text| set_word(&mut c.validation, text, &["declarative", "parser"]),
        "`declarative` (invalid bodies get 400) or `parser` (422)"),
    setting("MAX_PER_PAGE", Scope::Service, |c, text| set_whole_number(&mut c.max_per_page, text, 1..=1_000_000),
        "Largest `perPage`; the default, 15, is no larger"),
    setting("MAX_BODY_BYTES", Scope::Service, |c, text| set_whole_number(&mut c.limits.max_body_bytes, text, 1..=1 << 30),
        "Largest body, in bytes"),
    setting("MEMORY_BUDGET", Scope::Service, |c, text| set_whole_number(&mut c.limits.memory_budget, text, 1..=usize::MAX),
        "Bytes held for all clients: requests, answers, rows, hashes; beyond it they wait, or 503"),
    setting("MAX_CONNECTIONS", Scope::Service, |c, text| set_whole_number(&mut c.limits.max_connections, text, 1..=1 << 20),
        "Client connections at once; beyond it one of the peer that holds the most is closed, or 503"),
    setting("TRUSTED_PROXIES", Scope::Service, |c, text| set_and_show(&mut c.limits.trusted_proxies, text, str::parse, TrustedProxies::to_string),
        "Addresses and networks (and `unix`) whose `X-Forwarded-For` is believed"),
    setting("HEAD_TIMEOUT", Scope::Service, |c, text| set_seconds(&mut c.limits.head_timeout, text, 0.001),
        "Seconds for a request's head, from its first byte"),
    setting("BODY_TIMEOUT", Scope::Service, |c, text| set_seconds(&mut c.limits.body_timeout, text, 0.001),
        "Seconds for a request's body"),
    setting("IDLE_TIMEOUT", Scope::Service, |c, text| set_seconds(&mut c.limits.idle_timeout, text, 0.001),
        "Seconds that an idle connection is kept"),
    setting("WRITE_TIMEOUT", Scope::Service, |c, text| set_seconds(&mut c.limits.write_timeout, text, 0.001),
        "Seconds for the client to take its answer"),
    setting("REQUEST_TIMEOUT", Scope::Service, |c, text| set_seconds(&mut c.limits.request_timeout, text, 0.001),
        "Seconds from a whole request to its answer, else 503"),
    setting("DRAIN_DELAY", Scope::Service, |c, text| set_seconds(&mut c.limits.drain_delay, text, 0.0),
        "Seconds between the announcement of a stop at `/readyz` and the stop itself"),
    setting("STOP_TIMEOUT", Scope::Service, |c, text| set_seconds(&mut c.limits.stop_timeout, text, 0.001),
        "Seconds that a stop waits for requests in flight"),
    setting("API_TOKEN", Scope::Service, |c, text| set_tokens(&mut c.api_token, text),
        "Bearer token that `/users` and `/metrics` ask for; several are separated by white space"),
    setting("API_TOKEN_FILE", Scope::Machine, skip_field, "File that holds the token"),
    setting("API_TOKEN_READ", Scope::Service, |c, text| set_tokens(&mut c.api_token_read, text),
        "Token that allows `GET` and `HEAD` alone"),
    setting("API_TOKEN_READ_FILE", Scope::Machine, skip_field, "File that holds that token"),
    setting("API_TOKEN_LOGIN", Scope::Service, |c, text| set_tokens(&mut c.api_token_login, text),
        "Token that allows `POST /users/authenticate` alone"),
    setting("API_TOKEN_LOGIN_FILE", Scope::Machine, skip_field, "File that holds that token"),
    setting("AUTH_ATTEMPTS", Scope::Service, |c, text| set_whole_number(&mut c.auth_attempts, text, 0..=1_000_000),
        "Wrong passwords a minute from one peer for one e-mail address; 0 for any number"),
    setting("ALLOWED_HOSTS", Scope::Service, |c, text| set_list(&mut c.allowed_hosts, text, parse_host_name),
        "Further host names that requests without a token may name; `*` for any"),
    setting("ALLOWED_ORIGINS", Scope::Service, |c, text| set_list(&mut c.limits.allowed_origins, text, parse_origin),
        "Origins whose pages may use the service from a browser (CORS); `*` for any, only with a token"),
    setting("UI", Scope::Service, |c, text| set_word(&mut c.ui, text, &["auto", "true", "false"]),
        "The page for the browser, `/ui`: `true`, `false`, or `auto`: on loopback alone, without `TRUSTED_PROXIES`"),
    setting("MIGRATIONS_DIR", Scope::Machine, |c, text| set_path(&mut c.migrations_dir, text),
        "Directory of migrations instead of the built-in ones"),
    setting("POSTGRES_BIN", Scope::Database, skip_field,
        "Directory of PostgreSQL's programs for `--embedded`; unset: those that are found"),
    setting("LOG_FORMAT", Scope::Machine, |_, text| set_word(&mut "text".to_owned(), text, &["text", "json"]),
        "`text`, or `json`: one object a line"),
    setting("LOG_LEVEL", Scope::Machine, |_, text| set_word(&mut "info".to_owned(), text, &["info", "off", "error", "warn", "debug", "trace"]),
        "`off`, `error`, `warn`, `info`, `debug` or `trace`"),
];

/// Returns the text of a variable that has no field: only the command `userd` uses such a variable, or it names a file
/// that holds the value of another variable.
fn skip_field(_: &mut Config, text: Option<&str>) -> ShownValue {
    set_string(&mut String::new(), text)
}

impl Setting {
    /// Returns the default of the setting, as a text that the variable could have. `None` if it has no default.
    pub fn default(&self) -> Option<String> {
        let shown = (self.set)(&mut Config::cli_defaults(), None).ok()??;
        Some(shown).filter(|text| !text.is_empty())
    }

    /// Reads the variable into its field of `config`, if the variable is set. Returns the value that the field has
    /// then.
    fn read_into(&self, config: &mut Config, lookup: &Lookup) -> Result<ShownSetting, ConfigError> {
        let Setting { variable, set, .. } = *self;
        if set(config, None) == NO_EFFECT {
            return Ok(ShownSetting { variable, value: "-".to_owned(), source: "no effect" });
        }
        let (source, text) =
            read_variable(variable, lookup)?.map_or(("default", None), |(name, text)| (name, Some(text)));
        let shown = set(config, text.as_deref()).map_err(|why| refuse_text(source, text.as_deref(), why))?;
        let value = shown.filter(|text| !text.is_empty()).unwrap_or_else(|| "-".to_owned());
        Ok(ShownSetting { variable, value, source: if source == variable { "environment" } else { source } })
    }
}

/// A setting and the value that is in force, as `userd config` prints them.
#[derive(Debug, PartialEq, Eq)]
pub struct ShownSetting {
    /// The name of the environment variable.
    pub variable: &'static str,
    /// The value as text: `***` for a secret, `-` for no value.
    pub value: String,
    /// The source of the value: `environment`, `default`, or the name of the variable `…_FILE`; `no effect` for a
    /// setting that has none.
    pub source: &'static str,
}

/// A function that returns the value of an environment variable by its name.
type Lookup<'a> = dyn Fn(&str) -> Option<OsString> + 'a;

impl Config {
    /// Reads the settings from environment variables, which `lookup` returns by their names. A variable that is empty
    /// counts as unset.
    ///
    /// Blocks only to read the files that the `…_FILE` variables name.
    ///
    /// # Errors
    /// Names the first variable that is wrong, in the order of `userd --help`. The error's text ends with the errors of
    /// all further variables that are wrong.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Config, ConfigError> {
        Config::cli_defaults().with_vars(lookup)
    }

    /// Reads environment variables as [`Config::from_vars`] does. If a variable is not set, its field keeps its value.
    pub(crate) fn with_vars(
        mut self,
        lookup: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Config, ConfigError> {
        let errors = SETTINGS.iter().filter_map(|setting| setting.read_into(&mut self, &lookup).err());
        let all = errors.reduce(|all, one| ConfigError { problem: format!("{}; {one}", all.problem), ..all });
        let is_url = matches!(self.database, Database::Url(_));
        let file = lookup(if is_url { "DATABASE_URL_FILE" } else { "DB_PASS_FILE" });
        self.db_password_file = file.filter(|path| !path.is_empty()).map(PathBuf::from);
        all.map_or(Ok(self), Err)
    }

    /// Returns each setting with the value that is in force, in the order of `userd --help`. `lookup` must be the
    /// function that was passed to [`Config::from_vars`].
    pub fn in_force(&mut self, lookup: impl Fn(&str) -> Option<OsString>) -> Vec<ShownSetting> {
        SETTINGS.iter().filter_map(|setting| setting.read_into(self, &lookup).ok()).collect()
    }
}

/// Returns the known word that is most like a misspelt word, for a hint. A short word may differ in one letter, a
/// longer one in two.
pub fn find_similar<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let rated = known.into_iter().map(|known| (strsim::osa_distance(word, known), known));
    let near = rated.filter(|(steps, known)| *steps <= if known.len() > 5 { 2 } else { 1 });
    near.min_by_key(|(steps, _)| *steps).map(|(_, known)| known)
}

/// Checks that each field is within the bounds of its variable. The error names the first variable that is wrong.
pub(super) fn validate_bounds(config: &Config) -> Result<(), ConfigError> {
    let mut config = config.clone();
    let wrong =
        |setting: &Setting| (setting.set)(&mut config, None).err().map(|line| refuse(setting.variable, line));
    SETTINGS.iter().find_map(wrong).map_or(Ok(()), Err)
}

/// Returns the name and the text of a variable, or `None` if it is unset. If the variable `…_FILE` is set instead,
/// returns the name of the variable `…_FILE` and the text in the file. The name says where the text comes from.
fn read_variable(name: &'static str, lookup: &Lookup) -> Result<Option<(&'static str, String)>, ConfigError> {
    let read = |variable: &'static str| match lookup(variable).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(text)) => Ok(Some(text).filter(|text| !text.is_empty())),
        Some(Err(_)) => Err(refuse(variable, "is not UTF-8")),
    };
    let value = read(name)?.map(|text| (name, text));
    let is_file = |setting: &&Setting| setting.variable.strip_suffix("_FILE") == Some(name);
    let Some(Setting { variable: file, .. }) = SETTINGS.iter().find(is_file) else { return Ok(value) };
    let Some(path) = read(file)? else { return Ok(value) };
    if value.is_some() {
        return Err(refuse(file, format!("cannot be set together with {name}")));
    }
    let text = secret::read_secret(Path::new(&path)).map_err(|line| refuse_text(file, Some(&path), line))?;
    Ok(Some((file, text)))
}

/// Returns the error for a variable. If the variable's text is a connection string, the error does not repeat it,
/// because a connection string can have a password.
fn refuse_text(variable: &'static str, text: Option<&str>, problem: String) -> ConfigError {
    let is_hidden = text.is_some_and(is_connection_string);
    refuse(variable, if is_hidden { "is a connection string: set DATABASE_URL to it" } else { &problem })
}

/// Returns true if a text looks like a connection string. No error may repeat such a text, because it can have a
/// password.
pub fn is_connection_string(text: &str) -> bool {
    let (scheme, rest) = text.split_once("://").unwrap_or_default();
    let has_user = rest.split([',', ' ']).next().is_some_and(|address| address.contains('@'));
    has_user || scheme.contains("postgres") || text.contains("password=") && text.contains("host=")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_passes_its_own_check() {
        for setting in SETTINGS {
            let default = setting.default();
            let lookup =
                |name: &str| default.clone().filter(|_| name == setting.variable).map(OsString::from);
            let config = Config::from_vars(lookup).unwrap();
            let before = format!("{:?}", Config::cli_defaults());
            assert_eq!(format!("{config:?}"), before, "{}={default:?}", setting.variable);
        }
        validate_bounds(&Config::default()).unwrap();
    }

    #[test]
    fn every_word_is_a_value_of_its_field() {
        for setting in SETTINGS {
            let refusal = (setting.set)(&mut Config::default(), Some("none")).err();
            let words = refusal
                .as_ref()
                .and_then(|line| line.strip_prefix("must be one of ")?.split(", not ").next());
            for value in words.iter().flat_map(|words| words.split(", ")) {
                let variable = setting.variable;
                let lookup = |name: &str| (name == variable).then(|| OsString::from(value));
                let rows = Config::from_vars(lookup).unwrap().in_force(lookup);
                let row = rows.into_iter().find(|row| row.variable == variable);
                assert_eq!(
                    row,
                    Some(ShownSetting { variable, value: value.to_owned(), source: "environment" })
                );
            }
        }
    }

    #[test]
    fn a_file_is_for_a_variable_of_the_table() {
        for setting in SETTINGS {
            let same = SETTINGS.iter().filter(|other| other.variable == setting.variable);
            assert_eq!(same.count(), 1, "{}", setting.variable);
            if let Some(variable) = setting.variable.strip_suffix("_FILE") {
                assert!(SETTINGS.iter().any(|other| other.variable == variable), "{variable}");
            }
        }
    }
}
