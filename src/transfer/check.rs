//! Whether a record is a user that may be imported, and its row for the database.
//!
//! Knows what a record says and which rules hold; no file, no database.

use super::{
    Format, Import,
    fields::{Fields, PASSWORD_HASH, is_known, parse_json},
    records::{Batch, Record},
};
use crate::{
    app::validation::Validation,
    config::{Config, Validation as Mode},
    db::transfer::{write_staged, write_unstaged},
    error::Error,
    users::{
        password::{Hasher, PasswordHash},
        timestamp::Timestamp,
        user::{FILLABLE, NewUser, UserChanges, UserRef},
    },
};
use serde_json::{Map, Value};
use std::fmt;

/// What is wrong with a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// Its number, from 1.
    pub line: u64,
    /// Never a password, or a hash of one.
    pub problem: String,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It may hold the name of a field, and a name may hold what moves a terminal's cursor.
        let problem = self.problem.replace(char::is_control, "\u{fffd}");
        write!(f, "line {}: {problem}", self.line)
    }
}

/// What a batch has come to.
#[derive(Debug, Default)]
pub(super) struct Checked {
    pub lines: u64,
    /// Bytes of the stream up to its end.
    pub position: u64,
    /// The rows of those that may be imported, as the database takes them.
    pub rows: Vec<u8>,
    pub count: u64,
    /// How many of them have a password, in clear or hashed.
    pub with_password: u64,
    pub complaints: Vec<Complaint>,
}

/// What becomes of a user that is accepted.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rows {
    /// A row that is staged. Whether clear passwords are hashed: not where nothing is to be stored.
    Staged { hash: bool },
    /// A row of the table of users itself, without the password.
    Stored,
}

/// The rules that records are held to.
pub(super) struct Rules {
    validation: Validation,
    as_is: bool,
    keep_ids: bool,
    rows: Rows,
    /// The time of users that have none in their line.
    present: Timestamp,
    hasher: Hasher,
    /// How a user is written.
    pub format: Format,
    /// Of a CSV file: the names of its fields.
    columns: Vec<String>,
}

impl Rules {
    /// The rules of these settings and of this import.
    pub fn new(config: &Config, import: Import, rows: Rows, present: Timestamp) -> Rules {
        Rules {
            validation: Validation::new(config.schema, Mode::Declarative),
            as_is: import.as_is,
            keep_ids: import.keep_ids,
            rows,
            present,
            hasher: Hasher::new(config.password_hashing),
            format: import.format.unwrap_or(Format::Ndjson),
            columns: Vec::new(),
        }
    }

    /// Takes the columns from the header of a CSV file. The error is what is wrong with it.
    pub fn read_header(&mut self, header: &[u8]) -> Result<(), String> {
        let mut record = csv::ByteRecord::new();
        reader(header).read_byte_record(&mut record).map_err(|error| error.to_string())?;
        let names = record.iter().map(str::from_utf8).collect::<Result<Vec<_>, _>>();
        let names = names.map_err(|_| "is not UTF-8".to_owned())?;
        let required = ["name", "email", "id"];
        let mut required = required.iter().take(if self.keep_ids { 3 } else { 2 });
        if let Some(missing) = required.find(|name| !names.contains(name)) {
            for (separator, name) in [(';', "semicolons"), ('\t', "tabs")] {
                if names.iter().any(|name| name.contains(separator) && name.split(separator).any(is_known)) {
                    return Err(format!("the header is separated by {name}, and has to be by commas"));
                }
            }
            return Err(format!("the header has no column {missing}: {}", names.join(",")));
        }
        self.columns = names.iter().map(|name| (*name).to_owned()).collect();
        let unknown: Vec<String> = self.columns.iter().filter(|name| !is_known(name)).cloned().collect();
        if !unknown.is_empty() {
            return Err(Error::MassAssignment(unknown).to_string());
        }
        let twice = names.iter().find(|name| names.iter().filter(|other| other == name).count() > 1);
        twice.map_or(Ok(()), |name| Err(format!("the header has the column {name} twice")))
    }

    /// Checks the records of a batch, and hashes their clear passwords. Blocks for nothing else.
    pub fn check(&self, batch: &Batch) -> Checked {
        let (lines, position) = (batch.records.len() as u64, batch.position);
        let mut checked = Checked { lines, position, ..Checked::default() };
        let mut csv = (self.format == Format::Csv).then(|| reader(&batch.text));
        let mut values = csv::ByteRecord::new();
        let mut start = 0;
        for Record { line, end } in &batch.records {
            let user = end.map_err(str::to_owned).and_then(|end| {
                let text = &batch.text[start..end];
                start = end;
                let fields = match &mut csv {
                    None => parse_json(text),
                    Some(csv) => {
                        csv.read_byte_record(&mut values).map_err(|error| error.to_string())?;
                        self.parse_csv(&values)
                    }
                };
                self.user(*line, fields?, &mut checked.rows)
            });
            match user {
                Ok(has_password) => {
                    checked.count += 1;
                    checked.with_password += u64::from(has_password);
                }
                Err(problem) => checked.complaints.push(Complaint { line: *line, problem }),
            }
        }
        checked
    }

    fn parse_csv(&self, values: &csv::ByteRecord) -> Result<Fields, String> {
        if values.len() != self.columns.len() {
            let (found, expected) = (values.len(), self.columns.len());
            return Err(format!("has {found} fields, and the header {expected}"));
        }
        let mut fields = Fields::default();
        for (value, column) in values.iter().zip(&self.columns) {
            let text = str::from_utf8(value).map_err(|_| "is not UTF-8".to_owned())?;
            // Only these may be empty; of the others, that is how CSV says that there is none.
            if !text.is_empty() || matches!(column.as_str(), "name" | "email") {
                fields.set(column, text.into());
            }
        }
        Ok(fields)
    }

    /// Appends the row of a user who may be imported; whether it has a password.
    fn user(&self, line: u64, mut fields: Fields, rows: &mut Vec<u8>) -> Result<bool, String> {
        let mut problems = Vec::new();
        let hash = match fields.take(PASSWORD_HASH) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => {
                PasswordHash::imported(text).map(Some).map_err(|problem| format!("/passwordHash {problem}"))
            }
            Some(_) => Err("/passwordHash must be a string".to_owned()),
        };
        let id = match fields.take("id") {
            _ if !self.keep_ids => Ok(None),
            None | Some(Value::Null) => Err("/id is required by --keep-ids".to_owned()),
            Some(id) => {
                let wrong = || format!("/id must be a whole number from 1 to {}", i64::MAX);
                whole(&id).map(Some).ok_or_else(wrong)
            }
        };
        let (hash, id) = (noted(hash, &mut problems), noted(id, &mut problems));
        let mut time = |name| match fields.take(name) {
            None | Some(Value::Null) => self.present,
            Some(Value::String(text)) if let Some(time) = Timestamp::parse(&text) => time,
            Some(_) => {
                problems.push(format!("/{name} must be a time as in 2020-02-29T23:59:59.123456Z"));
                self.present
            }
        };
        let (created_at, updated_at) = (time("createdAt"), time("updatedAt"));
        let body = FILLABLE.into_iter().filter_map(|name| Some((name.to_owned(), fields.take(name)?)));
        let body: Map<String, Value> = body.collect();
        if hash.is_some() && body.contains_key("password") {
            problems.push("/password and /passwordHash exclude one another".to_owned());
        }
        if !fields.foreign.is_empty() {
            problems.push(Error::MassAssignment(fields.foreign).to_string());
        }
        let has_hash = hash.is_some() || !problems.is_empty();
        let new = match self.accept(body, has_hash) {
            Ok(new) if problems.is_empty() => new,
            refused => {
                problems.extend(refused.err().unwrap_or_default());
                return Err(problems.join("; "));
            }
        };
        let has_password = hash.is_some() || new.password.is_some();
        let password_hash = match (hash, &new.password, self.rows) {
            (None, Some(clear), Rows::Staged { hash: true }) => {
                Some(self.hasher.hash(clear).map_err(|error| error.to_string())?)
            }
            (hash, ..) => hash,
        };
        let user = UserRef { id: 0, name: &new.name, email: &new.email, created_at, updated_at };
        match self.rows {
            Rows::Staged { .. } => write_staged(line, id, password_hash.as_ref(), &user, rows),
            Rows::Stored => write_unstaged(&user, rows),
        }
        Ok(has_password)
    }

    /// The user of these fields, if they are accepted. `has_hash`: a password is not asked for.
    fn accept(&self, mut body: Map<String, Value>, has_hash: bool) -> Result<NewUser, Vec<String>> {
        if self.as_is {
            let missing = ["name", "email"].into_iter().filter(|key| !body.contains_key(*key));
            let missing: Vec<String> = missing.map(|key| format!("/{key} is required")).collect();
            let changes = UserChanges::as_is(body);
            let new = changes.map_err(problems)?.into_new();
            return new.filter(|_| missing.is_empty()).ok_or(missing);
        }
        let stand_in = has_hash && !body.contains_key("password");
        if stand_in {
            body.insert("password".to_owned(), Value::String("has a hash".to_owned()));
        }
        let new = self.validation.create(body).and_then(NewUser::from_body).map_err(problems)?;
        Ok(NewUser { password: new.password.filter(|_| !stand_in), ..new })
    }
}

/// The value, unless there is a problem with it.
fn noted<T>(value: Result<Option<T>, String>, problems: &mut Vec<String>) -> Option<T> {
    value.unwrap_or_else(|problem| {
        problems.push(problem);
        None
    })
}

/// The id, where it is one in canonical form.
fn whole(id: &Value) -> Option<i64> {
    match id {
        Value::Number(number) => number.as_i64().filter(|id| *id > 0),
        Value::String(text) if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0') => {
            text.parse().ok()
        }
        _ => None,
    }
}

/// What a refusal says of a line.
fn problems(error: Error) -> Vec<String> {
    match error {
        Error::Invalid(violations) | Error::Unprocessable(violations) => {
            violations.iter().map(|violation| format!("{} {}", violation.path, violation.message)).collect()
        }
        other => vec![other.to_string()],
    }
}

fn reader(text: &[u8]) -> csv::Reader<&[u8]> {
    let mut reader = csv::ReaderBuilder::new();
    reader.has_headers(false).flexible(true).terminator(csv::Terminator::Any(b'\n'));
    reader.from_reader(text)
}
