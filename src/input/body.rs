//! Parses the body of a request: its media type, its content coding, and the JSON object itself.

use super::validation::parse_object;
use crate::error::{Error, PATCH_TYPES};
use crate::http::Request;
use crate::users::email;
use serde_json::{Map, Value};

/// Parses the JSON object in the body of a request, and brings its e-mail address into NFC. Refuses a content coding
/// and an upload (`multipart/…`). Accepts the media type of a form, because curl sends this type by default. If
/// `is_patch` is set, accepts only the media types of a merge patch and of a form.
pub fn parse_body(request: &Request, is_patch: bool) -> Result<Map<String, Value>, Error> {
    const CURL_DEFAULT_TYPE: &str = "application/x-www-form-urlencoded";
    let mut codings = request.header_values("content-encoding").flat_map(|csv| csv.split(',')).map(str::trim);
    let has_coding = codings.any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case("identity"));
    let media_type =
        request.header("content-type").map(|text| text.split(';').next().unwrap_or_default().trim());
    let is_accepted = media_type.is_none_or(|given| {
        if is_patch {
            PATCH_TYPES.split(", ").chain([CURL_DEFAULT_TYPE]).any(|one| one.eq_ignore_ascii_case(given))
        } else {
            !given.get(..10).is_some_and(|start| start.eq_ignore_ascii_case("multipart/"))
        }
    });
    if !is_accepted || has_coding {
        return Err(Error::UnsupportedMediaType { is_patch, has_coding });
    }
    let mut fields = parse_object(&request.body)?;
    email::normalize_email(&mut fields);
    Ok(fields)
}
