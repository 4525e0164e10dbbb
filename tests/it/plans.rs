//! How statements are executed: by an index, also if their plan was made while the table was empty. PostgreSQL's module
//! auto_explain tells it, of statements within functions, too.

use crate::support::{LONG, Own, Process, every_verb};
use userd::{Config, Database as Target, Server};

/// Starts to log each statement of the service with how it was executed.
const EXPLAIN: [&str; 6] = [
    "session_preload_libraries = 'auto_explain'",
    "auto_explain.log_min_duration = 0",
    "auto_explain.log_nested_statements = on",
    "auto_explain.log_analyze = on",
    "auto_explain.log_timing = off",
    "autovacuum = off",
];

/// Stores users, passwords and kept keys, in a session whose statements are not logged.
const GROW: &str = "
    set auto_explain.log_min_duration = -1;
    insert into users (name, email) select 'User', n || '@grown.example' from generate_series(1, 20000) n;
    insert into credentials select id, 'none' from users where email like '%grown.example';
    insert into idempotency_keys (key, user_id, expires_at, answer)
        select sha256(id::text::bytea), id, now() + interval '1 day', to_jsonb(users) from users
        where email like '%grown.example'";

/// More rows than any scan of the service reads: those of a block of ids and a page.
const MOST: f64 = 9_500.0;

/// Tells whether a line of a plan is of a scan that reads more than it has to.
fn is_wrong(line: &str) -> bool {
    let number = |before: &str| -> Option<f64> {
        let (_, after) = line.rsplit_once(before)?;
        after.split([' ', ')']).next()?.parse().ok()
    };
    let is_of_table = ["users", "credentials", "idempotency_keys"]
        .iter()
        .any(|table| line.contains(&format!(" on {table} ")));
    let is_whole = line.contains("Seq Scan") || number("(actual rows=").is_some_and(|rows| rows > MOST);
    is_of_table && is_whole || number("Rows Removed by Filter: ").is_some_and(|rows| rows > MOST)
}

/// Returns the statements that `userd check` asks for behind a pooler.
fn missing_settings(own: &Own) -> Vec<String> {
    let url = own.url();
    let mut process = Process::start(&["check"], &[("DATABASE_URL", url.as_str()), ("DB_PREPARED", "false")]);
    process.wait(LONG);
    let lines = process.stdout();
    let lines = lines.lines().filter(|line| line.starts_with("problem  settings: "));
    lines.map(|line| format!("alter {}", line.split_once(": alter ").expect("what to do").1)).collect()
}

#[test]
fn no_statement_scans_tables_that_were_empty_when_it_was_prepared() {
    let own = Own::start();
    let mut client = own.client();
    client.batch_execute("load 'auto_explain'").expect("a module of PostgreSQL's own");
    for setting in EXPLAIN {
        client.batch_execute(&format!("alter system set {setting}")).expect("a superuser may");
    }
    own.run("select pg_reload_conf()");
    for prepared in [true, false] {
        if !prepared {
            let remedies = missing_settings(&own);
            assert!(
                remedies.iter().any(|sql| sql.ends_with("set search_path = public, pg_temp")),
                "{remedies:?}"
            );
            remedies.iter().for_each(|sql| own.run(sql));
            assert_eq!(missing_settings(&own), [""; 0]);
        }
        let database = Target::Url(own.url().as_str().into());
        let sizes = Config { db_pool_size: 1, workers: 1, ..Config::default() };
        let server = Server::start(Config { database, db_prepared: prepared, ..sizes }).expect("a server");
        own.run("truncate users, idempotency_keys cascade");
        own.run("vacuum analyze");
        every_verb(server.base_url(), "early");
        own.run(GROW);
        let seen = own.log().len();
        every_verb(server.base_url(), "late");
        let log = own.log().split_off(seen);
        let wrong: Vec<&str> = log.lines().filter(|line| is_wrong(line)).collect();
        assert!(wrong.is_empty(), "prepared: {prepared}: {wrong:#?}");
        for part in [
            "Index Scan using users_pkey on users ",
            "with blocks as",
            "insert into user_counts",
            "set answer",
        ] {
            assert!(log.contains(part), "prepared: {prepared}: {part}");
        }
        server.stop();
    }
}
