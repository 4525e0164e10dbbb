//! Tests of the workers, between a frontend and a database: which of them receive, which one wakes for what is due,
//! and what a stop or a panic leaves behind.

use super::*;
use crate::config::{Config, Limits};
use crate::frontend::{Frontend, Listener, SharedResources};
use crate::{http::Request, server::ticket_stream, testing::ScratchDatabase};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(20);
const SESSIONS: usize = 3;

struct Service {
    address: SocketAddr,
    workers: Workers,
    // The fields are dropped in this order: the answers to clients come first.
    _frontend: Frontend,
    database: ScratchDatabase,
}

impl Service {
    fn start(intercept: Option<InterceptHook>) -> Service {
        let database = ScratchDatabase::create().expect("PostgreSQL is installed");
        let config = Config { db_pool_size: SESSIONS as u32, ..database.config() };
        let app = Arc::new(App::open(&config).unwrap());
        let (http, private) = ticket_stream::start_tiny_http().unwrap();
        let listener = Listener::bind("127.0.0.1", 0).unwrap();
        listener.listen().unwrap();
        let address = listener.local_addr().unwrap();
        let resources = SharedResources {
            budget: app.operations.budget.clone(),
            answer_without_worker: Box::new(|_, _| None),
            metrics: app.metrics.clone(),
        };
        let (frontend, slots) =
            Frontend::start(listener, Limits::default(), resources, private, || {}).unwrap();
        let capacity = Capacity { sessions: SESSIONS, hashers: 1, cores: 2, max_retry_time: TIMEOUT };
        let workers = Workers::start(http, slots, app, capacity, intercept).unwrap();
        Service { address, workers, _frontend: frontend, database }
    }

    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n{body}");
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    /// Waits until the state meets this condition.
    fn until(&self, what: &str, holds: impl Fn(&DispatchState) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !holds(&self.workers.dispatcher.state.lock()) {
            assert!(Instant::now() < deadline, "{what}");
            thread::sleep(STOP_POLL_PAUSE);
        }
    }

    /// Waits until all workers wait for requests without a timer.
    fn is_at_rest(&self, what: &str) {
        self.until(what, |DispatchState { lanes, receiving_workers, next_worker_timeout, .. }| {
            *receiving_workers == MAX_RECEIVING_WORKERS && next_worker_timeout.is_none() && lanes.is_idle()
        });
    }
}

fn status(mut stream: TcpStream) -> u16 {
    let mut start = [0; 12];
    stream.read_exact(&mut start).unwrap();
    str::from_utf8(&start[9..]).unwrap().parse().unwrap()
}

#[test]
fn two_workers_receive_when_work_is_done() {
    let service = Service::start(None);
    service.is_at_rest("at the start");
    for round in 0..3 {
        let clients: Vec<_> =
            (0..100).map(|n| service.send("GET", ["/users/7", "/users", "/other"][n % 3], "")).collect();
        let statuses: Vec<u16> = clients.into_iter().map(status).collect();
        assert_eq!(statuses, ([404, 200, 404].into_iter().cycle().take(100).collect::<Vec<_>>()), "{round}");
        service.is_at_rest("after a burst");
    }
}

/// Checks that a due retry wakes a worker that waits, and that workers go on to receive.
#[test]
fn what_is_due_belongs_to_a_worker_that_waits() {
    let service = Service::start(None);
    assert_eq!(status(service.send("POST", "/users", r#"{"name":"a","email":"a@b.co"}"#)), 201);
    let mut other = postgres::Client::connect(service.database.url(), postgres::NoTls).unwrap();
    let mut transaction = other.transaction().unwrap();
    transaction.batch_execute("select from users where id = 1 for update").unwrap();
    let changes: Vec<_> =
        (0..10).map(|n| service.send("PUT", "/users/1", &format!(r#"{{"name":"{n}"}}"#))).collect();
    for _ in 0..5 {
        service.until("one wakes for the retry", |state| state.next_worker_timeout.is_some());
        assert_eq!(status(service.send("GET", "/users/1", "")), 200);
        service.until("both receive", |state| state.receiving_workers == MAX_RECEIVING_WORKERS);
    }
    transaction.commit().unwrap();
    assert!(changes.into_iter().all(|change| status(change) == 200));
    service.is_at_rest("after the retries");
}

#[test]
fn a_panic_loses_one_request_and_no_worker() {
    let service = Service::start(Some(Arc::new(|request: &Request| {
        assert!(request.path() != "/users/7", "as it was told");
        None
    })));
    // Panics more often than there are workers, also beside valid requests in one ticket.
    for _ in 0..10 {
        let clients: Vec<_> = (7..11).map(|n| service.send("GET", &format!("/users/{n}"), "")).collect();
        assert_eq!(clients.into_iter().map(status).collect::<Vec<_>>(), [500, 404, 404, 404]);
    }
    service.is_at_rest("after panics");
}

#[test]
fn a_stop_answers_what_is_queued_and_leaves_no_thread() {
    let mut service = Service::start(None);
    let clients: Vec<_> = (0..50).map(|_| service.send("GET", "/users/7", "")).collect();
    assert!(clients.into_iter().all(|client| status(client) == 404));
    service.workers.stop(TIMEOUT);
    assert!(service.workers.threads.is_empty());
    assert_eq!(Arc::strong_count(&service.workers.dispatcher), 1, "all threads have ended");
}
