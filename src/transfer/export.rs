//! All users of one snapshot, by id, as lines of JSON or as CSV.

use super::{Format, PASSWORD_HASH, TransferError};
use crate::config::Config;
use crate::db::{
    bulk::{begin_export, each_user},
    migrate::connect_migrated,
};
use crate::users::{
    timestamp,
    user::{FIELDS, User},
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
    /// Writes CSV for a spreadsheet: with a byte order mark, and without formulas.
    pub for_spreadsheets: bool,
}

/// Characters that begin a formula in a spreadsheet, or that a spreadsheet ignores before one.
const FORMULA: [char; 11] = ['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠'];

/// Characters that end a cell, within quotes or not, if a spreadsheet's language uses the comma in numbers.
const END_OF_CELL: [char; 4] = [';', '\t', '\r', '\n'];

/// Bytes of one write.
const WRITE: usize = 64 << 10;

/// Writes all users. Holds some hundred kilobytes, however many there are. Blocks until all are written; a slow reader of
/// the output makes the database wait, with its snapshot.
///
/// # Errors
/// After an error the output is not complete.
pub fn export(config: &Config, export: Export, to: &mut dyn Write) -> Result<(), TransferError> {
    let mut client = connect_migrated(config)?;
    let mut transaction = begin_export(&mut client)?;
    let mut to = BufWriter::with_capacity(WRITE, to);
    export.header(&mut to).map_err(TransferError::Write)?;
    each_user(&mut transaction, export.with_password_hashes, |user, hash| {
        export.user(user, hash, &mut to).map_err(TransferError::Write)
    })?;
    to.flush().map_err(TransferError::Write)
}

/// A user as GET answers it, and the hash if it is exported and there is one.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    user: User<&'a str>,
    #[serde(rename = "passwordHash", skip_serializing_if = "Option::is_none")]
    password_hash: Option<&'a str>,
}

impl Export {
    fn header(&self, to: &mut impl Write) -> io::Result<()> {
        if self.format == Format::Ndjson {
            return Ok(());
        }
        // Without a byte order mark, spreadsheets take UTF-8 for an older encoding.
        let mark = if self.for_spreadsheets { "\u{feff}" } else { "" };
        let hash = self.with_password_hashes.then_some(PASSWORD_HASH);
        let names: Vec<&str> = FIELDS.into_iter().chain(hash).collect();
        writeln!(to, "{mark}{}", names.join(","))
    }

    fn user(&self, user: User<&str>, password_hash: Option<&str>, to: &mut impl Write) -> io::Result<()> {
        if self.format == Format::Ndjson {
            serde_json::to_writer(&mut *to, &Line { user, password_hash })?;
            return to.write_all(b"\n");
        }
        let User { id, name, email, created_at, updated_at, version: _, credential: _ } = user;
        let (name, email) = (self.cell(name), self.cell(email));
        let [created_at, updated_at] = [created_at, updated_at].map(timestamp::text);
        let hash = password_hash.unwrap_or_default();
        let hash = if self.with_password_hashes { format!(",{}", self.cell(hash)) } else { String::new() };
        writeln!(to, "{id},{name},{email},{created_at},{updated_at}{hash}")
    }

    /// Returns the text as a field of CSV.
    fn cell(&self, text: &str) -> String {
        let text = if self.for_spreadsheets { without_formulas(text) } else { text.to_owned() };
        let is_quoted = text.contains([',', '"', '\r', '\n']);
        if is_quoted { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
    }
}

/// Returns the text with an apostrophe before each formula: at its beginning, and behind each sign that may end a cell.
fn without_formulas(text: &str) -> String {
    let mark = |cell: &str| if cell.trim_start_matches('"').starts_with(FORMULA) { "'" } else { "" };
    text.split_inclusive(END_OF_CELL).flat_map(|cell| [mark(cell), cell]).collect()
}
