//! An answer as a value, and its bytes for the socket. Makes the answer to an [`Error`], and the log line about it.

use super::{RequestId, log_line};
use crate::error::Error;
use httpdate::HttpDate;
use serde::Serialize;
use serde_json::Value;
use std::io::{self, Write};
use std::{borrow::Cow, fmt, time::SystemTime};

/// The bytes that are first allocated for a head, and for a body: most heads, and bodies with one user, are shorter.
const INITIAL_BUFFER_BYTES: usize = 512;

/// The most bytes of a body that is copied behind the head. The head is inserted before a longer body instead, because
/// a copy would need the memory of that body twice.
const MAX_COPIED_BODY_BYTES: usize = 4 << 10;

/// Tells whether the connection stays open after a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Persistence {
    /// The connection stays open, and the client may rely on that for this many seconds.
    KeepAliveSeconds(u64),
    /// The connection is closed.
    Close,
}

/// An answer: status, headers, body.
#[derive(Clone, PartialEq, Eq)]
pub struct Response {
    /// The HTTP status.
    pub status: u16,
    /// The header fields that are particular to this answer. When the server sends the answer, it adds `Date`,
    /// `X-Request-Id`, `X-Content-Type-Options`, `Content-Length` and `Connection`, and a `Content-Type` and a
    /// `Cache-Control` if `headers` has none.
    pub headers: Vec<(&'static str, Cow<'static, str>)>,
    /// The body: empty, or of the `Content-Type` in `headers`, or else one line of JSON with a newline at its end.
    pub body: Vec<u8>,
}

/// Shows the body as text, for failed tests.
impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Response")
            .field("status", &self.status)
            .field("headers", &self.headers)
            .field("body", &String::from_utf8_lossy(&self.body))
            .finish()
    }
}

impl Response {
    /// Returns an answer whose body is one line of JSON.
    pub(crate) fn json(status: u16, value: &impl Serialize) -> Response {
        let mut body = Vec::with_capacity(INITIAL_BUFFER_BYTES);
        serde_json::to_writer(&mut body, value).expect("our own types have string keys only");
        body.push(b'\n');
        if body.len() > MAX_COPIED_BODY_BYTES {
            body.shrink_to_fit();
        }
        Response { status, headers: Vec::new(), body }
    }

    /// Returns an answer with status 204 and no body.
    pub(crate) fn no_content() -> Response {
        Response { status: 204, headers: Vec::new(), body: Vec::new() }
    }

    /// Returns the body as JSON, for tests. Returns `Null` if the body is empty, as after a `DELETE`, or is not JSON.
    pub fn value(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Returns the value of the first of [`headers`](Response::headers) with this name (case-insensitive). Does not
    /// find fields that the server adds when it sends the answer, such as `Date`.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        let found = headers.find(|(header, _)| header.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_ref())
    }

    /// Adds a header.
    pub(crate) fn with(mut self, header: &'static str, value: impl Into<Cow<'static, str>>) -> Response {
        self.headers.push((header, value.into()));
        self
    }

    /// Returns how many bytes of memory the body takes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.body.capacity()
    }

    /// Returns the bytes for the socket, as the answer to the request with this id. If `head_only` is true, leaves out
    /// the body but keeps its `Content-Length`, as HEAD requires.
    pub(crate) fn into_bytes(self, persistence: Persistence, head_only: bool, id: &RequestId) -> Vec<u8> {
        let mut head = Vec::with_capacity(INITIAL_BUFFER_BYTES + self.body.len().min(MAX_COPIED_BODY_BYTES));
        self.write_head(persistence, id, &mut head).expect("a Vec takes all");
        if head_only || self.body.len() <= MAX_COPIED_BODY_BYTES {
            head.extend_from_slice(if head_only { &[] } else { &self.body });
            return head;
        }
        let mut bytes = self.body;
        bytes.reserve_exact(head.len());
        bytes.splice(..0, head);
        bytes
    }

    fn write_head(&self, persistence: Persistence, id: &RequestId, head: &mut Vec<u8>) -> io::Result<()> {
        let (status, now) = (self.status, HttpDate::from(SystemTime::now()));
        write!(head, "HTTP/1.1 {status} {}\r\nDate: {now}\r\nX-Request-Id: {id}\r\n", reason_phrase(status))?;
        head.extend_from_slice(b"X-Content-Type-Options: nosniff\r\n");
        let has = |name| self.headers.iter().any(|(given, _)| *given == name);
        if !has("Cache-Control") {
            head.extend_from_slice(b"Cache-Control: private, no-cache\r\n");
        }
        if !matches!(status, 204 | 304) {
            if !has("Content-Type") {
                head.extend_from_slice(b"Content-Type: application/json\r\n");
            }
            write!(head, "Content-Length: {}\r\n", self.body.len())?;
        }
        for (name, value) in &self.headers {
            write!(head, "{name}: {value}\r\n")?;
        }
        match persistence {
            // Sends `Connection: keep-alive`, too: clients of HTTP/1.0 need it, and Connection has to name the field
            // Keep-Alive (RFC 9110, 7.6.1).
            Persistence::KeepAliveSeconds(seconds) => {
                write!(head, "Connection: keep-alive\r\nKeep-Alive: timeout={seconds}\r\n\r\n")
            }
            Persistence::Close => write!(head, "Connection: close\r\n\r\n"),
        }
    }
}

impl Error {
    /// Returns the answer to this error. Logs nothing.
    pub fn answer(&self) -> Response {
        let refusal = self.refusal();
        Response { headers: refusal.headers.clone(), ..Response::json(refusal.status, &refusal) }
    }

    /// Logs the reason of a server error, which the answer does not tell: the SQL and the database's message, a panic,
    /// a lock, a wait that took too long. The line has the `id` of the request, if there is one. Logs no client error,
    /// because the log line about the request has its status.
    pub(crate) fn log(&self, id: Option<&RequestId>) {
        use log::Level::{Error as Severe, Warn};
        match self {
            Error::Database { sql: "", message, .. } => {
                log_line(Severe, id, format_args!("database error: {message}"));
            }
            Error::Database { sql, message, .. } => {
                // Makes the SQL one line, and removes its comments.
                let lines = sql.lines().map(|line| line.split("--").next().unwrap_or_default().trim());
                let sql = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
                log_line(Severe, id, format_args!("database error: {message}; SQL: {sql}"));
            }
            Error::LazyLoadingViolation(_) | Error::Internal(_) => {
                log_line(Severe, id, format_args!("{self}"));
            }
            Error::Unavailable(_) | Error::Busy(_) => log_line(Warn, id, format_args!("{self}")),
            _ => {}
        }
    }

    /// Logs the error as [`Error::log`] does, and returns the answer to it.
    pub(crate) fn log_and_answer(self, id: Option<&RequestId>) -> Response {
        self.log(id);
        self.answer()
    }
}

/// Returns the reason phrase of a status: `Not Found` for 404.
pub fn reason_phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        204 => "No Content",
        304 => "Not Modified",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        412 => "Precondition Failed",
        413 => "Content Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        417 => "Expectation Failed",
        422 => "Unprocessable Content",
        431 => "Request Header Fields Too Large",
        410 => "Gone",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        505 => "HTTP Version Not Supported",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_shown_as_text() {
        let response = Response::json(200, &serde_json::json!({"name": "Ada"}));
        let shown = format!("{response:?}");
        assert!(shown.contains(r#"{\"name\":\"Ada\"}"#), "{shown}");
    }

    #[test]
    fn rendering() {
        let id = RequestId::from_client(b"an-id").unwrap();
        let response = Response::json(200, &serde_json::json!({"a": 1}));
        let text = response.clone().into_bytes(Persistence::KeepAliveSeconds(59), false, &id);
        let text = String::from_utf8(text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\nDate: "), "{text}");
        assert!(text.contains(" GMT\r\nX-Request-Id: an-id\r\nX-Content-Type-Options: nosniff\r\nCache-Control: private, no-cache\r\n"), "{text}");
        assert!(
            text.ends_with(
                "Content-Type: application/json\r\nContent-Length: 8\r\nConnection: keep-alive\r\n\
                 Keep-Alive: timeout=59\r\n\r\n{\"a\":1}\n"
            ),
            "{text}"
        );
        let head = String::from_utf8(response.into_bytes(Persistence::Close, true, &id)).unwrap();
        assert!(head.ends_with("Content-Length: 8\r\nConnection: close\r\n\r\n"), "{head}");
        let empty = Response::no_content().into_bytes(Persistence::KeepAliveSeconds(0), false, &id);
        let empty = String::from_utf8(empty).unwrap();
        assert!(!empty.contains("\r\nContent-"), "{empty}");
        assert!(empty.ends_with("\r\nConnection: keep-alive\r\nKeep-Alive: timeout=0\r\n\r\n"), "{empty}");
        let unmodified = Response { status: 304, ..Response::no_content() }.with("ETag", "\"1-0\"");
        let unmodified = String::from_utf8(unmodified.into_bytes(Persistence::Close, false, &id)).unwrap();
        assert!(unmodified.starts_with("HTTP/1.1 304 Not Modified\r\nDate: "), "{unmodified}");
        assert!(
            unmodified
                .ends_with("Cache-Control: private, no-cache\r\nETag: \"1-0\"\r\nConnection: close\r\n\r\n"),
            "{unmodified}"
        );
        let unstored = Response::json(200, &1).with("Cache-Control", "no-store");
        let unstored = String::from_utf8(unstored.into_bytes(Persistence::Close, false, &id)).unwrap();
        assert_eq!(unstored.matches("Cache-Control").count(), 1, "{unstored}");
    }

    #[test]
    fn every_refusal_has_a_reason_phrase() {
        let errors = [
            Error::NotFound,
            Error::MethodNotAllowed("GET".to_owned()),
            Error::MassAssignment(vec![]),
            Error::UnsupportedMediaType { is_patch: false, has_coding: false },
            Error::Unauthorized,
            Error::CrossOrigin,
            Error::HostNotAllowed,
            Error::AlreadyExists,
            Error::PreconditionFailed,
            Error::Unavailable("".into()),
            Error::BadRequest("rule"),
            Error::RequestTimeout,
            Error::ContentTooLarge,
            Error::UriTooLong,
            Error::ExpectationFailed,
            Error::HeadTooLarge,
            Error::VersionNotSupported,
            Error::NotImplemented("rule"),
        ];
        for error in errors {
            assert_ne!(reason_phrase(error.answer().status), "", "{error:?}");
        }
    }
}
