//! `GET /users`: a page of all users, the users that follow an id, or the user with an address.

use super::{Item, RequestRules};
use crate::app::{App, Lane, Needs, fields};
use crate::error::Error;
use crate::http::{Request, Response};
use crate::users::pagination::{ListRequest, Listing, PageRequest, Range};
use crate::users::user::UserRef;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// A list of users.
#[derive(Debug)]
pub(crate) struct List(ListRequest);

impl List {
    /// How many statements read lists.
    pub const STATEMENTS: usize = 4;

    pub fn parse(request: &Request, rules: &RequestRules) -> Result<List, Error> {
        fields::list_request(request, rules.max_per_page).map(List)
    }

    pub fn needs(&self) -> Needs {
        match &self.0 {
            ListRequest::Email { .. } => Needs::of(Lane::Find),
            _ => Needs::list(self.range().per_page()),
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
    pub fn execute(app: &App, lists: Vec<Item<List>>) {
        let mut texts: Vec<_> = lists.iter().map(|list| ListText::new(list.command.range())).collect();
        let read = List::read(app, &lists, &mut texts);
        for (Item { command, outcome, .. }, text) in lists.into_iter().zip(texts) {
            let email = match &command.0 {
                ListRequest::Email { email, .. } => Some(email.as_str()),
                _ => None,
            };
            *outcome = read.clone().map(|()| Some(text.finish(email)));
        }
    }

    fn read(app: &App, lists: &[Item<List>], texts: &mut [ListText]) -> Result<(), Error> {
        let (mut ranges, mut emails) = (Vec::new(), Vec::new());
        for (list, text) in lists.iter().zip(&mut *texts) {
            match &list.command.0 {
                ListRequest::Range(range) => ranges.push(*range),
                ListRequest::Email { email, .. } => emails.push(email.as_str()),
                ListRequest::Prefix { prefix, per_page } => {
                    app.users.list_by_prefix(prefix, *per_page, text)?;
                }
            }
        }
        // All but one of the three kinds are empty.
        app.users.list_many(&ranges, texts)?;
        for (text, user) in texts.iter_mut().zip(app.users.find_by_email(&emails)?) {
            text.set_total(user.iter().len() as i64);
            if let Some(user) =
                user.filter(|_| matches!(text.range, Range::Page(PageRequest { page: 1, .. })))
            {
                text.push(user.as_row());
            }
        }
        Ok(())
    }

    fn range(&self) -> Range {
        match self.0 {
            ListRequest::Range(range) => range,
            ListRequest::Email { page, .. } => Range::Page(page),
            ListRequest::Prefix { per_page, .. } => Range::First { per_page },
        }
    }
}

/// Characters of an address that a `Link` has as they are.
const IN_A_QUERY: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'@');

/// Returns the field `Link` (RFC 8288) of a page: the first page, the previous one, the next one and the last one, as far
/// as they exist. References are relative to the server. `email`: the address that the list was asked for.
fn links(request: PageRequest, last: i64, email: Option<&str>) -> String {
    let PageRequest { page, per_page, is_from_end } = request;
    let mut query = String::new();
    if let Some(email) = email {
        query = format!("email={}&", utf8_percent_encode(email, IN_A_QUERY));
    }
    if is_from_end {
        query += "order=desc&";
    }
    let links = [
        (Some(1), "first"),
        // The page before one beyond the last is the last one.
        ((page > 1).then(|| last.min(page - 1)), "prev"),
        ((page < last).then(|| page + 1), "next"),
        (Some(last), "last"),
    ];
    let links = links.into_iter().filter_map(|(page, relation)| {
        page.map(|page| format!("</users?{query}page={page}&perPage={per_page}>; rel=\"{relation}\""))
    });
    links.collect::<Vec<_>>().join(", ")
}

/// The text of a list while it is written.
struct ListText {
    range: Range,
    text: Vec<u8>,
    total: i64,
    users: u32,
    last_id: i64,
    has_more: bool,
}

impl ListText {
    /// A list without users so far.
    fn new(range: Range) -> ListText {
        let text = br#"{"data":["#.to_vec();
        ListText { range, text, total: 0, users: 0, last_id: 0, has_more: false }
    }

    /// Ends the list and answers it. `email`: the address that it was asked for.
    fn finish(mut self, email: Option<&str>) -> Response {
        let (users, has_more) = (i64::from(self.users), self.has_more);
        let (summary, links) = match self.range {
            Range::Page(request) => {
                let (total, per_page) = (self.total, i64::from(request.per_page));
                let (page, last) = (request.page, ((total + per_page - 1) / per_page).max(1));
                let before = if users == 0 { 0 } else { request.offset() };
                let (from, to) = (before + users.min(1), before + users);
                let has_more = page < last;
                let summary = format!(
                    r#""total":{total},"perPage":{per_page},"currentPage":{page},"lastPage":{last},"from":{from},"to":{to},"hasMorePages":{has_more}"#
                );
                (summary, Some(links(request, last, email)))
            }
            Range::Walk { per_page, .. } => {
                let next = format!("</users?after={}&perPage={per_page}>; rel=\"next\"", self.last_id);
                (format!(r#""perPage":{per_page},"hasMorePages":{has_more}"#), has_more.then_some(next))
            }
            Range::First { per_page } => (format!(r#""perPage":{per_page},"hasMorePages":{has_more}"#), None),
        };
        self.text.extend_from_slice(format!("],{summary}}}\n").as_bytes());
        self.text.shrink_to_fit();
        let response = Response { status: 200, body: self.text, ..Response::no_content() };
        match links {
            Some(links) => response.with("Link", links),
            None => response,
        }
    }
}

impl Listing for ListText {
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
        serde_json::to_writer(&mut self.text, &user).expect("writing to memory does not fail");
        (self.users, self.last_id) = (self.users + 1, user.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::users::timestamp::Timestamp;
    use serde_json::json;

    const FIRST: PageRequest = PageRequest { page: 1, per_page: 15, is_from_end: false };

    #[test]
    fn an_empty_list() {
        let page = ListText::new(Range::Page(FIRST)).finish(None);
        assert_eq!(
            body_text(page),
            r#"{"data":[],"total":0,"perPage":15,"currentPage":1,"lastPage":1,"from":0,"to":0,"hasMorePages":false}
"#
        );
        let mut far = ListText::new(Range::Page(PageRequest { page: i64::MAX, ..FIRST }));
        far.set_total(31);
        let far = far.finish(None).value();
        assert_eq!(
            (&far["lastPage"], &far["hasMorePages"], &far["from"]),
            (&json!(3), &json!(false), &json!(0))
        );
    }

    /// The pages that the links of a page of 2 lead to, out of 5 users.
    fn pages(page: i64) -> String {
        let links = links(PageRequest { page, per_page: 2, ..FIRST }, 3, None);
        links.replace("</users?page=", "").replace("&perPage=2>; rel=", " ").replace('"', "")
    }

    #[test]
    fn links_of_pages() {
        assert_eq!(pages(1), "1 first, 2 next, 3 last");
        assert_eq!(pages(2), "1 first, 1 prev, 3 next, 3 last");
        assert_eq!(pages(3), "1 first, 2 prev, 3 last");
        assert_eq!(pages(4), "1 first, 3 prev, 3 last");
        assert_eq!(pages(i64::MAX), "1 first, 3 prev, 3 last");
        let from_end = links(PageRequest { is_from_end: true, ..FIRST }, 1, None);
        assert!(from_end.starts_with("</users?order=desc&page=1&perPage=15>; rel=\"first\""), "{from_end}");
        let links = links(FIRST, 1, Some("ada+news%>\"é@example.com"));
        assert_eq!(
            links,
            "</users?email=ada%2Bnews%25%3E%22%C3%A9@example.com&page=1&perPage=15>; rel=\"first\", \
             </users?email=ada%2Bnews%25%3E%22%C3%A9@example.com&page=1&perPage=15>; rel=\"last\""
        );
    }

    fn body_text(list: Response) -> String {
        String::from_utf8(list.body).unwrap()
    }

    /// A list of users from id 4 with these names.
    fn list(range: Range, names: &[&str]) -> Response {
        let mut body = ListText::new(range);
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
        let page = body_text(list(second, &["\"", "\"\""]));
        let expected = json!({
            "data": [user("4", "\""), user("5", "\"\"")], "total": 7, "perPage": 3, "currentPage": 2,
            "lastPage": 3, "from": 4, "to": 5, "hasMorePages": true,
        });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&page).unwrap(), expected);
        let walk = Range::Walk { after: 3, per_page: 2 };
        let long = "x".repeat(crate::users::user::NAME_MAX);
        // The third one only tells that there is one, however large it is.
        for (names, more) in [(&["a", "b"][..], false), (&["a", "b", &long], true)] {
            let found = list(walk, names);
            assert_eq!(found.header("Link"), more.then_some("</users?after=5&perPage=2>; rel=\"next\""));
            let found: serde_json::Value = serde_json::from_str(&body_text(found)).unwrap();
            assert_eq!(
                found,
                json!({"data": [user("4", "a"), user("5", "b")], "perPage": 2, "hasMorePages": more})
            );
        }
    }
}
