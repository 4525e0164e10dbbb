//! The counts behind pages: the same as counting, whoever writes, and however.

use crate::support::{Database, Service};
use postgres::{Client, IsolationLevel};
use serde_json::Value;
use std::{
    io::Write,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

const PAGES: &str = include_str!("../../src/db/pages.sql");

/// A small generator, so that a failure can be repeated by its seed (xorshift64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// One change of a random kind. Errors of its own making (equal addresses, deadlocks) undo it, as they may.
fn change(client: &mut Client, dice: &mut Dice) -> Result<(), postgres::Error> {
    let some_id = "(select id from users offset floor(random() * 2000) limit 1)";
    let insert = "insert into users (name, email) select 'n', gen_random_uuid() || '@example.com'";
    let mut transaction = client.transaction()?;
    match dice.roll(9) {
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
        _ => transaction.batch_execute(
            "update users set name = name || '.' where id in (select id from users limit 3)",
        )?,
    }
    match dice.roll(4) {
        0 => transaction.rollback(),
        _ => transaction.commit(),
    }
}

/// In one snapshot: some pages by the counts, against counting.
fn compare(client: &mut Client, dice: &mut Dice) {
    let builder = client.build_transaction();
    let snapshot = builder.isolation_level(IsolationLevel::RepeatableRead).start();
    let mut snapshot = snapshot.expect("a snapshot");
    let total: i64 = snapshot.query_one("select count(*) from users", &[]).expect("a count").get(0);
    let positions = [0, dice.roll(total.max(1) as u64) as i64, (total - 3).max(0), total, i64::MAX];
    let limits = [15_i64; 5];
    let rows = snapshot.query(PAGES, &[&positions.as_slice(), &limits.as_slice()]);
    let rows = rows.expect("pages");
    for (ordinal, position) in (1_i64..).zip(positions) {
        let page = rows.iter().filter(|row| row.get::<_, i64>(0) == ordinal);
        let (totals, ids): (Vec<i64>, Vec<Option<i64>>) =
            page.map(|row| (row.get::<_, i64>(1), row.get::<_, Option<i64>>(2))).unzip();
        assert!(!totals.is_empty() && totals.iter().all(|one| *one == total), "{totals:?} {total}");
        let plain = "select id from users order by id offset $1 limit 15";
        let expected = snapshot.query(plain, &[&position]).expect("ids");
        let expected: Vec<i64> = expected.iter().map(|row| row.get(0)).collect();
        assert_eq!(ids.into_iter().flatten().collect::<Vec<_>>(), expected, "at {position} of {total}");
    }
}

#[test]
fn the_counts_are_exact_after_and_during_changes_of_every_kind() {
    let service = Service::start();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = (1..=4)
            .map(|seed| {
                let mut client = service.database.client();
                scope.spawn(move || {
                    let mut dice = Dice(0x9E37_79B9_7F4A_7C15 / seed);
                    let mut refused = 0;
                    for _ in 0..150 {
                        if let Err(error) = change(&mut client, &mut dice) {
                            // 23505 and 40P01 are the writers' own; anything else is not.
                            let code = error.code().map(|code| code.code().to_owned());
                            assert!(matches!(code.as_deref(), Some("23505" | "40P01")), "{error:?}");
                            refused += 1;
                        }
                    }
                    refused
                })
            })
            .collect();
        let reader = scope.spawn(|| {
            let (mut client, mut dice) = (service.database.client(), Dice(42));
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) {
                compare(&mut client, &mut dice);
                rounds += 1;
            }
            rounds
        });
        // Before their results are looked at: the reader goes on until it is told.
        let results: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        done.store(true, Ordering::Relaxed);
        let refused: usize = results.into_iter().map(|result| result.expect("a writer")).sum();
        let rounds = reader.join().expect("a reader");
        assert!(rounds > 3 && refused < 300, "{rounds} rounds, {refused} refused");
    });
    every_page_is_right(&service);
    service.database.client().batch_execute("truncate users cascade").expect("a truncate");
    every_page_is_right(&service);
    let more =
        "insert into users (name, email) select 'n', i || '@example.com' from generate_series(1, 33) i";
    service.database.client().batch_execute(more).expect("users");
    every_page_is_right(&service);
}

/// Walks the whole list over HTTP and compares it with the table.
fn every_page_is_right(service: &Service) {
    let rows = service.database.client().query("select id from users order by id", &[]).expect("ids");
    let expected: Vec<String> = rows.iter().map(|row| row.get::<_, i64>(0).to_string()).collect();
    let mut client = service.client();
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

#[test]
fn ids_stay_as_they_are() {
    let database = Database::create();
    let service = userd::server::Server::start(database.config()).expect("a server");
    let mut client = database.client();
    client.batch_execute("insert into users (name, email) values ('n', 'a@b.co')").expect("a user");
    let error = client.batch_execute("update users set id = default").expect_err("ids are fixed");
    assert_eq!(error.code().map(|code| code.code()), Some("23000"));
    client.batch_execute("update users set name = 'm'").expect("names are not");
    service.stop();
}
