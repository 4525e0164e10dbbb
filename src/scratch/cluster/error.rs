//! What a cluster could not do, as one line.

use std::{fmt, io, path::Path};

/// Why there is no cluster: one line, made to be shown, that says what to do.
#[derive(Debug)]
pub struct ClusterError {
    pub(super) message: String,
    /// A file or directory was missing.
    pub(super) not_found: bool,
    /// The directory is another's at the moment.
    pub(super) busy: bool,
}

impl ClusterError {
    pub(super) fn new(message: impl AsRef<str>) -> ClusterError {
        ClusterError {
            message: message.as_ref().trim().replace(['\n', '\r'], " "),
            not_found: false,
            busy: false,
        }
    }

    pub(super) fn busy(message: String) -> ClusterError {
        ClusterError { busy: true, ..ClusterError::new(message) }
    }

    /// For `map_err`: "cannot `doing` `path`: reason".
    pub(super) fn io(doing: &str, path: &Path) -> impl Fn(io::Error) -> ClusterError {
        move |error| ClusterError {
            not_found: error.kind() == io::ErrorKind::NotFound,
            ..ClusterError::new(format!("cannot {doing} {}: {error}", path.display()))
        }
    }

    /// The same of a directory that cannot be made.
    pub(super) fn uncreatable(path: &Path) -> impl Fn(io::Error) -> ClusterError {
        move |error| {
            let mut error = ClusterError::io("create", path)(error);
            error.message.push_str("; choose another directory (--embedded=DIR)");
            error
        }
    }
}

impl fmt::Display for ClusterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ClusterError {}
