//! Every kind of request, alone and in batches, of one service.

use super::{Client, check};
use std::thread;

/// How many clients send requests at once: more than the service has sessions, so that batches form.
const CLIENTS: usize = 8;

/// Requests that are batched, of a user whose address begins with `WORD`.
const OF_BATCHES: &str = r#"
    POST /users {"name":"WORD","email":"WORD@example.com"} => 201 <Location: $user> *
    GET $user => 200 {"id":"$user.id","name":"WORD","email":"WORD@example.com",<times>}
    POST /users <Idempotency-Key: WORD> {"name":"K","email":"WORD-keyed@example.com"} => 201 <Location: $kept> *
    POST /users <Idempotency-Key: WORD> {"name":"K","email":"WORD-keyed@example.com"} => 201 <Idempotency-Replayed: true> <Location: $kept> *
    POST /users {"name":"n","email":"WORD@EXAMPLE.COM"} => 409 *
    GET /users?email=WORD@EXAMPLE.com => 200 {"data":[{"id":"$user.id",*
    GET /users?after=0&perPage=3 => 200 {"data":[{"id":"*
    GET /users?emailPrefix=WORD@&perPage=3 => 200 {"data":[{"id":"$user.id",*
    GET /users?order=desc&perPage=5 => 200 {"data":[{"id":"*
    GET /users?page=1&perPage=5 => 200 {"data":[{"id":"*
    GET /users?page=3000&perPage=5 => 200 *
    PUT $user {"name":"Put"} => 200 *
    GET $user => 200 {"id":"$user.id","name":"Put","email":"WORD@example.com",<times>}
    PATCH $user {"email":"WORD@patched.example"} => 200 *
    GET $user => 200 {"id":"$user.id","name":"Put","email":"WORD@patched.example",<times>}
    DELETE $kept => 204
    GET $kept => 404 *
    POST /users <Idempotency-Key: WORD> {"name":"K","email":"WORD-keyed@example.com"} => 410 *
"#;

/// Requests that are executed one by one.
const OF_ONE: &str = r#"
    POST /users {"name":"n","email":"WORD@example.com","password":"correct horse"} => 201 <Location: $user> *
    POST /users/authenticate {"email":"WORD@example.com","password":"correct horse"} => 200 {"id":"$user.id",*
    PUT $user {"password":"battery staple"} => 200 *
    POST /users/authenticate {"email":"WORD@example.com","password":"correct horse"} => 401 *
    POST /users/authenticate {"email":"WORD@example.com","password":"battery staple"} => 200 *
    PUT $user {"password":null} => 200 <ETag: $tag> *
    POST /users/authenticate {"email":"WORD@example.com","password":"battery staple"} => 401 *
    POST /users <Idempotency-Key: WORD> {"name":"K","email":"WORD-keyed@example.com","password":"correct horse"} => 201 <Location: $kept> *
    POST /users <Idempotency-Key: WORD> {"name":"K","email":"WORD-keyed@example.com","password":"correct horse"} => 201 <Idempotency-Replayed: true> <Location: $kept> *
    PUT $user <If-Match: $tag> {"name":"If"} => 200 <ETag: $new> *
    GET $user => 200 <ETag: $new> {"id":"$user.id","name":"If",*
    DELETE $user <If-Match: $tag> => 412 *
    DELETE $user <If-Match: $new> => 204
    GET $user => 404 *
"#;

/// Sends every kind of request, batched and unbatched, and reads back what each change did. `round`: a word that is in
/// each address.
pub fn every_verb(url: &str, round: &str) {
    thread::scope(|scope| {
        for n in 0..CLIENTS {
            scope.spawn(move || {
                let mut client = Client::new(url);
                (0..2).for_each(|i| {
                    check(&mut client, &OF_BATCHES.replace("WORD", &format!("{round}-{n}-{i}")))
                });
            });
        }
    });
    check(&mut Client::new(url), &OF_ONE.replace("WORD", round));
}
