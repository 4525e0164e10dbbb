//! The table of routes: for each path and method, the endpoint and the rights that a request needs.
//!
//! The answers to OPTIONS, the answers 404 and 405, and the labels of the metrics are made from this table.

use super::{App, pages};
use crate::error::{Error, PATCH_TYPES};
use crate::http::{Method, Response, percent_decode};
use crate::users::user::parse_id;
use Method::{Delete, Get, Head, Options, Patch, Post, Put};
use Rights::{AnyToken, Full, Login, Public, Read};
use std::{borrow::Cow, slice};

/// A path and its methods. A path with GET also has HEAD, and each path has OPTIONS.
#[derive(Debug)]
pub(crate) struct Route {
    /// The path, written as in the OpenAPI description and the metrics. `{id}` stands for any one segment that is not
    /// empty.
    pub path: &'static str,
    /// The methods except HEAD and OPTIONS, each with its endpoint and the rights that a request needs.
    methods: &'static [(Method, Endpoint, Rights)],
}

/// The rights that a route requires, or that a token gives. A token of `API_TOKEN` suffices for every route. The log
/// writes the rights of a token in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Rights {
    /// The route needs no token, because its answer tells nothing of the users.
    Public,
    /// The route needs a token, whatever its rights.
    AnyToken,
    /// The rights of a token of `API_TOKEN_READ`.
    Read,
    /// The rights of a token of `API_TOKEN_LOGIN`.
    Login,
    /// The rights of a token of `API_TOKEN`.
    Full,
}

/// A handler of requests: an operation on users, or a page that contains no user.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Endpoint {
    /// `GET /users`.
    List,
    /// `POST /users`.
    Create,
    /// `GET /users/{id}`.
    Find,
    /// `PUT /users/{id}`.
    Update,
    /// `PATCH /users/{id}`.
    Patch,
    /// `DELETE /users/{id}`.
    Delete,
    /// `POST /users/authenticate`.
    Authenticate,
    /// A page that contains no user, such as `/metrics`. The function makes its answer.
    Page(fn(&App) -> Response),
    /// The answer to OPTIONS, which lists the methods of these routes.
    ListMethods(&'static [Route]),
}

/// The result of looking a request up in the table of routes.
#[derive(Debug)]
pub(crate) struct FoundRoute {
    /// The value of the label `route` in the metrics: the path of the route, or `other` if the table has no such path.
    pub route_label: &'static str,
    /// The endpoint, or an error: [`Error::NotFound`], [`Error::MethodNotAllowed`], or [`Error::NotImplemented`] if no
    /// path has such a method.
    pub endpoint: Result<Endpoint, Error>,
    /// The rights that a request to the endpoint needs.
    pub required_rights: Rights,
    /// The id of a user in the path; `None` if the path has no id, or one that no user can have.
    pub user_id: Option<i64>,
    /// The rights that the token of the request gives; `None` if the request has no token or an unknown one.
    pub token_rights: Option<Rights>,
}

/// The path of the page for the browser, which not every service has.
const UI_PATH: &str = "/ui";

/// The table of routes. If several routes match a path, the first of them is taken.
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
    Route { path: HEALTH_PATHS[0], methods: &[(Get, Endpoint::Page(pages::answer_livez), Public)] },
    Route { path: HEALTH_PATHS[1], methods: &[(Get, Endpoint::Page(pages::answer_readyz), Public)] },
    Route { path: "/metrics", methods: &[(Get, Endpoint::Page(pages::answer_metrics), Read)] },
    Route { path: "/openapi.json", methods: &[(Get, Endpoint::Page(pages::answer_openapi), Public)] },
    Route { path: UI_PATH, methods: &[(Get, Endpoint::Page(pages::answer_ui), Public)] },
    Route { path: "/", methods: &[(Get, Endpoint::Page(pages::answer_index), Public)] },
];

/// The paths of health checks. The frontend answers them itself, so that they are answered while all workers are busy.
pub(crate) const HEALTH_PATHS: [&str; 2] = ["/livez", "/readyz"];

impl Route {
    /// Returns true if a service has this route. `has_ui`: the service has the page for the browser.
    fn is_served(&self, has_ui: bool) -> bool {
        has_ui || self.path != UI_PATH
    }

    /// Returns the endpoint for a method, and the rights that a request needs; `None` if the path lacks the method.
    fn endpoint_for(&'static self, method: Method) -> Option<(Endpoint, Rights)> {
        let method = match method {
            Head => Get,
            Options => {
                let is_public = self.methods.iter().all(|(.., rights)| *rights == Public);
                let options = Endpoint::ListMethods(slice::from_ref(self));
                return Some((options, if is_public { Public } else { AnyToken }));
            }
            method => method,
        };
        let row = self.methods.iter().find(|(served, ..)| *served == method);
        row.map(|(_, endpoint, rights)| (*endpoint, *rights))
    }
}

/// Finds the endpoint for a method and a path. `has_ui`: the service has the page for the browser.
pub(crate) fn find_route(method: Method, path: &str, has_ui: bool) -> FoundRoute {
    let found = find_route_and_last_segment(path);
    let route_label = found.as_ref().map_or("other", |(route, _)| route.path);
    let (required_rights, user_id, token_rights) = (Public, None, None);
    let no_user = |endpoint| FoundRoute { route_label, endpoint, required_rights, user_id, token_rights };
    match found.filter(|(route, _)| route.is_served(has_ui)) {
        Some((route, last)) => match route.endpoint_for(method) {
            Some((endpoint, required_rights)) => {
                FoundRoute { required_rights, user_id: parse_id(&last), ..no_user(Ok(endpoint)) }
            }
            None => no_user(Err(Error::MethodNotAllowed(list_methods(slice::from_ref(route))))),
        },
        None if (method, path) == (Options, "*") => no_user(Ok(Endpoint::ListMethods(&ROUTES))),
        None => no_user(Err(refuse_path(method, path, has_ui))),
    }
}

/// Returns the error for a path that no route has. It names the right path if the path only has slashes too many.
fn refuse_path(method: Method, path: &str, has_ui: bool) -> Error {
    if method == Method::Other {
        return Error::NotImplemented("the method is not served on any path");
    }
    let meant = without_surplus_slashes(path);
    match find_route_and_last_segment(&meant).filter(|(route, _)| meant != path && route.is_served(has_ui)) {
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

/// Returns the value of the header field `Allow`: the methods that these routes have.
fn list_methods(routes: &'static [Route]) -> String {
    let methods = [Get, Head, Post, Put, Patch, Delete, Options].into_iter();
    let served = methods.filter(|method| routes.iter().any(|route| route.endpoint_for(*method).is_some()));
    served.map(Method::name).collect::<Vec<_>>().join(", ")
}

/// Answers an OPTIONS request for these routes with the methods that they have.
pub(crate) fn answer_options(routes: &'static [Route]) -> Response {
    let response = Response::no_content().with("Allow", list_methods(routes));
    match routes {
        [route] if route.endpoint_for(Patch).is_some() => response.with("Accept-Patch", PATCH_TYPES),
        _ => response,
    }
}

/// Returns true if a path is that of a health check, which the frontend answers itself.
pub(crate) fn is_health_path(path: &str) -> bool {
    percent_decode(path).is_some_and(|path| HEALTH_PATHS.contains(&&*path))
}

/// Finds the route that a path matches. Also returns the last segment of the path, percent-decoded, which may be an id.
/// A slash that is percent-encoded belongs to its segment. A path of three segments matches no route.
fn find_route_and_last_segment(path: &str) -> Option<(&'static Route, Cow<'_, str>)> {
    let (first, rest) = split_first_segment(path)?;
    let (first, second) = (percent_decode(first)?, rest.filter(|rest| !rest.contains('/')));
    let second = second.map_or(Some(None), |second| percent_decode(second).map(Some))?;
    let matches = |route: &&Route| {
        let (own_first, own_second) = split_first_segment(route.path).unwrap_or_default();
        let is_id = own_second == Some("{id}") && second.as_ref().is_some_and(|id| !id.is_empty());
        own_first == first && (is_id || own_second == second.as_deref())
    };
    let route = ROUTES.iter().find(matches).filter(|_| rest.is_some() == second.is_some())?;
    Some((route, second.unwrap_or(first)))
}

/// Returns the first segment of a path, and the part behind its second slash, if it has one.
fn split_first_segment(path: &str) -> Option<(&str, Option<&str>)> {
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
            assert_eq!(find_route(Get, path, true).route_label, expected.unwrap_or("other"), "{path}");
        }
    }

    /// Returns the endpoint and the user of a request, or the status of its refusal.
    fn found(method: &str, path: &str) -> String {
        let FoundRoute { route_label, endpoint, user_id, .. } = find_route(method.into(), path, true);
        match endpoint {
            Ok(Endpoint::ListMethods(routes)) => list_methods(routes),
            Ok(Endpoint::Page(_)) => format!("page {route_label}"),
            Ok(endpoint) => format!("{endpoint:?} {}", user_id.unwrap_or_default()),
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
        let required = |method: &str, path: &str| find_route(method.into(), path, true).required_rights;
        let rows = [
            ("GET", "/users", Rights::Read),
            ("HEAD", "/users", Rights::Read),
            ("GET", "/users/x", Rights::Read),
            ("GET", "/metrics", Rights::Read),
            ("POST", "/users/authenticate", Rights::Login),
            ("OPTIONS", "/users/1", Rights::AnyToken),
            ("OPTIONS", "/livez", Rights::Public),
            ("OPTIONS", "*", Rights::Public),
            ("GET", "/", Rights::Public),
            ("GET", "/ui", Rights::Public),
            ("GET", "/openapi.json", Rights::Public),
            ("GET", "/readyz", Rights::Public),
        ];
        for (method, path, expected) in rows {
            assert_eq!(required(method, path), expected, "{method} {path}");
        }
        for (method, path) in
            [("POST", "/users"), ("PUT", "/users/1"), ("PATCH", "/users/1"), ("DELETE", "/users/1")]
        {
            assert_eq!(required(method, path), Rights::Full, "{method} {path}");
        }
    }

    #[test]
    fn without_the_page_its_path_is_none() {
        let status =
            |method: &str| find_route(method.into(), "/ui", false).endpoint.unwrap_err().answer().status;
        assert_eq!(["GET", "HEAD", "OPTIONS", "POST", "BREW"].map(status), [404, 404, 404, 404, 501]);
        assert!(find_route(Get, "/livez", false).endpoint.is_ok());
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
            match (find_route(Get, path, true).endpoint.unwrap_err(), meant) {
                (Error::SurplusSlash(found), Some(meant)) => {
                    assert_eq!(found, format!("the path is {meant}, without a further slash"), "{path}");
                }
                (Error::NotFound, None) => {}
                (other, _) => panic!("{path}: {other:?}"),
            }
        }
        assert!(matches!(find_route(Get, "/ui/", false).endpoint, Err(Error::NotFound)));
    }

    /// Checks that the description has the methods that are served, path by path, but for the page for people.
    #[test]
    fn all_of_it_is_described() {
        let text = include_str!("../../schemas/openapi.json");
        let description: Value = serde_json::from_str(text).unwrap();
        let paths = description["paths"].as_object().unwrap();
        assert_eq!(paths.len(), ROUTES.len() - 1);
        for route in ROUTES.iter().filter(|route| route.path != UI_PATH) {
            let described = paths[route.path].as_object().unwrap();
            for method in [Get, Head, Post, Put, Patch, Delete, Options] {
                let name = method.name().to_ascii_lowercase();
                let serves = route.endpoint_for(method).is_some();
                assert_eq!(described.contains_key(&name), serves, "{name} {}", route.path);
            }
        }
    }
}
