//! A throw-away PostgreSQL with TLS, and certificates for it.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use super::{Account, TempDir, free_port, pause};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};

/// Certificates and keys as PEM files.
pub struct Pki(TempDir);

impl Pki {
    pub fn new() -> Pki {
        let pki = Pki(TempDir::new());
        let authority = |name: &str| {
            let mut params = CertificateParams::new([]).unwrap();
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
            pki.write(name, &ca.pem(), &ca.key().serialize_pem());
            ca
        };
        let (ca, other) = (authority("ca"), authority("other-ca"));
        fs::write(pki.path("both.crt"), other.pem() + &ca.pem()).unwrap();

        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let params = |names: &[String]| {
            let mut params = CertificateParams::new(names).unwrap();
            params.distinguished_name.push(DnType::CommonName, "localhost");
            params
        };
        let issue =
            |name: &str, params: CertificateParams, key: KeyPair, ca: &CertifiedIssuer<'_, KeyPair>| {
                let certificate = params.signed_by(&key, ca).unwrap();
                pki.write(name, &certificate.pem(), &key.serialize_pem());
            };
        let key = || KeyPair::generate().unwrap();
        issue("good", params(&names), key(), &ca);
        issue("cn-only", params(&[]), key(), &ca);
        for (name, year) in [("expired", 2020), ("future", 2090)] {
            let mut params = params(&names);
            (params.not_before, params.not_after) =
                (date_time_ymd(year, 1, 1), date_time_ymd(year + 1, 1, 1));
            issue(name, params, key(), &ca);
        }

        let mut middle = params(&[]);
        middle.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        middle.distinguished_name.push(DnType::CommonName, "middle");
        let middle = CertifiedIssuer::signed_by(middle, key(), &ca).unwrap();
        issue("chain", params(&names), key(), &middle);
        let chain = fs::read_to_string(pki.path("chain.crt")).unwrap() + &middle.pem();
        fs::write(pki.path("chain.crt"), chain).unwrap();

        let mut client = params(&[]);
        client.distinguished_name.push(DnType::CommonName, "u");
        issue("other-client", client.clone(), key(), &other);
        issue("client", client, key(), &ca);

        pki.openssl("req -new -x509 -days 30 -nodes -newkey rsa:2048 -keyout self-signed.key -out self-signed.crt -subj /CN=localhost -addext subjectAltName=DNS:localhost");
        pki.openssl("req -new -x509 -days 30 -nodes -newkey ed25519 -keyout ed25519.key -out ed25519.crt -subj /CN=localhost -addext subjectAltName=DNS:localhost");
        pki
    }

    pub fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.0.path().to_owned() } else { self.0.path().join(name) }
    }

    /// Certificate and key files.
    pub fn server(&self, name: &str) -> (PathBuf, PathBuf) {
        (self.path(&format!("{name}.crt")), self.path(&format!("{name}.key")))
    }

    fn write(&self, name: &str, certificate: &str, key: &str) {
        let (crt_file, key_file) = self.server(name);
        fs::write(crt_file, certificate).unwrap();
        fs::write(key_file, key).unwrap();
    }

    pub fn openssl(&self, arguments: &str) {
        let arguments = arguments.split(' ');
        let output = Command::new("openssl").args(arguments).current_dir(self.0.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Data directories to start servers on; user `u`, password `secret`.
pub struct Cluster(Account);

impl Cluster {
    pub fn new() -> Cluster {
        let account = Account::new();
        account.write("password", "secret");
        account.shell(
            "initdb -D data --username=u --auth=scram-sha-256 --no-sync --encoding=UTF8 --pwfile=password >initdb.log",
        );
        let cluster = Cluster(account);
        cluster.allow("host all all all scram-sha-256");
        cluster
    }

    /// Replaces what pg_hba.conf says of TCP connections.
    pub fn allow(&self, access: &str) {
        self.0.write("data/pg_hba.conf", &format!("local all all scram-sha-256\n{access}\n"));
    }

    pub fn socket_directory(&self) -> String {
        self.0.dir().display().to_string()
    }

    /// Starts it with this certificate and key, or without TLS, and more lines of configuration.
    pub fn start(&self, certificate: Option<(PathBuf, PathBuf)>, more: &str) -> Server {
        let (port, dir) = (free_port(), self.0.dir());
        let mut conf = format!(
            "fsync = off\nport = {port}\nlisten_addresses = 'localhost'\nunix_socket_directories = '{}'\nlog_min_messages = fatal\n",
            dir.display()
        );
        if let Some((crt, key)) = certificate {
            for (from, to) in [(crt, "data/server.crt"), (key, "data/server.key")] {
                self.0.write(to, &fs::read_to_string(from).unwrap());
            }
            conf += "ssl = on\n";
        }
        self.0.write("data/postgresql.auto.conf", &(conf + more));
        let log = fs::File::create(dir.join("log")).unwrap();
        let child = self.0.command("postgres").args(["-D", "data"]).stderr(log).spawn().unwrap();
        let mut server = Server { child, port };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !fs::read_to_string(dir.join("data/postmaster.pid")).is_ok_and(|pid| pid.contains("ready")) {
            let log = || fs::read_to_string(dir.join("log")).unwrap();
            let has_ended = server.child.try_wait().unwrap().is_some();
            assert!(!has_ended && Instant::now() < deadline, "{}", log());
            pause(Duration::from_millis(20));
        }
        server
    }
}

/// A running server; stopped when dropped.
pub struct Server {
    pub child: Child,
    pub port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGQUIT: at once, children included.
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGQUIT);
        let _ = self.child.wait();
    }
}
