//! Schemas: the one that a start has found stays in use, and tables in another one are not left without a word.

use crate::support::{ADA, ADA_1, Client, Database, Ended, GRACE, Process, TempDir, check};

/// A database, and a role that may create in `public`.
struct Place {
    database: Database,
    role: String,
}

impl Place {
    fn new() -> Place {
        let database = Database::empty();
        // Other tests run in other databases of the cluster.
        let role = format!("{}_app", database.name());
        let place = Place { database, role };
        place.run("create role ROLE login; grant create on schema public to ROLE; grant create on database NAME to ROLE");
        place
    }

    fn of_role(&self, text: &str) -> String {
        text.replace("ROLE", &self.role).replace("NAME", self.database.name())
    }

    fn run(&self, sql: &str) {
        self.database.run(&self.of_role(sql));
    }

    /// Returns the connection string of the role, with an option unless it is empty.
    fn url(&self, option: &str) -> String {
        let url = self.database.url().replace("user=postgres", &format!("user={}", self.role));
        if option.is_empty() { url } else { format!("{url} options='{}'", self.of_role(option)) }
    }

    fn userd(&self, arguments: &[&str], option: &str) -> Ended {
        let variables = [("DATABASE_URL", &*self.url(option)), ("HOST", "127.0.0.1")];
        Process::start(arguments, &variables).ended()
    }

    /// Starts a service that has one user, and ends it.
    fn with_a_user(&self) {
        let mut process = Process::at(&self.url(""), &[]);
        check(&mut process.client(), &format!("POST /users {ADA} => 201 {ADA_1}"));
    }

    /// Every verb ends with one line that names both schemas, and makes nothing. Returns the line.
    fn is_refused(&self, used: &str, option: &str) -> String {
        let tables = "select count(*) from pg_class where relkind in ('r', 'v') and relname = 'users'";
        let before = self.database.value(tables);
        let mut said = String::new();
        for arguments in [
            &["--port=0"][..],
            &["--port=0", "--migrate=off"],
            &["export"],
            &["import"],
            &["recount"],
            &["grants", "postgres"],
            &["check"],
        ] {
            let (code, stdout, stderr) = self.userd(arguments, option);
            assert_eq!(code, 1, "{arguments:?}: {stdout}{stderr}");
            let output = if arguments == ["check"] { &stdout } else { &stderr };
            assert!(arguments == ["check"] || stdout.is_empty(), "{arguments:?}: {stdout}");
            let line = output.lines().find(|line| line.contains("has userd's tables"));
            let line = line.unwrap_or_else(|| panic!("{arguments:?}: {stdout}{stderr}"));
            assert!(
                line.contains("the schema \"public\" has") && line.contains(&self.of_role(used)),
                "{line}"
            );
            said = line.to_owned();
        }
        assert_eq!(self.database.value(tables), before);
        said
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.run("drop owned by ROLE cascade; drop role ROLE");
        }
    }
}

/// The hardening of PostgreSQL's manual, done under a running service: a schema for each role.
#[test]
fn a_schema_that_appears() {
    for (before, path, schema) in [
        ("", "create schema ROLE authorization ROLE", "the schema \"ROLE\""),
        (
            "alter role ROLE set search_path = crm, public",
            "create schema crm; grant usage on schema crm to ROLE",
            "the schema \"crm\"",
        ),
        (
            "alter database NAME set search_path = \"The crm\", public",
            "create schema \"The crm\" authorization ROLE",
            "the schema \"The crm\"",
        ),
        // Tables of another program are there already, and a history of its own.
        (
            "alter role ROLE in database NAME set search_path = crm, public",
            "create schema crm authorization ROLE; create table crm.users (id int); create table crm.refinery_schema_history \
                as select 1 as version, 'orders' as name, '' as applied_on, '123' as checksum; \
                grant select on all tables in schema crm to ROLE",
            "the schema \"crm\"",
        ),
        // A way of writing it that names no schema.
        ("", "alter role ROLE set search_path to '$user, public'", "no schema"),
    ] {
        let place = Place::new();
        place.run(before);
        let mut process = Process::at(&place.url(""), &[]);
        let mut client = process.client();
        check(&mut client, &format!("POST /users {ADA} => 201 {ADA_1}"));
        place.run(path);
        place.database.end_sessions();
        let rows = format!("GET /users/1 => 200 {ADA_1}\nPOST /users {GRACE} => 201 *\nGET /readyz => 200 *");
        check(&mut client, &rows);
        check(
            &mut Client::new(&process.wait_for_url()),
            "GET /users/2 => 200 {\"id\":\"2\",\"name\":\"Grace\",*",
        );
        drop(process);

        let line = place.is_refused(schema, "");
        place.run(line.split('`').nth(1).expect("a statement"));
        let mut process = Process::at(&place.url(""), &[]);
        check(&mut process.client(), &format!(r#"GET /users => 200 {{"data":[{ADA_1},*"#));
        let (code, found, _) = place.userd(&["check"], "");
        assert!(code == 0 && !found.contains("not used here"), "{found}");
    }
}

/// A second set of tables is made if the connection string names its schema, or by `userd migrate`, which says so.
#[test]
fn a_second_set_on_purpose() {
    for option in ["-csearch_path=crm", "-c search_path=CRM", "--search_path=\"crm\"", ""] {
        let place = Place::new();
        place.with_a_user();
        place.run("create schema crm authorization ROLE; alter role ROLE set search_path = crm, public");
        if option.is_empty() {
            place.is_refused("the schema \"crm\"", "");
            // An option for something else, or with a list, does not name the schema.
            place.is_refused("the schema \"crm\"", "-c search_path=crm,public -c jit=off");
            place.is_refused("the schema \"crm\"", "-c jit=off");
            let (code, stdout, stderr) = place.userd(&["migrate"], "");
            assert!(code == 0 && stdout.contains("V1__users"), "{stdout}{stderr}");
            assert!(stdout.contains("in the schema \"public\", too"), "{stdout}");
        }
        let mut process = Process::at(&place.url(option), &[]);
        check(&mut process.client(), &format!("GET /users/1 => 404 *\nPOST /users {GRACE} => 201 *"));
        let log = process.stderr();
        assert!(!log.contains("public"), "{log}");
        let (code, found, _) = place.userd(&["check"], option);
        let note = "note     schema: userd's tables are in the schema \"public\", too";
        assert!(code == 0 && found.contains(note), "{found}");
        assert_eq!(place.userd(&["migrate"], option).0, 0);
        let exported = |option| place.userd(&["export"], option).1;
        assert!(exported(option).contains("Grace") && exported("-csearch_path=public").contains("Ada"));
    }
}

/// Tables of another program are not taken for userd's, and neither are those that the role may not read.
#[test]
fn tables_of_other_programs() {
    let place = Place::new();
    place.with_a_user();
    for table in ["users", "credentials", "idempotency_keys", "user_counts", "refinery_schema_history"] {
        // All but this table, or this one of another kind; all of them, which the role may not read; all of them.
        place.run(&format!(
            "create schema a_{table}; create schema b_{table}; create schema c_{table}; create schema if not exists x; \
             create view b_{table}.{table} as select 1; \
             create unlogged table c_{table}.{table} (id int); create table x.{table} (id int)"
        ));
        for other in ["users", "credentials", "idempotency_keys", "user_counts", "refinery_schema_history"] {
            for schema in ["a", "b", "c"].iter().filter(|_| other != table) {
                place.run(&format!("create table {schema}_{table}.{other} as select * from public.{other}"));
            }
        }
    }
    let mut other = place.database.client();
    for table in ["users", "credentials", "idempotency_keys", "user_counts", "refinery_schema_history"] {
        other.batch_execute(&format!("create temporary table {table} (id int)")).unwrap();
        place.run(&format!(
            "grant usage on schema a_{table}, b_{table}, c_{table} to ROLE; grant select on all tables in schema \
             a_{table}, b_{table}, c_{table} to ROLE"
        ));
    }
    let look = || {
        let (code, found, _) = place.userd(&["check"], "");
        assert_eq!(code, 0, "{found}");
        found.lines().filter(|line| line.contains(", too")).count()
    };
    assert_eq!(look(), 0);
    place.run("grant select on all tables in schema x to ROLE");
    assert_eq!(look(), 0);
    place.run("grant usage on schema x to ROLE; revoke select on x.users from ROLE");
    assert_eq!(look(), 0);
    place.run("grant select on x.users to ROLE");
    assert_eq!(look(), 1);
}

/// No lock of another session, and no function of another role, is met by a look at other schemas.
#[test]
fn a_history_that_is_locked() {
    let place = Place::new();
    place.with_a_user();
    place.run("create schema ROLE authorization ROLE");
    let _lock = place.database.transaction("lock table public.refinery_schema_history");
    place.is_refused("the schema \"ROLE\"", "");
}

/// Migrations of a directory: theirs are found without it, and those that are built in with it.
#[test]
fn migrations_of_a_directory() {
    let dir = TempDir::next_release("alter table users add more text", true);
    for (first, then) in [(true, false), (false, true)] {
        let place = Place::new();
        let url = place.url("");
        let start = |with: bool| {
            let variables = [("MIGRATIONS_DIR", dir.name())];
            Process::at(&url, if with { &variables } else { &[] })
        };
        assert_eq!(start(first).client().post("/users", ADA).status, 201);
        place.run("create schema ROLE authorization ROLE");
        let (code, _, stderr) = start(then).ended();
        assert!(code == 1 && stderr.contains("the schema \"public\" has userd's tables"), "{stderr}");
    }
}

/// The advice for a role that may not make tables leads to the history of its search_path, which may be userd's.
#[test]
fn advice_leads_to_the_tables() {
    for hidden in [
        "revoke usage on schema public from public, ROLE",
        "revoke select on refinery_schema_history from ROLE",
        "revoke usage on schema public from public, ROLE; revoke select on refinery_schema_history from ROLE",
    ] {
        for crm in ["create schema crm; grant usage on schema crm to ROLE", "create schema crm"] {
            let place = Place::new();
            assert_eq!(Process::on(&place.database, &[]).client().post("/users", ADA).status, 201);
            let grants = || {
                Process::start(&["grants", &place.role], &[("DATABASE_URL", &place.database.url())]).ended().1
            };
            place
                .run(&format!("{} alter role ROLE set search_path = crm, public; {crm}; {hidden}", grants()));
            let mut lines = Vec::new();
            while place.userd(&["export"], "").0 != 0 {
                let (code, _, stderr) = place.userd(&["--port=0"], "");
                assert!(code == 1 && lines.len() < 4, "{stderr}");
                let line = stderr.lines().last().expect("a line").to_owned();
                match line.split('`').nth(1) {
                    Some("userd grants ROLE") => place.run(&grants()),
                    Some(remedy) => place.run(remedy),
                    None => panic!("{line}"),
                }
                lines.push(line);
            }
            assert!(!lines.concat().contains("schema crm to"), "{lines:?}");
            check(&mut Process::at(&place.url(""), &[]).client(), &format!("GET /users/1 => 200 {ADA_1}"));
        }
    }
}
