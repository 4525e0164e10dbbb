//! The password that connects use. A file with it is read anew for each connect, so that a password can be changed.

use crate::config::{Config, Database};
use crate::db::target::Target;
use crate::secret;
use parking_lot::Mutex;
use std::path::PathBuf;

/// The password of the database, and the file that it is in, if it is in one.
pub struct Password {
    file: Option<PathBuf>,
    /// True if the file holds a connection string, not only the password.
    file_has_url: bool,
    /// The password that the last connect used.
    last: Mutex<Option<Vec<u8>>>,
}

impl Password {
    /// Returns the password that the settings name.
    pub fn new(config: &Config, target: &Target) -> Password {
        let file_has_url = matches!(config.database, Database::Url(_));
        Password { file: config.db_password_file.clone(), file_has_url, last: Mutex::new(target.password()) }
    }

    /// Returns the password. Reads its file again if it is in a file; if that fails, returns the last password.
    pub fn read(&self) -> Option<Vec<u8>> {
        let mut last = self.last.lock();
        let Some(file) = &self.file else { return last.clone() };
        let parse = |text: String| {
            if self.file_has_url {
                Ok(Target::parse(&text, Some(""))?.password())
            } else {
                Ok(Some(text.into_bytes()))
            }
        };
        match secret::read(file).and_then(parse) {
            Ok(new) => *last = new.or_else(|| last.take()),
            Err(problem) => log::warn!("the password stays as it was, its file cannot be used: {problem}"),
        }
        last.clone()
    }
}
