//! Fields by which answers tell browsers about pages of other origins (CORS): which origin may read them, and what a
//! preflight allows.
//!
//! Pure. Without `ALLOWED_ORIGINS` no field of a request is looked at.

use super::Response;
use crate::config::AllowedOrigins;
use std::sync::Arc;

/// The fields that a page may send beside those that need no permission. The last five are sent by libraries on their own.
const REQUEST_FIELDS: &str = "Authorization, Content-Type, If-Match, If-None-Match, Idempotency-Key, X-Request-Id, \
                              X-Requested-With, traceparent, tracestate, baggage, sentry-trace";
/// The fields that a page may read beside those that need no permission.
const ANSWER_FIELDS: &str = "ETag, Link, Location, Retry-After, X-Request-Id, Idempotency-Replayed";
/// Seconds for which a browser need not ask again; the most that Chromium keeps.
const MAX_AGE: &str = "7200";

/// The fields for browsers that the answer to a request has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Cors {
    /// No field: there are no allowed origins.
    #[default]
    Off,
    /// `Vary` alone: the request is not of a page of an allowed origin, and the answer to such a page has more fields.
    Varies,
    /// The fields that let a page of an allowed origin read the answer.
    Allowed {
        /// The entry that allows the origin.
        origin: Arc<str>,
        /// The method is OPTIONS, as a preflight's is.
        options: bool,
    },
}

impl Cors {
    /// Returns the fields for a request with these fields; `options` if that is its method.
    pub fn of<'a>(
        origins: &AllowedOrigins,
        options: bool,
        fields: impl Iterator<Item = (&'a str, &'a [u8])>,
    ) -> Cors {
        if origins.is_empty() {
            return Cors::Off;
        }
        let mut fields = fields.filter(|(name, _)| name.eq_ignore_ascii_case("origin"));
        match (fields.next(), fields.next()) {
            (Some((_, origin)), None) => match origins.find(origin) {
                Some(entry) => Cors::Allowed { origin: entry.clone(), options },
                None => Cors::Varies,
            },
            _ => Cors::Varies,
        }
    }

    /// Returns whether the request is of a page of an allowed origin.
    pub fn is_allowed(&self) -> bool {
        matches!(self, Cors::Allowed { .. })
    }

    /// Returns whether a browser asks what a page of an allowed origin may send.
    pub fn is_preflight(&self) -> bool {
        matches!(self, Cors::Allowed { options: true, .. })
    }

    /// Adds the fields to an answer.
    pub fn add_to(self, response: &mut Response) {
        if self == Cors::Off {
            return;
        }
        let allow =
            response.headers.iter().find(|(name, _)| *name == "Allow").map(|(_, allow)| allow.clone());
        response.headers.push(("Vary", "Origin".into()));
        let Cors::Allowed { origin, options } = self else { return };
        response.headers.push(("Access-Control-Allow-Origin", origin.to_string().into()));
        match allow {
            Some(allow) if options => response.headers.extend([
                ("Access-Control-Allow-Methods", allow),
                ("Access-Control-Allow-Headers", REQUEST_FIELDS.into()),
                ("Access-Control-Max-Age", MAX_AGE.into()),
            ]),
            _ => response.headers.push(("Access-Control-Expose-Headers", ANSWER_FIELDS.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_answers() {
        const ORIGIN: (&str, &[u8]) = ("Origin", b"https://app.example");
        const OTHER: (&str, &[u8]) = ("origin", b"https://evil.example");
        let of = |origins: &str, options, fields: &[(&'static str, &'static [u8])]| {
            let mut response = Response::no_content().with("Allow", "GET, OPTIONS");
            Cors::of(&origins.parse().unwrap(), options, fields.iter().copied()).add_to(&mut response);
            let fields = response.headers[1..].iter();
            fields.map(|(name, value)| format!("{name}: {value}")).collect::<Vec<_>>().join("; ")
        };
        assert_eq!(of("", true, &[ORIGIN]), "");
        for fields in [&[][..], &[OTHER], &[ORIGIN, ORIGIN], &[("Origin", b"null")]] {
            assert_eq!(of("https://app.example", true, fields), "Vary: Origin", "{fields:?}");
        }
        let found = of("https://app.example", false, &[("Host", b"a"), ORIGIN]);
        assert_eq!(
            found,
            format!(
                "Vary: Origin; Access-Control-Allow-Origin: https://app.example; \
                 Access-Control-Expose-Headers: {ANSWER_FIELDS}"
            )
        );
        assert_eq!(
            of("*", true, &[OTHER]),
            format!(
                "Vary: Origin; Access-Control-Allow-Origin: *; Access-Control-Allow-Methods: GET, OPTIONS; \
                 Access-Control-Allow-Headers: {REQUEST_FIELDS}; Access-Control-Max-Age: 7200"
            )
        );
    }
}
