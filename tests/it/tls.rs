//! The command over TLS: a private PostgreSQL for each certificate, each on a free port.

use crate::support::tls_servers::{Cluster, Pki};
use crate::support::{Client, Database, LONG, Process, eventually};
use std::net::TcpListener;

/// The service serves over TLS, or says in one line what is wrong with the server's certificate.
#[test]
fn the_service_over_tls() {
    let pki = Pki::new();
    let cluster = Cluster::new();
    let ca = pki.path("ca.crt").display().to_string();
    let other_ca = pki.path("other-ca.crt").display().to_string();
    for (certificate, ca, timeout, expected) in [
        ("good", &ca, "10", None),
        ("good", &other_ca, "2", Some("invalid peer certificate: UnknownIssuer")),
        ("expired", &ca, "2", Some("certificate expired")),
    ] {
        let server = cluster.start(Some(pki.server(certificate)), "");
        let port = server.port.to_string();
        let mut process = Process::start(
            &[],
            &[
                ("DB_HOST", "localhost"),
                ("DB_PORT", &port),
                ("DB_USER", "u"),
                ("DB_PASS", "secret"),
                ("DB_NAME", "postgres"),
                ("DB_SSL", "true"),
                ("DB_SSL_CA", ca),
                ("DB_CONNECT_TIMEOUT", timeout),
                ("DB_POOL_SIZE", "2"),
                ("REQUEST_TIMEOUT", "1"),
                ("HOST", "127.0.0.1"),
                ("PORT", "0"),
            ],
        );
        let Some(expected) = expected else {
            let mut caller = Client::new(&process.wait_for_url());
            let mut sql = sql(&cluster, server.port);
            let ask = "select ssl, pid from pg_stat_ssl join pg_stat_activity using (pid) \
                where application_name = 'userd'";
            eventually(LONG, "it serves", || caller.call("GET", "/users", "").unwrap().0 == 200);
            // None comes later, so that every request meets one of them.
            let mut sessions = Vec::new();
            eventually(LONG, "the pool is full", || {
                sessions = sql.query(ask, &[]).unwrap();
                sessions.len() == 2
            });
            assert!(sessions.iter().all(|session| session.get(0)), "they are encrypted");
            continue;
        };
        assert_eq!(process.wait(LONG), 1);
        let log = process.stderr();
        let line = log.lines().last().unwrap_or_default();
        assert!(line.starts_with("userd: cannot connect to the database: "), "{log}");
        // The last try may have been cut short by the timeout.
        assert!(log.contains(expected) && !log.contains("secret"), "{log}");
    }
}

/// A session on its Unix socket.
fn sql(cluster: &Cluster, port: u16) -> postgres::Client {
    let url =
        format!("host={} port={port} user=u password=secret dbname=postgres", cluster.socket_directory());
    postgres::Client::connect(&url, postgres::NoTls).unwrap()
}

/// A setting that is wrong is named even if the port is taken; a name of another client is a warning, and it serves.
#[test]
fn an_address_is_judged_before_anything_is_bound() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (address, named) in [
        ("postgres://u:secret@h/d?sslmod=require", "did you mean sslmode?"),
        ("\"postgres://u:secret@h/d\"", "must start with postgres://"),
        ("postgres://u:sec@ret@h/d", "write %40"),
    ] {
        let variables = [("DATABASE_URL", address), ("HOST", "127.0.0.1"), ("PORT", &port)];
        let mut process = Process::start(&[], &variables);
        assert_eq!(process.wait(LONG), 2, "{address}");
        let log = process.stderr();
        let line = log.lines().last().unwrap_or_default();
        assert!(line.starts_with("userd: DATABASE_URL: ") && line.contains(named), "{log}");
        assert!(!log.contains("sec"), "{log}");
    }

    let database = Database::create();
    let address = format!(" {} pgbouncer=true nonsense=1\n", database.url());
    let variables = [("DATABASE_URL", &*address), ("HOST", "127.0.0.1"), ("PORT", "0")];
    let mut process = Process::start(&[], &variables);
    let mut caller = Client::new(&process.wait_for_url());
    assert_eq!(caller.call("GET", "/users", "").unwrap().0, 200);
    let log = process.stderr();
    assert!(log.contains("DATABASE_URL: pgbouncer has no effect: behind a pooler"), "{log}");
    assert!(log.contains("is unknown and has no effect") && !log.contains("nonsense"), "{log}");
}
