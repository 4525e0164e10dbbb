//! Whether the database can be used, as a load balancer asks. A thread probes it over a session of its own, once a
//! second for as long as somebody asks, so that neither a busy pool nor a hanging database delays the answer.
//!
//! Owns how often it probes, and how many failures mean something. A probe may take longer than its time-out (nothing
//! ends the look-up of a host's name), so [`Prober::readiness`] itself counts probes that are overdue as failures.
//! Knows no HTTP.

use super::{
    explain,
    migrate::{Applied, Schema},
    servers::Servers,
    sqlstate::{Meaning, is_missing},
    watchdog::{ConnectError, Connection},
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    io, mem,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Between two probes of a database that answers.
const PAUSE: Duration = Duration::from_secs(1);

/// Between two probes of one that does not.
const PAUSE_IN_TROUBLE: Duration = Duration::from_millis(500);

/// Failures in a row that make the service unready.
const FAILURES: u32 = 3;

/// After this a probe has failed. One that blocks for longer has failed once more each time.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How long after a question the database is probed. The common health checks ask at least twice in this time.
const LATELY: Duration = Duration::from_secs(60);

/// How long the end of the thread is waited for. It may be connecting, which takes up to some seconds.
const LAST_WORK: Duration = Duration::from_millis(100);

/// Of the thread, in bytes.
const STACK: usize = 512 << 10;

/// What is known of the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// It answered when it was last asked, or has not failed often enough since.
    Ready,
    /// It has not answered several times in a row.
    Silent,
    /// It has not the migrations that it has to have, or others that are not compatible.
    OtherSchema,
}

/// A thread that probes a database while it is asked for. Dropping it ends the thread.
pub struct Prober(Arc<Shared>);

struct Shared {
    state: Mutex<ProbeState>,
    changed: Condvar,
    on_silence: Box<dyn Fn() + Send + Sync>,
}

struct ProbeState {
    readiness: Readiness,
    /// Whether the database takes no changes, as the last probe has found it.
    read_only: bool,
    asked: Option<Instant>,
    /// When the database was last known to answer: at the start, before there is a prober.
    answered: Instant,
    /// Failed probes in a row.
    failures: u32,
    /// When the probe has begun that is not over yet.
    began: Option<Instant>,
    ended: bool,
    gone: bool,
}

impl ProbeState {
    /// How often the probe that is not over yet has failed by now.
    fn overdue(&self) -> u32 {
        let blocked = self.began.map_or(Duration::ZERO, |began| began.elapsed());
        u32::try_from(blocked.as_millis() / TIMEOUT.as_millis()).unwrap_or(u32::MAX)
    }
}

impl Prober {
    /// Starts the thread, which sleeps until [`Prober::readiness`] is called. `schema`: what the database has to have;
    /// `prepared`: whether sessions may keep settings. Errors: the system has no more threads.
    pub fn start(servers: Arc<Servers>, schema: Schema, prepared: bool) -> io::Result<Prober> {
        // Idle sessions of the pool would only be waited for.
        let known = servers.clone();
        let on_silence = move || known.end_epoch(known.epoch());
        let probe = DatabaseProbe { servers, schema, prepared };
        Prober::of(move |connection, read_only| probe.ask(connection, read_only), on_silence)
    }

    /// `ask` blocks for the answer of the database, over the connection that it has left last, or a new one; it says
    /// whether the database takes no changes, too. `on_silence` is called when the database has not answered several times in a row, and does not block.
    fn of<C>(
        ask: impl FnMut(&mut Option<C>, &mut bool) -> Result<Readiness, String> + Send + 'static,
        on_silence: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Prober> {
        let state = ProbeState {
            readiness: Readiness::Ready,
            read_only: false,
            asked: None,
            answered: Instant::now(),
            failures: 0,
            began: None,
            ended: false,
            gone: false,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            on_silence: Box::new(on_silence),
        });
        let prober = Prober(shared.clone());
        let thread = thread::Builder::new().name("prober".to_owned()).stack_size(STACK);
        thread.spawn(move || {
            shared.run(ask);
            shared.state.lock().gone = true;
            shared.changed.notify_all();
        })?;
        Ok(prober)
    }

    /// What is known, and how long ago the database answered last. Never blocks. The database is probed for a minute
    /// from now on.
    pub fn readiness(&self) -> (Readiness, Duration) {
        let now = Instant::now();
        let mut state = self.0.state.lock();
        let (before, answered) = (state.asked.replace(now), state.answered);
        if before.is_none_or(|before| now >= before + LATELY) {
            self.0.changed.notify_all();
        }
        let (overdue, readiness) = (state.overdue(), state.readiness);
        let is_silent = overdue > 0 && state.failures.saturating_add(overdue) >= FAILURES;
        if is_silent {
            self.0.set(state, Readiness::Silent, &format!("no answer for {overdue} s"));
        }
        let readiness = if is_silent { Readiness::Silent } else { readiness };
        (readiness, now.saturating_duration_since(answered))
    }

    /// Whether the database takes no changes, as the last probe has found it. Never blocks.
    pub fn is_read_only(&self) -> bool {
        self.0.state.lock().read_only
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.ended = true;
        self.0.changed.notify_all();
        // Where it does not end in time it ends by itself, within the time-outs of a probe.
        self.0.changed.wait_while_for(&mut state, |state| !state.gone, LAST_WORK);
    }
}

impl Shared {
    fn run<C>(&self, mut ask: impl FnMut(&mut Option<C>, &mut bool) -> Result<Readiness, String>) {
        let (mut connection, mut last, mut read_only) = (None, None, false);
        while self.wait(&mut connection, last) {
            last = Some(Instant::now());
            self.state.lock().began = last;
            let found = ask(&mut connection, &mut read_only);
            let mut state = self.state.lock();
            state.read_only = read_only;
            let overdue = state.overdue();
            state.began = None;
            state.failures = match found {
                Err(_) => state.failures.saturating_add(overdue.max(1)),
                Ok(_) => 0,
            };
            match found {
                Ok(readiness) => {
                    if readiness == Readiness::Ready {
                        state.answered = Instant::now();
                    }
                    self.set(state, readiness, "");
                }
                Err(why) if state.failures >= FAILURES => self.set(state, Readiness::Silent, &why),
                Err(_) => {}
            }
        }
    }

    /// Waits until a probe is due; `false` at the end. Until the service is ready again it goes on by itself, so that
    /// no old failure is ever told.
    fn wait<C>(&self, connection: &mut Option<C>, last: Option<Instant>) -> bool {
        let mut resting = false;
        let mut state = self.state.lock();
        let trouble = state.failures > 0 || state.readiness != Readiness::Ready;
        loop {
            if state.ended {
                return false;
            }
            let now = Instant::now();
            let lately = state.asked.is_some_and(|asked| now < asked + LATELY);
            if !lately && !trouble {
                if mem::replace(&mut resting, true) {
                    self.changed.wait(&mut state);
                } else {
                    MutexGuard::unlocked(&mut state, || *connection = None);
                }
                continue;
            }
            let pause = if trouble { PAUSE_IN_TROUBLE } else { PAUSE };
            let left = last.map_or(Duration::ZERO, |last| (last + pause).saturating_duration_since(now));
            if left.is_zero() {
                return true;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// Of two threads that judge, the one that has judged last is right. `why`: how the database is silent.
    fn set(&self, mut judged: MutexGuard<ProbeState>, readiness: Readiness, why: &str) {
        let before = mem::replace(&mut judged.readiness, readiness);
        drop(judged);
        match readiness {
            _ if before == readiness => {}
            Readiness::Ready => log::info!("ready again"),
            Readiness::OtherSchema => log::warn!("unready: the database's schema is not the one expected"),
            Readiness::Silent => {
                log::warn!("unready: the database does not answer: {why}");
                (self.on_silence)();
            }
        }
    }
}

/// What is asked over a connection of its own.
struct DatabaseProbe {
    servers: Arc<Servers>,
    schema: Schema,
    prepared: bool,
}

impl DatabaseProbe {
    /// A session that has ended since the last probe says nothing of the database, which may end idle ones: a new one
    /// is opened then, in the time of this probe. One that takes no changes may be of a primary that was demoted.
    fn ask(&self, connection: &mut Option<Connection>, read_only: &mut bool) -> Result<Readiness, String> {
        let (was_open, began) = (connection.is_some(), Instant::now());
        let found = self.ask_once(connection, read_only);
        match was_open && connection.is_none() && began.elapsed() < TIMEOUT {
            true => self.ask_once(connection, read_only),
            false => found,
        }
    }

    /// Leaves no connection where this one is of no use.
    fn ask_once(&self, left: &mut Option<Connection>, read_only: &mut bool) -> Result<Readiness, String> {
        let mut connection = match left.take().map_or_else(|| self.connect(), Ok) {
            Ok(connection) => connection,
            // The server has answered. It is its number of sessions that is short, and this one is an extra.
            Err(error) if error.is_full() => return Ok(Readiness::Ready),
            Err(error) => return Err(error.to_string()),
        };
        connection.watch().begin(TIMEOUT);
        let rows = connection.query_typed(Schema::ASK, &[]);
        let in_time = connection.watch().end();
        let found = match rows {
            Ok(rows) => {
                *read_only = rows.first().is_some_and(|row| row.get(3));
                match self.schema.judge(&rows) {
                    _ if *read_only && self.servers.wants_primary => {
                        return Err("the server takes no changes".to_owned());
                    }
                    Ok(Applied::All | Applied::AndNewer(_)) => Ok(Readiness::Ready),
                    Ok(Applied::No) | Err(_) => Ok(Readiness::OtherSchema),
                }
            }
            Err(_) if !in_time => return Err("no answer within a second".to_owned()),
            Err(error) if connection.is_closed() || Meaning::of(&error) == Meaning::Broken => {
                return Err(explain(&error));
            }
            Err(error) if is_missing(&error) => Ok(Readiness::OtherSchema),
            Err(error) => Err(explain(&error)),
        };
        *left = Some(connection);
        found
    }

    fn connect(&self) -> Result<Connection, ConnectError> {
        let set_up = match self.prepared {
            true => format!("set statement_timeout = {}", TIMEOUT.as_millis()),
            false => String::new(),
        };
        self.servers.connect(&set_up).map(|(connection, _)| connection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    type Outcome = Result<Readiness, String>;

    /// Each probe takes its outcome from the test, and says when it began.
    fn scripted(
        began: mpsc::Sender<Instant>,
        outcomes: mpsc::Receiver<Outcome>,
    ) -> impl FnMut(&mut Option<()>, &mut bool) -> Outcome {
        move |_, _| {
            let _ = began.send(Instant::now());
            outcomes.recv().unwrap_or(Ok(Readiness::Ready))
        }
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn three_failures_in_a_row_and_one_success() {
        let (asked, asks) = mpsc::channel();
        let (say, said) = mpsc::channel();
        let prober = Prober::of(scripted(asked, said), || {}).unwrap();
        assert!(asks.recv_timeout(Duration::from_millis(50)).is_err(), "it was not asked");
        assert_eq!(prober.readiness().0, Readiness::Ready);
        let mut times = Vec::new();
        let mut step = |outcome: Outcome, expected: Readiness| {
            times.push(asks.recv_timeout(LONG).unwrap());
            say.send(outcome).unwrap();
            let deadline = Instant::now() + LONG;
            // The next probe has begun: this one is settled.
            while prober.readiness().0 != expected {
                assert!(Instant::now() < deadline, "{:?}, not {expected:?}", prober.readiness().0);
                thread::sleep(Duration::from_millis(1));
            }
        };
        let failed = || Err("no".to_owned());
        step(failed(), Readiness::Ready);
        step(failed(), Readiness::Ready);
        step(Ok(Readiness::Ready), Readiness::Ready);
        step(failed(), Readiness::Ready);
        step(failed(), Readiness::Ready);
        step(failed(), Readiness::Silent);
        step(failed(), Readiness::Silent);
        step(Ok(Readiness::Ready), Readiness::Ready);
        step(Ok(Readiness::OtherSchema), Readiness::OtherSchema);
        step(Ok(Readiness::Ready), Readiness::Ready);
        let pauses: Vec<Duration> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses.iter().all(|pause| *pause >= PAUSE_IN_TROUBLE), "{pauses:?}");
        drop(say);
        drop(prober);
    }

    /// Nothing ends what it is in: it is judged all the same, and so is what it says at last.
    #[test]
    fn a_probe_that_does_not_end() {
        let (asked, asks) = mpsc::channel();
        let (say, said) = mpsc::channel();
        let (silenced, silences) = mpsc::channel();
        let on_silence = move || silenced.send(()).unwrap();
        let prober = Prober::of(scripted(asked, said), on_silence).unwrap();
        for failures_before in [0, 1] {
            for _ in 0..failures_before {
                prober.readiness();
                asks.recv_timeout(LONG).unwrap();
                say.send(Err("no".to_owned())).unwrap();
            }
            prober.readiness();
            let began = asks.recv_timeout(LONG).unwrap();
            let seconds = FAILURES - failures_before;
            while prober.readiness().0 == Readiness::Ready {
                assert!(began.elapsed() < LONG, "it is ready for as long as the probe goes on");
                thread::sleep(Duration::from_millis(1));
            }
            assert!(began.elapsed() >= TIMEOUT * seconds, "{:?}, not {seconds} s", began.elapsed());
            assert_eq!(prober.readiness().0, Readiness::Silent);
            silences.recv_timeout(LONG).unwrap();
            say.send(Ok(Readiness::Ready)).unwrap();
            while prober.readiness().0 != Readiness::Ready {
                assert!(began.elapsed() < LONG, "it is unready though the database has answered");
                thread::sleep(Duration::from_millis(1));
            }
            assert!(silences.try_recv().is_err(), "told once");
        }
        drop(say);
    }
}
