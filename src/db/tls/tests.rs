//! Tests TLS with real servers: a private PostgreSQL for each certificate, each on a free port.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::{CertifiedKey, SingleCertAndKey};

use super::connector;
use crate::config::{Config, Database};
use crate::db::explain;
use crate::db::target::DbTarget;
use tls_servers::{Cluster, Pki};

// These modules are also in tests/it, for the tests of the command over TLS.
#[allow(dead_code, reason = "tests/deploy uses the rest")]
#[path = "../../../tests/it/support/account.rs"]
mod account;
#[allow(dead_code, reason = "tests/it uses the rest")]
#[path = "../../../tests/it/support/machine.rs"]
mod machine;
#[path = "../../../tests/it/support/tls_servers.rs"]
mod tls_servers;
use account::Account;
use machine::{TempDir, free_port, pause, programs_of_postgres};

/// Connects. Returns "tls" or "plain", or the line that explains the error.
fn connect(target: &DbTarget) -> String {
    let connector = match connector(&target.tls) {
        Ok(connector) => connector,
        Err(error) => return format!("connector: {error}"),
    };
    // Connects by the type that the service uses for every mode of TLS.
    let manager = r2d2_postgres::PostgresConnectionManager::new(target.hosts[0].clone(), connector);
    match r2d2::ManageConnection::connect(&manager) {
        Ok(mut client) => {
            let sql = "select ssl, repeat('x', 100000) from pg_stat_ssl \
                where pid = pg_backend_pid()";
            let row = client.query_one(sql, &[]).unwrap();
            assert_eq!(row.get::<_, &str>(1).len(), 100_000);
            if row.get(0) { "tls" } else { "plain" }.into()
        }
        Err(error) => {
            let line = explain(&error);
            assert!(!line.contains("secret") && !line.contains('\n'), "{line}");
            line
        }
    }
}

/// Parses a connection string and connects. Returns what `connect` does, or the error of the string.
fn parse_and_connect(text: &str) -> String {
    match DbTarget::parse(text, None) {
        Ok(target) => connect(&target),
        Err(error) => format!("target: {error}"),
    }
}

/// Checks rows of `host | parameters | outcome`, once as keywords and once as a URL. In a row, `$` stands for the directory of
/// certificates, `TLS!` for a failed handshake, `REFUSED` for a refused server certificate, and `…` for any end of a line.
fn assert_rows(port: u16, pki: &Pki, rows: &str) {
    let rows = rows
        .replace('$', pki.path("").to_str().unwrap())
        .replace("REFUSED", "TLS! invalid peer certificate:")
        .replace("TLS!", "error performing TLS handshake:");
    for row in rows.lines().map(str::trim).filter(|row| !row.is_empty()) {
        let mut cells = row.split('|').map(str::trim);
        let [host, parameters, expected] = [(); 3].map(|()| cells.next().unwrap());
        let text = format!("host={host} port={port} user=u password=secret dbname=postgres {parameters}");
        let holds = |line: &str| match expected.strip_suffix('…') {
            Some(start) => line.starts_with(start),
            None => line == expected,
        };
        let line = parse_and_connect(&text);
        assert!(holds(&line), "{row}: {line}");
        let (host, parameters) = (host.replace('/', "%2F"), parameters.replace(' ', "&"));
        let url = format!("postgres://u:secret@{host}:{port}/postgres?{parameters}");
        let line = parse_and_connect(&url);
        assert!(holds(&line), "{url}: {line}");
    }
}

#[test]
fn server_certificates() {
    let pki = Pki::new();
    let cluster = Cluster::new();
    let with = |name: &str, rows: &str| {
        let server = cluster.start(Some(pki.server(name)), "");
        assert_rows(server.port, &pki, &rows.replace("SOCKET", &cluster.socket_directory()));
    };

    with(
        "good",
        r#"
        127.0.0.1 | | tls
        127.0.0.1 | sslmode=disable | plain
        127.0.0.1 | sslmode=allow | tls
        127.0.0.1 | sslmode=prefer | tls
        127.0.0.1 | sslmode=require | tls
        127.0.0.1 | sslmode=require sslrootcert=$/ca.crt | tls
        127.0.0.1 | sslmode=verify-ca sslrootcert=$/ca.crt | tls
        127.0.0.1 | sslmode=verify-full sslrootcert=$/ca.crt | tls
        localhost | sslmode=verify-full sslrootcert=$/ca.crt | tls
        localhost | sslmode=verify-full sslrootcert=$/both.crt | tls
        localhost | hostaddr=127.0.0.1 sslmode=verify-full sslrootcert=$/ca.crt | tls
        localhost | sslmode=verify-full sslrootcert=$/good.crt | TLS! unexpected error: no trusted authority…

        x.example | hostaddr=127.0.0.1 sslmode=require | tls
        x.example | hostaddr=127.0.0.1 sslmode=verify-ca sslrootcert=$/ca.crt | tls
        x.example | hostaddr=127.0.0.1 sslmode=verify-full sslrootcert=$/ca.crt | REFUSED certificate not valid for name "x.example"; certificate is only valid for DnsName("localhost") or IpAddress(127.0.0.1)
        un_der    | hostaddr=127.0.0.1 sslmode=require | tls
        no~name   | hostaddr=127.0.0.1 sslmode=verify-full sslrootcert=$/ca.crt | TLS! invalid dns name

        127.0.0.1 | sslmode=prefer sslrootcert=$/other-ca.crt | TLS! unexpected error: no trusted authority…
        127.0.0.1 | sslmode=require sslrootcert=$/other-ca.crt | TLS! unexpected error: no trusted authority…
        127.0.0.1 | sslmode=verify-ca sslrootcert=$/other-ca.crt | TLS! unexpected error: no trusted authority…
        localhost | sslmode=verify-full sslrootcert=$/other-ca.crt | TLS! unexpected error: no trusted authority…
        localhost | sslmode=verify-full | TLS! unexpected error: no trusted authority…
        localhost | sslrootcert=system | TLS! unexpected error: no trusted authority…

        127.0.0.1 | sslmode=require channel_binding=require | tls
        127.0.0.1 | sslmode=require channel_binding=disable | tls
        127.0.0.1 | sslmode=disable channel_binding=require | authentication error: server did not use channel binding

        127.0.0.1 | sslmode=require password=wrongsecret | FATAL: password authentication failed for user "u" (28P01)
        127.0.0.1 | sslmode=require dbname=none | FATAL: database "none" does not exist (3D000)

        SOCKET | | plain
        SOCKET | sslmode=verify-full | plain
        SOCKET | sslmode=require sslrootcert=$/ca.crt | plain

        127.0.0.1 | sslmode=require sslrootcert=$/none.crt | connector: $/none.crt cannot be read: No such file or directory (os error 2)
        127.0.0.1 | sslmode=require sslrootcert=$/ca.key | connector: $/ca.key holds no PEM certificate…
    "#,
    );
    with(
        "chain",
        "
        localhost | sslmode=verify-full sslrootcert=$/ca.crt | tls
        localhost | sslmode=require channel_binding=require | tls
    ",
    );
    with(
        "expired",
        "
        localhost | sslmode=require | tls
        localhost | sslmode=verify-full sslrootcert=$/ca.crt | REFUSED certificate expired:…
        localhost | sslmode=verify-ca sslrootcert=$/ca.crt | REFUSED certificate expired:…
        localhost | sslmode=verify-ca sslrootcert=$/expired.crt | REFUSED certificate expired:…
    ",
    );
    with(
        "future",
        "
        localhost | sslmode=verify-ca sslrootcert=$/ca.crt | REFUSED certificate not valid yet:…
        localhost | sslmode=verify-ca sslrootcert=$/future.crt | REFUSED certificate not valid yet:…
    ",
    );
    with(
        "cn-only",
        "
        localhost | sslmode=verify-ca sslrootcert=$/ca.crt | tls
        localhost | sslmode=verify-full sslrootcert=$/ca.crt | REFUSED certificate not valid for name…
    ",
    );
    with(
        "ed25519",
        "
        localhost | sslmode=verify-full sslrootcert=$/ed25519.crt | tls
    ",
    );
    // This certificate signs itself and is marked as an authority, as `openssl req -x509` in PostgreSQL's manual makes it.
    with(
        "self-signed",
        r#"
        localhost | sslmode=require | tls
        localhost | sslmode=require channel_binding=require | tls
        localhost | sslmode=verify-ca sslrootcert=$/self-signed.crt | tls
        localhost | sslmode=verify-full sslrootcert=$/self-signed.crt | tls
        x.example | hostaddr=127.0.0.1 sslmode=verify-ca sslrootcert=$/self-signed.crt | tls
        x.example | hostaddr=127.0.0.1 sslmode=verify-full sslrootcert=$/self-signed.crt | REFUSED certificate not valid for name "x.example"; certificate is only valid for DnsName("localhost")
        localhost | sslmode=verify-ca sslrootcert=$/ca.crt | TLS! unexpected error: no trusted authority…
        localhost | sslmode=verify-full | TLS! unexpected error: no trusted authority…
    "#,
    );
}

#[test]
fn older_tls_and_none() {
    let pki = Pki::new();
    let cluster = Cluster::new();

    let tls_1_2 = "ssl_max_protocol_version = 'TLSv1.2'";
    let server = cluster.start(Some(pki.server("good")), tls_1_2);
    assert_rows(
        server.port,
        &pki,
        "
        localhost | sslmode=verify-full sslrootcert=$/ca.crt channel_binding=require | tls
    ",
    );
    drop(server);
    let server = cluster.start(None, "");
    assert_rows(
        server.port,
        &pki,
        "
        127.0.0.1 | | plain
        127.0.0.1 | sslmode=prefer sslrootcert=$/ca.crt | plain
        127.0.0.1 | sslmode=require | TLS! server does not support TLS
        127.0.0.1 | sslmode=verify-full | TLS! server does not support TLS
    ",
    );
    let port = server.port;
    drop(server);
    assert_rows(
        port,
        &pki,
        "
        127.0.0.1 | | error connecting to server: Connection refused (os error 111)
    ",
    );
}

#[test]
fn client_certificates() {
    let pki = Pki::new();
    let cluster = Cluster::new();
    let ca = format!("ssl_ca_file = '{}'", pki.path("ca.crt").display());
    cluster.allow("hostssl all u all cert");
    let server = cluster.start(Some(pki.server("good")), &ca);
    assert_rows(server.port, &pki, "
        localhost | sslmode=require sslcert=$/client.crt sslkey=$/client.key | tls
        localhost | sslmode=verify-full sslrootcert=$/ca.crt sslcert=$/client.crt sslkey=$/client.key | tls
        localhost | sslmode=require | FATAL: connection requires a valid client certificate (28000)
        localhost | sslmode=require sslcert=$/client.crt sslkey=$/ca.key | connector: $/ca.key …
        localhost | sslmode=require sslcert=$/client.crt sslkey=$/ca.crt | connector: $/ca.crt holds no unencrypted PEM private key
    ");
    // Other programs write these files with a byte order mark, as a trusted certificate, in DER or as X509.
    for name in ["client.crt", "client.key", "ca.crt"] {
        let text = fs::read_to_string(pki.path(name)).unwrap();
        fs::write(pki.path(&format!("bom-{name}")), format!("\u{feff}{text}")).unwrap();
    }
    pki.openssl("x509 -trustout -in ca.crt -out trusted.crt");
    pki.openssl("x509 -outform der -in ca.crt -out der.crt");
    let old = fs::read_to_string(pki.path("ca.crt")).unwrap().replace("CERTIFICATE", "X509 CERTIFICATE");
    fs::write(pki.path("x509.crt"), old).unwrap();
    for name in ["trusted", "der", "x509"] {
        pki.openssl(&format!("x509 -in {name}.crt -out {name}-new.crt"));
    }
    pki.openssl("req -new -nodes -newkey rsa:2048 -keyout v1.key -out v1.req -subj /CN=u");
    let sign = "x509 -req -in v1.req -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out";
    fs::write(pki.path("extensions"), "extendedKeyUsage = clientAuth\n").unwrap();
    pki.openssl(&format!("{sign} v1.crt"));
    pki.openssl(&format!("{sign} v3.crt -extfile extensions"));
    let version = "is not of X.509 version 3: sign it anew with `openssl x509 -req -extfile FILE ...`…";
    let format = "holds no PEM certificate, as `openssl x509 -in FILE -out NEW` writes it";
    assert_rows(server.port, &pki, &format!("
        localhost | sslmode=verify-full sslrootcert=$/bom-ca.crt sslcert=$/bom-client.crt sslkey=$/bom-client.key | tls
        localhost | sslmode=require sslcert=$/v1.crt sslkey=$/v1.key | connector: $/v1.crt {version}
        localhost | sslmode=require sslcert=$/v3.crt sslkey=$/v1.key | tls
        localhost | sslmode=verify-full sslrootcert=$/trusted.crt | connector: $/trusted.crt {format}
        localhost | sslmode=verify-full sslrootcert=$/x509.crt | connector: $/x509.crt {format}
        localhost | sslmode=verify-full sslrootcert=$/der.crt | connector: $/der.crt {format}
        localhost | sslmode=verify-full sslrootcert=$/trusted-new.crt sslcert=$/v3.crt sslkey=$/v1.key | tls
        localhost | sslmode=verify-full sslrootcert=$/x509-new.crt sslcert=$/v3.crt sslkey=$/v1.key | tls
        localhost | sslmode=verify-full sslrootcert=$/der-new.crt sslcert=$/v3.crt sslkey=$/v1.key | tls
    "));
    // The text of the error differs, because the server may have closed the connection before its alert is read.
    let line = parse_and_connect(&format!(
        "host=localhost port={} user=u sslmode=require sslcert={1}/other-client.crt \
         sslkey={1}/other-client.key",
        server.port,
        pki.path("").display(),
    ));
    assert!(line.starts_with("error communicating with the server: "), "{line}");
}

#[test]
fn single_settings() {
    let pki = Pki::new();
    let cluster = Cluster::new();
    let server = cluster.start(Some(pki.server("good")), "");
    let (ca, other, socket) = (pki.path("ca.crt"), pki.path("other-ca.crt"), cluster.socket_directory());
    let untrusted = "error performing TLS handshake: unexpected error: no trusted authority has signed the server's certificate: DB_SSL_CA, or sslrootcert in DATABASE_URL, names the PEM file of its authority, or of the certificate itself if it is self-signed (UnknownIssuer)";
    for (host, password, db_ssl_ca, expected) in [
        ("localhost", "secret", Some(&ca), "tls"),
        ("127.0.0.1", "secret", Some(&ca), "tls"),
        ("localhost", "secret", None, "plain"),
        (&socket, "secret", Some(&ca), "plain"),
        ("localhost", "secret", Some(&other), untrusted),
        ("localhost", "", Some(&ca), "invalid configuration: password missing"),
    ] {
        let (host, name, user) = (host.into(), "postgres".into(), "u".into());
        let (port, password, ssl) = (server.port, password.into(), db_ssl_ca.is_some());
        let database = Database::Parts { host, port, name, user, password, ssl };
        let config = Config { database, db_ssl_ca: db_ssl_ca.cloned(), ..Config::default() };
        assert_eq!(connect(&DbTarget::new(&config).unwrap()), expected);
    }
}

/// A server that does not own the key of its certificate is refused, even if the certificate is not verified.
#[test]
fn stolen_certificates() {
    let pki = Pki::new();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    for (certificate, key, version) in
        [("good", "expired", &rustls::version::TLS13), ("good", "expired", &rustls::version::TLS12)]
    {
        let chain = vec![CertificateDer::from_pem_file(pki.server(certificate).0).unwrap()];
        let key = PrivateKeyDer::from_pem_file(pki.server(key).1).unwrap();
        let key = provider.key_provider.load_private_key(key).unwrap();
        let config = rustls::ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[version])
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(CertifiedKey::new(chain, key))));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            socket.read_exact(&mut [0; 8]).unwrap();
            socket.write_all(b"S").unwrap();
            let mut tls = rustls::ServerConnection::new(Arc::new(config)).unwrap();
            tls.complete_io(&mut socket).is_err()
        });
        let line = parse_and_connect(&format!("host=127.0.0.1 port={port} user=u sslmode=require"));
        assert!(line.ends_with("invalid peer certificate: BadSignature"), "{line}");
        server.join().unwrap();
    }
}
