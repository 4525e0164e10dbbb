//! Clients that go on whatever breaks, and the books they keep: what was acknowledged, what may have happened.

use super::{Client, LONG, eventually, pause};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

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

impl Books {
    /// Panics if a user is not stored as one of its possible states. Returns how many states were acknowledged, and how
    /// many are open, as a change of the user has had no answer or a failure for one. `stored`: names by address.
    pub fn check(&self, stored: &HashMap<String, String>) -> String {
        let (mut acknowledged, mut open) = (0, 0);
        for (email, possible) in &self.possible {
            let found = stored.get(email);
            let is_possible = possible.iter().any(|name| name.as_ref() == found);
            assert!(is_possible, "{email}: {found:?}, not one of {possible:?}");
            *(if possible.len() == 1 { &mut acknowledged } else { &mut open }) += 1;
        }
        assert!(acknowledged > 0, "the load was no load");
        format!("{acknowledged} acknowledged, {open} open")
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
    /// Base URL of the service.
    url: Arc<Mutex<String>>,
    stop: Arc<AtomicBool>,
    /// When each client had its last success.
    successes: Vec<Arc<Mutex<Option<Instant>>>>,
    created: Arc<AtomicUsize>,
    clients: Vec<JoinHandle<Notes>>,
}

impl Load {
    /// `count` clients of the service. Addresses have the `name` in them.
    pub fn start(name: &str, count: usize, url: &str) -> Load {
        let url = Arc::new(Mutex::new(url.to_owned()));
        let stop = Arc::new(AtomicBool::new(false));
        let successes: Vec<Arc<Mutex<_>>> = (0..count).map(|_| Arc::default()).collect();
        let created = Arc::new(AtomicUsize::new(0));
        let client = |(n, success): (usize, &Arc<_>)| {
            let (name, success, created) = (format!("{name}-{n}"), Arc::clone(success), created.clone());
            let (stop, url) = (stop.clone(), url.clone());
            let client = Worker { name, url, success, created, ..Worker::default() };
            thread::spawn(move || client.work(&stop))
        };
        let clients = successes.iter().enumerate().map(client).collect();
        Load { url, stop, successes, created, clients }
    }

    /// Sends the next requests to this URL.
    pub fn moves_to(&self, url: &str) {
        url.clone_into(&mut self.url.lock().unwrap());
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
struct Worker {
    name: String,
    url: Arc<Mutex<String>>,
    success: Arc<Mutex<Option<Instant>>>,
    created: Arc<AtomicUsize>,
    client: Client,
    events: Vec<Event>,
    possible: HashMap<String, Possible>,
    /// Id and address of users in no doubt.
    sure: Vec<(String, String)>,
}

impl Worker {
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
        if let Some((201, user)) = self.call("POST", "/users", &body, 201) {
            self.possible.insert(email.clone(), vec![Some(name)]);
            self.created.fetch_add(1, Ordering::SeqCst);
            self.sure.push((user["id"].as_str().expect("an id").to_owned(), email));
        }
    }

    fn update(&mut self, turn: u32) {
        let name = format!("changed in {turn}");
        let body = json!({ "name": name }).to_string();
        if let Some(user) = self.change("PUT", &body, Some(name), 200) {
            self.sure.insert(0, user);
        }
    }

    fn delete(&mut self) {
        self.change("DELETE", "", None, 204);
    }

    /// Changes a user, who has this name then. Returns the user if that is acknowledged.
    fn change(
        &mut self,
        method: &str,
        body: &str,
        then: Option<String>,
        success: u16,
    ) -> Option<(String, String)> {
        let (id, email) = self.sure.pop()?;
        let before = self.possible[&email][0].clone();
        self.possible.insert(email.clone(), vec![before, then.clone()]);
        self.call(method, &format!("/users/{id}"), body, success)?;
        self.possible.insert(email.clone(), vec![then]);
        Some((id, email))
    }

    fn read(&mut self) {
        let Some((id, email)) = self.sure.last().cloned() else {
            return;
        };
        if let Some((_, user)) = self.call("GET", &format!("/users/{id}"), "", 200) {
            assert_eq!(user["name"].as_str().map(str::to_owned), self.possible[&email][0], "{email}");
        }
    }

    /// Returns true if the service accepts a connection. If it does not, no request can have changed a user.
    fn connects(&mut self) -> bool {
        let sent = Instant::now();
        let url = self.url.lock().unwrap().clone();
        if self.client.base_url != url {
            self.client = Client::new(&url);
        }
        let connected = self.client.connect().is_ok();
        if !connected {
            self.events.push(Event { sent, took: sent.elapsed(), status: None });
            pause(AFTER_FAILURE);
        }
        connected
    }

    /// The answer, if it is a success. Whatever is no success has to be a failure of the database's or none at all.
    fn call(&mut self, method: &str, target: &str, body: &str, success: u16) -> Option<(u16, Value)> {
        let sent = Instant::now();
        let answer = self.client.call(method, target, body).ok();
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
                assert_eq!(success, status, "{name}: {method} {target} {body}: {answer:?}");
                return Some(answer);
            }
        };
        assert!(failure, "{method} {target} {body}: {answer:?}");
        pause(AFTER_FAILURE);
        None
    }
}
