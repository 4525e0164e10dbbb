//! Executes several requests of one kind as one statement: in an order that lets two batches not wait for each other,
//! with an outcome for each. The statement answers with a row for each request, or for each that it has done, which
//! names the request's position. Where it fails for a reason that may concern only some of them, they are executed one
//! by one.

use super::{Users, at_positions};
use crate::{
    db::{clock::Changed, sqlstate},
    error::Error,
    users::user::Values,
};
use postgres::Row;
use std::time::Instant;

/// A request that may share its statement with others of its kind.
pub(in crate::db) trait Batched: Sized {
    /// What becomes of it.
    type Outcome;
    /// What the requests are ordered by in a statement, so that two statements wait for each other in one direction
    /// only.
    type Key: Ord;

    /// Its key, and its deadline, past which nothing is changed.
    fn key(&self) -> (Self::Key, Instant);

    /// Executes the statement for all of them.
    fn batched(users: &Users, given: &[&Self], deadlines: &[Instant]) -> Result<Changed, Error>;

    /// The outcome of this one by its row, if there is one. `late`: why it was not begun, if it may not have been.
    fn outcome(&self, users: &Users, row: Option<&Row>, late: Option<Error>) -> Result<Self::Outcome, Error>;

    /// Executes the statement for this one alone, which costs less.
    fn unbatched(&self, users: &Users) -> Result<Self::Outcome, Error>;
}

impl Users {
    /// Executes requests in one statement and one commit, each with the outcome that it would have had unbatched.
    pub(in crate::db) fn batch<T: Batched>(&self, requests: &[T]) -> Vec<Result<T::Outcome, Error>> {
        let executed = || {
            let keyed = requests.iter().map(T::key).enumerate();
            let mut order: Vec<_> = keyed.map(|(at, (key, deadline))| (key, at, deadline)).collect();
            // Of equal addresses the first wins.
            order.sort();
            let given: Vec<&T> = order.iter().map(|(_, at, _)| &requests[*at]).collect();
            let deadlines: Vec<Instant> = order.iter().map(|(.., deadline)| *deadline).collect();
            let changed = T::batched(self, &given, &deadlines)?;
            let rows = at_positions(&changed.rows, given.len(), Ok)?;
            let mut outcomes: Vec<_> = (0..given.len()).map(|_| Err(Error::AlreadyExists)).collect();
            for (place, row) in rows.into_iter().enumerate() {
                let (_, at, deadline) = &order[place];
                let late = changed.not_begun(place, *deadline);
                outcomes[*at] = requests[*at].outcome(self, row, late);
            }
            Ok(outcomes)
        };
        match requests {
            [] => Vec::new(),
            [one] => vec![one.unbatched(self)],
            several => executed().unwrap_or_else(|error| self.unbatched_after(&error, several)),
        }
    }

    /// The outcomes of requests after a batch of them has failed: each by itself, where that may have another outcome.
    fn unbatched_after<T: Batched>(&self, error: &Error, requests: &[T]) -> Vec<Result<T::Outcome, Error>> {
        /// The batch and two of its users. An address that another transaction has stored and not committed yet blocks
        /// its own user alone; a lock of the table blocks all of them, each for the whole of `lock_timeout`.
        const REFUSALS: usize = 3;
        let contended = matches!(error, Error::Contended);
        if !(contended || sqlstate::is_of_rows(error)) {
            return requests.iter().map(|_| Err(error.clone())).collect();
        }
        let mut refusals = usize::from(contended);
        let one = |request: &T| {
            if refusals == REFUSALS {
                return Err(Error::Contended);
            }
            let outcome = request.unbatched(self);
            refusals += usize::from(matches!(outcome, Err(Error::Contended)));
            outcome
        };
        requests.iter().map(one).collect()
    }
}

/// What creates are ordered by.
pub(in crate::db) fn address(values: &Values) -> Option<String> {
    values.email.map(str::to_ascii_lowercase)
}
