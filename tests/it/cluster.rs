//! The private cluster: made, kept, used by one process, recovered after a crash. Runs as root and as any user.
//! The test binary starts itself as the process to be
//! killed (`helper`), so it can be copied anywhere and run by another account.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use crate::support::{LONG, children, eventually, others_may_read, pause};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use postgres::{Client, NoTls};
use userd::embedded::{Cluster, Options};

/// How long a start waits for what a killed userd leaves.
const LOCK_WAIT: Duration = Duration::from_secs(30);

fn is_root() -> bool {
    nix::unistd::Uid::effective().is_root()
}

/// A directory to be removed at the end, which any account may enter.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        others_may_read();
        let dir = env::temp_dir().join(format!("own-{}-{name}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
        Scratch(dir)
    }
    fn options(&self, name: &str) -> Options {
        Options { max_connections: 10, ..Options::new(self.0.join(name)) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !thread::panicking() {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }
}

fn temporary(options: Options) -> Options {
    Options { durable: false, ..options }
}

fn client(cluster: &Cluster) -> Client {
    Client::connect(&cluster.connection_string("postgres"), NoTls).unwrap()
}

fn write(client: &mut Client) {
    client.batch_execute("create table if not exists t(v int); insert into t values (1)").unwrap();
}

fn count(cluster: &Cluster) -> i64 {
    client(cluster).query_one("select count(*) from t", &[]).unwrap().get(0)
}

fn start(options: &Options) -> Cluster {
    Cluster::start(options).unwrap_or_else(|error| panic!("{error}"))
}

fn refused(options: &Options) -> String {
    let error = match Cluster::start(options) {
        Ok(_) => panic!("started"),
        Err(error) => error.to_string(),
    };
    println!("  refused: {error}");
    assert!(!error.contains('\n'));
    error
}

fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().unwrap_or("");
    !state.is_empty() && !state.starts_with(['Z', 'X'])
}

fn kill(pid: u32, signal: Signal) {
    signal::kill(Pid::from_raw(pid.cast_signed()), signal).unwrap();
}

/// Every process whose arguments or working directory name the path.
fn processes_about(path: &Path) -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let about = |dir: PathBuf| {
        let line = fs::read(dir.join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let cwd = fs::read_link(dir.join("cwd")).unwrap_or_default();
        let ours = path.to_str().unwrap();
        (line.contains(ours) || cwd.starts_with(path)).then_some(format!("{dir:?} {line}"))
    };
    entries.filter_map(|entry| about(entry.path())).collect()
}

/// The postmaster's child that works on the helper's query, which its title tells.
fn session_of(postmaster: u32) -> Option<u32> {
    let title = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    children(postmaster).into_iter().find(|pid| title(pid).contains("] DO"))
}

/// The process whose line names the directory and this.
fn process_of(options: &Options, name: &str) -> u32 {
    let processes = processes_about(&options.dir);
    let line = processes.iter().find(|line| line.contains(name));
    let pid = line.expect(name).trim_start_matches("\"/proc/");
    pid.split('"').next().unwrap().parse().unwrap()
}

fn watcher_of(options: &Options) -> u32 {
    process_of(options, "userd-watcher")
}

/// Another process with a cluster in `options.dir`, once it is ready, and its postmaster's pid.
fn helper(options: &Options, and_then: &str) -> (Child, u32) {
    let mut child = spawn_helper(options, and_then);
    let output = BufReader::new(child.stdout.take().unwrap());
    let mut lines = output.lines().map(Result::unwrap);
    let pid = lines.find_map(|line| Some(line.split_once("ready ")?.1.parse().unwrap()));
    (child, pid.expect("a helper that is ready"))
}

fn spawn_helper(options: &Options, and_then: &str) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "cluster::the_helper", "--nocapture"])
        .env("HELPER_DIR", &options.dir)
        .env("HELPER_DURABLE", options.durable.to_string())
        .env("HELPER_THEN", and_then)
        .envs([("PGDATA", "/nowhere"), ("PGPORT", "1"), ("PGOPTIONS", "-c x=y"), ("LC_ALL", "xx_XX")])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Not a test: the other process, started by the tests of this file with `HELPER_DIR` set.
#[test]
fn the_helper() {
    let Some(dir) = env::var_os("HELPER_DIR") else {
        return;
    };
    let options = Options {
        durable: env::var("HELPER_DURABLE").unwrap() == "true",
        max_connections: 10,
        ..Options::new(dir)
    };
    let cluster = Cluster::start(&options).unwrap_or_else(|_| std::process::exit(1));
    write(&mut client(&cluster));
    println!("ready {}", cluster.pid());
    match env::var("HELPER_THEN").unwrap().as_str() {
        "exit" => std::process::exit(0),
        "query" => {
            let _ = client(&cluster).batch_execute("do $$ begin loop end loop; end $$");
        }
        _ => thread::park_timeout(Duration::from_secs(60)),
    }
    unreachable!("this process was to be killed");
}

#[test]
fn a_second_start_keeps_the_data() {
    let scratch = Scratch::new("second");
    let options = scratch.options("a/b/data");
    let began = Instant::now();
    let cluster = start(&options);
    println!("durable: initdb and start {:?}", began.elapsed());
    write(&mut client(&cluster));
    let info: String = client(&cluster)
        .query_one(
            "select current_setting('server_encoding') || lower('Ä') || current_setting('max_connections')",
            &[],
        )
        .unwrap()
        .get(0);
    assert_eq!(info, "UTF8ä10");
    let mode = |name: &str| fs::metadata(options.dir.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(""), mode("lock"), mode("postgres.log")), (0o700, 0o600, 0o600));
    let pid = cluster.pid();
    let began = Instant::now();
    cluster.stop().unwrap();
    println!("durable: stop {:?}", began.elapsed());
    assert!(!alive(pid));
    let began = Instant::now();
    let cluster = start(&options);
    println!("durable: start {:?}", began.elapsed());
    assert_eq!(count(&cluster), 1);
    drop(cluster);
    assert_eq!(processes_about(&scratch.0), [""; 0]);
}

#[test]
fn one_userd_a_directory() {
    let scratch = Scratch::new("one");
    let options = scratch.options("data");
    let cluster = start(&options);
    let began = Instant::now();
    assert!(refused(&options).contains(&format!("in use by another userd (process {})", std::process::id())));
    let mut other = spawn_helper(&options, "");
    assert!(!other.wait().unwrap().success());
    // At once, and not after the wait for what a killed userd leaves.
    assert!(began.elapsed() < LOCK_WAIT);
    drop(cluster);
    let (mut other, _) = helper(&options, "");
    assert!(refused(&options).contains(&format!("(process {})", other.id())));
    other.kill().unwrap();
    other.wait().unwrap();
    start(&options);
}

/// In a process that is just being started, say, which has a copy of every file of ours for a moment.
#[test]
fn a_lock_that_outlives_its_holder_is_waited_for() {
    let scratch = Scratch::new("copy");
    let options = scratch.options("data");
    drop(start(&options));
    let copy = fs::File::open(options.dir.join("lock")).unwrap();
    copy.lock().unwrap();
    thread::scope(|scope| {
        let next = scope.spawn(|| start(&options));
        pause(Duration::from_millis(1500));
        drop(copy);
        next.join().unwrap();
    });
}

#[test]
fn many_starts_at_once() {
    let scratch = Scratch::new("many");
    let options = scratch.options("data");
    thread::scope(|scope| {
        let starts: Vec<_> = (0..6).map(|_| scope.spawn(|| Cluster::start(&options))).collect();
        let started: Vec<_> = starts.into_iter().map(|start| start.join().unwrap()).collect();
        assert_eq!(started.iter().filter(|result| result.is_ok()).count(), 1);
    });
}

#[test]
fn a_killed_userd_is_followed_by_the_next() {
    let scratch = Scratch::new("killed");
    let options = scratch.options("data");
    let (mut userd, postmaster) = helper(&options, "");
    userd.kill().unwrap();
    userd.wait().unwrap();
    assert!(alive(postmaster));
    let cluster = start(&options);
    assert!(!alive(postmaster));
    assert_eq!(count(&cluster), 1);
}

#[test]
fn a_killed_server_with_a_session_at_work() {
    let scratch = Scratch::new("shm");
    let options = scratch.options("data");
    let (mut userd, postmaster) = helper(&options, "query");
    let session = || session_of(postmaster);
    eventually(LONG, "the query runs", || session().is_some());
    let session = session().unwrap();
    userd.kill().unwrap();
    userd.wait().unwrap();
    kill(postmaster, Signal::SIGKILL);
    eventually(LONG, "the postmaster is dead", || !alive(postmaster));
    assert!(alive(session));
    let began = Instant::now();
    let cluster = start(&options);
    println!("after a crash with a session left: start {:?}", began.elapsed());
    assert_eq!(count(&cluster), 1);
    // The server is killed under our feet: dropping is quick and without a fuss.
    kill(cluster.pid(), Signal::SIGKILL);
    drop(cluster);
    assert_eq!(count(&start(&options)), 1);
}

#[test]
fn stale_pid_files() {
    let scratch = Scratch::new("stale");
    let options = scratch.options("data");
    write(&mut client(&start(&options)));
    let mut stranger = Command::new("sleep").arg("100").current_dir("/").spawn().unwrap();
    let file = options.dir.join("pgdata/postmaster.pid");
    let socket_lock = options.dir.join(".s.PGSQL.5432.lock");
    for content in [
        format!("{}\n{}\n", stranger.id(), file.display()),
        String::new(),
        "1\n".into(),
        "999999999\n".into(),
    ] {
        fs::write(&file, &content).unwrap();
        fs::write(&socket_lock, &content).unwrap();
        assert_eq!(count(&start(&options)), 1, "{content:?}");
        assert!(stranger.try_wait().unwrap().is_none());
    }
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[test]
fn an_interrupted_initdb_is_repeated() {
    let scratch = Scratch::new("initdb");
    let options = scratch.options("data");
    let new = options.dir.join("pgdata.new");
    for wait in [0, 100, 300] {
        let mut userd = spawn_helper(&options, "");
        eventually(LONG, "initdb is at work", || new.join("base").exists());
        pause(Duration::from_millis(wait));
        userd.kill().unwrap();
        userd.wait().unwrap();
        if wait > 0 && options.dir.join("pgdata").exists() {
            println!("initdb takes less than {wait} ms here");
            break;
        }
        assert!(!options.dir.join("pgdata").exists());
    }
    start(&options).stop().unwrap();
    assert!(!new.exists());
    fs::create_dir_all(new.join("base")).unwrap();
    start(&options);
}

#[test]
fn names_of_any_kind() {
    let scratch = Scratch::new("names");
    let deep = "deep/".repeat(30);
    for name in ["it's \"quoted\" \\ $(touch x) `y`", " space ", "a,b", "ünïcode", "-D", &deep] {
        let durable = scratch.options(name);
        for options in [temporary(durable.clone()), durable] {
            let cluster = start(&options);
            write(&mut client(&cluster));
            let psql = Command::new("psql")
                .args([&cluster.connection_string("postgres"), "-Atc", "select v from t"])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8_lossy(&psql.stdout), "1\n", "{psql:?}");
            drop(cluster);
            assert_eq!(options.dir.exists(), options.durable, "{options:?}");
            assert_eq!(processes_about(&scratch.0), [""; 0]);
        }
    }
    assert!(refused(&scratch.options("new\nline")).contains("control character"));
}

#[test]
fn a_socket_elsewhere_is_removed_after_a_crash() {
    let scratch = Scratch::new("elsewhere");
    let options = scratch.options(&"deep/".repeat(30));
    let (mut userd, postmaster) = helper(&options, "");
    userd.kill().unwrap();
    let left = env::temp_dir().join(format!("userd-socket-{}-0", userd.id()));
    userd.wait().unwrap();
    kill(postmaster, Signal::SIGKILL);
    assert!(left.exists());
    start(&options);
    assert!(!left.exists());
}

#[test]
fn unusable_directories() {
    let scratch = Scratch::new("unusable");
    let dir = |name: &str, mode: u32| {
        let dir = scratch.0.join(name);
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, PermissionsExt::from_mode(mode)).unwrap();
        dir
    };
    fs::write(scratch.0.join("file"), "").unwrap();
    assert!(refused(&scratch.options("file")).contains("not a directory"));
    assert!(refused(&scratch.options("file/below")).contains("cannot"));
    fs::write(dir("foreign", 0o755).join("letter.txt"), "").unwrap();
    assert!(refused(&scratch.options("foreign")).contains("letter.txt"));
    assert_eq!(fs::read_dir(scratch.0.join("foreign")).unwrap().count(), 1);
    dir("closed", if is_root() { 0o700 } else { 0o500 });
    let error = refused(&scratch.options("closed/data"));
    assert!(
        error.contains(if is_root() { "may not enter" } else { "cannot create" }) && error.contains("closed")
    );
    assert!(!scratch.0.join("closed/data").exists());
    std::os::unix::fs::symlink("/nowhere/at/all", scratch.0.join("dangling")).unwrap();
    refused(&scratch.options("dangling"));
    if !is_root() {
        assert!(refused(&Options::new("/etc/ssl/private/x")).contains("Permission denied"));
        assert!(refused(&Options::new("/var/cache")).contains("another directory"));
    }
    dir("empty", 0o755);
    start(&scratch.options("empty"));
    fs::write(scratch.0.join("empty/pgdata/PG_VERSION"), "9.6\n").unwrap();
    let error = refused(&scratch.options("empty"));
    assert!(error.contains("needs PostgreSQL 9,") && error.contains("is installed"), "{error}");
    assert!(refused(&temporary(scratch.options("empty"))).contains("would delete it"));
    if is_root() {
        std::os::unix::fs::chown(scratch.0.join("empty/pgdata"), Some(65534), None).unwrap();
        assert!(refused(&scratch.options("empty")).contains("belongs to user nobody"));
    }
}

/// As after a copy by root. What the refusal says to do is done.
#[test]
fn a_cluster_of_roots_is_given_away_as_told() {
    if !is_root() {
        println!("not tested: only root gives files away");
        return;
    }
    let scratch = Scratch::new("roots");
    let options = scratch.options("data");
    let cluster = start(&options);
    write(&mut client(&cluster));
    drop(cluster);
    let copied = Command::new("chown").arg("-R").arg("root:root").arg(&options.dir).status().unwrap();
    assert!(copied.success());
    let error = refused(&options);
    let (_, advice) = error.split_once("(chown ").unwrap_or_else(|| panic!("{error}"));
    let (advice, _) = advice.split_once(')').unwrap();
    let followed = Command::new("sh").args(["-c", &format!("chown {advice}")]).status().unwrap();
    assert!(followed.success());
    assert_eq!(count(&start(&options)), 1);
}

#[test]
fn a_server_that_fails_says_why() {
    let scratch = Scratch::new("fails");
    let options = scratch.options("data");
    start(&options);
    let conf = options.dir.join("pgdata/postgresql.conf");
    let text = fs::read_to_string(&conf).unwrap();
    fs::write(&conf, format!("{text}\nshared_buffers = rubbish\n")).unwrap();
    let began = Instant::now();
    assert!(refused(&options).contains("FATAL"));
    // At once, and not after the wait for what a killed userd leaves.
    assert!(began.elapsed() < LOCK_WAIT);
    fs::write(&conf, text).unwrap();
    // A log that has grown is put aside.
    let log = fs::File::options().write(true).open(options.dir.join("postgres.log")).unwrap();
    log.set_len(9 << 20).unwrap();
    start(&options);
    assert!(options.dir.join("postgres.log.old").metadata().unwrap().len() == 8 << 20);
    assert!(options.dir.join("postgres.log").metadata().unwrap().len() < 10_000);
    // No time at all: an error, and nothing left running.
    let hurried = Options { start_timeout: Duration::ZERO, ..options };
    assert!(refused(&hurried).contains("in time"));
    let fresh = Options { dir: scratch.0.join("fresh"), ..hurried };
    assert!(refused(&fresh).contains("in time"));
    // The initdb that was ended holds the lock until it is gone.
    eventually(LONG, "a refusal for the time", || refused(&temporary(fresh.clone())).contains("in time"));
    let gone = || !fresh.dir.exists() && processes_about(&scratch.0).is_empty();
    eventually(LONG, "nothing is left", gone);
}

#[test]
fn a_throwaway_cluster_leaves_nothing() {
    let scratch = Scratch::new("temporary");
    let options = temporary(scratch.options("data"));
    let gone = || !options.dir.exists() && processes_about(&scratch.0).is_empty();
    let began = Instant::now();
    let cluster = start(&options);
    println!("temporary: initdb and start {:?}", began.elapsed());
    write(&mut client(&cluster));
    let began = Instant::now();
    cluster.stop().unwrap();
    println!("temporary: stop {:?}", began.elapsed());
    assert!(gone());
    // The terminal's signals, and a postmaster that was killed, are nothing to the watcher.
    let cluster = start(&options);
    let watcher = watcher_of(&options);
    for signal in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM] {
        kill(watcher, signal);
    }
    write(&mut client(&cluster));
    kill(cluster.pid(), Signal::SIGKILL);
    drop(cluster);
    eventually(LONG, "nothing is left", gone);
    // Killed, or ended without Drop.
    for then in ["", "exit", "query"] {
        let (mut userd, postmaster) = helper(&options, then);
        if then != "exit" {
            userd.kill().unwrap();
        }
        userd.wait().unwrap();
        let began = Instant::now();
        eventually(LONG, "nothing is left", gone);
        println!("temporary, {then:?}: gone after {:?}", began.elapsed());
        assert!(!alive(postmaster));
    }
    // Killed somewhere in its start, and the next one follows at once.
    for wait in [0, 1, 5, 20, 50, 200, 400, 600, 800] {
        let mut userd = spawn_helper(&options, "");
        pause(Duration::from_millis(wait));
        userd.kill().unwrap();
        userd.wait().unwrap();
        if wait >= 50 {
            start(&options);
            assert!(gone());
        }
    }
    // Its initdb outlives it for a while, and then removes by name what it made.
    let mut userd = spawn_helper(&options, "");
    eventually(LONG, "initdb has begun", || options.dir.join("pgdata.new/base").exists());
    let initdb = process_of(&options, "initdb -D");
    kill(initdb, Signal::SIGSTOP);
    userd.kill().unwrap();
    userd.wait().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            pause(Duration::from_millis(150));
            kill(initdb, Signal::SIGCONT);
        });
        let cluster = start(&options);
        // At the first attempt: the second is made without a locale.
        let row = client(&cluster).query_one("select max(datctype::text) from pg_database", &[]).unwrap();
        assert_eq!(row.get::<_, String>(0), "C.UTF-8");
    });
    assert!(gone());
    // The watcher itself was killed with us: the next one clears up; a durable one doesn't trust it.
    let (mut userd, postmaster) = helper(&options, "");
    kill(watcher_of(&options), Signal::SIGKILL);
    userd.kill().unwrap();
    userd.wait().unwrap();
    assert!(refused(&Options { durable: true, ..options.clone() }).contains("temporary cluster"));
    drop(start(&options));
    assert!(gone() && !alive(postmaster));
}

/// Other accounts may make files beside it: links under the name that the directory gets as it goes, and one in the place
/// of the directory itself.
#[test]
fn the_end_of_a_throwaway_cluster_follows_no_link() {
    let scratch = Scratch::new("links");
    fs::set_permissions(&scratch.0, PermissionsExt::from_mode(0o777)).unwrap();
    let options = temporary(scratch.options("data"));
    let victim = scratch.0.join("victim");
    let precious = ["pgdata/precious", "precious"].map(|name| victim.join(name));
    for file in &precious {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "").unwrap();
    }
    let link = |name: &str| std::os::unix::fs::symlink(&victim, scratch.0.join(name)).unwrap();
    let ours = || {
        let files = fs::read_dir(&scratch.0).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("data")).collect::<Vec<_>>()
    };

    let cluster = start(&options);
    let guessed = format!("data.{}", watcher_of(&options));
    link(&guessed);
    cluster.stop().unwrap();
    assert!(precious.iter().all(|file| file.exists()), "a link under the name that it may get");
    assert_eq!(ours(), [guessed.as_str()], "the cluster is gone");
    fs::remove_file(scratch.0.join(&guessed)).unwrap();

    let cluster = start(&options);
    fs::rename(&options.dir, scratch.0.join("moved")).unwrap();
    link("data");
    drop(cluster);
    eventually(LONG, "the server is gone", || processes_about(&scratch.0).is_empty());
    assert!(precious.iter().all(|file| file.exists()), "a link in its place");
    assert!(!scratch.0.join("moved/pgdata").exists(), "what it had is gone");
}

/// The account that runs PostgreSQL may write to the directory; root must neither wait for its pipes nor give it files.
#[test]
fn files_of_a_directory_are_regular_and_have_one_name() {
    let scratch = Scratch::new("files");
    let outside = scratch.0.join("outside");
    fs::write(&outside, "").unwrap();
    type Prepare = fn(&Path, &Path);
    let rows: [Prepare; 2] = [
        |log, _| nix::unistd::mkfifo(log, nix::sys::stat::Mode::S_IRWXU).unwrap(),
        |log, outside| fs::hard_link(outside, log).unwrap(),
    ];
    for (number, prepare) in rows.into_iter().enumerate() {
        let options = scratch.options(&number.to_string());
        fs::create_dir(&options.dir).unwrap();
        prepare(&options.dir.join("postgres.log"), &outside);
        let error = refused(&options);
        assert!(error.contains("not a regular file"), "{error}");
    }
    let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(&outside).unwrap());
    assert_eq!(owner, nix::unistd::Uid::effective().as_raw(), "it was given away");
}

/// Clients of the service cause errors of statements; none of them is a line of PostgreSQL's log, which is bounded
/// while the server runs.
#[test]
fn the_log_of_a_server_stays_small() {
    let scratch = Scratch::new("log");
    let options = scratch.options("data");
    let mut cluster = start(&options);
    let log = options.dir.join("postgres.log");
    assert!(client(&cluster).batch_execute("select 1 / 0").is_err());
    assert!(client(&cluster).batch_execute("do $$ begin raise log 'a line of the log'; end $$").is_ok());
    let said = || fs::read_to_string(&log).unwrap();
    eventually(LONG, "the server logs", || said().contains("a line of the log"));
    assert!(!said().contains("division by zero"), "{}", said());

    let filled = fs::OpenOptions::new().append(true).open(&log).unwrap();
    filled.set_len(9 << 20).unwrap();
    assert_eq!(cluster.ended(), None);
    assert_eq!(fs::metadata(&log).unwrap().len(), 0);
    assert_eq!(fs::metadata(log.with_extension("log.old")).unwrap().len(), 8 << 20);
    assert!(client(&cluster).batch_execute("do $$ begin raise log 'another line'; end $$").is_ok());
    eventually(LONG, "the server goes on logging", || said().contains("another line"));
    assert!(fs::metadata(&log).unwrap().len() < 1 << 20, "it writes at the end");
}

/// The file of a data directory names where its sockets are; only directories of ours are cleared.
#[test]
fn sockets_of_other_directories_stay() {
    let scratch = Scratch::new("sockets");
    let options = scratch.options("data");
    let (mut userd, postmaster) = helper(&options, "");
    userd.kill().unwrap();
    userd.wait().unwrap();
    kill(postmaster, Signal::SIGKILL);
    eventually(LONG, "the postmaster is dead", || !alive(postmaster));
    let other = scratch.0.join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join(".s.PGSQL.5432"), "").unwrap();
    let file = options.dir.join("pgdata/postmaster.pid");
    let text = fs::read_to_string(&file).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines[4] = other.to_str().unwrap();
    fs::write(&file, lines.join("\n")).unwrap();
    start(&options);
    assert!(other.join(".s.PGSQL.5432").exists());
}
