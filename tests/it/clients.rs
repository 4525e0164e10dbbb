//! Clients that are faulty or hostile: pages under foreign names, answers that are not read. (Malformed requests are in
//! `src/frontend`.)

use crate::support::{
    ADA, Answer, Client, Database, LONG, Process, Service, TOKEN, TempDir, check, connect_small, eventually,
    pause,
};
use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};
use userd::Config;

/// Builds a request with a length, this host, and these fields.
fn counted(host: &str, fields: &str) -> String {
    let size = ADA.len();
    format!("POST /users HTTP/1.1\r\nHost: {host}\r\n{fields}Content-Length: {size}\r\n\r\n{ADA}")
}

/// Each answer says for how long the client may rely on its connection; a client that does loses no request.
#[test]
fn connections_are_kept_for_as_long_as_they_say() {
    const CLIENTS: usize = 4;
    let service = Service::with(|config| config.limits.idle_timeout = Duration::from_secs(2));
    let said = |answer: &Answer| {
        assert_eq!(answer.header("Connection"), Some("keep-alive"), "{answer:?}");
        let seconds = answer.header("Keep-Alive").and_then(|value| value.strip_prefix("timeout="));
        Duration::from_secs(seconds.and_then(|text| text.parse().ok()).expect("whole seconds"))
    };
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| service.client()).collect();
    // By a worker, by the frontend, and a refusal.
    let targets = ["/users", "/livez", "/users/7"];
    for round in 0..2 {
        let (mut kept, start) = (Vec::new(), Instant::now());
        for (n, client) in clients.iter_mut().enumerate() {
            let answer = match n % 4 {
                3 => {
                    client.send(b"GET /users HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
                    client.answer("GET")
                }
                at => client.get(targets[at]),
            };
            assert!([200, 404].contains(&answer.status), "{round}: {answer:?}");
            kept.push(said(&answer));
        }
        assert_eq!(kept, [Duration::from_secs(1); CLIENTS]);
        // The client's wait is what is tested. Half a second is left to a busy machine, and a second by the service.
        pause((kept[0] - Duration::from_millis(500)).saturating_sub(start.elapsed()));
    }
    let closed = clients[0].request("GET", "/users", &[("Connection", "close")], "");
    assert_eq!((closed.header("Connection"), closed.header("Keep-Alive")), (Some("close"), None));
}

/// The request that Chromium 156 sends for `fetch(target, {method})` of a page of this host over plain http, byte for byte. Only over
/// https and to localhost it has `Sec-Fetch-*`, and a GET has no Origin.
fn chromium(host: &str, method: &str, target: &str) -> String {
    let length = if method == "POST" { "Content-Length: 0\r\n" } else { "" };
    let origin = match method {
        "GET" | "HEAD" => String::new(),
        _ => format!("Origin: http://{host}\r\n"),
    };
    format!(
        "{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: keep-alive\r\n{length}\
         User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) \
         HeadlessChrome/156.0.8078.79 Safari/537.36\r\n\
         Accept: */*\r\n{origin}Referer: http://{host}/\r\nAccept-Encoding: gzip, deflate\r\n\r\n"
    )
}

fn is_refused(answer: &Answer) -> bool {
    let refusal = r#"{"error":"Host not allowed","message":"ALLOWED_HOSTS does not name this host: add its name, without a port, as in ALLOWED_HOSTS=users.example,www.example"}"#;
    answer.status == 403 && (answer.body.trim_end() == refusal || answer.body.is_empty())
}

#[test]
fn a_rebound_page_gets_nothing() {
    let service = Service::with(|config| config.allowed_hosts = vec!["users.example".to_owned()]);
    let mut client = service.client();
    let id = client.post("/users", ADA).id();
    let user = format!("/users/{id}");
    let port = service.server.addr().expect("a TCP address").port();
    let rebound = format!("evil.example:{port}");
    // A browser sends it so over plain http, and adds fields elsewhere.
    let rows = [
        chromium(&rebound, "GET", "/users"),
        chromium(&rebound, "GET", &user),
        chromium(&rebound, "HEAD", &user),
        chromium(&rebound, "GET", "/metrics"),
        chromium(&rebound, "DELETE", &user),
        chromium(&rebound, "POST", "/users"),
        chromium(&rebound, "GET", "/users").replace("HTTP/1.1", "HTTP/1.0"),
        chromium("127.0.0.1", "GET", "/users").replace("GET /", "GET http://evil.example/"),
        chromium("users.example.evil.example", "GET", "/users"),
        chromium("", "GET", "/users"),
        counted(&rebound, &format!("Origin: http://{rebound}\r\nSec-Fetch-Site: same-origin\r\n"))
            .replace("ada@", "eve@"),
        counted(&rebound, "").replace("/users", "/users/authenticate"),
    ];
    for request in rows {
        // HTTP/1.0 closes.
        let mut client = service.client();
        client.send(request.as_bytes());
        let method = request.split(' ').next().expect("a method");
        let answer = client.answer(method);
        assert!(is_refused(&answer), "{request}{answer:?}");
        assert_eq!(service.client().get("/users").json()["total"], 1, "{request}");
    }
    // The service's own hosts.
    let machine = nix::unistd::gethostname().expect("it has a name").into_string().expect("UTF-8");
    for (count, host) in ["127.0.0.1", "localhost:80", "USERS.EXAMPLE.:8080", &machine].iter().enumerate() {
        client.send(counted(host, "").replace("ada@", &format!("a{count:02}@")).as_bytes());
        assert_eq!(client.answer("POST").status, 201, "{host}");
        client.send(chromium(host, "GET", "/users").as_bytes());
        assert_eq!(client.answer("GET").json()["total"], count + 2, "{host}");
    }
    // Paths that tell nothing of the users are open.
    for (method, target, status) in [
        ("GET", "/livez", 200),
        ("GET", "/readyz", 200),
        ("GET", "/openapi.json", 200),
        ("OPTIONS", "/openapi.json", 204),
        ("GET", "/other", 404),
    ] {
        client.send(chromium(&rebound, method, target).as_bytes());
        assert_eq!(client.answer(method).status, status, "{method} {target}");
    }
    // HTTP/1.0 without a host is no browser's.
    client.send(b"GET /users HTTP/1.0\r\n\r\n");
    assert_eq!(client.answer("GET").json()["total"], 5);
}

/// `ALLOWED_HOSTS=*`, a token and a Unix socket make the name irrelevant, but not for a browser behind a proxy at the socket.
#[test]
fn settings_that_accept_any_host() {
    let dir = TempDir::new();
    let bearer = format!("Authorization: Bearer {TOKEN}\r\n");
    type Change<'a> = &'a dyn Fn(&mut Config);
    let rows: [(Change, &str, u16); 4] = [
        (&|config| config.allowed_hosts = vec!["*".to_owned()], "", 200),
        (&|config| config.api_token = Some(TOKEN.into()), &bearer, 200),
        (&|config| config.host = format!("unix:{}/http", dir.name()), "", 200),
        (
            &|config| {
                config.host = format!("unix:{}/proxied", dir.name());
                config.limits.trusted_proxies = "unix".parse().expect("a list");
            },
            "X-Forwarded-For: 203.0.113.7\r\n",
            403,
        ),
    ];
    for (change, field, status) in rows {
        let service = Service::with(change);
        let mut client = service.client();
        let request =
            chromium("evil.example", "GET", "/users").replace("\r\n\r\n", &format!("\r\n{field}\r\n"));
        client.send(request.as_bytes());
        let answer = client.answer("GET");
        assert_eq!((answer.status, is_refused(&answer)), (status, status == 403), "{field}{answer:?}");
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
    let mut stalled = connect_small(address);
    stalled.write_all(b"GET /users?perPage=1000 HTTP/1.1\r\nHost: a\r\n\r\n").expect("it reads");
    process.logs("cut off: 127.0.0.1 took ");
    process.logs("B so far");
    assert!(process.stderr().contains("bytes of an answer (after WRITE_TIMEOUT)"), "{}", process.stderr());
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

/// A client that waits for a 100 (`Expect: 100-continue`) while memory is short is told at once: to go on, as a request that
/// does not move has made way for it, or that there is no memory.
#[test]
fn a_client_that_waits_to_go_on_is_told() {
    const LENGTH: usize = 7_900_000;
    let service = Service::with(|config| {
        config.limits.max_body_bytes = 8 << 20;
        config.limits.memory_budget = 64 << 20;
    });
    let address = service.server.addr().expect("a TCP address");
    let head = format!(
        "POST /users HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: {LENGTH}\r\n\r\n"
    );
    // The status, 15 seconds before the body is too late.
    let ask = || {
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a socket");
        stream.write_all(head.as_bytes()).expect("it reads");
        let mut status = [0; 12];
        stream.read_exact(&mut status).expect("it is told");
        (stream, String::from_utf8(status.to_vec()).expect("ASCII"))
    };
    let mut held: Vec<_> = (0..8).map(|_| ask()).collect();
    assert!(held.iter().all(|(_, status)| status == "HTTP/1.1 100"));
    let mut last = None;
    eventually(LONG, "another one makes way", || {
        let (stream, status) = ask();
        last = Some(stream).filter(|_| status == "HTTP/1.1 100");
        assert!(last.is_some() || status == "HTTP/1.1 503", "{status}");
        last.is_some()
    });
    let mut stream = last.expect("it was told to go on");
    stream.write_all((ADA.to_owned() + &" ".repeat(LENGTH - ADA.len())).as_bytes()).expect("it reads");
    let mut answer = [0; 13 + 12];
    stream.read_exact(&mut answer).expect("an answer");
    assert!(answer.ends_with(b"HTTP/1.1 201"), "{}", String::from_utf8_lossy(&answer));
    assert_eq!(service.client().get("/users").json()["total"], 1);
    let mut refused = String::new();
    held[0].0.read_to_string(&mut refused).expect("it was told");
    assert!(refused.contains("HTTP/1.1 503"), "{refused}");
}
