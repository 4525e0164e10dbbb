//! The id of a request: what `X-Request-Id` says, or one that is made here.
//!
//! Owns which ids of clients are taken over, and what makes one that is made unique. Knows no socket and no clock.

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Bytes of the longest id that is taken over.
const MAX_BYTES: usize = 128;

/// What names a request: in its answer, and in every line of the log about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestId {
    /// The bytes of a UUID.
    Made([u8; 16]),
    /// What the client says.
    Given(Arc<str>),
}

impl RequestId {
    /// The id that a client sent, if it is one that is taken over: 1 to 128 characters of `[A-Za-z0-9._~+/=:-]`, which
    /// can neither end a line nor be taken for another field of it.
    pub fn given(value: &[u8]) -> Option<RequestId> {
        let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"._~+/=:-".contains(byte);
        if value.is_empty() || value.len() > MAX_BYTES || !value.iter().all(allowed) {
            return None;
        }
        let text = str::from_utf8(value).ok()?;
        Some(RequestId::Given(text.into()))
    }

    /// Appends its text.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            RequestId::Made(bytes) => out.extend_from_slice(&text(bytes)),
            RequestId::Given(text) => out.extend_from_slice(text.as_bytes()),
        }
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestId::Made(bytes) => f.write_str(str::from_utf8(&text(bytes)).expect("hexadecimal digits")),
            RequestId::Given(text) => f.write_str(text),
        }
    }
}

/// Makes ids for one thread: UUIDs of version 7 (RFC 9562), in the order of time. Behind the milliseconds they have a
/// count of 34 bits, and 40 random bits that are the process's own: two replicas make the same id only if they have the
/// same 40 bits, and then in the same millisecond and at the same count.
pub struct RequestIds {
    process: [u8; 5],
    count: u64,
    milliseconds: u64,
    /// A moment by both clocks. The clock of the wall is read again after a second.
    read: (Instant, u64),
}

/// How long the time since the last look at the clock of the wall is taken from the other clock.
const READ_AGAIN: Duration = Duration::from_secs(1);

impl RequestIds {
    /// Takes random bits from the system.
    pub fn new(now: Instant) -> RequestIds {
        let random = RandomState::new().hash_one(std::process::id()).to_be_bytes();
        let [.., a, b, c, d, e] = random;
        RequestIds { process: [a, b, c, d, e], count: 0, milliseconds: 0, read: (now, unix_milliseconds()) }
    }

    /// The next id. `now` is the time that its request is said to have come.
    pub fn make(&mut self, now: Instant) -> RequestId {
        let mut since = now.saturating_duration_since(self.read.0);
        if since > READ_AGAIN {
            (self.read, since) = ((now, unix_milliseconds()), Duration::ZERO);
        }
        // A clock that was put back does not change the order.
        let milliseconds = self.read.1 + since.as_secs() * 1000 + u64::from(since.subsec_millis());
        self.milliseconds = self.milliseconds.max(milliseconds);
        self.count = self.count.wrapping_add(1);
        let [_, _, time @ ..] = self.milliseconds.to_be_bytes();
        let count = self.count;
        let version = 7 << 12 | (count >> 22 & 0xfff) as u16;
        let variant = 0b10 << 14 | (count >> 8 & 0x3fff) as u16;
        let mut bytes = [0; 16];
        bytes[..6].copy_from_slice(&time);
        bytes[6..8].copy_from_slice(&version.to_be_bytes());
        bytes[8..10].copy_from_slice(&variant.to_be_bytes());
        bytes[10] = count as u8;
        bytes[11..].copy_from_slice(&self.process);
        RequestId::Made(bytes)
    }
}

fn unix_milliseconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// `0193b6a0-9c4f-7000-8000-01d2c3b4a596`
fn text(bytes: &[u8; 16]) -> [u8; 36] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    const AT: [usize; 16] = [0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34];
    let mut text = [b'-'; 36];
    for (byte, at) in bytes.iter().zip(AT) {
        text[at] = DIGITS[usize::from(byte >> 4)];
        text[at + 1] = DIGITS[usize::from(byte & 15)];
    }
    text
}

/// Logs a line about a request, or about none: the id goes beside the message, as the value of `request_id`.
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
            assert_eq!(RequestId::given(text.as_bytes()).unwrap().to_string(), text);
        }
        for text in ["", " ", "a b", "a,b", "a\"b", "{a}", "é", "a\tb", "a;b", "a%20", &format!("{longest}x")]
        {
            assert_eq!(RequestId::given(text.as_bytes()), None, "{text}");
        }
        assert_eq!(RequestId::given(b"\xff"), None);
    }

    #[test]
    fn made_ids_are_uuids_in_the_order_of_time() {
        let start = Instant::now();
        let mut ids = RequestIds::new(start);
        let before = unix_milliseconds();
        // Several in a millisecond, a pause, and a clock that was put back.
        let times = [0, 0, 0, 1, 500, 5000, 5000, 4000];
        let made = times.map(|time| ids.make(start + Duration::from_millis(time)).to_string());
        assert!(made.is_sorted(), "{made:?}");
        assert_eq!(made.iter().collect::<HashSet<_>>().len(), made.len());
        for text in &made {
            let parts: Vec<&str> = text.split('-').collect();
            assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [8, 4, 4, 4, 12], "{text}");
            let digits = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-'));
            assert!(digits && parts[2].starts_with('7') && "89ab".contains(&parts[3][..1]), "{text}");
            assert!(RequestId::given(text.as_bytes()).is_some(), "the next service takes it over");
        }
        let time = u64::from_str_radix(&made[0].replace('-', "")[..12], 16).unwrap();
        assert!((before - 1000..=unix_milliseconds()).contains(&time), "{time}");
    }

    #[test]
    fn the_count_reaches_every_bit_of_its_own() {
        let now = Instant::now();
        let mut ids = RequestIds::new(now);
        let mut seen = HashSet::new();
        for bit in 0..34 {
            ids.count = (1 << bit) - 1;
            let text = ids.make(now).to_string();
            assert!(text[14..].starts_with('7') && "89ab".contains(&text[19..20]), "{text}");
            assert!(seen.insert(text));
        }
    }

    #[test]
    fn two_processes_make_different_ones() {
        let now = Instant::now();
        let [mut one, mut other] = [RequestIds::new(now), RequestIds::new(now)];
        assert_ne!(one.make(now), other.make(now));
    }
}
