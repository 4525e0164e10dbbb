//! Links that PostgreSQL's account puts where a process of root's works: they lead root nowhere. These tests run only as
//! root.

use crate::support::{LONG_ON_DISK, Process, TempDir, check, eventually, is_root};
use nix::sys::signal::Signal;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{collections::BTreeMap, fs};
use userd::internals::SharedServer;

/// Files of root's that no other account can reach, and what they are.
struct Treasure {
    dir: TempDir,
    before: BTreeMap<PathBuf, String>,
}

impl Treasure {
    fn bury() -> Treasure {
        let dir = TempDir::new();
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).unwrap();
        for below in ["full", "full/base", "cluster", "cluster/pgdata", "empty"] {
            fs::create_dir(dir.path().join(below)).unwrap();
        }
        for file in ["file", "full/postmaster.pid", "full/postgresql.conf", "cluster/pgdata/postmaster.pid"] {
            dir.write(file, "1\n");
            fs::set_permissions(dir.path().join(file), PermissionsExt::from_mode(0o644)).unwrap();
        }
        dir.write("full/PG_VERSION", "15\n");
        let before = found(dir.path());
        Treasure { dir, before }
    }

    #[track_caller]
    fn check(&self, what: &str) {
        assert_eq!(found(self.dir.path()), self.before, "{what}");
    }
}

/// Returns the owners, modes, times and texts of the files below a directory.
fn found(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).chain([dir.to_owned()]) {
        if path != dir && path.is_dir() {
            all.extend(found(&path));
            continue;
        }
        let its = fs::symlink_metadata(&path).unwrap();
        let ids = (its.ino(), its.uid(), its.gid(), its.mode(), its.mtime(), its.mtime_nsec());
        all.insert(path.clone(), format!("{ids:?} {:?}", fs::read_to_string(&path).ok()));
    }
    all
}

/// Executes a script as PostgreSQL's account.
#[track_caller]
fn as_account(script: &str, arguments: &[&Path]) {
    let mut command = Command::new("/usr/bin/setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "sh", "-euc", script, "sh"]);
    assert!(command.args(arguments).status().unwrap().success(), "{script}");
}

/// A directory of the account's, in one of root's.
fn of_account() -> (TempDir, PathBuf) {
    let dir = TempDir::new();
    let own = dir.path().join("own");
    fs::create_dir(&own).unwrap();
    assert!(Command::new("chown").arg("postgres:postgres").arg(&own).status().unwrap().success());
    (dir, own)
}

/// Ends a service that has started, or waits for the end of one that has not.
fn end(mut process: Process) -> String {
    let mut has_ended = false;
    eventually(LONG_ON_DISK, "it listens or ends", || {
        has_ended = process.has_ended();
        has_ended || process.stdout().contains("listening")
    });
    if !has_ended {
        process.signal(Signal::SIGTERM);
    }
    process.wait(LONG_ON_DISK);
    process.stderr()
}

#[test]
fn of_a_cluster_that_is_made_or_started() {
    if !is_root() {
        return;
    }
    let treasure = Treasure::bury();
    let target = |name: &str| treasure.dir.path().join(name);
    // Each is put into the directory of the cluster before the start; `..` stands for the directory itself.
    for (link, to) in [
        ("lock", "file"),
        ("lock", "missing"),
        ("postgres.log", "file"),
        ("postgres.log", "missing"),
        (".s.PGSQL.5432", "file"),
        (".s.PGSQL.5432.lock", "file"),
        ("pgdata", "full"),
        ("pgdata", "empty"),
        ("pgdata", "missing"),
        ("pgdata.new", "full"),
        ("pgdata.new", "missing"),
        ("userd", "cluster"),
        ("userd", "missing"),
        ("..", "empty"),
        ("..", "cluster"),
        ("..", "missing"),
    ] {
        let (_dir, own) = of_account();
        let data = own.join("data");
        let script =
            if link == ".." { r#"ln -s "$2" "$1""# } else { r#"mkdir -m 700 "$1"; ln -s "$2" "$1/$3""# };
        as_account(script, &[&data, &target(to), Path::new(link)]);
        let argument = format!("--embedded={}", data.display());
        for arguments in [&["migrate", &argument][..], &[&argument]] {
            let said = end(Process::start(arguments, &[]));
            treasure.check(&format!("{link} to {to}, {arguments:?}: {said}"));
        }
    }
    // A directory on the way is a link, and root would have to make what is below it.
    let (_dir, own) = of_account();
    as_account(r#"ln -s "$2" "$1/way""#, &[&own, treasure.dir.path()]);
    for below in ["new", "empty"] {
        let argument = format!("--embedded={}/way/{below}", own.display());
        let said = end(Process::start(&[&argument], &[]));
        treasure.check(&said);
        assert!(said.contains("userd: "), "{said}");
    }
}

/// The account replaces a file between two steps: `initdb` and `postgres`, which run as the account, do it here.
#[test]
fn of_a_cluster_amid_its_start() {
    if !is_root() {
        return;
    }
    let treasure = Treasure::bury();
    let programs = programs();
    for (program, name, to) in [
        ("initdb", "pgdata.new/postgresql.conf", "file"),
        ("initdb", "pgdata.new/postgresql.conf", "missing"),
        ("initdb", "pgdata.new", "full"),
        ("initdb", "pgdata", "empty"),
        ("initdb", "postgres.log", "file"),
        ("initdb", "lock", "file"),
        ("postgres", "pgdata/postmaster.pid", "file"),
        ("postgres", "pgdata/PG_VERSION", "missing"),
    ] {
        let (dir, own) = of_account();
        fs::create_dir(dir.path().join("bin")).unwrap();
        let put = r#"cd "$DATA"; rm -rf "$NAME"; ln -s "$TO" "$NAME""#;
        let scripts = [
            ("initdb", format!("\"$REAL/initdb\" \"$@\" || exit; [ $PROGRAM != initdb ] || ( {put} )")),
            (
                "postgres",
                format!("[ \"$1 $PROGRAM\" != '-D postgres' ] || ( {put} )\nexec \"$REAL/postgres\" \"$@\""),
            ),
        ];
        let to = treasure.dir.path().join(to);
        for (wrapped, script) in scripts {
            let variables = format!(
                "REAL={} DATA={}/data NAME={name} TO={} PROGRAM={program}",
                programs,
                own.display(),
                to.display()
            );
            wrap(&dir, wrapped, &format!("{variables}\n{script}"));
        }
        let argument = format!("--embedded={}/data", own.display());
        let bin = dir.path().join("bin");
        for turn in 0..2 {
            let said = end(Process::start(&[&argument], &[("POSTGRES_BIN", bin.to_str().unwrap())]));
            treasure.check(&format!("{program}, {name} to {to:?}, {turn}: {said}"));
        }
    }
}

/// The socket is replaced by a link to one of root's before userd connects.
#[test]
fn of_the_socket_that_userd_connects_to() {
    if !is_root() {
        return;
    }
    let roots = TempDir::new();
    fs::set_permissions(roots.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let listener = UnixListener::bind(roots.path().join("socket")).unwrap();
    fs::set_permissions(roots.path().join("socket"), PermissionsExt::from_mode(0o777)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (dir, own) = of_account();
    let data = own.join("data");
    let argument = format!("--embedded={}", data.display());
    assert_eq!(Process::start(&["migrate", &argument], &[]).ended().0, 0);
    fs::create_dir(dir.path().join("bin")).unwrap();
    let (programs, socket) = (programs(), data.join(".s.PGSQL.5432"));
    let put = format!("ln -sfn {}/socket {}", roots.name(), socket.display());
    let until = format!("until [ -S {} ]; do :; done; {put}", socket.display());
    wrap(&dir, "initdb", &format!("exec {programs}/initdb \"$@\""));
    wrap(&dir, "postgres", &format!("[ \"$1\" != -D ] || ( {until} ) &\nexec {programs}/postgres \"$@\""));
    let variables = [("POSTGRES_BIN", &*format!("{}/bin", dir.name())), ("DB_CONNECT_TIMEOUT", "1")];
    let out = format!("{}/users", dir.name());
    for arguments in [
        &[&*argument][..],
        &["migrate", &argument],
        &["recount", &argument],
        &["grants", "postgres", &argument],
        &["export", &argument, &out],
        &["import", "--format=ndjson", &argument],
    ] {
        let (_, stdout, stderr) = Process::start(arguments, &variables).ended();
        assert!(stderr.contains("Permission denied"), "{arguments:?}: {stdout}{stderr}");
        let connected = listener.accept();
        assert!(connected.is_err(), "{arguments:?} connected to root's socket: {stderr}");
    }
    let (_, stdout, _) = Process::start(&["check", &argument], &variables).ended();
    assert!(stdout.contains("problem") && listener.accept().is_err(), "{stdout}");
}

/// Returns the directory of PostgreSQL's own programs.
fn programs() -> String {
    let found = Command::new("sh").args(["-c", "ls -d /usr/lib/postgresql/*/bin | tail -n 1"]).output();
    String::from_utf8(found.unwrap().stdout).unwrap().trim().to_owned()
}

/// Puts a script of a shell in the place of a program.
fn wrap(dir: &TempDir, program: &str, script: &str) {
    let file = dir.path().join("bin").join(program);
    fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(file, PermissionsExt::from_mode(0o755)).unwrap();
}

/// The shared server is removed, too, as soon as its files are no server's.
#[test]
fn of_a_server_that_is_thrown_away() {
    if !is_root() {
        return;
    }
    let treasure = Treasure::bury();
    let dir = TempDir::new();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let first = dir.path().join("first");
    let name = SharedServer::join(std::slice::from_ref(&first), 20).unwrap().socket_dir;
    for (turn, (link, to)) in [
        ("lock", "file"),
        ("lock", "missing"),
        ("postgres.log", "file"),
        ("pgdata", "full"),
        ("pgdata.new", "full"),
    ]
    .into_iter()
    .enumerate()
    {
        let prefix = dir.path().join(format!("turn{turn}"));
        let place = name.to_str().unwrap().replacen("/first-", &format!("/turn{turn}-"), 1);
        let to = treasure.dir.path().join(to);
        as_account(r#"mkdir -m 700 "$1"; ln -s "$2" "$1/$3""#, &[place.as_ref(), &to, Path::new(link)]);
        let joined = SharedServer::join(&[prefix], 20)
            .map(|shared| drop(shared.session))
            .map_err(|error| error.to_string());
        treasure.check(&format!("{link} to {to:?}: {joined:?}"));
    }
}

/// An export to a file whose name another account has taken for a link.
#[test]
fn of_a_file_that_is_exported_to() {
    if !is_root() {
        return;
    }
    let treasure = Treasure::bury();
    let (dir, own) = of_account();
    let argument = format!("--embedded={}/data", dir.name());
    let mut service = Process::start(&[&argument], &[]);
    service.wait_for_url_within(LONG_ON_DISK);
    check(&mut service.client(), r#"POST /users {"name":"Ada","email":"ada@example.com"} => 201 *"#);
    for to in ["file", "missing"] {
        let file = own.join(to);
        as_account(r#"ln -s "$1" "$2""#, &[&treasure.dir.path().join(to), &file]);
        let (code, stdout, stderr) =
            Process::start(&["export", &argument, file.to_str().unwrap()], &[]).ended();
        treasure.check(to);
        assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
        assert!(stderr.contains("is a link of user"), "{stderr}");
    }
    // A link of root's own leads on.
    let file = dir.path().join("users.ndjson");
    std::os::unix::fs::symlink(dir.path().join("real"), &file).unwrap();
    fs::write(dir.path().join("real"), "").unwrap();
    assert_eq!(Process::start(&["export", &argument, file.to_str().unwrap()], &[]).ended().0, 0);
    assert!(fs::read_to_string(dir.path().join("real")).unwrap().contains("ada@example.com"));
    assert!(fs::symlink_metadata(&file).unwrap().is_symlink());
}

/// In a directory of the account's that every user may write to, another user has put a link: to a file of the account's, or
/// to a cluster that runs.
#[test]
fn of_another_user_of_the_machine() {
    if !is_root() {
        return;
    }
    let (_dir, own) = of_account();
    as_account(
        "mkdir -m 700 $1/private && echo precious >$1/private/file && mkdir -m 777 $1/open && chmod 777 $1/open",
        &[&own],
    );
    for name in ["lock", "postgres.log", "pgdata"] {
        let link = own.join("open").join(name);
        let mut command = Command::new("/usr/bin/setpriv");
        command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups", "ln", "-s"]);
        // The way to it is open to the account alone.
        fs::set_permissions(&own, PermissionsExt::from_mode(0o755)).unwrap();
        fs::set_permissions(own.join("open"), PermissionsExt::from_mode(0o777)).unwrap();
        assert!(command.arg(own.join("private/file")).arg(&link).status().unwrap().success());
        let embedded = format!("--embedded={}", own.join("open").display());
        let (code, _, said) = Process::start(&[&embedded, "--port=0"], &[]).ended();
        assert_eq!((code, said.lines().count()), (1, 1), "{said}");
        assert!(said.contains("has a link of another user"), "{said}");
        assert_eq!(fs::read_to_string(own.join("private/file")).unwrap(), "precious\n");
        fs::remove_file(link).unwrap();
    }
}
