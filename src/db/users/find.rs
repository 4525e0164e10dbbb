//! Reads of users that are named by ids or addresses.

use super::{Users, credential};
use crate::db::sqlstate::none_if_untranslatable;
use crate::error::Error;
use crate::users::{pagination::Listed, relation::Relation, user::User};
use postgres::types::Type;

const FIND: &str =
    "select id, name, email, created_at, updated_at, version from users where id = any ($1::bigint[])";

/// Each row has the position of its address, from 1, as two requests may ask for one address.
const FIND_BY_EMAIL: &str = r#"
    select found.*, position, bigint '1' as total
    from unnest($1::text[]) with ordinality as asked (address, position), lateral (
        select id, name, email, created_at, updated_at, version from users
        where lower(email::text collate "C") = lower(address collate "C") limit 1
    ) found"#;

const FIND_WITH_CREDENTIAL: &str = r#"
    select id, name, email, created_at, updated_at, version,
        (select password_hash from credentials where user_id = id) as password_hash
    from users where lower(email::text collate "C") = lower($1 collate "C")"#;

impl Users {
    pub fn find_many(&self, ids: &[i64]) -> Result<Vec<User>, Error> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.pool.execute(FIND, &[(&ids, Type::INT8_ARRAY)], None)?;
        rows.iter().map(|row| self.user(row)).collect()
    }

    pub fn find_by_email(&self, emails: &[&str]) -> Result<Vec<Listed>, Error> {
        let found = self.lists(FIND_BY_EMAIL, &[(&emails, Type::TEXT_ARRAY)], emails.len());
        let [email] = emails else { return found };
        let found = none_if_untranslatable(email, found.map(|mut lists| lists.remove(0)));
        found.map(|listed| vec![listed])
    }

    pub fn find_by_email_with_credential(&self, email: &str) -> Result<Option<User>, Error> {
        let rows = self.pool.execute(FIND_WITH_CREDENTIAL, &[(&email, Type::TEXT)], None);
        let rows = none_if_untranslatable(email, rows)?;
        let user = |row| {
            Ok(User { credential: Relation::loaded("credential", credential(row)?), ..self.user(row)? })
        };
        rows.first().map(user).transpose()
    }
}
