//! The body of a request: which media types are read as the JSON object that is in it.

use super::validation::object;
use crate::{error::Error, http::Request};
use serde_json::{Map, Value};

/// The media types of a patch, of which the first is the one that it has (RFC 7396).
pub const ACCEPT_PATCH: &str = "application/merge-patch+json, application/json";

/// The body of a PATCH. It is a merge patch if it is JSON, or if its type is curl's default; other kinds of patches mean
/// something else, and so are refused.
pub fn merge_patch(request: &Request) -> Result<Map<String, Value>, Error> {
    const CURLS: &str = "application/x-www-form-urlencoded";
    let media_type =
        request.header("content-type").map(|text| text.split(';').next().unwrap_or_default().trim());
    let accepted =
        |text: &str| ACCEPT_PATCH.split(", ").chain([CURLS]).any(|one| one.eq_ignore_ascii_case(text));
    match media_type {
        Some(other) if !accepted(other) => Err(unsupported(request, ACCEPT_PATCH, true)),
        _ if is_coded(request) => Err(unsupported(request, ACCEPT_PATCH, true)),
        _ => object(&request.body),
    }
}

/// Bodies are JSON whatever their Content-Type says, as curl's is a form's, except uploads.
pub fn json(request: &Request) -> Result<Map<String, Value>, Error> {
    let media_type = request.header("content-type").unwrap_or_default();
    let upload = media_type.get(..10).is_some_and(|start| start.eq_ignore_ascii_case("multipart/"));
    match upload || is_coded(request) {
        true => Err(unsupported(request, "application/json", false)),
        false => object(&request.body),
    }
}

/// Whether the body is something else than what was meant, which a decoder would make of it.
fn is_coded(request: &Request) -> bool {
    let fields = request.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("content-encoding"));
    let mut codings = fields.flat_map(|(_, value)| value.split(',')).map(str::trim);
    codings.any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case("identity"))
}

fn unsupported(request: &Request, accepted: &'static str, patch: bool) -> Error {
    Error::UnsupportedMediaType { accepted, patch, coded: is_coded(request) }
}
