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
}

impl Model {
    fn new(lane: Lane, waiting: u64, clients: usize, constant: Option<usize>) -> Model {
        let epoch = Instant::now();
        let capacity = Capacity { statements: WORKERS, hashes: 1, retry_for: Duration::from_secs(10) };
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
                    self.scheduler.push(client, self.lane, Keys::default(), time).expect("it hashes nothing");
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
            }
            self.start();
        }
        self.now = until;
    }

    fn start(&mut self) {
        while self.executing < WORKERS {
            let time = self.time();
            let Next::Run(batch) = self.scheduler.next(time) else {
                return;
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

    /// Commands a second and their median wait, after what it takes to learn.
    fn measure(&mut self) -> (f64, u64) {
        const LEARN: u64 = 900_000;
        const MEASURE: u64 = 300_000;
        let start = self.now;
        self.run(start + LEARN);
        self.waits.clear();
        self.run(start + LEARN + MEASURE);
        let mut waits = self.waits.clone();
        waits.sort_unstable();
        let median = waits.get(waits.len() / 2).copied().unwrap_or(u64::MAX);
        (waits.len() as f64 / MEASURE as f64 * 1e6, median)
    }
}

#[test]
fn what_is_learned_is_as_good_as_the_best_constant() {
    for waiting in [50, 500, 1_000, 5_000, 20_000] {
        for clients in [1, 4, 16, 64, 256] {
            let constants = (1..=WORKERS)
                .map(|constant| Model::new(Lane::Find, waiting, clients, Some(constant)).measure());
            let constants: Vec<_> = constants.collect();
            let (rate, wait) = constants
                .iter()
                .fold((0.0_f64, u64::MAX), |best, one| (best.0.max(one.0), best.1.min(one.1)));
            let learned = Model::new(Lane::Find, waiting, clients, None).measure();
            eprintln!(
                "{waiting:>6} {clients:>4} best {rate:>8.0} {wait:>6} learned {:>8.0} {:>6}  {:.2} {:.2}  {:?}",
                learned.0,
                learned.1,
                learned.0 / rate,
                learned.1 as f64 / wait as f64,
                constants.iter().map(|c| c.0 as u64).collect::<Vec<_>>()
            );
        }
    }
}
