//! Logical replication: with a publication, changes go on; and a subscriber takes over under load, with every user that was
//! acknowledged, exact totals, and ids that go on.

use crate::support::{LONG_ON_DISK, Load, Own, Process, blocks, eventually, every_verb, shell};
use std::path::Path;
use userd::{Config, Database as Target, Server};

const PAGE: &str = include_str!("../../examples/deploy/replication/README.md");

/// The lines of the page: the copy, what empties the tables, the cut.
fn page() -> [&'static str; 3] {
    blocks(PAGE, "# To another PostgreSQL while userd serves\n").try_into().expect("three blocks")
}

fn serve(own: &Own) -> Server {
    let database = Target::Url(own.url().as_str().into());
    Server::start(Config { database, db_pool_size: 4, ..Config::default() }).expect("a server")
}

/// A cluster that may publish.
fn publisher() -> Own {
    let mut own = Own::start();
    own.run("alter system set wal_level = logical");
    own.restart();
    own
}

#[test]
fn changes_go_on_with_a_publication() {
    let own = publisher();
    let server = serve(&own);
    own.run("create publication everything for all tables");
    own.run("insert into users (name, email) select 'n', n::text from generate_series(1, 2000) n");
    every_verb(server.base_url(), "published");
    for sql in ["delete from users where id % 3 = 0", "update users set name = 'm'", "truncate users cascade"]
    {
        own.run(sql);
    }
    every_verb(server.base_url(), "again");
    let missing = "select count(*) from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace \
        and not (relreplident = 'f' or relreplident = 'd' and exists \
            (select from pg_index where indrelid = pg_class.oid and indisprimary))";
    assert_eq!(own.client().query_one(missing, &[]).expect("a count").get::<_, i64>(0), 0);
}

#[test]
fn to_the_next_server_under_load() {
    let [copy, _, cut] = page();
    to_the_next_server(copy, cut);
}

/// Some tools publish all tables, as they know none.
#[test]
fn to_the_next_server_by_a_publication_of_all_tables() {
    let [copy, empty, cut] = page();
    let (three, all) = ("for table users, credentials, idempotency_keys", "for all tables");
    let subscription = "psql -X -q \"$NEW\" -c \"create subscription";
    assert!(copy.contains(three) && copy.contains(subscription), "{copy}");
    let copy = copy.replace(three, all).replace(subscription, &format!("{empty}\n{subscription}"));
    to_the_next_server(&copy, cut);
}

fn to_the_next_server(copy: &str, cut: &str) {
    let (old, new) = (publisher(), Own::start());
    let server = serve(&old);
    let load = Load::start("moved", 4, server.base_url());
    load.creates(100);
    let run = |lines: &str| {
        // The servers are the test's own.
        let lines: Vec<&str> = lines.lines().filter(|line| !line.starts_with("OLD=")).collect();
        let servers = [("OLD", old.url()), ("NEW", new.url())];
        let (code, _, said) = shell(Path::new("/"), &lines.join("\n"), &servers);
        assert_eq!(code, 0, "{said}");
    };
    run(copy);
    load.creates(100);
    run(cut);
    let next = serve(&new);
    load.moves_to(next.base_url());
    load.creates(200);
    let books = load.stop();
    server.stop();
    books.check(&new.users());
    let url = new.url();
    let mut process = Process::start(&["check", "--counts"], &[("DATABASE_URL", &url)]);
    assert_eq!(process.wait(LONG_ON_DISK), 0, "{}", process.stdout());
    every_verb(next.base_url(), "moved-and-served");
    eventually(LONG_ON_DISK, "the slot is gone", || {
        old.client().query("select from pg_replication_slots", &[]).expect("rows").is_empty()
    });
}
