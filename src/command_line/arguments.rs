//! The arguments, and the text of `--help`. Knows no variable but those that an argument replaces.

use super::ending::Parent;
use std::{ffi::OsString, path::PathBuf};
use userd::config::SETTINGS;

/// What the command is to do.
pub enum Arguments {
    Help,
    Version,
    Healthcheck(Address),
    Serve(Serve),
}

/// How the service is to run.
#[derive(Default)]
pub struct Serve {
    /// The directory of a private cluster.
    pub dir: Option<PathBuf>,
    /// On a database that is dropped at the end.
    pub ephemeral: bool,
    /// The process whose end is the end of this one.
    pub parent: Option<Parent>,
    pub address: Address,
}

impl Serve {
    /// Whether the database is one that the command starts.
    pub fn embedded(&self) -> bool {
        self.dir.is_some() || self.ephemeral
    }
}

/// Where the service listens, as far as the arguments say.
#[derive(Default)]
pub struct Address {
    host: Option<OsString>,
    port: Option<OsString>,
}

impl Address {
    /// What the arguments say instead of the variables.
    pub fn variable(&self, name: &str) -> Option<OsString> {
        match name {
            "HOST" => self.host.clone(),
            "PORT" => self.port.clone(),
            _ => None,
        }
    }
}

impl Arguments {
    /// The error is a line without `userd: ` before it.
    pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Arguments, String> {
        let mut arguments = arguments.peekable();
        let healthcheck = arguments.next_if(|first| first == "healthcheck").is_some();
        let mut serve = Serve::default();
        let mut embedded = false;
        while let Some(argument) = arguments.next() {
            let text = argument.to_str().unwrap_or_default();
            let (name, value) = match text.split_once('=') {
                Some((name, value)) => (name, Some(OsString::from(value))),
                None => (text, None),
            };
            let mut needed = |value: Option<OsString>| {
                let value = value.or_else(|| arguments.next());
                value.filter(|value| !value.is_empty()).ok_or(format!("{name} needs a value"))
            };
            match (name, value) {
                ("--help" | "-h", None) => return Ok(Arguments::Help),
                ("--host", value) => serve.address.host = Some(needed(value)?),
                ("--port", value) => serve.address.port = Some(needed(value)?),
                _ if healthcheck => {
                    return Err(format!("healthcheck takes --host and --port, not {argument:?}"));
                }
                ("--version" | "-V", None) => return Ok(Arguments::Version),
                ("--embedded", None) => embedded = true,
                ("--embedded", Some(dir)) if dir.is_empty() => {
                    return Err("--embedded= names no directory".to_owned());
                }
                ("--embedded", Some(dir)) => serve.dir = Some(PathBuf::from(dir)),
                ("--ephemeral", None) => serve.ephemeral = true,
                ("--with-parent", None) => serve.parent = Some(Parent::StandardInput),
                ("--with-parent", Some(pid)) => {
                    let pid = pid.to_str().and_then(|pid| pid.parse().ok()).filter(|pid| *pid > 0);
                    serve.parent = Some(Parent::Process(pid.ok_or("--with-parent= names no process")?));
                }
                _ => return Err(format!("unknown argument {argument:?}")),
            }
        }
        if healthcheck {
            return Ok(Arguments::Healthcheck(serve.address));
        }
        match (embedded, &serve.dir, serve.ephemeral) {
            (_, Some(_), true) => {
                return Err("--ephemeral keeps nothing: it goes without a directory".to_owned());
            }
            (false, _, true) => return Err("--ephemeral goes with --embedded".to_owned()),
            (true, None, false) => serve.dir = Some(default_dir()),
            _ => {}
        }
        Ok(Arguments::Serve(serve))
    }
}

/// Root's PostgreSQL runs as another user, who could not enter most directories that root works in.
fn default_dir() -> PathBuf {
    let root = nix::unistd::Uid::effective().is_root();
    PathBuf::from(if root { "/var/lib/userd" } else { "userd-data" })
}

/// The text of `--help`.
pub fn help() -> String {
    let mut text = String::from(
        "userd: a user-management HTTP service over PostgreSQL\n\
         \n\
         usage: userd [--embedded[=DIR]] [--ephemeral] [--host HOST] [--port PORT] [--with-parent[=PID]]\n\
         \x20      userd healthcheck [--host HOST] [--port PORT]\n\
         \n\
         --embedded[=DIR]  run a private PostgreSQL cluster in DIR from this machine's own programs\n\
         \x20                 (default ./userd-data; /var/lib/userd when started by root); listens on\n\
         \x20                 127.0.0.1 unless HOST or a token is set\n\
         --ephemeral       with --embedded: on a fresh database that is dropped at the end\n\
         --host, --port    instead of the variables HOST and PORT; port 0 takes a free one\n\
         --with-parent     end when standard input does, and so with the process that holds its other end;\n\
         \x20                 --with-parent=PID: end when that process does\n\
         healthcheck       exit code 0 if the service that these variables start answers GET /users with 200,\n\
         \x20                 else 1: for images without curl\n\
         --help            print this\n\
         --version         print the version\n\
         \n\
         Environment variables, with their defaults:\n",
    );
    for setting in SETTINGS {
        let default = match setting.default() {
            default if default.is_empty() => "-".to_owned(),
            default => default,
        };
        text.push_str(&format!("  {:<19} {default:<12} {}\n", setting.variable, setting.help));
    }
    text.push_str(
        "\nSIGTERM, SIGHUP or Ctrl-C: answers the requests in flight, then ends; a second one ends at once.\n",
    );
    text
}
