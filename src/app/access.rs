//! Access to the routes that are not public. A change that a browser sends for a page of another origin is refused,
//! unless `ALLOWED_ORIGINS` has that origin. If the service has tokens, a request needs one. If it has none, the `Host`
//! of a request must be a name of this service, because a foreign page could otherwise reach it by DNS rebinding.

use super::routes::Rights;
use crate::config::Config;
use crate::error::Error;
use crate::http::{Cors, Method, Request, hosts};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// The rules by which requests are admitted to the routes that are not public.
pub struct AccessRules {
    /// The SHA-256 digest of each token, with the rights that the token gives; `None` if requests need no token.
    /// Digests are compared instead of tokens, because the time of a comparison could tell how many characters of a
    /// token are right.
    pub(super) token_digests: Option<Vec<([u8; 32], Rights)>>,
    /// The names that the `Host` of a request may have if the service has no token; `None` for any name. Names that no
    /// stranger can register, such as `localhost`, are accepted, too.
    accepted_hosts: Option<Vec<String>>,
    /// The origins (as in `https://app.example`) of pages that may use the service from a browser.
    allowed_origins: Vec<Arc<str>>,
}

impl AccessRules {
    /// Returns the rules that the settings ask for. If a token is set, requests to `/users` need it. If none is
    /// set, the `Host` of a request must name this service.
    pub fn new(config: &Config) -> AccessRules {
        let machine = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        // Leaves out a setting `HOST` with a colon, because it is an IPv6 address or the path of a socket.
        let listening = (!config.host.contains(':')).then_some(&config.host);
        let named = config.allowed_hosts.iter().chain(listening).chain(&machine);
        let hosts = named.map(|name| hosts::host_name(name).to_owned()).collect();
        AccessRules {
            token_digests: config.api_token.is_some().then(|| make_token_digests(config)),
            accepted_hosts: (!config.allowed_hosts.iter().any(|name| name == "*")).then_some(hosts),
            allowed_origins: config.limits.allowed_origins.clone(),
        }
    }

    /// Admits a request to a route, or fails with [`Error::CrossOrigin`], [`Error::Unauthorized`], [`Error::Forbidden`]
    /// or [`Error::HostNotAllowed`]. `required_rights`: the rights that the route requires. `token_rights`: the
    /// rights that the token of the request gives.
    pub fn admit(
        &self,
        request: &Request,
        required_rights: Rights,
        cors: &Cors,
        token_rights: Option<Rights>,
    ) -> Result<(), Error> {
        let is_safe = matches!(request.method, Method::Get | Method::Head | Method::Options);
        if !is_safe && is_cross_origin(request) && !cors.is_origin_allowed() {
            return Err(Error::CrossOrigin);
        }
        match self.token_digests {
            // Admits a preflight without a token: browsers send no token with a preflight, and its answer tells nothing
            // of the users.
            Some(_) if cors.is_preflight(request) => Ok(()),
            // Accepts any `Host` if a token is set, because a page of another site does not know the token.
            Some(_) => match token_rights {
                None => Err(Error::Unauthorized),
                Some(Rights::Full) => Ok(()),
                Some(own) if own == required_rights || required_rights == Rights::AnyToken => Ok(()),
                Some(_) => Err(Error::Forbidden),
            },
            None => match request.header("host") {
                Some(host) if !self.is_own_host(host) && request.peer.is_some() => Err(Error::HostNotAllowed),
                // Admits a request over a Unix socket, which no web page can reach, and a request without a `Host`,
                // which no browser sends.
                _ => Ok(()),
            },
        }
    }

    /// Returns the rights that the token of a request gives. Returns `None` if the token is unknown or missing, or if
    /// the request has several `Authorization` fields.
    pub fn find_token_rights(&self, request: &Request) -> Option<Rights> {
        let tokens = self.token_digests.as_ref()?;
        let mut fields = request.header_values("authorization");
        let field = fields.next().filter(|_| fields.next().is_none()).and_then(|value| value.split_once(' '));
        let bearer = field.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let carried = bearer.map(|(_, token)| sha256(token.trim()))?;
        // Compares the request's token with all tokens, so that the time does not tell which one is equal.
        let equal = tokens.iter().filter(|(expected, _)| carried.ct_eq(expected).into());
        equal.fold(None, |_, (_, rights)| Some(*rights))
    }

    /// Returns the CORS fields for the answer to a request. By these fields a browser lets a page of another origin
    /// read the answer.
    pub fn cors_for(&self, request: &Request) -> Cors {
        let fields = request.header_fields().map(|(name, value)| (name, value.as_bytes()));
        Cors::for_request(&self.allowed_origins, fields)
    }

    /// Returns true if the `Host` of a request names this service. By DNS rebinding, the owner of a foreign page lets
    /// the name of the page resolve to this server. The browser then takes the page and the service for one origin, and
    /// lets the page read the answers. Only the `Host` tells that such a request comes from a foreign page.
    fn is_own_host(&self, authority: &str) -> bool {
        let Some(hosts) = &self.accepted_hosts else { return true };
        let name = hosts::host_name(authority);
        hosts::is_rebind_safe(authority) || hosts.iter().any(|accepted| accepted.eq_ignore_ascii_case(name))
    }
}

/// Returns the digests of all tokens in the settings, each with the rights that its token gives.
fn make_token_digests(config: &Config) -> Vec<([u8; 32], Rights)> {
    let settings = [
        (&config.api_token, Rights::Full),
        (&config.api_token_read, Rights::Read),
        (&config.api_token_login, Rights::Login),
    ];
    let digests = settings.into_iter().flat_map(|(tokens, rights)| {
        let tokens = tokens.iter().flat_map(|tokens| tokens.expose().split_whitespace());
        tokens.map(move |token| (sha256(token), rights))
    });
    digests.collect()
}

fn sha256(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

/// Returns true if a browser sends this change for a page of another origin, by the rules of `CrossOriginProtection` in
/// Go 1.25. Present browsers say so in `Sec-Fetch-Site`. Older browsers send the `Origin` of the page, which is
/// compared with the `Host`. A client that sends neither field is no browser.
fn is_cross_origin(request: &Request) -> bool {
    let field = |name| request.header(name).filter(|value| !value.is_empty());
    match (field("sec-fetch-site"), field("origin")) {
        (Some(site), _) => !matches!(site, "same-origin" | "none"),
        (None, Some(origin)) => {
            origin.split_once("://").is_none_or(|(_, host)| Some(host) != request.header("host"))
        }
        (None, None) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, headers: &[(&str, &str)]) -> Request {
        let mut request = Request::new(method, "/users", "");
        request.peer = Some([192, 0, 2, 7].into());
        headers.iter().fold(request, |request, (name, value)| request.with(*name, *value))
    }

    fn admit(access: &AccessRules, request: &Request, required: Rights) -> Result<(), Error> {
        access.admit(request, required, &access.cors_for(request), access.find_token_rights(request))
    }

    fn access(token: Option<&str>) -> AccessRules {
        let allowed_hosts = vec!["a".to_owned(), "Users.Example".to_owned()];
        let api_token = token.map(Into::into);
        AccessRules::new(&Config {
            host: "api.example".to_owned(),
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
            let result = admit(&access, &request("GET", headers), Rights::Full);
            assert_eq!(result.is_ok(), *welcome, "{headers:?}");
        }
        assert!(admit(&self::access(None), &request("GET", &[]), Rights::Full).is_ok());
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
            // Prefers Sec-Fetch-Site to Origin.
            ("POST", &[("Sec-Fetch-Site", "same-origin"), ("Origin", "http://x"), ("Host", "a")], true),
        ];
        for (method, headers, welcome) in rows {
            let result = admit(&access(None), &request(method, headers), Rights::Full);
            assert_eq!(result.is_ok(), *welcome, "{method} {headers:?}");
        }
    }

    #[test]
    fn names_that_requests_may_have() {
        let machine = nix::unistd::gethostname().unwrap().into_string().unwrap();
        let own = [
            "127.0.0.1:3000",
            "[::1]",
            "LOCALHOST:1",
            "userd",
            "x.internal",
            "users.example",
            "USERS.example:8080",
            "users.example.",
            "api.example",
            &machine,
        ];
        let foreign =
            ["evil.example", "evil.example:3000", "x.users.example", "users.example.evil.example", ""];
        // Sends a GET of a page over plain http, which has none of these fields.
        let markers: [&[(&str, &str)]; 4] = [
            &[],
            &[("Sec-Fetch-Site", "same-origin")],
            &[("sec-fetch-mode", "cors")],
            &[("Origin", "http://HOST"), ("Sec-Fetch-Site", "same-origin")],
        ];
        for (hosts, allowed) in [(own.as_slice(), true), (&foreign, false)] {
            for (host, markers) in hosts.iter().flat_map(|host| markers.map(|markers| (*host, markers))) {
                let headers = [markers, &[("Host", host)]].concat();
                for method in ["GET", "POST", "OPTIONS"] {
                    let mut request = request(method, &headers);
                    let result = admit(&access(None), &request, Rights::Full);
                    assert_eq!(result.is_ok(), allowed, "{method} {headers:?}");
                    if let Err(error) = result {
                        assert!(matches!(error, Error::HostNotAllowed), "{error:?}");
                    }
                    let with_token = request.clone().with("Authorization", "Bearer s3cret");
                    assert!(
                        admit(&access(Some("s3cret")), &with_token, Rights::Full).is_ok(),
                        "a token suffices"
                    );
                    let any = AccessRules::new(&Config {
                        allowed_hosts: vec!["*".to_owned()],
                        ..Config::default()
                    });
                    assert!(admit(&any, &request, Rights::Full).is_ok(), "* is any name");
                    // Admits a request without an address, which came over a Unix socket or over none.
                    request.peer = None;
                    assert!(admit(&access(None), &request, Rights::Full).is_ok());
                }
            }
        }
        assert!(admit(&access(None), &request("GET", &[]), Rights::Full).is_ok(), "HTTP/1.0 without a Host");
    }
}
