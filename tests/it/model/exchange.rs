//! One request on a connection of its own, which may break anywhere, and what its client then knows.

use super::{linearizable::Call, state::Action};
use crate::support::{Client, LONG, eventually};
use serde_json::json;
use std::time::{Duration, Instant};

/// The time in which a change that began before its answer ends: a lock is waited for 100 ms.
const BEGUN: Duration = Duration::from_secs(1);

/// Where a client closes its connection by itself: after so many hundredths of its request, or bytes of the answer.
#[derive(Debug, Clone, Copy)]
pub enum Cut {
    Request(usize),
    Answer(usize),
}

/// Sends a client's request on a connection of its own. Returns nothing if it was not sent whole.
pub fn exchange(address: &str, client: usize, action: Action, cut: Option<Cut>) -> Option<Call> {
    let (method, target, fields, body) = action.request();
    let mut fields: Vec<_> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
    // A client that waits for more bytes than there are meets the end of the connection.
    fields.push(("Connection", "close"));
    let mut connection = Client::new(&format!("http://{address}"));
    eventually(LONG, "the service listens", || connection.connect().is_ok());
    let message = connection.message(method, &target, &fields, body.as_bytes());
    // It may have been done, or be done later, or not.
    let mut call = Call { client, action, sent: Instant::now(), answer: None, until: None };
    match cut {
        Some(Cut::Request(hundredths)) => {
            let _ = connection.try_send(&message[..message.len() * hundredths / 100]);
            return None;
        }
        Some(Cut::Answer(bytes)) => {
            if connection.try_send(&message).is_ok() {
                connection.read_some(bytes);
            }
        }
        None => match connection.try_request(method, &target, &fields, &body) {
            // The service says so where it cannot know.
            Ok(answer) if answer.status == 500 && answer.json() == json!({"error": "Database error"}) => {}
            // It may have been done, or not; it is not begun any more.
            Ok(answer) if answer.status == 503 => call.until = Some(Instant::now() + BEGUN),
            Ok(answer) => call.answer = Some((answer.into(), Instant::now())),
            Err(_) => {}
        },
    }
    Some(call)
}
