//! Requests for lists of users: pages, walks by id, and searches by address.

use super::user::UserRef;

/// A requested list of users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListRequest {
    /// A part of all users, without a search.
    Range(Range),
    /// A page of the users with this address, in whatever case: one user at the most.
    Email {
        /// The address.
        email: String,
        /// The page.
        page: PageRequest,
    },
    /// The users whose addresses begin so, in whatever case, in the order of addresses.
    Prefix {
        /// The beginning.
        prefix: String,
        /// The largest number of users, from 1.
        per_page: u32,
    },
}

/// A part of all users, by id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// A page.
    Page(PageRequest),
    /// Users in the order of their ids, after an id.
    Walk {
        /// Id that precedes the first user of the page, from 0.
        after: i64,
        /// The largest number of users, from 1.
        per_page: u32,
    },
    /// The first users of a search.
    First {
        /// The largest number of users, from 1.
        per_page: u32,
    },
}

impl Range {
    /// Returns the largest number of users that the list may have.
    pub fn per_page(self) -> u32 {
        match self {
            Range::Page(PageRequest { per_page, .. })
            | Range::Walk { per_page, .. }
            | Range::First { per_page } => per_page,
        }
    }
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

/// A list that is filled with the requested users, in their order.
pub trait Listing {
    /// Sets the number of users on all pages.
    fn set_total(&mut self, total: i64);

    /// Adds the next user. One user more than requested only tells that there are more.
    fn push(&mut self, user: UserRef);
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
