//! The table of routes: the endpoint of each method of each path, and the clients that may use it.
//!
//! The answers to OPTIONS, the answers 404 and 405, and the labels of the metrics follow from this table.

use super::{App, pages};
use crate::error::{Error, PATCH_TYPES};
use crate::http::{Method, Response, percent_decode};
use crate::users::user::parse_id;
use Callers::{Any, Full, Known, Login, Read};
use Method::{Delete, Get, Head, Options, Patch, Post, Put};
use std::{borrow::Cow, slice};

/// A path and its methods. HEAD is served wherever GET is, OPTIONS for each path.
#[derive(Debug)]
pub(crate) struct Route {
    /// The path, as the OpenAPI description and the metrics have it. `{id}` stands for one segment that is not empty.
    pub path: &'static str,
    methods: &'static [(Method, Endpoint, Callers)],
}

/// The clients that may use a route (clients with `API_TOKEN` may use all), and the clients that a token stands for.
/// The log has the names in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Callers {
    /// All clients may use the route: its answer tells nothing of the users.
    Any,
    /// Clients with any token may use the route.
    Known,
    /// Clients with the token for reads.
    Read,
    /// Clients with the token for logins.
    Login,
    /// Clients with `API_TOKEN` alone.
    Full,
}

/// An operation or a page.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Endpoint {
    List,
    Create,
    Find,
    Update,
    Patch,
    Delete,
    Authenticate,
    /// A page: this function returns its answer.
    Page(fn(&App) -> Response),
    /// The answer to OPTIONS: it lists the methods of these routes.
    Options(&'static [Route]),
}

/// The endpoint that a request asks for, and the clients that may use it.
#[derive(Debug)]
pub(crate) struct FoundRoute {
    /// The value of the label `route` in the metrics: the path of the route, or `other` if the table has no such path.
    pub metrics_label: &'static str,
    /// The endpoint, or an error: [`Error::NotFound`], [`Error::MethodNotAllowed`], or [`Error::NotImplemented`] if no
    /// path has such a method.
    pub endpoint: Result<Endpoint, Error>,
    /// The callers that may use the endpoint.
    pub callers: Callers,
    /// The id in the path; `None` if the path has none, or no user can have this id.
    pub user: Option<i64>,
    /// The clients that the token of the request stands for; `None` without a known token.
    pub token: Option<Callers>,
}

/// The path of the page for the browser. Not every service has the page.
const UI: &str = "/ui";

/// The table of routes. If two rows match a path, the first one is taken.
static ROUTES: [Route; 9] = [
    Route { path: "/users", methods: &[(Get, Endpoint::List, Read), (Post, Endpoint::Create, Full)] },
    Route { path: "/users/authenticate", methods: &[(Post, Endpoint::Authenticate, Login)] },
    Route {
        path: "/users/{id}",
        methods: &[
            (Get, Endpoint::Find, Read),
            (Put, Endpoint::Update, Full),
            (Patch, Endpoint::Patch, Full),
            (Delete, Endpoint::Delete, Full),
        ],
    },
    Route { path: ANSWERED_AT_ONCE[0], methods: &[(Get, Endpoint::Page(pages::answer_livez), Any)] },
    Route { path: ANSWERED_AT_ONCE[1], methods: &[(Get, Endpoint::Page(pages::answer_readyz), Any)] },
    Route { path: "/metrics", methods: &[(Get, Endpoint::Page(pages::answer_metrics), Read)] },
    Route { path: "/openapi.json", methods: &[(Get, Endpoint::Page(pages::answer_description), Any)] },
    Route { path: UI, methods: &[(Get, Endpoint::Page(pages::answer_ui), Any)] },
    Route { path: "/", methods: &[(Get, Endpoint::Page(pages::answer_index), Any)] },
];

/// The paths that the frontend answers at once, without a worker.
pub(crate) const ANSWERED_AT_ONCE: [&str; 2] = ["/livez", "/readyz"];

impl Route {
    /// Returns true if a service has the route. `ui`: the service has the page for the browser.
    fn is_served(&self, ui: bool) -> bool {
        ui || self.path != UI
    }

    fn endpoint(&'static self, method: Method) -> Option<(Endpoint, Callers)> {
        let method = match method {
            Head => Get,
            Options => {
                let is_open = self.methods.iter().all(|(.., callers)| *callers == Any);
                let options = Endpoint::Options(slice::from_ref(self));
                return Some((options, if is_open { Any } else { Known }));
            }
            method => method,
        };
        let row = self.methods.iter().find(|(served, ..)| *served == method);
        row.map(|(_, endpoint, callers)| (*endpoint, *callers))
    }
}

/// Finds the endpoint of a request. `ui`: the service has the page for the browser.
pub(crate) fn find_endpoint(method: Method, path: &str, ui: bool) -> FoundRoute {
    let found = find_route(path);
    let metrics_label = found.as_ref().map_or("other", |(route, _)| route.path);
    let no_user = |endpoint| FoundRoute { metrics_label, endpoint, callers: Any, user: None, token: None };
    match found.filter(|(route, _)| route.is_served(ui)) {
        Some((route, last)) => match route.endpoint(method) {
            Some((endpoint, callers)) => {
                FoundRoute { callers, user: parse_id(&last), ..no_user(Ok(endpoint)) }
            }
            None => no_user(Err(Error::MethodNotAllowed(allowed_methods(slice::from_ref(route))))),
        },
        None if (method, path) == (Options, "*") => no_user(Ok(Endpoint::Options(&ROUTES))),
        None => no_user(Err(refuse_path(method, path, ui))),
    }
}

/// Returns the refusal of a path that no route has: a hint at the right path if slashes alone are wrong.
fn refuse_path(method: Method, path: &str, ui: bool) -> Error {
    if method == Method::Other {
        return Error::NotImplemented("the method is not served on any path");
    }
    let meant = without_surplus_slashes(path);
    match find_route(&meant).filter(|(route, _)| meant != path && route.is_served(ui)) {
        Some((route, _)) => {
            Error::SurplusSlash(format!("the path is {}, without a further slash", route.path))
        }
        None => Error::NotFound,
    }
}

/// Returns a path without doubled slashes and without a slash at its end: `/users` for `//users/`.
pub(crate) fn without_surplus_slashes(path: &str) -> String {
    let segments = path.split('/').filter(|segment| !segment.is_empty());
    segments.flat_map(|segment| ["/", segment]).collect()
}

/// Returns the value of `Allow`: the methods of these routes.
fn allowed_methods(routes: &'static [Route]) -> String {
    let methods = [Get, Head, Post, Put, Patch, Delete, Options].into_iter();
    let served = methods.filter(|method| routes.iter().any(|route| route.endpoint(*method).is_some()));
    served.map(Method::name).collect::<Vec<_>>().join(", ")
}

/// Answers OPTIONS of these routes.
pub(crate) fn answer_options(routes: &'static [Route]) -> Response {
    let response = Response::no_content().with("Allow", allowed_methods(routes));
    match routes {
        [route] if route.endpoint(Patch).is_some() => response.with("Accept-Patch", PATCH_TYPES),
        _ => response,
    }
}

/// Returns whether the frontend answers requests of this path at once.
pub(crate) fn is_answered_at_once(path: &str) -> bool {
    percent_decode(path).is_some_and(|path| ANSWERED_AT_ONCE.contains(&&*path))
}

/// Returns the route of a path, and the last segment of the path, decoded. An encoded slash does not end a segment. No
/// route has three segments.
fn find_route(path: &str) -> Option<(&'static Route, Cow<'_, str>)> {
    let (first, rest) = split_path(path)?;
    let (first, second) = (percent_decode(first)?, rest.filter(|rest| !rest.contains('/')));
    let second = second.map_or(Some(None), |second| percent_decode(second).map(Some))?;
    let matches = |route: &&Route| {
        let (own_first, own_second) = split_path(route.path).unwrap_or_default();
        let is_id = own_second == Some("{id}") && second.as_ref().is_some_and(|id| !id.is_empty());
        own_first == first && (is_id || own_second == second.as_deref())
    };
    let route = ROUTES.iter().find(matches).filter(|_| rest.is_some() == second.is_some())?;
    Some((route, second.unwrap_or(first)))
}

/// Returns the first segment of a path, and the rest of it.
fn split_path(path: &str) -> Option<(&str, Option<&str>)> {
    let path = path.strip_prefix('/')?;
    Some(path.split_once('/').map_or((path, None), |(first, rest)| (first, Some(rest))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

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
            assert_eq!(find_endpoint(Get, path, true).metrics_label, expected.unwrap_or("other"), "{path}");
        }
    }

    /// Returns the endpoint and the user of a request, or the status of its refusal.
    fn found(method: &str, path: &str) -> String {
        let FoundRoute { metrics_label, endpoint, user, .. } = find_endpoint(method.into(), path, true);
        match endpoint {
            Ok(Endpoint::Options(routes)) => allowed_methods(routes),
            Ok(Endpoint::Page(_)) => format!("page {metrics_label}"),
            Ok(endpoint) => format!("{endpoint:?} {}", user.unwrap_or_default()),
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
            ("GET", "/metrics", "page /metrics"),
            ("HEAD", "/metrics", "page /metrics"),
            ("OPTIONS", "/metrics", "GET, HEAD, OPTIONS"),
            ("POST", "/metrics", "405"),
            ("GET", "/metrics/", "404"),
            ("GET", "/openapi.json", "page /openapi.json"),
            ("HEAD", "/openapi.json", "page /openapi.json"),
            ("OPTIONS", "/openapi.json", "GET, HEAD, OPTIONS"),
            ("POST", "/openapi.json", "405"),
            ("GET", "/openapi.json/", "404"),
            ("GET", "/ui", "page /ui"),
            ("OPTIONS", "/ui", "GET, HEAD, OPTIONS"),
            ("POST", "/ui", "405"),
            ("HEAD", "/livez", "page /livez"),
            ("GET", "/%72eadyz", "page /readyz"),
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
            ("GET", "/", "page /"),
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
        let callers = |method: &str, path: &str| find_endpoint(method.into(), path, true).callers;
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
        let status =
            |method: &str| find_endpoint(method.into(), "/ui", false).endpoint.unwrap_err().answer().status;
        assert_eq!(["GET", "HEAD", "OPTIONS", "POST", "BREW"].map(status), [404, 404, 404, 404, 501]);
        assert!(find_endpoint(Get, "/livez", false).endpoint.is_ok());
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
        ];
        for (path, meant) in rows {
            match (find_endpoint(Get, path, true).endpoint.unwrap_err(), meant) {
                (Error::SurplusSlash(found), Some(meant)) => {
                    assert_eq!(found, format!("the path is {meant}, without a further slash"), "{path}");
                }
                (Error::NotFound, None) => {}
                (other, _) => panic!("{path}: {other:?}"),
            }
        }
        assert!(matches!(find_endpoint(Get, "/ui/", false).endpoint, Err(Error::NotFound)));
    }

    /// Checks that the description has the methods that are served, path by path, but for the page for people.
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
                let serves = route.endpoint(method).is_some();
                assert_eq!(described.contains_key(&name), serves, "{name} {}", route.path);
            }
        }
    }
}
