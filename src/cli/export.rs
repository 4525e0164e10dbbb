//! `userd export`: writes all users to a file or to standard output.

use super::{Failure, arguments::Args, commands, embedded, export_output::ExportOutput};
use crate::transfer::{self, ExportOptions, Format, TransferError};
use std::io;

/// The exit code that a shell reports for a program which SIGPIPE, the signal of a closed pipe, has ended.
const CLOSED_PIPE_CODE: u8 = 128 + 13;

/// Returns the options of an export that the command line gives.
pub fn export_options(args: &Args) -> ExportOptions {
    let for_spreadsheets = args.has(commands::FOR_SPREADSHEETS);
    let format = if for_spreadsheets { Format::Csv } else { args.file_format().unwrap_or(Format::Ndjson) };
    ExportOptions { format, with_password_hashes: args.has(commands::WITH_PASSWORD_HASHES), for_spreadsheets }
}

/// Writes all users of the database to a file or to standard output. Blocks until all users are written.
pub fn export(args: &Args) -> Result<(), Failure> {
    let options = export_options(args);
    if options.for_spreadsheets && args.file_format() == Some(Format::Ndjson) {
        return Err(Failure::usage("--for-spreadsheets: a spreadsheet takes CSV, not --format ndjson"));
    }
    let mut output = ExportOutput::open(args.operand_file(), options.with_password_hashes)?;
    let (config, cluster) = embedded::open_database(args, false)?;
    let mut export = || transfer::export(&config, options, &mut output.file);
    let exported = match &cluster {
        Some(cluster) => cluster.account.with_rights(export),
        None => export(),
    };
    exported.and_then(|()| output.finish().map_err(TransferError::Write)).map_err(export_failure)
}

/// Returns the failure of an export. Its message is empty if the reader of the output, such as `head`, has closed the
/// output, because the export has made no error then.
fn export_failure(error: TransferError) -> Failure {
    match error {
        TransferError::Write(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Failure { exit_code: CLOSED_PIPE_CODE, message: String::new() }
        }
        TransferError::Start(error) => error.into(),
        error => Failure::runtime(error),
    }
}
