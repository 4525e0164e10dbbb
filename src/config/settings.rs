//! The table of settings: variable, field, bounds and help. Defaults are in [`Config`] and
//! `Config::of_the_command`.
//!
//! To add a setting: a field with its default, a row here, and the same row in docs/configuration.md. Reading the
//! variable, its check, `userd --help` and the test that compares that page follow from the row.

use super::{
    Config, ConfigError, Database,
    value::{Bounds, Value, problem, without_line_end},
};
use Bounds::{Any, Token, Whole, Words};
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

/// One variable that the command reads. The table is [`SETTINGS`].
#[derive(Debug)]
pub struct Setting {
    /// The variable's name.
    pub variable: &'static str,
    /// The meaning of the variable, in a line.
    pub help: &'static str,
    bounds: Bounds,
    /// The field that the variable sets. `None`: the command alone reads it, or it names the file with another one's value.
    field: Option<Field>,
}

/// A time up to a day: the sum of a deadline and the present time stays far from overflow.
const SECONDS: Bounds = Bounds::Seconds(0.001, 86_400.0);

/// A field of a configuration; `None` if the configuration has no such field.
type Field = fn(&mut Config) -> Option<&mut dyn Value>;

const fn field(variable: &'static str, field: Field, bounds: Bounds, help: &'static str) -> Setting {
    Setting { variable, help, bounds, field: Some(field) }
}

/// A variable without a field. If it may have only some words, the first one is the default.
const fn command(variable: &'static str, bounds: Bounds, help: &'static str) -> Setting {
    Setting { variable, help, bounds, field: None }
}

/// A field of [`Config`].
macro_rules! at {
    ($($field:ident).+) => {
        |config| Some(&mut config.$($field).+)
    };
}

/// A field of [`Database::Parts`]: there is none if a connection string was given.
macro_rules! part {
    ($field:ident) => {
        |config| match &mut config.database {
            Database::Parts { $field, .. } => Some($field),
            Database::Url(_) => None,
        }
    };
}

/// Every variable, in the order of `userd --help` and of docs/configuration.md. A row applies after those above it.
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = &[
    field("DATABASE_URL", |config| Some(&mut config.database), Any,
        "Connection string as libpq takes it; used instead of `DB_HOST` to `DB_SSL_CA`"),
    command("DATABASE_URL_FILE", Any, "File that holds the connection string"),
    field("DB_HOST", part!(host), Any, "Database host, or the directory of a Unix socket"),
    field("DB_PORT", part!(port), Whole(1, 65_535), "Database port"),
    field("DB_NAME", part!(name), Any, "Database name"),
    field("DB_USER", part!(user), Any, "Database user"),
    field("DB_PASS", part!(password), Any, "Database password"),
    command("DB_PASS_FILE", Any, "File that holds the database password"),
    field("DB_SSL", part!(ssl), Bounds::Exactly("true"),
        "TLS to the database, on only when exactly `true`; certificate and host name are verified"),
    field("DB_SSL_CA", at!(db_ssl_ca), Any,
        "PEM file of the authorities that `DB_SSL` trusts instead of the system's"),
    field("DB_POOL_SIZE", at!(db_pool_size), Whole(1, 1000), "Most connections to the database"),
    field("DB_CONNECT_TIMEOUT", at!(db_connect_timeout), SECONDS, "Seconds that start-up waits for the database"),
    field("DB_ACQUIRE_TIMEOUT", at!(db_acquire_timeout), SECONDS,
        "Seconds that a request waits for a free connection"),
    field("DB_PREPARED", at!(db_prepared), Words(&["true", "false"]),
        "`false` behind a pooler in transaction mode: sessions hold no state; unset, a start looks for one"),
    field("PGPASSWORD", at!(pg_password), Any, "Database password if the settings above have none"),
    field("HOST", at!(host), Any, "Address to listen on, 127.0.0.1 with --embedded; `unix:/path` for a Unix socket"),
    field("PORT", |config| (!config.host.starts_with("unix:")).then_some(&mut config.port), Whole(0, 65_535), "Port to listen on; 0 takes a free one and prints it"),
    field("NODE_ENV", at!(production), Bounds::Exactly("production"),
        "`production`: code that reads a relation which was not loaded fetches it; else that is an error. No request does so"),
    field("WORKERS", at!(workers), Whole(1, 1000), "Threads that answer requests"),
    field("SCHEMA", at!(schema), Words(&["basic", "strict"]), "Create schema: `basic`, or `strict` (password required)"),
    field("VALIDATION", at!(validation), Words(&["declarative", "parser"]),
        "`declarative` (invalid bodies get 400) or `parser` (422)"),
    field("MAX_PER_PAGE", at!(max_per_page), Whole(1, 1_000_000),
        "Largest `perPage`; the default, 15, is no larger"),
    field("MAX_BODY_BYTES", at!(limits.max_body_bytes), Whole(1, 1 << 30), "Largest body, in bytes"),
    field("MEMORY_BUDGET", at!(limits.memory_budget), Whole(1, 1 << 40),
        "Bytes held for all clients: requests, answers, rows, hashes; beyond it they wait, or 503"),
    field("MAX_CONNECTIONS", at!(limits.max_connections), Whole(1, 1 << 20),
        "Client connections at once; beyond it one of the peer that holds the most is closed, or 503"),
    field("TRUSTED_PROXIES", at!(limits.trusted_proxies), Any,
        "Addresses and networks (and `unix`) whose `X-Forwarded-For` is believed"),
    field("HEAD_TIMEOUT", at!(limits.head_timeout), SECONDS, "Seconds for a request's head, from its first byte"),
    field("BODY_TIMEOUT", at!(limits.body_timeout), SECONDS, "Seconds for a request's body"),
    field("IDLE_TIMEOUT", at!(limits.idle_timeout), SECONDS, "Seconds that an idle connection is kept"),
    field("WRITE_TIMEOUT", at!(limits.write_timeout), SECONDS, "Seconds for the client to take its answer"),
    field("REQUEST_TIMEOUT", at!(limits.request_timeout), SECONDS,
        "Seconds from a whole request to its answer, else 503"),
    field("DRAIN_DELAY", at!(limits.drain_delay), Bounds::Seconds(0.0, 86_400.0),
        "Seconds between the announcement of a stop at `/readyz` and the stop itself"),
    field("STOP_TIMEOUT", at!(limits.stop_timeout), SECONDS, "Seconds that a stop waits for requests in flight"),
    field("API_TOKEN", at!(api_token), Token,
        "Bearer token that `/users` and `/metrics` ask for; several are separated by white space"),
    command("API_TOKEN_FILE", Any, "File that holds the token"),
    field("API_TOKEN_READ", at!(api_token_read), Token, "Token that allows `GET` and `HEAD` alone"),
    command("API_TOKEN_READ_FILE", Any, "File that holds that token"),
    field("API_TOKEN_LOGIN", at!(api_token_login), Token, "Token that allows `POST /users/authenticate` alone"),
    command("API_TOKEN_LOGIN_FILE", Any, "File that holds that token"),
    field("AUTH_ATTEMPTS", at!(auth_attempts), Whole(0, 1_000_000),
        "Wrong passwords a minute from one peer for one e-mail address; 0 for any number"),
    field("ALLOWED_HOSTS", at!(allowed_hosts), Any,
        "Further host names that requests without a token may name; `*` for any"),
    field("ALLOWED_ORIGINS", at!(limits.allowed_origins), Any,
        "Origins whose pages may use the service from a browser (CORS); `*` for any, only with a token"),
    field("UI", at!(ui), Words(&["auto", "true", "false"]),
        "The page for the browser, `/ui`: `true`, `false`, or `auto`: on loopback alone, without `TRUSTED_PROXIES`"),
    field("MIGRATIONS_DIR", at!(migrations_dir), Any, "Directory of migrations instead of the built-in ones"),
    command("POSTGRES_BIN", Any,
        "Directory of PostgreSQL's programs for `--embedded`; unset: those that are found"),
    command("LOG_FORMAT", Words(&["text", "json"]), "`text`, or `json`: one object a line"),
    command("LOG_LEVEL", Words(&["info", "off", "error", "warn", "debug", "trace"]),
        "`off`, `error`, `warn`, `info`, `debug` or `trace`"),
];

impl Setting {
    /// Returns the default as the variable's text, if there is one.
    pub fn default(&self) -> Option<String> {
        let default = match (self.field, &self.bounds) {
            (_, Bounds::Exactly(_)) => None,
            (Some(field), _) => field(&mut Config::of_the_command())?.text(),
            (None, Words(words)) => Some(words[0].to_owned()),
            (None, _) => None,
        };
        default.filter(|text| !text.is_empty())
    }

    /// Checks the text of the variable, if there is one, and sets the field of `config`. Does nothing if there is no such
    /// field: a part of the database's address beside a connection string.
    fn apply(&self, config: &mut Config, lookup: &Lookup) -> Result<(), ConfigError> {
        let field = self.field.map(|field| field(config));
        if matches!(field, Some(None)) {
            return Ok(());
        }
        let Some((blamed, text)) = text(self.variable, lookup)? else { return Ok(()) };
        let set = |text: String| field.flatten().map_or(Ok(()), |field| field.set(&text));
        self.bounds.read(text).and_then(set).map_err(|line| problem(blamed, line))
    }
}

/// A setting in force: the variable, its value as a variable has it (`***` for a secret, `-` for none), and the place that
/// the value comes from.
pub type InForce = (&'static str, String, &'static str);

/// Look-up of a variable.
type Lookup<'a> = dyn Fn(&str) -> Option<OsString> + 'a;

impl Config {
    /// Reads every variable of [`SETTINGS`] that sets a field. One that is empty counts as unset.
    ///
    /// Blocks only to read the files that the `…_FILE` variables name.
    ///
    /// # Errors
    /// The variables that cannot be used, in the table's order: the first one, and behind its problem the others.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Config, ConfigError> {
        let mut config = Config::of_the_command();
        let errors = SETTINGS.iter().filter_map(|setting| setting.apply(&mut config, &lookup).err());
        let all = errors.reduce(|all, one| ConfigError { problem: format!("{}; {one}", all.problem), ..all });
        let is_url = matches!(config.database, Database::Url(_));
        let file = lookup(if is_url { "DATABASE_URL_FILE" } else { "DB_PASS_FILE" });
        config.db_password_file = file.filter(|path| !path.is_empty()).map(PathBuf::from);
        all.map_or(Ok(config), Err)
    }

    /// Returns the settings in force, in the table's order. `lookup` is what this configuration was made with.
    pub fn in_force(&self, lookup: impl Fn(&str) -> Option<OsString>) -> Vec<InForce> {
        let mut config = self.clone();
        let row = |setting: &Setting| {
            // The configuration was made, so each text can be read.
            let given = text(setting.variable, &lookup).ok().flatten();
            let source = given.as_ref().map_or("default", |(variable, _)| variable);
            let source = if source == setting.variable { "environment" } else { source };
            let value = match setting.field.map(|field| field(&mut config).map(|field| field.text())) {
                None => given.map(|(_, text)| text).or_else(|| setting.default()),
                Some(None) => return (setting.variable, "-".to_owned(), "no effect"),
                Some(Some(None)) => given.map(|_| "***".to_owned()),
                Some(Some(value)) => value,
            };
            let value = value.filter(|text| !text.is_empty()).unwrap_or_else(|| "-".to_owned());
            (setting.variable, value, source)
        };
        SETTINGS.iter().map(row).collect()
    }
}

/// Returns the setting that a misspelt name is meant for: a letter or two are wrong, missing, too many or swapped, or
/// letters follow its end, as in `DB_PASSWORD`.
pub fn near_miss(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_uppercase();
    let mut names = SETTINGS.iter().map(|setting| setting.variable).filter(|known| known.len() > 2);
    let goes_on = |known: &&str| {
        known.contains('_') && name.strip_prefix(*known).is_some_and(|rest| !rest.starts_with('_'))
    };
    nearest(&name, names.clone()).or_else(|| names.find(goes_on))
}

/// Returns the word that a misspelt one is meant for.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let rated = known.into_iter().map(|known| (strsim::osa_distance(word, known), known));
    let near = rated.filter(|(steps, known)| *steps <= if known.len() > 5 { 2 } else { 1 });
    near.min_by_key(|(steps, _)| *steps).map(|(_, known)| known)
}

/// Checks that the numbers and durations of `config` are within their bounds.
pub(super) fn check(config: &Config) -> Result<(), ConfigError> {
    let mut config = config.clone();
    for Setting { variable, bounds, field, .. } in SETTINGS {
        let value = field.and_then(|field| field(&mut config));
        if let Some(text) = value.and_then(|value| value.text()) {
            bounds.read(text).map_err(|line| problem(variable, line))?;
        }
    }
    Ok(())
}

/// Returns the text of a variable, or of the file that its `…_FILE` names, behind the name of the variable that was used.
fn text(variable: &'static str, lookup: &Lookup) -> Result<Option<(&'static str, String)>, ConfigError> {
    let read = |variable: &'static str| match lookup(variable).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(text)) => Ok(Some(text).filter(|text| !text.is_empty())),
        Some(Err(_)) => Err(problem(variable, "is not UTF-8")),
    };
    let value = read(variable)?.map(|text| (variable, text));
    let is_file = |setting: &&Setting| setting.variable.strip_suffix("_FILE") == Some(variable);
    let Some(Setting { variable: file, .. }) = SETTINGS.iter().find(is_file) else { return Ok(value) };
    let Some(path) = read(file)? else { return Ok(value) };
    if value.is_some() {
        return Err(problem(file, format!("cannot be set together with {variable}")));
    }
    let text = read_secret(Path::new(&path)).map_err(|line| problem(file, line))?;
    Ok(Some((file, text)))
}

/// Returns the text of a file without the end of its last line, and without a byte order mark. The error names the file.
pub(crate) fn read_secret(path: &Path) -> Result<String, String> {
    let content = fs::read_to_string(path).map_err(|error| format!("cannot read {path:?}: {error}"))?;
    let line = without_line_end(content.strip_prefix('\u{feff}').unwrap_or(&content));
    if line.is_empty() { Err(format!("{path:?} is empty")) } else { Ok(line.to_owned()) }
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
            let before = format!("{:?}", Config::of_the_command());
            assert_eq!(format!("{config:?}"), before, "{}={default:?}", setting.variable);
        }
        check(&Config::default()).unwrap();
    }

    #[test]
    fn every_word_is_a_value_of_its_field() {
        for setting in SETTINGS {
            let Words(words) = setting.bounds else { continue };
            for word in words {
                let lookup = |name: &str| (name == setting.variable).then(|| OsString::from(word));
                let rows = Config::from_vars(lookup).unwrap().in_force(lookup);
                let row = rows.into_iter().find(|row| row.0 == setting.variable);
                assert_eq!(row, Some((setting.variable, (*word).to_owned(), "environment")));
            }
        }
    }

    #[test]
    fn a_file_is_for_a_variable_of_the_table() {
        for setting in SETTINGS {
            let same = SETTINGS.iter().filter(|other| other.variable == setting.variable);
            assert_eq!(same.count(), 1, "{}", setting.variable);
            if let Some(of) = setting.variable.strip_suffix("_FILE") {
                assert!(SETTINGS.iter().any(|other| other.variable == of), "{of}");
            }
        }
    }
}
