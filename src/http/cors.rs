//! The header fields that tell a browser what a page of another origin may do (CORS): whether the page may read an
//! answer, and which requests it may send.
//!
//! Pure. Without `ALLOWED_ORIGINS` no answer has such a field.

use super::{Method, Request, Response, is_http_token_byte};
use std::sync::Arc;

/// The header fields that a page of another origin may read, beside the few that browsers let every page read.
const EXPOSED_HEADERS: &str = "ETag, Link, Location, Retry-After, X-Request-Id, Idempotency-Replayed";
/// The seconds for which a browser may reuse the answer to a preflight: the most that Chromium accepts.
const PREFLIGHT_MAX_AGE_SECONDS: &str = "7200";
/// The field of a preflight in which the browser lists the header fields that the page wants to send.
const REQUEST_HEADERS_FIELD: &str = "Access-Control-Request-Headers";

/// The CORS fields that the answer to a request has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Cors {
    /// No field, because no origin is allowed (`ALLOWED_ORIGINS` is empty).
    #[default]
    Off,
    /// Only `Vary: Origin`: no page of an allowed origin sent the request. `Vary` keeps caches from giving the answer
    /// to such a page, which needs further fields.
    VaryOnly,
    /// The fields that let a page read the answer. Holds the entry of `ALLOWED_ORIGINS` that allows the page's origin.
    OriginAllowed(Arc<str>),
}

impl Cors {
    /// Returns the CORS fields of the answer to a request with the header `fields`. `origins` are the allowed origins.
    pub fn for_request<'a>(origins: &[Arc<str>], fields: impl Iterator<Item = (&'a str, &'a [u8])>) -> Cors {
        if origins.is_empty() {
            return Cors::Off;
        }
        let mut fields = fields.filter(|(name, _)| name.eq_ignore_ascii_case("origin"));
        match (fields.next(), fields.next()) {
            (Some((_, origin)), None) => match find_allowed_origin(origins, origin) {
                Some(entry) => Cors::OriginAllowed(entry.clone()),
                None => Cors::VaryOnly,
            },
            _ => Cors::VaryOnly,
        }
    }

    /// Returns whether a page of an allowed origin sent the request.
    pub fn is_origin_allowed(&self) -> bool {
        matches!(self, Cors::OriginAllowed(_))
    }

    /// Returns whether the request is a preflight: a browser asks what a page of an allowed origin may send.
    pub fn is_preflight(&self, request: &Request) -> bool {
        self.is_origin_allowed() && request.method == Method::Options
    }

    /// If the request is a preflight, adds to its response which methods and header fields the page may send: the
    /// methods of the response's `Allow`, and all fields that the page asks for, because libraries send fields of their
    /// own.
    pub fn add_permissions(&self, request: &Request, response: Response) -> Response {
        let allow = response.header("Allow").filter(|_| self.is_preflight(request)).map(str::to_owned);
        let Some(methods) = allow else { return response };
        let response = response
            .with("Access-Control-Allow-Methods", methods)
            .with("Access-Control-Max-Age", PREFLIGHT_MAX_AGE_SECONDS);
        let lists = request.header_values(REQUEST_HEADERS_FIELD);
        let asked: Vec<_> = lists.flat_map(|list| list.split(',')).map(str::trim).collect();
        let are_names = asked.iter().all(|name| !name.is_empty() && name.bytes().all(is_http_token_byte));
        if asked.is_empty() || !are_names {
            return response;
        }
        response.with("Access-Control-Allow-Headers", asked.join(", "))
    }

    /// Adds these CORS fields to an answer.
    pub fn add_fields_to(self, response: &mut Response) {
        if self == Cors::Off {
            return;
        }
        let is_permission = response.header("Access-Control-Allow-Methods").is_some();
        let vary = if is_permission { "Origin, Access-Control-Request-Headers" } else { "Origin" };
        response.headers.push(("Vary", vary.into()));
        if let Cors::OriginAllowed(origin) = self {
            response.headers.push(("Access-Control-Allow-Origin", origin.to_string().into()));
            response.headers.push(("Access-Control-Expose-Headers", EXPOSED_HEADERS.into()));
        }
    }
}

/// Returns the entry of `ALLOWED_ORIGINS` that allows the origin of a request.
fn find_allowed_origin<'a>(origins: &'a [Arc<str>], origin: &[u8]) -> Option<&'a Arc<str>> {
    origins.iter().find(|allowed| ***allowed == *"*" || allowed.as_bytes() == origin)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(origins: &str) -> Vec<Arc<str>> {
        origins.split_whitespace().map(Arc::from).collect()
    }

    /// Returns the fields, beside `Allow`, of the answer to a request with these fields.
    fn added(origins: &str, method: Method, fields: &[(&str, &str)]) -> String {
        let request = Request::new(method, "/users", "");
        let request = fields.iter().fold(request, |request, (name, value)| request.with(*name, *value));
        let lines = request.header_fields().map(|(name, value)| (name, value.as_bytes()));
        let cors = Cors::for_request(&entries(origins), lines);
        let mut response =
            cors.add_permissions(&request, Response::no_content().with("Allow", "GET, OPTIONS"));
        cors.add_fields_to(&mut response);
        let fields = response.headers[1..].iter();
        fields.map(|(name, value)| format!("{name}: {value}")).collect::<Vec<_>>().join("; ")
    }

    const ORIGIN: (&str, &str) = ("Origin", "https://app.example");
    const OTHER: (&str, &str) = ("origin", "https://evil.example");

    #[test]
    fn fields_of_answers() {
        assert_eq!(added("", Method::Options, &[ORIGIN]), "");
        for fields in
            [&[][..], &[OTHER], &[ORIGIN, ORIGIN], &[("Origin", "null"), (REQUEST_HEADERS_FIELD, "a")]]
        {
            assert_eq!(added("https://app.example", Method::Options, fields), "Vary: Origin", "{fields:?}");
        }
        let readable = |origin: &str| {
            format!("Access-Control-Allow-Origin: {origin}; Access-Control-Expose-Headers: {EXPOSED_HEADERS}")
        };
        let found =
            added("https://app.example", Method::Get, &[("Host", "a"), ORIGIN, (REQUEST_HEADERS_FIELD, "a")]);
        assert_eq!(found, format!("Vary: Origin; {}", readable("https://app.example")));
        let permitted = "Access-Control-Allow-Methods: GET, OPTIONS; Access-Control-Max-Age: 7200; \
                         Vary: Origin, Access-Control-Request-Headers";
        assert_eq!(added("*", Method::Options, &[OTHER]), format!("{permitted}; {}", readable("*")));
    }

    #[test]
    fn fields_that_a_page_asks_for() {
        let rows: &[(&[&str], Option<&str>)] = &[
            (
                &["authorization,content-type,x-datadog-origin,newrelic"],
                Some("authorization, content-type, x-datadog-origin, newrelic"),
            ),
            (&[" A ,\tb", "c"], Some("A, b, c")),
            (&["*"], Some("*")),
            (&[""], None),
            (&["a,,b"], None),
            (&["a b"], None),
            (&["a:b"], None),
            (&["a\u{e4}"], None),
            (&["a", "(b)"], None),
        ];
        for (lists, expected) in rows {
            let mut fields = vec![ORIGIN];
            fields.extend(lists.iter().map(|list| (REQUEST_HEADERS_FIELD, *list)));
            let found = added(ORIGIN.1, Method::Options, &fields);
            let found =
                found.split("; ").find_map(|field| field.strip_prefix("Access-Control-Allow-Headers: "));
            assert_eq!(found, *expected, "{lists:?}");
        }
    }

    #[test]
    fn origins_are_compared_exactly() {
        let origins = entries("https://app.example http://a:81");
        for (origin, entry) in [
            ("https://app.example", Some("https://app.example")),
            ("http://a:81", Some("http://a:81")),
            ("http://app.example", None),
            ("https://app.example:8443", None),
            ("https://app.example.evil.example", None),
            ("https://xapp.example", None),
            ("null", None),
            ("*", None),
            ("", None),
        ] {
            assert_eq!(
                find_allowed_origin(&origins, origin.as_bytes()).map(|entry| &**entry),
                entry,
                "{origin}"
            );
        }
        let any = entries("*");
        assert_eq!(find_allowed_origin(&any, b"https://x.example").map(|entry| &**entry), Some("*"));
        assert_eq!(find_allowed_origin(&any, b"*"), find_allowed_origin(&any, b"https://x.example"));
        assert!(find_allowed_origin(&[], b"*").is_none());
    }
}
