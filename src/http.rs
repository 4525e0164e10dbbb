//! Requests and responses as values: methods, header look-up, query strings, JSON bodies.
//!
//! Knows no socket and no tiny_http; a [`Response`] is rendered into bytes here, and sent elsewhere.

use crate::{chunks::Chunks, error::Error, request_id::RequestId};
use serde::Serialize;
use serde_json::Value;
use std::{borrow::Cow, fmt, mem, net::IpAddr, sync::Mutex, time::SystemTime};

/// The methods that routes are told apart by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Method {
    Get,
    Head,
    Post,
    Put,
    Patch,
    Delete,
    Options,
    /// Any other; there is no route for it.
    Other,
}

impl From<&str> for Method {
    /// Method names are case-sensitive (RFC 9110, 9.1).
    fn from(name: &str) -> Method {
        match name {
            "GET" => Method::Get,
            "HEAD" => Method::Head,
            "POST" => Method::Post,
            "PUT" => Method::Put,
            "PATCH" => Method::Patch,
            "DELETE" => Method::Delete,
            "OPTIONS" => Method::Options,
            _ => Method::Other,
        }
    }
}

impl Method {
    /// The method's name for the log, of a request whose method is `name`: that name, if it is no longer than any that
    /// is in use.
    pub(crate) fn shown(self, name: &str) -> Cow<'static, str> {
        const LONGEST: usize = 16;
        match self {
            Method::Other if name.len() <= LONGEST => Cow::Owned(name.to_owned()),
            known => Cow::Borrowed(known.name()),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Method::Get => "GET",
            Method::Head => "HEAD",
            Method::Post => "POST",
            Method::Put => "PUT",
            Method::Patch => "PATCH",
            Method::Delete => "DELETE",
            Method::Options => "OPTIONS",
            Method::Other => "OTHER",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A complete request: the body has arrived, framing and limits are behind it.
#[derive(Clone)]
pub struct Request {
    /// The method.
    pub method: Method,
    /// Path and query as they were sent, percent-encoded: `/users?page=2`.
    pub target: String,
    /// Field names and values, in their order.
    pub headers: Vec<(String, String)>,
    /// The body, decoded from its framing.
    pub body: Vec<u8>,
    /// The client's address, behind a trusted proxy too. `None` on a Unix socket, and without a socket.
    pub peer: Option<IpAddr>,
}

/// Neither the values of the fields, of which one may be a token, nor the body, which may hold a password.
impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("method", &self.method)
            .field("target", &self.target)
            .field("headers", &self.headers.iter().map(|(name, _)| name).collect::<Vec<_>>())
            .field("body", &format_args!("{} bytes", self.body.len()))
            .field("peer", &self.peer)
            .finish()
    }
}

impl Request {
    /// `GET` of a target: `Request::get("/users?page=2")`.
    pub fn get(target: impl Into<String>) -> Request {
        Request::new(Method::Get, target, "")
    }

    /// `POST` of a JSON body:
    ///
    /// ```
    /// # use userd::Request;
    /// use serde_json::json;
    ///
    /// let request = Request::post("/users", &json!({"name": "Ada", "email": "ada@example.com"}));
    /// ```
    pub fn post(target: impl Into<String>, body: &Value) -> Request {
        Request::new(Method::Post, target, body.to_string())
    }

    /// `PUT` of a JSON body.
    pub fn put(target: impl Into<String>, body: &Value) -> Request {
        Request::new(Method::Put, target, body.to_string())
    }

    /// `PATCH` of a JSON body.
    pub fn patch(target: impl Into<String>, body: &Value) -> Request {
        Request::new(Method::Patch, target, body.to_string())
    }

    /// `DELETE` of a target.
    pub fn delete(target: impl Into<String>) -> Request {
        Request::new(Method::Delete, target, "")
    }

    /// The same request with one more header: `.with("Authorization", "Bearer …")`.
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Request {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// A request without headers, of any method and with any body.
    pub fn new(method: impl Into<Method>, target: impl Into<String>, body: impl Into<Vec<u8>>) -> Request {
        Request {
            method: method.into(),
            target: target.into(),
            headers: Vec::new(),
            body: body.into(),
            peer: None,
        }
    }

    /// The value of the first field of that name, whatever its case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut fields = self.headers.iter();
        let found = fields.find(|(field, _)| field.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    /// The path, without the query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// The parameters of the query string, decoded, in their order.
    pub fn query(&self) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
        let query = self.target.split_once('?').map_or("", |(_, query)| query);
        form_urlencoded::parse(query.as_bytes())
    }
}

/// How the connection goes on after a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Persistence {
    /// It stays open, and the client may rely on that for so many seconds.
    KeepAlive(u64),
    /// It is closed after this response.
    Close,
}

/// An answer: status, headers, body.
#[derive(Clone, PartialEq, Eq)]
pub struct Response {
    /// The HTTP status.
    pub status: u16,
    /// Headers beside `Content-Type`, `Content-Length`, `Date`, `X-Request-Id` and `Connection`, which rendering adds.
    pub headers: Vec<(&'static str, Cow<'static, str>)>,
    /// The body: one line of JSON with a newline at its end, or empty; of another kind where `headers` has a
    /// `Content-Type`.
    pub body: Vec<u8>,
    /// The rest of a long body.
    pub(crate) more: Option<Box<Chunks>>,
}

/// The body as text, since it is there to be read in a failed test.
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
    /// A body of one line of JSON.
    #[doc(hidden)]
    pub fn json(status: u16, value: &impl Serialize) -> Response {
        let mut body = Vec::with_capacity(256);
        serde_json::to_writer(&mut body, value).expect("our own types have string keys only");
        body.push(b'\n');
        Response { status, headers: Vec::new(), body, more: None }
    }

    /// A body of JSON that is there already.
    pub(crate) fn of_chunks(status: u16, body: Chunks) -> Response {
        match body.into_piece() {
            Ok(body) => Response { status, headers: Vec::new(), body, more: None },
            Err(more) => {
                Response { status, headers: Vec::new(), body: Vec::new(), more: Some(Box::new(more)) }
            }
        }
    }

    /// 204, without a body.
    #[doc(hidden)]
    pub fn no_content() -> Response {
        Response { status: 204, headers: Vec::new(), body: Vec::new(), more: None }
    }

    /// 304, without a body.
    pub(crate) fn not_modified() -> Response {
        Response { status: 304, ..Response::no_content() }
    }

    /// The body as JSON; `Null` where it is empty, as after a `DELETE`. For tests: every body that is served
    /// here is JSON.
    pub fn value(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The value of the first header of that name, whatever its case. `Content-Type`, `Content-Length`, `Date`,
    /// `X-Request-Id` and `Connection` are not among them: they are added on the way out.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        let found = headers.find(|(header, _)| header.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_ref())
    }

    /// The same response with one more header.
    pub(crate) fn with(mut self, name: &'static str, value: impl Into<Cow<'static, str>>) -> Response {
        self.headers.push((name, value.into()));
        self
    }

    /// The same response with its body in one piece.
    pub(crate) fn contiguous(mut self) -> Response {
        if let Some(mut more) = self.more.take() {
            more.push_front(mem::take(&mut self.body));
            self.body = more.into_vec();
        }
        self
    }

    /// The memory that its body takes.
    pub(crate) fn memory(&self) -> usize {
        self.body.capacity() + self.more.as_ref().map_or(0, |more| more.memory())
    }

    /// The bytes on the wire, as the answer to the request of that id. `head_only` leaves the body out and keeps its
    /// length, as HEAD wants it. A short body is copied behind its head; a long one is not.
    pub(crate) fn into_chunks(self, persistence: Persistence, head_only: bool, id: &RequestId) -> Chunks {
        const SHORT: usize = 16 << 10;
        if self.body.len() <= SHORT && self.more.is_none() {
            return Chunks::from(self.render(persistence, head_only, id));
        }
        let head = self.render(persistence, true, id);
        if head_only {
            return Chunks::from(head);
        }
        let mut chunks = self.more.map_or_else(Chunks::default, |more| *more);
        chunks.push_front(self.body);
        chunks.push_front(head);
        chunks
    }

    /// The same in one piece.
    pub(crate) fn render(&self, persistence: Persistence, head_only: bool, id: &RequestId) -> Vec<u8> {
        let body = if head_only { 0 } else { self.body.len() };
        let mut out = Vec::with_capacity(320 + body);
        let mut number = itoa::Buffer::new();
        out.extend_from_slice(b"HTTP/1.1 ");
        out.extend_from_slice(number.format(self.status).as_bytes());
        out.push(b' ');
        out.extend_from_slice(reason(self.status).as_bytes());
        out.extend_from_slice(b"\r\nDate: ");
        push_date(&mut out);
        out.extend_from_slice(b"\r\nX-Request-Id: ");
        id.write(&mut out);
        if !matches!(self.status, 204 | 304) {
            if self.headers.iter().all(|(name, _)| *name != "Content-Type") {
                out.extend_from_slice(b"\r\nContent-Type: application/json");
            }
            out.extend_from_slice(b"\r\nContent-Length: ");
            let length = self.body.len() + self.more.as_ref().map_or(0, |more| more.len());
            out.extend_from_slice(number.format(length).as_bytes());
        }
        for (name, value) in &self.headers {
            out.extend_from_slice(b"\r\n");
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b": ");
            out.extend_from_slice(value.as_bytes());
        }
        match persistence {
            Persistence::KeepAlive(seconds) => {
                // Clients of HTTP/1.0 need the first one, and Connection has to name the second one (RFC 9110, 7.6.1).
                out.extend_from_slice(b"\r\nConnection: keep-alive\r\nKeep-Alive: timeout=");
                out.extend_from_slice(number.format(seconds).as_bytes());
                out.extend_from_slice(b"\r\n\r\n");
            }
            Persistence::Close => out.extend_from_slice(b"\r\nConnection: close\r\n\r\n"),
        }
        if !head_only {
            out.extend_from_slice(&self.body);
        }
        out
    }
}

impl Error {
    /// The answer, logged where the client is not told what went wrong; with the id of the request, where it has one.
    pub(crate) fn into_response(self, request: Option<&RequestId>) -> Response {
        self.log(request);
        Response::from(&self)
    }
}

impl From<&Error> for Response {
    fn from(error: &Error) -> Response {
        let answer = error.answer();
        Response { headers: answer.headers, ..Response::json(answer.status, &answer.body) }
    }
}

/// Percent-decoding; `None` where an escape is cut short, not hexadecimal, or the result not UTF-8.
pub fn percent_decode(text: &str) -> Option<Cow<'_, str>> {
    let is_escape = |rest: &str| rest.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    if !text.split('%').skip(1).all(is_escape) {
        return None;
    }
    percent_encoding::percent_decode_str(text).decode_utf8().ok()
}

/// Formatting a date costs more than the rest of a head, so it is done once a second.
fn push_date(out: &mut Vec<u8>) {
    static DATE: Mutex<(u64, String)> = Mutex::new((0, String::new()));
    let now = SystemTime::now();
    let second = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut date = DATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if date.0 != second {
        *date = (second, httpdate::fmt_http_date(now));
    }
    out.extend_from_slice(date.1.as_bytes());
}

fn reason(status: u16) -> &'static str {
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
        500 => "Internal Server Error",
        429 => "Too Many Requests",
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
        let id = RequestId::given(b"an-id").unwrap();
        let response = Response::json(200, &serde_json::json!({"a": 1}));
        let text = String::from_utf8(response.render(Persistence::KeepAlive(59), false, &id)).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\nDate: "), "{text}");
        assert!(text.contains(" GMT\r\nX-Request-Id: an-id\r\n"), "{text}");
        assert!(
            text.ends_with(
                "Content-Type: application/json\r\nContent-Length: 8\r\nConnection: keep-alive\r\n\
                 Keep-Alive: timeout=59\r\n\r\n{\"a\":1}\n"
            ),
            "{text}"
        );
        let head = String::from_utf8(response.render(Persistence::Close, true, &id)).unwrap();
        assert!(head.ends_with("Content-Length: 8\r\nConnection: close\r\n\r\n"), "{head}");
        let empty = Response::no_content().render(Persistence::KeepAlive(0), false, &id);
        let empty = String::from_utf8(empty).unwrap();
        assert!(!empty.contains("Content-"), "{empty}");
        assert!(empty.ends_with("\r\nConnection: keep-alive\r\nKeep-Alive: timeout=0\r\n\r\n"), "{empty}");
        let unmodified = Response::not_modified().with("ETag", "\"1-0\"");
        let unmodified = String::from_utf8(unmodified.render(Persistence::Close, false, &id)).unwrap();
        assert!(unmodified.starts_with("HTTP/1.1 304 Not Modified\r\nDate: "), "{unmodified}");
        assert!(
            unmodified.ends_with("\r\nX-Request-Id: an-id\r\nETag: \"1-0\"\r\nConnection: close\r\n\r\n"),
            "{unmodified}"
        );
    }

    #[test]
    fn every_refusal_has_a_reason_phrase() {
        let errors = [
            Error::NotFound,
            Error::MethodNotAllowed("GET"),
            Error::MassAssignment(vec![]),
            Error::UnsupportedMediaType { accepted: "", patch: false, coded: false },
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
            assert_ne!(reason(Response::from(&error).status), "", "{error:?}");
        }
    }

    #[test]
    fn queries() {
        let request = Request::new("GET", "/users?page=2&&perPage=%31%35&x&y=a+b&z=%zz", "");
        let pairs: Vec<_> = request.query().map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(pairs, ["page=2", "perPage=15", "x=", "y=a b", "z=%zz"]);
        assert_eq!(request.path(), "/users");
    }

    #[test]
    fn percent_decoding() {
        let rows = [
            ("abc", Some("abc")),
            ("%34%32", Some("42")),
            ("%4", None),
            ("%", None),
            ("%+1", None),
            ("%zz", None),
            ("%ff", None),
            ("%c3%a9", Some("é")),
            ("%2531", Some("%31")),
            ("a%", None),
            ("%4%31", None),
            ("%é", None),
        ];
        for (text, expected) in rows {
            assert_eq!(percent_decode(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn requests_are_shown_without_secrets() {
        let request = Request::post("/users/authenticate", &serde_json::json!({"password": "hunter2"}));
        let shown = format!("{:?}", request.with("Authorization", "Bearer t0ken"));
        assert!(shown.contains("Authorization") && shown.contains("22 bytes"), "{shown}");
        assert!(!shown.contains("hunter2") && !shown.contains("t0ken"), "{shown}");
    }
}
