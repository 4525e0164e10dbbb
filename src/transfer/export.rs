//! All users of one snapshot, by id, as lines of JSON or as CSV.

use super::{Format, PASSWORD_HASH, TransferError};
use crate::{
    config::Config,
    db::{
        bulk::{begin_export, count_users, each_user},
        open::Opening,
    },
    users::{timestamp, user::UserRef},
};
use serde::Serialize;
use std::{
    borrow::Cow,
    io::{self, BufWriter, Write},
};

/// Options of an export.
#[derive(Debug, Clone, Copy)]
pub struct Export {
    /// The format of the output.
    pub format: Format,
    /// Adds the hash of the password, as `passwordHash`.
    pub with_password_hashes: bool,
    /// Writes CSV that a spreadsheet reads as UTF-8 and finds no formula in.
    pub for_spreadsheets: bool,
}

/// Characters with which a formula begins in a spreadsheet, or which it leaves out before one.
const FORMULA: [char; 11] = ['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠'];

/// Characters that end a cell, within quotes or not, if a spreadsheet's language uses the comma in numbers.
const END_OF_CELL: [char; 4] = [';', '\t', '\r', '\n'];

/// Users between two calls of `on_progress`.
const STEP: u64 = 1000;

/// Writes all users. Returns their number. Holds some hundred kilobytes, however many there are. Blocks until all are
/// written; a slow reader of the output makes the database wait, with its snapshot. `on_progress` gets the number of users
/// that are written, and the number of all.
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
    let mut transaction = begin_export(&mut client, config.db_prepared)?;
    let total = count_users(&mut transaction)?;
    let mut to = BufWriter::new(to);
    export.header(&mut to).map_err(TransferError::Write)?;
    let mut done = 0;
    each_user(&mut transaction, export.with_password_hashes, |user, hash| {
        done += 1;
        if done % STEP == 0 {
            on_progress(done, total);
        }
        export.user(user, hash, &mut to).map_err(TransferError::Write)
    })?;
    to.flush().map_err(TransferError::Write)?;
    Ok(done)
}

/// A user as GET answers it, and the hash if it is exported and there is one.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    user: UserRef<'a>,
    #[serde(rename = "passwordHash", skip_serializing_if = "Option::is_none")]
    password_hash: Option<&'a str>,
}

impl Export {
    fn header(&self, to: &mut impl Write) -> io::Result<()> {
        if self.format == Format::Ndjson {
            return Ok(());
        }
        // Without a byte order mark, spreadsheets take UTF-8 for an older encoding.
        to.write_all(if self.for_spreadsheets { "\u{feff}" } else { "" }.as_bytes())?;
        let [id, name, email, created_at, updated_at] = UserRef::FIELDS;
        self.row([id, name, email, created_at, updated_at, PASSWORD_HASH], to)
    }

    fn user(&self, user: UserRef, password_hash: Option<&str>, to: &mut impl Write) -> io::Result<()> {
        if self.format == Format::Ndjson {
            serde_json::to_writer(&mut *to, &Line { user, password_hash })?;
            return to.write_all(b"\n");
        }
        let [created_at, updated_at] = [user.created_at, user.updated_at].map(timestamp::text);
        let (id, hash) = (user.id.to_string(), password_hash.unwrap_or_default());
        self.row([&id, user.name, user.email, &created_at, &updated_at, hash], to)
    }

    /// Writes a row of CSV: the last value is the hash of the password.
    fn row(&self, values: [&str; 6], to: &mut impl Write) -> io::Result<()> {
        let count = values.len() - usize::from(!self.with_password_hashes);
        writeln!(to, "{}", values[..count].iter().map(|text| self.cell(text)).collect::<Vec<_>>().join(","))
    }

    /// Returns the text as a field of CSV.
    fn cell<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let text = if self.for_spreadsheets { without_formulas(text).into() } else { Cow::from(text) };
        match text.contains([',', '"', '\r', '\n']) {
            true => format!("\"{}\"", text.replace('"', "\"\"")).into(),
            false => text,
        }
    }
}

/// Returns the text with an apostrophe before each formula, at its beginning or where a cell may begin in it.
fn without_formulas(text: &str) -> String {
    let quoted = |cell: &str| match cell.trim_start_matches('"').starts_with(FORMULA) {
        true => format!("'{cell}"),
        false => cell.to_owned(),
    };
    text.split_inclusive(END_OF_CELL).map(quoted).collect()
}
