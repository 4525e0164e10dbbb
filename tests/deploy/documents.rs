//! The documents: where a person finds what, links that lead somewhere, and the lines of docs/curl.md, which print what it
//! says.

use crate::support::{PASSWORD, Service, TOKEN, TempDir, masked};
use postgres::SimpleQueryMessage;
use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

const README: &str = include_str!("../../README.md");
const SECURITY: &str = include_str!("../../docs/security.md");
const CURL: &str = include_str!("../../docs/curl.md");

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
    // Tests that documents name: files, and in the table of docs/security.md modules and functions.
    let code = |text: &'static str| text.split('`').skip(1).step_by(2);
    let files = code(README).filter(|code| code.starts_with("tests/")).map(|file| (file.to_owned(), ""));
    let rows = SECURITY.lines().filter(|line| line.starts_with("| ")).skip(1);
    let named = rows.flat_map(|row| code(row.rsplit(" | ").next().expect("a cell")));
    let tests = named.filter(|name| name.contains("::") || !name.contains('_')).map(|name| {
        let (module, function) = name.split_once("::").unwrap_or((name, ""));
        (format!("tests/it/{module}.rs"), function)
    });
    for (file, function) in files.chain(tests) {
        let text = fs::read_to_string(root.join(&file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(text.contains(&format!("fn {function}")), "{file}: {function}");
    }
    let missing: Vec<_> =
        documents.iter().map(|(name, _)| name).filter(|name| !listed.contains(*name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Lines for a shell, and what they print.
fn blocks() -> Vec<(&'static str, &'static str)> {
    let block = |text: &'static str| {
        let (lines, rest) = text.split_once("```\n").expect("it ends");
        let printed = rest.split_once("```text\n").and_then(|(_, text)| text.split_once("```\n"));
        (lines, printed.map_or("", |(printed, _)| printed))
    };
    CURL.split("\n```sh\n").skip(1).map(block).collect()
}

#[test]
fn the_lines_print_what_it_says() {
    let (service, dir) = (Service::start(), TempDir::new());
    let url = service.server.base_url();
    let blocks = blocks();
    assert!(blocks.len() > 5, "{blocks:?}");
    // One shell runs them all.
    let script: String = blocks.iter().map(|(lines, _)| format!("{lines}echo '=='\n")).collect();
    let mut shell = Command::new("sh");
    shell.args(["-ec", &script.replace("http://localhost:3000", url)]).current_dir(dir.path());
    let output = shell.env("no_proxy", "*").stdin(Stdio::null()).output().expect("a shell");
    let (printed, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{printed}");
    let printed = printed.replace('\r', "");
    let mut found = printed.split("==\n");
    for (lines, expected) in blocks {
        let found = found.next().unwrap_or_default();
        let masked = |text: &str| text.lines().map(masked).collect::<Vec<_>>();
        assert_eq!(masked(found), masked(expected), "{lines}\n{said}");
    }
    assert_eq!(said, "");
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
    let (lines, _) = blocks().into_iter().find(|(lines, _)| lines.contains("API_TOKEN")).expect("a block");
    for (token, status) in [(TOKEN, "200\n"), ("another", "401\n")] {
        let dir = TempDir::new();
        let mut shell = Command::new("sh");
        shell.args(["-ec", &format!("users={url}/users\n{lines}")]).current_dir(dir.path());
        let output = shell.env("no_proxy", "*").env("API_TOKEN", token).output().expect("a shell");
        assert_eq!(String::from_utf8_lossy(&output.stdout), status);
        let mode = fs::metadata(dir.path().join("token.txt")).expect("a file").permissions().mode();
        assert_eq!(mode & 0o077, 0, "others may read it");
    }
}
