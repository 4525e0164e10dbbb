//! `export`, `import`, `migrate`, `check` and `config` on the private cluster of `--embedded`, while a service runs on it
//! and while none does.

use crate::support::{
    ADA, Ended, GRACE, LONG, LONG_ON_DISK, Process, TempDir, USERD, eventually, is_root, postmaster,
};
use nix::{
    sys::signal::Signal,
    unistd::{User, chown},
};
use std::{fs, process::Command};

/// A directory for a cluster, and a file with a user.
struct Place {
    temp: TempDir,
    argument: String,
    file: String,
}

impl Place {
    fn with(user: &str) -> Place {
        let temp = TempDir::new();
        temp.write("users.ndjson", user);
        let argument = format!("--embedded={}/data", temp.name());
        let file = format!("{}/users.ndjson", temp.name());
        Place { temp, argument, file }
    }

    fn server(&self) -> Option<u32> {
        postmaster(&self.temp.path().join("data"))
    }

    /// How the verb ends. The setting of another database has no effect.
    fn run(&self, verb: &[&str]) -> Ended {
        // Kubernetes sets such a port beside a service that is named `db`. It is not judged.
        let other = [("DATABASE_URL", "postgres://app@192.0.2.1/none"), ("DB_PORT", "tcp://10.0.0.1:5432")];
        Process::start(&[verb, &[&self.argument]].concat(), &other).ended()
    }

    #[track_caller]
    fn import(&self) {
        assert_eq!(
            self.run(&["import", &self.file]),
            (0, "imported: 1, existing: 0, refused: 0\n".to_owned(), String::new())
        );
    }

    /// The e-mail addresses of an export.
    fn addresses(&self) -> Vec<String> {
        let (code, stdout, stderr) = self.run(&["export"]);
        assert_eq!((code, stderr.as_str()), (0, ""));
        let email = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["email"].clone();
        stdout.lines().map(|line| email(line).as_str().unwrap().to_owned()).collect()
    }
}

#[test]
fn a_full_standard_output() {
    let line = "userd: cannot write to standard output: No space left on device (os error 28)\n";
    for verb in [&["--help"][..], &["--version"], &["man"], &["completion", "bash"], &["config"]] {
        let script = r#"exec "$0" "$@" >/dev/full"#;
        let (code, _, stderr) = Process::under(&["/bin/sh", "-c", script, USERD], verb, &[]).ended();
        assert_eq!((code, &*stderr), (1, line), "{verb:?}");
    }
}

/// Each verb starts the server for itself, and leaves none behind.
#[test]
fn on_a_cluster_that_does_not_run() {
    let place = Place::with(ADA);
    let data = place.temp.path().join("data");
    let line = format!("has no cluster; `userd --embedded={}` makes one", data.display());
    let import = ["import", "--dry-run", &place.file];
    for verb in [&["export"][..], &["recount"], &import, &["check"]] {
        let (code, stdout, stderr) = place.run(verb);
        assert!(code == 1 && (stdout + &stderr).contains(&line), "{verb:?}: {stderr}");
        assert!(!data.exists(), "{verb:?} has made it");
    }
    // The first one makes it, and its tables.
    place.import();
    assert_eq!(place.server(), None);
    assert_eq!(place.addresses(), ["ada@example.com"]);
    assert_eq!(place.run(&["migrate"]), (0, "nothing to apply\n".to_owned(), String::new()));
    let (code, stdout, _) = place.run(&["check"]);
    assert!(code == 0 && !stdout.contains("note "), "{stdout}");
    assert_eq!(place.server(), None);
    // The server ends with the verb that has started it. It waits for users: both ends of the pipe are its own.
    let pipe = place.temp.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let script = format!(r#"exec "$0" "$@" <>{}"#, pipe.display());
    let mut import = Process::under(&["/bin/sh", "-c", &script, USERD], &["import", &place.argument], &[]);
    eventually(LONG_ON_DISK, "the server runs", || place.server().is_some());
    import.signal(Signal::SIGTERM);
    assert_eq!(import.wait(LONG_ON_DISK), 128 + 15, "{}", import.stderr());
    assert!(import.stderr().contains("interrupted; nothing was imported"), "{}", import.stderr());
    eventually(LONG, "the server ends", || place.server().is_none());
}

/// A service of the system has its own account. What root does there leaves everything that account's.
#[test]
fn on_a_cluster_that_a_service_runs_on() {
    let place = Place::with(ADA);
    let data = place.temp.path().join("data");
    let is_root = is_root();
    if is_root {
        let User { uid, gid, .. } = user("nobody");
        fs::create_dir(&data).unwrap();
        chown(&data, Some(uid), Some(gid)).unwrap();
    }
    place.import();
    let service = [&*place.argument];
    let mut service = if is_root { run_as("nobody", &service) } else { Process::start(&service, &[]) };
    service.wait_for_url_within(LONG_ON_DISK);
    let mut client = service.client();
    assert_eq!(client.get("/users/1").json()["email"], "ada@example.com");
    let server = place.server().expect("it runs");
    place.temp.write("users.ndjson", GRACE);
    place.import();
    assert_eq!(client.get("/users/2").json()["email"], "grace@example.com");
    assert_eq!(place.addresses(), ["ada@example.com", "grace@example.com"]);
    for verb in ["migrate", "check", "recount"] {
        assert_eq!(place.run(&[verb]).0, 0, "{verb}");
    }
    assert_eq!(place.server(), Some(server));

    let (code, stdout, stderr) = place.run(&["config"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let rows: Vec<String> =
        stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for row in ["HOST localhost default", "DB_NAME - no effect", "DATABASE_URL - default"] {
        assert!(rows.iter().any(|found| found == row), "{row}: {stdout}");
    }
    // The line of docs/backup.md.
    let mut psql = Command::new("psql");
    psql.arg("-h").arg(&data).args(["-U", "postgres", "-Atc", "select count(*) from users"]);
    let psql = psql.output().unwrap();
    assert_eq!(String::from_utf8(psql.stdout).unwrap(), "2\n", "{}", String::from_utf8_lossy(&psql.stderr));

    service.signal(Signal::SIGTERM);
    assert_eq!(service.wait(LONG_ON_DISK), 0, "{}", service.stderr());
    assert_eq!(place.server(), None);
    assert_eq!(place.addresses().len(), 2);
    if is_root {
        let roots = Command::new("find").arg(&data).args(["!", "-user", "nobody"]).output().unwrap();
        assert_eq!(String::from_utf8(roots.stdout).unwrap(), "");
        // Another account is told whose it is.
        let mut export = run_as("postgres", &["export", &place.argument]);
        assert_eq!(export.wait(LONG), 1);
        assert!(export.stderr().contains("belongs to user nobody, "), "{}", export.stderr());
        let mut service = run_as("postgres", &[&place.argument]);
        assert_eq!(service.wait(LONG), 1);
        assert!(service.stderr().contains("start userd as nobody, or"), "{}", service.stderr());
    }
}

fn user(name: &str) -> User {
    User::from_name(name).unwrap().expect("every system has it")
}

fn run_as(name: &str, arguments: &[&str]) -> Process {
    let User { uid, gid, .. } = user(name);
    let (uid, gid) = (format!("--reuid={uid}"), format!("--regid={gid}"));
    let program = ["/usr/bin/setpriv", &uid, &gid, "--clear-groups", USERD];
    Process::under(&program, arguments, &[("TMPDIR", "/tmp")])
}
