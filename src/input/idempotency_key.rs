//! Parses the header field `Idempotency-Key`.

use crate::error::Error;
use crate::http::Request;
use crate::users::idempotency::KeyDigest;

/// The most characters of an idempotency key.
const MAX_KEY_CHARS: usize = 255;

/// Parses the `Idempotency-Key` of a request: 1 to 255 visible ASCII characters, plain or in double quotes (a
/// structured string without escapes). Returns `None` if the request has no key. Fails with [`Error::BadRequest`] if
/// the key is malformed or there are several keys.
pub fn parse_idempotency_key(request: &Request) -> Result<Option<KeyDigest>, Error> {
    let mut fields = request.header_values("idempotency-key");
    let Some(value) = fields.next() else { return Ok(None) };
    let value = value.trim_matches([' ', '\t']);
    let is_key = |text: &&str| {
        (1..=MAX_KEY_CHARS).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
    };
    let text = match value.strip_prefix('"') {
        None => Some(value),
        Some(quoted) => quoted.strip_suffix('"').filter(|text| !text.contains(['"', '\\'])),
    };
    match text.filter(is_key) {
        Some(text) if fields.next().is_none() => Ok(Some(KeyDigest::new(text))),
        _ => Err(Error::BadRequest("Idempotency-Key must be one key of 1 to 255 visible ASCII characters")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        let parse = |values: &[&str]| {
            let request = Request::get("/users");
            parse_idempotency_key(
                &values.iter().fold(request, |request, value| request.with("idempotency-KEY", *value)),
            )
        };
        assert!(matches!(parse(&[]), Ok(None)));
        let longest = "k".repeat(255);
        let rows = [
            ("a", "a"),
            (" a\t", "a"),
            ("\"a\"", "a"),
            ("8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
            ("a\"b\\c,;=", "a\"b\\c,;="),
            (&longest, &longest),
            (&format!("\"{longest}\""), &longest),
        ];
        for (value, text) in rows {
            assert_eq!(parse(&[value]).unwrap(), Some(KeyDigest::new(text)), "{value}");
        }
        let malformed = [
            "",
            " ",
            "\"\"",
            "\"",
            "\"a",
            "a b",
            "\"a b\"",
            "\"a\";x=1",
            "\"a\"b\"",
            "\"a\\\"",
            "\"\\a\"",
            r#""a\"b""#,
            r#""a\\b""#,
            "a\tb",
            "a\u{7f}",
            "é",
            &format!("{longest}k"),
            &format!("\"{longest}k\""),
        ];
        for value in malformed {
            assert!(matches!(parse(&[value]), Err(Error::BadRequest(_))), "{value}");
        }
        assert!(parse(&["a", "a"]).is_err());
    }
}
