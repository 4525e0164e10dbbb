//! Clients that are faulty or hostile: malformed requests, browsers under foreign names, answers that are not read.

use crate::support::{Client, Database, Process, Service, check};
use socket2::{Domain, Socket, Type};
use std::{io::Write, net::SocketAddr};

const ADA: &str = r#"{"name":"Ada","email":"ada@example.com"}"#;

/// `POST /users` of a valid user, as one chunk with these extensions.
fn chunked(extensions: &str) -> String {
    let size = ADA.len();
    format!(
        "POST /users HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\
         {size:x}{extensions}\r\n{ADA}\r\n0\r\n\r\n"
    )
}

/// The same with a length, this host, and these fields.
fn counted(host: &str, fields: &str) -> String {
    let size = ADA.len();
    format!("POST /users HTTP/1.1\r\nHost: {host}\r\n{fields}Content-Length: {size}\r\n\r\n{ADA}")
}

fn coded(codings: &str) -> String {
    chunked("").replace("Transfer-Encoding: chunked", &format!("Transfer-Encoding: {codings}"))
}

#[test]
fn malformed_requests_are_refused_and_change_nothing() {
    let service = Service::start();
    let long = "M".repeat(33);
    let rows = [
        (chunked(";"), 400),
        (chunked(";a="), 400),
        (chunked(";=b"), 400),
        (chunked(";a=\"b"), 400),
        (counted("[", ""), 400),
        (counted("[::1", ""), 400),
        (counted("a:b", ""), 400),
        (counted("%zz", ""), 400),
        (counted("a", "Content-Type: application/json\r\nContent-Type: text/plain\r\n"), 400),
        (coded("gzip"), 501),
        (coded("gzip, chunked"), 501),
        (coded("chunked, gzip"), 400),
        (coded("chunked, chunked"), 400),
        (counted("a", "").replace("POST", &long), 501),
        (counted("a", "").replace("/users", "/users#x"), 400),
        (counted("a", "").replace("/users", "/users\\x"), 400),
        (counted("a", "").replace("HTTP/1.1", "HTTP/2.0"), 505),
        // Nothing else has to come.
        ("GET /\r\n".to_owned(), 400),
        ("GET / HTTP/3.0\r\n".to_owned(), 505),
    ];
    for (request, status) in rows {
        let mut client = service.client();
        client.send(request.as_bytes());
        let answer = client.answer("POST");
        assert_eq!(answer.status, status, "{request}");
        assert_eq!(answer.header("Connection"), Some("close"), "{request}");
    }
    assert_eq!(service.client().get("/users").json()["total"], 0);
    // What is well-formed of the same kinds.
    let mut client = service.client();
    client.send(chunked(" ; a = \"b\\\"\";c").as_bytes());
    assert_eq!(client.answer("POST").status, 201);
    client.send(b"GET /users HTTP/1.2\r\nHost: [::1]:80\r\n\r\n");
    assert_eq!(client.answer("GET").json()["total"], 1);
}

#[test]
fn a_wrong_password_names_a_scheme() {
    let service = Service::start();
    let body = r#"{"email":"ada@example.com","password":"wrong password"}"#;
    let answer = service.client().post("/users/authenticate", body);
    assert_eq!((answer.status, answer.header("WWW-Authenticate")), (401, Some("Userd-Password")));
}

#[test]
fn browsers_call_under_the_service_s_own_names() {
    let service = Service::with(|config| config.allowed_hosts = vec!["users.example".to_owned()]);
    let mut client = service.client();
    let own = service.server.addr().expect("a TCP address").to_string();
    let rebound = "evil.example";
    let refused = r#"{"error":"Host not allowed","message":"ALLOWED_HOSTS does not name this host"}"#;
    for fields in
        ["Origin: http://evil.example\r\nSec-Fetch-Site: same-origin\r\n", "Sec-Fetch-Mode: cors\r\n"]
    {
        for request in
            [counted(rebound, fields), format!("GET /users HTTP/1.1\r\nHost: {rebound}\r\n{fields}\r\n")]
        {
            client.send(request.as_bytes());
            let answer = client.answer("POST");
            assert_eq!((answer.status, answer.body.trim_end()), (403, refused), "{request}");
        }
        assert_eq!(client.get("/users").json()["total"], 0);
    }
    let rows = [
        (own.as_str(), "Sec-Fetch-Site: same-origin\r\n"),
        ("localhost:80", "Sec-Fetch-Site: none\r\n"),
        ("users.example", "Origin: http://users.example\r\n"),
        // curl, under any name.
        (rebound, ""),
    ];
    for (count, (host, fields)) in rows.into_iter().enumerate() {
        client.send(counted(host, fields).replace("ada@", &format!("a{count:02}@")).as_bytes());
        assert_eq!(client.answer("POST").status, 201, "{host} {fields}");
        assert_eq!(client.get("/users").json()["total"], count + 1);
    }
}

#[test]
fn an_answer_that_is_not_read_is_not_logged_as_read() {
    let database = Database::create();
    let mut process = Process::on(&database, &[("WRITE_TIMEOUT", "0.5")]);
    let url = process.wait_for_url();
    database.run(
        "insert into users (name, email) select repeat('x', 200), n || '@example.com' from generate_series(1, 1000) n",
    );
    let address: SocketAddr =
        url.strip_prefix("http://").and_then(|text| text.parse().ok()).expect("an address");
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    // So that the kernels of both sides hold little of the answer.
    socket.set_recv_buffer_size(4096).expect("an option of every socket");
    socket.set_tcp_mss(536).expect("an option of every TCP socket");
    socket.connect(&address.into()).expect("it listens");
    (&socket).write_all(b"GET /users?perPage=1000 HTTP/1.1\r\nHost: a\r\n\r\n").expect("it reads");
    process.logs("cut off: 127.0.0.1 took ");
    process.logs("B so far");
    assert!(process.stderr().contains("bytes of an answer within WRITE_TIMEOUT"), "{}", process.stderr());
    let whole = Client::new(&url).get("/users?perPage=1000");
    assert!(whole.size > 300_000);
    // A reader gets all of it, and only that is logged as a whole answer.
    let end = format!(" {}B client=127.0.0.1 request_id=", whole.size);
    process.logs(&end);
    let lines = process.stderr();
    let logged = lines.lines().filter(|line| line.contains(&end));
    assert_eq!(logged.count(), 1, "{lines}");
    check(&mut Client::new(&url), "GET /users/0 => 404 {\"error\":\"Not found\"}");
}
