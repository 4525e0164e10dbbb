//! The documents: where a person finds what, links that lead somewhere, the table of settings, and blocks that run as pasted
//! from top to bottom of each page.

use crate::support::{Account, Client, Database, PASSWORD, Service, TOKEN, TempDir, USERD, blocks, shell};
use nix::unistd::{Gid, Uid};
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
use userd::{
    Config, Server,
    internals::{SETTINGS, Setting},
};

const CURL: &str = include_str!("../../docs/curl.md");
const EXCEL: &str = include_str!("../../docs/excel.md");
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

/// Pages whose blocks run here from top to bottom, as `.ci/blocks` says.
const PAGES: [&str; 9] = [
    "README.md",
    "docs/configuration.md",
    "docs/curl.md",
    "docs/excel.md",
    "docs/login.md",
    "docs/observability.md",
    "docs/offboarding.md",
    "docs/testing.md",
    "docs/twice.md",
];

/// Pages with blocks for several servers, or with files of other systems, which tests of their own run.
const OTHER_PAGES: [&str; 7] = [
    "CONTRIBUTING.md",
    "docs/backup.md",
    "docs/import.md",
    "docs/install.md",
    "docs/operations.md",
    "docs/performance.md",
    "docs/proxy.md",
];

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
        run_page(
            page,
            &Account::new(),
            &["host/name", "new-host/name"].map(|name| (name, Database::empty())),
        );
    }
}

/// Returns the script that runs the blocks of a page.
fn blocks_of(page: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    printed(Command::new(root.join(".ci/blocks")).arg(page).current_dir(root))
}

/// Runs a program, which must succeed, and returns what it has printed.
fn printed(command: &mut Command) -> String {
    let output = command.output().expect("a program");
    let [printed, said] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{command:?}:\n{printed}{said}");
    printed.trim_end().to_owned()
}

/// Runs the blocks of a page in the account's directory. Each of the databases stands for one that the page names.
fn run_page(page: &str, account: &Account, databases: &[(&str, Database)]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut script = blocks_of(page);
    for (name, database) in databases {
        let host = database.socket_dir().replace('/', "%2F");
        let url = format!("postgres://postgres@{host}/{}", database.name());
        for login in ["user:password", "user"] {
            script = script.replace(&format!("postgres://{login}@{name}"), &url);
        }
    }
    let file = account.write("page.sh", &script);
    symlink(root.join("examples"), account.dir().join("examples")).expect("a fresh directory");
    let node = printed(&mut Command::new(root.join(".ci/npm/node")));
    let programs = [USERD, &node].map(|program| Path::new(program).parent().expect("a directory").to_owned());
    let path = env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect::<Vec<_>>();
    let path = programs.into_iter().chain([account.dir().join(".rust/bin")]).chain(path);
    let mut command = account.command("sh");
    command.uid(Uid::effective().as_raw()).gid(Gid::effective().as_raw());
    command.args(["-c", ENTER]).arg(file).arg(printed(Command::new("rustc").args(["--print", "sysroot"])));
    command.arg(&account.name).env("PATH", env::join_paths(path).expect("plain names"));
    printed(command.env_remove("PGHOST").env_remove("PGUSER").stdout(Stdio::piped()).stderr(Stdio::piped()));
}

/// The list of blocks that are not run is short; each entry has a reason, and is there for a block.
#[test]
fn few_blocks_are_not_run() {
    let list = include_str!("../../.ci/not-run");
    let entries: Vec<&str> = list.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(entries.len() <= 10, "{entries:?}");
    for entry in entries {
        let (beginning, reason) = entry.split_once('\t').expect("a tab");
        let mut lines = documents()
            .into_iter()
            .flat_map(|(_, text)| text.lines().map(|line| line.trim_start().to_owned()).collect::<Vec<_>>());
        let is_used = lines.any(|line| line.starts_with(beginning));
        assert!(is_used && !reason.is_empty(), "{entry}");
    }
}

/// Each block without a mark is run by a test.
#[test]
fn every_block_runs() {
    for (page, _) in documents() {
        let has_blocks = blocks_of(&page).contains("\necho '== ");
        let is_run = PAGES.contains(&page.as_str()) || OTHER_PAGES.contains(&page.as_str());
        assert!(is_run || !has_blocks, "{page} is in no list");
    }
}

/// The lines with a token, against a service that asks for one.
#[test]
fn the_lines_with_a_token() {
    let service = Service::with(|config| config.api_token = Some(TOKEN.into()));
    let url = service.server.base_url();
    let [package, _, own] = blocks(CURL, "\n## With a token\n")[..] else { panic!("three blocks") };
    let package = format!("sudo() {{ \"$@\"; }}\n{}", package.replace("/etc/", ""));
    let (_, request) = own.split_once('\n').expect("two lines");
    for (token, lines, status) in [
        (TOKEN, own, "200\n"),
        ("another", own, "401\n"),
        (TOKEN, &(package.clone() + request), "200\n"),
        ("another", &(package + request), "401\n"),
    ] {
        let dir = TempDir::new();
        dir.write("userd.env", &format!("HOST=0.0.0.0\nAPI_TOKEN=\"{token} old\"\n"));
        let variables = [("API_TOKEN", token.to_owned())];
        let (_, printed, _) = shell(dir.path(), &format!("users={url}/users\n{lines}"), &variables);
        assert_eq!(printed, status);
        let mode = fs::metadata(dir.path().join("token.txt")).expect("a file").permissions().mode();
        assert_eq!(mode & 0o077, 0, "others may read it");
    }
}

/// The lines that open psql leave the password of `DATABASE_URL` out, because other users may read the arguments of psql.
#[test]
fn the_password_is_no_argument_of_psql() {
    let page = include_str!("../../docs/offboarding.md");
    let is_used = |line: &&str| line.contains("DATABASE_URL") && line.contains("`psql \"");
    let lines: Vec<_> =
        page.lines().filter(is_used).map(|row| row.rsplit('`').nth(1).expect("a line")).collect();
    assert_eq!(lines.len(), 2);
    for (url, expected) in [
        ("postgres://app:s%40x@h:5432/d?sslmode=require", "postgres://app@h:5432/d?sslmode=require"),
        ("postgresql://app@h/d?password=s&sslmode=require", "postgresql://app@h/d?sslmode=require"),
        ("postgres:///d", "postgres:///d"),
        ("host=h user=app password=s dbname=d", "host=h user=app dbname=d"),
    ] {
        for line in &lines {
            let dir = TempDir::new();
            dir.write("userd.env", &format!("PORT=3000\nDATABASE_URL=\"{url}\"\n"));
            let line = line.replace("/etc/", "");
            let lines = format!("sudo() {{ \"$@\"; }}\npsql() {{ echo \"$#\" \"$1\"; }}\n{line}");
            let (_, printed, _) = shell(dir.path(), &lines, &[("DATABASE_URL", url.to_owned())]);
            assert_eq!(printed, format!("1 {expected}\n"), "{line}");
        }
    }
}

/// The lines for the Debian package import a sheet that the service's account may not open. They delete it after an
/// import that has succeeded, and only then.
#[test]
fn a_sheet_for_the_debian_package() {
    let which = blocks(IMPORT, "\n## Say which userd you have\n");
    let (service, account, dir) = (Service::start(), Account::new(), TempDir::new());
    let settings = account.write("userd.env", &format!("DATABASE_URL={}\n", service.database.url()));
    let which = which[0].replace("/etc/userd.env", settings.to_str().expect("UTF-8"));
    let become_account = if Uid::effective().is_root() {
        format!("setpriv --reuid {0} --regid {0} --clear-groups", account.name)
    } else {
        "command".to_owned()
    };
    let (_, sheet) = EXCEL.split_once("\n```csv people.csv\n").expect("a sheet");
    let sheet = sheet.split("```").next().expect("rows");
    let protect = blocks(EXCEL, "\n## 1. Save the sheet\n")[0];
    let [look, correct] = blocks(EXCEL, "\n## 3. Look what would happen\n")[..] else { panic!("two blocks") };
    let map = look.lines().next().expect("a line");
    let import = blocks(EXCEL, "\n## 4. Import\n")[0];
    let sudo = format!("sudo() {{ shift 2; {become_account} \"$@\"; }}");
    for (correction, code, users) in [("", 1, "0"), (correct, 0, "3")] {
        dir.write("people.csv", sheet);
        let lines = format!("{sudo}\n{protect}\n{which}\n{correction}\n{map}\n{import}");
        let ended = shell(dir.path(), &lines, &[]);
        assert_eq!(ended.0, code, "{ended:?}");
        assert_eq!(service.database.value("select count(*) from users"), users);
        assert!(dir.path().join("people.csv").exists(), "the reader has not looked yet");
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

/// Unhappy users of other systems: the name of a section; its files, each a name and its lines; the tables that its
/// `psql` reads; and the users that its lines import, each a name, an address, and `yes` if `PASSWORD` logs in.
const OTHER_SYSTEMS: &str = r#"
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

== WordPress
-- wordpress.ndjson
{"name": "\"Big", "email": "a@x.org", "passwordHash": "$P$6abcdefghRJFCMvnAbZH2hCiFPRxpk."}
{"name": "Mid\tTab\\", "email": "b@x.org", "passwordHash": "$wp$2y$05$abcdefghijklmnopqrstuu9iY1gyjA3k6CGptWJJ9nIT22tG/wV8K"}
{"name": "Tall\"", "email": "c@x.org", "passwordHash": null}
{"name": "d@x.org", "email": "d@x.org", "passwordHash": null}
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
{"name": "b@x.org", "email": "b@x.org", "passwordHash": null}
{"name": "C@X.org", "email": "C@X.org", "passwordHash": null}
=> Ada a@x.org yes | b@x.org b@x.org | C@X.org C@X.org
"#;

/// The lines of docs/import.md on unhappy users of each system: who is there then, under which name, and who logs in.
#[test]
fn users_of_other_systems() {
    let account = Account::new();
    let databases = ["host/name", "new-host/name", "host/rails"].map(|name| (name, Database::empty()));
    let of_page = [
        "Zoë zoe@example.com",
        "Eve eve@example.com",
        "1 1@md5.example",
        "2 2@md5.example",
        "3 3@md5.example",
    ];
    let mut expected = of_page.map(str::to_owned).to_vec();
    let hash = |n, hash| format!(r#"{{"name":"{n}","email":"{n}@md5.example","passwordHash":{hash}}}"#);
    let md5 = r#""5f4dcc3b5aa765d61d8327deb882cf99""#;
    account.write("users.ndjson", &[hash(1, "null"), hash(2, md5), hash(3, md5)].join("\n"));
    let systems: Vec<&str> = OTHER_SYSTEMS.split("\n== ").skip(1).collect();
    assert_eq!(IMPORT.matches("\n## From ").count(), systems.len());
    for text in systems {
        let (system, text) = text.split_once('\n').expect("a name");
        assert!(IMPORT.contains(&format!("\n## From {system}\n")), "{system}");
        let domain = format!("{}.example", system.to_lowercase());
        let text = text.replace("BCRYPT", BCRYPT).replace("SHA512", SHA512).replace("x.org", &domain);
        let (text, users) = text.split_once("\n=> ").expect("users");
        expected.extend(users.trim_end().split(" | ").map(str::to_owned));
        if let Some(files) = text.strip_prefix("-- ") {
            for file in files.split("\n-- ") {
                let (name, lines) = file.split_once('\n').expect("a name");
                account.write(name, &format!("{lines}\n"));
            }
        } else {
            let name = format!("host/{}", system.to_lowercase());
            databases.iter().find(|(of, _)| *of == name).expect("a database").1.run(text);
        }
    }
    run_page("docs/import.md", &account, &databases);
    let config = Config { auth_attempts: 0, ..databases[0].1.config() };
    let server = Server::start(config).expect("a server starts");
    let mut client = Client::new(server.base_url());
    let page = client.get("/users?perPage=1000").json();
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
    expected.sort();
    assert_eq!(found, expected);
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
