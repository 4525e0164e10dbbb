//! Finding users: by address, by a walk through all of them, by the links of a list; and queries that ask for nothing
//! that there is.

use crate::support::{Answer, Client, Database, LONG, OTHER_PASSWORD, PASSWORD, Service, check, eventually};
use serde_json::{Value, json};
use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};
use userd::{PasswordHashing, Server};

/// The ids in a list.
fn ids(list: &Value) -> Vec<i64> {
    let users = list["data"].as_array().expect("a list");
    users.iter().map(|user| user["id"].as_str().and_then(|id| id.parse().ok()).expect("an id")).collect()
}

/// Relations and targets of the field `Link`.
fn links(answer: &Answer) -> Vec<(String, String)> {
    let field = answer.header("Link").unwrap_or_default();
    let link = |link: &str| {
        let (target, relation) = link.split_once(">; rel=\"")?;
        Some((relation.strip_suffix('"')?.to_owned(), target.strip_prefix('<')?.to_owned()))
    };
    let links = field.split(", ").filter(|link| !link.is_empty());
    links.map(|text| link(text).unwrap_or_else(|| panic!("a link: {text}"))).collect()
}

fn link(answer: &Answer, relation: &str) -> Option<String> {
    links(answer).into_iter().find(|(found, _)| found == relation).map(|(_, target)| target)
}

/// All answers from a target on, by `next`.
fn follow(client: &mut Client, target: &str) -> Vec<Answer> {
    let mut answers = Vec::new();
    let mut next = Some(target.to_owned());
    while let Some(target) = next {
        let answer = client.get(&target);
        assert_eq!(answer.status, 200, "{target}: {answer:?}");
        next = link(&answer, "next");
        answers.push(answer);
    }
    answers
}

fn create(client: &mut Client, name: &str, email: &str) -> String {
    let created = client.post("/users", json!({"name": name, "email": email}).to_string());
    assert_eq!(created.status, 201, "{created:?}");
    created.id()
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
        let mut client = Client::new(server.base_url());
        let body = |email: &str| json!({"name": "n", "email": email, "password": PASSWORD}).to_string();
        for (email, status) in [
            ("info@x.co", 201),
            ("INFO@X.CO", 409),
            ("é@x.co", 201),
            ("É@x.co", 201),
            ("iİi@x.co", 201),
            ("iii@x.co", 201),
            ("İİİ@x.co", 201),
            ("III@x.co", 409),
        ] {
            let answer = client.post("/users", body(email));
            assert_eq!(answer.status, status, "{locale}: {email}: {answer:?}");
        }
        for (email, found) in
            [("Info@x.co", "info@x.co"), ("I%C4%B0I@X.co", "iİi@x.co"), ("Iii@x.co", "iii@x.co")]
        {
            let list = client.get(&format!("/users?email={email}")).json();
            assert_eq!(list["data"].as_array().map(|data| data.len()), Some(1), "{locale}: {email}");
            assert_eq!(list["data"][0]["email"], found, "{locale}");
        }
        let login = json!({"email": "INFO@x.co", "password": PASSWORD}).to_string();
        assert_eq!(client.post("/users/authenticate", login).status, 200, "{locale}");
        server.stop();
    }
}

#[test]
fn by_address() {
    let service = Service::start();
    let mut client = service.client();
    let emails =
        ["Ada@Example.com", "ada+news@example.com", "o'hara_~!#$%&*-/=?^`{|}@example.com", "Zoë@example.com"];
    // One of them is for psql alone.
    service
        .database
        .client()
        .execute("insert into users (name, email) values ('z', $1)", &[&emails[3]])
        .unwrap();
    for email in &emails[..3] {
        create(&mut client, "n", email);
    }
    // Addresses are written in the ways of curl's users and of programs.
    let rows = [
        ("Ada@Example.com", Some(0)),
        ("ada@example.com", Some(0)),
        ("ADA@EXAMPLE.COM", Some(0)),
        ("ada%40example.com", Some(0)),
        ("%41da@example.com", Some(0)),
        ("ada+news@example.com", Some(1)),
        ("ADA+News@example.com", Some(1)),
        ("ada%2Bnews%40example.com", Some(1)),
        ("ada%2bnews@example.com", Some(1)),
        ("o'hara_~!%23$%25%26*-/=?^%60{|}@example.com", Some(2)),
        ("Zo%C3%AB@example.com", Some(3)),
        // Only of ASCII letters is the case ignored.
        ("zO%C3%AB@EXAMPLE.com", Some(3)),
        ("ZO%C3%8B@example.com", None),
        ("ada%20news@example.com", None),
        ("ada@example.com%20", None),
        ("ada@example.co", None),
        ("%25", None),
        ("_da@example.com", None),
    ];
    for (written, expected) in rows {
        let answer = client.get(&format!("/users?email={written}"));
        assert_eq!(answer.status, 200, "{written}: {answer:?}");
        let total = i32::from(expected.is_some());
        let mut list = answer.json();
        let data = list["data"].take();
        let found = data.as_array().expect("a list").iter().map(|user| user["email"].as_str().expect("text"));
        let expected: Vec<&str> = expected.map(|index: usize| emails[index]).into_iter().collect();
        assert_eq!(found.collect::<Vec<_>>(), expected, "{written}");
        assert_eq!(
            list,
            json!({
                "data": null, "total": total, "perPage": 15, "currentPage": 1, "lastPage": 1,
                "from": total, "to": total, "hasMorePages": false,
            })
        );
        // The links find the same.
        for (relation, target) in links(&answer) {
            assert_eq!(client.get(&target).body, answer.body, "{written}: {relation} {target}");
        }
    }
    check(
        &mut client,
        r#"
        GET /users?email=ada@example.com&perPage=2&page=1 => 200 {"data":[{"id":"2","name":"n","email":"Ada@Example.com",<times>}],"total":1,"perPage":2,"currentPage":1,"lastPage":1,"from":1,"to":1,"hasMorePages":false}
        GET /users?email=ada@example.com&page=2 => 200 {"data":[],"total":1,"perPage":15,"currentPage":2,"lastPage":1,"from":0,"to":0,"hasMorePages":false}
        DELETE /users/2 => 204
        GET /users?email=ada@example.com => 200 {"data":[],"total":0,"perPage":15,"currentPage":1,"lastPage":1,"from":0,"to":0,"hasMorePages":false}
        "#,
    );
}

/// Pages from the end have the totals of the others, and their links keep the order.
#[test]
fn newest_first() {
    let service = Service::start();
    let mut client = service.client();
    let empty = client.get("/users?order=desc&page=2").json();
    assert_eq!((&empty["data"], &empty["total"], &empty["lastPage"]), (&json!([]), &json!(0), &json!(1)));
    let insert = |count: u32| {
        service.database.run(&format!(
            "insert into users (name, email) select 'n', gen_random_uuid() || '@b.co' from generate_series(1, {count})"
        ));
    };
    insert(7);
    service.database.run("delete from users where id = 3");
    let pages = follow(&mut client, "/users?order=desc&perPage=4");
    let found: Vec<Vec<i64>> = pages.iter().map(|page| ids(&page.json())).collect();
    assert_eq!(found, [vec![7, 6, 5, 4], vec![2, 1]]);
    let second = pages[1].json();
    let positions =
        ["total", "currentPage", "lastPage", "from", "to"].map(|name| second[name].as_i64().unwrap());
    assert_eq!((positions, &second["hasMorePages"]), ([6, 2, 2, 5, 6], &json!(false)));
    assert_eq!(link(&pages[1], "first").as_deref(), Some("/users?order=desc&page=1&perPage=4"));
    assert_eq!(link(&pages[1], "prev").as_deref(), Some("/users?order=desc&page=1&perPage=4"));
    assert_eq!(ids(&client.get("/users?order=asc&perPage=4").json()), [1, 2, 4, 5]);
    for beyond in ["3", "9223372036854775807"] {
        let page = client.get(&format!("/users?order=desc&perPage=4&page={beyond}")).json();
        assert_eq!((&page["data"], &page["total"], &page["from"]), (&json!([]), &json!(6), &json!(0)));
    }
    // More blocks of ids than one, with gaps.
    insert(20_000);
    service.database.run("delete from users where id % 7 = 0");
    let ascending: Vec<i64> = {
        let pages = follow(&mut client, "/users?perPage=1000");
        pages.iter().flat_map(|page| ids(&page.json())).collect()
    };
    let pages = follow(&mut client, "/users?order=desc&perPage=1000");
    let descending: Vec<i64> =
        pages.iter().rev().flat_map(|page| ids(&page.json()).into_iter().rev()).collect();
    assert_eq!(descending, ascending);
    assert!(pages.iter().all(|page| page.json()["total"] == ascending.len()));
}

#[test]
fn addresses_that_begin_so() {
    let service = Service::start();
    let mut client = service.client();
    for email in
        ["ada2@b.co", "Ada@b.co", "adam@b.co", "b@b.co", "ad@b.co", "a%_@b.co", "jürgen@b.co", "ada+n@b.co"]
    {
        create(&mut client, "n", email);
    }
    let mut found = |query: &str| {
        let answer = client.get(&format!("/users?emailPrefix={query}"));
        assert_eq!((answer.status, answer.header("Link")), (200, None), "{query}: {answer:?}");
        let list = answer.json();
        let users = list["data"].as_array().unwrap();
        let emails: Vec<String> =
            users.iter().map(|user| user["email"].as_str().unwrap().to_owned()).collect();
        assert_eq!(list.as_object().unwrap().len(), 3, "{list}");
        (emails.join(" "), list["perPage"].as_i64().unwrap(), list["hasMorePages"].as_bool().unwrap())
    };
    let rows = [
        ("ada", "ada+n@b.co ada2@b.co Ada@b.co adam@b.co", 15, false),
        ("ADA&perPage=4", "ada+n@b.co ada2@b.co Ada@b.co adam@b.co", 4, false),
        ("ada&perPage=3", "ada+n@b.co ada2@b.co Ada@b.co", 3, true),
        ("ada+", "ada+n@b.co", 15, false),
        ("ada%2B", "ada+n@b.co", 15, false),
        ("a%25", "a%_@b.co", 15, false),
        ("a_", "", 15, false),
        ("j%C3%BCr", "jürgen@b.co", 15, false),
        ("j%C3%9Cr", "", 15, false),
        ("b@b.co", "b@b.co", 15, false),
        ("b@b.com", "", 15, false),
        ("zzz", "", 15, false),
        ("%F4%8F%BF%BF", "", 15, false),
    ];
    for (query, emails, per_page, more) in rows {
        assert_eq!(found(query), (emails.to_owned(), per_page, more), "{query}");
    }
}

#[test]
fn queries_that_cannot_be() {
    let service = Service::start();
    let mut client = service.client();
    create(&mut client, "Ada", "ada@example.com");
    let rows = [
        ("email=", "/email", "minLength", "must not be empty"),
        ("email", "/email", "minLength", "must not be empty"),
        ("email=a@b.co&email=c@b.co", "/email", "maxItems", "must be given once"),
        ("email=%zz", "/email", "format", "must be UTF-8, percent-encoded"),
        ("email=%ff", "/email", "format", "must be UTF-8, percent-encoded"),
        ("email=%00", "/email", "pattern", "must not contain NUL (U+0000)"),
        ("after=-1", "/after", "type", "must be a whole number of at least 0"),
        ("after=x", "/after", "type", "must be a whole number of at least 0"),
        ("after=", "/after", "type", "must be a whole number of at least 0"),
        ("after=9223372036854775808", "/after", "maximum", "must be at most 9223372036854775807"),
        ("order=up", "/order", "enum", "must be asc or desc"),
        ("order=desc&email=a@b.co", "/order", "not", "cannot be given together with email"),
        ("emailPrefix=", "/emailPrefix", "minLength", "must not be empty"),
        (
            "emailPrefix=a&page=1",
            "/emailPrefix",
            "not",
            "cannot be given together with page or email or order or after",
        ),
        ("after=1&after=2", "/after", "maxItems", "must be given once"),
        ("after=1&page=1", "/after", "not", "cannot be given together with page or email or order"),
        ("after=1&email=a@b.co", "/after", "not", "cannot be given together with page or email or order"),
        ("perpage=5", "/perpage", "additionalProperties", "is not a parameter here; perPage is"),
        ("Page=5", "/Page", "additionalProperties", "is not a parameter here; page is"),
        (
            "sort=name",
            "/sort",
            "additionalProperties",
            "is not a parameter here; page, perPage, order, email, emailPrefix and after are",
        ),
        (
            "page%20=1",
            "/page ",
            "additionalProperties",
            "is not a parameter here; page, perPage, order, email, emailPrefix and after are",
        ),
    ];
    // Not even a missing table is noticed: no query is executed.
    service.database.run("alter table users rename to lost");
    for (query, path, keyword, message) in rows {
        let refusal = json!({
            "error": "Invalid query",
            "errors": [{"path": path, "keyword": keyword, "message": message}],
        });
        for method in ["GET", "HEAD"] {
            let answer = client.request(method, &format!("/users?{query}"), &[], "");
            assert_eq!(answer.status, 400, "{method} {query}");
            assert!(method == "HEAD" || answer.json() == refusal, "{query}: {answer:?}");
        }
    }
    service.database.run("alter table lost rename to users");
    // No other route has parameters. What is refused changes nothing.
    let refusal = r#"400 {"error":"Invalid query","errors":[{"path":"/page","keyword":"additionalProperties","message":"is not a parameter here; there is none"}]}"#;
    check(
        &mut client,
        &format!(
            r#"
            GET /users/1?page=1 => {refusal}
            GET /users/7?page=1 => {refusal}
            GET /users/abc?page=1 => {refusal}
            POST /users?page=1 {{"name":"Eve","email":"eve@example.com"}} => {refusal}
            PUT /users/1?page=1 {{"name":"Eve"}} => {refusal}
            DELETE /users/1?page=1 => {refusal}
            OPTIONS /users?page=1 => {refusal}
            POST /users/authenticate?page=1 {{"email":"ada@example.com","password":"{PASSWORD}"}} => {refusal}
            GET /nowhere?page=1 => 404 {{"error":"Not found"}}
            POST /users/1?page=1 => 405 {{"error":"Method not allowed"}}
            GET /users?email=eve@example.com => 200 {{"data":[],"total":0,"perPage":15,"currentPage":1,"lastPage":1,"from":0,"to":0,"hasMorePages":false}}
            GET /users/1 => 200 {{"id":"1","name":"Ada","email":"ada@example.com",<times>}}
            "#
        ),
    );
    // Values are not repeated, and of many names some.
    let many = format!("/users?token={OTHER_PASSWORD}{}", "&x=1".repeat(1000)).replace(' ', "%20");
    let answer = client.get(&many);
    assert_eq!(answer.status, 400);
    assert!(answer.size < 2000, "{answer:?}");
}

#[test]
fn links_of_lists() {
    let service = Service::start();
    let mut client = service.client();
    service.database.run(
        "insert into users (name, email) select 'n', n || '@example.com' from generate_series(1, 9) n;
         delete from users where id in (1, 5)",
    );
    // The target, and where its links lead to.
    let rows: [(&str, &[(&str, &str)]); 7] = [
        (
            "/users?perPage=3",
            &[
                ("first", "/users?page=1&perPage=3"),
                ("next", "/users?page=2&perPage=3"),
                ("last", "/users?page=3&perPage=3"),
            ],
        ),
        (
            "/users?perPage=3&page=2",
            &[
                ("first", "/users?page=1&perPage=3"),
                ("prev", "/users?page=1&perPage=3"),
                ("next", "/users?page=3&perPage=3"),
                ("last", "/users?page=3&perPage=3"),
            ],
        ),
        (
            "/users?page=3&perPage=3",
            &[
                ("first", "/users?page=1&perPage=3"),
                ("prev", "/users?page=2&perPage=3"),
                ("last", "/users?page=3&perPage=3"),
            ],
        ),
        (
            "/users?page=77",
            &[
                ("first", "/users?page=1&perPage=15"),
                ("prev", "/users?page=1&perPage=15"),
                ("last", "/users?page=1&perPage=15"),
            ],
        ),
        ("/users?after=4&perPage=2", &[("next", "/users?after=7&perPage=2")]),
        ("/users?after=7&perPage=2", &[]),
        ("/users?after=9", &[]),
    ];
    for (target, expected) in rows {
        for method in ["GET", "HEAD"] {
            let found = links(&client.request(method, target, &[], ""));
            let found: Vec<_> = found.iter().map(|(name, to)| (name.as_str(), to.as_str())).collect();
            assert_eq!(found, expected, "{method} {target}");
        }
    }
    // By `next` to the end.
    for start in ["/users?perPage=2", "/users?after=0&perPage=2", "/users?after=0&perPage=7", "/users"] {
        let answers = follow(&mut client, start);
        let found: Vec<i64> = answers.iter().flat_map(|answer| ids(&answer.json())).collect();
        assert_eq!(found, [2, 3, 4, 6, 7, 8, 9], "{start}");
    }
    // An answer that is no list has none.
    for target in ["/users/2", "/users/1", "/users?page=x"] {
        assert_eq!(client.get(target).header("Link"), None, "{target}");
    }
}

#[test]
fn a_walk() {
    let service = Service::with(|config| config.max_per_page = 20);
    let mut client = service.client();
    check(
        &mut client,
        r#"
        GET /users?after=0 => 200 {"data":[],"perPage":15,"hasMorePages":false}
        POST /users {"name":"Ada","email":"ada@example.com"} => 201 {"id":"1","name":"Ada","email":"ada@example.com",<times>}
        POST /users {"name":"Bob","email":"bob@example.com"} => 201 {"id":"2","name":"Bob","email":"bob@example.com",<times>}
        GET /users?after=0&perPage=1 => 200 {"data":[{"id":"1","name":"Ada","email":"ada@example.com",<times>}],"perPage":1,"hasMorePages":true}
        GET /users?after=1&perPage=1 => 200 {"data":[{"id":"2","name":"Bob","email":"bob@example.com",<times>}],"perPage":1,"hasMorePages":false}
        GET /users?perPage=20&after=001 => 200 {"data":[{"id":"2","name":"Bob","email":"bob@example.com",<times>}],"perPage":20,"hasMorePages":false}
        GET /users?after=2 => 200 {"data":[],"perPage":15,"hasMorePages":false}
        GET /users?after=9223372036854775807 => 200 {"data":[],"perPage":15,"hasMorePages":false}
        GET /users?after=0&perPage=21 => 400 {"error":"Invalid query","errors":[{"path":"/perPage","keyword":"maximum","message":"must be at most 20"}]}
        "#,
    );
    // The last id that there is.
    service.database.run(
        "insert into users (id, name, email) overriding system value \
         values (9223372036854775807, 'Zoe', 'zoe@example.com')",
    );
    let found: Vec<i64> = follow(&mut client, "/users?after=0&perPage=2")
        .iter()
        .flat_map(|answer| ids(&answer.json()))
        .collect();
    assert_eq!(found, [1, 2, i64::MAX]);
}

/// A walk has each user once that was there when it began and when it ended, whatever becomes of others meanwhile.
#[test]
fn walks_among_changes() {
    const WALKS: usize = 12;
    let service = Service::start();
    service.database.run(
        "insert into users (name, email) select 'n', n || '@example.com' from generate_series(1, 600) n",
    );
    let (done, changes) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for n in 0..2_usize {
            let (mut client, done, changes) = (service.client(), &done, &changes);
            scope.spawn(move || {
                let mut turn = n;
                while !done.load(Ordering::SeqCst) {
                    // The odd ones of the first 600 stay.
                    turn += 2;
                    let gone = turn % 600 / 2 * 2 + 2;
                    let deleted = client.delete(&format!("/users/{gone}")).status;
                    assert!([204, 404].contains(&deleted), "{deleted}");
                    create(&mut client, "new", &format!("new-{turn}@example.com"));
                    changes.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let walks: Vec<_> = (0..3)
            .map(|walker| {
                let (service, changes) = (&service, &changes);
                scope.spawn(move || {
                    let mut client = service.client();
                    for walk in 0..WALKS / 3 {
                        let before = changes.load(Ordering::SeqCst);
                        eventually(LONG, "users change", || changes.load(Ordering::SeqCst) > before);
                        let stay = "select string_agg(id::text, ',') from users where id % 2 = 1 or id > 600";
                        let stay = service.database.value(stay);
                        let per_page = 7 + 20 * walker + walk;
                        let answers = follow(&mut client, &format!("/users?after=0&perPage={per_page}"));
                        let found: Vec<i64> = answers.iter().flat_map(|answer| ids(&answer.json())).collect();
                        assert!(found.is_sorted_by(|a, b| a < b), "each once, by id: {found:?}");
                        let stay = stay.split(',').map(|id| id.parse::<i64>().expect("an id"));
                        let missing: Vec<i64> = stay.filter(|id| found.binary_search(id).is_err()).collect();
                        assert!(missing.is_empty(), "{missing:?}");
                    }
                })
            })
            .collect();
        let walks: Vec<_> = walks.into_iter().map(|walk| walk.join()).collect();
        done.store(true, Ordering::SeqCst);
        assert!(walks.into_iter().all(|walk| walk.is_ok()));
    });
}

/// Pages, walks and look-ups that wait together are answered as each would be by itself.
#[test]
fn lists_that_wait_together() {
    const CLIENTS: usize = 24;
    let service = Service::start();
    service
        .database
        .run("insert into users (name, email) select 'n', n || '@example.com' from generate_series(1, 50) n");
    let targets = |n: usize| match n % 3 {
        0 => format!("/users?page={}&perPage=3", n / 3 + 1),
        1 => format!("/users?after={n}&perPage={}", n / 3 + 1),
        _ => format!("/users?email={n}@EXAMPLE.com"),
    };
    let mut client = service.client();
    let expected: Vec<String> = (0..CLIENTS).map(|n| client.get(&targets(n)).body).collect();
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| service.client()).collect();
    for _ in 0..20 {
        for (n, client) in clients.iter_mut().enumerate() {
            client.send_request("GET", &targets(n), &[], "");
        }
        for (n, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.answer("GET").body, expected[n], "{}", targets(n));
        }
    }
}

/// Reads of every kind that wait for one lock get their own answers; two that ask for one address both get it.
#[test]
fn reads_of_every_kind_that_wait_for_a_lock() {
    let service = Service::with(|config| config.password_hashing = PasswordHashing::LeastCostForTests);
    let user =
        |name: &str| json!({"name": name, "email": format!("{name}@example.com"), "password": PASSWORD});
    let mut client = service.client();
    let mut first = Vec::new();
    for name in ["ada", "bob"] {
        let body = user(name).to_string();
        first.push(client.request("POST", "/users", &[("Idempotency-Key", name)], &body).body);
    }
    // A method, a target, a key and a body; a status, and the user in the answer.
    let login = |email: &str, password: &str| json!({"email": email, "password": password}).to_string();
    let rows = [
        ("GET", "/users?email=ADA@example.com", "", String::new(), 200, Some(0)),
        ("GET", "/users?email=ada@example.com", "", String::new(), 200, Some(0)),
        ("GET", "/users?email=nobody@example.com", "", String::new(), 200, None),
        ("GET", "/users?email=bob@example.com&page=2", "", String::new(), 200, None),
        ("GET", "/users?email=bob@example.com", "", String::new(), 200, Some(1)),
        ("GET", "/users/2", "", String::new(), 200, Some(1)),
        ("GET", "/users/3", "", String::new(), 404, None),
        ("POST", "/users/authenticate", "", login("Bob@example.com", PASSWORD), 200, Some(1)),
        ("POST", "/users/authenticate", "", login("ada@example.com", PASSWORD), 200, Some(0)),
        ("POST", "/users/authenticate", "", login("ada@example.com", OTHER_PASSWORD), 401, None),
        ("POST", "/users/authenticate", "", login("nobody@example.com", PASSWORD), 401, None),
        ("POST", "/users", "bob", user("bob").to_string(), 201, Some(1)),
        ("POST", "/users", "ada", user("ada").to_string(), 201, Some(0)),
        ("POST", "/users", "ada", user("bob").to_string(), 422, None),
        ("PUT", "/users/1", "", json!({"name": 7}).to_string(), 422, None),
    ];
    let mut neighbour = service.database.client();
    let mut lock = neighbour.transaction().unwrap();
    lock.batch_execute("lock table users, idempotency_keys in access exclusive mode").unwrap();
    let mut clients: Vec<Client> = rows.iter().map(|_| service.client()).collect();
    for (client, (method, target, key, body, ..)) in clients.iter_mut().zip(&rows) {
        let field = [("Idempotency-Key", *key)];
        let fields = if key.is_empty() { &field[..0] } else { &field[..] };
        client.send_request(method, target, fields, body);
    }
    let working = format!("userd_http_connections{{state=\"working\"}} {}", rows.len() + 1);
    eventually(LONG, "all wait", || client.get("/metrics").body.contains(&working));
    lock.rollback().unwrap();
    for (client, (method, target, _, body, status, of)) in clients.iter_mut().zip(rows) {
        let answer = client.answer(method);
        assert_eq!(answer.status, status, "{method} {target} {body}: {answer:?}");
        let value = answer.json();
        let found = match target.contains("?email") {
            true => value["data"].get(0).cloned(),
            false => (status < 300).then_some(value),
        };
        let expected: Option<Value> = of.map(|of: usize| serde_json::from_str(&first[of]).unwrap());
        assert_eq!(found, expected, "{method} {target} {body}");
    }
}
