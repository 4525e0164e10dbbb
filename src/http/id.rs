//! The id of a request: the id that the client sends in `X-Request-Id`, or a new one. Decides which ids of clients are
//! accepted.

use std::{fmt, sync::Arc};
use uuid::Uuid;

/// The most bytes of an id that is accepted from a client.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// The id of a request, which is in the answer and in every log line about the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestId {
    /// An id that the client sent.
    FromClient(Arc<str>),
    /// An id that this server made. It is kept as a number, and becomes text only in the answer and the log.
    Generated(Uuid),
}

impl RequestId {
    /// Makes a new id: a UUID of version 7 (RFC 9562), so that later ids sort behind earlier ones.
    pub fn new() -> RequestId {
        RequestId::Generated(Uuid::now_v7())
    }

    /// Accepts the id that a client sent, or returns `None`. An id has 1 to 128 characters of `[A-Za-z0-9._~+/=:-]`, so
    /// that it can neither end a log line nor look like another field of the line.
    pub fn from_client(value: &[u8]) -> Option<RequestId> {
        let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"._~+/=:-".contains(byte);
        if value.is_empty() || value.len() > MAX_REQUEST_ID_BYTES || !value.iter().all(allowed) {
            return None;
        }
        Some(RequestId::FromClient(str::from_utf8(value).ok()?.into()))
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestId::FromClient(text) => f.write_str(text),
            RequestId::Generated(id) => id.fmt(f),
        }
    }
}

/// Logs a line about a request, with the id of the request as the value of `request_id`.
pub fn log_line(level: log::Level, id: Option<&RequestId>, line: fmt::Arguments) {
    match id {
        Some(id) => log::log!(level, request_id:% = id; "{line}"),
        None => log::log!(level, "{line}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn what_is_taken_over() {
        let longest = "x".repeat(128);
        for text in ["a", "0193b6a0-9c4f-7000-8000-01d2c3b4a596", "A.z_~+/=:-9", &longest] {
            assert_eq!(RequestId::from_client(text.as_bytes()).unwrap().to_string(), text);
        }
        for text in ["", " ", "a b", "a,b", "a\"b", "{a}", "é", "a\tb", "a;b", "a%20", &format!("{longest}x")]
        {
            assert_eq!(RequestId::from_client(text.as_bytes()), None, "{text}");
        }
        assert_eq!(RequestId::from_client(b"\xff"), None);
    }

    #[test]
    fn made_ids_are_uuids_in_the_order_of_time() {
        let made: Vec<_> = (0..1000).map(|_| RequestId::new().to_string()).collect();
        assert!(made.is_sorted(), "{made:?}");
        assert_eq!(made.iter().collect::<HashSet<_>>().len(), made.len());
        for text in &made {
            assert_eq!(Uuid::parse_str(text).unwrap().get_version_num(), 7, "{text}");
            assert!(RequestId::from_client(text.as_bytes()).is_some(), "the next service takes it over");
        }
    }
}
