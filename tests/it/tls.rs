//! The command over TLS: a private PostgreSQL for each certificate, each on a free port.

use crate::support::tls_servers::{Cluster, Pki};
use crate::support::{LONG, Process, eventually};
use base64ct::{Base64, Encoding};
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// The service serves over TLS, or says in one line what is wrong with the server's certificate. The password of the
/// settings goes before `PGPASSWORD`.
#[test]
fn the_service_over_tls() {
    let pki = Pki::new();
    let cluster = Cluster::new();
    let [ca, other_ca, file] = ["ca.crt", "other-ca.crt", "password"].map(|name| pki.path(name));
    fs::write(&file, "secret\n").unwrap();
    let [ca, other_ca, file] = [ca, other_ca, file].map(|path| path.display().to_string());
    let wrong = ("PGPASSWORD", "another");
    type Row<'a> = (&'a str, &'a str, &'a str, [(&'a str, &'a str); 2], Option<&'a str>);
    let untrusted = "no trusted authority has signed the server's certificate: DB_SSL_CA, or sslrootcert";
    let rows: [Row; 7] = [
        ("good", "", &ca, [("DB_PASS", "secret"), wrong], None),
        ("good", "", &ca, [("DB_PASS_FILE", &file), wrong], None),
        ("good", "", &ca, [("PGPASSWORD", "secret"), ("DB_PASS", "")], None),
        ("good", ":secret", &ca, [wrong, ("DB_PASS", "another")], None),
        ("good", "", &other_ca, [("DB_PASS", "secret"), wrong], Some(untrusted)),
        ("self-signed", "", &ca, [("DB_PASS", "secret"), wrong], Some(untrusted)),
        ("expired", "", &ca, [("DB_PASS", "secret"), wrong], Some("certificate expired")),
    ];
    for (certificate, in_url, ca, passwords, expected) in rows {
        let server = cluster.start(Some(pki.server(certificate)), "");
        let port = server.port.to_string();
        let url =
            format!("postgres://u{in_url}@localhost:{port}/postgres?sslmode=verify-full&sslrootcert={ca}");
        let variables = [
            ("DATABASE_URL", if in_url.is_empty() { "" } else { &url }),
            ("DB_HOST", "localhost"),
            ("DB_PORT", &port),
            ("DB_USER", "u"),
            ("DB_NAME", "postgres"),
            ("DB_SSL", "true"),
            ("DB_SSL_CA", ca),
            ("DB_CONNECT_TIMEOUT", if expected.is_none() { "10" } else { "2" }),
            ("DB_POOL_SIZE", "2"),
            ("REQUEST_TIMEOUT", "1"),
            ("HOST", "127.0.0.1"),
        ];
        let mut process = Process::start(&[], &[&variables[..], &passwords].concat());
        let Some(expected) = expected else {
            let mut client = process.client();
            let mut sql = sql(&cluster, server.port);
            let ask = "select ssl, pid from pg_stat_ssl join pg_stat_activity using (pid) \
                where application_name = 'userd'";
            eventually(LONG, "it serves", || client.get("/users").status == 200);
            // None comes later, so that every request meets one of them.
            let mut sessions = Vec::new();
            eventually(LONG, "the pool is full", || {
                sessions = sql.query(ask, &[]).unwrap();
                sessions.len() == 2
            });
            assert!(sessions.iter().all(|session| session.get(0)), "they are encrypted");
            assert!(!process.stderr().contains("secret"), "{}", process.stderr());
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

/// A certificate of X.509 version 1, as `openssl x509 -req` makes it without extensions, is refused in each mode of TLS,
/// with the way to one of version 3.
#[test]
fn a_certificate_of_version_1() {
    let (pki, cluster) = (Pki::new(), Cluster::new());
    pki.openssl("req -new -nodes -newkey rsa:2048 -keyout old.key -out old.req -subj /CN=localhost");
    let sign = "x509 -req -in old.req -signkey old.key -days 30 -out old.crt";
    pki.openssl(sign);
    fs::write(pki.path("file"), "subjectAltName = DNS:localhost\n").unwrap();
    let start = |mode: &str, port: u16| {
        let url = format!("postgres://u:secret@localhost:{port}/postgres?sslmode={mode}");
        Process::at(&url, &[("DB_CONNECT_TIMEOUT", "1")])
    };
    let server = cluster.start(Some(pki.server("old")), "");
    for mode in ["prefer", "require", "require&channel_binding=require"] {
        let (code, _, stderr) = start(mode, server.port).ended();
        let line = stderr.lines().last().unwrap_or_default();
        let told =
            "certificate is not of X.509 version 3: sign it anew with `openssl x509 -req -extfile FILE ...`";
        assert!(code == 1 && line.contains(told) && !stderr.contains("secret"), "{mode}: {stderr}");
    }
    drop(server);
    pki.openssl(&sign.replace("-req", "-req -extfile file"));
    let server = cluster.start(Some(pki.server("old")), "");
    let mut process = start("require&channel_binding=require", server.port);
    assert_eq!(process.client().get("/users").status, 200);
}

/// A server that takes TLS alone tells how to reach it, in the words of the settings.
#[test]
fn a_server_that_takes_tls_alone() {
    let (pki, cluster) = (Pki::new(), Cluster::new());
    cluster.allow("hostssl all all all scram-sha-256");
    let server = cluster.start(Some(pki.server("good")), "");
    let (port, ca) = (server.port.to_string(), pki.path("ca.crt").display().to_string());
    let url = format!("postgres://u:secret@localhost:{port}/postgres?sslmode=disable");
    let parts = [
        ("DB_HOST", "localhost"),
        ("DB_PORT", &port),
        ("DB_USER", "u"),
        ("DB_PASS", "secret"),
        ("DB_NAME", "postgres"),
        ("DB_CONNECT_TIMEOUT", "1"),
        ("HOST", "127.0.0.1"),
    ];
    let rows: [(&[(&str, &str)], &str); 3] = [
        (&[], "no encryption (28000); tried "),
        (&[("DATABASE_URL", &url)], "no encryption (28000); tried "),
        (&[("DB_SSL", "true")], "no trusted authority has signed the server's certificate: DB_SSL_CA"),
    ];
    for (more, cause) in rows {
        for command in [&[][..], &["check"]] {
            let (code, stdout, stderr) = Process::start(command, &[&parts, more].concat()).ended();
            let said = stdout + &stderr;
            let line = said.lines().last().unwrap_or_default();
            assert!(code != 0 && line.contains(cause) && line.contains("DB_SSL_CA"), "{more:?}: {said}");
            assert_eq!(line.contains("DB_SSL=true"), cause.contains("28000"), "{line}");
            assert!(!said.contains("names another database") && !said.contains("secret"), "{said}");
        }
    }
    let tls = [("DB_SSL", "true"), ("DB_SSL_CA", ca.as_str())];
    let mut process = Process::start(&[], &[&parts, &tls[..]].concat());
    assert_eq!(process.client().get("/users").status, 200);
}

/// A key that libpq would not read is a warning.
#[test]
fn a_key_that_others_may_read() {
    let (pki, cluster) = (Pki::new(), Cluster::new());
    let server = cluster.start(Some(pki.server("good")), "");
    let (crt, key) = pki.server("client");
    let (files, port) = (format!("sslcert={}&sslkey={}", crt.display(), key.display()), server.port);
    let url = format!("postgres://u:secret@localhost:{port}/postgres?sslmode=require&{files}");
    for (mode, is_open) in [(0o644, true), (0o660, true), (0o604, true), (0o600, false), (0o400, false)] {
        fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        let mut process = Process::at(&url, &[]);
        assert_eq!(process.client().get("/users").status, 200);
        let line = format!("[WARN] {} can be read by others: chmod 600", key.display());
        assert_eq!(process.stderr().contains(&line), is_open, "{mode:o}: {}", process.stderr());
    }
}

/// A password whose hash has more iterations than the client library goes through ends the start at once.
#[test]
fn a_password_of_too_many_iterations() {
    let cluster = Cluster::new();
    let server = cluster.start(None, "");
    let hash = |iterations: u32| {
        let [salt, key] = [16, 32].map(|length| Base64::encode_string(&vec![7; length]));
        format!("alter role u password 'SCRAM-SHA-256${iterations}:{salt}${key}:{key}'")
    };
    let url = format!("postgres://u:secret@localhost:{}/postgres", server.port);
    let mut sql = sql(&cluster, server.port);
    for (iterations, cause, remedy) in [
        (100_001, "SCRAM iteration count", "scram_iterations of the server may be 100000 at most"),
        (4096, "password authentication failed", "names another database"),
    ] {
        sql.batch_execute(&hash(iterations)).unwrap();
        let mut process = Process::at(&url, &[("DB_CONNECT_TIMEOUT", "600")]);
        assert_eq!(process.wait(LONG), 1);
        let line = process.stderr().lines().last().unwrap_or_default().to_owned();
        assert!(line.contains(cause) && line.contains(remedy) && !line.contains("secret"), "{line}");
    }
}

/// A session on its Unix socket.
fn sql(cluster: &Cluster, port: u16) -> postgres::Client {
    let url =
        format!("host={} port={port} user=u password=secret dbname=postgres", cluster.socket_directory());
    postgres::Client::connect(&url, postgres::NoTls).unwrap()
}
