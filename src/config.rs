//! Every setting: its variable's name, default, meaning and check.
//!
//! Knows nothing of the other rooms and reads no environment: the command passes a look-up in.

use std::{
    ffi::OsString, fmt, ops::RangeInclusive, os::fd::OwnedFd, path::PathBuf, sync::Arc, time::Duration,
};

/// The settings of one server. `Config::default()` is the contract's defaults on loopback and a free port,
/// which suits embedding; [`Config::from_vars`] reads the variables that the command is set by.
#[derive(Debug, Clone)]
pub struct Config {
    /// Which database.
    pub database: Database,
    /// Where TLS to the database finds its certificate authorities (PEM); `None`: the system's.
    pub db_ssl_ca: Option<PathBuf>,
    /// The most connections to the database.
    pub db_pool_size: u32,
    /// How long start-up waits for the database.
    pub db_connect_timeout: Duration,
    /// How long a request waits for a free connection.
    pub db_acquire_timeout: Duration,
    /// Whether sessions keep prepared statements and settings; a pooler in transaction mode lends them out.
    pub db_prepared: bool,
    /// The operating system's name of the user, which a `DATABASE_URL` without a user means.
    pub os_user: Option<String>,
    /// An address, a host name, or `unix:/path`.
    pub host: String,
    /// The TCP port; 0 takes a free one.
    pub port: u16,
    /// A socket that listens already, as a supervisor passes one, instead of `host` and `port`.
    pub socket: Option<Arc<OwnedFd>>,
    /// `NODE_ENV=production`: relations that were not loaded are loaded on access, not refused.
    pub production: bool,
    /// Threads that answer requests.
    pub workers: usize,
    /// Which create schema.
    pub schema: Schema,
    /// When bodies are checked, and how a violation is answered.
    pub validation: Validation,
    /// The largest `perPage`.
    pub max_per_page: u32,
    /// A directory of migrations instead of the built-in ones.
    pub migrations_dir: Option<PathBuf>,
    /// The bearer token that `/users` asks for.
    pub api_token: Option<Secret>,
    /// What clients may use up.
    pub limits: Limits,
}

/// What one client, and all of them together, may use up. Beyond it the request is refused.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Client connections at once.
    pub max_connections: usize,
    /// Bytes of a request line and its header fields.
    pub max_head_bytes: usize,
    /// Bytes of a request line.
    pub max_request_line_bytes: usize,
    /// Header fields of a request.
    pub max_header_fields: usize,
    /// Bytes of a body.
    pub max_body_bytes: usize,
    /// From the first byte of a head to its end.
    pub head_timeout: Duration,
    /// From the end of a head to the end of its body.
    pub body_timeout: Duration,
    /// A connection without a request.
    pub idle_timeout: Duration,
    /// An answer that the client takes.
    pub write_timeout: Duration,
    /// A request, from complete to answered.
    pub request_timeout: Duration,
    /// A stop, until everything in work is answered.
    pub stop_timeout: Duration,
}

/// Which database to use.
#[derive(Clone)]
pub enum Database {
    /// What libpq accepts: a URL or `keyword=value` pairs.
    Url(Secret),
    /// The parts one by one.
    Parts {
        /// Host name, address, or the directory of a Unix socket.
        host: String,
        /// TCP port, or the number in the Unix socket's name.
        port: u16,
        /// Database name.
        name: String,
        /// Role.
        user: String,
        /// Its password; empty for none.
        password: Secret,
        /// TLS, with certificate and host name verified.
        ssl: bool,
    },
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Database::Url(_) => f.write_str("Url(…)"),
            Database::Parts { host, port, name, user, ssl, .. } => {
                write!(f, "Parts {{ {user}@{host}:{port}/{name}, ssl: {ssl} }}")
            }
        }
    }
}

/// A text that is never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself, for the one place that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Secret {
        Secret(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Secret {
        Secret(text.to_owned())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// The create schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schema {
    /// `name` and `email`; `password` where it is given.
    Basic,
    /// `name` of at least one character, `email`, and `password`.
    Strict,
}

/// The way bodies are validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validation {
    /// Before the handler: 400.
    Declarative,
    /// Inside the handler: 422.
    Parser,
}

/// A variable that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Its name.
    pub variable: &'static str,
    /// What is wrong with it; never a secret's text.
    pub problem: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.variable, self.problem)
    }
}

impl std::error::Error for ConfigError {}

/// Name, default and meaning of every variable, in the order of `userd --help` and the README.
pub const VARIABLES: &[(&str, &str, &str)] = &[
    ("DATABASE_URL", "", "Connection string as libpq takes it; used instead of the seven below"),
    ("DB_HOST", "localhost", "Database host, or the directory of a Unix socket"),
    ("DB_PORT", "5432", "Database port"),
    ("DB_NAME", "myapp", "Database name"),
    ("DB_USER", "postgres", "Database user"),
    ("DB_PASS", "", "Database password"),
    (
        "DB_SSL",
        "",
        "TLS to the database, on only when exactly `true`; certificate and host name are verified",
    ),
    ("DB_SSL_CA", "", "PEM file of the authorities that DB_SSL trusts instead of the system's"),
    ("DB_POOL_SIZE", "8", "Most connections to the database"),
    ("DB_CONNECT_TIMEOUT", "10", "Seconds that start-up waits for the database"),
    ("DB_ACQUIRE_TIMEOUT", "3", "Seconds that a request waits for a free connection"),
    ("DB_PREPARED", "true", "`false` behind a pooler in transaction mode: sessions hold no state"),
    ("HOST", "0.0.0.0", "Address to listen on; `unix:/path` for a Unix socket"),
    ("PORT", "3000", "Port to listen on; 0 takes a free one and prints it"),
    ("NODE_ENV", "", "`production` turns off lazy-loading prevention"),
    ("WORKERS", "8", "Threads that answer requests"),
    ("SCHEMA", "basic", "Create schema: `basic`, or `strict` (password required)"),
    ("VALIDATION", "declarative", "`declarative` (invalid bodies get 400) or `parser` (422)"),
    ("MAX_PER_PAGE", "1000", "Largest `perPage`; the default, 15, is no larger"),
    ("MAX_BODY_BYTES", "65536", "Largest body, in bytes"),
    (
        "MAX_CONNECTIONS",
        "1024",
        "Client connections at once; beyond it the oldest idle one makes room, or 503",
    ),
    ("HEAD_TIMEOUT", "5", "Seconds for a request's head, from its first byte"),
    ("BODY_TIMEOUT", "15", "Seconds for a request's body"),
    ("IDLE_TIMEOUT", "60", "Seconds that an idle connection is kept"),
    ("WRITE_TIMEOUT", "15", "Seconds for the client to take its answer"),
    ("REQUEST_TIMEOUT", "10", "Seconds from a whole request to its answer, else 503"),
    ("STOP_TIMEOUT", "10", "Seconds that a stop waits for what is in work"),
    ("API_TOKEN", "", "Bearer token that /users asks for"),
    ("API_TOKEN_FILE", "", "File that holds the token"),
    ("MIGRATIONS_DIR", "", "Directory of migrations instead of the built-in ones"),
    ("LOG_LEVEL", "info", "`off`, `error`, `warn`, `info`, `debug` or `trace`"),
];

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_connections: 1024,
            max_head_bytes: 16 * 1024,
            max_request_line_bytes: 8 * 1024,
            max_header_fields: 100,
            max_body_bytes: 64 * 1024,
            head_timeout: Duration::from_secs(5),
            body_timeout: Duration::from_secs(15),
            idle_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(15),
            request_timeout: Duration::from_secs(10),
            stop_timeout: Duration::from_secs(10),
        }
    }
}

impl Default for Config {
    fn default() -> Config {
        let variables = Config::from_vars(|_| None).expect("the defaults pass their own checks");
        Config { host: "127.0.0.1".to_owned(), port: 0, ..variables }
    }
}

impl Config {
    /// Whether the numbers and durations are within the bounds that their variables have. An error names the first
    /// that is not, by its variable.
    pub fn check(&self) -> Result<(), ConfigError> {
        let numbers = [
            ("DB_POOL_SIZE", u64::from(self.db_pool_size)),
            ("WORKERS", self.workers as u64),
            ("MAX_PER_PAGE", self.max_per_page.into()),
            ("MAX_CONNECTIONS", self.limits.max_connections as u64),
            ("MAX_BODY_BYTES", self.limits.max_body_bytes as u64),
        ];
        for (variable, number) in numbers {
            if !bounds(variable).contains(&number) {
                return Err(no_number(variable, number));
            }
        }
        let times = [
            ("DB_CONNECT_TIMEOUT", self.db_connect_timeout),
            ("DB_ACQUIRE_TIMEOUT", self.db_acquire_timeout),
            ("HEAD_TIMEOUT", self.limits.head_timeout),
            ("BODY_TIMEOUT", self.limits.body_timeout),
            ("IDLE_TIMEOUT", self.limits.idle_timeout),
            ("WRITE_TIMEOUT", self.limits.write_timeout),
            ("REQUEST_TIMEOUT", self.limits.request_timeout),
            ("STOP_TIMEOUT", self.limits.stop_timeout),
        ];
        for (variable, time) in times {
            if !SECONDS.contains(&time.as_secs_f64()) {
                return Err(no_seconds(variable, time.as_secs_f64()));
            }
        }
        Ok(())
    }

    /// Reads every variable but `LOG_LEVEL` (see [`log_level`]). One that is empty counts as unset.
    ///
    /// Errors name the variable. Blocks only to read the file that `API_TOKEN_FILE` names.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Config, ConfigError> {
        let vars = Vars { lookup: &lookup };
        let database = match vars.text("DATABASE_URL")? {
            Some(url) => Database::Url(url.into()),
            None => Database::Parts {
                host: vars.text_or_default("DB_HOST")?,
                port: vars.number("DB_PORT")? as u16,
                name: vars.text_or_default("DB_NAME")?,
                user: vars.text_or_default("DB_USER")?,
                password: vars.text_or_default("DB_PASS")?.into(),
                ssl: vars.text("DB_SSL")?.as_deref() == Some("true"),
            },
        };
        let limits = Limits {
            max_connections: vars.number("MAX_CONNECTIONS")? as usize,
            max_body_bytes: vars.number("MAX_BODY_BYTES")? as usize,
            head_timeout: vars.seconds("HEAD_TIMEOUT")?,
            body_timeout: vars.seconds("BODY_TIMEOUT")?,
            idle_timeout: vars.seconds("IDLE_TIMEOUT")?,
            write_timeout: vars.seconds("WRITE_TIMEOUT")?,
            request_timeout: vars.seconds("REQUEST_TIMEOUT")?,
            stop_timeout: vars.seconds("STOP_TIMEOUT")?,
            ..Limits::default()
        };
        Ok(Config {
            database,
            db_ssl_ca: vars.text("DB_SSL_CA")?.map(PathBuf::from),
            db_pool_size: vars.number("DB_POOL_SIZE")? as u32,
            db_connect_timeout: vars.seconds("DB_CONNECT_TIMEOUT")?,
            db_acquire_timeout: vars.seconds("DB_ACQUIRE_TIMEOUT")?,
            db_prepared: vars.choice("DB_PREPARED", &[("true", true), ("false", false)])?,
            os_user: None,
            host: vars.text_or_default("HOST")?,
            port: vars.number("PORT")? as u16,
            socket: None,
            production: vars.text("NODE_ENV")?.as_deref() == Some("production"),
            workers: vars.number("WORKERS")? as usize,
            schema: vars.choice("SCHEMA", &[("basic", Schema::Basic), ("strict", Schema::Strict)])?,
            validation: vars.choice(
                "VALIDATION",
                &[("declarative", Validation::Declarative), ("parser", Validation::Parser)],
            )?,
            max_per_page: vars.number("MAX_PER_PAGE")? as u32,
            migrations_dir: vars.text("MIGRATIONS_DIR")?.map(PathBuf::from),
            api_token: vars.api_token()?,
            limits,
        })
    }
}

/// `LOG_LEVEL`; the library never logs by itself, so this is the command's alone.
pub fn log_level(lookup: impl Fn(&str) -> Option<OsString>) -> Result<log::LevelFilter, ConfigError> {
    let vars = Vars { lookup: &lookup };
    vars.choice(
        "LOG_LEVEL",
        &[
            ("off", log::LevelFilter::Off),
            ("error", log::LevelFilter::Error),
            ("warn", log::LevelFilter::Warn),
            ("info", log::LevelFilter::Info),
            ("debug", log::LevelFilter::Debug),
            ("trace", log::LevelFilter::Trace),
        ],
    )
}

/// Up to a day; beyond it a deadline is none, and sums with "now" stay far from overflow.
const SECONDS: RangeInclusive<f64> = 0.001..=86_400.0;

fn bounds(variable: &str) -> RangeInclusive<u64> {
    match variable {
        "PORT" => 0..=65_535,
        "DB_PORT" => 1..=65_535,
        "MAX_PER_PAGE" => 1..=1_000_000,
        "MAX_CONNECTIONS" => 1..=1 << 20,
        "MAX_BODY_BYTES" => 1..=1 << 30,
        _ => 1..=1000,
    }
}

fn no_number(variable: &'static str, found: impl fmt::Debug) -> ConfigError {
    let (min, max) = bounds(variable).into_inner();
    problem(variable, format!("must be a whole number from {min} to {max}, not {found:?}"))
}

fn no_seconds(variable: &'static str, found: impl fmt::Debug) -> ConfigError {
    let (min, max) = SECONDS.into_inner();
    problem(variable, format!("must be a number of seconds from {min} to {max}, not {found:?}"))
}

struct Vars<'a> {
    lookup: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Vars<'_> {
    fn text(&self, variable: &'static str) -> Result<Option<String>, ConfigError> {
        debug_assert!(VARIABLES.iter().any(|(name, _, _)| *name == variable));
        match (self.lookup)(variable).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) if text.is_empty() => Ok(None),
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(_)) => Err(problem(variable, "is not UTF-8")),
        }
    }

    fn text_or_default(&self, variable: &'static str) -> Result<String, ConfigError> {
        let default = || {
            let mut all = VARIABLES.iter();
            let found = all.find(|(name, _, _)| *name == variable);
            found.expect("every variable is in the table").1.to_owned()
        };
        Ok(self.text(variable)?.unwrap_or_else(default))
    }

    fn number(&self, variable: &'static str) -> Result<u64, ConfigError> {
        let text = self.text_or_default(variable)?;
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse() {
            Ok(number) if digits && bounds(variable).contains(&number) => Ok(number),
            _ => Err(no_number(variable, &text)),
        }
    }

    fn seconds(&self, variable: &'static str) -> Result<Duration, ConfigError> {
        let text = self.text_or_default(variable)?;
        let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        match text.parse::<f64>() {
            Ok(seconds) if plain && SECONDS.contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
            _ => Err(no_seconds(variable, &text)),
        }
    }

    fn choice<T: Copy>(&self, variable: &'static str, choices: &[(&str, T)]) -> Result<T, ConfigError> {
        let text = self.text_or_default(variable)?;
        match choices.iter().find(|(name, _)| *name == text) {
            Some((_, value)) => Ok(*value),
            None => {
                let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
                let names = names.join(", ");
                Err(problem(variable, format!("must be one of {names}, not {text:?}")))
            }
        }
    }

    fn api_token(&self) -> Result<Option<Secret>, ConfigError> {
        const FILE: &str = "API_TOKEN_FILE";
        let (variable, token) = match (self.text("API_TOKEN")?, self.text(FILE)?) {
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => {
                return Err(problem(FILE, "cannot be set together with API_TOKEN"));
            }
            (Some(token), None) => ("API_TOKEN", token),
            (None, Some(path)) => {
                let text = std::fs::read_to_string(&path)
                    .map_err(|error| problem(FILE, format!("cannot read {path:?}: {error}")))?;
                (FILE, text.trim_end_matches(['\r', '\n']).to_owned())
            }
        };
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(problem(variable, "must be printable ASCII without spaces"));
        }
        Ok(Some(token.into()))
    }
}

fn problem(variable: &'static str, problem: impl Into<String>) -> ConfigError {
    ConfigError { variable, problem: problem.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_vars(|name| {
            let mut pairs = pairs.iter();
            pairs.find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_defaults_of_the_contract() {
        let config = from(&[]).unwrap();
        let Database::Parts { host, port, name, user, password, ssl } = config.database else {
            panic!("no URL was given");
        };
        assert_eq!((host.as_str(), port, name.as_str()), ("localhost", 5432, "myapp"));
        assert_eq!((user.as_str(), password.expose(), ssl), ("postgres", "", false));
        assert_eq!((config.host.as_str(), config.port), ("0.0.0.0", 3000));
        assert!(!config.production);
    }

    #[test]
    fn limits_agree_with_the_table() {
        let (a, b) = (from(&[]).unwrap().limits, Limits::default());
        assert_eq!(format!("{a:?}"), format!("{b:?}"));
    }

    #[test]
    fn tls_is_on_for_exactly_true() {
        for (text, expected) in [("true", true), ("TRUE", false), ("1", false), (" true", false)] {
            let Database::Parts { ssl, .. } = from(&[("DB_SSL", text)]).unwrap().database else {
                panic!("no URL was given");
            };
            assert_eq!(ssl, expected, "{text}");
        }
    }

    #[test]
    fn a_url_goes_before_the_parts_and_is_never_shown() {
        let config = from(&[
            ("DATABASE_URL", "postgres://u:hunter2@h/d"),
            ("DB_PORT", "abc"),
            ("API_TOKEN", "hunter2"),
        ]);
        let config = config.unwrap();
        assert!(matches!(&config.database, Database::Url(url) if url.expose().contains("hunter2")));
        assert!(!format!("{config:?}").contains("hunter2"));
    }

    #[test]
    fn what_is_wrong_is_refused_by_name() {
        let rows = [
            ("PORT", "abc"),
            ("PORT", "65536"),
            ("PORT", "-1"),
            ("PORT", "+1"),
            ("PORT", "3e3"),
            ("PORT", " 3000"),
            ("DB_PORT", "0"),
            ("DB_PORT", "five"),
            ("WORKERS", "0"),
            ("WORKERS", "1.5"),
            ("SCHEMA", "loose"),
            ("VALIDATION", "both"),
            ("REQUEST_TIMEOUT", "soon"),
            ("REQUEST_TIMEOUT", "-1"),
            ("REQUEST_TIMEOUT", "inf"),
            ("REQUEST_TIMEOUT", "0"),
            ("MAX_PER_PAGE", "0"),
            ("API_TOKEN", "a b"),
            ("API_TOKEN_FILE", "/nowhere/at/all"),
        ];
        for (variable, value) in rows {
            let error = from(&[(variable, value)]).unwrap_err();
            assert_eq!(error.variable, variable, "{variable}={value}");
        }
    }

    #[test]
    fn empty_is_unset() {
        let config = from(&[("PORT", ""), ("DATABASE_URL", ""), ("HOST", "")]).unwrap();
        assert_eq!((config.host.as_str(), config.port), ("0.0.0.0", 3000));
        assert!(matches!(config.database, Database::Parts { .. }));
    }

    #[test]
    fn log_levels() {
        assert_eq!(log_level(|_| None), Ok(log::LevelFilter::Info));
        assert_eq!(log_level(|_| Some("loud".into())).unwrap_err().variable, "LOG_LEVEL");
    }
}
