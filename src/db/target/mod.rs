//! What database to connect to: a libpq connection string, or settings one by one, made into a
//! `postgres::Config` and TLS settings. `conninfo` owns the syntax of a connection string,
//! `parameters` what its names mean. Reads no environment and opens no connection; nothing it shows
//! holds a password.

mod conninfo;
mod parameters;
mod passfile;

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use postgres::Config;
use postgres::config::{Host, SslMode, SslNegotiation};

use self::parameters::Parameters;
use super::tls::{TlsSettings, Verify};

/// A database to connect to. `Display` is a line for the log: hosts, database, user and TLS, never
/// the password; nor does `Debug` show it.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where, as whom, and whether with TLS (`ssl_mode`).
    pub config: Config,
    /// How TLS is spoken, for `tls::connector`; `None` where it never is.
    pub tls: Option<TlsSettings>,
    /// The password file that the connection string names.
    passfile: Option<PathBuf>,
}

/// Settings given one by one; `Target::from_settings` says what they mean.
#[derive(Clone, Copy)]
pub struct Settings<'a> {
    /// Name, address, or directory of a Unix socket if it starts with `/`.
    pub host: &'a str,
    /// TCP port, or the number in a Unix socket's name.
    pub port: u16,
    /// Database name.
    pub name: &'a str,
    /// Role to log in as.
    pub user: &'a str,
    /// Its password; empty for none.
    pub password: &'a str,
    /// TLS, with certificate and host name verified; otherwise none at all.
    pub ssl: bool,
    /// PEM file of the authorities to trust; `None`: the system's.
    pub ssl_ca: Option<&'a Path>,
}

/// Why there is no target: one line that quotes neither the password nor the connection string.
#[derive(Debug, PartialEq, Eq)]
pub struct TargetError(String);

impl Target {
    /// The target that libpq would see in `text`, a URL or a keyword/value string. Where it names no
    /// user that is `os_user`, and where it names no database one called like the user.
    ///
    /// An error if the syntax or a value is wrong, or if a parameter asks for what cannot be
    /// honoured; the error names the parameter. Does not block.
    pub fn parse(text: &str, os_user: Option<&str>) -> Result<Target, TargetError> {
        let mut parameters = Parameters::new(text)?;
        let user =
            parameters.take("user").or_else(|| os_user.map(str::to_owned)).ok_or("it names no user")?;
        let dbname = parameters.take("dbname").unwrap_or_else(|| user.clone());
        let mut config = parameters.config()?;
        config.user(&user).dbname(&dbname);
        if let Some(password) = parameters.take("password") {
            config.password(password);
        }
        parameters.add_hosts(&mut config)?;
        let passfile = parameters.take("passfile").map(PathBuf::from);
        let tls = parameters.tls()?;
        Ok(Target { passfile, ..Target::new(config, tls)? })
    }

    /// Finds a password where the target has none, in libpq's order: this one (`PGPASSWORD`), then a file of
    /// passwords, which is the connection string's or else `file` (`PGPASSFILE`).
    ///
    /// An error if the file cannot be read, or has different passwords for several hosts. Blocks to read it.
    pub fn find_password(&mut self, password: Option<&str>, file: Option<&Path>) -> Result<(), TargetError> {
        let file = self.passfile.as_deref().or(file);
        match (self.config.get_password(), password, file) {
            (None, Some(password), _) => drop(self.config.password(password)),
            (None, None, Some(file)) => passfile::add_password(&mut self.config, file)?,
            _ => {}
        }
        Ok(())
    }

    /// The target made of single settings.
    ///
    /// An error if the host is empty, or if a file of authorities is given with TLS off. Does not
    /// block.
    pub fn from_settings(settings: Settings) -> Result<Target, TargetError> {
        if settings.host.is_empty() {
            return Err("the host is empty".into());
        }
        if settings.ssl_ca.is_some() && !settings.ssl {
            return Err("a file of certificates to trust is given, but TLS is off".into());
        }
        let mut config = Config::new();
        config.host(settings.host).port(settings.port);
        config.dbname(settings.name).user(settings.user);
        if !settings.password.is_empty() {
            config.password(settings.password);
        }
        let verify_full = TlsSettings {
            verify: Verify::ChainAndName,
            roots: settings.ssl_ca.map(Path::to_owned),
            client: None,
        };
        Target::new(config, settings.ssl.then_some((SslMode::Require, verify_full)))
    }

    /// Joins the two halves: TLS is never spoken over Unix sockets, whatever was asked for.
    fn new(mut config: Config, tls: Option<(SslMode, TlsSettings)>) -> Result<Target, TargetError> {
        let unix = |host: &Host| matches!(host, Host::Unix(_));
        let (mode, tls) = match tls {
            Some(_) if config.get_hosts().iter().all(unix) => (SslMode::Disable, None),
            // As libpq does that was built without TLS: `prefer` is plain text, and `require` fails.
            Some((SslMode::Require, _)) if cfg!(not(feature = "tls")) => {
                return Err("TLS is required, and userd was built without it (feature `tls`)".into());
            }
            Some(_) if cfg!(not(feature = "tls")) => (SslMode::Disable, None),
            // One `ssl_mode` serves all hosts, and `Require` refuses Unix sockets.
            Some((SslMode::Require, _)) if config.get_hosts().iter().any(unix) => {
                return Err("TLS cannot be required when some hosts are Unix sockets".into());
            }
            Some((mode, tls)) => (mode, Some(tls)),
            None => (SslMode::Disable, None),
        };
        config.ssl_mode(mode);
        if mode == SslMode::Prefer && config.get_ssl_negotiation() == SslNegotiation::Direct {
            return Err("sslnegotiation=direct needs sslmode=require or stricter".into());
        }
        Ok(Target { config, tls, passfile: None })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = &self.config;
        let database = config.get_dbname().unwrap_or_default();
        let user = config.get_user().unwrap_or_default();
        write!(f, "database {database:?} as user {user:?} on ")?;
        for (at, host) in config.get_hosts().iter().enumerate() {
            let ports = config.get_ports();
            let port = ports.get(at).or(ports.first()).copied().unwrap_or_default();
            let comma = if at > 0 { ", " } else { "" };
            match host {
                Host::Tcp(name) if name.contains(':') => write!(f, "{comma}[{name}]:{port}")?,
                Host::Tcp(name) => write!(f, "{comma}{}:{port}", name.escape_debug())?,
                Host::Unix(path) => write!(f, "{comma}{}:{port}", path.to_string_lossy().escape_debug())?,
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

impl fmt::Display for TargetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for TargetError {}

impl From<&str> for TargetError {
    fn from(line: &str) -> TargetError {
        TargetError(line.into())
    }
}

impl From<String> for TargetError {
    fn from(line: String) -> TargetError {
        TargetError(line)
    }
}

#[cfg(all(test, not(feature = "tls")))]
mod tests {
    use super::*;

    #[test]
    fn without_tls_it_is_refused_where_it_is_required() {
        for mode in ["require", "verify-full"] {
            let error = Target::parse(&format!("host=h user=u sslmode={mode}"), None).unwrap_err();
            assert!(error.to_string().contains("feature `tls`"), "{error}");
        }
        for mode in ["prefer", "disable"] {
            let target = Target::parse(&format!("host=h user=u sslmode={mode}"), None).unwrap();
            assert!(target.to_string().ends_with(", no TLS"), "{target}");
        }
    }
}

#[cfg(all(test, feature = "tls"))]
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
        let socket = parameters::socket_directory().display();
        let default = format!("database \"me\" as user \"me\" on {socket}:5432, no TLS");
        for text in ["", "postgres://", "postgresql:///?sslmode=require", "host='' user="] {
            assert_eq!(shown(text), default, "{text}");
        }
        assert_eq!(shown("dbname='a\nb' host='c\nd' sslmode=disable").lines().count(), 1);
        assert_eq!(Target::parse("host=h", None).unwrap_err().to_string(), "it names no user");
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
        let settings = Settings {
            host: "h",
            port: 1,
            name: "d",
            user: "u",
            password: "secret",
            ssl: true,
            ssl_ca: None,
        };
        let shown = |settings| match Target::from_settings(settings) {
            Ok(target) => target.to_string(),
            Err(error) => format!("! {error}"),
        };
        let d = "database \"d\" as user \"u\" on ";
        assert_eq!(shown(settings), format!("{d}h:1, TLS verified"));
        let plain = Settings { ssl: false, ..settings };
        assert_eq!(shown(plain), format!("{d}h:1, no TLS"));
        assert_eq!(shown(Settings { host: "/s", ..settings }), format!("{d}/s:1, no TLS"));
        assert_eq!(shown(Settings { host: "", ..settings }), "! the host is empty");
        let ca = Some(Path::new("/ca"));
        let line = "! a file of certificates to trust is given, but TLS is off";
        assert_eq!(shown(Settings { ssl_ca: ca, ..plain }), line);
        let target = Target::from_settings(plain).unwrap();
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
