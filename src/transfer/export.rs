//! Writes all users of one snapshot of the database, in the order of their ids, as lines of JSON or as CSV.

use super::{Format, PASSWORD_HASH_FIELD, TransferError};
use crate::config::Config;
use crate::db::{
    bulk::{begin_export, for_each_user},
    migrate::connect_if_migrated,
};
use crate::users::{
    timestamp,
    user::{USER_FIELDS, User},
};
use serde::Serialize;
use std::io::{self, BufWriter, Write};

#[derive(Debug, Clone, Copy)]
pub struct ExportOptions {
    pub format: Format,
    /// True if the export has the hash of each user's password, too, as `passwordHash`.
    pub with_password_hashes: bool,
    /// True if the CSV is for a spreadsheet: with a byte order mark, and with an apostrophe before texts that are
    /// formulas.
    pub for_spreadsheets: bool,
}

/// Characters that begin a formula in a spreadsheet, and white space that a spreadsheet ignores before a formula.
const FORMULA_CHARS: [char; 11] = ['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠'];

/// Characters at which a spreadsheet may end a cell, even in quotes. A semicolon does so if the language of the
/// spreadsheet writes commas in numbers.
const CELL_ENDS: [char; 4] = [';', '\t', '\r', '\n'];

/// Number of bytes of the output that are collected for one write.
const BYTES_PER_WRITE: usize = 64 << 10;

/// Writes all users to `to`. Takes some hundred kilobytes of memory, however many users there are. Blocks until all
/// users are written: a slow reader of the output makes the database wait.
///
/// # Errors
/// After an error the output is incomplete.
pub fn export(config: &Config, options: ExportOptions, to: &mut dyn Write) -> Result<(), TransferError> {
    let mut client = connect_if_migrated(config)?;
    let mut transaction = begin_export(&mut client)?;
    let mut to = BufWriter::with_capacity(BYTES_PER_WRITE, to);
    options.write_header(&mut to).map_err(TransferError::Write)?;
    for_each_user(&mut transaction, options.with_password_hashes, |user, hash| {
        options.write_user(user, hash, &mut to).map_err(TransferError::Write)
    })?;
    to.flush().map_err(TransferError::Write)
}

/// A line of JSON: the user as `GET /users/ID` answers it, and the hash of the password if the export has hashes and
/// the user has a password.
#[derive(Serialize)]
struct JsonLine<'a> {
    #[serde(flatten)]
    user: User<&'a str>,
    #[serde(rename = "passwordHash", skip_serializing_if = "Option::is_none")]
    password_hash: Option<&'a str>,
}

impl ExportOptions {
    fn write_header(&self, to: &mut impl Write) -> io::Result<()> {
        if self.format == Format::Ndjson {
            return Ok(());
        }
        // Writes a byte order mark, because a spreadsheet takes UTF-8 without it for an older encoding.
        let mark = if self.for_spreadsheets { "\u{feff}" } else { "" };
        let hash = self.with_password_hashes.then_some(PASSWORD_HASH_FIELD);
        let names: Vec<&str> = USER_FIELDS.into_iter().chain(hash).collect();
        writeln!(to, "{mark}{}", names.join(","))
    }

    fn write_user(&self, user: User<&str>, hash: Option<&str>, to: &mut impl Write) -> io::Result<()> {
        if self.format == Format::Ndjson {
            serde_json::to_writer(&mut *to, &JsonLine { user, password_hash: hash })?;
            return to.write_all(b"\n");
        }
        let User { id, name, email, created_at, updated_at, version: _, credential: _ } = user;
        let (name, email) = (self.format_csv_field(name), self.format_csv_field(email));
        let [created_at, updated_at] = [created_at, updated_at].map(timestamp::to_text);
        let hash = self.format_csv_field(hash.unwrap_or_default());
        let hash = if self.with_password_hashes { format!(",{hash}") } else { String::new() };
        writeln!(to, "{id},{name},{email},{created_at},{updated_at}{hash}")
    }

    /// Returns a text as a field of CSV, in quotes if the text has a comma, a quote or a line end.
    fn format_csv_field(&self, text: &str) -> String {
        let text = if self.for_spreadsheets { disable_formulas(text) } else { text.to_owned() };
        let is_quoted = text.contains([',', '"', '\r', '\n']);
        if is_quoted { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
    }
}

/// Returns the text with an apostrophe before each formula, so that a spreadsheet does not compute it. A formula is at
/// the start, or behind a character that may end a cell.
fn disable_formulas(text: &str) -> String {
    let mark = |cell: &str| if cell.trim_start_matches('"').starts_with(FORMULA_CHARS) { "'" } else { "" };
    text.split_inclusive(CELL_ENDS).flat_map(|cell| [mark(cell), cell]).collect()
}
