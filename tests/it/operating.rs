//! Tests the commands of an operator: `migrate`, `check` and `config`, two versions beside each other, a database that has users of
//! another program, and completion in a shell.

use crate::support::{
    ADA, DATABASE_PASSWORD, Database, Ended, PASSWORD, Process, TempDir, blocks, every_verb, last_migration,
    shell,
};

const OPERATIONS: &str = include_str!("../../docs/operations.md");

/// Runs a command with these variables. Returns its exit code and what it has written.
fn userd(arguments: &[&str], variables: &[(&str, &str)]) -> Ended {
    Process::start(arguments, variables).ended()
}

/// Runs a command on the database, with further variables.
fn userd_on(database: &Database, arguments: &[&str], variables: &[(&str, &str)]) -> Ended {
    let url = database.url();
    userd(arguments, &[&[("DATABASE_URL", url.as_str())], variables].concat())
}

/// Returns a text that differs if a table or an index of the schema `public` is made, dropped or rewritten.
fn schema_state(database: &Database) -> String {
    database.value(
        "select string_agg(format('%s %s %s', oid, relname, relfilenode), ',' order by oid) \
         from pg_class where relnamespace = 'public'::regnamespace",
    )
}

// Tests of migrations

#[test]
fn migrations_without_a_service() {
    let database = Database::empty();
    // With --migrate=off, a start names the migrations that are missing, and changes nothing.
    let (code, _, stderr) = userd_on(&database, &["--migrate=off"], &[]);
    assert_eq!(code, 1);
    let line = stderr.lines().last().unwrap();
    assert!(line.starts_with("userd: the database lacks V1__users, V2__user_counts, "), "{line}");
    assert!(line.ends_with("; `userd migrate` applies what is missing"), "{line}");
    assert_eq!(schema_state(&database), "null");

    let (code, stdout, stderr) = userd_on(&database, &["migrate"], &[]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(stdout.starts_with("applied V1__users\napplied V2__user_counts\n"), "{stdout}");
    let history = "select count(*) from refinery_schema_history";
    assert_eq!(stdout.lines().count().to_string(), database.value(history));
    assert_eq!(userd_on(&database, &["migrate"], &[]), (0, "nothing to apply\n".to_owned(), String::new()));
    let address = [("HOST", "127.0.0.1"), ("PORT", "0"), ("DATABASE_URL", &database.url())];
    let mut process = Process::start(&["--migrate=off"], &address);
    assert_eq!(process.client().get("/users").status, 200);
}

/// A newer release migrates the tables of an older release that goes on to serve. If the migration bounds its wait for a lock, the newer
/// release ends after this time, and writers go on. The time-outs of the database do not end the migration. Statements that the older
/// release has prepared stay valid.
#[test]
fn an_older_release_goes_on_beside_a_newer_one() {
    let database = Database::empty();
    let mut older = Process::on(&database, &[]);
    let url = older.wait_for_url();
    every_verb(&url, "before");
    for bound in ["statement_timeout", "idle_in_transaction_session_timeout"] {
        database.run(&format!("alter database {} set {bound} = '1s'", database.name()));
    }
    let next = TempDir::next_release(
        "select pg_sleep(1.5); set local lock_timeout = '200ms'; \
         alter table users add column next int, alter column email type varchar(300);
         \ncreate or replace function user_version() returns trigger language plpgsql as $$ begin \
             new.version := -1 - floor(random() * float8 '1e15')::bigint; return new; end $$",
        true,
    );
    let mut writer = database.transaction(
        "set idle_in_transaction_session_timeout = 0; \
         insert into users (name, email) values ('n', 'n@example.com')",
    );
    let start = || Process::on(&database, &[("MIGRATIONS_DIR", next.name())]);
    let (code, _, stderr) = start().ended();
    assert!(code == 1 && stderr.contains("canceling statement due to lock timeout (55P03)"), "{stderr}");
    assert_eq!(older.client().post("/users", ADA).status, 201);
    writer.batch_execute("commit").unwrap();
    let mut newer = start();
    for email in ["n@example.com", "ada@example.com"] {
        assert_eq!(newer.client().get(&format!("/users?email={email}")).json()["total"], 1);
    }
    newer.logs(&format!("applied migration V{}", last_migration() + 1));
    every_verb(&url, "after");
    // A change by the older release fires the trigger function of the newer release.
    let ada = older.client().get("/users?email=ada@example.com").json()["data"][0]["id"].clone();
    let path = format!("/users/{}", ada.as_str().unwrap());
    assert_eq!(older.client().request("PUT", &path, &[], r#"{"name":"A"}"#).status, 200);
    let tag = newer.client().get(&path).header("ETag").map(str::to_owned);
    assert!(tag.as_ref().is_some_and(|tag| tag.starts_with("\"-")), "{tag:?}");
    let mut restarted = Process::on(&database, &[]);
    assert_eq!(restarted.client().get("/users?email=ada@example.com").json()["total"], 1);
}

/// A migration replaces no function of another program.
#[test]
fn a_function_of_another_program_is_not_replaced() {
    let database = Database::create();
    database.run("create function audit() returns int language sql as 'select 7'");
    let made = "create or replace function audit() returns int language sql as 'select 8'";
    let next = TempDir::next_release(&format!("select 1;\n{made}"), true);
    let (code, _, stderr) = userd_on(&database, &["migrate"], &[("MIGRATIONS_DIR", next.name())]);
    assert!(code == 1 && stderr.contains("audit") && stderr.contains("of another program"), "{stderr}");
    assert_eq!(database.value("select audit()"), "7");
}

/// An older release refuses a database whose newest migration does not say that older releases may use it. The opposite case is in
/// `an_older_release_goes_on_beside_a_newer_one`.
#[test]
fn a_database_of_a_newer_release() {
    let database = Database::empty();
    let next = TempDir::next_release("alter table users rename name to full_name", false);
    assert_eq!(userd_on(&database, &["migrate"], &[("MIGRATIONS_DIR", next.name())]).0, 0);
    for arguments in [&["migrate"][..], &["export"], &["--port=0"]] {
        let (code, stdout, stderr) = userd_on(&database, arguments, &[("HOST", "127.0.0.1")]);
        assert_eq!((code, stdout.as_str()), (1, ""));
        let line = stderr.lines().last().unwrap();
        let (last, next) = (last_migration(), last_migration() + 1);
        let expected =
            format!("a newer userd has migrated it, to migration {next}; this one knows those up to {last}");
        assert!(line.contains(&expected), "{line}");
        database.run("comment on table refinery_schema_history is null");
    }
    let (code, stdout, _) = userd_on(&database, &["check"], &[]);
    assert!(code == 1 && stdout.contains("problem  migrations: a newer userd has migrated it"), "{stdout}");
}

// Tests of `userd check`

#[test]
fn a_check_changes_nothing() {
    let database = Database::create();
    let before = schema_state(&database);
    let (code, stdout, stderr) = userd_on(&database, &["check"], &[]);
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    let expected = [
        "ok       configuration: every variable can be used",
        "ok       database: connected to database",
        "ok       database: PostgreSQL ",
        "ok       migrations: all are applied",
        "ok       service: creates, reads, changes and deletes do what they should",
    ];
    assert_eq!(stdout.lines().count(), expected.len(), "{stdout}");
    for (line, expected) in stdout.lines().zip(expected) {
        assert!(line.starts_with(expected), "{line}");
    }
    assert_eq!(schema_state(&database), before);
    database.run(&format!("alter database {} set default_transaction_read_only = on", database.name()));
    let empty = Database::empty();
    let read_only =
        "note     service: changes were not tried: it is a standby, or default_transaction_read_only is on\n";
    for (database, arguments, code, line) in [
        (&database, &["check"][..], 0, read_only),
        (&empty, &["check"], 0, "note     migrations: a start applies what is missing: V1__users, "),
        (
            &empty,
            &["check", "--migrate=off"],
            1,
            "problem  migrations: `userd migrate` applies what is missing: V1__",
        ),
    ] {
        let (found, stdout, _) = userd_on(database, arguments, &[]);
        assert!(found == code && stdout.contains(line), "{found}: {stdout}");
    }
    assert_eq!(schema_state(&empty), "null");
}

#[test]
fn a_check_of_a_configuration_that_cannot_be_used() {
    let away =
        [("DATABASE_URL", "postgres://u:pa55-of-the-database@127.0.0.1:1/d"), ("DB_CONNECT_TIMEOUT", "0.1")];
    for (variables, expected) in [
        (&[("LOG_LEVEL", "loud")][..], "problem  configuration: LOG_LEVEL: must be one of"),
        (&[("MIGRATIONS_DIR", "/nowhere/at/all")], "problem  configuration: MIGRATIONS_DIR: "),
        (&away, "problem  database: cannot connect to the database: "),
    ] {
        let (code, stdout, stderr) = userd(&["check"], &[&away, variables].concat());
        assert_eq!((code, stderr.as_str()), (1, ""), "{stdout}");
        assert!(stdout.lines().any(|line| line.starts_with(expected)), "{stdout}");
    }
}

/// A check has one problem for a missing table or column, which is PostgreSQL's error. No statement mends it.
#[test]
fn a_check_finds_what_is_missing() {
    for (sql, expected) in [
        ("drop table credentials", "ERROR: relation \"credentials\" does not exist (42P01)"),
        ("alter table users rename version to v", "ERROR: column \"version\" does not exist (42703)"),
    ] {
        let database = Database::create();
        database.run(sql);
        let (code, stdout, stderr) = userd_on(&database, &["check", "--counts"], &[]);
        assert_eq!((code, stderr.as_str()), (1, ""), "{sql}: {stdout}");
        let problems: Vec<_> = stdout.lines().filter(|line| line.starts_with("problem  service: ")).collect();
        assert_eq!(problems, [format!("problem  service: requests get 500: {expected}")], "{sql}: {stdout}");
    }
}

// Tests of the configuration

/// A connection string may have quotes, which `docker run --env-file` keeps, a line end of Windows or of a file, or a byte order mark.
#[test]
fn connection_strings_as_they_arrive() {
    let database = Database::create();
    let (url, dir) = (database.url(), TempDir::new());
    for text in
        [format!("\"{url}\""), format!("'{url}'\r\n"), format!(" {url} "), format!("\u{feff}\"{url}\"\r\n")]
    {
        let (code, stdout, _) = userd(&["check"], &[("DATABASE_URL", &text)]);
        assert!(code == 0 && stdout.contains("connected to"), "{text:?}: {stdout}");
        dir.write("url", &text);
        let file = dir.path().join("url");
        let (code, stdout, _) = userd(&["check"], &[("DATABASE_URL_FILE", file.to_str().unwrap())]);
        assert!(code == 0 && stdout.contains("connected to"), "{text:?}: {stdout}");
    }
    for (parameter, remedy) in [
        ("ssl=false", "write sslmode=disable"),
        ("ssl=1", "sslmode=require"),
        ("sslmode=no-verify", "write sslmode=require"),
    ] {
        let (code, _, stderr) =
            userd(&[], &[("DATABASE_URL", &format!("postgres://u:hunter2@127.0.0.1/d?{parameter}"))]);
        assert!(code == 2 && stderr.contains(remedy) && !stderr.contains("hunter2"), "{parameter}: {stderr}");
    }
    // Kubernetes sets PORT to such a URL in some pods. PORT has no effect if HOST is a Unix socket.
    let host = format!("unix:{}/socket", dir.name());
    let variables = [("DATABASE_URL", &*url), ("HOST", &host), ("PORT", "tcp://10.0.0.1:3000")];
    let mut process = Process::start(&[], &variables);
    assert!(process.wait_for_url().contains("/socket"), "{}", process.stderr());
}

/// A setting comes from an argument, else from a variable that is not empty, else from the file of `--env-file`. The file is used as
/// docs/operations.md shows it, and may have variables of other programs.
#[test]
fn the_settings_in_force() {
    let database = Database::create();
    database.run("insert into users (name, email) values ('Ada', 'ada@example.com')");
    let dir = TempDir::new();
    let lines = format!("# A comment\nDATABASE_URL=\"{}\"\nWORKERS=3\nAPI_TOKEN=secret\n", database.url());
    dir.write("userd.env", &(lines + "MAIL_HOST=x\n"));
    let file = dir.path().join("userd.env");
    let file = file.to_str().unwrap();
    let line = OPERATIONS.lines().find_map(|line| line.strip_prefix("sudo -u userd userd "));
    let line = line.expect("a line").replace("/etc/userd.env", file);
    let arguments: Vec<&str> = line.split(' ').filter(|word| ![">", "users.ndjson"].contains(word)).collect();
    let (code, stdout, stderr) = userd(&arguments, &[]);
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
    assert!(stdout.contains("\"email\":\"ada@example.com\""), "{stdout}");
    let (code, stdout, _) = userd(&["check", "--env-file", file], &[]);
    assert!(code == 0 && !stdout.contains("MAIL_HOST"), "{stdout}");
    for (value, workers) in [("", "3 --env-file"), ("4", "4 environment")] {
        let variables =
            [("WORKERS", value), ("PORT", "8080"), ("HOST", ""), ("PGPASSWORD", DATABASE_PASSWORD)];
        let (code, stdout, stderr) = userd(&["config", "--env-file", file, "--port", "81"], &variables);
        assert_eq!((code, stderr.as_str()), (0, ""));
        assert_eq!(stdout.lines().count(), userd::internals::SETTINGS.len());
        for row in [
            &format!("WORKERS {workers}"),
            "DATABASE_URL *** --env-file",
            "API_TOKEN *** --env-file",
            "PORT 81 argument",
            "HOST localhost default",
            "DB_HOST - no effect",
            "LOG_LEVEL info default",
        ] {
            let mut rows = stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
            assert!(rows.any(|found| found == row), "{row}: {stdout}");
        }
    }
    assert_eq!(userd(&["config"], &[("WORKERS", "0")]).0, 2);

    dir.write("userd.env", "DATABASE_URL=x\nsecret text\n");
    let expected =
        (2, String::new(), format!("userd: --env-file: {file}: line 2 is not NAME=value or NAME='value'\n"));
    for verb in [&[][..], &["check"], &["config"]] {
        assert_eq!(userd(&[verb, &["--env-file", file]].concat(), &[]), expected);
    }
}

// Tests of a database with users of another program

/// Creates the table of users of a shop in Rails.
const SHOP: &str = "
    create table users (
        id serial primary key, name text, email text unique, encrypted_password text not null default '',
        created_at timestamp not null, updated_at timestamp not null);
    select setval('users_id_seq', 41);
    insert into users (name, email, encrypted_password, created_at, updated_at) values
        ('Ada', 'Ada@Example.com', '$2b$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2',
            '2001-02-03 04:05:06.789', '2002-02-03 04:05:06'),
        ('Zoë, \"Z\"', 'zoe@localhost', '', '2001-02-03 04:05:06', '2002-02-03 04:05:06')";

/// userd leaves a table `users` of another program as it is. The lines of docs/operations.md give userd a schema of its own, and copy
/// the users.
#[test]
fn users_of_another_program() {
    let database = Database::empty();
    database.run(SHOP);
    let before = schema_state(&database);
    for arguments in [&["--port=0"][..], &["migrate"]] {
        let (code, stdout, stderr) = userd_on(&database, arguments, &[("HOST", "127.0.0.1")]);
        assert_eq!((code, stdout.as_str()), (1, ""));
        let line = stderr.lines().last().unwrap();
        for part in [
            "the schema \"public\" has the table users of another program",
            "a schema of its own",
            "\"What if the database has users already?\"",
        ] {
            assert!(line.contains(part), "{line}");
        }
    }
    let (code, stdout, _) = userd_on(&database, &["check"], &[]);
    assert!(
        code == 1 && stdout.contains("problem  migrations: the schema \"public\" has the table"),
        "{stdout}"
    );
    assert_eq!(schema_state(&database), before);
    // A table of ours without its history counts as another program's.
    let ours = Database::create();
    ours.run("drop table refinery_schema_history");
    assert_eq!(userd_on(&ours, &["migrate"], &[]).0, 1);

    let lines = blocks(OPERATIONS, "\n## What if the database has users already?\n");
    assert_eq!(lines.len(), 2);
    let lines = lines.join("\n").replace("host=10.0.0.21 user=app dbname=shop", &database.url());
    let dir = TempDir::new();
    let (code, stdout, stderr) = shell(dir.path(), &lines, &[]);
    assert!(code == 0 && stdout.ends_with("imported: 2, existing: 0, refused: 0\n"), "{stdout}{stderr}");
    assert_eq!(database.value("select count(*) from public.users where name is not null"), "2");
    assert_eq!(database.value("select count(*) from userd.users"), "2");

    let url = format!("{} options='-c search_path=userd'", database.url());
    let mut process = Process::at(&url, &[]);
    let mut client = process.client();
    let users = client.get("/users").json();
    assert_eq!(users["total"], 2);
    // The ids are the shop's, because its other tables refer to them.
    assert_eq!((&users["data"][0]["id"], &users["data"][1]["id"]), (&"42".into(), &"43".into()));
    assert_eq!(users["data"][0]["email"], "Ada@Example.com");
    assert_eq!(users["data"][0]["createdAt"], "2001-02-03T04:05:06.789000Z");
    assert_eq!(users["data"][1]["name"], "Zoë, \"Z\"");
    assert_eq!(users["data"][1]["updatedAt"], "2002-02-03T04:05:06.000000Z");
    assert!(client.opens("ada@example.com", PASSWORD));
    let hash = "select left(password_hash, 9) from userd.credentials";
    assert_eq!(database.value(hash), "$argon2id");
    // A delete by userd leaves the users of the shop.
    assert_eq!(client.delete("/users/42").status, 204);
    assert_eq!(database.value("select count(*) from public.users"), "2");
}

/// If the search_path names only a schema that is missing, each command says so in one line.
#[test]
fn a_search_path_without_a_schema() {
    let database = Database::create();
    let url = format!("{} options='-c search_path=missing'", database.url());
    let nowhere = "its search_path has none (3F000): `create schema missing authorization postgres`";
    for (arguments, expected) in [
        (&["--port=0"][..], nowhere),
        (&["migrate"], nowhere),
        (&["--port=0", "--migrate=off"], "the database lacks V1__users"),
        (&["export"], "the database lacks V1__users"),
        (&["check"], "problem  privileges: the role may not create tables in its schema"),
    ] {
        let variables = [("DATABASE_URL", url.as_str()), ("HOST", "127.0.0.1"), ("LOG_LEVEL", "error")];
        let (code, stdout, stderr) = userd(arguments, &variables);
        assert_eq!(code, 1, "{arguments:?}: {stdout}{stderr}");
        assert!((stdout + &stderr).contains(expected), "{arguments:?}: {stderr}");
    }
    assert_eq!(database.value("select count(*) from pg_namespace where nspname = 'missing'"), "0");
}

// Test of the completion in a shell

/// The line for bash in docs/operations.md works in a home directory that is empty, and bash offers arguments after it.
#[test]
fn a_shell_completes_arguments() {
    let line = OPERATIONS.lines().find(|line| line.contains("userd completion bash >")).expect("a line");
    let home = TempDir::new();
    let bash = |lines: &str| {
        let (code, stdout, stderr) = shell(home.path(), lines, &[("HOME", home.name().to_owned())]);
        assert_eq!(code, 0, "{stderr}");
        stdout
    };
    bash(line);
    for (before, last, offered) in [
        ("userd", "exp", "export\n"),
        ("userd import", "--skip-", "--skip-invalid\n--skip-existing\n"),
        ("userd export --format", "", "ndjson\ncsv\n"),
        ("userd completion", "z", "zsh\n"),
    ] {
        let words: Vec<&str> = before.split(' ').collect();
        let (count, previous) = (words.len(), words[words.len() - 1]);
        let found = bash(&format!(
            "set +e\nsource .local/share/bash-completion/completions/userd\nCOMP_WORDS=({before} '{last}') COMP_CWORD={count}\n\
             _userd userd '{last}' '{previous}'\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
        ));
        assert_eq!(found, offered, "{before} {last}");
    }
    for arguments in [&["completion", "zsh"][..], &["completion", "fish"], &["man"]] {
        let (code, script, _) = userd(arguments, &[]);
        assert!(code == 0 && script.contains("userd") && script.contains("existing"), "{script}");
    }
}

/// If a role owns the tables but not the functions, as after `alter table … owner to`, a check and `userd migrate` name the functions.
#[test]
fn a_check_finds_what_a_migration_may_not_replace() {
    let database = Database::create();
    let role = format!("{}_owner", database.name());
    database.run(&format!("create role {role} login; grant create on schema public to {role}"));
    for table in ["users", "credentials", "user_counts", "idempotency_keys", "refinery_schema_history"] {
        database.run(&format!("alter table {table} owner to {role}"));
    }
    let replaced = "create or replace function user_version() returns trigger language plpgsql \
        as $$ begin new.version := 7; return new; end $$";
    let next = TempDir::next_release(&format!("select 1;\n{replaced}"), true);
    let url = database.url().replace("user=postgres", &format!("user={role}"));
    assert!(url.contains(&role), "{url}");
    let run = |argument: &str| {
        Process::start(&[argument], &[("DATABASE_URL", &url), ("MIGRATIONS_DIR", next.name())]).ended()
    };
    let (code, stdout, _) = run("check");
    let line = "problem  privileges: the role does not own the function user_version(), the function";
    assert!(code == 1 && stdout.contains(line), "{stdout}");
    let (code, _, stderr) = run("migrate");
    assert!(code == 1 && stderr.contains("the role does not own the function user_version()"), "{stderr}");
    database.run(&format!(
        "alter function user_version() owner to {role}; alter function user_id_is_fixed() owner to {role}; \
         alter function user_counts_record() owner to {role}; alter function user_counts_reset() owner to {role}; \
         alter function idempotency_erase() owner to {role}"
    ));
    let (code, stdout, _) = run("check");
    assert_eq!(code, 0, "{stdout}");
    assert_eq!(run("migrate").0, 0);
    database.run(&format!("reassign owned by {role} to postgres; drop owned by {role}; drop role {role}"));
}
