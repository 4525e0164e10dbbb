//! The rules for records: which members of a record are fields of a user, and whether an import accepts the user.
//!
//! This module knows no file and no database.

use super::{Import, PASSWORD_HASH};
use crate::config::{Config, Validation as Mode};
use crate::users::{
    email,
    password::{Hasher, PasswordHash, is_hash},
    timestamp,
    user::{self, UserChanges, parse_id},
};
use crate::{db::bulk::StagedUser, error::Error, input::validation::BodySchemas};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Returns the fields that a record may have: the fields of an answer, the password, and its hash.
pub fn field_names() -> impl Iterator<Item = &'static str> {
    user::USER_FIELDS.into_iter().chain(["password", PASSWORD_HASH])
}

/// The largest id that an import keeps. The sequence of ids goes on behind this id, and needs some for new users.
const MAX_ID: i64 = i64::MAX / 2;

const BAD_ID: &str = "/id must be a whole number from 1 to 4611686018427387903";

const BAD_TIME: &str = "must be a time as in 2020-02-29T23:59:59.123456Z, with its offset (Z, UTC, +01:00)";

/// For each field, the column or the dotted path of the member that it is read from. A name may be read from several of
/// them, with a `+` between them.
pub type Mapping = BTreeMap<&'static str, String>;

/// A record of a stream.
pub(super) struct Record {
    /// The number of the record's line, or of its place in an array, from 1.
    pub number: i64,
    /// The members of the record, or the problem of a record that cannot be read. A problem quotes no value.
    pub members: Result<Map<String, Value>, String>,
}

/// A record that may be imported.
pub(super) struct Candidate<'a> {
    pub user: StagedUser,
    /// Names of the record's members that no field is read from.
    pub left_out: Vec<&'a String>,
}

/// The rules of one import.
pub(super) struct Rules<'a> {
    pub import: &'a Import,
    validation: BodySchemas,
    hasher: Hasher,
    /// For each field, the paths of the members that it is read from. Only a name may have several paths, for its
    /// parts.
    paths: BTreeMap<&'static str, Vec<String>>,
}

impl Rules<'_> {
    /// Creates the rules. A mapping need not have the name, the address and the id, which are then read from members of
    /// these names. Every other field is read only if the mapping has it.
    pub fn new<'a>(config: &Config, import: &'a Import) -> Rules<'a> {
        let has_own_name = |field: &&str| import.map.is_none() || import.requires(field);
        let unmapped = field_names().filter(has_own_name).map(|field| (field, field.to_owned()));
        let paths = unmapped.chain(import.map.clone().unwrap_or_default()).map(|(field, path)| {
            let parts = path.split('+').map(str::trim).filter(|part| !part.is_empty());
            (field, if field == "name" { parts.map(str::to_owned).collect() } else { vec![path] })
        });
        let validation = BodySchemas::new(config.schema, Mode::Declarative);
        let hasher = Hasher::new(config.password_hashing.params());
        Rules { import, validation, hasher, paths: paths.collect() }
    }

    /// Returns the paths that the mapping names. Some record must have each of them.
    pub fn mapped_paths(&self) -> Vec<&String> {
        self.import.map.iter().flatten().flat_map(|(field, _)| &self.paths[field]).collect()
    }

    /// Returns whether a JSON object has a member from which this field of a user is read.
    fn has_field(&self, object: &Map<String, Value>, field: &str) -> bool {
        self.paths[field].iter().any(|path| member_at(object, path).is_some())
    }

    /// Returns whether the first line shows that the file is one JSON document instead of a user a line. Such a line
    /// begins an object that goes on in the next lines, or is an object that has an array and no name or address.
    pub fn is_document(&self, line: &str) -> bool {
        let is_user = |object: &_| ["name", "email"].iter().any(|field| self.has_field(object, field));
        match serde_json::from_str::<Map<_, _>>(line) {
            Ok(object) => object.values().any(Value::is_array) && !is_user(&object),
            Err(error) => error.is_eof() && line.ends_with('\n'),
        }
    }

    /// Returns the name of a member for each column. The error says what is wrong with the header. It quotes no column
    /// if the line lacks a required column, because the line may be a row with a person's data.
    pub fn column_names(&self, columns: Vec<String>) -> Result<Vec<String>, String> {
        let mut names: Vec<String> = columns.iter().map(|column| column.trim().to_owned()).collect();
        for path in self.paths.values().flatten() {
            let mut same = names.iter_mut().filter(|name| name.eq_ignore_ascii_case(path));
            match (same.next(), same.next()) {
                (Some(name), None) => name.clone_from(path),
                (Some(_), Some(_)) => return Err(format!("has the column {path} twice")),
                (None, _) => {}
            }
        }
        let object = names.iter().map(|name| (name.clone(), Value::Null)).collect();
        let is_missing = |field: &&str| self.import.requires(field) && !self.has_field(&object, field);
        match self.paths.keys().copied().find(is_missing) {
            Some(field) => Err(format!(
                "has {} columns, and none is {}; is it the header? --map {field}=COLUMN names the column",
                columns.len(),
                self.paths[field].join("+")
            )),
            None => Ok(names),
        }
    }

    /// Returns the members that the fields of a row make, or the problem of the row.
    pub fn row_members(&self, header: &[String], row: Vec<String>) -> Result<Map<String, Value>, String> {
        if row.len() != header.len() {
            return Err(format!("has {} fields, and the header {}", row.len(), header.len()));
        }
        let members = header.iter().zip(row).filter_map(|(name, value)| {
            // An empty name or address is an empty text. Any other empty field means that the user has no such value.
            let is_column_of = |field| self.paths[field].contains(name);
            let has_value = !value.is_empty() || is_column_of("name") || is_column_of("email");
            let value = if has_value { value.into() } else { Value::Null };
            (has_value || self.uses_member(name)).then(|| (name.clone(), value))
        });
        Ok(members.collect())
    }

    /// Returns whether a field of a user is read from the member with this name.
    fn uses_member(&self, member: &str) -> bool {
        let mut paths = self.paths.values().flatten();
        paths.any(|path| path == member || path.split('.').next() == Some(member))
    }

    /// Checks a record, and hashes its clear password, which blocks for the work of a hash. The error is the problem of
    /// the record.
    pub fn check<'m>(&self, record: &'m Record) -> Result<Candidate<'m>, String> {
        let object = record.members.as_ref().map_err(String::clone)?;
        let left_out: Vec<&String> = object.keys().filter(|name| !self.uses_member(name)).collect();
        if !left_out.is_empty() && !self.import.ignore_unknown && self.import.map.is_none() {
            return Err(format!(
                "has unknown fields {:?}; --ignore-unknown leaves them out, --map says which of them is which field",
                &left_out[..left_out.len().min(10)]
            ));
        }
        let mut fields = self.fields(object);
        let hash = fields.remove(PASSWORD_HASH).map(PasswordHash::parse_imported).transpose();
        let hash = hash.map_err(|problem| format!("/{PASSWORD_HASH} {problem}"))?;
        let id = match fields.remove("id").filter(|_| self.import.keep_ids) {
            Some(id) => {
                let id = parse_id(id.as_str().unwrap_or(&id.to_string())).filter(|id| *id <= MAX_ID);
                Some(id.ok_or(BAD_ID)?)
            }
            None if self.import.requires("id") => return Err("/id is required by --keep-ids".to_owned()),
            None => None,
        };
        let mut time = |name: &str| match fields.remove(name) {
            None => Ok(None),
            Some(Value::String(text)) if let Some(time) = timestamp::parse(&text) => Ok(Some(time)),
            Some(_) => Err(format!("/{name} {BAD_TIME}")),
        };
        let (created_at, updated_at) = (time("createdAt")?, time("updatedAt")?);
        if let Some(password) = fields.get("password") {
            let hashes = format!("--map {PASSWORD_HASH}={}", self.paths["password"].concat());
            match password {
                _ if hash.is_some() => Err("/password and /passwordHash exclude one another".to_owned()),
                _ if !self.import.clear_passwords => {
                    Err(format!("/password may be a hash: {hashes}, or --clear-passwords if all are clear"))
                }
                Value::String(text) if is_hash(text) => Err(format!("/password is a hash: {hashes}")),
                _ => Ok(()),
            }?;
        }
        if !self.import.as_is {
            if hash.is_some() {
                // A stand-in, because the strict schema requires a password, and this user has only a hash.
                fields.insert("password".to_owned(), "has a hash".into());
            }
            fields = self.validation.create.validate(fields).map_err(join_problems)?;
        }
        let new = UserChanges::parse(fields, self.import.as_is).map_err(join_problems)?.into_new_user();
        let mut new = new.ok_or("/name and /email are required")?;
        let hash = match new.password.take().filter(|_| hash.is_none() && !self.import.dry_run) {
            Some(clear) => Some(self.hasher.hash(&clear).map_err(|error| error.to_string())?),
            None => hash,
        };
        let user = StagedUser { line: record.number, id, hash, created_at, updated_at, user: new };
        Ok(Candidate { user, left_out })
    }

    /// Returns the fields of a record. Brings the address into NFC and trims it, unless users are imported as they are.
    /// Joins the parts of a name; if the record has none of them, the name is the address.
    fn fields(&self, object: &Map<String, Value>) -> Map<String, Value> {
        let value = |path: &String| member_at(object, path).filter(|value| !value.is_null());
        let field = |(field, paths): (&&str, &Vec<String>)| match &paths[..] {
            [path] => Some(((*field).to_owned(), value(path)?.clone())),
            _ => None,
        };
        let mut fields: Map<String, Value> = self.paths.iter().filter_map(field).collect();
        if let Some(Value::String(email)) = fields.get_mut("email")
            && !self.import.as_is
        {
            *email = email::to_nfc(email.trim());
        }
        // A name has several parts only if each of them is a text.
        let parts = self.paths["name"].iter().filter_map(value).map(|part| part.as_str().map(str::trim));
        if self.paths["name"].len() > 1
            && let Some(parts) = parts.collect::<Option<Vec<&str>>>()
        {
            let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
            let email = fields.get("email").filter(|_| parts.is_empty()).cloned();
            fields.insert("name".to_owned(), email.unwrap_or_else(|| parts.join(" ").into()));
        }
        fields
    }
}

/// Returns the member at a dotted path. A number in the path is a place in an array, as in `emails.0.value`.
pub(super) fn member_at<'a>(object: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    object.get(path).or_else(|| {
        let (first, rest) = path.split_once('.')?;
        object.get(first)?.pointer(&format!("/{}", rest.replace('.', "/")))
    })
}

/// Returns the problems that the error of a body names, as one line.
fn join_problems(error: Error) -> String {
    let (Error::Invalid(violations) | Error::Unprocessable(violations)) = error else {
        return error.to_string();
    };
    let lines: Vec<_> =
        violations.iter().map(|violation| format!("{} {}", violation.path, violation.message)).collect();
    lines.join("; ")
}
