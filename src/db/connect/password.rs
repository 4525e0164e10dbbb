//! The password of each connect.

use crate::config::{Config, Database};
use crate::db::target::Target;
use crate::secret;
use parking_lot::Mutex;
use std::path::PathBuf;

/// The password, which may be in a file that changes.
pub struct Password {
    file: Option<PathBuf>,
    /// The text in the file is a connection string.
    is_url: bool,
    /// The password that the last connect used.
    last: Mutex<Option<Vec<u8>>>,
}

impl Password {
    /// Returns the password of these settings.
    pub fn new(config: &Config, target: &Target) -> Password {
        let is_url = matches!(config.database, Database::Url(_));
        Password { file: config.db_password_file.clone(), is_url, last: Mutex::new(of(target)) }
    }

    /// Returns the password. Reads it again if it is in a file.
    pub fn read(&self) -> Option<Vec<u8>> {
        let mut last = self.last.lock();
        let Some(file) = &self.file else { return last.clone() };
        let parse = |text: String| {
            if self.is_url { Ok(of(&Target::parse(&text, Some(""))?)) } else { Ok(Some(text.into_bytes())) }
        };
        match secret::read(file).and_then(parse) {
            Ok(new) => *last = new.or_else(|| last.take()),
            Err(problem) => log::warn!("the password stays as it was, its file cannot be used: {problem}"),
        }
        last.clone()
    }
}

fn of(target: &Target) -> Option<Vec<u8>> {
    target.hosts[0].get_password().map(<[u8]>::to_vec)
}
