//! The service inside another program, on a database of its own: `cargo run --example embed`.

use std::{error::Error, io::Read, net::TcpStream};
use userd::{Config, Database, ScratchDatabase, Server};

pub fn main() -> Result<(), Box<dyn Error>> {
    // A program that keeps its data names its database here; this one throws it away.
    let database = ScratchDatabase::create()?;
    let server = Server::start(Config {
        database: Database::Url(database.url().into()),
        workers: 4,
        api_token: Some("a secret of this program".into()),
        ..Config::default() // a free port of the loopback
    })?;

    println!("serving {}", server.base_url());
    let address = server.addr().expect("it is no Unix socket");
    let mut stream = TcpStream::connect(address)?;
    std::io::Write::write_all(
        &mut stream,
        b"GET /users HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    assert!(answer.starts_with("HTTP/1.1 401 "), "no token was sent");

    server.stop(); // as dropping it does: all that is in work is answered, and the port is free
    Ok(())
}
