//! Requests for lists of users: pages, walks by id, searches by address, and look-ups of several ids.

use super::user::User;
use std::collections::BTreeSet;

/// A requested list of users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListRequest {
    /// A page of all users, by id.
    Page(PageRequest),
    /// Users in the order of their ids, after an id.
    Walk {
        /// Id that precedes the first user of the list, from 0.
        after: i64,
        /// The largest number of users, from 1.
        per_page: u32,
    },
    /// A page of the users with this address, in whatever case: one user at the most.
    Email {
        /// The address.
        email: String,
        /// The page.
        page: PageRequest,
    },
    /// The users whose addresses begin with a text, in whatever case, in the order of addresses.
    Prefix {
        /// The beginning.
        prefix: String,
        /// The largest number of users, from 1.
        per_page: u32,
    },
    /// The users with these ids, by id.
    Ids {
        /// The ids.
        ids: BTreeSet<i64>,
        /// The number of ids that the request named, repeated ones and texts that are no id included.
        per_page: u32,
    },
}

/// A list of users, as it was read.
#[derive(Debug, Default)]
pub struct Listed {
    /// The number of users on all pages; 0 if the list has no pages.
    pub total: i64,
    /// The users. If the list has no pages, one user more than requested tells that there are more.
    pub users: Vec<User>,
}

/// A page number and a page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRequest {
    /// The number of the page, from 1 to 2^63 - 1.
    pub page: i64,
    /// The number of users on a page, from 1.
    pub per_page: u32,
    /// True if pages count from the last user.
    pub is_from_end: bool,
}

impl PageRequest {
    /// Returns the number of users before the page, at most 2^63 - 1.
    pub fn offset(self) -> i64 {
        (self.page - 1).saturating_mul(self.per_page.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: PageRequest = PageRequest { page: 1, per_page: 15, is_from_end: false };

    #[test]
    fn offsets() {
        assert_eq!(PageRequest { page: i64::MAX, ..FIRST }.offset(), i64::MAX);
        assert_eq!(PageRequest { page: 3, per_page: 7, ..FIRST }.offset(), 14);
    }
}
