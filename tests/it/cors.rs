//! Pages of other origins: which of them browsers let read answers, and send changes (`ALLOWED_ORIGINS`).

use crate::support::{ADA, Database, LONG, Process, Service, TOKEN, check};
use std::time::Duration;

const APP: &str = "https://app.example";
const LOCAL: &str = "http://localhost:5173";
const EVIL: &str = "https://evil.example";
const REFUSED: &str =
    r#"{"error":"Cross-origin request refused","message":"ALLOWED_ORIGINS does not name this origin"}"#;

/// Fields of an answer that browsers let no page read, and of a preflight's that permits nothing.
const UNREADABLE: &str = "<!Access-Control-Allow-Origin> <!Access-Control-Allow-Methods> <!Access-Control-Allow-Headers> \
     <!Access-Control-Expose-Headers> <!Access-Control-Max-Age>";

/// Fields that pages have sent to services like this one: those of the API, and of libraries that trace requests.
const ASKED: &str = "authorization,baggage,content-type,idempotency-key,if-match,newrelic,sentry-trace,traceparent,\
                     tracestate,x-datadog-origin,x-datadog-parent-id,x-datadog-sampling-priority,x-datadog-trace-id,\
                     x-request-id";

/// The preflight that Chromium 123 sends before `fetch(target, {method, headers})` of a page of that origin.
fn preflight(origin: &str, method: &str, target: &str) -> String {
    format!(
        "OPTIONS {target} <Access-Control-Request-Method: {method}> \
         <Access-Control-Request-Headers: {ASKED}> \
         <Origin: {origin}> <Sec-Fetch-Mode: cors> <Sec-Fetch-Site: cross-site> <Sec-Fetch-Dest: empty>"
    )
}

/// Fields of the answer to a preflight that permits all that a page may need.
fn permitted(origin: &str, methods: &str) -> String {
    format!(
        "<Vary: Origin, Access-Control-Request-Headers> <Access-Control-Allow-Origin: {origin}> \
         <Access-Control-Allow-Methods: {methods}> <Access-Control-Allow-Headers: {}> <Access-Control-Max-Age: 7200>",
        ASKED.replace(',', ", ")
    )
}

/// Fields of an answer that a page of `origin` may read, with those that clients need.
fn readable(origin: &str) -> String {
    format!(
        "<Vary: Origin> <Access-Control-Allow-Origin: {origin}> \
         <Access-Control-Expose-Headers: ETag, Link, Location, Retry-After, X-Request-Id, Idempotency-Replayed>"
    )
}

#[test]
fn pages_of_allowed_origins() {
    let service = Service::with(|config| {
        config.limits.allowed_origins = vec![APP.into(), LOCAL.into()];
        config.api_token = Some(TOKEN.into());
        config.limits.head_timeout = Duration::from_secs(1);
        config.limits.body_timeout = Duration::from_secs(1);
    });
    // A preflight has no token.
    for (method, target, methods) in [
        ("POST", "/users", "GET, HEAD, POST, OPTIONS"),
        ("PATCH", "/users/1", "GET, HEAD, PUT, PATCH, DELETE, OPTIONS"),
        ("GET", "/livez", "GET, HEAD, OPTIONS"),
        ("GET", "/users?id=3&id=5", "GET, HEAD, POST, OPTIONS"),
        ("GET", "//users?page=2", "GET, HEAD, POST, OPTIONS"),
        ("GET", "/users/1?page=2", "GET, HEAD, PUT, PATCH, DELETE, OPTIONS"),
        // The refusal of the request itself, which a page may read, tells of the slash.
        ("POST", "/users/", "GET, HEAD, POST, OPTIONS"),
        ("DELETE", "//users/1/", "GET, HEAD, PUT, PATCH, DELETE, OPTIONS"),
    ] {
        for origin in [APP, LOCAL] {
            let permitted = permitted(origin, methods);
            service.check(format!("{} => 204 {permitted}", preflight(origin, method, target)));
        }
        let refused = match target {
            "/livez" => "204",
            "/users" | "/users/1" | "/users?id=3&id=5" | "/users/1?page=2" => "401",
            _ => "404",
        };
        for origin in [EVIL, "null"] {
            let answer = format!("{refused} <Vary: Origin> {UNREADABLE} *");
            service.check(format!("{} => {answer}", preflight(origin, method, target)));
        }
    }
    let preflight = format!("OPTIONS /users <Origin: {APP}> <Access-Control-Request-Method: POST>");
    service.check(format!(
        "
        {preflight} => 204 <Access-Control-Allow-Methods: GET, HEAD, POST, OPTIONS> <!Access-Control-Allow-Headers>
        {preflight} <Access-Control-Request-Headers: a b> => 204 <!Access-Control-Allow-Headers>
        {preflight} <Access-Control-Request-Headers: X-Mine, *> => 204 <Access-Control-Allow-Headers: X-Mine, *>
        "
    ));
    // Answers and refusals of every kind, the last four of the frontend; a page that is not allowed changes nothing, and is
    // told less. The last status is the answer's to that page.
    for (request, body, status, of_evil) in [
        ("GET /users/1 TOKEN", "", 404, 404),
        ("POST /users TOKEN", ADA, 201, 403),
        ("PUT /users/1 TOKEN", r#"{"name":"Ada King"}"#, 200, 403),
        ("GET /users/1 TOKEN <If-None-Match: *>", "", 304, 304),
        ("POST /users TOKEN", ADA, 409, 403),
        ("DELETE /users/1 TOKEN <If-Match: \"x\">", "", 412, 403),
        ("POST /users TOKEN", "{", 400, 403),
        ("GET /users", "", 401, 401),
        ("POST /users/ TOKEN", ADA, 404, 404),
        ("GET /livez", "", 200, 200),
        ("POST /users TOKEN <Expect: other>", ADA, 417, 417),
        ("GET /users TOKEN <Transfer-Encoding: gzip>", "", 501, 501),
        ("GET /users TOKEN <Host: b>", "", 400, 400),
        // The body never comes.
        ("GET /users TOKEN <Content-Length: 40>", "", 408, 408),
    ] {
        let request = request.replace("TOKEN", &format!("<Authorization: Bearer {TOKEN}>"));
        let (readable, refused) = (readable(APP), if of_evil == 403 { REFUSED } else { "*" });
        // The next request of a connection keeps nothing of the one before.
        service.check(format!(
            "
            {request} <Origin: {EVIL}> <Sec-Fetch-Site: cross-site> {body} => {of_evil} <Vary: Origin> {UNREADABLE} {refused}
            {request} <Origin: {APP}> <Sec-Fetch-Site: cross-site> {body} => {status} {readable} *
            GET /livez => 200 <Vary: Origin> {UNREADABLE} *
            "
        ));
    }
    let names = "select string_agg(name, ', ') from users";
    assert_eq!(service.database.value(names), "Ada King");
    // The origin is not known until the head has been read.
    for (end, status) in [("", 408), ("\x01", 400)] {
        let mut client = service.client();
        client.send(format!("POST /users HTTP/1.1\r\nOrigin: {APP}\r\n{end}").as_bytes());
        let answer = client.answer("POST");
        assert_eq!((answer.status, answer.header("Access-Control-Allow-Origin")), (status, None));
    }
    // Without a socket.
    let bearer = format!("Bearer {TOKEN}");
    let request = userd::Request::get("/users/1").with("Authorization", bearer).with("Origin", APP);
    let response = service.server.app().handle(&request);
    assert_eq!((response.status, response.header("Access-Control-Allow-Origin")), (200, Some(APP)));
}

/// Without a token the host is still one that no stranger can own; without the setting nothing is said to any page.
#[test]
fn hosts_are_checked_and_nothing_is_said_by_default() {
    let service = Service::with(|config| config.limits.allowed_origins = vec![APP.into()]);
    let permitted = permitted(APP, "GET, HEAD, POST, OPTIONS");
    for (host, answer) in [
        ("rebound.example", "403 <!Access-Control-Allow-Methods> *"),
        ("localhost:3000", &format!("204 {permitted}")),
    ] {
        let mut client = service.client();
        client.connect().expect("it listens");
        client.base_url = format!("http://{host}");
        check(&mut client, &format!("{} => {answer}", preflight(APP, "POST", "/users")));
    }
    let database = Database::create();
    let mut process = Process::on(&database, &[]);
    let rows = format!(
        r#"
        {} => 204 <!Vary> {UNREADABLE}
        GET /users <Origin: {EVIL}> => 200 <!Vary> {UNREADABLE} *
        POST /users <Origin: {EVIL}> {ADA} => 403 <!Vary> {UNREADABLE} {REFUSED}
        GET /users => 200 {{"data":[],*
        "#,
        preflight(EVIL, "POST", "/users")
    );
    check(&mut process.client(), &rows);
    process.logs(&format!("ALLOWED_ORIGINS does not name the origin {EVIL:?}"));
}

#[test]
fn any_origin_needs_a_token() {
    let mut process = Process::start(&[], &[("ALLOWED_ORIGINS", "*")]);
    assert_eq!(process.wait(LONG), 2);
    let line = "ALLOWED_ORIGINS: `*` needs API_TOKEN: without a token whoever can connect may do everything";
    assert!(process.stderr().contains(line), "{}", process.stderr());
    let service = Service::with(|config| {
        config.limits.allowed_origins = vec!["*".into()];
        config.api_token = Some(TOKEN.into());
    });
    // The token decides.
    service.check(format!(
        r#"
        {} => 204 {}
        POST /users <Origin: {EVIL}> {ADA} => 401 {any} *
        POST /users <Origin: {EVIL}> <Authorization: Bearer {TOKEN}> {ADA} => 201 {any} *
        GET /users <Authorization: Bearer {TOKEN}> => 200 <Vary: Origin> {UNREADABLE} {{"data":[{{"id":"1",*
        "#,
        preflight(EVIL, "POST", "/users"),
        permitted("*", "GET, HEAD, POST, OPTIONS"),
        any = readable("*")
    ));
}
