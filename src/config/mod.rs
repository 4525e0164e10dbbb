//! The settings. This file has the field and the default of each setting. The table [`SETTINGS`] has its environment
//! variable, its bounds and its help.
//!
//! The module does not read the environment itself. Its caller passes a function that looks variables up.

mod origins;
mod setters;
mod settings;
mod trusted_proxies;

pub use setters::without_brackets;
pub use settings::{SETTINGS, Scope, Setting, ShownSetting, find_similar, is_connection_string};
pub use trusted_proxies::TrustedProxies;

use crate::error::ConfigError;
use crate::secret::Secret;
use crate::users::{page, user};
use argon2::Params;
use setters::{refuse, set_whole_number};
use std::{collections::HashSet, os::fd::OwnedFd};
use std::{path::PathBuf, sync::Arc, time::Duration};

/// The bytes of the memory budget that rows and short answers need beside a page and a hash.
const BUDGET_BYTES_FOR_SHORT_ANSWERS: usize = 512 << 10;

/// The largest value of the limit `max_header_fields`: the parser of requests has an array of this length.
pub(crate) const MAX_HEADER_FIELDS: usize = 128;

/// Declares a structure in which each field is followed by its default value, and implements `Default` by these values.
macro_rules! with_defaults {
    (
        $(#[$about:meta])*
        pub struct $name:ident {
            $($(#[$meaning:meta])* pub $field:ident: $type:ty = $default:expr,)+
        }
    ) => {
        $(#[$about])*
        pub struct $name {
            $($(#[$meaning])* pub $field: $type,)+
        }

        impl Default for $name {
            fn default() -> $name {
                $name { $($field: $default,)+ }
            }
        }
    };
}

with_defaults! {
    /// The settings of one server. `Config::default()` is for programs that embed a server: it has the documented
    /// defaults, but takes a free port of the loopback. [`Config::from_vars`] reads the environment variables of the
    /// command `userd`.
    #[derive(Debug, Clone)]
    pub struct Config {
        /// The address of the database, and the role and password to connect with.
        pub database: Database = Database::Parts {
            host: "localhost".to_owned(),
            port: 5432,
            name: "myapp".to_owned(),
            user: "postgres".to_owned(),
            password: Secret::default(),
            ssl: false,
        },
        /// The PEM file of the certificate authorities that may sign the database's certificate; `None` for the
        /// authorities that the system trusts.
        pub db_ssl_ca: Option<PathBuf> = None,
        /// The most connections to the database.
        pub db_pool_size: u32 = 8,
        /// The time for which a start waits until the database accepts a connection.
        pub db_connect_timeout: Duration = Duration::from_secs(10),
        /// The time for which a request waits for a free connection to the database. Then it is answered 503.
        pub db_acquire_timeout: Duration = Duration::from_secs(3),
        /// True if prepared statements and session settings last from one transaction to the next. Must be false behind
        /// a pooler in transaction mode, because the pooler gives each transaction another session.
        pub db_prepared: bool = true,
        /// True if a start looks for a pooler in transaction mode. If it finds one, the service behaves as if
        /// `db_prepared` were false.
        pub find_pooler: bool = true,
        /// The file with the database password or the connection string. Each new session reads its password from the
        /// file, so that a new password needs no restart.
        pub db_password_file: Option<PathBuf> = None,
        /// The name of the operating-system account that runs the process. It is the database role if a connection
        /// string names none.
        pub os_user: Option<String> = None,
        /// The database password (`PGPASSWORD`), used if no other setting has one.
        pub pg_password: Option<Secret> = None,
        /// The address to listen on: an IP address, a host name, or `unix:/path`. A name stands for all addresses that
        /// the name has and this machine has, too; `localhost` stands for `127.0.0.1` and `::1`.
        pub host: String = "localhost".to_owned(),
        /// The TCP port to listen on; 0 for one that is free on all addresses of `host`.
        pub port: u16 = 0,
        /// Listening sockets from a supervisor such as systemd. If there are any, `host` and `port` have no effect.
        pub sockets: Vec<Arc<OwnedFd>> = Vec::new(),
        /// True if reading a relation that was not loaded, such as a user's credential, fetches the relation from the
        /// database. If false, reading it is an error, so that tests find the omission.
        pub production: bool = false,
        /// The number of threads that execute requests; at most `db_pool_size` of them are used. Two more threads
        /// receive requests, and further threads hash passwords.
        pub workers: usize = 8,
        /// The schema that the body of a create must meet. The strict schema requires a password.
        pub schema: Schema = Schema::Basic,
        /// The status of the answer to a body that violates its schema: 400 or 422.
        pub validation: Validation = Validation::Declarative,
        /// The largest value of the query parameter `perPage`: the most users on a page of a list.
        pub max_per_page: u32 = page::DEFAULT_MAX_PER_PAGE,
        /// The directory of the migrations to apply; `None` for the built-in migrations.
        pub migrations_dir: Option<PathBuf> = None,
        /// True if a start applies the migrations that the database lacks; if false, a start fails when one is missing.
        /// No environment variable sets this field.
        pub migrate: bool = true,
        /// The bearer tokens that allow every request, separated by white space; `None` if requests need no token.
        pub api_token: Option<Secret> = None,
        /// The bearer tokens that allow only `GET` and `HEAD`. An error if `api_token` is not set.
        pub api_token_read: Option<Secret> = None,
        /// The bearer tokens that allow only `POST /users/authenticate`. An error if `api_token` is not set.
        pub api_token_login: Option<Secret> = None,
        /// The cost of hashing a password. No environment variable sets this field.
        pub password_hashing: PasswordHashing = PasswordHashing::Owasp,
        /// The most wrong passwords that one client address may send for one e-mail address in a minute; 0 for no
        /// limit.
        pub auth_attempts: u32 = 10,
        /// Names that the `Host` of a request may have if no token is set, beside `host`, the machine's name and names
        /// that no stranger can own; `*` for any name.
        pub allowed_hosts: Vec<String> = Vec::new(),
        /// The clients that get the page for the browser, at `/ui`.
        pub ui: Ui = Ui::Auto,
        /// The limits for clients: sizes, times, and the number of connections.
        pub limits: Limits = Limits::default(),
    }
}

with_defaults! {
    /// Limits for each client, and for all clients together. A request that exceeds a limit is refused.
    #[derive(Debug, Clone)]
    pub struct Limits {
        /// The most connections of clients that are open at once.
        pub max_connections: usize = 1024,
        /// The most bytes of a request's head: its request line and header fields.
        pub max_head_bytes: usize = 16 * 1024,
        /// The most bytes of a request line.
        pub max_request_line_bytes: usize = 8 * 1024,
        /// The most header fields of a request; no more than 128.
        pub max_header_fields: usize = 100,
        /// The most bytes of a request's body.
        pub max_body_bytes: usize = 64 * 1024,
        /// The most bytes of memory that requests, answers, rows and password hashes of all clients may take together.
        pub memory_budget: usize = 48 << 20,
        /// The time from the first byte of a request's head to its last byte.
        pub head_timeout: Duration = Duration::from_secs(5),
        /// The time from the end of a request's head to the end of its body.
        pub body_timeout: Duration = Duration::from_secs(15),
        /// The time for which a connection without a request is kept open.
        pub idle_timeout: Duration = Duration::from_secs(75),
        /// The time that a client has to read its answer.
        pub write_timeout: Duration = Duration::from_secs(15),
        /// The time from the last byte of a request to its answer. If the answer takes longer, the client gets 503.
        pub request_timeout: Duration = Duration::from_secs(10),
        /// The time for which `/readyz` announces a stop before connections are refused, so that load balancers notice.
        pub drain_delay: Duration = Duration::ZERO,
        /// The time for which a stop, after `drain_delay`, waits for the requests in flight.
        pub stop_timeout: Duration = Duration::from_secs(10),
        /// Proxies whose `X-Forwarded-For` tells the client's address. Their connections are never closed to make place
        /// for other clients, because each of them serves many clients.
        pub trusted_proxies: TrustedProxies = TrustedProxies::default(),
        /// Origins whose pages may use the service from a browser (CORS), written as in `https://app.example`. `*`
        /// stands for any origin, and is an error if `api_token` is not set.
        pub allowed_origins: Vec<Arc<str>> = Vec::new(),
    }
}

impl Limits {
    /// Returns the longest time for a statement, and for the retries of a command that meets locks: half of
    /// `request_timeout`, so that time is left to answer.
    pub(crate) fn statement_timeout(&self) -> Duration {
        self.request_timeout / 2
    }
}

/// The address of a database, and the role and password to connect with.
#[derive(Debug, Clone)]
pub enum Database {
    /// A connection string as libpq accepts it: a URL or `keyword=value` pairs.
    Url(Secret),
    /// The parts of a connection string, each in a field of its own.
    Parts {
        /// The host name or IP address of the database server, or the directory of its Unix socket.
        host: String,
        /// The TCP port of the database server, or the number at the end of its Unix socket's name.
        port: u16,
        /// The name of the database.
        name: String,
        /// The role to connect as.
        user: String,
        /// The password of the role; empty if it needs none.
        password: Secret,
        /// True if the connection uses TLS and verifies the server's certificate and host name.
        ssl: bool,
    },
}

impl From<Secret> for Database {
    fn from(url: Secret) -> Database {
        Database::Url(url)
    }
}

/// The schema that the body of a create must meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum Schema {
    /// Requires `name` and `email`; `password` is optional.
    Basic,
    /// Requires a `name` of at least one character, `email`, and `password`.
    Strict,
}

/// The status of the answer to a body that violates its schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum Validation {
    /// Status 400, as if bodies were validated before the handler is called.
    Declarative,
    /// Status 422, as if a parser in the handler found the violation.
    Parser,
}

/// The clients that get the page for the browser.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum Ui {
    /// Clients on this machine: there is a page only if the service listens on the loopback alone and trusts no proxy.
    Auto,
    /// All clients.
    #[strum(serialize = "true")]
    On,
    /// No client.
    #[strum(serialize = "false")]
    Off,
}

/// The cost of hashing a password by Argon2id. An attacker who guesses a password pays this cost for each guess.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PasswordHashing {
    /// The cost that OWASP recommends: 19 MiB of memory and two passes, which take some 20 ms if the compiler optimizes
    /// the crate `argon2`.
    Owasp,
    /// The least cost that Argon2id allows: 8 KiB of memory and one pass. For tests only, because guesses are some
    /// thousand times faster than with [`Owasp`](PasswordHashing::Owasp).
    LeastCostForTests,
}

impl PasswordHashing {
    /// Returns the parameters of Argon2id for this cost.
    pub(crate) fn params(self) -> Params {
        let (memory, passes, lanes) = match self {
            PasswordHashing::Owasp => (19_456, 2, 1),
            PasswordHashing::LeastCostForTests => (8, 1, 1),
        };
        Params::new(memory, passes, lanes, None).expect("the costs are within Argon2's bounds")
    }
}

impl Config {
    /// Returns the default settings of the command `userd`, which listens on port 3000.
    fn cli_defaults() -> Config {
        Config { port: 3000, ..Config::default() }
    }

    /// Returns true if a server with these settings has the page for the browser. `is_loopback_only`: the server
    /// listens on the loopback alone.
    pub(crate) fn serves_ui(&self, is_loopback_only: bool) -> bool {
        self.ui == Ui::On || self.ui == Ui::Auto && is_loopback_only && self.limits.trusted_proxies.is_empty()
    }

    /// Validates the settings. The error names the environment variable of the first wrong setting.
    ///
    /// Each number and duration must be within its bounds. The memory budget must suffice for the largest body, page
    /// and hash. If `api_token` is not set, the allowed origins may not have `*`, and tokens with fewer rights are an
    /// error. A token may be in one setting only.
    pub fn check(&self) -> Result<(), ConfigError> {
        settings::validate_bounds(self)?;
        for (field, mut value, max) in [
            ("max_head_bytes", self.limits.max_head_bytes, 1 << 30),
            ("max_request_line_bytes", self.limits.max_request_line_bytes, 1 << 30),
            ("max_header_fields", self.limits.max_header_fields, MAX_HEADER_FIELDS),
        ] {
            set_whole_number(&mut value, None, 1..=max).map_err(|line| refuse(field, line))?;
        }
        if self.limits.allowed_origins.contains(&"*".into()) && self.api_token.is_none() {
            return Err(refuse(
                "ALLOWED_ORIGINS",
                "`*` needs API_TOKEN: without a token whoever can connect may do everything, and then any page that a \
                 person opens could",
            ));
        }
        let mut known = HashSet::new();
        for (variable, tokens) in [
            ("API_TOKEN", &self.api_token),
            ("API_TOKEN_READ", &self.api_token_read),
            ("API_TOKEN_LOGIN", &self.api_token_login),
        ] {
            let Some(tokens) = tokens else { continue };
            if self.api_token.is_none() {
                return Err(refuse(variable, "needs API_TOKEN: without that every request is allowed"));
            }
            if !tokens.expose().split_whitespace().all(|token| known.insert(token)) {
                return Err(refuse(variable, "has a token twice, or one that another variable has, too"));
            }
        }
        let input = self.limits.max_body_bytes.saturating_add(self.limits.max_head_bytes);
        // Requires memory for a page of the largest users, or for a page of usual users and a hash: the larger of both.
        let page = |bytes_per_user| page::memory_bytes(self.max_per_page as usize, bytes_per_user);
        let hash = (self.password_hashing.params().m_cost() as usize) << 10;
        let work = page(user::MAX_USER_BYTES.next_multiple_of(1 << 10))
            .max(page(user::USUAL_USER_BYTES).saturating_add(hash))
            .saturating_add(BUDGET_BYTES_FOR_SHORT_ANSWERS);
        // Doubles this memory, because the rows of a page are in memory together with the text that is made of them.
        let min = input.saturating_add(work.saturating_mul(2));
        if self.limits.memory_budget >= min {
            return Ok(());
        }
        let (body, page) = (self.limits.max_body_bytes, self.max_per_page);
        let line = format!("must be at least {min} with MAX_BODY_BYTES={body} and MAX_PER_PAGE={page}");
        Err(refuse("MEMORY_BUDGET", line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

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
        assert_eq!((config.host.as_str(), config.port), ("localhost", 3000));
        assert!(!config.production);
    }

    #[test]
    fn values_that_are_meant_by_exactly_one_text() {
        for (text, expected) in [("true", true), ("TRUE", false), ("1", false), (" true", false)] {
            let Database::Parts { ssl, .. } = from(&[("DB_SSL", text)]).unwrap().database else {
                panic!("no URL was given");
            };
            assert_eq!(ssl, expected, "{text}");
        }
        for (text, expected) in [("production", true), ("Production", false), ("production ", false)] {
            assert_eq!(from(&[("NODE_ENV", text)]).unwrap().production, expected, "{text:?}");
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
    fn each_token_has_one_meaning() {
        type Pairs<'a> = &'a [(&'a str, &'a str)];
        let rows: [(Pairs, Option<&str>); 8] = [
            (&[("API_TOKEN", "a b\nc")], None),
            (&[("API_TOKEN", "a"), ("API_TOKEN_READ", "b c"), ("API_TOKEN_LOGIN", "d")], None),
            (&[("API_TOKEN_READ", "b")], Some("API_TOKEN_READ")),
            (&[("API_TOKEN_LOGIN", "b")], Some("API_TOKEN_LOGIN")),
            (&[("API_TOKEN_READ", "b"), ("API_TOKEN_LOGIN", "c")], Some("API_TOKEN_READ")),
            (&[("API_TOKEN", "a b"), ("API_TOKEN_READ", "c b")], Some("API_TOKEN_READ")),
            (&[("API_TOKEN", "a"), ("API_TOKEN_LOGIN", "a")], Some("API_TOKEN_LOGIN")),
            (
                &[("API_TOKEN", "a"), ("API_TOKEN_READ", "b"), ("API_TOKEN_LOGIN", "c b")],
                Some("API_TOKEN_LOGIN"),
            ),
        ];
        for (pairs, expected) in rows {
            let found = from(pairs).unwrap().check().err();
            assert_eq!(found.as_ref().map(|error| error.variable), expected, "{pairs:?}");
        }
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
            ("TRUSTED_PROXIES", "10.0.0.0/33"),
            ("ALLOWED_HOSTS", "http://a"),
            ("ALLOWED_HOSTS", "a:80"),
            ("ALLOWED_HOSTS", "*.example.com"),
            ("ALLOWED_HOSTS", ".example.com"),
            ("ALLOWED_HOSTS", "a.example,.example.com"),
            ("ALLOWED_HOSTS", "a.example.."),
            ("ALLOWED_HOSTS", "a..example"),
            ("ALLOWED_HOSTS", "-"),
            ("ALLOWED_HOSTS", "a-.example"),
            ("ALLOWED_HOSTS", "."),
            ("ALLOWED_HOSTS", ".."),
            ("ALLOWED_HOSTS", "[::1]"),
            ("ALLOWED_HOSTS", "bücher.example"),
            ("ALLOWED_HOSTS", "[\"a.example\"]"),
            ("API_TOKEN", "a é"),
            ("API_TOKEN", " \t"),
            ("API_TOKEN", "Bearer a"),
            ("API_TOKEN_LOGIN", "a bearer"),
            ("DB_HOST", "postgres://u:hunter2@h/d"),
            ("DB_HOST", "h;password=hunter2"),
            ("DB_HOST", "\"\""),
            ("DB_HOST", "db.example:5432"),
            ("HOST", "postgres://u:hunter2@h/d"),
            ("PORT", "postgres://u:hunter2@h/d"),
            ("SCHEMA", "postgres://u:hunter2@h/d"),
            ("ALLOWED_ORIGINS", "postgres://u:hunter2@h/d"),
            ("DATABASE_URL_FILE", "postgres://u:hunter2@h/d"),
            ("API_TOKEN_READ", "\"a\"\r\n"),
            ("DB_PORT", "tcp://10.0.0.1:5432"),
            ("API_TOKEN_FILE", "/nowhere/at/all"),
            ("API_TOKEN_FILE", "/dev/null"),
            ("DATABASE_URL_FILE", "/dev/null"),
            ("DB_PASS_FILE", "/nowhere/at/all"),
        ];
        for (variable, value) in rows {
            let error = from(&[(variable, value)]).unwrap_err();
            assert_eq!(error.variable, variable, "{variable}={value}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn all_that_is_wrong_is_told() {
        let error =
            from(&[("PORT", "abc"), ("WORKERS", "7"), ("SCHEMA", "x"), ("API_TOKEN_FILE", "/nowhere")]);
        let line = error.unwrap_err().to_string();
        let parts: Vec<&str> =
            line.split("; ").map(|part| part.split(':').next().unwrap_or_default()).collect();
        assert_eq!(parts, ["PORT", "SCHEMA", "API_TOKEN_FILE"], "{line}");
    }

    #[test]
    fn bounds_of_a_configuration_are_those_of_its_variables() {
        type Change = fn(&mut Config);
        let changes: [(&str, Change); 5] = [
            ("ALLOWED_HOSTS", |config| config.allowed_hosts = vec![".example.com".to_owned()]),
            ("WORKERS", |config| config.workers = 0),
            ("MAX_PER_PAGE", |config| config.max_per_page = 1_000_001),
            ("STOP_TIMEOUT", |config| config.limits.stop_timeout = Duration::ZERO),
            ("DB_PORT", |config| match &mut config.database {
                Database::Parts { port, .. } => *port = 0,
                Database::Url(_) => unreachable!(),
            }),
        ];
        for (variable, change) in changes {
            let mut config = Config::default();
            change(&mut config);
            assert_eq!(config.check().unwrap_err().variable, variable);
        }
    }

    #[test]
    fn what_does_not_fit_into_the_budget_is_refused() {
        type Change = fn(&mut Config);
        let rows: [(Change, bool); 9] = [
            (|_| {}, true),
            (|config| config.limits.memory_budget = 40 << 20, false),
            (|config| config.max_per_page = 2500, true),
            (|config| config.max_per_page = 2900, true),
            (|config| config.max_per_page = 3000, false),
            (|config| config.limits.max_body_bytes = 20 << 20, false),
            (|config| config.limits.max_body_bytes = 1 << 30, false),
            (
                |config| {
                    config.limits.max_body_bytes = 1 << 30;
                    config.limits.memory_budget = 3 << 30;
                },
                true,
            ),
            (
                |config| {
                    config.limits.memory_budget = 17 << 20;
                    config.password_hashing = PasswordHashing::LeastCostForTests;
                },
                true,
            ),
        ];
        for (change, fits) in rows {
            let mut config = Config::default();
            change(&mut config);
            let checked = config.check();
            assert_eq!(checked.is_ok(), fits, "{checked:?}");
            if let Err(error) = checked {
                assert_eq!(error.variable, "MEMORY_BUDGET");
                assert!(error.problem.contains("MAX_BODY_BYTES") && error.problem.contains("MAX_PER_PAGE"));
            }
        }
    }

    #[test]
    fn secrets_come_from_files_as_well() {
        let path = std::env::temp_dir().join(format!("userd-secret-{}", std::process::id()));
        std::fs::write(&path, "\u{feff}hunter2\r\n").unwrap();
        let file = path.to_str().unwrap();
        let config = from(&[("DB_PASS_FILE", file), ("API_TOKEN_FILE", file)]).unwrap();
        let Database::Parts { password, .. } = &config.database else { panic!("no URL was given") };
        assert_eq!((password.expose(), config.api_token.unwrap().expose()), ("hunter2", "hunter2"));
        let config = from(&[("DATABASE_URL_FILE", file), ("DB_PASS_FILE", "/nowhere")]).unwrap();
        assert!(matches!(&config.database, Database::Url(url) if url.expose() == "hunter2"));
        let error = from(&[("DB_PASS_FILE", file), ("DB_PASS", "x")]).unwrap_err();
        assert_eq!(error.variable, "DB_PASS_FILE");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn settings_in_force() {
        let path = std::env::temp_dir().join(format!("userd-in-force-{}", std::process::id()));
        std::fs::write(&path, "hunter2\n").unwrap();
        let file = path.to_str().unwrap();
        let pairs = [("DB_PASS_FILE", file), ("PORT", "8080"), ("LOG_LEVEL", "debug"), ("DB_HOST", "")];
        let pairs = [&pairs[..], &[("NODE_ENV", "production"), ("DB_SSL", "yes")]].concat();
        let lookup = |name: &str| {
            let given = pairs.iter().find(|(key, _)| *key == name);
            given.map(|(_, value)| OsString::from(value))
        };
        let rows = Config::from_vars(lookup).unwrap().in_force(lookup);
        assert_eq!(rows.len(), SETTINGS.len());
        let row = |name: &str| {
            let row = rows.iter().find(|row| row.variable == name).unwrap();
            (row.value.as_str(), row.source)
        };
        assert_eq!(row("PORT"), ("8080", "environment"));
        assert_eq!(row("WORKERS"), ("8", "default"));
        assert_eq!(row("LOG_LEVEL"), ("debug", "environment"));
        assert_eq!(row("DB_HOST"), ("localhost", "default"));
        assert_eq!(row("DB_PASS"), ("***", "DB_PASS_FILE"));
        assert_eq!(row("DB_PASS_FILE"), (file, "environment"));
        assert_eq!(row("API_TOKEN"), ("-", "default"));
        assert_eq!(row("NODE_ENV"), ("production", "environment"));
        assert_eq!(row("DB_SSL"), ("-", "environment"));
        let lookup = |name: &str| (name == "DATABASE_URL").then(|| "postgres://u:hunter2@h/d".into());
        let rows = Config::from_vars(lookup).unwrap().in_force(lookup);
        assert_eq!((&*rows[0].value, rows[0].source), ("***", "environment"));
        let unused = rows.iter().filter(|row| row.source == "no effect").count();
        assert_eq!(unused, 6, "{rows:?}");
        assert!(!format!("{rows:?}").contains("hunter2"));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn lists() {
        let config =
            from(&[("TRUSTED_PROXIES", "127.0.0.1, unix"), ("ALLOWED_HOSTS", "a.example, B.example. x_1 *")]);
        let config = config.unwrap();
        assert!(config.limits.trusted_proxies.contains(None));
        assert_eq!(config.allowed_hosts, ["a.example", "B.example.", "x_1", "*"]);
    }

    #[test]
    fn what_comes_around_a_value_on_its_way_is_left_out() {
        let config = from(&[
            ("DB_PASS", " hunter2 \r\n"),
            ("DB_USER", "u\n"),
            ("DB_NAME", "d\r\n"),
            ("API_TOKEN", "a\r\n"),
            ("ALLOWED_HOSTS", "a.example\nb.example\r\n"),
            ("HOST", "unix:/x"),
            ("PORT", "tcp://10.0.0.1:3000"),
        ]);
        let config = config.unwrap();
        let Database::Parts { password, user, name, .. } = &config.database else {
            panic!("no URL was given")
        };
        assert_eq!((&**user, &**name), ("u", "d"));
        assert_eq!((password.expose(), config.api_token.unwrap().expose()), (" hunter2 ", "a"));
        assert_eq!(config.allowed_hosts, ["a.example", "b.example"]);
    }

    #[test]
    fn empty_is_unset() {
        let config = from(&[("PORT", ""), ("DATABASE_URL", ""), ("HOST", "")]).unwrap();
        assert_eq!((config.host.as_str(), config.port), ("localhost", 3000));
        assert!(matches!(config.database, Database::Parts { .. }));
        let config = from(&[("DATABASE_URL", "\"\"\n"), ("DB_HOST", "/run/a=b@c")]).unwrap();
        assert!(matches!(config.database, Database::Parts { host, .. } if host == "/run/a=b@c"));
    }

    #[test]
    fn an_address_in_brackets() {
        let config = from(&[("HOST", "[::1]"), ("DB_HOST", "[2001:db8::7]")]).unwrap();
        assert_eq!(config.host, "::1");
        assert!(matches!(config.database, Database::Parts { host, .. } if host == "2001:db8::7"));
    }
}
