//! PgBouncer between userd and its database, in each of its modes, and pgpool-II. No setting tells userd of them.

use crate::{
    program, serve,
    support::{
        Account, Client, Daemon, LONG, LONG_ON_DISK, Own, PASSWORD, Process, eventually, every_verb,
        free_port, hash,
    },
};
use nix::sys::signal::Signal;
use std::{net::TcpStream, process::Command, thread};

/// A pooler of a cluster, with these settings.
struct Pooled {
    // Ended before its directory goes.
    _pgbouncer: Daemon,
    _account: Account,
    url: String,
}

impl Pooled {
    fn start(own: &Own, settings: &str) -> Pooled {
        let account = Account::new();
        let port = free_port();
        let users = account.write("users.txt", "\"app\" \"\"\n\"postgres\" \"\"\n");
        let file = account.write(
            "pgbouncer.ini",
            &format!(
                "[databases]\npostgres = host={}\n[pgbouncer]\nuser = {}\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
                 unix_socket_dir =\nauth_type = trust\nauth_file = {}\n{settings}\n",
                own.socket_dir().display(),
                account.name,
                users.display()
            ),
        );
        let mut command = Command::new(program("pgbouncer", "pgbouncer"));
        let pgbouncer = serve(command.arg(file).current_dir("/"), Signal::SIGINT);
        eventually(LONG, "the port is listened on", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        let url = format!("postgres://app@127.0.0.1:{port}/postgres?sslmode=disable");
        Pooled { _pgbouncer: pgbouncer, _account: account, url }
    }
}

fn database() -> Own {
    let own = Own::start();
    own.run("create role app login; grant create on schema public to app");
    own
}

fn check(url: &str, variables: &[(&str, &str)]) -> (i32, String) {
    let (code, stdout, _) =
        Process::start(&["check"], &[&[("DATABASE_URL", url)], variables].concat()).ended();
    (code, stdout)
}

/// A start finds the pooler out, serves every request, and leaves nothing in the sessions of other programs.
#[test]
fn a_pooler_in_transaction_mode_is_found() {
    let own = database();
    let pooled = Pooled::start(&own, "pool_mode = transaction\ndefault_pool_size = 4");
    let mut process = Process::at(&pooled.url, &[]);
    let url = process.wait_for_url();
    every_verb(&url, "found");
    let others = |name: &str| -> String {
        let mut client = postgres::Client::connect(&pooled.url, postgres::NoTls).expect("pgbouncer");
        client.query_typed_one(&format!("show {name}"), &[]).unwrap().get(0)
    };
    for (name, value) in [
        ("enable_seqscan", "on"),
        ("statement_timeout", "0"),
        ("lock_timeout", "0"),
        ("search_path", "\"$user\", public"),
        ("plan_cache_mode", "auto"),
    ] {
        (0..8).for_each(|_| assert_eq!(others(name), value, "{name}"));
    }
    let log = process.stderr();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("DB_PREPARED=false")).collect();
    assert_eq!(warnings.len(), 1, "{log}");
    for part in ["[WARN] a pooler lends", "statement_timeout is 0: alter role app", "lock_timeout is 0: "] {
        assert!(warnings[0].contains(part), "{part}: {log}");
    }
    // A check judges as a start does, and its remedies are enough.
    let (code, found) = check(&pooled.url, &[]);
    let note = "note     database: a pooler lends its sessions for one transaction each: userd serves as with DB_PREPARED=false";
    assert!(code == 1 && found.contains(note), "{found}");
    for line in found.lines().filter(|line| line.starts_with("problem")) {
        let line = line.strip_prefix("problem  settings: ").unwrap_or_else(|| panic!("{found}"));
        own.run(&format!("alter {}", line.split_once(": alter ").expect("what to do").1));
    }
    own.run("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'");
    let (code, found) = check(&pooled.url, &[]);
    assert!(code == 0 && found.contains(note), "{found}");
    // Longer than half of REQUEST_TIMEOUT is too long, shorter is not.
    for (time, code) in [("6s", 1), ("2s", 0)] {
        own.run(&format!("alter role app in database postgres set statement_timeout = '{time}'"));
        own.run("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'");
        let (found_code, found) = check(&pooled.url, &[("DB_PREPARED", "false")]);
        assert_eq!(found_code, code, "{time}: {found}");
        assert_eq!(found.contains("statement_timeout is 6s"), code == 1, "{found}");
    }
    let (_, found) = check(&pooled.url, &[("DB_PREPARED", "true")]);
    assert!(found.contains(note), "{found}");
}

/// Many other clients share the pool: one that stays out of their way is found all the same, and commands leave nothing
/// behind, either.
#[test]
fn a_busy_pooler_is_found() {
    let own = database();
    let pooled = Pooled::start(&own, "pool_mode = transaction\ndefault_pool_size = 6");
    let others: Vec<_> = (0..12)
        .map(|_| {
            let mut client = postgres::Client::connect(&pooled.url, postgres::NoTls).expect("pgbouncer");
            // Until the test ends the pooler.
            thread::spawn(move || while client.batch_execute("select pg_sleep(0.002)").is_ok() {})
        })
        .collect();
    // Replicas of which the first one migrates look at once.
    let mut replicas = [0; 5].map(|_| Process::at(&pooled.url, &[("DB_POOL_SIZE", "2")]));
    for replica in &mut replicas {
        replica.wait_for_url_within(LONG_ON_DISK);
        replica.logs("userd serves as with DB_PREPARED=false");
    }
    for arguments in [&["export"][..], &["migrate"], &["check"]] {
        Process::start(arguments, &[("DATABASE_URL", &pooled.url)]).ended();
    }
    let mut client = postgres::Client::connect(&pooled.url, postgres::NoTls).expect("pgbouncer");
    for _ in 0..30 {
        let row = client.query_typed_one("select current_setting('search_path')", &[]).unwrap();
        assert_eq!(row.get::<_, &str>(0), "\"$user\", public");
    }
    drop((client, pooled));
    others.into_iter().for_each(|other| other.join().expect("it ends"));
}

/// In session mode, a session is a client's own: it holds statements and settings.
#[test]
fn a_pooler_in_session_mode_is_as_good_as_none() {
    let own = database();
    let pooled =
        Pooled::start(&own, "pool_mode = session\ndefault_pool_size = 20\nserver_reset_query = DISCARD ALL");
    let mut process = Process::at(&pooled.url, &[]);
    every_verb(&process.wait_for_url(), "session");
    assert!(!process.stderr().contains("pooler"), "{}", process.stderr());
    let (code, found) = check(&pooled.url, &[]);
    assert!(code == 0 && !found.contains("pooler") && !found.contains("settings"), "{found}");
}

/// A pooler that forbids transactions of several statements serves what is migrated.
#[test]
fn a_pooler_in_statement_mode() {
    let own = database();
    let pooled = Pooled::start(&own, "pool_mode = statement\ndefault_pool_size = 4");
    let (code, found) = check(&pooled.url, &[]);
    assert!(code == 1 && found.contains("migrations need transactions (pool_mode of PgBouncer)"), "{found}");
    let (code, _, stderr) = Process::at(&pooled.url, &[]).ended();
    assert!(
        code == 1 && stderr.contains("migrations need transactions (pool_mode of PgBouncer)"),
        "{stderr}"
    );
    let direct = own.url().replace("user=postgres", "user=app");
    assert_eq!(Process::start(&["migrate"], &[("DATABASE_URL", &direct)]).ended().0, 0);
    let mut process = Process::at(&pooled.url, &[]);
    every_verb(&process.wait_for_url(), "statement");
    process.logs("userd serves as with DB_PREPARED=false");
}

/// Migrations need two sessions at once, and say so.
#[test]
fn a_pooler_with_one_session() {
    for mode in ["transaction", "session"] {
        let own = database();
        let pooled = Pooled::start(&own, &format!("pool_mode = {mode}\ndefault_pool_size = 1"));
        let (code, _, stderr) = Process::at(&pooled.url, &[("DB_CONNECT_TIMEOUT", "3")]).ended();
        let last = stderr.lines().last().expect("a line");
        assert_eq!(code, 1, "{stderr}");
        assert!(
            last.contains("migrations need two sessions at once (default_pool_size of PgBouncer)"),
            "{last}"
        );
        let (code, found) = check(&pooled.url, &[("DB_CONNECT_TIMEOUT", "3")]);
        let problem = found.lines().find(|line| line.starts_with("problem  migrations: ")).expect(&found);
        assert!(code == 1 && problem.contains("migrations need two sessions at once"), "{found}");
        let tables = "select count(*) from pg_class where relname = 'users'";
        assert_eq!(own.client().query_one(tables, &[]).unwrap().get::<_, i64>(0), 0);
    }
    // A service on a migrated database needs one.
    let own = database();
    let direct = own.url().replace("user=postgres", "user=app");
    assert_eq!(Process::start(&["migrate"], &[("DATABASE_URL", &direct)]).ended().0, 0);
    let pooled = Pooled::start(&own, "pool_mode = transaction\ndefault_pool_size = 1");
    let mut process = Process::at(&pooled.url, &[]);
    let mut client = Client::new(&process.wait_for_url());
    assert_eq!(client.get("/users").status, 200);
}

/// The connection string names a schema, and the pooler does not: nothing is made or read in another one.
#[test]
fn a_pooler_that_ignores_the_schema() {
    for mode in ["session", "transaction"] {
        let own = database();
        own.run("create schema userd authorization app");
        let settings =
            format!("pool_mode = {mode}\ndefault_pool_size = 8\nignore_startup_parameters = options");
        let pooled = Pooled::start(&own, &settings);
        let url = format!("{}&options=-csearch_path%3Duserd", pooled.url);
        let is_refused = |told: &str| {
            for arguments in [&["--port=0"][..], &["migrate"], &["export"], &["check"]] {
                let (code, stdout, stderr) = Process::start(arguments, &[("DATABASE_URL", &url)]).ended();
                assert!(code == 1 && (stdout + &stderr).contains(told), "{arguments:?}: {stderr}");
            }
        };
        let ignored = "a pooler ignores `options` of DATABASE_URL, and the session has the schema \"public\"";
        is_refused(ignored);
        let tables = "select count(*) from pg_class where relname = 'users'";
        assert_eq!(own.client().query_one(tables, &[]).unwrap().get::<_, i64>(0), 0);
        // Users of another service are not served, either.
        let direct = own.url().replace("user=postgres", "user=app");
        assert_eq!(Process::start(&["migrate"], &[("DATABASE_URL", &direct)]).ended().0, 0);
        is_refused(ignored);
        own.run("alter role app in database postgres set search_path = userd, pg_temp");
        own.run("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'");
        let migrated = Process::start(&["migrate"], &[("DATABASE_URL", &url)]).ended();
        assert_eq!(migrated.0, 0, "{migrated:?}");
        every_verb(&Process::at(&url, &[]).wait_for_url(), mode);
        let users = "select count(*) from public.users";
        assert_eq!(own.client().query_one(users, &[]).unwrap().get::<_, i64>(0), 0);
    }
}

/// pgpool-II answers no COPY of the extended protocol, so an import and an export do without.
#[test]
fn pgpool_passes_a_service_an_import_and_an_export() {
    let own = database();
    let account = Account::new();
    let (port, dir) = (free_port(), account.dir().display());
    let settings = format!(
        "listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = ''\npcp_port = {}\n\
         pcp_socket_dir = '{dir}'\nbackend_hostname0 = '{}'\nbackend_port0 = 5432\nbackend_clustering_mode = 'raw'\n\
         pid_file_name = '{dir}/pid'\nlogdir = '{dir}'\nwork_dir = '{dir}'\nnum_init_children = 16\n",
        free_port(),
        own.socket_dir().display()
    );
    let file = account.write("pgpool.conf", &settings);
    let empty = account.write("empty", "");
    let program = program("pgpool", "pgpool2");
    let mut command = account.command(program.to_str().expect("UTF-8"));
    command.arg("-n").arg("-f").arg(file).arg("-F").arg(&empty).arg("-a").arg(&empty);
    let _pgpool = serve(&mut command, Signal::SIGINT);
    eventually(LONG, "the port is listened on", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    let url = format!("postgres://app@127.0.0.1:{port}/postgres?sslmode=disable");
    let variables = [("DATABASE_URL", url.as_str())];
    let (code, _, said) = Process::start(&["migrate"], &variables).ended();
    assert_eq!(code, 0, "{said}");
    let hash = hash(PASSWORD);
    let user = |n: u32| format!("n,{n}@example.com,{n},\"{hash}\"\n");
    let users: String = (1..=3000).map(user).collect();
    let users = account.write("users.csv", &format!("name,email,id,passwordHash\n{users}"));
    let mut import = Process::start(&["import", "--keep-ids", users.to_str().expect("UTF-8")], &variables);
    assert_eq!(import.wait(LONG_ON_DISK), 0, "{}", import.stderr());
    let (code, exported, said) = Process::start(&["export"], &variables).ended();
    assert_eq!((code, exported.lines().count()), (0, 3000), "{said}");
    let mut process = Process::at(&url, &[]);
    let mut client = Client::new(&process.wait_for_url());
    assert!(client.opens("3000@example.com", PASSWORD));
}
