//! An HTTP/1.1 client of one connection, which holds every answer against what all answers promise.

use super::{assert_no_secret, described::check_described};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    time::Duration,
};

/// How long an answer is waited for, which may need a lock that a test holds.
const AGES: Duration = Duration::from_secs(100);

/// The type of `/metrics`.
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The type of `/ui`.
const PAGE: &str = "text/html; charset=utf-8";

/// Header fields.
pub type Fields<'a> = &'a [(&'a str, &'a str)];

/// An answer that has kept the promises of all answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
    /// All its bytes, those of its head included.
    pub size: usize,
}

impl Answer {
    /// The value of the one field of that name.
    pub fn header(&self, name: &str) -> Option<&str> {
        let named = |(field, _): &&(String, String)| field.eq_ignore_ascii_case(name);
        let mut fields = self.headers.iter().filter(named);
        let found = fields.next().map(|(_, value)| value.as_str());
        assert!(fields.next().is_none(), "{name} is there twice: {self:?}");
        found
    }

    /// The body.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The body; null if there is none.
    pub fn value(&self) -> Value {
        if self.body.is_empty() { Value::Null } else { self.json() }
    }

    /// The `id` in the body.
    pub fn id(&self) -> String {
        let id = self.json()["id"].as_str().map(str::to_owned);
        id.unwrap_or_else(|| panic!("no id: {self:?}"))
    }

    /// Checks the invariants of every answer.
    fn keep_promises(&self, method: &str) {
        assert_no_secret(&format!("{self:?}"));
        if self.status < 200 {
            return;
        }
        let date = self.header("Date").map(httpdate::parse_http_date);
        assert!(matches!(date, Some(Ok(_))), "no date: {self:?}");
        let id = self.header("X-Request-Id");
        assert!(id.is_some_and(|id| (1..=128).contains(&id.len())), "no id: {self:?}");
        assert_eq!(self.header("X-Content-Type-Options"), Some("nosniff"), "{self:?}");
        let is_private = matches!(self.header("Cache-Control"), Some("private, no-cache" | "no-store"));
        assert!(is_private, "others may get it from a cache: {self:?}");
        // RFC 9110, 8.6. A 304 could have it; of ours none needs it.
        let has_content = !matches!(self.status, 204 | 304);
        assert_eq!(self.header("Content-Length").is_some(), has_content, "{self:?}");
        let media_type = self.header("Content-Type").unwrap_or_default();
        let is_text = self.status == 200 && [METRICS, PAGE].contains(&media_type);
        assert!(is_text || !has_content || media_type == "application/json", "{self:?}");
        if is_text || !has_content || method == "HEAD" {
            return;
        }
        assert_eq!(self.body.find('\n'), Some(self.body.len() - 1), "one line: {self:?}");
        let body = self.json();
        let is_refusal = body.get("error").is_some() || body.get("errors").is_some();
        let is_unready = self.status == 503 && body["status"] == "unready" && body["reason"].is_string();
        assert_eq!(is_refusal || is_unready, self.status >= 400, "{self:?}");
        assert!(self.status != 503 || is_unready || self.header("Retry-After").is_some(), "{self:?}");
    }
}

/// A client that keeps its connection as long as the service does.
#[derive(Default)]
pub struct Client {
    pub base_url: String,
    stream: Option<BufReader<Socket>>,
    /// Targets of the requests that wait for their answers.
    targets: VecDeque<String>,
}

impl Client {
    /// For the service at `http://host:port` or `unix:/path`. Connects when first used.
    pub fn new(base_url: &str) -> Client {
        Client { base_url: base_url.to_owned(), ..Client::default() }
    }

    /// Connects at once, from another address of the loopback device than all others: another peer.
    pub fn from_peer(base_url: &str, host: u8) -> Client {
        let address: SocketAddr =
            base_url.strip_prefix("http://").and_then(|it| it.parse().ok()).expect("an address");
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let from = SocketAddr::from(([127, 0, 0, host], 0));
        socket.bind(&from.into()).expect("the loopback device has it");
        socket.connect(&address.into()).expect("it listens");
        Client { stream: Some(BufReader::new(socket)), ..Client::new(base_url) }
    }

    /// Connects if there is no connection.
    pub fn connect(&mut self) -> io::Result<()> {
        if self.stream.is_none() {
            self.stream = Some(BufReader::new(connect(&self.base_url)?));
        }
        Ok(())
    }

    /// Sends a request and reads its answer.
    pub fn request<B: AsRef<[u8]>>(&mut self, method: &str, target: &str, fields: Fields, body: B) -> Answer {
        self.send_request(method, target, fields, body);
        self.answer(method)
    }

    /// Sends a request and reads its answer. After an error, the request may have been executed or not.
    pub fn try_request<B: AsRef<[u8]>>(
        &mut self,
        method: &str,
        target: &str,
        fields: Fields,
        body: B,
    ) -> io::Result<Answer> {
        let message = self.message(method, target, fields, body.as_ref());
        self.try_send(&message)?;
        self.targets.push_back(target.to_owned());
        self.try_answer(method)
    }

    /// Returns status and body of the answer to a request, which may have been executed or not after an error.
    pub fn call(&mut self, method: &str, target: &str, body: &str) -> io::Result<(u16, Value)> {
        self.try_request(method, target, &[], body).map(|answer| (answer.status, answer.value()))
    }

    /// Sends a request, whose answer is still to be read.
    pub fn send_request<B: AsRef<[u8]>>(&mut self, method: &str, target: &str, fields: Fields, body: B) {
        let message = self.message(method, target, fields, body.as_ref());
        self.send(&message);
        self.targets.push_back(target.to_owned());
    }

    /// Returns the bytes of a request.
    pub fn message(&self, method: &str, target: &str, fields: Fields, body: &[u8]) -> Vec<u8> {
        let host = self.base_url.strip_prefix("http://").unwrap_or("localhost");
        let mut message = format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\n");
        for (name, value) in fields {
            message += &format!("{name}: {value}\r\n");
        }
        if !body.is_empty() || ["POST", "PUT"].contains(&method) {
            message += &format!("Content-Length: {}\r\n", body.len());
        }
        [message.as_bytes(), b"\r\n", body].concat()
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).expect("the service reads");
    }

    /// Sends bytes as they are. After an error, the connection has ended.
    pub fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.connect()?;
        let stream = self.stream.as_mut().expect("connected above");
        let sent = stream.get_mut().write_all(bytes);
        sent.inspect_err(|_| self.end())
    }

    /// Reads the answer to a request with that method.
    pub fn answer(&mut self, method: &str) -> Answer {
        self.try_answer(method).unwrap_or_else(|error| panic!("no answer: {error}"))
    }

    /// Reads at most so many bytes, and closes the connection.
    pub fn read_some(&mut self, bytes: usize) {
        let stream = self.stream.as_mut().expect("something was sent");
        // The end of the connection is as good.
        let _ = stream.read_exact(&mut vec![0; bytes]);
        self.end();
    }

    /// Closes the connection.
    pub fn end(&mut self) {
        (self.stream, self.targets) = Default::default();
    }

    fn try_answer(&mut self, method: &str) -> io::Result<Answer> {
        let answer = self.read_answer(method).inspect_err(|error| {
            assert_ne!(error.kind(), ErrorKind::WouldBlock, "every request has an answer in time");
            self.end();
        })?;
        if answer.header("Connection") == Some("close") {
            self.stream = None;
            self.targets.truncate(1);
        }
        answer.keep_promises(method);
        // Bytes that a test sends may be no request, so they have no target.
        if let Some(target) = self.targets.pop_front() {
            check_described(method, &target, &answer);
        }
        Ok(answer)
    }

    fn read_answer(&mut self, method: &str) -> io::Result<Answer> {
        let stream = self.stream.as_mut().expect("something was sent");
        let mut size = 0;
        let mut line = || {
            let mut line = String::new();
            size += stream.read_line(&mut line)?;
            let text = line.strip_suffix("\r\n").map(str::to_owned);
            text.ok_or_else(|| io::Error::other(format!("cut short: {line:?}")))
        };
        let status_line = line()?;
        let status = status_line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3));
        let status = status.and_then(|digits| digits.parse().ok());
        let status = status.unwrap_or_else(|| panic!("a status line: {status_line:?}"));
        let mut headers = Vec::new();
        loop {
            let field = line()?;
            match field.split_once(": ") {
                Some((name, value)) => headers.push((name.to_owned(), value.to_owned())),
                None if field.is_empty() => break,
                None => panic!("a header field: {field:?}"),
            }
        }
        let mut answer = Answer { status, headers, body: String::new(), size };
        let length = answer.header("Content-Length").map(|length| length.parse());
        let bodiless = method == "HEAD" || matches!(status, 204 | 304) || status < 200;
        let length = if bodiless { 0 } else { length.unwrap_or(Ok(0)).expect("a length") };
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        answer.body = String::from_utf8(body).expect("UTF-8");
        answer.size += length;
        if matches!(status, 502..=504) && answer.header("X-Request-Id").is_none() {
            return Err(io::Error::other("a proxy has no answer of the service"));
        }
        Ok(answer)
    }

    pub fn get(&mut self, target: &str) -> Answer {
        self.request("GET", target, &[], "")
    }

    /// Checks a password.
    pub fn login(&mut self, email: &str, password: &str) -> Answer {
        self.post("/users/authenticate", json!({"email": email, "password": password}).to_string())
    }

    /// Returns true if the password opens the account.
    pub fn opens(&mut self, email: &str, password: &str) -> bool {
        match self.login(email, password).status {
            200 => true,
            401 => false,
            status => panic!("{status}"),
        }
    }

    pub fn post(&mut self, target: &str, body: impl AsRef<[u8]>) -> Answer {
        self.request("POST", target, &[], body)
    }

    pub fn put(&mut self, target: &str, body: impl AsRef<[u8]>) -> Answer {
        self.request("PUT", target, &[], body)
    }

    pub fn patch(&mut self, target: &str, body: impl AsRef<[u8]>) -> Answer {
        self.request("PATCH", target, &[], body)
    }

    pub fn delete(&mut self, target: &str) -> Answer {
        self.request("DELETE", target, &[], "")
    }
}

fn connect(base_url: &str) -> io::Result<Socket> {
    let socket: Socket = match base_url.strip_prefix("unix:") {
        Some(path) => UnixStream::connect(path)?.into(),
        None => TcpStream::connect(base_url.strip_prefix("http://").expect("a base URL"))?.into(),
    };
    socket.set_read_timeout(Some(AGES))?;
    // A Unix socket has no such option.
    let _ = socket.set_tcp_nodelay(true);
    Ok(socket)
}

/// A connection whose kernels hold little of an answer.
pub fn connect_small(address: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_recv_buffer_size(4096).expect("an option of every socket");
    socket.set_tcp_mss(536).expect("an option of every TCP socket");
    socket.connect(&address.into()).expect("it listens");
    socket.into()
}
