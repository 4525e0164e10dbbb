//! Whether a record is a user that may be imported, and its row for the database.
//!
//! Knows what a record says and which rules hold; no file, no database.

use super::{
    Format, Import,
    fields::{Column, Field, Fields, parse_json},
    records::{Batch, Record},
};
use crate::{
    app::validation::Validation,
    config::{Config, Validation as Mode},
    db::bulk::ImportedUser,
    error::Error,
    users::{
        password::{Hasher, Password, PasswordHash},
        user::{NewUser, Timestamp, UserChanges},
    },
};
use serde_json::{Map, Value};
use std::{borrow::Cow, fmt};

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
    /// A row of the table of users itself, where a time that is missing is this one; without the password.
    Stored { present: Timestamp },
}

/// The rules that records are held to.
pub(super) struct Rules {
    validation: Validation,
    as_is: bool,
    keep_ids: bool,
    rows: Rows,
    hasher: Hasher,
    format: Format,
    columns: Vec<Column>,
}

impl Rules {
    /// The rules of these settings and of this import.
    pub fn new(config: &Config, import: Import, rows: Rows) -> Rules {
        Rules {
            validation: Validation::new(config.schema, Mode::Declarative),
            as_is: import.as_is,
            keep_ids: import.keep_ids,
            rows,
            hasher: Hasher::new(config.password_hashing),
            format: import.format.unwrap_or(Format::Ndjson),
            columns: Vec::new(),
        }
    }

    /// How a user is written.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Takes the columns from the header of a CSV file. The error is what is wrong with it.
    pub fn read_header(&mut self, header: &[u8]) -> Result<(), String> {
        let mut record = csv::ByteRecord::new();
        reader(header).read_byte_record(&mut record).map_err(|error| error.to_string())?;
        let names = record.iter().map(str::from_utf8).collect::<Result<Vec<_>, _>>();
        let names = names.map_err(|_| "is not UTF-8".to_owned())?;
        let unknown = names.iter().filter(|name| Column::named(name).is_none());
        let unknown: Vec<String> = unknown.map(|name| (*name).to_owned()).collect();
        let known = names.iter().filter_map(|name| Column::named(name));
        self.columns = known.collect();
        let required = [("name", Column::Name), ("email", Column::Email), ("id", Column::Id)];
        let mut required = required.iter().take(if self.keep_ids { 3 } else { 2 });
        if let Some((missing, _)) = required.find(|(_, column)| !self.columns.contains(column)) {
            for (separator, name) in [(';', "semicolons"), ('\t', "tabs")] {
                let is_known = |name: &str| Column::named(name).is_some();
                if names.iter().any(|name| name.contains(separator) && name.split(separator).any(is_known)) {
                    return Err(format!("the header is separated by {name}, and has to be by commas"));
                }
            }
            return Err(format!("the header has no column {missing}: {}", names.join(",")));
        }
        if !unknown.is_empty() {
            return Err(Error::MassAssignment(unknown).to_string());
        }
        let twice = names.iter().find(|name| names.iter().filter(|other| other == name).count() > 1);
        twice.map_or(Ok(()), |name| Err(format!("the header has the column {name} twice")))
    }

    /// Checks the records of a batch, and hashes their clear passwords. Blocks for nothing else.
    pub fn check(&self, batch: &Batch) -> Checked {
        let mut checked = Checked::default();
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
                self.user(*line, fields?)
            });
            match user {
                Ok((user, has_password)) => {
                    checked.count += 1;
                    checked.with_password += u64::from(has_password);
                    match self.rows {
                        Rows::Staged { .. } => user.write_staged(&mut checked.rows),
                        Rows::Stored { present } => user.write_stored(present, &mut checked.rows),
                    }
                }
                Err(problem) => checked.complaints.push(Complaint { line: *line, problem }),
            }
        }
        checked
    }

    fn parse_csv<'a>(&self, values: &'a csv::ByteRecord) -> Result<Fields<'a>, String> {
        if values.len() != self.columns.len() {
            let (found, expected) = (values.len(), self.columns.len());
            return Err(format!("has {found} fields, and the header {expected}"));
        }
        let mut fields = Fields::default();
        for (value, column) in values.iter().zip(&self.columns) {
            let text = str::from_utf8(value).map_err(|_| "is not UTF-8".to_owned())?;
            // Only these may be empty; of the others, that is how CSV says that there is none.
            if !text.is_empty() || matches!(column, Column::Name | Column::Email) {
                fields.set(column.clone(), Field::Text(text.into()));
            }
        }
        Ok(fields)
    }

    /// The user, and whether it has a password.
    fn user<'a>(&self, line: u64, fields: Fields<'a>) -> Result<(ImportedUser<'a>, bool), String> {
        let mut problems = Vec::new();
        let hash = fields.password_hash.and_then(|field| match field {
            Field::Null => None,
            Field::Text(text) => match PasswordHash::imported(text.into_owned()) {
                Ok(hash) => Some(hash),
                Err(problem) => {
                    problems.push(format!("/passwordHash {problem}"));
                    None
                }
            },
            Field::Whole(_) | Field::Other => {
                problems.push("/passwordHash must be a string".to_owned());
                None
            }
        });
        let id = match fields.id {
            _ if !self.keep_ids => None,
            None | Some(Field::Null) => {
                problems.push("/id is required by --keep-ids".to_owned());
                None
            }
            Some(id) => {
                let id = whole(&id);
                if id.is_none() {
                    problems.push(format!("/id must be a whole number from 1 to {}", i64::MAX));
                }
                id
            }
        };
        let mut time = |field, name| match field {
            None | Some(Field::Null) => None,
            Some(Field::Text(text)) if let Some(time) = Timestamp::parse(&text) => Some(time),
            Some(_) => {
                problems.push(format!("/{name} must be a time as in 2020-02-29T23:59:59.123456Z"));
                None
            }
        };
        let (created_at, updated_at) =
            (time(fields.created_at, "createdAt"), time(fields.updated_at, "updatedAt"));
        if hash.is_some() && fields.password.is_some() {
            problems.push("/password and /passwordHash exclude one another".to_owned());
        }
        if !fields.foreign.is_empty() {
            problems.push(Error::MassAssignment(fields.foreign).to_string());
        }
        let has_hash = hash.is_some() || !problems.is_empty();
        let accepted = self.accept(fields.name, fields.email, fields.password, has_hash);
        let (name, email, password) = accepted.unwrap_or_else(|mut found| {
            problems.append(&mut found);
            Default::default()
        });
        if !problems.is_empty() {
            return Err(problems.join("; "));
        }
        let has_password = hash.is_some() || password.is_some();
        let password_hash = match (hash, password, self.rows) {
            (None, Some(Password::Clear(clear)), Rows::Staged { hash: true }) => {
                Some(self.hasher.hash(&clear).map_err(|error| error.to_string())?)
            }
            (hash, ..) => hash,
        };
        Ok((ImportedUser { line, id, name, email, password_hash, created_at, updated_at }, has_password))
    }

    /// Name, address and password, if they are accepted. `has_hash`: a password is not asked for.
    fn accept<'a>(
        &self,
        name: Option<Field<'a>>,
        email: Option<Field<'a>>,
        password: Option<Field<'a>>,
        has_hash: bool,
    ) -> Result<Accepted<'a>, Vec<String>> {
        let mut body = Map::new();
        let mut put = |key: &str, field: Option<Field>| {
            let value = match field {
                None => return,
                Some(Field::Text(text)) => Value::String(text.into_owned()),
                Some(Field::Null) => Value::Null,
                Some(Field::Whole(_) | Field::Other) => Value::Bool(false),
            };
            body.insert(key.to_owned(), value);
        };
        put("name", name);
        put("email", email);
        put("password", password);
        if self.as_is {
            let missing = ["name", "email"].into_iter().filter(|key| !body.contains_key(*key));
            let missing: Vec<String> = missing.map(|key| format!("/{key} is required")).collect();
            let changes = UserChanges::from_body(body);
            return match changes.map_err(problems)? {
                UserChanges { name: Some(name), email: Some(email), password } if missing.is_empty() => {
                    Ok((name.into(), email.into(), password.flatten()))
                }
                _ => Err(missing),
            };
        }
        let stand_in = has_hash && !body.contains_key("password");
        if stand_in {
            body.insert("password".to_owned(), Value::String("has a hash".to_owned()));
        }
        let new = self.validation.create(body).and_then(NewUser::from_body).map_err(problems)?;
        Ok((new.name.into(), new.email.into(), new.password.filter(|_| !stand_in)))
    }
}

/// Name, address and password.
type Accepted<'a> = (Cow<'a, str>, Cow<'a, str>, Option<Password>);

/// The id, where it is one in canonical form.
fn whole(id: &Field) -> Option<i64> {
    match id {
        Field::Whole(number) => i64::try_from(*number).ok().filter(|id| *id > 0),
        Field::Text(text) if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0') => {
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
