//! Query strings: which parameters a route has, and what they ask for.
//!
//! Knows no route's answer. What a parameter asks for is a value of `users::pagination`.

use crate::{
    error::{Error, HAS_NUL, Violation},
    http::{Request, percent_decode},
    users::pagination::{ListRequest, PageRequest, Range},
};
use std::borrow::Cow;

/// What `GET /users` knows.
const OF_LISTS: [&str; 6] = ["page", "perPage", "order", "email", "emailPrefix", "after"];

/// Unknown parameters that a refusal names, and characters of each: a query of thousands is not repeated.
const NAMED: usize = 10;
const NAMED_CHARS: usize = 64;

/// What `GET /users` asks for: `page` (default 1) and `perPage` (default 15, at most `max_per_page`), both whole
/// numbers from 1, with `email` or `order`; or `perPage` with a whole number `after` or with `emailPrefix`. Each at most
/// once, and no others; else [`Error::InvalidQuery`].
pub fn list(request: &Request, max_per_page: u32) -> Result<ListRequest, Error> {
    let mut query = Query { request, violations: Vec::new() };
    let page = query.number("page", 1, i64::MAX);
    let per_page = query.number("perPage", 1, max_per_page.into());
    let is_from_end = query.is_from_end();
    let email = query.address("email");
    let prefix = query.address("emailPrefix");
    let after = query.number("after", 0, i64::MAX);
    query.excludes("order", &["email"]);
    query.excludes("after", &["page", "email", "order"]);
    query.excludes("emailPrefix", &["page", "email", "order", "after"]);
    query.refuse_all_but(&OF_LISTS);
    if !query.violations.is_empty() {
        return Err(Error::InvalidQuery(query.violations));
    }
    let per_page = per_page.map_or(15.min(max_per_page), |number| number as u32);
    let page = PageRequest { page: page.unwrap_or(1), per_page, is_from_end };
    Ok(match (after, prefix, email) {
        (Some(after), ..) => ListRequest::Range(Range::Walk { after, per_page }),
        (None, Some(prefix), _) => ListRequest::Prefix { prefix, per_page },
        (None, None, Some(email)) => ListRequest::Email { email, page },
        (None, None, None) => ListRequest::Range(Range::Page(page)),
    })
}

/// For every other route: [`Error::InvalidQuery`] where there is any parameter.
pub fn none(request: &Request) -> Result<(), Error> {
    let mut query = Query { request, violations: Vec::new() };
    query.refuse_all_but(&[]);
    if query.violations.is_empty() { Ok(()) } else { Err(Error::InvalidQuery(query.violations)) }
}

/// A query string, and what is wrong with it.
struct Query<'a> {
    request: &'a Request,
    violations: Vec<Violation>,
}

impl<'a> Query<'a> {
    fn refuse(&mut self, name: &str, keyword: &str, message: String) {
        // As in a JSON pointer.
        let path = format!("/{}", name.replace('~', "~0").replace('/', "~1"));
        self.violations.push(Violation { path, keyword: keyword.to_owned(), message });
    }

    fn is_given(&self, name: &str) -> bool {
        self.request.query().any(|(key, _)| key == name)
    }

    /// The value of a parameter, which is refused where it is given more than once.
    fn value(&mut self, name: &str) -> Option<Cow<'a, str>> {
        let mut given = self.request.query().filter(|(key, _)| key == name);
        let (_, value) = given.next()?;
        if given.next().is_some() {
            self.refuse(name, "maxItems", "must be given once".to_owned());
            return None;
        }
        Some(value)
    }

    fn number(&mut self, name: &str, min: i64, max: i64) -> Option<i64> {
        let text = self.value(name)?;
        let too_small = || format!("must be a whole number of at least {min}");
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            self.refuse(name, "type", too_small());
            return None;
        }
        // Digits only, so what does not fit is too large.
        match text.parse().ok() {
            Some(number) if number < min => self.refuse(name, "minimum", too_small()),
            Some(number) if number <= max => return Some(number),
            _ => self.refuse(name, "maximum", format!("must be at most {max}")),
        }
        None
    }

    /// Refuses a parameter that is given together with one of these.
    fn excludes(&mut self, name: &str, others: &[&str]) {
        if self.is_given(name) && others.iter().any(|other| self.is_given(other)) {
            let message = format!("cannot be given together with {}", others.join(" or "));
            self.refuse(name, "not", message);
        }
    }

    /// Whether `order` asks for the last users first.
    fn is_from_end(&mut self) -> bool {
        match self.value("order").as_deref() {
            None | Some("asc") => false,
            Some("desc") => true,
            Some(_) => {
                self.refuse("order", "enum", "must be asc or desc".to_owned());
                false
            }
        }
    }

    /// An address, in which `+` stands for itself, as in what people write for curl; in a form it would be a space.
    fn address(&mut self, parameter: &str) -> Option<String> {
        self.value(parameter)?;
        let query = self.request.target.split_once('?').map_or("", |(_, query)| query);
        let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        let is_parameter = |name: &str| {
            form_urlencoded::parse(name.as_bytes()).next().is_some_and(|(name, _)| name == parameter)
        };
        let (_, encoded) = pairs.into_iter().find(|(name, _)| is_parameter(name))?;
        match percent_decode(encoded) {
            None => self.refuse(parameter, "format", "must be UTF-8, percent-encoded".to_owned()),
            Some(email) if email.is_empty() => {
                self.refuse(parameter, "minLength", "must not be empty".to_owned())
            }
            Some(email) if email.contains('\0') => self.refuse(parameter, "pattern", HAS_NUL.to_owned()),
            Some(email) => return Some(email.into_owned()),
        }
        None
    }

    /// Refuses what is not among these, by name; values are never repeated, as one may be a token.
    fn refuse_all_but(&mut self, known: &[&str]) {
        let request = self.request;
        let unknown = request.query().filter(|(name, _)| !known.contains(&name.as_ref()));
        for (name, _) in unknown.take(NAMED) {
            let meant = known.iter().find(|known| known.eq_ignore_ascii_case(&name));
            let message = match (meant, known.split_last()) {
                (Some(meant), _) => format!("is not a parameter here; {meant} is"),
                (None, Some((last, others))) => {
                    format!("is not a parameter here; {} and {last} are", others.join(", "))
                }
                (None, None) => "is not a parameter here; there is none".to_owned(),
            };
            let name: String = name.chars().take(NAMED_CHARS).collect();
            self.refuse(&name, "additionalProperties", message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str) -> Result<ListRequest, Error> {
        list(&Request::get(format!("/users?{query}")), 1000)
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
        let rows = [
            ("", ListRequest::Range(Range::Page(page(1, 15)))),
            ("page=2", ListRequest::Range(Range::Page(page(2, 15)))),
            ("perPage=1000&page=007", ListRequest::Range(Range::Page(page(7, 1000)))),
            ("page=%32", ListRequest::Range(Range::Page(page(2, 15)))),
            ("page=9223372036854775807", ListRequest::Range(Range::Page(page(i64::MAX, 15)))),
            ("order=asc", ListRequest::Range(Range::Page(page(1, 15)))),
            (
                "order=desc&page=2",
                ListRequest::Range(Range::Page(PageRequest { is_from_end: true, ..page(2, 15) })),
            ),
            (
                "emailPrefix=Ada+n%2B&perPage=3",
                ListRequest::Prefix { prefix: "Ada+n+".to_owned(), per_page: 3 },
            ),
            ("after=0", ListRequest::Range(Range::Walk { after: 0, per_page: 15 })),
            (
                "perPage=7&after=9223372036854775807",
                ListRequest::Range(Range::Walk { after: i64::MAX, per_page: 7 }),
            ),
            ("email=ada@example.com", email("ada@example.com")),
            ("email=ada%40example.com", email("ada@example.com")),
            ("email=ada+news@example.com", email("ada+news@example.com")),
            ("email=ada%2Bnews%40example.com", email("ada+news@example.com")),
            ("&em%61il=a=b@c.de&", email("a=b@c.de")),
            ("email=%C3%A9%20x", email("é x")),
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
            ("limit=2", "is not a parameter here; page, perPage, order, email, emailPrefix and after are"),
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
            assert!(none(&Request::get(target)).is_ok(), "{target}");
        }
        for target in ["/users/1?page=1", "/users/1?=", "/users/1?x&y"] {
            assert!(none(&Request::get(target)).is_err(), "{target}");
        }
        let many = format!("/users/1?{}", "a&".repeat(3000));
        match none(&Request::get(many)) {
            Err(Error::InvalidQuery(violations)) => {
                assert_eq!(violations.len(), NAMED);
                assert_eq!(violations[0].message, "is not a parameter here; there is none");
            }
            other => panic!("{other:?}"),
        }
    }
}
