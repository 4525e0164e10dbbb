//! What another role puts into the schema of the tables is never executed as the service's role.
//!
//! PostgreSQL takes an operator or a function for exactly the types at hand before one of `pg_catalog` for others. So each
//! statement and each function names the schema of what it uses.

use crate::support::{Client, Database, LONG, Process, TempDir, every_verb};
use std::{collections::BTreeSet, fs, path::Path};
use userd::{Config, Database as Target, Server};

/// The SQL that userd executes, by where it is: the migrations, and what `src/db` has in files and in strings, in which
/// `{…}` stands for a list of columns.
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = Vec::new();
    let mut dirs = vec![root.join("migrations"), root.join("src/db")];
    while let Some(dir) = dirs.pop() {
        for path in fs::read_dir(&dir).expect("it is ours").flatten().map(|entry| entry.path()) {
            let name = path.display().to_string();
            let read = || fs::read_to_string(&path).expect("UTF-8");
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("sql") => sources.push((name, read())),
                Some("rs") if !name.ends_with("tests.rs") => {
                    sources.extend(statements(&read()).into_iter().map(|text| (name.clone(), text)));
                }
                _ if path.is_dir() => dirs.push(path),
                _ => {}
            }
        }
    }
    sources
}

/// The string literals of a module that are statements.
fn statements(module: &str) -> Vec<String> {
    const VERBS: [&str; 8] =
        ["select ", "insert ", "update ", "delete ", "with ", "copy ", "create ", "begin; "];
    let code = module.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n").replace("\\\"", "\u{1}").replace("'\"'", "");
    let texts =
        code.split('"').skip(1).step_by(2).map(|text| text.replace("\\\n", "").replace('\u{1}', "\""));
    texts.filter(|text| VERBS.iter().any(|verb| text.trim_start().starts_with(verb))).collect()
}

/// Words, signs and names of SQL; without comments, constants, and what names the schema of an operator.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_alphanumeric() || "_%$".contains(c);
        let is_sign = |c: char| "+-*/<>=~!@#^&|`?:".contains(c);
        let length = match first {
            _ if rest.starts_with("--") => rest.find('\n').unwrap_or(rest.len()),
            _ if rest.starts_with("operator(pg_catalog.") => rest.find(')').expect("its end") + 1,
            '\'' => rest[1..].find('\'').expect("its end") + 2,
            '"' => rest[1..].find('"').expect("its end") + 2,
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            c if is_sign(c) => rest.find(|c| !is_sign(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        rest = after;
        match first {
            '-' if token.starts_with("--") => {}
            'o' if token.starts_with("operator(") => tokens.push("operator".to_owned()),
            '\'' => tokens.push("''".to_owned()),
            c if c.is_whitespace() => {}
            _ => tokens.push(token.to_lowercase()),
        }
    }
    tokens
}

/// What of a text is looked up in the `search_path`: operators and functions that are named without their schema.
/// Functions that have a `search_path` of their own are left out.
fn unqualified(text: &str) -> Vec<String> {
    /// What has parentheses after it and is no function.
    const WORDS: [&str; 38] = [
        "operator",
        "join",
        "copy",
        "stdout",
        "stdin",
        "coalesce",
        "greatest",
        "least",
        "exists",
        "any",
        "all",
        "values",
        "array",
        "row",
        "from",
        "and",
        "or",
        "not",
        "where",
        "as",
        "on",
        "select",
        "when",
        "then",
        "else",
        "materialized",
        "lateral",
        "over",
        "varchar",
        "key",
        "with",
        "conflict",
        "using",
        "in",
        "return",
        "is",
        "returning",
        "end",
    ];
    /// What is followed by a name and its columns, or by a function that is made, or named without being called.
    const BEFORE_NAMES: [&str; 8] = ["into", "table", "on", "as", "function", "references", "copy", "join"];
    /// These have no arguments whose types could be others, and are called in a migration alone, just after they were made.
    const OURS: [&str; 3] = ["page_functions", "page_recount", "idempotency_functions"];
    /// These are operators, too.
    const KEYWORDS: [&str; 6] = ["between", "like", "ilike", "similar", "nullif", "distinct"];

    let mut found = Vec::new();
    let mut checked = String::new();
    for (n, function) in text.split("create or replace function").enumerate() {
        match function.split_once("$$") {
            Some((head, rest)) if n > 0 && head.contains("set search_path = pg_catalog, pg_temp") => {
                checked.push_str(rest.split_once("$$").expect("its end").1);
            }
            _ if n > 0 => checked += &format!("function {function}"),
            _ => checked.push_str(function),
        }
    }
    let tokens = tokens(&checked);
    let at = |at: usize| tokens.get(at).map(String::as_str).unwrap_or_default();
    let (mut depth, mut assigns) = (0_i32, None);
    for n in 0..tokens.len() {
        let token = at(n);
        let before = |count: usize| n.checked_sub(count).map(at).unwrap_or_default();
        match token {
            "(" => depth += 1,
            ")" => depth -= 1,
            "set" => assigns = Some(depth),
            "where" | "from" | "returning" | "as" | ";" => assigns = assigns.filter(|at| depth > *at),
            _ => {}
        }
        if assigns.is_some_and(|at| depth < at) {
            assigns = None;
        }
        let name = token.starts_with(|c: char| c.is_alphabetic() || c == '_');
        let is_wrong = match token {
            "::" | ":=" | ":" | "<<" if before(1) == "[" => false,
            "::" | ":=" => false,
            "*" => !["select", ".", "(", ","].contains(&before(1)),
            "=" if assigns == Some(depth) => !["set", ",", "local", "{"].contains(&before(2)),
            // Of a table's storage, and of an error.
            "=" => {
                !before(1).starts_with("autovacuum_") && !["errcode", "detail", "hint"].contains(&before(1))
            }
            // A constant.
            "-" if [",", "("].contains(&before(1)) && at(n + 1).parse::<u32>().is_ok() => false,
            _ if token.starts_with(|c| "+-*/<>=~!@#^&|`?".contains(c)) => true,
            "distinct" => at(n + 1) == "from",
            "case" => at(n + 1) != "when",
            "in" | "using" => at(n + 1) == "(" && at(n + 2) != "select" || at(n + 1) == "(" && token == "in",
            _ if KEYWORDS.contains(&token) => true,
            _ if name && at(n + 1) == "(" && !WORDS.contains(&token) && !OURS.contains(&token) => {
                let schema = (before(1) == ".").then(|| before(2));
                let is_named =
                    BEFORE_NAMES.contains(&before(1)) || before(1) == "," && checked.contains("revoke");
                !(is_named
                    || names_columns(&tokens[n + 1..])
                    || schema.is_some_and(|schema| schema == "pg_catalog" || schema.starts_with('%')))
            }
            _ => false,
        };
        if is_wrong {
            found.push(format!("{} {} {token} {}", before(2), before(1), at(n + 1)));
        }
    }
    found
}

/// Whether these begin with the columns of a CTE.
fn names_columns(tokens: &[String]) -> bool {
    let end = tokens.iter().position(|token| token == ")").unwrap_or_default();
    matches!(&tokens[end + 1..], [word, next, ..] if word == "as" && (next == "(" || next == "materialized"))
}

#[test]
fn each_statement_names_the_schema_of_what_it_uses() {
    let sources = sources();
    assert!(sources.len() > 40, "{} statements", sources.len());
    let mut lines = String::new();
    for (place, text) in &sources {
        for found in unqualified(text) {
            lines += &format!("{place}: {found}\n");
        }
    }
    assert!(lines.is_empty(), "{lines}");
    // It finds what there is to find.
    for (text, count) in [
        ("select id from users where id = $1", 1),
        ("select id from users where id operator(pg_catalog.=) any ($1)", 0),
        ("update users set name = $1, email = lower($2) where id < 3", 2),
        ("select lower(email), pg_catalog.lower(email) from users where id between 1 and 2", 2),
        ("select case a when 1 then nullif(b, c) end, count(*) from t join u using (x)", 4),
        ("select 1 where id in (1, 2) and x is distinct from y and 'a' || 'b' like c", 4),
    ] {
        assert_eq!(unqualified(text).len(), count, "{text}: {:?}", unqualified(text));
    }
}

/// Functions that are called with their schema.
fn functions_in_use() -> BTreeSet<String> {
    let tokens: Vec<String> = sources().iter().flat_map(|(_, text)| tokens(text)).collect();
    let called = tokens.windows(4).filter(|four| four[0] == "pg_catalog" && four[1] == "." && four[3] == "(");
    called.map(|four| four[2].clone()).collect()
}

/// Operators and functions of a stranger in `public`: what they do is count. Those for all pairs of types that
/// `pg_catalog` has none for; `copies`: those of `pg_catalog`, too.
fn fill(database: &Database, copies: bool) {
    const MAKE: &str = r"
        grant create on schema public to public;
        create schema evil;
        grant usage on schema evil to public;
        create sequence evil.ran;
        grant all on sequence evil.ran to public;
        create temporary table types as select oid, format_type(oid, null) as name from pg_type where typname = any
            ('{int2,int4,int8,numeric,float8,text,varchar,name,bytea,timestamptz,interval,oid,char,_int4,_text,regclass}')
            and typnamespace = 'pg_catalog'::regnamespace;
        create function evil.make(schema text, name text, arguments text, result text) returns void
            language plpgsql as $make$
        begin
            execute format('create function %I.%I(%s) returns %s language plpgsql security invoker as $$ '
                'begin perform pg_catalog.nextval(''evil.ran''); return null; end $$', schema, name, arguments, result);
        exception when others then
            -- Of types that PL/pgSQL has no functions of.
        end $make$;
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
    const COPIES: &str = r"
        select evil.make_operator(oprname, nullif(format_type(oprleft, null), '-'), nullif(format_type(oprright, null), '-'),
            format_type(oprresult, null)) from pg_operator where oprnamespace = 'pg_catalog'::regnamespace";
    const COPIED_FUNCTIONS: &str = r"
        select evil.make('public', proname, pg_get_function_identity_arguments(oid), format_type(prorettype, null))
        from pg_proc where proname = any ($1) and pronamespace = 'pg_catalog'::regnamespace";
    let mut client = database.client();
    let functions: Vec<String> = functions_in_use().into_iter().collect();
    assert!(functions.len() > 30, "{functions:?}");
    client.batch_execute(MAKE).expect("a superuser may");
    client.batch_execute(OPERATORS).expect("a superuser may");
    client.query(FUNCTIONS, &[&functions]).expect("a superuser may");
    if copies {
        client.batch_execute(COPIES).expect("a superuser may");
        client.query(COPIED_FUNCTIONS, &[&functions]).expect("a superuser may");
    }
    // They are found, and do count.
    client.batch_execute("alter sequence evil.ran restart").expect("a superuser may");
    client.batch_execute("select 1::int4 + 1::numeric, lower('a'::varchar)").expect("they return null");
    if copies {
        let sql = "set search_path = public, pg_catalog; select 1 + 1";
        client.batch_execute(sql).expect("it returns null");
    }
    assert_eq!(ran(database), if copies { "3" } else { "2" });
    client.batch_execute("alter sequence evil.ran restart").expect("a superuser may");
}

/// How many of the stranger's functions have run.
fn ran(database: &Database) -> String {
    database.value("select case when is_called then last_value else 0 end from evil.ran")
}

/// Every verb of the service, its commands, its cleaner, and other clients of the tables, with this `search_path`.
fn everything(database: &Database, path: &str) {
    let url = format!("{} options='-c search_path={path}'", database.url());
    let command = |arguments: &[&str]| {
        let mut process = Process::start(arguments, &[("DATABASE_URL", &url)]);
        let code = process.wait(LONG);
        (code, process.stdout(), process.stderr())
    };
    for prepared in [true, false] {
        let config =
            Config { db_prepared: prepared, database: Target::Url(url.as_str().into()), ..database.config() };
        let server = Server::start(Config { db_pool_size: 1, ..config }).expect("a server");
        every_verb(server.base_url(), &format!("prepared-{prepared}"));
        database.run("update idempotency_keys set kept_since = now() - interval '25 hours'");
        server.app().users().remove_expired_keys().expect("they are removed");
        assert_eq!(database.value("select count(*) from idempotency_keys"), "0");
        assert_eq!(Client::new(server.base_url()).get("/readyz").status, 200);
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
    for (arguments, text, code) in [
        (&["import"][..], with_hash.as_str(), 0),
        (&["import"], plain, 0),
        (&["import"], plain, 1),
        (&["import", "--skip-existing"], plain, 0),
    ] {
        let done = command(&[arguments, &[file("users", text).as_str()]].concat());
        assert_eq!(done.0, code, "{done:?}");
    }
    let checked = command(&["check"]);
    assert!(checked.1.contains("schema: other roles may create"), "{checked:?}");

    // The triggers, in another client's session.
    let mut client = database.client();
    client.batch_execute(&format!("set search_path = {path}")).expect("a path");
    for sql in [
        "insert into users (name, email) select 'n', n::text from pg_catalog.generate_series(1, 2000) n",
        "update users set name = 'm'",
        "delete from users where id operator(pg_catalog.<) 1000",
        "truncate users cascade",
        "insert into users (name, email) values ('n', 'n'); select page_recount()",
    ] {
        client.batch_execute(sql).unwrap_or_else(|error| panic!("{path}: {sql}: {error:?}"));
    }
}

#[test]
fn what_another_role_has_made_never_runs() {
    // An empty database, into which somebody may put things before userd.
    let database = Database::empty();
    fill(&database, false);
    everything(&database, "public");
    assert_eq!(ran(&database), "0");
}

#[test]
fn nothing_is_looked_up_in_the_path() {
    // There, even what pg_catalog has for exactly the types at hand comes second.
    let database = Database::create();
    fill(&database, true);
    everything(&database, "public,pg_catalog");
    assert_eq!(ran(&database), "0");
}

/// `create or replace` would leave the function to its first owner, who could have it run as the service's role later.
#[test]
fn a_function_that_another_role_has_made_before_is_refused() {
    for (function, names) in [("page_fold(b bigint)", "V2"), ("idempotency_erase_all()", "V3")] {
        let database = Database::empty();
        let role = format!("{}_{}", database.name(), names.to_lowercase());
        let result = if names == "V3" { "trigger" } else { "void" };
        database.run(&format!("create role {role}; grant create on schema public to {role}"));
        database.run(&format!(
            "set role {role}; \
             create function {function} returns {result} language plpgsql as 'begin raise exception ''no''; end'"
        ));
        let url = database.url();
        let mut process = Process::start(&["migrate"], &[("DATABASE_URL", &url)]);
        assert_eq!(process.wait(LONG), 1, "{function}");
        let said = process.stderr();
        let expected = "another role than the owner of the table users has made the function";
        assert!(said.contains(expected), "{said}");
        // Without it, the rest is applied.
        database.run(&format!("drop owned by {role}; drop role {role}"));
        let mut process = Process::start(&["migrate"], &[("DATABASE_URL", &url)]);
        assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
        database.run("insert into users (name, email) values ('n', 'n')");
        assert_eq!(database.value("select count(*) from users"), "1");
    }
}
