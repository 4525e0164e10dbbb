//! The table of variables, and how the text of each is read.

use super::{ConfigError, Secret, TrustedProxies};
use std::{ffi::OsString, fmt, ops::RangeInclusive, time::Duration};

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
        "Client connections at once; beyond it the peer that holds the most makes room, or 503",
    ),
    (
        "TRUSTED_PROXIES",
        "",
        "Addresses and networks (and `unix`) whose `X-Forwarded-For` or `Forwarded` is believed",
    ),
    ("HEAD_TIMEOUT", "5", "Seconds for a request's head, from its first byte"),
    ("BODY_TIMEOUT", "15", "Seconds for a request's body"),
    ("IDLE_TIMEOUT", "60", "Seconds that an idle connection is kept"),
    ("WRITE_TIMEOUT", "15", "Seconds for the client to take its answer"),
    ("REQUEST_TIMEOUT", "10", "Seconds from a whole request to its answer, else 503"),
    ("STOP_TIMEOUT", "10", "Seconds that a stop waits for what is in work"),
    ("API_TOKEN", "", "Bearer token that /users asks for"),
    ("API_TOKEN_FILE", "", "File that holds the token"),
    ("ALLOWED_HOSTS", "", "Further host names under which browsers may call without a token"),
    ("MIGRATIONS_DIR", "", "Directory of migrations instead of the built-in ones"),
    ("LOG_LEVEL", "info", "`off`, `error`, `warn`, `info`, `debug` or `trace`"),
];

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
pub(super) const SECONDS: RangeInclusive<f64> = 0.001..=86_400.0;

pub(super) fn bounds(variable: &str) -> RangeInclusive<u64> {
    match variable {
        "PORT" => 0..=65_535,
        "DB_PORT" => 1..=65_535,
        "MAX_PER_PAGE" => 1..=1_000_000,
        "MAX_CONNECTIONS" => 1..=1 << 20,
        "MAX_BODY_BYTES" => 1..=1 << 30,
        _ => 1..=1000,
    }
}

pub(super) fn no_number(variable: &'static str, found: impl fmt::Debug) -> ConfigError {
    let (min, max) = bounds(variable).into_inner();
    problem(variable, format!("must be a whole number from {min} to {max}, not {found:?}"))
}

pub(super) fn no_seconds(variable: &'static str, found: impl fmt::Debug) -> ConfigError {
    let (min, max) = SECONDS.into_inner();
    problem(variable, format!("must be a number of seconds from {min} to {max}, not {found:?}"))
}

pub(super) struct Vars<'a> {
    pub lookup: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Vars<'_> {
    pub fn text(&self, variable: &'static str) -> Result<Option<String>, ConfigError> {
        debug_assert!(VARIABLES.iter().any(|(name, _, _)| *name == variable));
        match (self.lookup)(variable).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) if text.is_empty() => Ok(None),
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(_)) => Err(problem(variable, "is not UTF-8")),
        }
    }

    pub fn text_or_default(&self, variable: &'static str) -> Result<String, ConfigError> {
        let default = || {
            let mut all = VARIABLES.iter();
            let found = all.find(|(name, _, _)| *name == variable);
            found.expect("every variable is in the table").1.to_owned()
        };
        Ok(self.text(variable)?.unwrap_or_else(default))
    }

    pub fn number(&self, variable: &'static str) -> Result<u64, ConfigError> {
        let text = self.text_or_default(variable)?;
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse() {
            Ok(number) if digits && bounds(variable).contains(&number) => Ok(number),
            _ => Err(no_number(variable, &text)),
        }
    }

    pub fn seconds(&self, variable: &'static str) -> Result<Duration, ConfigError> {
        let text = self.text_or_default(variable)?;
        let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        match text.parse::<f64>() {
            Ok(seconds) if plain && SECONDS.contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
            _ => Err(no_seconds(variable, &text)),
        }
    }

    pub fn choice<T: Copy>(&self, variable: &'static str, choices: &[(&str, T)]) -> Result<T, ConfigError> {
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

    pub fn trusted_proxies(&self) -> Result<TrustedProxies, ConfigError> {
        const VARIABLE: &str = "TRUSTED_PROXIES";
        let text = self.text(VARIABLE)?.unwrap_or_default();
        let wrong = |entry| problem(VARIABLE, format!("{entry:?} is not an address, a network or `unix`"));
        text.parse().map_err(wrong)
    }

    pub fn allowed_hosts(&self) -> Result<Vec<String>, ConfigError> {
        const VARIABLE: &str = "ALLOWED_HOSTS";
        let text = self.text(VARIABLE)?.unwrap_or_default();
        let names = text.split([',', ' ']).filter(|name| !name.is_empty());
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let checked = names.map(|name| match name.bytes().all(is_name) {
            true => Ok(name.to_owned()),
            false => Err(problem(VARIABLE, format!("{name:?} is not a host name"))),
        });
        checked.collect()
    }

    pub fn api_token(&self) -> Result<Option<Secret>, ConfigError> {
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
