//! Parses the query string: the parameters of lists. Refuses all other parameters.

use crate::error::{Error, NUL_MESSAGE, Violation};
use crate::http::{Request, percent_decode};
use crate::users::email;
use crate::users::page::{ListRequest, PageRequest, Selection};
use crate::users::user::parse_id;
use percent_encoding::percent_decode_str;

/// The parameters of `GET /users`.
const LIST_PARAMETERS: [&str; 7] = ["page", "perPage", "order", "email", "emailPrefix", "after", "id"];

/// Each parameter with the parameters that it cannot be combined with.
const EXCLUSIVE_PARAMETERS: [(&str, &[&str]); 4] = [
    ("order", &["email"]),
    ("after", &["page", "email", "order"]),
    ("emailPrefix", &["page", "email", "order", "after"]),
    ("id", &["page", "perPage", "order", "email", "emailPrefix", "after"]),
];

/// The message about an `id` parameter whose value cannot be the id of a user.
const INVALID_ID_MESSAGE: &str = "must be an id, one for each parameter, as in id=3&id=5: digits, without a zero in front, up to 9223372036854775807";

/// The most unknown parameters that a refusal names, because the answer must not repeat a query of thousands of
/// parameters.
const MAX_SHOWN_PARAMETERS: usize = 10;
/// The most characters that a refusal shows of the name of an unknown parameter.
const MAX_SHOWN_NAME_CHARS: usize = 64;

/// Parses the query of `GET /users`, or returns [`Error::InvalidQuery`]. There are four groups of parameters:
/// - `page` (default 1) and `perPage` (default 15, at most `max_per_page`), both whole numbers from 1; also `email` or
///   `order`
/// - `after`, a whole number, and `perPage`
/// - `emailPrefix` and `perPage`
/// - `id` alone, up to `max_per_page` times
///
/// Each parameter but `id` may be there once, and no other parameter may be there.
pub fn parse_list_request(request: &Request, max_per_page: u32) -> Result<ListRequest, Error> {
    let mut query = Query::new(request);
    let page = query.parse_number("page", 1, i64::MAX);
    let per_page = query.parse_number("perPage", 1, max_per_page.into());
    let order = query.single_value("order").map(|text| percent_decode(text).unwrap_or_default());
    if !matches!(order.as_deref(), None | Some("asc" | "desc")) {
        query.add_violation("order", "enum", "must be asc or desc");
    }
    let is_from_end = order.is_some_and(|order| order == "desc");
    let (email, prefix) = (query.parse_email("email"), query.parse_email("emailPrefix"));
    let after = query.parse_number("after", 0, i64::MAX);
    let ids = query.parse_ids("id", max_per_page);
    for (name, others) in EXCLUSIVE_PARAMETERS {
        if query.is_given(name) && others.iter().any(|other| query.is_given(other)) {
            let message = format!("cannot be given together with {}", others.join(" or "));
            query.add_violation(name, "not", message);
        }
    }
    query.refuse_invalid(&LIST_PARAMETERS)?;
    let named = (!ids.is_empty()).then_some(ids.len() as u32);
    let per_page = per_page.map_or(15.min(max_per_page), |number| number as u32);
    let per_page = named.unwrap_or(per_page);
    let page = PageRequest { page: page.unwrap_or(1), per_page, is_from_end };
    let selection = named.map(|_| Selection::Ids(ids.into_iter().collect()));
    let selection = selection.or(after.map(Selection::AfterId)).or(prefix.map(Selection::EmailPrefix));
    let selection = selection.or(email.map(Selection::Email)).unwrap_or(Selection::All);
    Ok(ListRequest { selection, page })
}

/// Fails with [`Error::InvalidQuery`] if the query has any parameter, for routes that take no parameters.
pub fn refuse_parameters(request: &Request) -> Result<(), Error> {
    Query::new(request).refuse_invalid(&[])
}

/// The parameters of a query string, and the violations that were found in them.
struct Query<'a> {
    /// The name of each parameter, decoded as in a form, and its value, which is still percent-encoded.
    parameters: Vec<(String, &'a str)>,
    violations: Vec<Violation>,
}

impl<'a> Query<'a> {
    fn new(request: &'a Request) -> Query<'a> {
        let (_, query) = request.target.split_once('?').unwrap_or_default();
        let pair = |pair: &'a str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (percent_decode_str(&name.replace('+', " ")).decode_utf8_lossy().into_owned(), value)
        };
        let parameters = query.split('&').filter(|pair| !pair.is_empty()).map(pair).collect();
        Query { parameters, violations: Vec::new() }
    }

    fn add_violation(&mut self, name: &str, keyword: &str, message: impl Into<String>) {
        // Escapes the name as in a JSON pointer.
        let path = format!("/{}", name.replace('~', "~0").replace('/', "~1"));
        self.violations.push(Violation { path, keyword: keyword.to_owned(), message: message.into() });
    }

    fn is_given(&self, name: &str) -> bool {
        self.parameters.iter().any(|(given, _)| given == name)
    }

    /// Returns the value of a parameter, still percent-encoded. Adds a violation if the parameter is given more than
    /// once.
    fn single_value(&mut self, name: &str) -> Option<&'a str> {
        let mut values = self.parameters.iter().filter(|(given, _)| given == name);
        let (_, value) = values.next()?;
        if values.next().is_some() {
            self.add_violation(name, "maxItems", "must be given once");
            return None;
        }
        Some(value)
    }

    /// Parses the values of a parameter as ids. Adds a violation for a malformed id, or if there are more than
    /// `max_ids` ids.
    fn parse_ids(&mut self, name: &str, max_ids: u32) -> Vec<i64> {
        let given = self.parameters.iter().filter(|(given, _)| given == name);
        let ids: Vec<_> = given.map(|(_, value)| parse_id(&percent_decode(value)?)).collect();
        if ids.len() > max_ids as usize {
            self.add_violation(name, "maxItems", format!("must be given at most {max_ids} times"));
        } else if ids.contains(&None) {
            self.add_violation(name, "pattern", INVALID_ID_MESSAGE);
        }
        ids.into_iter().flatten().collect()
    }

    /// Parses a parameter as a whole number from `min` to `max`. Adds a violation for another value.
    fn parse_number(&mut self, name: &str, min: i64, max: i64) -> Option<i64> {
        let text = percent_decode(self.single_value(name)?).unwrap_or_default();
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let too_small = || format!("must be a whole number of at least {min}");
        let (keyword, message) = match text.parse() {
            _ if !is_number => ("type", too_small()),
            Ok(number) if number < min => ("minimum", too_small()),
            Ok(number) if number <= max => return Some(number),
            // Reports digits that do not fit into an `i64` as a number that is too large.
            _ => ("maximum", format!("must be at most {max}")),
        };
        self.add_violation(name, keyword, message);
        None
    }

    /// Parses a parameter as an e-mail address, in NFC. Keeps `+` as a plus sign, although HTML forms send `+` for a
    /// space, because users of curl do not encode the plus sign of an address.
    fn parse_email(&mut self, name: &str) -> Option<String> {
        let (keyword, message) = match percent_decode(self.single_value(name)?) {
            None => ("format", "must be UTF-8, percent-encoded"),
            Some(text) if text.is_empty() => ("minLength", "must not be empty"),
            Some(text) if text.contains('\0') => ("pattern", NUL_MESSAGE),
            Some(text) => return Some(email::to_nfc(&text)),
        };
        self.add_violation(name, keyword, message);
        None
    }

    /// Adds a violation for each parameter that is not one of `known`. The violation lacks the parameter's value, which
    /// may be a token. Fails with [`Error::InvalidQuery`] if the query has violations of any kind.
    fn refuse_invalid(mut self, known: &[&str]) -> Result<(), Error> {
        let names = self.parameters.iter().map(|(name, _)| name.as_str());
        let unknown = names.filter(|name| !known.contains(name)).map(str::to_owned);
        for name in unknown.take(MAX_SHOWN_PARAMETERS).collect::<Vec<_>>() {
            let meant = known.iter().find(|known| known.eq_ignore_ascii_case(&name));
            let served = match (meant, known.split_last()) {
                (Some(meant), _) => format!("{meant} is"),
                (None, Some((last, others))) => format!("{} and {last} are", others.join(", ")),
                (None, None) => "there is none".to_owned(),
            };
            let name: String = name.chars().take(MAX_SHOWN_NAME_CHARS).collect();
            self.add_violation(&name, "additionalProperties", format!("is not a parameter here; {served}"));
        }
        if self.violations.is_empty() { Ok(()) } else { Err(Error::InvalidQuery(self.violations)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str) -> Result<ListRequest, Error> {
        parse_list_request(&Request::get(format!("/users?{query}")), 1000)
    }

    /// Returns the path and the keyword of each violation.
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
        let paged = |page| ListRequest { selection: Selection::All, page };
        let of = |email: &str, page| ListRequest { selection: Selection::Email(email.to_owned()), page };
        let email = |email: &str| of(email, page(1, 15));
        let unpaged = |selection, per_page| ListRequest { selection, page: page(1, per_page) };
        let ids = |ids: &[i64], count| unpaged(Selection::Ids(ids.iter().copied().collect()), count);
        let rows = [
            ("", paged(page(1, 15))),
            ("page=2", paged(page(2, 15))),
            ("perPage=1000&page=007", paged(page(7, 1000))),
            ("page=%32", paged(page(2, 15))),
            ("page=9223372036854775807", paged(page(i64::MAX, 15))),
            ("order=asc", paged(page(1, 15))),
            ("order=desc&page=2", paged(PageRequest { is_from_end: true, ..page(2, 15) })),
            ("emailPrefix=Ada+n%2B&perPage=3", unpaged(Selection::EmailPrefix("Ada+n+".to_owned()), 3)),
            ("id=3", ids(&[3], 1)),
            ("id=8&i%64=%33&id=8", ids(&[3, 8], 3)),
            ("id=9223372036854775807", ids(&[i64::MAX], 1)),
            ("after=0", unpaged(Selection::AfterId(0), 15)),
            ("perPage=7&after=9223372036854775807", unpaged(Selection::AfterId(i64::MAX), 7)),
            ("email=ada@example.com", email("ada@example.com")),
            ("email=ada%40example.com", email("ada@example.com")),
            ("email=ada+news@example.com", email("ada+news@example.com")),
            ("email=ada%2Bnews%40example.com", email("ada+news@example.com")),
            ("&em%61il=a=b@c.de&", email("a=b@c.de")),
            ("email=%C3%A9%20x", email("é x")),
            ("email=e%CC%81%20x", email("é x")),
            ("email=a@b.co&page=3&perPage=2", of("a@b.co", page(3, 2))),
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
            ("id=1&order=asc", "/id not"),
            ("id=1&email=a@b.co", "/id not"),
            ("id=1&emailPrefix=a", "/id not"),
            ("id=1&after=0", "/id not"),
            ("id", "/id pattern"),
            ("id=1,2", "/id pattern"),
            ("id=3&id=03", "/id pattern"),
            ("id=%ff", "/id pattern"),
            ("id=9223372036854775808", "/id pattern"),
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
            assert!(refuse_parameters(&Request::get(target)).is_ok(), "{target}");
        }
        for target in ["/users/1?page=1", "/users/1?=", "/users/1?x&y"] {
            assert!(refuse_parameters(&Request::get(target)).is_err(), "{target}");
        }
        let many = format!("/users/1?{}", "a&".repeat(3000));
        match refuse_parameters(&Request::get(many)) {
            Err(Error::InvalidQuery(violations)) => {
                assert_eq!(violations.len(), MAX_SHOWN_PARAMETERS);
                assert_eq!(violations[0].message, "is not a parameter here; there is none");
            }
            other => panic!("{other:?}"),
        }
    }
}
