//! Tests `userd check` on databases in which one thing that the migrations make is missing or spoilt. The check has to say so, with the
//! statement that mends it, unless `HARMLESS` says why no request fails.

use crate::support::{Database, Process};

/// Kinds of damage that a check does not report, each with the reason.
const HARMLESS: &[(&str, &str)] = &[
    ("owner to NAME_powerless on user_version", "it has the rights of its caller"),
    ("owner to NAME_powerless on user_id_is_fixed", "it has the rights of its caller"),
    ("execute on user_version", "it has the rights of its caller"),
    ("execute on user_id_is_fixed", "it has the rights of its caller"),
    ("owner of table credentials", "roles keep their grants, and no function writes it"),
    ("check constraint", "userd stores no id and no time that these refuse"),
    ("not null constraint", "userd stores no null there"),
];

/// Returns statements that each spoil one thing that the migrations have made, with a name for the kind of damage. `NAME` stands for
/// the start of the names of roles, and `DATABASE` for the database.
const DAMAGES: &str = "
    with ours as (
        select oid, relname::text from pg_class where relnamespace = 'public'::regnamespace and relkind = 'r'
            and relname <> 'refinery_schema_history'
    ), functions as (select proname::text from pg_proc where pronamespace = 'public'::regnamespace)
    select 'trigger', format(line, tgname, relname) from ours join pg_trigger on tgrelid = ours.oid and not tgisinternal,
        unnest(array['drop trigger %1$I on %2$I', 'alter table %2$I disable trigger %1$I',
            'alter trigger %1$I on %2$I rename to \"Other %1$s\"']) line
    union all
    select 'function that does nothing',
        format('create or replace function %I() returns trigger language plpgsql as $$ begin return new; end $$', proname)
        from functions
    union all
    select 'trigger with another function', 'drop trigger user_counts_truncate on users; create trigger user_counts_truncate
        after truncate on users execute function user_id_is_fixed()'
    union all
    select 'foreign key triggers', 'alter table users disable trigger all'
    union all
    select case line when 1 then 'function' when 2 then 'owner to NAME_powerless on ' || proname else 'execute on ' || proname end,
        format(case line when 1 then 'drop function %I() cascade' when 2 then 'alter function %I() owner to NAME_powerless'
            else 'grant execute on function %I() to public' end, proname)
        from functions, generate_series(1, 3) line
    union all
    select case contype when 'c' then 'check constraint' when 'n' then 'not null constraint' else 'constraint' end,
        format('alter table %I drop constraint %I cascade', relname, conname)
        from ours join pg_constraint on conrelid = ours.oid
        -- The columns of a primary key cannot be null.
        where contype <> 'n' or not exists (select from pg_index where indrelid = ours.oid and indisprimary and conkey[1] = any (indkey))
    union all
    select 'index', format(line, c.relname, ours.relname) from ours join pg_index on indrelid = ours.oid and not indisprimary
        join pg_class c on c.oid = indexrelid,
        unnest(array['drop index %I', 'update pg_index set indisvalid = false where indexrelid = %L::regclass']) line
    union all
    select case when adnum = 0 then 'identity' else 'default' end, format('alter table %I alter %I drop default', relname, attname)
        from ours join pg_attrdef on adrelid = ours.oid join pg_attribute on attrelid = adrelid and attnum = adnum
    union all
    select 'identity', format('alter table %I alter %I drop identity', relname, attname)
        from ours join pg_attribute on attrelid = ours.oid where attidentity <> ''
    union all
    select 'owner of table ' || relname, format('alter table %I owner to NAME_powerless', relname) from ours
    union all
    select 'restore without functions', string_agg(format('drop function %I() cascade', proname), ';') from functions
    union all
    select 'restore without triggers', string_agg(format('drop trigger %I on users', tgname), ';')
        from pg_trigger where tgrelid = 'users'::regclass and not tgisinternal
    union all
    select 'session', 'alter role NAME_app in database DATABASE set session_replication_role = replica'";

/// Runs a check without an error. Returns its exit code and its lines.
fn check(url: &str, more: &[&str]) -> (i32, Vec<String>) {
    let (code, stdout, stderr) =
        Process::start(&[&["check"], more].concat(), &[("DATABASE_URL", url)]).ended();
    assert_eq!(stderr, "", "{stdout}");
    (code, stdout.lines().map(str::to_owned).collect())
}

/// Returns the lines that are problems.
fn problems(lines: &[String]) -> Vec<String> {
    lines.iter().filter(|line| line.starts_with("problem")).cloned().collect()
}

/// Returns a migrated database whose owner is no superuser; the start of the names of its roles `_owner`, `_app` (which has the rights of
/// a service) and `_powerless`; and a function that returns the connection string of a role.
fn database_with_roles() -> (Database, String, impl Fn(&str) -> String) {
    let database = Database::empty();
    let name = database.name().to_owned();
    database.run(&format!(
        "create role {name}_owner login; create role {name}_app login; create role {name}_powerless; \
         alter database {name} owner to {name}_owner; revoke create on schema public from public; \
         grant create, usage on schema public to {name}_owner"
    ));
    let base = database.url();
    let of = name.clone();
    let url = move |role: &str| match role {
        "postgres" => base.clone(),
        role => base.replace("user=postgres", &format!("user={of}_{role}")),
    };
    let owner = url("owner");
    let run = |arguments: &[&str]| {
        let (code, stdout, stderr) = Process::start(arguments, &[("DATABASE_URL", &owner)]).ended();
        assert_eq!(code, 0, "{stdout}{stderr}");
        stdout
    };
    run(&["migrate"]);
    database.run(&run(&["grants", &format!("{name}_app")]));
    (database, name, url)
}

/// Drops the roles of `database_with_roles`.
fn drop_roles(database: &Database, name: &str) {
    database.run(&format!(
        "alter database {name} owner to postgres; reassign owned by {name}_owner, {name}_powerless to postgres; \
         drop owned by {name}_app, {name}_owner, {name}_powerless; drop role {name}_app, {name}_owner, {name}_powerless"
    ));
}

/// Executes the statements of problems as a superuser with the usual search_path, but creates functions as their owner. Ignores errors,
/// as one statement may have done the work of a later one: the next check says what is left.
fn mend(database: &Database, owner: &str, problems: &[String]) {
    let statement = |line: &str| {
        let revoke = line.split_once("in the schema public: ").map(|(_, last)| last.to_owned());
        revoke.or(line.split('`').nth(1).map(str::to_owned))
    };
    for statement in problems.iter().filter_map(|line| statement(line)) {
        let makes = statement.contains("; create or replace");
        let role = if makes { format!("set role {owner};") } else { String::new() };
        let _ = database.client().batch_execute(&format!("{role} {statement}"));
    }
}

/// A check as the role of the service finds each damage that is not harmless, until its statements have mended it. Checks as the owner
/// and as a superuser find nothing then.
#[test]
fn a_check_finds_each_thing_that_is_spoilt() {
    let (model, name, url) = database_with_roles();
    let damages: Vec<(String, String)> =
        model.client().query(DAMAGES, &[]).unwrap().iter().map(|row| (row.get(0), row.get(1))).collect();
    assert!(damages.len() > 50, "{damages:?}");
    let mut wrong = Vec::new();
    for (kind, damage) in damages {
        let database = Database::copy(&name, &format!("owner {name}_owner"));
        let url = |role: &str| {
            url(role).replace(&format!("dbname='{name}'"), &format!("dbname='{}'", database.name()))
        };
        let damage = damage.replace("DATABASE", database.name()).replace("NAME", &name);
        database.run(&format!("set allow_system_table_mods = on; {damage}"));
        let why = HARMLESS.iter().find(|(harmless, _)| kind.starts_with(harmless));
        for round in 0.. {
            let (code, lines) = check(&url("app"), &[]);
            let found = problems(&lines);
            assert_eq!(code, i32::from(!found.is_empty()));
            if round == 0 && found.is_empty() != why.is_some() {
                wrong.push(format!("{kind}: {damage}: {lines:#?}"));
            }
            if kind == "session" && found.len() > 1 {
                wrong.push(format!("more than the cause: {found:#?}"));
            }
            if found.is_empty() {
                break;
            }
            if round == 5 {
                wrong.push(format!("not mended: {damage}: {lines:#?}"));
                break;
            }
            mend(&database, &format!("{name}_owner"), &found);
        }
        assert_eq!(database.value("select count(*) from users, credentials, idempotency_keys"), "0");
        let owners =
            if kind.starts_with("owner of table") { &["postgres"][..] } else { &["owner", "postgres"] };
        for role in owners {
            let (code, lines) = check(&url(role), &["--counts"]);
            if code != 0 || lines.iter().any(|line| line.contains("not tried")) {
                wrong.push(format!("{damage}: {role}: {lines:#?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    drop_roles(&model, &name);
}

/// Rows that were inserted without triggers, as by a restore of `pg_dump --data-only --disable-triggers`, have no counts and no ids
/// from the sequence.
#[test]
fn a_restore_of_data_alone() {
    let (database, name, url) = database_with_roles();
    database.run(
        "set session_replication_role = replica; insert into users (id, name, email) overriding system value \
            select i, 'n', i || '@example.com' from generate_series(1, 9) i",
    );
    let (code, lines) = check(&url("app"), &["--read-only"]);
    assert!(
        code == 1 && lines.iter().any(|line| line.contains("the sequence of ids is behind")),
        "{lines:#?}"
    );
    mend(&database, &format!("{name}_owner"), &problems(&lines));
    let (_, lines) = check(&url("app"), &[]);
    let line = "problem  service: totals and pages are wrong: `userd recount`";
    assert_eq!(problems(&lines), [line]);
    let (code, _, _) = Process::start(&["recount"], &[("DATABASE_URL", &url("owner"))]).ended();
    assert_eq!((code, check(&url("app"), &["--counts"]).0), (0, 0));
    assert_eq!(database.value("select sum(n) from user_counts"), "9");
    drop_roles(&database, &name);
}

/// The statements of a check mend its tables, whatever the search_path of the session that executes them is.
#[test]
fn remedies_name_the_schema() {
    let database = Database::empty();
    let path = "create schema \"The app\"; alter role postgres in database NAME set search_path = ";
    database.run(&format!("{path}\"The app\"").replace("NAME", database.name()));
    let url = database.url();
    assert_eq!(Process::start(&["migrate"], &[("DATABASE_URL", &url)]).ended().0, 0);
    database.run(
        "drop function user_counts_record() cascade; drop index users_email_key; \
         alter table credentials drop constraint credentials_user_id_fkey; alter table users alter version drop default",
    );
    let mut rounds = 0;
    loop {
        let (code, lines) = check(&url, &[]);
        assert!(rounds < 5, "{lines:#?}");
        for statement in problems(&lines).iter().filter_map(|line| line.split('`').nth(1)) {
            let _ = database.client().batch_execute(&format!("set search_path = pg_catalog; {statement}"));
        }
        if code == 0 {
            break;
        }
        rounds += 1;
    }
    assert!(rounds > 0);
}

/// A check tells which roles may execute the functions that run with the rights of their owner, which are for our triggers alone.
#[test]
fn roles_that_may_use_functions_are_told() {
    let (database, name, url) = database_with_roles();
    database.run(&format!("grant execute on all functions in schema public to {name}_powerless"));
    let told = || {
        let (code, lines) = check(&url("app"), &[]);
        assert_eq!(code, 0, "{lines:#?}");
        lines.into_iter().filter(|line| line.contains("_powerless may make public.")).collect::<Vec<_>>()
    };
    let lines = told();
    assert_eq!(lines.len(), 3, "{lines:#?}");
    mend(&database, "", &lines);
    assert_eq!(told(), [""; 0]);
    drop_roles(&database, &name);
}

/// A check passes although the role takes null in the text of an array for a word, as no request sends such a text.
#[test]
fn a_role_without_nulls_in_the_text_of_arrays() {
    let (database, name, url) = database_with_roles();
    database.run(&format!("alter role {name}_app set array_nulls = off"));
    let (code, lines) = check(&url("app"), &[]);
    assert_eq!((code, problems(&lines)), (0, vec![]));
    drop_roles(&database, &name);
}

/// A check begins its trial again after a deadlock, a cancelled statement, a lock or a serialization failure.
#[test]
fn a_check_tries_again() {
    for state in ["40P01", "57014", "55P03", "40001"] {
        let database = Database::create();
        database.run(&format!(
            "create sequence tries; create function fails() returns trigger language plpgsql as $$ begin \
                if nextval('tries') < 3 then raise exception using errcode = '{state}'; end if; return null; end $$; \
             create trigger fails after insert on users for each statement execute function fails()"
        ));
        let (code, lines) = check(&database.url(), &["--fire-triggers"]);
        assert!(code == 0 && lines.iter().any(|line| line.starts_with("ok       service: ")), "{lines:#?}");
        assert!(database.value("select last_value > 3 from tries") == "true");
    }
}

/// A check changes no row, and says what it has left out. Locks, triggers of other programs and a setting that has the catalog quote
/// every name make no difference.
#[test]
fn a_check_harms_nothing() {
    let (database, name, url) = database_with_roles();
    let app = url("app");
    database.run(&format!(
        "insert into users (name, email) values ('Ada', 'ada@example.com'); \
         alter role {name}_app in database {name} set quote_all_identifiers = on; \
         create table mails (n int); \
         create function mail() returns trigger language plpgsql security definer as \
            'begin insert into public.mails values (1); perform nextval(''public.sent''); return null; end'; \
         create sequence sent; grant usage on sequence sent to {name}_app"
    ));
    let rows = "select row(u, c, k)::text from (select json_agg(users) u from users) a, \
        (select json_agg(user_counts) c from user_counts) b, (select json_agg(idempotency_keys) k from idempotency_keys) d";
    let before = database.value(rows);
    let said = |lines: &[String], what: &str| lines.iter().any(|line| line.contains(what));
    let fine = "ok       service: creates, reads, changes and deletes do what they should";
    let (code, lines) = check(&app, &[]);
    assert!(code == 0 && said(&lines, fine), "{lines:#?}");
    let (code, lines) = check(&app, &["--read-only"]);
    assert!(code == 0 && said(&lines, "note     service: changes were not tried: --read-only"), "{lines:#?}");

    // A trigger of another program is fired only with --fire-triggers.
    let sent = || database.value("select is_called from sent");
    database.run("create trigger mail after insert on users for each row execute function mail()");
    let (code, lines) = check(&app, &[]);
    assert!(code == 0 && said(&lines, "--fire-triggers fires them: \"mail\" on"), "{lines:#?}");
    assert_eq!(sent(), "false");
    let (code, lines) = check(&app, &["--fire-triggers"]);
    assert!(code == 0 && said(&lines, fine), "{lines:#?}");
    assert_eq!((sent().as_str(), database.value("select count(*) from mails").as_str()), ("true", "0"));
    database.run("drop trigger mail on users");

    // A trigger that is disabled is found also if no change is tried.
    database.run("alter table users disable trigger user_counts_insert");
    let (code, lines) = check(&app, &["--read-only"]);
    assert!(code == 1 && said(&lines, "creates are not counted"), "{lines:#?}");
    database.run("alter table users enable trigger user_counts_insert");

    let mut holder = database.transaction("lock table users in access exclusive mode");
    let pid: i32 = holder.query_one("select pg_backend_pid()", &[]).unwrap().get(0);
    let (code, lines) = check(&app, &[]);
    assert!(code == 0 && said(&lines, &format!("end this part of the check; pid: {pid}")), "{lines:#?}");
    holder.batch_execute("rollback").unwrap();

    database.run(&format!("alter role {name}_app in database {name} set default_transaction_read_only = on"));
    let (code, lines) = check(&app, &[]);
    assert!(
        code == 0
            && said(
                &lines,
                "changes were not tried: it is a standby, or default_transaction_read_only is on"
            ),
        "{lines:#?}"
    );
    assert_eq!(database.value(rows), before);
    drop_roles(&database, &name);
}

/// A check does not wait for a lock of the history of migrations, but says what it met.
#[test]
fn a_check_beside_a_locked_history() {
    let database = Database::create();
    let _lock = database.transaction("lock table refinery_schema_history in access exclusive mode");
    let (code, lines) = check(&database.url(), &[]);
    let line = "problem  migrations: ERROR: canceling statement due to lock timeout (55P03)";
    assert_eq!((code, problems(&lines)), (1, vec![line.to_owned()]), "{lines:#?}");
}
