//! The statements that make and drop databases to be thrown away, and fill them. Their errors are one line.

use super::{explain, migrate::Migrations, tls};
use postgres::{Client, Config, Error, config::SslMode, types::Type};
use std::{sync::mpsc, thread, time::Instant};

/// Any number will do; held while a template is made.
const TEMPLATE_LOCK: i64 = 0x0075_7365_7264;

/// A database whose owner, the session that created it, has ended.
const LEFTOVER: &str = "\
    select datname from pg_catalog.pg_database \
    where datname::text operator(pg_catalog.~) '^userd_scratch_[0-9]+_[0-9]+$' \
        and pg_catalog.split_part(datname::text, '_', 3)::int operator(pg_catalog.<>) all (array( \
            select pid from pg_catalog.pg_stat_activity where datname operator(pg_catalog.=) 'postgres' \
                and pid operator(pg_catalog.<>) pg_catalog.pg_backend_pid())) \
    limit 1";

/// Those of a session that has ended, and had this one's number.
const NAMESAKES: &str = "\
    select datname from pg_catalog.pg_database where datname::text operator(pg_catalog.~) \
        pg_catalog.concat('^userd_scratch_', pg_catalog.pg_backend_pid(), '_[0-9]+$')";

/// Ends the sessions of a database and waits until they have ended: `drop database` would look every 100 ms only.
const END_SESSIONS: &str = r"
    do $$ begin
        for i in 1..100 loop
            perform pg_stat_clear_snapshot();
            perform pg_terminate_backend(pid) from pg_stat_activity where datname = 'DATABASE';
            exit when not found;
            perform pg_sleep(0.001);
        end loop;
    end $$";

/// A connection without TLS. By the service's own connector: with another one, the client's code would be compiled
/// twice.
pub fn connect(connection_string: &str) -> Result<Client, Error> {
    let plain = tls::connector(&tls::TlsSettings::default()).expect("it reads no certificate");
    let mut config: Config = connection_string.parse()?;
    config.ssl_mode(SslMode::Disable).connect(plain)
}

/// Drops what a session left that had this one's number.
pub fn drop_namesakes(client: &mut Client) -> Result<(), Error> {
    for row in client.query_typed(NAMESAKES, &[])? {
        drop_database(client, row.get(0))?;
    }
    Ok(())
}

/// Drops what ended processes left, one after the other, each looked at right before: the number of its owner may
/// become another session's.
pub fn drop_leftovers(connection_string: &str) -> Result<(), Error> {
    let mut client = connect(connection_string)?;
    while let Some(row) = client.query_typed(LEFTOVER, &[])?.first() {
        let name: &str = row.get(0);
        log::debug!("dropping {name}, which an ended process left");
        drop_database(&mut client, name)?;
    }
    Ok(())
}

/// The number of the session, and the server's version.
pub fn session(client: &mut Client) -> Result<(i32, String), Error> {
    let ask = "select pg_catalog.pg_backend_pid(), pg_catalog.current_setting('server_version')";
    let row = client.query_typed_one(ask, &[])?;
    Ok((row.get(0), row.get(1)))
}

/// Makes a migrated template of this name, unless it is there. `connect` connects to it. Only a finished one is marked
/// as a template; it accepts no connection, so that it can be cloned at any time.
pub fn make_template(
    client: &mut Client,
    name: &str,
    migrations: Migrations,
    connect: impl Fn() -> Result<Client, Error>,
) -> Result<(), String> {
    let run = |client: &mut Client, sql: &str| client.batch_execute(sql).map_err(|error| explain(&error));
    let make = |client: &mut Client| {
        let ask = "select from pg_catalog.pg_database where datname::text operator(pg_catalog.=) $1 and datistemplate";
        let made = client.query_typed(ask, &[(&name, Type::TEXT)]).map_err(|error| explain(&error))?;
        if made.is_empty() {
            drop_database(client, name).map_err(|error| explain(&error))?;
            run(client, &format!("create database {name}"))?;
            let connect = || connect().map_err(|error| explain(&error));
            migrations.apply(&mut connect()?, &mut connect()?)?;
            run(client, &format!("alter database {name} with is_template true allow_connections false"))?;
        }
        Ok(())
    };
    run(client, &format!("select pg_catalog.pg_advisory_lock({TEMPLATE_LOCK})"))?;
    let made = make(client);
    run(client, &format!("select pg_catalog.pg_advisory_unlock({TEMPLATE_LOCK})"))?;
    made
}

/// Makes a database as the template is.
pub fn create_database(client: &mut Client, name: &str, template: &str) -> Result<(), Error> {
    client.batch_execute(&format!("create database {name} template {template}"))
}

/// Ends the sessions of a database, and drops it.
pub fn drop_with_sessions(client: &mut Client, name: &str) -> Result<(), Error> {
    client.batch_execute(&END_SESSIONS.replace("DATABASE", name))?;
    drop_database(client, name)
}

fn drop_database(client: &mut Client, name: &str) -> Result<(), Error> {
    client.batch_execute(&format!("drop database if exists {name} with (force)"))
}

/// Only a superuser may create in the schema `public` of a database from now on, as it is by itself from version 15 on.
pub fn close_schema(connection_string: &str) -> Result<(), Error> {
    connect(connection_string)?.batch_execute("revoke create on schema public from public")
}

/// How a cluster's superuser reaches a database over the socket in a directory.
pub fn connection_string(socket_dir: &str, port: &str, database: &str) -> String {
    /// A value of libpq's keyword/value connection strings.
    fn quote(value: &str) -> String {
        format!("'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"))
    }
    let (host, database) = (quote(socket_dir), quote(database));
    format!("host={host} port={port} user=postgres dbname={database}")
}

/// Whether a server answers a query. On a thread, since a hung server would hold the client for ever; at most until the
/// deadline. The error is one line.
pub fn answers(connection_string: String, deadline: Instant) -> Result<(), String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let answer = connect(&connection_string).and_then(|mut client| client.batch_execute("select 1"));
        let _ = sender.send(answer.map_err(|error| match error.as_db_error() {
            Some(error) => error.message().to_owned(),
            None => error.to_string(),
        }));
    });
    let left = deadline.saturating_duration_since(Instant::now());
    receiver.recv_timeout(left).unwrap_or_else(|_| Err("a connection was not answered".to_owned()))
}

/// Stores users with these ids, and has the next user get an id above theirs.
#[cfg(feature = "testing")]
pub fn store(url: &str, ids: &[i64], names: &[&str], emails: &[&str]) -> Result<(), Error> {
    const STORE: &str = "\
        with stored as (insert into users (id, name, email) overriding system value \
            select * from rows from (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::text[]), \
                pg_catalog.unnest($3::text[])) as given (id, name, email) returning id) \
        select pg_catalog.setval(pg_catalog.pg_get_serial_sequence('users', 'id')::pg_catalog.regclass, \
            pg_catalog.max(id)) from stored";
    let params =
        [(&ids as _, Type::INT8_ARRAY), (&names as _, Type::TEXT_ARRAY), (&emails as _, Type::TEXT_ARRAY)];
    connect(url)?.query_typed(STORE, &params).map(drop)
}

/// Stores so many users, `User 1` with `user1@example.com` and so on, counted on with each call; their ids.
#[cfg(feature = "testing")]
pub fn seed(url: &str, count: u32) -> Result<Vec<i64>, Error> {
    const SEED: &str = "\
        with start as (select coalesce(pg_catalog.max( \
            pg_catalog.substring(email, '^user([0-9]{1,9})@example[.]com$')::bigint), 0) as taken from users) \
        insert into users (name, email) \
        select pg_catalog.concat('User ', taken operator(pg_catalog.+) i), \
            pg_catalog.concat('user', taken operator(pg_catalog.+) i, '@example.com') \
        from start, pg_catalog.generate_series(1, $1::bigint) as i order by i returning id";
    let rows = connect(url)?.query_typed(SEED, &[(&i64::from(count), Type::INT8)])?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}
