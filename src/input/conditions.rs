//! Parses `If-Match` and `If-None-Match`, and makes the `ETag` that clients send back in these fields.

use crate::error::Error;
use crate::http::Request;
use crate::users::revision::{Condition, Revision, Revisions};
use time::OffsetDateTime;

/// Returns the value of `ETag` for a user at this revision.
pub fn etag(Revision { version, updated_at }: Revision) -> String {
    let micros = (updated_at.unix_timestamp_nanos() / 1000) as i64;
    format!("\"{version}-{micros:x}\"")
}

/// Parses an entity tag, without its quotes, into the revision that the tag stands for. Returns `None` for a tag that
/// this service has not made.
fn parse_etag(text: &str) -> Option<Revision> {
    let (version, micros) = text.rsplit_once('-')?;
    let micros = u64::from_str_radix(micros, 16).ok()?.cast_signed();
    let updated_at = OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000).ok()?;
    let revision = Revision { version: version.parse().ok()?, updated_at };
    // Refuses another spelling of the version or the time, such as `+1` or `01`, because no tag of this service is
    // spelled so.
    (etag(revision).trim_matches('"') == text).then_some(revision)
}

/// Parses the fields `If-Match` and `If-None-Match` of a request, as far as the request has them. Fails with
/// [`Error::BadRequest`] if one of the fields is neither `*` nor a list of entity tags.
pub fn parse_condition(request: &Request) -> Result<Condition, Error> {
    let Condition { if_match, if_none_match } = Condition::default();
    // Ignores weak tags in If-Match, where a weak tag matches no revision. In If-None-Match, weak tags match as strong
    // tags do (RFC 9110, 13.1).
    let if_match = parse_revisions(request, "if-match", false, if_match)
        .ok_or(Error::BadRequest("If-Match must be *, or entity tags in double quotes"))?;
    let if_none_match = parse_revisions(request, "if-none-match", true, if_none_match)
        .ok_or(Error::BadRequest("If-None-Match must be *, or entity tags in double quotes"))?;
    Ok(Condition { if_match, if_none_match })
}

/// Parses all fields named `field` together into the revisions that their tags stand for, or returns `default` if
/// there is no such field. Returns `None` if a field is malformed. Ignores tags of other services.
fn parse_revisions(request: &Request, field: &str, with_weak: bool, default: Revisions) -> Option<Revisions> {
    let values: Vec<&str> = request.header_values(field).collect();
    match values[..] {
        [] => Some(default),
        [value] if value.trim_matches(SPACE_AND_TAB) == "*" => Some(None),
        _ => {
            let lists = values.into_iter().map(|value| parse_etag_list(value, with_weak));
            Some(Some(lists.collect::<Option<Vec<_>>>()?.concat()))
        }
    }
}

const SPACE_AND_TAB: [char; 2] = [' ', '\t'];

/// Parses a list of tags into the revisions that the tags stand for. Includes weak tags only if `with_weak` is set.
/// Returns `None` if the list is malformed. An empty text is a valid list (RFC 9110, 5.6.1).
fn parse_etag_list(value: &str, with_weak: bool) -> Option<Vec<Revision>> {
    let mut revisions = Vec::new();
    let mut rest = value.trim_matches([' ', '\t', ',']);
    while !rest.is_empty() {
        let weak_tag = rest.strip_prefix("W/");
        let (text, after) = weak_tag.unwrap_or(rest).strip_prefix('"')?.split_once('"')?;
        if text.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
            return None;
        }
        revisions.extend(parse_etag(text).filter(|_| with_weak || weak_tag.is_none()));
        rest = after.trim_start_matches(SPACE_AND_TAB);
        if !rest.is_empty() {
            rest = rest.strip_prefix(',')?.trim_start_matches([' ', '\t', ',']);
        }
    }
    Some(revisions)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(version: i64, micros: i64) -> Revision {
        let updated_at = OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000).unwrap();
        Revision { version, updated_at }
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
            assert_eq!(etag(state), format!("\"{text}\""));
            assert_eq!(parse_etag(text), Some(state), "{text}");
        }
        for text in
            ["", "1", "1-", "-1", "+1-0", "01-0", "1-00", "1-A", "1-g", "1--1", "1-0 ", "1-7fffffffffffffff"]
        {
            assert_eq!(parse_etag(text), None, "{text}");
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
            assert_eq!(parse_etag_list(value, false).as_deref(), expected, "{value}");
        }
        assert_eq!(parse_etag_list(r#"W/"1-0", "2-a""#, true), Some(vec![at(1, 0), at(2, 10)]));
    }

    #[test]
    fn fields() {
        let parse = |fields: &[(&str, &str)]| {
            let mut request = Request::get("/users/1");
            for (name, value) in fields {
                request = request.with(*name, *value);
            }
            parse_condition(&request)
        };
        let (one, two) = (at(1, 0), at(2, 10));
        // Each row has the fields, and the statuses of a read of the first and the second state.
        type Row<'a> = (&'a [(&'a str, &'a str)], u16, u16);
        let rows: [Row; 15] = [
            (&[], 200, 200),
            (&[("If-None-Match", r#""1-0""#)], 304, 200),
            (&[("if-none-match", r#"W/"1-0", "x""#)], 304, 200),
            (&[("If-None-Match", r#""1-0""#), ("If-None-Match", r#""2-a""#)], 304, 304),
            (&[("If-None-Match", " * ")], 304, 304),
            (&[("If-None-Match", r#""x""#)], 200, 200),
            (&[("If-Match", r#""1-0""#)], 200, 412),
            (&[("If-Match", r#"W/"1-0""#)], 412, 412),
            (&[("If-Match", "*")], 200, 200),
            (&[("If-Match", r#""1-0""#), ("If-None-Match", r#""1-0""#)], 304, 412),
            (&[("If-Match", "*"), ("If-None-Match", "*")], 304, 304),
            (&[("If-Match", "")], 412, 412),
            (&[("If-Match", ", ,"), ("If-Match", r#""1-0""#)], 200, 412),
            (&[("If-None-Match", "")], 200, 200),
            (&[("If-None-Match", ","), ("If-None-Match", r#""1-0""#)], 304, 200),
        ];
        for (fields, first, second) in rows {
            let condition = parse(fields).unwrap();
            // Makes a change if a read would be answered.
            let read = |revision| match (condition.is_met_by(revision), condition.if_match_allows(revision)) {
                (true, _) => 200,
                (false, true) => 304,
                (false, false) => 412,
            };
            assert_eq!((read(one), read(two)), (first, second), "{fields:?}");
            if condition.is_always_met() {
                assert_eq!((first, second), (200, 200), "{fields:?}");
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
