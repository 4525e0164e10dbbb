//! A TCP port in front of the cluster's Unix socket, that can be shut and cut.

use super::Database;
use std::{
    io,
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    sync::{Arc, Mutex},
    thread,
};

/// Relays connections to the cluster while it is open, and closes them while it is not.
pub struct Relay {
    port: u16,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    open: bool,
    refused: usize,
    clients: Vec<TcpStream>,
}

impl Relay {
    /// Shut, for now.
    pub fn shut(database: &Database) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("a bound socket").port();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        let socket = format!("{}/.s.PGSQL.5432", database.socket_dir());
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let mut state = shared.lock().unwrap();
                if state.open {
                    let server = UnixStream::connect(&socket).expect("the cluster listens");
                    state.clients.push(join(client, server).expect("descriptors"));
                } else {
                    state.refused += 1;
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

    /// From now on it leads to the cluster.
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
fn join(mut client: TcpStream, mut server: UnixStream) -> io::Result<TcpStream> {
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
