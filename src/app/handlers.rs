//! One short function a route: check, query, answer. And the [`App`] that calls them.
//!
//! Knows no socket: [`App::handle`] is a function from a request to a response.

use crate::{
    app::{
        access::Access,
        router::{Route, route},
        validation::{Validation, object},
    },
    config::{Config, Secret},
    db::{
        blocking::{DropOutside, outside_of_runtimes},
        users::{PasswordChange, Users},
    },
    error::{Cause, Error},
    http::{Request, Response},
    users::{
        pagination::PageRequest,
        password::{Hasher, PasswordHash, Turns},
        user::{NewUser, User, UserChanges},
    },
};

/// The service without a server: a function from a request to a response. Shared by reference between threads.
pub struct App {
    users: DropOutside<Users>,
    validation: Validation,
    access: Access,
    max_per_page: u32,
    hasher: Hasher,
    hashing: Turns,
}

/// Which requests are answered together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `GET /users/:id`: one query for all.
    Find,
    /// `GET /users`.
    List,
    /// `POST /users` without a password: one statement and one commit for all.
    Create,
    /// What may hash a password: apart from all others, because it is dear.
    Hash,
    /// All others, one by one.
    Alone,
}

impl Kind {
    /// Each of them.
    pub const ALL: [Kind; 5] = [Kind::Find, Kind::List, Kind::Create, Kind::Hash, Kind::Alone];
}

impl App {
    /// The service over these users, as the settings have it.
    pub(crate) fn new(users: Users, config: &Config) -> App {
        App {
            users: DropOutside::new(users),
            validation: Validation::new(config.schema, config.validation),
            access: Access::new(config.api_token.as_ref()),
            max_per_page: config.max_per_page,
            hasher: Hasher::new(config.password_hashing),
            hashing: Turns::default(),
        }
    }

    /// Answers a request; what goes wrong is an answer too, and is logged where the client is not told.
    ///
    /// Blocks for the database, up to `db_acquire_timeout` for a connection and `request_timeout` for each of its
    /// statements, and where a password is involved for its turn to be hashed and for that work, some 20 ms. What only
    /// a server can refuse (its [`Limits`](crate::Limits)) is not refused here.
    pub fn handle(&self, request: &Request) -> Response {
        outside_of_runtimes(|| answer(self.dispatch(request)))
    }

    /// With which others a request may be answered.
    pub(crate) fn kind(&self, request: &Request) -> Kind {
        match route(request.method, request.path()) {
            Ok(Route::Find(Some(_))) => Kind::Find,
            Ok(Route::List) => Kind::List,
            Ok(Route::Create | Route::Update(_) | Route::Authenticate) if may_hash(request) => Kind::Hash,
            Ok(Route::Create) => Kind::Create,
            _ => Kind::Alone,
        }
    }

    /// Answers requests of one kind, each as [`App::handle`] would, with fewer queries. `None` for one that would
    /// keep the others waiting: it is to be handled alone.
    pub(crate) fn handle_run(&self, kind: Kind, requests: &[&Request]) -> Vec<Option<Response>> {
        match (kind, requests) {
            (Kind::Create, _) => {
                let new = |request: &Request| self.new_user(request);
                self.together(requests, new, |new| self.create_together(&new))
            }
            (_, [request]) => vec![Some(self.handle(request))],
            (Kind::Find, _) => self.together(requests, find_id, |ids| self.find_together(&ids)),
            (Kind::List, _) => {
                let page = |request: &Request| PageRequest::from_query(request, self.max_per_page);
                self.together(requests, page, |pages| self.list_together(&pages))
            }
            _ => requests.iter().map(|request| Some(self.handle(request))).collect(),
        }
    }

    /// Answers those that are not admitted, or do not read, one by one and the others together, each in its
    /// place.
    fn together<T, R: Into<Option<Response>>>(
        &self,
        requests: &[&Request],
        read: impl Fn(&Request) -> Result<T, Error>,
        run: impl FnOnce(Vec<T>) -> Vec<R>,
    ) -> Vec<Option<Response>> {
        let mut admitted = Vec::with_capacity(requests.len());
        let mut refusals = Vec::with_capacity(requests.len());
        for request in requests {
            match self.access.check(request).and_then(|()| read(request)) {
                Ok(one) => {
                    admitted.push(one);
                    refusals.push(None);
                }
                Err(error) => refusals.push(Some(answer(Err(error)))),
            }
        }
        let mut answers = run(admitted).into_iter();
        let all = refusals.into_iter().map(|refusal| match refusal {
            Some(refusal) => Some(refusal),
            None => answers.next().expect("a run has an outcome for each of its requests").into(),
        });
        all.collect()
    }

    /// The users themselves, for what HTTP does not offer.
    #[doc(hidden)]
    pub fn users(&self) -> &Users {
        &self.users
    }

    fn dispatch(&self, request: &Request) -> Result<Response, Error> {
        let route = route(request.method, request.path())?;
        self.access.check(request)?;
        match route {
            Route::List => self.list(request),
            Route::Create => self.create(request),
            Route::Find(id) => self.find(id),
            Route::Update(id) => self.update(id, request),
            Route::Delete(id) => self.delete(id),
            Route::Authenticate => self.authenticate(request),
            Route::Options(allow) => Ok(Response::no_content().with("Allow", allow)),
        }
    }

    fn list(&self, request: &Request) -> Result<Response, Error> {
        let page = PageRequest::from_query(request, self.max_per_page)?;
        Ok(Response::json(200, &self.users.list(page)?))
    }

    fn list_together(&self, requests: &[PageRequest]) -> Vec<Response> {
        match self.users.list_many(requests) {
            Ok(pages) => pages.iter().map(|page| Response::json(200, page)).collect(),
            Err(error) => vec![answer(Err(error)); requests.len()],
        }
    }

    fn find(&self, id: Option<i64>) -> Result<Response, Error> {
        let user = self.users.find(id.ok_or(Error::NotFound)?)?;
        Ok(Response::json(200, &user))
    }

    fn find_together(&self, ids: &[i64]) -> Vec<Response> {
        let users = match self.users.find_many(ids) {
            Ok(users) => users,
            Err(error) => return vec![answer(Err(error)); ids.len()],
        };
        let one = |id: &i64| match users.binary_search_by_key(id, |user| user.id) {
            Ok(at) => Response::json(200, &users[at]),
            Err(_) => answer(Err(Error::NotFound)),
        };
        ids.iter().map(one).collect()
    }

    fn create(&self, request: &Request) -> Result<Response, Error> {
        let new = self.new_user(request)?;
        let hash = new.password.as_ref().map(|clear| self.hash(clear)).transpose()?;
        let user = self.users.create(&new.name, &new.email, hash.as_ref())?;
        Ok(created(&user))
    }

    /// Of users without a password: those with one are [`Kind::Hash`].
    fn create_together(&self, new: &[NewUser]) -> Vec<Option<Response>> {
        let values: Vec<_> = new.iter().map(|new| (&*new.name, &*new.email)).collect();
        let outcomes = self.users.create_many(&values).into_iter();
        let outcomes = outcomes.map(|outcome| match outcome {
            Err(Error::Database { cause: Cause::Lock, .. }) => None,
            outcome => Some(answer(outcome.map(|user| created(&user)))),
        });
        outcomes.collect()
    }

    fn new_user(&self, request: &Request) -> Result<NewUser, Error> {
        NewUser::from_body(self.validation.create(json(request)?)?)
    }

    /// A missing record answers 404 before the body is judged; a good body needs no look-up for that.
    fn update(&self, id: Option<i64>, request: &Request) -> Result<Response, Error> {
        let id = id.ok_or(Error::NotFound)?;
        let changes = match json(request).and_then(UserChanges::from_body) {
            Ok(changes) => changes,
            Err(refusal) => return self.users.find(id).and(Err(refusal)),
        };
        let password = match &changes.password {
            None => PasswordChange::Keep,
            Some(None) => PasswordChange::Remove,
            Some(Some(clear)) => {
                // A hash is too dear to be made for nobody.
                self.users.find(id)?;
                PasswordChange::Set(self.hash(clear)?)
            }
        };
        let (name, email) = (changes.name.as_deref(), changes.email.as_deref());
        let user = self.users.update(id, name, email, &password)?;
        Ok(Response::json(200, &user))
    }

    fn delete(&self, id: Option<i64>) -> Result<Response, Error> {
        self.users.delete(id.ok_or(Error::NotFound)?)?;
        Ok(Response::no_content())
    }

    fn hash(&self, clear: &Secret) -> Result<PasswordHash, Error> {
        self.hashing.take(|| self.hasher.hash(clear))
    }

    fn authenticate(&self, request: &Request) -> Result<Response, Error> {
        let body = self.validation.authenticate(json(request)?)?;
        let text = |key: &str| body.get(key).and_then(|value| value.as_str()).unwrap_or_default();
        let user = match self.users.find_by_email_with_credential(text("email")) {
            Ok(user) => Some(user),
            Err(Error::NotFound) => None,
            Err(error) => return Err(error),
        };
        let credential = match &user {
            Some(user) => user.credential.get()?,
            None => None,
        };
        let hash = credential.map(|credential| &credential.password_hash);
        let matches = self.hashing.take(|| self.hasher.verify(&Secret::from(text("password")), hash));
        match user {
            Some(user) if matches => Ok(Response::json(200, &user)),
            _ => Err(Error::InvalidCredentials),
        }
    }
}

fn answer(result: Result<Response, Error>) -> Response {
    result.unwrap_or_else(|error| {
        error.log();
        Response::from(&error)
    })
}

fn find_id(request: &Request) -> Result<i64, Error> {
    match route(request.method, request.path())? {
        Route::Find(Some(id)) => Ok(id),
        _ => Err(Error::NotFound),
    }
}

fn created(user: &User) -> Response {
    Response::json(201, user).with("Location", format!("/users/{}", user.id))
}

/// Whether handling may hash a password: a body sets one only where it names it, plainly or with a letter escaped.
fn may_hash(request: &Request) -> bool {
    let holds = |text: &[u8]| request.body.windows(text.len()).any(|window| window == text);
    holds(b"\"password\"") || holds(br"\u006") || holds(br"\u007")
}

/// Bodies are JSON whatever their Content-Type says, as curl's is a form's, except uploads.
fn json(request: &Request) -> Result<serde_json::Map<String, serde_json::Value>, Error> {
    let media_type = request.header("content-type").unwrap_or_default();
    let upload = media_type.get(..10).is_some_and(|start| start.eq_ignore_ascii_case("multipart/"));
    if upload {
        return Err(Error::UnsupportedMediaType);
    }
    object(&request.body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_hash() {
        let rows = [
            (r#"{"password":"x"}"#, true),
            (r#"{"passw\u006frd":"x"}"#, true),
            (r#"{"\u0070assword":"x"}"#, true),
            (r#"{"name":"x"}"#, false),
            (r#"{"name":"Ren\u00e9e \"forgot her password\""}"#, false),
            ("", false),
        ];
        for (body, expected) in rows {
            let request = Request::new("PUT", "/users/1", body);
            assert_eq!(may_hash(&request), expected, "{body}");
        }
    }
}
