//! One thread cuts the stream into batches, one thread for each core checks them, and the caller takes the outcomes in
//! the order of the stream. Channels hold one batch each, so a slow stage makes the others wait.

use super::{
    TransferError,
    check::{Checked, Rules},
    read::{Batch, Source},
};
use std::{
    io,
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
};

/// The threads that cut and check. They are not joined: one may wait for a stream that never goes on.
pub(super) struct Pipeline {
    /// The outcomes of each core. `None` is the end of the stream; an error keeps it from being read further.
    checked: Vec<Receiver<io::Result<Option<Checked>>>>,
    /// The core that has the next batch.
    turn: usize,
}

impl Pipeline {
    /// Starts the threads.
    pub fn start(source: Source, rules: Rules) -> io::Result<Pipeline> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let rules = Arc::new(rules);
        let (mut to_check, mut checked) = (Vec::new(), Vec::new());
        for core in 0..cores {
            let (sender, batches) = mpsc::sync_channel::<io::Result<Option<Batch>>>(1);
            let (done, outcomes) = mpsc::sync_channel(1);
            let rules = rules.clone();
            let body = move || {
                let check = |batch: Option<Batch>| batch.map(|batch| rules.check(&batch));
                batches.into_iter().map(|batch| batch.map(check)).try_for_each(|outcome| done.send(outcome))
            };
            thread::Builder::new().name(format!("check-{core}")).spawn(body)?;
            to_check.push(sender);
            checked.push(outcomes);
        }
        let body = move || {
            let mut cores = to_check.iter().cycle();
            let mut send = |batch| cores.next().map(|core| core.send(batch).map_err(io::Error::other));
            let read = source.read(&mut |batch| send(Ok(Some(batch))).unwrap_or(Ok(())));
            // If the consumer is gone, there is nobody to tell.
            let _ = send(read.map(|()| None));
        };
        thread::Builder::new().name("read".to_owned()).spawn(body)?;
        Ok(Pipeline { checked, turn: 0 })
    }

    /// Returns the outcome of the next batch in the order of the stream; `None` at its end. Blocks until it is checked.
    pub fn next(&mut self) -> Result<Option<Checked>, TransferError> {
        let checked = self.checked[self.turn].recv();
        self.turn = (self.turn + 1) % self.checked.len();
        checked
            .unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))
            .map_err(TransferError::Read)
    }
}
