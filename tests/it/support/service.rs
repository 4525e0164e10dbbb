//! The service, in this process and as a process of its own.

use super::{
    Answer, Client, Database, Ended, LONG, LONG_ON_DISK, TempDir, USERD, assert_no_secret, eventually,
    own::end,
};
use nix::{
    libc::dup2,
    sys::signal::{SigHandler, Signal, kill, signal},
    unistd::Pid,
};
use std::{
    fs,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::Duration,
};
use userd::{Config, Server};

/// Names the programs of PostgreSQL that all tests use, where it is set.
const POSTGRES_BIN: &str = "POSTGRES_BIN";

/// Has a program start with the default dispositions of signals: what runs the tests may ignore some, as `nohup` does.
pub fn by_default(command: &mut Command) -> &mut Command {
    let reset = || {
        for number in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM, Signal::SIGCHLD] {
            // SAFETY: no function is set as the handler.
            unsafe { signal(number, SigHandler::SigDfl) }?;
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls alone.
    unsafe { command.pre_exec(reset) }
}

/// A server in this process, on a free port and a database of its own.
pub struct Service {
    pub server: Server,
    pub database: Database,
}

impl Service {
    /// With the default settings.
    pub fn start() -> Service {
        Service::with(|_| ())
    }

    /// With some settings changed.
    pub fn with(change: impl FnOnce(&mut Config)) -> Service {
        let database = Database::create();
        let mut config = database.config();
        change(&mut config);
        let server = Server::start(config).expect("a server starts");
        Service { server, database }
    }

    /// A client of its own connection.
    pub fn client(&self) -> Client {
        Client::new(self.server.base_url())
    }
}

/// `userd test` without a command: a service that is thrown away, with its controls.
pub struct Tested {
    pub process: Process,
    /// The lines on standard output: `USERD_URL=…` and so on.
    pub lines: Vec<String>,
}

impl Tested {
    pub fn start(arguments: &[&str]) -> Tested {
        let mut process = Process::fed(Stdio::piped(), &[USERD], &[&["test"], arguments].concat(), &[]);
        let mut lines = Vec::new();
        eventually(LONG, "its lines end", || {
            let ended = process.child.try_wait().expect("it is our child");
            assert!(ended.is_none(), "it ended: {}", process.stderr());
            lines = process.stdout().lines().map(str::to_owned).collect();
            process.stdout().ends_with("\n\n")
        });
        lines.pop();
        Tested { process, lines }
    }

    /// Returns the value of a line.
    pub fn value(&self, name: &str) -> &str {
        let mut values = self.lines.iter().filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        values.next().unwrap_or_else(|| panic!("no {name}: {:?}", self.lines))
    }

    /// A client of the service.
    pub fn client(&self) -> Client {
        Client::new(self.value("USERD_URL"))
    }

    /// Sends a control of the service.
    pub fn control(&self, request: &str, body: &str) -> Answer {
        control(self.value("USERD_CONTROL"), request, body)
    }

    /// Starts another service. Returns its URL and the URL of its controls.
    pub fn another(&self, order: &str) -> (String, String) {
        let answer = self.control("POST /services", order);
        assert_eq!(answer.status, 201, "{answer:?}");
        let member = |name: &str| answer.json()[name].as_str().expect(name).to_owned();
        (member("url"), member("control"))
    }
}

/// Sends a control, such as `POST /reset`, to the service with the URL of these controls.
pub fn control(url: &str, request: &str, body: &str) -> Answer {
    let (origin, path) = url.split_at(
        url.rmatch_indices('/')
            .map(|(at, _)| at)
            .find(|at| url[..*at].matches('/').count() == 2)
            .expect("a path"),
    );
    let (method, rest) = request.split_once(' ').expect("a method and a path");
    let mut client = Client::new(origin);
    let message = client.message(method, &format!("{path}{rest}"), &[], body.as_bytes());
    client.send(&message);
    client.answer(method)
}

/// `userd` itself, killed when dropped.
pub struct Process {
    child: Child,
    stdout: Output,
    stderr: Output,
    temp_dir: TempDir,
}

impl Process {
    /// With only these arguments and variables, PostgreSQL's programs as the tests themselves use them, a `TMPDIR` of its
    /// own, and a free port unless they name one: several tests run at once.
    pub fn start(arguments: &[&str], variables: &[(&str, &str)]) -> Process {
        Process::under(&[USERD], arguments, variables)
    }

    /// Starts userd through a program that executes it, such as `nohup` with its arguments.
    pub fn under(program: &[&str], arguments: &[&str], variables: &[(&str, &str)]) -> Process {
        Process::fed(Stdio::null(), program, arguments, variables)
    }

    /// Passes sockets, as systemd does: descriptors from 3 on, and two variables that say how many and name the process
    /// that is meant.
    pub fn activated(sockets: Vec<OwnedFd>, arguments: &[&str], variables: &[(&str, &str)]) -> Process {
        // Far from those that starting a process needs.
        const FIRST: usize = 100;
        let count = sockets.len();
        let moved: String = (0..count).map(|index| format!(" {}<&{}", 3 + index, FIRST + index)).collect();
        let script = format!("LISTEN_PID=$$ LISTEN_FDS={count} exec \"$0\" \"$@\"{moved}");
        let mut command = Command::new("/bin/bash");
        let place = move || {
            (FIRST..).zip(&sockets).try_for_each(|(place, socket)| {
                // SAFETY: `place` is no descriptor of this process, which is about to execute a program.
                match unsafe { dup2(socket.as_raw_fd(), place as i32) } {
                    -1 => Err(io::Error::last_os_error()),
                    _ => Ok(()),
                }
            })
        };
        // SAFETY: dup2 may be called between fork and exec.
        unsafe { command.args(["-c", &script, USERD]).pre_exec(place) };
        Process::spawn(command, Stdio::null(), arguments, variables)
    }

    /// Gives the program a standard input.
    pub fn fed(input: Stdio, program: &[&str], arguments: &[&str], variables: &[(&str, &str)]) -> Process {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]);
        Process::spawn(command, input, arguments, variables)
    }

    fn spawn(mut command: Command, input: Stdio, arguments: &[&str], variables: &[(&str, &str)]) -> Process {
        let temp_dir = TempDir::new();
        let mut child = by_default(&mut command)
            .args(arguments)
            .env_clear()
            .env("TMPDIR", temp_dir.path())
            .env("PORT", "0")
            .envs(std::env::var_os(POSTGRES_BIN).map(|dir| (POSTGRES_BIN, dir)))
            .envs(variables.iter().copied())
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("cargo has built it");
        let stdout = Output::read(child.stdout.take().expect("it is piped"));
        let stderr = Output::read(child.stderr.take().expect("it is piped"));
        Process { child, stdout, stderr, temp_dir }
    }

    /// On this database and a free port; `variables` are set after that.
    pub fn on(database: &Database, variables: &[(&str, &str)]) -> Process {
        Process::at(&database.url(), variables)
    }

    /// On the database with this `DATABASE_URL`.
    pub fn at(url: &str, variables: &[(&str, &str)]) -> Process {
        let ours = [("DATABASE_URL", url), ("HOST", "127.0.0.1"), ("PORT", "0")];
        Process::start(&[], &[&ours, variables].concat())
    }

    /// Where it says that it listens.
    pub fn wait_for_url(&mut self) -> String {
        self.wait_for_url_within(LONG)
    }

    pub fn wait_for_url_within(&mut self, time: Duration) -> String {
        let mut url = None;
        eventually(time, "it listens", || {
            let ended = self.child.try_wait().expect("it is our child");
            let stdout = self.stdout();
            let mut lines = stdout.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
            let prefixes = ["listening on ", "USERD_URL="];
            let named =
                |line: &str| prefixes.iter().find_map(|prefix| line.strip_prefix(prefix).map(str::to_owned));
            url = lines.find_map(named);
            assert!(ended.is_none() || url.is_some(), "it ended: {}", self.stderr());
            url.is_some()
        });
        url.expect("it was waited for")
    }

    /// A client of its own connection, once it listens.
    pub fn client(&mut self) -> Client {
        Client::new(&self.wait_for_url())
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Writes to a standard input that is a pipe. An error if the process has ended.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.child.stdin.as_mut().expect("a pipe").write_all(bytes)
    }

    /// Ends a standard input that is a pipe.
    pub fn end_input(&mut self) {
        drop(self.child.stdin.take());
    }

    /// How many threads it has, and how many descriptors.
    pub fn size(&self) -> (usize, usize) {
        let count = |what| fs::read_dir(format!("/proc/{}/{what}", self.id())).map_or(0, Iterator::count);
        (count("task"), count("fd"))
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.id().cast_signed()), signal).expect("it has not been waited for");
    }

    /// How it ended, with all that it wrote read: its exit code, or the number of the signal, negative. Panics
    /// where it does not end within the time.
    pub fn wait(&mut self, within: Duration) -> i32 {
        let mut status = None;
        eventually(within, "the process ends", || {
            status = self.child.try_wait().expect("it is our child");
            status.is_some()
        });
        for output in [&mut self.stdout, &mut self.stderr] {
            eventually(LONG, "its output ends", || output.reader.is_finished());
        }
        let status: ExitStatus = status.expect("it was waited for");
        status.code().unwrap_or_else(|| -status.signal().unwrap_or_default())
    }

    /// Returns whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("it is our child").is_some()
    }

    /// Returns how it ended, however long a cluster takes to start and to stop.
    pub fn ended(&mut self) -> Ended {
        (self.wait(LONG_ON_DISK), self.stdout(), self.stderr())
    }

    /// The names in its temporary directory.
    pub fn left_behind(&self) -> Vec<String> {
        let files = fs::read_dir(self.temp_dir.path()).expect("it is ours");
        files.map(|file| file.expect("it is ours").file_name().to_string_lossy().into_owned()).collect()
    }

    /// Returns the process's standard output so far.
    pub fn stdout(&self) -> String {
        self.stdout.text()
    }

    /// Returns the process's standard error so far.
    pub fn stderr(&self) -> String {
        self.stderr.text()
    }

    /// Waits until that is in the log, which a thread of the process writes and one of ours reads.
    pub fn logs(&self, text: &str) {
        eventually(LONG, text, || self.stderr().contains(text));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Asked first, so that it takes a private cluster along.
        end(&mut self.child, Signal::SIGTERM, Duration::from_secs(3));
        // Whatever the test was about.
        if !thread::panicking() {
            assert_no_secret(&self.stderr());
            assert_no_secret(&self.stdout());
        }
    }
}

/// Output of a process, read by a thread so that the process never blocks on a full pipe.
struct Output {
    text: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Output {
    fn read(mut pipe: impl Read + Send + 'static) -> Output {
        let text = Arc::new(Mutex::new(Vec::new()));
        let shared = text.clone();
        let reader = thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = pipe.read(&mut buffer) {
                shared.lock().unwrap().extend_from_slice(&buffer[..length]);
            }
        });
        Output { text, reader }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap()).into_owned()
    }
}
