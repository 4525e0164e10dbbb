//! Lists of users as they are answered: JSON that is written row by row, within the memory that it may take, and the
//! links to other lists.

use crate::{
    http::{CHUNK, Chunks, Response},
    users::{
        pagination::{Listing, PageRequest, Range},
        user::{EMAIL_MAX, NAME_MAX, UserRef},
    },
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use std::{fmt::Write, mem};

/// What a page says beside its users.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
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

impl Summary {
    /// Of a page with so many users, out of `total`.
    pub fn new(request: PageRequest, total: i64, users: i64) -> Summary {
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

/// What a walk says beside its users.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WalkSummary {
    per_page: u32,
    has_more_pages: bool,
}

/// A list's body, in no more memory than it may take.
pub struct ListBody {
    range: Range,
    body: Chunks,
    /// The last piece of the body. Writing into a vector costs less than into pieces.
    last: Vec<u8>,
    /// Bytes that further pieces may take.
    left: usize,
    is_too_large: bool,
    total: i64,
    users: u32,
    last_id: i64,
    has_more: bool,
}

impl ListBody {
    /// Of the largest user: a control character is six bytes.
    const LARGEST: usize = UserRef::EMPTY + 6 * (NAME_MAX + EMAIL_MAX);
    /// Of what comes behind the users, at most.
    const END: usize = 256;

    /// A list without users so far, that may take so many bytes.
    pub fn new(range: Range, memory: usize) -> ListBody {
        /// Of a usual user in a list.
        const USUAL: usize = 224;
        let mut last = Vec::with_capacity((USUAL * (2 + range.per_page() as usize)).min(CHUNK));
        last.extend_from_slice(br#"{"data":["#);
        ListBody {
            range,
            body: Chunks::default(),
            left: memory.saturating_sub(last.capacity()),
            last,
            is_too_large: false,
            total: 0,
            users: 0,
            last_id: 0,
            has_more: false,
        }
    }

    /// Begins a piece of so many bytes at least, if it may; else drops what there is.
    fn next_piece(&mut self, needed: usize) {
        if self.left < needed || self.is_too_large {
            return self.leave_out();
        }
        let next = Vec::with_capacity(CHUNK.min(self.left));
        self.left -= next.capacity();
        self.body.push_back(mem::replace(&mut self.last, next));
    }

    /// The list as it is answered; `None` where it would take more memory than it may. `email`: the address that it was
    /// asked for.
    pub fn finish(mut self, email: Option<&str>) -> Option<Response> {
        if self.is_too_large {
            return None;
        }
        self.last.push(b']');
        let brace = self.last.len();
        let links = match self.range {
            Range::Page(request) => {
                let summary = Summary::new(request, self.total, self.users.into());
                serde_json::to_writer(&mut self.last, &summary).expect(IN_MEMORY);
                Some(summary.links(email))
            }
            Range::Walk { per_page, .. } => {
                let has_more_pages = self.has_more;
                let summary = WalkSummary { per_page, has_more_pages };
                serde_json::to_writer(&mut self.last, &summary).expect(IN_MEMORY);
                let after = self.last_id;
                has_more_pages.then(|| format!("</users?after={after}&perPage={per_page}>; rel=\"next\""))
            }
        };
        self.last[brace] = b',';
        self.last.push(b'\n');
        self.body.push_back(self.last);
        let response = Response::of_chunks(200, self.body);
        Some(match links {
            Some(links) => response.with("Link", links),
            None => response,
        })
    }
}

impl Listing for ListBody {
    fn set_total(&mut self, total: i64) {
        self.total = total;
    }

    fn push(&mut self, user: UserRef) {
        if self.users == self.range.per_page() {
            self.has_more = true;
            return;
        }
        let most = UserRef::EMPTY + 6 * (user.name.len() + user.email.len());
        let needed = most.min(ListBody::LARGEST) + ListBody::END;
        if self.last.capacity() - self.last.len() < needed {
            self.next_piece(needed);
        }
        if self.is_too_large {
            return;
        }
        if self.users > 0 {
            self.last.push(b',');
        }
        serde_json::to_writer(&mut self.last, &user).expect(IN_MEMORY);
        self.users += 1;
        self.last_id = user.id;
    }

    fn leave_out(&mut self) {
        if self.users == self.range.per_page() {
            self.has_more = true;
            return;
        }
        self.is_too_large = true;
        (self.body, self.last) = Default::default();
    }
}

const IN_MEMORY: &str = "writing to memory does not fail";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::users::timestamp::Timestamp;
    use serde_json::json;

    const FIRST: PageRequest = PageRequest { page: 1, per_page: 15 };

    #[test]
    fn an_empty_list() {
        let page = ListBody::new(Range::Page(FIRST), 0).finish(None);
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
        let links = Summary::new(PageRequest { page, per_page: 2 }, 5, 0).links(None);
        links.replace("</users?page=", "").replace("&perPage=2>; rel=", " ").replace('"', "")
    }

    #[test]
    fn links_of_pages() {
        assert_eq!(links(1), "1 first, 2 next, 3 last");
        assert_eq!(links(2), "1 first, 1 prev, 3 next, 3 last");
        assert_eq!(links(3), "1 first, 2 prev, 3 last");
        assert_eq!(links(4), "1 first, 3 prev, 3 last");
        assert_eq!(links(i64::MAX), "1 first, 3 prev, 3 last");
        let links = Summary::new(FIRST, 0, 0).links(Some("ada+news%>\"é@example.com"));
        assert_eq!(
            links,
            "</users?email=ada%2Bnews%25%3E%22%C3%A9@example.com&page=1&perPage=15>; rel=\"first\", \
             </users?email=ada%2Bnews%25%3E%22%C3%A9@example.com&page=1&perPage=15>; rel=\"last\""
        );
    }

    fn text(list: Option<Response>) -> String {
        String::from_utf8(list.expect("it fits").contiguous().body).unwrap()
    }

    /// A list of users from id 4 with these names.
    fn list(range: Range, names: &[&str], memory: usize) -> Option<Response> {
        let mut body = ListBody::new(range, memory);
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
        let second = Range::Page(PageRequest { page: 2, per_page: 3 });
        let page = text(list(second, &["\"", "\"\""], second.usual_memory()));
        let expected = json!({
            "data": [user("4", "\""), user("5", "\"\"")], "total": 7, "perPage": 3, "currentPage": 2,
            "lastPage": 3, "from": 4, "to": 5, "hasMorePages": true,
        });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&page).unwrap(), expected);
        let walk = Range::Walk { after: 3, per_page: 2 };
        let long = "x".repeat(NAME_MAX);
        // The third one only tells that there is one, however large it is.
        for (names, more) in [(&["a", "b"][..], false), (&["a", "b", &long], true)] {
            let found = list(walk, names, walk.usual_memory()).unwrap();
            assert_eq!(found.header("Link"), more.then_some("</users?after=5&perPage=2>; rel=\"next\""));
            let found: serde_json::Value = serde_json::from_str(&text(Some(found))).unwrap();
            assert_eq!(
                found,
                json!({"data": [user("4", "a"), user("5", "b")], "perPage": 2, "hasMorePages": more})
            );
        }
    }

    /// What a list takes is what it may, and that suffices for any users.
    #[test]
    fn memory_of_lists() {
        let control = "\u{1}".repeat(NAME_MAX);
        let names = ["Ada Lovelace", &"x".repeat(NAME_MAX), &"\u{10ffff}".repeat(NAME_MAX), &control];
        let time = Timestamp::from_unix_micros(0).unwrap();
        for per_page in [1, 2, 15, 100, 1000, 3000] {
            for range in [Range::Page(PageRequest { page: 1, per_page }), Range::Walk { after: 0, per_page }]
            {
                for name in names {
                    let email = if *name == control { &control[..EMAIL_MAX] } else { "ada@example.com" };
                    let made = |memory: usize| {
                        let mut body = ListBody::new(range, memory);
                        for n in 0..per_page {
                            let id = i64::MAX - i64::from(n);
                            body.push(UserRef { id, name, email, created_at: time, updated_at: time });
                        }
                        body.finish(None).map(|list| (list.memory(), list.contiguous().body.len()))
                    };
                    let (memory, length) = made(range.most_memory()).expect("it suffices");
                    assert!(length <= memory && memory <= range.most_memory(), "{per_page}: {memory}");
                    let usual = made(range.usual_memory());
                    assert!(usual.is_none_or(|(memory, _)| memory <= range.usual_memory()), "{per_page}");
                    if name.len() < 20 {
                        assert!(usual.is_some(), "{per_page}");
                    }
                    if *name == control {
                        assert_eq!(usual, None, "{per_page}");
                    }
                }
            }
        }
    }
}
