//! The documents: where a person finds what, links that lead somewhere, the table of settings, and the lines of docs/curl.md
//! and docs/import.md, which print what these say, and those of the README and docs/testing.md for tests in any language.

use crate::support::{Account, Database, PASSWORD, Service, TOKEN, TempDir, USERD, blocks, shell};
use nix::unistd::{Gid, Uid};
use postgres::SimpleQueryMessage;
use std::{
    collections::BTreeSet,
    env, fs,
    os::unix::{
        fs::{PermissionsExt, symlink},
        process::CommandExt,
    },
    path::Path,
    process::{Command, Stdio},
};
use userd::internals::{SETTINGS, Setting};

const README: &str = include_str!("../../README.md");
const CURL: &str = include_str!("../../docs/curl.md");
const IMPORT: &str = include_str!("../../docs/import.md");

/// Hashes of `PASSWORD` by crypt(3) and Python's hashlib, without bcrypt's version.
const BCRYPT: &str = "$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
const SHA512: &str =
    "oSKce4SGrSKsJabCWZfpe2MmVOPtl4paOjoD1njLdjo3le9sMBwq0q7ivJFcrXSTMQ0HjlOn/J48J9WZe4uR0g==";

/// Every document: its name from the root, and its text.
fn documents() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let names = ["", "docs/"].into_iter().flat_map(|dir| {
        let files = fs::read_dir(root.join(dir)).expect("a directory").flatten();
        files.map(move |file| format!("{dir}{}", file.file_name().to_string_lossy()))
    });
    let names: BTreeSet<String> = names.filter(|name| name.ends_with(".md")).collect();
    let text = |name: &String| fs::read_to_string(root.join(name)).expect("UTF-8");
    names.into_iter().map(|name| (name.clone(), text(&name))).collect()
}

/// The lines that are no code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Returns the names of a page's headings in links.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let name = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|char| char.is_alphanumeric() || "-_ ".contains(*char));
        kept.map(|char| if char == ' ' { '-' } else { char }).collect()
    };
    headings.map(name).collect()
}

fn links(text: &str) -> Vec<&str> {
    let rest = |line| str::split(line, "](").skip(1);
    prose(text).flat_map(rest).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect()
}

/// Links lead somewhere, and the index has one to every page.
#[test]
fn links_lead_somewhere() {
    let (root, documents) = (Path::new(env!("CARGO_MANIFEST_DIR")), documents());
    let (mut count, mut listed) = (0, BTreeSet::from(["docs/README.md".to_owned()]));
    for (name, text) in &documents {
        for link in links(text).into_iter().filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let here = root.join(name);
            let target = match file {
                "" => here,
                file => here.parent().expect("a directory").join(file),
            };
            let path = target.canonicalize().unwrap_or_else(|error| panic!("{name}: {link}: {error}"));
            let path = path.strip_prefix(root.canonicalize().unwrap()).expect("in the project");
            let first = path.iter().next().expect("a name").to_str().expect("UTF-8");
            let packed = ["docs", "examples", "LICENSE"].contains(&first) || first.ends_with(".md");
            assert!(packed, "{name}: {link}: no package has it");
            let text = fs::read_to_string(&target).unwrap_or_default();
            assert!(anchor.is_empty() || anchors(&text).contains(anchor), "{name}: {link}");
            count += 1;
            if name == "docs/README.md" {
                listed.insert(path.display().to_string());
            }
        }
    }
    assert!(count > 50, "{count} links");
    let missing: Vec<_> =
        documents.iter().map(|(name, _)| name).filter(|name| !listed.contains(*name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Lines for a shell, and what they print.
fn curl_blocks() -> Vec<(&'static str, &'static str)> {
    let block = |text: &'static str| {
        let (lines, rest) = text.split_once("```\n").expect("it ends");
        let printed = rest.split_once("```text\n").and_then(|(_, text)| text.split_once("```\n"));
        (lines, printed.map_or("", |(printed, _)| printed))
    };
    CURL.split("\n```sh\n").skip(1).map(block).collect()
}

/// Pages whose blocks run here from top to bottom, as `.ci/blocks` says.
const PAGES: [&str; 3] = ["docs/curl.md", "docs/left.md", "docs/twice.md"];

/// Runs a page's script, with ports and processes of its own if it is run by root, and as PostgreSQL's account then.
const ENTER: &str = r#"
    [ "$(id -u)" = 0 ] || exec timeout 300 sh "$0"
    mkdir .rust
    exec timeout 300 unshare --net --mount --pid --mount-proc --fork --kill-child sh -ec '
        ip link set lo up
        mount --bind "$1" .rust
        exec setpriv --reuid "$2" --regid "$2" --clear-groups sh "$0"' "$0" "$1" "$2""#;

#[test]
fn pages_run_from_top_to_bottom() {
    let chosen = env::var("PAGE").unwrap_or_default();
    for page in PAGES.into_iter().filter(|page| page.contains(&chosen)) {
        run_page(page, &Account::new());
    }
}

/// Runs the blocks of a page in the account's directory. Returns what they have printed.
fn run_page(page: &str, account: &Account) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = |command: &mut Command| {
        let output = command.output().expect("a program");
        let [printed, said] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.success(), "{page}:\n{printed}{said}");
        printed.trim_end().to_owned()
    };
    let mut script = output(Command::new(root.join(".ci/blocks")).arg(page).current_dir(root));
    let databases = [(); 2].map(|()| Database::empty());
    for (database, host) in databases.iter().zip(["host", "new-host"]) {
        let url =
            format!("postgres://postgres@{}/{}", database.socket_dir().replace('/', "%2F"), database.name());
        script = script.replace(&format!("postgres://user:password@{host}/name"), &url);
    }
    let file = account.write("page.sh", &script);
    symlink(root.join("examples"), account.dir().join("examples")).expect("a fresh directory");
    let node = output(&mut Command::new(root.join(".ci/npm/node")));
    let programs = [USERD, &node].map(|program| Path::new(program).parent().expect("a directory").to_owned());
    let path = env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect::<Vec<_>>();
    let path = programs.into_iter().chain([account.dir().join(".rust/bin")]).chain(path);
    let mut command = account.command("sh");
    command.uid(Uid::effective().as_raw()).gid(Gid::effective().as_raw());
    command.args(["-c", ENTER]).arg(file).arg(output(Command::new("rustc").args(["--print", "sysroot"])));
    command.arg(&account.name).env("PATH", env::join_paths(path).expect("plain names"));
    output(command.env_remove("PGHOST").env_remove("PGUSER").stdout(Stdio::piped()).stderr(Stdio::piped()))
}

/// The list of blocks that are not run is short; each entry has a reason, and is there for a block.
#[test]
fn few_blocks_are_not_run() {
    let list = include_str!("../../.ci/not-run");
    let entries: Vec<&str> = list.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(entries.len() <= 10, "{entries:?}");
    for entry in entries {
        let (beginning, reason) = entry.split_once('\t').expect("a tab");
        let is_used = documents().iter().any(|(_, text)| text.contains(&format!("\n{beginning}")));
        assert!(is_used && !reason.is_empty(), "{entry}");
    }
}

/// The tests in a shell, Python, Node and Rust, each in a directory that has nothing else.
#[test]
fn the_tests_in_any_language_run_as_pasted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let node = Command::new(root.join(".ci/npm/node")).output().expect("a shell").stdout;
    let node = Path::new(str::from_utf8(&node).expect("UTF-8").trim()).parent().expect("Node 20 or newer");
    let kept = ["HOME", "CARGO_HOME", "RUSTUP_HOME", "POSTGRES_BIN"];
    let variables: Vec<(&str, String)> =
        kept.into_iter().filter_map(|name| Some((name, env::var(name).ok()?))).collect();
    let pages = [
        (README, "\n## In your tests\n", 1),
        (include_str!("../../docs/testing.md"), "# In your tests\n", 4),
    ];
    for (page, heading, count) in pages {
        let blocks = blocks(page, heading);
        assert_eq!(blocks.len(), count, "{blocks:?}");
        for lines in blocks {
            let dir = TempDir::new();
            let lines = format!("PATH=$PATH:{}\n{lines}", node.display());
            let (code, stdout, stderr) = shell(dir.path(), &lines, &variables);
            assert_eq!(code, 0, "{lines}\n{stdout}{stderr}");
            assert!(lines.contains("userd test -- "), "{lines}");
        }
    }
}

/// The blocks of SQL beside the API, and the README's table with fields of one's own: its rows go with their users.
#[test]
fn the_sql_does_what_it_says() {
    let blocks: Vec<&str> =
        CURL.split("\n```sql\n").skip(1).map(|text| text.split("```").next().unwrap()).collect();
    let [queries, trigger, follow, lock, unlock] = blocks[..] else { panic!("{blocks:?}") };
    let (_, profiles) = README.split_once("\n```sql\n").expect("a block of SQL");
    let service = Service::start();
    service.database.run(profiles.split_once("```").expect("it ends").0);
    let (mut client, mut sql) = (service.client(), service.database.client());
    let mut rows = |text: &str| -> Vec<String> {
        let messages = sql.simple_query(text).expect("it is SQL").into_iter();
        let row = |message| match message {
            SimpleQueryMessage::Row(row) => Some(format!("{} {}", row.get(0).unwrap(), row.get(1).unwrap())),
            _ => None,
        };
        messages.filter_map(row).collect()
    };
    for (name, email) in [("Ada Lovelace", "ada@example.com"), ("Bob", "bob@old.example")] {
        let body = format!(r#"{{"name":"{name}","email":"{email}","password":"{PASSWORD}"}}"#);
        assert_eq!(client.post("/users", body).status, 201);
    }
    rows(trigger);
    assert_eq!(rows(queries), ["1 Ada Lovelace", "1 Ada Lovelace", "2 Bob"]);
    assert_eq!(client.get("/users").json()["total"], 1);
    assert_eq!(client.get("/users/2").status, 404);
    assert_eq!(client.post("/users", r#"{"name":"C","email":"c@example.com"}"#).status, 201);
    assert_eq!(client.put("/users/1", r#"{"name":"Ada"}"#).status, 200);
    assert_eq!(rows(follow), ["1 2", "2 3", "3 1"]);
    assert!(rows(follow).is_empty());
    let mut status = || client.login("ada@example.com", PASSWORD).status;
    assert_eq!(status(), 200);
    rows(lock);
    assert_eq!(status(), 401);
    rows(unlock);
    assert_eq!(status(), 200);
    assert_eq!(client.get("/users").json()["total"], 2);
    service.database.run("insert into profiles select id, '555' from users");
    assert_eq!(client.delete("/users/1").status, 204);
    assert_eq!(rows(follow), ["4 1"]);
    assert_eq!(service.database.value("select string_agg(user_id::text, ',') from profiles"), "3");
}

/// The lines with a token, against a service that asks for one.
#[test]
fn the_lines_with_a_token() {
    let service = Service::with(|config| config.api_token = Some(TOKEN.into()));
    let url = service.server.base_url();
    let (lines, _) =
        curl_blocks().into_iter().find(|(lines, _)| lines.contains("API_TOKEN")).expect("a block");
    for (token, status) in [(TOKEN, "200\n"), ("another", "401\n")] {
        let dir = TempDir::new();
        let variables = [("API_TOKEN", token.to_owned())];
        let (_, printed, _) = shell(dir.path(), &format!("users={url}/users\n{lines}"), &variables);
        assert_eq!(printed, status);
        let mode = fs::metadata(dir.path().join("token.txt")).expect("a file").permissions().mode();
        assert_eq!(mode & 0o077, 0, "others may read it");
    }
}

#[test]
fn the_documents_have_the_table_of_settings() {
    let page = include_str!("../../docs/configuration.md");
    let after = page.split_once("| Variable | Default | Meaning |\n|---|---|---|\n").unwrap().1;
    let rows: Vec<&str> = after.lines().take_while(|line| line.starts_with('|')).collect();
    let row = |setting: &Setting| {
        let default = setting.default().map(|default| format!("`{default}` ")).unwrap_or_default();
        format!("| `{}` | {default}| {} |", setting.variable, setting.help)
    };
    let expected: Vec<String> = SETTINGS.iter().map(row).collect();
    assert_eq!(rows, expected);
}

/// The lines of docs/import.md, in a directory with a file of new users.
#[test]
fn the_lines_that_export_and_import() {
    let service = Service::start();
    let mut client = service.client();
    service
        .database
        .run("insert into users (name, email) select 'n', n || '@example.com' from generate_series(1, 3) n");
    let dir = TempDir::new();
    dir.write("new-users.csv", "name,email\nZoë,zoe@example.com\nEve,eve@example.com\n");
    let lines = blocks(IMPORT, "\n## How do I export and import many users?\n")[0];
    let (code, stdout, stderr) = shell(dir.path(), lines, &[("DATABASE_URL", service.database.url())]);
    let said: Vec<&str> = stdout.lines().collect();
    assert_eq!((code, said.len()), (0, 6), "{stdout}{stderr}");
    assert_eq!(said[0], "id,name,email,createdAt,updatedAt");
    let ends = [
        "would import: 2, existing: 0, refused: 0",
        "imported: 2, existing: 0, refused: 0",
        "imported: 0, existing: 2, refused: 0",
    ];
    assert_eq!(said[3..], ends);
    assert_eq!(client.get("/users").json()["total"], 5);
}

/// Unhappy users of other systems: the name of a paragraph; its files, each a name and its lines; the tables that its
/// `psql` reads; and the users that its lines import, each a name, an address, and `yes` if `PASSWORD` logs in.
const OTHER_SYSTEMS: &str = r#"
== Auth0
-- auth0.ndjson
{"_id":{"$oid":"60425dc43519d90068f82971"},"email_verified":false,"email":"a@x.org","passwordHash":"$2bBCRYPT","password_set_date":{"$date":"2021-03-05T16:34:49.502Z"}}
{"_id":{"$oid":"60425dc43519d90068f82972"},"email":"b@x.org","passwordHash":"$2bBCRYPT"}
{"_id":{"$oid":"60425dc43519d90068f82973"},"email":"c@x.org","passwordHash":"$2bBCRYPT","blocked":true}
{"_id":{"$oid":"60425dc43519d90068f82974"},"email":null,"passwordHash":"$2bBCRYPT"}
{"_id":"own-id","email":"e@x.org","passwordHash":"$2bBCRYPT"}
-- auth0-users.ndjson
{"user_id":"auth0|60425dc43519d90068f82971","email":"a@x.org","name":"Ada","blocked":false}
{"user_id":"auth0|60425dc43519d90068f82972","email":"b@x.org","name":"","blocked":true}
{"user_id":"auth0|60425dc43519d90068f82974"}
{"user_id":"auth0|own-id","email":"e@x.org","name":"Eve","blocked":true}
{"user_id":"google-oauth2|1","email":"d@x.org","name":"Dan"}
{"user_id":"sms|2","name":"+49"}
=> Ada a@x.org yes | b@x.org b@x.org | c@x.org c@x.org | Dan d@x.org | Eve e@x.org

== Firebase
-- firebase.json
{"users":[{"localId":"1","email":"a@x.org","displayName":"Ada","passwordHash":"V1N3LQ==","salt":"r7vD3Q==","createdAt":"1520370000000","providerUserInfo":[]},
{"localId":"2","email":"b@x.org","disabled":true},{"localId":"3","email":"c@x.org","displayName":""},
{"localId":"4","phoneNumber":"+49"},{"localId":"5","email":"","displayName":"Nobody"}]}
=> Ada a@x.org | b@x.org b@x.org | c@x.org c@x.org

== Keycloak
-- keycloak.json
{"realm":"shop","clients":[{"name":"x"}],"users":[
{"username":"a","enabled":true,"firstName":"Ada","lastName":"Lovelace","email":"a@x.org","credentials":[
  {"type":"otp","secretData":"{\"value\":\"x\"}","credentialData":"{}"},
  {"type":"password","secretData":"{\"value\":\"SHA512\",\"salt\":\"c2FsdHNhbHRzYWx0\"}","credentialData":"{\"hashIterations\":1000,\"algorithm\":\"pbkdf2-sha512\"}"},
  {"type":"password-history","secretData":"{}","credentialData":"{}"}]},
{"username":"b","enabled":false,"firstName":"Mia","email":"b@x.org","credentials":[
  {"type":"password","secretData":"{\"value\":\"SHA512\",\"salt\":\"c2FsdHNhbHRzYWx0\"}","credentialData":"{\"hashIterations\":1000,\"algorithm\":\"pbkdf2-sha512\"}"}]},
{"username":"c","enabled":true,"email":"c@x.org","lastName":" ","credentials":[]},
{"username":"d","enabled":true,"email":"d@x.org","lastName":"Dee","federationLink":"ldap","credentials":[
  {"type":"password","secretData":"{\"value\":\"SHA512\",\"salt\":\"c2FsdHNhbHRzYWx0\"}","credentialData":"{\"hashIterations\":1000,\"algorithm\":\"pbkdf2-sha512\"}"}]},
{"username":"e","enabled":true,"email":"e@x.org","firstName":"Eva","credentials":[
  {"type":"password","secretData":"{\"value\":\"4Smw+8uJE9vkMuQHTI8JCch07funn1w88/v1CwyXAOw=\",\"salt\":\"c2FsdHNhbHRzYWx0\"}","credentialData":"{\"hashIterations\":1,\"algorithm\":\"argon2\",\"additionalParameters\":{\"hashLength\":[\"32\"],\"memory\":[\"8\"],\"type\":[\"id\"],\"version\":[\"1.3\"],\"parallelism\":[\"1\"]}}"}]},
{"username":"service-account-shop","enabled":true,"serviceAccountClientId":"shop"},
{"username":"service-account-till","enabled":true,"email":"service-account-till@placeholder.org","serviceAccountClientId":"till"},
{"username":"f","enabled":true,"email":"","firstName":"No"}],"roles":{}}
=> Ada Lovelace a@x.org yes | Mia b@x.org | c@x.org c@x.org | Dee d@x.org | Eva e@x.org yes

== Okta
-- okta.json
[{"id":"00u1","status":"ACTIVE","created":"2013-06-24T16:39:18.000Z","profile":{"firstName":"Ada","lastName":"Lovelace","email":"a@x.org","login":"a@x.org"},"credentials":{"password":{}}},
{"id":"00u2","status":"SUSPENDED","created":"2013-06-24T16:39:18.000Z","profile":{"firstName":"Mia","lastName":null,"email":"b@x.org"}},
{"id":"00u3","profile":{"email":"c@x.org"}},{"id":"00u4","profile":{"login":"nobody"}}]
=> Ada Lovelace a@x.org | Mia b@x.org | c@x.org c@x.org

== WordPress
-- wordpress.ndjson
{"name": "\"Big", "email": "a@x.org", "passwordHash": "$P$6abcdefghRJFCMvnAbZH2hCiFPRxpk.", "status": 0}
{"name": "Mid\tTab\\", "email": "b@x.org", "passwordHash": "$wp$2y$05$abcdefghijklmnopqrstuu9iY1gyjA3k6CGptWJJ9nIT22tG/wV8K", "status": 0}
{"name": "Tall\"", "email": "c@x.org", "passwordHash": "$P$6abcdefghRJFCMvnAbZH2hCiFPRxpk.", "status": 1}
{"name": "", "email": "d@x.org", "passwordHash": "", "status": 0}
{"name": "e", "email": "", "passwordHash": "x", "status": 0}
=> "Big a@x.org yes | Mid	Tab\ b@x.org yes | Tall" c@x.org | d@x.org d@x.org

== Django
-- django.json
[{"model":"auth.user","pk":1,"fields":{"password":"pbkdf2_sha256$1000$saltsaltsalt$F7o7+5VTVzFAO998X6s3AHrDsJVdMiIlgndIMe19NvY=","username":"ada","email":"a@x.org","is_active":true,"date_joined":"2020-02-29T23:59:59.123Z"}},
{"model":"auth.user","pk":2,"fields":{"password":"pbkdf2_sha256$1000$saltsaltsalt$F7o7+5VTVzFAO998X6s3AHrDsJVdMiIlgndIMe19NvY=","username":"bob","email":"b@x.org","is_active":false,"date_joined":"2020-02-29T23:59:59Z"}},
{"model":"auth.user","pk":3,"fields":{"password":"!DbIJB7lN2IsImPZNzTjN1Ik8lfEMVAhtzXWGHVLM","username":"","email":"c@x.org","is_active":true,"date_joined":"2020-02-29T23:59:59Z"}},
{"model":"auth.user","pk":4,"fields":{"password":"","username":"dan","email":"d@x.org"}},
{"model":"auth.user","pk":5,"fields":{"password":"!","username":"eve","email":"","is_active":true,"date_joined":"2020-02-29T23:59:59Z"}},
{"model":"auth.group","pk":1,"fields":{"name":"g","permissions":[]}}]
=> ada a@x.org yes | bob b@x.org | c@x.org c@x.org | dan d@x.org

== Rails
create table users (name text, email text, encrypted_password text, created_at timestamp default '2020-02-29 23:59:59');
insert into users values ('"Ada", \', 'a@x.org', '$2aBCRYPT'), ('', 'b@x.org', '$2aBCRYPT'), (null, 'c@x.org', ''), ('Dan', 'd@x.org', null), ('Eve', '', ''), ('Fay', null, '')
=> "Ada", \ a@x.org yes | b@x.org b@x.org yes | c@x.org c@x.org | Dan d@x.org

== Laravel
-- laravel.ndjson
{"name": "Ada", "email": "a@x.org", "passwordHash": "$2yBCRYPT"}
{"name": "", "email": "b@x.org", "passwordHash": null}
{"name": null, "email": "C@X.org", "passwordHash": ""}
{"name": "Dan", "email": null, "passwordHash": "$2yBCRYPT"}
{"name": "Eve", "email": "", "passwordHash": "$2yBCRYPT"}
=> Ada a@x.org yes | b@x.org b@x.org | C@X.org C@X.org

== Supabase
create schema auth;
create table auth.users (email text, encrypted_password text, raw_user_meta_data jsonb, created_at timestamptz default now(), banned_until timestamptz, deleted_at timestamptz);
insert into auth.users (email, encrypted_password, raw_user_meta_data) values ('a@x.org', '$2aBCRYPT', '{"name":"Ada"}'), ('b@x.org', '$2aBCRYPT', '{"name":""}'), ('c@x.org', '$2aBCRYPT', null), ('d@x.org', '', '{"name":"Dan"}'), ('e@x.org', '$2aBCRYPT', '{}'), (null, null, '{}'), ('', '', '{}');
update auth.users set banned_until = now() + case email when 'b@x.org' then interval '1 day' else '-1 day' end where email in ('b@x.org', 'c@x.org');
update auth.users set deleted_at = now() where email = 'e@x.org'
=> Ada a@x.org yes | b@x.org b@x.org | c@x.org c@x.org yes | Dan d@x.org
"#;

/// The lines of docs/import.md on unhappy users of each system: who is there then, under which name, and who logs in.
/// Each paragraph says how many come.
#[test]
fn files_of_other_systems() {
    let systems: Vec<&str> = OTHER_SYSTEMS.split("\n== ").skip(1).collect();
    assert_eq!(IMPORT.matches("\n**").count(), systems.len());
    let service = Service::start();
    let (mut client, url) = (service.client(), service.database.url());
    for text in systems {
        let text = text.replace("BCRYPT", BCRYPT).replace("SHA512", SHA512);
        let (text, expected) = text.split_once("\n=> ").expect("users");
        let (system, text) = text.split_once('\n').expect("a name");
        service.database.run("delete from users");
        let (dir, other) = (TempDir::new(), Database::empty());
        let (_, paragraph) = IMPORT.split_once(&format!("\n**{system}**: ")).expect("a paragraph");
        let (prose, _) = paragraph.split_once("```").expect("its lines");
        let run = |line: &str| {
            let variables = [("DATABASE_URL", url.clone()), ("SUPABASE_URL", other.url())];
            let (_, stdout, stderr) = shell(dir.path(), line, &variables);
            assert_eq!(stderr, "", "{system}");
            stdout
        };
        let prose = prose.replace('\n', " ").replace(" shop >", " \"$SUPABASE_URL\" >");
        let commands = |program: &str| {
            let of_program = move |code: &&str| code.starts_with(&format!("{program} "));
            prose.split('`').skip(1).step_by(2).filter(of_program).map(str::to_owned).collect::<Vec<_>>()
        };
        for file in text.strip_prefix("-- ").into_iter().flat_map(|files| files.split("\n-- ")) {
            let (name, lines) = file.split_once('\n').expect("a name");
            dir.write(name, &format!("{lines}\n"));
        }
        if !text.starts_with("-- ") {
            other.run(text);
            commands("psql").iter().for_each(|line| assert_eq!(run(line), ""));
        }
        let mut users: Vec<&str> = expected.trim_end().split(" | ").collect();
        let counted: String = commands("jq").iter().map(|line| run(line)).collect();
        assert!(counted.is_empty() || counted == format!("{}\n", users.len()), "{system}: {counted}");
        let lines = blocks(IMPORT, &format!("\n**{system}**: "))[0];
        assert_eq!(run(lines), format!("imported: {}, existing: 0, refused: 0\n", users.len()), "{system}");
        let page = client.get("/users").json();
        let mut found: Vec<String> = page["data"]
            .as_array()
            .expect("users")
            .iter()
            .map(|user| {
                let [name, email] = ["name", "email"].map(|field| user[field].as_str().expect("a text"));
                let opens = if client.opens(email, PASSWORD) { " yes" } else { "" };
                format!("{name} {email}{opens}")
            })
            .collect();
        // Rows of a table come in no order.
        found.sort();
        users.sort();
        assert_eq!(found, users, "{system}");
    }
}

/// The blocks of docs/proxy.md for nginx and Caddy are parts of the files that `.ci/proxies` runs.
#[test]
fn the_proxies_are_those_that_run() {
    let page = include_str!("../../docs/proxy.md");
    for (fence, file) in [
        ("\n```nginx userd.nginx\n", include_str!("../../examples/deploy/nginx.conf")),
        ("\n```caddy Caddyfile\n", include_str!("../../examples/deploy/Caddyfile")),
    ] {
        let (_, block) = page.split_once(fence).expect("a block");
        let lines: Vec<&str> = block.split("```").next().expect("lines").lines().map(str::trim).collect();
        let missing: Vec<_> =
            lines.iter().filter(|line| !line.is_empty() && !file.contains(**line)).collect();
        assert!(lines.len() > 5 && missing.is_empty(), "{missing:?}");
    }
}
