//! A TCP port in front of a server, with the faults of a network: it refuses, cuts, resets, delays, stalls, and holds back
//! what a client sends.

use super::pause;
use socket2::Socket;
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// Treatment of the bytes that pass the proxy, in both directions unless a variant names one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Weather {
    /// They pass.
    #[default]
    Fair,
    /// They pass after this time.
    Slow(Duration),
    /// They wait until the weather changes. Connections are taken.
    Stalled,
    /// This many bytes of what one side says next pass, and then their connection is closed.
    CutAfter { from_server: bool, bytes: usize },
    /// They pass, but a new connection is closed at once.
    Shut,
}

/// Relays connections to a server.
pub struct Proxy {
    port: u16,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    weather: Weather,
    connections: Vec<Arc<Joined>>,
    /// How many connections `Weather::CutAfter` has closed.
    cuts: usize,
    /// The next client that sends something is held back.
    holds_next: bool,
    /// How many clients were held back.
    held: usize,
    /// How often clients were released.
    released: usize,
}

/// A client and the server it was led to.
struct Joined {
    client: Socket,
    server: Socket,
    reset: AtomicBool,
}

impl Joined {
    fn end(&self) {
        let _ = self.server.shutdown(Shutdown::Both);
        // A reset is sent when the last handle is closed, unless the end was told before.
        let reset = self.reset.load(Ordering::SeqCst);
        let _ = self.client.shutdown(if reset { Shutdown::Read } else { Shutdown::Both });
    }
}

impl Proxy {
    /// Before the server on this Unix socket.
    pub fn start(socket: &Path) -> Proxy {
        let socket = socket.to_owned();
        Proxy::to(move || UnixStream::connect(&socket).map(Socket::from))
    }

    /// Before the server at this TCP address.
    pub fn before(address: String) -> Proxy {
        Proxy::to(move || TcpStream::connect(&address).map(Socket::from))
    }

    fn to(server: impl Fn() -> io::Result<Socket> + Send + 'static) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("a bound socket").port();
        let state = Arc::<Mutex<State>>::default();
        let shared = state.clone();
        // It ends with the test process; all that it holds then is a listener.
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let mut state = shared.lock().unwrap();
                if state.weather == Weather::Shut {
                    continue;
                }
                if let Ok(server) = server() {
                    let joined = Joined { client: client.into(), server, reset: AtomicBool::new(false) };
                    state.connections.push(join(joined, &shared));
                }
            }
        });
        Proxy { port, state }
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on, on old connections and new ones.
    pub fn set(&self, weather: Weather) {
        self.state().weather = weather;
    }

    /// Ends all connections in good order.
    pub fn cut(&self) {
        self.state().connections.drain(..).for_each(|joined| joined.end());
    }

    /// Ends all connections, and each new one until the weather changes.
    pub fn shut(&self) {
        self.set(Weather::Shut);
        self.cut();
    }

    /// Ends all connections with a reset.
    pub fn reset(&self) {
        for joined in self.state().connections.drain(..) {
            joined.client.set_linger(Some(Duration::ZERO)).expect("a socket");
            joined.reset.store(true, Ordering::SeqCst);
            joined.end();
        }
    }

    /// How many connections `Weather::CutAfter` has closed.
    pub fn cuts(&self) -> usize {
        self.state().cuts
    }

    /// Holds back the next client that sends something: this, and what it sends after it.
    pub fn hold_next(&self) {
        self.state().holds_next = true;
    }

    /// How many clients were held back.
    pub fn held(&self) -> usize {
        self.state().held
    }

    /// Lets pass what was held back, whatever its client has done meanwhile.
    pub fn release(&self) {
        let mut state = self.state();
        state.holds_next = false;
        state.released += 1;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

/// Copies both ways until either end is closed.
fn join(joined: Joined, state: &Arc<Mutex<State>>) -> Arc<Joined> {
    let joined = Arc::new(joined);
    for from_server in [false, true] {
        let (joined, state) = (joined.clone(), state.clone());
        thread::spawn(move || {
            let (client, server) = (&joined.client, &joined.server);
            let (from, to) = if from_server { (server, client) } else { (client, server) };
            let is_cut = carry(from, to, &state, from_server);
            joined.end();
            let mut state = state.lock().unwrap();
            state.cuts += usize::from(is_cut);
            state.connections.retain(|other| !Arc::ptr_eq(other, &joined));
        });
    }
    joined
}

/// Copies one way until either end is closed, and returns whether that is to be done by `Weather::CutAfter`.
fn carry(mut from: &Socket, mut to: &Socket, state: &Mutex<State>, from_server: bool) -> bool {
    let mut buffer = [0; 16384];
    let mut is_cut = false;
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if !from_server {
            hold(state);
        }
        let bytes = loop {
            let weather = state.lock().unwrap().weather;
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
                    is_cut = true;
                    bytes.min(length)
                }
                Weather::Fair | Weather::CutAfter { .. } | Weather::Shut => length,
            };
        };
        if to.write_all(&buffer[..bytes]).is_err() || is_cut {
            break;
        }
    }
    is_cut
}

/// Returns at once, or when the client is released.
fn hold(state: &Mutex<State>) {
    let mut shared = state.lock().unwrap();
    if !std::mem::take(&mut shared.holds_next) {
        return;
    }
    shared.held += 1;
    let before = shared.released;
    drop(shared);
    while state.lock().unwrap().released == before {
        pause(Duration::from_millis(2));
    }
}
