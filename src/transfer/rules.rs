//! The rules for records: which members of a record are fields of a user, and whether an import accepts the user.
//!
//! This module knows no file and no database.

use super::{ImportOptions, PASSWORD_HASH_FIELD};
use crate::config::{Config, Validation as Mode};
use crate::users::{
    email,
    password::{Hasher, PasswordHash, looks_like_hash},
    timestamp,
    user::{self, UserChanges, parse_id},
};
use crate::{db::bulk::StagedUser, error::Error, input::validation::BodySchemas};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Returns the names of the fields that a record may have: a user's fields in an answer, `password` and `passwordHash`.
pub fn field_names() -> impl Iterator<Item = &'static str> {
    user::USER_FIELDS.into_iter().chain(["password", PASSWORD_HASH_FIELD])
}

/// The largest id that an import keeps. New users get larger ids, so that half of the numbers are left for them.
const MAX_KEPT_ID: i64 = i64::MAX / 2;

const BAD_ID: &str = "/id must be a whole number from 1 to 4611686018427387903";

const BAD_TIME: &str = "must be a time as in 2020-02-29T23:59:59.123456Z, with its offset (Z, UTC, +01:00)";

/// The column, or the dotted path of the member, that each field of a user is read from. A name may have
/// several paths, as in `first+last`, whose values are joined.
pub type FieldMapping = BTreeMap<&'static str, String>;

/// A record of a stream: an object or a row with the fields of one user.
pub(super) struct Record {
    /// The number of the record's line, or of its element in an array, from 1.
    pub number: i64,
    /// The members of the record, or its problem if it cannot be parsed. A problem quotes no value, which may be
    /// secret.
    pub members: Result<Map<String, Value>, String>,
}

/// A valid record, whose user is stored unless the address or the id is taken.
pub(super) struct ValidUser<'a> {
    pub user: StagedUser,
    /// Names of the members of the record that no field is read from.
    pub left_out_members: Vec<&'a String>,
}

/// The rules by which one import validates records.
pub(super) struct Rules<'a> {
    pub options: &'a ImportOptions,
    schemas: BodySchemas,
    hasher: Hasher,
    /// The dotted paths of the members that each field of a user is read from. Only a name may have several paths, for
    /// its parts.
    field_paths: BTreeMap<&'static str, Vec<String>>,
}

impl Rules<'_> {
    /// Creates the rules. Without a mapping, each field is read from the member of its own name. With a mapping, a
    /// field that the mapping lacks is read so only if every record must have the field.
    pub fn new<'a>(config: &Config, options: &'a ImportOptions) -> Rules<'a> {
        let has_own_name = |field: &&str| options.mapping.is_none() || options.requires(field);
        let unmapped = field_names().filter(has_own_name).map(|field| (field, field.to_owned()));
        let paths = unmapped.chain(options.mapping.clone().unwrap_or_default()).map(|(field, path)| {
            let parts = path.split('+').map(str::trim).filter(|part| !part.is_empty());
            (field, if field == "name" { parts.map(str::to_owned).collect() } else { vec![path] })
        });
        let schemas = BodySchemas::new(config.schema, Mode::Declarative);
        let hasher = Hasher::new(config.password_hashing.params());
        Rules { options, schemas, hasher, field_paths: paths.collect() }
    }

    /// Returns the paths that the mapping names. The import fails if there is a path that all records lack.
    pub fn mapped_paths(&self) -> Vec<&String> {
        self.options.mapping.iter().flatten().flat_map(|(field, _)| &self.field_paths[field]).collect()
    }

    /// Returns whether a JSON object has a member from which this field of a user is read.
    fn has_field(&self, object: &Map<String, Value>, field: &str) -> bool {
        self.field_paths[field].iter().any(|path| member_at(object, path).is_some())
    }

    /// Returns whether the first line shows that the file is one JSON document, and not one user a line: the line
    /// begins an object that goes on in the next lines, or is an object that has an array and no name or address.
    pub fn begins_single_document(&self, first_line: &str) -> bool {
        let is_user = |object: &_| ["name", "email"].iter().any(|field| self.has_field(object, field));
        match serde_json::from_str::<Map<_, _>>(first_line) {
            Ok(object) => object.values().any(Value::is_array) && !is_user(&object),
            Err(error) => error.is_eof() && first_line.ends_with('\n'),
        }
    }

    /// Returns the name of the member for each column of a header. The error says what is wrong with the header. If a
    /// required column is missing, the error quotes no column, because the line may be a row with a person's data.
    pub fn parse_header(&self, columns: Vec<String>) -> Result<Vec<String>, String> {
        let mut names: Vec<String> = columns.iter().map(|column| column.trim().to_owned()).collect();
        for path in self.field_paths.values().flatten() {
            let mut same = names.iter_mut().filter(|name| name.eq_ignore_ascii_case(path));
            match (same.next(), same.next()) {
                (Some(name), None) => name.clone_from(path),
                (Some(_), Some(_)) => return Err(format!("has the column {path} twice")),
                (None, _) => {}
            }
        }
        let object = names.iter().map(|name| (name.clone(), Value::Null)).collect();
        let is_missing = |field: &&str| self.options.requires(field) && !self.has_field(&object, field);
        match self.field_paths.keys().copied().find(is_missing) {
            Some(field) => Err(format!(
                "has {} columns, and none is {}; is it the header? `userd import --map {field}=COLUMN` names the column",
                columns.len(),
                self.field_paths[field].join("+")
            )),
            None => Ok(names),
        }
    }

    /// Returns a row as the members of a record, or the problem of the row.
    pub fn parse_row(&self, header: &[String], row: Vec<String>) -> Result<Map<String, Value>, String> {
        if row.len() != header.len() {
            return Err(format!("has {} fields, and the header {}", row.len(), header.len()));
        }
        let members = header.iter().zip(row).filter_map(|(name, value)| {
            // Keeps an empty name or address as an empty text. Any other empty field means that the user has no such
            // value.
            let is_column_of = |field| self.field_paths[field].contains(name);
            let has_value = !value.is_empty() || is_column_of("name") || is_column_of("email");
            let value = if has_value { value.into() } else { Value::Null };
            (has_value || self.uses_member(name)).then(|| (name.clone(), value))
        });
        Ok(members.collect())
    }

    /// Returns whether a field of a user is read from the member with this name.
    fn uses_member(&self, member: &str) -> bool {
        let mut paths = self.field_paths.values().flatten();
        paths.any(|path| path == member || path.split('.').next() == Some(member))
    }

    /// Validates a record, and hashes its clear password, which blocks for the time of a hash. The error is the problem
    /// of the record.
    pub fn validate<'m>(&self, record: &'m Record) -> Result<ValidUser<'m>, String> {
        let object = record.members.as_ref().map_err(String::clone)?;
        let left_out: Vec<&String> = object.keys().filter(|name| !self.uses_member(name)).collect();
        if !left_out.is_empty() && !self.options.ignore_unknown && self.options.mapping.is_none() {
            return Err(format!(
                "has unknown fields {:?}; `userd import --ignore-unknown` leaves them out, and --map says which of them is which field",
                &left_out[..left_out.len().min(10)]
            ));
        }
        let mut fields = self.extract_fields(object);
        let hash = fields.remove(PASSWORD_HASH_FIELD).map(PasswordHash::parse_imported).transpose();
        let hash = hash.map_err(|problem| format!("/{PASSWORD_HASH_FIELD} {problem}"))?;
        let id = match fields.remove("id").filter(|_| self.options.keep_ids) {
            Some(id) => {
                let id = parse_id(id.as_str().unwrap_or(&id.to_string())).filter(|id| *id <= MAX_KEPT_ID);
                Some(id.ok_or(BAD_ID)?)
            }
            None if self.options.requires("id") => return Err("/id is required by --keep-ids".to_owned()),
            None => None,
        };
        let mut time = |name: &str| match fields.remove(name) {
            None => Ok(None),
            Some(Value::String(text)) if let Some(time) = timestamp::parse(&text) => Ok(Some(time)),
            Some(_) => Err(format!("/{name} {BAD_TIME}")),
        };
        let (created_at, updated_at) = (time("createdAt")?, time("updatedAt")?);
        if let Some(password) = fields.get("password") {
            let hashes = format!("--map {PASSWORD_HASH_FIELD}={}", self.field_paths["password"].concat());
            match password {
                _ if hash.is_some() => Err("/password and /passwordHash exclude one another".to_owned()),
                _ if !self.options.hash_passwords => {
                    Err(format!("/password may be a hash: {hashes}, or --clear-passwords if all are clear"))
                }
                Value::String(text) if looks_like_hash(text) => Err(format!("/password is a hash: {hashes}")),
                _ => Ok(()),
            }?;
        }
        if !self.options.as_is {
            if hash.is_some() {
                // Adds a placeholder, because the strict schema requires a password, and this user has only a hash.
                fields.insert("password".to_owned(), "has a hash".into());
            }
            fields = self.schemas.create.validate(fields).map_err(join_problems)?;
        }
        let new = UserChanges::parse(fields, self.options.as_is).map_err(join_problems)?.into_new_user();
        let mut new = new.ok_or("/name and /email are required")?;
        let hash = match new.password.take().filter(|_| hash.is_none() && !self.options.dry_run) {
            Some(clear) => Some(self.hasher.hash(&clear).map_err(|error| error.to_string())?),
            None => hash,
        };
        let user = StagedUser { line: record.number, id, hash, created_at, updated_at, user: new };
        Ok(ValidUser { user, left_out_members: left_out })
    }

    /// Returns the fields of a user that a record has. Brings the address into NFC and trims it, unless users are
    /// imported as they are. Joins the parts of a name; if the record has none of them, the address is the name.
    fn extract_fields(&self, object: &Map<String, Value>) -> Map<String, Value> {
        let value = |path: &String| member_at(object, path).filter(|value| !value.is_null());
        let field = |(field, paths): (&&str, &Vec<String>)| match &paths[..] {
            [path] => Some(((*field).to_owned(), value(path)?.clone())),
            _ => None,
        };
        let mut fields: Map<String, Value> = self.field_paths.iter().filter_map(field).collect();
        if let Some(Value::String(email)) = fields.get_mut("email")
            && !self.options.as_is
        {
            *email = email::to_nfc(email.trim());
        }
        // Leaves the name out if one of its parts is no text.
        let parts = self.field_paths["name"].iter().filter_map(value).map(|part| Some(part.as_str()?.trim()));
        if self.field_paths["name"].len() > 1
            && let Some(parts) = parts.collect::<Option<Vec<&str>>>()
        {
            let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
            let email = fields.get("email").filter(|_| parts.is_empty()).cloned();
            fields.insert("name".to_owned(), email.unwrap_or_else(|| parts.join(" ").into()));
        }
        fields
    }
}

/// Returns the member of a JSON object at a dotted path. A number in the path is a place in an array, as in
/// `emails.0.value`.
pub(super) fn member_at<'a>(object: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    object.get(path).or_else(|| {
        let (first, rest) = path.split_once('.')?;
        object.get(first)?.pointer(&format!("/{}", rest.replace('.', "/")))
    })
}

/// Returns what an error says about the fields of a body, as one line.
fn join_problems(error: Error) -> String {
    let (Error::InvalidBody(violations) | Error::Unprocessable(violations)) = error else {
        return error.to_string();
    };
    let lines: Vec<_> =
        violations.iter().map(|violation| format!("{} {}", violation.path, violation.message)).collect();
    lines.join("; ")
}
