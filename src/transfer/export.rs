//! Writes all users of one snapshot of the database, by id, as lines of JSON or as CSV.

use super::{Format, PASSWORD_HASH, TransferError};
use crate::config::Config;
use crate::db::{
    bulk::{begin_export, for_each_user},
    migrate::connect_migrated,
};
use crate::users::{
    timestamp,
    user::{USER_FIELDS, User},
};
use serde::Serialize;
use std::io::{self, BufWriter, Write};

/// Options of an export.
#[derive(Debug, Clone, Copy)]
pub struct Export {
    /// The format of the output.
    pub format: Format,
    /// Adds the hash of the password, as `passwordHash`.
    pub with_password_hashes: bool,
    /// Writes CSV for a spreadsheet: with a byte order mark, and with an apostrophe before texts that are formulas.
    pub for_spreadsheets: bool,
}

/// Characters that begin a formula in a spreadsheet, and white space that a spreadsheet ignores before a formula.
const FORMULA_CHARS: [char; 11] = ['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠'];

/// Characters that may end a cell, even in quotes. A semicolon separates cells if the spreadsheet's language writes
/// commas in numbers.
const CELL_ENDS: [char; 4] = [';', '\t', '\r', '\n'];

/// Bytes of the output that are written at once.
const WRITE_BYTES: usize = 64 << 10;

/// Writes all users. Takes some hundred kilobytes of memory, however many users there are. Blocks until all users are
/// written: a slow reader of the output makes the database wait.
///
/// # Errors
/// After an error the output is incomplete.
pub fn export(config: &Config, export: Export, to: &mut dyn Write) -> Result<(), TransferError> {
    let mut client = connect_migrated(config)?;
    let mut transaction = begin_export(&mut client)?;
    let mut to = BufWriter::with_capacity(WRITE_BYTES, to);
    export.write_header(&mut to).map_err(TransferError::Write)?;
    for_each_user(&mut transaction, export.with_password_hashes, |user, hash| {
        export.write_user(user, hash, &mut to).map_err(TransferError::Write)
    })?;
    to.flush().map_err(TransferError::Write)
}

/// A line of JSON: the user as a GET answers, and the hash of the password if the export has hashes and the user has
/// one.
#[derive(Serialize)]
struct JsonLine<'a> {
    #[serde(flatten)]
    user: User<&'a str>,
    #[serde(rename = "passwordHash", skip_serializing_if = "Option::is_none")]
    password_hash: Option<&'a str>,
}

impl Export {
    fn write_header(&self, to: &mut impl Write) -> io::Result<()> {
        if self.format == Format::Ndjson {
            return Ok(());
        }
        // A spreadsheet takes UTF-8 without a byte order mark for an older encoding.
        let mark = if self.for_spreadsheets { "\u{feff}" } else { "" };
        let hash = self.with_password_hashes.then_some(PASSWORD_HASH);
        let names: Vec<&str> = USER_FIELDS.into_iter().chain(hash).collect();
        writeln!(to, "{mark}{}", names.join(","))
    }

    fn write_user(&self, user: User<&str>, hash: Option<&str>, to: &mut impl Write) -> io::Result<()> {
        if self.format == Format::Ndjson {
            serde_json::to_writer(&mut *to, &JsonLine { user, password_hash: hash })?;
            return to.write_all(b"\n");
        }
        let User { id, name, email, created_at, updated_at, version: _, credential: _ } = user;
        let (name, email) = (self.csv_cell(name), self.csv_cell(email));
        let [created_at, updated_at] = [created_at, updated_at].map(timestamp::to_text);
        let hash = self.csv_cell(hash.unwrap_or_default());
        let hash = if self.with_password_hashes { format!(",{hash}") } else { String::new() };
        writeln!(to, "{id},{name},{email},{created_at},{updated_at}{hash}")
    }

    /// Returns a text as a field of CSV, in quotes if necessary.
    fn csv_cell(&self, text: &str) -> String {
        let text = if self.for_spreadsheets { disable_formulas(text) } else { text.to_owned() };
        let is_quoted = text.contains([',', '"', '\r', '\n']);
        if is_quoted { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
    }
}

/// Writes an apostrophe before each formula in a text. A formula is at the start, or behind a character that may end a
/// cell.
fn disable_formulas(text: &str) -> String {
    let mark = |cell: &str| if cell.trim_start_matches('"').starts_with(FORMULA_CHARS) { "'" } else { "" };
    text.split_inclusive(CELL_ENDS).flat_map(|cell| [mark(cell), cell]).collect()
}
