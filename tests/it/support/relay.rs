//! A TCP port in front of a server, that can be shut and cut, and hold back what a client sends.

use super::{Database, LONG, eventually, pause};
use socket2::Socket;
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

/// Relays connections to a server while it is open, and closes them while it is not.
pub struct Relay {
    port: u16,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    open: bool,
    refused: usize,
    clients: Vec<Socket>,
    /// The next client that sends this is held back.
    marker: Option<Vec<u8>>,
    /// How many are.
    held: usize,
    released: usize,
}

impl Relay {
    /// To the cluster's Unix socket; shut, for now.
    pub fn shut(database: &Database) -> Relay {
        let socket = format!("{}/.s.PGSQL.5432", database.socket_dir());
        Relay::to(move || UnixStream::connect(&socket).map(Socket::from))
    }

    /// To a Unix socket; open.
    pub fn before_socket(socket: PathBuf) -> Relay {
        let relay = Relay::to(move || UnixStream::connect(&socket).map(Socket::from));
        relay.open();
        relay
    }

    /// To a TCP address; open.
    pub fn before(address: String) -> Relay {
        let relay = Relay::to(move || TcpStream::connect(&address).map(Socket::from));
        relay.open();
        relay
    }

    fn to(server: impl Fn() -> io::Result<Socket> + Send + 'static) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("a bound socket").port();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let mut state = shared.lock().unwrap();
                if !state.open {
                    state.refused += 1;
                } else if let Ok(server) = server() {
                    state.clients.push(join(client.into(), server, &shared).expect("descriptors"));
                }
            }
        });
        Relay { port, state }
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// How many connections came while it was shut.
    pub fn refused(&self) -> usize {
        self.state.lock().unwrap().refused
    }

    /// From now on it leads to the server.
    pub fn open(&self) {
        self.state.lock().unwrap().open = true;
    }

    /// Holds back the next client that sends these bytes, from then on.
    pub fn hold(&self, marker: &[u8]) {
        self.state.lock().unwrap().marker = Some(marker.to_vec());
    }

    /// Returns when one is held back.
    pub fn holds(&self) {
        eventually(LONG, "a client is held back", || self.state.lock().unwrap().held > 0);
    }

    /// Lets pass what was held back, whatever its client has done meanwhile.
    pub fn release(&self) {
        let mut state = self.state.lock().unwrap();
        (state.marker, state.held) = (None, 0);
        state.released += 1;
    }

    /// Closes all connections, and each new one until it is reopened.
    pub fn cut(&self) {
        let mut state = self.state.lock().unwrap();
        state.open = false;
        for client in state.clients.drain(..) {
            let _ = client.shutdown(Shutdown::Both);
        }
    }
}

/// Copies both ways until either end is closed; returns a handle to close the client's.
fn join(mut client: Socket, mut server: Socket, state: &Arc<Mutex<State>>) -> io::Result<Socket> {
    let handle = client.try_clone()?;
    let (mut to_client, mut from_server) = (client.try_clone()?, server.try_clone()?);
    let state = state.clone();
    thread::spawn(move || {
        let mut buffer = [0; 16384];
        while let Ok(length @ 1..) = client.read(&mut buffer) {
            let bytes = &buffer[..length];
            hold(bytes, &state);
            if server.write_all(bytes).is_err() {
                break;
            }
        }
        let _ = server.shutdown(Shutdown::Both);
    });
    thread::spawn(move || {
        let _ = io::copy(&mut from_server, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
    });
    Ok(handle)
}

/// Returns at once, or when they are released.
fn hold(bytes: &[u8], state: &Mutex<State>) {
    let mut shared = state.lock().unwrap();
    let is_in = |marker: &mut Vec<u8>| {
        marker.is_empty() || bytes.windows(marker.len()).any(|part| part == marker.as_slice())
    };
    if shared.marker.take_if(is_in).is_none() {
        return;
    }
    shared.held += 1;
    let before = shared.released;
    drop(shared);
    while state.lock().unwrap().released == before {
        pause(Duration::from_millis(2));
    }
}
