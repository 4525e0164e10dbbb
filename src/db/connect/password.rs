//! Reads the password for connects. If it is in a file, reads the file again for each connect, so that an operator can
//! change the password without a restart.

use crate::config::{Config, Database};
use crate::db::target::DbTarget;
use crate::secret;
use parking_lot::Mutex;
use std::path::PathBuf;

/// The password of the database, and the file to read it from if the settings name a file.
pub struct PasswordSource {
    file: Option<PathBuf>,
    /// True if the file holds a whole connection string, false if it holds only the password.
    file_has_url: bool,
    /// The password of the last connect; before the first connect, the one in the settings.
    last_password: Mutex<Option<Vec<u8>>>,
}

impl PasswordSource {
    /// Returns the source of the password, as the settings name it.
    pub fn new(config: &Config, target: &DbTarget) -> PasswordSource {
        let file_has_url = matches!(config.database, Database::Url(_));
        let last_password = Mutex::new(target.password());
        PasswordSource { file: config.db_password_file.clone(), file_has_url, last_password }
    }

    /// Returns the password for the next connect. Reads the password file if there is one; if this fails, returns the
    /// password of the last connect.
    pub fn read(&self) -> Option<Vec<u8>> {
        let mut last = self.last_password.lock();
        let Some(file) = &self.file else { return last.clone() };
        let parse = |text: String| {
            if self.file_has_url {
                Ok(DbTarget::parse(&text, Some(""))?.password())
            } else {
                Ok(Some(text.into_bytes()))
            }
        };
        match secret::read_secret(file).and_then(parse) {
            Ok(new) => *last = new.or_else(|| last.take()),
            Err(problem) => log::warn!("the password stays as it was, its file cannot be used: {problem}"),
        }
        last.clone()
    }
}
