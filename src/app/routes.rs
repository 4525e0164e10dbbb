//! The table of routes: what a method of a path asks for, who may ask, and which fields of the head that depends on.
//!
//! `Allow`, 404 and 405, the labels of figures, the fields that the frontend keeps and what it answers at once follow
//! from it. Knows no endpoint but its name.

use super::access;
use crate::{
    error::Error,
    http::{Method, percent_decode},
};
use Method::{Delete, Get, Head, Options, Patch, Post, Put};
use std::{borrow::Cow, slice, sync::LazyLock};

/// A path and what its methods ask for. HEAD is served wherever GET is, OPTIONS everywhere.
#[derive(Debug)]
pub(crate) struct Route {
    /// As the description and the figures have it; `{id}` stands for one segment that is not empty.
    pub path: &'static str,
    methods: &'static [(Method, Endpoint, Callers, &'static [&'static str])],
}

/// Clients that may ask, beside those with the token for everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Callers {
    /// All clients: the answer tells nothing of the users.
    Any,
    /// Clients with any token.
    Known,
    /// Clients with the token for reads.
    Read,
    /// Clients with the token for logins.
    Login,
    /// No others.
    Full,
}

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Endpoint {
    List,
    Create,
    Find,
    Update,
    Patch,
    Delete,
    Authenticate,
    /// The frontend answers it at once.
    Health(Probe),
    Metrics,
    Description,
    /// The page for the browser.
    Ui,
    /// The paths to begin with.
    Index,
    /// The methods of these routes.
    Options(&'static [Route]),
}

/// The two questions about health.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Probe {
    /// Whether the process serves.
    Live,
    /// Whether it should get requests.
    Ready,
}

/// What a request asks for by its method and path.
#[derive(Debug)]
pub(crate) struct Asked {
    pub endpoint: Endpoint,
    pub callers: Callers,
    /// The user in the path, where it names one that there can be.
    pub user: Option<i64>,
}

const BODY: &[&str] = &["content-type", "content-encoding"];
const KEYED_BODY: &[&str] = &["content-type", "content-encoding", "idempotency-key"];
const TAGS: &[&str] = &["if-match", "if-none-match"];
const BODY_AND_TAGS: &[&str] = &["content-type", "content-encoding", "if-match", "if-none-match"];

/// The path of the page for the browser, which not every service has.
const UI: &str = "/ui";

/// The table. Of two rows that a path fits, the first one has it.
static ROUTES: [Route; 9] = [
    Route {
        path: "/users",
        methods: &[
            (Get, Endpoint::List, Callers::Read, &[]),
            (Post, Endpoint::Create, Callers::Full, KEYED_BODY),
        ],
    },
    Route { path: "/users/authenticate", methods: &[(Post, Endpoint::Authenticate, Callers::Login, BODY)] },
    Route {
        path: "/users/{id}",
        methods: &[
            (Get, Endpoint::Find, Callers::Read, TAGS),
            (Put, Endpoint::Update, Callers::Full, BODY_AND_TAGS),
            (Patch, Endpoint::Patch, Callers::Full, BODY_AND_TAGS),
            (Delete, Endpoint::Delete, Callers::Full, TAGS),
        ],
    },
    Route { path: "/livez", methods: &[(Get, Endpoint::Health(Probe::Live), Callers::Any, &[])] },
    Route { path: "/readyz", methods: &[(Get, Endpoint::Health(Probe::Ready), Callers::Any, &[])] },
    Route { path: "/metrics", methods: &[(Get, Endpoint::Metrics, Callers::Read, &[])] },
    Route { path: "/openapi.json", methods: &[(Get, Endpoint::Description, Callers::Any, &[])] },
    Route { path: UI, methods: &[(Get, Endpoint::Ui, Callers::Any, &["if-none-match"])] },
    Route { path: "/", methods: &[(Get, Endpoint::Index, Callers::Any, &[])] },
];

impl Route {
    /// Returns what a method asks for, and which clients may.
    fn endpoint(&'static self, method: Method) -> Option<(Endpoint, Callers)> {
        let method = match method {
            Head => Get,
            Options => {
                let is_open = self.methods.iter().all(|(.., callers, _)| *callers == Callers::Any);
                let callers = if is_open { Callers::Any } else { Callers::Known };
                return Some((Endpoint::Options(slice::from_ref(self)), callers));
            }
            method => method,
        };
        let row = self.methods.iter().find(|(served, ..)| *served == method);
        row.map(|(_, endpoint, callers, _)| (*endpoint, *callers))
    }

    /// Whether it serves a method.
    pub fn serves(&'static self, method: Method) -> bool {
        self.endpoint(method).is_some()
    }

    /// Whether the frontend answers all of it at once.
    pub fn is_at_once(&self) -> bool {
        self.methods.iter().all(|(_, endpoint, ..)| matches!(endpoint, Endpoint::Health(_)))
    }

    fn fits(&self, first: &str, second: Option<&str>) -> bool {
        let mut segments = self.path[1..].split('/');
        segments.next() == Some(first)
            && match (segments.next(), second) {
                (Some(own), Some(second)) => own == "{id}" || own == second,
                (own, second) => own == second,
            }
    }
}

/// What is asked for; else [`Error::NotFound`], [`Error::MethodNotAllowed`], or [`Error::NotImplemented`] where no path
/// has such a method. `ui`: whether the page for the browser is served.
pub(crate) fn find(method: Method, path: &str, ui: bool) -> Result<Asked, Error> {
    if (method, path) == (Options, "*") {
        // It asks about the server as a whole.
        return Ok(Asked { endpoint: Endpoint::Options(&ROUTES), callers: Callers::Any, user: None });
    }
    let is_served = |(at, _): &(usize, _)| ui || ROUTES[*at].path != UI;
    let Some((at, second)) = row(path).filter(is_served) else {
        return Err(match method {
            Method::Other => Error::NotImplemented("the method is not served on any path"),
            _ => {
                let meant = without_further_slashes(path);
                row(&meant).filter(is_served).map_or(Error::NotFound, |(at, _)| {
                    Error::FurtherSlash(format!("the path is {}, without a further slash", ROUTES[at].path))
                })
            }
        });
    };
    let route = &ROUTES[at];
    let asked = route.endpoint(method);
    let (endpoint, callers) = asked.ok_or_else(|| Error::MethodNotAllowed(allow(slice::from_ref(route))))?;
    Ok(Asked { endpoint, callers, user: second.and_then(|text| parse_id(&text)) })
}

/// The value of `Allow`: what these routes serve.
pub(crate) fn allow(routes: &'static [Route]) -> String {
    let methods = [Get, Head, Post, Put, Patch, Delete, Options].into_iter();
    let served = methods.filter(|method| routes.iter().any(|route| route.serves(*method)));
    served.map(Method::name).collect::<Vec<_>>().join(", ")
}

/// Returns the label of a path's route in figures; `other` if it has none.
pub(crate) fn label(path: &str) -> &'static str {
    row(path).map_or("other", |(at, _)| ROUTES[at].path)
}

/// The fields of a head that any route reads, in lower case, beside Host. All others need not be passed on.
pub(crate) fn fields() -> &'static [&'static str] {
    static FIELDS: LazyLock<Vec<&str>> = LazyLock::new(|| {
        let of_rows = ROUTES.iter().flat_map(|route| route.methods).flat_map(|(.., fields)| *fields);
        let mut fields: Vec<&str> = access::FIELDS.iter().chain(of_rows).copied().collect();
        fields.sort_unstable();
        fields.dedup();
        fields
    });
    &FIELDS
}

/// The paths that the frontend answers at once.
pub(crate) fn at_once() -> &'static [&'static str] {
    static PATHS: LazyLock<Vec<&str>> =
        LazyLock::new(|| ROUTES.iter().filter(|route| route.is_at_once()).map(|route| route.path).collect());
    &PATHS
}

/// The row that a path fits, and the second segment of the path. A segment with an encoded slash is one segment.
fn row(path: &str) -> Option<(usize, Option<Cow<'_, str>>)> {
    let mut segments = path.strip_prefix('/')?.split('/');
    let (first, second, None) = (segments.next()?, segments.next(), segments.next()) else {
        return None;
    };
    let first = percent_decode(first)?;
    let second = match second {
        None => None,
        Some(text) => Some(percent_decode(text).filter(|text| !text.is_empty())?),
    };
    let at = ROUTES.iter().position(|route| route.fits(&first, second.as_deref()))?;
    Some((at, second))
}

/// Returns the path with one slash for each run of them, and none at its end.
fn without_further_slashes(path: &str) -> String {
    path.strip_prefix('/')
        .unwrap_or_default()
        .split('/')
        .filter(|segment| !segment.is_empty())
        .map(|segment| format!("/{segment}"))
        .collect()
}

/// The id, where the text is the canonical decimal of a positive bigint; no other text names a user.
fn parse_id(text: &str) -> Option<i64> {
    let canonical = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| canonical)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::{fs, path::Path};

    #[test]
    fn labels_of_paths() {
        let rows = [
            ("/users", Some("/users")),
            ("/%75sers", Some("/users")),
            ("/users/1", Some("/users/{id}")),
            ("/users/a%2Fb", Some("/users/{id}")),
            ("/users/authenticate", Some("/users/authenticate")),
            ("/users/%61uthenticate", Some("/users/authenticate")),
            ("/livez", Some("/livez")),
            ("/%6civez", Some("/livez")),
            ("/readyz", Some("/readyz")),
            ("/metrics", Some("/metrics")),
            ("/openapi.json", Some("/openapi.json")),
            ("/ui", Some("/ui")),
            ("/users/", None),
            ("/users/1/x", None),
            ("/users/%", None),
            ("/metrics/", None),
            ("/livez/", None),
            ("livez", None),
            ("/Livez", None),
            ("/%", None),
            ("/", Some("/")),
            ("//", None),
            ("*", None),
            ("", None),
        ];
        for (path, expected) in rows {
            assert_eq!(label(path), expected.unwrap_or("other"), "{path}");
        }
        assert_eq!(at_once(), ["/livez", "/readyz"]);
    }

    /// What is found, in short: the endpoint with the user, or the status.
    fn found(method: &str, path: &str) -> String {
        match find(method.into(), path, true) {
            Ok(Asked { endpoint: Endpoint::Options(routes), .. }) => allow(routes),
            Ok(Asked { endpoint, user, .. }) => format!("{endpoint:?} {}", user.unwrap_or_default()),
            Err(error) => error.answer().status.to_string(),
        }
    }

    #[test]
    fn what_is_asked_for() {
        let rows = [
            ("GET", "/users", "List 0"),
            ("HEAD", "/users", "List 0"),
            ("POST", "/users", "Create 0"),
            ("GET", "/%75sers", "List 0"),
            ("GET", "/users/42", "Find 42"),
            ("GET", "/users/%34%32", "Find 42"),
            ("PUT", "/users/9223372036854775807", "Update 9223372036854775807"),
            ("PATCH", "/users/%34%32", "Patch 42"),
            ("PATCH", "/users/x", "Patch 0"),
            ("DELETE", "/users/9223372036854775808", "Delete 0"),
            ("GET", "/users/0", "Find 0"),
            ("GET", "/users/-1", "Find 0"),
            ("GET", "/users/+1", "Find 0"),
            ("GET", "/users/007", "Find 0"),
            ("GET", "/users/abc", "Find 0"),
            ("GET", "/users/%31%00", "Find 0"),
            ("GET", "/users/1%2F2", "Find 0"),
            ("POST", "/users/authenticate", "Authenticate 0"),
            ("OPTIONS", "/users", "GET, HEAD, POST, OPTIONS"),
            ("OPTIONS", "/users/1", "GET, HEAD, PUT, PATCH, DELETE, OPTIONS"),
            ("OPTIONS", "/users/authenticate", "POST, OPTIONS"),
            ("OPTIONS", "*", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
            ("GET", "/metrics", "Metrics 0"),
            ("HEAD", "/metrics", "Metrics 0"),
            ("OPTIONS", "/metrics", "GET, HEAD, OPTIONS"),
            ("POST", "/metrics", "405"),
            ("GET", "/metrics/", "404"),
            ("GET", "/openapi.json", "Description 0"),
            ("HEAD", "/openapi.json", "Description 0"),
            ("OPTIONS", "/openapi.json", "GET, HEAD, OPTIONS"),
            ("POST", "/openapi.json", "405"),
            ("GET", "/openapi.json/", "404"),
            ("GET", "/ui", "Ui 0"),
            ("OPTIONS", "/ui", "GET, HEAD, OPTIONS"),
            ("POST", "/ui", "405"),
            ("HEAD", "/livez", "Health(Live) 0"),
            ("GET", "/%72eadyz", "Health(Ready) 0"),
            ("OPTIONS", "/livez", "GET, HEAD, OPTIONS"),
            ("POST", "/readyz", "405"),
            ("GET", "/users/authenticate", "405"),
            ("PATCH", "/users", "405"),
            ("DELETE", "/users", "405"),
            ("POST", "/users/1", "405"),
            ("get", "/users", "405"),
            ("GET", "/users/", "404"),
            ("GET", "/users/1/", "404"),
            ("GET", "/users/1/x", "404"),
            ("GET", "/users/%", "404"),
            ("GET", "/users/%ff", "404"),
            ("GET", "/", "Index 0"),
            ("OPTIONS", "/", "GET, HEAD, OPTIONS"),
            ("POST", "/", "405"),
            ("GET", "//", "404"),
            ("GET", "//users", "404"),
            ("GET", "/Users", "404"),
            ("GET", "*", "404"),
            ("GET", "", "404"),
            ("OPTIONS", "/other", "404"),
            ("PATCH", "/other", "404"),
            ("BREW", "/other", "501"),
            ("CONNECT", "example.com:443", "501"),
        ];
        for (method, path, expected) in rows {
            assert_eq!(found(method, path), expected, "{method} {path}");
        }
    }

    #[test]
    fn clients_that_may_ask() {
        let callers = |method: &str, path: &str| find(method.into(), path, true).unwrap().callers;
        let rows = [
            ("GET", "/users", Callers::Read),
            ("HEAD", "/users", Callers::Read),
            ("GET", "/users/x", Callers::Read),
            ("GET", "/metrics", Callers::Read),
            ("POST", "/users/authenticate", Callers::Login),
            ("OPTIONS", "/users/1", Callers::Known),
            ("OPTIONS", "/livez", Callers::Any),
            ("OPTIONS", "*", Callers::Any),
            ("GET", "/", Callers::Any),
            ("GET", "/ui", Callers::Any),
            ("GET", "/openapi.json", Callers::Any),
            ("GET", "/readyz", Callers::Any),
        ];
        for (method, path, expected) in rows {
            assert_eq!(callers(method, path), expected, "{method} {path}");
        }
        for (method, path) in
            [("POST", "/users"), ("PUT", "/users/1"), ("PATCH", "/users/1"), ("DELETE", "/users/1")]
        {
            assert_eq!(callers(method, path), Callers::Full, "{method} {path}");
        }
    }

    #[test]
    fn without_the_page_its_path_is_none() {
        let status = |method: &str| find(method.into(), "/ui", false).unwrap_err().answer().status;
        assert_eq!(["GET", "HEAD", "OPTIONS", "POST", "BREW"].map(status), [404, 404, 404, 404, 501]);
        assert!(find(Get, "/livez", false).is_ok());
    }

    #[test]
    fn further_slashes_are_told() {
        let rows = [
            ("/users/", Some("/users")),
            ("//users", Some("/users")),
            ("/users/1/", Some("/users/{id}")),
            ("/users//1//", Some("/users/{id}")),
            ("/ui/", Some("/ui")),
            ("/metrics/", Some("/metrics")),
            ("/livez/", Some("/livez")),
            ("/users/1/x/", None),
            ("/other/", None),
            ("//", None),
            ("", None),
            ("users/", None),
        ];
        for (path, meant) in rows {
            match (find(Get, path, true).unwrap_err(), meant) {
                (Error::FurtherSlash(found), Some(meant)) => {
                    assert_eq!(found, format!("the path is {meant}, without a further slash"), "{path}");
                }
                (Error::NotFound, None) => {}
                (other, _) => panic!("{path}: {other:?}"),
            }
        }
        assert!(matches!(find(Get, "/ui/", false), Err(Error::NotFound)));
    }

    /// Path by path, what is served is what is described; the page is for people.
    #[test]
    fn all_of_it_is_described() {
        let text = include_str!("../../schemas/openapi.json");
        let description: Value = serde_json::from_str(text).unwrap();
        let paths = description["paths"].as_object().unwrap();
        assert_eq!(paths.len(), ROUTES.len() - 1);
        for route in ROUTES.iter().filter(|route| route.path != UI) {
            let described = paths[route.path].as_object().unwrap();
            for method in [Get, Head, Post, Put, Patch, Delete, Options] {
                let name = method.name().to_ascii_lowercase();
                assert_eq!(described.contains_key(&name), route.serves(method), "{name} {}", route.path);
            }
        }
    }

    #[test]
    fn fields_of_heads() {
        let expected = [
            "authorization",
            "content-encoding",
            "content-type",
            "idempotency-key",
            "if-match",
            "if-none-match",
            "origin",
            "sec-fetch-site",
        ];
        assert_eq!(fields(), expected);
    }

    /// The frontend drops a field that no row names, and what looks it up would see it as absent.
    #[test]
    fn each_field_that_is_looked_up_is_in_a_row() {
        fn look_ups(dir: &Path, found: &mut Vec<String>) {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    look_ups(&path, found);
                    continue;
                }
                let text = fs::read_to_string(path).unwrap();
                let (code, _) = text.split_once("#[cfg(test)]").unwrap_or((&text, ""));
                for call in ["request.header(\"", "request.fields(\"", "tags(request, \""] {
                    found.extend(
                        code.split(call).skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()),
                    );
                }
            }
        }
        let mut found = Vec::new();
        look_ups(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/app"), &mut found);
        assert!(found.len() > 10, "{found:?}");
        found.iter().for_each(|name| assert!(name == "host" || fields().contains(&name.as_str()), "{name}"));
    }
}
