//! What each name in a libpq connection string means here: what goes into `postgres::Config`, what
//! into TLS settings, what makes no difference and what is refused. An error names the parameter and
//! quotes no value. Opens nothing; looks whether Debian's socket directory is there.

use std::error::Error;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use postgres::Config;
use postgres::config::SslMode;

use super::{Host, conninfo};
use crate::{
    config::nearest,
    db::tls::{TlsSettings, Verify},
};

/// The parameters of a connection string, each once, the last one given.
pub struct Parameters(Vec<(String, String)>);

impl Parameters {
    /// Parses `text`; an error if a parameter is unknown or cannot be honoured.
    pub fn new(text: &str) -> Result<Parameters, String> {
        let listed = |list: &str, name: &str| list.split(' ').any(|listed| listed == name);
        let harmless = |name: &str| HARMLESS.iter().find(|(harmless, _)| *harmless == name);
        let given = conninfo::parse(text, &|name| (!known().any(|known| known == name)).then(|| hint(name)))?;
        let mut all: Vec<(String, String)> = Vec::new();
        for (name, value) in given {
            all.retain(|(known, _)| *known != name);
            all.push((name, value));
        }
        // As in libpq, an empty value is as good as none, but not where one of a few words is due.
        let words = "channel_binding load_balance_hosts sslmode sslnegotiation target_session_attrs";
        all.retain(|(name, value)| !value.is_empty() || listed(words, name));
        for (name, value) in &all {
            let honoured = match harmless(name) {
                Some((_, values)) => values.is_empty() || values.contains(&value.as_str()),
                None => !listed(REFUSED, name),
            };
            if !honoured {
                return Err(format!("{name}, or the value given for it, is not supported"));
            }
        }
        Ok(Parameters(all))
    }

    /// The value of `name`, unless it is missing or empty.
    pub fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.swap_remove(at).1)
    }

    /// A configuration with everything but user, password, database and hosts.
    pub fn config(&mut self) -> Result<Config, String> {
        let is_refused = |(name, value): &(String, String)| {
            name == "target_session_attrs"
                && matches!(value.as_str(), "primary" | "standby" | "prefer-standby")
        };
        if self.0.iter().any(is_refused) {
            return Err("target_session_attrs can be any, read-write or read-only, no other".into());
        }
        let mut text = String::new();
        for name in SHARED.split(' ') {
            if let Some(value) = self.take(name) {
                let quoted = value.replace('\\', r"\\").replace('\'', r"\'");
                text += &format!("{name}='{quoted}' ");
            }
        }
        let mut config = text.parse::<Config>().map_err(|error| {
            // "invalid value for option `…`": it names the parameter and quotes no value.
            error.source().map_or_else(|| error.to_string(), ToString::to_string)
        })?;
        if let Some(name) = self.take("fallback_application_name")
            && config.get_application_name().is_none()
        {
            config.application_name(&name);
        }
        if let Some(retries) = self.number("keepalives_count")? {
            config.keepalives_retries(retries);
        }
        // Milliseconds in libpq, which `postgres::Config` would read as seconds.
        if let Some(milliseconds) = self.number("tcp_user_timeout")?.filter(|&ms| ms > 0) {
            config.tcp_user_timeout(Duration::from_millis(milliseconds.into()));
        }
        Ok(config)
    }

    fn number(&mut self, name: &str) -> Result<Option<u32>, String> {
        let number = self.take(name).map(|value| value.trim().parse());
        number.transpose().map_err(|_| format!("{name} is not a whole number"))
    }

    /// The hosts, with a port each.
    pub fn hosts(&mut self) -> Result<Vec<Host>, String> {
        let [hosts, addresses, ports] = ["host", "hostaddr", "port"].map(|name| self.take(name));
        let [hosts, addresses, ports] = [&hosts, &addresses, &ports]
            .map(|list| -> Vec<&str> { list.iter().flat_map(|list| list.split(',')).collect() });
        let servers = hosts.len().max(addresses.len()).max(1);
        if !hosts.is_empty() && !addresses.is_empty() && hosts.len() != addresses.len() {
            return Err("host and hostaddr have different numbers of entries".into());
        }
        if ports.len() > 1 && ports.len() != servers {
            return Err("host and port have different numbers of entries".into());
        }
        let host = |at| {
            let (name, address) = match (entry(&hosts, at), entry(&addresses, at)) {
                (Some(name), _) if name.starts_with('@') => {
                    return Err("abstract Unix sockets are not supported".into());
                }
                (name, None) if addresses.is_empty() => (name.unwrap_or(socket_directory()), None),
                // With an address the name is but one to verify: the address, if there is no other.
                (name, address) => {
                    let address = address.or(name).unwrap_or_default();
                    let number: IpAddr = address.parse().map_err(|_| "hostaddr is not an IP address")?;
                    (name.unwrap_or(address), Some(number))
                }
            };
            if name.starts_with('/') && address.is_some() {
                return Err("hostaddr does not go with a Unix socket".into());
            }
            // A single port serves every server.
            let port = match entry(&ports, if ports.len() == 1 { 0 } else { at }) {
                Some(port) => port.trim().parse().ok().filter(|&port| port > 0),
                None => Some(DEFAULT_PORT),
            };
            let port = port.ok_or("port is not a number from 1 to 65535")?;
            Ok(Host { name: name.to_owned(), address, port })
        };
        (0..servers).map(host).collect()
    }

    /// Whether and how TLS is spoken over TCP; `None` for not at all.
    pub fn tls(&mut self) -> Result<Option<(SslMode, TlsSettings)>, String> {
        let roots = self.take("sslrootcert");
        let system = roots.as_deref() == Some("system");
        let default = if system { "verify-full" } else { "prefer" };
        let mode = self.take("sslmode").unwrap_or_else(|| default.into());
        if system && mode != "verify-full" {
            return Err("sslrootcert=system needs sslmode=verify-full".into());
        }
        let (mode, verify) = match mode.as_str() {
            "disable" => return Ok(None),
            // `allow` would speak TLS only where plain text is refused: this is never less safe.
            "allow" | "prefer" => (SslMode::Prefer, Verify::Nothing),
            "require" => (SslMode::Require, Verify::Nothing),
            "verify-ca" => (SslMode::Require, Verify::Chain),
            "verify-full" => (SslMode::Require, Verify::ChainAndName),
            _ => {
                let modes = "disable, allow, prefer, require, verify-ca or verify-full";
                return Err(format!("sslmode is not one of {modes}"));
            }
        };
        let roots = roots.filter(|_| !system).map(PathBuf::from);
        let verify = match (verify, &roots) {
            (Verify::Nothing, Some(_)) => Verify::Chain,
            // Anybody can have a certificate for some name signed by a public authority.
            (Verify::Chain, None) => return Err("sslmode=verify-ca needs sslrootcert".into()),
            (verify, _) => verify,
        };
        let client = match (self.take("sslcert"), self.take("sslkey")) {
            (Some(certificate), Some(key)) => Some((certificate.into(), key.into())),
            (None, None) => None,
            _ => return Err("sslcert and sslkey need each other".into()),
        };
        Ok(Some((mode, TlsSettings { verify, roots, client })))
    }
}

/// What may be meant by a name that is unknown. The name itself is not repeated: it may be a piece of a password.
fn hint(name: &str) -> String {
    if let Some((foreign, instead)) = FOREIGN.iter().find(|(foreign, _)| name.eq_ignore_ascii_case(foreign)) {
        return format!(": instead of {foreign}, {instead}");
    }
    nearest(name, known()).map_or_else(String::new, |meant| format!(" (did you mean {meant}?)"))
}

/// All names that libpq knows.
fn known() -> impl Iterator<Item = &'static str> {
    let listed = [OWN, SHARED, REFUSED].into_iter().flat_map(|list| list.split(' '));
    listed.chain(HARMLESS.iter().map(|(harmless, _)| *harmless))
}

/// The parameter that a variable of libpq stands for; `None` where it is none of those.
#[cfg(feature = "command")]
pub fn of_variable(variable: &str) -> Option<&'static str> {
    let name = variable.strip_prefix("PG")?.to_ascii_lowercase().replace('_', "");
    let name = match name.as_str() {
        "database" => "dbname",
        "requiressl" => "sslmode",
        "appname" => "applicationname",
        name => name,
    };
    known().find(|parameter| parameter.replace('_', "") == name)
}

/// The entry at `at`, unless it is missing or empty.
fn entry<'a>(list: &[&'a str], at: usize) -> Option<&'a str> {
    list.get(at).copied().filter(|entry| !entry.is_empty())
}

/// Where libpq looks for a Unix socket when no host is named: Debian's directory, or upstream's where
/// there is none such.
pub fn socket_directory() -> &'static str {
    let directory = "/var/run/postgresql";
    if Path::new(directory).is_dir() { directory } else { "/tmp" }
}

const DEFAULT_PORT: u16 = 5432;

/// Known to libpq, and given a meaning here.
const OWN: &str = "dbname fallback_application_name host hostaddr keepalives_count passfile password port \
    sslcert sslkey sslmode sslrootcert tcp_user_timeout user";

/// Known to libpq and to `postgres::Config`, with one meaning.
const SHARED: &str = "application_name channel_binding connect_timeout keepalives keepalives_idle \
    keepalives_interval load_balance_hosts options sslnegotiation target_session_attrs";

/// Known to libpq, and refused: ignoring one silently could, for instance, leave a connection less secure than asked
/// for.
const REFUSED: &str = "oauth_client_id oauth_client_secret oauth_issuer oauth_scope \
    require_auth requirepeer scram_client_key scram_server_key service servicefile sslcrl sslcrldir \
    sslkeylogfile sslpassword";

/// Known to other programs' URLs, and what says the same here.
const FOREIGN: [(&str, &str); 5] = [
    ("schema", SCHEMA),
    ("currentSchema", SCHEMA),
    ("search_path", SCHEMA),
    ("connection_limit", "the variable DB_POOL_SIZE"),
    ("pgbouncer", "the variable DB_PREPARED=false"),
];
const SCHEMA: &str =
    "options=-csearch_path%3DNAME (options='-c search_path=NAME' without a URL) names the schema";

/// Known to libpq, and without effect here for these values (for any, where none is listed): there is
/// no GSSAPI, no TLS compression and nothing older than TLS 1.2, and the service speaks UTF-8.
const HARMLESS: [(&str, &[&str]); 13] = [
    ("client_encoding", &[]),
    ("gssdelegation", &[]),
    ("gssencmode", &["disable", "prefer"]),
    ("gsslib", &[]),
    ("krbsrvname", &[]),
    ("max_protocol_version", &["3.0", "latest"]),
    ("min_protocol_version", &["3.0"]),
    ("replication", &["false", "off", "no", "0"]),
    ("ssl_max_protocol_version", &["TLSv1.3"]),
    ("ssl_min_protocol_version", &["TLSv1", "TLSv1.1", "TLSv1.2"]),
    ("sslcertmode", &["allow"]),
    ("sslcompression", &[]),
    ("sslsni", &["1"]),
];
