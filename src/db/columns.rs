//! The columns of a user's record: the one list of them, the texts of statements that are made from it, and the ways
//! from a row to a user and from values to parameters.

use super::users::moment;
use crate::users::user::UserRef;
use postgres::types::Type;
use std::sync::OnceLock;

/// A column, the type that its values are read and written with, and the lists that it belongs to.
struct Column {
    name: &'static str,
    ty: Type,
    lists: &'static [&'static str],
}

/// Rows have them first and in this order. The lists are named by what stands for them in a statement: all columns;
/// those that are answered, of a fixed length or texts; those that an import stores; those that requests give values
/// for.
static COLUMNS: [Column; 6] = [
    Column { name: "id", ty: Type::INT8, lists: &["COLUMN", "FIXED"] },
    Column { name: "created_at", ty: Type::TIMESTAMPTZ, lists: &["COLUMN", "FIXED", "STORED"] },
    Column { name: "updated_at", ty: Type::TIMESTAMPTZ, lists: &["COLUMN", "FIXED", "STORED"] },
    Column { name: "name", ty: Type::TEXT, lists: &["COLUMN", "TEXT", "STORED", "GIVEN"] },
    Column { name: "email", ty: Type::TEXT, lists: &["COLUMN", "TEXT", "STORED", "GIVEN"] },
    Column { name: "version", ty: Type::INT8, lists: &["COLUMN"] },
];

/// How many columns are answered, of which the last one is a text: all but the version.
pub(in crate::db) const ANSWERED: usize = COLUMNS.len() - 1;

/// A statement. Where it has `{… COLUMN …}`, it gets that once for each column of the list, with commas between, or with what follows a semicolon. `TYPE` is the type of a column, and
/// `VALUE` the parameter that they are: these come after all others.
pub(in crate::db) struct Sql {
    template: &'static str,
    text: OnceLock<String>,
}

impl Sql {
    pub const fn new(template: &'static str) -> Sql {
        Sql { template, text: OnceLock::new() }
    }

    /// Its text, which is made once.
    pub fn text(&'static self) -> &'static str {
        self.text.get_or_init(|| expand(self.template))
    }
}

/// What a statement's text is, once the lists are written out.
pub(super) fn expand(template: &str) -> String {
    let digits =
        |rest: &str| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default().parse().ok();
    let others: usize = template.split('$').skip(1).filter_map(digits).max().unwrap_or_default();
    let list = |text: &str| {
        let (each, separator) = text.split_once(';').unwrap_or((text, ","));
        let lists = ["COLUMN", "FIXED", "TEXT", "STORED"];
        let word = lists.into_iter().find(|word| each.contains(word)).unwrap_or("GIVEN");
        let columns = COLUMNS.iter().filter(|column| column.lists.contains(&word)).enumerate();
        let columns = columns.map(|(at, column)| {
            let value = format!("${}", others + at + 1);
            each.replace(word, column.name).replace("TYPE", column.ty.name()).replace("VALUE", &value)
        });
        columns.collect::<Vec<_>>().join(&format!("{separator} "))
    };
    let parts = template.split(['{', '}']).enumerate();
    parts.map(|(at, part)| if at % 2 == 0 { part.to_owned() } else { list(part) }).collect()
}

/// Appends a row for COPY in its binary format: values, and what an import stores of a user behind them.
#[cfg(feature = "command")]
pub(in crate::db) fn write_stored(values: &[Option<&[u8]>], user: &UserRef, rows: &mut Vec<u8>) {
    let UserRef { id: _, name, email, created_at, updated_at } = *user;
    let (created_at, updated_at) = (moment(created_at), moment(updated_at));
    let stored = [&created_at, &updated_at, name.as_bytes(), email.as_bytes()].map(Some);
    // A record is much shorter, and has fewer fields, than what these lengths count.
    rows.extend_from_slice(&((values.len() + stored.len()) as i16).to_be_bytes());
    for value in values.iter().copied().chain(stored) {
        rows.extend_from_slice(&value.map_or(-1, |value| value.len() as i32).to_be_bytes());
        rows.extend_from_slice(value.unwrap_or_default());
    }
}
