//! One thread cuts the stream into batches of records, one a core checks them, and the caller's takes them in the order
//! of the stream: each core has every so many-th batch. Channels hold one batch each, so that a slow stage makes the
//! others wait.

use super::{
    TransferError,
    check::{Checked, Rules},
    records::{Batch, Records},
};
use std::{
    io::{self, BufRead},
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
};

/// The threads that cut and check. They are not waited for: one may wait for a stream that never goes on.
pub(super) struct Pipeline {
    /// Of each core; `None` is the end of the stream, and an error what keeps it from being read further.
    checked: Vec<Receiver<io::Result<Option<Checked>>>>,
    /// Which of them has the next batch.
    turn: usize,
}

impl Pipeline {
    pub fn start<R: BufRead + Send + 'static>(mut records: Records<R>, rules: Rules) -> io::Result<Pipeline> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let rules = Arc::new(rules);
        let (mut read, mut checked) = (Vec::new(), Vec::new());
        for core in 0..cores {
            let (to_check, batches) = mpsc::sync_channel::<io::Result<Option<Batch>>>(1);
            let (done, outcomes) = mpsc::sync_channel(1);
            let rules = rules.clone();
            let body = move || {
                let check = |batch: Option<Batch>| batch.map(|batch| rules.check(&batch));
                batches.into_iter().map(|batch| batch.map(check)).try_for_each(|outcome| done.send(outcome))
            };
            thread::Builder::new().name(format!("check-{core}")).spawn(body)?;
            read.push(to_check);
            checked.push(outcomes);
        }
        let body = move || {
            for core in read.iter().cycle() {
                let batch = records.next_batch();
                let is_last = !matches!(batch, Ok(Some(_)));
                if core.send(batch).is_err() || is_last {
                    break;
                }
            }
        };
        thread::Builder::new().name("read".to_owned()).spawn(body)?;
        Ok(Pipeline { checked, turn: 0 })
    }

    /// What the next batch in the order of the stream has come to; `None` at its end.
    pub fn next(&mut self) -> Result<Option<Checked>, TransferError> {
        let checked = self.checked[self.turn].recv();
        self.turn = (self.turn + 1) % self.checked.len();
        checked
            .unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))
            .map_err(TransferError::Read)
    }
}
