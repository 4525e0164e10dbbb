//! `GET /users`: a page of all users, the users that follow an id, or the user with an address.

use super::{Command, Outcome, Progress, failed};
use crate::{
    app::{
        App,
        lanes::{Lane, Needs},
        query,
    },
    error::Error,
    http::{Request, Response},
    users::{
        pagination::{ListRequest, Listing, PageRequest, Range},
        user::UserRef,
    },
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use std::fmt::Write;

/// A list of users.
#[derive(Debug)]
pub(crate) struct List(ListRequest);

impl List {
    /// How many statements read lists.
    pub const STATEMENTS: usize = 4;

    pub fn parse(request: &Request, max_per_page: u32) -> Result<List, Error> {
        query::list(request, max_per_page).map(List)
    }

    pub fn needs(&self) -> Needs {
        match &self.0 {
            ListRequest::Range(range) => Needs { users: range.per_page() as usize, ..Needs::of(Lane::List) },
            ListRequest::Prefix { per_page, .. } => {
                Needs { users: *per_page as usize, ..Needs::of(Lane::List) }
            }
            ListRequest::Email { .. } => Needs::of(Lane::Find),
        }
    }

    /// The number of the statement that reads it.
    pub fn statement(&self) -> usize {
        match &self.0 {
            ListRequest::Range(Range::Page(_)) => 0,
            ListRequest::Range(_) => 1,
            ListRequest::Email { .. } => 2,
            ListRequest::Prefix { .. } => 3,
        }
    }

    /// Executes lists of one statement; searches by a prefix one after the other.
    pub fn execute(app: &App, lists: Vec<List>) -> Vec<Outcome> {
        let (mut ranges, mut emails, mut prefixes) = (Vec::new(), Vec::new(), Vec::new());
        for List(asked) in &lists {
            match asked {
                ListRequest::Range(range) => ranges.push(*range),
                ListRequest::Email { email, page } => emails.push((email.as_str(), *page)),
                ListRequest::Prefix { prefix, per_page } => prefixes.push((prefix, *per_page)),
            }
        }
        let mut bodies: Vec<_> = ranges.iter().map(|range| Body::new(*range)).collect();
        let mut filled = app.users.list_many(&ranges, &mut bodies);
        for (prefix, per_page) in prefixes {
            let mut body = Body::new(Range::First { per_page });
            filled = filled.and_then(|()| app.users.list_by_prefix(prefix, per_page, &mut body));
            bodies.push(body);
        }
        let found = filled.and_then(|()| {
            let addresses: Vec<&str> = emails.iter().map(|(email, _)| *email).collect();
            app.users.find_by_email(&addresses)
        });
        let users = match found {
            Ok(users) => users,
            Err(error) => return failed(error, lists, Command::List),
        };
        for ((_, page), user) in emails.iter().zip(users) {
            let mut body = Body::new(Range::Page(*page));
            body.set_total(user.iter().len() as i64);
            if let Some(user) = user.filter(|_| page.page == 1) {
                body.push(user.as_row());
            }
            bodies.push(body);
        }
        let email = |at: usize| emails.get(at).map(|(email, _)| *email);
        let answers = bodies.into_iter().enumerate().map(|(at, body)| body.finish(email(at)));
        answers.map(|answer| answer.map(Progress::Done)).collect()
    }
}

/// What a page says beside its users.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary {
    /// How many there are on all pages.
    total: i64,
    /// The page size asked for.
    per_page: u32,
    /// The page number asked for.
    current_page: i64,
    /// The last page that is not empty; 1 when all are.
    last_page: i64,
    /// The position of the page's first user, from 1; 0 when the page is empty.
    from: i64,
    /// The position of its last user; 0 when the page is empty.
    to: i64,
    /// Whether users come after this page.
    has_more_pages: bool,
}

impl Summary {
    /// Of a page with so many users, out of `total`.
    fn new(request: PageRequest, total: i64, users: i64) -> Summary {
        let last_page = (total + i64::from(request.per_page) - 1) / i64::from(request.per_page);
        let (from, to) = if users == 0 {
            (0, 0)
        } else {
            let before = request.offset();
            (before + 1, before + users)
        };
        Summary {
            total,
            per_page: request.per_page,
            current_page: request.page,
            last_page: last_page.max(1),
            from,
            to,
            has_more_pages: last_page > request.page,
        }
    }

    /// The field `Link` (RFC 8288): the first page, the one before this, the next one, and the last one, where there
    /// are such. References are relative to the server. `email`: the address that the list was asked for.
    /// `is_from_end`: whether pages count from the last user.
    fn links(&self, email: Option<&str>, is_from_end: bool) -> String {
        const IN_A_QUERY: &AsciiSet =
            &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'@');
        let mut users = "/users?".to_owned();
        if let Some(email) = email {
            users.extend(["email="].into_iter().chain(utf8_percent_encode(email, IN_A_QUERY)));
            users.push('&');
        }
        if is_from_end {
            users.push_str("order=desc&");
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

/// What a walk says beside its users.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WalkSummary {
    per_page: u32,
    has_more_pages: bool,
}

/// The text of a list while it is written.
struct Body {
    range: Range,
    text: Vec<u8>,
    total: i64,
    users: u32,
    last_id: i64,
    has_more: bool,
}

impl Body {
    /// A list without users so far.
    fn new(range: Range) -> Body {
        let text = br#"{"data":["#.to_vec();
        Body { range, text, total: 0, users: 0, last_id: 0, has_more: false }
    }

    /// The list as it is answered. `email`: the address that it was asked for.
    fn finish(mut self, email: Option<&str>) -> Result<Response, Error> {
        self.text.push(b']');
        let brace = self.text.len();
        let links = match self.range {
            Range::Page(request) => {
                let summary = Summary::new(request, self.total, self.users.into());
                serde_json::to_writer(&mut self.text, &summary).expect(IN_MEMORY);
                Some(summary.links(email, request.is_from_end))
            }
            Range::Walk { per_page, .. } => {
                let (has_more_pages, after) = (self.has_more, self.last_id);
                serde_json::to_writer(&mut self.text, &WalkSummary { per_page, has_more_pages })
                    .expect(IN_MEMORY);
                has_more_pages.then(|| format!("</users?after={after}&perPage={per_page}>; rel=\"next\""))
            }
            Range::First { per_page } => {
                let summary = WalkSummary { per_page, has_more_pages: self.has_more };
                serde_json::to_writer(&mut self.text, &summary).expect(IN_MEMORY);
                None
            }
        };
        self.text[brace] = b',';
        self.text.push(b'\n');
        self.text.shrink_to_fit();
        let response = Response { status: 200, body: self.text, ..Response::no_content() };
        Ok(match links {
            Some(links) => response.with("Link", links),
            None => response,
        })
    }
}

impl Listing for Body {
    fn set_total(&mut self, total: i64) {
        self.total = total;
    }

    fn push(&mut self, user: UserRef) {
        if self.users == self.range.per_page() {
            self.has_more = true;
            return;
        }
        if self.users > 0 {
            self.text.push(b',');
        }
        serde_json::to_writer(&mut self.text, &user).expect(IN_MEMORY);
        (self.users, self.last_id) = (self.users + 1, user.id);
    }
}

const IN_MEMORY: &str = "writing to memory does not fail";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::users::timestamp::Timestamp;
    use serde_json::json;

    const FIRST: PageRequest = PageRequest { page: 1, per_page: 15, is_from_end: false };

    #[test]
    fn an_empty_list() {
        let page = Body::new(Range::Page(FIRST)).finish(None);
        assert_eq!(
            text(page),
            r#"{"data":[],"total":0,"perPage":15,"currentPage":1,"lastPage":1,"from":0,"to":0,"hasMorePages":false}
"#
        );
        let far = Summary::new(PageRequest { page: i64::MAX, ..FIRST }, 31, 0);
        assert_eq!((far.last_page, far.has_more_pages), (3, false));
    }

    /// The pages that the links of a page of 2 lead to, out of 5 users.
    fn links(page: i64) -> String {
        let links = Summary::new(PageRequest { page, per_page: 2, ..FIRST }, 5, 0).links(None, false);
        links.replace("</users?page=", "").replace("&perPage=2>; rel=", " ").replace('"', "")
    }

    #[test]
    fn links_of_pages() {
        assert_eq!(links(1), "1 first, 2 next, 3 last");
        assert_eq!(links(2), "1 first, 1 prev, 3 next, 3 last");
        assert_eq!(links(3), "1 first, 2 prev, 3 last");
        assert_eq!(links(4), "1 first, 3 prev, 3 last");
        assert_eq!(links(i64::MAX), "1 first, 3 prev, 3 last");
        let from_end = Summary::new(FIRST, 0, 0).links(None, true);
        assert!(from_end.starts_with("</users?order=desc&page=1&perPage=15>; rel=\"first\""), "{from_end}");
        let links = Summary::new(FIRST, 0, 0).links(Some("ada+news%>\"é@example.com"), false);
        assert_eq!(
            links,
            "</users?email=ada%2Bnews%25%3E%22%C3%A9@example.com&page=1&perPage=15>; rel=\"first\", \
             </users?email=ada%2Bnews%25%3E%22%C3%A9@example.com&page=1&perPage=15>; rel=\"last\""
        );
    }

    fn text(list: Result<Response, Error>) -> String {
        String::from_utf8(list.expect("it fits").body).unwrap()
    }

    /// A list of users from id 4 with these names.
    fn list(range: Range, names: &[&str]) -> Result<Response, Error> {
        let mut body = Body::new(range);
        body.set_total(7);
        for (id, name) in (4..).zip(names) {
            let time = Timestamp::from_unix_micros(0).unwrap();
            body.push(UserRef { id, name, email: "a@b.co", created_at: time, updated_at: time });
        }
        body.finish(None)
    }

    #[test]
    fn lists_of_users() {
        let user = |id: &str, name: &str| {
            let time = "1970-01-01T00:00:00.000000Z";
            json!({"id": id, "name": name, "email": "a@b.co", "createdAt": time, "updatedAt": time})
        };
        let second = Range::Page(PageRequest { page: 2, per_page: 3, ..FIRST });
        let page = text(list(second, &["\"", "\"\""]));
        let expected = json!({
            "data": [user("4", "\""), user("5", "\"\"")], "total": 7, "perPage": 3, "currentPage": 2,
            "lastPage": 3, "from": 4, "to": 5, "hasMorePages": true,
        });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&page).unwrap(), expected);
        let walk = Range::Walk { after: 3, per_page: 2 };
        let long = "x".repeat(crate::users::user::NAME_MAX);
        // The third one only tells that there is one, however large it is.
        for (names, more) in [(&["a", "b"][..], false), (&["a", "b", &long], true)] {
            let found = list(walk, names).unwrap();
            assert_eq!(found.header("Link"), more.then_some("</users?after=5&perPage=2>; rel=\"next\""));
            let found: serde_json::Value = serde_json::from_str(&text(Ok(found))).unwrap();
            assert_eq!(
                found,
                json!({"data": [user("4", "a"), user("5", "b")], "perPage": 2, "hasMorePages": more})
            );
        }
    }
}
