//! Which users are asked for, and lists of them as they are answered.

use crate::users::user::User;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use std::fmt::Write;

/// Which list is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListRequest {
    /// A page of all users.
    Page(PageRequest),
    /// A page of those with this address, in whatever case: one user at the most.
    Email {
        /// The address.
        email: String,
        /// The page.
        page: PageRequest,
    },
    /// The users that follow this id.
    Walk {
        /// From 0.
        after: i64,
        /// How many, from 1.
        per_page: u32,
    },
}

/// A page number and a page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRequest {
    /// From 1 to 2^63 - 1.
    pub page: i64,
    /// From 1.
    pub per_page: u32,
}

impl PageRequest {
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

    /// A page of the one user that there is, or of none.
    pub fn of_one(request: PageRequest, user: Option<User>) -> Page {
        let total = i64::from(user.is_some());
        Page::new(request, total, user.into_iter().filter(|_| request.page == 1).collect())
    }

    /// The field `Link` (RFC 8288): the first page, the one before this, the next one, and the last one, where there are
    /// such. References are relative to the server. `email`: the address that the list was asked for.
    pub fn links(&self, email: Option<&str>) -> String {
        const IN_A_QUERY: &AsciiSet =
            &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'@');
        let mut users = "/users?".to_owned();
        if let Some(email) = email {
            users.extend(["email="].into_iter().chain(utf8_percent_encode(email, IN_A_QUERY)));
            users.push('&');
        }
        let last = self.last_page;
        let links = [
            (Some(1), "first"),
            // Beyond the last page, the one before is the last one.
            ((self.current_page > 1).then(|| last.min(self.current_page - 1)), "prev"),
            (self.has_more_pages.then(|| self.current_page + 1), "next"),
            (Some(last), "last"),
        ];
        let mut text = String::with_capacity(4 * (users.len() + 48));
        for (page, relation) in links {
            let Some(page) = page else { continue };
            let comma = if text.is_empty() { "" } else { ", " };
            let per_page = self.per_page;
            let written = write!(text, "{comma}<{users}page={page}&perPage={per_page}>; rel=\"{relation}\"");
            written.expect("a String takes all text");
        }
        text
    }
}

/// Some users that follow an id, in the members that they are answered with.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Walk {
    /// The users, by id.
    pub data: Vec<User>,
    /// How many were asked for.
    pub per_page: u32,
    /// Whether users come after these.
    pub has_more_pages: bool,
}

impl Walk {
    /// From the users that there are after an id, of which one more than `per_page` suffices.
    pub fn new(per_page: u32, mut users: Vec<User>) -> Walk {
        let count = per_page as usize;
        let has_more_pages = users.len() > count;
        users.truncate(count);
        Walk { data: users, per_page, has_more_pages }
    }

    /// The field `Link`: the list that follows this one, if there is one.
    pub fn links(&self) -> Option<String> {
        let last = self.data.last().filter(|_| self.has_more_pages)?;
        Some(format!("</users?after={}&perPage={}>; rel=\"next\"", last.id, self.per_page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: PageRequest = PageRequest { page: 1, per_page: 15 };

    #[test]
    fn offsets() {
        assert_eq!(PageRequest { page: i64::MAX, ..FIRST }.offset(), i64::MAX);
        assert_eq!(PageRequest { page: 3, per_page: 7 }.offset(), 14);
    }

    #[test]
    fn an_empty_list() {
        let page = Page::new(FIRST, 0, vec![]);
        assert_eq!(
            serde_json::to_string(&page).unwrap(),
            r#"{"data":[],"total":0,"perPage":15,"currentPage":1,"lastPage":1,"from":0,"to":0,"hasMorePages":false}"#
        );
        let far = Page::new(PageRequest { page: i64::MAX, ..FIRST }, 31, vec![]);
        assert_eq!((far.last_page, far.has_more_pages), (3, false));
    }

    /// The pages that the links of a page of 2 lead to, out of 5 users.
    fn links(page: i64) -> String {
        let links = Page::new(PageRequest { page, per_page: 2 }, 5, vec![]).links(None);
        links.replace("</users?page=", "").replace("&perPage=2>; rel=", " ").replace('"', "")
    }

    #[test]
    fn links_of_pages() {
        assert_eq!(links(1), "1 first, 2 next, 3 last");
        assert_eq!(links(2), "1 first, 1 prev, 3 next, 3 last");
        assert_eq!(links(3), "1 first, 2 prev, 3 last");
        assert_eq!(links(4), "1 first, 3 prev, 3 last");
        assert_eq!(links(i64::MAX), "1 first, 3 prev, 3 last");
        let links = Page::new(FIRST, 0, vec![]).links(Some("ada+news%>\"é@example.com"));
        assert_eq!(
            links,
            "</users?email=ada%2Bnews%25%3E%22%C3%A9@example.com&page=1&perPage=15>; rel=\"first\", \
             </users?email=ada%2Bnews%25%3E%22%C3%A9@example.com&page=1&perPage=15>; rel=\"last\""
        );
    }
}
