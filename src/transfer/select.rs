//! Which members or columns of a record are which fields of a user, and which are left out.

use crate::{error::Error, users::user::UserRef};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The field of a hash, which exports have, too.
pub(super) const PASSWORD_HASH: &str = "passwordHash";

/// The fields that a record may have.
const FIELDS: [&str; 7] = {
    let [id, name, email, created_at, updated_at] = UserRef::FIELDS;
    [id, name, email, created_at, updated_at, "password", PASSWORD_HASH]
};

/// Fields, each with the column or the dotted path of the member that it is read from.
#[derive(Debug, Clone, Default)]
pub struct Mapping(Vec<(&'static str, String)>);

impl Mapping {
    /// Parses `name=displayName,email=emails.0.value`. The error says what is wrong with it.
    pub fn parse(text: &str) -> Result<Mapping, String> {
        let mut pairs: Vec<(&str, String)> = Vec::new();
        for pair in text.split(',') {
            let (field, path) = pair.split_once('=').unwrap_or_default();
            let field = FIELDS.iter().find(|known| **known == field.trim());
            match field.filter(|_| !path.trim().is_empty()) {
                None => {
                    return Err(format!("must be FIELD=MEMBER,…, and FIELD one of {}", FIELDS.join(", ")));
                }
                Some(field) if pairs.iter().any(|(known, _)| known == field) => {
                    return Err(format!("has {field} twice"));
                }
                Some(field) => pairs.push((field, path.trim().to_owned())),
            }
        }
        Ok(Mapping(pairs))
    }
}

/// Members or columns that were left out, each with the number of its records.
pub(super) type LeftOut = BTreeMap<String, u64>;

/// Counts a member that is left out in `count` records. After some names, the rest is counted together.
pub(super) fn leave_out(left_out: &mut LeftOut, name: &str, count: u64) {
    const MOST_NAMES: usize = 20;
    let is_new = left_out.len() >= MOST_NAMES && !left_out.contains_key(name);
    *left_out.entry(if is_new { "…" } else { name }.to_owned()).or_default() += count;
}

/// Returns the problem of a record that has members other than a user's fields.
pub(super) fn unknown(names: Vec<String>) -> String {
    format!(
        "{}; --ignore-unknown leaves them out, --map says which of them is which field",
        Error::MassAssignment(names)
    )
}

/// Decides which members are fields.
pub(super) struct Selection {
    paths: Vec<(&'static str, String)>,
    /// Whether other members are left out instead of refused.
    leaves_out: bool,
    keep_ids: bool,
    /// Whether white space around an address in CSV is taken off.
    trims: bool,
}

impl Selection {
    /// Creates the selection of an import. With a mapping, a name, an address and an id to be kept are read under their
    /// own names if it does not say otherwise, and every other field only if it says so.
    pub fn new(map: Option<&Mapping>, ignore_unknown: bool, keep_ids: bool, as_is: bool) -> Selection {
        let implied = FIELDS.iter().filter(|field| {
            map.is_none() || matches!(**field, "name" | "email") || (keep_ids && **field == "id")
        });
        let mut paths = map.cloned().unwrap_or_default().0;
        for field in implied {
            if paths.iter().all(|(mapped, _)| mapped != field) {
                paths.push((field, (*field).to_owned()));
            }
        }
        Selection { paths, leaves_out: ignore_unknown || map.is_some(), keep_ids, trims: !as_is }
    }

    /// Returns whether an object is a user rather than an object that has users in it.
    pub fn is_user(&self, object: &Map<String, Value>) -> bool {
        let is_nested = |value: &Value| {
            let array = value.as_array();
            array.is_some_and(|all| all.iter().any(Value::is_object) || (all.is_empty() && object.len() == 1))
        };
        let email = self.paths.iter().find(|(field, _)| *field == "email");
        email.is_some_and(|(_, path)| member(object, path).is_some()) || !object.values().any(is_nested)
    }

    /// Returns the fields of a JSON object, and unknown members if these are to be refused.
    pub fn of_object(&self, mut object: Map<String, Value>, left_out: &mut LeftOut) -> Map<String, Value> {
        if !self.leaves_out {
            return object;
        }
        let fields = self.paths.iter().filter_map(|(field, path)| {
            Some(((*field).to_owned(), member(&object, path)?.clone())).filter(|(_, value)| !value.is_null())
        });
        let fields: Map<String, Value> = fields.collect();
        let is_read = |name: &str, path: &str| path == name || path.split('.').next() == Some(name);
        object.retain(|name, _| !self.paths.iter().any(|(_, path)| is_read(name, path)));
        object.keys().for_each(|name| leave_out(left_out, name, 1));
        fields
    }

    /// Returns where the fields are in the rows below this header. The error says what is wrong with the header. It
    /// quotes no column of a line without known ones, which is likely a row.
    pub fn columns(&self, header: &csv::StringRecord) -> Result<Columns, String> {
        let names: Vec<&str> = header.iter().map(trimmed).collect();
        let count = names.iter().rposition(|name| !name.is_empty()).map_or(0, |at| at + 1);
        let names = &names[..count];
        let mut columns = Columns { count, ..Columns::default() };
        let (mut known, mut twice) = (vec![false; count], None);
        for (field, path) in &self.paths {
            let mut found = (0..count).filter(|at| names[*at].eq_ignore_ascii_case(path));
            if let Some(at) = found.next() {
                columns.fields.push((field, at));
                known[at] = true;
            }
            if found.next().is_some() {
                twice = Some(path);
            }
        }
        let other = |at: &usize| !known[*at];
        let others = (0..count).filter(other).count();
        let required = ["name", "email", "id"].into_iter().take(if self.keep_ids { 3 } else { 2 });
        let has = |field: &str| columns.fields.iter().any(|(found, _)| *found == field);
        if let Some(missing) = required.clone().find(|field| !has(field)) {
            let path =
                self.paths.iter().find(|(field, _)| *field == missing).map_or(missing, |(_, path)| path);
            let found: Vec<&str> = (0..count).filter(|at| !other(at)).map(|at| names[at]).collect();
            let found = found.join(",");
            return Err(match (others, found.is_empty()) {
                (0, _) => format!("the header has no column {path}: {found}"),
                (_, false) => format!(
                    "the header has no column {path}: {found} and {others} others; --map {missing}=COLUMN names it"
                ),
                (_, true) => format!(
                    "the header has no column {path}: is this a header? None of its {count} columns is known; --map \
                     {missing}=COLUMN names it"
                ),
            });
        }
        if let Some(path) = twice {
            return Err(format!("the header has the column {path} twice"));
        }
        columns.others = (0..count).filter(other).map(|at| (at, names[at].to_owned())).collect();
        match columns.others.is_empty() || self.leaves_out {
            true => Ok(columns),
            false => Err(unknown(columns.others.into_iter().map(|(_, name)| name).collect())),
        }
    }

    /// Returns the fields of a row, none if all its values are blank. The error is the problem of the line.
    pub fn of_row(
        &self,
        columns: &Columns,
        row: &csv::ByteRecord,
        left_out: &mut LeftOut,
    ) -> Result<Option<Map<String, Value>>, String> {
        let texts: Result<Vec<&str>, _> = row.iter().map(str::from_utf8).collect();
        let texts = texts.map_err(|_| "is not UTF-8")?;
        if texts.iter().all(|text| trimmed(text).is_empty()) {
            return Ok(None);
        }
        let has_more = texts.iter().skip(columns.count).any(|text| !trimmed(text).is_empty());
        if texts.len() < columns.count || has_more {
            return Err(format!("has {} fields, and the header {}", texts.len(), columns.count));
        }
        let mut fields = Map::new();
        for (field, at) in &columns.fields {
            let text = if self.trims && *field == "email" { trimmed(texts[*at]) } else { texts[*at] };
            // An empty value is a text only of these; of the others it means that there is none.
            if !text.is_empty() || matches!(*field, "name" | "email") {
                fields.insert((*field).to_owned(), text.into());
            }
        }
        for (_, name) in columns.others.iter().filter(|(at, _)| !texts[*at].is_empty()) {
            leave_out(left_out, if name.is_empty() { "a column without a name" } else { name }, 1);
        }
        Ok(Some(fields))
    }
}

/// The places of fields and of other columns in a row of CSV.
#[derive(Debug, Default)]
pub(super) struct Columns {
    count: usize,
    fields: Vec<(&'static str, usize)>,
    others: Vec<(usize, String)>,
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
