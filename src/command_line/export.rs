//! `userd export`: all users to a file or to standard output.

use super::{Failure, embedded, environment, output::Output, progress::Progress, transfer_error};
use std::{io, path::Path};
use userd::transfer::{self, Export, TransferError};

/// What a shell reports of a program that a closed pipe has ended.
const CLOSED_PIPE: u8 = 128 + 13;

/// Writes all users to a file, or to standard output; those of the private cluster in `dir`, if any. Blocks until they
/// are written.
pub fn export(what: Export, file: Option<&Path>, dir: Option<&Path>) -> Result<(), Failure> {
    let mut config = environment::config(|_| None).map_err(Failure::usage)?;
    let mut output = Output::open(file, what.with_password_hashes)?;
    let _cluster = embedded::join(dir, &mut config, false)?;
    let progress = Progress::new();
    let exported = transfer::export(&config, what, &mut output, &mut |done, of| progress.users(done, of));
    drop(progress);
    exported.map(drop).and_then(|()| output.finish().map_err(TransferError::Write)).map_err(failure)
}

/// A reader that has enough, as `head` has, is no failure worth a line; but not everything was written.
fn failure(error: TransferError) -> Failure {
    match error {
        TransferError::Write(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Failure { code: CLOSED_PIPE, line: String::new() }
        }
        error => transfer_error(error),
    }
}
