//! The fixed pool: takes requests from tiny_http, has them answered, writes one log line each.
//!
//! The highest room that knows tiny_http's types; everything it calls sees [`Request`] and [`Response`].
//! One worker at a time waits for requests; when it has some it goes to work on a run of those that can be
//! answered together, and the next idle worker waits in its place, unless reads are in work: whoever
//! ends those fetches what has come meanwhile. Nothing ever waits for company: a run is
//! what has come while others were in work. Requests that hash a password have threads of their own, so that
//! dear work never stalls cheap reads.

use crate::{
    app::{App, handlers::Kind},
    error::Error,
    frontend::{Responder, Slot},
    http::{Request, Response},
};
use std::{
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// While a run of reads is in work, new requests are fetched when it ends, so that they make one run instead of
/// many: two cores answered more reads in one run at a time than in two, with a tenth of the p99. After this
/// long, which a database further away may take, they are fetched all the same, and start a run of their own;
/// creates that have waited for so long, too.
const PATIENCE: Duration = Duration::from_millis(1);

/// How long what waits behind others of its kind goes unnoticed where nothing new comes. Longer than a commit takes:
/// two small runs of creates at once are slower than one after the other.
const UNNOTICED: Duration = Duration::from_millis(20);

/// Of a worker, in bytes. Only what is used becomes memory: 48 KiB at most under load of every kind.
const STACK: usize = 512 << 10;

/// Requests that wait before the first look at whether somebody still waits for them.
const FEW: usize = 64;

/// The threads that answer requests.
pub struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    ended: mpsc::Receiver<()>,
}

struct Shared {
    server: tiny_http::Server,
    responder: Responder,
    app: Arc<App>,
    queues: Mutex<Queues>,
    changed: Condvar,
    /// The same for the threads that hash.
    hash: Condvar,
}

/// A request in work.
struct Job {
    request: Request,
    slot: Slot,
    received: Instant,
}

impl Workers {
    /// Starts `count` workers, and beside them those that hash. Errors: the system has no more threads.
    pub fn start(
        server: tiny_http::Server,
        responder: Responder,
        app: Arc<App>,
        count: usize,
    ) -> io::Result<Workers> {
        // What is done one by one may have to wait for a lock that somebody holds in the database. All of it
        // together takes fewer threads than there are workers, and so fewer connections than a pool as large has.
        let (alone, hashing) = ((count / 2).max(1), (count / 2).saturating_sub(1).max(1));
        let queues = Mutex::new(Queues { alone, ..Queues::default() });
        let (changed, hash) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { server, responder, app, queues, changed, hash });
        let (end, ended) = mpsc::channel();
        let threads = Vec::new();
        let mut workers = Workers { shared, threads, ended };
        for n in 0..hashing {
            workers.spawn(&format!("hasher-{n}"), &end, |shared| shared.hash())?;
        }
        for n in 0..count {
            workers.spawn(&format!("worker-{n}"), &end, |shared| shared.work())?;
        }
        Ok(workers)
    }

    /// Ends the threads once they have answered what was queued, and waits for them up to `timeout`. Those
    /// that are stuck for longer are left behind.
    pub fn stop(self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        self.shared.queues().stopping = true;
        self.shared.changed.notify_all();
        self.shared.hash.notify_all();
        self.shared.server.unblock();
        for _ in &self.threads {
            let left = deadline.saturating_duration_since(Instant::now());
            if self.ended.recv_timeout(left).is_err() {
                log::warn!("left a worker behind that did not finish in time");
                return;
            }
        }
        for thread in self.threads {
            // It has said that it ended; a panic in it was logged where it was caught.
            let _ = thread.join();
        }
    }

    fn spawn(
        &mut self,
        name: &str,
        end: &mpsc::Sender<()>,
        body: impl FnOnce(&Shared) + Send + 'static,
    ) -> io::Result<()> {
        let (shared, end) = (self.shared.clone(), end.clone());
        let thread = thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn(move || {
            body(&shared);
            drop(shared);
            let _ = end.send(());
        })?;
        self.threads.push(thread);
        Ok(())
    }
}

/// What waits for a worker, by kind.
#[derive(Default)]
struct Queues {
    waiting: [VecDeque<Job>; Kind::ALL.len()],
    /// How many wait before those are dropped that nobody waits for.
    most: [usize; Kind::ALL.len()],
    runs: [usize; Kind::ALL.len()],
    /// How many of those that are done one by one may be in work.
    alone: usize,
    /// Whether a worker waits for requests.
    fetching: bool,
    /// Whether one looks for them every [`PATIENCE`], because reads in work end with fetching them.
    standing_by: bool,
    stopping: bool,
}

impl Queues {
    /// How many runs of a kind the workers have in work at once, how many when requests have waited for
    /// [`PATIENCE`], and how many requests are in one.
    fn bounds(&self, kind: Kind) -> (usize, usize, usize) {
        match kind {
            Kind::Find => (1, 4, 64),
            Kind::List => (2, 4, 16),
            Kind::Create => (1, 4, 64),
            Kind::Alone => (self.alone, self.alone, 1),
            // Others do that.
            Kind::Hash => (0, 0, 1),
        }
    }

    /// The kind whose oldest request has waited longest, of those that may have one more run.
    fn next(&self) -> Option<Kind> {
        let oldest = |kind: Kind| {
            let received = self.waiting[kind as usize].front()?.received;
            let (runs, patient_runs, _) = self.bounds(kind);
            let running = self.runs[kind as usize];
            let open = running < runs || (running < patient_runs && received.elapsed() >= PATIENCE);
            open.then_some((received, kind))
        };
        let candidates = Kind::ALL.into_iter().filter_map(oldest);
        candidates.min_by_key(|(received, _)| *received).map(|(_, kind)| kind)
    }

    /// How long until something is to be looked at that may have one run more although others of its kind are in work.
    fn patience(&self) -> Option<Duration> {
        let left = |kind: Kind| {
            let received = self.waiting[kind as usize].front()?.received;
            let may = self.runs[kind as usize] < self.bounds(kind).1;
            may.then(|| UNNOTICED.saturating_sub(received.elapsed()))
        };
        Kind::ALL.into_iter().filter_map(left).min()
    }

    fn take(&mut self) -> Option<(Kind, Vec<Job>)> {
        let kind = self.next()?;
        self.runs[kind as usize] += 1;
        let most = self.bounds(kind).2;
        let waiting = &mut self.waiting[kind as usize];
        let run = waiting.drain(..most.min(waiting.len())).collect();
        Some((kind, run))
    }

    /// One request more. Whenever so many wait that they have doubled, those are dropped that nobody waits for any
    /// more: clients who give up and come back, again and again, would let the queue grow without end.
    fn add(&mut self, kind: Kind, job: Job, responder: &Responder) {
        let (waiting, most) = (&mut self.waiting[kind as usize], &mut self.most[kind as usize]);
        waiting.push_back(job);
        if waiting.len() > *most {
            waiting.retain(|job| !responder.abandoned(job.slot));
            *most = FEW.max(2 * waiting.len());
        }
    }

    /// Whether an idle worker has something to do: a run, or waiting for requests.
    fn wants_another(&self) -> bool {
        let somebody_looks = self.fetching || (self.standing_by && self.reads());
        !somebody_looks || self.next().is_some()
    }

    /// Whether a run of reads is in work, whose end brings a worker that fetches.
    fn reads(&self) -> bool {
        self.runs[Kind::Find as usize] + self.runs[Kind::List as usize] > 0
    }
}

impl Shared {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut queues = self.queues();
        let mut found = false;
        loop {
            if let Some((kind, run)) = queues.take() {
                if queues.wants_another() {
                    self.changed.notify_one();
                }
                drop(queues);
                let apart = self.serve(kind, run);
                queues = self.queues();
                queues.runs[kind as usize] -= 1;
                for job in apart {
                    queues.add(Kind::Alone, job, &self.responder);
                }
            } else if queues.stopping {
                // Who stood by may have taken the sign that was meant for who waits.
                self.server.unblock();
                return;
            } else if queues.fetching || (queues.standing_by && queues.reads()) {
                // Who fetches began before this was found, and may not look at it in time.
                let time = if found { UNNOTICED } else { Duration::MAX };
                found = false;
                let waited = self.changed.wait_timeout(queues, time);
                queues = waited.unwrap_or_else(PoisonError::into_inner).0;
            } else if queues.reads() {
                queues.standing_by = true;
                let waited = self.changed.wait_timeout(queues, PATIENCE);
                queues = waited.unwrap_or_else(PoisonError::into_inner).0;
                queues.standing_by = false;
                // Without waiting for more, and without the lock: a reader that ends fetches too.
                drop(queues);
                let fetched = self.fetch(self.server.try_recv().ok().flatten());
                found = !fetched.is_empty();
                queues = self.add(fetched);
            } else {
                queues.fetching = true;
                let patience = queues.patience();
                drop(queues);
                let fetched = self.fetch(match patience {
                    None => self.server.recv().ok(),
                    Some(time) => self.server.recv_timeout(time).ok().flatten(),
                });
                queues = self.add(fetched);
                queues.fetching = false;
            }
        }
    }

    /// The first request, if there is one, and all that are there behind it.
    fn fetch(&self, first: Option<tiny_http::Request>) -> Vec<(Kind, Job)> {
        let mut fetched = Vec::new();
        let mut next = first;
        let received = Instant::now();
        while let Some(incoming) = next {
            if let Some((slot, request)) = self.accept(incoming) {
                let job = Job { request, slot, received };
                fetched.push((self.app.kind(&job.request), job));
            }
            next = self.server.try_recv().ok().flatten();
        }
        fetched
    }

    fn add(&self, fetched: Vec<(Kind, Job)>) -> MutexGuard<'_, Queues> {
        let mut queues = self.queues();
        for (kind, job) in fetched {
            queues.add(kind, job, &self.responder);
            if kind == Kind::Hash {
                self.hash.notify_one();
            }
        }
        queues
    }

    /// The request and where its answer goes; `None` where nobody waits for one any more.
    fn accept(&self, mut incoming: tiny_http::Request) -> Option<(Slot, Request)> {
        let (target, slot) = incoming.url().rsplit_once('#').unwrap_or_default();
        let slot = self.responder.claim(slot);
        let headers = incoming.headers().iter();
        let mut request = Request {
            method: incoming.method().as_str().into(),
            target: target.to_owned(),
            headers: headers.map(|header| (header.field.to_string(), header.value.to_string())).collect(),
            body: Vec::new(),
        };
        // The door sends whole requests over a stream of our own, so nothing is waited for; and what is not
        // read here, tiny_http would drain.
        let body = incoming.as_reader().read_to_end(&mut request.body);
        // Dropped unused: the answer goes to the slot.
        drop(incoming.into_writer());
        slot.filter(|_| body.is_ok()).map(|slot| (slot, request))
    }

    fn hash(&self) {
        let mut queues = self.queues();
        loop {
            if let Some(job) = queues.waiting[Kind::Hash as usize].pop_front() {
                drop(queues);
                self.serve(Kind::Hash, vec![job]);
                queues = self.queues();
            } else if queues.stopping {
                return;
            } else {
                queues = self.hash.wait(queues).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Answers a run; returns those of it that are to be handled alone.
    fn serve(&self, kind: Kind, mut run: Vec<Job>) -> Vec<Job> {
        // Whoever was told 503 meanwhile has given it up, or asks anew: what is late is not done any more.
        // Reads by id are not worth the look.
        if kind != Kind::Find {
            run.retain(|job| !self.responder.abandoned(job.slot));
        }
        let mut apart = Vec::new();
        if run.is_empty() {
            return apart;
        }
        let requests: Vec<&Request> = run.iter().map(|job| &job.request).collect();
        let handled = catch_unwind(AssertUnwindSafe(|| self.app.handle_run(kind, &requests)));
        let responses = handled.unwrap_or_else(|panic| {
            let error = Error::Internal(format!("panic: {}", panic_text(&*panic)));
            error.log();
            vec![Some(Response::from(&error)); run.len()]
        });
        for (job, response) in run.into_iter().zip(responses) {
            let Some(response) = response else {
                apart.push(job);
                continue;
            };
            let sent = self.responder.answer(job.slot, &response);
            let (method, path, status) = (job.request.method, job.request.path(), response.status);
            let milliseconds = job.received.elapsed().as_secs_f64() * 1000.0;
            match sent {
                Some(bytes) => log::info!("{method} {path} {status} {milliseconds:.1}ms {bytes}B"),
                None => log::info!("{method} {path} {status} {milliseconds:.1}ms not awaited"),
            }
        }
        apart
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("of an unknown kind")
}
