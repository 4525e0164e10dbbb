//! The rules for records: which of their members are fields of a user, and whether these are a user that may be imported.
//!
//! Knows no file and no database, but the rows that the database takes.

use super::{Import, Imported, PASSWORD_HASH, read::Record};
use crate::{
    app::validation::BodySchemas,
    config::{Config, Validation as Mode},
    db::bulk::write_staged,
    error::Error,
    users::{
        password::{Hasher, PasswordHash},
        timestamp::Timestamp,
        user::{NewUser, UserChanges, UserRef},
    },
};
use parking_lot::Mutex;
use serde_json::{Map, Value};

/// The fields that a record may have.
const FIELDS: [&str; 7] = {
    let [id, name, email, created_at, updated_at] = UserRef::FIELDS;
    [id, name, email, created_at, updated_at, "password", PASSWORD_HASH]
};

/// A field, and the column or the dotted path of the member that it is read from.
type Path = (&'static str, String);

/// Fields that are read from members or columns of other names.
#[derive(Debug, Clone, Default)]
pub struct Mapping(Vec<Path>);

impl Mapping {
    /// Parses `name=displayName,email=emails.0.value`. The error says what is wrong with the text.
    pub fn parse(text: &str) -> Result<Mapping, String> {
        let mut paths: Vec<Path> = Vec::new();
        for pair in text.split(',') {
            let (field, path) = pair.split_once('=').unwrap_or_default();
            let field = FIELDS.into_iter().find(|known| *known == field.trim() && !path.trim().is_empty());
            let field = field
                .ok_or_else(|| format!("must be FIELD=MEMBER,…, and FIELD one of {}", FIELDS.join(", ")))?;
            if paths.iter().any(|(known, _)| *known == field) {
                return Err(format!("has {field} twice"));
            }
            paths.push((field, path.trim().to_owned()));
        }
        Ok(Mapping(paths))
    }
}

/// The rules of one import.
pub(super) struct Rules<'a> {
    pub import: &'a Import,
    validation: BodySchemas,
    hasher: Hasher,
    /// The time of users that have none in their record.
    present: Timestamp,
    paths: Vec<Path>,
    /// True if members that are no field are left out, else they are refused.
    leaves_out: bool,
}

impl Rules<'_> {
    /// Creates the rules. With a mapping, a name, an address and an id to be kept are read under their own names if it does
    /// not say otherwise, and every other field only if it says so.
    pub fn new<'a>(config: &Config, import: &'a Import, present: Timestamp) -> Rules<'a> {
        let mut paths = import.map.clone().unwrap_or_default().0;
        for field in FIELDS {
            let is_implied = import.map.is_none() || import.requires(field);
            if is_implied && paths.iter().all(|(mapped, _)| *mapped != field) {
                paths.push((field, field.to_owned()));
            }
        }
        Rules {
            import,
            validation: BodySchemas::new(config.schema, Mode::Declarative),
            hasher: Hasher::new(config.password_hashing),
            present,
            paths,
            leaves_out: import.ignore_unknown || import.map.is_some(),
        }
    }

    /// Returns whether a stream that begins with this line is one array, or one object with an array in it.
    pub fn is_document(&self, line: &[u8]) -> bool {
        match serde_json::from_slice(line) {
            Ok(Value::Object(object)) => {
                let is_user = self.paths.iter().any(|(field, path)| {
                    matches!(*field, "name" | "email") && member(&object, path).is_some()
                });
                !is_user && object.values().any(Value::is_array)
            }
            Ok(value) => value.is_array(),
            Err(error) => error.is_eof() || line.trim_ascii_start().starts_with(b"["),
        }
    }

    /// Returns the members that the columns are. The error says what is wrong with the header; it quotes no column of a line
    /// without the required ones, which is likely a row.
    pub fn header(&self, columns: Vec<String>) -> Result<Vec<String>, String> {
        let mut names: Vec<String> = columns.iter().map(|name| trimmed(name).to_owned()).collect();
        names.truncate(names.iter().rposition(|name| !name.is_empty()).map_or(0, |at| at + 1));
        for name in &mut names {
            let path = self.paths.iter().find(|(_, path)| name.eq_ignore_ascii_case(path));
            path.into_iter().for_each(|(_, path)| name.clone_from(path));
        }
        let is_other = |name: &&String| self.paths.iter().all(|(_, path)| path != *name);
        let others: Vec<String> = names.iter().filter(is_other).cloned().collect();
        for (field, path) in &self.paths {
            match names.iter().filter(|name| *name == path).count() {
                0 if self.import.requires(field) => {
                    return Err(format!(
                        "the header has no column {path}, and {} columns of other names; is it a header? --map \
                         {field}=COLUMN names the column",
                        others.len()
                    ));
                }
                0 | 1 => {}
                _ => return Err(format!("the header has the column {path} twice")),
            }
        }
        if others.is_empty() || self.leaves_out { Ok(names) } else { Err(unknown(others)) }
    }

    /// Returns the members of a row, none if all its values are blank. The error is its problem.
    pub fn row(&self, header: &[String], row: &[String]) -> Result<Option<Map<String, Value>>, String> {
        let is_blank = |values: &[String]| values.iter().all(|value| trimmed(value).is_empty());
        if is_blank(row) {
            return Ok(None);
        }
        if row.len() < header.len() || !is_blank(&row[header.len()..]) {
            return Err(format!("has {} fields, and the header {}", row.len(), header.len()));
        }
        let members = header.iter().zip(row).filter_map(|(name, value)| {
            let is = |field: &str| self.paths.iter().any(|(known, path)| *known == field && path == name);
            let value = if is("email") && !self.import.as_is { trimmed(value) } else { value };
            // An empty value is a text only of a name and an address; else it means that there is none.
            let is_there = !value.is_empty() || is("name") || is("email");
            is_there.then(|| (name.clone(), value.into()))
        });
        Ok(Some(members.collect()))
    }

    /// Checks records, and hashes their clear passwords. Returns the rows of the accepted users, as the database takes them.
    /// Blocks for that work.
    pub fn check(&self, records: Vec<Record>, imported: &Mutex<Imported>) -> Vec<u8> {
        let mut rows = Vec::new();
        for (number, object) in records {
            let fields = object.map(|object| self.fields(object, imported));
            if let Err(problem) = fields.and_then(|fields| self.user(number, fields, &mut rows)) {
                imported.lock().refuse(number, &problem);
            }
        }
        rows
    }

    /// Returns the fields of a record, and members that are no field if these are to be refused.
    fn fields(&self, mut object: Map<String, Value>, imported: &Mutex<Imported>) -> Map<String, Value> {
        if !self.leaves_out {
            return object;
        }
        let fields = self.paths.iter().filter_map(|(field, path)| {
            Some(((*field).to_owned(), member(&object, path)?.clone())).filter(|(_, value)| !value.is_null())
        });
        let fields = fields.collect();
        let is_read = |name: &str, path: &str| path == name || path.split('.').next() == Some(name);
        object.retain(|name, _| !self.paths.iter().any(|(_, path)| is_read(name, path)));
        object.keys().for_each(|name| imported.lock().leave_out(name));
        fields
    }

    /// Appends the row of a user. The error is the problem of the record.
    fn user(&self, number: u64, mut fields: Map<String, Value>, rows: &mut Vec<u8>) -> Result<(), String> {
        let mut take = |name: &str| fields.remove(name).filter(|value| !value.is_null());
        let hash = take(PASSWORD_HASH).map(PasswordHash::imported).transpose();
        let hash = hash.map_err(|problem| format!("/{PASSWORD_HASH} {problem}"))?;
        let id = match take("id").filter(|_| self.import.keep_ids) {
            None if self.import.keep_ids => return Err("/id is required by --keep-ids".to_owned()),
            None => None,
            Some(id) if let Some(id) = whole(&id) => Some(id),
            Some(_) => return Err(format!("/id must be a whole number from 1 to {}", i64::MAX)),
        };
        let mut time = |name: &str| match take(name) {
            None => Ok(self.present),
            Some(Value::String(text)) if let Some(time) = Timestamp::parse(&text) => Ok(time),
            Some(_) => Err(format!("/{name} must be a time as in 2020-02-29T23:59:59.123456Z")),
        };
        let (created_at, updated_at) = (time("createdAt")?, time("updatedAt")?);
        if hash.is_some() && fields.contains_key("password") {
            return Err("/password and /passwordHash exclude one another".to_owned());
        }
        let NewUser { name, email, password } = self.accept(fields, hash.is_some())?;
        let hash = match password {
            Some(clear) if !self.import.dry_run => {
                Some(self.hasher.hash(&clear).map_err(|error| error.to_string())?)
            }
            _ => hash,
        };
        let user = UserRef { id: 0, name: &name, email: &email, created_at, updated_at };
        write_staged(number, id, hash.as_ref(), &user, rows);
        Ok(())
    }

    /// Returns the user of these fields. If `has_hash`, no password is required.
    fn accept(&self, mut body: Map<String, Value>, has_hash: bool) -> Result<NewUser, String> {
        if self.import.as_is {
            let changes = UserChanges::read(body, true).map_err(problems)?;
            return changes.into_new().ok_or_else(|| "/name and /email are required".to_owned());
        }
        if has_hash {
            // It stands in for the password that the strict schema requires.
            body.insert("password".to_owned(), "has a hash".into());
        }
        let new = self.validation.create(body).and_then(NewUser::from_body).map_err(problems)?;
        Ok(NewUser { password: new.password.filter(|_| !has_hash), ..new })
    }
}

/// Returns the member at a dotted path, in which a number is a place in an array.
fn member<'a>(object: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    object.get(path).or_else(|| {
        let (first, rest) = path.split_once('.')?;
        object.get(first)?.pointer(&format!("/{}", rest.replace('.', "/")))
    })
}

/// Takes white space and zero-width no-break spaces off both ends.
fn trimmed(text: &str) -> &str {
    text.trim_matches(|sign: char| sign.is_whitespace() || sign == '\u{feff}')
}

/// Returns the id if it is a positive whole number in canonical form.
fn whole(id: &Value) -> Option<i64> {
    let number = id.as_i64().or_else(|| {
        let text = id.as_str()?;
        text.parse().ok().filter(|number: &i64| number.to_string() == text)
    });
    number.filter(|number| *number > 0)
}

/// Returns the problems that a refusal names.
fn problems(error: Error) -> String {
    match error {
        Error::Invalid(violations) | Error::Unprocessable(violations) => {
            let lines =
                violations.iter().map(|violation| format!("{} {}", violation.path, violation.message));
            lines.collect::<Vec<_>>().join("; ")
        }
        Error::MassAssignment(names) => unknown(names),
        other => other.to_string(),
    }
}

/// Returns the problem of a record that has members other than a user's fields.
fn unknown(names: Vec<String>) -> String {
    let refusal = Error::MassAssignment(names);
    format!("{refusal}; --ignore-unknown leaves them out, --map says which of them is which field")
}
