//! Programs of PostgreSQL: userd runs only the named ones, and runs them as another user if root starts
//! userd. What needs root is not tested as another user.

use crate::support::{
    ADA, ADA_1, Client, LONG, LONG_ON_DISK, Process, TempDir, UNTIL_SIGNAL, USERD, check, is_root,
    postmaster, programs_of_postgres,
};
use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

/// Without the programs that Debian installs, and with a list of users that has these only. `$1` and what follows is run.
const ALONE: &str = r#"
    set -e
    mount -t tmpfs none /usr/lib/postgresql
    grep -E "$KEEP" /etc/passwd >"$TMPDIR/passwd"
    mount --bind "$TMPDIR/passwd" /etc/passwd
    export TMPDIR=/tmp
    exec setpriv --reuid="$AS" --regid="$AS" --clear-groups "$@""#;

/// Copies files in a process of its own. A file that this process has open for writing may be inherited by a
/// child that another test starts, and cannot be executed then (ETXTBSY).
fn copy(from: impl AsRef<Path>, to: &Path) {
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    assert!(Command::new("cp").arg("-rT").args([from.as_ref(), to]).status().unwrap().success());
}

/// An installation of its own below `dir`: the programs are copies, which find what else they need beside them.
fn installation(dir: &Path) -> PathBuf {
    let bin = programs_of_postgres();
    let own = dir.join(bin.strip_prefix("/").unwrap());
    copy(bin.parent().unwrap(), own.parent().unwrap());
    fs::create_dir_all(dir.join("usr/share")).unwrap();
    symlink("/usr/share/postgresql", dir.join("usr/share/postgresql")).unwrap();
    own
}

/// Starts a copy of userd as a user where only the programs that it is told are there. `keep`: the users that are known.
fn alone(userd: &Path, user: &str, keep: &str, arguments: &[&str], bin: &str) -> Process {
    let program = ["/usr/bin/unshare", "-m", "/bin/sh", "-c", ALONE, "sh", userd.to_str().unwrap()];
    let path = ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    Process::under(&program, arguments, &[path, ("AS", user), ("KEEP", keep), ("POSTGRES_BIN", bin)])
}

/// An exit code of a failed start, and one line, which has the text.
#[track_caller]
fn refused(mut process: Process, expected: &str) {
    assert!([1, 125].contains(&process.wait(LONG)), "{}", process.stderr());
    let said = process.stderr();
    let line = said.lines().last().unwrap_or_default().to_owned();
    assert!(line.starts_with("userd: ") && line.contains(expected), "{said}");
    assert!(!said.contains("without a locale"), "one try: {said}");
}

#[track_caller]
fn serves(process: &mut Process) {
    let url = process.wait_for_url_within(LONG_ON_DISK);
    check(&mut Client::new(&url), &format!("POST /users {ADA} => 201 *\nGET /users/1 => 200 {ADA_1}"));
}

#[test]
fn programs_that_are_named_are_the_only_ones() {
    let dir = TempDir::new();
    let bin = dir.path().join("bin");
    let (named, kept) = (bin.to_str().unwrap(), format!("--embedded={}/data", dir.name()));
    // A program that says something instead of its version.
    for (program, expected) in [
        (
            "#!/bin/sh\necho 'error while loading libnone.so.1' >&2\nexit 127\n",
            "postgres does not start (exit status: 127): error while loading libnone.so.1",
        ),
        ("#!/nowhere/loader\n", "postgres does not start: it is not there, or its loader is missing"),
        ("#!/bin/sh\necho 'postgres (PostgreSQL) 9.6.1'\n", "PostgreSQL 9 is too old"),
    ] {
        dir.write("program", program);
        fs::set_permissions(dir.path().join("program"), PermissionsExt::from_mode(0o755)).unwrap();
        ["initdb", "postgres"].iter().for_each(|name| copy(dir.path().join("program"), &bin.join(name)));
        refused(Process::start(&UNTIL_SIGNAL, &[("POSTGRES_BIN", named)]), expected);
        // The argument counts more than the variable.
        let arguments = [&kept, "--postgres", named];
        refused(Process::start(&arguments, &[("POSTGRES_BIN", "/nowhere")]), expected);
    }
}

/// The clusters that are shared are told apart by their programs.
#[test]
fn two_installations_have_two_clusters() {
    let dir = TempDir::new();
    let own = installation(dir.path());
    // The server's program, by the log of the process that started it, or none if it runs already.
    let start = |bin: &str| {
        let arguments = [&UNTIL_SIGNAL[..], &["--set=LOG_LEVEL=info"]].concat();
        let mut process = Process::start(&arguments, &[("POSTGRES_BIN", bin)]);
        serves(&mut process);
        let log = process.stderr();
        let place = log.lines().find_map(|line| Some(line.split_once(" serves ")?.1.to_owned()));
        let server = place.map(|place| postmaster(Path::new(&place)).unwrap());
        (process, server.map(|server| fs::read_link(format!("/proc/{server}/exe")).unwrap()))
    };
    let name = own.to_str().unwrap();
    let (_first, program) = start(name);
    let (_second, other) = start(programs_of_postgres().to_str().unwrap());
    assert_eq!(program, Some(own.join("postgres")));
    assert_ne!(other, program);
    // By a relative name, the same one again: it founds no other cluster.
    assert_eq!(start(&format!("{name}/./")).1, None);
    // Other programs in the same place, as after an upgrade.
    let upgraded = own.join("postgres.new");
    copy(own.join("postgres"), &upgraded);
    fs::rename(&upgraded, own.join("postgres")).unwrap();
    assert!(start(name).1.is_some());
}

/// In a user namespace with one user, as rootless Podman's may be, and without the capabilities to become another user.
#[test]
fn root_that_cannot_become_another_user() {
    let dir = TempDir::new();
    let kept = format!("--embedded={}/data", dir.name());
    let namespace = ["/usr/bin/unshare", "-r", USERD];
    let caps = ["/usr/bin/setpriv", "--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid", USERD];
    for program in [&namespace[..], &caps] {
        if program != namespace && !is_root() {
            continue;
        }
        for arguments in [&UNTIL_SIGNAL[..], &[&kept]] {
            let process = Process::under(program, arguments, &[]);
            refused(process, "root cannot become user postgres here (");
        }
    }
    assert!(!dir.path().join("data").exists());
}

/// Images for tests may lack PostgreSQL's account, an entry for the user, or programs in a directory that everyone may
/// enter.
#[test]
fn whoever_starts_it_gets_a_service_or_the_remedy() {
    if !is_root() {
        return;
    }
    let dir = TempDir::new();
    let own = installation(&dir.path().join("own"));
    let (bin, userd) = (own.to_str().unwrap(), dir.path().join("userd"));
    copy(USERD, &userd);
    let kept = format!("--embedded={}/data", dir.name());
    let run = |user, keep, arguments: &[&str], bin| alone(&userd, user, keep, arguments, bin);

    let missing = "were not found; on Debian: apt-get install postgresql; or name the directory that has them: POSTGRES_BIN=DIR";
    refused(run("0", "", &UNTIL_SIGNAL, ""), missing);
    serves(&mut run("0", "", &UNTIL_SIGNAL, bin));
    serves(&mut run("0", "^(root|nobody):", &UNTIL_SIGNAL, bin));
    let line = "there is no user postgres to run it: create one";
    refused(run("0", "^(root|nobody):", &[&kept], bin), line);
    assert!(!dir.path().join("data").exists());
    serves(&mut run("65534", "", &UNTIL_SIGNAL, bin));
    let line = "could not look up effective user ID 54321: user does not exist";
    refused(run("54321", "", &UNTIL_SIGNAL, bin), line);

    serves(&mut run("0", "", &[&kept], bin));
    // The data is there, and still for programs of this version alone.
    refused(run("0", "", &[&kept], ""), "apt-get install postgresql-");
    let mut again = run("0", "", &[&kept], bin);
    let url = again.wait_for_url_within(LONG_ON_DISK);
    check(&mut Client::new(&url), &format!("GET /users/1 => 200 {ADA_1}"));

    // Clusters above may still run, so these programs are other files.
    let closed = dir.path().join("closed");
    copy(dir.path().join("own"), &closed);
    fs::set_permissions(&closed, PermissionsExt::from_mode(0o700)).unwrap();
    let bin = closed.join(own.strip_prefix(dir.path().join("own")).unwrap());
    for user in ["0", "65534"] {
        let line = format!("may not enter {}: chmod a+x it", closed.display());
        refused(run(user, "", &UNTIL_SIGNAL, bin.to_str().unwrap()), &line);
    }
}
