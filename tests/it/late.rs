//! Changes whose time is nearly up: none is sent, so that the statement of each has ended before its request is answered.

use crate::support::{LONG, PASSWORD, Service};
use serde_json::json;
use std::{fmt::Debug, time::Instant};
use userd::{
    Delete, New, Update,
    error::Error,
    users::{revision::Condition, user::Values},
};

/// Each create of a batch has a deadline of its own.
#[test]
fn batches_do_what_is_in_time() {
    let service = Service::start();
    let users = service.server.app().users();
    let (soon, past) = (Instant::now() + LONG, Instant::now());
    fn new(email: &str, deadline: Instant) -> New<'_> {
        New { values: Values::new("n", email), password: None, key: None, deadline }
    }
    let taken = users.create_many(&[new("taken@example.com", soon)]).pop();
    assert!(matches!(taken, Some(Ok(_))), "{taken:?}");
    for round in 0..3 {
        let emails: Vec<_> = (0..4).map(|n| format!("{n}-{round}@example.com")).collect();
        let batch = [
            new(&emails[0], past),
            new(&emails[1], soon),
            new("taken@example.com", past),
            new("TAKEN@example.com", soon),
            new(&emails[2], past),
            new(&emails[3], soon),
        ];
        let outcomes = users.create_many(&batch);
        for (new, outcome) in batch.iter().zip(outcomes) {
            match outcome {
                Ok(created) if new.deadline == soon => {
                    assert_eq!(Some(created.into_user().email.as_str()), new.values.email);
                }
                Err(Error::AlreadyExists) if new.values.email == Some("TAKEN@example.com") => {}
                Err(Error::Unavailable(_)) if new.deadline == past => {}
                outcome => panic!("{new:?}: {outcome:?}"),
            }
        }
    }
    assert_eq!(service.client().get("/users").json()["total"], 1 + 3 * 2);
}

/// A change of any kind is refused alike, whatever is stored.
#[test]
fn a_change_that_is_late_is_not_sent() {
    fn refused<T: Debug>(outcome: Result<T, Error>) {
        assert!(matches!(outcome, Err(Error::Unavailable(_))), "{outcome:?}");
    }
    let service = Service::with(|config| config.limits.request_timeout = LONG);
    let mut client = service.client();
    let ada = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD});
    let created = client.post("/users", ada.to_string());
    assert_eq!(created.status, 201);
    let users = service.server.app().users();
    let only = Condition { only: Some(Vec::new()), except: Vec::new() };
    // Less is left than the half of a request's time in which a statement may be executed.
    let deadline = Instant::now() + LONG / 3;
    for email in ["ada@example.com", "bob@example.com"] {
        let new = New { values: Values::new("n", email), password: None, key: None, deadline };
        users.create_many(&[new]).into_iter().for_each(refused);
    }
    for condition in [&Condition::default(), &only] {
        let values = Values { name: Some("n"), email: None };
        let update = |id| Update { id, values, password: None, condition, deadline };
        let delete = |id| Delete { id, condition, deadline };
        users.update_many(&[update(1)]).into_iter().for_each(refused);
        users.update_many(&[update(1), update(2)]).into_iter().for_each(refused);
        users.delete_many(&[delete(1)]).into_iter().for_each(refused);
        users.delete_many(&[delete(1), delete(2)]).into_iter().for_each(refused);
    }
    assert_eq!(client.get("/users/1").body, created.body);
    assert_eq!(client.get("/users").json()["total"], 1);
}
