//! Parses the body of a request: its media type, its content coding, and the JSON object itself.

use super::validation::parse_object;
use crate::error::{ACCEPT_PATCH, Error};
use crate::http::Request;
use crate::users::email;
use serde_json::{Map, Value};

/// Parses the JSON object in the body of a request, and brings its e-mail address into NFC. Refuses a content coding
/// and an upload (`multipart/…`). Accepts the media type of a form, because curl sends this type by default. If
/// `is_patch` is set, accepts only the media types of a merge patch and of a form.
pub fn parse_body(request: &Request, is_patch: bool) -> Result<Map<String, Value>, Error> {
    const CURL_DEFAULT_TYPE: &str = "application/x-www-form-urlencoded";
    let mut codings = request.header_values("content-encoding").flat_map(|csv| csv.split(',')).map(str::trim);
    let coded = codings.any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case("identity"));
    let media_type =
        request.header("content-type").map(|text| text.split(';').next().unwrap_or_default().trim());
    let is_accepted = media_type.is_none_or(|given| {
        if is_patch {
            ACCEPT_PATCH.split(", ").chain([CURL_DEFAULT_TYPE]).any(|one| one.eq_ignore_ascii_case(given))
        } else {
            !given.get(..10).is_some_and(|start| start.eq_ignore_ascii_case("multipart/"))
        }
    });
    if !is_accepted || coded {
        return Err(Error::UnsupportedMediaType { patch: is_patch, coded });
    }
    let mut fields = parse_object(&request.body)?;
    email::normalize_email(&mut fields);
    Ok(fields)
}
