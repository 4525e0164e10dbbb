//! `userd export`: all users to a file or to standard output.

use super::{Failure, arguments::Given, embedded, output::Output, progress};
use std::io;
use userd::transfer::{self, Export, Format, TransferError};

/// Exit code that a shell reports for a program that a closed pipe has ended.
const CLOSED_PIPE: u8 = 128 + 13;

/// Which users the arguments ask for, and how.
pub fn what(given: &Given) -> Export {
    let for_spreadsheets = given.has("--for-spreadsheets");
    let format = if for_spreadsheets { Format::Csv } else { given.format().unwrap_or(Format::Ndjson) };
    Export { format, with_password_hashes: given.has("--with-password-hashes"), for_spreadsheets }
}

/// Writes all users to a file, or to standard output; those of the private cluster, if one is given. Blocks until they
/// are written.
pub fn export(given: &Given) -> Result<(), Failure> {
    let what = what(given);
    let mut output = Output::open(given.file(), what.with_password_hashes)?;
    let (config, _cluster) = embedded::database(given, false)?;
    let bar = progress::bar(Some(0), "{bar:30} {human_pos} of {human_len} users, {per_sec:0}, {eta} left");
    let exported = transfer::export(&config, what, &mut output.to, &mut |done, of| {
        bar.set_length(of);
        bar.set_position(done);
    });
    drop(bar);
    exported.map(drop).and_then(|()| output.finish().map_err(TransferError::Write)).map_err(failure)
}

/// A reader that has enough, as `head` has, is no failure worth a line; but not everything was written.
fn failure(error: TransferError) -> Failure {
    match error {
        TransferError::Write(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Failure { code: CLOSED_PIPE, line: String::new() }
        }
        TransferError::Start(error) => error.into(),
        error => Failure::runtime(error),
    }
}
