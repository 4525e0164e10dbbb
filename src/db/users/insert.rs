//! Batches of creates: with `on conflict … do nothing` only while addresses turn out to be taken.
//!
//! With that clause PostgreSQL looks into each index before it inserts a row, and writes a second record to its log
//! after it, which costs a third of the statement. Without it a row that is refused fails the batch, which is executed
//! again.

use super::{Users, columns::expand};
use crate::{
    db::{
        clock::Changed,
        session::{Deadlines, Param},
    },
    error::Error,
};
use std::{
    sync::{OnceLock, atomic::Ordering},
    time::Instant,
};

/// What makes a statement leave out the rows whose address is taken. Not those whose id is: the sequence is moved then.
const CLAUSE: &str = "on conflict (pg_catalog.lower(email collate pg_catalog.\"C\")) do nothing";

/// Batches that are executed with the clause after one with an address that was taken: see `docs/performance.md`.
const CAREFUL: u32 = 32;

/// A statement that inserts a batch of users: its text with the clause, and the two that are made of it.
pub(in crate::db) struct Insert(&'static str, OnceLock<[String; 2]>);

impl Insert {
    /// From its text, which has the clause.
    pub const fn new(careful: &'static str) -> Insert {
        Insert(careful, OnceLock::new())
    }

    /// Without the clause, and with it.
    fn texts(&'static self) -> &'static [String; 2] {
        debug_assert!(self.0.contains(CLAUSE), "it would be executed twice in vain");
        self.1.get_or_init(|| [expand(&self.0.replace(CLAUSE, "")), expand(self.0)])
    }
}

impl Users {
    /// What a statement returns for a batch: no rows for those that were left out because something that must be unique
    /// is taken. One round trip; two where that was not expected.
    pub(in crate::db) fn insert(
        &self,
        statement: &'static Insert,
        params: &[Param],
        deadlines: &[Instant],
    ) -> Result<Changed, Error> {
        let until = Deadlines::Each(deadlines);
        let [plain, careful] = statement.texts();
        if self.careful.load(Ordering::Relaxed) == 0 {
            match self.pool.change(plain, params, until) {
                Err(Error::AlreadyExists) => {}
                result => return result,
            }
        }
        let created = self.pool.change(careful, params, until)?;
        match created.rows.len() < deadlines.len() {
            true => self.careful.store(CAREFUL, Ordering::Relaxed),
            false => {
                let less = |batches: u32| Some(batches.saturating_sub(1));
                let _ = self.careful.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            }
        }
        Ok(created)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        App, ScratchDatabase,
        db::{New, tests::LONG},
        users::user::Values,
    };

    /// Each row that is tried draws an id: so their number tells which statement was executed.
    #[test]
    fn the_clause_is_used_while_addresses_are_taken() {
        let database = ScratchDatabase::create().unwrap();
        let app = App::open(&database.config()).unwrap();
        let mut sql = postgres::Client::connect(database.url(), postgres::NoTls).unwrap();
        let mut drawn: i64 = 0;
        let mut batch = 0;
        let mut create = |with_taken: bool| {
            batch += 1;
            let emails = [format!("{batch}@example.com"), format!("other-{batch}@example.com")];
            let deadline = Instant::now() + LONG;
            let new_user = |name, email| New { values: Values::new(name, email), deadline };
            let mut new: Vec<_> = emails.iter().map(|email| new_user("Ada", email)).collect();
            if with_taken {
                // The last one to be inserted.
                new.insert(1, new_user("Eve", "TAKEN@example.com"));
            }
            for (New { values, .. }, outcome) in new.iter().zip(app.users().create_many(&new)) {
                let email = values.email.unwrap();
                let taken = email.starts_with("TAKEN");
                match outcome {
                    Ok(user) if !taken => {
                        assert_eq!(app.users().find_many(&[user.id]).unwrap().remove(0).email, email)
                    }
                    Err(Error::AlreadyExists) if taken => {}
                    outcome => panic!("{email}: {outcome:?}"),
                }
            }
            let before = drawn;
            drawn = sql.query_one("select last_value from users_id_seq", &[]).unwrap().get(0);
            drawn - before
        };
        let bob = New { values: Values::new("Bob", "taken@example.com"), deadline: Instant::now() + LONG };
        app.users().create(&bob, None).unwrap();
        assert_eq!(create(false), 1 + 2);
        assert_eq!(create(true), 3 + 3, "without the clause, and then with it");
        assert_eq!(create(true), 3, "with it");
        for _ in 0..CAREFUL {
            assert_eq!(create(false), 2);
        }
        assert_eq!(create(true), 3 + 3, "without it again");
        let found = app.users().find_by_email(&["taken@example.com"]).unwrap().pop();
        assert_eq!(found.unwrap().unwrap().name, "Bob");
    }
}
