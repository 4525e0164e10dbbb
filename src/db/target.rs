//! Parses the settings that name a database, which are a URL, `keyword=value` pairs or single settings, into a
//! `postgres::Config` and TLS settings. The `postgres` crate parses the values. This file accepts or refuses each
//! parameter by its name, and translates the names that libpq writes differently. Opens no connection. No error,
//! warning or log line repeats a value or an unknown name, because it may be a part of a password.

use super::tls::{TlsSettings, Verification};
use crate::config::{Config, Database, find_similar};
use crate::error::ConfigError;
use crate::http::percent_decode;
use postgres::config::{Host, SslMode};
use std::{borrow::Cow, collections::HashMap, error::Error, fmt, path::Path};

/// The parameters of a connection string that have an effect. The `postgres` crate knows those of the first two rows,
/// and this file those of the last row.
const KNOWN_PARAMETERS: &str = "user password dbname host hostaddr port options application_name connect_timeout \
     keepalives keepalives_idle keepalives_interval keepalives_retries target_session_attrs channel_binding sslnegotiation \
     sslmode sslrootcert sslcert sslkey tcp_user_timeout keepalives_count fallback_application_name";

/// The parameters of a connection string that have no effect and are accepted with a warning. Most of them belong to
/// other clients. A parameter that is neither here nor in `KNOWN_PARAMETERS` ends the start.
const IGNORED_PARAMETERS: &str = "schema currentSchema search_path schema_search_path connection_limit pool_size \
     pool_max_conns max_connections pool_min_conns pool_timeout checkout_timeout socket_timeout pgbouncer \
     prepareThreshold prepared_statements statement_cache_size prepared_statement_cache_size sslaccept client_encoding \
     gssencmode sslcertmode sslcompression sslsni ssl_min_protocol_version ApplicationName encoding supa \
     uselibpqcompat workaround statement_timeout pool binary_parameters default_query_exec_mode load_balance_hosts";

/// The problem of a URL whose percent-encoding is malformed, or encodes bytes that are not UTF-8.
const BAD_PERCENT_ENCODING: &str =
    "'%' is not followed by two hexadecimal digits, or encodes no UTF-8: write %25 for '%'";

/// Ignored parameters, each with a value that ends the start instead, because it asks for more safety than userd has.
const REFUSED_PAIRS: [(&str, &str); 3] =
    [("gssencmode", "require"), ("sslcertmode", "require"), ("ssl_min_protocol_version", "TLSv1.3")];

/// Names and values of parameters in their order. A name may be repeated.
type ParamList = Vec<(String, String)>;

/// The values of the parameters of a connection string by name.
type ParamMap = HashMap<String, String>;

/// Returns whether `list`, which separates names by white space, has the name `name`.
fn is_listed(name: &str, list: &str) -> bool {
    list.split_ascii_whitespace().any(|listed| listed == name)
}

/// The database to connect to, as the settings name it. `Display` writes hosts, database, user and TLS for the log.
/// Neither `Display` nor `Debug` shows the password.
#[derive(Clone, Debug)]
pub struct DbTarget {
    /// The settings of the client library for each host. The files of certificates are in `tls`, because the client
    /// library does not know them.
    pub hosts: Vec<postgres::Config>,
    /// The settings of TLS. They have no effect if no host uses TLS.
    pub tls: TlsSettings,
    /// A warning for each parameter that has no effect.
    pub warnings: Vec<String>,
}

impl DbTarget {
    /// Returns the database that the settings name. An error names the variable and the parameter.
    pub fn new(config: &Config) -> Result<DbTarget, ConfigError> {
        let wrong = |variable| move |problem| ConfigError { variable, problem };
        let os_user = config.os_user.as_deref();
        let mut target = match &config.database {
            Database::Url(url) => DbTarget::parse(url.expose(), os_user).map_err(wrong("DATABASE_URL"))?,
            Database::Parts { ssl: false, .. } if config.db_ssl_ca.is_some() => {
                let problem = "a file of certificates to trust is given, but TLS is off";
                return Err(wrong("DB_SSL_CA")(problem.to_owned()));
            }
            Database::Parts { host, port, name, user, password, ssl } => {
                let mode = if *ssl { "verify-full" } else { "disable" };
                let (port, password) = (port.to_string(), password.expose());
                let pairs = [("host", trim_value(host)), ("port", &port), ("dbname", name), ("user", user)];
                let pairs = pairs.into_iter().chain([("password", password), ("sslmode", mode)]);
                let pairs = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
                let mut target = DbTarget::from_pairs(pairs, 0, os_user).map_err(wrong("DB_HOST"))?;
                target.tls.root_file = config.db_ssl_ca.clone();
                target
            }
        };
        if let Some(password) = &config.pg_password {
            let lacking = target.hosts.iter_mut().filter(|host| host.get_password().is_none());
            lacking.for_each(|host| _ = host.password(password.expose()));
        }
        Ok(target)
    }

    /// Returns the password of the first host.
    pub fn password(&self) -> Option<Vec<u8>> {
        self.hosts[0].get_password().map(<[u8]>::to_vec)
    }

    /// Parses a URL or `keyword=value` pairs as libpq does. If they name no user, the user is `os_user`; if they name
    /// no database, it has the user's name. An error names the parameter.
    pub fn parse(text: &str, os_user: Option<&str>) -> Result<DbTarget, String> {
        let text = trim_value(text);
        let (scheme, url) = text.split_once("://").unwrap_or_default();
        if scheme.is_empty() || scheme.contains('=') {
            return DbTarget::from_pairs(parse_keyword_pairs(text)?, 0, os_user);
        }
        if !["postgres", "postgresql"].contains(&scheme) {
            return Err("a URL must start with postgres:// or postgresql://".to_owned());
        }
        // The first '@' ends the password, as in libpq. A second '@' is refused, because a part of the password would
        // be taken for a host, which the log shows.
        let end = url.find(['@', '/']).filter(|at| url[*at..].starts_with('@')).map_or(0, |at| at + 1);
        if url[end..].contains('@') {
            return Err("a password or user holds '@', '/' or '?': write %40, %2F or %3F".to_owned());
        }
        let (base, query) = url[end..].split_once('?').unwrap_or((&url[end..], ""));
        let (hosts, database) = base.split_once('/').unwrap_or((base, ""));
        let credentials = url[..end].strip_suffix('@').unwrap_or_default();
        let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
        let hosts = hosts.split(',').map(split_host_and_port).collect::<Result<Vec<_>, _>>()?;
        let (names, ports): (Vec<&str>, Vec<&str>) = hosts.into_iter().unzip();
        let ports = if ports.iter().all(|port| port.is_empty()) { String::new() } else { ports.join(",") };
        let (names, base) = (names.join(","), [("user", user), ("password", password), ("dbname", database)]);
        let base = base.into_iter().chain([("host", &*names), ("port", &*ports)]);
        let parameters = query.split('&').filter(|parameter| !parameter.is_empty());
        let parameters = parameters.map(|pair| {
            let pair = pair.split_once('=').filter(|(_, value)| !value.contains('='));
            pair.ok_or("each parameter after '?' must read name=value; '=' in a value is %3D")
        });
        let decoded = |text: &str| percent_decode(text).map(Cow::into_owned).ok_or(BAD_PERCENT_ENCODING);
        let pairs = base.map(Ok).chain(parameters);
        let pairs = pairs.map(|pair| pair.and_then(|(name, value)| Ok((decoded(name)?, decoded(value)?))));
        DbTarget::from_pairs(pairs.collect::<Result<_, _>>()?, 5, os_user)
    }

    /// Returns the database that the parameters `pairs` name. An error gives the number of an unknown parameter,
    /// because its name may be a part of a password. The first `query_start` pairs, the parts of a URL before '?', do
    /// not count.
    fn from_pairs(pairs: ParamList, query_start: usize, os_user: Option<&str>) -> Result<DbTarget, String> {
        let (mut values, warnings) = accept_parameters(pairs, query_start)?;
        // Drops empty values, as libpq does. Keeps the empty values of parameters that take only certain words, so that
        // these values are refused below.
        let words = "sslmode channel_binding target_session_attrs sslnegotiation";
        values.retain(|name, value| !value.is_empty() || is_listed(name, words));
        let (mode, tls) = take_tls_settings(&mut values)?;
        // Rounds up to whole seconds, because the `postgres` crate takes no milliseconds.
        let milliseconds = values.get("tcp_user_timeout").map_or(Ok(10_000), |text| text.parse::<u32>());
        let milliseconds = milliseconds.map_err(|_| "tcp_user_timeout is not a number of milliseconds")?;
        values.insert("tcp_user_timeout".to_owned(), milliseconds.div_ceil(1000).to_string());
        if values.get("target_session_attrs").is_some_and(|value| value == "primary") {
            values.insert("target_session_attrs".to_owned(), "read-write".to_owned());
        }
        for (name, libpq_name, default) in PARAMETER_DEFAULTS {
            let value = values.remove(libpq_name).unwrap_or(default.to_owned());
            values.entry(name.to_owned()).or_insert(value);
        }
        if !values.contains_key("host") {
            let host = values.get("hostaddr").map_or(default_socket_dir(), String::as_str).to_owned();
            values.insert("host".to_owned(), host);
        }
        let user = values.get("user").map(String::as_str).or(os_user).ok_or("it names no user")?.to_owned();
        values.entry("dbname".to_owned()).or_insert_with(|| user.clone());
        values.insert("user".to_owned(), user);
        let count = |name| values.get(name).map_or(1, |all| all.split(',').count());
        let (hosts, most) = (count("host"), count("port").max(count("hostaddr")));
        let host = |at| {
            let mut config = postgres_config(&values, at)?;
            // PostgreSQL does not use TLS over Unix sockets.
            let mode = if matches!(config.get_hosts(), [Host::Tcp(_)]) { mode } else { SslMode::Disable };
            if cfg!(not(feature = "tls")) && mode == SslMode::Require {
                return Err("TLS is required, and userd was built without it (feature `tls`)".to_owned());
            }
            config.ssl_mode(mode);
            Ok(config)
        };
        let hosts = (0..hosts).map(host).collect::<Result<Vec<_>, _>>()?;
        if most > 1 && most != hosts.len() {
            return Err("it has different numbers of hosts, addresses and ports".to_owned());
        }
        Ok(DbTarget { hosts, tls, warnings })
    }
}

/// Returns the parameters that have an effect, and a warning for each parameter without effect. If a name is repeated,
/// its last value counts. Fails at an unknown parameter, and at a value that the log would show and that may hold a
/// password.
fn accept_parameters(pairs: ParamList, query_start: usize) -> Result<(ParamMap, Vec<String>), String> {
    let (mut values, mut warnings) = (ParamMap::new(), Vec::new());
    for (at, (name, value)) in pairs.into_iter().enumerate() {
        let number = (at + 1).saturating_sub(query_start);
        if value.contains('\0') {
            return Err("a value holds NUL".to_owned());
        }
        if is_listed(&name, KNOWN_PARAMETERS) {
            values.insert(name, value);
        } else if name == "ssl" && value == "true" {
            values.insert("sslmode".to_owned(), "require".to_owned());
        } else if name == "ssl" {
            let words = "sslmode=disable, sslmode=require or sslmode=verify-full";
            return Err(format!("parameter {number} is ssl, which other clients have: write {words}"));
        } else if is_listed(&name, IGNORED_PARAMETERS) && !REFUSED_PAIRS.contains(&(&*name, &*value)) {
            warnings.push(format!("{name} has no effect"));
        } else {
            // Does not show the unknown name, because it may be a part of a password.
            let meant = find_similar(&name.to_ascii_lowercase(), KNOWN_PARAMETERS.split_ascii_whitespace());
            let hint = meant.map(|meant| format!(" (did you mean {meant}?)")).unwrap_or_default();
            return Err(format!("parameter {number} is unknown or not supported{hint}"));
        }
    }
    // Refuses hosts, users and databases that may hold a password, because the log shows them. In a text whose
    // parameters are separated by `;`, as for some other programs, one value holds all later parameters.
    let mut shown = values.iter().filter(|(name, _)| is_listed(name, "host user dbname"));
    if shown.any(|(_, value)| value.contains('=') || value.contains("://")) {
        let way = "separate parameters by spaces, in a URL by '&'";
        return Err(format!("a host, user or database holds a URL or a parameter: {way}"));
    }
    Ok((values, warnings))
}

/// Splits the text of a URL into a host and a port. An IPv6 address is in brackets, because it has colons of its own.
fn split_host_and_port(text: &str) -> Result<(&str, &str), &'static str> {
    let Some(bracketed) = text.strip_prefix('[') else {
        return Ok(text.split_once(':').unwrap_or((text, "")));
    };
    let parts = bracketed.split_once(']').filter(|(host, _)| !host.is_empty());
    match parts.map(|(host, rest)| (host, rest, rest.strip_prefix(':'))) {
        Some((host, "", _)) => Ok((host, "")),
        Some((host, _, Some(port))) => Ok((host, port)),
        _ => Err("brackets hold an address, and a port may follow them, as in [::1]:5432"),
    }
}

/// Removes what files and environments add to a connection string or a host: white space, a byte order mark,
/// `DATABASE_URL=`, and the quotes around the whole, which `docker run --env-file` keeps.
fn trim_value(text: &str) -> &str {
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    let text = text.strip_prefix("DATABASE_URL=").unwrap_or(text);
    let unquoted = ['"', '\''].iter().find_map(|quote| text.strip_prefix(*quote)?.strip_suffix(*quote));
    unquoted.map_or(text, str::trim)
}

/// Parameters for which userd has a default: the name in the `postgres` crate, the name in libpq, and the default.
const PARAMETER_DEFAULTS: [(&str, &str, &str); 4] = [
    ("application_name", "fallback_application_name", "userd"),
    ("keepalives_idle", "keepalives_idle", "5"),
    ("keepalives_interval", "keepalives_interval", "2"),
    ("keepalives_retries", "keepalives_count", "3"),
];

/// Takes the parameters of TLS out of `values`. Returns whether TCP connections use TLS, and the TLS settings.
fn take_tls_settings(values: &mut ParamMap) -> Result<(SslMode, TlsSettings), String> {
    let roots = values.remove("sslrootcert");
    let is_system = roots.as_deref() == Some("system");
    let default = if is_system { "verify-full" } else { "prefer" };
    let mode = values.remove("sslmode").unwrap_or_else(|| default.to_owned());
    let roots = roots.filter(|_| !is_system);
    let (mode, verification) = match (&*mode, roots.is_some()) {
        ("no-verify", _) => return Err("sslmode is no-verify: write sslmode=require".to_owned()),
        // Refuses to use the system's certificates without `verify-full`, because public authorities sign certificates
        // for any host.
        (other, _) if is_system && other != "verify-full" => {
            return Err("sslrootcert=system needs sslmode=verify-full".to_owned());
        }
        ("disable", _) => (SslMode::Disable, Verification::Nothing),
        // Treats `allow` as `prefer`, which is never less safe: libpq's `allow` tries plain text first.
        ("allow" | "prefer", false) => (SslMode::Prefer, Verification::Nothing),
        ("allow" | "prefer", true) => (SslMode::Prefer, Verification::Chain),
        ("require", false) => (SslMode::Require, Verification::Nothing),
        ("require" | "verify-ca", true) => (SslMode::Require, Verification::Chain),
        ("verify-ca", false) => return Err("sslmode=verify-ca needs sslrootcert".to_owned()),
        ("verify-full", _) => (SslMode::Require, Verification::ChainAndName),
        _ => {
            let modes = "disable, allow, prefer, require, verify-ca or verify-full";
            return Err(format!("sslmode is not one of {modes}"));
        }
    };
    let client_cert_and_key = match (values.remove("sslcert"), values.remove("sslkey")) {
        (Some(certificate), Some(key)) => Some((certificate.into(), key.into())),
        (None, None) => None,
        _ => return Err("sslcert and sslkey need each other".to_owned()),
    };
    Ok((mode, TlsSettings { verification, root_file: roots.map(Into::into), client_cert_and_key }))
}

/// Returns the settings of the client library for the host at `host_index` in the lists of hosts, addresses and ports.
fn postgres_config(values: &ParamMap, host_index: usize) -> Result<postgres::Config, String> {
    let pair = |(name, value): (&String, &String)| {
        let is_list = is_listed(name, "host hostaddr port");
        let value = value.split(',').nth(host_index).filter(|_| is_list).unwrap_or(value);
        format!("{name}='{}' ", value.replace('\\', r"\\").replace('\'', r"\'"))
    };
    // Takes the source of the crate's error, because the source names the parameter, but not its value.
    let line = |error: postgres::Error| error.source().map_or_else(|| error.to_string(), ToString::to_string);
    let config = values.iter().map(pair).collect::<String>().parse::<postgres::Config>().map_err(line)?;
    match config.get_hosts() {
        [Host::Tcp(name)] if name.is_empty() || name.contains('@') => {
            Err("a host is empty or holds '@': in a password write it as %40".to_owned())
        }
        _ => Ok(config),
    }
}

/// Splits text such as `name = value name='quoted value'` into pairs. A backslash takes the next character literally.
fn parse_keyword_pairs(text: &str) -> Result<ParamList, String> {
    let (mut pairs, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let (name, after) = rest
            .split_once('=')
            .filter(|(name, _)| !name.trim_end().contains(char::is_whitespace))
            .ok_or("'=' is missing after a name (a URL begins with postgres://, and values with spaces are quoted: 'like this')")?;
        let after = after.trim_start();
        let unquoted = after.strip_prefix('\'');
        let (mut value, mut characters) = (String::new(), unquoted.unwrap_or(after).chars());
        loop {
            match characters.next() {
                Some('\\') => value.extend(characters.next()),
                Some('\'') if unquoted.is_some() => break,
                Some(c) if c.is_whitespace() && unquoted.is_none() => break,
                Some(c) => value.push(c),
                None if unquoted.is_some() => return Err("a quoted value is not closed".to_owned()),
                None => break,
            }
        }
        pairs.push((name.trim_end().to_owned(), value));
        rest = characters.as_str().trim_start();
    }
    Ok(pairs)
}

/// Returns the directory of the Unix socket if the settings name no host, as libpq does: Debian's directory if there is
/// one, else PostgreSQL's own.
fn default_socket_dir() -> &'static str {
    let directory = "/var/run/postgresql";
    if Path::new(directory).is_dir() { directory } else { "/tmp" }
}

impl fmt::Display for DbTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (database, user) = (self.hosts[0].get_dbname(), self.hosts[0].get_user());
        write!(f, "database {:?} as user {:?} on ", database.unwrap_or_default(), user.unwrap_or_default())?;
        for (at, host) in self.hosts.iter().enumerate() {
            let port = host.get_ports().first().unwrap_or(&5432);
            let name = match &host.get_hosts()[0] {
                Host::Tcp(name) if name.contains(':') => format!("[{name}]"),
                Host::Tcp(name) => name.clone(),
                Host::Unix(directory) => directory.display().to_string(),
            };
            write!(f, "{}{}:{port}", if at > 0 { ", " } else { "" }, name.escape_debug())?;
        }
        let mut modes = self.hosts.iter().map(postgres::Config::get_ssl_mode);
        f.write_str(match (modes.find(|mode| *mode != SslMode::Disable), self.tls.verification) {
            (None, _) => ", no TLS",
            (_, Verification::ChainAndName) => ", TLS verified",
            (Some(SslMode::Prefer), _) => ", TLS if the server has it",
            (_, Verification::Chain) => ", TLS verified but for the host name",
            (_, Verification::Nothing) => ", TLS not verified",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postgres::config::{ChannelBinding, TargetSessionAttrs};
    use std::time::Duration;

    /// Parses an address. Returns its line for the log and the warnings, or `! ` and the error.
    fn shown(text: &str) -> String {
        match DbTarget::parse(text, Some("me")) {
            Ok(target) => [vec![target.to_string()], target.warnings].concat().join(" | "),
            Err(error) => format!("! {error}"),
        }
    }

    /// Checks rows of `address | outcome`. In an outcome `D` stands for `database "d" as user "u" on`, and `B`, `E` and
    /// `P` stand for the problems of brackets, of percent-encoding and of a parameter.
    fn assert_rows(rows: &str) {
        for row in rows.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let (text, expected) = row.split_once('|').unwrap();
            let expected = match expected.trim() {
                "! B" => {
                    "! brackets hold an address, and a port may follow them, as in [::1]:5432".to_owned()
                }
                "! E" => format!("! {BAD_PERCENT_ENCODING}"),
                "! P" => "! each parameter after '?' must read name=value; '=' in a value is %3D".to_owned(),
                _ => expected.replace(" D ", r#" database "d" as user "u" on "#),
            };
            assert_eq!(shown(text.trim()), expected.trim(), "{row}");
        }
    }

    /// Addresses in the forms that providers of databases hand out.
    #[cfg(feature = "tls")]
    #[test]
    fn addresses_of_providers() {
        let rows = [
            // Addresses as Neon gives them
            (
                "postgresql://u:pw@ep-cool-darkness-123456-pooler.us-east-2.aws.neon.tech/d?sslmode=require&channel_binding=require",
                "ep-cool-darkness-123456-pooler.us-east-2.aws.neon.tech:5432, TLS not verified",
            ),
            (
                "postgresql://u:pw@ep-cool-darkness-123456.us-east-2.aws.neon.tech/d?sslmode=require&options=endpoint%3Dep-cool",
                "ep-cool-darkness-123456.us-east-2.aws.neon.tech:5432, TLS not verified",
            ),
            // Addresses as Supabase gives them: direct, of the session pooler, of the transaction pooler
            (
                "postgresql://u:[YOUR-PASSWORD]@db.abcdef.supabase.co:5432/d",
                "db.abcdef.supabase.co:5432, TLS if the server has it",
            ),
            (
                "postgres://u:pw@aws-0-eu-central-1.pooler.supabase.com:5432/d",
                "aws-0-eu-central-1.pooler.supabase.com:5432, TLS if the server has it",
            ),
            (
                "postgres://u:pw@aws-0-eu-central-1.pooler.supabase.com:6543/d?pgbouncer=true&connection_limit=1",
                "aws-0-eu-central-1.pooler.supabase.com:6543, TLS if the server has it | pgbouncer has no effect | connection_limit has no effect",
            ),
            (
                "postgres://u:pw@aws-0.pooler.supabase.com:6543/d?sslmode=require&supa=base-pooler.x",
                "aws-0.pooler.supabase.com:6543, TLS not verified | supa has no effect",
            ),
            // An address as Heroku gives it
            (
                "postgres://u:pw@ec2-34-1-2-3.compute-1.amazonaws.com:5432/d",
                "ec2-34-1-2-3.compute-1.amazonaws.com:5432, TLS if the server has it",
            ),
            // Addresses as RDS gives them
            (
                "postgresql://u:pw@db.123456789012.us-east-1.rds.amazonaws.com:5432/d?sslmode=verify-full&sslrootcert=/certs/global-bundle.pem",
                "db.123456789012.us-east-1.rds.amazonaws.com:5432, TLS verified",
            ),
            (
                "host=db.123456789012.us-east-1.rds.amazonaws.com port=5432 dbname=d user=u sslrootcert=/certs/global-bundle.pem sslmode=verify-ca",
                "db.123456789012.us-east-1.rds.amazonaws.com:5432, TLS verified but for the host name",
            ),
            // Addresses as Render gives them: internal, external
            ("postgresql://u:pw@dpg-abc123-a/d", "dpg-abc123-a:5432, TLS if the server has it"),
            (
                "postgresql://u:pw@dpg-abc123-a.oregon-postgres.render.com/d?ssl=true",
                "dpg-abc123-a.oregon-postgres.render.com:5432, TLS not verified",
            ),
            // Addresses as Railway gives them: internal, external
            (
                "postgresql://u:pw@postgres.railway.internal:5432/d",
                "postgres.railway.internal:5432, TLS if the server has it",
            ),
            (
                "postgresql://u:pw@monorail.proxy.rlwy.net:12345/d",
                "monorail.proxy.rlwy.net:12345, TLS if the server has it",
            ),
            // Addresses in the documentation of Prisma
            (
                "postgresql://u:pw@localhost:5432/d?schema=public&connect_timeout=10&pool_timeout=2&sslmode=require&sslaccept=strict",
                "localhost:5432, TLS not verified | schema has no effect | pool_timeout has no effect | sslaccept has no effect",
            ),
            (
                "postgresql://u:pw@localhost:5433/d?host=/var/run/postgresql/",
                "/var/run/postgresql/:5433, no TLS",
            ),
            // An address as Cloud SQL gives it
            (
                "postgresql://u:pw@localhost/d?host=/cloudsql/project:region:instance",
                "/cloudsql/project:region:instance:5432, no TLS",
            ),
        ];
        for (text, expected) in rows {
            assert_eq!(shown(text), format!("database \"d\" as user \"u\" on {expected}"), "{text}");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn hosts_and_names() {
        assert_rows(
            r#"
            host=h                                 | database "me" as user "me" on h:5432, TLS if the server has it
            postgres://u:pw@h:1/d?sslmode=disable  | D h:1, no TLS
            postgres://u@h1:1,[::1],h3:3/d         | D h1:1, [::1]:5432, h3:3, TLS if the server has it
            host=a,b port=7 user=u dbname=d        | D a:7, b:7, TLS if the server has it
            host=a host=b user=u dbname=e dbname=d | D b:5432, TLS if the server has it
            postgres://x@h/y?host=/s&port=9&user=u&dbname=d | D /s:9, no TLS
            postgres://u@%2Fs/d?sslmode=verify-full | D /s:5432, no TLS
            postgres://u@/d?host=/s&sslmode=require | D /s:5432, no TLS
            postgres://u:p:q?r#s@h/d               | D h:5432, TLS if the server has it
            hostaddr=::1 user=u dbname=d           | D [::1]:5432, TLS if the server has it
            host=h hostaddr=::1 user=u dbname=d    | D h:5432, TLS if the server has it
            dbname='x\ty' user=u host='a\tb'       | database "xty" as user "u" on atb:5432, TLS if the server has it
            host=h,/s user=u dbname=d              | D h:5432, /s:5432, TLS if the server has it
            host=/s hostaddr=1.2.3.4,1.2.3.5       | ! it has different numbers of hosts, addresses and ports
            host=a,b,c port=1,2                    | ! it has different numbers of hosts, addresses and ports
            host=a hostaddr=b                      | ! invalid value for option `hostaddr`
            postgres://h:65536                     | ! invalid value for option `port`
            host=@abstract                         | ! a host is empty or holds '@': in a password write it as %40
            postgres://u:p@ss@db/d                 | ! a password or user holds '@', '/' or '?': write %40, %2F or %3F
            postgres://u:p/ss@db/d                 | ! a password or user holds '@', '/' or '?': write %40, %2F or %3F
            postgres://u:p/s?s@db/d                | ! a password or user holds '@', '/' or '?': write %40, %2F or %3F
            postgres://u:1%@h/d                    | ! E
            postgres://u:%zz@h/d                   | ! E
            postgres://u@h%2/d                     | ! E
            postgres://u@h/d?a%g=b                 | ! E
            postgres://h/d?user=%ff                | ! E
            postgres://u@a%00b/d                   | ! a value holds NUL
            postgres://u@h/d?a=%00                 | ! a value holds NUL
            postgres://u@[]:5432/d                 | ! B
            postgres://u@[::1/d                    | ! B
            postgres://u@[::1]5432/d               | ! B
            postgres://u@h,[::1/d                  | ! B
            postgres://u@[::1]::5432/d             | ! invalid value for option `port`
            postgres://u@::1/d                     | ! invalid value for option `port`
            postgres://u@[::1]:/d                  | D [::1]:5432, TLS if the server has it
            "postgres://u:pw@h/d"                  | D h:5432, TLS if the server has it
            'postgres://u:pw@h/d?sslmode=disable'  | D h:5432, no TLS
            " postgres://u:pw@h/d "                | D h:5432, TLS if the server has it
            'user=u dbname=d host=h'               | D h:5432, TLS if the server has it
            'user=u host=h dbname='d''             | D h:5432, TLS if the server has it
            DATABASE_URL="postgres://u:pw@h/d"     | D h:5432, TLS if the server has it
            "postgres://u:pw@h/d'                  | ! a URL must start with postgres:// or postgresql://
            psql postgres://u:pw@h/d?sslmode=require | ! a URL must start with postgres:// or postgresql://
            jdbc:postgresql://h/d?user=u           | ! a URL must start with postgres:// or postgresql://
            mysql://u:pw@h/d                       | ! a URL must start with postgres:// or postgresql://
            postgresql+asyncpg://u:pw@h/d          | ! a URL must start with postgres:// or postgresql://
            host                                   | ! '=' is missing after a name (a URL begins with postgres://, and values with spaces are quoted: 'like this')
            password=my pw user=u                  | ! '=' is missing after a name (a URL begins with postgres://, and values with spaces are quoted: 'like this')
            password='pw                           | ! a quoted value is not closed
            postgres://h/d?sslmode                 | ! P
            postgres://u@h/d?nonsense=a=b          | ! P
            postgres://u@h/d?sslmode=disable?a=b   | ! P
            postgres://u@h/d?sslmode=sslmode=require | ! P
            postgres://u@h/d?options=-c%20a=b      | ! P
        "#,
        );
        let default = format!("database \"me\" as user \"me\" on {}:5432, no TLS", default_socket_dir());
        for text in ["", "postgres://", "postgresql:///?sslmode=require", "host='' user=", " \n"] {
            assert_eq!(shown(text), default, "{text}");
        }
        for text in
            ["\t postgres://u@h/d\r\n", "\u{feff}postgres://u@h/d\r\n", "\u{feff}\"postgres://u@h/d\"\r"]
        {
            assert_eq!(shown(text), shown("postgres://u@h/d"), "{text:?}");
        }
        assert_eq!(shown("dbname='a\nb' host='c\nd' sslmode=disable").lines().count(), 1);
        assert_eq!(DbTarget::parse("host=h", None).unwrap_err(), "it names no user");
    }

    #[cfg(feature = "tls")]
    #[test]
    fn modes_of_tls() {
        for (text, mode, verification, roots) in [
            ("", SslMode::Prefer, Verification::Nothing, None),
            ("sslmode=disable", SslMode::Disable, Verification::Nothing, None),
            ("sslmode=allow", SslMode::Prefer, Verification::Nothing, None),
            ("sslmode=require", SslMode::Require, Verification::Nothing, None),
            ("sslmode=prefer sslrootcert=/ca", SslMode::Prefer, Verification::Chain, Some("/ca")),
            ("sslmode=require sslrootcert='/a b'", SslMode::Require, Verification::Chain, Some("/a b")),
            ("sslmode=verify-ca sslrootcert=/ca", SslMode::Require, Verification::Chain, Some("/ca")),
            (
                "sslmode=verify-full sslrootcert=/ca",
                SslMode::Require,
                Verification::ChainAndName,
                Some("/ca"),
            ),
            ("sslmode=verify-full", SslMode::Require, Verification::ChainAndName, None),
            ("sslmode=verify-full sslrootcert=''", SslMode::Require, Verification::ChainAndName, None),
            ("sslrootcert=system", SslMode::Require, Verification::ChainAndName, None),
            ("ssl=true", SslMode::Require, Verification::Nothing, None),
            ("sslmode=require sslnegotiation=direct", SslMode::Require, Verification::Nothing, None),
        ] {
            let target = DbTarget::parse(&format!("host=h {text}"), Some("u")).unwrap();
            assert_eq!(target.hosts[0].get_ssl_mode(), mode, "{text}");
            let root_file = roots.map(Into::into);
            let tls = TlsSettings { verification, root_file, client_cert_and_key: None };
            assert_eq!(target.tls, tls, "{text}");
        }
        let target = DbTarget::parse("postgres://h?sslcert=%2Fc&sslkey=/k", Some("u")).unwrap();
        assert_eq!(target.tls.client_cert_and_key, Some(("/c".into(), "/k".into())));
        assert_rows("
            host=h sslmode=on                      | ! sslmode is not one of disable, allow, prefer, require, verify-ca or verify-full
            host=h sslmode=no-verify               | ! sslmode is no-verify: write sslmode=require
            host=h sslmode=verify-full sslmode=''  | ! sslmode is not one of disable, allow, prefer, require, verify-ca or verify-full
            host=h sslmode=verify-ca               | ! sslmode=verify-ca needs sslrootcert
            host=h sslmode=require sslrootcert=system | ! sslrootcert=system needs sslmode=verify-full
            host=h sslmode=disable sslrootcert=system | ! sslrootcert=system needs sslmode=verify-full
            host=h sslmode=verify-ca sslrootcert=system | ! sslrootcert=system needs sslmode=verify-full
            host=h sslcert=/c                      | ! sslcert and sslkey need each other
        ");
    }

    #[cfg(feature = "tls")]
    #[test]
    fn other_parameters() {
        let target = DbTarget::parse(
            "postgres://u:p%40ss@h/d?connect_timeout=3&application_name=it's&options=-c%20a%3D%5C%20b\
             &tcp_user_timeout=1500&keepalives_count=4&keepalives_idle=6&target_session_attrs=primary\
             &load_balance_hosts=random&channel_binding=require&gssencmode=prefer&fallback_application_name=x\
             &ssl_min_protocol_version=TLSv1.2",
            None,
        );
        let target = target.unwrap();
        let no_effect = |name: &str| format!("{name} has no effect");
        assert_eq!(
            target.warnings,
            ["load_balance_hosts", "gssencmode", "ssl_min_protocol_version"].map(no_effect)
        );
        let config = &target.hosts[0];
        assert_eq!(config.get_password(), Some(&b"p@ss"[..]));
        assert_eq!(config.get_connect_timeout(), Some(&Duration::from_secs(3)));
        assert_eq!(config.get_application_name(), Some("it's"));
        assert_eq!(config.get_options(), Some(r"-c a=\ b"));
        assert_eq!(config.get_tcp_user_timeout(), Some(&Duration::from_secs(2)));
        assert_eq!(config.get_keepalives_retries(), Some(4));
        assert_eq!(config.get_keepalives_idle(), Duration::from_secs(6));
        assert_eq!(config.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
        assert_eq!(config.get_channel_binding(), ChannelBinding::Require);
        let config = &DbTarget::parse("host=h user=u", None).unwrap().hosts[0];
        assert_eq!(config.get_application_name(), Some("userd"));
        assert_eq!(config.get_tcp_user_timeout(), Some(&Duration::from_secs(10)));
        assert_eq!(config.get_keepalives_idle(), Duration::from_secs(5));
        assert_eq!(config.get_keepalives_interval(), Some(Duration::from_secs(2)));
        assert_eq!(config.get_keepalives_retries(), Some(3));
        assert_rows("
            host=h connect_timeout=soon     | ! invalid value for option `connect_timeout`
            host=h channel_binding=''       | ! invalid value for option `channel_binding`
            host=h keepalives_count=x       | ! invalid value for option `keepalives_retries`
            host=h tcp_user_timeout=1s      | ! tcp_user_timeout is not a number of milliseconds
            host=h target_session_attrs=standby | ! invalid value for option `target_session_attrs`
            host=h sslmod=require           | ! parameter 2 is unknown or not supported (did you mean sslmode?)
            host=h SSLMODE=require          | ! parameter 2 is unknown or not supported (did you mean sslmode?)
            postgres://h?ssl-mode=x         | ! parameter 1 is unknown or not supported (did you mean sslmode?)
            postgres://h?sslfactory=x       | ! parameter 1 is unknown or not supported
            postgres://h?Channel_Mode=x     | ! parameter 1 is unknown or not supported
            host=h chanel_binding=require   | ! parameter 2 is unknown or not supported (did you mean channel_binding?)
            host=h pasword=secret           | ! parameter 2 is unknown or not supported (did you mean password?)
            postgres://h?ssl=false          | ! parameter 1 is ssl, which other clients have: write sslmode=disable, sslmode=require or sslmode=verify-full
            postgres://h?pool=b&ssl=1       | ! parameter 2 is ssl, which other clients have: write sslmode=disable, sslmode=require or sslmode=verify-full
            host=h sslcrl=/x                | ! parameter 2 is unknown or not supported (did you mean sslcert?)
            host=h service=x                | ! parameter 2 is unknown or not supported
            host=h requirepeer=x            | ! parameter 2 is unknown or not supported
            host=h require_auth=x           | ! parameter 2 is unknown or not supported
            host=h gssencmode=require       | ! parameter 2 is unknown or not supported
            host=h ssl_min_protocol_version=TLSv1.3 | ! parameter 2 is unknown or not supported
            postgres://u@h/d?nonsense=1     | ! parameter 1 is unknown or not supported
            host=h passfile=/x              | ! parameter 2 is unknown or not supported
        ");
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn a_build_without_tls_refuses_to_require_it() {
        for mode in ["require", "verify-full"] {
            let error = DbTarget::parse(&format!("host=h user=u sslmode={mode}"), None).unwrap_err();
            assert!(error.contains("feature `tls`"), "{error}");
        }
        assert_rows("postgres://u@h/d?sslmode=disable | D h:5432, no TLS");
    }

    #[cfg(feature = "tls")]
    #[test]
    fn single_settings() {
        let target = |host: &str, ssl, db_ssl_ca: Option<&str>| {
            let (name, user, password) = ("d".into(), "u".into(), "secret".into());
            let database = Database::Parts { host: host.into(), port: 1, name, user, password, ssl };
            DbTarget::new(&Config { database, db_ssl_ca: db_ssl_ca.map(Into::into), ..Config::default() })
        };
        let shown = |host, ssl, ca| match target(host, ssl, ca) {
            Ok(target) => target.to_string(),
            Err(error) => format!("! {error}"),
        };
        let d = "database \"d\" as user \"u\" on ";
        assert_eq!(shown("h", true, None), format!("{d}h:1, TLS verified"));
        assert_eq!(shown("\"h\"\r\n", true, None), format!("{d}h:1, TLS verified"));
        assert_eq!(shown("h", true, Some("/ca")), format!("{d}h:1, TLS verified"));
        assert_eq!(shown("h", false, None), format!("{d}h:1, no TLS"));
        assert_eq!(shown("/s", true, None), format!("{d}/s:1, no TLS"));
        let line = "! DB_SSL_CA: a file of certificates to trust is given, but TLS is off";
        assert_eq!(shown("h", false, Some("/ca")), line);
        let target = target("h", true, Some("/ca")).unwrap();
        assert_eq!(target.tls.root_file.as_deref(), Some(Path::new("/ca")));
        assert_eq!(target.hosts[0].get_ssl_mode(), SslMode::Require);
        assert_eq!(target.hosts[0].get_password(), Some(&b"secret"[..]));
    }

    #[test]
    fn no_line_shows_a_password() {
        for text in [
            "postgres://u:secret@h/d",
            "postgres://u@h/d?password=secret",
            "host=h password='secret'",
            "host=h password=secret sslmode=x",
            "host=h password=x secret",
            "host=h password=x secret=y",
            "host=h password=x sslsecret=y",
            "host=h password='secret",
            "postgres://u:secret@h:x/d",
            "postgres://u:secret/x@h/d",
            "postgres://u:x/secret@h/d",
            "postgres://u:x/y?secret=z@h/d",
            "postgres://u:x/y?secret@h/d",
            "postgres://u:1/y?a=b&secret@h/d",
            "postgres://u:secret%@h/d",
            "postgres://u:x@secret@h/d",
            "http://u:secret@h/d",
            "u:secret@h/d",
            "\"postgres://u:secret@h/d",
            "psql postgres://u:secret@h/d",
            "jdbc:postgresql://u:secret@h/d",
            "postgres://u:secret@h/d?ssl=secret",
            "host=h;port=1;user=u;password=secret",
            "host=h,password=secret dbname=d",
            "host=h user=u;Pwd=secret",
            "host=h dbname=d;Password=secret",
            "postgres://u@h/d;password=secret",
            "postgres://u@h/d&password=secret",
            "host=h dbname=postgres://u:secret@h/d",
        ] {
            let line = format!("{:?} {}", DbTarget::parse(text, Some("u")), shown(text));
            assert!(!line.contains("secret"), "{text}: {line}");
        }
    }
}
