//! The private cluster: made, kept, used by one process, recovered after a crash; and the one that is thrown away. Runs as
//! root and as any user. The test binary starts itself as the process to be killed (`the_helper`).

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use crate::support::{LONG, LONG_ON_DISK, Process, TempDir, children, eventually, pause, running};
use nix::sys::signal::{self, Signal};
use nix::unistd::{Pid, Uid};
use postgres::{Client, NoTls};
use userd::embedded::{Cluster, Options, Shared};

const WRITE: &str = "create table if not exists t(v int); insert into t values (1)";
const AT_WORK: &str = "do $$ begin loop end loop; end $$";

/// A directory that every account may enter.
fn directory() -> TempDir {
    let dir = TempDir::new();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    dir
}

fn start(dir: &Path) -> Cluster {
    Cluster::start(&Options::new(dir)).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn refused(dir: &Path) -> String {
    let error = Cluster::start(&Options::new(dir)).expect_err("it starts").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

fn client(cluster: &Cluster) -> Client {
    Client::connect(&cluster.connection_string("postgres"), NoTls).unwrap()
}

fn count(cluster: &Cluster) -> i64 {
    client(cluster).query_one("select count(*) from t", &[]).unwrap().get(0)
}

fn kill(pid: u32, signal: Signal) {
    signal::kill(Pid::from_raw(pid.cast_signed()), signal).unwrap();
}

/// Every process whose arguments or working directory name the path.
fn processes_about(path: &Path) -> Vec<(u32, String)> {
    let about = |dir: PathBuf| {
        let line = fs::read(dir.join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let works_there = fs::read_link(dir.join("cwd")).is_ok_and(|cwd| cwd.starts_with(path));
        let pid = dir.file_name()?.to_str()?.parse().ok()?;
        (works_there || line.contains(path.to_str()?)).then_some((pid, line)).filter(|_| running(pid))
    };
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| about(entry.path())).collect()
}

#[track_caller]
fn process_about(path: &Path, name: &str) -> u32 {
    let processes = processes_about(path);
    let found = processes.iter().find(|(_, line)| line.contains(name));
    found.unwrap_or_else(|| panic!("{name}: {processes:?}")).0
}

/// Another process, once it has printed "ready", and the number that it has printed. Killed by its test.
fn helper(what: &str, dir: &Path) -> (Child, u32) {
    let mut child = spawn_helper(what, dir);
    let output = BufReader::new(child.stdout.take().unwrap());
    let mut lines = output.lines().map(Result::unwrap);
    let pid = lines.find_map(|line| Some(line.split_once("ready ")?.1.parse().unwrap()));
    (child, pid.expect("a helper that is ready"))
}

fn spawn_helper(what: &str, dir: &Path) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "cluster::the_helper", "--nocapture"])
        .env("HELPER", what)
        .env("HELPER_DIR", dir)
        .envs([("PGDATA", "/nowhere"), ("PGPORT", "1"), ("PGOPTIONS", "-c x=y"), ("LC_ALL", "xx_XX")])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Not a test: the other process, started by the tests of this file with `HELPER` set.
#[test]
fn the_helper() {
    let Some(what) = env::var_os("HELPER") else { return };
    let dir = PathBuf::from(env::var_os("HELPER_DIR").unwrap());
    if what == "share" {
        let mut shared =
            Shared::join(std::slice::from_ref(&dir), 20).unwrap_or_else(|error| panic!("{error}"));
        let row = shared.client.query_one("select pg_backend_pid()", &[]).unwrap();
        println!("ready {}", row.get::<_, i32>(0));
        let _ = std::io::stdin().lines().count();
        thread::park();
    }
    let Ok(cluster) = Cluster::start(&Options::new(dir)) else { std::process::exit(1) };
    client(&cluster).batch_execute(WRITE).unwrap();
    println!("ready {}", cluster.pid());
    if what == "query" {
        let _ = client(&cluster).batch_execute(AT_WORK);
    }
    thread::park();
}

#[test]
fn a_second_start_keeps_the_data() {
    let dir = directory();
    let data = dir.path().join("a/it's \"ü\" \\ $(touch x) `y`/ data ");
    let cluster = start(&data);
    assert!(cluster.is_new());
    client(&cluster).batch_execute(WRITE).unwrap();
    let info = "select current_setting('server_encoding') || lower('Ä') || current_setting('max_connections') || \
        current_setting('shared_buffers')";
    let info: String = client(&cluster).query_one(info, &[]).unwrap().get(0);
    assert_eq!(info, "UTF8ä10024MB");
    let mode = |name: &str| fs::metadata(data.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(""), mode("lock"), mode("postgres.log")), (0o700, 0o600, 0o600));
    let pid = cluster.pid();
    let string = cluster.connection_string("postgres");
    let said = Command::new("psql").args([string.as_str(), "-Atc", "select v from t"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout), "1\n");
    cluster.stop().unwrap();
    assert!(!running(pid));
    // Settings that an operator adds to postgresql.conf take effect.
    let file = data.join("pgdata/postgresql.conf");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, format!("{text}shared_buffers = 16MB\n")).unwrap();
    let cluster = start(&data);
    let row = client(&cluster).query_one("select current_setting('shared_buffers')", &[]).unwrap();
    assert_eq!((row.get::<_, &str>(0), count(&cluster), cluster.is_new()), ("16MB", 1, false));
    drop(cluster);
    assert_eq!(processes_about(dir.path()), []);
}

#[test]
fn one_userd_a_directory() {
    let dir = directory();
    let data = dir.path().join("data");
    // If several start at once, one succeeds.
    let started = thread::scope(|scope| {
        let starts: Vec<_> = (0..6).map(|_| scope.spawn(|| Cluster::start(&Options::new(&data)))).collect();
        let started = starts.into_iter().map(|start| start.join().unwrap());
        started.filter_map(Result::ok).collect::<Vec<_>>()
    });
    assert_eq!(started.len(), 1);
    assert!(refused(&data).contains(&format!("in use by another userd (process {})", std::process::id())));
    drop(started);
    let (other, _) = helper("start", &data);
    assert!(refused(&data).contains(&format!("(process {})", other.id())));
    end(other);
    drop(start(&data));
    // A process that is just being started has a copy of the lock for a moment.
    let copy = fs::File::open(data.join("lock")).unwrap();
    copy.lock().unwrap();
    thread::scope(|scope| {
        let next = scope.spawn(|| start(&data));
        pause(Duration::from_millis(500));
        assert!(!next.is_finished());
        drop(copy);
        next.join().unwrap();
    });
}

#[test]
fn a_start_after_a_crash() {
    let dir = directory();
    let data = dir.path().join("data");
    // userd is killed, and its server goes on.
    let (userd, server) = helper("start", &data);
    end(userd);
    assert!(running(server));
    let cluster = start(&data);
    assert!(!running(server));
    assert_eq!(count(&cluster), 1);
    // The server is killed under our feet: dropping is quick and without a fuss.
    kill(cluster.pid(), Signal::SIGKILL);
    drop(cluster);
    // Both are killed, and a session is at work.
    let (userd, server) = helper("query", &data);
    let title = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let session = || children(server).into_iter().find(|pid| title(pid).contains("] DO"));
    eventually(LONG, "the query runs", || session().is_some());
    let session = session().unwrap();
    end(userd);
    kill(server, Signal::SIGKILL);
    eventually(LONG, "the server is dead", || !running(server));
    assert!(running(session));
    let cluster = start(&data);
    assert_eq!(count(&cluster), 2);
    assert!(!running(session));
    drop(cluster);
    // Files that name a process of another kind, or none.
    let mut stranger = Command::new("sleep").arg("100").current_dir("/").spawn().unwrap();
    for content in [format!("{}\n{}\n", stranger.id(), data.display()), String::new(), "1\n".to_owned()] {
        for file in ["pgdata/postmaster.pid", ".s.PGSQL.5432.lock"] {
            fs::write(data.join(file), &content).unwrap();
        }
        assert_eq!(count(&start(&data)), 2, "{content:?}");
        assert!(stranger.try_wait().unwrap().is_none());
    }
    end(stranger);
}

#[test]
fn an_interrupted_initdb_is_repeated() {
    let dir = directory();
    let data = dir.path().join("data");
    let new = data.join("pgdata.new");
    let userd = spawn_helper("start", &data);
    eventually(LONG, "initdb is at work", || new.join("base").exists());
    end(userd);
    assert!(!data.join("pgdata").exists());
    start(&data).stop().unwrap();
    assert!(!new.exists());
}

#[test]
fn unusable_directories() {
    let dir = directory();
    let path = |name: &str| dir.path().join(name);
    let make = |name: &str, mode: u32| {
        fs::create_dir(path(name)).unwrap();
        fs::set_permissions(path(name), PermissionsExt::from_mode(mode)).unwrap();
    };
    dir.write("file", "");
    make("foreign", 0o755);
    fs::write(path("foreign/letter.txt"), "").unwrap();
    let is_root = Uid::effective().is_root();
    make("closed", if is_root { 0o700 } else { 0o500 });
    std::os::unix::fs::symlink("/nowhere/at/all", path("dangling")).unwrap();
    for (name, expected) in [
        ("file", "file"),
        ("file/below", "cannot"),
        ("foreign", "letter.txt"),
        ("closed/data", if is_root { "may not enter" } else { "cannot create" }),
        ("dangling", "cannot"),
        ("new\nline", "choose another directory"),
        ("a,b", "has a comma"),
        (&"deep/".repeat(30), "too long"),
    ] {
        let error = refused(&path(name));
        assert!(error.contains(expected), "{name}: {error}");
    }
    assert_eq!(fs::read_dir(path("foreign")).unwrap().count(), 1);
    assert!(!path("closed/data").exists());
    make("empty", 0o755);
    start(&path("empty"));
    fs::write(path("empty/pgdata/PG_VERSION"), "9.6\n").unwrap();
    let error = refused(&path("empty"));
    assert!(error.contains("needs PostgreSQL 9,") && error.contains("is installed"), "{error}");
    if is_root {
        std::os::unix::fs::chown(path("empty/pgdata"), Some(65534), None).unwrap();
        assert!(refused(&path("empty")).contains("belongs to user nobody"));
    }
}

/// A cluster that root has copied is refused, and starts after the command in the refusal is executed.
#[test]
fn a_cluster_of_roots_is_given_away_as_told() {
    if !Uid::effective().is_root() {
        println!("not tested: only root gives files away");
        return;
    }
    let dir = directory();
    let data = dir.path().join("data");
    client(&start(&data)).batch_execute(WRITE).unwrap();
    assert!(Command::new("chown").args(["-R", "root:root"]).arg(&data).status().unwrap().success());
    let error = refused(&data);
    let advice = error.split_once("(chown ").and_then(|(_, rest)| rest.split_once(')'));
    let advice = advice.unwrap_or_else(|| panic!("{error}")).0;
    assert!(Command::new("sh").args(["-c", &format!("chown {advice}")]).status().unwrap().success());
    assert_eq!(count(&start(&data)), 1);
}

#[test]
fn a_server_that_fails_says_why() {
    let dir = directory();
    let data = dir.path().join("data");
    start(&data);
    let conf = data.join("pgdata/postgresql.conf");
    let text = fs::read_to_string(&conf).unwrap();
    fs::write(&conf, format!("{text}\nshared_buffers = rubbish\n")).unwrap();
    let error = refused(&data);
    assert!(error.contains("shared_buffers") && error.contains("FATAL"), "{error}");
    fs::write(&conf, text).unwrap();
    // A log that has grown is put aside.
    let log = data.join("postgres.log");
    fs::File::options().write(true).open(&log).unwrap().set_len(9 << 20).unwrap();
    let cluster = start(&data);
    assert_eq!(fs::metadata(log.with_extension("log.old")).unwrap().len(), 9 << 20);
    // Clients of the service cause errors of statements: none of them is a line of the log.
    assert!(client(&cluster).batch_execute("select 1 / 0").is_err());
    client(&cluster).batch_execute("do $$ begin raise log 'a line of the log'; end $$").unwrap();
    let said = || fs::read_to_string(&log).unwrap();
    eventually(LONG, "the server logs", || said().contains("a line of the log"));
    assert!(!said().contains("division by zero") && said().len() < 10_000, "{}", said());
}

/// The account that runs PostgreSQL may write to the directory; root must neither wait for its pipes nor give it files.
#[test]
fn files_of_a_directory_are_regular_and_have_one_name() {
    let dir = directory();
    dir.write("outside", "");
    let outside = dir.path().join("outside");
    type Prepare = fn(&Path, &Path);
    let rows: [Prepare; 2] = [
        |log, _| nix::unistd::mkfifo(log, nix::sys::stat::Mode::S_IRWXU).unwrap(),
        |log, outside| fs::hard_link(outside, log).unwrap(),
    ];
    for (number, prepare) in rows.into_iter().enumerate() {
        let data = dir.path().join(number.to_string());
        fs::create_dir(&data).unwrap();
        prepare(&data.join("lock"), &outside);
        let error = refused(&data);
        assert!(error.contains("not a regular file"), "{error}");
    }
    let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(&outside).unwrap());
    assert_eq!(owner, Uid::effective().as_raw(), "it was given away");
}

// Shared servers that are thrown away

/// Returns the directory of the shared server, whose name begins with the name of `prefix`.
fn shared_dir(prefix: &Path) -> Option<PathBuf> {
    let name = prefix.file_name()?.to_str()?;
    let dirs = fs::read_dir(prefix.parent()?).unwrap().flatten();
    dirs.map(|dir| dir.path()).find(|dir| dir.file_name().unwrap().to_str().unwrap().starts_with(name))
}

#[track_caller]
fn leaves_nothing(prefix: &Path) {
    let left = || (shared_dir(prefix), processes_about(prefix));
    eventually(LONG_ON_DISK, "nothing is left", || left() == (None, Vec::new()));
}

#[test]
fn a_shared_server_outlives_its_founder_and_no_user() {
    let dir = directory();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let prefix = dir.path().join("s");
    let (founder, _) = helper("share", &prefix);
    let (user, _) = helper("share", &prefix);
    let place = shared_dir(&prefix).unwrap();
    let server = fs::read_to_string(place.join("pgdata/postmaster.pid")).unwrap();
    let server: u32 = server.lines().next().unwrap().parse().unwrap();
    end(founder);
    // It is not idle, for longer than it waits.
    let since = Instant::now();
    eventually(LONG, "it would have ended", || since.elapsed() > Duration::from_secs(13));
    assert!(running(server));
    let (other, _) = helper("share", &prefix);
    assert_eq!(shared_dir(&prefix), Some(place.clone()));
    // The suite is killed, and the next one comes before the server has ended.
    end(user);
    end(other);
    let (next, _) = helper("share", &prefix);
    assert!(running(server));
    end(next);
    // A terminal's signals are nothing to it.
    let guard = process_about(&place, "userd-postgres");
    for signal in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM] {
        kill(guard, signal);
    }
    leaves_nothing(&prefix);
    assert!(!running(server));
}

#[test]
fn whatever_is_killed_leaves_nothing() {
    let dir = directory();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let prefix = dir.path().join("k");
    // The founder, somewhere in its start.
    for wait in [0, 50, 200, 400, 600, 800, 1000] {
        let founder = spawn_helper("share", &prefix);
        pause(Duration::from_millis(wait));
        end(founder);
    }
    leaves_nothing(&prefix);
    // The server, with a session at work.
    let mut shared = Shared::join(std::slice::from_ref(&prefix), 20).unwrap();
    let place = shared_dir(&prefix).unwrap();
    let at_work = shared.connection_string("postgres");
    let session = thread::spawn(move || Client::connect(&at_work, NoTls).unwrap().batch_execute(AT_WORK));
    let ask = "select count(*) from pg_stat_activity where query like 'do $$ begin loop%'";
    eventually(LONG, "the query runs", || shared.client.query_one(ask, &[]).unwrap().get::<_, i64>(0) > 0);
    kill(process_about(&place, "postgres -D pgdata"), Signal::SIGKILL);
    assert!(session.join().unwrap().is_err());
    leaves_nothing(&prefix);
    // The guard: the server ends by itself, and the next start clears up.
    let (user, _) = helper("share", &prefix);
    kill(process_about(&place, "userd-postgres"), Signal::SIGKILL);
    let (next, _) = helper("share", &prefix);
    end(user);
    end(next);
    eventually(LONG, "the server has ended", || processes_about(&place).is_empty());
    let (last, _) = helper("share", &prefix);
    end(last);
    leaves_nothing(&prefix);
}

#[test]
fn a_directory_of_another_user_is_passed_over() {
    let dir = directory();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let prefixes = ["first", "second"].map(|name| dir.path().join(name));
    let first = Shared::join(&prefixes[..1], 20).unwrap();
    let place = shared_dir(&prefixes[0]).unwrap();
    drop(first);
    leaves_nothing(&prefixes[0]);
    // A link that another user has made, to a directory that looks like one of ours.
    let theirs = dir.path().join("theirs");
    fs::create_dir_all(theirs.join("pgdata")).unwrap();
    fs::write(theirs.join("pgdata/postmaster.pid"), "1\n\n\n\n\n\n\nready\n").unwrap();
    std::os::unix::fs::symlink(&theirs, &place).unwrap();
    let second = Shared::join(&prefixes, 20).unwrap();
    assert!(second.socket_dir().starts_with(shared_dir(&prefixes[1]).unwrap()));
    drop(second);
    leaves_nothing(&prefixes[1]);
    assert!(theirs.join("pgdata/postmaster.pid").exists());
}

/// `/dev/shm` of mode 755 or read-only, as containers have it.
#[test]
fn without_shared_memory_the_temporary_directory_is_taken() {
    if !Uid::effective().is_root() {
        println!("not tested: only root may mount a file system");
        return;
    }
    for mount in ["-o mode=755", "-o ro"] {
        let script = format!("mount -t tmpfs {mount} none /dev/shm && exec \"$0\" \"$@\"");
        let program = ["/usr/bin/unshare", "-m", "/bin/sh", "-c", &script, env!("CARGO_BIN_EXE_userd")];
        let mut process = Process::under(&program, &["--embedded", "--ephemeral"], &[("TMPDIR", "/tmp")]);
        process.wait_for_url_within(LONG_ON_DISK);
        assert_eq!(process.client().get("/users").status, 200, "{mount}");
    }
}
