//! The harness of these tests: a frontend with a real tiny_http and simple workers, and clients that send raw bytes.
//!
//! One thread claims the requests of each ticket, and the workers echo them as JSON. `/hold` waits until
//! [`Harness::release`] is called, `/big/N` answers N bytes, `/empty` answers 204. The frontend answers `/immediate`
//! without a worker.

use crate::frontend::{ClaimedRequest, Frontend, Listener, SharedResources, Slots};
use crate::http::{Request, RequestId, Response};
use crate::{budget::MemoryBudget, config::Limits, metrics::Metrics};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::{
    fs::{DirBuilderExt, PermissionsExt},
    net::{UnixListener, UnixStream},
};
use std::sync::{
    Arc, Condvar, Mutex,
    atomic::{AtomicUsize, Ordering},
    mpsc,
};
use std::time::{Duration, Instant};
use std::{path::PathBuf, thread};

/// The longest time that a test waits for an event.
pub const TIMEOUT: Duration = Duration::from_secs(20);

pub struct Harness {
    pub address: Option<SocketAddr>,
    pub name: String,
    pub frontend: Option<Frontend>,
    pub slots: Arc<Slots>,
    pub gate: Arc<Gate>,
    pub budget: MemoryBudget,
    /// Locked by a test that lets no worker claim a request.
    pub claims: Arc<Mutex<()>>,
    tiny: Option<Arc<tiny_http::Server>>,
    threads: Vec<thread::JoinHandle<()>>,
    directory: PathBuf,
}

/// The gate that `/hold` waits for, and the counts of the workers.
#[derive(Default)]
pub struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    pub seen: AtomicUsize,
    /// The number of workers that have begun to wait for the gate.
    pub held: AtomicUsize,
    pub late: AtomicUsize,
    pub answered: AtomicUsize,
    pub broken: AtomicUsize,
}

impl Harness {
    pub fn new() -> Harness {
        Harness::with(|_| {})
    }

    /// Starts a frontend with limits that differ from the default ones.
    pub fn with(change: impl FnOnce(&mut Limits)) -> Harness {
        let mut limits = Limits::default();
        change(&mut limits);
        Harness::start(Listener::bind("127.0.0.1", 0).unwrap(), &limits, 4)
    }

    pub fn start(listener: Listener, limits: &Limits, workers: usize) -> Harness {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        raise_the_limit_of_descriptors();
        listener.listen().unwrap();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("userd-frontend-{}-{count}", std::process::id()));
        std::fs::DirBuilder::new().mode(0o700).create(&directory).unwrap();
        assert_eq!(directory.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let path = directory.join("s");
        let tiny = tiny_http::Server::from_listener(UnixListener::bind(&path).unwrap(), None);
        let tiny = Arc::new(tiny.unwrap());
        let private = UnixStream::connect(&path).unwrap();
        let gate = Arc::new(Gate::default());
        let address = listener.local_addr();
        let name = listener.to_string();
        let broken = Arc::clone(&gate);
        let budget = MemoryBudget::new(limits.memory_budget);
        let (frontend, slots) = Frontend::start(
            listener,
            limits.clone(),
            SharedResources {
                budget: budget.clone(),
                answer_without_worker: Box::new(at_once),
                metrics: Arc::new(Metrics::new(&[])),
            },
            private,
            move || {
                broken.broken.fetch_add(1, Ordering::SeqCst);
            },
        )
        .unwrap();
        let (sender, receiver) = mpsc::channel();
        let receiver = Arc::new(Mutex::new(receiver));
        let mut threads: Vec<_> = (0..workers)
            .map(|_| {
                let (receiver, slots, gate) = (Arc::clone(&receiver), Arc::clone(&slots), Arc::clone(&gate));
                let next = move || receiver.lock().unwrap().recv();
                thread::spawn(move || {
                    while let Ok(claimed) = next() {
                        serve(claimed, &slots, &gate);
                    }
                })
            })
            .collect();
        let claims = Arc::new(Mutex::new(()));
        let (own, own_slots, may_claim) = (Arc::clone(&tiny), Arc::clone(&slots), Arc::clone(&claims));
        threads.push(thread::spawn(move || {
            while let Ok(ticket) = own.recv() {
                assert!(ticket.headers().is_empty() && ticket.body_length().is_none(), "{}", ticket.url());
                let _claiming = may_claim.lock().unwrap();
                own_slots.claim(ticket.url()).for_each(|claimed| sender.send(claimed).unwrap());
                drop(ticket.into_writer());
            }
        }));
        Harness {
            address,
            name,
            frontend: Some(frontend),
            slots,
            gate,
            budget,
            claims,
            tiny: Some(tiny),
            threads,
            directory,
        }
    }

    pub fn connect(&self) -> Client<TcpStream> {
        connect(self.address.expect("a TCP listener"))
    }

    pub fn barrier(&self) {
        barrier(self.address.expect("a TCP listener"));
    }

    /// Waits as [`Harness::barrier`] does, over a connection of another address.
    pub fn barrier_from(&self, host: u8) {
        barrier_of(connect_from(host, self.address.expect("a TCP listener")).unwrap());
    }

    pub fn release(&self) {
        *self.gate.open.lock().unwrap() = true;
        self.gate.changed.notify_all();
    }

    pub fn stop(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        self.release();
        if let Some(frontend) = self.frontend.take() {
            drop(frontend);
        }
        if let Some(tiny) = self.tiny.take() {
            tiny.unblock();
            self.threads.drain(..).for_each(|thread| thread.join().unwrap());
            assert_eq!(self.budget.held_bytes(), 0, "all memory is given back");
            drop(tiny);
            std::fs::remove_dir_all(&self.directory).unwrap();
        }
    }
}

/// Waits until the frontend has processed all bytes that were sent before. Sends a request that the frontend answers
/// without a worker: events are reported in the order in which they came. Needs a connection meanwhile.
pub fn barrier(address: SocketAddr) {
    barrier_of(connect(address));
}

fn barrier_of(mut client: Client<TcpStream>) {
    // Accepts 503, which is the answer if all connections are taken.
    assert!([400, 503].contains(&client.send("malformed\r\n\r\n").answer().status));
    assert!(client.ends());
}

/// A client with an address of its own: all of 127.0.0.0/8 is the loopback.
pub fn connect_from(host: u8, address: SocketAddr) -> io::Result<Client<TcpStream>> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from(([127, 0, 0, host], 0)).into())?;
    // Makes the buffers small: the kernels of both sides then hold about 100 kB of an unread answer.
    socket.set_recv_buffer_size(4096)?;
    socket.set_tcp_mss(536)?;
    socket.connect(&address.into())?;
    Ok(client(socket.into()))
}

fn connect(address: SocketAddr) -> Client<TcpStream> {
    client(until(|| TcpStream::connect(address).ok()))
}

fn client(stream: TcpStream) -> Client<TcpStream> {
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    Client::new(stream)
}

/// Raises the limit of descriptors, which usually is 1024: this process has both ends of every connection.
pub fn raise_the_limit_of_descriptors() {
    const ENOUGH: u64 = 8192;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if soft < ENOUGH.min(hard) {
        setrlimit(Resource::RLIMIT_NOFILE, ENOUGH.min(hard), hard).unwrap();
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.finish();
        }
    }
}

fn at_once(request: &Request, _: &RequestId) -> Option<Response> {
    (request.path() == "/immediate").then(|| Response::json(200, &json!({"at": "once"})))
}

fn serve(claimed: ClaimedRequest, slots: &Slots, gate: &Gate) {
    gate.seen.fetch_add(1, Ordering::SeqCst);
    let ClaimedRequest { handle, request, memory, .. } = claimed;
    if !slots.mark_executing(handle) {
        gate.late.fetch_add(1, Ordering::SeqCst);
        return;
    }
    let target = request.target.as_str();
    let response = if target == "/hold" {
        gate.held.fetch_add(1, Ordering::SeqCst);
        let mut open = gate.open.lock().unwrap();
        while !*open {
            open = gate.changed.wait(open).unwrap();
        }
        Response::json(200, &json!({"held": true}))
    } else if let Some(length) = target.strip_prefix("/big/") {
        Response { body: vec![b'x'; length.parse().unwrap()], ..Response::json(200, &()) }
    } else if target == "/peer" {
        Response::json(200, &json!({"peer": request.peer}))
    } else if target == "/empty" {
        Response::no_content()
    } else if target == "/canned" {
        Response::json(200, &json!({"id": "42", "name": "Ada Lovelace", "email": "ada@example.com"}))
    } else {
        let (method, body) = (&request.method_name, String::from_utf8_lossy(&request.body));
        let fields: Vec<(&str, &str)> = request.header_fields().collect();
        Response::json(200, &json!({"method": method, "target": target, "fields": fields, "body": body}))
    };
    match slots.send(handle, response, None, memory) {
        Some(_) => gate.answered.fetch_add(1, Ordering::SeqCst),
        None => gate.late.fetch_add(1, Ordering::SeqCst),
    };
}

/// A connection over which a test sends raw bytes.
pub struct Client<S> {
    pub stream: S,
    pending: Vec<u8>,
}

/// An answer whose invariants were checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut fields = self.headers.iter();
        let found = fields.find(|(field, _)| field.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    pub fn closes(&self) -> bool {
        self.header("connection") == Some("close")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

impl<S: Read + Write> Client<S> {
    pub fn new(stream: S) -> Client<S> {
        Client { stream, pending: Vec::new() }
    }

    /// Sends bytes. Ignores an error, as the server may have closed the connection by then.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        let _ = self.stream.write_all(bytes.as_ref());
        self
    }

    /// Reads the next answer; an interim answer (100) counts as one.
    pub fn answer(&mut self) -> Answer {
        self.try_answer(false).expect("an answer, not the end")
    }

    pub fn head_answer(&mut self) -> Answer {
        self.try_answer(true).expect("an answer, not the end")
    }

    /// Reads the next answer; `None` if the connection ends before its first byte.
    pub fn try_answer(&mut self, head_only: bool) -> Option<Answer> {
        let end = loop {
            if let Some(at) = self.pending.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.more() {
                assert_eq!(String::from_utf8_lossy(&self.pending), "", "cut short");
                return None;
            }
        };
        let head = String::from_utf8(self.pending.drain(..end).collect()).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap();
        assert!(status.starts_with("HTTP/1.1 "), "{status}");
        let status: u16 = status[9..12].parse().unwrap();
        let headers: Vec<(String, String)> = lines
            .map(|line| line.split_once(": ").expect("a field"))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let mut answer = Answer { status, headers, body: Vec::new() };
        if status == 100 {
            return Some(answer);
        }
        assert!(answer.header("date").is_some(), "{head}");
        let length = match answer.header("content-length") {
            Some(length) => length.parse().unwrap(),
            None => 0,
        };
        if status == 204 {
            assert_eq!(answer.header("content-length"), None);
        } else {
            assert_eq!(answer.header("content-type"), Some("application/json"));
            assert!(answer.header("content-length").is_some(), "{head}");
        }
        if !head_only {
            while self.pending.len() < length {
                assert!(self.more(), "the body was cut short");
            }
            answer.body = self.pending.drain(..length).collect();
        }
        if status >= 400 && !head_only {
            assert!(answer.json()["error"].is_string(), "{answer:?}");
        }
        Some(answer)
    }

    /// Returns true if the connection has ended, with or without a reset, and without another byte.
    pub fn ends(&mut self) -> bool {
        self.pending.is_empty() && !self.more()
    }

    fn more(&mut self) -> bool {
        let mut bytes = [0; 16 * 1024];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return false,
                Ok(count) => {
                    self.pending.extend_from_slice(&bytes[..count]);
                    return true;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    panic!("nothing came within {TIMEOUT:?}");
                }
                Err(_) => return false,
            }
        }
    }
}

impl Client<TcpStream> {
    pub fn finish(&mut self) -> &mut Self {
        self.stream.shutdown(Shutdown::Write).unwrap();
        self
    }
}

/// Tries again until there is a value, for [`TIMEOUT`] at most.
pub fn until<T>(mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(Instant::now() < deadline, "nothing came of it");
        pause(Duration::from_millis(2));
    }
}

pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the names of the threads of this process.
pub fn threads() -> Vec<String> {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect()
}

/// Lets time pass, to reach another moment of the server's work.
pub fn pause(time: Duration) {
    thread::sleep(time);
}

/// The most threads of tiny_http that may be left by 200 starts. A thread of tiny_http may miss the end of a server
/// that lives for a moment only, because the wake-up is sent without the lock that it waits with. A thread of this
/// crate that is left would be left 200 times.
pub const MISSED: usize = 2;

/// Returns true if this machine has IPv6.
pub fn has_ipv6() -> bool {
    std::net::TcpListener::bind("[::1]:0").is_ok()
}

/// Returns a port without a listener, outside of the range from which the system assigns ports.
pub fn free_port() -> u16 {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    // Begins at a port of its own, as other processes may run these tests.
    let start = std::process::id() as usize * 64;
    loop {
        let next = start + COUNT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + u16::try_from(next % 20_000).expect("a remainder");
        // Binds the port without listening: a process that another test is starting has a copy of the socket for a
        // moment.
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_reuse_address(true).expect("an option of every socket");
        if socket.bind(&SocketAddr::from(([127, 0, 0, 1], port)).into()).is_ok() {
            return port;
        }
    }
}

/// Returns the resident memory of a process, in bytes.
pub fn memory_kib(process: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1)).expect("a number of KiB");
    number.parse().expect("a number of KiB")
}
