//! `GET /users`: a page of all users, those that follow an id, or the one with an address.

use super::{Outcome, Progress, Step, Task};
use crate::{
    app::{
        lanes::{Lane, Needs},
        list::ListBody,
        query,
    },
    error::Error,
    http::Request,
    users::{
        pagination::{ListRequest, Listing, PageRequest, Range},
        user::User,
    },
};

/// Some of all users, by id.
#[derive(Debug)]
pub(crate) struct Page {
    pub range: Range,
}

/// A page of those with an address: one user at the most.
#[derive(Debug)]
pub(crate) struct Address {
    pub email: String,
    page: PageRequest,
}

pub(super) fn judge(request: &Request, max_per_page: u32) -> Result<Step, Error> {
    Ok(match query::list(request, max_per_page)? {
        ListRequest::Range(range) => page(range),
        ListRequest::Email { email, page } => {
            Step { needs: Needs::of(Lane::Find), task: Task::FindAddress(Address { email, page }) }
        }
    })
}

fn page(range: Range) -> Step {
    let needs = Needs { users: range.per_page() as usize, ..Needs::of(Lane::List) };
    Step { needs, task: Task::Page(Page { range }) }
}

impl Page {
    pub fn listed(self, list: ListBody) -> Outcome {
        list.finish(None).map(Progress::Done).ok_or_else(too_large)
    }
}

impl Address {
    pub fn found(self, user: Option<User>) -> Outcome {
        let Address { email, page } = self;
        let range = Range::Page(PageRequest { per_page: 1, ..page });
        let mut list = ListBody::new(Range::Page(page), range.most_memory());
        list.set_total(user.iter().len() as i64);
        if let Some(user) = user.filter(|_| page.page == 1) {
            list.push(user.as_row());
        }
        list.finish(Some(&email)).map(Progress::Done).ok_or_else(too_large)
    }
}

fn too_large() -> Error {
    Error::Internal("a user is larger than the table allows".to_owned())
}
