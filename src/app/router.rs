//! Method and path to a route. Pure.

use crate::{
    error::Error,
    http::{Method, percent_decode},
    metrics::Route as Label,
};

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// `GET /users`
    List,
    /// `POST /users`
    Create,
    /// `GET /users/:id`; the id as [`parse_id`] reads it.
    Find(Option<i64>),
    /// `PUT /users/:id`
    Update(Option<i64>),
    /// `PATCH /users/:id`
    Patch(Option<i64>),
    /// `DELETE /users/:id`
    Delete(Option<i64>),
    /// `POST /users/authenticate`
    Authenticate,
    /// `GET /metrics`
    Metrics,
    /// `GET /openapi.json`
    Description,
    /// `OPTIONS` of a path that exists; holds the value of `Allow`.
    Options(&'static str),
}

const USERS: &str = "GET, HEAD, POST, OPTIONS";
/// The methods of a user.
pub const USER: &str = "GET, HEAD, PUT, PATCH, DELETE, OPTIONS";
const AUTHENTICATE: &str = "POST, OPTIONS";
/// What `/metrics` and `/openapi.json` serve.
const READ_ONLY: &str = "GET, HEAD, OPTIONS";
/// The answer to `OPTIONS *`, which asks about the server as a whole.
const SERVER: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";

/// The route, else [`Error::NotFound`], [`Error::MethodNotAllowed`], or [`Error::NotImplemented`] where no path has such a
/// method. HEAD goes wherever GET goes.
pub fn route(method: Method, path: &str) -> Result<Route, Error> {
    match find(method, path) {
        Err(Error::NotFound) if method == Method::Other => {
            Err(Error::NotImplemented("the method is not served on any path"))
        }
        result => result,
    }
}

fn find(method: Method, path: &str) -> Result<Route, Error> {
    use Method::{Delete, Get, Head, Options, Patch, Post, Put};
    if path == "*" && method == Options {
        return Ok(Route::Options(SERVER));
    }
    let mut segments = path.strip_prefix('/').ok_or(Error::NotFound)?.split('/');
    let (first, second, more) = (segments.next(), segments.next(), segments.next());
    let first = first.and_then(percent_decode);
    let read_only = match first.as_deref() {
        Some("metrics") => Some(Route::Metrics),
        Some("openapi.json") => Some(Route::Description),
        _ => None,
    };
    if let (Some(route), None) = (read_only, second) {
        return match method {
            Get | Head => Ok(route),
            Options => Ok(Route::Options(READ_ONLY)),
            _ => Err(Error::MethodNotAllowed(READ_ONLY)),
        };
    }
    let is_users = first.is_some_and(|text| text == "users");
    if !is_users || more.is_some() {
        return Err(Error::NotFound);
    }
    let Some(segment) = second else {
        return match method {
            Get | Head => Ok(Route::List),
            Post => Ok(Route::Create),
            Options => Ok(Route::Options(USERS)),
            _ => Err(Error::MethodNotAllowed(USERS)),
        };
    };
    let Some(segment) = percent_decode(segment).filter(|text| !text.is_empty()) else {
        return Err(Error::NotFound);
    };
    if segment == "authenticate" {
        return match method {
            Post => Ok(Route::Authenticate),
            Options => Ok(Route::Options(AUTHENTICATE)),
            _ => Err(Error::MethodNotAllowed(AUTHENTICATE)),
        };
    }
    let id = parse_id(&segment);
    match method {
        Get | Head => Ok(Route::Find(id)),
        Put => Ok(Route::Update(id)),
        Patch => Ok(Route::Patch(id)),
        Delete => Ok(Route::Delete(id)),
        Options => Ok(Route::Options(USER)),
        _ => Err(Error::MethodNotAllowed(USER)),
    }
}

/// The route's label for figures.
pub fn label(path: &str) -> Label {
    // Nearly all requests: these two, told without a look at each segment.
    if path == "/users" {
        return Label::Users;
    }
    let id = path.strip_prefix("/users/").map(str::as_bytes);
    if id.is_some_and(|id| !id.is_empty() && id.iter().all(u8::is_ascii_digit)) {
        return Label::User;
    }
    if path.contains('%') {
        let decoded: Option<Vec<_>> = path.split('/').map(percent_decode).collect();
        // A segment with an encoded slash is one segment all the same.
        return decoded
            .map_or(Label::Other, |segments| label_of(segments.iter().skip(1).map(|text| &**text)));
    }
    label_of(path.split('/').skip(1))
}

fn label_of<'a>(mut segments: impl Iterator<Item = &'a str>) -> Label {
    match (segments.next(), segments.next(), segments.next()) {
        (Some("users"), None, None) => Label::Users,
        (Some("users"), Some("authenticate"), None) => Label::Authenticate,
        (Some("users"), Some(id), None) if !id.is_empty() => Label::User,
        (Some("livez"), None, None) => Label::Live,
        (Some("readyz"), None, None) => Label::Ready,
        (Some("metrics"), None, None) => Label::Metrics,
        (Some("openapi.json"), None, None) => Label::Description,
        _ => Label::Other,
    }
}

/// The id, where the text is the canonical decimal of a positive bigint; no other text names a user.
fn parse_id(text: &str) -> Option<i64> {
    let canonical = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| canonical)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels() {
        let rows = [
            ("/users", Label::Users),
            ("/%75sers", Label::Users),
            ("/users/1", Label::User),
            ("/users/a%2Fb", Label::User),
            ("/users/authenticate", Label::Authenticate),
            ("/users/%61uthenticate", Label::Authenticate),
            ("/livez", Label::Live),
            ("/readyz", Label::Ready),
            ("/metrics", Label::Metrics),
            ("/openapi.json", Label::Description),
            ("/users/", Label::Other),
            ("/users/1/x", Label::Other),
            ("/users/%", Label::Other),
            ("/metrics/", Label::Other),
            ("/", Label::Other),
            ("*", Label::Other),
            ("", Label::Other),
        ];
        for (path, expected) in rows {
            assert_eq!(label(path), expected, "{path}");
        }
    }

    #[test]
    fn routes() {
        let rows = [
            ("GET", "/users", Ok(Route::List)),
            ("HEAD", "/users", Ok(Route::List)),
            ("POST", "/users", Ok(Route::Create)),
            ("GET", "/%75sers", Ok(Route::List)),
            ("GET", "/users/42", Ok(Route::Find(Some(42)))),
            ("GET", "/users/%34%32", Ok(Route::Find(Some(42)))),
            ("PUT", "/users/9223372036854775807", Ok(Route::Update(Some(i64::MAX)))),
            ("PATCH", "/users/%34%32", Ok(Route::Patch(Some(42)))),
            ("PATCH", "/users/x", Ok(Route::Patch(None))),
            ("DELETE", "/users/9223372036854775808", Ok(Route::Delete(None))),
            ("GET", "/users/0", Ok(Route::Find(None))),
            ("GET", "/users/-1", Ok(Route::Find(None))),
            ("GET", "/users/+1", Ok(Route::Find(None))),
            ("GET", "/users/007", Ok(Route::Find(None))),
            ("GET", "/users/abc", Ok(Route::Find(None))),
            ("GET", "/users/%31%00", Ok(Route::Find(None))),
            ("GET", "/users/1%2F2", Ok(Route::Find(None))),
            ("POST", "/users/authenticate", Ok(Route::Authenticate)),
            ("OPTIONS", "/users", Ok(Route::Options(USERS))),
            ("OPTIONS", "/users/1", Ok(Route::Options(USER))),
            ("OPTIONS", "*", Ok(Route::Options(SERVER))),
            ("GET", "/metrics", Ok(Route::Metrics)),
            ("HEAD", "/metrics", Ok(Route::Metrics)),
            ("OPTIONS", "/metrics", Ok(Route::Options(READ_ONLY))),
            ("POST", "/metrics", Err(405)),
            ("GET", "/metrics/", Err(404)),
            ("GET", "/openapi.json", Ok(Route::Description)),
            ("HEAD", "/openapi.json", Ok(Route::Description)),
            ("OPTIONS", "/openapi.json", Ok(Route::Options(READ_ONLY))),
            ("POST", "/openapi.json", Err(405)),
            ("GET", "/openapi.json/", Err(404)),
            ("GET", "/users/authenticate", Err(405)),
            ("PATCH", "/users", Err(405)),
            ("DELETE", "/users", Err(405)),
            ("POST", "/users/1", Err(405)),
            ("get", "/users", Err(405)),
            ("GET", "/users/", Err(404)),
            ("GET", "/users/1/", Err(404)),
            ("GET", "/users/1/x", Err(404)),
            ("GET", "/users/%", Err(404)),
            ("GET", "/users/%ff", Err(404)),
            ("GET", "/", Err(404)),
            ("GET", "//users", Err(404)),
            ("GET", "/Users", Err(404)),
            ("GET", "*", Err(404)),
            ("GET", "", Err(404)),
            ("OPTIONS", "/other", Err(404)),
            ("PATCH", "/other", Err(404)),
            ("BREW", "/other", Err(501)),
            ("CONNECT", "example.com:443", Err(501)),
        ];
        for (method, path, expected) in rows {
            let found = route(method.into(), path).map_err(|error| error.answer().status);
            assert_eq!(found, expected, "{method} {path}");
        }
    }
}
