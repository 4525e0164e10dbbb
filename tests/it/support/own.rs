//! A PostgreSQL of one test's own, to be killed, stopped and restarted.

use super::{
    LONG, TempDir,
    database::{compare_user_counts, run, socket_dir},
    eventually, pause, programs_of_postgres,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use postgres::{Client, NoTls};
use std::{
    collections::HashMap,
    fs,
    os::unix::{
        fs::{MetadataExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};
use userd::internals::Cluster;

/// A durable cluster in a directory that goes with it.
pub struct Own {
    // Stopped before its directory goes.
    cluster: Option<Cluster>,
    dir: TempDir,
}

impl Own {
    pub fn start() -> Own {
        let dir = TempDir::new();
        let mut own = Own { cluster: None, dir };
        own.restart();
        // Processes are killed here, not the machine: what they have written stays. And a start after a crash
        // would sync every file.
        own.run("alter system set fsync = off");
        own.run("select pg_reload_conf()");
        own
    }

    /// Returns a standby that follows it.
    pub fn standby(&self) -> Own {
        let dir = TempDir::new();
        let data = dir.path().join("data");
        let owner = fs::metadata(self.dir.path().join("data/pgdata")).expect("there is a cluster");
        fs::create_dir(&data).expect("a directory can be made");
        chown(&data, Some(owner.uid()), Some(owner.gid())).expect("root may, and an owner");
        let mut copy = Command::new(programs_of_postgres().join("pg_basebackup"));
        copy.args(["--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--username=postgres"]);
        copy.arg("--host").arg(self.socket_dir()).arg("--pgdata").arg(data.join("pgdata"));
        let copied = copy.uid(owner.uid()).gid(owner.gid()).status().expect("PostgreSQL is installed");
        assert!(copied.success(), "{copied}");
        let mut standby = Own { cluster: None, dir };
        standby.restart();
        standby
    }

    /// Starts it, or restarts it.
    pub fn restart(&mut self) {
        self.cluster = None;
        let cluster = Cluster::open(&self.dir.path().join("data"), 100, false, |_| true);
        self.cluster = Some(cluster.expect("the tests need a PostgreSQL server of their own"));
    }

    /// Ends it in good order: sessions are told.
    pub fn stop(&mut self) {
        drop(self.cluster.take().expect("it runs"));
    }

    /// Kills the server and all of its sessions at once.
    pub fn kill(&mut self) {
        let processes = self.processes();
        self.signal(Signal::SIGKILL);
        eventually(LONG, "the killed are gone", || processes.iter().all(|process| !running(*process)));
    }

    /// Sends a signal to the server and all of its sessions.
    pub fn signal(&self, signal: Signal) {
        for process in self.processes() {
            let _ = kill(Pid::from_raw(process.cast_signed()), signal);
        }
    }

    /// The server's process first, then its sessions and its helpers.
    pub fn processes(&self) -> Vec<u32> {
        let server = self.server();
        let mut processes = vec![server];
        processes.extend(children(server));
        processes
    }

    pub fn server(&self) -> u32 {
        self.cluster.as_ref().and_then(Cluster::own_server_pid).expect("it runs")
    }

    /// Returns the value for `DATABASE_URL`.
    pub fn url(&self) -> String {
        self.cluster.as_ref().expect("it runs").connection_string("postgres")
    }

    /// The directory of its socket.
    pub fn socket_dir(&self) -> PathBuf {
        socket_dir(&self.url())
    }

    /// Returns the log of the cluster.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("data/postgres.log")).expect("it logs")
    }

    /// The file of its socket.
    pub fn socket(&self) -> PathBuf {
        self.socket_dir().join(".s.PGSQL.5432")
    }

    /// A session, to look behind the service's back.
    pub fn client(&self) -> Client {
        Client::connect(&self.url(), NoTls).expect("the cluster takes connections")
    }

    /// Runs statements.
    pub fn run(&self, sql: &str) {
        run(&self.url(), sql);
    }

    /// Changes a setting of the server, and waits until it is in force. Whatever transactions read only or wait for, this
    /// one does not.
    pub fn set(&self, name: &str, value: &str) {
        let mut client = self.client();
        for sql in [
            "set default_transaction_read_only = off",
            "set synchronous_commit = local",
            &format!("alter system set {name} = '{value}'"),
            "select pg_reload_conf()",
        ] {
            client.batch_execute(sql).unwrap();
        }
        eventually(LONG, "the setting is in force", || {
            let row = self.client().query_one(&format!("show {name}"), &[]).unwrap();
            row.get::<_, &str>(0) == value
        });
    }

    /// Names by address.
    pub fn users(&self) -> HashMap<String, String> {
        users(&mut self.client())
    }
}

/// The counts are compared, as those of [`Database`](super::Database), where the test has left the server running.
impl Drop for Own {
    fn drop(&mut self) {
        let Some(cluster) = self.cluster.as_ref().filter(|_| !thread::panicking()) else { return };
        let target: postgres::Config =
            cluster.connection_string("postgres").parse().expect("our own connection string");
        let client = target.clone().connect_timeout(Duration::from_secs(2)).connect(NoTls);
        let compared = client.map(compare_user_counts);
        assert!(!matches!(compared, Ok(Err(_))), "{compared:?}");
    }
}

/// Names by address.
pub fn users(client: &mut Client) -> HashMap<String, String> {
    let rows = client.query("select email, name from users", &[]).expect("there is a table");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// The processes that this one has started and that are still there.
pub fn children(process: u32) -> Vec<u32> {
    let file = format!("/proc/{process}/task/{process}/children");
    let text = fs::read_to_string(file).unwrap_or_default();
    text.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

/// Returns true if the process exists and is not a zombie.
pub fn running(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    state.is_some_and(|state| state != 'Z')
}

/// Returns the process of the server in a directory of a private cluster, if it runs.
pub fn postmaster(dir: &Path) -> Option<u32> {
    let file = fs::read_to_string(dir.join("pgdata/postmaster.pid")).ok()?;
    file.lines().next()?.parse().ok().filter(|pid| running(*pid))
}

/// Returns true as root; prints a line if not.
pub fn is_root() -> bool {
    let is_root = nix::unistd::Uid::effective().is_root();
    if !is_root {
        println!("not tested: only root can do it");
    }
    is_root
}

/// How much of a process is in memory (`VmRSS`), is its program and libraries of that (`RssFile`), or was at most
/// (`VmHWM`); `None` if the process is ending.
pub fn memory_kib(process: u32, name: &str) -> Option<usize> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with(name))?;
    let number = line.split_whitespace().nth(1).and_then(|number| number.parse().ok());
    Some(number.expect("a number of KiB"))
}

/// Another's program, ended with this signal when dropped.
pub struct Daemon {
    child: Child,
    end: Signal,
}

impl Daemon {
    pub fn new(child: Child, end: Signal) -> Daemon {
        Daemon { child, end }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        end(&mut self.child, self.end, LONG);
    }
}

/// Ends a process with a signal, or kills it when it has had this time.
pub fn end(child: &mut Child, signal: Signal, within: Duration) {
    let _ = kill(Pid::from_raw(child.id().cast_signed()), signal);
    let deadline = Instant::now() + within;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
        pause(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
}
