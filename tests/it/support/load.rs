//! Clients that go on whatever breaks, and the books they keep: what was acknowledged, what may have happened.

use super::{LONG, assert_no_secret, eventually, pause};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// A client that takes a broken connection for an answer.
pub struct Caller {
    address: SocketAddr,
    stream: Option<BufReader<TcpStream>>,
    timeout: Duration,
}

impl Caller {
    /// Makes a client of the service at `http://host:port` that waits at most `timeout` for an answer.
    pub fn new(base_url: &str, timeout: Duration) -> Caller {
        let address = base_url.strip_prefix("http://").and_then(|address| address.parse().ok());
        Caller { address: address.expect("a base URL"), stream: None, timeout }
    }

    /// Returns status and body. After an error, the request may have been executed or not.
    pub fn call(&mut self, method: &str, target: &str, body: &str) -> io::Result<(u16, Value)> {
        self.call_with(method, target, &[], body)
    }

    /// Sends a request with header fields and returns the answer.
    pub fn call_with(
        &mut self,
        method: &str,
        target: &str,
        fields: &[(&str, &str)],
        body: &str,
    ) -> io::Result<(u16, Value)> {
        let answer = self.exchange(method, target, fields, body);
        if answer.is_err() {
            self.stream = None;
        }
        answer
    }

    /// A connection, the last one if it was left open. An error means that nothing was sent.
    fn connect(&mut self) -> io::Result<&mut BufReader<TcpStream>> {
        if self.stream.is_none() {
            let stream = TcpStream::connect_timeout(&self.address, self.timeout)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(self.timeout))?;
            self.stream = Some(BufReader::new(stream));
        }
        Ok(self.stream.as_mut().expect("connected above"))
    }

    fn exchange(
        &mut self,
        method: &str,
        target: &str,
        fields: &[(&str, &str)],
        body: &str,
    ) -> io::Result<(u16, Value)> {
        let stream = self.connect()?;
        let fields: String = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.len();
        write!(
            stream.get_mut(),
            "{method} {target} HTTP/1.1\r\nHost: test\r\n{fields}Content-Length: {length}\r\n\r\n{body}"
        )?;
        let (mut head, mut length, mut closes, mut says_when) = (Vec::new(), 0, false, false);
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                if line == "\r\n" {
                    break;
                }
                head.push(line);
                continue;
            };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.parse().map_err(io::Error::other)?,
                "connection" => closes = value == "close",
                "retry-after" => says_when = true,
                _ => {}
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        if closes {
            self.stream = None;
        }
        let text = String::from_utf8(body).map_err(io::Error::other)?;
        assert_no_secret(&text);
        let status = head.first().and_then(|line| line.get(9..12)?.parse().ok());
        let status = status.unwrap_or_else(|| panic!("a status line: {head:?}"));
        assert!(status != 503 || says_when, "503 without Retry-After: {text}");
        if matches!(status, 502..=504) && text.starts_with("<html>") {
            return Err(io::Error::other("a proxy has no answer of the service's"));
        }
        let body = match text.as_str() {
            "" => Value::Null,
            text => serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}")),
        };
        Ok((status, body))
    }
}

/// Between a failure and the next try: short of what the tests tell apart.
const AFTER_FAILURE: Duration = Duration::from_millis(10);

/// Names that may be stored under an address; `None` if there may be no user.
type Possible = Vec<Option<String>>;

/// Events that one client has seen, and the possible states by address.
type Notes = (Vec<Event>, HashMap<String, Possible>);

/// One request of a client: when it was sent, how long it took, and its status.
#[derive(Debug, Clone, Copy)]
pub struct Event {
    pub sent: Instant,
    pub took: Duration,
    /// `None`: no answer.
    pub status: Option<u16>,
}

impl Event {
    pub fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status < 300)
    }
}

/// Events that the clients have seen, by client, and the possible states by address.
#[derive(Default)]
pub struct Books {
    pub events: Vec<Vec<Event>>,
    pub possible: HashMap<String, Possible>,
}

/// How the database compares with the books.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Audit {
    pub acknowledged: usize,
    /// Writes without an answer, or with a failure for one.
    pub open: usize,
    pub lost: Vec<String>,
    pub unexpected: Vec<String>,
}

impl Audit {
    pub fn add(&mut self, other: Audit) {
        self.acknowledged += other.acknowledged;
        self.open += other.open;
        self.lost.extend(other.lost);
        self.unexpected.extend(other.unexpected);
    }
}

impl Books {
    /// `stored`: names by address.
    pub fn audit(&self, stored: &HashMap<String, String>) -> Audit {
        let mut audit = Audit::default();
        for (email, possible) in &self.possible {
            let found = stored.get(email);
            match possible.len() {
                1 => audit.acknowledged += 1,
                _ => audit.open += 1,
            }
            if !possible.iter().any(|name| name.as_ref() == found) {
                let line = format!("{email}: {found:?}, not one of {possible:?}");
                match found {
                    None => audit.lost.push(line),
                    Some(_) => audit.unexpected.push(line),
                }
            }
        }
        let unknown = stored.keys().filter(|email| !self.possible.contains_key(*email));
        audit.unexpected.extend(unknown.cloned());
        audit
    }

    /// From `end` on, how long the unluckiest client waited for a first success.
    pub fn longest_outage(&self, end: Instant) -> Duration {
        let first = |events: &Vec<Event>| {
            let mut after = events.iter().filter(|event| event.succeeded() && event.sent + event.took > end);
            let first = after.next().unwrap_or_else(|| panic!("a client had no success any more"));
            (first.sent + first.took).saturating_duration_since(end)
        };
        self.events.iter().map(first).max().unwrap_or_default()
    }
}

/// Clients at work, until told to stop.
pub struct Load {
    stop: Arc<AtomicBool>,
    /// When each client had its last success.
    successes: Vec<Arc<Mutex<Option<Instant>>>>,
    created: Arc<AtomicUsize>,
    clients: Vec<JoinHandle<Notes>>,
}

impl Load {
    /// `count` clients of the service whose base URL is in `url`, which may change. Addresses have the `name` in them.
    pub fn start(name: &str, count: usize, url: &Arc<Mutex<String>>, timeout: Duration) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let successes: Vec<Arc<Mutex<_>>> = (0..count).map(|_| Arc::default()).collect();
        let created = Arc::new(AtomicUsize::new(0));
        let client = |(n, success): (usize, &Arc<_>)| {
            let (name, success, created) = (format!("{name}-{n}"), Arc::clone(success), created.clone());
            let (stop, url) = (stop.clone(), url.clone());
            let client = Client { name, url, timeout, success, created, ..Client::default() };
            thread::spawn(move || client.work(&stop))
        };
        let clients = successes.iter().enumerate().map(client).collect();
        Load { stop, successes, created, clients }
    }

    /// Waits until as many more users were created: enough for a fault to meet a load, on any machine.
    pub fn creates(&self, count: usize) {
        let before = self.created.load(Ordering::SeqCst);
        eventually(LONG, "users are created", || self.created.load(Ordering::SeqCst) >= before + count);
    }

    /// Waits until every client has had a success after this moment.
    pub fn all_succeed_after(&self, moment: Instant) {
        let succeeded = |success: &Arc<Mutex<Option<Instant>>>| *success.lock().unwrap() > Some(moment);
        eventually(LONG, "every client succeeds", || self.successes.iter().all(succeeded));
    }

    pub fn stop(self) -> Books {
        self.stop.store(true, Ordering::SeqCst);
        let mut books = Books::default();
        for client in self.clients {
            let (events, possible) = client.join().expect("a client keeps its books");
            books.events.push(events);
            books.possible.extend(possible);
        }
        books
    }
}

#[derive(Default)]
struct Client {
    name: String,
    url: Arc<Mutex<String>>,
    timeout: Duration,
    success: Arc<Mutex<Option<Instant>>>,
    created: Arc<AtomicUsize>,
    caller: Option<(String, Caller)>,
    events: Vec<Event>,
    possible: HashMap<String, Possible>,
    /// Id and address of users in no doubt.
    sure: Vec<(String, String)>,
}

impl Client {
    fn work(mut self, stop: &AtomicBool) -> Notes {
        let mut turn = 0;
        while !stop.load(Ordering::SeqCst) {
            if !self.connects() {
                continue;
            }
            turn += 1;
            match turn % 6 {
                0..3 => self.create(turn),
                3 => self.update(turn),
                4 => self.read(),
                _ => self.delete(),
            }
            // Enough of them to be in work when it breaks, and not so many that they are all that works.
            pause(Duration::from_millis(2));
        }
        (self.events, self.possible)
    }

    fn create(&mut self, turn: u32) {
        let (name, email) = (format!("{turn}"), format!("{}-{turn}@example.com", self.name));
        // Recorded before it is sent: its outcome is unknown until it is answered.
        self.possible.insert(email.clone(), vec![None, Some(name.clone())]);
        let body = json!({"name": name, "email": email}).to_string();
        if let Some((201, user)) = self.call("POST", "/users", &body, &[201]) {
            self.possible.insert(email.clone(), vec![Some(name)]);
            self.created.fetch_add(1, Ordering::SeqCst);
            self.sure.push((user["id"].as_str().expect("an id").to_owned(), email));
        }
    }

    fn update(&mut self, turn: u32) {
        let Some((id, email)) = self.sure.pop() else {
            return;
        };
        let before = self.possible[&email].clone();
        let after = Some(format!("changed in {turn}"));
        self.possible.insert(email.clone(), vec![before[0].clone(), after.clone()]);
        let body = json!({"name": after}).to_string();
        if self.call("PUT", &format!("/users/{id}"), &body, &[200]).is_some() {
            self.possible.insert(email.clone(), vec![after]);
            self.sure.insert(0, (id, email));
        }
    }

    fn delete(&mut self) {
        let Some((id, email)) = self.sure.pop() else {
            return;
        };
        let before = self.possible[&email].clone();
        self.possible.insert(email.clone(), vec![before[0].clone(), None]);
        if self.call("DELETE", &format!("/users/{id}"), "", &[204]).is_some() {
            self.possible.insert(email, vec![None]);
        }
    }

    fn read(&mut self) {
        let Some((id, email)) = self.sure.last().cloned() else {
            return;
        };
        if let Some((_, user)) = self.call("GET", &format!("/users/{id}"), "", &[200]) {
            assert_eq!(user["name"].as_str().map(str::to_owned), self.possible[&email][0], "{email}");
        }
    }

    /// Returns true if the service accepts a connection. If it does not, no request can have changed a user.
    fn connects(&mut self) -> bool {
        let sent = Instant::now();
        let connected = self.caller().connect().is_ok();
        if !connected {
            self.events.push(Event { sent, took: sent.elapsed(), status: None });
            pause(AFTER_FAILURE);
        }
        connected
    }

    fn caller(&mut self) -> &mut Caller {
        let url = self.url.lock().unwrap().clone();
        if self.caller.as_ref().is_none_or(|(old, _)| *old != url) {
            let caller = Caller::new(&url, self.timeout);
            self.caller = Some((url, caller));
        }
        &mut self.caller.as_mut().expect("made above").1
    }

    /// The answer, if it is a success. Whatever is no success has to be a failure of the database's or none at all.
    fn call(&mut self, method: &str, target: &str, body: &str, success: &[u16]) -> Option<(u16, Value)> {
        let sent = Instant::now();
        let answer = self.caller().call(method, target, body).ok();
        let event = Event { sent, took: sent.elapsed(), status: answer.as_ref().map(|(status, _)| *status) };
        self.events.push(event);
        if event.succeeded() {
            *self.success.lock().unwrap() = Some(event.sent + event.took);
        }
        let Some(answer) = answer else {
            pause(AFTER_FAILURE);
            return None;
        };
        let failure = match answer.0 {
            500 => answer.1 == json!({"error": "Database error"}),
            503 => answer.1 == json!({"error": "Service unavailable"}),
            status => {
                let name = &self.name;
                assert!(success.contains(&status), "{name}: {method} {target} {body}: {answer:?}");
                return Some(answer);
            }
        };
        assert!(failure, "{method} {target} {body}: {answer:?}");
        pause(AFTER_FAILURE);
        None
    }
}
