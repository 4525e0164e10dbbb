//! The rules for records: which of their members are fields of a user, and whether these are a user that may be imported.
//!
//! Knows no file and no database.

use super::{Import, PASSWORD_HASH, read::Record};
use crate::{
    app::validation::BodySchemas,
    config::{Config, Validation as Mode},
    db::bulk::StagedUser,
    error::Error,
    users::{
        email,
        password::{Hasher, PasswordHash},
        timestamp,
        user::{NewUser, UserChanges, parse_id},
    },
};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The fields that a record may have.
const FIELDS: [&str; 7] = ["id", "name", "email", "createdAt", "updatedAt", "password", PASSWORD_HASH];

/// The largest id that is kept: the sequence of ids goes on behind it.
const LARGEST_ID: i64 = i64::MAX / 2;

const NOT_WHOLE: &str = "/id must be a whole number from 1 to 4611686018427387903";

/// The column, or the dotted path of the member, that each field is read from.
pub type Mapping = BTreeMap<&'static str, String>;

/// Parses `name=displayName,email=emails.0.value`. The error says what is wrong with the text.
pub fn mapping(text: &str) -> Result<Mapping, String> {
    let pair = |pair: &str| {
        let (field, path) = pair.split_once('=')?;
        let field = FIELDS.into_iter().find(|known| *known == field.trim())?;
        Some((field, path.trim().to_owned())).filter(|(_, path)| !path.is_empty())
    };
    let paths: Option<Mapping> = text.split(',').map(pair).collect();
    let paths = paths.filter(|paths| paths.len() == text.split(',').count());
    paths.ok_or_else(|| format!("must be FIELD=MEMBER,…, each FIELD once and one of {}", FIELDS.join(", ")))
}

/// The user of a record, and the names of members that are left out; or the problem of the record.
pub(super) type Checked<'a> = Result<(StagedUser, Vec<&'a String>), String>;

/// The rules of one import.
pub(super) struct Rules<'a> {
    pub import: &'a Import,
    validation: BodySchemas,
    hasher: Hasher,
    paths: Mapping,
}

impl Rules<'_> {
    /// Creates the rules. With a mapping, a name, an address and an id to be kept are read under their own names if it does
    /// not say otherwise, and every other field only if it says so.
    pub fn new<'a>(config: &Config, import: &'a Import) -> Rules<'a> {
        let is_read = |field: &&str| import.map.is_none() || import.requires(field);
        let own = FIELDS.into_iter().filter(is_read).map(|field| (field, field.to_owned()));
        let paths = own.chain(import.map.clone().unwrap_or_default()).collect();
        let validation = BodySchemas::new(config.schema, Mode::Declarative);
        let hasher = Hasher::new(config.password_hashing);
        Rules { import, validation, hasher, paths }
    }

    /// Returns whether a stream that begins with this line is one array, or one object with an array in it.
    pub fn is_document(&self, line: &[u8]) -> bool {
        match serde_json::from_slice::<Map<_, _>>(line) {
            Ok(object) => {
                let has = |field| member(&object, &self.paths[field]).is_some();
                !has("name") && !has("email") && object.values().any(Value::is_array)
            }
            Err(error) => error.is_eof() || line.trim_ascii_start().starts_with(b"["),
        }
    }

    /// Returns the members that the columns are. The error says what is wrong with the header; it quotes no column of a line
    /// without the required ones, which is likely a row.
    pub fn header(&self, columns: Vec<String>) -> Result<Vec<String>, String> {
        let mut names: Vec<String> = columns.iter().map(|column| column.trim().to_owned()).collect();
        for (field, path) in &self.paths {
            let mut found = names.iter_mut().filter(|name| name.eq_ignore_ascii_case(path));
            match (found.next(), found.next()) {
                (Some(name), None) => name.clone_from(path),
                (Some(_), Some(_)) => return Err(format!("has the column {path} twice")),
                (None, _) if self.import.requires(field) => {
                    return Err(format!(
                        "has {} columns, and none is {path}; is it the header? --map {field}=COLUMN names the column",
                        columns.len()
                    ));
                }
                (None, _) => {}
            }
        }
        Ok(names)
    }

    /// Returns the members of a row. The error is its problem.
    pub fn row(&self, header: &[String], row: Vec<String>) -> Result<Map<String, Value>, String> {
        if row.len() != header.len() {
            return Err(format!("has {} fields, and the header {}", row.len(), header.len()));
        }
        let members = header.iter().zip(row).filter_map(|(name, value)| {
            let is = |field| self.paths.get(field) == Some(name);
            let value = if is("email") && !self.import.as_is { value.trim().to_owned() } else { value };
            // An empty value is a text only of a name and an address; else it means that there is none.
            let is_there = !value.is_empty() || is("name") || is("email");
            is_there.then(|| (name.clone(), value.into()))
        });
        Ok(members.collect())
    }

    /// Checks a record, and hashes its clear password. Blocks for that work.
    pub fn user<'m>(&self, (line, object): &'m Record) -> Checked<'m> {
        let object = object.as_ref().map_err(String::clone)?;
        let is_read =
            |name: &str| self.paths.values().any(|path| path == name || path.split('.').next() == Some(name));
        let unknown: Vec<&String> = object.keys().filter(|name| !is_read(name)).collect();
        if !unknown.is_empty() && !self.import.ignore_unknown && self.import.map.is_none() {
            return Err(format!(
                "has unknown fields {:?}; --ignore-unknown leaves them out, --map says which of them is which field",
                &unknown[..unknown.len().min(10)]
            ));
        }
        let field = |(field, path): (&&str, &String)| {
            let value = member(object, path).filter(|value| !value.is_null())?;
            Some(((*field).to_owned(), value.clone()))
        };
        let mut fields: Map<String, Value> = self.paths.iter().filter_map(field).collect();
        let hash = fields.remove(PASSWORD_HASH).map(PasswordHash::imported).transpose();
        let hash = hash.map_err(|problem| format!("/{PASSWORD_HASH} {problem}"))?;
        let id = match fields.remove("id").filter(|_| self.import.keep_ids) {
            Some(id) => {
                let id = parse_id(id.as_str().unwrap_or(&id.to_string())).filter(|id| *id <= LARGEST_ID);
                Some(id.ok_or(NOT_WHOLE)?)
            }
            None if self.import.requires("id") => return Err("/id is required by --keep-ids".to_owned()),
            None => None,
        };
        let mut time = |name: &str| match fields.remove(name) {
            None => Ok(None),
            Some(Value::String(text)) if let Some(time) = timestamp::parse(&text) => Ok(Some(time)),
            Some(_) => Err(format!("/{name} must be a time as in 2020-02-29T23:59:59.123456Z")),
        };
        let (created_at, updated_at) = (time("createdAt")?, time("updatedAt")?);
        if hash.is_some() && fields.contains_key("password") {
            return Err("/password and /passwordHash exclude one another".to_owned());
        }
        if !self.import.as_is {
            if hash.is_some() {
                // The hash stands in for the password that the strict schema requires.
                fields.insert("password".to_owned(), "has a hash".into());
            }
            email::normalize(&mut fields);
            fields = self.validation.create.check(fields).map_err(problems)?;
        }
        let new = UserChanges::read(fields, self.import.as_is).map_err(problems)?.into_new();
        let NewUser { name, email, password } = new.ok_or("/name and /email are required")?;
        let hash = match password.filter(|_| hash.is_none() && !self.import.dry_run) {
            Some(clear) => Some(self.hasher.hash(&clear).map_err(|error| error.to_string())?),
            None => hash,
        };
        Ok((StagedUser { line: *line, id, hash, created_at, updated_at, name, email }, unknown))
    }
}

/// Returns the member at a dotted path, in which a number is a place in an array.
fn member<'a>(object: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    object.get(path).or_else(|| {
        let (first, rest) = path.split_once('.')?;
        object.get(first)?.pointer(&format!("/{}", rest.replace('.', "/")))
    })
}

/// Returns the problems that a refusal names.
fn problems(error: Error) -> String {
    let (Error::Invalid(violations) | Error::Unprocessable(violations)) = error else {
        return error.to_string();
    };
    let lines: Vec<_> = violations.iter().map(|found| format!("{} {}", found.path, found.message)).collect();
    lines.join("; ")
}
