//! All users of one snapshot, by id, as lines of JSON or as CSV.

use super::{Format, TransferError, select::PASSWORD_HASH};
use crate::{
    config::Config,
    db::{
        bulk::{begin_export, count_users, each_user},
        open::Opening,
    },
    users::user::UserRef,
};
use serde::Serialize;
use std::{
    borrow::Cow,
    io::{self, BufWriter, Write},
};

/// What is exported, and how it is written.
#[derive(Debug, Clone, Copy)]
pub struct Export {
    /// How a user is written.
    pub format: Format,
    /// Whether with the hash of the password, as `passwordHash`.
    pub with_password_hashes: bool,
    /// Whether names and addresses in CSV that a spreadsheet would take for formulas have an apostrophe before them.
    pub for_spreadsheets: bool,
}

/// What a spreadsheet takes for the beginning of a formula, or leaves out before one.
const FORMULA: [char; 11] = ['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠'];

/// What ends a cell, quotes or not, for a spreadsheet whose language has the comma in numbers and another separator.
const END_OF_CELL: [char; 4] = [';', '\t', '\r', '\n'];

/// Users between two calls.
const STEP: u64 = 1000;

/// Bytes of one write.
const WRITE: usize = 64 << 10;

/// Writes all users; how many they were. Holds some hundred kilobytes, however many there are. Blocks for as long as it
/// takes; a slow reader of the output makes the database wait, with its snapshot. `on_progress` is told how many users
/// are written, and how many there are.
///
/// # Errors
/// After any of them the output is not complete.
pub fn export(
    config: &Config,
    export: Export,
    to: &mut dyn Write,
    on_progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, TransferError> {
    let mut client = Opening::new(config)?.connect_migrated(config)?;
    let breaker = client.breaker();
    let mut transaction = begin_export(&mut client, config.db_prepared)?;
    let total = count_users(&mut transaction)?;
    let mut done = 0;
    let mut each = |write: &mut dyn FnMut(UserRef, Option<&str>) -> io::Result<()>| {
        each_user(&mut transaction, export.with_password_hashes, |user, hash| {
            done += 1;
            if done % STEP == 0 {
                on_progress(done, total);
            }
            write(user, hash).map_err(TransferError::Write)
        })
    };
    let written = match export.format {
        Format::Ndjson => {
            let mut lines = BufWriter::with_capacity(WRITE, to);
            let written = each(&mut |user, password_hash| {
                serde_json::to_writer(&mut lines, &Line { user, password_hash })?;
                lines.write_all(b"\n")
            });
            written.and_then(|()| lines.flush().map_err(TransferError::Write))
        }
        Format::Csv => export_csv(export, to, &mut each),
    };
    // After an error, the rest of the users would be read to end the transaction in good order.
    written.inspect_err(|_| breaker.shut_down())?;
    Ok(done)
}

/// Calls a function with each user, and with the hash of the password if it is exported and there is one.
type Each<'a> =
    dyn FnMut(&mut dyn FnMut(UserRef, Option<&str>) -> io::Result<()>) -> Result<(), TransferError> + 'a;

fn export_csv(export: Export, to: &mut dyn Write, each: &mut Each) -> Result<(), TransferError> {
    let begin = || {
        if export.for_spreadsheets {
            // Without it, spreadsheets take UTF-8 for an older encoding.
            to.write_all("\u{feff}".as_bytes())?;
        }
        let mut csv = csv::WriterBuilder::new().has_headers(false).buffer_capacity(WRITE).from_writer(to);
        let hash = export.with_password_hashes.then_some(PASSWORD_HASH);
        csv.write_record(UserRef::FIELDS.into_iter().chain(hash))?;
        Ok(csv)
    };
    let mut csv = begin().map_err(TransferError::Write)?;
    each(&mut |user, password_hash| {
        let cell = |text| match export.for_spreadsheets {
            true => Cow::Owned(without_formulas(text)),
            false => Cow::Borrowed(text),
        };
        let (name, email) = (cell(user.name), cell(user.email));
        let user = UserRef { name: &name, email: &email, ..user };
        match export.with_password_hashes {
            true => csv.serialize((user, password_hash))?,
            false => csv.serialize(user)?,
        }
        Ok(())
    })?;
    csv.flush().map_err(TransferError::Write)
}

/// A user as GET answers it, and the hash where it is asked for and there is one.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    user: UserRef<'a>,
    #[serde(rename = "passwordHash", skip_serializing_if = "Option::is_none")]
    password_hash: Option<&'a str>,
}

/// The text with an apostrophe before each formula, at its beginning or where a cell may begin in it.
fn without_formulas(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 1);
    let mut begins = true;
    for sign in text.chars() {
        if begins && FORMULA.contains(&sign) {
            quoted.push('\'');
        }
        quoted.push(sign);
        begins = END_OF_CELL.contains(&sign) || (begins && sign == '"');
    }
    quoted
}
