//! Why the server refuses a request or gives it up, other than by an endpoint's answer: the values of a metric's label,
//! and the texts of the log.

/// Why a request is refused or given up.
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
    /// Each of them, in the order of their numbers (`reason as usize`), with its label and its text.
    pub const ALL: [(Reason, &str, &str); 15] = [
        (Reason::BadRequest, "bad_request", "bad request"),
        (Reason::RequestTimeout, "request_timeout", "request timeout"),
        (Reason::ContentTooLarge, "content_too_large", "content too large"),
        (Reason::UriTooLong, "uri_too_long", "URI too long"),
        (Reason::HeadTooLarge, "head_too_large", "head too large"),
        (Reason::ExpectationFailed, "expectation_failed", "expectation failed"),
        (Reason::VersionNotSupported, "version_not_supported", "version not supported"),
        (Reason::NotImplemented, "not_implemented", "not implemented"),
        (Reason::TooManyConnections, "too_many_connections", "too many connections"),
        (Reason::TooManyRequests, "too_many_requests", "too many requests wait for the workers"),
        (Reason::Unanswered, "not_answered_in_time", "a request was not answered in time"),
        (Reason::TooManyHashes, "too_many_hashes", "too many passwords wait to be hashed"),
        (Reason::NoMemory, "no_memory", "the memory for requests is used up"),
        (Reason::Stopped, "stopped", "the server stopped"),
        (Reason::Broken, "broken", "the stream to tiny_http is broken"),
    ];

    /// What the log says of it.
    pub fn text(self) -> &'static str {
        Reason::ALL[self as usize].2
    }
}
