//! Tests tables that something other than the service has changed: a sequence behind the ids, wrong counts, row security, rights of
//! roles, and columns of other programs.

use crate::support::{Database, LONG, Process, Service, TempDir, eventually, every_verb};
use userd::{User, internals::operations};

/// Runs a command on the database. Returns its exit code, and its standard output before its standard error.
fn userd(database_url: &str, arguments: &[&str]) -> (i32, String) {
    let (code, stdout, stderr) = Process::start(arguments, &[("DATABASE_URL", database_url)]).ended();
    (code, stdout + &stderr)
}

// Tests of the sequence of ids

#[test]
fn a_check_finds_a_sequence_behind_the_ids() {
    let database = Database::create();
    let dir = TempDir::new();
    dir.write("new", r#"{"name":"new","email":"new@example.com"}"#);
    let new = dir.path().join("new");
    let new = new.to_str().unwrap();
    let problem = |what: &str| {
        let (code, said) = userd(&database.url(), &["check"]);
        let mut lines = said.lines().map(str::to_owned);
        let found = lines.find(|line| line.starts_with("problem  service: the sequence of ids"));
        assert_eq!(code, i32::from(found.is_some()), "{what}: {said}");
        found
    };
    assert_eq!(problem("no user, none drawn"), None);
    let end = "select setval('users_id_seq', 9223372036854775807)";
    database.run(end);
    database.run(problem(end).expect(end).split('`').nth(1).unwrap());
    assert_eq!(problem("no user, mended"), None);
    database.run("alter sequence users_id_seq restart");
    database
        .run("insert into users (name, email) select 'n', i || '@example.com' from generate_series(1, 20) i");
    assert_eq!(problem("as it should be"), None);
    database.run("alter sequence users_id_seq restart with 21");
    assert_eq!(problem("the next one is free"), None);
    database.run(end);
    database.run(problem(end).expect(end).split('`').nth(1).unwrap());
    assert_eq!(problem("mended"), None);
    for behind in ["alter sequence users_id_seq restart with 20", "select setval('users_id_seq', 19)"] {
        database.run(behind);
        let line = problem(behind).expect(behind);
        // An import that meets a taken id names `userd check`, and stores nothing.
        let (code, said) = userd(&database.url(), &["import", new]);
        assert!(code == 1 && said.contains("`userd check`"), "{said}");
        let mend = line.split('`').nth(1).unwrap();
        database.run(mend);
        assert_eq!(problem(mend), None);
        // The check after the remedy has drawn ids, beginning with 21.
        assert_ne!(database.value("select nextval('users_id_seq')"), "20", "{behind}");
    }
    assert_eq!(userd(&database.url(), &["import", new]).0, 0);
    assert_eq!(database.value("select string_agg(name, ' ') from users where id > 20"), "new");
}

/// A migration that adds a column to `users` fails this test, until `User` has a field for the column.
#[test]
fn the_columns_are_the_fields_of_a_user() {
    let service = Service::start();
    service.database.run("insert into users (name, email, version) values ('ada', 'ada@example.com', 7)");
    let ada = operations(service.server.app()).find_by_ids(&[1]).unwrap().remove(0);
    let User { id, name, email, created_at, updated_at, version, .. } = ada;
    assert_eq!((id, &*name, &*email, version), (1, "ada", "ada@example.com", 7));
    assert_eq!(created_at, updated_at);
    let columns = "select string_agg(attname, ' ' order by attnum) from pg_attribute \
        where attrelid = 'users'::regclass and attnum > 0";
    assert_eq!(service.database.value(columns), "id name email created_at updated_at version");
}

// Tests of the counts behind pages

#[test]
fn wrong_counts_are_found_and_mended() {
    let service = Service::start();
    let (mut client, url) = (service.client(), service.database.url());
    let add = "insert into users (name, email) select 'n', gen_random_uuid() || '@example.com' from generate_series(1, 3000)";
    service.database.run(add);
    let check = || userd(&url, &["check", "--counts"]);
    let (code, said) = check();
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("\nok       tables: the page counts are those of the 3000 users\n"), "{said}");
    let mut users = 3000;
    for broken in [
        "update user_counts set n = n + 1 where ctid = (select ctid from user_counts where block = 0 limit 1)",
        "ONE; delete from user_counts",
        "insert into user_counts values (9, 5)",
        "insert into user_counts select * from user_counts",
        "truncate user_counts",
        "alter table users disable trigger user_counts_delete; delete from users where id = 3; \
         alter table users enable trigger user_counts_delete",
        "set session_replication_role = replica; delete from users where id % 3 = 0",
    ] {
        let one = "insert into users (name, email) values ('n', gen_random_uuid() || '@example.com')";
        service.database.run(&broken.replace("ONE", one));
        users = service.database.value("select count(*) from users").parse().unwrap();
        let (code, said) = check();
        assert_eq!(code, 1, "{broken}: {said}");
        let line = format!("problem  tables: the page counts differ from the {users} users in ");
        assert!(said.lines().any(|found| found.starts_with(&line)), "{broken}: {said}");
        let (code, said) = userd(&url, &["check"]);
        let other =
            said.lines().find(|line| line.starts_with("problem") && !line.ends_with("`userd recount`"));
        assert_eq!(other, None, "only a block in use is counted unasked: {code}: {said}");
        let (code, said) = userd(&url, &["recount"]);
        assert_eq!(
            (code, said),
            (0, format!("the page counts are those of the {users} users\n")),
            "{broken}"
        );
        let (code, said) = check();
        assert_eq!(code, 0, "{broken}: {said}");
        assert_eq!(client.get("/users").json()["total"], users, "{broken}");
        let last = client.get(&format!("/users?perPage=1&page={users}")).json();
        assert_eq!(last["data"][0]["id"], service.database.value("select max(id) from users"), "{broken}");
    }
    assert!(users > 1000);
}

/// A recount waits for a transaction that has changed users, but only for a second, as further changes wait behind it.
#[test]
fn a_recount_beside_writers() {
    let service = Service::start();
    let mut client = service.client();
    let mut create = |email: &str| {
        let created = client.post("/users", format!(r#"{{"name":"n","email":"{email}"}}"#));
        assert_eq!(client.get(&format!("/users/{}", created.id())).body, created.body);
    };
    create("ada@example.com");
    service.database.run("update user_counts set n = n + 1; insert into user_counts values (9, 5)");
    let mut writer = service.database.transaction("update users set name = 'held' where id = 1");
    let mut recount = Process::start(&["recount"], &[("DATABASE_URL", &service.database.url())]);
    let waits = "select count(*) > 0 from pg_stat_activity where datname = current_database() \
        and query ~ 'delete from user_counts' and wait_event_type = 'Lock'";
    eventually(LONG, "it waits", || service.database.value(waits) == "true");
    (0..20).for_each(|number| create(&format!("beside-{number}@example.com")));
    assert_eq!(recount.wait(LONG), 1);
    assert!(recount.stderr().contains("canceling statement due to lock timeout"), "{}", recount.stderr());
    let wrong = client.get("/users").json()["total"].clone();
    writer.batch_execute("commit").unwrap();
    assert_ne!(wrong, 21, "nothing was counted anew");
    let (code, said) = userd(&service.database.url(), &["recount"]);
    assert_eq!(code, 0, "{said}");
    let users = client.get("/users").json();
    assert_eq!((&users["total"], &users["data"][0]["name"]), (&21.into(), &"held".into()));
}

// Tests of the rights of roles

/// A check reports row-level security that hides rows from the role of the service. The remedy gives no other role a right.
#[test]
fn row_security_is_refused_by_a_check() {
    const TABLES: [&str; 5] =
        ["users", "credentials", "idempotency_keys", "user_counts", "refinery_schema_history"];
    let database = Database::create();
    let name = database.name();
    let (app, owner) = (format!("{name}_App"), format!("{name}_owner"));
    database.run(&format!(
        "create role \"{app}\" login; create role {owner} login; \
         grant usage, create on schema public to {owner}; grant {owner} to postgres"
    ));
    for table in TABLES {
        database.run(&format!(
            "alter table {table} owner to {owner}; alter table {table} enable row level security"
        ));
    }
    let url = |role: &str| database.url().replace("user=postgres", &format!("user={role}"));
    let (_, grants) = userd(&database.url(), &["grants", &app]);
    database.run(&grants);
    let finding = |role: &str| {
        let (code, said) = userd(&url(role), &["check"]);
        let mut lines = said.lines().map(str::to_owned);
        let found = lines.find(|line| line.contains("row-level security hides rows of "));
        assert_eq!(code, i32::from(found.is_some()), "{role}: {said}");
        found
    };
    let rights = || {
        database.value("select string_agg(relacl::text, ' ' order by relname) from pg_class where relnamespace = 'public'::regnamespace")
    };
    let before = rights();
    // An owner and a superuser see all rows. The role of the service sees no migration, so that a start fails, too.
    assert_eq!((finding("postgres"), finding(&owner)), (None, None));
    let line = finding(&app).expect("a finding");
    assert!(
        line.starts_with("problem  migrations: row-level security hides rows of refinery_schema_history"),
        "{line}"
    );
    for verb in [&["--host=127.0.0.1", "--port=0"][..], &["export"]] {
        let (code, said) = userd(&url(&app), verb);
        assert!(code == 1 && said.contains("row-level security hides rows of "), "{said}");
    }
    database.run("alter table refinery_schema_history disable row level security");
    database.run(finding(&app).expect("a finding").split('`').nth(1).unwrap());
    assert_eq!(finding(&app), None);
    for table in TABLES {
        database.run(&format!("alter table {table} enable row level security, force row level security"));
        let line = finding(&owner).expect(table);
        Process::at(&url(&owner), &[]).logs(&format!("row-level security hides rows of {table}"));
        database.run(line.split('`').nth(1).unwrap());
        assert_eq!(finding(&owner), None);
    }
    assert_eq!(rights(), before);
    let hides = "select count(*) from pg_class where relrowsecurity and not relforcerowsecurity";
    assert_eq!(database.value(hides), "5", "it goes on for other roles");
    database.run(&format!("reassign owned by {owner} to postgres; drop owned by \"{app}\", {owner}; drop role \"{app}\", {owner}"));
}

/// A check tells which other roles may read hashes. Its statement revokes this right, and no other one.
#[test]
fn roles_that_may_read_hashes_are_told() {
    let database = Database::create();
    let name = database.name();
    let role = |role: &str| format!("{name}_{role}");
    let all = ["Anon", "column", "view", "group", "full", "reader"].map(role);
    let [anon, column, view, group, full, reader] = &all;
    all.iter().for_each(|role| database.run(&format!("create role \"{role}\"")));
    let (_, grants) = userd(&database.url(), &["grants", full]);
    database.run(&grants);
    database.run(&format!(
        "create schema \"Odd one\";
         create view \"Odd one\".\"V\" as select * from credentials; create view over as select * from \"Odd one\".\"V\";
         grant select on credentials, idempotency_keys, users to \"{anon}\"; grant insert on credentials to \"{anon}\";
         grant select (password_hash) on credentials to {column};
         grant select on \"Odd one\".\"V\", over to {view};
         grant select on credentials to {group}; grant {group} to {reader};
         do $$ begin
             grant pg_read_all_data to {reader};
         exception when undefined_object then  -- PostgreSQL 13 has no such role.
         end $$"
    ));
    let findings = || {
        let (code, said) = userd(&database.url(), &["check"]);
        let lines = said.lines().filter(|line| line.contains(" may read ")).map(str::to_owned);
        (code, lines.collect::<Vec<_>>())
    };
    let (code, lines) = findings();
    assert_eq!((code, lines.len()), (0, 8), "{lines:?}");
    assert!(lines.iter().all(|line| line.starts_with("note     privileges: ")), "{lines:?}");
    // A role with all rights may run another userd, so that its line does not ask to revoke them.
    let (kept, revoked): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.contains(full));
    assert!(kept.iter().all(|line| line.ends_with(", unless it runs userd")), "{kept:?}");
    for line in revoked {
        database.run(line.split('`').nth(1).expect("a statement"));
    }
    assert_eq!(findings(), (0, kept.clone()));
    let may = |role: &str, right: &str, table: &str| {
        database.value(&format!("select has_table_privilege('{role}', '{table}', '{right}')")) == "true"
    };
    assert!(may(anon, "select", "users") && may(anon, "insert", "credentials"), "it has lost another right");
    assert!(!may(anon, "select", "credentials") && may(full, "select", "credentials"));
    database.run("grant select on credentials to public");
    let (code, lines) = findings();
    let line =
        lines.iter().find(|line| line.starts_with("problem  privileges: public may read public.credentials"));
    assert_eq!((code, line.is_some()), (1, true), "{lines:?}");
    database.run(line.and_then(|line| line.split('`').nth(1)).expect("a statement"));
    assert_eq!(findings(), (0, kept));
    all.iter().for_each(|role| database.run(&format!("drop owned by \"{role}\"; drop role \"{role}\"")));
}

/// A role that owns no table runs the service with the grants that `userd grants` prints, and with no other right. If one of the grants
/// is revoked, a check has a finding.
#[test]
fn a_role_that_owns_nothing_runs_the_service() {
    let database = Database::empty();
    let name = database.name();
    let (owner, app) = (format!("{name}_owner"), format!("{name}_App"));
    // The name of the schema needs quotes, and only roles with a grant may connect to the database.
    database.run(&format!(
        "create role {owner} login; create role \"{app}\" login; alter database {name} owner to {owner}; \
         revoke all on database {name} from public; revoke all on schema public from public; \
         create schema \"The app's\" authorization {owner}; \
         alter role {owner} in database {name} set search_path = \"The app's\"; \
         alter role \"{app}\" in database {name} set search_path = \"The app's\""
    ));
    let url = |role: &str| database.url().replace("user=postgres", &format!("user={role}"));
    let (code, said) = userd(&url(&owner), &["migrate"]);
    assert_eq!(code, 0, "{said}");
    let (code, said) = userd(&url(&owner), &["grants", "nobody"]);
    assert_eq!((code, said.as_str()), (1, "userd: database error: there is no role \"nobody\"\n"));
    let (code, grants) = userd(&url(&owner), &["grants", &app]);
    assert_eq!(code, 0, "{grants}");
    let as_owner = |sql: &str| {
        let done = postgres::Client::connect(&url(&owner), postgres::NoTls)
            .and_then(|mut client| client.batch_execute(sql));
        done.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    };
    as_owner(&grants);
    // Each command names the right that the role lacks.
    as_owner(&format!("revoke select on refinery_schema_history from \"{app}\""));
    let lacks = "ERROR: permission denied for table refinery_schema_history (42501): `userd grants ROLE`";
    let service = ["--host=127.0.0.1", "--port=0", "--migrate=off"];
    for verb in [&["migrate"][..], &["export"], &["import"], &["check"], &service[..2], &service] {
        let (code, said) = userd(&url(&app), verb);
        assert!(code == 1 && said.contains(lacks), "{verb:?}: {said}");
    }
    as_owner(&grants);

    let (code, said) = userd(&url(&app), &["check", "--counts"]);
    assert_eq!(code, 0, "{said}");
    let variables = [("DATABASE_URL", url(&app)), ("HOST", "127.0.0.1".to_owned())];
    let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
    for arguments in [&[][..], &["--migrate=off"]] {
        let mut process = Process::start(arguments, &variables);
        every_verb(&process.wait_for_url(), &format!("of-{}", arguments.len()));
    }
    as_owner(&format!("grant temporary on database {name} to \"{app}\""));
    let dir = TempDir::new();
    dir.write("users", r#"{"name":"i","email":"i@example.com","password":"correct horse"}"#);
    let imported = (0, "imported: 1, existing: 0, refused: 0\n".to_owned());
    let users = format!("{}/users", dir.name());
    assert_eq!(userd(&url(&app), &["import", "--clear-passwords", &users]), imported);

    for grant in grants.lines() {
        let (rights, rest) = grant.strip_prefix("grant ").unwrap().split_once(" on ").unwrap();
        let (tables, _) = rest.split_once(" to ").unwrap();
        for right in rights.split(", ") {
            for table in tables.split(", ") {
                let kind = ["database ", "schema ", "sequence "].iter().any(|kind| table.starts_with(kind));
                let on = if kind { table.to_owned() } else { format!("table {table}") };
                as_owner(&format!("revoke {right} on {on} from \"{app}\""));
                let (code, said) = userd(&url(&app), &["check"]);
                let name = table.rsplit('.').next().unwrap();
                let told = format!("permission denied for table {name} (42501): `userd grants ROLE`");
                assert!(kind || code == 1 && said.contains(&told), "{right} {table}: {said}");
                assert!(
                    !said.contains("drop index") && !said.contains("add primary key"),
                    "{right} {table}: {said}"
                );
                let noted = said.contains("\nnote     service: the role may not see the sequence");
                assert!(code == 1 || noted, "{right} {table}: {said}");
                as_owner(grant);
            }
        }
    }
    database.run(&format!("alter database {name} owner to postgres; drop owned by \"{app}\", {owner} cascade; drop role \"{app}\", {owner}"));
}

/// Columns that another program has added change no answer, even if they have a name that one of our statements uses.
#[test]
fn columns_of_another_program() {
    const NAMES: &str = "id name email version user_id password_hash key answer fingerprint expires_at position total first \
                         most after asked address line is_kept is_from_end first_id if_any if_version if_updated new_name \
                         new_email outcome block n before behind upto";
    let service = Service::start();
    let mut client = service.client();
    for (name, password) in [("a", Some("correct horse")), ("b", None), ("c", Some("other horse"))] {
        let password = password.map(|password| format!(r#","password":"{password}""#)).unwrap_or_default();
        let body = format!(r#"{{"name":"{name}","email":"{name}@example.com"{password}}}"#);
        assert_eq!(client.post("/users", body).status, 201);
    }
    for table in ["users", "credentials", "idempotency_keys"] {
        for name in NAMES.split_whitespace() {
            service
                .database
                .run(&format!("alter table {table} add column if not exists {name} bigint default 2"));
        }
    }
    every_verb(service.server.base_url(), "columns");
    assert!(client.opens("a@example.com", "correct horse") && client.opens("c@example.com", "other horse"));
    for email in ["a@example.com", "b@example.com"] {
        assert!(!client.opens(email, "other horse"), "{email}");
    }
    let dir = TempDir::new();
    let file = dir.path().join("users").display().to_string();
    let exported = userd(&service.database.url(), &["export", "--with-password-hashes", &file]);
    assert_eq!(exported, (0, String::new()));
    assert_eq!(std::fs::read_to_string(&file).expect("it is written").matches("$argon2id$").count(), 3);
}
