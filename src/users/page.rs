//! Requests for lists of users: pages, walks by id, searches by address, and look-ups of several ids.

use super::user::User;
use std::collections::BTreeSet;

/// A requested list of users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListRequest {
    /// The users that are listed.
    pub selection: Selection,
    /// The page. Of a list without pages, `per_page` is the largest number of users: for ids, the number that the request
    /// named, repeated ones and texts that are no id included.
    pub page: PageRequest,
}

/// The users of a list: all of them or those with one address are on pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// All users, by id.
    All,
    /// The users with this address, in whatever case: one user at the most.
    Email(String),
    /// Users in the order of their ids, after an id from 0.
    After(i64),
    /// The users whose addresses begin with a text, in whatever case, in the order of addresses.
    Prefix(String),
    /// The users with these ids, by id.
    Ids(BTreeSet<i64>),
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

/// Users of the largest page, unless a setting says otherwise.
pub const MAX_USERS: u32 = 1000;

/// Returns the bytes of memory that a page of so many users is made with; `user`: bytes of each.
pub fn memory(users: usize, user: usize) -> usize {
    const REST_OF_PAGE: usize = 64 << 10;
    user.saturating_mul(users).saturating_add(REST_OF_PAGE)
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
