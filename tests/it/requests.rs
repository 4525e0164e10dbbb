//! The id that names a request in its answer and in the log, and the other values in a line of the log.

use crate::support::{
    ADA, Answer, Database, LONG, PASSWORD, Process, Service, TOKEN, TempDir, USERD, Variables, eventually,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn id(answer: &Answer) -> &str {
    answer.header("X-Request-Id").expect("every answer has one")
}

fn is_made(id: &str) -> bool {
    uuid::Uuid::parse_str(id).is_ok_and(|id| id.get_version_num() == 7)
}

/// Answers of the workers and of the frontend, of every kind.
#[test]
fn an_id_is_taken_over_by_every_kind_of_answer() {
    let service = Service::with(|config| config.limits.body_timeout = std::time::Duration::from_millis(50));
    service.client().post("/users", ADA);
    let long = "x".repeat(128);
    let body = format!("Content-Length: {}\r\n\r\n{ADA}", ADA.len());
    // A request line, and what follows the id; the last six are answered by the frontend.
    let rows = [
        ("GET /users/1", "\r\n", 200),
        ("HEAD /users/1", "\r\n", 200),
        ("GET /users/2", "\r\n", 404),
        ("OPTIONS /users", "\r\n", 204),
        ("BREW /users", "\r\n", 405),
        ("POST /users", &body, 409),
        ("POST /users", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n", 400),
        ("POST /users", "Content-Length: 99999999\r\n\r\n", 413),
        ("GET /users", "Host: b\r\n\r\n", 400),
        ("POST /users", "Expect: tea\r\n\r\n", 417),
        ("POST /users", "Transfer-Encoding: gzip\r\n\r\n", 501),
        ("POST /users", "Transfer-Encoding: chunked\r\n\r\nx\r\n", 400),
        // It is never complete.
        ("POST /users", "Content-Length: 9\r\n\r\n{", 408),
    ];
    for (line, rest, status) in rows {
        let method = line.split(' ').next().unwrap();
        for (field, expected) in [
            ("X-Request-Id: one.of_these~+/=:-9\r\n", Some("one.of_these~+/=:-9")),
            (&format!("x-request-ID:{long}\r\n"), Some(long.as_str())),
            (&format!("X-Request-Id: {long}x\r\n"), None),
            ("X-Request-Id: a\r\nX-Request-Id: a\r\n", None),
        ] {
            let mut client = service.client();
            client.send(format!("{line} HTTP/1.1\r\nHost: a\r\n{field}{rest}").as_bytes());
            let answer = client.answer(method);
            assert_eq!(answer.status, status, "{line} {rest}");
            match expected {
                Some(expected) => assert_eq!(id(&answer), expected, "{line} {rest}"),
                None => assert!(is_made(id(&answer)), "{line} {rest}: {answer:?}"),
            }
        }
    }
    // Where no head is complete, there is no field.
    let mut client = service.client();
    client.send(b"GET / HTTP/1.1\nX-Request-Id: a\n\n");
    assert!(is_made(id(&client.answer("GET"))));
    // Each of pipelined ones has its own.
    let request = |id: &str| format!("GET /users/0 HTTP/1.1\r\nHost: a\r\n{id}\r\n");
    let all = ["X-Request-Id: a\r\n", "", "X-Request-Id: b\r\n", "", ""].map(request).concat();
    client.send(all.as_bytes());
    let ids: Vec<String> = (0..5).map(|_| id(&client.answer("GET")).to_owned()).collect();
    assert_eq!((ids[0].as_str(), ids[2].as_str()), ("a", "b"));
    assert!([1, 3, 4].iter().all(|at| is_made(&ids[*at])), "{ids:?}");
}

/// The lines of a log as objects.
fn objects(process: &Process) -> Vec<Value> {
    let text = process.stderr();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let object = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    whole.map(object).collect()
}

/// Returns the line of the log that holds all of these texts, once it is there.
fn line_with(process: &Process, texts: &[&str]) -> String {
    let mut found = None;
    eventually(LONG, &texts.join(", "), || {
        let log = process.stderr();
        let mut lines = log.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        found = lines.find(|line| texts.iter().all(|text| line.contains(text))).map(str::to_owned);
        found.is_some()
    });
    found.expect("it was waited for")
}

/// Each kind of request, be it executed, answered by the worker that receives it or at once: the status, and the label of
/// its route in figures; the log has its method and path.
#[test]
fn kinds_of_requests_in_answers_log_and_figures() {
    let database = Database::create();
    let mut process =
        Process::on(&database, &[("LOG_LEVEL", "debug"), ("ALLOWED_ORIGINS", "https://app.example")]);
    let mut client = process.client();
    let (one, of) = ("/users/{id}", "/users");
    let plain: [(&str, &str); 0] = [];
    // Method, target, fields, body, status, label.
    type Row<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], &'a str, u16, &'a str);
    let rows: [Row; 26] = [
        ("POST", "/users", &plain, ADA, 201, of),
        ("POST", "/users", &plain, ADA, 409, of),
        ("POST", "/users", &plain, "{", 400, of),
        ("POST", "/users", &[("Content-Type", "multipart/form-data")], ADA, 415, of),
        ("POST", "/users", &[("Sec-Fetch-Site", "cross-site")], ADA, 403, of),
        ("POST", "/users", &[("Idempotency-Key", "\u{e9}")], ADA, 400, of),
        ("GET", "/users/1", &plain, "", 200, one),
        ("GET", "/users/%31", &plain, "", 200, one),
        ("HEAD", "/users/1", &plain, "", 200, one),
        ("GET", "/users/1", &[("If-None-Match", "*")], "", 304, one),
        ("GET", "/users/7", &plain, "", 404, one),
        ("GET", "/users/x", &plain, "", 404, one),
        ("GET", "/users?perPage=1", &plain, "", 200, of),
        ("GET", "/users?email=ada@example.com", &plain, "", 200, of),
        ("GET", "/users?page=0", &plain, "", 400, of),
        ("PUT", "/users/1", &plain, r#"{"name":"n"}"#, 200, one),
        ("PUT", "/users/7", &plain, "{", 404, one),
        ("PATCH", "/users/1", &plain, r#"{"email":"none"}"#, 400, one),
        ("DELETE", "/users/1", &plain, "", 204, one),
        ("DELETE", "/users", &plain, "", 405, of),
        ("OPTIONS", "/users/1", &[("Origin", "https://app.example")], "", 204, one),
        ("GET", "/users/", &plain, "", 404, "other"),
        ("BREW", "/pot", &plain, "", 501, "other"),
        ("GET", "/openapi.json", &plain, "", 200, "/openapi.json"),
        ("GET", "/livez", &plain, "", 200, "/livez"),
        ("GET", "/%6civez", &plain, "", 200, "/livez"),
    ];
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (method, target, fields, body, status, label) in rows {
        let answer = client.request(method, target, fields, body);
        assert_eq!(answer.status, status, "{method} {target}");
        let (level, path) = match label {
            "/livez" => ("DEBUG", "/livez"),
            _ => ("INFO", target.split('?').next().unwrap()),
        };
        line_with(&process, &[&format!("[{level}] {method} {path} {status} "), id(&answer)]);
        let method = if method == "BREW" { "OTHER" } else { method };
        let labels = format!(r#"{{method="{method}",route="{label}",status="{status}"}} "#);
        *counts.entry(format!("userd_http_requests_total{labels}")).or_default() += 1;
    }
    let figures = client.get("/metrics").body;
    for (labels, count) in counts {
        assert!(figures.contains(&format!("\n{labels}{count}\n")), "{labels}{count} is not in {figures}");
    }
}

/// At `debug` the log says why a request was refused; a value, or a name from a query, is in no line.
#[test]
fn the_log_in_each_format() {
    for format in ["text", "json"] {
        let is_json = format == "json";
        let database = Database::create();
        let common = [("LOG_FORMAT", format), ("LOG_LEVEL", "debug")];
        let tokens = [("API_TOKEN", TOKEN), ("API_TOKEN_READ", "reader")];
        let mut process = Process::on(&database, &[common, tokens].concat());
        let mut client = process.client();
        let full = format!("Bearer {TOKEN}");
        let login = format!(r#"{{"email":"ada@example.com","password":"{PASSWORD}"}}"#);
        let ada = login.replace('{', r#"{"name":"Ada","#);
        // The rights of the token, the body, and the status.
        for (method, target, token, body, status) in [
            ("POST", "/users", "full", &*ada, 201),
            ("POST", "/users", "full", "{", 400),
            ("GET", "/users?page=1&email=ada@example.com", "read", "", 200),
            ("GET", "/users/1?token=t0ken-0f-the-tests", "full", "", 400),
            ("GET", "/users/1", "", "", 401),
            ("PUT", "/users/1", "full", &*ada, 200),
            ("POST", "/users/authenticate", "full", &*login, 200),
            ("GET", "/a%20b?c", "full", "", 404),
            ("GET", r#"/users/"q""#, "full", "", 404),
            ("OPTIONS", "/users", "full", "", 204),
            ("SIXTEEN-LETTERS-", "/users", "full", "", 405),
            ("SEVENTEEN-LETTERS", "/users", "full", "", 405),
            ("DELETE", "/users/1", "full", "", 204),
        ] {
            let named = if method == "SEVENTEEN-LETTERS" { "OTHER" } else { method };
            let value = match token {
                "full" => &*full,
                "read" => "Bearer reader",
                _ => "",
            };
            let answer = client.request(method, target, &[("Authorization", value)], body);
            assert_eq!(answer.status, status, "{method} {target}");
            let (path, size, id) = (target.split('?').next().unwrap(), answer.size, id(&answer));
            let said = format!("{named} {path} {status} ");
            if !is_json {
                let line = line_with(&process, &[&format!("[INFO] {said}"), id]);
                assert!(line.contains(&format!("ms {size}B")), "{line}");
                assert!(line.ends_with(&format!(" client=127.0.0.1 request_id={id}")), "{line}");
                let of_token = format!(" token={token} ");
                assert_eq!(line.contains(&of_token), !token.is_empty(), "{line}");
                continue;
            }
            let line: Value =
                serde_json::from_str(&line_with(&process, &["\"duration_ms\"", id])).expect("JSON");
            let found = ["level", "method", "path", "status", "bytes"].map(|member| line[member].clone());
            assert_eq!(json!(found), json!(["info", named, path, status, size]));
            assert_eq!(line["token"].as_str().unwrap_or_default(), token);
            let took = line["duration_ms"].as_f64();
            assert!(took.is_some_and(|time| (0.0..60_000.0).contains(&time)), "{line}");
            assert!(line["message"].as_str().is_some_and(|message| message.starts_with(&said)), "{line}");
        }
        let log = process.stderr();
        for private in ["example.com", "Ada", "page=1", "reader"] {
            assert!(!log.contains(private), "{private}: {log}");
        }
        // Lines about failures.
        database.run("alter table users rename to lost");
        let error = if is_json { "\"level\":\"error\"" } else { "[ERROR] database error: " };
        for (method, target, body) in [("GET", "/users/1", ""), ("POST", "/users", ADA)] {
            let answer = client.request(method, target, &[("Authorization", &full)], body);
            assert_eq!(answer.status, 500);
            line_with(&process, &[error, id(&answer)]);
            line_with(&process, &[&format!("{method} {target} 500 "), id(&answer)]);
        }
        client.send(b"GET /users HTTP/1.1\r\nX-Request-Id: lost\r\n\r\n");
        assert_eq!(client.answer("GET").status, 400);
        line_with(&process, &["refused: bad request: no Host", "127.0.0.1", "lost"]);
        assert_eq!(process.stdout().lines().count(), 1, "the address is all that goes to standard output");
        process.signal(nix::sys::signal::Signal::SIGTERM);
        assert_eq!(process.wait(LONG), 0);
        let lines = if is_json { objects(&process) } else { Vec::new() };
        for line in &lines {
            let time = line["time"].as_str().expect("a time");
            assert!(crate::support::is_timestamp(time) && line["message"].is_string(), "{line}");
        }
        assert!(lines.last().is_none_or(|line| line["message"] == "stopped"), "{lines:?}");
    }
}

/// The address that a filter like fail2ban blocks stands in each line about a request and about a refusal; behind a
/// trusted proxy it is the client's.
#[test]
fn the_log_names_the_client() {
    let database = Database::create();
    let dir = TempDir::new();
    let socket = format!("unix:{}/http", dir.path().display());
    let proxied = [("X-Forwarded-For", "203.0.113.7")];
    // Variables, fields of the requests, the client of those, and that of requests that are refused unread.
    let both = [("X-Forwarded-For", "203.0.113.7"), ("Forwarded", "for=198.51.100.9")];
    let trusted = ("TRUSTED_PROXIES", "127.0.0.1");
    let rows: [(Variables, Variables, &str, &str); 6] = [
        (&[], &[], "127.0.0.1", "127.0.0.1"),
        (&[], &proxied, "127.0.0.1", "127.0.0.1"),
        (&[trusted], &proxied, "203.0.113.7", "127.0.0.1"),
        (&[("TRUSTED_PROXIES", "::ffff:127.0.0.0/104")], &proxied, "203.0.113.7", "127.0.0.1"),
        // A client's own field beside the proxy's.
        (&[trusted], &both, "203.0.113.7", "127.0.0.1"),
        (&[("HOST", &socket)], &[], "unix", "unix"),
    ];
    for ((variables, fields, client, refused), format) in rows.into_iter().zip(["text", "json"].repeat(3)) {
        let common = [("API_TOKEN", TOKEN), ("LOG_LEVEL", "debug"), ("LOG_FORMAT", format)];
        let mut process = Process::on(&database, &[&common, variables].concat());
        let mut connection = process.client();
        // By a worker, and by the frontend.
        for (target, status) in [("/users/1", 401), ("/livez", 200)] {
            assert_eq!(connection.request("GET", target, fields, "").status, status);
        }
        connection.send(b"GET /users HTTP/1.1\r\n\r\n");
        assert_eq!(connection.answer("GET").status, 400);
        // Refused by its head alone.
        let fields = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect::<String>();
        let mut connection = process.client();
        let head = format!("POST /users HTTP/1.1\r\nHost: a\r\n{fields}Content-Length: 9999999\r\n\r\n");
        connection.send(head.as_bytes());
        assert_eq!(connection.answer("POST").status, 413);
        let lines = [
            ("GET /users/1 401 ", client),
            ("GET /livez 200 ", client),
            ("refused: bad request: no Host", refused),
            ("refused: Content too large", client),
        ];
        for (said, client) in lines {
            let named = match format {
                "text" => format!(" client={client} request_id="),
                _ => format!(r#""client":"{client}""#),
            };
            line_with(&process, &[said, &named]);
        }
    }
}

#[test]
fn a_failure_to_start_as_json() {
    let nowhere = [("DATABASE_URL", "postgres://ada@127.0.0.1:1/app"), ("DB_CONNECT_TIMEOUT", "0.1")];
    let variables = [&nowhere[..], &[("PORT", "0"), ("LOG_FORMAT", "json")]].concat();
    let mut process = Process::start(&[], &variables);
    assert_eq!(process.wait(LONG), 1);
    let last = objects(&process).pop().unwrap();
    assert_eq!(last["level"], "error");
    assert!(last["message"].as_str().unwrap().starts_with("cannot connect"), "{last}");
    let mut process = Process::start(&[], &[("LOG_FORMAT", "JSON")]);
    assert_eq!(process.wait(LONG), 2);
    assert!(process.stderr().starts_with("userd: LOG_FORMAT: "), "{}", process.stderr());
}

/// Each line has its priority if standard error is the stream that `JOURNAL_STREAM` names, and in no other case.
#[test]
fn the_log_in_the_journal() {
    let database = Database::create();
    let url = database.url();
    let nowhere = [("DATABASE_URL", "postgres://ada@127.0.0.1:1/app"), ("DB_CONNECT_TIMEOUT", "0.1")];
    for (stream, format, is_journal) in [
        ("$(stat -Lc %d:%i /dev/fd/2)", "text", true),
        ("$(stat -Lc %d:%i /dev/fd/2)", "json", false),
        // Standard output is the journal's; the device is another one; the stream was another descriptor's.
        ("$(stat -Lc %d:%i /dev/fd/1)", "text", false),
        ("1$(stat -Lc %d:%i /dev/fd/2)", "text", false),
        ("$(stat -Lc %d:%i /dev/fd/2)1", "text", false),
        ("9:", "text", false),
    ] {
        let script = format!("export JOURNAL_STREAM={stream}; exec \"$0\" \"$@\"");
        let start = |arguments: &[&str], variables: Variables| {
            let common = [("LOG_FORMAT", format), ("LOG_LEVEL", "debug"), ("HOST", "127.0.0.1")];
            let program = ["/bin/sh", "-c", &script, USERD];
            Process::under(&program, arguments, &[&common[..], variables].concat())
        };
        let mut process = start(&[], &[("DATABASE_URL", &url)]);
        let mut client = process.client();
        assert_eq!(client.get("/livez").status, 200);
        database.run("alter table users rename to lost");
        let answer = client.request("GET", "/users/1", &[("X-Request-Id", "a-request")], "");
        assert_eq!(answer.status, 500);
        line_with(&process, &["GET /users/1 500 ", "a-request"]);
        database.run("alter table lost rename to users");
        process.signal(nix::sys::signal::Signal::SIGTERM);
        assert_eq!(process.wait(LONG), 0);
        let log = process.stderr();
        assert!(log.contains("database error: "), "{log}");
        for line in log.lines() {
            let expected = match line {
                _ if !is_journal => "",
                _ if line.contains("database error: ") => "<3>",
                _ if line.contains("/livez") => "<7>",
                _ if line.contains("GET /users/1 500 ") || line.contains("stopp") => "<6>",
                _ => "<",
            };
            assert!(line.starts_with(expected) && line.starts_with('<') == is_journal, "{line}");
            assert!(!is_journal || !line.contains("[INFO]") && !line.contains("Z ["), "{line}");
        }
        // A start that fails; arguments that are wrong, whose message has several lines.
        for (arguments, code, last) in
            [(&[][..], 1, "userd: cannot connect"), (&["--embeded"], 2, "For more")]
        {
            let mut process = start(arguments, &nowhere);
            assert_eq!(process.wait(LONG), code);
            let said = process.stderr();
            assert!(code == 1 || said.lines().count() > 2, "{said}");
            assert!(said.lines().all(|line| line.starts_with('<') == is_journal), "{said}");
            let prefix = if is_journal { "<3>" } else { "" };
            let is_object = format == "json" && code == 1;
            let found = said.lines().last().unwrap_or_default();
            assert!(is_object || found.starts_with(&format!("{prefix}{last}")), "{said}");
        }
    }
}

/// The frontend's 503 and the worker's line say the same id.
#[test]
fn a_request_that_is_answered_late_is_found_by_its_id() {
    let database = Database::create();
    let mut process = Process::on(&database, &[("REQUEST_TIMEOUT", "0.3")]);
    let mut client = process.client();
    let transaction = database.transaction("lock table users in access exclusive mode");
    let answer = client.request("GET", "/users/1", &[("X-Request-Id", "late")], "");
    assert_eq!((answer.status, id(&answer)), (503, "late"));
    drop(transaction);
    line_with(&process, &["[WARN]", " request_id=late"]);
    line_with(&process, &["GET /users/1", " request_id=late"]);
}
