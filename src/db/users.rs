//! The statements that read users, and how a row becomes a [`User`].

use super::{Pool, blocking::outside_of_runtimes, session::Param, sqlstate};
use crate::{
    error::Error,
    users::{
        pagination::{List, ListBody, Range},
        password::PasswordHash,
        relation::{Load, Relation},
        user::{Credential, Timestamp, User, UserRef},
    },
};
use postgres::{
    Row,
    types::{FromSql, Type},
};
use std::sync::{Arc, Weak, atomic::AtomicU32};

const FIND: &str = "\
    select id, name, email, created_at, updated_at, version from users where id operator(pg_catalog.=) $1";

const FIND_MANY: &str = "\
    select id, name, email, created_at, updated_at, version from users where id operator(pg_catalog.=) any ($1)";

const FIND_CREDENTIAL: &str = "\
    select password_hash from credentials where user_id operator(pg_catalog.=) $1";

const FIND_BY_EMAIL: &str = "\
    select id, name, email, created_at, updated_at, version, 1::bigint from users \
    where pg_catalog.lower(email collate pg_catalog.\"C\") \
            operator(pg_catalog.=) pg_catalog.lower($1 collate pg_catalog.\"C\")";

/// Each row comes with the position of its address, from 1: two may ask for the same one.
const FIND_MANY_BY_EMAIL: &str = "\
    select found.*, position \
    from pg_catalog.unnest($1::text[]) with ordinality as asked (address, position) cross join lateral ( \
        select id, name, email, created_at, updated_at, version from users \
        where pg_catalog.lower(email collate pg_catalog.\"C\") \
            operator(pg_catalog.=) pg_catalog.lower(address collate pg_catalog.\"C\") limit 1 \
    ) as found";

const FIND_MANY_WITH_CREDENTIALS: &str = "\
    select found.*, position, \
        (select password_hash from credentials where user_id operator(pg_catalog.=) found.id) \
    from pg_catalog.unnest($1::text[]) with ordinality as asked (address, position) cross join lateral ( \
        select id, name, email, created_at, updated_at, version from users \
        where pg_catalog.lower(email collate pg_catalog.\"C\") \
            operator(pg_catalog.=) pg_catalog.lower(address collate pg_catalog.\"C\") limit 1 \
    ) as found";

/// Any pages with their exact total, in time that grows neither with the users nor with the page number.
pub(super) const PAGES: &str = include_str!("pages.sql");

/// Users that follow an id, for several requests: a range scan of the primary key for each. The columns are those of
/// [`PAGES`], and so is `$3`.
const WALKS: &str = "\
    select ordinal, 0::bigint, id, case when bytes operator(pg_catalog.<=) largest then name end, \
        case when bytes operator(pg_catalog.<=) largest then email end, created_at, updated_at \
    from rows from (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::bigint[]), pg_catalog.unnest($3::int[])) \
        with ordinality as asked (after, most, largest, ordinal) \
    cross join lateral ( \
        select *, pg_catalog.octet_length(name) operator(pg_catalog.+) pg_catalog.octet_length(email) as bytes \
        from users where id operator(pg_catalog.>) asked.after order by id limit asked.most \
    ) as found \
    order by ordinal, id";

/// What a row of these takes beside name and address, in bytes.
const ROW: usize = 512;

/// The users of one database; clones share it.
#[derive(Clone)]
pub struct Users {
    pub(super) pool: Arc<Pool>,
    /// Batches of creates that are still to be executed with `on conflict do nothing`: see `insert`.
    pub(super) careful: Arc<AtomicU32>,
    lazy: Option<Arc<dyn Load<Credential>>>,
}

impl Users {
    /// The users behind a pool. `lazy_loading`: whether a relation that was not loaded is loaded on access.
    pub fn new(pool: Pool, lazy_loading: bool) -> Users {
        let pool = Arc::new(pool);
        let lazy = lazy_loading.then(|| Arc::new(Credentials(Arc::downgrade(&pool))) as Arc<dyn Load<_>>);
        Users { pool, careful: Arc::default(), lazy }
    }

    /// The pool that the statements are executed on.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The user with this id. One round trip; errors: [`Error::NotFound`], those of the database.
    pub fn find(&self, id: i64) -> Result<User, Error> {
        let rows = self.pool.read(FIND, &[(&id, Type::INT8)])?;
        self.user(rows.first().ok_or(Error::NotFound)?)
    }

    /// Those of these users that there are, by id. One round trip.
    pub fn find_many(&self, ids: &[i64]) -> Result<Vec<User>, Error> {
        let rows = match ids {
            [] => return Ok(Vec::new()),
            [id] => self.pool.read(FIND, &[(id, Type::INT8)])?,
            several => self.pool.read(FIND_MANY, &[(&several, Type::INT8_ARRAY)])?,
        };
        let mut users = rows.iter().map(|row| self.user(row)).collect::<Result<Vec<_>, _>>()?;
        users.sort_unstable_by_key(|user| user.id);
        Ok(users)
    }

    /// The users with these addresses, in whatever case, each in the place of its address; `None` where there is none. One
    /// round trip.
    pub fn find_by_email(&self, emails: &[&str]) -> Result<Vec<Option<User>>, Error> {
        let rows = match emails {
            [] => return Ok(Vec::new()),
            [email] => self.pool.read(FIND_BY_EMAIL, &[(email, Type::TEXT)])?,
            several => self.pool.read(FIND_MANY_BY_EMAIL, &[(&several, Type::TEXT_ARRAY)])?,
        };
        at_positions(&rows, 6, emails.len(), |row| self.user(row))
    }

    /// The same together with their credentials.
    pub fn find_by_email_with_credential(&self, emails: &[&str]) -> Result<Vec<Option<User>>, Error> {
        if emails.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.pool.read(FIND_MANY_WITH_CREDENTIALS, &[(&emails, Type::TEXT_ARRAY)])?;
        at_positions(&rows, 6, emails.len(), |row| {
            let hash: Option<String> = column(row, 7)?;
            Ok(User { credential: Relation::loaded("credential", hash.map(credential)), ..self.user(row)? })
        })
    }

    /// Several lists of one kind, by id, from one snapshot, pages with their exact total; each with the bytes that it may
    /// take, and `None` where it needs more. One round trip.
    pub fn list_many(&self, asked: &[(Range, usize)]) -> Result<Vec<Option<List>>, Error> {
        let sql = match asked.first() {
            None => return Ok(Vec::new()),
            Some((Range::Page(_), _)) => PAGES,
            Some((Range::Walk { .. }, _)) => WALKS,
        };
        let (positions, limits): (Vec<i64>, Vec<i64>) = asked
            .iter()
            .map(|(range, _)| match range {
                Range::Page(request) => (request.offset(), i64::from(request.per_page)),
                // One more tells whether users come after these.
                Range::Walk { after, per_page } => (*after, i64::from(*per_page) + 1),
            })
            .unzip();
        // A row is freed before the next one becomes a part of the body: it takes what the user may, less its columns.
        let largest: Vec<i32> = asked
            .iter()
            .map(|(range, memory)| (memory / range.per_page().max(1) as usize - ROW) as i32)
            .collect();
        let params: [Param; 3] =
            [(&positions, Type::INT8_ARRAY), (&limits, Type::INT8_ARRAY), (&largest, Type::INT4_ARRAY)];
        let mut lists: Vec<_> = asked.iter().map(|(range, memory)| ListBody::new(*range, *memory)).collect();
        for row in self.pool.read(sql, &params)? {
            push(&row, &mut lists)?;
        }
        Ok(lists.into_iter().map(|list| list.finish(None)).collect())
    }

    pub(super) fn user(&self, row: &Row) -> Result<User, Error> {
        let id = column(row, 0)?;
        Ok(User {
            id,
            name: column(row, 1)?,
            email: column(row, 2)?,
            created_at: column(row, 3)?,
            updated_at: column(row, 4)?,
            version: column(row, 5)?,
            credential: match &self.lazy {
                Some(loader) => Relation::lazy("credential", loader.clone(), id),
                None => Relation::prevented("credential"),
            },
        })
    }
}

/// What rows are, each at the position, from 1, that one of its columns has.
pub(super) fn at_positions<T>(
    rows: &[Row],
    column_of_position: usize,
    count: usize,
    value: impl Fn(&Row) -> Result<T, Error>,
) -> Result<Vec<Option<T>>, Error> {
    let mut values: Vec<Option<T>> = (0..count).map(|_| None).collect();
    for row in rows {
        let position: i64 = column(row, column_of_position)?;
        let at = usize::try_from(position - 1).ok().and_then(|at| values.get_mut(at));
        *at.ok_or_else(|| Error::Internal("a row of no position".into()))? = Some(value(row)?);
    }
    Ok(values)
}

/// Adds a row to its list.
fn push(row: &Row, lists: &mut [ListBody]) -> Result<(), Error> {
    let ordinal: i64 = column(row, 0)?;
    let list = lists.get_mut(ordinal as usize - 1);
    let list = list.ok_or_else(|| Error::Internal("a row of no list".into()))?;
    list.set_total(column(row, 1)?);
    // The one row of an empty page holds the total alone.
    if let Some(id) = column(row, 2)? {
        match (column(row, 3)?, column(row, 4)?) {
            (Some(name), Some(email)) => {
                let (created_at, updated_at) = (column(row, 5)?, column(row, 6)?);
                list.push(UserRef { id, name, email, created_at, updated_at });
            }
            _ => list.leave_out(),
        }
    }
    Ok(())
}

/// Loads a credential on access. A user may outlive its service and be dropped anywhere, so it keeps no pool.
struct Credentials(Weak<Pool>);

impl Load<Credential> for Credentials {
    fn load(&self, owner: i64) -> Result<Option<Credential>, Error> {
        outside_of_runtimes(|| {
            let pool =
                self.0.upgrade().ok_or_else(|| Error::Unavailable("the service has stopped".into()))?;
            let rows = pool.read(FIND_CREDENTIAL, &[(&owner, Type::INT8)])?;
            let hash: Option<String> = rows.first().map(|row| column(row, 0)).transpose()?;
            Ok(hash.map(credential))
        })
    }
}

fn credential(hash: String) -> Credential {
    Credential { password_hash: PasswordHash::from_phc(hash) }
}

pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, at: usize) -> Result<T, Error> {
    row.try_get(at).map_err(|error| sqlstate::condition("", &error))
}

/// 2000-01-01T00:00:00Z, from which PostgreSQL counts microseconds, in microseconds since 1970.
pub(super) const EPOCH: i64 = 946_684_800_000_000;

impl FromSql<'_> for Timestamp {
    fn from_sql(_: &Type, raw: &[u8]) -> Result<Timestamp, Box<dyn std::error::Error + Sync + Send>> {
        let micros = i64::from_be_bytes(raw.try_into()?);
        let since_1970 = micros.checked_add(EPOCH);
        since_1970
            .and_then(Timestamp::from_unix_micros)
            .ok_or_else(|| "a timestamp outside the years 1 to 9999".into())
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        App, Config, ScratchDatabase,
        config::PasswordHashing,
        db::{PasswordChange, silent::LONG},
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
        app.users()
            .create(Values::new("Ada", "ada@example.com"), Some(&hash), Instant::now() + LONG)
            .unwrap();
        app.users().create(Values::new("Bob", "bob@example.com"), None, Instant::now() + LONG).unwrap();
        (database, app)
    }

    fn sql(database: &ScratchDatabase) -> postgres::Client {
        postgres::Client::connect(database.url(), postgres::NoTls).unwrap()
    }

    #[test]
    fn outside_production_a_lazy_load_is_a_violation() {
        let (_database, app) = ada_and_bob(false);
        let users = app.users();
        let mut unloaded = vec![users.find(1).unwrap(), users.find(2).unwrap()];
        unloaded.extend(users.find_by_email(&["ada@example.com"]).unwrap().pop().unwrap());
        let deadline = Instant::now() + LONG;
        let renamed = Values { name: Some("Robert"), ..Values::default() };
        unloaded.push(users.create(Values::new("Eve", "eve@example.com"), None, deadline).unwrap());
        unloaded
            .push(users.update(2, renamed, &PasswordChange::Keep, &Condition::default(), deadline).unwrap());
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
        let (ada, bob) = (users.find(1).unwrap(), users.find(2).unwrap());
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
        let another = users.find(1).unwrap();
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
        let (ada, bob) = (app.users().find(1).unwrap(), app.users().find(2).unwrap());
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
