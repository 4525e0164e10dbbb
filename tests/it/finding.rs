//! Finding users: by address, by a walk through all of them, by the links of a list; and reads that wait together.

use crate::support::{Answer, Client, Database, LONG, OTHER_PASSWORD, PASSWORD, Service, eventually};
use serde_json::{Value, json};
use std::{collections::BTreeSet, thread};
use userd::{PasswordHashing, Server};

/// The ids in a list.
fn ids(list: &Value) -> Vec<i64> {
    let users = list["data"].as_array().expect("a list");
    users.iter().map(|user| user["id"].as_str().and_then(|id| id.parse().ok()).expect("an id")).collect()
}

/// The target of the relation `next` in the field `Link`.
fn next(answer: &Answer) -> Option<String> {
    let mut links = answer.header("Link").unwrap_or_default().split(", ");
    let next = links.find_map(|link| link.strip_suffix(">; rel=\"next\""))?;
    Some(next.strip_prefix('<').expect("a target").to_owned())
}

/// All lists from a target on, by `next`.
fn follow(client: &mut Client, target: &str) -> Vec<Value> {
    let (mut lists, mut target) = (Vec::new(), Some(target.to_owned()));
    while let Some(at) = target {
        let answer = client.get(&at);
        assert_eq!(answer.status, 200, "{at}: {answer:?}");
        target = next(&answer);
        lists.push(answer.json());
    }
    lists
}

/// The case of ASCII letters is ignored, and nothing else, whatever the locale of the database.
#[test]
fn the_case_of_addresses() {
    let mut locales = vec!["locale 'C'", "locale 'C.UTF-8'"];
    let icu = "select current_setting('server_version_num')::int >= 150000 \
               and exists (select from pg_collation where collprovider = 'i')";
    if Database::empty().value(icu) == "true" {
        locales.push("locale 'C.UTF-8' locale_provider icu icu_locale 'tr-TR'");
    }
    for locale in locales {
        let database = Database::with(&format!("template template0 encoding 'UTF8' {locale}"));
        let server = Server::start(database.config()).expect("a server");
        let service = Service { server, database };
        service.check(
            r#"
            POST /users {"name":"n","email":"info@x.co","password":"correct horse"} => 201 *
            POST /users {"name":"n","email":"INFO@X.CO"} => 409 *
            POST /users {"name":"n","email":"é@x.co"} => 201 *
            POST /users {"name":"n","email":"É@x.co"} => 201 *
            POST /users {"name":"n","email":"iİi@x.co"} => 201 <Location: /users/5> *
            POST /users {"name":"n","email":"iii@x.co"} => 201 *
            POST /users {"name":"n","email":"İİİ@x.co"} => 201 *
            POST /users {"name":"n","email":"III@x.co"} => 409 *
            GET /users?email=Info@x.co => 200 {"data":[{"id":"1","name":"n","email":"info@x.co",<times>}],"total":1,*
            GET /users?email=I%C4%B0I@X.co => 200 {"data":[{"id":"5","name":"n","email":"iİi@x.co",<times>}],"total":1,*
            GET /users?email=Iii@x.co => 200 {"data":[{"id":"6","name":"n","email":"iii@x.co",<times>}],"total":1,*
            POST /users/authenticate {"email":"INFO@x.co","password":"correct horse"} => 200 *
            "#,
        );
    }
}

/// Addresses are written in the ways of curl's users and of programs.
#[test]
fn by_address() {
    Service::start().check(
        r#"
        POST /users {"name":"n","email":"Ada@Example.com"} => 201 *
        POST /users {"name":"n","email":"ada+news@example.com"} => 201 *
        POST /users {"name":"n","email":"o'hara_~!#$%&*-/=?^`{|}@example.com"} => 201 *
        sql insert into users (name, email) values ('n', 'Zoë@example.com')
        GET /users?email=Ada@Example.com => 200 <Link: </users?email=Ada@Example.com&page=1&perPage=15>; rel="first", </users?email=Ada@Example.com&page=1&perPage=15>; rel="last"> {"data":[{"id":"1","name":"n","email":"Ada@Example.com",<times>}],"total":1,"perPage":15,"currentPage":1,"lastPage":1,"from":1,"to":1,"hasMorePages":false}
        GET /users?email=ADA@EXAMPLE.COM => 200 {"data":[{"id":"1",*
        GET /users?email=ADA+News@example.com => 200 {"data":[{"id":"2",*
        GET /users?email=ada%2bnews%40example.com => 200 {"data":[{"id":"2",*
        GET /users?email=o'hara_~!%23$%25%26*-/=?^%60{|}@example.com => 200 {"data":[{"id":"3",*
        GET /users?email=zO%C3%AB@EXAMPLE.com => 200 {"data":[{"id":"4",*
        GET /users?email=ZO%C3%8B@example.com => 200 {"data":[],*
        GET /users?email=ada%20news@example.com => 200 {"data":[],*
        GET /users?email=ada@example.co => 200 {"data":[],*
        GET /users?email=_da@example.com => 200 {"data":[],*
        GET /users?email=Ann%20%3Cann@example.com%3E => 200 {"data":[],*
        GET /users?email=ada@example.com&perPage=2&page=1 => 200 {"data":[{"id":"1","name":"n","email":"Ada@Example.com",<times>}],"total":1,"perPage":2,"currentPage":1,"lastPage":1,"from":1,"to":1,"hasMorePages":false}
        GET /users?email=ada@example.com&page=2 => 200 {"data":[],"total":1,"perPage":15,"currentPage":2,"lastPage":1,"from":0,"to":0,"hasMorePages":false}
        DELETE /users/1 => 204
        GET /users?email=ada@example.com => 200 {"data":[],"total":0,"perPage":15,"currentPage":1,"lastPage":1,"from":0,"to":0,"hasMorePages":false}
        "#,
    );
}

/// A person writes an address into the query as it is.
#[test]
fn a_query_that_is_not_encoded_is_refused_with_the_remedy() {
    let service = Service::start();
    let refused: [&[u8]; 7] = [
        "jürgen@x.org".as_bytes(),
        b"j\xfcrgen@x.org",
        b"a b@x.org",
        b"a@x.org#b",
        b"a\\@x.org",
        b"a\t@x.org",
        b"a@x.org ",
    ];
    let rows = refused.map(|text| (text, 400)).into_iter().chain([(&b"|\"<>[]{}^`@x.org"[..], 200)]);
    for (address, status) in rows {
        let mut client = service.client();
        client.send(&[b"GET /users?email=", address, b" HTTP/1.1\r\nHost: a\r\n\r\n"].concat());
        let answer = client.answer("GET");
        let shown = String::from_utf8_lossy(address);
        assert_eq!(answer.status, status, "{shown}: {answer:?}");
        if status == 400 {
            let message = answer.json()["message"].to_string();
            assert!(
                message.contains("percent-encode the query, as curl -G --data-urlencode does"),
                "{shown}: {message}"
            );
        }
    }
}

/// Keyboards differ in how they write é: an address is brought into NFC wherever it enters. Rows of SQL stay as they are.
#[test]
fn an_address_is_stored_and_found_in_one_form() {
    let service = Service::start();
    service.check(format!(
        r#"
        POST /users {{"name":"n","email":"jose\u0301@x.org","password":"{PASSWORD}"}} => 201 {{"id":"1","name":"n","email":"josé@x.org",*
        sql select email = U&'jos\00e9@x.org' from users => t
        POST /users {{"name":"n","email":"jos\u00e9@x.org"}} => 409 *
        POST /users {{"name":"n","email":"JOSE\u0301@x.org"}} => 201 *
        GET /users?email=jose%CC%81@x.org => 200 <Link: </users?email=jos%C3%A9@x.org&page=1&perPage=15>; rel="first", </users?email=jos%C3%A9@x.org&page=1&perPage=15>; rel="last"> {{"data":[{{"id":"1",*
        GET /users?email=jos%C3%A9@x.org => 200 {{"data":[{{"id":"1",*
        GET /users?emailPrefix=jose%CC%81 => 200 {{"data":[{{"id":"1",*
        GET /users?emailPrefix=jose => 200 {{"data":[],*
        POST /users/authenticate {{"email":"jose\u0301@x.org","password":"{PASSWORD}"}} => 200 {{"id":"1",*
        POST /users/authenticate {{"email":"jos\u00e9@x.org","password":"{PASSWORD}"}} => 200 {{"id":"1",*
        PUT /users/1 {{"email":"Jose\u0301@x.org"}} => 200 {{"id":"1","name":"n","email":"José@x.org",*
        PATCH /users/1 {{"email":"a\u030a@x.org"}} => 200 {{"id":"1","name":"n","email":"å@x.org",*
        PATCH /users/1 {{"email":"\u212b@x.org"}} => 200 {{"id":"1","name":"n","email":"Å@x.org",*
        GET /users/1 => 200 {{"id":"1","name":"n","email":"Å@x.org",*
        POST /users <Idempotency-Key: nfc> {{"name":"n","email":"u\u0308@x.org"}} => 201 *
        POST /users <Idempotency-Key: nfc> {{"name":"n","email":"\u00fc@x.org"}} => 201 <Idempotency-Replayed: true> {{"id":"4",*
        sql insert into users (name, email) values ('n', U&'zoe\0308@x.org')
        GET /users?email=zoe%CC%88@x.org => 200 {{"data":[],*
        GET /users?emailPrefix=zo => 200 {{"data":[{{"id":"5",*
        POST /users {{"name":"n","email":"a\u037eb@x.org"}} => 400 *
        "#
    ));
    // Two spellings of one address are throttled as one.
    let mut client = service.client();
    let wrong = |email: &str| format!(r#"{{"email":"{email}","password":"{OTHER_PASSWORD}"}}"#);
    let mut logins = (0..11).map(|n| if n % 2 == 0 { "u\u{308}@x.org" } else { "\u{fc}@x.org" });
    let statuses: Vec<u16> =
        logins.by_ref().map(|email| client.post("/users/authenticate", wrong(email)).status).collect();
    assert_eq!(statuses, [&[401; 10][..], &[429]].concat());
}

/// By POST and PATCH, in which 254 are bytes; a PUT and the column count characters. Logins and finds have no rule.
#[test]
fn addresses_that_look_like_others_are_refused() {
    let service = Service::start();
    let rows = |address: &str| {
        format!(
            r#"
            POST /users {{"name":"n","email":"{address}"}} => 400 *
            PATCH /users/1 {{"email":"{address}"}} => 400 *
            POST /users/authenticate {{"email":"{address}","password":"{PASSWORD}"}} => 401 *
            PUT /users/1 {{"email":"{address}"}} => 200 {{"id":"1","name":"n","email":"{address}",*
            sql delete from users where id > 1
            "#
        )
    };
    service.check(r#"POST /users {"name":"n","email":"ada@x.org"} => 201 *"#);
    let long =
        |n: usize| format!("{}@{}.{}.{}.org", "é".repeat(30), "d".repeat(63), "d".repeat(63), "d".repeat(n));
    for mark in
        ["\u{61c}", "\u{ad}", "\u{3164}", "\u{fe0f}", "\u{e0001}", "\u{e000}", "\u{fdd0}", "\u{10ffff}"]
    {
        service.check(rows(&format!("a{mark}@x.org")));
    }
    for address in ["\u{301}a@x.org", "a.\u{301}@x.org", &long(62)] {
        service.check(rows(address));
    }
    service.check(format!(r#"POST /users {{"name":"n","email":"{}"}} => 201 *"#, long(61)));
    service.check(r#"GET /users?email=%C2%AD@x.org => 200 {"data":[],*"#);
    service.check(r#"GET /users?emailPrefix=%CC%81 => 200 {"data":[],*"#);
}

/// In the order of addresses, whatever the case of ASCII letters.
#[test]
fn addresses_that_begin_so() {
    Service::start().check(
        r#"
        POST /users {"name":"n","email":"ada2@b.co"} => 201 *
        POST /users {"name":"n","email":"Ada@b.co"} => 201 *
        POST /users {"name":"n","email":"adam@b.co"} => 201 *
        POST /users {"name":"n","email":"ad@b.co"} => 201 *
        POST /users {"name":"n","email":"a%_@b.co"} => 201 *
        POST /users {"name":"n","email":"jürgen@b.co"} => 201 *
        GET /users?emailPrefix=ada&perPage=3 => 200 <!Link> {"data":[{"id":"1","name":"n","email":"ada2@b.co",<times>},{"id":"2","name":"n","email":"Ada@b.co",<times>},{"id":"3","name":"n","email":"adam@b.co",<times>}],"perPage":3,"hasMorePages":false}
        GET /users?emailPrefix=ADA&perPage=1 => 200 <!Link> {"data":[{"id":"1","name":"n","email":"ada2@b.co",<times>}],"perPage":1,"hasMorePages":true}
        GET /users?emailPrefix=a%25 => 200 {"data":[{"id":"5","name":"n","email":"a%_@b.co",<times>}],"perPage":15,"hasMorePages":false}
        GET /users?emailPrefix=j%C3%BCr => 200 {"data":[{"id":"6","name":"n","email":"jürgen@b.co",<times>}],"perPage":15,"hasMorePages":false}
        GET /users?emailPrefix=a_ => 200 {"data":[],"perPage":15,"hasMorePages":false}
        GET /users?emailPrefix=j%C3%9Cr => 200 {"data":[],"perPage":15,"hasMorePages":false}
        GET /users?emailPrefix=zzz => 200 {"data":[],"perPage":15,"hasMorePages":false}
        GET /users?emailPrefix=%F4%8F%BF%BF => 200 {"data":[],"perPage":15,"hasMorePages":false}
        "#,
    );
}

/// Programs that keep ids ask for the users of a page of theirs at once.
#[test]
fn users_of_several_ids() {
    let service = Service::with(|config| config.max_per_page = 5);
    let ada = r#"{"id":"1","name":"Ada","email":"ada@b.co",<times>}"#;
    let grace = r#"{"id":"2","name":"Grace","email":"grace@b.co",<times>}"#;
    let both = format!(r#"{{"data":[{ada},{grace}],"perPage":3,"hasMorePages":false}}"#);
    let none = r#"{"data":[],"perPage":1,"hasMorePages":false}"#;
    let refused = |path, keyword, message| {
        format!(
            r#"400 {{"error":"Invalid query","errors":[{{"path":"{path}","keyword":"{keyword}","message":"{message}"}}]}}"#
        )
    };
    let alone = refused(
        "/id",
        "not",
        "cannot be given together with page or perPage or order or email or emailPrefix or after",
    );
    let too_many = refused("/id", "maxItems", "must be given at most 5 times");
    let meant = refused("/ID", "additionalProperties", "is not a parameter here; id is");
    service.check(format!(
        r#"
        GET /users?id=1 => 200 <!Link> {none}
        POST /users {{"name":"Ada","email":"ada@b.co"}} => 201 *
        POST /users {{"name":"Grace","email":"grace@b.co"}} => 201 *
        GET|HEAD /users?id=2&id=1&id=2 => 200 <!Link> {both}
        GET /users?i%64=%32&id=99&id=1& => 200 {both}
        GET /users?id=9223372036854775807 => 200 {none}
        GET /users?id=1&id=2&id=3&id=4&id=5&id=5 => {too_many}
        GET /users?id=1&page=1 => {alone}
        GET /users?perPage=5&id=1 => {alone}
        GET /users?id=1&after=0 => {alone}
        GET /users?ID=1 => {meant}
        PUT /users/1 {{"name":"Ada King"}} => 200 *
        DELETE /users/2 => 204
        GET /users?id=2&id=1 => 200 {{"data":[{{"id":"1","name":"Ada King",*
        "#
    ));
    assert_eq!(service.client().get(&format!("/users?{}", "id=1&".repeat(1700))).status, 414);
}

/// A text that no user can have as an id is told, whichever mistake has made it.
#[test]
fn ids_that_are_none() {
    let service = Service::start();
    let answer = r#"400 {"error":"Invalid query","errors":[{"path":"/id","keyword":"pattern","message":"must be an id, one for each parameter, as in id=3&id=5: digits, without a zero in front, up to 9223372036854775807"}]}"#;
    let texts = [
        "1,2",
        "01",
        "0",
        "-1",
        "+1",
        "%2B1",
        "x",
        "",
        "1%20",
        "%201",
        "1.0",
        "1e3",
        "%00",
        "1%00",
        "%ff",
        "%",
        "[1]",
        "9223372036854775808",
        "99999999999999999999",
        "%D9%A1",
        "null",
        "undefined",
        "1|2",
        "1%0A",
        "0x1",
    ];
    for text in texts {
        service.check(format!("GET|HEAD /users?id={text} => {answer}"));
        service.check(format!("GET /users?id=1&id={text}&id=2 => {answer}"));
    }
    service.check(format!("GET /users?id => {answer}"));
}

/// Lists share a statement: each gets the users that it names, also if others name them, too.
#[test]
fn ids_of_many_clients_at_once() {
    let service = Service::start();
    service
        .database
        .run("insert into users (name, email) select 'n', n || '@b.co' from generate_series(1, 300) n");
    thread::scope(|scope| {
        for client in 0..16 {
            let service = &service;
            scope.spawn(move || {
                let mut connection = service.client();
                for round in 0..20 {
                    let asked: Vec<i64> =
                        (0..=client).map(|n| (client * 7 + round * 3 + n * 5) % 320 + 1).collect();
                    let query: Vec<String> = asked.iter().map(|id| format!("id={id}")).collect();
                    let list = connection.get(&format!("/users?{}", query.join("&"))).json();
                    let expected: BTreeSet<i64> = asked.into_iter().filter(|id| *id <= 300).collect();
                    assert_eq!(ids(&list), expected.into_iter().collect::<Vec<_>>());
                }
            });
        }
    });
}

/// Pages from the end have the totals of the others, and their links keep the order.
#[test]
fn newest_first() {
    let service = Service::start();
    service.check(
        r#"
        GET /users?order=desc&page=2 => 200 {"data":[],"total":0,"perPage":15,"currentPage":2,"lastPage":1,*
        sql insert into users (name, email) select 'n', n || '@b.co' from generate_series(1, 7) n; delete from users where id = 3
        GET /users?order=asc&perPage=1 => 200 {"data":[{"id":"1",*
        GET /users?order=desc&perPage=4&page=3 => 200 {"data":[],"total":6,"perPage":4,"currentPage":3,"lastPage":2,"from":0,"to":0,"hasMorePages":false}
        GET /users?order=desc&page=9223372036854775807 => 200 {"data":[],"total":6,"perPage":15,"currentPage":9223372036854775807,"lastPage":1,"from":0,"to":0,"hasMorePages":false}
        GET|HEAD /users?order=desc&perPage=4&page=2 => 200 <Link: </users?order=desc&page=1&perPage=4>; rel="first", </users?order=desc&page=1&perPage=4>; rel="prev", </users?order=desc&page=2&perPage=4>; rel="last"> {"data":[{"id":"2","name":"n","email":"2@b.co",<times>},{"id":"1","name":"n","email":"1@b.co",<times>}],"total":6,"perPage":4,"currentPage":2,"lastPage":2,"from":5,"to":6,"hasMorePages":false}
        "#,
    );
    let mut client = service.client();
    let lists = follow(&mut client, "/users?order=desc&perPage=4");
    assert_eq!(lists.iter().map(ids).collect::<Vec<_>>(), [vec![7, 6, 5, 4], vec![2, 1]]);
    // More blocks of ids than one, with gaps.
    let insert = "insert into users (name, email) select 'n', n || '@b.co' from generate_series(8, 20000) n";
    service.database.run(&format!("{insert}; delete from users where id % 7 = 0"));
    let [ascending, mut descending] = ["asc", "desc"].map(|order| {
        let lists = follow(&mut client, &format!("/users?order={order}&perPage=1000"));
        let ids: Vec<i64> = lists.iter().flat_map(ids).collect();
        assert!(lists.iter().all(|list| list["total"] == ids.len()));
        ids
    });
    descending.reverse();
    assert_eq!(descending, ascending);
}

#[test]
fn queries_that_cannot_be() {
    let service = Service::start();
    service.check(r#"POST /users {"name":"Ada","email":"ada@example.com"} => 201 *"#);
    // Not even a missing table is noticed: no query is executed.
    service.database.run("alter table users rename to lost");
    let whole = "must be a whole number of at least 1";
    for (query, path, keyword, message) in [
        ("page=0", "/page", "minimum", whole),
        ("page=", "/page", "type", whole),
        ("page=1&p%61ge=2", "/page", "maxItems", "must be given once"),
        ("email", "/email", "minLength", "must not be empty"),
        ("email=%ff", "/email", "format", "must be UTF-8, percent-encoded"),
        ("after=-1", "/after", "type", "must be a whole number of at least 0"),
        ("order=up", "/order", "enum", "must be asc or desc"),
        (
            "emailPrefix=a&page=1",
            "/emailPrefix",
            "not",
            "cannot be given together with page or email or order or after",
        ),
        ("after=1&email=a@b.co", "/after", "not", "cannot be given together with page or email or order"),
        ("perpage=5", "/perpage", "additionalProperties", "is not a parameter here; perPage is"),
    ] {
        let errors = format!(r#"[{{"path":"{path}","keyword":"{keyword}","message":"{message}"}}]"#);
        service.check(format!(
            r#"GET|HEAD /users?{query} => 400 {{"error":"Invalid query","errors":{errors}}}"#
        ));
    }
    service.database.run("alter table lost rename to users");
    // No other route has parameters. What is refused changes nothing.
    let refusal = r#"400 {"error":"Invalid query","errors":[{"path":"/page","keyword":"additionalProperties","message":"is not a parameter here; there is none"}]}"#;
    service.check(format!(
        r#"
        GET|PUT|PATCH|DELETE /users/1?page=1 {{"name":"Eve"}} => {refusal}
        GET /users/abc?page=1 => {refusal}
        POST /users?page=1 {{"name":"Eve","email":"eve@example.com"}} => {refusal}
        OPTIONS /users?page=1 => {refusal}
        POST /users/authenticate?page=1 {{"email":"ada@example.com","password":"{PASSWORD}"}} => {refusal}
        GET /nowhere?page=1 => 404 {{"error":"Not found"}}
        POST /users/1?page=1 => 405 {{"error":"Method not allowed"}}
        GET /users => 200 {{"data":[{{"id":"1","name":"Ada","email":"ada@example.com",<times>}}],"total":1,*
        "#
    ));
    // Values are not repeated, and of many names some.
    let many = format!("/users?token={OTHER_PASSWORD}{}", "&x=1".repeat(1000)).replace(' ', "%20");
    let answer = service.client().get(&many);
    assert!(answer.status == 400 && answer.size < 2000, "{answer:?}");
}

#[test]
fn links_of_lists() {
    let service = Service::with(|config| config.max_per_page = 20);
    service.check(
        r#"
        GET /users?after=0 => 200 <!Link> {"data":[],"perPage":15,"hasMorePages":false}
        GET /users?after=0&perPage=21 => 400 {"error":"Invalid query","errors":[{"path":"/perPage","keyword":"maximum","message":"must be at most 20"}]}
        sql insert into users (name, email) select 'n', n || '@example.com' from generate_series(1, 9) n; delete from users where id in (1, 5)
        GET|HEAD /users?perPage=3 => 200 <Link: </users?page=1&perPage=3>; rel="first", </users?page=2&perPage=3>; rel="next", </users?page=3&perPage=3>; rel="last"> *
        GET|HEAD /users?perPage=3&page=2 => 200 <Link: </users?page=1&perPage=3>; rel="first", </users?page=1&perPage=3>; rel="prev", </users?page=3&perPage=3>; rel="next", </users?page=3&perPage=3>; rel="last"> *
        GET /users?page=9223372036854775807&perPage=20 => 200 {"data":[],"total":7,"perPage":20,"currentPage":9223372036854775807,"lastPage":1,"from":0,"to":0,"hasMorePages":false}
        GET /users?page=77 => 200 <Link: </users?page=1&perPage=15>; rel="first", </users?page=1&perPage=15>; rel="prev", </users?page=1&perPage=15>; rel="last"> *
        GET|HEAD /users?after=4&perPage=2 => 200 <Link: </users?after=7&perPage=2>; rel="next"> *
        GET|HEAD /users?after=7&perPage=2 => 200 <!Link> *
        GET /users?after=008&perPage=1 => 200 <!Link> {"data":[{"id":"9","name":"n","email":"9@example.com",<times>}],"perPage":1,"hasMorePages":false}
        GET /users?after=9223372036854775807 => 200 {"data":[],"perPage":15,"hasMorePages":false}
        GET /users/2 => 200 <!Link> *
        GET /users/1 => 404 <!Link> *
        GET /users?page=x => 400 <!Link> *
        "#,
    );
    // By `next` to the last id that there is.
    service.database.run("insert into users (id, name, email) overriding system value values (9223372036854775807, 'n', 'last')");
    for start in ["/users?perPage=2", "/users?after=0&perPage=2", "/users?after=0&perPage=7", "/users"] {
        let found: Vec<i64> = follow(&mut service.client(), start).iter().flat_map(ids).collect();
        assert_eq!(found, [2, 3, 4, 6, 7, 8, 9, i64::MAX], "{start}");
    }
}

/// A walk has each user once that was there when it began and when it ended, whatever becomes of others between its
/// requests.
#[test]
fn walks_among_changes() {
    let service = Service::start();
    service.database.run(
        "insert into users (name, email) select 'n', n || '@example.com' from generate_series(1, 600) n",
    );
    let mut client = service.client();
    let mut gone = (2..=600).step_by(2);
    for per_page in [7, 50, 199] {
        let stay = "select string_agg(id::text, ',') from users where id % 2 = 1 or id > 600";
        let stay = service.database.value(stay);
        let (mut found, mut target) = (Vec::new(), Some(format!("/users?after=0&perPage={per_page}")));
        while let Some(at) = target {
            let answer = client.get(&at);
            found.extend(ids(&answer.json()));
            target = next(&answer);
            // Odd ones of the first 600 stay, and so do new ones.
            if let Some(gone) = gone.next() {
                assert_eq!(client.delete(&format!("/users/{gone}")).status, 204);
            }
            let new = json!({"name": "new", "email": format!("{per_page}-{}@example.com", found.len())});
            assert_eq!(client.post("/users", new.to_string()).status, 201);
        }
        assert!(found.is_sorted_by(|a, b| a < b), "each once, by id: {found:?}");
        let stay = stay.split(',').map(|id| id.parse::<i64>().expect("an id"));
        let missing: Vec<i64> = stay.filter(|id| found.binary_search(id).is_err()).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}

/// Reads of every kind that wait for one lock are answered as each would be by itself; two that ask for one address both
/// are.
#[test]
fn reads_that_wait_together() {
    let service = Service::with(|config| {
        config.password_hashing = PasswordHashing::LeastCostForTests;
        config.auth_attempts = 0;
        // However long a busy machine takes until all of them wait.
        config.limits.request_timeout = 3 * LONG;
    });
    let user =
        |name: &str| format!(r#"{{"name":"{name}","email":"{name}@example.com","password":"{PASSWORD}"}}"#);
    let mut client = service.client();
    for name in ["ada", "bob"] {
        assert_eq!(client.request("POST", "/users", &[("Idempotency-Key", name)], user(name)).status, 201);
    }
    let tag = client.get("/users/2").header("ETag").expect("a user has one").to_owned();
    let (tag, ada, bob) = (tag.as_str(), user("ada"), user("bob"));
    let login = |email: &str, password: &str| json!({"email": email, "password": password}).to_string();
    let logins = [
        login("Bob@example.com", PASSWORD),
        login("ada@example.com", PASSWORD),
        login("ada@example.com", OTHER_PASSWORD),
        login("eve@example.com", PASSWORD),
    ];
    let lists = "page=1&perPage=1 page=2&perPage=1 order=desc&perPage=1 after=0&perPage=1 after=1 email=ADA@example.com \
                 email=ada@example.com email=eve@example.com email=bob@example.com&page=2 email=bob@example.com";
    let lists: Vec<String> = lists.split(' ').map(|query| format!("/users?{query}")).collect();
    // A method, a target, a field and its value, and a body.
    let mut rows = vec![
        ("GET", "/users/2", ("", ""), ""),
        ("GET", "/users/3", ("", ""), ""),
        ("GET", "/users/1", ("If-None-Match", tag), ""),
        ("GET", "/users/2", ("If-None-Match", tag), ""),
        ("GET", "/users/1", ("If-Match", tag), ""),
        ("POST", "/users", ("Idempotency-Key", "bob"), &*bob),
        ("POST", "/users", ("Idempotency-Key", "ada"), &*ada),
        ("POST", "/users", ("Idempotency-Key", "ada"), &*bob),
        ("PUT", "/users/1", ("", ""), r#"{"name":7}"#),
    ];
    rows.extend(lists.iter().map(|target| ("GET", target.as_str(), ("", ""), "")));
    rows.extend(logins.iter().map(|body| ("POST", "/users/authenticate", ("", ""), body.as_str())));
    let send = |client: &mut Client, (method, target, field, body): &(&str, &str, (&str, &str), &str)| {
        let fields = if field.0.is_empty() { &[][..] } else { &[*field] };
        client.send_request(method, target, fields, body);
    };
    let of = |answer: Answer| (answer.status, answer.header("ETag").map(str::to_owned), answer.body);
    let mut expected = Vec::new();
    for row in &rows {
        send(&mut client, row);
        expected.push(of(client.answer(row.0)));
    }
    for status in [200, 201, 304, 401, 404, 412, 422] {
        assert!(expected.iter().any(|(found, ..)| *found == status), "{status}");
    }
    let lock = service.database.transaction("lock table users, idempotency_keys in access exclusive mode");
    let mut clients: Vec<Client> = rows.iter().map(|_| service.client()).collect();
    clients.iter_mut().zip(&rows).for_each(|(client, row)| send(client, row));
    let working = format!("userd_http_connections{{state=\"working\"}} {}", rows.len() + 1);
    eventually(LONG, "all wait", || client.get("/metrics").body.contains(&working));
    drop(lock);
    for ((client, row), expected) in clients.iter_mut().zip(&rows).zip(expected) {
        assert_eq!(of(client.answer(row.0)), expected, "{row:?}");
    }
}
