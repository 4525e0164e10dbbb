//! Secret texts, which no log line and no error shows.

use std::{fmt, fs, path::Path};

/// A secret text, such as a password. Its `Debug` shows `…`, so that no log line has the text.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Returns the secret text. Use it only where the text itself is needed, and never in a log line.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl<T: Into<String>> From<T> for Secret {
    fn from(text: T) -> Secret {
        Secret(text.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// Returns the secret in a file, without the line end behind it and without a byte order mark. Fails if the file is
/// empty; the error names the file.
pub(crate) fn read_secret(path: &Path) -> Result<String, String> {
    let content = fs::read_to_string(path).map_err(|error| format!("cannot read {path:?}: {error}"))?;
    let line = without_line_end(content.strip_prefix('\u{feff}').unwrap_or(&content));
    if line.is_empty() { Err(format!("{path:?} is empty")) } else { Ok(line.to_owned()) }
}

/// Returns a text without the line end that an editor or `echo` has put behind it. Keeps spaces, in which a password
/// may end.
pub(crate) fn without_line_end(text: &str) -> &str {
    text.trim_end_matches(['\r', '\n'])
}
