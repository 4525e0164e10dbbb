//! Which requests are accepted: those that carry the bearer token, and those that no browser sends for another site.

use crate::{
    config::Config,
    error::Error,
    http::{Method, Request},
};
use sha2::{Digest, Sha256};
use std::net::{Ipv4Addr, Ipv6Addr};
use subtle::ConstantTimeEq;

/// The rules that stand before every route.
pub struct Access {
    /// Digests are compared: equally long, and a difference in their first bytes tells nothing of the token.
    token: Option<[u8; 32]>,
    /// Host names under which browsers may call, in lower case.
    hosts: Vec<String>,
}

impl Access {
    /// With a token, `/users` asks for it; without one it is open, to browsers under the names of `config` and of this
    /// machine.
    pub fn new(config: &Config) -> Access {
        let machine = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        let hosts = config.allowed_hosts.iter().cloned().chain([config.host.clone()]).chain(machine);
        Access {
            token: config.api_token.as_ref().map(|token| digest(token.expose())),
            hosts: hosts.map(|host| host.to_ascii_lowercase()).collect(),
        }
    }

    /// [`Error::CrossOrigin`], [`Error::Unauthorized`] or [`Error::HostNotAllowed`] where the request is refused.
    pub fn check(&self, request: &Request) -> Result<(), Error> {
        if is_cross_origin(request) {
            return Err(Error::CrossOrigin);
        }
        match self.token {
            Some(expected) if !carries(request, &expected) => Err(Error::Unauthorized),
            // A page of another site does not know the token, whatever name it is served under.
            Some(_) => Ok(()),
            None if is_from_browser(request) && !self.is_own_host(request) => Err(Error::HostNotAllowed),
            None => Ok(()),
        }
    }

    /// Whether the request was sent to a name of this service. A page whose own name resolves to this server (DNS
    /// rebinding) has the same origin as the service in the browser's eyes; only the name tells. An address or a name
    /// of the loopback cannot be rebound.
    fn is_own_host(&self, request: &Request) -> bool {
        let Some(host) = request.header("host") else {
            return false;
        };
        if let Some(rest) = host.strip_prefix('[') {
            let address = rest.split_once(']').map(|(address, _)| address);
            return address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
        }
        let host = host.split(':').next().unwrap_or_default().to_ascii_lowercase();
        let host = host.strip_suffix('.').unwrap_or(&host);
        let is_loopback = host == "localhost" || host.ends_with(".localhost");
        is_loopback || host.parse::<Ipv4Addr>().is_ok() || self.hosts.iter().any(|own| own == host)
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
    let is_token = digest(token.trim()).ct_eq(expected);
    scheme.eq_ignore_ascii_case("bearer") && bool::from(is_token)
}

fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

/// Whether the request says of itself what only browsers say.
fn is_from_browser(request: &Request) -> bool {
    const FETCH_METADATA: &str = "sec-fetch-";
    request.headers.iter().any(|(name, _)| {
        let start = name.get(..FETCH_METADATA.len()).unwrap_or_default();
        name.eq_ignore_ascii_case("origin") || start.eq_ignore_ascii_case(FETCH_METADATA)
    })
}

/// The rules of Go 1.25's CrossOriginProtection: browsers of today say where a request comes from in Sec-Fetch-Site;
/// older ones send Origin, which has to name this host; clients that send neither are no browsers.
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
    use crate::config::Secret;

    fn request(method: &str, headers: &[(&str, &str)]) -> Request {
        let mut request = Request::new(method, "/users", "");
        let owned = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
        request.headers = headers.iter().map(owned).collect();
        request
    }

    fn access(token: Option<&str>) -> Access {
        let allowed_hosts = vec!["a".to_owned(), "Users.Example".to_owned()];
        let api_token = token.map(Secret::from);
        Access::new(&Config {
            host: "api.internal".to_owned(),
            allowed_hosts,
            api_token,
            ..Config::default()
        })
    }

    #[test]
    fn tokens() {
        let access = access(Some("s3cret"));
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
        assert!(self::access(None).check(&request("GET", &[])).is_ok());
    }

    #[test]
    fn browsers() {
        type Fields = &'static [(&'static str, &'static str)];
        let rows: &[(&str, Fields, bool)] = &[
            ("POST", &[], true),
            ("POST", &[("Sec-Fetch-Site", "same-origin"), ("Host", "a")], true),
            ("POST", &[("Sec-Fetch-Site", "none"), ("Host", "a")], true),
            ("POST", &[("Sec-Fetch-Site", "cross-site")], false),
            ("POST", &[("Sec-Fetch-Site", "same-site")], false),
            ("DELETE", &[("Sec-Fetch-Site", "cross-site")], false),
            ("PATCH", &[("Sec-Fetch-Site", "cross-site")], false),
            ("GET", &[("Sec-Fetch-Site", "cross-site"), ("Host", "a")], true),
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
            let result = access(None).check(&request(method, headers));
            assert_eq!(result.is_ok(), *welcome, "{method} {headers:?}");
        }
    }

    #[test]
    fn names_under_which_browsers_may_call() {
        let machine = nix::unistd::gethostname().unwrap().into_string().unwrap();
        let own = [
            "127.0.0.1",
            "127.0.0.1:3000",
            "10.1.2.3",
            "[::1]",
            "[::1]:3000",
            "localhost",
            "LOCALHOST:1",
            "app.localhost",
            "localhost.",
            "users.example",
            "USERS.example:8080",
            "users.example.",
            "api.internal",
            &machine,
        ];
        let foreign = [
            "evil.example",
            "evil.example:3000",
            "localhost.evil.example",
            "notlocalhost",
            "1.2.3.4.evil.example",
            "x.users.example",
            "[::1",
            "",
            "0x7f000001",
        ];
        let markers: [&[(&str, &str)]; 3] = [
            &[("Sec-Fetch-Site", "same-origin")],
            &[("sec-fetch-mode", "cors")],
            &[("Origin", "http://HOST"), ("Sec-Fetch-Site", "same-origin")],
        ];
        for (hosts, allowed) in [(own.as_slice(), true), (&foreign, false)] {
            for (host, markers) in hosts.iter().flat_map(|host| markers.map(|markers| (*host, markers))) {
                let headers = [markers, &[("Host", host)]].concat();
                for method in ["GET", "POST"] {
                    let request = request(method, &headers);
                    let result = access(None).check(&request);
                    assert_eq!(result.is_ok(), allowed, "{method} {headers:?}");
                    if let Err(error) = result {
                        assert!(matches!(error, Error::HostNotAllowed), "{error:?}");
                    }
                    let with_token = request.with("Authorization", "Bearer s3cret");
                    assert!(access(Some("s3cret")).check(&with_token).is_ok(), "a token suffices");
                }
                // Without a browser's fields it is curl's, under whatever name.
                assert!(access(None).check(&request("POST", &[("Host", host)])).is_ok());
            }
        }
        assert!(access(None).check(&request("GET", &[("Origin", "http://a")])).is_err(), "no Host at all");
    }
}
