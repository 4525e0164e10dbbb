//! The setting `ALLOWED_ORIGINS`: origins whose pages may use the service from a browser (CORS).

use super::setters::is_host_name;
use std::sync::Arc;
use url::{Position, Url};

/// Parses an origin, or `*` for any origin. Returns the origin in lower case, which is how browsers send it. Refuses a
/// text that browsers never send as an origin. Refuses `null`, too, because it is the origin of every local file.
pub(super) fn parse_origin(entry: &str) -> Result<Arc<str>, String> {
    let lower = entry.to_ascii_lowercase();
    let is_origin = Url::parse(&lower).is_ok_and(|url| {
        let host = url.host_str().unwrap_or_default();
        let written = format!("{}://{}", url.scheme(), &url[Position::BeforeHost..Position::AfterPort]);
        written == lower && (host.starts_with('[') || is_host_name(host))
    });
    if entry == "*" || is_origin {
        return Ok(lower.into());
    }
    Err(format!(
        "{entry:?} is no origin as browsers send it: write scheme://host or scheme://host:port in ASCII (xn--…), without a \
         slash at its end and without the port that its scheme has anyway"
    ))
}

#[cfg(test)]
mod tests {
    use super::{super::setters::parse_list, *};

    #[test]
    fn entries() {
        let rows = [
            ("", Ok("")),
            ("https://app.example", Ok("https://app.example")),
            (
                "https://App.Example, http://localhost:5173 HTTP://[::1]:8080",
                Ok("https://app.example,http://localhost:5173,http://[::1]:8080"),
            ),
            ("capacitor://localhost", Ok("capacitor://localhost")),
            ("chrome-extension://abcdefgh", Ok("chrome-extension://abcdefgh")),
            ("http://[::1]", Ok("http://[::1]")),
            ("*", Ok("*")),
            ("null", Err("\"null\" is no origin")),
            ("app.example", Err("\"app.example\" is no origin")),
            ("https://app.example/", Err("\"https://app.example/\" is no origin")),
            ("https://app.example/path", Err("is no origin")),
            ("https://*.example", Err("is no origin")),
            ("https://user@app.example", Err("is no origin")),
            ("https://", Err("is no origin")),
            ("://a", Err("is no origin")),
            ("https://app.example:443", Err("is no origin")),
            ("http://a:80", Err("is no origin")),
            ("https://bücher.example", Err("is no origin")),
            ("https://.example.com", Err("is no origin")),
            ("https://app..example", Err("is no origin")),
            ("https://-", Err("is no origin")),
            ("https://app.example:", Err("is no origin")),
            ("https://app.example:080", Err("is no origin")),
            ("https://app.example:65536", Err("is no origin")),
            ("https://app.example:*", Err("is no origin")),
            ("http://127.1", Err("is no origin")),
            ("http://[::1", Err("is no origin")),
            ("http://[0:0::1]", Err("is no origin")),
            ("http://::1", Err("is no origin")),
            ("http://my_app.test:8080", Ok("http://my_app.test:8080")),
            ("http://192.168.0.7:8080", Ok("http://192.168.0.7:8080")),
            ("https://a.example https://b.example/", Err("\"https://b.example/\"")),
        ];
        for (text, expected) in rows {
            match (parse_list(text, parse_origin), expected) {
                (Ok(origins), Ok(shown)) => assert_eq!(origins.join(","), shown, "{text}"),
                (Err(line), Err(part)) => assert!(line.contains(part), "{text}: {line}"),
                (found, _) => panic!("{text}: {found:?}"),
            }
        }
    }
}
