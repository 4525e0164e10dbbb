//! Pages of other origins: which of them browsers let read answers, and send changes (`ALLOWED_ORIGINS`).

use crate::support::{ADA, Answer, Client, Database, LONG, Process, Service, TOKEN};
use std::time::Duration;
use userd::Request;

const APP: &str = "https://app.example";
const EVIL: &str = "https://evil.example";
const REFUSED: &str =
    r#"{"error":"Cross-origin request refused","message":"ALLOWED_ORIGINS does not name this origin"}"#;

/// The preflight that Chromium 123 sends before `fetch(target, {method, headers})` of a page of that origin.
fn preflight(origin: &str, host: &str, target: &str, method: &str) -> String {
    format!(
        "OPTIONS {target} HTTP/1.1\r\nHost: {host}\r\nConnection: keep-alive\r\nAccept: */*\r\n\
         Access-Control-Request-Method: {method}\r\n\
         Access-Control-Request-Headers: authorization,content-type,idempotency-key,if-match,x-request-id\r\n\
         Origin: {origin}\r\nSec-Fetch-Mode: cors\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: empty\r\n\r\n"
    )
}

/// Returns whether a browser lets a page of `origin` read the answer, with the fields that clients need. Each answer of
/// a service that allows origins says that others may have another one.
#[track_caller]
fn is_readable(answer: &Answer, origin: &str) -> bool {
    assert_eq!(answer.header("Vary"), Some("Origin"), "{answer:?}");
    let Some(allowed) = answer.header("Access-Control-Allow-Origin") else {
        let named = answer.headers.iter().any(|(name, _)| name.starts_with("Access-Control-"));
        assert!(!named, "{answer:?}");
        return false;
    };
    let exposed = answer.header("Access-Control-Expose-Headers").unwrap_or_default();
    for field in ["ETag", "Link", "Location", "Retry-After", "X-Request-Id", "Idempotency-Replayed"] {
        assert!(exposed.split(", ").any(|name| name == field), "{field}: {answer:?}");
    }
    allowed == origin || allowed == "*"
}

/// Returns whether a preflight permits all that its page may need; else it permits nothing.
#[track_caller]
fn permits(answer: &Answer, origin: &str, method: &str) -> bool {
    assert_eq!(answer.status, 204, "{answer:?}");
    let list = |name: &str| answer.header(name).unwrap_or_default().to_ascii_lowercase();
    let has = |name: &str, word: &str| list(name).split(", ").any(|one| one == word.to_ascii_lowercase());
    let fields =
        ["Authorization", "Content-Type", "If-Match", "If-None-Match", "Idempotency-Key", "X-Request-Id"];
    let permitted = [
        answer.header("Access-Control-Allow-Origin") == Some(origin),
        has("Access-Control-Allow-Methods", method),
        fields.iter().all(|field| has("Access-Control-Allow-Headers", field)),
        answer.header("Access-Control-Max-Age").is_some_and(|age| age.parse::<u32>().is_ok()),
    ];
    assert!(permitted.iter().all(|one| *one == permitted[0]), "{answer:?}");
    permitted[0]
}

#[test]
fn pages_of_allowed_origins() {
    let service = Service::with(|config| {
        config.limits.allowed_origins = format!("{APP}, http://localhost:5173").parse().unwrap();
        config.api_token = Some(TOKEN.into());
    });
    let mut client = service.client();
    let bearer = format!("Bearer {TOKEN}");
    let page =
        |origin| [("Origin", origin), ("Sec-Fetch-Site", "cross-site"), ("Authorization", bearer.as_str())];
    // No token, and another host: a token makes that irrelevant.
    for (origin, allowed) in [(APP, true), ("http://localhost:5173", true), (EVIL, false), ("null", false)] {
        for (method, target) in [
            ("POST", "/users"),
            ("PUT", "/users/1"),
            ("PATCH", "/users/1"),
            ("DELETE", "/users/1"),
            ("GET", "/livez"),
        ] {
            client.send(preflight(origin, "users.example", target, method).as_bytes());
            let answer = client.answer("OPTIONS");
            if !allowed && target != "/livez" {
                assert_eq!((answer.status, is_readable(&answer, origin)), (401, false), "{origin} {target}");
                continue;
            }
            assert_eq!(answer.header("Vary"), Some("Origin"), "{answer:?}");
            assert_eq!(permits(&answer, origin, method), allowed, "{origin} {method} {target}");
        }
    }
    // A change of a page that is not allowed is none.
    let answer = client.request("POST", "/users", &page(EVIL), ADA);
    assert_eq!((answer.status, answer.body.trim_end(), is_readable(&answer, EVIL)), (403, REFUSED, false));
    let answer = client.request("GET", "/users", &page(APP), "");
    assert!(answer.json()["total"] == 0 && is_readable(&answer, APP), "{answer:?}");
    let answer = client.request("POST", "/users", &page(APP), ADA);
    assert!(answer.status == 201 && is_readable(&answer, APP), "{answer:?}");
    let user = format!("/users/{}", answer.id());
    let answer = client.request("PUT", &user, &page(APP), r#"{"name":"Ada King"}"#);
    assert!(answer.status == 200 && is_readable(&answer, APP), "{answer:?}");
    let answer = client.request("GET", &user, &page("http://localhost:5173"), "");
    assert_eq!(answer.json()["name"], "Ada King");
    assert!(is_readable(&answer, "http://localhost:5173"), "{answer:?}");
    let tag = answer.header("ETag").expect("a tag").to_owned();
    // Answers and refusals of every kind, the last two of the frontend. A page that is not allowed is told less.
    let allow = format!("<Access-Control-Allow-Origin: {APP}> <Vary: Origin> *");
    let none = "<!Access-Control-Allow-Origin> <Vary: Origin> *";
    for (request, body, status, of_evil) in [
        (format!("GET {user} TOKEN <If-None-Match: {tag}>"), "", 304, 304),
        ("GET /users/999 TOKEN".to_owned(), "", 404, 404),
        ("POST /users TOKEN".to_owned(), ADA, 409, 403),
        (format!("DELETE {user} TOKEN <If-Match: \"x\">"), "", 412, 403),
        ("POST /users TOKEN".to_owned(), "{", 400, 403),
        ("GET /users".to_owned(), "", 401, 401),
        ("GET /livez".to_owned(), "", 200, 200),
        ("POST /users TOKEN <Expect: other>".to_owned(), ADA, 417, 417),
        ("GET /users TOKEN <Transfer-Encoding: gzip>".to_owned(), "", 501, 501),
    ] {
        let request = request.replace("TOKEN", &format!("<Authorization: {bearer}>"));
        service.check(format!("{request} <Origin: {APP}> {body} => {status} {allow}"));
        service.check(format!("{request} <Origin: {EVIL}> {body} => {of_evil} {none}"));
        service.check(format!("{request} {body} => {status} {none}"));
    }
    assert_eq!(client.request("GET", &user, &page(APP), "").json()["name"], "Ada King");
    // Without a socket.
    let request = Request::get(&user).with("Authorization", bearer.as_str()).with("Origin", APP);
    let response = service.server.app().handle(&request);
    assert_eq!((response.status, response.header("Access-Control-Allow-Origin")), (200, Some(APP)));
}

#[test]
fn refusals_of_the_frontend_once_the_head_was_read() {
    let service = Service::with(|config| {
        config.limits.allowed_origins = APP.parse().unwrap();
        config.limits.body_timeout = Duration::from_secs(1);
        config.limits.head_timeout = Duration::from_secs(1);
    });
    let head = |fields: &str| format!("POST /users HTTP/1.1\r\nHost: a\r\n{fields}Origin: {APP}\r\n\r\n");
    let rows = [
        (head("Content-Length: 1000000\r\n"), 413, true),
        (head("Host: b\r\n"), 400, true),
        // The body never comes.
        (head("Content-Length: 40\r\n"), 408, true),
        (head("Transfer-Encoding: chunked\r\n") + "x\r\n", 400, true),
        // The head is not read.
        (format!("POST /users HTTP/1.1\r\nOrigin: {APP}\r\n"), 408, false),
        (format!("POST /users HTTP/1.1\r\nOrigin: {APP}\r\n\x01"), 400, false),
    ];
    for (request, status, read) in rows {
        let mut client = service.client();
        client.send(request.as_bytes());
        let answer = client.answer("POST");
        assert_eq!(answer.status, status, "{request}");
        match read {
            true => assert!(is_readable(&answer, APP), "{request}{answer:?}"),
            false => assert_eq!(answer.header("Access-Control-Allow-Origin"), None, "{request}"),
        }
    }
    // The next request of the connection keeps nothing of the one before.
    let mut client = service.client();
    assert!(is_readable(&client.request("GET", "/users", &[("Origin", APP)], ""), APP));
    assert!(!is_readable(&client.get("/users"), APP));
}

/// Without a token the host is still one that no stranger can own; without the setting nothing is said to any page.
#[test]
fn hosts_are_checked_and_nothing_is_said_by_default() {
    let service = Service::with(|config| config.limits.allowed_origins = APP.parse().unwrap());
    let mut client = service.client();
    for (host, status) in [("rebound.example", 403), ("localhost:3000", 204)] {
        client.send(preflight(APP, host, "/users", "POST").as_bytes());
        let answer = client.answer("OPTIONS");
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.header("Access-Control-Allow-Methods").is_some(), status == 204, "{answer:?}");
    }
    let database = Database::create();
    let mut process = Process::on(&database, &[]);
    let mut client = process.client();
    let fields = [("Origin", EVIL), ("Access-Control-Request-Method", "POST")];
    let of_cors = |answer: &Answer| {
        answer.headers.iter().any(|(name, _)| name.starts_with("Access-Control-") || name == "Vary")
    };
    for (method, status) in [("OPTIONS", 204), ("GET", 200), ("POST", 403)] {
        let answer = client.request(method, "/users", &fields, if method == "POST" { ADA } else { "" });
        assert_eq!((answer.status, of_cors(&answer)), (status, false), "{answer:?}");
        assert!(status != 403 || answer.body.trim_end() == REFUSED, "{answer:?}");
    }
    assert_eq!(client.get("/users").json()["total"], 0);
    process.logs(&format!("ALLOWED_ORIGINS does not name the origin {EVIL:?}"));
}

#[test]
fn any_origin_needs_a_token() {
    let mut process = Process::start(&[], &[("ALLOWED_ORIGINS", "*")]);
    assert_eq!(process.wait(LONG), 2);
    let line = "ALLOWED_ORIGINS: `*` needs API_TOKEN: without a token whoever can connect may do everything";
    assert!(process.stderr().contains(line), "{}", process.stderr());
    let database = Database::create();
    let mut process = Process::on(&database, &[("ALLOWED_ORIGINS", "*"), ("API_TOKEN", TOKEN)]);
    let mut client: Client = process.client();
    client.send(preflight(EVIL, "a", "/users", "POST").as_bytes());
    assert!(permits(&client.answer("OPTIONS"), "*", "POST"));
    // The token decides.
    let bearer = format!("Bearer {TOKEN}");
    for (fields, status) in
        [(&[("Origin", EVIL)][..], 401), (&[("Origin", EVIL), ("Authorization", bearer.as_str())], 201)]
    {
        let answer = client.request("POST", "/users", fields, ADA);
        assert!(answer.status == status && is_readable(&answer, EVIL), "{answer:?}");
    }
    let answer = client.request("GET", "/users", &[("Authorization", bearer.as_str())], "");
    assert!(answer.json()["total"] == 1 && !is_readable(&answer, EVIL), "{answer:?}");
}
