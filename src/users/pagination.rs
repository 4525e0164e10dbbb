//! Which users are asked for: pages, and those that follow an id.

use super::user::UserRef;

/// A requested list of users.
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
    /// The users whose addresses begin so, in whatever case, in the order of addresses.
    Prefix {
        /// The beginning.
        prefix: String,
        /// How many, from 1.
        per_page: u32,
    },
}

/// Some of all users, by id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// A page.
    Page(PageRequest),
    /// Users in the order of their ids, after an id.
    Walk {
        /// Id that precedes the first user of the page, from 0.
        after: i64,
        /// How many, from 1.
        per_page: u32,
    },
    /// The first ones of a selection.
    First {
        /// How many, from 1.
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
    /// From 1 to 2^63 - 1.
    pub page: i64,
    /// From 1.
    pub per_page: u32,
    /// Is set if pages count from the last user.
    pub is_from_end: bool,
}

impl PageRequest {
    /// How many users come before the page; as many as there can be where it lies beyond them.
    pub fn offset(self) -> i64 {
        (self.page - 1).saturating_mul(self.per_page.into())
    }
}

/// A list that is filled with the users that were asked for, in their order.
pub trait Listing {
    /// The number of users on all pages.
    fn set_total(&mut self, total: i64);

    /// The next user. One more than was asked for only tells that there is one.
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
