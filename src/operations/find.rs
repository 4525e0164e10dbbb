//! `GET /users/{id}`: finds a user. Answers 304 if the client already has the user's current revision.

use super::{BatchItem, Operations, answer_with};
use crate::db::{Failure, Pool, blocking::run_outside_of_runtimes, rows::read_credential};
use crate::error::Error;
use crate::http::{Request, Response};
use crate::input::{etag, parse_condition};
use crate::users::relation::Loader;
use crate::users::revision::Condition;
use crate::users::user::{Credential, User};
use postgres::types::Type;
use std::sync::Arc;

/// A request for one user, by id.
#[derive(Debug)]
pub struct Find {
    id: i64,
    /// For a GET: the condition that the user has to meet. For a PUT or a PATCH with a refused body: the refusal, which
    /// is the answer if the user exists. A user that does not exist is answered 404.
    condition_or_refusal: Result<Condition, Error>,
}

impl Find {
    pub(crate) fn parse(request: &Request, id: Option<i64>) -> Result<Find, Error> {
        let condition = parse_condition(request)?;
        Ok(Find { id: id.ok_or(Error::NotFound)?, condition_or_refusal: Ok(condition) })
    }

    /// Creates the look-up that answers a PUT or a PATCH with a refused body: 404 if the user does not exist, otherwise
    /// the refusal.
    pub(super) fn with_refusal(id: i64, refusal: Error) -> Find {
        Find { id, condition_or_refusal: Err(refusal) }
    }
}

pub(crate) const FIND_BY_ID: &str =
    "select id, name, email, created_at, updated_at, version from users where id = any ($1::bigint[])";

pub(crate) const FIND_CREDENTIAL: &str = "select password_hash from credentials where user_id = $1";

impl Operations {
    /// Finds the users with these ids, in any order. Takes one round trip, or none if there are no ids.
    pub fn find_by_ids(&self, ids: &[i64]) -> Result<Vec<User>, Failure> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.pool.execute(FIND_BY_ID, &[(&ids, Type::INT8_ARRAY)], None)?;
        rows.iter().map(|row| Ok(self.read_user(row)?)).collect()
    }
}

/// Returns the function that loads the credential of a user when the credential is first accessed. Does not keep the
/// pool alive, because a user may outlive its service, and open sessions would outlive the service, too.
pub(super) fn credential_loader(pool: &Arc<Pool>) -> Loader<Credential> {
    let weak = Arc::downgrade(pool);
    Arc::new(move |owner| {
        run_outside_of_runtimes(|| {
            let pool = weak.upgrade().ok_or_else(|| Error::Unavailable("the service has stopped".into()))?;
            let rows =
                pool.execute(FIND_CREDENTIAL, &[(&owner, Type::INT8)], None).map_err(Failure::into_error)?;
            rows.first().map_or(Ok(None), read_credential)
        })
    })
}

impl Find {
    /// Finds the users of several requests with one statement, and answers each request.
    pub(super) fn execute(operations: &Operations, finds: Vec<BatchItem<Find>>) {
        let ids: Vec<i64> = finds.iter().map(|find| find.command.id).collect();
        let users = operations.find_by_ids(&ids);
        for BatchItem { command, outcome, .. } in finds {
            let answered = users.as_ref().map_err(Failure::clone).and_then(|users| {
                let found = users.iter().find(|user| user.id == command.id);
                Ok(command.answer(found.ok_or(Error::NotFound)?)?.into())
            });
            *outcome = Some(answered.into());
        }
    }

    fn answer(&self, user: &User) -> Result<Response, Error> {
        match &self.condition_or_refusal {
            Err(refusal) => Err(refusal.clone()),
            Ok(condition) if condition.is_met_by(user.revision()) => Ok(answer_with(200, user)),
            Ok(condition) if condition.if_match_allows(user.revision()) => {
                let unmodified = Response { status: 304, ..Response::no_content() };
                Ok(unmodified.with("ETag", etag(user.revision())))
            }
            Ok(_) => Err(Error::PreconditionFailed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::{Create, Update};
    use crate::users::password::{Hasher, PasswordMatch};
    use crate::users::user::{NewUser, UserChanges};
    use crate::{App, Config, ScratchDatabase, config::PasswordHashing};
    use std::thread;
    use std::time::{Duration, Instant};

    const PASSWORD: &str = "correct horse";

    /// A time that is longer than a test takes on a busy machine.
    const LONG: Duration = Duration::from_secs(20);

    fn create(name: &str, email: &str) -> Create {
        let user = NewUser { name: name.to_owned(), email: email.to_owned(), password: None };
        Create { user, key: None, hash: None, peer: None }
    }

    /// Returns a service with Ada, who has a password, and Bob, who has none.
    fn ada_and_bob(production: bool) -> (ScratchDatabase, App) {
        let database = ScratchDatabase::create().unwrap();
        let app = App::open(&Config { production, db_pool_size: 2, ..database.config() }).unwrap();
        let hash = Hasher::new(PasswordHashing::Owasp.params()).hash(&PASSWORD.into()).unwrap();
        let (ada, bob) = (create("Ada", "ada@example.com"), create("Bob", "bob@example.com"));
        let deadline = Instant::now() + LONG;
        for create in [Create { hash: Some(hash), ..ada }, bob] {
            create.store(app.operations(), deadline).unwrap();
        }
        (database, app)
    }

    fn sql(database: &ScratchDatabase) -> postgres::Client {
        postgres::Client::connect(database.url(), postgres::NoTls).unwrap()
    }

    #[test]
    fn outside_production_a_lazy_load_is_a_violation() {
        let (_database, app) = ada_and_bob(false);
        let users = app.operations();
        let mut unloaded =
            vec![users.find_by_ids(&[1]).unwrap().remove(0), users.find_by_ids(&[2]).unwrap().remove(0)];
        unloaded.append(&mut users.find_by_email(&["ada@example.com"]).unwrap()[0].users);
        let deadline = Instant::now() + LONG;
        let eve = create("Eve", "eve@example.com");
        unloaded.push(eve.store(users, deadline).unwrap().user);
        let changes = UserChanges { name: Some("Robert".to_owned()), ..UserChanges::default() };
        let renamed =
            Update { id: 2, changes, condition: Condition::default(), hash: None, is_unbatched: false };
        unloaded.push(renamed.apply(users, deadline).unwrap());
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
        let users = app.operations();
        let (ada, bob) =
            (users.find_by_ids(&[1]).unwrap().remove(0), users.find_by_ids(&[2]).unwrap().remove(0));
        assert!(!ada.credential.is_loaded() && !bob.credential.is_loaded());
        let credential = ada.credential.get().unwrap().expect("Ada has a password");
        let hasher = Hasher::new(PasswordHashing::Owasp.params());
        let check = |password: &str| hasher.verify(&password.into(), Some(&credential.password_hash));
        assert!(check(PASSWORD) != PasswordMatch::None && check("battery staple") == PasswordMatch::None);
        assert!(bob.credential.get().unwrap().is_none());
        // Keeps a credential once it is loaded. An access to another credential asks the database, and gets its error.
        let another = users.find_by_ids(&[1]).unwrap().remove(0);
        sql(&database).batch_execute("drop table credentials").unwrap();
        assert!(ada.credential.get().unwrap().is_some() && bob.credential.get().unwrap().is_none());
        assert!(matches!(another.credential.get(), Err(Error::Database { .. })));
    }

    #[test]
    fn an_eager_load_is_never_a_violation() {
        for production in [true, false] {
            let (_database, app) = ada_and_bob(production);
            for (email, has_password) in [("ADA@example.com", true), ("bob@example.com", false)] {
                let user = app.operations().find_by_email_with_credential(email).unwrap().unwrap();
                assert!(user.credential.is_loaded());
                assert_eq!(user.credential.get().unwrap().is_some(), has_password, "{email}");
            }
        }
    }

    #[test]
    fn a_user_may_outlive_its_service_and_be_dropped_in_an_async_task() {
        let (database, app) = ada_and_bob(true);
        let (ada, bob) = (
            app.operations().find_by_ids(&[1]).unwrap().remove(0),
            app.operations().find_by_ids(&[2]).unwrap().remove(0),
        );
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
