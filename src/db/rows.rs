//! Reads users from the rows of statements. Each statement that returns users has all columns of the table `users`, in
//! any order.

use crate::error::Error;
use crate::users::password::PasswordHash;
use crate::users::relation::{Loader, Relation};
use crate::users::user::{Credential, User};
use postgres::{Row, types::FromSql};

/// Returns the user in a row. `credential_loader` loads the user's credential when code first accesses it.
pub fn read_user<'a, T: FromSql<'a>>(
    row: &'a Row,
    credential_loader: Option<Loader<Credential>>,
) -> Result<User<T>, postgres::Error> {
    let id = row.try_get("id")?;
    Ok(User {
        id,
        name: row.try_get("name")?,
        email: row.try_get("email")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
        version: row.try_get("version")?,
        credential: Relation::unloaded("credential", credential_loader.map(|loader| (loader, id))),
    })
}

/// Returns the credential in a row, or `None` if the row has no password hash.
pub fn read_credential(row: &Row) -> Result<Option<Credential>, Error> {
    let hash: Option<String> = row.try_get("password_hash")?;
    Ok(hash.map(|hash| Credential { password_hash: PasswordHash::from_stored(hash) }))
}
