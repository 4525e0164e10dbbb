//! All users of one snapshot, by id, as lines of JSON or as CSV.

use super::{BulkError, Format, connect};
use crate::{
    config::Config,
    db::bulk::{self, ExportedUser},
    users::user::Timestamp,
};
use serde::Serialize;
use std::io::{self, BufWriter, Write};

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

/// Told how far it is: users written, and how many there are.
pub type OnProgress<'a> = &'a mut dyn FnMut(u64, u64);

/// Users between two calls.
const STEP: u64 = 1000;

/// Bytes of one write.
const WRITE: usize = 64 << 10;

/// Writes all users; how many they were. Holds some hundred kilobytes, however many there are. Blocks for as long as it
/// takes; a slow reader of the output makes the database wait, with its snapshot.
///
/// # Errors
/// After any of them the output is not complete.
pub fn export(
    config: &Config,
    export: Export,
    to: &mut dyn Write,
    on_progress: OnProgress,
) -> Result<u64, BulkError> {
    let (_, mut client) = connect(config)?;
    let breaker = client.breaker();
    let mut transaction = bulk::begin_export(&mut client, config.db_prepared)?;
    let total = bulk::count(&mut transaction)?;
    let mut output = Output::begin(export, to).map_err(BulkError::Write)?;
    let mut count = 0;
    let written = bulk::each_user(&mut transaction, export.with_password_hashes, |user| {
        output.user(&user).map_err(BulkError::Write)?;
        count += 1;
        if count % STEP == 0 {
            on_progress(count, total);
        }
        Ok(())
    });
    if written.is_err() {
        // Otherwise the rest of the users would be read, to end the transaction in good order.
        breaker.trip();
    }
    written.and_then(|()| output.end().map_err(BulkError::Write))?;
    Ok(count)
}

/// Lines that gather until there is enough for a write.
enum Output<'a> {
    Json(BufWriter<&'a mut dyn Write>),
    Csv { csv: Box<csv::Writer<&'a mut dyn Write>>, export: Export },
}

/// A user as GET answers it, and the hash where it is asked for and there is one.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    id: Digits,
    name: &'a str,
    email: &'a str,
    created_at: Timestamp,
    updated_at: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
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

/// A number, as a JSON string.
struct Digits(i64);

impl Serialize for Digits {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(itoa::Buffer::new().format(self.0))
    }
}

impl<'a> Output<'a> {
    fn begin(export: Export, to: &'a mut dyn Write) -> io::Result<Output<'a>> {
        const COLUMNS: [&str; 6] = ["id", "name", "email", "createdAt", "updatedAt", "passwordHash"];
        if export.format == Format::Ndjson {
            return Ok(Output::Json(BufWriter::with_capacity(WRITE, to)));
        }
        let mut csv = csv::WriterBuilder::new().buffer_capacity(WRITE).from_writer(to);
        csv.write_record(&COLUMNS[..if export.with_password_hashes { 6 } else { 5 }])?;
        Ok(Output::Csv { csv: Box::new(csv), export })
    }

    fn user(&mut self, user: &ExportedUser) -> io::Result<()> {
        match self {
            Output::Json(lines) => {
                let line = Line {
                    id: Digits(user.id),
                    name: user.name,
                    email: user.email,
                    created_at: user.created_at,
                    updated_at: user.updated_at,
                    password_hash: user.password_hash,
                };
                serde_json::to_writer(&mut *lines, &line)?;
                lines.write_all(b"\n")
            }
            Output::Csv { csv, export } => {
                csv.write_field(itoa::Buffer::new().format(user.id))?;
                for text in [user.name, user.email] {
                    match export.for_spreadsheets {
                        true => csv.write_field(without_formulas(text))?,
                        false => csv.write_field(text)?,
                    }
                }
                csv.write_field(user.created_at.to_rfc3339())?;
                csv.write_field(user.updated_at.to_rfc3339())?;
                if export.with_password_hashes {
                    csv.write_field(user.password_hash.unwrap_or_default())?;
                }
                Ok(csv.write_record(None::<&[u8]>)?)
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
