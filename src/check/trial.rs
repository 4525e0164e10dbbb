//! Does what a service does, in one transaction that is rolled back: plans and executes the statements of requests, and compares
//! what they return. A finding is an effect that is missing. Asks the catalog for effects that one execution does not show.

use super::{Changes, Finding, Weight::*, add};
use crate::db::migrate::{GRANTS_HINT, Migrations, in_one_line};
use crate::db::{TABLES, WRITTEN, explain, is_denied, is_read_only, is_transient};
use crate::db::{probe::REMOVE_EXPIRED, settings};
use crate::operations::{authenticate::*, create::*, delete::*, find::*, list::*, update::*};
use postgres::{Client, Error, IsolationLevel, SimpleQueryMessage, SimpleQueryRow, Transaction, types::Type};
use serde_json::Value;
use std::{collections::BTreeMap, time::Duration};

/// The longest time that a statement, or a pause between two, may take.
const MAX_STATEMENT_TIME: Duration = Duration::from_secs(5);

/// How often the trial begins anew after it has met a lock.
const MAX_TRIES: usize = 3;

/// A well-formed hash that no password matches.
const HASH: &str = "$argon2id$v=19$m=19456,t=2,p=1$dXNlcmQgY2hlY2s$bm8gcGFzc3dvcmQ";

/// The result that a statement has to have.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    /// A plan that uses an index. The statement is not executed.
    Planned,
    /// A row with a new version. Later steps use the values in it.
    New,
    /// A row with the values that the user has by now.
    Same,
    /// No row, or one of nulls.
    Nothing,
    /// No error.
    Done,
}
use Then::*;

/// The finding if a statement fails; its text, which is empty if only the trigger is asked for; its arguments, with values of the
/// user by name; what has to come of it; and what mends it: a statement, an object of the migrations, or a command.
type Step<'a> = (&'a str, &'a str, &'a str, Then, &'a str);

const NEW: &str = r#"('{n}', '{:key@userd.invalid}', '{":password_hash"}', '{:key}', '{:key}')"#;
const MANY: &str = "('{:id}', '{true}', '{null}', '{null}', '{n}', '{null}')";
const PASSWORD: &str = "(:id, true, null, null, null, null, ':password_hash')";
const EMAIL_KEY: &str = "unique index users_email_key";
const ETAG: &str = "trigger zz_user_version";
const REINDEX: &str = "reindex table users";
const FOREIGN_KEY: &str = "alter table credentials drop constraint if exists credentials_user_id_fkey, \
    add foreign key (user_id) references users (id) on delete cascade";

/// The statement of `idempotency_erase()`.
const ERASE: &str =
    "update idempotency_keys set answer = null where user_id = any (array(select $1::bigint))";

/// By how much the count of the block of the user $1 exceeds the rows of the table, unless it is $2.
const COUNT_EXCESS: &str = "\
    select counted.n - stored.n as excess \
    from (select coalesce(sum(n), 0)::bigint as n from user_counts where block = $1::bigint >> 12) counted, \
        (select count(*) as n from users where id >= ($1 >> 12) << 12 and id < (($1 >> 12) + 1) << 12) stored \
    where counted.n - stored.n is distinct from $2::bigint";

/// Statements of requests and of the prober, and triggers whose effect they do not show.
const STEPS: [Step; 26] = [
    ("SQL may change the id of a user", "", "", Planned, "trigger user_id_is_fixed"),
    ("totals are wrong after a TRUNCATE", "", "", Planned, "trigger user_counts_truncate"),
    ("a TRUNCATE leaves values of users", "", "", Planned, "trigger idempotency_erase_all"),
    ("two users may have one address", CREATE_MANY, "('{n}', '{:key}')", Planned, EMAIL_KEY),
    ("keys that have expired stay", REMOVE_EXPIRED, "", Planned, "index idempotency_keys_expires_at"),
    ("deletes are slow", ERASE, "(:id)", Planned, "index idempotency_keys_user_id"),
    ("creates store nothing", CREATE_WITH_KEYS, NEW, New, ""),
    ("creates cannot be counted", COUNT_EXCESS, "(:id, null)", New, ""),
    ("two users may have one address", CREATE, "('n', ':key@USERD.INVALID')", Nothing, EMAIL_KEY),
    ("reads by id miss a user", FIND, "('{:id}')", Same, REINDEX),
    ("searches by address miss a user", FIND_BY_EMAIL, "('{:key@userd.invalid}')", Same, REINDEX),
    ("searches by prefix miss a user", BY_PREFIX, "(':key', 1)", Same, REINDEX),
    ("lists miss a user", WALKS, "(array[:id - 1], '{1}')", Same, REINDEX),
    ("pages fail", PAGES, "('{0}', '{1}', '{false}')", Done, ""),
    ("passwords are not stored", FIND_CREDENTIAL, "(:id)", Same, ""),
    ("logins miss a user", FIND_WITH_CREDENTIAL, "(':key@userd.invalid')", Same, REINDEX),
    ("idempotency keys are not stored", FIND_KEPT, "(':key')", Same, ""),
    ("a change leaves the ETag as it was", UPDATE, "(:id, true, null, null, 'm', null)", New, ETAG),
    ("a batch leaves the ETag as it was", UPDATE_MANY, MANY, New, ETAG),
    ("a new password leaves the ETag as it was", UPDATE_PASSWORD, PASSWORD, New, ETAG),
    ("logins fail", REPLACE_HASH, "(:id, ':password_hash', ':password_hash')", Done, ""),
    ("deletes keep a user", DELETE, "(:id, true, null, null)", Same, ""),
    ("deletes fail", DELETE_MANY, "('{:id}', '{true}', '{null}', '{null}')", Done, ""),
    ("deletes leave hashes of passwords", FIND_CREDENTIAL, "(:id)", Nothing, FOREIGN_KEY),
    ("deletes leave values of users", FIND_KEPT, "(':key')", Nothing, "trigger idempotency_erase"),
    ("deletes are not counted", COUNT_EXCESS, "(:id, :excess)", Nothing, "trigger user_counts_delete"),
];

/// Statements after a rollback of [`STEPS`].
const TOTALS: [Step; 2] = [
    ("creates are not counted", COUNT_EXCESS, "(:id, :excess)", Nothing, "trigger user_counts_insert"),
    ("totals and pages are wrong", COUNT_EXCESS, "(:id, 0)", Nothing, "userd recount"),
];

/// Primary keys by table.
const KEYS: [(&str, &str); 3] = [(WRITTEN[0], "id"), (WRITTEN[1], "user_id"), (WRITTEN[2], "key")];

/// Enabled triggers of the tables $1: the name, alone and with the table; the function, if it is in the schema, and its body.
const TRIGGERS: &str = "\
    select tgname::text, format('%I on %s', tgname, tgrelid::regclass), case \
        when tgfoid = to_regprocedure(format('%I()', proname))::oid then format('%s()', proname) else '' end, prosrc \
    from pg_trigger join pg_proc on pg_proc.oid = tgfoid \
    where tgrelid = any (array(select to_regclass(name)::oid from unnest($1::text[]) name)) \
        and not tgisinternal and tgenabled in ('O', 'A')";

/// Functions with the rights of an owner who lacks those that they need, at times: at a fold of the counts, or a TRUNCATE. The
/// owner of `users` gets what such a function needs.
const OWNERS_WITHOUT_RIGHTS: &str = "\
    select format('changes get 500 at times, as the owner of %s() may not use %s so', f, t), \
        format('alter table %2$s owner to %3$I; alter function %1$s() owner to %3$I', f, t, pg_get_userbyid(relowner)) \
    from (values ('user_counts_record', 'user_counts', 'SELECT,INSERT,UPDATE,DELETE'), \
        ('user_counts_reset', 'user_counts', 'TRUNCATE,INSERT'), ('user_counts_reset', 'users', 'SELECT'), \
        ('idempotency_erase', 'idempotency_keys', 'SELECT,UPDATE')) as needs (f, t, rights), pg_proc p, pg_class u \
    where p.oid = to_regprocedure(f || '()')::oid and prosecdef and u.oid = to_regclass('users')::oid \
        and (not has_schema_privilege(proowner, u.relnamespace, 'USAGE') or exists (select \
            from unnest(string_to_array(rights, ',')) one where not has_table_privilege(proowner, to_regclass(t)::oid, one)))";

/// The sequence that ids are drawn from, whatever its name is, and whether the role may see it.
const SEQUENCE: &str = "select name, has_sequence_privilege(name, 'SELECT') \
    from pg_get_serial_sequence('users', 'id') name where name is not null";

/// A row if the next id of the sequence `SEQUENCE` is taken, or there is none.
const SEQUENCE_IS_BEHIND: &str = "select last_value from SEQUENCE where last_value = bigint '9223372036854775807' \
    or exists (select from users where id >= last_value and (id > last_value or not is_called))";

const SET_SEQUENCE: &str =
    "select setval(pg_get_serial_sequence('users', 'id'), coalesce(max(id), bigint '1')) from users";

/// Sessions that hold, or wait for, a lock of the tables $1 that changes or reads wait for.
const LOCK_HOLDERS: &str = "\
    select coalesce(string_agg(distinct pid::text, ', '), 'gone now') from pg_locks \
    where relation = any (array(select to_regclass(name)::oid from unnest($1::text[]) name)) and pid <> pg_backend_pid() \
        and mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')";

/// A trial in a transaction.
struct Trial<'a> {
    transaction: Transaction<'a>,
    migrations: &'a Migrations,
    /// The name of the schema, quoted for SQL.
    schema: String,
    /// Values of the user by column. There is no version before there is a user.
    values: BTreeMap<String, String>,
    /// Triggers of the migrations that are enabled and execute what the migrations made.
    enabled: Vec<String>,
    is_read_only: bool,
    findings: Vec<Finding>,
}

/// Returns the findings that a service would meet. If it meets the lock of another session, it is tried again, and a note says whose.
/// Changes nothing. The error ends a check.
pub(super) fn run(
    client: &mut Client,
    migrations: &Migrations,
    changes: Changes,
) -> Result<Vec<Finding>, Error> {
    // Deferred constraints are checked by each statement: the transaction never commits.
    const SET_UP: &str = "set local application_name = 'userd check'; \
        set local idle_in_transaction_session_timeout = '5s'; set constraints all immediate";
    const VALUES: &str = "select gen_random_uuid()::text, quote_ident(current_schema()::text)";
    for _ in 0..MAX_TRIES {
        let isolated = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted);
        let mut transaction = isolated.start()?;
        transaction.batch_execute(&(settings::statements("set local", MAX_STATEMENT_TIME) + SET_UP))?;
        let row = transaction.query_typed_one(VALUES, &[])?;
        let values = [("id", "0"), ("key", row.get(0)), ("password_hash", HASH)];
        let values = values.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let (schema, enabled, findings) = (row.get(1), Vec::new(), Vec::new());
        let mut trial =
            Trial { transaction, migrations, schema, values, enabled, is_read_only: false, findings };
        match trial.attempt(changes) {
            Ok(()) => return Ok(trial.findings),
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error),
        }
    }
    let holders: String = client.query_typed_one(LOCK_HOLDERS, &[(&TABLES, Type::TEXT_ARRAY)])?.get(0);
    let line = format!("locks of other sessions end this part of the check; pid: {holders}");
    Ok(vec![Finding { weight: Note, subject: "service", line }])
}

impl Trial<'_> {
    fn attempt(&mut self, changes: Changes) -> Result<(), Error> {
        self.leave_out(changes)?;
        for row in self.transaction.query_typed(OWNERS_WITHOUT_RIGHTS, &[])? {
            self.problem(row.get(0), "", row.get(1));
        }
        for (table, column) in KEYS {
            let sql = format!("insert into {table} default values on conflict ({column}) do nothing");
            let remedy = format!("alter table {table} add primary key ({column})");
            self.step(&("requests get 500", &sql, "", Planned, &remedy))?;
        }
        for row in self.transaction.query_typed(SEQUENCE, &[])? {
            let (sql, found) = (SEQUENCE_IS_BEHIND.replace("SEQUENCE", row.get(0)), self.findings.len());
            let what = "the sequence of ids is behind them or at its end, so that creates fail";
            if !row.get::<_, bool>(1) {
                let line = "the role may not see the sequence of ids, which may be behind them";
                add(&mut self.findings, Note, "service", [line]);
                continue;
            }
            self.step(&(what, &sql, "", Nothing, SET_SEQUENCE))?;
            // Ends here if the sequence is behind: a create would draw an id, and a later check would no longer
            // find the fault.
            if self.findings.len() > found {
                return Ok(());
            }
        }
        self.transaction.batch_execute("savepoint before")?;
        for step in &STEPS {
            if !self.step(step)? {
                return Ok(());
            }
        }
        self.transaction.batch_execute("rollback to savepoint before")?;
        TOTALS.iter().try_for_each(|step| self.step(step).map(drop))
    }

    /// Finds the triggers that are as the migrations make them, and further ones with a function of theirs. Returns those of
    /// other programs.
    fn look_at_triggers(&mut self) -> Result<Vec<String>, Error> {
        let mut foreign = Vec::new();
        for row in self.transaction.query_typed(TRIGGERS, &[(&TABLES, Type::TEXT_ARRAY)])? {
            let [name, label, function, body] = [0, 1, 2, 3].map(|at| row.get::<_, &str>(at));
            let makes = |what: String| self.migrations.statement(&format!("create {what} "));
            let made = makes(format!("function {function}"));
            let body = format!("$$ {} $$", in_one_line(body).trim());
            let is_made = made.as_ref().is_some_and(|made| made.ends_with(&body));
            match makes(format!("trigger {name}")) {
                Some(trigger) if is_made && trigger.ends_with(&format!(" {function}")) => {
                    self.enabled.push(format!("trigger {name}"));
                }
                // The steps find that it is not enabled.
                Some(_) => {}
                None if made.is_some() => {
                    let what = format!("a further trigger executes {function}");
                    self.problem(&what, "", &format!("drop trigger {label}"));
                }
                None => foreign.push(label.to_owned()),
            }
        }
        Ok(foreign)
    }

    /// Has the transaction refuse changes, with a note that says why, if none are to be tried.
    fn leave_out(&mut self, changes: Changes) -> Result<(), Error> {
        const IS_READ_ONLY: &str = "select current_setting('transaction_read_only') = 'on'";
        let foreign = self.look_at_triggers()?.join(", ");
        let why = match changes {
            Changes::None => Some("--read-only leaves them out".to_owned()),
            Changes::Usual if !foreign.is_empty() => Some(format!(
                "no rollback may undo what triggers of another program do; --fire-triggers fires them: {foreign}"
            )),
            _ => None,
        };
        if why.is_some() {
            self.transaction.batch_execute("set transaction read only")?;
        }
        self.is_read_only = self.transaction.query_typed_one(IS_READ_ONLY, &[])?.get(0);
        if self.is_read_only {
            let why = why.as_deref().unwrap_or("the database accepts none");
            add(&mut self.findings, Note, "service", [format!("changes were not tried: {why}")]);
        }
        Ok(())
    }

    /// Plans and executes a statement. Returns false if requests get 500, or later steps lack their user.
    fn step(&mut self, &(what, sql, arguments, then, mends): &Step) -> Result<bool, Error> {
        if mends.starts_with("trigger ") && !self.enabled.iter().any(|trigger| trigger == mends) {
            self.problem(what, "", mends);
        }
        if sql.is_empty() {
            return Ok(true);
        }
        let mends_plan = if then == Planned { mends } else { "" };
        let messages = match self.execute(sql, arguments, then != Planned) {
            Ok(messages) => messages,
            Err(error) if error.as_db_error().is_none() || is_transient(&error) => return Err(error),
            Err(error) if self.is_read_only && is_read_only(&error) => return Ok(true),
            Err(error) => {
                // Names no index as the remedy if the statement was refused for a missing right.
                let (hint, mends) = if is_denied(&error) { (GRANTS_HINT, "") } else { ("", mends_plan) };
                self.problem(what, &(explain(&error) + hint), mends);
                return Ok(then == Planned);
            }
        };
        let mut rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let plan = rows.next().and_then(|row| serde_json::from_str(row.get(0)?).ok());
        for table in scanned(&plan.unwrap_or_default()) {
            self.problem(&format!("requests read all of {table}"), "", mends_plan);
        }
        let row = rows.next().filter(|row| row.get(0).is_some());
        if !self.is_right(then, row) {
            self.problem(what, "", mends);
        }
        Ok(then != New || row.is_some())
    }

    /// Returns the plan of a statement, as a session of a service makes it, and its rows.
    fn execute(
        &mut self,
        sql: &str,
        arguments: &str,
        is_executed: bool,
    ) -> Result<Vec<SimpleQueryMessage>, Error> {
        let fill = |text: String, (name, value): (&String, &String)| text.replace(&format!(":{name}"), value);
        let execute = format!("execute userd_check {}", self.values.iter().fold(arguments.to_owned(), fill));
        let executed = if is_executed { &*execute } else { "" };
        let mut savepoint = self.transaction.transaction()?;
        let answer = savepoint.simple_query(&format!(
            "prepare userd_check as {sql}; explain (format json) {execute}; {executed}; deallocate userd_check"
        ));
        if answer.is_ok() {
            savepoint.commit()?;
        } else {
            drop(savepoint);
            // Deallocates the prepared statement: it outlives a rollback, and a pooler may lend the session to
            // other clients.
            let _ = self.transaction.transaction()?.batch_execute("deallocate userd_check");
        }
        answer
    }

    /// Compares the row that a statement has returned, and keeps the values of a new one.
    fn is_right(&mut self, then: Then, row: Option<&SimpleQueryRow>) -> bool {
        let columns = row.map_or(&[][..], SimpleQueryRow::columns).iter().enumerate();
        let values: Vec<(&str, Option<&str>)> =
            columns.map(|(at, column)| (column.name(), row.and_then(|row| row.get(at)))).collect();
        let known = |name: &str| self.values.get(name).map(String::as_str);
        match then {
            Planned | Done => true,
            Nothing => row.is_none(),
            Same => {
                let is_same = |(name, value): &(&str, _)| known(name).is_none() || known(name) == *value;
                known("version").is_none() || row.is_some() && values.iter().all(is_same)
            }
            New => {
                let moves = |name: &&str| ["version", "updated_at"].contains(name);
                let is_old = values.iter().any(|(name, value)| moves(name) && known(name) == *value);
                let new =
                    values.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
                self.values.extend(new);
                row.is_some() && !is_old
            }
        }
    }

    /// Adds a finding, unless an earlier finding names its remedy, or its cause if it has no remedy.
    fn problem(&mut self, what: &str, cause: &str, mends: &str) {
        let remedy = self.remedy(mends).unwrap_or_default();
        let parts = [&*remedy, cause, what];
        let mark = parts.into_iter().find(|part| !part.is_empty()).unwrap_or_default();
        if !self.findings.iter().any(|finding| finding.line.contains(mark)) {
            let parts = parts.into_iter().rev().filter(|part| !part.is_empty());
            add(&mut self.findings, Problem, "service", [parts.collect::<Vec<_>>().join(": ")]);
        }
    }

    /// Returns what mends a fault, as [`Step`] has it, as a statement for any session.
    fn remedy(&self, mends: &str) -> Option<String> {
        let made = |name: &str| self.migrations.statement(&format!("create {name} "));
        let (kind, name) = mends.rsplit_once(' ')?;
        let statement = match kind {
            "userd" => return Some(format!("`{mends}`")),
            "index" | "unique index" => format!("drop index if exists {name}; {}", made(mends)?),
            "trigger" => {
                let trigger = made(mends)?;
                let function =
                    made(trigger.split_once("execute ")?.1)?.replacen("create", "create or replace", 1);
                format!("{function}; drop trigger if exists {name} on users; {trigger}")
            }
            _ => mends.to_owned(),
        };
        Some(format!("`set search_path = {}, pg_temp; {statement}`", self.schema))
    }
}

/// Returns the tables of which a plan reads all rows: without an index, or without a condition on it.
fn scanned(plan: &Value) -> Vec<&str> {
    let node = plan["Node Type"].as_str().unwrap_or_default();
    let is_whole = node == "Seq Scan" || node.starts_with("Index") && plan["Index Cond"].is_null();
    let table = plan["Relation Name"].as_str().filter(|table| is_whole && WRITTEN.contains(table));
    let parts =
        [plan, &plan["Plans"]].into_iter().filter_map(Value::as_array).flatten().chain(plan.get("Plan"));
    table.into_iter().chain(parts.flat_map(scanned)).collect()
}
