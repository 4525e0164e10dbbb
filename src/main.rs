//! The command: arguments and environment to a [`Config`], the logger, signals, start, wait, exit code.
//!
//! All that touches the process as a whole is here; the library never reads the environment or exits.

mod command_line;

use command_line::{healthcheck::healthcheck, log_writer::LogWriter};
use listenfd::ListenFd;
use log::LevelFilter;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};
use simplelog::{ConfigBuilder, WriteLogger};
use std::{
    env,
    ffi::OsString,
    io::{self, Write},
    os::fd::OwnedFd,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};
use userd::{
    Config, Database, ScratchDatabase, Server, StartError,
    config::{ConfigError, SETTINGS},
    embedded::{Cluster, Options},
};

/// 73,100 users read a second instead of 64,800 with glibc's (32 connections, in one run), for 3 MiB more.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The command line or a variable cannot be used.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let done = match Arguments::parse(env::args_os().skip(1)) {
        Ok(Arguments::Help) => return print(&help()),
        Ok(Arguments::Version) => return print(concat!("userd ", env!("CARGO_PKG_VERSION"), "\n")),
        Ok(Arguments::Healthcheck) => Config::from_vars(|name| env::var_os(name))
            .map_err(usage)
            .and_then(|config| healthcheck(&config).map_err(failure)),
        Ok(Arguments::Serve(options)) => serve(options),
        Err(problem) => Err(usage(format!("{problem}; `userd --help` lists what there is"))),
    };
    log::logger().flush();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, line)) => {
            eprintln!("userd: {line}");
            code
        }
    }
}

/// An exit code and one line.
type Failure = (ExitCode, String);

fn usage(problem: impl ToString) -> Failure {
    (ExitCode::from(USAGE), problem.to_string())
}

fn failure(problem: impl ToString) -> Failure {
    (ExitCode::FAILURE, problem.to_string())
}

/// Runs the service until a signal, or the end of its parent, ends it.
fn serve(options: Serve) -> Result<(), Failure> {
    let variables = |name: &str| options.variable(name).or_else(|| env::var_os(name));
    let mut config = Config::from_vars(variables).map_err(usage)?;
    config.os_user = os_user();
    config.socket = passed_socket()?;
    let level = log_level(variables).map_err(usage)?;
    log_to_stderr(level).map_err(failure)?;
    let ending = Ending::watch(options.dir.is_none()).map_err(failure)?;
    if options.with_parent {
        ending.watch_parent().map_err(failure)?;
    }

    let mut cluster = match options.dir {
        None => None,
        Some(dir) => {
            let options = Options {
                // Some beyond the pool's, for migrations and for psql.
                max_connections: config.db_pool_size + 10,
                ..Options::new(dir)
            };
            let cluster = Cluster::start(&options).map_err(failure)?;
            let _ = ending.cluster.set(cluster.pid());
            config.database = Database::Url(cluster.connection_string("postgres").into());
            Some(cluster)
        }
    };
    let scratch = match options.ephemeral {
        false => None,
        true => {
            let dir = config.migrations_dir.as_deref();
            let scratch = ScratchDatabase::with_migrations(dir).map_err(failure)?;
            config.database = Database::Url(scratch.url().into());
            Some(scratch)
        }
    };
    let server = Server::start_watched(config, ending.on_broken()).map_err(|error| match error {
        StartError::Config(error) => usage(error),
        other => failure(other),
    })?;
    // Before anybody can know that it serves, and sends a signal for it.
    ending.idle.store(false, Ordering::SeqCst);
    // A harness may have closed it; the service does not depend on being read.
    let _ = writeln!(io::stdout(), "listening on {}", server.base_url());
    let end = ending.wait(|| cluster.as_mut().and_then(Cluster::ended));
    log::info!("stopping");
    server.stop();
    drop(scratch);
    if let Some(cluster) = cluster {
        cluster.stop().map_err(failure)?;
    }
    log::info!("stopped");
    match end {
        End::Asked => Ok(()),
        End::Broken => Err(failure("nothing could be served any more")),
        End::Cluster(line) => Err(failure(line)),
    }
}

/// The socket that systemd, or who else speaks its protocol, listens on for us (`LISTEN_FDS`, `LISTEN_PID`).
fn passed_socket() -> Result<Option<Arc<OwnedFd>>, Failure> {
    let mut passed = ListenFd::from_env();
    if passed.len() > 1 {
        return Err(usage(format!("LISTEN_FDS: {} sockets were passed, and one is served", passed.len())));
    }
    let tcp = passed.take_tcp_listener(0).map(|socket| socket.map(OwnedFd::from));
    let socket = match tcp {
        Ok(socket) => socket,
        Err(_) => passed
            .take_unix_listener(0)
            .map_err(|error| usage(format!("LISTEN_FDS: {error}")))?
            .map(OwnedFd::from),
    };
    Ok(socket.map(Arc::new))
}

/// Why the service ends.
enum End {
    Asked,
    Broken,
    /// The private cluster's server is gone. Whoever supervises the process starts both anew.
    Cluster(String),
}

/// The signals that end the process: the first lets it finish what is in work, the second does not.
struct Ending {
    ends: mpsc::Receiver<End>,
    end: mpsc::Sender<End>,
    /// Whether there is nothing to finish yet, so that the first signal ends it too.
    idle: Arc<AtomicBool>,
    /// The private cluster's server, which must not outlive the process.
    cluster: Arc<OnceLock<u32>>,
}

impl Ending {
    fn watch(idle: bool) -> io::Result<Ending> {
        let (end, ends) = mpsc::channel();
        let sender = end.clone();
        let idle = Arc::new(AtomicBool::new(idle));
        let cluster = Arc::new(OnceLock::<u32>::new());
        let mut signals = Signals::new([SIGTERM, SIGINT])?;
        let (is_idle, server) = (idle.clone(), cluster.clone());
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for (before, signal) in signals.forever().enumerate() {
                if before > 0 || is_idle.load(Ordering::SeqCst) {
                    if let Some(pid) = server.get() {
                        let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
                        let _ = nix::sys::signal::kill(pid, nix::sys::signal::SIGINT);
                    }
                    log::logger().flush();
                    std::process::exit(128 + signal);
                }
                let _ = sender.send(End::Asked);
            }
        })?;
        Ok(Ending { ends, end, idle, cluster })
    }

    /// As a signal, when standard input ends: with the process that holds its other end.
    fn watch_parent(&self) -> io::Result<()> {
        let (sender, idle) = (self.end.clone(), self.idle.clone());
        let wait = move || {
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            if idle.load(Ordering::SeqCst) {
                std::process::exit(0);
            }
            let _ = sender.send(End::Asked);
        };
        let thread = thread::Builder::new().name("parent".to_owned());
        thread.spawn(wait).map(drop)
    }

    fn on_broken(&self) -> impl FnOnce() + Send + 'static {
        let end = self.end.clone();
        move || drop(end.send(End::Broken))
    }

    /// Blocks until the first signal, or until the service is broken, or its cluster has ended.
    fn wait(&self, mut cluster_ended: impl FnMut() -> Option<String>) -> End {
        const LOOK: Duration = Duration::from_millis(500);
        loop {
            if let Ok(end) = self.ends.recv_timeout(LOOK) {
                return end;
            }
            if let Some(line) = cluster_ended() {
                return End::Cluster(line);
            }
        }
    }
}

enum Arguments {
    Help,
    Version,
    Healthcheck,
    Serve(Serve),
}

#[derive(Default)]
struct Serve {
    /// A private cluster's directory.
    dir: Option<PathBuf>,
    ephemeral: bool,
    with_parent: bool,
    host: Option<OsString>,
    port: Option<OsString>,
}

impl Serve {
    /// What the arguments say instead of the variables.
    fn variable(&self, name: &str) -> Option<OsString> {
        match name {
            "HOST" if self.host.is_some() => self.host.clone(),
            // What is thrown away is for this machine.
            "HOST" if self.ephemeral && env::var_os(name).is_none_or(|host| host.is_empty()) => {
                Some("127.0.0.1".into())
            }
            "PORT" => self.port.clone(),
            _ => None,
        }
    }
}

impl Arguments {
    fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Arguments, String> {
        let mut serve = Serve::default();
        let mut embedded = false;
        let mut arguments = arguments.peekable();
        if arguments.next_if(|first| first == "healthcheck").is_some() {
            return match arguments.next() {
                None => Ok(Arguments::Healthcheck),
                Some(more) => Err(format!("healthcheck takes no argument, not {more:?}")),
            };
        }
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
                ("--version" | "-V", None) => return Ok(Arguments::Version),
                ("--embedded", None) => embedded = true,
                ("--embedded", Some(dir)) if dir.is_empty() => {
                    return Err("--embedded= names no directory".to_owned());
                }
                ("--embedded", Some(dir)) => serve.dir = Some(PathBuf::from(dir)),
                ("--ephemeral", None) => serve.ephemeral = true,
                ("--with-parent", None) => serve.with_parent = true,
                ("--host", value) => serve.host = Some(needed(value)?),
                ("--port", value) => serve.port = Some(needed(value)?),
                _ => return Err(format!("unknown argument {argument:?}")),
            }
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

fn help() -> String {
    let mut text = String::from(
        "userd: a user-management HTTP service over PostgreSQL\n\
         \n\
         usage: userd [--embedded[=DIR]] [--ephemeral] [--host HOST] [--port PORT] [--with-parent]\n\
         \x20      userd healthcheck\n\
         \n\
         --embedded[=DIR]  run a private PostgreSQL cluster in DIR from this machine's own programs\n\
         \x20                 (default ./userd-data; /var/lib/userd when started by root)\n\
         --ephemeral       with --embedded: on a fresh database that is thrown away at the end; listens on\n\
         \x20                 127.0.0.1 unless told otherwise\n\
         --host, --port    instead of the variables HOST and PORT; port 0 takes a free one\n\
         --with-parent     end when standard input does, and so with the process that started this one\n\
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
    text.push_str("\nSIGTERM or Ctrl-C: answers what is in work, then ends; a second one ends at once.\n");
    text
}

fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn log_level(variables: impl Fn(&str) -> Option<OsString>) -> Result<LevelFilter, ConfigError> {
    const VARIABLE: &str = "LOG_LEVEL";
    let level = variables(VARIABLE).filter(|level| !level.is_empty());
    let level = level.unwrap_or_else(|| "info".into());
    let levels = LevelFilter::iter().map(|level| level.as_str().to_ascii_lowercase());
    let known: Vec<String> = levels.collect();
    let found = level.to_str().filter(|text| known.iter().any(|known| known == text));
    found.and_then(|text| text.parse().ok()).ok_or_else(|| ConfigError {
        variable: VARIABLE,
        problem: format!("must be one of {}, not {level:?}", known.join(", ")),
    })
}

/// Lines of userd's own only: others log statements with their parameters, passwords among them.
fn log_to_stderr(level: LevelFilter) -> io::Result<()> {
    let config = ConfigBuilder::new()
        .set_time_format_rfc3339()
        .set_target_level(LevelFilter::Off)
        .set_thread_level(LevelFilter::Off)
        .set_location_level(LevelFilter::Off)
        .add_filter_allow_str("userd")
        .build();
    // It fails only where a logger is set already, and this is the first line that could.
    let _ = WriteLogger::init(level, config, LogWriter::start()?);
    Ok(())
}

fn os_user() -> Option<String> {
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::effective());
    user.ok().flatten().map(|user| user.name)
}
