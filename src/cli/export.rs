//! `userd export`: all users to a file or to standard output.

use super::{Failure, arguments::Args, commands, embedded, output::Output};
use crate::transfer::{self, Export, Format, TransferError};
use std::io;

/// Exit code that a shell reports for a program that a closed pipe has ended.
const CLOSED_PIPE: u8 = 128 + 13;

/// Returns the options that the arguments ask for.
pub fn options(args: &Args) -> Export {
    let for_spreadsheets = args.has(commands::FOR_SPREADSHEETS);
    let format = if for_spreadsheets { Format::Csv } else { args.format().unwrap_or(Format::Ndjson) };
    Export { format, with_password_hashes: args.has(commands::WITH_PASSWORD_HASHES), for_spreadsheets }
}

/// Writes all users of the database, or of the private cluster if one is given, to a file or to standard output. Blocks
/// until they are written.
pub fn export(args: &Args) -> Result<(), Failure> {
    let options = options(args);
    let mut output = Output::open(args.file(), options.with_password_hashes)?;
    let (config, cluster) = embedded::database(args, false)?;
    let mut export = || transfer::export(&config, options, &mut output.to);
    let exported = match &cluster {
        Some(cluster) => cluster.account.with_rights(export),
        None => export(),
    };
    exported.and_then(|()| output.finish().map_err(TransferError::Write)).map_err(failure)
}

/// Returns the failure of an export. The line is empty if the reader has closed the output, as `head` does.
fn failure(error: TransferError) -> Failure {
    match error {
        TransferError::Write(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Failure { code: CLOSED_PIPE, line: String::new() }
        }
        TransferError::Start(error) => error.into(),
        error => Failure::runtime(error),
    }
}
