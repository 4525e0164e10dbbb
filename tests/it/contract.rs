//! The contract, as tables of requests and their answers. Every table has a database of its own, in which the
//! first user has the id 1. What a value may be is tested beside the code; here, that each route asks for it.

use crate::support::{ADA, ADA_1, Answer, OTHER_PASSWORD, PASSWORD, Service, check, hash};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use serde_json::json;
use userd::{PasswordHashing, Request, Schema, Ui, Validation};

const NOT_FOUND: &str = r#"{"error":"Not found"}"#;
const NUL: &str = "must not contain NUL (U+0000)";

/// The answer to a body that breaks the schema: violations of a path and a keyword with a message, divided by `; `.
fn invalid(validation: Validation, violations: &str) -> String {
    let entry = |violation: &str| {
        let (path, rest) = violation.split_once(' ').expect("a path");
        let (keyword, message) = rest.split_once(' ').expect("a keyword");
        format!(r#"{{"path":"{path}","keyword":"{keyword}","message":{}}}"#, json!(message))
    };
    let entries = violations.split("; ").map(entry).collect::<Vec<_>>().join(",");
    match validation {
        Validation::Declarative => format!(r#"400 {{"error":"Validation failed","errors":[{entries}]}}"#),
        Validation::Parser => format!(r#"422 {{"errors":[{entries}]}}"#),
    }
}

// Create, read, update, delete

#[test]
fn the_life_of_a_user() {
    let service = Service::start();
    service.check(
        r#"
        GET /users => 200 {"data":[],"total":0,"perPage":15,"currentPage":1,"lastPage":1,"from":0,"to":0,"hasMorePages":false}
        GET|DELETE /users/1 => 404 {"error":"Not found"}
        POST /users {"name":"Ada","email":"ada@example.com"} => 201 <Location: /users/1> {"id":"1","name":"Ada","email":"ada@example.com",<times>}
        GET|HEAD /users/1 => 200 {"id":"1","name":"Ada","email":"ada@example.com",<times>}
        sql select created_at = updated_at and created_at between now() - interval '1 minute' and now() from users => t
        POST /users {"name":"Ada","email":"ada@example.com"} => 409 {"error":"Already exists"}
        POST /users {"name":"Ada","email":"ADA@example.com"} => 409 {"error":"Already exists"}
        POST /users {"name":"Ada","email":"ada@EXAMPLE.Com","password":"correct horse"} => 409 {"error":"Already exists"}
        PUT /users/1 {"name":"A","n\u0061me":"Ada L."} => 200 {"id":"1","name":"Ada L.","email":"ada@example.com",<times>}
        GET /users/1 => 200 {"id":"1","name":"Ada L.","email":"ada@example.com",<times>}
        PUT /users/%31 {"email":"a@b.co","password":"correct horse"} => 200 {"id":"1","name":"Ada L.","email":"a@b.co",<times>}
        GET /users/%31?& => 200 {"id":"1","name":"Ada L.","email":"a@b.co",<times>}
        GET /users => 200 {"data":[{"id":"1","name":"Ada L.","email":"a@b.co",<times>}],"total":1,"perPage":15,"currentPage":1,"lastPage":1,"from":1,"to":1,"hasMorePages":false}
        sql select count(*) from credentials where password_hash like '$argon2id$v=19$m=19456,t=2,p=1$%' => 1
        DELETE /users/%31 => 204
        sql select count(*) from credentials => 0
        GET|DELETE /users/1 => 404 {"error":"Not found"}
        PUT /users/1 {"name":"Ada"} => 404 {"error":"Not found"}
        POST /users {"name":7,"email":"a@b.co","name":"Ada","email":"b@b.co"} => 201 <Location: /users/5> {"id":"5","name":"Ada","email":"b@b.co",<times>}
        POST /users {"name":"Ada","email":"c@b.co","name":7} => 400 {"error":"Validation failed","errors":[{"path":"/name","keyword":"type","message":"value is not of type \"string\""}]}
        GET /users?perPage=1 => 200 {"data":[{"id":"5",*
        "#,
    );
    // To the microsecond that the database has.
    let stored =
        "select to_char(created_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') from users";
    assert_eq!(service.client().get("/users/5").json()["createdAt"], service.database.value(stored));
}

#[test]
fn what_a_put_may_set() {
    for validation in [Validation::Declarative, Validation::Parser] {
        let service = Service::with(|config| config.validation = validation);
        // No format is asked of an address, but it has to fit.
        let (fits, too_long) = ("é".repeat(254), "é".repeat(255));
        let (long_name, longer_name) = ("🔑".repeat(1000), "x".repeat(1001));
        let patched = invalid(validation, "/name maxLength value is longer than 1000 characters");
        service.check(format!(
            r#"
            POST /users {ADA} => 201 {ADA_1}
            POST /users {{"name":"Bob","email":"bob@example.com"}} => 201 *
            PUT /users/1 {{"name":""}} => 200 {{"id":"1","name":"","email":"ada@example.com",<times>}}
            PUT /users/1 {{"name":"A\tB"}} => 200 *
            PUT /users/1 {{"name":"A"}} => 200 {{"id":"1","name":"A","email":"ada@example.com",<times>}}
            PUT /users/1 {{"name":null}} => 422 {{"errors":[{{"path":"/name","keyword":"type","message":"must be a string"}}]}}
            PUT /users/1 {{"name":"a\u0000b"}} => 422 {{"errors":[{{"path":"/name","keyword":"pattern","message":"{NUL}"}}]}}
            PUT /users/1 {{"email":true}} => 422 {{"errors":[{{"path":"/email","keyword":"type","message":"must be a string"}}]}}
            PUT /users/1 {{"email":"a\u0000@b.co"}} => 422 {{"errors":[{{"path":"/email","keyword":"pattern","message":"{NUL}"}}]}}
            PUT /users/1 {{"email":"x\r\nBcc: y@example.com"}} => 422 {{"errors":[{{"path":"/email","keyword":"pattern","message":"must not contain control characters"}}]}}
            PUT /users/1 {{"password":["correct horse"]}} => 422 {{"errors":[{{"path":"/password","keyword":"type","message":"must be a string"}}]}}
            PUT /users/1 {{"password":"12345678\u0000"}} => 422 {{"errors":[{{"path":"/password","keyword":"pattern","message":"{NUL}"}}]}}
            PUT /users/1 {{"password":"ééééééé","name":"B"}} => 422 {{"errors":[{{"path":"/password","keyword":"minLength","message":"must be at least 8 characters"}}]}}
            PUT /users/1 {{"name":1,"email":2}} => 422 {{"errors":[{{"path":"/email","keyword":"type","message":"must be a string"}},{{"path":"/name","keyword":"type","message":"must be a string"}}]}}
            GET /users/1 => 200 {{"id":"1","name":"A","email":"ada@example.com",<times>}}
            sql select count(*) from credentials => 0
            PUT /users/1 {{"email":"no address"}} => 200 {{"id":"1","name":"A","email":"no address",<times>}}
            PUT /users/1 {{"email":""}} => 200 {{"id":"1","name":"A","email":"",<times>}}
            PUT /users/1 {{"email":"{fits}"}} => 200 {{"id":"1","name":"A","email":"{fits}",<times>}}
            PUT /users/1 {{"email":"{too_long}"}} => 422 {{"errors":[{{"path":"/email","keyword":"maxLength","message":"must be at most 254 characters"}}]}}
            PUT /users/1 {{"name":"{long_name}"}} => 200 {{"id":"1","name":"{long_name}","email":"{fits}",<times>}}
            PUT /users/1 {{"name":"{longer_name}"}} => 422 {{"errors":[{{"path":"/name","keyword":"maxLength","message":"must be at most 1000 characters"}}]}}
            PATCH /users/1 {{"name":"{longer_name}"}} => {patched}
            GET /users/1 => 200 {{"id":"1","name":"{long_name}","email":"{fits}",<times>}}
            PUT /users/1 {{"name":"A","email":"a@b.co"}} => 200 {{"id":"1","name":"A","email":"a@b.co",<times>}}
            PUT /users/1 {{"email":"bob@example.com"}} => 409 {{"error":"Already exists"}}
            PUT /users/1 {{"name":"lost?","email":"BOB@EXAMPLE.com"}} => 409 {{"error":"Already exists"}}
            PUT /users/2 {{"email":"Bob@Example.com"}} => 200 {{"id":"2","name":"Bob","email":"Bob@Example.com",<times>}}
            GET /users/1 => 200 {{"id":"1","name":"A","email":"a@b.co",<times>}}
            "#
        ));
    }
}

#[test]
fn a_missing_user_is_not_found_before_the_body_is_judged() {
    let service = Service::start();
    for body in [
        r#"{"isAdmin":true}"#,
        r#"{"name":7}"#,
        r#"{"name":"a\u0000"}"#,
        r#"{"password":"correct horse"}"#,
        "{",
        "[]",
        "",
        "<Content-Type: multipart/form-data> --x--",
        "<Content-Encoding: gzip> {}",
    ] {
        for target in ["/users/1", "/users/abc"] {
            service.check(format!("PUT|PATCH {target} {body} => 404 {NOT_FOUND}"));
        }
    }
}

#[test]
fn fields_that_may_not_be_mass_assigned() {
    let service = Service::start();
    service.client().post("/users", ADA);
    // Further fields of the body, and their names in the refusal. On POST the schema speaks before the guard, and the
    // guard before the database; on PUT the guard speaks before the values are judged.
    for (more, named) in [
        (r#""id":"7""#, r#"\"id\""#),
        (r#""createdAt":"2020-01-01T00:00:00Z""#, r#"\"createdAt\""#),
        (r#""password_hash":"x""#, r#"\"password_hash\""#),
        (r#""Name":"Bob""#, r#"\"Name\""#),
        (r#""isAdmin":true,"id":7"#, r#"\"id\", \"isAdmin\""#),
    ] {
        let refusal = format!(r#"422 {{"error":"These fields may not be mass assigned: {named}"}}"#);
        service.check(format!(
            r#"
            POST /users {{"name":"Bob","email":"bob@example.com",{more}}} => {refusal}
            POST /users {{"name":"Ada","email":"ada@example.com",{more}}} => {refusal}
            POST /users {{"name":"Bob",{more}}} => 400 {{"error":"Validation failed","errors":[{{"path":"/email","keyword":"required","message":"is required"}}]}}
            PUT /users/1 {{"name":7,"email":"bob@example.com",{more}}} => {refusal}
            PUT|PATCH /users/1 {{"name":"Bob",{more}}} => {refusal}
            GET /users/1 => 200 {ADA_1}
            GET /users/2 => 404 {NOT_FOUND}
            "#
        ));
    }
}

// Bodies

/// The fields of a patch are judged as those of a create.
#[test]
fn the_four_variants() {
    use {Schema::*, Validation::*};
    // Violations of each body. A violation after `strict` is one of the strict schema alone.
    let rows = r#"
        POST /users {"name":"C","email":"c@b.co","password":"12345678"} =>
        POST /users {"name":"","email":"missing@domain","password":"ééééééé"} => /email format NO_DOT; strict /name minLength NO_NAME; /password minLength SHORT
        POST /users {} => /name required is required; /email required is required; strict /password required is required
        POST /users {"name":null,"email":["a@b.co"],"password":null} => /email type NO_STRING; /name type NO_STRING; /password type NO_STRING
        POST /users {"name":"","email":"a@b.co"} => strict /password required is required; strict /name minLength NO_NAME
        POST /users {"name":"A","email":"Ann <ann@example.com>","password":"12345678"} => /email format BARE
        POST /users {"name":"A\u0000","email":"a@b.co","password":"12345678\u0000"} => /name pattern NUL; /password pattern NUL
        POST /users/authenticate {} => /email required is required; /password required is required
        POST /users/authenticate {"email":7,"password":"correct horse"} => /email type NO_STRING
        POST /users/authenticate {"email":"a@b.co","password":["correct horse"]} => /password type NO_STRING
        POST /users/authenticate {"email":"a\u0000","password":"correct horse"} => /email pattern NUL
        PATCH /users/1 {"name":"A"} =>
        PATCH /users/1 {"name":""} => strict /name minLength NO_NAME
        PATCH /users/1 {"name":null,"password":null} => /name type NO_STRING
        PATCH /users/1 {"email":null} => /email type NO_STRING
        PATCH /users/1 {"email":"Ann <ann@example.com>"} => /email format BARE
        PATCH /users/1 {"password":""} => /password minLength SHORT
        PATCH /users/1 {"password":null} =>
        "#;
    let rows = rows.replace("NO_DOT", "value is not an e-mail address: the domain after the @ needs a dot");
    let rows =
        rows.replace("BARE", "value is not an e-mail address alone: leave out the display name and the < >");
    let rows = rows.replace("NO_NAME", "value is shorter than 1 character").replace("NUL", NUL);
    let rows = rows.replace("SHORT", "value is shorter than 8 characters");
    let rows = rows.replace("NO_STRING", "value is not of type \"string\"");
    for (schema, validation) in
        [(Basic, Declarative), (Basic, Parser), (Strict, Declarative), (Strict, Parser)]
    {
        let service = Service::with(|config| (config.schema, config.validation) = (schema, validation));
        let mut created = 0;
        for row in rows.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let (request, violations) = row.split_once(" =>").expect("a row");
            let violations = violations.trim_start().split("; ").filter(|one| !one.is_empty());
            let of_schema = |one: &&str| schema == Strict || !one.starts_with("strict ");
            let violations: Vec<_> = violations.filter(of_schema).collect();
            let answer = match (request.starts_with("POST"), violations.join("; ").replace("strict ", "")) {
                (true, none) if none.is_empty() => "201 *".to_owned(),
                (false, none) if none.is_empty() => "200 *".to_owned(),
                (_, some) => invalid(validation, &some),
            };
            created += usize::from(answer == "201 *");
            service.check(format!("{request} => {answer}"));
        }
        service.check(format!(
            "sql select count(*) from users => {created}\nsql select count(*) from credentials => 0"
        ));
    }
}

/// Windows' editors write a byte order mark.
#[test]
fn bodies_that_are_no_json_objects() {
    let service = Service::start();
    let mut client = service.client();
    let marked = format!("\u{feff}{ADA}");
    assert_eq!(client.post("/users", &marked).status, 201);
    assert_eq!(client.put("/users/1", "\u{feff}{\"name\":\"Ada L.\"}").status, 200);
    assert_eq!(client.patch("/users/1", "\u{feff}{\"name\":\"Ada\"}").status, 200);
    let deep = format!("{{\"name\":{}", "[".repeat(60_000));
    // A body, and the message where it is not the parser's.
    let no_object = |first: char, problem: &str| {
        format!(
            "the body is not a JSON object: it begins with {first:?} ({problem}); a file arrives as it is: curl -d @user.json"
        )
    };
    let rows: [(&[u8], &str); 15] = [
        (b"", "the body is empty"),
        (b" \r\n", "the body is empty"),
        (b"null", &no_object('n', "another kind of JSON")),
        (b" []", &no_object('[', "another kind of JSON")),
        (b"\"{\\\"name\\\":\\\"Ada\\\"}\"", &no_object('"', "another kind of JSON")),
        (b"{name:Ada}", "the body is not valid JSON: key must be a string at line 1 column 2"),
        (b"%7b%22name%22%3a%22Ada%22%7d", &no_object('%', "expected value at line 1 column 1")),
        (b"[object Object]", &no_object('[', "expected value at line 1 column 2")),
        // Copied from a page.
        ("\u{a0}{\"name\":\"Ada\"}".as_bytes(), &no_object('\u{a0}', "expected value at line 1 column 1")),
        // A message repeats no password.
        (b"correct horse", &no_object('c', "expected value at line 1 column 1")),
        (b"\"\0c\0o\0r", "the body is UTF-16; send it as UTF-8"),
        (
            b" 'correct horse'",
            "the body begins with a single quote, which cmd.exe passes on; use double quotes there",
        ),
        (b"{\"name\":\"\\ud800\"}", ""),
        (deep.as_bytes(), ""),
        (b"{\"name\":\"J\xfcrgen\"}", "the body is not UTF-8"),
    ];
    for (body, message) in rows {
        let shown = String::from_utf8_lossy(&body[..body.len().min(40)]);
        for (method, target) in
            [("POST", "/users"), ("PUT", "/users/1"), ("PATCH", "/users/1"), ("POST", "/users/authenticate")]
        {
            let answer = client.request(method, target, &[], body);
            assert_eq!(answer.status, 400, "{method} {shown}: {answer:?}");
            let mut refusal = answer.json();
            let found = refusal["message"].take();
            assert!(
                found.is_string() && (message.is_empty() || found == message),
                "{method} {shown}: {found}"
            );
            assert_eq!(refusal, json!({"error": "Invalid JSON", "message": null}), "{method} {shown}");
        }
    }
    check(&mut client, &format!("GET /users/1 => 200 {ADA_1}\nGET /users/2 => 404 {NOT_FOUND}"));
}

/// A body is read as it is, so one that was compressed is refused and not taken for what it is not; bodies are JSON whatever
/// their type, but for uploads and patches of other kinds.
#[test]
fn media_types_and_content_codings() {
    const UPLOAD: &str = r#"415 <Accept: application/json> <!Accept-Encoding> {"error":"Unsupported media type","message":"uploads are not read: send JSON, as application/json"}"#;
    const PATCH: &str = r#"415 <Accept: application/merge-patch+json, application/json> <Accept-Patch: application/merge-patch+json, application/json> <!Accept-Encoding> {"error":"Unsupported media type","message":"the Content-Type of a patch is application/merge-patch+json or application/json"}"#;
    const CODED: &str = r#"415 <Accept-Encoding: identity> {"error":"Unsupported media type","message":"bodies with a Content-Encoding are not decoded: send plain JSON"}"#;
    let service = Service::with(|config| config.password_hashing = PasswordHashing::LeastCostForTests);
    service.check(format!("POST /users {ADA} => 201 *"));
    // Fields; the answers to a POST and a PUT, and to a PATCH, where they are refused.
    let rows = [
        ("", None, None),
        ("<Content-Type: Application/JSON; charset=utf-8>", None, None),
        ("<Content-Type: application/x-www-form-urlencoded>", None, None),
        ("<Content-Type: application/merge-patch+json ;x=y>", None, None),
        ("<Content-Type: text/plain>", None, Some(PATCH)),
        ("<Content-Type: application/json-patch+json>", None, Some(PATCH)),
        ("<Content-Type: multipart/form-data; boundary=x>", Some(UPLOAD), Some(PATCH)),
        ("<Content-Type: Multipart/Mixed>", Some(UPLOAD), Some(PATCH)),
        ("<Content-Encoding: Identity, identity>", None, None),
        ("<Content-Encoding:>", None, None),
        ("<Content-Encoding: gzip>", Some(CODED), Some(CODED)),
        ("<Content-Encoding: identity> <Content-Encoding: br>", Some(CODED), Some(CODED)),
        ("<Content-Encoding: é>", Some(CODED), Some(CODED)),
    ];
    for (n, (fields, refused, patch_refused)) in rows.into_iter().enumerate() {
        let (created, put) = (refused.unwrap_or("201 *"), refused.unwrap_or("200 *"));
        let (login, patched) = (refused.unwrap_or("401 *"), patch_refused.unwrap_or("200 *"));
        let name = if refused.is_none() { format!("put {n}") } else { "Ada".to_owned() };
        let then = if patch_refused.is_none() { format!("patch {n}") } else { name.clone() };
        service.check(format!(
            r#"
            sql update users set name = 'Ada' where id = 1
            POST /users {fields} {{"name":"B","email":"{n}@example.com"}} => {created}
            GET /users?email={n}@example.com => 200 *
            sql select count(*) from users where email = '{n}@example.com' => {}
            POST /users/authenticate {fields} {{"email":"a{n}@b.co","password":"x"}} => {login}
            PUT /users/1 {fields} {{"name":"put {n}"}} => {put}
            GET /users/1 {fields} => 200 {{"id":"1","name":"{name}",*
            PATCH /users/1 {fields} {{"name":"patch {n}"}} => {patched}
            GET /users/1 => 200 {{"id":"1","name":"{then}",*
            "#,
            u8::from(refused.is_none())
        ));
    }
}

// Paths, methods and fields of answers

#[test]
fn where_to_begin() {
    for (ui, page) in [(Ui::On, r#""ui":"/ui","#), (Ui::Off, "")] {
        Service::with(|config| config.ui = ui).check(format!(
            r#"
            GET /?page=1 => 200 {{"description":"/openapi.json",{page}"users":"/users"}}
            POST / => 405 {{"error":"Method not allowed"}}
            "#
        ));
    }
}

#[test]
fn paths_that_name_no_user_or_nothing() {
    let service = Service::start();
    service.check(format!("POST /users {ADA} => 201 {ADA_1}"));
    let ids = "0 -1 01 +1 1.0 1e0 0x1 2 9223372036854775807 9223372036854775808 18446744073709551617 abc %31%00 %201 1%20 \
               1%2F2 % %3 %zz %ff %D9%A1 1;2";
    for id in ids.split(' ') {
        service.check(format!(
            "
            GET|PUT|PATCH|DELETE /users/{id} => 404 {NOT_FOUND}
            PUT /users/{id} {{\"name\":\"Eve\"}} => 404 {NOT_FOUND}
            "
        ));
    }
    let paths = "/user /Users /users/1/x /users/./1 /v1/users /favicon.ico /users%2F1 /nothing/";
    for path in paths.split(' ') {
        service.check(format!("GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH {path} => 404 {NOT_FOUND}"));
    }
    let message = "the path is /users, without a further slash";
    service.check(format!(r#"GET|DELETE /users/ => 404 {{"error":"Not found","message":"{message}"}}"#));
    service.check(format!("GET /users/1 => 200 {ADA_1}"));
}

#[test]
fn methods() {
    let service = Service::start();
    service.client().post("/users", ADA);
    service.check(
        r#"
        OPTIONS /users => 204 <Allow: GET, HEAD, POST, OPTIONS> <!Accept-Patch>
        OPTIONS /users/1 => 204 <Allow: GET, HEAD, PUT, PATCH, DELETE, OPTIONS> <Accept-Patch: application/merge-patch+json, application/json>
        OPTIONS /users/abc => 204 <Allow: GET, HEAD, PUT, PATCH, DELETE, OPTIONS> <Accept-Patch: application/merge-patch+json, application/json>
        OPTIONS /users/authenticate => 204 <Allow: POST, OPTIONS> <!Accept-Patch>
        PUT|DELETE|PATCH|TRACE|QUERY|get|Post /users => 405 <Allow: GET, HEAD, POST, OPTIONS> {"error":"Method not allowed"}
        POST|TRACE|put|patch /users/1 => 405 <Allow: GET, HEAD, PUT, PATCH, DELETE, OPTIONS> {"error":"Method not allowed"}
        POST /users/abc => 405 <Allow: GET, HEAD, PUT, PATCH, DELETE, OPTIONS> {"error":"Method not allowed"}
        GET|HEAD|PUT|DELETE|PATCH /users/authenticate => 405 <Allow: POST, OPTIONS> {"error":"Method not allowed"}
        "#,
    );
    // HEAD is GET without the body.
    let mut client = service.client();
    for target in ["/users", "/users?page=2", "/users?page=x", "/users/1", "/users/2", "/users/%", "/nowhere"]
    {
        let (get, head) = (client.get(target), client.request("HEAD", target, &[], ""));
        let fields = |answer: &Answer| {
            let mut fields = answer.headers.clone();
            fields.retain(|(name, _)| !["Date", "X-Request-Id"].contains(&name.as_str()));
            (answer.status, fields)
        };
        assert_eq!(fields(&head), fields(&get), "{target}");
    }
}

// Passwords

/// A wrong password, no such user, a user without a password: a client cannot tell them apart.
#[test]
fn authentication() {
    let service = Service::start();
    service.check(format!(
        r#"
        POST /users {{"name":"Ada","email":"ada@example.com","password":"correct horse"}} => 201 {ADA_1}
        POST /users {{"name":"Bob","email":"bob@example.com"}} => 201 *
        POST /users/authenticate {{"email":"ada@example.com","password":"correct horse"}} => 200 {ADA_1}
        POST /users/authenticate {{"email":"ADA@Example.Com","password":"correct horse","x":1}} => 200 {ADA_1}
        POST /users/authenticate {{"email":"ada@example.com","password":"battery staple"}} => 401 <WWW-Authenticate: Userd-Password> {{"error":"Invalid credentials"}}
        POST /users/authenticate {{"email":"ada@example.com","password":"correct horse "}} => 401 {{"error":"Invalid credentials"}}
        POST /users/authenticate {{"email":"ada@example.com","password":""}} => 401 {{"error":"Invalid credentials"}}
        POST /users/authenticate {{"email":"eve@example.com","password":"correct horse"}} => 401 {{"error":"Invalid credentials"}}
        POST /users/authenticate {{"email":"Ann <ann@example.com>","password":"correct horse"}} => 401 {{"error":"Invalid credentials"}}
        POST /users/authenticate {{"email":"bob@example.com","password":"correct horse"}} => 401 {{"error":"Invalid credentials"}}
        sql insert into credentials (user_id, password_hash) values (2, '{}')
        POST /users/authenticate {{"email":"bob@example.com","password":""}} => 401 {{"error":"Invalid credentials"}}
        "#,
        hash("")
    ));
}

/// A refused change leaves the password as it was, and so do the other fields.
#[test]
fn a_change_sets_keeps_and_removes_the_password() {
    let service = Service::with(|config| {
        config.auth_attempts = 0;
        config.password_hashing = PasswordHashing::LeastCostForTests;
    });
    let longest = "🔑".repeat(10_000);
    service.check(format!(
        r#"POST /users {{"name":"Ada","email":"ada@example.com","password":"{PASSWORD}"}} => 201 *
        POST /users {{"name":"Bob","email":"bob@example.com"}} => 201 *"#
    ));
    // The statuses of a PUT and of a PATCH, and the password then.
    for (body, statuses, now) in [
        (format!(r#""password":"{OTHER_PASSWORD}""#), [200, 200], Some(OTHER_PASSWORD)),
        (r#""name":"Ada L.""#.to_owned(), [200, 200], Some(OTHER_PASSWORD)),
        (r#""password":null"#.to_owned(), [200, 200], None),
        (r#""passw\u006frd":"correct horse","name":"Ada""#.to_owned(), [200, 200], Some(PASSWORD)),
        (r#""password":null,"email":"ADA@example.com""#.to_owned(), [200, 200], None),
        (format!(r#""password":"{longest}""#), [200, 200], Some(&*longest)),
        (r#""password":"12345678","email":"BOB@example.com""#.to_owned(), [409, 409], Some(&longest)),
        (r#""password":"12345678","name":7"#.to_owned(), [422, 400], Some(&longest)),
        (r#""password":null,"isAdmin":true"#.to_owned(), [422, 422], Some(&longest)),
        (r#""password":"""#.to_owned(), [422, 400], Some(&longest)),
    ] {
        for (method, status) in ["PUT", "PATCH"].iter().zip(statuses) {
            service.check(format!("{method} /users/1 {{{body}}} => {status} *"));
            for password in [OTHER_PASSWORD, PASSWORD, "12345678", &longest] {
                let opens = service.client().opens("ada@example.com", password);
                assert_eq!(opens, now == Some(password), "{method} {body:.40}: {password:.20}");
            }
        }
    }
}

#[test]
fn the_time_of_a_refusal_tells_nothing() {
    const ROUNDS: std::ops::Range<usize> = 8..100;
    let service = Service::with(|config| config.auth_attempts = 0);
    let mut client = service.client();
    let ada = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD});
    client.post("/users", ada.to_string());
    client.post("/users", r#"{"name":"Bob","email":"bob@example.com"}"#);
    // Only of this thread's work: other threads slow it down, and do not count.
    let worked = || {
        let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
        (usage.user_time() + usage.system_time()).num_microseconds()
    };
    let requests = ["ada@example.com", "bob@example.com", "eve@example.com", "no address"]
        .map(|email| json!({"email": email, "password": OTHER_PASSWORD}))
        .map(|credentials| Request::post("/users/authenticate", &credentials));
    // The least of several rounds: what other processes do to the caches and the clock of a core only adds.
    let mut times = [i64::MAX; 4];
    // With one pass of Argon2 instead of two it would be a half, and without a hash a twentieth.
    let agree = |times: &[i64; 4]| times.iter().all(|time| (time - times[0]).abs() < times[0] / 4);
    for round in 0..ROUNDS.end {
        if round >= ROUNDS.start && agree(&times) {
            break;
        }
        for (request, least) in requests.iter().zip(&mut times) {
            let before = worked();
            assert_eq!(service.server.app().handle(request).status, 401);
            *least = (worked() - before).min(*least);
        }
    }
    assert!(agree(&times), "microseconds: {times:?}");
}

// Rows that other clients wrote

#[test]
fn rows_inserted_by_hand_are_as_good_as_any() {
    let service = Service::start();
    let mut sql = service.database.client();
    sql.batch_execute("insert into users (name, email) values ('Ada', 'ada@example.com')").unwrap();
    let mut copy = sql.copy_in("copy users (name, email) from stdin").unwrap();
    std::io::Write::write_all(&mut copy, b"Bob\tbob@example.com\nZo\xc3\xab\tZOE@example.com\n").unwrap();
    copy.finish().unwrap();
    service.check(
        r#"
        sql insert into users (name, email, created_at, updated_at) values ('Old', 'old@example.com', '0001-01-01T00:00:00Z', '9999-12-31T23:59:59.999999Z')
        GET /users?perPage=2 => 200 {"data":[{"id":"1","name":"Ada","email":"ada@example.com",<times>},{"id":"2","name":"Bob","email":"bob@example.com",<times>}],"total":4,"perPage":2,"currentPage":1,"lastPage":2,"from":1,"to":2,"hasMorePages":true}
        GET /users/2 => 200 {"id":"2","name":"Bob","email":"bob@example.com",<times>}
        POST /users {"name":"Zoe","email":"zoe@EXAMPLE.com"} => 409 {"error":"Already exists"}
        GET /users/3 => 200 <ETag: $tag> {"id":"3",*
        PUT /users/3 <If-Match: $tag> {"name":"Zoe"} => 200 {"id":"3","name":"Zoe","email":"ZOE@example.com",<times>}
        PUT /users/1 {"password":"correct horse"} => 200 {"id":"1","name":"Ada","email":"ada@example.com",<times>}
        POST /users/authenticate {"email":"ada@example.com","password":"correct horse"} => 200 {"id":"1","name":"Ada","email":"ada@example.com",<times>}
        DELETE /users/2 => 204
        GET /users?perPage=1&page=2 => 200 {"data":[{"id":"3","name":"Zoe","email":"ZOE@example.com",<times>}],"total":3,"perPage":1,"currentPage":2,"lastPage":3,"from":2,"to":2,"hasMorePages":true}
        POST /users {"name":"New","email":"new@example.com"} => 201 <Location: /users/6> {"id":"6",*
        "#,
    );
    let old = service.client().get("/users/4").json();
    assert_eq!(old["createdAt"], "0001-01-01T00:00:00.000000Z");
    assert_eq!(old["updatedAt"], "9999-12-31T23:59:59.999999Z");
}

#[test]
fn rows_that_could_not_be_served_are_refused_by_the_database() {
    let service = Service::start();
    // Refused as well by a session that has inserted users before.
    for before in ["", "insert into users (name, email) values ('o', gen_random_uuid() || '@example.com');"] {
        let rows = r#"
            sql BEFORE insert into users (name, email, created_at) values ('n', 'a@b.co', 'infinity') => error 23514
            sql BEFORE insert into users (name, email, updated_at) values ('n', 'a@b.co', '-infinity') => error 23514
            sql BEFORE insert into users (name, email, created_at) values ('n', 'a@b.co', '10000-01-01T00:00:00Z') => error 23514
            sql BEFORE insert into users (name, email, created_at) values ('n', 'a@b.co', '0001-12-31T00:00:00Z BC') => error 23514
            sql BEFORE insert into users (id, name, email) overriding system value values (0, 'n', 'a@b.co') => error 23514
            sql BEFORE insert into users (id, name, email) values (7, 'n', 'a@b.co') => error 428C9
            sql BEFORE insert into users (name) values ('n') => error 23502
            sql BEFORE insert into users (email) values ('a@b.co') => error 23502
            sql BEFORE insert into users (name, email, created_at) values ('n', 'a@b.co', null) => error 23502
            sql BEFORE insert into users (name, email) values ('n', repeat('x', 255)) => error 22001
            sql BEFORE insert into users (name, email) values (repeat('é', 1001), 'a@b.co') => error 22001
            sql BEFORE set local session_replication_role = replica; insert into users (name, email) values (repeat('x', 1001), 'a@b.co') => error 22001
            sql BEFORE insert into credentials (user_id, password_hash) values (1, repeat('x', 513)) => error 22001
            sql BEFORE insert into users (name, email) values ('n', 'a@b.co'), ('n', 'A@B.CO') => error 23505
            sql BEFORE insert into credentials (user_id, password_hash) values (7777, 'x') => error 23503
            sql insert into users (name, email) values ('n', 'n@b.co'); update users set id = default => error 23000
            sql insert into users (name, email) values ('n', 'n@b.co'); update users set created_at = 'infinity' => error 23514
            sql insert into users (name, email) values ('n', 'n@b.co'); update users set updated_at = '10000-01-01T00:00:00Z' => error 23514
            sql insert into users (name, email) values ('n', 'n@b.co'); update users set name = repeat('x', 1001) => error 22001
            sql select count(*) from users => 0
            "#;
        service.check(rows.replace("BEFORE", before));
    }
}

// Which requests are allowed

/// A program gets the rights that it needs, and a token can be replaced without an interruption.
#[test]
fn tokens_with_fewer_rights() {
    let service = Service::with(|config| {
        config.api_token = Some("full-1 full-2".into());
        config.api_token_read = Some("read-1\nread-2".into());
        config.api_token_login = Some("login".into());
    });
    let login = format!(r#"{{"email":"ada@example.com","password":"{PASSWORD}"}}"#);
    let ada = login.replace('{', r#"{"name":"Ada","#);
    service.check(format!("POST /users <Authorization: Bearer full-1> {ada} => 201 {ADA_1}"));
    // Method, target, body; the status with a token for reads, with one for logins, and with none.
    let rows = [
        ("GET|HEAD", "/users", "", 200, 403, 401),
        ("GET", "/users/1", "", 200, 403, 401),
        ("GET", "/metrics", "", 200, 403, 401),
        ("POST", "/users/authenticate", &login, 403, 200, 401),
        ("POST", "/users", r#"{"name":"B","email":"b@example.com"}"#, 403, 403, 401),
        ("PUT|PATCH", "/users/1", r#"{"name":"B"}"#, 403, 403, 401),
        ("DELETE", "/users/1", "", 403, 403, 401),
        ("GET", "/users/abc", "", 404, 403, 401),
        ("DELETE", "/users", "", 405, 405, 405),
        ("GET", "/openapi.json", "", 200, 200, 200),
        ("GET", "/readyz", "", 200, 200, 200),
    ];
    for (method, target, body, with_read, with_login, with_none) in rows {
        for (field, status) in [
            ("<Authorization: Bearer read-1>", with_read),
            ("<Authorization: Bearer read-2>", with_read),
            ("<Authorization: Bearer login>", with_login),
            ("", with_none),
        ] {
            let answer = match status {
                401 => r#"401 <WWW-Authenticate: Bearer> {"error":"Unauthorized"}"#,
                403 => r#"403 {"error":"Forbidden"}"#,
                status => &format!("{status} *"),
            };
            service.check(format!("{method} {target} {field} {body} => {answer}"));
        }
    }
    service.check(format!(
        r#"
        OPTIONS /users <Authorization: Bearer login> => 204
        GET /users <Authorization: Bearer full-2> => 200 {{"data":[{ADA_1}],"total":1,*
        DELETE /users/1 <Authorization: Bearer full-2> => 204
        GET /users/1 <Authorization: Bearer read-2> => 404 {NOT_FOUND}
        GET /nothing => 404 {NOT_FOUND}
        GET /users/1/x => 404 {NOT_FOUND}
        "#
    ));
    // Not even a missing table is noticed: no query is executed.
    service.database.run("drop table users cascade");
    let unknown = "Bearer full|Bearer full-1x|Bearer read-1 read-2|Bearer full-1 full-2|Bearer login2|Bearer \
                   |Bearer|Basic dTpw|full-1";
    for field in unknown.split('|') {
        for (method, target, body, ..) in rows.iter().filter(|row| row.5 == 401) {
            service.check(format!("{method} {target} <Authorization: {field}> {body} => 401 *"));
        }
    }
}

#[test]
fn browsers_that_speak_for_other_sites() {
    let service = Service::start();
    let own = service.server.base_url();
    service.check(format!("POST /users {ADA} => 201 {ADA_1}"));
    for fields in [
        "<Sec-Fetch-Site: cross-site>",
        "<Sec-Fetch-Site: same-site>",
        &format!("<Sec-Fetch-Site: cross-site> <Origin: {own}>"),
        "<Origin: https://evil.example>",
        "<Origin: null>",
    ] {
        let refused = r#"403 {"error":"Cross-origin request refused","message":"ALLOWED_ORIGINS does not name this origin"}"#;
        service.check(format!(
            r#"
            POST /users {fields} {{"name":"Eve","email":"eve@example.com"}} => {refused}
            PUT|PATCH|DELETE /users/1 {fields} {{"name":"Eve"}} => {refused}
            POST /users/authenticate {fields} {{"email":"ada@example.com","password":"correct horse"}} => {refused}
            GET /users/1 {fields} => 200 {ADA_1}
            GET /users => 200 {{"data":[{ADA_1}],"total":1,*
            "#
        ));
    }
    for fields in [
        "<Sec-Fetch-Site: same-origin>",
        "<Sec-Fetch-Site: none>",
        "<Sec-Fetch-Site: same-origin> <Origin: https://proxied.example>",
        &format!("<Origin: {own}>"),
    ] {
        service.check(format!("PUT /users/1 {fields} {{}} => 200 {ADA_1}"));
    }
}
