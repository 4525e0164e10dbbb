//! The private cluster: made, kept, used by one process, recovered after a crash; and the one that is thrown away. Runs as
//! root and as any user. The test binary starts itself as the process to be killed (`the_helper`).

use crate::support::{
    ADA, LONG, LONG_ON_DISK, Process, TempDir, UNTIL_SIGNAL, USERD, check, children, eventually, is_root,
    pause, postmaster, running,
};
use nix::sys::signal::{self, Signal};
use nix::unistd::{Pid, Uid};
use postgres::{Client, NoTls, error::SqlState};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};
use userd::internals::{Cluster, SharedServer, connection_string};

const WRITE: &str = "create table if not exists t(v int); insert into t values (1)";
const COUNT: &str = "select count(*)::text from t";
const AT_WORK: &str = "do $$ begin loop end loop; end $$";

fn start(dir: &Path) -> Cluster {
    Cluster::open(dir, 100, false, |_| true).unwrap_or_else(|error| panic!("{error}"))
}

/// A directory for a cluster, and the argument that names it.
fn data_directory() -> (TempDir, String) {
    let dir = TempDir::new();
    let argument = format!("--embedded={}/data", dir.name());
    (dir, argument)
}

#[track_caller]
fn refused(dir: &Path, expected: &str) -> String {
    let error = Cluster::open(dir, 100, false, |_| true).expect_err("it starts").to_string();
    assert!(error.contains(expected) && !error.contains('\n'), "{dir:?}: {error}");
    error
}

fn client(cluster: &Cluster) -> Client {
    Client::connect(&cluster.connection_string("postgres"), NoTls).unwrap()
}

fn value(cluster: &Cluster, sql: &str) -> String {
    client(cluster).query_one(sql, &[]).unwrap().get(0)
}

fn kill(pid: u32) {
    signal::kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
}

/// Every process whose arguments or working directory name the path.
fn processes_about(path: &Path) -> Vec<(u32, String)> {
    let about = |dir: PathBuf| {
        let line = fs::read(dir.join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let name = path.to_str()?;
        let works_there =
            fs::read_link(dir.join("cwd")).is_ok_and(|cwd| cwd.to_str().unwrap().starts_with(name));
        let pid = dir.file_name()?.to_str()?.parse().ok()?;
        (works_there || line.contains(name)).then_some((pid, line)).filter(|_| running(pid))
    };
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| about(entry.path())).collect()
}

/// This binary as another process, killed when dropped.
struct Helper(Child);

impl Helper {
    fn spawn(what: &str, dir: &Path) -> Helper {
        // A lock of the caller's, for the helper alone.
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", r#"exec 9>"${HELPER_DIR%/*}/caller"; exec "$@""#, "sh"])
            .arg(env::current_exe().unwrap());
        command.args(["--exact", "cluster::the_helper", "--nocapture"]);
        command.env("HELPER", what).env("HELPER_DIR", dir).stdout(Stdio::piped());
        // None of these is PostgreSQL's.
        command.envs([("PGDATA", "/nowhere"), ("PGPORT", "1"), ("PGOPTIONS", "-c x=y"), ("LC_ALL", "xx_XX")]);
        Helper(command.spawn().unwrap())
    }

    /// Waits until it is ready.
    fn start(what: &str, dir: &Path) -> Helper {
        let mut helper = Helper::spawn(what, dir);
        let output = BufReader::new(helper.0.stdout.take().unwrap());
        assert!(output.lines().any(|line| line.unwrap().contains("ready")), "the helper has ended");
        helper
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test: the other process, started by the tests of this file with `HELPER` set.
#[test]
fn the_helper() {
    let Some(what) = env::var_os("HELPER") else { return };
    let dir = PathBuf::from(env::var_os("HELPER_DIR").unwrap());
    if what == "share" {
        let _shared = SharedServer::join(&[dir], 20).unwrap_or_else(|error| panic!("{error}"));
        println!("ready");
        loop {
            thread::park();
        }
    }
    let Ok(cluster) = Cluster::open(&dir, 100, false, |_| true) else { std::process::exit(1) };
    client(&cluster).batch_execute(WRITE).unwrap();
    println!("ready");
    let _ = client(&cluster).batch_execute(AT_WORK);
}

#[test]
fn one_userd_a_directory_and_a_second_start_keeps_the_data() {
    let dir = TempDir::new();
    let data = dir.path().join("a/it's \"ü\" \\ $(touch x) `y`/ data ");
    // If several start at once, one succeeds.
    let mut started = thread::scope(|scope| {
        let starts = [(); 4].map(|()| scope.spawn(|| Cluster::open(&data, 100, false, |_| true)));
        starts.into_iter().filter_map(|start| start.join().unwrap().ok()).collect::<Vec<_>>()
    });
    let cluster = started.pop().unwrap();
    assert!(started.is_empty(), "{started:?}");
    refused(&data, &format!("in use by another userd (process {})", std::process::id()));
    client(&cluster).batch_execute(WRITE).unwrap();
    let info =
        "select current_setting('server_encoding') || lower('Ä') || current_setting('max_connections')";
    assert_eq!(value(&cluster, info), "UTF8ä100");
    let mode = |name: &str| fs::metadata(data.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(""), mode("lock"), mode("postgres.log")), (0o700, 0o600, 0o600));
    drop(cluster);
    assert_eq!(processes_about(dir.path()), []);
    // Settings that an operator changes in postgresql.conf take effect.
    let file = data.join("pgdata/postgresql.conf");
    let edit = |from: &str, to: &str| {
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(from));
        fs::write(&file, text.replace(from, to)).unwrap();
    };
    edit("shared_buffers = 24MB", "shared_buffers = 16MB");
    let cluster = start(&data);
    assert_eq!(value(&cluster, "show shared_buffers") + &value(&cluster, COUNT), "16MB1");
    // Clients of the service cause errors of statements: none of them is a line of the log.
    assert!(client(&cluster).batch_execute("select 1 / 0").is_err());
    client(&cluster).batch_execute("do $$ begin raise log 'a line of the log'; end $$").unwrap();
    let said = || fs::read_to_string(data.join("postgres.log")).unwrap();
    eventually(LONG, "the server logs", || said().contains("a line of the log"));
    assert!(!said().contains("division by zero") && said().len() < 10_000, "{}", said());
    drop(cluster);
    // A server that does not start says why.
    edit("shared_buffers = 16MB", "shared_buffers = rubbish");
    assert!(refused(&data, "shared_buffers").contains("FATAL"));
    assert_eq!(processes_about(dir.path()), []);
}

#[test]
fn a_start_after_a_crash() {
    let dir = TempDir::new();
    let data = dir.path().join("data");
    // userd is killed amid initdb.
    let userd = Helper::spawn("keep", &data);
    eventually(LONG, "initdb is at work", || data.join("pgdata.new/base").exists());
    drop(userd);
    assert!(!data.join("pgdata").exists());
    // It is killed, and its server goes on, with a session at work.
    for (kills_server, users) in [(false, "1"), (true, "2")] {
        let userd = Helper::start("keep", &data);
        let server = postmaster(&data).unwrap();
        let title = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let session = || children(server).into_iter().find(|pid| title(pid).contains("] DO"));
        eventually(LONG, "the query runs", || session().is_some());
        let session = session().unwrap();
        drop(userd);
        if kills_server {
            kill(server);
            eventually(LONG, "the server is dead", || !running(server));
        }
        assert!(running(session));
        let cluster = start(&data);
        assert!(!running(server) && !running(session) && !data.join("pgdata.new").exists());
        assert_eq!(value(&cluster, COUNT), users);
        // The server is killed under our feet: dropping is quick and without a fuss.
        kill(cluster.own_server_pid().unwrap());
    }
    // Files that name a process of another kind, or none.
    let stranger = Helper(Command::new("sleep").arg("100").current_dir("/").spawn().unwrap());
    for content in [format!("{}\n{}\n", stranger.0.id(), data.display()), String::new()] {
        for file in ["pgdata/postmaster.pid", ".s.PGSQL.5432.lock"] {
            fs::write(data.join(file), &content).unwrap();
        }
        assert_eq!(value(&start(&data), COUNT), "2", "{content:?}");
        assert!(running(stranger.0.id()));
    }
}

/// A shell's `exec 9>lock; flock 9` is for what the shell starts, and not for a server that outlives that.
#[test]
fn a_server_holds_no_descriptor_of_its_callers() {
    let (_dir, prefix) = prefix();
    for what in ["keep", "share"] {
        let place = prefix.with_extension(what);
        let lock = prefix.with_file_name("caller");
        let holds = |pid: &u32| {
            let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            files.map(|file| fs::read_link(file.path())).any(|file| file.is_ok_and(|file| file == lock))
        };
        let helper = Helper::start(what, &place);
        let processes: Vec<u32> = processes_about(&place).into_iter().map(|(pid, _)| pid).collect();
        let dir = if what == "keep" { place } else { shared_dir(&place).unwrap() };
        let server = postmaster(&dir).unwrap();
        assert!(holds(&helper.0.id()) && processes.contains(&server));
        assert_eq!(processes.into_iter().find(holds), None, "{what}");
        drop(helper);
        signal::kill(Pid::from_raw(server.cast_signed()), Signal::SIGINT).unwrap();
        eventually(LONG, "the server ends", || !running(server));
    }
}

/// Kills what a service runs, and the service.
fn crash(mut process: Process, data: &Path) {
    let server = postmaster(data).unwrap();
    let all = [&[process.id(), server], &*children(server)].concat();
    all.iter().for_each(|pid| kill(*pid));
    process.wait(LONG);
    eventually(LONG, "all are killed", || !all.iter().any(|pid| running(*pid)));
}

/// Starts a service whose PostgreSQL recovers after a crash, and stops the process that does so. Returns that process.
fn recovering(arguments: &[&str], data: &Path) -> (Process, Pid) {
    let (process, startup) = loop {
        let process = Process::start(arguments, &[]);
        let mut startup = None;
        while startup.is_none() && !process.stdout().contains("listening") {
            startup = postmaster(data).and_then(|server| of_title(server, "postgres: startup"));
        }
        match startup {
            Some(startup) => break (process, Pid::from_raw(startup.cast_signed())),
            // It was too quick.
            None => crash(process, data),
        }
    };
    signal::kill(startup, Signal::SIGSTOP).unwrap();
    let refused = || Client::connect(&connection_string(data, "postgres"), NoTls).err();
    let starts = || refused().is_some_and(|error| error.code() == Some(&SqlState::CANNOT_CONNECT_NOW));
    eventually(LONG, "PostgreSQL says that it starts", starts);
    (process, startup)
}

fn of_title(server: u32, title: &str) -> Option<u32> {
    let has_title = |pid: &u32| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.starts_with(title)
    };
    children(server).into_iter().find(has_title)
}

fn resume(process: Pid) {
    signal::kill(process, Signal::SIGCONT).unwrap();
}

/// A recovery that is killed, as on a slow disk, begins anew at each start.
#[test]
fn a_recovery_is_waited_for_until_a_signal() {
    let (dir, argument) = data_directory();
    let data = dir.path().join("data");
    let mut process = Process::start(&[&argument], &[]);
    process.wait_for_url_within(LONG_ON_DISK);
    check(&mut process.client(), &format!("POST /users {ADA} => 201 *"));
    crash(process, &data);
    for (end, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let (mut process, startup) = recovering(&[&argument], &data);
        process.signal(end);
        // PostgreSQL has had its fast shutdown, and ends once the process that recovers does.
        eventually(LONG, "PostgreSQL stops", || {
            let file = fs::read_to_string(data.join("pgdata/postmaster.pid")).unwrap();
            file.contains("stopping")
        });
        resume(startup);
        assert_eq!(process.wait(LONG), code, "{}", process.stderr());
        assert_eq!((postmaster(&data), process.stdout().as_str()), (None, ""));
        assert!(!process.stderr().contains("userd: "), "{}", process.stderr());
    }
    // A further signal ends userd at once, and leaves PostgreSQL to end by itself.
    let (mut process, startup) = recovering(&[&argument], &data);
    process.signal(Signal::SIGTERM);
    pause(Duration::from_millis(1100));
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 143, "{}", process.stderr());
    resume(startup);
    eventually(LONG, "PostgreSQL ends by itself", || postmaster(&data).is_none());

    let (mut process, startup) = recovering(&[&argument], &data);
    let server = postmaster(&data).unwrap();
    let mut export = Process::start(&["export", &argument], &[]);
    let line = format!("waiting for 10 s: PostgreSQL (process {server}) starts");
    process.logs(&line);
    process.logs(&line.replace("10 s", "20 s"));
    resume(startup);
    process.wait_for_url_within(LONG_ON_DISK);
    check(&mut process.client(), "GET /users?email=ada@example.com => 200 *");
    assert_eq!(process.client().get("/users").json()["total"], 1);
    assert_eq!(export.wait(LONG), 0, "{}", export.stderr());
    assert!(export.stdout().contains("ada@example.com"));
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
}

/// If PostgreSQL is killed amid the last checkpoint, as on a slow disk, it has to recover at the next start.
#[test]
fn the_last_checkpoint_is_waited_for() {
    let (dir, argument) = data_directory();
    let data = dir.path().join("data");
    let mut process = Process::start(&[&argument], &[]);
    for user in 1..=2 {
        process.wait_for_url_within(LONG_ON_DISK);
        let create = format!(r#"POST /users {{"name":"Ada","email":"{user}@example.com"}} => 201 *"#);
        check(&mut process.client(), &create);
        let server = postmaster(&data).unwrap();
        let checkpointer = Pid::from_raw(of_title(server, "postgres: checkpointer").unwrap().cast_signed());
        signal::kill(checkpointer, Signal::SIGSTOP).unwrap();
        if user == 1 {
            process.signal(Signal::SIGTERM);
            process.logs(&format!("waiting for 10 s: PostgreSQL (process {server}) stops"));
            resume(checkpointer);
            assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
            process = Process::start(&[&argument], &[]);
        } else {
            // The next service stops the server that a killed one has left.
            process.signal(Signal::SIGKILL);
            process.wait(LONG);
            process = Process::start(&[&argument], &[]);
            process.logs(&format!("waiting for 10 s: the PostgreSQL left in {} stops", data.display()));
            resume(checkpointer);
        }
    }
    process.wait_for_url_within(LONG_ON_DISK);
    assert_eq!(process.client().get("/users").json()["total"], 2);
    let said = fs::read_to_string(data.join("postgres.log")).unwrap();
    assert!(!said.contains("not properly shut down"), "{said}");
}

/// A volume of Kubernetes with `fsGroup`: root's, with files that each mount makes the group's and lets it write to.
#[test]
fn a_volume_whose_owner_and_mode_cannot_be_set() {
    const AS_A_POD: [&str; 4] = ["/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--groups=2000"];
    const MOUNT: &str = "chown -R :2000 $0 && chmod -R ug+rw $0 && find $0 -type d -exec chmod ug+rwxs {} +";
    if !is_root() {
        return;
    }
    let dir = TempDir::new();
    let (volume, below) = (dir.path().join("volume"), dir.path().join("volume/userd"));
    fs::create_dir_all(volume.join("lost+found")).unwrap();
    let argument = format!("--embedded={}", below.display());
    let program = [&AS_A_POD[..], &[USERD]].concat();
    for row in [
        r#"POST /users {"name":"Ada","email":"ada@example.com"} => 201 *"#,
        r#"GET /users?email=ada@example.com => 200 *"#,
    ] {
        let mounted = Command::new("sh").args(["-c", MOUNT]).arg(&volume).status().unwrap();
        assert!(mounted.success());
        let mut process = Process::under(&program, &[&argument], &[]);
        process.wait_for_url_within(LONG_ON_DISK);
        check(&mut process.client(), row);
        assert_eq!(process.client().get("/users").json()["total"], 1, "{row}");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&below), mode(&below.join("pgdata"))), (0o700, 0o700));
        // Subcommands find it, as its user and as root.
        for program in [&program[..], &[USERD]] {
            let mut export = Process::under(program, &["export", &argument], &[]);
            assert_eq!(export.wait(LONG), 0, "{}", export.stderr());
            assert!(export.stdout().contains("ada@example.com"), "{}", export.stdout());
        }
        process.signal(Signal::SIGTERM);
        assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
    }
    assert_eq!(fs::metadata(&volume).unwrap().uid(), 0);
    // The volume itself cannot be closed to others.
    let empty = dir.path().join("empty");
    fs::create_dir_all(&empty).unwrap();
    assert!(Command::new("sh").args(["-c", MOUNT]).arg(&empty).status().unwrap().success());
    let mut process = Process::under(&program, &[&format!("--embedded={}", empty.display())], &[]);
    assert_eq!(process.wait(LONG), 1);
    let said = process.stderr();
    assert!(
        said.contains("belongs to user root, ") && said.contains("another directory, as one in it"),
        "{said}"
    );
}

/// `docker run --user 4711` names a user that the image does not know.
#[test]
fn a_user_without_an_entry() {
    const UNKNOWN: [&str; 4] = ["/usr/bin/setpriv", "--reuid=4711", "--regid=4711", "--clear-groups"];
    if !is_root() {
        return;
    }
    let dir = TempDir::new();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o1777)).unwrap();
    let argument = format!("--embedded={}/data", dir.name());
    let mut process = Process::under(&[&UNKNOWN[..], &[USERD]].concat(), &[&argument], &[]);
    assert_eq!(process.wait(LONG), 1);
    let (log, advice) = (process.stderr(), "could not look up effective user ID 4711: user does not exist");
    assert!(log.lines().last().is_some_and(|line| line.contains(advice)), "{log}");
}

/// A umask may close new files to their owner.
#[test]
fn whatever_the_umask_is() {
    const AS_NOBODY: [&str; 4] = ["/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    if !is_root() {
        return;
    }
    let (dir, _) = prefix();
    let argument = format!("--embedded={}/data", dir.name());
    for (n, umask) in ["0277", "0022"].into_iter().enumerate() {
        let script = format!("umask {umask}; exec \"$0\" \"$@\"");
        let program = [&AS_NOBODY[..], &["/bin/sh", "-c", &script, USERD]].concat();
        let mut process = Process::under(&program, &[&argument], &[]);
        process.wait_for_url_within(LONG_ON_DISK);
        let create = format!(r#"POST /users {{"name":"Ada","email":"{n}@example.com"}} => 201 *"#);
        check(&mut process.client(), &create);
        assert_eq!(process.client().get("/users").json()["total"], n + 1, "{umask}");
        process.signal(Signal::SIGTERM);
        assert_eq!(process.wait(LONG), 0, "{umask}: {}", process.stderr());
    }
}

/// A signal may come at any time of a first start. Shared memory, which a killed server would leave until the machine
/// starts again, is counted in namespaces of its own.
#[test]
fn a_first_service_that_is_ended_amid_initdb_leaves_nothing() {
    const END: &str = r#"
        mount -t tmpfs -o mode=1777 none /dev/shm
        "$@" & userd=$!
        until [ "$(ls /dev/shm | grep -c PostgreSQL)" -gt 0 ]; do sleep 0.01; done
        kill -s "$SIGNAL" $userd
        wait $userd
        echo "$?"
        turn=0
        while [ "$(ls /dev/shm; sed 1d /proc/sysvipc/shm)" ]; do
            turn=$((turn + 1))
            [ $turn -lt 600 ] || { ls /dev/shm; cat /proc/sysvipc/shm; exit 1; }
            sleep 0.05
        done"#;
    if !is_root() {
        return;
    }
    for (name, code) in [("TERM", 143), ("INT", 130), ("KILL", 137)] {
        let program = ["/usr/bin/unshare", "-m", "-i", "/bin/sh", "-c", END, "sh", USERD];
        let mut process =
            Process::under(&program, &UNTIL_SIGNAL, &[("SIGNAL", name), ("PATH", "/usr/bin:/bin")]);
        assert_eq!(process.wait(LONG_ON_DISK), 0, "{name}: {} {}", process.stdout(), process.stderr());
        assert_eq!(process.stdout(), format!("{code}\n"), "{name}");
    }
}

#[test]
fn unusable_directories() {
    let dir = TempDir::new();
    let path = |name: &str| dir.path().join(name);
    let is_root = Uid::effective().is_root();
    let closed = if is_root { 0o700 } else { 0o500 };
    for (name, mode) in [("foreign", 0o755), ("closed", closed), ("fifo", 0o755)] {
        fs::create_dir(path(name)).unwrap();
        fs::set_permissions(path(name), PermissionsExt::from_mode(mode)).unwrap();
    }
    dir.write("file", "");
    dir.write("foreign/letter.txt", "");
    symlink("/nowhere/at/all", path("dangling")).unwrap();
    // A pipe that is waited for would never be opened.
    nix::unistd::mkfifo(&path("fifo/lock"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (name, expected) in [
        ("file", "file cannot be created"),
        ("foreign", "letter.txt"),
        ("closed/data", if is_root { "may not enter" } else { "cannot be created" }),
        ("dangling", "cannot"),
        ("new\nline", "choose another directory"),
        ("a,b", "has a comma"),
        (&"deep/".repeat(30), "too long"),
        ("fifo", if is_root { "fifo/lock belongs to user root" } else { "cannot write" }),
    ] {
        refused(&path(name), expected);
    }
    assert!(!path("foreign/lock").exists() && !path("closed/data").exists());
    assert_eq!(fs::metadata(path("file")).unwrap().uid(), Uid::effective().as_raw(), "it was given away");
    let data = path("data");
    client(&start(&data)).batch_execute(WRITE).unwrap();
    if is_root {
        // A cluster that root has copied starts after the command in the refusal is executed.
        assert!(Command::new("chown").args(["-R", "root:root"]).arg(&data).status().unwrap().success());
        let error = refused(&data, "(chown ");
        let advice = error.split_once("(chown ").and_then(|(_, rest)| rest.split_once(')')).unwrap().0;
        assert!(Command::new("sh").args(["-c", &format!("chown {advice}")]).status().unwrap().success());
    }
    assert_eq!(value(&start(&data), COUNT), "1");
    fs::write(data.join("pgdata/PG_VERSION"), "9.6\n").unwrap();
    assert!(refused(&data, "needs PostgreSQL 9,").contains("is installed"));
}

// Shared servers that are thrown away

/// A directory that each account may write to, and the prefix of a shared server's directory in it.
fn prefix() -> (TempDir, PathBuf) {
    let dir = TempDir::new();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let prefix = dir.path().join("s");
    (dir, prefix)
}

/// Returns the directory of the shared server, whose name begins with the name of `prefix`.
fn shared_dir(prefix: &Path) -> Option<PathBuf> {
    let dirs = fs::read_dir(prefix.parent()?).unwrap().flatten();
    dirs.map(|dir| dir.path()).find(|dir| dir.to_str().unwrap().starts_with(prefix.to_str().unwrap()))
}

#[test]
fn whatever_is_killed_leaves_nothing() {
    let (_dir, prefix) = prefix();
    // The founder, somewhere in its start.
    for wait in [0, 100, 400, 800] {
        let founder = Helper::spawn("share", &prefix);
        pause(Duration::from_millis(wait));
        drop(founder);
    }
    let founder = Helper::spawn("share", &prefix);
    eventually(LONG_ON_DISK, "the server is started", || {
        shared_dir(&prefix).is_some_and(|dir| postmaster(&dir).is_some())
    });
    drop(founder);
    // The server, with a session at work: the next one takes its place.
    let mut shared = SharedServer::join(std::slice::from_ref(&prefix), 20).unwrap();
    let place = shared.socket_dir.clone();
    let at_work = connection_string(&place, "postgres");
    let session = thread::spawn(move || Client::connect(&at_work, NoTls).unwrap().batch_execute(AT_WORK));
    let ask = "select pid from pg_stat_activity where query like 'do $$ begin loop%'";
    eventually(LONG, "the query runs", || !shared.session.query(ask, &[]).unwrap().is_empty());
    let pid = shared.session.query_one(ask, &[]).unwrap().get::<_, i32>(0).cast_unsigned();
    kill(postmaster(&place).unwrap());
    let founder = Helper::start("share", &prefix);
    assert!(!running(pid) && session.join().unwrap().is_err());
    // The founder, for longer than an idle server waits: the server has a user.
    let user = Helper::start("share", &prefix);
    let server = postmaster(&place).unwrap();
    drop(founder);
    let since = Instant::now();
    eventually(LONG, "it would have ended", || since.elapsed() > Duration::from_secs(12));
    assert!(running(server));
    // The shell that keeps the server: the next one starts another.
    let shells = || processes_about(&prefix).into_iter().find(|(_, line)| line.starts_with("/bin/sh "));
    kill(shells().unwrap().0);
    drop(Helper::start("share", &prefix));
    assert!(shells().is_some() && running(server));
    // The suite, and the next one comes before the server has ended.
    drop(user);
    let next = Helper::start("share", &prefix);
    assert_eq!((shared_dir(&prefix), postmaster(&place)), (Some(place), Some(server)));
    drop(next);
    let left = || (shared_dir(&prefix), processes_about(&prefix));
    eventually(LONG_ON_DISK, "nothing is left", || left() == (None, Vec::new()));
}

#[test]
fn a_directory_of_another_user_is_passed_over() {
    let (dir, first) = prefix();
    let second = dir.path().join("u");
    let shared = SharedServer::join(std::slice::from_ref(&second), 20).unwrap();
    // A link that another user has made, to a directory that looks like one of ours.
    let theirs = dir.path().join("theirs");
    fs::create_dir_all(theirs.join("pgdata")).unwrap();
    symlink(&theirs, shared.socket_dir.to_str().unwrap().replacen("/u-", "/s-", 1)).unwrap();
    let joined = SharedServer::join(&[first, second], 20).unwrap();
    assert!(joined.socket_dir == shared.socket_dir && theirs.join("pgdata").exists());
    kill(postmaster(&shared.socket_dir).unwrap());
    eventually(LONG, "its processes end", || processes_about(&shared.socket_dir).is_empty());
}

/// `/dev/shm` of mode 755 or read-only, as containers have it.
#[test]
fn without_shared_memory_the_temporary_directory_is_taken() {
    if !is_root() {
        return;
    }
    for mount in ["-o mode=755", "-o ro"] {
        let script = format!("mount -t tmpfs {mount} none /dev/shm && exec \"$0\" \"$@\"");
        let program = ["/usr/bin/unshare", "-m", "/bin/sh", "-c", &script, USERD];
        let mut process = Process::under(&program, &UNTIL_SIGNAL, &[("TMPDIR", "/tmp")]);
        process.wait_for_url_within(LONG_ON_DISK);
        assert_eq!(process.client().get("/users").status, 200, "{mount}");
    }
}

/// Connection strings are UTF-8, so a name of other bytes is refused as what it is.
#[test]
fn a_name_that_is_not_utf_8() {
    let (dir, _) = data_directory();
    let name = dir.path().join(OsStr::from_bytes(b"\xff"));
    let error = Cluster::open(&name, 100, false, |_| true).expect_err("no socket there").to_string();
    assert!(error.contains("or is not UTF-8"), "{error}");
}
