//! A server and its standby: changes while the standby is away, and after the primary was demoted.

use crate::support::{Client, LONG, LONG_ON_DISK, Own, Process, eventually};
use serde_json::json;

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
