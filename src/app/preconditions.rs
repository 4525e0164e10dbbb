//! Entity tags, and the header fields that make a request depend on them (RFC 9110, sections 8.8.3 and 13).
//!
//! Knows no statuses. A change is compared with the record where it is made, in the database: here its tags become a
//! [`Condition`].

use crate::{
    error::Error,
    http::Request,
    users::{
        revision::{Condition, Revision},
        timestamp::Timestamp,
        user::User,
    },
};

/// The field `ETag` of an answer with this user.
pub fn etag(user: &User) -> String {
    tag(user.revision())
}

/// The tag of a state, in its quotes.
fn tag(Revision { version, updated_at }: Revision) -> String {
    format!("\"{version}-{:x}\"", updated_at.unix_micros())
}

/// The state that a tag of ours names, given without its quotes.
fn revision(text: &str) -> Option<Revision> {
    let (version, micros) = text.rsplit_once('-')?;
    let micros = u64::from_str_radix(micros, 16).ok()?.cast_signed();
    let revision =
        Revision { version: version.parse().ok()?, updated_at: Timestamp::from_unix_micros(micros)? };
    // In the one spelling that we use.
    (tag(revision).trim_matches('"') == text).then_some(revision)
}

/// `If-Match` and `If-None-Match` of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Preconditions {
    if_match: Tags,
    if_none_match: Tags,
}

/// What one of the fields holds.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Tags {
    Absent,
    /// `*`
    Any,
    /// The states that its tags name. Tags that are not ours match nothing.
    These(Vec<Revision>),
}

/// What becomes of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    /// It is answered.
    Answered,
    /// The client has it already.
    NotModified,
    /// The record is not the one that the client means.
    Failed,
}

impl Preconditions {
    /// From the fields of a request; [`Error::BadRequest`] where one is no list of entity tags.
    pub fn of(request: &Request) -> Result<Preconditions, Error> {
        // Strong comparison: weak tags match nothing. In the other field they match as strong ones do.
        let if_match = tags(request, "if-match", false)
            .ok_or(Error::BadRequest("If-Match holds neither * nor entity tags in double quotes"))?;
        let if_none_match = tags(request, "if-none-match", true)
            .ok_or(Error::BadRequest("If-None-Match holds neither * nor entity tags in double quotes"))?;
        Ok(Preconditions { if_match, if_none_match })
    }

    /// What becomes of a read of a record in this state.
    pub fn read(&self, revision: Revision) -> Read {
        let matches = |tags: &Tags| match tags {
            Tags::Absent => None,
            Tags::Any => Some(true),
            Tags::These(revisions) => Some(revisions.contains(&revision)),
        };
        match (matches(&self.if_match), matches(&self.if_none_match)) {
            (Some(false), _) => Read::Failed,
            (_, Some(true)) => Read::NotModified,
            _ => Read::Answered,
        }
    }

    /// What a change of a record depends on.
    pub fn into_condition(self) -> Condition {
        let only = match self.if_match {
            Tags::Absent | Tags::Any => None,
            Tags::These(revisions) => Some(revisions),
        };
        match self.if_none_match {
            Tags::Absent => Condition { only, except: Vec::new() },
            // Every record that there is matches it.
            Tags::Any => Condition { only: Some(Vec::new()), except: Vec::new() },
            Tags::These(except) => Condition { only, except },
        }
    }
}

/// What all fields of that name hold together; `None` where they are malformed.
fn tags(request: &Request, name: &str, weak: bool) -> Option<Tags> {
    let mut found = Tags::Absent;
    for value in request.fields(name) {
        found = match found {
            Tags::Absent if value.trim_matches(SPACES) == "*" => Tags::Any,
            Tags::Absent => Tags::These(list(value, weak)?),
            Tags::These(mut revisions) => {
                revisions.extend(list(value, weak)?);
                Tags::These(revisions)
            }
            Tags::Any => return None,
        };
    }
    Some(found)
}

const SPACES: [char; 2] = [' ', '\t'];

/// The states that a list of tags names, those of weak tags only where they count; `None` where it is malformed.
fn list(value: &str, weak: bool) -> Option<Vec<Revision>> {
    let mut revisions = Vec::new();
    each_tag(value, |text, is_weak| revisions.extend(revision(text).filter(|_| weak || !is_weak)))?;
    Some(revisions)
}

/// Calls `see` with the text of each tag of a list, and whether it is weak; `None` where the list is malformed. An
/// empty one is a list (RFC 9110, 5.6.1).
pub fn each_tag<'a>(value: &'a str, mut see: impl FnMut(&'a str, bool)) -> Option<()> {
    let mut rest = value.trim_matches([' ', '\t', ',']);
    while !rest.is_empty() {
        let (is_weak, tag) = match rest.strip_prefix("W/") {
            Some(tag) => (true, tag),
            None => (false, rest),
        };
        let (text, after) = tag.strip_prefix('"')?.split_once('"')?;
        if text.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
            return None;
        }
        see(text, is_weak);
        rest = after.trim_start_matches(SPACES);
        if !rest.is_empty() {
            rest = rest.strip_prefix(',')?.trim_start_matches([' ', '\t', ',']);
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(version: i64, micros: i64) -> Revision {
        Revision { version, updated_at: Timestamp::from_unix_micros(micros).unwrap() }
    }

    #[test]
    fn texts_of_tags() {
        let rows = [
            (at(1, 0), "1-0"),
            (at(7, 1_770_000_000_000_000), "7-649ce3d40a000"),
            (at(i64::MAX, -1), "9223372036854775807-ffffffffffffffff"),
            (at(-3, 1), "-3-1"),
        ];
        for (state, text) in rows {
            assert_eq!(tag(state), format!("\"{text}\""));
            assert_eq!(revision(text), Some(state), "{text}");
        }
        for text in
            ["", "1", "1-", "-1", "+1-0", "01-0", "1-00", "1-A", "1-g", "1--1", "1-0 ", "1-7fffffffffffffff"]
        {
            assert_eq!(revision(text), None, "{text}");
        }
    }

    #[test]
    fn lists() {
        let rows: [(&str, Option<&[Revision]>); 22] = [
            (r#""1-0""#, Some(&[at(1, 0)])),
            (r#""1-0", "2-a""#, Some(&[at(1, 0), at(2, 10)])),
            (r#""1-0","2-a"  ,	"3-b""#, Some(&[at(1, 0), at(2, 10), at(3, 11)])),
            (r#" , "1-0", , ,"2-a",, "#, Some(&[at(1, 0), at(2, 10)])),
            (r#"W/"1-0", "2-a""#, Some(&[at(2, 10)])),
            (r#""a,b", "", "x" , "*""#, Some(&[])),
            ("\"\u{e9}\"", Some(&[])),
            ("", Some(&[])),
            (" , ", Some(&[])),
            ("1-0", None),
            (r#"""#, None),
            (r#""1-0"#, None),
            (r#""1-0" "2-a""#, None),
            (r#""1-0", x"#, None),
            (r#""1-0",, W/"#, None),
            (r#"w/"1-0""#, None),
            (r#"W /"1-0""#, None),
            (r#""1-0""2-a""#, None),
            (r#""a b""#, None),
            (r#"'1-0'"#, None),
            (r#"*, "1-0""#, None),
            (r#""1-0", *"#, None),
        ];
        for (value, expected) in rows {
            assert_eq!(list(value, false).as_deref(), expected, "{value}");
        }
        assert_eq!(list(r#"W/"1-0", "2-a""#, true), Some(vec![at(1, 0), at(2, 10)]));
    }

    #[test]
    fn fields() {
        let parse = |fields: &[(&str, &str)]| {
            let mut request = Request::get("/users/1");
            for (name, value) in fields {
                request = request.with(*name, *value);
            }
            Preconditions::of(&request)
        };
        let (one, two) = (at(1, 0), at(2, 10));
        // The fields, and what becomes of reads of both states.
        type Row<'a> = (&'a [(&'a str, &'a str)], Read, Read);
        let rows: [Row; 15] = [
            (&[], Read::Answered, Read::Answered),
            (&[("If-None-Match", r#""1-0""#)], Read::NotModified, Read::Answered),
            (&[("if-none-match", r#"W/"1-0", "x""#)], Read::NotModified, Read::Answered),
            (
                &[("If-None-Match", r#""1-0""#), ("If-None-Match", r#""2-a""#)],
                Read::NotModified,
                Read::NotModified,
            ),
            (&[("If-None-Match", " * ")], Read::NotModified, Read::NotModified),
            (&[("If-None-Match", r#""x""#)], Read::Answered, Read::Answered),
            (&[("If-Match", r#""1-0""#)], Read::Answered, Read::Failed),
            (&[("If-Match", r#"W/"1-0""#)], Read::Failed, Read::Failed),
            (&[("If-Match", "*")], Read::Answered, Read::Answered),
            (&[("If-Match", r#""1-0""#), ("If-None-Match", r#""1-0""#)], Read::NotModified, Read::Failed),
            (&[("If-Match", "*"), ("If-None-Match", "*")], Read::NotModified, Read::NotModified),
            (&[("If-Match", "")], Read::Failed, Read::Failed),
            (&[("If-Match", ", ,"), ("If-Match", r#""1-0""#)], Read::Answered, Read::Failed),
            (&[("If-None-Match", "")], Read::Answered, Read::Answered),
            (&[("If-None-Match", ","), ("If-None-Match", r#""1-0""#)], Read::NotModified, Read::Answered),
        ];
        for (fields, first, second) in rows {
            let preconditions = parse(fields).unwrap();
            assert_eq!((preconditions.read(one), preconditions.read(two)), (first, second), "{fields:?}");
            // A change is made where a read would be answered.
            let condition = preconditions.into_condition();
            let holds = (condition.holds(one), condition.holds(two));
            assert_eq!(holds, (first == Read::Answered, second == Read::Answered), "{fields:?}");
            if condition.is_empty() {
                assert_eq!((first, second), (Read::Answered, Read::Answered), "{fields:?}");
            }
        }
        let malformed: [&[(&str, &str)]; 6] = [
            &[("If-Match", "1-0")],
            &[("If-Match", ""), ("If-Match", "*")],
            &[("If-None-Match", "1-0")],
            &[("If-Match", "*"), ("If-Match", "*")],
            &[("If-Match", "*"), ("If-Match", r#""1-0""#)],
            &[("If-Match", r#""1-0""#), ("If-Match", "*")],
        ];
        for fields in malformed {
            assert!(matches!(parse(fields), Err(Error::BadRequest(_))), "{fields:?}");
        }
    }
}
