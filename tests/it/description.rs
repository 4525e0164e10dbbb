//! `/openapi.json`: every answer that it describes is given. (That no other is, the suite's client checks all the time.)

use crate::support::{
    Answer, Client, DESCRIPTION, OTHER_PASSWORD, PASSWORD, Service, TOKEN, check_described,
};
use serde_json::{Value, json};
use std::{
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use userd::Validation;

#[test]
fn it_is_served_to_all() {
    let service = Service::with(|config| config.api_token = Some(TOKEN.into()));
    let document = service.client().get("/openapi.json").json();
    assert_eq!(document["paths"], DESCRIPTION["paths"]);
    assert_eq!(document["security"], json!([{ "token": [] }]));
    let body = &document["components"]["schemas"]["UserToCreate"];
    assert_eq!(body["properties"]["email"]["format"], "email");
    service.check("HEAD /openapi.json => 200\nPOST /openapi.json => 405 *");
}

/// Generated clients accept members that a later version adds, and more than 32 bits; patterns are regular expressions of
/// PCRE, too. Nothing is described that no operation has.
#[test]
fn generators_of_clients_can_use_it() {
    let document = Service::start().client().get("/openapi.json").json();
    // Generators for Go and Java take an object that says nothing of further members for a closed one.
    let objects = document["components"]["schemas"].as_object().unwrap().iter();
    let closed: Vec<_> = objects
        .filter(|(_, schema)| schema["type"] == "object" && schema["additionalProperties"] != true)
        .map(|(name, _)| name)
        .collect();
    assert_eq!(closed, ["Authenticate", "UserChanges", "UserPatch", "UserToCreate"]);
    walk(&document, "", &mut |path, value| {
        assert!(value["type"] != "integer" || value["format"] == "int64", "{path}");
        // A generated validator would match the pattern with a value that is not a text.
        assert!(value["format"] != "date-time" || value["pattern"].is_null(), "{path}");
        if let Some(pattern) = value["pattern"].as_str() {
            let grep =
                Command::new("grep").args(["-P", "--", pattern]).stdin(Stdio::null()).status().unwrap();
            assert_eq!((grep.code(), pattern.contains("\\u")), (Some(1), false), "{path}: {pattern}");
        }
    });
    // Generated clients send a default, and pages that try an API send the example of each parameter.
    walk(&document, "", &mut |path, value| assert!(value["default"].is_null(), "{path}"));
    for (name, parameter) in document["components"]["parameters"].as_object().unwrap() {
        let has_example = !parameter["example"].is_null() || !parameter["examples"].is_null();
        assert!(parameter["required"] == true || !has_example, "{name}");
    }
    // Generators rename what their language has, not always everywhere; and constructors of Go are named `New…`.
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for name in schemas.keys() {
        assert!(
            !["Error", "Index"].contains(&name.as_str()) && !schemas.contains_key(&format!("New{name}")),
            "{name}"
        );
    }
    let text = document.to_string();
    for (kind, components) in document["components"].as_object().unwrap() {
        for name in components.as_object().unwrap().keys().filter(|_| kind != "securitySchemes") {
            assert!(text.contains(&format!("\"#/components/{kind}/{name}\"")), "{kind}/{name}");
        }
    }
}

/// Calls a function with each object of a document, and its path.
fn walk(value: &Value, path: &str, visit: &mut impl FnMut(&str, &Value)) {
    match value {
        Value::Object(members) => {
            visit(path, value);
            members.iter().for_each(|(name, member)| walk(member, &format!("{path}/{name}"), visit));
        }
        Value::Array(items) => items.iter().for_each(|item| walk(item, path, visit)),
        _ => {}
    }
}

#[test]
fn every_described_answer_is_given() {
    let mut world = World::new();
    let mut missing = Vec::new();
    for (template, path) in DESCRIPTION["paths"].as_object().unwrap() {
        for (method, operation) in path.as_object().unwrap() {
            let method = method.to_ascii_uppercase();
            for status in operation["responses"].as_object().unwrap().keys() {
                let answer = world.provoke(&method, template, status);
                if answer.status.to_string() != *status {
                    missing.push(format!("{method} {template}: {status}, but {answer:?}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// Services that answer each in its own way.
struct World {
    plain: Service,
    token: Service,
    parser: Service,
    hurried: Service,
    /// Its table of users has another name.
    broken: Service,
    /// Its only connection is in use, and a proxy's, which is never closed for another.
    full: Service,
    _holder: Client,
}

impl World {
    fn new() -> World {
        let broken = Service::start();
        broken.database.run("alter table users rename to others");
        let full = Service::with(|config| {
            config.limits.max_connections = 1;
            config.limits.trusted_proxies = "127.0.0.1".parse().unwrap();
            config.limits.idle_timeout = Duration::from_secs(600);
        });
        let mut holder = full.client();
        assert_eq!(holder.get("/livez").status, 200);
        World {
            plain: Service::start(),
            token: Service::with(|config| config.api_token = Some(TOKEN.into())),
            parser: Service::with(|config| config.validation = Validation::Parser),
            hurried: Service::with(|config| config.limits.head_timeout = Duration::from_millis(50)),
            broken,
            full,
            _holder: holder,
        }
    }

    /// The answer to a request that is meant to be answered with this status.
    fn provoke(&mut self, method: &str, template: &str, status: &str) -> Answer {
        let mut client = self.plain.client();
        let id = client.post("/users", new_user(None)).id();
        let path = template.replace("{id}", &id);
        let body = match (method, template) {
            ("POST", "/users") => new_user(None),
            ("POST", _) => json!({"email": "nobody@example.com", "password": PASSWORD}).to_string(),
            ("PUT" | "PATCH", _) => r#"{"name":"B"}"#.to_owned(),
            _ => String::new(),
        };
        let raw = |service: &Service, head: &str| {
            let mut client = service.client();
            client.send(head.as_bytes());
            let answer = client.answer(method);
            check_described(method, &path, &answer);
            answer
        };
        let line = format!("{method} {path} HTTP/1.1\r\n");
        let head = format!("{line}Host: localhost\r\n");
        let mut with = |target: &str, headers: &[(&str, &str)], body: &str| {
            client.request(method, target, headers, body)
        };
        match status {
            "201" => {
                let created = with(&path, &[], &body);
                let location = created.header("Location").expect("it is where it says");
                assert_eq!(self.plain.client().get(location).body, created.body);
                created
            }
            "200" if template == "/users/authenticate" => {
                let login = new_user(Some(PASSWORD));
                assert_eq!(self.plain.client().post("/users", &login).status, 201);
                with(&path, &[], &login)
            }
            "200" | "204" => {
                let answer = with(&path, &[], &body);
                let left = self.plain.client().get(&format!("/users/{id}"));
                match method {
                    "PUT" | "PATCH" => {
                        assert_eq!((&left.body, &left.json()["name"]), (&answer.body, &"B".into()))
                    }
                    "DELETE" => assert_eq!(left.status, 404),
                    _ => assert_eq!(left.json()["name"], "Ada"),
                }
                answer
            }
            "304" => with(&path, &[("If-None-Match", "*")], ""),
            "400" => with(&path, &[("Host", "localhost")], ""),
            "401" => self.token.client().request(method, &path, &[], body),
            "403" => {
                raw(&self.plain, &format!("{line}Host: evil.example\r\nOrigin: http://evil.example\r\n\r\n"))
            }
            "404" => with("/users/999999999", &[], &body),
            "408" => raw(&self.hurried, &line),
            "409" => {
                let taken = new_user(None);
                assert_eq!(self.plain.client().post("/users", &taken).status, 201);
                with(&path, &[], &taken)
            }
            "410" => {
                let body = new_user(None);
                let created = with(&path, &[("Idempotency-Key", "of-a-deleted-user")], &body);
                let location = created.header("Location").expect("it is where it says");
                assert_eq!(self.plain.client().delete(location).status, 204);
                with(&path, &[("Idempotency-Key", "of-a-deleted-user")], &body)
            }
            "412" => with(&path, &[("If-Match", "\"another\"")], &body),
            "413" => raw(&self.plain, &format!("{head}Content-Length: 99999999\r\n\r\n")),
            "414" => with(&format!("{path}?{}", "x".repeat(9000)), &[], ""),
            "415" => with(&path, &[("Content-Type", "multipart/form-data; boundary=x")], &body),
            "417" => with(&path, &[("Expect", "a miracle")], &body),
            "422" if template == "/users/authenticate" => self.parser.client().post(&path, "{}"),
            "422" => with(&path, &[], &json!({"name": "B", "email": "b@example.com", "id": "7"}).to_string()),
            // By a create that is repeated, or by a login.
            "429" => {
                let (user, key) = (new_user(Some(PASSWORD)), [("Idempotency-Key", &*id)]);
                assert_eq!(with("/users", &key, &user).status, 201);
                let wrong = user.replace(PASSWORD, OTHER_PASSWORD);
                let mut answers = (0..50).map(|_| with(&path, &key, &wrong));
                answers.find(|answer| answer.status == 429).expect("it is throttled")
            }
            "431" => with(&path, &[("X-Long", &"x".repeat(20_000))], ""),
            "500" => self.broken.client().request(method, &path, &[], body),
            "501" => raw(&self.plain, &format!("{head}Transfer-Encoding: gzip\r\n\r\n")),
            "503" => raw(&self.full, ""),
            "505" => raw(&self.plain, &format!("{method} {path} HTTP/2.0\r\nHost: localhost\r\n\r\n")),
            other => panic!("{method} {template}: {other} is not provoked by this test"),
        }
    }
}

/// The body of a creation, with an address that nobody has.
fn new_user(password: Option<&str>) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let email = format!("user{}@example.com", COUNT.fetch_add(1, Ordering::Relaxed));
    let mut body = json!({"name": "Ada", "email": email});
    if let Some(password) = password {
        body["password"] = password.into();
    }
    body.to_string()
}
