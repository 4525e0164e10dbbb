//! The users of a database: what every statement on them shares.

mod batch;
mod columns;
mod insert;
mod read;
mod write;
mod write_many;

pub(super) use batch::{Batched, address};
#[cfg(feature = "command")]
pub(super) use columns::{ANSWERED, record, write_stored};
pub(super) use columns::{Sql, arrays, with_arrays, with_values};
pub(super) use insert::Insert;
#[cfg(feature = "command")]
pub(super) use read::PAGES;
pub use write::{Delete, New, PasswordChange, Update, Updated};

use super::{Pool, blocking::outside_of_runtimes, sqlstate};
use crate::{
    error::Error,
    users::{
        password::PasswordHash,
        relation::{Loader, Relation},
        user::{Credential, User, UserRef},
    },
};
use postgres::{
    Row,
    row::RowIndex,
    types::{FromSql, Type},
};
use std::{
    fmt::Display,
    sync::{Arc, atomic::AtomicU32},
};

const FIND_CREDENTIAL: &str = "\
    select password_hash from credentials where user_id operator(pg_catalog.=) $1";

/// The users of one database; clones share it.
#[derive(Clone)]
pub struct Users {
    pub(super) pool: Arc<Pool>,
    /// Batches of creates that are still to be executed with `on conflict do nothing`: see `insert`.
    careful: Arc<AtomicU32>,
    lazy: Option<Loader<Credential>>,
}

impl Users {
    /// The users behind a pool. `lazy_loading`: whether a relation that was not loaded is loaded on access.
    pub fn new(pool: Pool, lazy_loading: bool) -> Users {
        let pool = Arc::new(pool);
        // A user may outlive its service and be dropped anywhere, so it keeps no pool.
        let weak = Arc::downgrade(&pool);
        let loader: Loader<Credential> = Arc::new(move |owner| {
            outside_of_runtimes(|| {
                let pool =
                    weak.upgrade().ok_or_else(|| Error::Unavailable("the service has stopped".into()))?;
                let rows = pool.read(FIND_CREDENTIAL, &[(&owner, Type::INT8)])?;
                let hash: Option<String> = rows.first().map(|row| column(row, 0)).transpose()?;
                Ok(hash.map(credential))
            })
        });
        let lazy = lazy_loading.then_some(loader);
        Users { pool, careful: Arc::default(), lazy }
    }

    /// The pool that the statements are executed on.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The user of a row whose first columns are those of a user.
    pub(super) fn user(&self, row: &Row) -> Result<User, Error> {
        let found = columns::record(row).and_then(|record| Ok((record, columns::version(row)?)));
        let (UserRef { id, name, email, created_at, updated_at }, version) =
            found.map_err(|error| sqlstate::condition("", &error))?;
        let lazy = self.lazy.clone().map(|loader| (loader, id));
        let credential = Relation::unloaded("credential", lazy);
        let (name, email) = (name.to_owned(), email.to_owned());
        Ok(User { id, name, email, created_at, updated_at, version, credential })
    }
}

fn credential(hash: String) -> Credential {
    Credential { password_hash: PasswordHash::from_phc(hash) }
}

/// A column of a row, by its name or its place.
pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, at: impl RowIndex + Display) -> Result<T, Error> {
    row.try_get(at).map_err(|error| sqlstate::condition("", &error))
}

/// What is made of rows, each at the place that its column `position` has, from 1.
pub(super) fn at_positions<'a, T>(
    rows: &'a [Row],
    count: usize,
    value: impl Fn(&'a Row) -> Result<T, Error>,
) -> Result<Vec<Option<T>>, Error> {
    let mut values: Vec<Option<T>> = (0..count).map(|_| None).collect();
    for row in rows {
        let position: i64 = column(row, "position")?;
        let at = usize::try_from(position - 1).ok().and_then(|at| values.get_mut(at));
        *at.ok_or_else(|| Error::Internal("a row of no position".into()))? = Some(value(row)?);
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        App, Config, ScratchDatabase,
        config::PasswordHashing,
        db::{PasswordChange, tests::LONG},
        users::{password::Hasher, revision::Condition, user::Values},
    };
    use std::{
        thread,
        time::{Duration, Instant},
    };

    const PASSWORD: &str = "correct horse";

    /// A service with Ada, who has a password, and Bob, who has none.
    fn ada_and_bob(production: bool) -> (ScratchDatabase, App) {
        let database = ScratchDatabase::create().unwrap();
        let app = App::open(&Config { production, db_pool_size: 2, ..database.config() }).unwrap();
        let hash = Hasher::new(PasswordHashing::Owasp).hash(&PASSWORD.into()).unwrap();
        let deadline = Instant::now() + LONG;
        let new = |name, email| New { values: Values::new(name, email), deadline };
        app.users().create(&new("Ada", "ada@example.com"), Some(&hash)).unwrap();
        app.users().create(&new("Bob", "bob@example.com"), None).unwrap();
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
        unloaded.extend(users.find_by_email(&["ada@example.com"]).unwrap().pop().unwrap());
        let deadline = Instant::now() + LONG;
        let values = Values { name: Some("Robert"), ..Values::default() };
        let eve = New { values: Values::new("Eve", "eve@example.com"), deadline };
        unloaded.push(users.create(&eve, None).unwrap());
        let renamed = Update { id: 2, values, condition: &Condition::default(), deadline };
        unloaded.push(users.update(&renamed, &PasswordChange::Keep).unwrap());
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
        assert!(
            Hasher::new(PasswordHashing::Owasp).verify(&PASSWORD.into(), Some(&credential.password_hash))
        );
        assert!(
            !Hasher::new(PasswordHashing::Owasp)
                .verify(&"battery staple".into(), Some(&credential.password_hash))
        );
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
                let found = app.users().find_by_email_with_credential(&[email]).unwrap().pop();
                let user = found.unwrap().unwrap();
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
