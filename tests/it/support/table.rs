//! Tables of requests, of the answers to them, and of statements that look behind the service's back.

use super::{Answer, Client, Database, Service};
use postgres::SimpleQueryMessage;
use std::collections::BTreeMap;

/// Values of the words in a table.
type Words = BTreeMap<String, String>;

/// Sends requests in their order, a line each, and panics with all that were answered otherwise:
///
/// `METHOD TARGET <Field: value> BODY => STATUS <Field: value> BODY`, where fields and bodies may be missing.
///
/// Several methods, divided by `|`, are sent one after the other. `<!Field>`: the answer has no such field. `<Field: $word>`
/// in an answer gives a value to the word, which no other word has; from then on `$word` stands for it, and `$word.id` for
/// what follows its last slash. In an expected body `<times>` stands for `createdAt` and `updatedAt` with any timestamps, and
/// `*` at its end for any rest.
#[track_caller]
pub fn check(client: &mut Client, rows: &str) {
    check_rows(client, None, rows);
}

impl Service {
    /// Checks a table that may also have rows `sql STATEMENT`, `sql QUERY => VALUE` and `sql STATEMENT => error SQLSTATE`.
    #[track_caller]
    pub fn check(&self, rows: impl AsRef<str>) {
        check_rows(&mut self.client(), Some(&self.database), rows.as_ref());
    }
}

#[track_caller]
fn check_rows(client: &mut Client, database: Option<&Database>, rows: &str) {
    let (mut words, mut surprises) = (Words::new(), String::new());
    for row in rows.lines().map(str::trim).filter(|row| !row.is_empty()) {
        let found = match row.strip_prefix("sql ") {
            Some(row) => execute(database.expect("a table with a database"), row),
            None => ask(client, row, &mut words),
        };
        if let Err(found) = found {
            let row: String = row.chars().take(1000).collect();
            surprises += &format!("\n{row}\n  but found {found}\n");
        }
    }
    assert!(surprises.is_empty(), "{surprises}");
}

/// Executes statements. Returns what was found instead of the expected value or error.
fn execute(database: &Database, row: &str) -> Result<(), String> {
    let (sql, expected) = row.split_once(" => ").map_or((row, None), |(sql, value)| (sql, Some(value)));
    let value = |message: &SimpleQueryMessage| match message {
        SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or("null").to_owned()),
        _ => None,
    };
    let found = match database.client().simple_query(sql) {
        Ok(messages) => messages.iter().rev().find_map(value).unwrap_or_default(),
        Err(error) => format!("error {}", error.code().map_or("of the session", |code| code.code())),
    };
    let fits = expected.map_or(!found.starts_with("error "), |expected| expected == found);
    if fits { Ok(()) } else { Err(found) }
}

/// Sends a request with each method of the row. Returns the answer that is not as expected.
fn ask(client: &mut Client, row: &str, words: &mut Words) -> Result<(), String> {
    let (sent, expected) = row.split_once(" =>").unwrap_or_else(|| panic!("a row: {row}"));
    let replaced = |text: &str| {
        words.iter().rev().fold(text.trim().to_owned(), |text, (word, it)| text.replace(word, it))
    };
    let (sent, expected) = (replaced(sent), replaced(expected));
    let (methods, rest) = sent.split_once(' ').unwrap_or_else(|| panic!("a row: {row}"));
    let (target, rest) = rest.trim_start().split_once(' ').unwrap_or((rest.trim_start(), ""));
    let (sent_fields, body) = fields(rest);
    let (status, rest) = expected.split_once(' ').unwrap_or((&expected, ""));
    let (expected_fields, expected_body) = fields(rest);
    for method in methods.split('|') {
        let answer = client.request(method, target, &sent_fields, body);
        let found = if method == "HEAD" { expected_body.to_owned() } else { masked(&answer.body) };
        let mut fits = answer.status.to_string() == status;
        fits &= match expected_body.strip_suffix('*') {
            Some(start) => found.starts_with(start),
            None => found == expected_body,
        };
        if !fits || !expected_fields.iter().all(|field| has_field(&answer, field, words)) {
            return Err(format!("{method} {} {:?} {}", answer.status, answer.headers, masked(&answer.body)));
        }
    }
    Ok(())
}

/// Splits the fields at the beginning from the rest.
fn fields(text: &str) -> (Vec<(&str, &str)>, &str) {
    let (mut fields, mut text) = (Vec::new(), text.trim());
    while let Some(start) = text.strip_prefix('<') {
        let (field, rest) = start.split_once("> ").unwrap_or((start.trim_end_matches('>'), ""));
        fields.push(field.split_once(": ").unwrap_or((field.trim_end_matches(':'), "")));
        text = rest.trim_start();
    }
    (fields, text)
}

fn has_field(answer: &Answer, (name, value): &(&str, &str), words: &mut Words) -> bool {
    if let Some(name) = name.strip_prefix('!') {
        return answer.header(name).is_none();
    }
    let Some(found) = answer.header(name) else { return false };
    match words.get(*value) {
        Some(known) => found == known,
        None if value.starts_with('$') => {
            let is_new = words.values().all(|known| known != found);
            let last = found.rsplit('/').next().unwrap_or_default();
            words.insert(format!("{value}.id"), last.to_owned());
            words.insert((*value).to_owned(), found.to_owned());
            is_new
        }
        None => found == *value,
    }
}

/// The text without its end of line, and with `<times>` for the timestamps of users.
pub fn masked(text: &str) -> String {
    let parts: Vec<&str> = text.trim_end().split('"').collect();
    let mask = |part: &&str| if is_timestamp(part) { "<time>" } else { part }.to_owned();
    let masked = parts.iter().map(mask).collect::<Vec<_>>().join("\"");
    masked.replace(r#""createdAt":"<time>","updatedAt":"<time>""#, "<times>")
}

/// Returns true if the text has the form `2025-01-31T12:34:56.123456Z`.
pub fn is_timestamp(text: &str) -> bool {
    const FORM: &[u8] = b"0000-00-00T00:00:00.000000Z";
    let fits = |(byte, form): (u8, &u8)| match form {
        b'0' => byte.is_ascii_digit(),
        sign => byte == *sign,
    };
    text.len() == FORM.len() && text.bytes().zip(FORM).all(fits)
}
