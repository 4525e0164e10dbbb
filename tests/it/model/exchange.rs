//! One request on a connection of its own, which may break anywhere, and what its client then knows.

use super::state::{Action, Answer};
use crate::support::{Client, LONG, eventually};
use serde_json::json;
use std::time::Instant;

/// Where a client closes its connection by itself: after so many hundredths of its request, or bytes of the answer.
#[derive(Debug, Clone, Copy)]
pub enum Cut {
    Request(usize),
    Answer(usize),
}

/// The fate of a request.
pub enum Outcome {
    Answered(Answer, Instant),
    /// It may have been done, or be done later, or not.
    Open,
    /// It was answered 503: it may have been done, or not; it is not begun any more.
    Unavailable(Instant),
    /// It was not sent whole.
    Void,
}

/// Sends a request on a connection of its own. Returns when it was sent, too.
pub fn exchange(address: &str, action: &Action, cut: Option<Cut>) -> (Instant, Outcome) {
    let (method, target, fields, body) = action.request();
    let mut fields: Vec<_> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
    // A client that waits for more bytes than there are meets the end of the connection.
    fields.push(("Connection", "close"));
    let mut client = Client::new(&format!("http://{address}"));
    eventually(LONG, "the service listens", || client.connect().is_ok());
    let message = client.message(method, &target, &fields, body.as_bytes());
    let sent = Instant::now();
    let outcome = match cut {
        Some(Cut::Request(hundredths)) => {
            let _ = client.try_send(&message[..message.len() * hundredths / 100]);
            Outcome::Void
        }
        Some(Cut::Answer(bytes)) => {
            if client.try_send(&message).is_ok() {
                client.read_some(bytes);
            }
            Outcome::Open
        }
        None => match client.try_request(method, &target, &fields, &body) {
            Err(_) => Outcome::Open,
            // The service says so where it cannot know.
            Ok(answer) if answer.status == 500 && answer.json() == json!({"error": "Database error"}) => {
                Outcome::Open
            }
            Ok(answer) if answer.status == 503 => Outcome::Unavailable(Instant::now()),
            Ok(answer) => Outcome::Answered(answer.into(), Instant::now()),
        },
    };
    (sent, outcome)
}
