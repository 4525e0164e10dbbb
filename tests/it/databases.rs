//! Databases as people have them: other encodings, a sequence that is behind, servers that say nothing, passwords that
//! change, names that another program has taken, roles with few rights or too many.

use crate::support::{ADA, ADA_1, Client, Database, LONG, Own, Process, TempDir, Weather, check, eventually};
use std::{
    fs,
    net::TcpListener,
    os::unix::fs::symlink,
    thread,
    time::{Duration, Instant},
};

/// Returns how `userd check` ends, and what it prints.
fn check_of(database: &Database, variables: &[(&str, &str)]) -> (i32, String) {
    let url = database.url();
    let (code, stdout, stderr) =
        Process::start(&["check"], &[&[("DATABASE_URL", &*url)], variables].concat()).ended();
    assert_eq!(stderr, "", "{stdout}");
    (code, stdout)
}

// Encodings

/// Reads of a user whose address begins with `WORD`, beside searches for characters that the database may not have.
const READS: &str = r#"
    GET /users?email=%F0%9F%98%80@example.com => 200 {"data":[],"total":0,*
    GET /users?email=WORD@example.com => 200 {"data":[{"id":"*
    GET /users?emailPrefix=WORD%F0%9F%98%80 => 200 {"data":[],*
    GET /users?emailPrefix=WORD@ => 200 {"data":[{"id":"*
    GET /users?after=0&perPage=2 => 200 {"data":[{"id":"*
    GET /users?page=1&perPage=2 => 200 {"data":[{"id":"*
    GET /users?id=1&id=2 => 200 {"data":[{"id":"1",*
    GET $user => 200 *
"#;

#[test]
fn characters_that_the_encoding_of_the_database_lacks() {
    for encoding in ["LATIN1", "WIN1252", "EUC_JP", "SQL_ASCII"] {
        let database =
            Database::with(&format!("template template0 encoding '{encoding}' lc_collate 'C' lc_ctype 'C'"));
        let mut process = Process::on(&database, &[("DB_POOL_SIZE", "2")]);
        let url = process.wait_for_url();
        // Two addresses of which one is refused, in one batch.
        thread::scope(|scope| {
            for n in 0..12 {
                let url = &url;
                scope.spawn(move || {
                    let mut client = Client::new(url);
                    let create = format!("POST /users {{\"name\":\"n\",\"email\":\"w{n}@example.com\"}} => 201 <Location: $user> *\n");
                    let reads = READS.replace("WORD", &format!("w{n}"));
                    check(&mut client, &(create + &reads.repeat(6)));
                });
            }
        });
        let mut client = Client::new(&url);
        let fits = encoding == "SQL_ASCII";
        let stored = if fits { 201 } else { 500 };
        check(
            &mut client,
            &format!(
                r#"POST /users/authenticate {{"email":"😀@example.com","password":"correct horse"}} => 401 *
            POST /users {{"name":"😀","email":"name@example.com"}} => {stored} *
            POST /users {{"name":"n","email":"😀@example.com"}} => {stored} *
            GET /users?email=name@example.com => 200 {{"data":[{}*"#,
                if fits { r#"{"id":""# } else { "]" }
            ),
        );
        let (code, found) = check_of(&database, &[]);
        let line = format!("note     database: its encoding is {encoding}, not UTF8: ");
        assert!(code == 0 && found.contains(&line), "{found}");
        assert!(!check_of(&Database::create(), &[]).1.contains("encoding"));
    }
}

/// Another program has stored bytes that are no text: those who read other users beside it get them.
#[test]
fn a_row_that_cannot_be_read_fails_its_own_reads_alone() {
    let database = Database::with("template template0 encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C'");
    let mut process = Process::on(&database, &[("DB_POOL_SIZE", "2")]);
    let url = process.wait_for_url();
    database.run(
        r"insert into users (name, email) values ('Ada', 'ada@example.com'), (E'\xff', 'bad@example.com');
          insert into users (name, email) select 'n', i || '@example.com' from generate_series(1, 20) i",
    );
    thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                let reads = r#"
                    GET /users/2 => 500 *
                    GET /users/1 => 200 *
                    GET /users?page=2&perPage=2 => 200 *
                    GET /users?page=1&perPage=2 => 500 *
                    GET /users?after=2&perPage=2 => 200 *
                    GET /users?after=0&perPage=2 => 500 *
                    GET /users?email=bad@example.com => 500 *
                    GET /users?email=ada@example.com => 200 *
                "#;
                check(&mut Client::new(&url), &reads.repeat(6));
            });
        }
    });
}

// The sequence of ids

/// Rows that came with their ids, as COPY brings them: a create is refused, the log names the check, whose remedy mends it.
#[test]
fn a_sequence_that_is_behind_is_named_in_the_log() {
    let database = Database::create();
    database.run(
        "insert into users (id, name, email) overriding system value \
            select i, 'n', i || '@example.com' from generate_series(1, 30) i",
    );
    let mut process = Process::on(&database, &[]);
    let mut client = process.client();
    let create = |key: &str| {
        format!("POST /users {key}{{\"name\":\"n\",\"email\":\"new{}@example.com\"}} => ", key.len())
    };
    for key in ["", "<Idempotency-Key: k> "] {
        check(&mut client, &format!("{}409 {{\"error\":\"Already exists\"}}", create(key)));
    }
    process.logs("[ERROR] the sequence of ids gave an id that is taken: `userd check` says how to mend it");
    assert_eq!(client.get("/users").json()["total"], 30);
    let (code, found) = check_of(&database, &[]);
    let line = found.lines().find(|line| line.starts_with("problem  service: the sequence of ids"));
    assert_eq!(code, 1, "{found}");
    database.run(line.expect(&found).split('`').nth(1).expect("a statement"));
    assert_eq!(check_of(&database, &[]).0, 0);
    for key in ["", "<Idempotency-Key: k> "] {
        check(&mut client, &format!("{}201 <Location: $user> *\nGET $user => 200 *", create(key)));
    }
    assert_eq!(client.get("/users").json()["total"], 32);
}

// Servers that say nothing, passwords that change

/// The first server of a connection string accepts connections and is silent: a service starts and goes on with the next
/// one, and does not collect threads.
#[test]
fn a_silent_server_is_passed_over() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let database = Database::create();
    let url = format!(
        "host=127.0.0.1,{} port={port},5432 user=postgres dbname={}",
        database.socket_dir(),
        database.name()
    );
    let mut process = Process::at(&url, &[("DB_POOL_SIZE", "2")]);
    let mut client = process.client();
    check(&mut client, &format!("POST /users {ADA} => 201 {ADA_1}\nGET /readyz => 200 *"));
    for _ in 0..2 {
        database.end_sessions();
        eventually(LONG, "sessions are opened again", || client.get("/users/1").status == 200);
        eventually(LONG, "it is ready", || client.get("/readyz").status == 200);
    }
    check(
        &mut client,
        "PUT /users/1 {\"name\":\"A\"} => 200 *\nGET /users/1 => 200 {\"id\":\"1\",\"name\":\"A\",*",
    );
    let before = process.size().0;
    let (code, found) = {
        let (code, stdout, stderr) = Process::start(&["check"], &[("DATABASE_URL", &url)]).ended();
        (code, stdout + &stderr)
    };
    assert_eq!(code, 0, "{found}");
    assert!(process.size().0 <= before + 2, "{} threads, and {before} before", process.size().0);
}

/// A server falls silent for some time: each try to connect ends, and few threads wait for an answer.
#[test]
fn a_server_that_was_silent_is_found_again() {
    let database = Database::create();
    let (proxy, _) = database.proxied();
    let mut process = Process::at(&database.url_at(proxy.port()), &[("DB_ACQUIRE_TIMEOUT", "0.2")]);
    let mut client = process.client();
    let threads = process.size().0;
    proxy.set(Weather::Stalled);
    eventually(LONG, "it is unready", || client.get("/readyz").status == 503);
    let since = Instant::now();
    eventually(LONG, "it goes on trying", || since.elapsed() > Duration::from_secs(8));
    assert!(process.size().0 < threads + 12, "{} threads, and {threads} before", process.size().0);
    assert_eq!(client.get("/livez").status, 200);
    proxy.set(Weather::Fair);
    eventually(LONG, "it is back", || client.get("/users").status == 200);
    eventually(LONG, "it is ready", || client.get("/readyz").status == 200);
}

/// The look for a pooler takes longer than the time to connect, but the server has answered.
#[test]
fn a_server_that_is_far_away_is_connected_to() {
    let database = Database::create();
    let (proxy, _) = database.proxied();
    proxy.set(Weather::Slow(Duration::from_millis(20)));
    let mut process = Process::at(&database.url_at(proxy.port()), &[("DB_CONNECT_TIMEOUT", "0.5")]);
    let mut client = process.client();
    assert_eq!(client.post("/users", ADA).status, 201);
    assert_eq!(client.get("/users/1").json()["name"], "Ada");
}

/// PostgreSQL that asks the role `app` for its password, and no other role.
fn with_a_password(password: &str) -> Own {
    let own = Own::start();
    own.run(&format!("create role app login password '{password}'; create schema userd authorization app"));
    own.run("alter role app set search_path = userd");
    let file: String = own.client().query_one("show hba_file", &[]).unwrap().get(0);
    let rest = fs::read_to_string(&file).unwrap();
    fs::write(&file, format!("local all app scram-sha-256\n{rest}")).unwrap();
    own.run("select pg_reload_conf()");
    own
}

/// Ends the sessions of the service, so that it needs new ones.
const END: &str = "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'";

/// A secret is changed in the database, and then in the file, as Kubernetes does it: a symbolic link gets another target.
#[test]
fn a_password_is_read_again_for_each_session() {
    for as_url in [false, true] {
        let own = with_a_password("first");
        let socket_dir = own.socket_dir().display().to_string();
        let dir = TempDir::new();
        let put = |version: &str, content: &str| {
            fs::create_dir(dir.path().join(version)).unwrap();
            dir.write(&format!("{version}/secret"), content);
            let next = dir.path().join("..next");
            symlink(version, &next).unwrap();
            fs::rename(next, dir.path().join("..data")).unwrap();
        };
        let content = |password: &str| {
            let url = format!("postgres://app:{password}@/postgres?host={socket_dir}\n");
            if as_url { url } else { format!("{password}\n") }
        };
        put("v1", &content("first"));
        symlink("..data/secret", dir.path().join("secret")).unwrap();
        let file = dir.path().join("secret").display().to_string();
        let parts = [("DB_HOST", &*socket_dir), ("DB_USER", "app"), ("DB_NAME", "postgres")];
        let variables = if as_url {
            vec![("DATABASE_URL_FILE", &*file)]
        } else {
            [&parts[..], &[("DB_PASS_FILE", &*file)]].concat()
        };
        let ours = [("HOST", "127.0.0.1"), ("DB_ACQUIRE_TIMEOUT", "0.5"), ("DB_POOL_SIZE", "2")];
        let mut process = Process::start(&[], &[&ours, &variables[..]].concat());
        let mut client = process.client();
        eventually(LONG, "a session is open", || client.get("/users").status == 200);
        check(&mut client, &format!("POST /users {ADA} => 201 {ADA_1}\nGET /readyz => 200 *"));
        own.run("alter role app password 'sec:nd%25'");
        eventually(LONG, "the old password is refused", || {
            // Again each time, as a session may have authenticated before the new password and open after this.
            own.run(END);
            client.get("/users/1").status == 503
        });
        put("v2", &content(if as_url { "sec:nd%2525" } else { "sec:nd%25" }));
        eventually(LONG, "the new one is taken", || client.get("/users/1").status == 200);
        eventually(LONG, "it is ready", || client.get("/readyz").status == 200);
        // A file that is empty or missing for a moment takes nothing away.
        for (version, gone) in [("v3", false), ("v4", true)] {
            put(version, "");
            if gone {
                fs::remove_dir_all(dir.path().join(version)).unwrap();
            }
            own.run(END);
            eventually(LONG, "the last password stays", || client.get("/users/1").status == 200);
        }
        process.logs("[WARN] the password stays as it was, its file cannot be used: ");
        for secret in ["first", "sec:nd"] {
            assert!(!process.stderr().contains(secret), "{}", process.stderr());
        }
        check(
            &mut client,
            "PUT /users/1 {\"name\":\"A\"} => 200 *\nGET /users/1 => 200 {\"id\":\"1\",\"name\":\"A\",*",
        );
    }
}

// Keys that have expired

#[test]
fn keys_that_have_expired_go_whatever_is_created() {
    let database = Database::create();
    let key = "insert into idempotency_keys (key, user_id, expires_at) \
        select sha256(i::text::bytea), i, now() + interval '1 hour' * (1 - 2 * (i % 2)) \
        from generate_series(1, 5200) i";
    database.run(key);
    let mut process = Process::on(&database, &[]);
    let mut client = process.client();
    assert_eq!(client.get("/readyz").status, 200);
    let count = "select count(*) from idempotency_keys";
    eventually(LONG, "they are removed", || database.value(count) == "2600");
    let kept = "select count(*) from idempotency_keys where expires_at > now()";
    assert_eq!(database.value(kept), "2600");
    // A database that takes no changes is left alone.
    database.run("update idempotency_keys set expires_at = now() - interval '1 day'");
    database.run(&format!("alter database {} set default_transaction_read_only = on", database.name()));
    let mut other = Process::on(&database, &[]);
    let mut client = other.client();
    eventually(LONG, "it has looked", || {
        client.get("/readyz").status == 200
            && client.get("/metrics").body.contains("userd_database_read_only 1")
    });
    assert!(!other.stderr().contains("keys"), "{}", other.stderr());
    assert_eq!(database.value(count), "2600");
}

// Names that another program has taken, roles with few rights

/// Starts a service on the database as this role, and returns its last line, as it has to end.
fn start_of(url: &str) -> String {
    let (code, _, stderr) = Process::at(url, &[]).ended();
    assert_eq!(code, 1, "{stderr}");
    assert!(!stderr.contains("alter table ") && !stderr.contains("drop rule "), "not our tables: {stderr}");
    stderr.lines().last().expect("a line").to_owned()
}

#[test]
fn names_of_another_program_are_told_before_a_start_meets_them() {
    const HISTORY: &str = "the table refinery_schema_history";
    for (sql, thing) in [
        ("create table credentials (id int)", "the table credentials"),
        ("create table user_counts (id int) partition by range (id)", "the table user_counts"),
        ("create view users as select 1 as id", "the view users"),
        (
            "create table users (id int, phone text not null); create rule r as on insert to users do also notify r",
            "the table users",
        ),
        (
            "create materialized view idempotency_keys as select 1 as id",
            "the materialized view idempotency_keys",
        ),
        ("create sequence credentials", "the sequence credentials"),
        ("create type users as enum ('a')", "the type users"),
        ("create type user_counts as (a int)", "the composite type user_counts"),
        ("create domain credentials as text", "the type credentials"),
        (
            "create table t (id int); create index idempotency_keys_user_id on t (id)",
            "the index idempotency_keys_user_id",
        ),
        (
            "create table t (email text); create index users_email_key on t (email)",
            "the index users_email_key",
        ),
        (
            "create function user_version() returns int language sql as 'select 1'",
            "the function user_version()",
        ),
        (
            "create procedure idempotency_erase() language sql as 'select 1'",
            "the function idempotency_erase()",
        ),
        (
            "create table refinery_schema_history as select 1 as version, 'orders' as name, '' as applied_on, '123' as checksum",
            HISTORY,
        ),
        (
            "create table refinery_schema_history as select 20240101 as version, 'users' as name, '' as applied_on, '123' as checksum",
            HISTORY,
        ),
        (
            "create table refinery_schema_history as select 'one' as version, '' as name, '' as applied_on, '1' as checksum",
            HISTORY,
        ),
        ("create table refinery_schema_history (id text)", HISTORY),
        ("create table refinery_schema_history (version int4, checksum text)", HISTORY),
    ] {
        let database = Database::empty();
        database.run(sql);
        let line = format!(
            "the schema \"public\" has {thing} of another program, which is left as it is: give userd a schema of its own"
        );
        let (code, found) = check_of(&database, &[]);
        assert!(code == 1 && found.contains(&format!("problem  migrations: {line}")), "{sql}: {found}");
        let last = start_of(&database.url());
        assert!(last.contains(&line), "{sql}: {last}");
        // The way out that the line names works.
        database.run("create schema userd");
        let own = format!("{} options='-c search_path=userd'", database.url());
        let mut process = Process::at(&own, &[]);
        check(
            &mut process.client(),
            &format!("POST /users {ADA} => 201 {ADA_1}\nGET /users/1 => 200 {ADA_1}"),
        );
        assert_eq!(check_of(&database, &[("DATABASE_URL", &own)]).0, 0);
    }
    // Things of these names elsewhere, or of other kinds, are left alone.
    let database = Database::empty();
    database.run(
        "create function user_version(int) returns int language sql as 'select 1'; create type mood as enum ('users'); \
         create table orders (users int); create schema other; create table other.credentials (id int)",
    );
    assert_eq!(check_of(&database, &[]).0, 0);
    assert_eq!(Process::on(&database, &[]).client().get("/users").status, 200);
}

/// Columns and rules of another program fail creates: a check and a start say so, and mend it.
#[test]
fn additions_of_another_program_that_fail_creates_are_told() {
    for sql in [
        "alter table users add \"Tenant\" int not null default 1; alter table users alter \"Tenant\" drop default",
        "alter table credentials add kind text not null default ''; alter table credentials alter kind drop default",
        "create rule watch as on insert to users do also notify users",
        "create rule \"Keep\" as on update to users do instead nothing",
    ] {
        let database = Database::create();
        database.run(sql);
        let body = r#"{"name":"n","email":"n@example.com","password":"correct horse"}"#;
        let mut process = Process::on(&database, &[]);
        let mut client = process.client();
        assert_eq!(client.post("/users", body).status, 500, "{sql}");
        let (code, found) = check_of(&database, &[]);
        let line =
            found.lines().find(|line| line.starts_with("problem  tables: ") && line.contains("get 500"));
        let line = line.unwrap_or_else(|| panic!("{sql}: {found}"));
        assert_eq!(code, 1);
        process.logs(line.strip_prefix("problem  tables: ").unwrap());
        database.run(line.split('`').nth(1).expect("a statement"));
        assert_eq!(check_of(&database, &[]).0, 0, "{sql}");
        assert_eq!(Process::on(&database, &[]).client().post("/users", body).status, 201, "{sql}");
    }
    // These fail nothing.
    let database = Database::create();
    database.run(
        "alter table users add lower_name text generated always as (lower(name)) stored, add kind text not null default 'a', \
            add number int generated by default as identity, add note text; \
         create table orders (user_id bigint references users (id)); alter table users alter id set generated by default",
    );
    assert_eq!(check_of(&database, &[]).0, 0);
    assert_eq!(Process::on(&database, &[]).client().post("/users", ADA).status, 201);
}

/// A database in which the first start cannot make tables, and the statement that mends it.
#[test]
fn a_first_start_that_may_not_make_tables_says_how_it_may() {
    for (sql, path, remedy) in [
        ("", "", "grant usage, create on schema public to \"ROLE\""),
        (
            "create schema \"Odd, one\"; grant usage on schema \"Odd, one\" to \"ROLE\"",
            "\"Odd, one\"",
            "grant usage, create on schema \"Odd, one\" to \"ROLE\"",
        ),
        ("create schema closed", "closed, other", "grant usage, create on schema closed to \"ROLE\""),
        (
            "create schema \"Clo\"\"sed\"",
            "\"$user\", \"No, schema\", \"Clo\"\"sed\"",
            "grant usage, create on schema \"Clo\"\"sed\" to \"ROLE\"",
        ),
        ("", "\"No \"\"such\"\"\", other", "create schema \"No \"\"such\"\"\" authorization \"ROLE\""),
        ("", "NOWHERE", "create schema nowhere authorization \"ROLE\""),
        (
            "alter role \"ROLE\" in database NAME set search_path = ''; grant create on schema public to \"ROLE\"",
            "",
            "alter role \"ROLE\" in database NAME set search_path = \"$user\", public",
        ),
        ("", "\"$user\"", "create schema \"ROLE\" authorization \"ROLE\""),
        (
            "alter database NAME set default_transaction_read_only = on; grant create on schema public to \"ROLE\"",
            "",
            "begin read write; alter role \"ROLE\" in database NAME set default_transaction_read_only = off; commit",
        ),
    ] {
        let database = Database::empty();
        let of_role = |text: &str| {
            text.replace("ROLE", &format!("{}_App", database.name())).replace("NAME", database.name())
        };
        database.run(&of_role("create role \"ROLE\" login"));
        database.run(&of_role(sql));
        if !path.is_empty() {
            database.run(&of_role(&format!("alter role \"ROLE\" set search_path = {path}")));
        }
        let url = database.url().replace("user=postgres", &of_role("user=ROLE"));
        let (code, found) = check_of(&database, &[("DATABASE_URL", &url)]);
        let told = of_role(&format!("`{remedy}`"));
        assert!(code == 1 && found.contains(&told), "{told}: {found}");
        let last = start_of(&url);
        assert!(last.starts_with("userd: cannot migrate the database: ") && last.contains(&told), "{last}");
        database.run(&of_role(remedy));
        let (code, found) = check_of(&database, &[("DATABASE_URL", &url)]);
        assert_eq!(code, 0, "{remedy}: {found}");
        let mut process = Process::at(&url, &[]);
        check(
            &mut process.client(),
            &format!("POST /users {ADA} => 201 {ADA_1}\nGET /users/1 => 200 {ADA_1}"),
        );
        drop(process);
        let (code, found) = check_of(&database, &[("DATABASE_URL", &url)]);
        assert_eq!(code, 0, "{remedy}: {found}");
        database.run(&of_role("begin read write; drop owned by \"ROLE\"; drop role \"ROLE\"; commit"));
    }
}

/// A role that may not enter the schema of the tables is led to these, not to a schema without users.
#[test]
fn a_role_that_may_not_enter_the_schema_of_the_tables() {
    let database = Database::create();
    let role = format!("{}_app", database.name());
    database.run(&format!(
        "create role {role} login; insert into users (name, email) values ('n', 'n@example.com')"
    ));
    let grants = Process::start(&["grants", &role], &[("DATABASE_URL", &database.url())]).ended().1;
    database.run(&grants);
    database.run(&format!("revoke usage on schema public from public, {role}"));
    let url = database.url().replace("user=postgres", &format!("user={role}"));
    let remedy = format!(
        "grant usage on schema public to {role}; grant select on public.refinery_schema_history to {role}"
    );
    let (code, found) = check_of(&database, &[("DATABASE_URL", &url)]);
    assert!(code == 1 && found.contains(&format!("`{remedy}`")), "{found}");
    assert!(start_of(&url).contains(&format!("`{remedy}`")));
    database.run(&remedy);
    assert_eq!(check_of(&database, &[("DATABASE_URL", &url)]).0, 0);
    check(
        &mut Process::at(&url, &[]).client(),
        r#"GET /users?email=n@example.com => 200 {"data":[{"id":"1",*"#,
    );
    database.run(&format!("begin read write; drop owned by {role}; drop role {role}; commit"));
}

/// The sequence of ids has another name, and another program's has its name.
#[test]
fn a_sequence_of_another_name() {
    let database = Database::empty();
    database.run("create table t (id int); create sequence users_id_seq start 5000 owned by t.id");
    let mut process = Process::on(&database, &[]);
    let mut client = process.client();
    assert_eq!(client.post("/users", ADA).status, 201);
    database
        .run("insert into users (id, name, email) overriding system value values (7, 'n', 'n@example.com')");
    database.run("alter sequence users_id_seq1 rename to \"Ids\"");
    let (code, found) = check_of(&database, &[]);
    let line = found.lines().find(|line| line.starts_with("problem  service: the sequence of ids"));
    assert_eq!(code, 1, "{found}");
    database.run(line.expect(&found).split('`').nth(1).expect("a statement"));
    assert_eq!(check_of(&database, &[]).0, 0);
    assert_eq!(database.value("select last_value from users_id_seq"), "5000", "another program's has moved");
    let created = client.post("/users", r#"{"name":"m","email":"m@example.com"}"#);
    assert_eq!((created.status, created.json()["id"].as_str()), (201, Some("10")));
    let role = format!("{}_app", database.name());
    database.run(&format!("create role {role} login"));
    let (_, grants, _) = Process::start(&["grants", &role], &[("DATABASE_URL", &database.url())]).ended();
    database.run(&grants);
    let url = database.url().replace("user=postgres", &format!("user={role}"));
    let (code, found) = check_of(&database, &[("DATABASE_URL", &url)]);
    assert!(code == 0 && !found.contains("sequence"), "{found}");
    database.run(&format!("drop owned by {role}; drop role {role}"));
}
