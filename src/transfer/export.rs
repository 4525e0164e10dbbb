//! All users of one snapshot, by id, as lines of JSON or as CSV.

use super::{Format, TransferError, fields::PASSWORD_HASH};
use crate::{
    config::Config,
    db::{
        open::Opening,
        transfer::{begin_export, count, each_user},
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
    let total = count(&mut transaction)?;
    let mut output = Output::begin(export, to).map_err(TransferError::Write)?;
    let mut done = 0;
    let written = each_user(&mut transaction, export.with_password_hashes, |user, hash| {
        output.user(user, hash).map_err(TransferError::Write)?;
        done += 1;
        if done % STEP == 0 {
            on_progress(done, total);
        }
        Ok(())
    });
    if written.is_err() {
        // Otherwise the rest of the users would be read, to end the transaction in good order.
        breaker.shut_down();
    }
    written.and_then(|()| output.end().map_err(TransferError::Write))?;
    Ok(done)
}

/// Lines that gather until there is enough for a write.
enum Output<'a> {
    Json(BufWriter<&'a mut dyn Write>),
    Csv { csv: Box<csv::Writer<&'a mut dyn Write>>, export: Export },
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

impl<'a> Output<'a> {
    fn begin(export: Export, to: &'a mut dyn Write) -> io::Result<Output<'a>> {
        if export.format == Format::Ndjson {
            return Ok(Output::Json(BufWriter::with_capacity(WRITE, to)));
        }
        let mut csv = csv::WriterBuilder::new().has_headers(false).buffer_capacity(WRITE).from_writer(to);
        let hash = export.with_password_hashes.then_some(PASSWORD_HASH);
        csv.write_record(UserRef::FIELDS.into_iter().chain(hash))?;
        Ok(Output::Csv { csv: Box::new(csv), export })
    }

    fn user(&mut self, user: UserRef, password_hash: Option<&str>) -> io::Result<()> {
        match self {
            Output::Json(lines) => {
                serde_json::to_writer(&mut *lines, &Line { user, password_hash })?;
                lines.write_all(b"\n")
            }
            Output::Csv { csv, export } => {
                let cell = |text| match export.for_spreadsheets {
                    true => Cow::Owned(without_formulas(text)),
                    false => Cow::Borrowed(text),
                };
                let (name, email) = (cell(user.name), cell(user.email));
                let user = UserRef { name: &name, email: &email, ..user };
                let written = match export.with_password_hashes {
                    true => csv.serialize((user, password_hash)),
                    false => csv.serialize(user),
                };
                Ok(written?)
            }
        }
    }

    fn end(self) -> io::Result<()> {
        match self {
            Output::Json(mut lines) => lines.flush(),
            Output::Csv { mut csv, .. } => csv.flush(),
        }
    }
}
