//! Which users are asked for, and lists of them as they are answered.

use crate::{
    chunks::{CHUNK, Chunks},
    users::user::UserRef,
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use std::{fmt::Write, mem};

/// Which list is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListRequest {
    /// Some of all users.
    Range(Range),
    /// A page of those with this address, in whatever case: one user at the most.
    Email {
        /// The address.
        email: String,
        /// The page.
        page: PageRequest,
    },
}

/// Some of all users, by id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// A page.
    Page(PageRequest),
    /// Those that follow this id.
    Walk {
        /// From 0.
        after: i64,
        /// How many, from 1.
        per_page: u32,
    },
}

impl Range {
    /// How many users, at most.
    pub fn per_page(self) -> u32 {
        match self {
            Range::Page(PageRequest { per_page, .. }) | Range::Walk { per_page, .. } => per_page,
        }
    }
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

/// What a walk says beside its users.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WalkSummary {
    per_page: u32,
    has_more_pages: bool,
}

/// A list's body, or why there is none yet.
#[derive(Debug)]
pub enum Listed {
    /// The list.
    Body {
        /// Its JSON.
        body: Chunks,
        /// The field `Link`, where there is something to link to.
        links: Option<String>,
    },
    /// Some of its users are too large to be read together with other lists.
    Large {
        /// Bytes that reading the list by itself takes.
        memory: usize,
    },
    /// The body would be larger than allowed.
    TooLarge {
        /// How many of its users fit.
        fits: u32,
    },
}

/// A list's body, built from rows as they come; no more of it than is allowed.
pub struct ListBody {
    range: Range,
    max_bytes: usize,
    body: Chunks,
    /// The last piece of the body. Writing into a vector costs less than into pieces.
    last: Vec<u8>,
    total: i64,
    users: u32,
    last_id: i64,
    has_more: bool,
    /// Bytes that the users need at least, of which some may be left out of the body.
    needed: usize,
    largest: usize,
    left_out: bool,
    /// How many users the limit allows, once there are more.
    fits: Option<u32>,
}

impl ListBody {
    /// Bytes of a user as JSON with neither name nor address, and of the comma behind it.
    pub const EMPTY_USER: usize = 116;
    /// Bytes of an identifier beyond its first.
    const DIGITS: usize = 18;
    /// Bytes of what comes behind the users, at most.
    const END: usize = 256;

    /// A list without users so far. `capacity`: bytes that are expected.
    pub fn new(range: Range, max_bytes: usize, capacity: usize) -> ListBody {
        let mut last = Vec::with_capacity(capacity);
        last.extend_from_slice(br#"{"data":["#);
        ListBody {
            range,
            max_bytes,
            body: Chunks::default(),
            last,
            total: 0,
            users: 0,
            last_id: 0,
            has_more: false,
            needed: 0,
            largest: 0,
            left_out: false,
            fits: None,
        }
    }

    /// The number of users on all pages.
    pub fn set_total(&mut self, total: i64) {
        self.total = total;
    }

    /// The next user.
    pub fn push(&mut self, user: UserRef) {
        if self.is_full() {
            return;
        }
        let bytes = user.name.len() + user.email.len();
        self.count(user.id, bytes);
        if self.fits.is_none() && !self.left_out {
            let room = self.last.capacity() - self.last.len();
            if room < ListBody::EMPTY_USER + ListBody::DIGITS + bytes {
                self.next_piece(bytes);
            }
            if self.users > 0 {
                self.last.push(b',');
            }
            serde_json::to_writer(&mut self.last, &user).expect(IN_MEMORY);
            // With what is escaped.
            self.needed = self.needed.max(self.body.len() + self.last.len());
        }
        self.limit();
    }

    /// The next user, of which only the size is known: that of its name and its address in bytes.
    pub fn leave_out(&mut self, id: i64, bytes: usize) {
        if self.is_full() {
            return;
        }
        self.count(id, bytes);
        self.left_out = true;
        self.limit();
    }

    /// Whether the next user would be one more than was asked for; for a walk there is one.
    fn is_full(&mut self) -> bool {
        let is_full = self.users == self.range.per_page();
        self.has_more |= is_full;
        is_full
    }

    fn count(&mut self, id: i64, bytes: usize) {
        self.needed += ListBody::EMPTY_USER + bytes;
        self.largest = self.largest.max(bytes);
        self.last_id = id;
    }

    /// Drops what would be too large. One user is answered however large it is.
    fn limit(&mut self) {
        if self.fits.is_none() && self.users > 0 && self.needed.saturating_add(ListBody::END) > self.max_bytes
        {
            self.fits = Some(self.users);
            (self.body, self.last) = Default::default();
        }
        self.users += 1;
    }

    /// Begins a piece with room for a user of so many bytes.
    fn next_piece(&mut self, bytes: usize) {
        let needed = ListBody::EMPTY_USER + ListBody::DIGITS + bytes;
        let next = Vec::with_capacity(needed.max(CHUNK));
        self.body.push_back(mem::replace(&mut self.last, next));
    }

    /// The body, or why there is none. `email`: the address that the list was asked for.
    pub fn finish(mut self, email: Option<&str>) -> Listed {
        /// Of a row on its way: the message, and the buffer that it is read into.
        const COPIES: usize = 4;
        if let Some(fits) = self.fits {
            return Listed::TooLarge { fits };
        }
        if self.left_out {
            return Listed::Large { memory: self.needed + self.needed / 8 + COPIES * self.largest + STREAM };
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
        Listed::Body { body: self.body, links }
    }
}

const IN_MEMORY: &str = "writing to memory does not fail";

/// What it takes to read rows one by one, beside the rows, in bytes.
pub const STREAM: usize = 128 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::users::user::Timestamp;
    use serde_json::json;

    const FIRST: PageRequest = PageRequest { page: 1, per_page: 15 };

    #[test]
    fn offsets() {
        assert_eq!(PageRequest { page: i64::MAX, ..FIRST }.offset(), i64::MAX);
        assert_eq!(PageRequest { page: 3, per_page: 7 }.offset(), 14);
    }

    #[test]
    fn an_empty_list() {
        let page = ListBody::new(Range::Page(FIRST), 1, 0).finish(None);
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

    fn text(list: Listed) -> String {
        match list {
            Listed::Body { body, .. } => String::from_utf8(body.into_vec()).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// A list of users from id 4 with names of these sizes; those beyond `most` are left out.
    fn list(range: Range, names: &[usize], most: usize, max_bytes: usize) -> Listed {
        let mut body = ListBody::new(range, max_bytes, 0);
        body.set_total(7);
        for (id, length) in (4..).zip(names) {
            let name = "\"".repeat(*length);
            let time = Timestamp::from_unix_micros(0).unwrap();
            let user = UserRef { id, name: &name, email: "a@b.co", created_at: time, updated_at: time };
            match *length > most {
                true => body.leave_out(id, length + user.email.len()),
                false => body.push(user),
            }
        }
        body.finish(None)
    }

    const SECOND: Range = Range::Page(PageRequest { page: 2, per_page: 3 });

    #[test]
    fn lists_of_users() {
        let user = |id: &str, name: &str| {
            let time = "1970-01-01T00:00:00.000000Z";
            json!({"id": id, "name": name, "email": "a@b.co", "createdAt": time, "updatedAt": time})
        };
        let page: serde_json::Value = serde_json::from_str(&text(list(SECOND, &[1, 2], 9, 1000))).unwrap();
        let expected = json!({
            "data": [user("4", "\""), user("5", "\"\"")], "total": 7, "perPage": 3, "currentPage": 2,
            "lastPage": 3, "from": 4, "to": 5, "hasMorePages": true,
        });
        assert_eq!(page, expected);
        let walk = Range::Walk { after: 3, per_page: 2 };
        // The third one only tells that there is one, however large it is.
        for (names, more) in [(vec![1, 2], false), (vec![1, 2, 3], true), (vec![1, 2, 5000], true)] {
            let found = list(walk, &names, 9, 1000);
            let next = match &found {
                Listed::Body { links, .. } => links.clone(),
                other => panic!("{other:?}"),
            };
            assert_eq!(next.as_deref(), more.then_some("</users?after=5&perPage=2>; rel=\"next\""));
            let found: serde_json::Value = serde_json::from_str(&text(found)).unwrap();
            let data = [user("4", "\""), user("5", "\"\"")];
            assert_eq!(found, json!({"data": data, "perPage": 2, "hasMorePages": more}));
        }
    }

    #[test]
    fn lists_that_are_too_large() {
        // A user has 122 bytes without its name, and its name's quotes are escaped.
        type Names = &'static [usize];
        let rows: [(Names, usize, usize, Result<(), u32>); 9] = [
            (&[1, 1, 1], 9, 900, Ok(())),
            (&[1, 1, 1], 9, 600, Err(2)),
            (&[1, 1, 1], 9, 400, Err(1)),
            (&[1], 9, 10, Ok(())),
            (&[5000], 9000, 10, Ok(())),
            (&[1, 5000, 1], 9000, 5000, Err(1)),
            (&[1, 5000, 1], 9, 5000, Err(1)),
            (&[5000, 1, 1], 9, 5000, Err(1)),
            (&[1, 1, 5000], 9, 5000, Err(2)),
        ];
        for (names, most, max_bytes, expected) in rows {
            for range in [SECOND, Range::Walk { after: 3, per_page: 3 }] {
                let found = match list(range, names, most, max_bytes) {
                    Listed::Body { .. } => Ok(()),
                    Listed::TooLarge { fits } => Err(fits),
                    other => panic!("{other:?}"),
                };
                assert_eq!(found, expected, "{names:?} {most} {max_bytes}");
            }
        }
    }

    #[test]
    fn what_is_left_out_is_read_by_itself() {
        for names in [[5000, 1, 1], [1, 1, 5000]] {
            match list(SECOND, &names, 9, 20_000) {
                Listed::Large { memory } => assert!((5000..200_000).contains(&memory), "{memory}"),
                other => panic!("{other:?}"),
            }
        }
        // However large it is alone.
        assert!(matches!(list(SECOND, &[5000], 9, 100), Listed::Large { .. }));
    }
}
