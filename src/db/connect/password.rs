//! Reads the password for connects. If it is in a file, reads the file again for each connect, so that an operator can
//! change the password without a restart.

use crate::config::{Config, Database};
use crate::db::target::DbTarget;
use crate::secret;
use parking_lot::Mutex;
use std::path::PathBuf;

/// The password of the database, and the file to read it from if the settings name a file.
pub struct Password {
    file: Option<PathBuf>,
    /// True if the file holds a whole connection string, false if it holds only the password.
    file_has_url: bool,
    /// The password of the last connect; before the first connect, the one in the settings.
    current: Mutex<Option<Vec<u8>>>,
}

impl Password {
    /// Returns the password that the settings name.
    pub fn new(config: &Config, target: &DbTarget) -> Password {
        let file_has_url = matches!(config.database, Database::Url(_));
        let current = Mutex::new(target.password());
        Password { file: config.db_password_file.clone(), file_has_url, current }
    }

    /// Returns the password for the next connect. Reads the password file if there is one; if this fails, returns the
    /// password of the last connect.
    pub fn read(&self) -> Option<Vec<u8>> {
        let mut current = self.current.lock();
        let Some(file) = &self.file else { return current.clone() };
        let parse = |text: String| {
            if self.file_has_url {
                Ok(DbTarget::parse(&text, Some(""))?.password())
            } else {
                Ok(Some(text.into_bytes()))
            }
        };
        match secret::read_secret(file).and_then(parse) {
            Ok(new) => *current = new.or_else(|| current.take()),
            Err(problem) => log::warn!("the password stays as it was, its file cannot be used: {problem}"),
        }
        current.clone()
    }
}
