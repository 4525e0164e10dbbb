//! Whether a record is a user that may be imported, and its row for the database.
//!
//! Knows the fields of a record and the rules for them; no file, no database.

use super::{
    Import,
    read::{Batch, Layout, Source},
    select::{Columns, LeftOut, PASSWORD_HASH, Selection, unknown},
};
use crate::{
    app::validation::Validation,
    config::{Config, Validation as Mode},
    db::bulk::write_staged,
    error::Error,
    users::{
        password::{Hasher, PasswordHash},
        timestamp::Timestamp,
        user::{NewUser, UserChanges, UserRef},
    },
};
use serde_json::{Map, Value, error::Category};
use std::{fmt, io};

/// The problem of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// Whether the record is an element of an array, and no line.
    pub is_element: bool,
    /// Its number, from 1.
    pub number: u64,
    /// Quotes no value of the record.
    pub problem: String,
}

impl Complaint {
    /// Creates the complaint of a line.
    pub fn of_line(number: u64, problem: String) -> Complaint {
        Complaint { is_element: false, number, problem }
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Characters of a problem: it may have names of fields, which may be long.
        const MOST: usize = 1000;
        let unit = if self.is_element { "user" } else { "line" };
        // A name of a field may have what moves a terminal's cursor.
        let problem = self.problem.replace(char::is_control, "\u{fffd}");
        let end = problem.char_indices().nth(MOST).map_or(problem.len(), |(at, _)| at);
        write!(f, "{unit} {}: {}", self.number, &problem[..end])
    }
}

/// The outcome of a batch.
#[derive(Debug, Default)]
pub(super) struct Checked {
    pub records: u64,
    /// The rows of the accepted users, as the database takes them.
    pub rows: Vec<u8>,
    pub users: u64,
    /// Accepted users with a password, in clear or hashed.
    pub with_password: u64,
    pub complaints: Vec<Complaint>,
    pub left_out: LeftOut,
}

/// The rules for records.
pub(super) struct Rules {
    validation: Validation,
    as_is: bool,
    keep_ids: bool,
    /// Whether clear passwords are hashed: not if nothing is to be stored.
    hashes: bool,
    /// The time of users that have none in their record.
    present: Timestamp,
    hasher: Hasher,
    pub selection: Selection,
    layout: Layout,
    /// The columns of CSV.
    columns: Columns,
}

impl Rules {
    /// Creates the rules of an import.
    pub fn new(config: &Config, import: &Import, selection: Selection, present: Timestamp) -> Rules {
        Rules {
            validation: Validation::new(config.schema, Mode::Declarative),
            as_is: import.as_is,
            keep_ids: import.keep_ids,
            hashes: !import.dry_run,
            present,
            hasher: Hasher::new(config.password_hashing),
            selection,
            layout: Layout::Lines,
            columns: Columns::default(),
        }
    }

    /// Takes the layout of a stream, and the columns from the header if it is CSV. The inner error is the problem of that
    /// line. Blocks for the input.
    pub fn begin(&mut self, mut source: Source) -> io::Result<Result<Source, Complaint>> {
        self.layout = source.layout;
        let Layout::Csv(separator) = source.layout else { return Ok(Ok(source)) };
        let mut text = Vec::new();
        let Some((line, header)) = source.record(&mut text)? else { return Ok(Ok(source)) };
        let header = header.map_err(str::to_owned).and_then(|()| {
            let mut header = csv::StringRecord::new();
            reader(&text, separator).read_record(&mut header).map_err(|_| "is not UTF-8")?;
            self.selection.columns(&header)
        });
        Ok(match header {
            Ok(columns) => {
                self.columns = columns;
                Ok(source)
            }
            Err(problem) => Err(Complaint::of_line(line, problem)),
        })
    }

    /// Checks the records of a batch, and hashes their clear passwords. Blocks only for that work.
    pub fn check(&self, batch: &Batch) -> Checked {
        let mut checked = Checked { records: batch.records.len() as u64, ..Checked::default() };
        let mut csv = match self.layout {
            Layout::Csv(separator) => Some(reader(&batch.text, separator)),
            Layout::Lines | Layout::Array => None,
        };
        let mut row = csv::ByteRecord::new();
        let mut start = 0;
        for (number, end) in &batch.records {
            let fields = end.map_err(str::to_owned).and_then(|end| {
                let text = &batch.text[start..end];
                start = end;
                let Some(csv) = &mut csv else {
                    return Ok(Some(self.selection.of_object(object(text)?, &mut checked.left_out)));
                };
                csv.read_byte_record(&mut row).map_err(|error| error.to_string())?;
                self.selection.of_row(&self.columns, &row, &mut checked.left_out)
            });
            let user = fields.and_then(|fields| {
                fields.map(|fields| self.user(*number, fields, &mut checked.rows)).transpose()
            });
            match user {
                Ok(None) => {}
                Ok(Some(has_password)) => {
                    checked.users += 1;
                    checked.with_password += u64::from(has_password);
                }
                Err(problem) => {
                    let is_element = self.layout == Layout::Array;
                    checked.complaints.push(Complaint { is_element, number: *number, problem });
                }
            }
        }
        checked
    }

    /// Appends the row of a user. Returns whether it has a password; the error is the problem of the record.
    fn user(&self, number: u64, mut fields: Map<String, Value>, rows: &mut Vec<u8>) -> Result<bool, String> {
        let mut problems = Vec::new();
        let hash = fields.remove(PASSWORD_HASH).filter(|hash| !hash.is_null()).and_then(|hash| {
            let imported = PasswordHash::imported(hash);
            imported.map_err(|problem| problems.push(format!("/{PASSWORD_HASH} {problem}"))).ok()
        });
        let id = fields.remove("id").filter(|id| self.keep_ids && !id.is_null());
        let has_id = id.is_some();
        let id = id.as_ref().and_then(whole);
        if self.keep_ids && id.is_none() {
            problems.push(match has_id {
                true => format!("/id must be a whole number from 1 to {}", i64::MAX),
                false => "/id is required by --keep-ids".to_owned(),
            });
        }
        let mut time = |name| match fields.remove(name) {
            None | Some(Value::Null) => self.present,
            Some(Value::String(text)) if let Some(time) = Timestamp::parse(&text) => time,
            Some(_) => {
                problems.push(format!("/{name} must be a time as in 2020-02-29T23:59:59.123456Z"));
                self.present
            }
        };
        let (created_at, updated_at) = (time("createdAt"), time("updatedAt"));
        if hash.is_some() && fields.contains_key("password") {
            problems.push("/password and /passwordHash exclude one another".to_owned());
        }
        let has_hash = hash.is_some() || !problems.is_empty();
        let new = match self.accept(fields, has_hash) {
            Ok(new) if problems.is_empty() => new,
            refused => {
                problems.extend(refused.err().unwrap_or_default());
                return Err(problems.join("; "));
            }
        };
        let has_password = hash.is_some() || new.password.is_some();
        let hash = match &new.password {
            Some(clear) if self.hashes => Some(self.hasher.hash(clear).map_err(|error| error.to_string())?),
            _ => hash,
        };
        let user = UserRef { id: 0, name: &new.name, email: &new.email, created_at, updated_at };
        write_staged(number, id, hash.as_ref(), &user, rows);
        Ok(has_password)
    }

    /// Returns the user of these fields, or the problems that they have. `has_hash`: no password is required.
    fn accept(&self, mut body: Map<String, Value>, has_hash: bool) -> Result<NewUser, Vec<String>> {
        if self.as_is {
            let missing = ["name", "email"].into_iter().filter(|key| !body.contains_key(*key));
            let missing: Vec<String> = missing.map(|key| format!("/{key} is required")).collect();
            let changes = UserChanges::as_is(body);
            let new = changes.map_err(problems)?.into_new();
            return new.filter(|_| missing.is_empty()).ok_or(missing);
        }
        let is_stand_in = has_hash && !body.contains_key("password");
        if is_stand_in {
            body.insert("password".to_owned(), Value::String("has a hash".to_owned()));
        }
        let new = self.validation.create(body).and_then(NewUser::from_body).map_err(problems)?;
        Ok(NewUser { password: new.password.filter(|_| !is_stand_in), ..new })
    }
}

/// Parses a line of JSON.
fn object(text: &[u8]) -> Result<Map<String, Value>, String> {
    // Without its line feed, so that every error is on one line.
    let text = str::from_utf8(text.trim_ascii_end()).map_err(|_| "is not UTF-8")?;
    serde_json::from_str(text).map_err(|error| match error.classify() {
        Category::Data => "is not a JSON object".to_owned(),
        _ => format!("is not JSON: {}", error.to_string().replace(" at line 1 column ", " at column ")),
    })
}

/// Returns the id if it is a positive whole number in canonical form.
fn whole(id: &Value) -> Option<i64> {
    match id {
        Value::Number(number) => number.as_i64().filter(|id| *id > 0),
        Value::String(text) if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0') => {
            text.parse().ok()
        }
        _ => None,
    }
}

/// Returns the problems that a refusal names.
fn problems(error: Error) -> Vec<String> {
    match error {
        Error::Invalid(violations) | Error::Unprocessable(violations) => {
            violations.iter().map(|violation| format!("{} {}", violation.path, violation.message)).collect()
        }
        Error::MassAssignment(names) => vec![unknown(names)],
        other => vec![other.to_string()],
    }
}

fn reader(text: &[u8], separator: u8) -> csv::Reader<&[u8]> {
    let mut reader = csv::ReaderBuilder::new();
    reader.has_headers(false).flexible(true).terminator(csv::Terminator::Any(b'\n')).delimiter(separator);
    reader.from_reader(text)
}
