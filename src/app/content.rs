//! The body of a request: which media types are read as the JSON object that is in it.

use super::validation::object;
use crate::{error::Error, http::Request};
use serde_json::{Map, Value};

/// The media types of a patch, of which the first is the one that it has (RFC 7396).
pub const ACCEPT_PATCH: &str = "application/merge-patch+json, application/json";

/// The body of a PATCH. It is a merge patch if it is JSON, or if its type is curl's default; other kinds of patches
/// mean something else, and so are refused.
pub fn merge_patch(request: &Request) -> Result<Map<String, Value>, Error> {
    const CURLS: &str = "application/x-www-form-urlencoded";
    let media_type =
        request.header("content-type").map(|text| text.split(';').next().unwrap_or_default().trim());
    let accepted =
        |text: &str| ACCEPT_PATCH.split(", ").chain([CURLS]).any(|one| one.eq_ignore_ascii_case(text));
    body(request, media_type.is_none_or(accepted), ACCEPT_PATCH, true)
}

/// Bodies are JSON whatever their Content-Type says, as curl's is a form's, except uploads.
pub fn json(request: &Request) -> Result<Map<String, Value>, Error> {
    let media_type = request.header("content-type").unwrap_or_default();
    let upload = media_type.get(..10).is_some_and(|start| start.eq_ignore_ascii_case("multipart/"));
    body(request, !upload, "application/json", false)
}

/// The JSON object, if its media type is one of those that are accepted, and it is not coded: a decoder would make
/// something else of that than what was meant.
fn body(
    request: &Request,
    is_accepted: bool,
    accepted: &'static str,
    patch: bool,
) -> Result<Map<String, Value>, Error> {
    let mut codings = request.fields("content-encoding").flat_map(|value| value.split(',')).map(str::trim);
    let coded = codings.any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case("identity"));
    match is_accepted && !coded {
        true => object(&request.body),
        false => Err(Error::UnsupportedMediaType { accepted, patch, coded }),
    }
}
