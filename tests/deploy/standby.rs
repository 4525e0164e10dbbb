//! A server and its standby: changes while the standby is away, and after the primary was demoted.

use crate::support::{Client, LONG, LONG_ON_DISK, Own, Process, TempDir, eventually};
use serde_json::json;
use std::{fs, os::unix::fs::symlink};

#[test]
fn a_standby_that_is_away() {
    const CREATES: usize = 4;
    let postgres = Own::start();
    let mut process = Process::at(&postgres.url(), &[("REQUEST_TIMEOUT", "1")]);
    let mut client = process.client();
    let create = |client: &mut Client, n: usize| {
        let (key, body) = (format!("key-{n}"), json!({"name": "n", "email": format!("{n}@example.com")}));
        client.request("POST", "/users", &[("Idempotency-Key", &key)], body.to_string())
    };
    assert_eq!(create(&mut client, 0).status, 201);
    postgres.set("synchronous_standby_names", "absent");
    // The server's other processes read the setting a moment later.
    let mut made = 0;
    eventually(LONG, "creates wait for the standby", || {
        made += 1;
        create(&mut client, CREATES + made).status == 503
    });
    for n in 1..=CREATES {
        assert_eq!(create(&mut client, n).status, 503);
        assert_eq!(client.get("/users/1").status, 200);
    }
    postgres.set("synchronous_standby_names", "");
    eventually(LONG, "changes are taken", || client.put("/users/1", r#"{"name":"p"}"#).status == 200);
    assert_eq!(client.get("/users/1").json()["name"], "p");
    // A create that was answered 503 may have been made; with a key it is made once.
    for n in 1..=CREATES + made {
        assert_eq!(create(&mut client, n).status, 201);
    }
    assert_eq!(client.get("/users?perPage=100").json()["total"], 1 + CREATES + made);
}

/// A check of a standby does what reads do, and finds what is missing there as on its primary.
#[test]
fn a_check_of_a_standby() {
    let primary = Own::start();
    let mut migrate = Process::start(&["migrate"], &[("DATABASE_URL", &primary.url())]);
    assert_eq!(migrate.wait(LONG_ON_DISK), 0, "{}", migrate.stderr());
    let standby = primary.standby();
    let check = || {
        let (code, stdout, stderr) = Process::start(&["check"], &[("DATABASE_URL", &standby.url())]).ended();
        assert_eq!(stderr, "", "{stdout}");
        let note = "note     service: changes were not tried: it is a standby, or default_transaction_read_only is on";
        assert!(stdout.contains(note), "{stdout}");
        (code, stdout)
    };
    let (code, found) = check();
    assert_eq!(code, 0, "{found}");
    primary.run("drop trigger user_counts_insert on users; drop index idempotency_keys_user_id");
    eventually(LONG, "the standby has followed", || check().0 == 1);
    eventually(LONG, "both are found", || {
        let (_, found) = check();
        found.contains("problem  service: creates are not counted: `")
            && found.contains("problem  service: requests read all of idempotency_keys: `")
    });
    let drawn = primary.client().query_one("select is_called from users_id_seq", &[]).unwrap();
    assert!(!drawn.get::<_, bool>(0), "a check has tried a change");
}

/// A primary that is demoted while it lives: its sessions go on, but it takes no changes any more. No change is refused.
#[test]
fn a_primary_that_is_demoted() {
    let (old, new) = (Own::start(), Own::start());
    let mut migrate = Process::start(&["migrate"], &[("DATABASE_URL", &new.url())]);
    assert_eq!(migrate.wait(LONG_ON_DISK), 0, "{}", migrate.stderr());
    let hosts = format!("{},{}", old.socket_dir().display(), new.socket_dir().display());
    let url = format!("host={hosts} user=postgres dbname=postgres target_session_attrs=read-write");
    let mut process = Process::at(&url, &[]);
    let mut client = process.client();
    let create = |n: u32| json!({"name": "n", "email": format!("{n}@example.com")}).to_string();
    assert_eq!(client.post("/users", create(0)).status, 201);
    assert_eq!(old.users().len(), 1);
    old.set("default_transaction_read_only", "on");
    // The sessions have been told by now, or are while they are asked.
    for n in 1..20 {
        assert_eq!(client.post("/users", create(n)).status, 201, "{}", process.stderr());
    }
    assert!(new.users().contains_key("19@example.com"));
    assert_eq!(old.users().len() + new.users().len(), 20);
}

/// One name that moves to another server, as managed databases have it, while the old one takes no more changes and keeps
/// its sessions. A database that takes none for long keeps its sessions, and reads go on.
#[test]
fn a_name_that_moves_to_a_new_primary() {
    let (old, new) = (Own::start(), Own::start());
    let mut migrate = Process::start(&["migrate"], &[("DATABASE_URL", &new.url())]);
    assert_eq!(migrate.wait(LONG_ON_DISK), 0, "{}", migrate.stderr());
    new.run("insert into users (name, email) values ('n', '0@example.com')");
    let dir = TempDir::new();
    let point = |own: &Own| {
        let next = dir.path().join("next");
        symlink(own.socket_dir(), &next).unwrap();
        fs::rename(next, dir.path().join("name")).unwrap();
    };
    point(&old);
    let url = format!("host={}/name user=postgres dbname=postgres", dir.name());
    let mut process = Process::at(&url, &[]);
    let mut client = process.client();
    let body = |n: u32| json!({"name": "n", "email": format!("{n}@example.com")}).to_string();
    assert_eq!(client.post("/users", body(0)).status, 201);
    old.set("default_transaction_read_only", "on");
    let sessions = || {
        let sql = "select pid from pg_stat_activity where application_name = 'userd' order by pid";
        old.client().query(sql, &[]).unwrap().iter().map(|row| row.get(0)).collect::<Vec<i32>>()
    };
    assert_eq!(client.get("/readyz").status, 200);
    eventually(LONG, "all sessions are open", || sessions().len() == 9);
    let before = sessions();
    for n in 1..40 {
        assert_eq!(client.post("/users", body(n)).status, 503, "{}", process.stderr());
        assert_eq!(client.get("/users/1").status, 200, "{}", process.stderr());
    }
    assert!(before.iter().all(|pid| sessions().contains(pid)), "{before:?}");
    point(&new);
    let mut n = 40;
    eventually(LONG, "changes are taken", || {
        n += 1;
        assert_eq!(client.get("/users/1").status, 200, "{}", process.stderr());
        client.post("/users", body(n)).status == 201
    });
    assert!(new.users().contains_key(&format!("{n}@example.com")));
    assert_eq!(old.users().len(), 1);
    eventually(LONG, "the figure says so", || {
        client.get("/readyz").status == 200
            && client.get("/metrics").body.contains("userd_database_read_only 0")
    });
}
