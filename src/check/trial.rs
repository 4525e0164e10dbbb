//! Does what a service does, in one transaction that is rolled back: explains its statements, and creates, reads, changes and
//! deletes a user. A finding is an effect that is missing. Asks the catalog for effects that one execution does not show.

use super::{Changes, Finding, Weight::*, add};
use crate::db::{TABLES, WRITTEN, explain, is_contended, lacks_unique_index};
use crate::db::{migrate::Migrations, probe::REMOVE_EXPIRED, session::Param, settings};
use crate::operations::{authenticate::*, create::*, delete::*, find::*, list::*, update::*};
use postgres::{Client, Error, IsolationLevel, Row, SimpleQueryMessage, Transaction, types::Type};
use serde_json::Value;
use std::{slice, time::Duration};
use time::OffsetDateTime;

/// The longest time that a statement, or a pause between two, may take.
const MAX_STATEMENT: Duration = Duration::from_secs(5);

/// How often it begins anew after it has met a lock.
const MAX_TRIES: usize = 3;

/// The functions of the migrations.
const FUNCTIONS: [&str; 5] =
    ["user_version", "user_id_is_fixed", "user_counts_record", "user_counts_reset", "idempotency_erase"];

/// The triggers of the migrations, and what happens without them. One execution shows the effects of the last four.
const TRIGGERS: [(&str, &str); 7] = [
    ("user_id_is_fixed", "SQL may change the id of a user"),
    ("user_counts_truncate", "totals are wrong after a TRUNCATE"),
    ("idempotency_erase_all", "a TRUNCATE leaves values of users in idempotency_keys"),
    ("user_counts_insert", "creates are not counted: totals and pages are wrong"),
    ("user_counts_delete", "deletes are not counted: totals and pages are wrong"),
    ("zz_user_version", "a change leaves the ETag of a user as it was"),
    ("idempotency_erase", "deletes leave values of users in idempotency_keys"),
];

/// The place in [`TRIGGERS`] of the first one whose effect is seen.
const SEEN_FROM: usize = 3;

/// Statements that need an index or a unique value, each after the index, or the statement that makes it.
const LOOKUPS: [(&str, &str); 9] = [
    ("alter table users add primary key (id)", FIND),
    (
        "alter table users add primary key (id)",
        "insert into users (name, email) values ('', '') on conflict (id) do nothing",
    ),
    ("users_email_key", FIND_BY_EMAIL),
    ("alter table credentials add primary key (user_id)", FIND_CREDENTIAL),
    ("alter table credentials add primary key (user_id)", UPDATE_PASSWORD),
    ("alter table idempotency_keys add primary key (key)", FIND_KEPT),
    (
        "alter table idempotency_keys add primary key (key)",
        "insert into idempotency_keys (key, user_id, expires_at) values ('', 1, now()) on conflict (key) do nothing",
    ),
    ("idempotency_keys_expires_at", REMOVE_EXPIRED),
    (
        "idempotency_keys_user_id",
        "update idempotency_keys set answer = null where user_id = any (array(select $1::bigint))",
    ),
];

/// All other statements of requests.
const STATEMENTS: [&str; 12] = [
    CREATE,
    CREATE_MANY,
    CREATE_WITH_KEYS,
    PAGES,
    WALKS,
    BY_PREFIX,
    FIND_WITH_CREDENTIAL,
    REPLACE_HASH,
    UPDATE,
    UPDATE_MANY,
    DELETE,
    DELETE_MANY,
];

/// Functions of $1 that do not exist.
const MISSING: &str = "\
    select f || '()' from unnest($1::text[]) f where to_regprocedure(f || '()') is null";

/// Names of enabled triggers of the tables $1; of those whose function is none of $2 the table, too.
const ENABLED: &str = "\
    select case when tgfoid::oid = any (array( \
            select to_regprocedure(f || '()')::oid from unnest($2::text[]) f)) then tgname::text \
        else format('%I of %s', tgname, tgrelid::regclass) end \
    from pg_trigger where tgrelid = any (array(select to_regclass(name)::oid from unnest($1::text[]) name)) \
        and not tgisinternal and tgenabled in ('O', 'A')";

/// Functions with the rights of an owner who lacks those that they need, now or at a fold of the counts or a TRUNCATE; and
/// functions with these rights that all roles may use. $1: names of functions, $2: of tables.
const OWNERS: &str = "\
    select format('changes get 500 at times, as the owner of %1$s() may not %2$s %3$s: `%4$s`', \
        needs.f, string_agg(lower(action), ', '), needs.t, \
        case when (select count(distinct relowner) from pg_class where oid = any (array(select to_regclass(name)::oid from unnest($2::text[]) name))) = 1 \
            then format('alter function %s() owner to %I', needs.f, pg_get_userbyid(relowner)) \
            else format('grant %s on %s to %I', string_agg(lower(action), ', '), needs.t, pg_get_userbyid(proowner)) end) \
    from (values ('user_counts_record', 'user_counts', 'SELECT,INSERT,UPDATE,DELETE'), \
        ('user_counts_reset', 'user_counts', 'TRUNCATE,INSERT'), ('user_counts_reset', 'users', 'SELECT'), \
        ('idempotency_erase', 'idempotency_keys', 'SELECT,UPDATE')) as needs (f, t, actions), \
        unnest(string_to_array(actions, ',')) action, pg_proc p, pg_class t \
    where p.oid = to_regprocedure(needs.f || '()') and prosecdef and t.oid = to_regclass(needs.t)::oid \
        and not has_table_privilege(proowner, t.oid, action) \
    group by needs.f, needs.t, relowner, proowner \
    union all \
    select format('every role may make %1$s() a trigger of its own table, which would write ours: \
        `revoke execute on function %1$s() from public`', f) \
    from unnest($1::text[]) f join pg_proc p on p.oid = to_regprocedure(f || '()') \
    where prosecdef and exists (select from aclexplode(coalesce(proacl, acldefault('f', proowner))) where grantee = oid '0')";

/// The statement that mends the trigger, the index or the constraint $1, if it is not missing, and the one that makes functions
/// find their tables. $2: names of enabled triggers.
const REPAIR: &str = "\
    select case when current_setting('session_replication_role') <> 'origin' and $1::text = any ($2::text[]) \
            then format('alter role %I in database %I set session_replication_role = origin', session_user, current_database()) \
        when exists (select from pg_trigger where tgrelid = to_regclass('users') and tgname::text = $1) \
            then format('alter table users enable trigger %I', $1) \
        when exists (select from pg_constraint where conname::text = $1 and conrelid = to_regclass('credentials')) \
            then 'alter table users enable trigger all' \
        when exists (select from pg_index join pg_class c on c.oid = indexrelid \
            where relname::text = $1 and relnamespace::regnamespace::text = quote_ident(current_schema()) and not indisvalid) \
            then format('reindex index %I', $1) end, \
        format('set search_path = %I, pg_temp', current_schema())";

/// The sequence that ids are drawn from, whatever its name is.
const SEQUENCE: &str = "select pg_get_serial_sequence('users', 'id')";

/// A line if the next id of the sequence `SEQUENCE` is taken.
const BEHIND: &str = "\
    select format('the sequence of ids is at %s and the largest id is %s, so that creates fail: \
        `select setval(%3$L, %4$s)` moves it', last_value, coalesce(largest::text, 'none'), \
        pg_get_serial_sequence('users', 'id'), coalesce(largest, bigint '1')) \
    from SEQUENCE, (select max(id) as largest from users) as ids \
    where largest > last_value or largest = last_value and not is_called \
        or last_value = bigint '9223372036854775807'";

/// Sessions that hold, or wait for, a lock of the tables $1 that changes or reads wait for.
const HOLDERS: &str = "\
    select coalesce(string_agg(distinct pid::text, ', '), 'gone now') from pg_locks \
    where relation = any (array(select to_regclass(name)::oid from unnest($1::text[]) name)) and pid <> pg_backend_pid() \
        and mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')";

/// By how much the count of the block of the user $1 exceeds the rows of the table.
const EXCESS: &str = "\
    select coalesce((select sum(n) from user_counts where block = $1 >> 12), 0)::bigint - (select count(*) from users \
        where id >= ($1 >> 12) << 12 and id < (($1 >> 12) + 1) << 12)";

/// A line for each row that a create of the user $1, with the hash $2 and the key $3, has not stored.
const NOT_STORED: &str = "\
    select line from (values \
        (exists (select from credentials where user_id = $1 and password_hash::text = $2), 'passwords are not stored'), \
        (exists (select from idempotency_keys where key = $3 and user_id = $1 and answer is not null), \
            'creates do not keep their idempotency keys')) as found (is_there, line) where not is_there";

/// Traces that a delete has left of the user $1, as names of [`TRIGGERS`], or [`FOREIGN_KEY`].
const LEFT: &str = "\
    select 'credentials_user_id_fkey' from credentials where user_id = $1 \
    union all select 'idempotency_erase' from idempotency_keys where user_id = $1 and answer is not null";

/// The constraint that deletes a credential with its user.
const FOREIGN_KEY: &str = "credentials_user_id_fkey";

/// Makes [`FOREIGN_KEY`], which has no statement of its own in the migrations.
const ADD_FOREIGN_KEY: &str =
    "alter table credentials add foreign key (user_id) references users (id) on delete cascade";

/// A hash that no password has.
const HASH: &str = "$argon2id$v=19$m=19456,t=2,p=1$dXNlcmQgY2hlY2s$bm8gcGFzc3dvcmQ";

/// A trial in a transaction.
struct Trial<'a> {
    transaction: Transaction<'a>,
    migrations: &'a Migrations,
    /// Names of enabled triggers and of constraints, which the role may have switched off.
    enabled: Vec<String>,
    findings: Vec<Finding>,
}

/// Returns the findings that a service would meet. If it meets the lock of another session, it is tried again, and a note says whose. Changes
/// nothing. The error ends a check.
pub(super) fn run(
    client: &mut Client,
    migrations: &Migrations,
    changes: Changes,
) -> Result<Vec<Finding>, Error> {
    for _ in 0..MAX_TRIES {
        let mut transaction =
            client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start()?;
        transaction.batch_execute(&settings::statements("set local", MAX_STATEMENT))?;
        transaction.batch_execute(
            "set local application_name = 'userd check'; set local idle_in_transaction_session_timeout = '5s'",
        )?;
        let mut trial =
            Trial { transaction, migrations, enabled: vec![FOREIGN_KEY.to_owned()], findings: Vec::new() };
        match trial.attempt(changes) {
            Ok(()) => return Ok(trial.findings),
            Err(error) if is_contended(&error) => {}
            Err(error) => return Err(error),
        }
    }
    let holders: String = client.query_typed_one(HOLDERS, &[(&TABLES, Type::TEXT_ARRAY)])?.get(0);
    let line = format!("locks of other sessions end this part of the check; pid: {holders}");
    Ok(vec![Finding { weight: Note, subject: "service", line }])
}

impl Trial<'_> {
    fn problem(&mut self, line: String) {
        if !self.findings.iter().any(|finding| finding.line == line) {
            add(&mut self.findings, Problem, "service", [line]);
        }
    }

    /// Returns the rows of a statement; `None` with a finding if it is refused. `what` begins the finding.
    fn try_to(&mut self, what: &str, sql: &str, params: &[Param]) -> Result<Option<Vec<Row>>, Error> {
        let mut savepoint = self.transaction.transaction()?;
        match savepoint.query_typed(sql, params) {
            Ok(rows) => savepoint.commit().map(|()| Some(rows)),
            Err(error) if error.as_db_error().is_none() || is_contended(&error) => Err(error),
            Err(error) => {
                drop(savepoint);
                let column = error.as_db_error().and_then(|error| error.column()).unwrap_or_default();
                let remedy = self.migrations.default_of(column).map_or(String::new(), |default| {
                    format!(": `alter table users alter {column} set default {default}`")
                });
                self.problem(format!("{what} get 500: {}{remedy}", explain(&error)));
                Ok(None)
            }
        }
    }

    /// Adds a finding with the statement that mends what has this name, or with `name` if that is a statement.
    fn lacks(&mut self, what: &str, name: &str) -> Result<(), Error> {
        let known = if name.contains(' ') { Some(name.to_owned()) } else { None };
        let found = self
            .transaction
            .query_typed_one(REPAIR, &[(&name, Type::TEXT), (&self.enabled, Type::TEXT_ARRAY)])?;
        let made =
            || Some(self.migrations.making(name)?.replace("set search_path from current", found.get(1)));
        let remedy = known.or_else(|| found.get(0)).or_else(made);
        let remedy = remedy.as_deref().unwrap_or(ADD_FOREIGN_KEY).to_owned();
        self.problem(format!("{what}: `{remedy}`"));
        Ok(())
    }

    fn attempt(&mut self, changes: Changes) -> Result<(), Error> {
        const IS_READ_ONLY: &str = "select current_setting('transaction_read_only') = 'on'";
        let is_read_only: bool = self.transaction.query_typed_one(IS_READ_ONLY, &[])?.get(0);
        let ids_are_free = self.ids_are_free()?;
        let functions: Param = (&&FUNCTIONS[..], Type::TEXT_ARRAY);
        for name in self.texts(MISSING, slice::from_ref(&functions))? {
            self.lacks(&format!("the function {name} is missing"), &name)?;
        }
        for line in self.texts(OWNERS, &[functions.clone(), (&TABLES, Type::TEXT_ARRAY)])? {
            self.problem(line);
        }
        let enabled = self.texts(ENABLED, &[(&TABLES, Type::TEXT_ARRAY), functions])?;
        let foreign: Vec<_> = enabled.iter().filter(|name| name.contains(' ')).cloned().collect();
        let why = match changes {
            _ if is_read_only => Some("the database accepts none".to_owned()),
            Changes::None => Some("--read-only leaves them out".to_owned()),
            Changes::Usual if !foreign.is_empty() => Some(format!(
                "no rollback may undo what triggers of another program do; --fire-triggers fires them: {}",
                foreign.join(", ")
            )),
            _ => None,
        };
        self.enabled.extend(enabled);
        let unseen = if why.is_some() { &TRIGGERS[..] } else { &TRIGGERS[..SEEN_FROM] };
        for (name, what) in unseen {
            if !self.enabled.iter().any(|one| one == name) {
                self.lacks(what, name)?;
            }
        }
        for (index, sql) in LOOKUPS.into_iter().chain(STATEMENTS.map(|sql| ("", sql))) {
            self.explain(index, sql)?;
        }
        if let Some(why) = why {
            add(&mut self.findings, Note, "service", [format!("changes were not tried: {why}")]);
            self.read(None, "nobody@userd.invalid")?;
        } else if ids_are_free {
            self.change()?;
        }
        Ok(())
    }

    fn texts(&mut self, sql: &str, params: &[Param]) -> Result<Vec<String>, Error> {
        Ok(self.transaction.query_typed(sql, params)?.iter().map(|row| row.get(0)).collect())
    }

    /// Returns false, with a finding, if the next id is taken or there is none.
    fn ids_are_free(&mut self) -> Result<bool, Error> {
        let sequence: Option<String> = self.transaction.query_typed_one(SEQUENCE, &[])?.get(0);
        let Some(sequence) = sequence else {
            self.problem(
                "no sequence draws ids: `alter table users alter id add generated always as identity`"
                    .to_owned(),
            );
            return Ok(false);
        };
        let mut savepoint = self.transaction.transaction()?;
        match savepoint.query_typed(&BEHIND.replace("SEQUENCE", &sequence), &[]) {
            Ok(rows) => {
                savepoint.commit()?;
                add(&mut self.findings, Problem, "tables", rows.iter().map(|row| row.get::<_, String>(0)));
                Ok(rows.is_empty())
            }
            Err(error) if is_contended(&error) => Err(error),
            Err(error) => {
                drop(savepoint);
                let line = "the role may not see the sequence of ids, which may be behind";
                add(&mut self.findings, Note, "tables", [format!("{line}: {}", explain(&error))]);
                Ok(true)
            }
        }
    }

    /// Explains a statement as a session of a service plans it. `index`: what it lacks if it reads a whole table.
    fn explain(&mut self, index: &str, sql: &str) -> Result<(), Error> {
        let nulls = (1..).take_while(|number| sql.contains(&format!("${number}"))).map(|_| "null");
        let nulls = nulls.collect::<Vec<_>>().join(", ");
        let execute = format!("userd_check{}", if nulls.is_empty() { nulls } else { format!("({nulls})") });
        let mut savepoint = self.transaction.transaction()?;
        let plan = savepoint
            .batch_execute(&format!("prepare userd_check as {sql}"))
            .and_then(|()| savepoint.simple_query(&format!("explain (format json) execute {execute}")));
        drop(savepoint);
        // A rollback keeps what is prepared.
        let _ = self.transaction.transaction()?.batch_execute("deallocate userd_check");
        let rows = match plan {
            Ok(rows) => rows,
            Err(error) if error.as_db_error().is_none() || is_contended(&error) => return Err(error),
            Err(error) if index.is_empty() || !lacks_unique_index(&error) => {
                self.problem(format!("requests get 500: {}", explain(&error)));
                return Ok(());
            }
            Err(error) => return self.lacks(&format!("requests get 500: {}", explain(&error)), index),
        };
        let plan = rows.iter().find_map(|row| match row {
            SimpleQueryMessage::Row(row) => serde_json::from_str::<Value>(row.get(0)?).ok(),
            _ => None,
        });
        let mut whole = Vec::new();
        scans(&plan.unwrap_or_default(), &mut whole);
        for table in whole {
            if !index.is_empty() {
                self.lacks(&format!("requests read all of {table}"), index)?;
            } else if !self.findings.iter().any(|finding| finding.line.contains(&table)) {
                self.problem(format!("requests read all of {table}"));
            }
        }
        Ok(())
    }

    /// Creates a user, reads, changes and deletes it.
    fn change(&mut self) -> Result<(), Error> {
        let unique: String = self.transaction.query_typed_one("select gen_random_uuid()::text", &[])?.get(0);
        let (address, key) = (format!("{unique}@userd.invalid"), unique.as_bytes());
        self.transaction.batch_execute("savepoint before")?;
        let create: [Param; 5] = [
            (&&["userd check"][..], Type::TEXT_ARRAY),
            (&&[&address][..], Type::TEXT_ARRAY),
            (&&[HASH][..], Type::TEXT_ARRAY),
            (&&[key][..], Type::BYTEA_ARRAY),
            (&&[key][..], Type::BYTEA_ARRAY),
        ];
        let Some(rows) = self.try_to("creates", CREATE_WITH_KEYS, &create)? else { return Ok(()) };
        let Some(created) = rows.first() else {
            self.problem("creates store nothing".to_owned());
            return Ok(());
        };
        let id: i64 = created.get("id");
        let user: Param = (&id, Type::INT8);
        let stored = [user.clone(), (&HASH, Type::TEXT), (&key, Type::BYTEA)];
        for line in self.texts(NOT_STORED, &stored)? {
            self.problem(line);
        }
        let created_excess = self.excess(&user)?;
        let again: [Param; 2] = [(&"userd check", Type::TEXT), (&address.to_uppercase(), Type::TEXT)];
        if self.try_to("creates", CREATE, &again)?.is_some_and(|rows| !rows.is_empty()) {
            self.lacks("two users may have one address", "users_email_key")?;
        }
        self.read(Some(id), &address)?;
        self.update(&user, created.get("version"))?;
        let before = self.excess(&user)?;
        let no_tag: [Param; 3] =
            [(&true, Type::BOOL), (&None::<i64>, Type::INT8), (&None::<OffsetDateTime>, Type::TIMESTAMPTZ)];
        let delete = [slice::from_ref(&user), &no_tag[..]].concat();
        let is_deleted = self.try_to("deletes", DELETE, &delete)?.is_some();
        if is_deleted {
            for left in self.texts(LEFT, slice::from_ref(&user))? {
                let what = TRIGGERS.iter().find(|(name, _)| *name == left);
                self.lacks(what.map_or("deletes leave hashes of passwords", |(_, what)| what), &left)?;
            }
        }
        self.try_to("changes", "set constraints all immediate", &[])?;
        let after = self.excess(&user)?;
        self.transaction.batch_execute("rollback to savepoint before")?;
        let at_first = self.excess(&user)?;
        for (is_counted, (name, what)) in
            [(created_excess == at_first, TRIGGERS[3]), (!is_deleted || before == after, TRIGGERS[4])]
        {
            if !is_counted {
                self.lacks(what, name)?;
            }
        }
        if at_first != 0 {
            self.problem("totals and pages are wrong: `userd recount`".to_owned());
        }
        Ok(())
    }

    fn excess(&mut self, user: &Param) -> Result<i64, Error> {
        Ok(self.transaction.query_typed_one(EXCESS, slice::from_ref(user))?.get(0))
    }

    /// Changes a name, then the password, which has to change the version each time.
    fn update(&mut self, user: &Param, mut version: i64) -> Result<(), Error> {
        let params: [Param; 7] = [
            user.clone(),
            (&true, Type::BOOL),
            (&None::<i64>, Type::INT8),
            (&None::<OffsetDateTime>, Type::TIMESTAMPTZ),
            (&"userd check, changed", Type::TEXT),
            (&None::<&str>, Type::TEXT),
            (&HASH, Type::TEXT),
        ];
        for (sql, params) in [(UPDATE, &params[..6]), (UPDATE_PASSWORD, &params[..])] {
            let Some(rows) = self.try_to("changes", sql, params)? else { continue };
            let new = rows.first().map(|row| row.get("version"));
            if new.is_none_or(|new: i64| new == version) {
                self.lacks(TRIGGERS[5].1, TRIGGERS[5].0)?;
            }
            version = new.unwrap_or(version);
        }
        Ok(())
    }

    /// Reads the user in each way that requests do; `None`: there is none.
    fn read(&mut self, id: Option<i64>, address: &str) -> Result<(), Error> {
        let (asked, after, one) = (id.unwrap_or(0), id.unwrap_or(0) - 1, [1_i64]);
        let ids: Param = (&&[asked][..], Type::INT8_ARRAY);
        let (text, most): (Param, Param) = ((&address, Type::TEXT), (&1_i64, Type::INT8));
        let most_of_each: Param = (&&one[..], Type::INT8_ARRAY);
        for (what, sql, params) in [
            ("reads by id", FIND, vec![ids]),
            ("searches by address", FIND_BY_EMAIL, vec![(&&[address][..], Type::TEXT_ARRAY)]),
            ("searches by prefix", BY_PREFIX, vec![text.clone(), most]),
            ("logins", FIND_WITH_CREDENTIAL, vec![text]),
            ("lists", WALKS, vec![(&&[after][..], Type::INT8_ARRAY), most_of_each.clone()]),
        ] {
            let found = self.try_to(what, sql, &params)?;
            let is_it = |row: &Row| {
                Some(row.get("id")) == id
                    && (what != "logins" || row.get::<_, Option<&str>>("password_hash") == Some(HASH))
            };
            if id.is_some() && found.is_some_and(|rows| !rows.first().is_some_and(is_it)) {
                self.problem(format!("{what} do not find a user that was created"));
            }
        }
        let page: [Param; 3] =
            [(&&[0_i64][..], Type::INT8_ARRAY), most_of_each, (&&[false][..], Type::BOOL_ARRAY)];
        self.try_to("pages", PAGES, &page).map(drop)
    }
}

/// Adds the tables of which a plan reads all rows: without an index, or without a condition on it.
fn scans(plan: &Value, tables: &mut Vec<String>) {
    let (node, table) = (plan["Node Type"].as_str(), plan["Relation Name"].as_str());
    let is_whole = node == Some("Seq Scan")
        || node.is_some_and(|node| node.starts_with("Index")) && plan["Index Cond"].is_null();
    tables.extend(table.filter(|table| is_whole && WRITTEN.contains(table)).map(str::to_owned));
    match plan {
        Value::Array(parts) => parts.iter().for_each(|part| scans(part, tables)),
        Value::Object(parts) => {
            ["Plan", "Plans"].iter().filter_map(|name| parts.get(*name)).for_each(|part| scans(part, tables))
        }
        _ => {}
    }
}
