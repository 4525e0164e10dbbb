//! What database to connect to: a libpq connection string, or settings one by one, made into a
//! `postgres::Config` and TLS settings. `conninfo` owns the syntax of a connection string,
//! `parameters` what its names mean. Reads no environment and opens no connection; nothing it shows
//! holds a password.

mod conninfo;
mod parameters;
mod passfile;

#[cfg(feature = "command")]
pub use parameters::of_variable;

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use postgres::Config as ClientConfig;
use postgres::config::{SslMode, SslNegotiation};

use self::parameters::Parameters;
use super::connect::CONNECT_TIMEOUT;
use super::tls::{TlsSettings, Verify};
use crate::config::{Config, ConfigError, Database};

/// A database to connect to. `Display` is a line for the log: hosts, database, user and TLS, never
/// the password; nor does `Debug` show it.
#[derive(Clone, Debug)]
pub struct Target {
    /// As whom, and whether with TLS (`ssl_mode`); without the hosts.
    pub config: ClientConfig,
    /// Where: at least one.
    pub hosts: Vec<Host>,
    /// How TLS is spoken, for `tls::connector`; `None` where it never is.
    pub tls: Option<TlsSettings>,
    /// The password file that the connection string names.
    passfile: Option<PathBuf>,
}

/// Where a server is.
#[derive(Clone, Debug)]
pub struct Host {
    /// Name, address, or directory of a Unix socket if it starts with `/`.
    pub name: String,
    /// The address that the name stands for, where it is given.
    pub address: Option<IpAddr>,
    /// TCP port, or the number in a Unix socket's name.
    pub port: u16,
}

impl Host {
    fn is_socket(&self) -> bool {
        self.name.starts_with('/')
    }
}

impl Target {
    /// The target of these settings. An error if the syntax or a value is wrong, if a parameter asks for what cannot be
    /// honoured, or if a file of passwords cannot be read; it names the variable. Blocks to read that file.
    pub fn new(config: &Config) -> Result<Target, ConfigError> {
        let wrong = |variable| move |problem: String| ConfigError { variable, problem };
        let mut target = match &config.database {
            Database::Url(url) => {
                Target::parse(url.expose(), config.os_user.as_deref()).map_err(wrong("DATABASE_URL"))?
            }
            Database::Parts { host, .. } if host.is_empty() => {
                return Err(wrong("DB_HOST")("the host is empty".to_owned()));
            }
            Database::Parts { ssl: false, .. } if config.db_ssl_ca.is_some() => {
                let problem = "a file of certificates to trust is given, but TLS is off";
                return Err(wrong("DB_SSL_CA")(problem.to_owned()));
            }
            Database::Parts { host, port, name, user, password, ssl } => {
                let mut options = ClientConfig::new();
                options.dbname(name).user(user);
                if !password.expose().is_empty() {
                    options.password(password.expose());
                }
                let verify_full = TlsSettings {
                    verify: Verify::ChainAndName,
                    roots: config.db_ssl_ca.clone(),
                    client: None,
                };
                let hosts = vec![Host { name: host.clone(), address: None, port: *port }];
                let tls = ssl.then_some((SslMode::Require, verify_full));
                Target::join(options, hosts, tls).map_err(wrong("DB_SSL"))?
            }
        };
        // libpq's order: its variable, the connection string's file of passwords, or else that of the other variable.
        let file = target.passfile.as_deref().or(config.pg_pass_file.as_deref());
        match (target.config.get_password(), &config.pg_password, file) {
            (None, Some(password), _) => drop(target.config.password(password.expose())),
            (None, None, Some(file)) => passfile::add_password(&mut target.config, &target.hosts, file)
                .map_err(wrong("PGPASSFILE"))?,
            _ => {}
        }
        if target.config.get_application_name().is_none() {
            target.config.application_name("userd");
        }
        if target.config.get_connect_timeout().is_none() {
            target.config.connect_timeout(CONNECT_TIMEOUT.min(config.db_connect_timeout));
        }
        Ok(target)
    }

    /// The target that libpq would see in `text`, a URL or a keyword/value string. Where it names no
    /// user that is `os_user`, and where it names no database one called like the user. An error names the parameter.
    pub fn parse(text: &str, os_user: Option<&str>) -> Result<Target, String> {
        let mut parameters = Parameters::new(text)?;
        let user =
            parameters.take("user").or_else(|| os_user.map(str::to_owned)).ok_or("it names no user")?;
        let dbname = parameters.take("dbname").unwrap_or_else(|| user.clone());
        let mut config = parameters.config()?;
        config.user(&user).dbname(&dbname);
        if let Some(password) = parameters.take("password") {
            config.password(password);
        }
        let hosts = parameters.hosts()?;
        let passfile = parameters.take("passfile").map(PathBuf::from);
        Ok(Target { passfile, ..Target::join(config, hosts, parameters.tls()?)? })
    }

    /// What a client connects to these of its hosts with.
    pub fn config_for(&self, hosts: &[Host]) -> ClientConfig {
        let mut config = self.config.clone();
        for Host { name, address, port } in hosts {
            config.host(name).port(*port);
            if let Some(address) = address {
                config.hostaddr(*address);
            }
        }
        config
    }

    /// Joins the halves: TLS is never spoken over Unix sockets, whatever was asked for.
    fn join(
        mut config: ClientConfig,
        hosts: Vec<Host>,
        tls: Option<(SslMode, TlsSettings)>,
    ) -> Result<Target, String> {
        let (mode, tls) = match tls {
            Some(_) if hosts.iter().all(Host::is_socket) => (SslMode::Disable, None),
            // As libpq does that was built without TLS: `prefer` is plain text, and `require` fails.
            Some((SslMode::Require, _)) if cfg!(not(feature = "tls")) => {
                return Err("TLS is required, and userd was built without it (feature `tls`)".into());
            }
            Some(_) if cfg!(not(feature = "tls")) => (SslMode::Disable, None),
            // One `ssl_mode` serves all hosts, and `Require` refuses Unix sockets.
            Some((SslMode::Require, _)) if hosts.iter().any(Host::is_socket) => {
                return Err("TLS cannot be required when some hosts are Unix sockets".into());
            }
            Some((mode, tls)) => (mode, Some(tls)),
            None => (SslMode::Disable, None),
        };
        config.ssl_mode(mode);
        if mode == SslMode::Prefer && config.get_ssl_negotiation() == SslNegotiation::Direct {
            return Err("sslnegotiation=direct needs sslmode=require or stricter".into());
        }
        Ok(Target { config, hosts, tls, passfile: None })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = &self.config;
        let database = config.get_dbname().unwrap_or_default();
        let user = config.get_user().unwrap_or_default();
        write!(f, "database {database:?} as user {user:?} on ")?;
        for (at, host) in self.hosts.iter().enumerate() {
            let (name, port) = (host.name.escape_debug(), host.port);
            let comma = if at > 0 { ", " } else { "" };
            match host.name.contains(':') && !host.is_socket() {
                true => write!(f, "{comma}[{name}]:{port}")?,
                false => write!(f, "{comma}{name}:{port}")?,
            }
        }
        f.write_str(match (config.get_ssl_mode(), self.tls.as_ref().map(|tls| tls.verify)) {
            (_, None) => ", no TLS",
            (_, Some(Verify::ChainAndName)) => ", TLS verified",
            (SslMode::Prefer, Some(_)) => ", TLS if the server has it",
            (_, Some(Verify::Chain)) => ", TLS verified but for the host name",
            (_, Some(Verify::Nothing)) => ", TLS not verified",
        })
    }
}

#[cfg(test)]
#[cfg(not(feature = "tls"))]
mod tests {
    use super::*;

    #[test]
    fn without_tls_it_is_refused_where_it_is_required() {
        for mode in ["require", "verify-full"] {
            let error = Target::parse(&format!("host=h user=u sslmode={mode}"), None).unwrap_err();
            assert!(error.contains("feature `tls`"), "{error}");
        }
        for mode in ["prefer", "disable"] {
            let target = Target::parse(&format!("host=h user=u sslmode={mode}"), None).unwrap();
            assert!(target.to_string().ends_with(", no TLS"), "{target}");
        }
    }
}

#[cfg(test)]
#[cfg(feature = "tls")]
mod tests {
    use super::*;
    use std::time::Duration;

    /// What a connection string comes to: the log line, or `! ` and the error.
    fn shown(text: &str) -> String {
        match Target::parse(text, Some("me")) {
            Ok(target) => target.to_string(),
            Err(error) => format!("! {error}"),
        }
    }

    /// Checks rows of `connection string | outcome`, in which `D` is `database "d" as user "u" on`.
    fn table(rows: &str) {
        for row in rows.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let (text, expected) = row.split_once('|').unwrap();
            let expected = expected.replace(" D ", r#" database "d" as user "u" on "#);
            assert_eq!(shown(text.trim()), expected.trim(), "{row}");
        }
    }

    #[test]
    fn hosts_and_names() {
        table(
            r#"
            host=h                                 | database "me" as user "me" on h:5432, TLS if the server has it
            postgres://u:pw@h:1/d?sslmode=disable  | D h:1, no TLS
            postgres://u@h1:1,[::1],h3:3/d         | D h1:1, [::1]:5432, h3:3, TLS if the server has it
            host=a,b port=7 user=u dbname=d        | D a:7, b:7, TLS if the server has it
            host=a host=b user=u dbname=e dbname=d | D b:5432, TLS if the server has it
            postgres://x@h/y?host=/s&port=9&user=u&dbname=d | D /s:9, no TLS
            postgres://u@%2Fs/d?sslmode=verify-full | D /s:5432, no TLS
            postgres://u@/d?host=/s&sslmode=require | D /s:5432, no TLS
            hostaddr=::1 user=u dbname=d           | D [::1]:5432, TLS if the server has it
            host=h hostaddr=::1 user=u dbname=d    | D h:5432, TLS if the server has it
            host=h,127.0.0.1 hostaddr=::1, user=u dbname=d | D h:5432, 127.0.0.1:5432, TLS if the server has it
            dbname='x\ty' user=u host='a\tb'       | database "xty" as user "u" on atb:5432, TLS if the server has it
            host=h,/s user=u dbname=d              | D h:5432, /s:5432, TLS if the server has it
            host=h,/s sslmode=require              | ! TLS cannot be required when some hosts are Unix sockets
            host=/s hostaddr=1.2.3.4 sslmode=require | ! hostaddr does not go with a Unix socket
            host=a,b hostaddr=1.2.3.4              | ! host and hostaddr have different numbers of entries
            host=a,b hostaddr=1.2.3.4,             | ! hostaddr is not an IP address
            host=a,b,c port=1,2                    | ! host and port have different numbers of entries
            host=a port=0                          | ! port is not a number from 1 to 65535
            postgres://h:65536                     | ! port is not a number from 1 to 65535
            host=@abstract                         | ! abstract Unix sockets are not supported
        "#,
        );
        let socket = parameters::socket_directory();
        let default = format!("database \"me\" as user \"me\" on {socket}:5432, no TLS");
        for text in ["", "postgres://", "postgresql:///?sslmode=require", "host='' user="] {
            assert_eq!(shown(text), default, "{text}");
        }
        assert_eq!(shown("dbname='a\nb' host='c\nd' sslmode=disable").lines().count(), 1);
        assert_eq!(Target::parse("host=h", None).unwrap_err(), "it names no user");
    }

    #[test]
    fn tls_settings() {
        for (text, mode, verify, roots) in [
            ("", SslMode::Prefer, Verify::Nothing, None),
            ("sslmode=allow", SslMode::Prefer, Verify::Nothing, None),
            ("sslmode=require", SslMode::Require, Verify::Nothing, None),
            ("sslmode=prefer sslrootcert=/ca", SslMode::Prefer, Verify::Chain, Some("/ca")),
            ("sslmode=require sslrootcert='/a b'", SslMode::Require, Verify::Chain, Some("/a b")),
            ("sslmode=verify-ca sslrootcert=/ca", SslMode::Require, Verify::Chain, Some("/ca")),
            ("sslmode=verify-full sslrootcert=/ca", SslMode::Require, Verify::ChainAndName, Some("/ca")),
            ("sslmode=verify-full", SslMode::Require, Verify::ChainAndName, None),
            ("sslmode=verify-full sslrootcert=''", SslMode::Require, Verify::ChainAndName, None),
            ("sslrootcert=system", SslMode::Require, Verify::ChainAndName, None),
            ("sslmode=require sslnegotiation=direct", SslMode::Require, Verify::Nothing, None),
        ] {
            let target = Target::parse(&format!("host=h {text}"), Some("u")).unwrap();
            assert_eq!(target.config.get_ssl_mode(), mode, "{text}");
            let tls = TlsSettings { verify, roots: roots.map(Into::into), client: None };
            assert_eq!(target.tls, Some(tls), "{text}");
        }
        let target = Target::parse("postgres://h?sslcert=%2Fc&sslkey=/k", Some("u")).unwrap();
        assert_eq!(target.tls.unwrap().client, Some(("/c".into(), "/k".into())));
        table("
            host=h sslmode=on                      | ! sslmode is not one of disable, allow, prefer, require, verify-ca or verify-full
            host=h sslmode=verify-full sslmode=''  | ! sslmode is not one of disable, allow, prefer, require, verify-ca or verify-full
            host=h sslmode=verify-ca               | ! sslmode=verify-ca needs sslrootcert
            host=h sslmode=require sslrootcert=system | ! sslrootcert=system needs sslmode=verify-full
            host=h sslmode=disable sslrootcert=system | ! sslrootcert=system needs sslmode=verify-full
            host=h sslcert=/c                      | ! sslcert and sslkey need each other
            host=h sslnegotiation=direct           | ! sslnegotiation=direct needs sslmode=require or stricter
        ");
    }

    #[test]
    fn other_parameters() {
        let target = Target::parse(
            "postgres://u:p%40ss@h/d?connect_timeout=3&application_name=it's&options=-c%20a%3D%5C%20b\
             &tcp_user_timeout=1500&keepalives_count=4&keepalives_idle=5&target_session_attrs=read-write\
             &load_balance_hosts=random&channel_binding=require&client_encoding=auto&gssencmode=prefer\
             &fallback_application_name=x&sslsni=1&ssl_min_protocol_version=TLSv1.2",
            None,
        );
        let config = target.unwrap().config;
        assert_eq!(config.get_password(), Some(&b"p@ss"[..]));
        assert_eq!(config.get_connect_timeout(), Some(&Duration::from_secs(3)));
        assert_eq!(config.get_application_name(), Some("it's"));
        assert_eq!(config.get_options(), Some(r"-c a=\ b"));
        assert_eq!(config.get_tcp_user_timeout(), Some(&Duration::from_millis(1500)));
        assert_eq!(config.get_keepalives_retries(), Some(4));
        assert_eq!(config.get_keepalives_idle(), Duration::from_secs(5));
        table("
            host=h connect_timeout=soon     | ! invalid value for option `connect_timeout`
            host=h channel_binding=''       | ! invalid value for option `channel_binding`
            host=h keepalives_count=x       | ! keepalives_count is not a whole number
            host=h target_session_attrs=standby | ! target_session_attrs can be any, read-write or read-only, no other
            host=h sslcrl=/x                | ! sslcrl, or the value given for it, is not supported
            host=h service=x                | ! service, or the value given for it, is not supported
            host=h sslcrl=x                 | ! sslcrl, or the value given for it, is not supported
            host=h requirepeer=x            | ! requirepeer, or the value given for it, is not supported
            host=h require_auth=x           | ! require_auth, or the value given for it, is not supported
            host=h gssencmode=require       | ! gssencmode, or the value given for it, is not supported
            host=h ssl_min_protocol_version=TLSv1.3 | ! ssl_min_protocol_version, or the value given for it, is not supported
            host=h replication=database     | ! replication, or the value given for it, is not supported
            host=h sslcrl='' passfile='' user=u dbname=d | D h:5432, TLS if the server has it
        ");
    }

    #[test]
    fn single_settings() {
        let target = |host: &str, ssl, db_ssl_ca: Option<PathBuf>| {
            let (name, user, password) = ("d".into(), "u".into(), "secret".into());
            let database = Database::Parts { host: host.into(), port: 1, name, user, password, ssl };
            Target::new(&Config { database, db_ssl_ca, ..Config::default() })
        };
        let shown = |host, ssl, ca| match target(host, ssl, ca) {
            Ok(target) => target.to_string(),
            Err(error) => format!("! {error}"),
        };
        let d = "database \"d\" as user \"u\" on ";
        assert_eq!(shown("h", true, None), format!("{d}h:1, TLS verified"));
        assert_eq!(shown("h", false, None), format!("{d}h:1, no TLS"));
        assert_eq!(shown("/s", true, None), format!("{d}/s:1, no TLS"));
        assert_eq!(shown("", true, None), "! DB_HOST: the host is empty");
        let line = "! DB_SSL_CA: a file of certificates to trust is given, but TLS is off";
        assert_eq!(shown("h", false, Some("/ca".into())), line);
        let target = target("h", false, None).unwrap();
        assert_eq!((target.config.get_ssl_mode(), target.tls), (SslMode::Disable, None));
        assert_eq!(target.config.get_password(), Some(&b"secret"[..]));
    }

    #[test]
    fn nothing_shows_a_password() {
        for text in [
            "postgres://u:secret@h/d",
            "postgres://u@h/d?password=secret",
            "host=h password='secret'",
            "host=h password=secret sslmode=x",
            "host=h password=x secret",
            "host=h password=x secret=y",
            "host=h password='secret",
            "postgres://u:secret@h:x/d",
            "postgres://u:secret/x@h/d",
            "postgres://u:x/secret@h/d",
            "postgres://u:x/y?secret=z@h/d",
            "postgres://u:x/y?secret@h/d",
            "postgres://u:secret%@h/d",
            "postgres://u:x@secret@h/d",
            "http://u:secret@h/d",
            "u:secret@h/d",
        ] {
            let line = format!("{:?} {}", Target::parse(text, Some("u")), shown(text));
            assert!(!line.contains("secret"), "{text}: {line}");
        }
    }
}
