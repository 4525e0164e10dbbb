//! The counts behind pages: the same as counting, whichever role writes, and however.

use crate::support::{Database, Dice, Own};
use postgres::{Client, IsolationLevel, error::SqlState, types::ToSql};
use serde_json::Value;
use std::{
    io::Write,
    thread,
    time::{Duration, Instant},
};
use userd::{Config, Server, internals::FIND_PAGES};

/// One change of a random kind. Errors of its own making (equal addresses, deadlocks) undo it, as they may.
fn change(client: &mut Client, dice: &mut Dice) -> Result<(), postgres::Error> {
    let some_id = "(select id from users offset floor(random() * 2000) limit 1)";
    let insert = "insert into users (name, email) select 'n', gen_random_uuid() || '@example.com'";
    let mut transaction = client.transaction()?;
    match dice.roll(10) {
        0 => transaction.batch_execute(insert)?,
        1 => transaction.batch_execute(&format!("{insert} from generate_series(1, 40)"))?,
        2 => transaction.batch_execute(
            "insert into users (name, email) select 'n', floor(random() * 500) || '@example.com' \
             from generate_series(1, 20) on conflict do nothing",
        )?,
        3 => transaction.batch_execute(&format!("delete from users where id = {some_id}"))?,
        4 => transaction
            .batch_execute(&format!("delete from users where id between {some_id} and {some_id}"))?,
        5 => {
            let mut rows = transaction.copy_in("copy users (name, email) from stdin")?;
            for _ in 0..dice.roll(300) {
                let (a, b) = (dice.roll(u64::MAX), dice.roll(u64::MAX));
                writeln!(rows, "copied\t{a}-{b}@example.com").expect("a row");
            }
            rows.finish()?;
        }
        6 => {
            transaction.batch_execute(insert)?;
            let mut savepoint = transaction.savepoint("s")?;
            savepoint.batch_execute(&format!("{insert} from generate_series(1, 700)"))?;
            savepoint.rollback()?;
            transaction.batch_execute(insert)?;
        }
        7 => {
            let id = 1 + dice.roll(3_000_000);
            transaction.execute(
                "insert into users (id, name, email) overriding system value \
                 values ($1, 'chosen', gen_random_uuid() || '@example.com') on conflict do nothing",
                &[&(id as i64)],
            )?;
        }
        8 => transaction.batch_execute(&format!(
            "with gone as (delete from users where id = any(array(select id from users order by id desc limit 40))) \
             {insert} from generate_series(1, 200)"
        ))?,
        _ => transaction.batch_execute(
            "update users set name = name || '.' where id in (select id from users limit 3)",
        )?,
    }
    match dice.roll(4) {
        0 => transaction.rollback(),
        _ => transaction.commit(),
    }
}

/// Changes users in a transaction of any kind: of each isolation level, left prepared for another session, of a session
/// whose plans are discarded.
fn attack(client: &mut Client, dice: &mut Dice, seed: u64) -> Result<(), postgres::Error> {
    let level =
        ["read uncommitted", "read committed", "repeatable read", "serializable"][dice.roll(4) as usize];
    client.batch_execute(&format!("set default_transaction_isolation = '{level}'"))?;
    match dice.roll(40) {
        0 => return client.batch_execute("truncate users cascade"),
        1 => client.batch_execute("discard all")?,
        2..=8 => {
            let prepared: Option<String> = client
                .query_opt("select gid from pg_prepared_xacts where random() < 0.5 limit 1", &[])?
                .map(|row| row.get(0));
            if let Some(prepared) = prepared {
                let end = ["commit", "rollback"][dice.roll(2) as usize];
                // Another session may be first.
                let _ = client.batch_execute(&format!("{end} prepared '{prepared}'"));
            }
        }
        9..=12 => {
            let rows = dice.roll(700);
            return client.batch_execute(&format!(
                "begin; insert into users (name, email) select 'n', gen_random_uuid() || '@example.com' \
                 from generate_series(1, {rows}); delete from users where id in (select max(id) from users); \
                 prepare transaction '{seed}-{}'",
                dice.roll(u64::MAX)
            ));
        }
        _ => {}
    }
    change(client, dice)
}

/// In one snapshot: some pages by the counts, against counting.
fn compare(client: &mut Client, dice: &mut Dice) {
    let builder = client.build_transaction();
    let snapshot = builder.isolation_level(IsolationLevel::RepeatableRead).start();
    let mut snapshot = snapshot.expect("a snapshot");
    // Snapshots of tables that were truncated later are empty: a property of TRUNCATE.
    snapshot.batch_execute("lock table users in access share mode").expect("a lock");
    let total: i64 = snapshot.query_one("select count(*) from users", &[]).expect("a count").get(0);
    let positions = [0, dice.roll(total.max(1) as u64) as i64, (total - 3).max(0), total, i64::MAX];
    let (limits, from_end) = ([15_i64; 5], [false; 5]);
    let asked: [&(dyn ToSql + Sync); 3] = [&positions.as_slice(), &limits.as_slice(), &from_end.as_slice()];
    let rows = snapshot.query(FIND_PAGES, &asked).expect("pages");
    for (ordinal, position) in (1_i64..).zip(positions) {
        let page = rows.iter().filter(|row| row.get::<_, i64>("position") == ordinal);
        let (totals, ids): (Vec<i64>, Vec<Option<i64>>) =
            page.map(|row| (row.get::<_, i64>("total"), row.get::<_, Option<i64>>("id"))).unzip();
        assert!(!totals.is_empty() && totals.iter().all(|one| *one == total), "{totals:?} {total}");
        let plain = "select id from users order by id offset $1 limit 15";
        let expected = snapshot.query(plain, &[&position]).expect("ids");
        let expected: Vec<i64> = expected.iter().map(|row| row.get(0)).collect();
        assert_eq!(ids.into_iter().flatten().collect::<Vec<_>>(), expected, "at {position} of {total}");
    }
}

/// For as many seconds as `COUNTS_SECONDS` says, or six.
#[test]
fn the_counts_withstand_attacks() {
    let seconds = std::env::var("COUNTS_SECONDS").map_or(6, |seconds| seconds.parse().expect("seconds"));
    let mut own = Own::start();
    own.run("alter system set max_prepared_transactions = 20");
    // A prepared transaction holds its locks until another writer ends it.
    own.run("alter system set lock_timeout = '50ms'");
    own.restart();
    let config = Config { database: userd::Database::Url(own.url().into()), ..Config::default() };
    Server::start(config.clone()).expect("a server migrates an empty database").stop();
    let end = Instant::now() + Duration::from_secs(seconds);
    let changes: usize = thread::scope(|scope| {
        let writers: Vec<_> = (1..=8)
            .map(|seed| {
                let mut client = own.client();
                let own = &own;
                scope.spawn(move || {
                    let mut dice = Dice(0x9E37_79B9_7F4A_7C15 / seed);
                    let mut done = 0;
                    while Instant::now() < end {
                        match attack(&mut client, &mut dice, seed) {
                            Ok(()) => done += 1,
                            // The client gives up a session whose COPY was refused.
                            Err(error) if error.code().is_none() => client = own.client(),
                            Err(error) => {
                                // Taken addresses, deadlocks, locks, conflicts, and too many that are prepared.
                                // PostgreSQL reports 57014 for a lock_timeout that passes while a second lock is
                                // waited for.
                                let code = error.code().map_or("", |code| code.code());
                                let expected =
                                    ["23505", "40P01", "55P03", "40001", "53200", "55000", "25P02", "57014"];
                                assert!(expected.contains(&code), "{error:?}");
                                // A transaction that failed is ended.
                                let _ = client.batch_execute("rollback");
                            }
                        }
                    }
                    done
                })
            })
            .collect();
        let (mut reader, mut dice) = (own.client(), Dice(42));
        reader.batch_execute("set lock_timeout = 0").expect("a setting");
        while Instant::now() < end {
            compare(&mut reader, &mut dice);
        }
        writers.into_iter().map(|writer| writer.join().expect("a writer")).sum()
    });
    assert!(changes as u64 > seconds, "{changes} changes");
    let (mut client, mut dice) = (own.client(), Dice(7));
    client.batch_execute("set lock_timeout = 0").expect("a setting");
    compare(&mut client, &mut dice);
    for row in client.query("select gid from pg_prepared_xacts", &[]).expect("transactions") {
        client.batch_execute(&format!("commit prepared '{}'", row.get::<_, &str>(0))).expect("a commit");
        compare(&mut client, &mut dice);
    }
    let server = Server::start(config).expect("a server");
    every_page_is_right(&server, &mut client);
    client.batch_execute("truncate users cascade").expect("a truncate");
    every_page_is_right(&server, &mut client);
    client.batch_execute(&with_inserts("ADD(33)")).expect("users");
    every_page_is_right(&server, &mut client);
}

/// Walks the whole list over HTTP and compares it with the table.
fn every_page_is_right(server: &Server, database: &mut Client) {
    let rows = database.query("select id from users order by id", &[]).expect("ids");
    let expected: Vec<String> = rows.iter().map(|row| row.get::<_, i64>(0).to_string()).collect();
    let mut client = crate::support::Client::new(server.base_url());
    let mut found = Vec::new();
    for page in 1.. {
        let path = format!("/users?perPage=1000&page={page}");
        let answer = client.request("GET", &path, &[], "").json();
        assert_eq!(answer["total"], expected.len() as u64, "{path}");
        let data = answer["data"].as_array().expect("a page").clone();
        found.extend(data.iter().map(|user| user["id"].as_str().expect("an id").to_owned()));
        if answer["hasMorePages"] == Value::Bool(false) {
            break;
        }
    }
    assert_eq!(found, expected);
}

/// Runs each line on a database of its own, and after each looks whether the counts are right.
fn counts_survive(statements: &str) {
    let database = Database::create();
    let (mut client, mut dice) = (database.client(), Dice(7));
    for statement in with_inserts(statements).lines().map(str::trim) {
        client.batch_execute(statement).unwrap_or_else(|error| panic!("{statement}: {error:?}"));
        compare(&mut client, &mut dice);
    }
}

/// `ADD(n)` inserts n users.
fn with_inserts(statements: &str) -> String {
    const ADD: &str = "insert into users (name, email) select 'n', gen_random_uuid() || '@example.com' \
                       from generate_series(1, ";
    statements.replace("ADD(", ADD)
}

#[test]
fn one_statement_may_change_users_several_times() {
    // Several changes in one statement, each with its own trigger.
    counts_survive(
        "ADD(511)
         with gone as (delete from users where id = 5) ADD(1)
         with gone as (delete from users where id = 512) ADD(1)
         with gone as (delete from users where id > 500 returning id), new as (ADD(1) returning id) table gone
         with one as (ADD(300)), two as (ADD(300)), gone as (delete from users where id between 90 and 99) ADD(1)
         begin; ADD(500); with gone as (delete from users where id < 600) ADD(600); commit
         begin; ADD(600); with gone as (delete from users where id < 900) ADD(600); ADD(1); delete from users where id < 1500; commit
         begin; savepoint s; with gone as (delete from users where id < 1600) ADD(600); rollback to s; with gone as (delete from users where id < 1700) ADD(600); commit
         begin; ADD(1); savepoint s; with gone as (delete from users where id < 1800) ADD(600); rollback; ADD(1)
         begin isolation level repeatable read; with gone as (delete from users where id < 1900) ADD(600); commit
         with gone as (delete from users where id % 7 = 0) ADD(2000)
         with gone as (delete from users where id % 5 = 0) delete from users where id % 11 = 0
         do $$ begin with gone as (delete from users where id % 3 = 0) ADD(600); raise division_by_zero; exception when others then end $$
         with gone as (delete from users where false) insert into users (name, email) select name, email from users on conflict do nothing
         with gone as (delete from users) ADD(600)
         with gone as (delete from users) ADD(1)",
    );
}

#[test]
fn triggers_may_change_users_amid_changes_of_users() {
    let nested = |trigger: &str, body: &str| {
        let end = if trigger.starts_with("before") { "new" } else { "null" };
        format!(
            "create function f() returns trigger language plpgsql as $$ begin if pg_trigger_depth() = 1 then {body}; end if; return {end}; end $$
             create trigger a_nested {trigger} execute function f()
             ADD(510)
             ADD(1)
             ADD(1)
             ADD(1)
             ADD(700)
             begin; ADD(600); delete from users where id % 3 = 0; ADD(600); commit
             begin; savepoint s; ADD(600); rollback to s; ADD(600); commit
             delete from users where id % 7 = 0
             truncate users cascade
             ADD(1)"
        )
    };
    for (trigger, body) in [
        ("after insert on users for each row", "ADD(1)"),
        ("before insert on users for each row", "ADD(1)"),
        ("after insert on users for each statement", "ADD(600)"),
        ("before insert on users for each statement", "ADD(600)"),
        ("after insert on users for each row", "delete from users where id = new.id - 512"),
        ("after delete on users for each row", "ADD(2)"),
        ("after delete on users for each statement", "ADD(600)"),
        ("before truncate on users for each statement", "ADD(600)"),
        ("after truncate on users for each statement", "ADD(600)"),
    ] {
        counts_survive(&nested(trigger, body));
    }
}

#[test]
fn cascades_and_merges_change_users_too() {
    counts_survive(
        "create table orgs (id int primary key)
         insert into orgs select generate_series(1, 9)
         alter table users add org int default 9 references orgs on delete cascade
         ADD(511)
         update users set org = 1 + id % 9
         with gone as (delete from orgs where id = 1) ADD(1)
         with gone as (delete from orgs where id < 4) ADD(600)
         update users set org = 4 + id % 6
         with new as (ADD(600)) delete from orgs where id < 6",
    );
    let version = Database::empty().value("current_setting('server_version_num')");
    if version.parse::<u32>().expect("a number") < 150_000 {
        return; // knows no MERGE
    }
    let merge = "merge into users u using generate_series(FROM) i on u.id = i \
                 when matched then delete \
                 when not matched then insert (name, email) values ('n', gen_random_uuid() || '@example.com')";
    let merge = |from: &str| merge.replace("FROM", from);
    counts_survive(&format!(
        "ADD(511)
         {}
         {}
         {}
         {}",
        merge("511, 512"),
        merge("100, 1200"),
        merge("1, 3000"),
        merge("0, -1"),
    ));
}

#[test]
fn nobody_needs_more_rights_than_those_on_users_nor_gets_at_the_counts() {
    let database = Database::create();
    let (mut client, mut dice) = (database.client(), Dice(7));
    let (writer, unprivileged) =
        (format!("{}_writer", database.name()), format!("{}_unprivileged", database.name()));
    let grants = format!(
        "create role {writer}; create role {unprivileged}; \
         grant insert, delete, truncate, select on users to {writer}; grant truncate on credentials to {writer}"
    );
    client.batch_execute(&grants).expect("roles");
    let writes = "ADD(1100) | ADD(1) | delete from users where id between 400 and 700 \
                  | with gone as (delete from users where id > 900) ADD(600) | truncate users, credentials | ADD(3) \
                  | create temp table user_counts (block bigint, n int); ADD(7); drop table pg_temp.user_counts";
    for statement in with_inserts(writes).split(" | ") {
        let as_writer = format!("set role {writer}; {statement}; reset role");
        client.batch_execute(&as_writer).unwrap_or_else(|error| panic!("{statement}: {error:?}"));
        compare(&mut client, &mut dice);
    }

    // Operators in a writer's search_path are not used with the owner's rights.
    let mut decoys = "create schema decoys; grant usage on schema decoys to public;".to_owned();
    for (operators, left, right) in [
        (&["=", "<>", "<=", ">=", "&", "+"][..], "bigint", "bigint"),
        (&[">>", "&", "+", "<="], "bigint", "int"),
        (&["=", "<>", "||"], "text", "text"),
        (&["<", ">=", "<>"], "timestamptz", "timestamptz"),
    ] {
        decoys += &format!(
            "create function decoys.f({left}, {right}) returns boolean language plpgsql as \
                 $$ begin raise exception 'a decoy was used'; end $$;"
        );
        for operator in operators {
            decoys += &format!(
                "create operator decoys.{operator} (leftarg = {left}, rightarg = {right}, function = decoys.f);"
            );
        }
    }
    decoys += &format!(
        "set search_path = decoys, pg_catalog, public; set role {writer}; \
         insert into users (name, email) values ('a', 'decoy1@example.com'); \
         insert into users (name, email) values ('a', 'decoy2@example.com'); \
         insert into users (name, email) values ('a', 'decoy3@example.com'); \
         delete from users where email like 'decoy_@example.com'; \
         reset role; reset search_path; drop schema decoys cascade"
    );
    client.batch_execute(&decoys).expect("no decoy is used");
    compare(&mut client, &mut dice);

    let functions = "select proname || '(' || coalesce((select string_agg('null', ',') \
                     from generate_series(1, pronargs)), '') || ')', prorettype = 'trigger'::regtype \
                     from pg_proc where proname like 'user\\_counts\\_%' order by 1";
    let functions = client.query(functions, &[]).expect("functions");
    assert_eq!(functions.len(), 2, "{functions:?}");
    for role in [&writer, &unprivileged] {
        for function in &functions {
            let (call, is_trigger): (String, bool) = (function.get(0), function.get(1));
            let select = format!("set local role {role}; select {call}");
            let trigger = format!(
                "set local role {role}; create temp table changed_ids (id bigint); \
                 create trigger t after insert on changed_ids \
                 referencing new table as changed for each statement execute function {call}"
            );
            let attempt = if is_trigger { trigger } else { select };
            let mut transaction = client.transaction().expect("a transaction");
            let error = transaction.batch_execute(&attempt).expect_err(&attempt);
            assert_eq!(error.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{attempt}: {error:?}");
        }
    }
    compare(&mut client, &mut dice);
    client
        .batch_execute(&format!("drop owned by {writer}, {unprivileged}; drop role {writer}, {unprivileged}"))
        .expect("they own nothing");
}
