//! Who may come in: the bearer token, and browsers that speak for another site.

use crate::{
    config::Secret,
    error::Error,
    http::{Method, Request},
};
use sha2::{Digest, Sha256};

/// The rules that stand before every route.
pub struct Access {
    /// Digests are compared: equally long, and a difference in their first bytes tells nothing of the token.
    token: Option<[u8; 32]>,
}

impl Access {
    /// With a token, `/users` asks for it; without one it is open.
    pub fn new(token: Option<&Secret>) -> Access {
        Access { token: token.map(|token| digest(token.expose())) }
    }

    /// [`Error::CrossOrigin`], [`Error::Unauthorized`], or in.
    pub fn check(&self, request: &Request) -> Result<(), Error> {
        if is_cross_origin(request) {
            return Err(Error::CrossOrigin);
        }
        match self.token {
            Some(expected) if !carries(request, &expected) => Err(Error::Unauthorized),
            _ => Ok(()),
        }
    }
}

/// Whether the request has exactly one Authorization field and it holds the token.
fn carries(request: &Request, expected: &[u8; 32]) -> bool {
    let mut fields = request.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("authorization"));
    let (Some((_, value)), None) = (fields.next(), fields.next()) else {
        return false;
    };
    let Some((scheme, token)) = value.split_once(' ') else {
        return false;
    };
    let given = digest(token.trim());
    let differences = given.iter().zip(expected).fold(0, |all, (a, b)| all | (a ^ b));
    scheme.eq_ignore_ascii_case("bearer") && std::hint::black_box(differences) == 0
}

fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

/// The rules of Go 1.25's CrossOriginProtection: browsers of today say where a request comes from in
/// Sec-Fetch-Site; older ones send Origin, which has to name this host; others are no browsers.
fn is_cross_origin(request: &Request) -> bool {
    if matches!(request.method, Method::Get | Method::Head | Method::Options) {
        return false;
    }
    match request.header("sec-fetch-site") {
        Some("same-origin" | "none") => false,
        Some(site) if !site.is_empty() => true,
        _ => match request.header("origin") {
            None | Some("") => false,
            Some(origin) => {
                let host = origin.split_once("://").map(|(_, host)| host);
                host.is_none() || host != request.header("host")
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, headers: &[(&str, &str)]) -> Request {
        let mut request = Request::new(method, "/users", "");
        let owned = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
        request.headers = headers.iter().map(owned).collect();
        request
    }

    #[test]
    fn tokens() {
        let access = Access::new(Some(&"s3cret".into()));
        let rows: &[(&[(&str, &str)], bool)] = &[
            (&[("Authorization", "Bearer s3cret")], true),
            (&[("authorization", "bearer s3cret")], true),
            (&[("Authorization", "Bearer  s3cret")], true),
            (&[], false),
            (&[("Authorization", "s3cret")], false),
            (&[("Authorization", "Basic s3cret")], false),
            (&[("Authorization", "Bearer s3cre")], false),
            (&[("Authorization", "Bearer s3crett")], false),
            (&[("Authorization", "Bearer ")], false),
            (&[("Authorization", "Bearer s3cret"), ("Authorization", "Bearer s3cret")], false),
        ];
        for (headers, welcome) in rows {
            let result = access.check(&request("GET", headers));
            assert_eq!(result.is_ok(), *welcome, "{headers:?}");
        }
        assert!(Access::new(None).check(&request("GET", &[])).is_ok());
    }

    #[test]
    fn browsers() {
        type Fields = &'static [(&'static str, &'static str)];
        let rows: &[(&str, Fields, bool)] = &[
            ("POST", &[], true),
            ("POST", &[("Sec-Fetch-Site", "same-origin")], true),
            ("POST", &[("Sec-Fetch-Site", "none")], true),
            ("POST", &[("Sec-Fetch-Site", "cross-site")], false),
            ("POST", &[("Sec-Fetch-Site", "same-site")], false),
            ("DELETE", &[("Sec-Fetch-Site", "cross-site")], false),
            ("PATCH", &[("Sec-Fetch-Site", "cross-site")], false),
            ("GET", &[("Sec-Fetch-Site", "cross-site")], true),
            ("HEAD", &[("Origin", "https://evil.example"), ("Host", "a:1")], true),
            ("POST", &[("Origin", "http://a:1"), ("Host", "a:1")], true),
            ("POST", &[("Origin", "http://a:2"), ("Host", "a:1")], false),
            ("POST", &[("Origin", "null"), ("Host", "a:1")], false),
            ("POST", &[("Origin", "null")], false),
            ("PUT", &[("Origin", "http://evil.example"), ("Host", "a:1")], false),
            // Sec-Fetch-Site goes before Origin.
            ("POST", &[("Sec-Fetch-Site", "same-origin"), ("Origin", "http://x"), ("Host", "a")], true),
        ];
        for (method, headers, welcome) in rows {
            let result = Access::new(None).check(&request(method, headers));
            assert_eq!(result.is_ok(), *welcome, "{method} {headers:?}");
        }
    }
}
