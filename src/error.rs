//! The errors of a request, with ONE table of the answers to them, and the errors of a server's start.
//!
//! Owns every status and text of a refusal. Knows nothing of HTTP's bytes, of sockets, of the database's client and
//! its SQLSTATEs, or of JSON Schema. No answer has a message of the database; `Error::log` logs it.

use serde::Serialize;
use std::{borrow::Cow, fmt, io};
use strum::{EnumMessage, IntoStaticStr, VariantNames};

/// The message about a value with a NUL character, which PostgreSQL cannot store.
pub(crate) const NUL_MESSAGE: &str = "must not contain NUL (U+0000)";

/// The media types that the body of a PATCH may have: JSON Merge Patch (RFC 7396), and plain JSON.
pub(crate) const PATCH_TYPES: &str = "application/merge-patch+json, application/json";

/// The message of the answer to a request whose `Host` is not allowed ([`Error::HostNotAllowed`]).
const HOST_ADVICE: &str = "ALLOWED_HOSTS does not name this host: add its name, without a port, as in \
                        ALLOWED_HOSTS=users.example,www.example";

/// A rule that a member of a body, or a parameter of a query, violates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// A JSON pointer to the member of the body (`/email`), or the name of the query parameter behind a slash
    /// (`/perPage`).
    pub path: String,
    /// The keyword of JSON Schema for the rule that is violated (`required`, `format`, …).
    pub keyword: String,
    /// A sentence for a person. The sentence never has the wrong value, which may be a password.
    pub message: String,
}

/// The reasons why a request fails.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Error {
    /// No route has the path, or the record does not exist.
    NotFound,
    /// No route has the path, because the path has a doubled slash, or a slash at its end. Holds a line that names the
    /// right path.
    SurplusSlash(String),
    /// The route of the path does not have the method. Holds the value of `Allow`.
    MethodNotAllowed(String),
    /// The body sets fields that clients may not set. Holds the names of these fields.
    MassAssignment(Vec<String>),
    /// The body is not a JSON object. Holds a description of the problem.
    InvalidJson(String),
    /// The body violates its JSON Schema, and the setting `VALIDATION` is `declarative`.
    InvalidBody(Vec<Violation>),
    /// The body violates its JSON Schema, and the setting `VALIDATION` is `parser`; or a PUT, whose body has no schema,
    /// has a value that its column cannot hold.
    Unprocessable(Vec<Violation>),
    /// The query has a parameter or a value that is not allowed.
    InvalidQuery(Vec<Violation>),
    /// The media type of the body is not accepted, or the body has a content coding.
    UnsupportedMediaType {
        /// True if the request is a PATCH.
        is_patch: bool,
        /// True if the body has a content coding.
        has_coding: bool,
    },
    /// The password is wrong, or no user has the e-mail address.
    InvalidCredentials,
    /// The service requires a token, and the request has no valid token.
    Unauthorized,
    /// The token of the request does not give the right to this route.
    Forbidden,
    /// A browser sent a change for a page of another origin, and `ALLOWED_ORIGINS` does not allow that origin.
    CrossOrigin,
    /// The service has no token, and the `Host` of the request may be the name of another site: by DNS rebinding, a
    /// page of that site could send the request.
    HostNotAllowed,
    /// Another record has a value that must be unique, as an e-mail address (SQLSTATE 23505).
    AlreadyExists,
    /// The create has the `Idempotency-Key` of an earlier create with another body.
    IdempotencyKeyReused,
    /// The create has the `Idempotency-Key` of an earlier create whose user was deleted since.
    CreatedUserDeleted,
    /// The record is not in a state that the precondition allows (`If-Match`, `If-None-Match`).
    PreconditionFailed,
    /// The database refused a statement for a reason that has no variant here, or the connection to the database broke
    /// after a change was sent.
    Database {
        /// The statement without the values of its parameters; empty if no statement was sent yet.
        sql: &'static str,
        /// The message of the database, or of the broken connection.
        message: String,
        /// The SQLSTATE; empty if the connection broke.
        code: String,
    },
    /// The request cannot be executed now: a resource did not become free in time, the database did not answer in time,
    /// or the database takes no changes. Holds the reason, for the log.
    Unavailable(Cow<'static, str>),
    /// The service is too busy for the request. Holds the reason.
    Busy(BusyReason),
    /// A defect of userd: its code used a related record (as a user's credential) that was not loaded, although loading
    /// it on access is forbidden. Holds the name of the relation.
    LazyLoadingViolation(&'static str),
    /// A defect of userd: a panic, or an invariant that does not hold. Holds a description.
    Internal(String),
    /// The request breaks a rule of HTTP, or of the part of HTTP that userd serves. Holds the rule.
    BadRequest(&'static str),
    /// The head or the body did not arrive in time.
    RequestTimeout,
    /// The body is longer than `Limits` allow.
    ContentTooLarge,
    /// The request line is longer than `Limits` allow.
    UriTooLong,
    /// `Expect` asks for something other than `100-continue`.
    ExpectationFailed,
    /// The client has sent too many wrong passwords for an account. Holds the seconds after which it may retry.
    LockedOutForSeconds(u64),
    /// The head has too many bytes or too many fields.
    HeadTooLarge,
    /// userd does not serve the HTTP version of the request.
    VersionNotSupported,
    /// userd serves the method, or the transfer coding, on no path. Holds a message that names what is not served.
    NotImplemented(&'static str),
}

impl Error {
    /// Returns the answer to the error: status, body and headers. This `match` is the table of all answers to errors.
    pub(crate) fn refusal(&self) -> Refusal<'_> {
        let fixed = Refusal::new::<&'static str>;
        let explained = |status, error, message| Refusal { message: Some(message), ..fixed(status, error) };
        let invalid =
            |status, error, violations| Refusal { errors: Some(violations), ..fixed(status, error) };
        match self {
            Error::NotFound => fixed(404, "Not found"),
            Error::SurplusSlash(message) => explained(404, "Not found", message),
            Error::MethodNotAllowed(allow) => fixed(405, "Method not allowed").with("Allow", allow.clone()),
            Error::MassAssignment(fields) => Refusal::new(422, mass_assignment_message(fields)),
            Error::InvalidJson(problem) => explained(400, "Invalid JSON", problem),
            Error::InvalidBody(violations) => invalid(400, "Validation failed", violations),
            Error::Unprocessable(violations) => invalid(422, "", violations),
            Error::InvalidQuery(violations) => invalid(400, "Invalid query", violations),
            // Adds `Accept-Encoding` if the content coding is refused, so that the client does not blame the media type
            // (RFC 9110, 12.5.3).
            Error::UnsupportedMediaType { is_patch, has_coding } => {
                let message = match (has_coding, is_patch) {
                    (true, _) => "bodies with a Content-Encoding are not decoded: send plain JSON",
                    (_, true) => {
                        "the Content-Type of a patch is application/merge-patch+json or application/json"
                    }
                    _ => "uploads are not read: send JSON, as application/json",
                };
                let accepted = if *is_patch { PATCH_TYPES } else { "application/json" };
                let answer = explained(415, "Unsupported media type", message).with("Accept", accepted);
                let answer = if *is_patch { answer.with("Accept-Patch", accepted) } else { answer };
                if *has_coding { answer.with("Accept-Encoding", "identity") } else { answer }
            }
            // Names an authentication scheme, as a 401 has to (RFC 9110, 15.5.2). No browser knows this scheme: at a
            // known scheme such as Basic, the browser itself would ask for a password.
            Error::InvalidCredentials => {
                fixed(401, "Invalid credentials").with("WWW-Authenticate", "Userd-Password")
            }
            Error::LockedOutForSeconds(seconds) => {
                fixed(429, "Too many attempts").with("Retry-After", seconds.to_string())
            }
            Error::Unauthorized => fixed(401, "Unauthorized").with("WWW-Authenticate", "Bearer"),
            Error::Forbidden => fixed(403, "Forbidden"),
            Error::CrossOrigin => {
                explained(403, "Cross-origin request refused", "ALLOWED_ORIGINS does not name this origin")
            }
            Error::HostNotAllowed => explained(403, "Host not allowed", HOST_ADVICE),
            Error::AlreadyExists => fixed(409, "Already exists"),
            Error::IdempotencyKeyReused => fixed(422, "Idempotency-Key reused"),
            Error::CreatedUserDeleted => fixed(410, "Gone"),
            Error::PreconditionFailed => fixed(412, "Precondition failed"),
            Error::Database { .. } => fixed(500, "Database error"),
            Error::Unavailable(_) | Error::Busy(_) => {
                fixed(503, "Service unavailable").with("Retry-After", "1")
            }
            Error::LazyLoadingViolation(_) | Error::Internal(_) => fixed(500, "Internal server error"),
            Error::BadRequest(rule) => explained(400, "Bad request", rule),
            Error::RequestTimeout => fixed(408, "Request timeout"),
            Error::ContentTooLarge => fixed(413, "Content too large"),
            Error::UriTooLong => fixed(414, "URI too long"),
            Error::ExpectationFailed => fixed(417, "Expectation failed"),
            Error::HeadTooLarge => fixed(431, "Request header fields too large"),
            Error::VersionNotSupported => fixed(505, "HTTP version not supported"),
            Error::NotImplemented(what) => explained(501, "Not implemented", what),
        }
    }
}

/// The answer to an error: its status, the members of its JSON body, and its headers.
#[derive(Serialize)]
pub(crate) struct Refusal<'a> {
    #[serde(skip)]
    pub status: u16,
    /// The error in a few words. If empty, the body has no member `error`.
    #[serde(skip_serializing_if = "str::is_empty")]
    error: Cow<'static, str>,
    /// Tells in a sentence why the request is refused, or how to correct it.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    errors: Option<&'a [Violation]>,
    #[serde(skip)]
    pub headers: Vec<(&'static str, Cow<'static, str>)>,
}

impl Refusal<'_> {
    fn new<T: Into<Cow<'static, str>>>(status: u16, error: T) -> Self {
        Refusal { status, error: error.into(), message: None, errors: None, headers: Vec::new() }
    }

    fn with(mut self, header: &'static str, value: impl Into<Cow<'static, str>>) -> Self {
        self.headers.push((header, value.into()));
        self
    }
}

fn mass_assignment_message(fields: &[String]) -> String {
    /// The most fields that the message names: the answer must not repeat a body with thousands of fields.
    const MAX_NAMED_FIELDS: usize = 10;
    let named: Vec<String> =
        fields.iter().take(MAX_NAMED_FIELDS).map(|field| format!("\"{field:.64}\"")).collect();
    let more = fields.len().saturating_sub(MAX_NAMED_FIELDS);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("These fields may not be mass assigned: {}{more}", named.join(", "))
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::LazyLoadingViolation(relation) => write!(f, "lazy loading violation: {relation}"),
            Error::Internal(what) => write!(f, "internal error: {what}"),
            Error::Unavailable(what) => write!(f, "unavailable: {what}"),
            Error::Busy(reason) => write!(f, "unavailable: {}", reason.log_text()),
            Error::Database { message, .. } => write!(f, "database error: {message}"),
            Error::BadRequest(rule) => write!(f, "bad request: {rule}"),
            Error::NotImplemented(what) => write!(f, "not implemented: {what}"),
            Error::Unprocessable(_) => f.write_str("Validation failed"),
            other => f.write_str(&other.refusal().error),
        }
    }
}

impl std::error::Error for Error {}

/// The reasons why the service refuses or gives up a request although the request is valid. The metrics have the name
/// of a reason in `snake_case` as the label `reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumMessage, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum BusyReason {
    /// The number of connections has reached `MAX_CONNECTIONS`.
    #[strum(message = "too many connections")]
    TooManyConnections,
    /// The request was not answered within `REQUEST_TIMEOUT`.
    #[strum(message = "a request was not answered in time")]
    NotAnsweredInTime,
    /// Too many passwords wait to be hashed.
    #[strum(message = "too many passwords wait to be hashed")]
    TooManyHashes,
    /// The memory that requests may hold is used up.
    #[strum(message = "the memory for requests is used up")]
    NoMemory,
    /// The server stopped before the request was answered.
    #[strum(message = "the server stopped")]
    Stopped,
}

impl BusyReason {
    /// Returns the words for the reason in a line of the log.
    pub fn log_text(self) -> &'static str {
        self.get_message().unwrap_or_default()
    }
}

/// A setting that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: {problem}")]
pub struct ConfigError {
    /// The name of the environment variable, or the name of the field of [`Config`](crate::Config) if no variable sets
    /// it.
    pub variable: &'static str,
    /// Says what is wrong with the value. Never quotes a secret.
    pub problem: String,
}

/// The reasons why a server did not start. Each message is one line. After such an error no thread and no connection is
/// left.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting that cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No connection to the database was made within `db_connect_timeout`, or the server refused one for a reason that
    /// a retry would not change.
    #[error("cannot connect to the database: {0}")]
    Database(String),
    /// The database refused a statement, or the connection broke.
    #[error("database error: {0}")]
    Statement(String),
    /// A database for tests cannot be made: PostgreSQL's programs are missing, or its cluster does not start. Only
    /// [`ScratchDatabase`](crate::ScratchDatabase) and the test servers return this.
    #[error("{0}")]
    Cluster(String),
    /// A migration could not be applied, and has changed nothing.
    #[error("cannot migrate the database: {0}")]
    Migration(String),
    /// The database lacks these migrations, and `migrate` is off.
    #[error("the database {}", describe_missing_migrations(.0))]
    NotMigrated(Vec<String>),
    /// The server cannot listen on its address.
    #[error("cannot listen on {0}: {1}; {remedy}", remedy = listen_remedy(.0, .1))]
    Listen(String, io::Error),
    /// The operating system refused a thread or a socket, or allows the process too few file descriptors or threads.
    #[error("cannot start: {0}")]
    System(io::Error),
}

/// Returns the end of the sentence "the database …": which migrations it lacks, and the remedy.
fn describe_missing_migrations(migrations: &[String]) -> String {
    match migrations {
        [] => "has other migrations than this userd; `userd migrate` says which".to_owned(),
        _ => format!("lacks {}; `userd migrate` applies what is missing", migrations.join(", ")),
    }
}

/// The name of a socket that a supervisor has passed, in place of an address in [`StartError::Listen`].
pub(crate) const PASSED_SOCKET_NAME: &str = "a socket that was passed";

/// Returns what the operator can do if the server cannot listen on an address.
fn listen_remedy(address: &str, error: &io::Error) -> &'static str {
    use io::ErrorKind::{AddrInUse, PermissionDenied};
    match (error.kind(), address.starts_with("unix:")) {
        _ if address == PASSED_SOCKET_NAME => "pass sockets that listen, as ListenStream= of systemd does",
        (AddrInUse, _) => "end what listens there, or choose another HOST or PORT",
        (_, true) => "HOST names a socket in a directory that is there and may be written",
        (PermissionDenied, false) => "choose a PORT from 1024 on, or let systemd pass the socket",
        _ => "HOST has to be an address of this machine, without a scheme or a port",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_contract() {
        let rows: &[(Error, u16, &str)] = &[
            (Error::NotFound, 404, r#"{"error":"Not found"}"#),
            (Error::AlreadyExists, 409, r#"{"error":"Already exists"}"#),
            (Error::IdempotencyKeyReused, 422, r#"{"error":"Idempotency-Key reused"}"#),
            (Error::CreatedUserDeleted, 410, r#"{"error":"Gone"}"#),
            (Error::PreconditionFailed, 412, r#"{"error":"Precondition failed"}"#),
            (
                Error::UnsupportedMediaType { is_patch: true, has_coding: true },
                415,
                r#"{"error":"Unsupported media type","message":"bodies with a Content-Encoding are not decoded: send plain JSON"}"#,
            ),
            (
                Error::Database { sql: "select secret", message: "whatever".into(), code: String::new() },
                500,
                r#"{"error":"Database error"}"#,
            ),
            (Error::Unavailable("a lock".into()), 503, r#"{"error":"Service unavailable"}"#),
            (Error::LazyLoadingViolation("credential"), 500, r#"{"error":"Internal server error"}"#),
            (Error::Internal("panic".into()), 500, r#"{"error":"Internal server error"}"#),
            (
                Error::MassAssignment(vec!["id".into(), "a\"b".into()]),
                422,
                r#"{"error":"These fields may not be mass assigned: \"id\", \"a\"b\""}"#,
            ),
            (Error::Unprocessable(vec![]), 422, r#"{"errors":[]}"#),
        ];
        for (error, status, body) in rows {
            let answer = error.answer();
            assert_eq!(answer.status, *status);
            let text = str::from_utf8(&answer.body).unwrap().trim_end();
            if matches!(error, Error::MassAssignment(_)) {
                assert!(text.contains("id") && text.contains("mass assigned"));
            } else {
                assert_eq!(text, *body);
            }
        }
    }

    #[test]
    fn a_body_of_many_fields_is_not_repeated() {
        let fields: Vec<String> = (0..5000).map(|i| format!("field{i}")).collect();
        let text = mass_assignment_message(&fields);
        assert!(text.len() < 400 && text.ends_with("and 4990 more"), "{text}");
    }
}
