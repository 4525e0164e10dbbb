//! A TCP port in front of a server, with the faults of a network: it cuts, resets, delays, stalls and loses.

use super::pause;
use socket2::SockRef;
use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// Treatment of the bytes that pass the proxy, in both directions unless a variant names one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weather {
    /// They pass.
    Fair,
    /// They pass after this time.
    Slow(Duration),
    /// They wait until the weather changes. Connections are taken.
    Stalled,
    /// This many bytes of what one side says next pass, and then their connection is closed.
    CutAfter { from_server: bool, bytes: usize },
}

/// Relays connections to the server.
pub struct Proxy {
    port: u16,
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    weather: Weather,
    connections: Vec<Arc<Joined>>,
}

/// A client and the server it was led to.
struct Joined {
    client: TcpStream,
    server: UnixStream,
    reset: AtomicBool,
}

impl Joined {
    fn end(&self) {
        let _ = self.server.shutdown(Shutdown::Both);
        // A reset is sent when the last handle is closed, unless the end was told before.
        let reset = self.reset.load(Ordering::SeqCst);
        let how = if reset { Shutdown::Read } else { Shutdown::Both };
        let _ = self.client.shutdown(how);
    }
}

impl Proxy {
    /// Before the server on this Unix socket.
    pub fn start(socket: &Path) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("a bound socket").port();
        let shared = Arc::new(Mutex::new(Shared { weather: Weather::Fair, connections: Vec::new() }));
        let (socket, state): (PathBuf, _) = (socket.to_owned(), shared.clone());
        // It ends with the test process; all that it holds then is a listener.
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = UnixStream::connect(&socket) else {
                    continue;
                };
                join(client, server, &state);
            }
        });
        Proxy { port, shared }
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on, on old connections and new ones.
    pub fn set(&self, weather: Weather) {
        self.shared().weather = weather;
    }

    /// Ends all connections in good order.
    pub fn cut(&self) {
        for joined in self.shared().connections.drain(..) {
            joined.end();
        }
    }

    /// Ends all connections with a reset.
    pub fn reset(&self) {
        for joined in self.shared().connections.drain(..) {
            SockRef::from(&joined.client).set_linger(Some(Duration::ZERO)).expect("a socket");
            joined.reset.store(true, Ordering::SeqCst);
            joined.end();
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }
}

fn join(client: TcpStream, server: UnixStream, shared: &Arc<Mutex<Shared>>) {
    let reset = AtomicBool::new(false);
    let joined = Arc::new(Joined { client, server, reset });
    shared.lock().unwrap().connections.push(joined.clone());
    for from_server in [false, true] {
        let (joined, shared) = (joined.clone(), shared.clone());
        thread::spawn(move || {
            let (client, server) = (&joined.client, &joined.server);
            match from_server {
                false => carry(client, server, &shared, from_server),
                true => carry(server, client, &shared, from_server),
            }
            joined.end();
            let mut shared = shared.lock().unwrap();
            shared.connections.retain(|other| !Arc::ptr_eq(other, &joined));
        });
    }
}

fn carry(mut from: impl Read, mut to: impl Write, shared: &Mutex<Shared>, from_server: bool) {
    let mut buffer = [0; 4096];
    let mut cut = false;
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        let bytes = loop {
            let weather = shared.lock().unwrap().weather;
            break match weather {
                Weather::Stalled => {
                    pause(Duration::from_millis(2));
                    continue;
                }
                Weather::Slow(time) => {
                    pause(time);
                    length
                }
                Weather::CutAfter { from_server: cut_side, bytes } if from_server == cut_side => {
                    cut = true;
                    bytes.min(length)
                }
                Weather::Fair | Weather::CutAfter { .. } => length,
            };
        };
        if to.write_all(&buffer[..bytes]).is_err() || cut {
            return;
        }
    }
}
