//! `POST /users/authenticate`: verifies the password of a user, and answers with the user if the password is right.
//!
//! An address without a user takes the same steps and the same time as an address with a user, so that a client cannot
//! find out which users exist.

use super::{Lane, Operations, Outcome, Step};
use crate::db::{Failure, empty_if_untranslatable, rows::read_credential, session::Param};
use crate::error::Error;
use crate::http::{PeerKey, Request, Response, peer_network};
use crate::input::parse_body;
use crate::secret::Secret;
use crate::users::password::{PasswordHash, PasswordMatch};
use crate::users::{relation::Relation, user::User};
use postgres::types::Type;
use std::time::Instant;

/// A login: an address and a password.
#[derive(Debug)]
pub struct Authenticate {
    email: String,
    password: Secret,
    peer: PeerKey,
    /// The user, the stored hash and a new hash, if the password was right but the stored hash is outdated; otherwise
    /// `None`.
    hash_replacement: Option<Box<(User, PasswordHash, PasswordHash)>>,
}

impl Authenticate {
    pub(crate) fn parse(request: &Request, operations: &Operations) -> Result<Authenticate, Error> {
        let body = operations.schemas.authenticate.validate(parse_body(request, false)?)?;
        let text = |key: &str| body.get(key).and_then(|value| value.as_str()).unwrap_or_default();
        let (email, password) = (text("email").to_owned(), text("password").into());
        let peer = request.peer.map(peer_network);
        operations.throttle.refuse_at_limit(&email, peer)?;
        Ok(Authenticate { email, password, peer, hash_replacement: None })
    }

    pub(super) fn next_step(&self) -> Step {
        Step::in_lane(if self.hash_replacement.is_some() { Lane::Single } else { Lane::Hash })
    }
}

pub(crate) const FIND_USER_WITH_CREDENTIAL: &str = r#"
    select id, name, email, created_at, updated_at, version,
        (select c.password_hash from credentials c where c.user_id = users.id) as password_hash
    from users where lower(email::text collate "C") = lower($1 collate "C")"#;

/// Replaces the hash of a password with a new hash of this password. Leaves the row in `users` as it is, because the
/// user does not change.
pub(crate) const REPLACE_HASH: &str =
    "update credentials set password_hash = $3 where user_id = $1 and password_hash::text = $2";

impl Operations {
    pub(super) fn find_by_email_with_credential(&self, email: &str) -> Result<Option<User>, Failure> {
        let rows = self.pool.execute(FIND_USER_WITH_CREDENTIAL, &[(&email, Type::TEXT)], None);
        let rows = empty_if_untranslatable(email, rows)?;
        let user = |row| {
            let credential = Relation::loaded("credential", read_credential(row)?);
            Ok(User { credential, ..self.read_user(row)? })
        };
        rows.first().map(user).transpose()
    }
}

impl Authenticate {
    pub(super) fn execute(&mut self, operations: &Operations, deadline: Instant) -> Result<Outcome, Failure> {
        if let Some(replacement) = self.hash_replacement.take() {
            let (user, old, new) = *replacement;
            let params: [Param; 3] =
                [(&user.id, Type::INT8), (&old.as_text(), Type::TEXT), (&new.as_text(), Type::TEXT)];
            // Answers the login even if the new hash could not be stored, because the next login can store a new hash.
            match operations.pool.execute(REPLACE_HASH, &params, Some(deadline)) {
                Ok(_) | Err(Failure::Contended) => {}
                Err(Failure::Error(error)) => error.log(None),
            }
            return Ok(Response::json(200, &user).into());
        }
        let attempt = operations.throttle.admit(&self.email, self.peer)?;
        let user = operations.find_by_email_with_credential(&self.email)?;
        let credential = user.as_ref().map(|user| user.credential.get()).transpose()?.flatten();
        let hash = credential.map(|credential| credential.password_hash.clone());
        let verdict = operations.use_hasher(hash.as_ref(), |hasher| {
            let found = hasher.verify(&self.password, hash.as_ref());
            let new = (found == PasswordMatch::OutdatedHash).then(|| hasher.hash(&self.password).ok());
            (found, new.flatten())
        })?;
        match (verdict, user, hash) {
            ((PasswordMatch::None, _), ..) | (_, None, _) => {
                attempt.mark_wrong();
                Err(Error::InvalidCredentials.into())
            }
            ((_, Some(new)), Some(user), Some(old)) => {
                self.hash_replacement = Some(Box::new((user, old, new)));
                Ok(Outcome::Continue)
            }
            (_, Some(user), _) => Ok(Response::json(200, &user).into()),
        }
    }
}
