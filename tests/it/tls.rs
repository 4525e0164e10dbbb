//! The command over TLS: a private PostgreSQL for each certificate, each on a free port.

use crate::faults::changes_without_a_standby;
use crate::support::tls_servers::{Cluster, Pki};
use crate::support::{Caller, LONG, Process, children, eventually};
use nix::sys::signal::Signal;
use std::fs;

/// It serves over TLS, also when its session was hung and is replaced, or says in one line
/// what is wrong with the server's certificate.
#[test]
fn the_service_over_tls() {
    let pki = Pki::new();
    let cluster = Cluster::new();
    let ca = pki.path("ca.crt").display().to_string();
    let other_ca = pki.path("other-ca.crt").display().to_string();
    for (certificate, ca, timeout, expected) in [
        ("good", &ca, "10", None),
        ("good", &other_ca, "2", Some("it is not signed by a trusted authority")),
        ("expired", &ca, "2", Some("it has expired")),
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
            let mut caller = Caller::new(&process.wait_for_url(), LONG);
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
            let all = |signal| {
                for session in &sessions {
                    let pid = nix::unistd::Pid::from_raw(session.get(1));
                    let _ = nix::sys::signal::kill(pid, signal);
                }
            };
            assert!(sessions.iter().all(|session| session.get(0)), "they are encrypted");
            all(Signal::SIGSTOP);
            eventually(LONG, "a silent session is closed", || {
                caller.call("GET", "/users", "").unwrap();
                process.stderr().contains("the database fell silent")
            });
            all(Signal::SIGCONT);
            eventually(LONG, "it serves", || caller.call("GET", "/users", "").unwrap().0 == 200);
            continue;
        };
        assert_eq!(process.wait(LONG), 1);
        let log = process.stderr();
        let line = log.lines().last().unwrap_or_default();
        assert!(line.starts_with("userd: cannot connect to the database: "), "{log}");
        assert!(line.contains(expected) && !log.contains("secret"), "{log}");
    }
}

/// A session on its Unix socket.
fn sql(cluster: &Cluster, port: u16) -> postgres::Client {
    let url =
        format!("host={} port={port} user=u password=secret dbname=postgres", cluster.socket_directory());
    postgres::Client::connect(&url, postgres::NoTls).unwrap()
}

/// The request to cancel is sent over TLS as well.
#[test]
fn a_standby_that_is_away() {
    let (pki, cluster) = (Pki::new(), Cluster::new());
    cluster.allow("hostssl all all all scram-sha-256");
    let server = cluster.start(Some(pki.server("good")), "");
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
            ("DB_SSL_CA", &pki.path("ca.crt").display().to_string()),
            ("REQUEST_TIMEOUT", "1"),
            ("HOST", "127.0.0.1"),
        ],
    );
    changes_without_a_standby(&process.wait_for_url(), &mut sql(&cluster, server.port));
    // A server that does not even say whether it speaks TLS holds up no request to cancel.
    let mut caller = Caller::new(&process.wait_for_url(), LONG);
    let mut processes = children(server.child.id());
    processes.push(server.child.id());
    let all = |signal| {
        for process in &processes {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(process.cast_signed()), signal);
        }
    };
    let cancels = || {
        let threads = fs::read_dir(format!("/proc/{}/task", process.id())).unwrap();
        let name = |thread: &fs::DirEntry| fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        threads.flatten().filter(|thread| name(thread) == "cancel\n").count()
    };
    all(Signal::SIGSTOP);
    assert_eq!(caller.call("GET", "/users/1", "").unwrap().0, 503);
    eventually(LONG, "a request to cancel is sent", || cancels() > 0);
    eventually(LONG, "it ends", || cancels() == 0);
    all(Signal::SIGCONT);
    eventually(LONG, "it serves", || caller.call("GET", "/users/1", "").unwrap().0 == 200);
}
