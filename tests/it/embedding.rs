//! The library, as a program uses it that starts the service in its own process.

use crate::support::{ADA, ADA_1, Client, Database, PASSWORD, Service, check, free_port};
use serde_json::json;
use std::{net::TcpStream, time::Duration};
use userd::{StartError, config::Config, http::Request, server::Server};

#[test]
fn a_login_is_the_same_wherever_lazy_loading_is_prevented() {
    for production in [true, false] {
        let service = Service::with(|config| config.production = production);
        let ada = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string();
        let credentials = json!({"email": "ada@example.com", "password": PASSWORD}).to_string();
        let mut client = service.client();
        check(&mut client, &format!("POST /users {ada} => 201 {ADA_1}"));
        check(&mut client, &format!("POST /users/authenticate {credentials} => 200 {ADA_1}"));
    }
}

#[test]
fn node_env_is_production_for_exactly_that_text() {
    for (value, expected) in
        [("", false), ("production", true), ("Production", false), ("production ", false)]
    {
        let lookup = |name: &str| (name == "NODE_ENV").then(|| value.into());
        assert_eq!(Config::from_vars(lookup).unwrap().production, expected, "{value:?}");
    }
}

// Servers in this process

#[test]
fn several_servers_side_by_side() {
    let services: Vec<Service> =
        (0..4).map(|n| Service::with(|config| config.max_per_page = 100 + n)).collect();
    for (n, service) in services.iter().enumerate() {
        assert!(service.server.addr().unwrap().ip().is_loopback(), "the default");
        for user in 0..=n {
            let body = json!({"name": "n", "email": format!("{user}@example.com")}).to_string();
            assert_eq!(service.client().post("/users", body).status, 201);
        }
    }
    for (n, service) in services.iter().enumerate() {
        // Each has users and settings of its own.
        assert_eq!(service.client().get(&format!("/users?perPage={}", 100 + n)).json()["total"], n + 1);
        assert_eq!(service.client().get(&format!("/users?perPage={}", 101 + n)).status, 400);
    }
    // Two on one database see the same, and ending one ends no other.
    let twin = Server::start(services[3].database.config()).unwrap();
    assert_eq!(Client::new(twin.base_url()).get("/users").json()["total"], 4);
    twin.stop();
    assert_eq!(services[3].client().get("/users").json()["total"], 4);
}

#[test]
fn a_stopped_server_frees_its_port() {
    let database = Database::create();
    let start = |port| Server::start(Config { port, ..database.config() });
    // No other process gets it once it is free.
    let port = free_port();
    let server = start(port).unwrap();
    let addr = server.addr().unwrap();
    assert_eq!(addr.port(), port);
    assert_eq!(server.base_url(), format!("http://{addr}"));
    assert_eq!(Client::new(server.base_url()).post("/users", ADA).status, 201);
    assert!(matches!(start(port), Err(StartError::Listen(address, _)) if address == addr.to_string()));
    server.stop();
    assert!(TcpStream::connect(addr).is_err(), "it still listens");
    let server = start(port).unwrap();
    check(&mut Client::new(server.base_url()), &format!("GET /users/1 => 200 {ADA_1}"));
    drop(server);
    assert!(TcpStream::connect(addr).is_err(), "it still listens");
}

/// Errors of a start are values: one line, and the variable that a setting is known by.
#[test]
fn what_keeps_a_server_from_starting() {
    let (database, missing) = (Database::create(), Database::unmade());
    let taken = Server::start(database.config()).unwrap();
    type Change<'a> = &'a dyn Fn(&mut Config);
    let rows: [(&str, Change); 9] = [
        ("cannot connect to the database: ", &|config| *config = missing.config()),
        ("cannot connect to the database: ", &|config| {
            config.database = userd::Database::Url("postgresql://someone@/x?host=/nowhere".into());
            config.db_connect_timeout = Duration::from_millis(500);
        }),
        ("cannot listen on 127.0.0.1:", &|config| config.port = taken.addr().unwrap().port()),
        ("cannot listen on unix:/nowhere/socket: ", &|config| {
            config.host = "unix:/nowhere/socket".to_owned()
        }),
        ("DATABASE_URL: ", &|config| config.database = userd::Database::Url("mysql://localhost".into())),
        ("MIGRATIONS_DIR: ", &|config| config.migrations_dir = Some("/nowhere".into())),
        // Settings that a variable could not have.
        ("WORKERS", &|config| config.workers = 0),
        ("IDLE_TIMEOUT", &|config| config.limits.idle_timeout = Duration::MAX),
        ("REQUEST_TIMEOUT", &|config| config.limits.request_timeout = Duration::ZERO),
    ];
    for (line, change) in rows {
        let mut config = database.config();
        change(&mut config);
        let error = Server::start(config).err().expect(line);
        if let StartError::Config(error) = &error {
            assert!(line.starts_with(error.variable), "{error:?}");
        }
        let error = error.to_string();
        assert!(error.starts_with(line) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn asked_without_a_socket_the_service_answers_the_same() {
    let service = Service::start();
    let mut client = service.client();
    let ada = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string();
    for body in [ada.as_str(), r#"{"name":"Bob","email":"bob@example.com"}"#] {
        assert_eq!(client.post("/users", body).status, 201);
    }
    let credentials = json!({"email": "ada@example.com", "password": PASSWORD}).to_string();
    let requests = [
        ("GET", "/users", ""),
        ("GET", "/users?page=2&perPage=1", ""),
        ("GET", "/users/1", ""),
        ("GET", "/users/3", ""),
        ("GET", "/nowhere", ""),
        ("GET", "/livez", ""),
        ("GET", "/readyz", ""),
        ("PATCH", "/users", ""),
        ("OPTIONS", "/users/1", ""),
        ("POST", "/users", "{"),
        ("POST", "/users", r#"{"name":"Bob","email":"BOB@example.com"}"#),
        ("PUT", "/users/1", r#"{"name":"Ada"}"#),
        ("PUT", "/users/1", r#"{"email":"bob@example.com"}"#),
        ("DELETE", "/users/3", ""),
        ("POST", "/users/authenticate", &credentials),
    ];
    for (method, target, body) in requests {
        let response = service.server.app().handle(&Request::new(method, target, body));
        let answer = client.request(method, target, &[], body);
        assert_eq!(response.status, answer.status, "{method} {target}");
        assert_eq!(String::from_utf8(response.body).unwrap(), answer.body, "{method} {target}");
        for (name, value) in response.headers {
            assert_eq!(answer.header(name), Some(&*value), "{method} {target}");
        }
    }
    // And what one way writes the other reads.
    let eve = Request::new("POST", "/users", r#"{"name":"Eve","email":"eve@example.com"}"#);
    let response = service.server.app().handle(&eve);
    let created = client.get(&response.headers[0].1).body;
    assert_eq!((response.status, String::from_utf8(response.body).unwrap()), (201, created));
}
