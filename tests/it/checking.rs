//! A check does what a service does: each thing that the migrations make is taken away or spoilt, and a check says so with
//! the statement that mends it, or the list below says why it harms no request.

use crate::support::{Database, Process};

/// Damages that no check reports, each with the reason.
const HARMLESS: &[(&str, &str)] = &[
    ("owner to NAME_powerless on user_version", "it has the rights of its caller"),
    ("owner to NAME_powerless on user_id_is_fixed", "it has the rights of its caller"),
    ("execute on user_version", "it has the rights of its caller"),
    ("execute on user_id_is_fixed", "it has the rights of its caller"),
    ("owner of table credentials", "roles keep their grants, and no function writes it"),
    ("check constraint", "userd stores no id and no time that these refuse"),
    ("not null constraint", "userd stores no null there"),
];

/// Statements that each spoil one thing that the migrations have made, with a name for the kind of damage.
const DAMAGES: &str = "
    with ours as (
        select oid, relname::text from pg_class where relnamespace = 'public'::regnamespace and relkind = 'r'
            and relname <> 'refinery_schema_history'
    ), functions as (select proname::text from pg_proc where pronamespace = 'public'::regnamespace)
    select 'trigger', format(line, tgname, relname) from ours join pg_trigger on tgrelid = ours.oid and not tgisinternal,
        unnest(array['drop trigger %1$I on %2$I', 'alter table %2$I disable trigger %1$I']) line
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
    select 'session', 'alter role NAME_app in database NAME set session_replication_role = replica'";

fn check(url: &str, more: &[&str]) -> (i32, Vec<String>) {
    let (code, stdout, stderr) =
        Process::start(&[&["check"], more].concat(), &[("DATABASE_URL", url)]).ended();
    assert_eq!(stderr, "", "{stdout}");
    (code, stdout.lines().map(str::to_owned).collect())
}

fn problems(lines: &[String]) -> Vec<String> {
    lines.iter().filter(|line| line.starts_with("problem")).cloned().collect()
}

/// A database of an owner who is no superuser, with a role that has the rights of a service.
fn with_roles() -> (Database, String, impl Fn(&str) -> String) {
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

fn drop_roles(database: &Database, name: &str) {
    database.run(&format!(
        "alter database {name} owner to postgres; reassign owned by {name}_owner, {name}_powerless to postgres; \
         drop owned by {name}_app, {name}_owner, {name}_powerless; drop role {name}_app, {name}_owner, {name}_powerless"
    ));
}

/// Each damage is found by each role, and its statements mend it; or it is harmless.
#[test]
fn a_check_finds_each_thing_that_is_spoilt() {
    let (model, name, _) = with_roles();
    let damages: Vec<(String, String)> =
        model.client().query(DAMAGES, &[]).unwrap().iter().map(|row| (row.get(0), row.get(1))).collect();
    drop_roles(&model, &name);
    assert!(damages.len() > 50, "{damages:?}");
    let mut wrong = Vec::new();
    for (kind, damage) in damages {
        let (database, name, url) = with_roles();
        database.run(&format!("set allow_system_table_mods = on; {}", damage.replace("NAME", &name)));
        let why = HARMLESS.iter().find(|(harmless, _)| kind.starts_with(harmless));
        let mut rounds = 0;
        loop {
            let (code, lines) = check(&url("app"), &[]);
            let found = problems(&lines);
            assert_eq!(code, i32::from(!found.is_empty()));
            if rounds == 0 {
                if found.is_empty() != why.is_some() {
                    wrong.push(format!("{kind}: {damage}: {lines:#?}"));
                }
                eprintln!("{damage}\n    {}", found.join("\n    "));
            }
            if found.is_empty() {
                break;
            }
            rounds += 1;
            if rounds == 5 {
                wrong.push(format!("not mended: {damage}: {lines:#?}"));
                break;
            }
            for line in found {
                // The cause of an error of PostgreSQL has a line of its own.
                let Some(statement) =
                    line.split('`').nth(1).or(line.split_once("public: ").map(|(_, last)| last))
                else {
                    continue;
                };
                // Statements of one check may overlap: the next one says what is left. What the owner makes stays the owner's.
                let role = if statement.contains("; create or replace") {
                    format!("set role {name}_owner;")
                } else {
                    String::new()
                };
                let _ = database
                    .client()
                    .batch_execute(&format!("set search_path = public, pg_temp; {role} {statement}"));
            }
        }
        assert_eq!(database.value("select count(*) from users, credentials, idempotency_keys"), "0");
        for role in
            if kind.starts_with("owner of table") { &["postgres"][..] } else { &["owner", "postgres"] }
        {
            let (code, lines) = check(&url(role), &["--counts"]);
            if code != 0 {
                wrong.push(format!("{damage}: {role}: {lines:#?}"));
            }
        }
        drop_roles(&database, &name);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A check changes no row, also beside locks, other triggers and settings that change how a catalog prints itself; it says
/// what it has left out.
#[test]
fn a_check_harms_nothing() {
    let (database, name, url) = with_roles();
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

    // Another program's trigger is fired only if that is asked for.
    let sent = || database.value("select is_called from sent");
    database.run("create trigger mail after insert on users for each row execute function mail()");
    let (code, lines) = check(&app, &[]);
    assert!(code == 0 && said(&lines, "--fire-triggers fires them: \"mail\" of"), "{lines:#?}");
    assert_eq!(sent(), "false");
    let (code, lines) = check(&app, &["--fire-triggers"]);
    assert!(code == 0 && said(&lines, fine), "{lines:#?}");
    assert_eq!((sent().as_str(), database.value("select count(*) from mails").as_str()), ("true", "0"));
    database.run("drop trigger mail on users");

    // A trigger that is missing is found without changes, too.
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
    assert!(code == 0 && said(&lines, "changes were not tried: the database accepts none"), "{lines:#?}");
    assert_eq!(database.value(rows), before);
    drop_roles(&database, &name);
}
