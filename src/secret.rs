//! Texts that no log and no error shows.

use std::{fmt, fs, path::Path};

/// A text that is never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Returns the text itself, for the one place that needs it.
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

/// Returns the text of a file without the end of its last line, and without a byte order mark. The error names the file.
pub(crate) fn read(path: &Path) -> Result<String, String> {
    let content = fs::read_to_string(path).map_err(|error| format!("cannot read {path:?}: {error}"))?;
    let line = without_line_end(content.strip_prefix('\u{feff}').unwrap_or(&content));
    if line.is_empty() { Err(format!("{path:?} is empty")) } else { Ok(line.to_owned()) }
}

/// Returns a text without the line end that an editor or `echo` has put behind it. A password may end in spaces.
pub(crate) fn without_line_end(text: &str) -> &str {
    text.trim_end_matches(['\r', '\n'])
}
