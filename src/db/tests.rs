//! For the tests of this module: a server that speaks PostgreSQL's protocol up to a point, and then no more.

use super::{target::Target, tls, watchdog::Watchdog};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

/// Longer than anything takes on a busy machine.
pub(super) const LONG: Duration = Duration::from_secs(20);

/// How far the server goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// It accepts connections.
    Accepted,
    /// It accepts sessions, and simple queries.
    Set,
    /// The same, and closes the connection at a statement.
    Closed,
    /// It answers a statement with an error, but not with the end of that answer.
    Refused,
}

/// A connection string of the server. Its threads end with their connections, and with the process.
pub(super) fn server(until: Until) -> Target {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || serve(stream.unwrap(), until));
        }
    });
    let url = format!("host=127.0.0.1 port={port} user=u dbname=d sslmode=disable connect_timeout=1");
    Target::parse(&url, None).unwrap()
}

pub(super) fn watchdog() -> (Watchdog, tls::Connector) {
    (Watchdog::start().unwrap(), tls::connector(None).unwrap())
}

/// Reads until the client closes; says what a server would.
fn serve(mut stream: TcpStream, until: Until) {
    const AUTHENTICATED: &[u8] = b"R\0\0\0\x08\0\0\0\0";
    const READY: &[u8] = b"Z\0\0\0\x05I";
    const EMPTY: &[u8] = b"I\0\0\0\x04";
    const ERROR: &[u8] = b"E\0\0\0\x23SERROR\0VERROR\0CXX000\0Mrefused\0\0";
    let mut said = [0; 4096];
    let (mut started, mut refused) = (false, false);
    while let Ok(1..) = stream.read(&mut said) {
        let answer = match said[0] {
            _ if until == Until::Accepted || refused => continue,
            _ if !started => [AUTHENTICATED, READY].concat(),
            b'Q' => [EMPTY, READY].concat(),
            _ if until == Until::Closed => return,
            _ if until == Until::Refused => ERROR.to_vec(),
            _ => continue,
        };
        refused = answer == ERROR;
        started = true;
        if stream.write_all(&answer).is_err() {
            return;
        }
    }
}
