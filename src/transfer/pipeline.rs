//! One thread cuts the stream into batches of records, one a core checks them, and the caller's takes them in the order of
//! the stream. A fixed number of batches goes round, so that a slow stage makes the others wait.

use super::{
    TransferError,
    check::{Checked, Rules},
    records::{Batch, Records},
};
use std::{
    cell::RefCell,
    io::{self, BufRead},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, Sender},
    },
    thread,
};

/// Batches that go round, for each core: one is cut, one checked, one waits for its turn.
const BATCHES_PER_CORE: usize = 3;

/// The threads that cut and check. They are not waited for: one may wait for a stream that never goes on.
pub(super) struct Pipeline {
    outcomes: Receiver<Outcome>,
    free: Sender<Batch>,
    waiting: RefCell<Waiting>,
}

/// What came before its turn, with its number; and the number whose turn it is.
#[derive(Default)]
struct Waiting {
    outcomes: Vec<(u64, Batch, Checked)>,
    next: u64,
    /// How many batches there are, once that is known.
    end: Option<u64>,
}

enum Outcome {
    Checked(u64, Batch, Checked),
    /// There are so many batches, and what kept the stream from being read further.
    End(u64, io::Result<()>),
}

impl Pipeline {
    pub fn start<R: BufRead + Send + 'static>(mut records: Records<R>, rules: Rules) -> io::Result<Pipeline> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let (free, empty) = mpsc::channel();
        let (full, read) = mpsc::channel::<(u64, Batch)>();
        let (done, outcomes) = mpsc::channel();
        for _ in 0..cores * BATCHES_PER_CORE {
            // Its receiver is still here.
            let _ = free.send(Batch::default());
        }
        let (read, rules) = (Arc::new(Mutex::new(read)), Arc::new(rules));
        for core in 0..cores {
            let (read, rules, done) = (read.clone(), rules.clone(), done.clone());
            let body = move || {
                loop {
                    let next = read.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((number, batch)) = next else { break };
                    let checked = rules.check(&batch);
                    if done.send(Outcome::Checked(number, batch, checked)).is_err() {
                        break;
                    }
                }
            };
            thread::Builder::new().name(format!("check-{core}")).spawn(body)?;
        }
        let body = move || {
            let mut number = 0;
            let end = loop {
                let Ok(mut batch) = empty.recv() else { return };
                match records.next_batch(&mut batch) {
                    Ok(true) if full.send((number, batch)).is_ok() => number += 1,
                    Ok(_) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            let _ = done.send(Outcome::End(number, end));
        };
        thread::Builder::new().name("read".to_owned()).spawn(body)?;
        Ok(Pipeline { outcomes, free, waiting: RefCell::default() })
    }

    /// The next batch in the order of the stream; `None` at its end.
    pub fn next(&self) -> Result<Option<(Batch, Checked)>, TransferError> {
        let mut waiting = self.waiting.borrow_mut();
        loop {
            let next = waiting.next;
            if let Some(at) = waiting.outcomes.iter().position(|(number, ..)| *number == next) {
                waiting.next += 1;
                let (_, batch, checked) = waiting.outcomes.swap_remove(at);
                return Ok(Some((batch, checked)));
            }
            if waiting.end == Some(next) {
                return Ok(None);
            }
            match self.outcomes.recv() {
                Ok(Outcome::Checked(number, batch, checked)) => {
                    waiting.outcomes.push((number, batch, checked));
                }
                Ok(Outcome::End(count, read)) => {
                    read.map_err(TransferError::Read)?;
                    waiting.end = Some(count);
                }
                Err(_) => return Err(TransferError::Read(io::Error::other("a thread has panicked"))),
            }
        }
    }

    /// Gives a batch back to the thread that fills it.
    pub fn reuse(&self, mut batch: Batch) {
        batch.clear();
        // The thread has ended where the stream has.
        let _ = self.free.send(batch);
    }
}
