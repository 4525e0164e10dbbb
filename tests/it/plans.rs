//! How statements are executed: by an index, whatever the planner knows of the tables, and whenever a session has made its
//! plans. PostgreSQL itself tells, by its module auto_explain, of statements within functions, too.

use crate::support::{LONG, LONG_ON_DISK, Own, Process, TempDir, eventually, every_verb};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};
use userd::{Config, Database as Target, Server};

/// Users that come after the plans were made.
const USERS: u32 = 20_000;

/// More rows of one scan than any statement of the service needs: those of a block of ids and a page.
const MOST: f64 = 9_500.0;

const TABLES: [&str; 3] = ["users", "credentials", "idempotency_keys"];

/// Starts to log each statement of the service with how it was executed.
fn explain(own: &Own) {
    let mut client = own.client();
    client.batch_execute("load 'auto_explain'").expect("it is of PostgreSQL's own modules");
    for setting in [
        "session_preload_libraries = 'auto_explain'",
        "auto_explain.log_min_duration = 0",
        "auto_explain.log_nested_statements = on",
        "auto_explain.log_analyze = on",
        "auto_explain.log_timing = off",
        "auto_explain.log_format = 'json'",
        "autovacuum = off",
    ] {
        client.batch_execute(&format!("alter system set {setting}")).expect("a superuser may");
    }
    own.run("select pg_reload_conf()");
    let is_logged = "select current_setting('auto_explain.log_format', true) = 'json'";
    eventually(LONG, "statements are logged", || {
        own.client().query_one(is_logged, &[]).expect("a row").get::<_, Option<bool>>(0) == Some(true)
    });
}

/// Many users with passwords and kept keys, by another client, whose statements are not logged.
fn grow(own: &Own, order: &str) {
    own.run(&format!(
        "set auto_explain.log_min_duration = -1; \
         insert into users (id, name, email) overriding system value \
             select n + 1000, 'User', n || '@grown.example' from generate_series(1, {USERS}) n order by {order}; \
         select setval('users_id_seq', {USERS} + 1000); \
         insert into credentials select id, 'none' from users where email like '%grown.example'; \
         insert into idempotency_keys (key, fingerprint, id, name, email, created_at, updated_at, version, kept_since) \
             select sha256(id::text::bytea), 'f', id, name, email, created_at, updated_at, version, \
                 now() - interval '23 hours' \
             from users where email like '%grown.example'"
    ));
}

/// The plans that were logged since `seen` bytes of log: text of the statement, and plan.
fn plans(own: &Own, seen: usize) -> Vec<(String, Value)> {
    let log = own.log();
    let logged = log[seen..].split("  plan:\n").skip(1);
    let plans = logged.map(|text| {
        let lines = text.lines().take_while(|line| line.starts_with('\t'));
        let json: String = lines.map(|line| &line[1..]).collect::<Vec<_>>().join("\n");
        serde_json::from_str::<Value>(&json).unwrap_or_else(|error| panic!("{error}: {json}"))
    });
    plans
        .map(|plan| (plan["Query Text"].as_str().expect("a text").to_owned(), plan["Plan"].clone()))
        .collect()
}

/// What of a plan reads more than it has to, by lines.
fn wrongs(plan: &Value, limited: bool, found: &mut BTreeSet<String>) {
    let (node, table) = (plan["Node Type"].as_str(), plan["Relation Name"].as_str());
    let (node, table) = (node.unwrap_or_default(), table.unwrap_or_default());
    let number = |key: &str| plan[key].as_f64().unwrap_or_default();
    let read = (number("Actual Rows") + number("Rows Removed by Filter")) * number("Actual Loops");
    if TABLES.contains(&table) && node.ends_with("Scan") {
        let has_condition = plan.get("Index Cond").is_some() || plan.get("TID Cond").is_some();
        if !matches!(node, "Index Scan" | "Index Only Scan" | "Tid Scan") {
            found.insert(format!("{node} on {table}"));
        } else if !(has_condition || limited) {
            found.insert(format!("{node} of all of {table}"));
        }
        if read > MOST * number("Actual Loops").max(1.0) {
            found.insert(format!("{node} on {table} reads {read} rows"));
        }
    }
    for child in plan["Plans"].as_array().into_iter().flatten() {
        wrongs(child, node == "Limit" || limited && node == "LockRows", found);
    }
}

/// The same of exports and imports, each of which is planned when it is executed, with the size that a table has by then:
/// bitmaps are as good as indexes then, and an export reads all users by an index, without a sort. The counts have a row for
/// some hundred users.
fn wrongs_in_bulk(plan: &Value, whole: bool, found: &mut BTreeSet<String>) {
    let (node, table) = (plan["Node Type"].as_str(), plan["Relation Name"].as_str());
    let (node, table) = (node.unwrap_or_default(), table.unwrap_or_default());
    let number = |key: &str| plan[key].as_f64().unwrap_or_default();
    let read = number("Actual Rows") + number("Rows Removed by Filter");
    let is_known = TABLES.contains(&table);
    if is_known && node == "Seq Scan" || whole && node.contains("Sort") {
        found.insert(format!("{node} {table}"));
    }
    if is_known && !whole && read > MOST {
        found.insert(format!("{node} on {table} reads {read} rows"));
    }
    for child in plan["Plans"].as_array().into_iter().flatten() {
        wrongs_in_bulk(child, whole, found);
    }
}

/// Fails for each statement that is wrong, and where one is missing that is known to be executed.
fn check_each(
    plans: &[(String, Value)],
    state: &str,
    wrongs: fn(&str, &Value, &mut BTreeSet<String>),
    known: &[&str],
) {
    let mut lines: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for (sql, plan) in plans {
        let mut found = BTreeSet::new();
        wrongs(sql, plan, &mut found);
        if !found.is_empty() {
            lines.entry(sql).or_default().extend(found);
        }
    }
    assert!(lines.is_empty(), "{state}: {lines:#?}");
    for part in known {
        assert!(plans.iter().any(|(sql, _)| sql.contains(part)), "{state}: {part}");
    }
}

fn check_bulk(plans: &[(String, Value)], state: &str) {
    let wrongs = |sql: &str, plan: &Value, found: &mut BTreeSet<String>| {
        wrongs_in_bulk(plan, sql.starts_with("select id, created_at"), found);
    };
    let known = [
        "select id, created_at, updated_at, name, email, null from users order by id",
        "from users left join credentials on user_id",
        "insert into users (created_at, updated_at, name, email)",
    ];
    check_each(plans, state, wrongs, &known);
}

fn check(plans: &[(String, Value)], state: &str) {
    let known = [
        "from users where id = $1",
        "from users where id = any ($1::bigint[])",
        "as asked (address, position)",
        "(select password_hash from credentials where user_id",
        "with blocks as materialized",
        "as asked (after, most, position)",
        "insert into users (name, email) ",
        "insert into credentials (user_id, password_hash)",
        "), expired as (",
        "as asked (asked_key, position)",
        "delete from idempotency_keys where key",
        "delete from users",
        "idempotency_keys set fingerprint = ''",
        "insert into user_counts",
        "DELETE FROM ONLY \"public\".\"credentials\"",
    ];
    check_each(plans, state, |_, plan, found| wrongs(plan, false, found), &known);
}

/// A server on the cluster whose requests form batches.
fn serve(own: &Own, prepared: bool) -> Server {
    let database = Target::Url(own.url().as_str().into());
    Server::start(Config {
        database,
        db_pool_size: 1,
        workers: 1,
        db_prepared: prepared,
        ..Config::default()
    })
    .expect("a server")
}

/// Exports of all users, and imports of a few beside them, and the plans of that.
fn exchanged(own: &Own, prepared: bool, round: &str) -> Vec<(String, Value)> {
    let seen = own.log().len();
    let prepared = if prepared { "true" } else { "false" };
    let dir = TempDir::new();
    let file = dir.path().join("users.ndjson");
    let file = file.to_str().expect("UTF-8");
    let hash = "$2b$04$abcdefghijklmnopqrstuuTc1kY2bLh9rDCLvJZ6Iz9d8rBFMnxhC";
    let line = |name: &str, id: Option<i64>| {
        let email = format!("{round}-{name}@imported.example");
        json!({"name": name, "email": email, "passwordHash": hash, "id": id}).to_string() + "\n"
    };
    let run = |arguments: &[&str]| {
        let url = own.url();
        let mut process =
            Process::start(arguments, &[("DATABASE_URL", url.as_str()), ("DB_PREPARED", prepared)]);
        assert_eq!(process.wait(LONG_ON_DISK), 0, "{arguments:?}: {}", process.stderr());
    };
    run(&["export", file]);
    run(&["export", "--with-password-hashes", file]);
    let import = |text: String, options: &[&str]| {
        fs::write(file, text).expect("a fresh directory");
        run(&[&["import"], options, &[file]].concat());
    };
    import(line("a", None) + &line("b", None), &[]);
    import(line("b", None) + &line("c", None), &["--skip-existing"]);
    // A line that repeats another one has the file staged, and the repeated ones looked up.
    import(line("d", None) + &line("d", None), &["--skip-invalid"]);
    let next: i64 = own.client().query_one("select max(id) + 1 from users", &[]).expect("a row").get(0);
    import(line("e", Some(next)), &["--keep-ids"]);
    let plans = plans(own, seen);
    let count = "select count(*) from users join credentials on user_id = id where email like $1 || '-%@imported.example'";
    assert_eq!(own.client().query_one(count, &[&round]).expect("a row").get::<_, i64>(0), 5);
    plans
}

/// Every verb and the cleaner, and the plans of all of that.
fn executed(own: &Own, server: &Server, round: &str) -> Vec<(String, Value)> {
    let seen = own.log().len();
    every_verb(server.base_url(), round);
    own.run(
        "set auto_explain.log_min_duration = -1; \
        update idempotency_keys set kept_since = now() - interval '25 hours' where email = ''",
    );
    server.app().users().remove_expired_keys().expect("they are removed");
    plans(own, seen)
}

/// The settings that `userd check` asks for behind a pooler.
fn as_checked(own: &Own, variables: &[(&str, &str)]) -> Vec<String> {
    let url = own.url();
    let mut process = Process::start(&["check"], &[&[("DATABASE_URL", url.as_str())], variables].concat());
    process.wait(LONG);
    let lines = process.stdout();
    let lines = lines.lines().filter(|line| line.starts_with("problem  settings: "));
    lines
        .map(|line| line.split_once(": alter").map(|(_, sql)| format!("alter{sql}")).expect("what to do"))
        .collect()
}

#[test]
fn each_statement_walks_an_index_whenever_it_was_planned() {
    for (state, before) in [
        ("vacuumed while empty", "vacuum analyze"),
        ("never vacuumed", "select"),
        (
            "analyzed at 60 rows",
            "insert into users (name, email) select 'n', n || '@early.example' from generate_series(1, 60) n; analyze",
        ),
    ] {
        let own = Own::start();
        explain(&own);
        let server = serve(&own, true);
        before.split("; ").for_each(|sql| own.run(sql));
        // The session makes its plans now, and keeps them.
        every_verb(server.base_url(), "early");
        grow(&own, "n");
        check(&executed(&own, &server, "late"), state);
        check_bulk(&exchanged(&own, true, "bulk"), state);
        server.stop();

        // Behind a pooler, each statement is planned anew.
        for sql in as_checked(&own, &[("DB_PREPARED", "false")]) {
            own.run(&sql);
        }
        assert_eq!(as_checked(&own, &[("DB_PREPARED", "false")]), [""; 0]);
        let server = serve(&own, false);
        let state = format!("{state}, unprepared");
        check(&executed(&own, &server, "unprepared"), &state);
        check_bulk(&exchanged(&own, false, "unprepared-bulk"), &state);
        server.stop();
    }
}
