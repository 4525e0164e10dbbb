//! `export`, `import`, `migrate`, `check` and `config` on the private cluster of `--embedded`, while a service runs on it
//! and while none does.

use crate::support::{LONG, LONG_ON_DISK, Process, TempDir, assert_no_secret, eventually, running};
use nix::{
    sys::signal::Signal,
    unistd::{Uid, User, chown},
};
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    process::Command,
};

const USERD: &str = env!("CARGO_BIN_EXE_userd");
const ADA: &str = r#"{"name":"Ada","email":"ada@example.com"}"#;
const GRACE: &str = r#"{"name":"Grace","email":"grace@example.com"}"#;

/// A directory that PostgreSQL's account may enter, and the argument that names a cluster in it.
fn directory() -> (TempDir, String) {
    let dir = TempDir::new();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let argument = format!("--embedded={}", dir.path().join("data").display());
    (dir, argument)
}

/// How the command ends: its exit code, standard output and standard error.
fn userd(arguments: &[&str]) -> (i32, String, String) {
    let mut process = Process::start(arguments, &[]);
    let code = process.wait(LONG_ON_DISK);
    assert_no_secret(&(process.stdout() + &process.stderr()));
    (code, process.stdout(), process.stderr())
}

fn postmaster(dir: &TempDir) -> Option<u32> {
    let file = fs::read_to_string(dir.path().join("data/pgdata/postmaster.pid")).ok()?;
    file.lines().next()?.parse().ok().filter(|pid| running(*pid))
}

/// The e-mail addresses of an export.
fn addresses(argument: &str) -> Vec<String> {
    let (code, stdout, stderr) = userd(&["export", argument]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let email = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["email"].clone();
    stdout.lines().map(|line| email(line).as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_directory_without_a_cluster() {
    let (dir, argument) = directory();
    let file = dir.path().join("users.ndjson");
    fs::write(&file, ADA).unwrap();
    let file = file.to_str().unwrap();
    let path = dir.path().join("data");
    let path = path.display();
    let line = format!("{path} has no cluster; `userd --embedded={path}` makes one");
    for arguments in [&["export"][..], &["config"], &["recount"], &["import", "--dry-run", file], &["check"]]
    {
        let (code, stdout, stderr) = userd(&[arguments, &[&argument]].concat());
        assert_eq!(code, 1, "{arguments:?}: {stdout}{stderr}");
        assert!((stdout + &stderr).contains(&line), "{arguments:?}: {stderr}");
        assert!(!dir.path().join("data").exists(), "{arguments:?} has made it");
    }
}

/// Each starts the server for itself, and leaves none behind.
#[test]
fn on_a_cluster_that_does_not_run() {
    let (dir, argument) = directory();
    let file = dir.path().join("users.ndjson");
    fs::write(&file, ADA).unwrap();
    // The first one makes it, and its tables.
    let (code, stdout, stderr) = userd(&["import", &argument, file.to_str().unwrap()]);
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "imported 1 user\n", ""));
    assert_eq!(postmaster(&dir), None);
    assert_eq!(addresses(&argument), ["ada@example.com"]);
    assert_eq!(userd(&["migrate", &argument]), (0, "nothing to apply\n".to_owned(), String::new()));
    let (code, stdout, _) = userd(&["check", &argument]);
    assert!(code == 0 && stdout.contains("ok       migrations: all are applied"), "{stdout}");
    assert_eq!(postmaster(&dir), None);
    // Settings of another database have no effect on it, and that is told.
    let url = [("DATABASE_URL", "postgres://nobody@192.0.2.1/none")];
    let mut process = Process::start(&["check", &argument], &url);
    assert_eq!(process.wait(LONG_ON_DISK), 0, "{}", process.stdout());
    let note = "note     configuration: DATABASE_URL has no effect with --embedded";
    assert!(process.stdout().contains(note), "{}", process.stdout());

    // The service finds what they have left.
    let mut service = Process::start(&[&argument], &[]);
    service.wait_for_url_within(LONG_ON_DISK);
    assert_eq!(service.client().get("/users/1").json()["email"], "ada@example.com");
}

#[test]
fn on_a_cluster_that_a_service_runs_on() {
    let (dir, argument) = directory();
    let mut service = Process::start(&[&argument], &[]);
    service.wait_for_url_within(LONG_ON_DISK);
    let mut client = service.client();
    assert_eq!(client.post("/users", ADA).status, 201);
    let server = postmaster(&dir).expect("it runs");

    let file = dir.path().join("users.ndjson");
    fs::write(&file, GRACE).unwrap();
    let (code, stdout, stderr) = userd(&["import", &argument, file.to_str().unwrap()]);
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "imported 1 user\n", ""));
    assert_eq!(client.get("/users/2").json()["email"], "grace@example.com");
    assert_eq!(addresses(&argument), ["ada@example.com", "grace@example.com"]);
    for verb in ["migrate", "check", "recount"] {
        assert_eq!(userd(&[verb, &argument]).0, 0, "{verb}");
    }
    assert_eq!(postmaster(&dir), Some(server));

    // The line for psql, as it is printed.
    let (code, stdout, stderr) = userd(&["config", &argument]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let row = |name: &str| {
        let line = stdout.lines().find(|line| line.split_whitespace().next() == Some(name));
        line.unwrap_or_else(|| panic!("{name}: {stdout}")).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row("HOST"), "HOST 127.0.0.1 --embedded");
    assert_eq!(row("DB_NAME"), "DB_NAME - --embedded is used instead");
    let line = row("psql");
    assert!(line.starts_with("psql -h /") && line.ends_with("/data -U postgres"), "{line}");
    let psql = format!("{line} -Atc 'select count(*) from users'");
    let psql = Command::new("/bin/sh").args(["-c", &psql]).output().unwrap();
    assert_eq!(String::from_utf8(psql.stdout).unwrap(), "2\n", "{}", String::from_utf8_lossy(&psql.stderr));

    service.signal(Signal::SIGTERM);
    assert_eq!(service.wait(LONG_ON_DISK), 0, "{}", service.stderr());
    // It is told without a server, too.
    assert!(userd(&["config", &argument]).1.contains(&line));
    assert_eq!(postmaster(&dir), None);
}

/// The server ends with the verb that has started it.
#[test]
fn a_signal() {
    let (dir, argument) = directory();
    let pipe = dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // It waits for users: both ends of the pipe are its own.
    let script = format!(r#"exec "$0" "$@" <>{}"#, pipe.display());
    let mut import = Process::under(&["/bin/sh", "-c", &script, USERD], &["import", &argument], &[]);
    eventually(LONG_ON_DISK, "the server runs", || postmaster(&dir).is_some());
    import.signal(Signal::SIGTERM);
    assert_eq!(import.wait(LONG_ON_DISK), 128 + 15, "{}", import.stderr());
    assert!(import.stderr().contains("interrupted; nothing was imported"), "{}", import.stderr());
    eventually(LONG, "the server ends", || postmaster(&dir).is_none());
}

/// A service of the system has its own account. What root does there leaves everything that account's.
#[test]
fn root_acts_as_the_owner_of_the_directory() {
    if !Uid::effective().is_root() {
        println!("not tested: only root acts for another user");
        return;
    }
    let (dir, argument) = directory();
    let data = dir.path().join("data");
    let owner = User::from_name("nobody").unwrap().expect("every system has it");
    fs::create_dir(&data).unwrap();
    chown(&data, Some(owner.uid), Some(owner.gid)).unwrap();
    let file = dir.path().join("users.ndjson");
    fs::write(&file, ADA).unwrap();
    let (code, stdout, stderr) = userd(&["import", &argument, file.to_str().unwrap()]);
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "imported 1 user\n", ""));
    assert_eq!(owners(&data), [owner.uid.as_raw()], "root has left something");

    let (uid, gid) = (format!("--reuid={}", owner.uid), format!("--regid={}", owner.gid));
    let as_owner = ["/usr/bin/setpriv", &uid, &gid, "--clear-groups", USERD];
    let mut service = Process::under(&as_owner, &[&argument], &[("TMPDIR", "/tmp")]);
    service.wait_for_url_within(LONG_ON_DISK);
    assert_eq!(service.client().get("/users/1").json()["email"], "ada@example.com");
    assert_eq!(addresses(&argument), ["ada@example.com"]);
    service.signal(Signal::SIGTERM);
    assert_eq!(service.wait(LONG_ON_DISK), 0, "{}", service.stderr());
    assert_eq!(addresses(&argument), ["ada@example.com"]);
    assert_eq!(owners(&data), [owner.uid.as_raw()], "root has left something");

    // Another account is told whose it is.
    let as_postgres = ["/usr/bin/setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", USERD];
    let mut export = Process::under(&as_postgres, &["export", &argument], &[("TMPDIR", "/tmp")]);
    assert_eq!(export.wait(LONG), 1);
    assert!(export.stderr().contains("belongs to user nobody: be nobody, or root"), "{}", export.stderr());
}

/// The users that own something in a directory, each once.
fn owners(dir: &Path) -> Vec<u32> {
    let mut owners = vec![fs::symlink_metadata(dir).unwrap().uid()];
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => owners.extend(self::owners(&path)),
            false => owners.push(fs::symlink_metadata(&path).unwrap().uid()),
        }
    }
    owners.sort_unstable();
    owners.dedup();
    owners
}
