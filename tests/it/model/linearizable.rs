//! Checks that the answers that concurrent clients got are those of some order of their requests, in which each request
//! takes effect at one moment between being sent and being answered. One that was not answered takes effect at any
//! moment after it was sent, up to one that it has, or never.
//!
//! The search is Wing and Gong's, and does not visit a state twice with the same requests done (Lowe).

use super::{
    rules::Rules,
    state::{Action, Answer, State},
};
use std::{collections::HashSet, time::Instant};

/// A request as its client saw it.
#[derive(Debug, Clone)]
pub struct Call {
    pub client: usize,
    pub action: Action,
    pub sent: Instant,
    /// The answer, and when it had arrived.
    pub answer: Option<(Answer, Instant)>,
    /// Where there is none: the last moment at which it may take effect, if there is one.
    pub until: Option<Instant>,
}

/// Which calls took effect, a bit each.
type Done = u128;

struct Search<'a> {
    rules: Rules,
    calls: &'a [Call],
    visited: HashSet<(Done, State)>,
    order: Vec<usize>,
    longest: Vec<usize>,
}

/// The error tells of the calls, and how far an order of them could be found.
pub fn check(rules: Rules, calls: &[Call]) -> Result<(), String> {
    assert!(calls.len() <= Done::BITS as usize, "{} calls are too many", calls.len());
    let mut search = Search { rules, calls, visited: HashSet::new(), order: Vec::new(), longest: Vec::new() };
    if search.completes(0, &State::default()) { Ok(()) } else { Err(search.report()) }
}

impl Search<'_> {
    fn completes(&mut self, done: Done, state: &State) -> bool {
        let open: Vec<usize> = (0..self.calls.len()).filter(|index| done >> index & 1 == 0).collect();
        let ends = open.iter().filter_map(|index| Some(self.calls[*index].answer.as_ref()?.1));
        // A call that was sent after another call's answer comes after that call.
        let Some(first_end) = ends.min() else {
            return true;
        };
        if !self.visited.insert((done, state.clone())) {
            return false;
        }
        for index in open {
            let call = &self.calls[index];
            if call.sent > first_end {
                continue;
            }
            // Too late where a call was made before it that was sent later than that.
            let is_done = |index: &usize| done >> index & 1 == 1;
            let sent = (0..self.calls.len()).filter(is_done).map(|index| self.calls[index].sent);
            if call.until.is_some_and(|until| sent.max() > Some(until)) {
                continue;
            }
            let answer = call.answer.as_ref().map(|(answer, _)| answer);
            let Some(next) = state.step(self.rules, &call.action, answer) else {
                continue;
            };
            // To have had no effect and to have taken none are the same.
            if answer.is_none() && next == *state {
                continue;
            }
            self.order.push(index);
            if self.order.len() > self.longest.len() {
                self.longest.clone_from(&self.order);
            }
            if self.completes(done | 1 << index, &next) {
                return true;
            }
            self.order.pop();
        }
        false
    }

    fn report(&self) -> String {
        let start = self.calls.iter().map(|call| call.sent).min().expect("there are calls");
        let mut report = "no order of these calls explains their answers (microseconds):".to_owned();
        for (index, call) in self.calls.iter().enumerate() {
            let (method, target, fields, body) = call.action.request();
            let since = |moment: Instant| moment.duration_since(start).as_micros();
            let answer = match &call.answer {
                // A page tells of all groups.
                Some((answer, end)) => {
                    let tag = answer.tag.as_deref().unwrap_or_default();
                    format!("{} {tag} {:.300} at {}", answer.status, answer.body.to_string(), since(*end))
                }
                None => match call.until {
                    Some(until) => format!("no answer, and no effect after {}", since(until)),
                    None => "no answer".to_owned(),
                },
            };
            let (client, sent) = (call.client, since(call.sent));
            report += &format!(
                "\n  {index}: client {client} at {sent}: {method} {target} {fields:?} {body} => {answer}"
            );
        }
        report + &format!("\n  the longest order: {:?}", self.longest)
    }
}

/// The checker itself: were it to allow everything, nothing would ever fail.
#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::time::Duration;

    fn user(name: &str, micros: u32) -> Value {
        json!({
            "id": "1", "name": name, "email": "a@example.com",
            "createdAt": "2025-01-01T00:00:00.000000Z", "updatedAt": format!("2025-01-01T00:00:00.{micros:06}Z"),
        })
    }

    fn body(value: Value) -> super::super::state::Body {
        value.as_object().expect("an object").clone()
    }

    /// A request, the millisecond at which it was sent, and its answer with another one.
    type Row = (Action, u64, Option<(u64, u16, Value)>);

    fn calls(rows: Vec<Row>) -> Vec<Call> {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let call = |(client, (action, sent, answer)): (usize, Row)| Call {
            client,
            action,
            sent: at(sent),
            // Each moment of a change has a tag of its own.
            answer: answer.map(|(end, status, body)| {
                let tag = body["updatedAt"].as_str().map(|moment| format!("\"{moment}\""));
                (Answer { status, body, tag }, at(end))
            }),
            until: None,
        };
        rows.into_iter().enumerate().map(call).collect()
    }

    #[test]
    fn orders_that_there_are_and_are_not() {
        let create = || {
            let body = body(json!({"name": "A", "email": "a@example.com"}));
            (Action::Create(body), 0, Some((10, 201, user("A", 0))))
        };
        let get = |name: &str, micros, sent, end| {
            (Action::Get("1".into()), sent, Some((end, 200, user(name, micros))))
        };
        let put = |name: &str, micros, sent, end| {
            let put = Action::Put("1".into(), body(json!({"name": name})));
            (put, sent, Some((end, 200, user(name, micros))))
        };
        let unanswered =
            |name: &str, sent| (Action::Put("1".into(), body(json!({"name": name}))), sent, None);
        let after_create = |rows: &[Row]| calls([&[create()], rows].concat());
        let rows = [
            // One after the other.
            (vec![put("B", 1, 20, 30), get("B", 1, 40, 50)], true),
            // A read that is behind the times.
            (vec![put("B", 1, 20, 30), get("A", 0, 40, 50)], false),
            // At the same time as the change: either.
            (vec![put("B", 1, 20, 50), get("A", 0, 30, 40)], true),
            (vec![put("B", 1, 20, 50), get("B", 1, 30, 40)], true),
            // But not first the new one and then the old one.
            (vec![put("B", 1, 20, 90), get("B", 1, 30, 40), get("A", 0, 50, 60)], false),
            // An unanswered change may happen late, or never, but not twice, nor before it is sent.
            (vec![unanswered("B", 20), get("A", 0, 30, 40), get("B", 1, 50, 60)], true),
            (vec![unanswered("B", 20), get("A", 0, 30, 40)], true),
            (vec![unanswered("B", 20), get("B", 1, 30, 40), put("C", 2, 50, 60), get("B", 3, 70, 80)], false),
            (vec![get("B", 1, 20, 30), unanswered("B", 40)], false),
            // A change of which the time does not tell.
            (vec![put("B", 0, 20, 30)], false),
            (vec![(Action::Delete("1".into()), 20, Some((30, 404, json!({"error": "Not found"}))))], false),
        ];
        for (number, (rows, expected)) in rows.into_iter().enumerate() {
            let found = check(Rules::default(), &after_create(&rows));
            assert_eq!(found.is_ok(), expected, "row {number}: {found:?}");
        }
        // A call that has an end may happen before it alone.
        for (until, expected) in [(25, false), (45, false), (55, true)] {
            let gets = [get("A", 0, 30, 40), get("A", 0, 50, 58), get("B", 1, 60, 70)];
            let mut calls = after_create(&[&[unanswered("B", 20)], &gets[..]].concat());
            calls[1].until = Some(calls[0].sent + Duration::from_millis(until));
            let found = check(Rules::default(), &calls);
            assert_eq!(found.is_ok(), expected, "until {until}: {found:?}");
        }
    }
}
