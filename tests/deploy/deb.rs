//! The Debian package: the printed lines that make a database, and the service that has a cluster of its own.

use crate::support::{
    ADA, ADA_1, LONG, LONG_ON_DISK, Own, Process, TempDir, USERD, check, postmaster, running,
};
use nix::sys::signal::Signal;
use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

const INSTALL: &str = include_str!("../../docs/install.md");
const UNIT: &str = include_str!("../../packaging/debian/userd-embedded.service");

/// The lines of a text that begin so.
fn lines<'a>(text: &'a str, begins: &str) -> Vec<&'a str> {
    text.lines().filter(|line| line.starts_with(begins)).collect()
}

/// Lines that make a database are equal in docs/install.md and `/etc/userd.env`, and work.
#[test]
fn lines_that_make_a_database() {
    let environment = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/environment");
    let printed = Command::new(environment).arg(USERD).output().unwrap();
    let printed = String::from_utf8(printed.stdout).unwrap();
    let made = lines(INSTALL, "sudo -u postgres create");
    assert_eq!(made.len(), 2, "{made:?}");
    let url = INSTALL
        .lines()
        .find_map(|line| line.strip_prefix("echo ")?.strip_suffix(" | sudo tee -a /etc/userd.env"));
    let url = url.expect("the page has the line");
    for line in made.iter().chain([&url]) {
        assert!(printed.lines().any(|found| found.strip_prefix("# ") == Some(line)), "{line}: {printed}");
    }
    // The settings themselves have their defaults behind a #.
    assert_eq!(lines(&printed, "#PORT=3000").len(), 1, "{printed}");

    let own = Own::start();
    let dir = own.socket_dir();
    for line in made {
        let line = line.strip_prefix("sudo -u postgres ").unwrap();
        let script = format!("PGHOST='{}' PGUSER=postgres {line}", dir.display());
        let done = Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
        assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
    }
    // The service's user is the role, and its directory that of the machine's PostgreSQL.
    let url = url.strip_prefix("DATABASE_URL=postgres:///").unwrap();
    let url = format!("postgres:///{url}?user=userd&host={}", dir.display());
    let mut process = Process::start(&[], &[("DATABASE_URL", &url), ("HOST", "127.0.0.1")]);
    check(&mut process.client(), &format!("POST /users {ADA} => 201 {ADA_1}\nGET /users/1 => 200 {ADA_1}"));
}

/// The value of a setting of the unit.
fn unit(name: &str) -> Vec<&'static str> {
    UNIT.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('=')).collect()
}

#[test]
fn the_service_with_a_cluster_of_its_own() {
    // Its user owns the cluster, and userd alone is told to stop: it stops PostgreSQL after the last request.
    assert_eq!(unit("User"), ["userd"]);
    assert_eq!((unit("StateDirectory"), unit("StateDirectoryMode")), (vec!["userd"], vec!["0700"]));
    assert_eq!(unit("KillMode"), ["mixed"]);
    // PostgreSQL's compiler needs memory that may be written and executed, and userd reads /proc/meminfo.
    assert_eq!((unit("MemoryDenyWriteExecute"), unit("ProcSubset")), (vec![], vec![]));

    let dir = TempDir::new();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let [start] = unit("ExecStart")[..] else { panic!("{UNIT}") };
    let argument = start.strip_prefix("/usr/bin/userd ").unwrap();
    let argument = argument.replace("/var/lib", dir.path().to_str().unwrap());
    let mut process = Process::start(&[&argument], &[("NODE_ENV", "production")]);
    assert!(process.wait_for_url_within(LONG_ON_DISK).starts_with("http://127.0.0.1:"));
    check(&mut process.client(), &format!("POST /users {ADA} => 201 {ADA_1}"));
    process.logs(" serves ");
    let server = postmaster(&dir.path().join("userd")).unwrap();
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
    assert!(!running(server));
}
