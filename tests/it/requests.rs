//! The id that names a request in its answer and in the log, and the other values in a line of the log.

use crate::support::{
    ADA, Answer, Database, LONG, PASSWORD, Process, Service, TOKEN, TempDir, assert_no_secret, eventually,
};
use serde_json::Value;

fn id(answer: &Answer) -> &str {
    answer.header("X-Request-Id").expect("every answer has one")
}

/// A UUID of version 7.
fn is_made(id: &str) -> bool {
    let digits = id.bytes().enumerate().all(|(at, byte)| match at {
        8 | 13 | 18 | 23 => byte == b'-',
        14 => byte == b'7',
        _ => byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte),
    });
    id.len() == 36 && digits
}

/// Answers of the workers and of the frontend, of every kind.
#[test]
fn an_id_is_taken_over_by_every_kind_of_answer() {
    let service = Service::with(|config| config.limits.body_timeout = std::time::Duration::from_millis(50));
    service.client().post("/users", ADA);
    let long = "x".repeat(128);
    let field = "X-Request-Id: one.of_these~+/=:-9\r\n";
    let bodies = "POST /users HTTP/1.1\r\nHost: a\r\n";
    let rows = [
        ("GET /users/1 HTTP/1.1\r\nHost: a\r\n{}\r\n".to_owned(), 200),
        ("HEAD /users/1 HTTP/1.1\r\nHost: a\r\n{}\r\n".to_owned(), 200),
        ("GET /users/2 HTTP/1.1\r\nHost: a\r\n{}\r\n".to_owned(), 404),
        ("DELETE /users HTTP/1.1\r\nHost: a\r\n{}\r\n".to_owned(), 405),
        ("OPTIONS /users HTTP/1.1\r\nHost: a\r\n{}\r\n".to_owned(), 204),
        ("BREW /users HTTP/1.1\r\nHost: a\r\n{}\r\n".to_owned(), 405),
        (format!("{bodies}{{}}Content-Length: {}\r\n\r\n{ADA}", ADA.len()), 409),
        (format!("{bodies}{{}}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n0\r\n\r\n"), 400),
        // Answers of the frontend.
        (format!("{bodies}{{}}Content-Length: 99999999\r\n\r\n"), 413),
        (format!("{bodies}{{}}Content-Length: 1\r\nContent-Length: 1\r\n\r\n"), 400),
        ("GET /users HTTP/1.1\r\n{}\r\n".to_owned(), 400),
        (format!("{bodies}Expect: tea\r\n{{}}\r\n"), 417),
        (format!("{bodies}{{}}Transfer-Encoding: gzip\r\n\r\n"), 501),
        (format!("{bodies}{{}}Transfer-Encoding: chunked\r\n\r\nx\r\n"), 400),
        // It is never complete.
        (format!("{bodies}{{}}Content-Length: 9\r\n\r\n{{"), 408),
    ];
    for (request, status) in rows {
        let method = request.split(' ').next().unwrap();
        for (field, expected) in [
            (field, Some("one.of_these~+/=:-9")),
            (&format!("x-request-ID:{long}\r\n"), Some(long.as_str())),
            (&format!("X-Request-Id: {long}x\r\n"), None),
            ("X-Request-Id: a\r\nX-Request-Id: a\r\n", None),
        ] {
            if status == 408 && field.len() > 100 {
                continue;
            }
            let mut client = service.client();
            client.send(request.replace("{}", field).as_bytes());
            let answer = client.answer(method);
            assert_eq!(answer.status, status, "{request}");
            match expected {
                Some(expected) => assert_eq!(id(&answer), expected, "{request}"),
                None => assert!(is_made(id(&answer)), "{request}: {answer:?}"),
            }
        }
    }
    // Where no head is complete, there is no field.
    let mut client = service.client();
    client.send(b"GET / HTTP/1.1\nX-Request-Id: a\n\n");
    assert!(is_made(id(&client.answer("GET"))));
}

#[test]
fn an_id_is_of_one_request() {
    let service = Service::start();
    let mut client = service.client();
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

#[test]
fn the_log_as_text() {
    let database = Database::create();
    let mut process = Process::on(&database, &[("LOG_LEVEL", "info")]);
    let mut client = process.client();
    let logs = |line: &str, id: &str| {
        let found = |text: &String| text.lines().any(|text| text.contains(line) && text.ends_with(id));
        eventually(LONG, line, || found(&process.stderr()));
    };
    let ada = format!(r#"{{"name":"Ada","email":"ada@example.com","password":"{PASSWORD}"}}"#);
    let login = format!(r#"{{"email":"ada@example.com","password":"{PASSWORD}"}}"#);
    for (method, target, body, line) in [
        ("POST", "/users", ada.as_str(), "POST /users 201 "),
        ("POST", "/users", "{", "POST /users 400 "),
        ("GET", "/users?page=1&email=ada@example.com", "", "GET /users 200 "),
        ("GET", "/users/1?token=t0ken-0f-the-tests", "", "GET /users/1 400 "),
        ("PUT", "/users/1", &ada, "PUT /users/1 200 "),
        ("POST", "/users/authenticate", &login, "POST /users/authenticate 200 "),
        ("GET", "/a%20b?c", "", "GET /a%20b 404 "),
        ("OPTIONS", "/users", "", "OPTIONS /users 204 "),
        ("DELETE", "/users/1", "", "DELETE /users/1 204 "),
    ] {
        let answer = client.request(method, target, &[], body);
        let ends = format!("ms {}B client=127.0.0.1 request_id={}", answer.size, id(&answer));
        logs(&format!("[INFO] {line}"), &ends);
    }
    assert_no_secret(&process.stderr());
    for private in ["example.com", "Ada", "page=1", "?"] {
        assert!(!process.stderr().contains(private), "{private}: {}", process.stderr());
    }
    // Methods by name.
    client.request("BREW", "/users", &[("X-Request-Id", "tea")], "");
    logs("BREW /users 405 ", " request_id=tea");
    client.request("SIXTEEN-LETTERS-", "/users", &[("X-Request-Id", "sixteen")], "");
    logs("SIXTEEN-LETTERS- /users 405 ", " request_id=sixteen");
    client.request("SEVENTEEN-LETTERS", "/users", &[("X-Request-Id", "seventeen")], "");
    logs("] OTHER /users 405 ", " request_id=seventeen");
    // Lines about failures.
    database.run("alter table users rename to lost");
    for (method, target, body) in [
        ("GET", "/users/1", ""),
        ("GET", "/users", ""),
        ("POST", "/users", ADA),
        ("PUT", "/users/1", r#"{"name":"n"}"#),
    ] {
        let answer = client.request(method, target, &[], body);
        assert_eq!(answer.status, 500);
        logs("[ERROR] database error: ", &format!("request_id={}", id(&answer)));
        logs(&format!("{method} {target} 500 "), &format!("request_id={}", id(&answer)));
    }
    client.send(b"GET /users HTTP/1.1\r\nX-Request-Id: lost\r\n\r\n");
    assert_eq!(client.answer("GET").status, 400);
    logs("[INFO] refused: bad request: no Host", " client=127.0.0.1 request_id=lost");
    assert_eq!(process.stdout().lines().count(), 1, "the address is all that goes to standard output");
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
    type Fields<'a> = &'a [(&'a str, &'a str)];
    let both = [("X-Forwarded-For", "203.0.113.7"), ("Forwarded", "for=198.51.100.9")];
    let trusted = ("TRUSTED_PROXIES", "127.0.0.1");
    let rows: [(Fields, Fields, &str, &str); 6] = [
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
        let lines = [("GET /users/1 401 ", client), ("GET /livez 200 ", client), ("refused: ", refused)];
        for (line, client) in lines {
            let named = |text: &&str| match format {
                "text" => text.contains(&format!(" client={client} request_id=")),
                _ => serde_json::from_str::<Value>(text).is_ok_and(|line| line["client"] == client),
            };
            let is_logged = || process.stderr().lines().any(|text| text.contains(line) && named(&text));
            eventually(LONG, &format!("{line} of {client} as {format}"), is_logged);
        }
    }
}

/// At `debug` the log says why a request was refused; a value, or a name from a query, is in no line.
#[test]
fn the_log_names_the_rights_of_a_token() {
    let database = Database::create();
    for (format, token) in [("text", " token=NAME "), ("json", "\"token\":\"NAME\"")] {
        let variables = [("API_TOKEN", TOKEN), ("API_TOKEN_READ", "reader"), ("LOG_FORMAT", format)];
        let mut process = Process::on(&database, &variables);
        let mut client = process.client();
        let bearer = format!("Bearer {TOKEN}");
        for (id, value, name) in
            [(1, &*bearer, Some("full")), (2, "Bearer reader", Some("read")), (3, "", None)]
        {
            client.request("GET", &format!("/users/{id}"), &[("Authorization", value)], "");
            process.logs(&format!("GET /users/{id} "));
            let said = process.stderr();
            let line = said.lines().find(|line| line.contains(&format!("GET /users/{id} "))).expect("a line");
            assert_eq!(line.contains("token"), name.is_some(), "{line}");
            assert!(name.is_none_or(|name| line.contains(&token.replace("NAME", name))), "{line}");
            assert!(!line.contains("reader"), "{line}");
        }
    }
}

#[test]
fn the_log_as_json() {
    let database = Database::create();
    let variables = [("LOG_FORMAT", "json"), ("LOG_LEVEL", "debug"), ("API_TOKEN", TOKEN)];
    let mut process = Process::on(&database, &variables);
    let mut client = process.client();
    let bearer = format!("Bearer {TOKEN}");
    let headers = [("Authorization", bearer.as_str())];
    let ada = format!(r#"{{"name":"Ada","email":"ada@example.com","password":"{PASSWORD}"}}"#);
    let target = format!("/users?page=1&token={TOKEN}");
    let rows = [
        ("POST", "/users", ada.as_str(), 201),
        ("GET", target.as_str(), "", 400),
        ("GET", r#"/users/"q""#, "", 404),
        ("BREW", "/users", "", 405),
        ("GET", "/users/1", "", 200),
    ];
    for (method, target, body, status) in rows {
        let answer = client.request(method, target, &headers, body);
        assert_eq!(answer.status, status, "{answer:?}");
        let of_it = |line: &Value| line["request_id"] == id(&answer) && line["path"].is_string();
        eventually(LONG, "the request is logged", || objects(&process).iter().any(of_it));
        let lines = objects(&process);
        let line = lines.iter().find(|line| of_it(line)).unwrap();
        assert_eq!(line["level"], "info");
        assert_eq!(line["method"], method);
        assert_eq!(line["path"], target.split('?').next().unwrap());
        assert_eq!((&line["status"], &line["bytes"]), (&status.into(), &answer.size.into()));
        assert!(line["duration_ms"].as_f64().is_some_and(|time| (0.0..60_000.0).contains(&time)), "{line}");
        assert!(line["message"].as_str().unwrap().starts_with(&format!("{method} /users")), "{line}");
    }
    database.run("alter table users rename to lost");
    let answer = client.request("GET", "/users/1", &headers, "");
    assert_eq!(answer.status, 500);
    let failed = |line: &Value| line["level"] == "error" && line["request_id"] == id(&answer);
    eventually(LONG, "the error is logged", || objects(&process).iter().any(failed));
    client.send(b"GET /users HTTP/1.1\r\nX-Request-Id: lost\r\n\r\n");
    assert_eq!(client.answer("GET").status, 400);
    let refused = |line: &Value| line["request_id"] == "lost" && line["status"] == 400;
    eventually(LONG, "the refusal is logged", || objects(&process).iter().any(refused));
    assert_no_secret(&process.stderr());
    assert!(!process.stderr().contains("page=1"), "{}", process.stderr());
    for line in objects(&process) {
        let time = line["time"].as_str().expect("a time");
        assert!(crate::support::is_timestamp(time) && line["message"].is_string(), "{line}");
    }
    process.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 0);
    assert_eq!(objects(&process).last().unwrap()["message"], "stopped");
}

#[test]
fn a_failure_to_start_in_each_format() {
    let nowhere = [("DATABASE_URL", "postgres://ada@127.0.0.1:1/app"), ("DB_CONNECT_TIMEOUT", "0.1")];
    for (format, json) in [("json", true), ("text", false), ("", false)] {
        let mut process =
            Process::start(&[], &[&nowhere[..], &[("PORT", "0"), ("LOG_FORMAT", format)]].concat());
        assert_eq!(process.wait(LONG), 1);
        match json {
            true => {
                let last = objects(&process).pop().unwrap();
                assert_eq!(last["level"], "error");
                assert!(last["message"].as_str().unwrap().starts_with("cannot connect"), "{last}");
            }
            false => assert!(process.stderr().contains("\nuserd: cannot connect"), "{}", process.stderr()),
        }
    }
    let mut process = Process::start(&[], &[("LOG_FORMAT", "JSON")]);
    assert_eq!(process.wait(LONG), 2);
    assert!(process.stderr().starts_with("userd: LOG_FORMAT: "), "{}", process.stderr());
}

/// The frontend's 503 and the worker's line say the same id.
#[test]
fn a_request_that_is_answered_late_is_found_by_its_id() {
    let database = Database::create();
    let mut process = Process::on(&database, &[("REQUEST_TIMEOUT", "0.3")]);
    let mut client = process.client();
    let mut blocker = database.client();
    let mut transaction = blocker.transaction().unwrap();
    transaction.execute("lock table users in access exclusive mode", &[]).unwrap();
    let answer = client.request("GET", "/users/1", &[("X-Request-Id", "late")], "");
    assert_eq!((answer.status, id(&answer)), (503, "late"));
    drop(transaction);
    eventually(LONG, "both lines", || {
        let text = process.stderr();
        let lines: Vec<&str> = text.lines().filter(|line| line.ends_with(" request_id=late")).collect();
        lines.iter().any(|line| line.contains("[WARN]"))
            && lines.iter().any(|line| line.contains("GET /users/1"))
    });
}
