//! The scheduler driven by a simulated clock: a machine with two cores, a database some way off, clients in a loop.

use super::*;
use std::{cmp::Reverse, collections::BinaryHeap};

/// Processor time, as measured for reads by id on two cores: a batch here, the same in the database, and a command.
const BATCH: u64 = 35;
const STATEMENT: u64 = 30;
const COMMAND: u64 = 6;
/// What a client does between an answer and its next request.
const THINK: u64 = 25;

const CORES: usize = 2;
const WORKERS: usize = 8;

/// A model of one lane, in microseconds.
struct Model {
    now: u64,
    epoch: Instant,
    scheduler: Scheduler<usize>,
    lane: Lane,
    /// Of the network, there and back, or of a commit.
    waiting: u64,
    /// When each core is free.
    cores: [u64; CORES],
    executing: usize,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    batches: Vec<Option<(Token, Vec<Item<usize>>)>>,
    sent: Vec<u64>,
    waits: Vec<u64>,
    order: u64,
    /// When something may be due.
    due: Option<u64>,
}

/// What happens to a client, or to a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A client's request is queued.
    Arrive(usize),
    /// A batch reaches the database.
    Execute(usize),
    /// Its rows are back.
    Return(usize),
    /// It is answered.
    End(usize),
    /// Something may be due.
    Due,
}

impl Model {
    fn new(lane: Lane, waiting: u64, clients: usize, constant: Option<usize>) -> Model {
        let epoch = Instant::now();
        let capacity =
            Capacity { statements: WORKERS, hashes: 1, cores: 2, retry_for: Duration::from_secs(10) };
        let mut scheduler = Scheduler::new(capacity, epoch);
        if let Some(batches) = constant {
            scheduler.lanes[lane as usize].pace.fix(batches);
        }
        let mut model = Model {
            now: 0,
            epoch,
            scheduler,
            lane,
            waiting,
            cores: [0; CORES],
            executing: 0,
            events: BinaryHeap::new(),
            batches: Vec::new(),
            sent: vec![0; clients],
            waits: Vec::new(),
            order: 0,
            due: None,
        };
        for client in 0..clients {
            model.schedule(client as u64, Event::Arrive(client));
        }
        model
    }

    fn schedule(&mut self, at: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((at, self.order, event)));
    }

    fn time(&self) -> Instant {
        self.epoch + Duration::from_micros(self.now)
    }

    /// When so much processor time has been had, from now on.
    fn compute(&mut self, time: u64) -> u64 {
        let core = self.cores.iter_mut().min().expect("there are cores");
        *core = (*core).max(self.now) + time;
        *core
    }

    fn size(&self, batch: usize) -> u64 {
        self.batches[batch].as_ref().map_or(0, |(_, items)| items.len() as u64)
    }

    fn run(&mut self, until: u64) {
        while let Some(Reverse((at, _, event))) = self.events.peek().copied() {
            if at > until {
                break;
            }
            self.events.pop();
            self.now = at;
            match event {
                Event::Arrive(client) => {
                    self.sent[client] = at;
                    let time = self.time();
                    self.scheduler.push(client, Needs::of(self.lane), None, time).expect("it hashes nothing");
                }
                Event::Execute(batch) => {
                    let executed = self.compute(STATEMENT + COMMAND * self.size(batch) / 2);
                    self.schedule(executed + self.waiting / 2, Event::Return(batch));
                }
                Event::Return(batch) => {
                    let answered = self.compute(BATCH / 2 + COMMAND * self.size(batch) / 2);
                    self.schedule(answered, Event::End(batch));
                }
                Event::End(batch) => self.end(batch),
                Event::Due => {}
            }
            self.start();
        }
        self.now = until;
    }

    fn start(&mut self) {
        while self.executing < WORKERS {
            let time = self.time();
            let batch = match self.scheduler.next(time) {
                Next::Run(batch) => batch,
                Next::Wait(due) => {
                    let wait =
                        due.map(|due| due.saturating_duration_since(time).as_nanos().div_ceil(1_000) as u64);
                    if let Some(due) = wait.map(|wait| self.now + wait).filter(|due| self.due != Some(*due)) {
                        self.due = Some(due);
                        self.schedule(due, Event::Due);
                    }
                    return;
                }
            };
            self.executing += 1;
            let sent = self.compute(BATCH / 2);
            self.batches.push(Some((batch.token, batch.items)));
            self.schedule(sent + self.waiting / 2, Event::Execute(self.batches.len() - 1));
        }
    }

    fn end(&mut self, batch: usize) {
        let (token, items) = self.batches[batch].take().expect("it ends once");
        self.executing -= 1;
        let time = self.time();
        self.scheduler.finished(token, false, time);
        for item in items {
            self.scheduler.done(&item);
            self.waits.push(self.now - self.sent[item.work]);
            self.schedule(self.now + THINK + item.work as u64 % 7, Event::Arrive(item.work));
        }
    }

    fn batches_that_pay(&self) -> usize {
        self.scheduler.lanes[self.lane as usize].pace.batches(1)
    }

    /// Commands a second and their median wait, after what it takes to learn.
    fn measure(&mut self) -> (f64, u64) {
        // Some rounds of each client.
        let (learn, measure) = (30_000 + 10 * self.waiting, 100_000 + 60 * self.waiting);
        self.run(self.now + learn);
        self.waits.clear();
        self.run(self.now + measure);
        let mut waits = self.waits.clone();
        waits.sort_unstable();
        let median = waits.get(waits.len() / 2).copied().unwrap_or(u64::MAX);
        (waits.len() as f64 / measure as f64 * 1e6, median)
    }
}

/// How much less throughput, and how much more of the median wait, than with the best constant for either: more would
/// be worth a rule that learns more than two values.
const TOLERANCE: f64 = 0.25;

#[test]
fn what_is_learned_is_nearly_as_good_as_the_best_constant() {
    let mut worse = String::new();
    for waiting in [500, 1_000, 5_000, 20_000] {
        for clients in [1, 4, 16, 32, 64, 128, 256] {
            let constant = |batches| Model::new(Lane::Find, waiting, clients, Some(batches)).measure();
            let constants: Vec<_> = (1..=WORKERS).map(constant).collect();
            let (rate, wait) = constants
                .iter()
                .fold((0.0_f64, u64::MAX), |best, one| (best.0.max(one.0), best.1.min(one.1)));
            let learned = Model::new(Lane::Find, waiting, clients, None).measure();
            if learned.0 < rate * (1.0 - TOLERANCE) || learned.1 as f64 > wait as f64 * (1.0 + TOLERANCE) {
                worse +=
                    &format!("\n{waiting} µs, {clients} clients: {learned:?}, but best {:?}", (rate, wait));
            }
        }
    }
    assert!(worse.is_empty(), "{worse}");
}

/// On the machine itself, one large batch at a time measured best: waking another worker costs more than this model
/// has.
#[test]
fn with_a_database_on_the_same_machine_batches_are_short() {
    for clients in [1, 4, 16, 64, 256] {
        let mut model = Model::new(Lane::Find, 50, clients, None);
        model.measure();
        assert_eq!(model.batches_that_pay(), 1, "{clients} clients");
    }
}

#[test]
fn a_change_of_the_round_trip_shows_within_a_second() {
    for clients in [1, 16, 64] {
        let mut model = Model::new(Lane::Find, 50, clients, None);
        for (waiting, expected) in [(50, 1..=1), (5_000, WORKERS..=usize::MAX), (50, 1..=1)] {
            model.waiting = waiting;
            model.run(model.now + 1_000_000);
            let found = model.batches_that_pay();
            assert!(expected.contains(&found), "{found} with {clients} clients, {waiting} µs away");
        }
    }
}
