//! Access to the routes that are not public. Refuses a change that a browser sends for a page of another origin,
//! unless that origin is allowed. Then requires a bearer token or, if no token is set, a `Host` that this service
//! accepts, because of DNS rebinding.

use super::routes::Callers;
use crate::config::Config;
use crate::error::Error;
use crate::http::{Cors, Method, Request, hosts};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// The rules by which requests are admitted to the routes that are not public.
pub struct Access {
    /// The digests of the tokens, each with the callers that the token stands for; `None` if requests need no token. A
    /// request's token is compared as a digest, because the time of a comparison could otherwise tell how much of a
    /// token is right.
    pub(super) tokens: Option<Vec<([u8; 32], Callers)>>,
    /// The host names that requests without a token may have, beside the names that no stranger can register; `None` allows
    /// any name.
    accepted_hosts: Option<Vec<String>>,
    /// The origins of pages that may send requests.
    allowed_origins: Vec<Arc<str>>,
}

impl Access {
    /// Returns the rules of these settings. With a token, `/users` needs it. Without a token, `/users` is open under
    /// the names in `config` and the name of this machine.
    pub fn new(config: &Config) -> Access {
        let machine = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        // Leaves out a HOST with a colon: it is an IPv6 address or the path of a socket, and no host name.
        let listening = (!config.host.contains(':')).then_some(&config.host);
        let named = config.allowed_hosts.iter().chain(listening).chain(&machine);
        let hosts = named.map(|name| hosts::without_port(name).to_owned()).collect();
        Access {
            tokens: config.api_token.is_some().then(|| tokens(config)),
            accepted_hosts: (!config.allowed_hosts.iter().any(|name| name == "*")).then_some(hosts),
            allowed_origins: config.limits.allowed_origins.clone(),
        }
    }

    /// Admits a request of a route for these callers, or fails with [`Error::CrossOrigin`], [`Error::Unauthorized`],
    /// [`Error::Forbidden`] or [`Error::HostNotAllowed`]. `token`: the callers that the token of the request stands
    /// for.
    pub fn admit(
        &self,
        request: &Request,
        callers: Callers,
        cors: &Cors,
        token: Option<Callers>,
    ) -> Result<(), Error> {
        let is_safe = matches!(request.method, Method::Get | Method::Head | Method::Options);
        if !is_safe && is_cross_origin(request) && !cors.is_allowed() {
            return Err(Error::CrossOrigin);
        }
        match self.tokens {
            // Admits a preflight without a token: browsers send none with it, and its answer tells nothing of the
            // users.
            Some(_) if cors.is_preflight(request) => Ok(()),
            // Does not look at the Host if a token is set, because a page of another site does not know the token.
            Some(_) => match token {
                None => Err(Error::Unauthorized),
                Some(Callers::Full) => Ok(()),
                Some(own) if own == callers || callers == Callers::Known => Ok(()),
                Some(_) => Err(Error::Forbidden),
            },
            None => match request.header("host") {
                Some(host) if !self.is_accepted(host) && request.peer.is_some() => Err(Error::HostNotAllowed),
                // Looks at the Host only if the client uses TCP and sends one: no web page reaches a Unix socket, and
                // every browser sends a Host.
                _ => Ok(()),
            },
        }
    }

    /// Returns the callers that the token of the request stands for. `None` unless the request has exactly one
    /// Authorization field, with a known token.
    pub fn token_callers(&self, request: &Request) -> Option<Callers> {
        let tokens = self.tokens.as_ref()?;
        let mut fields = request.header_values("authorization");
        let field = fields.next().filter(|_| fields.next().is_none()).and_then(|value| value.split_once(' '));
        let bearer = field.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let carried = bearer.map(|(_, token)| digest(token.trim()))?;
        // Compares all tokens, so that the time does not tell which token is similar.
        let equal = tokens.iter().filter(|(expected, _)| carried.ct_eq(expected).into());
        equal.fold(None, |_, (_, callers)| Some(*callers))
    }

    /// Returns the CORS fields that the answer to a request needs, for a browser with a page of another origin.
    pub fn cors(&self, request: &Request) -> Cors {
        let fields = request.header_fields().map(|(name, value)| (name, value.as_bytes()));
        Cors::for_request(&self.allowed_origins, fields)
    }

    /// Returns true if the Host names this service. By DNS rebinding, the owner of a foreign page lets the name of the
    /// page resolve to this server. The browser then takes the page and the service for one origin, and lets the page
    /// read the answers. Only the Host of such a request tells that it is a foreign page's.
    fn is_accepted(&self, authority: &str) -> bool {
        let Some(hosts) = &self.accepted_hosts else { return true };
        let name = hosts::without_port(authority);
        hosts::is_local_host(authority) || hosts.iter().any(|accepted| accepted.eq_ignore_ascii_case(name))
    }
}

/// Returns the digests of all tokens of the settings, each with the callers that it stands for.
fn tokens(config: &Config) -> Vec<([u8; 32], Callers)> {
    let settings = [
        (&config.api_token, Callers::Full),
        (&config.api_token_read, Callers::Read),
        (&config.api_token_login, Callers::Login),
    ];
    let digests = settings.into_iter().flat_map(|(tokens, callers)| {
        let tokens = tokens.iter().flat_map(|tokens| tokens.expose().split_whitespace());
        tokens.map(move |token| (digest(token), callers))
    });
    digests.collect()
}

fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

/// Returns true if a browser sends this change for a page of another origin, by the rules of Go 1.25's
/// CrossOriginProtection. Browsers of today tell so in Sec-Fetch-Site; older ones send the page's Origin, which has to
/// name this host. Clients that send neither are no browsers.
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

    fn admit(access: &Access, request: &Request, callers: Callers) -> Result<(), Error> {
        access.admit(request, callers, &access.cors(request), access.token_callers(request))
    }

    fn access(token: Option<&str>) -> Access {
        let allowed_hosts = vec!["a".to_owned(), "Users.Example".to_owned()];
        let api_token = token.map(Into::into);
        Access::new(&Config { host: "api.example".to_owned(), allowed_hosts, api_token, ..Config::default() })
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
            let result = admit(&access, &request("GET", headers), Callers::Full);
            assert_eq!(result.is_ok(), *welcome, "{headers:?}");
        }
        assert!(admit(&self::access(None), &request("GET", &[]), Callers::Full).is_ok());
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
            let result = admit(&access(None), &request(method, headers), Callers::Full);
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
                    let result = admit(&access(None), &request, Callers::Full);
                    assert_eq!(result.is_ok(), allowed, "{method} {headers:?}");
                    if let Err(error) = result {
                        assert!(matches!(error, Error::HostNotAllowed), "{error:?}");
                    }
                    let with_token = request.clone().with("Authorization", "Bearer s3cret");
                    assert!(
                        admit(&access(Some("s3cret")), &with_token, Callers::Full).is_ok(),
                        "a token suffices"
                    );
                    let any =
                        Access::new(&Config { allowed_hosts: vec!["*".to_owned()], ..Config::default() });
                    assert!(admit(&any, &request, Callers::Full).is_ok(), "* is any name");
                    // Admits a request without an address, which came over a Unix socket or over none.
                    request.peer = None;
                    assert!(admit(&access(None), &request, Callers::Full).is_ok());
                }
            }
        }
        assert!(admit(&access(None), &request("GET", &[]), Callers::Full).is_ok(), "HTTP/1.0 without a Host");
    }
}
