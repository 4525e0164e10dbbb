//! `userd export`: all users to a file or to standard output.

use super::{Failure, arguments::Export, environment, output::Output, progress::Progress, start_error};
use std::io;
use userd::bulk::{self, BulkError};

/// What a shell reports of a program that a closed pipe has ended.
const CLOSED_PIPE: u8 = 128 + 13;

/// Writes all users. Blocks until they are written.
pub fn export(arguments: &Export) -> Result<(), Failure> {
    let config = environment::config(|_| None).map_err(Failure::usage)?;
    let mut output = Output::open(arguments.file.as_deref(), arguments.with_password_hashes)?;
    let what =
        bulk::Export { format: arguments.format, with_password_hashes: arguments.with_password_hashes };
    let progress = Progress::new();
    let exported = bulk::export(&config, what, &mut output, &mut |done, of| progress.users(done, of));
    drop(progress);
    exported.map(drop).and_then(|()| output.finish().map_err(BulkError::Write)).map_err(failure)
}

/// A reader that has enough, as `head` has, is no failure worth a line; but not everything was written.
fn failure(error: BulkError) -> Failure {
    match error {
        BulkError::Write(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Failure { code: CLOSED_PIPE, line: String::new() }
        }
        BulkError::Start(error) => start_error(error),
        error => Failure::runtime(error),
    }
}
