//! The users of a database. Each kind of statement has a file, with the statements beside the functions that execute them;
//! this file has the part that they share.
//!
//! The statements can be pasted into psql. Operands have the exact types of PostgreSQL's own operators, and sessions
//! look names up in one schema alone, so that no operator of another role fits better. `limit 1` within a lateral and
//! `= any (array(…))` make look-ups in an index of plans that were made while a table was empty.

mod create;
mod delete;
mod find;
mod list;
mod update;

pub use create::{Create, Created};
pub use delete::Delete;
pub use update::Update;

use super::{Pool, blocking::outside_of_runtimes, sqlstate::is_of_rows};
use crate::error::Error;
use crate::users::password::PasswordHash;
use crate::users::relation::{Loader, Relation};
use crate::users::revision::Condition;
use crate::users::user::{Credential, User};
use postgres::Row;
use postgres::types::{FromSql, Type};
use std::time::{Duration, Instant};
use std::{collections::HashMap, sync::Arc};
use time::OffsetDateTime;

const FIND_CREDENTIAL: &str = "select password_hash from credentials where user_id = $1";

/// The users of one database; clones share it.
#[derive(Clone)]
pub struct Users {
    /// The pool that the statements are executed on.
    pub(crate) pool: Arc<Pool>,
    lazy: Option<Loader<Credential>>,
}

/// A change that is executed in one statement, and one commit, with others of its kind.
pub trait Change: Sized {
    /// The outcome of a change that is executed.
    type Done;

    /// Executes changes. Returns rows with the positions of their changes, from 1.
    fn batch(pool: &Pool, given: &[&Self], deadline: Instant) -> Result<Vec<Row>, Error>;

    /// Returns the outcome of the change, by its row if it has one.
    fn judge(&self, users: &Users, row: Option<&Row>) -> Result<Self::Done, Error>;

    /// Executes the change alone.
    fn alone(&self, users: &Users, deadline: Instant) -> Result<Self::Done, Error>;
}

impl Users {
    pub fn new(pool: Pool, lazy_loading: bool) -> Users {
        let pool = Arc::new(pool);
        // A user may outlive its service and be dropped anywhere, so it keeps no pool.
        let weak = Arc::downgrade(&pool);
        let loader: Loader<Credential> = Arc::new(move |owner| {
            outside_of_runtimes(|| {
                let pool =
                    weak.upgrade().ok_or_else(|| Error::Unavailable("the service has stopped".into()))?;
                let rows = pool.execute(FIND_CREDENTIAL, &[(&owner, Type::INT8)], None)?;
                rows.first().map_or(Ok(None), credential)
            })
        });
        Users { pool, lazy: lazy_loading.then_some(loader) }
    }

    /// Executes changes in one statement and one commit, each with the outcome that it would have had alone, and none past
    /// its deadline. Executes each of them alone after a refusal that may concern only some. If the batch met a lock, each
    /// change has met it: retries are alone.
    pub fn change_many<C: Change>(&self, changes: &[(&C, Instant)]) -> Vec<Result<C::Done, Error>> {
        /// A change whose time is nearly up is not sent, so that the batch does not wait for a session in vain.
        const MARGIN: Duration = Duration::from_millis(100);
        if let [(one, deadline)] = changes {
            return vec![one.alone(self, *deadline)];
        }
        let latest = Instant::now() + self.pool.statement_timeout + MARGIN;
        let in_time = changes.iter().filter(|(_, deadline)| *deadline >= latest);
        let (given, deadlines): (Vec<&C>, Vec<Instant>) = in_time.copied().unzip();
        let earliest = deadlines.into_iter().min();
        let rows = earliest.map_or(Ok(Vec::new()), |deadline| C::batch(&self.pool, &given, deadline));
        let place = |row: Row| Ok((row.try_get("position")?, row));
        let rows: Result<HashMap<i64, Row>, Error> =
            rows.and_then(|rows| rows.into_iter().map(place).collect());
        let mut positions = 1..;
        let outcome = |(change, deadline): &(&C, Instant)| match &rows {
            _ if *deadline < latest => Err(Error::Unavailable("a change could not be sent in time".into())),
            Err(error) if is_of_rows(error) => change.alone(self, *deadline),
            Err(error) => Err(error.clone()),
            Ok(rows) => change.judge(self, positions.next().and_then(|position| rows.get(&position))),
        };
        changes.iter().map(outcome).collect()
    }

    fn allowed(&self, id: i64, condition: &Condition) -> Result<User, Error> {
        let user = self.find_many(&[id])?.pop().ok_or(Error::NotFound)?;
        if condition.holds(user.revision()) { Ok(user) } else { Err(Error::PreconditionFailed) }
    }

    pub(super) fn user(&self, row: &Row) -> Result<User, Error> {
        Ok(user(row, self.lazy.clone())?)
    }
}

/// Returns the row of a change that was made; `None` if the change is to be executed alone.
fn outcome(row: Option<&Row>) -> Result<Option<&Row>, Error> {
    let row = row.ok_or_else(|| Error::Internal("a change has no outcome".into()))?;
    match row.try_get("outcome")? {
        "done" => Ok(Some(row)),
        "by itself" => Ok(None),
        "precondition failed" => Err(Error::PreconditionFailed),
        "locked" => Err(Error::Contended),
        _ => Err(Error::NotFound),
    }
}

/// Returns true if a row may have any state, else the version and time that it has to have: those of the state that was read
/// before, or of a simple condition. Nulls allow no state, as no row has them.
fn tag(condition: &Condition, before: Option<&User>) -> (bool, Option<i64>, Option<OffsetDateTime>) {
    let state = before.map(User::revision).or_else(|| condition.only.as_ref()?.first().copied());
    let is_any = before.is_none() && condition.only.is_none();
    (is_any, state.map(|state| state.version), state.map(|state| state.updated_at))
}

/// The tags of simple conditions, column by column.
fn tags<'a>(
    conditions: impl Iterator<Item = &'a Condition>,
) -> (Vec<bool>, Vec<Option<i64>>, Vec<Option<OffsetDateTime>>) {
    conditions.map(|condition| tag(condition, None)).collect()
}

/// Reads the first columns of a row, which each statement has in the order of the table. `lazy` loads the credential on
/// access.
pub(super) fn user<'a, T: FromSql<'a>>(
    row: &'a Row,
    lazy: Option<Loader<Credential>>,
) -> Result<User<T>, postgres::Error> {
    let id = row.try_get(0)?;
    Ok(User {
        id,
        name: row.try_get(1)?,
        email: row.try_get(2)?,
        created_at: row.try_get(3)?,
        updated_at: row.try_get(4)?,
        version: row.try_get(5)?,
        credential: Relation::unloaded("credential", lazy.map(|loader| (loader, id))),
    })
}

/// Returns the credential of a row, if there is one.
fn credential(row: &Row) -> Result<Option<Credential>, Error> {
    let hash: Option<String> = row.try_get("password_hash")?;
    Ok(hash.map(|hash| Credential { password_hash: PasswordHash::from_phc(hash) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::users::password::{Hasher, Match};
    use crate::users::user::{NewUser, UserChanges};
    use crate::{App, Config, ScratchDatabase, config::PasswordHashing};
    use std::thread;

    const PASSWORD: &str = "correct horse";

    /// Longer than anything takes on a busy machine.
    const LONG: Duration = Duration::from_secs(20);

    fn create(name: &str, email: &str) -> Create {
        let user = NewUser { name: name.to_owned(), email: email.to_owned(), password: None };
        Create { user, key: None, hash: None, peer: None }
    }

    /// A service with Ada, who has a password, and Bob, who has none.
    fn ada_and_bob(production: bool) -> (ScratchDatabase, App) {
        let database = ScratchDatabase::create().unwrap();
        let app = App::open(&Config { production, db_pool_size: 2, ..database.config() }).unwrap();
        let hash = Hasher::new(PasswordHashing::Owasp).hash(&PASSWORD.into()).unwrap();
        let (ada, bob) = (create("Ada", "ada@example.com"), create("Bob", "bob@example.com"));
        let deadline = Instant::now() + LONG;
        let both = [(&Create { hash: Some(hash), ..ada }, deadline), (&bob, deadline)];
        app.users().change_many(&both).into_iter().for_each(|created| _ = created.unwrap());
        (database, app)
    }

    fn sql(database: &ScratchDatabase) -> postgres::Client {
        postgres::Client::connect(database.url(), postgres::NoTls).unwrap()
    }

    #[test]
    fn outside_production_a_lazy_load_is_a_violation() {
        let (_database, app) = ada_and_bob(false);
        let users = app.users();
        let mut unloaded =
            vec![users.find_many(&[1]).unwrap().remove(0), users.find_many(&[2]).unwrap().remove(0)];
        unloaded.append(&mut users.find_by_email(&["ada@example.com"]).unwrap()[0].users);
        let deadline = Instant::now() + LONG;
        let eve = create("Eve", "eve@example.com");
        unloaded.push(users.change_many(&[(&eve, deadline)]).remove(0).unwrap().user);
        let changes = UserChanges { name: Some("Robert".to_owned()), ..UserChanges::default() };
        let renamed =
            Update { id: 2, changes, condition: Condition::default(), hash: None, is_single: false };
        unloaded.extend(users.change_many(&[(&renamed, deadline)]).remove(0).unwrap());
        assert_eq!(unloaded.len(), 5);
        for user in unloaded {
            assert!(!user.credential.is_loaded());
            for _ in 0..2 {
                let violation = user.credential.get().unwrap_err();
                assert!(matches!(violation, Error::LazyLoadingViolation("credential")), "{violation:?}");
            }
        }
    }

    #[test]
    fn in_production_a_lazy_load_is_a_query() {
        let (database, app) = ada_and_bob(true);
        let users = app.users();
        let (ada, bob) = (users.find_many(&[1]).unwrap().remove(0), users.find_many(&[2]).unwrap().remove(0));
        assert!(!ada.credential.is_loaded() && !bob.credential.is_loaded());
        let credential = ada.credential.get().unwrap().expect("Ada has a password");
        let hasher = Hasher::new(PasswordHashing::Owasp);
        let check = |password: &str| hasher.check(&password.into(), Some(&credential.password_hash));
        assert!(check(PASSWORD) != Match::None && check("battery staple") == Match::None);
        assert!(bob.credential.get().unwrap().is_none());
        // Once loaded, it is kept; what is not loaded yet asks the database, and has its errors.
        let another = users.find_many(&[1]).unwrap().remove(0);
        sql(&database).batch_execute("drop table credentials").unwrap();
        assert!(ada.credential.get().unwrap().is_some() && bob.credential.get().unwrap().is_none());
        assert!(matches!(another.credential.get(), Err(Error::Database { .. })));
    }

    #[test]
    fn an_eager_load_is_never_a_violation() {
        for production in [true, false] {
            let (_database, app) = ada_and_bob(production);
            for (email, has_password) in [("ADA@example.com", true), ("bob@example.com", false)] {
                let user = app.users().find_by_email_with_credential(email).unwrap().unwrap();
                assert!(user.credential.is_loaded());
                assert_eq!(user.credential.get().unwrap().is_some(), has_password, "{email}");
            }
        }
    }

    #[test]
    fn a_user_may_outlive_its_service_and_be_dropped_in_an_async_task() {
        let (database, app) = ada_and_bob(true);
        let (ada, bob) =
            (app.users().find_many(&[1]).unwrap().remove(0), app.users().find_many(&[2]).unwrap().remove(0));
        let mut sql = sql(&database);
        let mut sessions = || -> i64 {
            let count = "select count(*) from pg_stat_activity \
                where datname = current_database() and application_name = 'userd'";
            sql.query_one(count, &[]).unwrap().get(0)
        };
        assert!(sessions() > 0);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async { assert!(ada.credential.get().unwrap().is_some()) });
        drop(app);
        let deadline = Instant::now() + LONG;
        while sessions() > 0 {
            assert!(Instant::now() < deadline, "a user keeps {} sessions", sessions());
            thread::sleep(Duration::from_millis(5));
        }
        runtime.block_on(async {
            assert!(matches!(bob.credential.get(), Err(Error::Unavailable(_))));
            drop((ada, bob));
        });
    }
}
