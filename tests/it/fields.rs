//! Tests each field that a body may set: on each way into the table, in each answer, and on each way out. A new field
//! of the schemas needs a row here, and nothing else.

use crate::support::{Client, Database, LONG, OTHER_PASSWORD, PASSWORD, Process, Service, TempDir};
use serde_json::{Map, Value, json};
use std::{collections::BTreeSet, fs, time::Instant};
use userd::{
    PasswordHashing, Response,
    internals::{
        BodyFingerprint, Command, Condition, Create, KeyDigest, MAX_USER_BYTES, NewUser, Outcome, Update,
        UserChanges, operations,
    },
};

/// The fields: the name of each, two values, and whether null removes it.
const ROWS: [(&str, &str, &str, bool); 3] = [
    ("email", "ada@example.com", "grace@example.com", false),
    ("name", "Ada", "Grace", false),
    ("password", PASSWORD, OTHER_PASSWORD, true),
];

type Fields = Map<String, Value>;

fn first() -> Fields {
    ROWS.iter().map(|(field, value, ..)| ((*field).to_owned(), json!(value))).collect()
}

fn second() -> Fields {
    ROWS.iter().map(|(field, _, value, _)| ((*field).to_owned(), json!(value))).collect()
}

fn start() -> Service {
    Service::with(|config| {
        config.auth_attempts = 0;
        config.password_hashing = PasswordHashing::LeastCostForTests;
    })
}

/// Checks that a user has these fields, and opens with the password among them alone.
#[track_caller]
fn assert_user(client: &mut Client, id: &str, expected: &Fields) {
    let answer = client.get(&format!("/users/{id}")).json();
    let email = answer["email"].as_str().expect("a user has an address");
    for (field, one, other, _) in ROWS {
        let value = expected.get(field).unwrap_or(&Value::Null);
        if field == "password" {
            for password in [one, other] {
                assert_eq!(client.opens(email, password), *value == password, "{password}: {expected:?}");
            }
        } else {
            assert_eq!(answer[field], *value, "{answer} {expected:?}");
        }
    }
}

/// Executes commands in batches until each has an answer. Returns the answers.
fn execute(service: &Service, mut commands: Vec<Command>) -> Vec<Value> {
    let operations = operations(service.server.app());
    let mut answers = vec![None; commands.len()];
    let end = Instant::now() + LONG;
    while answers.contains(&None) {
        assert!(Instant::now() < end, "a command is never answered: {commands:?}");
        let deadline = Instant::now() + LONG;
        let (places, open): (Vec<usize>, Vec<_>) =
            commands.iter_mut().enumerate().filter(|(n, _)| answers[*n].is_none()).unzip();
        let open = open.into_iter().map(|command| (command, deadline)).collect();
        for (place, outcome) in places.into_iter().zip(operations.execute(open)) {
            let response: Option<Response> = match outcome {
                Outcome::Answer(answer) => Some(answer.expect("no command fails")),
                Outcome::Continue | Outcome::RetryLater => None,
            };
            answers[place] = response.map(|response| serde_json::from_slice(&response.body).expect("a user"));
        }
    }
    answers.into_iter().flatten().collect()
}

#[test]
fn fields_of_the_schemas_have_rows() {
    let names: BTreeSet<&str> = ROWS.iter().map(|(field, ..)| *field).collect();
    for body in ["create-user", "patch-user"] {
        for variant in ["basic", "strict"] {
            let path = format!("{}/schemas/{body}.{variant}.json", env!("CARGO_MANIFEST_DIR"));
            let schema: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
            let properties = schema["properties"].as_object().unwrap();
            assert_eq!(properties.keys().map(String::as_str).collect::<BTreeSet<_>>(), names, "{body}");
        }
    }
}

#[test]
fn fields_of_creates() {
    let service = start();
    let mut client = service.client();
    let without_password: Fields = first().into_iter().filter(|(field, _)| field != "password").collect();
    for fields in [first(), without_password] {
        let body = Value::Object(fields.clone()).to_string();
        let created = client.post("/users", &body);
        assert_eq!(created.status, 201);
        assert_user(&mut client, &created.id(), &fields);
        service.database.run("truncate users cascade");
        let key = |key: &str| Some((KeyDigest::new(key), BodyFingerprint::compute(&fields)));
        for keyed in [false, true] {
            let mut neighbour = fields.clone();
            neighbour["email"] = json!("neighbour@example.com");
            let create = |fields: &Fields, key| {
                let user = NewUser::from_body(fields.clone()).unwrap();
                Command::Create(Create { user, key, hash: None, peer: None })
            };
            let own = key("k").filter(|_| keyed);
            let answers = execute(&service, vec![create(&neighbour, None), create(&fields, own)]);
            assert_user(&mut client, answers[0]["id"].as_str().unwrap(), &neighbour);
            assert_user(&mut client, answers[1]["id"].as_str().unwrap(), &fields);
            if keyed {
                let replayed = client.request("POST", "/users", &[("Idempotency-Key", "k")], &body);
                assert_eq!((replayed.status, replayed.json()), (201, answers[1].clone()));
                let again = execute(&service, vec![create(&fields, key("k")), create(&fields, key("k"))]);
                assert_eq!(again, [&answers[1], &answers[1]].map(Value::clone));
            }
            service.database.run("delete from users");
        }
        assert_eq!(client.request("POST", "/users", &[("Idempotency-Key", "k")], &body).status, 410);
        // Checks that a deleted user leaves none of the values in the kept answers.
        let kept = service.database.value("select string_agg(k::text, '') from idempotency_keys k");
        for value in fields.values().filter_map(Value::as_str).chain(["argon2"]) {
            assert!(!kept.contains(value), "{kept}");
        }
        service.database.run("delete from idempotency_keys");
    }
}

#[test]
fn fields_of_changes() {
    let service = start();
    let mut client = service.client();
    let mut create = || {
        service.database.run("truncate users cascade");
        let created = client.post("/users", Value::Object(first()).to_string());
        (created.id(), first())
    };
    let mut other = service.client();
    for method in ["PUT", "PATCH"] {
        let (id, _) = create();
        let path = format!("/users/{id}");
        let all = Value::Object(second()).to_string();
        assert_eq!(other.request(method, &path, &[], all).status, 200);
        assert_user(&mut other, &id, &second());
        for (field, _, value, may_be_null) in ROWS {
            let (id, mut expected) = create();
            let path = format!("/users/{id}");
            expected[field] = json!(value);
            assert_eq!(other.request(method, &path, &[], json!({ field: value }).to_string()).status, 200);
            assert_user(&mut other, &id, &expected);
            let answer = other.request(method, &path, &[], json!({ field: null }).to_string());
            if may_be_null {
                expected[field] = Value::Null;
            }
            assert_eq!(answer.status == 200, may_be_null, "{method} {field}: {answer:?}");
            assert_user(&mut other, &id, &expected);
        }
        // Changes the field together with the removal of a password that the user does not have.
        for (field, _, value, _) in ROWS.into_iter().filter(|(field, ..)| *field != "password") {
            let (id, mut expected) = create();
            let path = format!("/users/{id}");
            (expected[field], expected["password"]) = (json!(value), Value::Null);
            for body in [json!({"password": null}), json!({"password": null, field: value})] {
                assert_eq!(other.request(method, &path, &[], body.to_string()).status, 200);
            }
            assert_user(&mut other, &id, &expected);
        }
    }
    // Changes the field in a batch with a change of another user. A password is changed alone.
    for (field, _, value, may_be_null) in ROWS.into_iter().filter(|(field, ..)| *field != "password") {
        let (id, mut expected) = create();
        let neighbour = other.post("/users", r#"{"name":"n","email":"n@example.com"}"#).id();
        let update = |id: &str, fields: Value| {
            let changes = UserChanges::from_body(fields.as_object().unwrap().clone()).unwrap();
            let (id, condition) = (id.parse().unwrap(), Condition::default());
            Command::Update(Update { id, changes, condition, hash: None, is_unbatched: false })
        };
        let updates = |name, value: &Value| {
            vec![update(&neighbour, json!({"name": name})), update(&id, json!({ field: value }))]
        };
        // Locks the user. The batch does not wait, changes nothing of the user, and does not answer that it has.
        let mut lock = service.database.transaction(&format!("select from users where id = {id} for update"));
        let (mut locked, deadline) = (updates("l", &json!(value)), Instant::now() + LONG);
        let commands = locked.iter_mut().map(|command| (command, deadline)).collect();
        let outcomes = operations(service.server.app()).execute(commands);
        assert!(!matches!(outcomes[1], Outcome::Answer(_)), "{field}: {outcomes:?}");
        lock.batch_execute("rollback").unwrap();
        let null = may_be_null.then_some(Value::Null);
        for value in [json!(value)].into_iter().chain(null) {
            execute(&service, updates("m", &value));
            expected[field] = value;
            assert_user(&mut other, &id, &expected);
            assert_eq!(other.get(&format!("/users/{neighbour}")).json()["name"], "m");
        }
    }
}

#[test]
fn fields_of_exports_and_imports() {
    let (from, dir) = (start(), TempDir::new());
    let created = from.client().post("/users", Value::Object(first()).to_string());
    let exported = |name: &str| {
        let file = dir.path().join(name);
        let arguments = ["export", "--with-password-hashes", file.to_str().unwrap()];
        let ended = Process::start(&arguments, &[("DATABASE_URL", &from.database.url())]).ended();
        assert_eq!(ended.0, 0, "{ended:?}");
        fs::read_to_string(file).unwrap()
    };
    let with_password = format!("{}\n", Value::Object(first()));
    let import = |database: &Database, text: &str| {
        dir.write("users", text);
        let file = dir.path().join("users");
        let arguments = ["import", "--clear-passwords", file.to_str().unwrap()];
        let ended = Process::start(&arguments, &[("DATABASE_URL", &database.url())]).ended();
        assert_eq!((ended.0, &*ended.1), (0, "imported: 1, existing: 0, refused: 0\n"), "{ended:?}");
    };
    for text in [exported("users.ndjson"), exported("users.csv"), with_password] {
        let to = start();
        import(&to.database, &text);
        assert_user(&mut to.client(), "1", &first());
        if text.contains("createdAt") {
            assert_eq!(to.client().get("/users/1").json(), created.json(), "{text}");
        }
    }
}

/// Checks that the longest JSON of a user has at most `MAX_USER_BYTES`, for which a page has memory.
#[test]
fn the_largest_user() {
    let service = start();
    let mut client = service.client();
    let created = client.post("/users", Value::Object(first()).to_string());
    let text =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/schemas/create-user.basic.json")).unwrap();
    let schema: Value = serde_json::from_str(&text).unwrap();
    for (field, rules) in schema["properties"].as_object().unwrap() {
        let Some(most) = rules["maxLength"].as_u64() else {
            assert_eq!(created.json()[field], Value::Null, "a field of an answer has a bound");
            continue;
        };
        // Sets the text whose JSON is the longest: a control character takes six bytes, but not every field may have
        // one.
        let path = format!("/users/{}", created.id());
        let longest = ["\u{1}", "\u{10348}"].into_iter().any(|character| {
            let body = json!({ field: character.repeat(most as usize) });
            client.put(&path, body.to_string()).status == 200
        });
        assert!(longest, "{field}");
    }
    let body = client.get(&format!("/users/{}", created.id())).body;
    assert!(body.len() <= MAX_USER_BYTES, "{} bytes", body.len());
}
