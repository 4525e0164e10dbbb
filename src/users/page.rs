//! Requests for lists of users: pages, walks from id to id, searches by address, and look-ups of several ids.

use super::user::User;
use std::collections::BTreeSet;

/// A requested list of users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListRequest {
    /// The users that are listed.
    pub selection: Selection,
    /// The number and the size of the page. A list without pages uses `per_page` alone, as the most users of the list;
    /// for [`Selection::Ids`], `per_page` is the number of `id` parameters in the request.
    pub page: PageRequest,
}

/// Which users a list has. Only `All` and `Email` have pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// All users, ordered by id.
    All,
    /// The user with this address, whatever the case of its letters.
    Email(String),
    /// The users whose ids are greater than this id, ordered by id.
    AfterId(i64),
    /// The users whose addresses begin with this text, whatever the case of letters, ordered by address.
    EmailPrefix(String),
    /// The users with these ids, ordered by id.
    Ids(BTreeSet<i64>),
}

/// A list of users that was read from the database.
#[derive(Debug, Default)]
pub struct Listing {
    /// The number of users on all pages; 0 if the list has no pages.
    pub total: i64,
    /// The users. A list without pages has one user more than requested if there are more users.
    pub users: Vec<User>,
}

/// A page number and a page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRequest {
    /// The number of the page, from 1 to 2^63 - 1.
    pub page: i64,
    /// The number of users on a page, from 1.
    pub per_page: u32,
    /// True if page 1 has the users with the largest ids.
    pub is_from_end: bool,
}

/// The default of the setting `MAX_PER_PAGE`, the most users on a page.
pub const DEFAULT_MAX_PER_PAGE: u32 = 1000;

/// Returns the bytes of memory that making a page takes: `bytes_per_user` for each user, and some for the rest of the
/// answer.
pub fn memory_bytes(user_count: usize, bytes_per_user: usize) -> usize {
    /// Bytes of memory that making a page takes beside the memory of its users.
    const REST_OF_ANSWER_BYTES: usize = 64 << 10;
    bytes_per_user.saturating_mul(user_count).saturating_add(REST_OF_ANSWER_BYTES)
}

impl PageRequest {
    /// Returns the number of users before the page, or 2^63 - 1 if the number is larger.
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
