//! Why a request is refused before it is queued: the labels of a figure, and the texts of the log.

/// Why a request is refused before it is queued, as a figure is labelled by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Reason {
    BadRequest,
    RequestTimeout,
    ContentTooLarge,
    UriTooLong,
    HeadTooLarge,
    ExpectationFailed,
    VersionNotSupported,
    NotImplemented,
    /// All connections are taken.
    TooManyConnections,
    /// Too many requests wait for workers that are stuck.
    TooManyRequests,
    /// Its time was up.
    Unanswered,
    /// Too many passwords wait to be hashed.
    TooManyHashes,
    /// The memory that requests may hold is used up.
    NoMemory,
    /// The server stopped.
    Stopped,
    /// The server cannot serve any more.
    Broken,
}

impl Reason {
    /// Each of them, in the order of their numbers (`reason as usize`).
    pub const ALL: [Reason; 15] = [
        Reason::BadRequest,
        Reason::RequestTimeout,
        Reason::ContentTooLarge,
        Reason::UriTooLong,
        Reason::HeadTooLarge,
        Reason::ExpectationFailed,
        Reason::VersionNotSupported,
        Reason::NotImplemented,
        Reason::TooManyConnections,
        Reason::TooManyRequests,
        Reason::Unanswered,
        Reason::TooManyHashes,
        Reason::NoMemory,
        Reason::Stopped,
        Reason::Broken,
    ];

    /// The label.
    pub fn name(self) -> &'static str {
        match self {
            Reason::BadRequest => "bad_request",
            Reason::RequestTimeout => "request_timeout",
            Reason::ContentTooLarge => "content_too_large",
            Reason::UriTooLong => "uri_too_long",
            Reason::HeadTooLarge => "head_too_large",
            Reason::ExpectationFailed => "expectation_failed",
            Reason::VersionNotSupported => "version_not_supported",
            Reason::NotImplemented => "not_implemented",
            Reason::TooManyConnections => "too_many_connections",
            Reason::TooManyRequests => "too_many_requests",
            Reason::Unanswered => "not_answered_in_time",
            Reason::TooManyHashes => "too_many_hashes",
            Reason::NoMemory => "no_memory",
            Reason::Stopped => "stopped",
            Reason::Broken => "broken",
        }
    }

    /// What the log says of it.
    pub fn text(self) -> &'static str {
        match self {
            Reason::TooManyConnections => "too many connections",
            Reason::TooManyRequests => "too many requests wait for the workers",
            Reason::Unanswered => "a request was not answered in time",
            Reason::TooManyHashes => "too many passwords wait to be hashed",
            Reason::NoMemory => "the memory for requests is used up",
            Reason::Stopped => "the server stopped",
            Reason::Broken => "the stream to tiny_http is broken",
            other => other.name(),
        }
    }
}
