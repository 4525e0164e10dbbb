//! Which addresses a service listens on, and who is told if it cannot.

use crate::support::{
    Client, Database, LONG, LONG_ON_DISK, Process, TempDir, USERD, check, free_port, is_root,
};
use nix::sys::signal::Signal;
use socket2::{Domain, Socket, Type};
use std::net::{TcpListener, TcpStream, UdpSocket};

const ADA: &str = r#"{"name":"Ada","email":"ada@example.com"}"#;

/// Without `HOST`, and by the name: `127.0.0.1` and `::1`, on one port, and no other address of this machine.
#[test]
fn a_service_listens_on_both_loopbacks_and_nowhere_else() {
    let database = Database::create();
    let (url, dir) = (database.url(), TempDir::new());
    let embedded = format!("--embedded={}/data", dir.name());
    for (variables, arguments) in [
        (&[("DATABASE_URL", &*url)][..], &[][..]),
        (&[("DATABASE_URL", &*url), ("HOST", "localhost")], &[]),
        (&[], &[&*embedded]),
    ] {
        database.run("truncate users restart identity cascade");
        let mut process = Process::start(arguments, variables);
        let url = process.wait_for_url_within(LONG_ON_DISK);
        assert_eq!(process.stdout(), format!("listening on {url}\n"), "one line");
        let port = url.strip_prefix("http://127.0.0.1:").expect("the address that every client has");
        assert!(TcpStream::connect(("127.0.0.2", port.parse().unwrap())).is_err(), "{arguments:?}");
        let mut clients = [url.clone(), format!("http://[::1]:{port}")].map(|url| Client::new(&url));
        check(&mut clients[0], &format!("POST /users {ADA} => 201 *"));
        check(&mut clients[1], "GET /users/1 => 200 *\nDELETE /users/1 => 204");
        check(&mut clients[0], "GET /users/1 => 404 *");
        let mut health = Process::start(&["healthcheck", "--port", port], &[]);
        assert_eq!(health.wait(LONG), 0, "{}", health.stderr());
        let warning = "other machines can connect";
        assert!(!process.stderr().contains(warning), "{}", process.stderr());
        process.signal(Signal::SIGTERM);
        assert_eq!(process.wait(LONG), 0);
        for host in ["127.0.0.1", "::1"] {
            assert!(TcpStream::connect((host, port.parse().unwrap())).is_err(), "{host} is free");
        }
    }
}

/// Else the clients of one address would meet another program.
#[test]
fn a_port_that_is_taken_on_one_loopback_ends_the_start() {
    let database = Database::create();
    for host in ["127.0.0.1", "[::1]", "0.0.0.0", "[::]"] {
        let taken = TcpListener::bind(format!("{host}:0")).unwrap();
        let port = taken.local_addr().unwrap().port().to_string();
        let named = match host {
            "[::1]" => format!("[::1]:{port}"),
            _ => format!("127.0.0.1:{port}"),
        };
        let mut process = Process::start(&[], &[("DATABASE_URL", &database.url()), ("PORT", &port)]);
        assert_eq!(process.wait(LONG), 1);
        let said = process.stderr();
        let line = format!("userd: cannot listen on {named}: Address already in use");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.starts_with(&line) && said.contains("choose another HOST or PORT"), "{said}");
    }
}

/// Many containers have no IPv6.
#[test]
fn a_machine_without_ipv6_has_one_loopback() {
    let database = Database::create();
    let port = free_port().to_string();
    let url = database.url();
    let variables = [("DATABASE_URL", &*url), ("PORT", &port), ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")];
    let script = "ip link set lo up; echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; exec \"$0\"";
    // Only root may have a network of its own without being another user there.
    let (own, join): (&[&str], &[&str]) = if is_root() {
        (&["/usr/bin/unshare", "-n"], &["/usr/bin/nsenter", "-n"])
    } else {
        (&["/usr/bin/unshare", "-rn"], &["/usr/bin/nsenter", "-nU", "--preserve-credentials"])
    };
    let program = [own, &["/bin/sh", "-c", script, USERD]].concat();
    let mut process = Process::under(&program, &[], &variables);
    assert_eq!(process.wait_for_url(), format!("http://127.0.0.1:{port}"));
    let target = process.id().to_string();
    let program = [join, &["-t", &target, USERD]].concat();
    let mut health = Process::under(&program, &["healthcheck"], &variables);
    assert_eq!(health.wait(LONG), 0, "{}", health.stderr());
}

/// systemd passes a socket for each `ListenStream=` of a unit.
#[test]
fn sockets_that_a_supervisor_passes_are_all_served() {
    let database = Database::create();
    let v4 = TcpListener::bind("127.0.0.1:0").unwrap();
    let v6 = TcpListener::bind("[::1]:0").unwrap();
    let urls = [&v4, &v6].map(|listener| format!("http://{}", listener.local_addr().unwrap()));
    // Connected before the service starts.
    let mut clients = urls.each_ref().map(|url| Client::new(url));
    clients.iter_mut().for_each(|client| client.connect().unwrap());
    let passed = [&v4, &v6].map(|listener| listener.try_clone().unwrap().into()).into();
    let variables = [("DATABASE_URL", &*database.url()), ("HOST", "192.0.2.1")];
    let mut process = Process::activated(passed, &[], &variables);
    assert_eq!(process.wait_for_url(), urls[0], "the first");
    check(&mut clients[0], &format!("POST /users {ADA} => 201 *\nGET /ui => 200 *"));
    check(&mut clients[1], "GET /users/1 => 200 *\nGET /ui => 200 *");
    // A flood of one socket's clients does not keep those of the other one waiting.
    let flood: Vec<_> = (0..300).map(|_| TcpStream::connect(v4.local_addr().unwrap()).unwrap()).collect();
    check(&mut Client::new(&urls[1]), "GET /users/1 => 200 *");
    drop(flood);
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
    assert!(TcpStream::connect(v6.local_addr().unwrap()).is_ok(), "the supervisor goes on listening");
}

/// A unit with `ListenDatagram=`, or a socket that does not listen.
#[test]
fn passed_sockets_that_cannot_be_served_are_refused() {
    let database = Database::create();
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap().into();
    let silent = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap().into();
    for (socket, code, end) in [
        (datagrams, 2, "; pass sockets as ListenStream= does\n"),
        (silent, 1, "; pass sockets that listen, as ListenStream= of systemd does\n"),
    ] {
        let mut process = Process::activated(vec![socket], &[], &[("DATABASE_URL", &database.url())]);
        assert_eq!(process.wait(LONG), code, "{}", process.stderr());
        assert!(process.stderr().ends_with(end), "{}", process.stderr());
    }
}
