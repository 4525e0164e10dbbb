//! Another role's operators, functions, tables and views in the schema of the tables are never used by the service's role.
//!
//! PostgreSQL takes an operator or a function for exactly the types at hand before one of `pg_catalog` for others. So the
//! operands of each statement have the exact types of the operators of `pg_catalog`.

use crate::support::{Client, Database, LONG, Process, TempDir, eventually, every_verb};
use userd::{Config, Database as Target, Server};

/// Functions that the statements call with arguments of certain types. Others take any type, as `unnest` does: in a schema
/// where other roles may create, theirs fit better, and `userd check` says what to revoke.
const FUNCTIONS_IN_USE: [&str; 18] = [
    "lower",
    "octet_length",
    "sum",
    "max",
    "min",
    "now",
    "random",
    "set_config",
    "current_setting",
    "pg_backend_pid",
    "has_table_privilege",
    "has_schema_privilege",
    "jsonb_to_record",
    "generate_series",
    "nextval",
    "setval",
    "pg_sequence_last_value",
    "pg_get_serial_sequence",
];

/// Tables and views that statements read or write, beside those that the migrations make.
const RELATIONS_IN_USE: [&str; 7] =
    ["userd_import", "pg_settings", "pg_class", "pg_namespace", "pg_roles", "pg_stat_activity", "pg_proc"];

/// Operators and functions of a stranger in `public`, for all pairs of types that `pg_catalog` has none for, and relations:
/// what they do is count.
fn fill(database: &Database) {
    const MAKE: &str = r"
        grant create on schema public to public;
        create schema evil;
        grant usage on schema evil to public;
        create sequence evil.ran;
        grant all on sequence evil.ran to public;
        create temporary table types as select oid, format_type(oid, null) as name from pg_type where typname = any
            ('{int2,int4,int8,numeric,float8,text,varchar,name,bytea,timestamptz,interval,oid,char,_int4,_text,regclass,jsonb}')
            and typnamespace = 'pg_catalog'::regnamespace;
        create function evil.make(schema text, name text, arguments text, result text) returns void
            language plpgsql as $make$
        begin
            execute format('create function %I.%I(%s) returns %s language plpgsql security invoker as $$ '
                'begin perform pg_catalog.nextval(''evil.ran''); return null; end $$', schema, name, arguments, result);
        exception when others then
            -- PL/pgSQL has no functions of some types.
        end $make$;
        create function evil.count() returns trigger language plpgsql as
            $$ begin perform pg_catalog.nextval('evil.ran'); return new; end $$;
        create function evil.make_operator(name text, l text, r text, result text) returns void
            language plpgsql as $make$
        declare
            function text := 'op ' || result;
        begin
            perform evil.make('evil', function, concat_ws(', ', l, r), result);
            execute format('create operator public.%s (%s %s function = evil.%I)', name,
                coalesce('leftarg = ' || l || ',', ''), coalesce('rightarg = ' || r || ',', ''), function);
        exception when others then
        end $make$;";
    const OPERATORS: &str = r"
        select evil.make_operator(o, l.name, r.name, case when o = any ('{+,-,*,/,&,|,<<,>>}') then 'bigint'
                when o = '||' then 'text' else 'boolean' end)
        from unnest('{+,-,*,/,&,|,<<,>>,||,=,<>,<,>,<=,>=,*<>,~~}'::text[]) o, types l, types r
        where not exists (select from pg_operator
            where oprname = o and oprleft = l.oid and oprright = r.oid and oprnamespace = 'pg_catalog'::regnamespace)";
    const FUNCTIONS: &str = r"
        select evil.make('public', f, a.name || coalesce(', ' || b.name, ''), 'bigint')
        from unnest($1::text[]) f, types a
            left join lateral (select null as name, null::oid as oid union all select name, oid from types
                where name = any ('{text,character varying,integer,bigint,name}')) b on true
        where not exists (select from pg_proc where proname = f and pronamespace = 'pg_catalog'::regnamespace
            and proargtypes::oid[] = array_remove(array[a.oid, b.oid], null))";
    /// With the columns of the rows that an import stages.
    const TABLE: &str = r"
        create table public.NAME (line bigint, id bigint, password_hash text, created_at timestamptz,
            updated_at timestamptz, name text, email text);
        create trigger counts before insert or update or delete on public.NAME for each row execute function evil.count()";
    let mut client = database.client();
    client.batch_execute(MAKE).expect("a superuser may");
    client.batch_execute(OPERATORS).expect("a superuser may");
    client.query(FUNCTIONS, &[&FUNCTIONS_IN_USE.as_slice()]).expect("a superuser may");
    for name in RELATIONS_IN_USE {
        client.batch_execute(&TABLE.replace("NAME", name)).expect("a superuser may");
    }
    // They are found, and do count.
    client.batch_execute("alter sequence evil.ran restart").expect("a superuser may");
    client.batch_execute("select 1::int4 + 1::numeric, lower('a'::varchar)").expect("they return null");
    assert_eq!(ran(database), "2");
    client.batch_execute("alter sequence evil.ran restart").expect("a superuser may");
}

/// How many of the stranger's functions have run.
fn ran(database: &Database) -> String {
    database.value("select case when is_called then last_value else 0 end from evil.ran")
}

/// Every verb of the service, its commands, its cleaner, and other clients of the tables, with this `search_path`.
fn everything(database: &Database, path: &str) {
    let url = format!("{} options='-c search_path={path}'", database.url());
    let command = |arguments: &[&str]| Process::start(arguments, &[("DATABASE_URL", &url)]).ended();
    for prepared in [true, false] {
        let config =
            Config { db_prepared: prepared, database: Target::Url(url.as_str().into()), ..database.config() };
        let server = Server::start(Config { db_pool_size: 1, ..config }).expect("a server");
        every_verb(server.base_url(), &format!("prepared-{prepared}"));
        database.run("update idempotency_keys set expires_at = now()");
        let body = format!(r#"{{"name":"Eve","email":"eve-{prepared}@example.com"}}"#);
        let key = [("Idempotency-Key", "the-only-one-left")];
        let answer = Client::new(server.base_url()).request("POST", "/users", &key, body);
        assert_eq!(answer.status, 201, "{answer:?}");
        assert_eq!(Client::new(server.base_url()).get("/readyz").status, 200);
        let keys = "select count(*) from idempotency_keys";
        eventually(LONG, "keys that have expired are removed", || database.value(keys) == "1");
        server.stop();
    }
    let dir = TempDir::new();
    let file = |name: &str, text: &str| {
        dir.write(name, text);
        dir.path().join(name).display().to_string()
    };
    let exported = command(&["export"]);
    let count = database.value("select count(*) from users");
    assert_eq!((exported.0, exported.1.lines().count().to_string(), exported.2.as_str()), (0, count, ""));
    let hashes = dir.path().join("hashes.ndjson").display().to_string();
    assert_eq!(command(&["export", "--with-password-hashes", &hashes]).0, 0);
    let hash = "$2b$10$abcdefghijklmnopqrstuuAaZ8hC9ltVPMHBAnVMZSeGM0LXmPsDC";
    let with_hash = format!("{{\"name\":\"i\",\"email\":\"i1@example.com\",\"passwordHash\":\"{hash}\"}}\n");
    let plain = "{\"name\":\"i\",\"email\":\"i2@example.com\"}\n";
    let last: i64 = database.value("select last_value from users_id_seq").parse().expect("a number");
    let near = format!("{{\"name\":\"i\",\"email\":\"i3@example.com\",\"id\":{}}}\n", last + 20);
    let far = format!("{{\"name\":\"i\",\"email\":\"i4@example.com\",\"id\":{}}}\n", last + 2000);
    for (arguments, text, code) in [
        (&["import"][..], with_hash.as_str(), 0),
        (&["import"], plain, 0),
        (&["import"], plain, 1),
        (&["import", "--skip-existing"], plain, 0),
        (&["import", "--keep-ids"], near.as_str(), 0),
        (&["import", "--keep-ids"], far.as_str(), 0),
    ] {
        let done = command(&[arguments, &[file("users", text).as_str()]].concat());
        assert_eq!(done.0, code, "{done:?}");
    }
    assert_eq!(database.value("select count(*) from public.userd_import"), "0");
    assert_eq!(database.value("select count(*) from users where email ~ '^i[1-4]@'"), "4");
    let checked = command(&["check"]);
    assert!(checked.1.contains("schema: other roles may create"), "{checked:?}");

    // The triggers, in another client's session.
    let mut client = database.client();
    client.batch_execute(&format!("set search_path = {path}")).expect("a path");
    for sql in [
        "insert into users (name, email) select 'n', n::text from pg_catalog.generate_series(1, 2000) n",
        "update users set name = 'm'",
        "delete from users where id < bigint '1000'",
        "truncate users cascade",
        "insert into users (name, email) values ('n', 'n')",
    ] {
        client.batch_execute(sql).unwrap_or_else(|error| panic!("{path}: {sql}: {error:?}"));
    }
}

#[test]
fn what_another_role_has_made_never_runs() {
    // An empty database, into which somebody may put things before userd.
    let database = Database::empty();
    fill(&database);
    everything(&database, "public");
    assert_eq!(ran(&database), "0");
}
