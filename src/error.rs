//! What can go wrong with a request, and the ONE table that says how it is answered.
//!
//! Owns every status and text of a refusal. Knows nothing of sockets, of the database's client and its SQLSTATEs, or of
//! JSON Schema. The answer never holds what the database said; `Error::log` does.

use crate::{http::Response, reason::Reason};
use serde::Serialize;
use std::{borrow::Cow, fmt};

/// The message of a violation whose value has a NUL in it, which PostgreSQL cannot store.
pub(crate) const HAS_NUL: &str = "must not contain NUL (U+0000)";

/// One thing that is wrong with a body or a query string.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Where: a JSON pointer into the body (`/email`), or the same to a query parameter (`/perPage`).
    pub path: String,
    /// The rule that does not hold, in the words of JSON Schema (`required`, `format`, …).
    pub keyword: String,
    /// For a person. Never repeats the offending value, which may be a password.
    pub message: String,
}

/// Why a request is not answered with success.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Error {
    /// No such route or no such record.
    NotFound,
    /// The path exists, the method does not; holds the value of `Allow`.
    MethodNotAllowed(String),
    /// The body sets fields that may not be mass assigned; holds their names.
    MassAssignment(Vec<String>),
    /// The body is not JSON, or not an object; holds what is wrong.
    InvalidJson(String),
    /// The body fails its JSON Schema before the handler (declarative variant).
    Invalid(Vec<Violation>),
    /// The body fails inside the handler (parser variant, and the values of a PUT).
    Unprocessable(Vec<Violation>),
    /// The query string asks for something that cannot be.
    InvalidQuery(Vec<Violation>),
    /// A body of a media type that is certainly not JSON, a patch of a kind that is not served, or a coded body.
    UnsupportedMediaType {
        /// The media types that are served here.
        accepted: &'static str,
        /// It is a patch.
        patch: bool,
        /// It has a content coding.
        coded: bool,
    },
    /// The password is not this user's, or there is no such user.
    InvalidCredentials,
    /// `API_TOKEN` is set and the request does not carry it.
    Unauthorized,
    /// A browser sent an unsafe request from another site.
    CrossOrigin,
    /// Without a token, the request names a host that a stranger may own and that is not this service's.
    HostNotAllowed,
    /// A unique violation (SQLSTATE 23505).
    AlreadyExists,
    /// A create has the key of an earlier one, and another body.
    KeyReused,
    /// A create has the key of an earlier one, whose user was deleted since.
    Gone,
    /// The record is not in a state that the request allows (`If-Match`, `If-None-Match`).
    PreconditionFailed,
    /// Any other error of a query or a connection.
    Database {
        /// The statement, without its parameters; empty when there was none yet.
        sql: &'static str,
        /// What the database or the connection said.
        message: String,
        /// The SQLSTATE; empty where the connection broke.
        code: String,
    },
    /// A lock was not granted, or a concurrent transaction took precedence. Nothing was changed: the same may succeed
    /// later.
    Contended,
    /// Something did not become free, or did not finish, in time, or the database cannot do it for now; holds what.
    Unavailable(Cow<'static, str>),
    /// The service cannot take the request now; holds why.
    Busy(Reason),
    /// A relation that was not loaded was accessed while that is prevented; holds its name.
    LazyLoadingViolation(&'static str),
    /// A panic, or an invariant that does not hold; holds what is known of it.
    Internal(String),
    /// The bytes, or a header field, are not the HTTP that is served here; holds the rule that they break.
    BadRequest(&'static str),
    /// The head or the body did not arrive in time.
    RequestTimeout,
    /// The body is longer than allowed.
    ContentTooLarge,
    /// The request line is longer than allowed.
    UriTooLong,
    /// `Expect` asks for something other than `100-continue`.
    ExpectationFailed,
    /// A peer has sent too many wrong passwords for an account; holds the seconds after which it may retry.
    TooManyAttempts {
        /// Seconds.
        retry_after: u64,
    },
    /// The header fields are longer, or more, than allowed.
    HeadTooLarge,
    /// An HTTP version that is not served here.
    VersionNotSupported,
    /// A method or a transfer coding that is not served on any path; holds which.
    NotImplemented(&'static str),
}

impl Error {
    /// The answer: status, body, and a header where the status wants one. This is the table.
    pub fn answer(&self) -> Response {
        let fixed = |status, text| Response::json(status, &Body::text(text));
        let explained = |status, text, message| {
            Response::json(status, &Body { message: Some(message), ..Body::text(text) })
        };
        let invalid = |status, error, violations| {
            Response::json(status, &Body { error, errors: Some(violations), message: None })
        };
        match self {
            Error::NotFound => fixed(404, "Not found"),
            Error::MethodNotAllowed(allow) => fixed(405, "Method not allowed").with("Allow", allow.clone()),
            Error::MassAssignment(fields) => fixed(422, &mass_assignment(fields)),
            Error::InvalidJson(problem) => explained(400, "Invalid JSON", problem),
            Error::Invalid(violations) => invalid(400, Some("Validation failed"), violations),
            Error::Unprocessable(violations) => invalid(422, None, violations),
            Error::InvalidQuery(violations) => invalid(400, Some("Invalid query"), violations),
            // By Accept-Encoding a client knows that the coding is at fault (RFC 9110, 12.5.3).
            Error::UnsupportedMediaType { accepted, patch, coded } => {
                let answer = fixed(415, "Unsupported media type").with("Accept", *accepted);
                let answer = if *patch { answer.with("Accept-Patch", *accepted) } else { answer };
                if *coded { answer.with("Accept-Encoding", "identity") } else { answer }
            }
            // A 401 has to name a scheme (RFC 9110, 15.5.2). This one is private: browsers ask for a password by
            // themselves where they know the scheme.
            Error::InvalidCredentials => {
                fixed(401, "Invalid credentials").with("WWW-Authenticate", "Userd-Password")
            }
            Error::TooManyAttempts { retry_after } => {
                fixed(429, "Too many attempts").with("Retry-After", retry_after.to_string())
            }
            Error::Unauthorized => fixed(401, "Unauthorized").with("WWW-Authenticate", "Bearer"),
            Error::CrossOrigin => {
                explained(403, "Cross-origin request refused", "ALLOWED_ORIGINS does not name this origin")
            }
            Error::HostNotAllowed => {
                explained(403, "Host not allowed", "ALLOWED_HOSTS does not name this host")
            }
            Error::AlreadyExists => fixed(409, "Already exists"),
            Error::KeyReused => fixed(422, "Idempotency-Key reused"),
            Error::Gone => fixed(410, "Gone"),
            Error::PreconditionFailed => fixed(412, "Precondition failed"),
            Error::Database { .. } => fixed(500, "Database error"),
            Error::Unavailable(_) | Error::Busy(_) | Error::Contended => {
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

impl Error {
    /// Why the request was refused before it was queued, where this says so.
    pub(crate) fn reason(&self) -> Option<Reason> {
        Some(match self {
            Error::BadRequest(_) => Reason::BadRequest,
            Error::RequestTimeout => Reason::RequestTimeout,
            Error::ContentTooLarge => Reason::ContentTooLarge,
            Error::UriTooLong => Reason::UriTooLong,
            Error::HeadTooLarge => Reason::HeadTooLarge,
            Error::ExpectationFailed => Reason::ExpectationFailed,
            Error::VersionNotSupported => Reason::VersionNotSupported,
            Error::NotImplemented(_) => Reason::NotImplemented,
            Error::Busy(reason) => *reason,
            _ => return None,
        })
    }
}

/// The body of a refusal: `error`, and where they help `message` and `errors`.
#[derive(Default, Serialize)]
struct Body<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    errors: Option<&'a [Violation]>,
}

impl Body<'_> {
    fn text(error: &str) -> Body<'_> {
        Body { error: Some(error), ..Body::default() }
    }
}

fn mass_assignment(fields: &[String]) -> String {
    /// Enough to find the mistake; a body of thousands of fields is not repeated.
    const NAMED: usize = 10;
    let named: Vec<String> = fields
        .iter()
        .take(NAMED)
        .map(|field| format!("\"{}\"", field.chars().take(64).collect::<String>()))
        .collect();
    let more = match fields.len().saturating_sub(NAMED) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    format!("These fields may not be mass assigned: {}{more}", named.join(", "))
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::LazyLoadingViolation(relation) => {
                write!(f, "lazy loading violation: relation {relation} was accessed before it was loaded")
            }
            Error::Internal(what) => write!(f, "internal error: {what}"),
            Error::Unavailable(what) => write!(f, "unavailable: {what}"),
            Error::Busy(reason) => write!(f, "unavailable: {}", reason.text()),
            Error::Contended => {
                f.write_str("unavailable: locks or concurrent transactions blocked a statement")
            }
            Error::Database { message, .. } => write!(f, "database error: {message}"),
            Error::BadRequest(rule) => write!(f, "bad request: {rule}"),
            Error::NotImplemented(what) => write!(f, "not implemented: {what}"),
            other => f.write_str(other.answer().value()["error"].as_str().unwrap_or("Validation failed")),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_contract() {
        let rows: &[(Error, u16, &str)] = &[
            (Error::NotFound, 404, r#"{"error":"Not found"}"#),
            (Error::AlreadyExists, 409, r#"{"error":"Already exists"}"#),
            (Error::KeyReused, 422, r#"{"error":"Idempotency-Key reused"}"#),
            (Error::Gone, 410, r#"{"error":"Gone"}"#),
            (Error::PreconditionFailed, 412, r#"{"error":"Precondition failed"}"#),
            (
                Error::UnsupportedMediaType { accepted: "a/b", patch: true, coded: true },
                415,
                r#"{"error":"Unsupported media type"}"#,
            ),
            (
                Error::Database { sql: "select secret", message: "whatever".into(), code: String::new() },
                500,
                r#"{"error":"Database error"}"#,
            ),
            (Error::Contended, 503, r#"{"error":"Service unavailable"}"#),
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
        let text = mass_assignment(&fields);
        assert!(text.len() < 400 && text.ends_with("and 4990 more"), "{text}");
    }
}
