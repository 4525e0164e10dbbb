//! A TCP port in front of a server, that can be shut and cut.

use super::Database;
use socket2::Socket;
use std::{
    io,
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    sync::{Arc, Mutex},
    thread,
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
}

impl Relay {
    /// To the cluster's Unix socket; shut, for now.
    pub fn shut(database: &Database) -> Relay {
        let socket = format!("{}/.s.PGSQL.5432", database.socket_dir());
        Relay::to(move || UnixStream::connect(&socket).map(Socket::from))
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
                    state.clients.push(join(client.into(), server).expect("descriptors"));
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
fn join(mut client: Socket, mut server: Socket) -> io::Result<Socket> {
    let handle = client.try_clone()?;
    let (mut to_client, mut from_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        let _ = io::copy(&mut client, &mut server);
        let _ = server.shutdown(Shutdown::Both);
    });
    thread::spawn(move || {
        let _ = io::copy(&mut from_server, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
    });
    Ok(handle)
}
