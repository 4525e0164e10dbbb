//! Ends of the command without success: the cause, then the remedy, in at most two lines for each finding, and nothing on
//! standard output. What clap says of arguments has its usage between the two.

use crate::support::{
    DATABASE_PASSWORD, LONG, PASSWORD, Process, TempDir, Variables, assert_no_secret, free_port,
};
use std::{fs, net::TcpListener, os::unix::fs::PermissionsExt};

/// Between cause and remedy there may be the system's own words, or a list of what there is.
#[test]
fn each_names_the_cause_and_then_the_remedy() {
    let dir = TempDir::new();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    for (name, text) in [("file", ""), ("bad.ndjson", "{\"name\":1,\"email\":\"a@example.com\"}\n[]\n")] {
        dir.write(name, text);
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().port().to_string();
    let free = free_port().to_string();
    let in_file = format!("--embedded={}", path("file"));
    let nowhere = format!("--embedded={}", path("nowhere"));
    let unmade = format!("--embedded={}", path("unmade"));
    let (none, bad) = (path("none"), path("bad.ndjson"));
    let none_csv = path("none.csv");
    let unwritable = path("nowhere/users.ndjson");
    let of_clap: [(&[&str], &str); 5] = [
        (&["--port"], "a value is required for '--port <PORT>'"),
        (&["--port="], "--port"),
        (&["healthcheck", "--port"], "a value is required for '--port <PORT>'"),
        // A pasted argument may be a password.
        (&[PASSWORD], "unrecognized subcommand '…'"),
        (&["--postgres", "/tmp"], "--embedded"),
    ];
    // An empty line parts cause, usage and remedy.
    for (arguments, cause) in of_clap {
        says(Process::start(arguments, &[]), &format!("{arguments:?}"), 2, 6, cause, "try '--help'");
    }
    let secret = format!("postgres://ada:{DATABASE_PASSWORD}@localhost/app?sslmod=require");
    let plain: [(&[&str], i32, &str, &str); 19] = [
        (&["import", &secret], 2, "no argument is a connection string", "DATABASE_URL names the database"),
        (
            &["test", "--set", "SCHMEA=strict", "--", "true"],
            125,
            "is no setting of userd",
            "`userd --help` lists them",
        ),
        (&["test", "--host=unix:/tmp/x", "--", "true"], 125, "HOST", "listens on a TCP port"),
        (&["test"], 125, "standard input has ended", "name a COMMAND, or add --until-signal"),
        (&["--env-file", &none], 2, &none, "name a file of lines NAME=value"),
        (&["test", "--env-file=/x", "--", "true"], 125, "--env-file has no effect", "--set gives it"),
        (&[&in_file], 1, "cannot be created", "choose another directory"),
        (&[&unmade, "--postgres=/nowhere"], 1, "/nowhere", "that has initdb and postgres"),
        (&["test", "--seed", &none_csv, "--", "true"], 125, "cannot read", "`userd help import` says"),
        (&["export", &nowhere], 1, "has no cluster", "makes one"),
        (&["import", &nowhere, &none_csv], 1, "cannot read", "`userd help import` says"),
        (&["healthcheck", "--port", &free], 1, "no answer from", "start userd, or name its address"),
        (&["migrate"], 1, "Connection refused", "`userd --embedded` runs one of its own"),
        (&["export", &unwritable], 1, "cannot write", "name another FILE"),
        // Before a database is waited for, or a cluster is made.
        (&["--port", &taken], 1, "Address already in use", "choose another HOST or PORT"),
        (&[&nowhere, "--port", &taken], 1, "Address already in use", "choose another HOST or PORT"),
        (
            &["--host", "unix:/nowhere/at/all"],
            1,
            "cannot listen on unix:/nowhere/at/all",
            "a directory that is there",
        ),
        (&["--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1", "an address of this machine"),
        (&["--host", "127.0.0.1:80"], 1, "cannot listen on 127.0.0.1:80", "without a scheme or a port"),
    ];
    let database = ("DATABASE_URL", "postgres://ada@127.0.0.1:1/app");
    let variables = [database, ("DB_CONNECT_TIMEOUT", "1"), ("HOST", "127.0.0.1"), ("PORT", "0")];
    for (arguments, code, cause, remedy) in plain {
        says(Process::start(arguments, &variables), &format!("{arguments:?}"), code, 1, cause, remedy);
    }
    assert!(!dir.path().join("nowhere").exists(), "a cluster was made");
    let seed = Process::start(&["test", "--seed", &bad, "--", "true"], &variables);
    says(seed, "two lines", 125, 1, "line 1: /name must be a string", "line 2: ");

    dir.write("blank", "\n");
    let blank = path("blank");
    let both = "postgres://ada@127.0.0.1:1/app?sslmode=require&sslrootcert=/nowhere";
    let empty = path("empty");
    fs::create_dir(&empty).unwrap();
    let variables: [(Variables, i32, &str, &str); 9] = [
        (&[("WORKERS", "0"), ("LOG_LEVEL", "loud")], 2, "; LOG_LEVEL: must be one of", "debug"),
        (&[("API_TOKEN", "t0ken-0f-the-tests é")], 2, "API_TOKEN: ", ""),
        // Without a token, all users would be open: an empty file is no way to say so.
        (&[("API_TOKEN_FILE", &blank)], 2, "API_TOKEN_FILE: ", " is empty"),
        (&[("DATABASE_URL", &secret)], 2, "DATABASE_URL: parameter 1 is unknown", "(did you mean sslmode?)"),
        (&[("API_TOKEN_FILE", "/nowhere")], 2, "API_TOKEN_FILE: cannot read", "\"/nowhere\""),
        (
            &[database, ("DB_CONNECT_TIMEOUT", "1")],
            1,
            "cannot connect",
            "DATABASE_URL names another database",
        ),
        (&[("DATABASE_URL", both)], 1, "/nowhere cannot be read", "(DB_SSL_CA, or sslrootcert"),
        (
            &[database, ("MIGRATIONS_DIR", "/nowhere")],
            2,
            "MIGRATIONS_DIR: ",
            "name a directory of migrations",
        ),
        (&[database, ("MIGRATIONS_DIR", &empty)], 2, "MIGRATIONS_DIR: ", "holds no migrations"),
    ];
    for (variables, code, cause, remedy) in variables {
        let all = [variables, &[("HOST", "127.0.0.1")]].concat();
        says(Process::start(&[], &all), &format!("{variables:?}"), code, 1, cause, remedy);
    }
}

/// It ends with the code; on standard error the cause comes before the remedy, in so many lines that are none of the log's.
#[track_caller]
fn says(mut process: Process, what: &str, code: i32, lines: usize, cause: &str, remedy: &str) {
    let ended = process.wait(LONG);
    let (stdout, stderr) = (process.stdout(), process.stderr());
    assert_eq!((ended, stdout.as_str()), (code, ""), "{what}: {stderr}");
    let is_of_the_log = |line: &&str| line.contains(" [INFO] ") || line.contains(" [WARN] ");
    let said: Vec<&str> = stderr.lines().filter(|line| !is_of_the_log(line)).collect();
    assert!(said.len() <= lines + 1, "{what}: {stderr}");
    let said = said.join("\n");
    let after = said.split_once(cause).unwrap_or_else(|| panic!("{what}: no {cause:?}: {said}")).1;
    assert!(after.contains(remedy), "{what}: no {remedy:?} after {cause:?}: {said}");
    assert!(!said.contains('\u{1b}'), "{what}: colour, and no terminal");
    assert_no_secret(&stderr);
}
