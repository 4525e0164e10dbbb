//! The parts of a request beside its path: body, query, `If-Match` and `If-None-Match`, `Idempotency-Key`.
//!
//! Knows no route's answer. Each function reads one part, or refuses the request for it.

use super::validation::object;
use crate::error::{ACCEPT_PATCH, Error, HAS_NUL, Violation};
use crate::http::{Request, percent_decode};
use crate::users::email;
use crate::users::idempotency::Key;
use crate::users::pagination::{ListRequest, PageRequest};
use crate::users::revision::{Condition, Revision, Revisions};
use crate::users::user::parse_id;
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value};
use time::OffsetDateTime;

/// Reads the JSON object of a body without a content coding, whatever its Content-Type says, as curl's is a form's, and
/// brings its address into NFC; refuses uploads. A `patch` is a merge patch if its type is JSON or curl's default; other kinds of patches mean something else,
/// and so are refused.
pub fn body(request: &Request, patch: bool) -> Result<Map<String, Value>, Error> {
    const CURLS: &str = "application/x-www-form-urlencoded";
    let mut codings = request.fields("content-encoding").flat_map(|value| value.split(',')).map(str::trim);
    let coded = codings.any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case("identity"));
    let media_type =
        request.header("content-type").map(|text| text.split(';').next().unwrap_or_default().trim());
    let is_accepted = media_type.is_none_or(|given| match patch {
        true => ACCEPT_PATCH.split(", ").chain([CURLS]).any(|one| one.eq_ignore_ascii_case(given)),
        false => !given.get(..10).is_some_and(|start| start.eq_ignore_ascii_case("multipart/")),
    });
    if !is_accepted || coded {
        return Err(Error::UnsupportedMediaType { patch, coded });
    }
    let mut fields = object(&request.body)?;
    email::normalize(&mut fields);
    Ok(fields)
}

/// The parameters of `GET /users`.
const OF_LISTS: [&str; 7] = ["page", "perPage", "order", "email", "emailPrefix", "after", "id"];

/// Parameters, each with the parameters that it cannot be combined with.
const EXCLUDED: [(&str, &[&str]); 4] = [
    ("order", &["email"]),
    ("after", &["page", "email", "order"]),
    ("emailPrefix", &["page", "email", "order", "after"]),
    ("id", &["page", "perPage", "order", "email", "emailPrefix", "after"]),
];

/// Unknown parameters that a refusal names, and characters of each: a query of thousands is not repeated.
const NAMED: usize = 10;
const NAMED_CHARS: usize = 64;

/// Reads the query of `GET /users`: `page` (default 1) and `perPage` (default 15, at most `max_per_page`), both whole
/// numbers from 1, with `email` or `order`; or `perPage` with a whole number `after` or with `emailPrefix`. Each at most
/// once, and no others; or `id` alone, at most `max_per_page` times. Else [`Error::InvalidQuery`].
pub fn list_request(request: &Request, max_per_page: u32) -> Result<ListRequest, Error> {
    let mut query = Query::new(request);
    let page = query.number("page", 1, i64::MAX);
    let per_page = query.number("perPage", 1, max_per_page.into());
    let order = query.value("order").map(|text| percent_decode(text).unwrap_or_default());
    if !matches!(order.as_deref(), None | Some("asc" | "desc")) {
        query.refuse("order", "enum", "must be asc or desc");
    }
    let is_from_end = order.is_some_and(|order| order == "desc");
    let (email, prefix) = (query.address("email"), query.address("emailPrefix"));
    let after = query.number("after", 0, i64::MAX);
    let named = query.values("id", max_per_page);
    for (name, others) in EXCLUDED {
        if query.is_given(name) && others.iter().any(|other| query.is_given(other)) {
            let message = format!("cannot be given together with {}", others.join(" or "));
            query.refuse(name, "not", message);
        }
    }
    query.end(&OF_LISTS)?;
    if !named.is_empty() {
        let ids = named.iter().filter_map(|text| parse_id(&percent_decode(text)?)).collect();
        return Ok(ListRequest::Ids { ids, per_page: named.len() as u32 });
    }
    let per_page = per_page.map_or(15.min(max_per_page), |number| number as u32);
    let page = PageRequest { page: page.unwrap_or(1), per_page, is_from_end };
    Ok(match (after, prefix, email) {
        (Some(after), ..) => ListRequest::Walk { after, per_page },
        (None, Some(prefix), _) => ListRequest::Prefix { prefix, per_page },
        (None, None, Some(email)) => ListRequest::Email { email, page },
        (None, None, None) => ListRequest::Page(page),
    })
}

/// Returns [`Error::InvalidQuery`] if there is any parameter.
pub fn no_query(request: &Request) -> Result<(), Error> {
    Query::new(request).end(&[])
}

/// The parameters of a query string, and the violations in it.
struct Query<'a> {
    /// Names, decoded as a form's, and values as they were sent.
    given: Vec<(String, &'a str)>,
    violations: Vec<Violation>,
}

impl<'a> Query<'a> {
    fn new(request: &'a Request) -> Query<'a> {
        let (_, query) = request.target.split_once('?').unwrap_or_default();
        let pair = |pair: &'a str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (percent_decode_str(&name.replace('+', " ")).decode_utf8_lossy().into_owned(), value)
        };
        let given = query.split('&').filter(|pair| !pair.is_empty()).map(pair).collect();
        Query { given, violations: Vec::new() }
    }

    fn refuse(&mut self, name: &str, keyword: &str, message: impl Into<String>) {
        // A JSON pointer has these escapes.
        let path = format!("/{}", name.replace('~', "~0").replace('/', "~1"));
        self.violations.push(Violation { path, keyword: keyword.to_owned(), message: message.into() });
    }

    fn is_given(&self, name: &str) -> bool {
        self.given.iter().any(|(given, _)| given == name)
    }

    /// Returns the value of a parameter as it was sent. Refuses a parameter that is given more than once.
    fn value(&mut self, name: &str) -> Option<&'a str> {
        let mut values = self.given.iter().filter(|(given, _)| given == name);
        let (_, value) = values.next()?;
        if values.next().is_some() {
            self.refuse(name, "maxItems", "must be given once");
            return None;
        }
        Some(value)
    }

    /// Returns the values of a parameter as they were sent. Refuses a parameter that is given more than `max` times.
    fn values(&mut self, name: &str, max: u32) -> Vec<&'a str> {
        let named = self.given.iter().filter(|(given, _)| given == name);
        let values: Vec<_> = named.map(|(_, value)| *value).collect();
        if values.len() > max as usize {
            self.refuse(name, "maxItems", format!("must be given at most {max} times"));
        }
        values
    }

    fn number(&mut self, name: &str, min: i64, max: i64) -> Option<i64> {
        let text = percent_decode(self.value(name)?).unwrap_or_default();
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let too_small = || format!("must be a whole number of at least {min}");
        let (keyword, message) = match text.parse() {
            _ if !is_number => ("type", too_small()),
            Ok(number) if number < min => ("minimum", too_small()),
            Ok(number) if number <= max => return Some(number),
            // Digits only, so text that does not fit is too large.
            _ => ("maximum", format!("must be at most {max}")),
        };
        self.refuse(name, keyword, message);
        None
    }

    /// Returns an address in NFC, in which `+` is itself, as users of curl write it; in a form it would be a space.
    fn address(&mut self, name: &str) -> Option<String> {
        let (keyword, message) = match percent_decode(self.value(name)?) {
            None => ("format", "must be UTF-8, percent-encoded"),
            Some(text) if text.is_empty() => ("minLength", "must not be empty"),
            Some(text) if text.contains('\0') => ("pattern", HAS_NUL),
            Some(text) => return Some(email::normalized(&text)),
        };
        self.refuse(name, keyword, message);
        None
    }

    /// Refuses parameters that are not among these, by name; values are never repeated, as one may be a token.
    fn end(mut self, known: &[&str]) -> Result<(), Error> {
        let names = self.given.iter().map(|(name, _)| name.clone());
        let unknown: Vec<_> = names.filter(|name| !known.contains(&name.as_str())).take(NAMED).collect();
        for name in unknown {
            let meant = known.iter().find(|known| known.eq_ignore_ascii_case(&name));
            let served = match (meant, known.split_last()) {
                (Some(meant), _) => format!("{meant} is"),
                (None, Some((last, others))) => format!("{} and {last} are", others.join(", ")),
                (None, None) => "there is none".to_owned(),
            };
            let name: String = name.chars().take(NAMED_CHARS).collect();
            self.refuse(&name, "additionalProperties", format!("is not a parameter here; {served}"));
        }
        if self.violations.is_empty() { Ok(()) } else { Err(Error::InvalidQuery(self.violations)) }
    }
}

/// Returns the field `ETag` of an answer with a user in this state.
pub fn etag(Revision { version, updated_at }: Revision) -> String {
    let micros = (updated_at.unix_timestamp_nanos() / 1000) as i64;
    format!("\"{version}-{micros:x}\"")
}

/// Returns the state that a tag of this service names, given without its quotes.
fn revision(text: &str) -> Option<Revision> {
    let (version, micros) = text.rsplit_once('-')?;
    let micros = u64::from_str_radix(micros, 16).ok()?.cast_signed();
    let updated_at = OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000).ok()?;
    let revision = Revision { version: version.parse().ok()?, updated_at };
    // Another spelling of the numbers is no tag of this service.
    (etag(revision).trim_matches('"') == text).then_some(revision)
}

/// Reads `If-Match` and `If-None-Match` of a request, as far as it has them; [`Error::BadRequest`] if one is no list of
/// entity tags.
pub fn condition(request: &Request) -> Result<Condition, Error> {
    let Condition { only, except } = Condition::default();
    // Weak tags match no state in If-Match; in If-None-Match they match as strong ones do.
    let only = tags(request, "if-match", false, only)
        .ok_or(Error::BadRequest("If-Match holds neither * nor entity tags in double quotes"))?;
    let except = tags(request, "if-none-match", true, except)
        .ok_or(Error::BadRequest("If-None-Match holds neither * nor entity tags in double quotes"))?;
    Ok(Condition { only, except })
}

/// Reads all fields of a name together, or returns `absent` if there is none; `None` if they are malformed. Tags of other
/// services match no state.
fn tags(request: &Request, name: &str, weak: bool, absent: Revisions) -> Option<Revisions> {
    let values: Vec<&str> = request.fields(name).collect();
    match values[..] {
        [] => Some(absent),
        [value] if value.trim_matches(SPACES) == "*" => Some(None),
        _ => {
            let lists = values.into_iter().map(|value| tag_list(value, weak));
            Some(Some(lists.collect::<Option<Vec<_>>>()?.concat()))
        }
    }
}

const SPACES: [char; 2] = [' ', '\t'];

/// Reads the states that a list of tags names, weak tags only if they count; `None` if it is malformed. An empty list is
/// one (RFC 9110, 5.6.1).
fn tag_list(value: &str, weak: bool) -> Option<Vec<Revision>> {
    let mut revisions = Vec::new();
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
        revisions.extend(revision(text).filter(|_| weak || !is_weak));
        rest = after.trim_start_matches(SPACES);
        if !rest.is_empty() {
            rest = rest.strip_prefix(',')?.trim_start_matches([' ', '\t', ',']);
        }
    }
    Some(revisions)
}

/// Characters of the longest key.
const LONGEST: usize = 255;

/// Reads the `Idempotency-Key` of a request: 1 to 255 visible ASCII characters, with or without the quotes of a
/// structured string. `None` if it has none; [`Error::BadRequest`] if it is malformed or there are several.
pub fn idempotency_key(request: &Request) -> Result<Option<Key>, Error> {
    const MALFORMED: Error =
        Error::BadRequest("Idempotency-Key holds not just 1 to 255 visible ASCII characters");
    let mut fields = request.fields("idempotency-key");
    let Some(value) = fields.next() else { return Ok(None) };
    let value = value.trim_matches([' ', '\t']);
    let text = match value.strip_prefix('"') {
        None => Some(value.to_owned()),
        Some(quoted) => quoted.strip_suffix('"').and_then(unescape),
    };
    let is_key = |text: &String| {
        (1..=LONGEST).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
    };
    match text.filter(is_key) {
        Some(text) if fields.next().is_none() => Ok(Some(Key::new(&text))),
        _ => Err(MALFORMED),
    }
}

/// Reads the rest of a structured string without its closing quote (RFC 9651, 3.3.3); `None` if it is malformed.
fn unescape(quoted: &str) -> Option<String> {
    let mut text = String::with_capacity(quoted.len());
    let mut characters = quoted.chars();
    while let Some(character) = characters.next() {
        text.push(match character {
            '"' => return None,
            '\\' => characters.next().filter(|escaped| matches!(escaped, '"' | '\\'))?,
            other => other,
        });
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str) -> Result<ListRequest, Error> {
        list_request(&Request::get(format!("/users?{query}")), 1000)
    }

    /// Path and keyword of each violation.
    fn violations(result: Result<ListRequest, Error>) -> Vec<String> {
        match result {
            Err(Error::InvalidQuery(violations)) => {
                violations.into_iter().map(|v| format!("{} {}", v.path, v.keyword)).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_asked_for() {
        let page = |page, per_page| PageRequest { page, per_page, is_from_end: false };
        let email = |email: &str| ListRequest::Email { email: email.to_owned(), page: page(1, 15) };
        let ids = |ids: &[i64], per_page| ListRequest::Ids { ids: ids.iter().copied().collect(), per_page };
        let rows = [
            ("", ListRequest::Page(page(1, 15))),
            ("page=2", ListRequest::Page(page(2, 15))),
            ("perPage=1000&page=007", ListRequest::Page(page(7, 1000))),
            ("page=%32", ListRequest::Page(page(2, 15))),
            ("page=9223372036854775807", ListRequest::Page(page(i64::MAX, 15))),
            ("order=asc", ListRequest::Page(page(1, 15))),
            ("order=desc&page=2", ListRequest::Page(PageRequest { is_from_end: true, ..page(2, 15) })),
            (
                "emailPrefix=Ada+n%2B&perPage=3",
                ListRequest::Prefix { prefix: "Ada+n+".to_owned(), per_page: 3 },
            ),
            ("id=3", ids(&[3], 1)),
            ("id=8&i%64=%33&id=8&id=&id=03&id=x&id=0&id=9223372036854775808&id=+3&id=-3", ids(&[3, 8], 10)),
            ("id=9223372036854775807&id=%ff&id", ids(&[i64::MAX], 3)),
            ("after=0", ListRequest::Walk { after: 0, per_page: 15 }),
            ("perPage=7&after=9223372036854775807", ListRequest::Walk { after: i64::MAX, per_page: 7 }),
            ("email=ada@example.com", email("ada@example.com")),
            ("email=ada%40example.com", email("ada@example.com")),
            ("email=ada+news@example.com", email("ada+news@example.com")),
            ("email=ada%2Bnews%40example.com", email("ada+news@example.com")),
            ("&em%61il=a=b@c.de&", email("a=b@c.de")),
            ("email=%C3%A9%20x", email("é x")),
            ("email=e%CC%81%20x", email("é x")),
            (
                "email=a@b.co&page=3&perPage=2",
                ListRequest::Email { email: "a@b.co".to_owned(), page: page(3, 2) },
            ),
        ];
        for (query, expected) in rows {
            assert_eq!(parse(query).unwrap(), expected, "{query}");
        }
    }

    #[test]
    fn what_cannot_be() {
        let rows = [
            ("page=0", "/page minimum"),
            ("page=-1", "/page type"),
            ("page=abc", "/page type"),
            ("page=1.5", "/page type"),
            ("page=1e3", "/page type"),
            ("page=", "/page type"),
            ("page", "/page type"),
            ("page=+1", "/page type"),
            ("page=%201", "/page type"),
            ("page=1&page=2", "/page maxItems"),
            ("page=9223372036854775808", "/page maximum"),
            ("page=999999999999999999999999999999", "/page maximum"),
            ("perPage=1001", "/perPage maximum"),
            ("perPage=999999999999999999999999999999", "/perPage maximum"),
            ("page=%D9%A1", "/page type"),
            ("after=-1", "/after type"),
            ("after=", "/after type"),
            ("after=9223372036854775808", "/after maximum"),
            ("after=1&after=1", "/after maxItems"),
            ("after=1&page=1", "/after not"),
            ("after=1&email=a@b.co", "/after not"),
            ("order=", "/order enum"),
            ("order=DESC", "/order enum"),
            ("order=desc&order=desc", "/order maxItems"),
            ("order=desc&email=a@b.co", "/order not"),
            ("order=asc&after=1", "/after not"),
            ("emailPrefix=", "/emailPrefix minLength"),
            ("emailPrefix=a%00", "/emailPrefix pattern"),
            ("emailPrefix=a&emailPrefix=a", "/emailPrefix maxItems"),
            ("emailPrefix=a&page=1", "/emailPrefix not"),
            ("emailPrefix=a&after=1", "/emailPrefix not"),
            ("emailPrefix=a&order=desc", "/emailPrefix not"),
            ("emailPrefix=a&email=a@b.co", "/emailPrefix not"),
            ("id=1&page=1", "/id not"),
            ("id=1&perPage=1", "/id not"),
            ("id=&order=asc", "/id not"),
            ("id=1&email=a@b.co", "/id not"),
            ("id=1&emailPrefix=a", "/id not"),
            ("id=1&after=0", "/id not"),
            ("ID=1", "/ID additionalProperties"),
            (&"&id=1".repeat(1001), "/id maxItems"),
            ("emailprefix=a", "/emailprefix additionalProperties"),
            ("email=", "/email minLength"),
            ("email", "/email minLength"),
            ("email=a@b.co&email=a@b.co", "/email maxItems"),
            ("email=a@b.co&em%61il=a@b.co", "/email maxItems"),
            ("email=%", "/email format"),
            ("email=a%ff", "/email format"),
            ("email=a%00", "/email pattern"),
            ("x", "/x additionalProperties"),
            ("=1", "/ additionalProperties"),
            ("a/b~=1", "/a~1b~0 additionalProperties"),
            ("per_page=2", "/per_page additionalProperties"),
        ];
        for (query, expected) in rows {
            assert_eq!(violations(parse(query)), [expected], "{query}");
        }
        assert_eq!(violations(parse("page=0&perPage=0")), ["/page minimum", "/perPage minimum"]);
        assert_eq!(violations(parse("x&page=0")), ["/page minimum", "/x additionalProperties"]);
    }

    #[test]
    fn typing_errors_are_told() {
        for (query, message) in [
            ("perpage=2", "is not a parameter here; perPage is"),
            ("PAGE=2", "is not a parameter here; page is"),
            ("Email=a@b.co", "is not a parameter here; email is"),
            (
                "limit=2",
                "is not a parameter here; page, perPage, order, email, emailPrefix, after and id are",
            ),
        ] {
            match parse(query) {
                Err(Error::InvalidQuery(violations)) => assert_eq!(violations[0].message, message, "{query}"),
                other => panic!("{query}: {other:?}"),
            }
        }
    }

    #[test]
    fn routes_without_parameters() {
        for target in ["/users/1", "/users/1?", "/users/1?&&"] {
            assert!(no_query(&Request::get(target)).is_ok(), "{target}");
        }
        for target in ["/users/1?page=1", "/users/1?=", "/users/1?x&y"] {
            assert!(no_query(&Request::get(target)).is_err(), "{target}");
        }
        let many = format!("/users/1?{}", "a&".repeat(3000));
        match no_query(&Request::get(many)) {
            Err(Error::InvalidQuery(violations)) => {
                assert_eq!(violations.len(), NAMED);
                assert_eq!(violations[0].message, "is not a parameter here; there is none");
            }
            other => panic!("{other:?}"),
        }
    }

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
            assert_eq!(tag_list(value, false).as_deref(), expected, "{value}");
        }
        assert_eq!(tag_list(r#"W/"1-0", "2-a""#, true), Some(vec![at(1, 0), at(2, 10)]));
    }

    #[test]
    fn fields() {
        let parse = |fields: &[(&str, &str)]| {
            let mut request = Request::get("/users/1");
            for (name, value) in fields {
                request = request.with(*name, *value);
            }
            condition(&request)
        };
        let (one, two) = (at(1, 0), at(2, 10));
        // The fields, and the statuses of reads of both states.
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
            // A change is made where a read would be answered.
            let read = |revision| match (condition.holds(revision), condition.allows(revision)) {
                (true, _) => 200,
                (false, true) => 304,
                (false, false) => 412,
            };
            assert_eq!((read(one), read(two)), (first, second), "{fields:?}");
            if condition.is_empty() {
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

    #[test]
    fn keys() {
        let parse = |values: &[&str]| {
            let request = Request::get("/users");
            idempotency_key(
                &values.iter().fold(request, |request, value| request.with("idempotency-KEY", *value)),
            )
        };
        assert!(matches!(parse(&[]), Ok(None)));
        let longest = "k".repeat(255);
        let rows = [
            ("a", "a"),
            (" a\t", "a"),
            ("\"a\"", "a"),
            ("8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
            ("a\"b\\c,;=", "a\"b\\c,;="),
            (r#""a\"b\\c""#, "a\"b\\c"),
            (&longest, &longest),
            (&format!("\"{longest}\""), &longest),
        ];
        for (value, text) in rows {
            assert_eq!(parse(&[value]).unwrap(), Some(Key::new(text)), "{value}");
        }
        let malformed = [
            "",
            " ",
            "\"\"",
            "\"",
            "\"a",
            "a b",
            "\"a b\"",
            "\"a\";x=1",
            "\"a\"b\"",
            "\"a\\\"",
            "\"\\a\"",
            "a\tb",
            "a\u{7f}",
            "é",
            &format!("{longest}k"),
            &format!("\"{longest}k\""),
        ];
        for value in malformed {
            assert!(matches!(parse(&[value]), Err(Error::BadRequest(_))), "{value}");
        }
        assert!(parse(&["a", "a"]).is_err());
    }
}
