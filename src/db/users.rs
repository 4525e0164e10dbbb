//! The statements that read users, and how a row becomes a [`User`].

use super::{Pool, blocking::outside_of_runtimes, session::Param, sqlstate};
use crate::{
    error::Error,
    users::{
        pagination::{ListBody, Listed, Range},
        password::PasswordHash,
        relation::{Load, Relation},
        revision::Revision,
        user::{Credential, Timestamp, User, UserRef},
    },
};
use postgres::{
    Row,
    types::{FromSql, Type},
};
use std::sync::{Arc, Weak, atomic::AtomicU32};

/// `$2`: bytes of the longest name that is answered; of a longer one its length, in place of the address: a column more
/// costs more. The database is not made to send what would not be kept.
const FIND: &str = "\
    select id, case when octet_length(name) <= $2 then name end, \
        case when octet_length(name) <= $2 then email else octet_length(name)::text end, \
        created_at, updated_at, version \
    from users where id = $1";

const FIND_MANY: &str = "\
    select id, case when octet_length(name) <= $2 then name end, \
        case when octet_length(name) <= $2 then email else octet_length(name)::text end, \
        created_at, updated_at, version \
    from users where id = any($1)";

/// Names, in bytes, that the users of one batch may have together: each its share.
const BATCH_NAMES: usize = 128 << 10;

/// The same for lists, of which each user has a small name at least.
const LIST_NAMES: usize = 1 << 20;
const SMALL_NAME: usize = 256;

/// The longest name: any.
const ANY_NAME: i32 = i32::MAX;

const FIND_CREDENTIAL: &str = "select password_hash from credentials where user_id = $1";

const FIND_BY_EMAIL: &str = "\
    select id, name, email, created_at, updated_at, version from users where lower(email) = lower($1)";

const FIND_WITH_CREDENTIAL: &str = "\
    select id, name, email, created_at, updated_at, version, password_hash \
    from users left join credentials on user_id = id \
    where lower(email) = lower($1)";

/// Any pages with their exact total, in time that grows neither with the users nor with the page number.
pub(super) const PAGES: &str = include_str!("pages.sql");

/// Users that follow an id, for several requests: a range scan of the primary key for each. The columns and `$3` are
/// those of [`PAGES`].
const WALKS: &str = "\
    select ordinal, 0::bigint, found.* \
    from unnest($1::bigint[], $2::bigint[]) with ordinality as asked (after, most, ordinal) \
    cross join lateral ( \
        select id, case when octet_length(name) <= $3 then name end, \
            case when octet_length(name) <= $3 then email else octet_length(name)::text end, \
            created_at, updated_at \
        from users where id > asked.after order by id limit asked.most \
    ) as found \
    order by ordinal, id";

/// The users of one database; clones share it.
#[derive(Clone)]
pub struct Users {
    pub(super) pool: Arc<Pool>,
    /// Batches of creates that are still to be executed with `on conflict do nothing`: see `insert`.
    pub(super) careful: Arc<AtomicU32>,
    lazy: Option<Arc<dyn Load<Credential>>>,
}

/// A user that was found.
#[derive(Debug)]
pub enum Found {
    /// The user.
    User(User),
    /// Its name is too long for a batch.
    Large {
        /// The user.
        id: i64,
        /// Its state.
        revision: Revision,
        /// Bytes that reading it by itself takes.
        memory: usize,
    },
}

/// The message with the row, the buffer that it is read into, the user, and the answer, which grows by doubling.
const FOUND_COPIES: usize = 6;

impl Found {
    /// The identifier.
    pub fn id(&self) -> i64 {
        match self {
            Found::User(user) => user.id,
            Found::Large { id, .. } => *id,
        }
    }

    /// The state of the record.
    pub fn revision(&self) -> Revision {
        match self {
            Found::User(user) => user.revision(),
            Found::Large { revision, .. } => *revision,
        }
    }
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
        let rows = self.pool.read(FIND, &[(&id, Type::INT8), (&ANY_NAME, Type::INT4)])?;
        self.user(rows.first().ok_or(Error::NotFound)?)
    }

    /// Those of these users that there are, by id; of those that are too large for a batch of so many only their size.
    /// One round trip.
    pub fn find_many(&self, ids: &[i64]) -> Result<Vec<Found>, Error> {
        let longest = (BATCH_NAMES / ids.len().max(1)) as i32;
        let rows = match ids {
            [id] => self.pool.read(FIND, &[(id, Type::INT8), (&longest, Type::INT4)])?,
            several => self.pool.read(FIND_MANY, &[(&several, Type::INT8_ARRAY), (&longest, Type::INT4)])?,
        };
        let mut users = Vec::with_capacity(rows.len());
        for row in &rows {
            users.push(match column(row, 1)? {
                Some(name) => Found::User(self.user_named(row, name)?),
                None => Found::Large {
                    id: column(row, 0)?,
                    revision: Revision { version: column(row, 5)?, updated_at: column(row, 4)? },
                    memory: length(row, 2)? * FOUND_COPIES,
                },
            });
        }
        users.sort_unstable_by_key(Found::id);
        Ok(users)
    }

    /// The user with this address, in whatever case; `None` where there is none. One round trip.
    pub fn find_by_email(&self, email: &str) -> Result<Option<User>, Error> {
        let rows = self.pool.read(FIND_BY_EMAIL, &[(&email, Type::TEXT)])?;
        rows.first().map(|row| self.user(row)).transpose()
    }

    /// The user with this address, in whatever case, together with its credential.
    pub fn find_by_email_with_credential(&self, email: &str) -> Result<User, Error> {
        let rows = self.pool.read(FIND_WITH_CREDENTIAL, &[(&email, Type::TEXT)])?;
        let row = rows.first().ok_or(Error::NotFound)?;
        let hash: Option<String> = column(row, 6)?;
        Ok(User { credential: Relation::loaded("credential", hash.map(credential)), ..self.user(row)? })
    }

    /// The bodies of several lists of one kind, by id, from one snapshot, pages with their exact total; none of more than
    /// `max_bytes` unless it is of one user. One round trip. The rows of all of them are in memory at once.
    pub fn list_many(&self, ranges: &[Range], max_bytes: usize) -> Result<Vec<Listed>, Error> {
        /// Of a usual user in a list.
        const USUAL: usize = 224;
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let users: usize = ranges.iter().map(|range| range.per_page() as usize).sum();
        let asked = Asked::new(ranges, max_bytes, (LIST_NAMES / users.max(1)).max(SMALL_NAME));
        let rows = self.pool.read(asked.sql, &asked.params())?;
        let mut rows = rows.iter().peekable();
        let mut lists = Vec::with_capacity(ranges.len());
        for (ordinal, range) in (1_i64..).zip(ranges) {
            let capacity = (USUAL * (2 + range.per_page() as usize)).min(max_bytes);
            let mut list = ListBody::new(*range, max_bytes, capacity);
            while let Some(row) = rows.next_if(|row| column(row, 0).is_ok_and(|found: i64| found == ordinal))
            {
                push(row, &mut list)?;
            }
            lists.push(list.finish(None));
        }
        Ok(lists)
    }

    /// One list as [`Users::list_many`] has it, built from its rows as they come. `whole`: with users of any size.
    pub fn list_one(&self, range: Range, max_bytes: usize, whole: bool) -> Result<Listed, Error> {
        let asked = Asked::new(&[range], max_bytes, if whole { usize::MAX } else { SMALL_NAME });
        let mut list = ListBody::new(range, max_bytes, 0);
        let mut result = Ok(());
        self.pool.read_each(asked.sql, &asked.params(), &mut |row| match row {
            // A new attempt: what came before is not of the same snapshot.
            None => list = ListBody::new(range, max_bytes, 0),
            Some(row) if result.is_ok() => result = push(&row, &mut list),
            Some(_) => {}
        })?;
        result.map(|()| list.finish(None))
    }

    pub(super) fn user(&self, row: &Row) -> Result<User, Error> {
        self.user_named(row, column(row, 1)?)
    }

    fn user_named(&self, row: &Row, name: String) -> Result<User, Error> {
        let id = column(row, 0)?;
        Ok(User {
            id,
            name,
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

/// A statement for lists of one kind, and its parameters.
struct Asked {
    sql: &'static str,
    positions: Vec<i64>,
    limits: Vec<i64>,
    longest: i32,
}

impl Asked {
    /// No more rows of a list than tell that its body would be larger than `max_bytes`.
    fn new(ranges: &[Range], max_bytes: usize, longest: usize) -> Asked {
        let most = (max_bytes / ListBody::EMPTY_USER + 2) as i64;
        let (positions, limits) = ranges
            .iter()
            .map(|range| match range {
                Range::Page(request) => (request.offset(), i64::from(request.per_page)),
                // One more tells whether users come after these.
                Range::Walk { after, per_page } => (*after, i64::from(*per_page) + 1),
            })
            .map(|(position, limit)| (position, limit.min(most)))
            .unzip();
        let sql = match ranges.first() {
            Some(Range::Walk { .. }) => WALKS,
            _ => PAGES,
        };
        Asked { sql, positions, limits, longest: i32::try_from(longest).unwrap_or(ANY_NAME) }
    }

    fn params(&self) -> [Param<'_>; 3] {
        let array = |values| (values as _, Type::INT8_ARRAY);
        [array(&self.positions), array(&self.limits), (&self.longest, Type::INT4)]
    }
}

/// Adds a row to its list.
fn push(row: &Row, list: &mut ListBody) -> Result<(), Error> {
    list.set_total(column(row, 1)?);
    // The one row of an empty page holds the total alone.
    let Some(id) = column(row, 2)? else {
        return Ok(());
    };
    match column(row, 3)? {
        Some(name) => {
            let (created_at, updated_at) = (column(row, 5)?, column(row, 6)?);
            list.push(UserRef { id, name, email: column(row, 4)?, created_at, updated_at });
        }
        None => list.leave_out(id, length(row, 4)?),
    }
    Ok(())
}

/// The length of a name that was left out, in bytes, which is there in place of the address.
fn length(row: &Row, at: usize) -> Result<usize, Error> {
    let text: &str = column(row, at)?;
    text.parse().map_err(|_| Error::Internal("a name that was left out has no length".into()))
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
        users::{password::Hasher, revision::Condition},
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
        app.users().create("Ada", "ada@example.com", Some(&hash)).unwrap();
        app.users().create("Bob", "bob@example.com", None).unwrap();
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
        unloaded.push(users.find_by_email("ada@example.com").unwrap().unwrap());
        unloaded.push(users.create("Eve", "eve@example.com", None).unwrap());
        unloaded.push(
            users.update(2, Some("Robert"), None, &PasswordChange::Keep, &Condition::default()).unwrap(),
        );
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
                let user = app.users().find_by_email_with_credential(email).unwrap();
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
