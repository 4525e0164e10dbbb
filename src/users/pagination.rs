//! Which page is asked for, and the page as it is answered.

use crate::{
    error::{Error, Violation},
    http::Request,
    users::user::User,
};
use serde::Serialize;

/// A page number and a page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRequest {
    /// From 1 to 2^63 - 1.
    pub page: i64,
    /// From 1.
    pub per_page: u32,
}

impl PageRequest {
    /// From the query's `page` (default 1) and `perPage` (default 15, at most `max_per_page`); other
    /// parameters are not looked at. Each has to be a whole number from 1, given once; else
    /// [`Error::InvalidQuery`].
    pub fn from_query(request: &Request, max_per_page: u32) -> Result<PageRequest, Error> {
        let mut violations = Vec::new();
        let page = parameter(request, "page", i64::MAX, &mut violations);
        let per_page = parameter(request, "perPage", max_per_page.into(), &mut violations);
        if !violations.is_empty() {
            return Err(Error::InvalidQuery(violations));
        }
        Ok(PageRequest {
            page: page.unwrap_or(1),
            per_page: per_page.map_or(15.min(max_per_page), |number| number as u32),
        })
    }

    /// How many users come before the page; as many as there can be where it lies beyond them.
    pub fn offset(self) -> i64 {
        (self.page - 1).saturating_mul(self.per_page.into())
    }
}

/// One page of the list, in the members that it is answered with.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Page {
    /// The users, by id.
    pub data: Vec<User>,
    /// How many there are on all pages.
    pub total: i64,
    /// The page size asked for.
    pub per_page: u32,
    /// The page number asked for.
    pub current_page: i64,
    /// The last page that is not empty; 1 when all are.
    pub last_page: i64,
    /// The position of the page's first user, from 1; 0 when the page is empty.
    pub from: i64,
    /// The position of its last user; 0 when the page is empty.
    pub to: i64,
    /// Whether users come after this page.
    pub has_more_pages: bool,
}

impl Page {
    /// The page with these users, out of `total`.
    pub fn new(request: PageRequest, total: i64, data: Vec<User>) -> Page {
        let last_page = (total + i64::from(request.per_page) - 1) / i64::from(request.per_page);
        let (from, to) = if data.is_empty() {
            (0, 0)
        } else {
            let before = request.offset();
            (before + 1, before + data.len() as i64)
        };
        Page {
            data,
            total,
            per_page: request.per_page,
            current_page: request.page,
            last_page: last_page.max(1),
            from,
            to,
            has_more_pages: last_page > request.page,
        }
    }
}

fn parameter(request: &Request, name: &str, max: i64, violations: &mut Vec<Violation>) -> Option<i64> {
    let mut refuse = |keyword: &str, message: String| {
        violations.push(Violation { path: name.to_owned(), keyword: keyword.to_owned(), message });
        None
    };
    let mut given = request.query().filter(|(key, _)| key == name);
    let (_, text) = given.next()?;
    if given.next().is_some() {
        return refuse("maxItems", "must be given once".to_owned());
    }
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return refuse("type", "must be a whole number of at least 1".to_owned());
    }
    // Digits only, so what does not fit is too large.
    match text.parse().ok() {
        Some(0) => refuse("minimum", "must be a whole number of at least 1".to_owned()),
        Some(number) if number <= max => Some(number),
        _ => refuse("maximum", format!("must be at most {max}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str) -> Result<PageRequest, Error> {
        PageRequest::from_query(&Request::new("GET", format!("/users?{query}"), ""), 1000)
    }

    #[test]
    fn what_is_asked_for() {
        let rows = [
            ("", 1, 15),
            ("page=2", 2, 15),
            ("perPage=1000&page=007", 7, 1000),
            ("page=%32", 2, 15),
            ("x=1&x=2&per_page=3", 1, 15),
            ("page=9223372036854775807", i64::MAX, 15),
        ];
        for (query, page, per_page) in rows {
            assert_eq!(parse(query).unwrap(), PageRequest { page, per_page }, "{query}");
        }
        assert_eq!(parse("page=9223372036854775807").unwrap().offset(), i64::MAX);
        assert_eq!(parse("page=3&perPage=7").unwrap().offset(), 14);
    }

    #[test]
    fn what_cannot_be() {
        let rows = [
            ("page=0", "minimum"),
            ("page=-1", "type"),
            ("page=abc", "type"),
            ("page=1.5", "type"),
            ("page=1e3", "type"),
            ("page=", "type"),
            ("page", "type"),
            ("page=+1", "type"),
            ("page=%201", "type"),
            ("page=1&page=2", "maxItems"),
            ("page=9223372036854775808", "maximum"),
            ("page=999999999999999999999999999999", "maximum"),
            ("perPage=1001", "maximum"),
            ("perPage=999999999999999999999999999999", "maximum"),
            ("page=%D9%A1", "type"),
        ];
        for (query, keyword) in rows {
            match parse(query) {
                Err(Error::InvalidQuery(violations)) => assert_eq!(violations[0].keyword, keyword),
                other => panic!("{query}: {other:?}"),
            }
        }
        assert!(matches!(parse("page=0&perPage=0"), Err(Error::InvalidQuery(v)) if v.len() == 2));
    }

    #[test]
    fn an_empty_list() {
        let page = Page::new(parse("").unwrap(), 0, vec![]);
        assert_eq!(
            serde_json::to_string(&page).unwrap(),
            r#"{"data":[],"total":0,"perPage":15,"currentPage":1,"lastPage":1,"from":0,"to":0,"hasMorePages":false}"#
        );
        let far = Page::new(parse("page=9223372036854775807").unwrap(), 31, vec![]);
        assert_eq!((far.last_page, far.has_more_pages), (3, false));
    }
}
