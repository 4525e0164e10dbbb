//! Executes the statements of a service's requests in one transaction, compares their results with the expected ones,
//! and rolls back. Adds a finding for each effect that is missing. Reads the catalog for effects that no statement of
//! the trial shows, such as that of a trigger on TRUNCATE.

use super::{Finding, Severity::*, TriedChanges, add_findings};
use crate::db::migrate::{GRANTS_REMEDY, Migrations, in_one_line};
use crate::db::{
    ALL_TABLES, WRITTEN_TABLES, is_missing_index, is_read_only_error, is_transient, lacks_right,
};
use crate::db::{explain, probe::EXPIRE_IDEMPOTENCY_KEYS, session_settings::setup_sql};
use crate::operations::{authenticate::*, create::*, delete::*, find::*, list::*, update::*};
use postgres::types::Type;
use postgres::{Client, Error, IsolationLevel, SimpleQueryMessage as Message, SimpleQueryRow, Transaction};
use serde_json::Value;
use std::{collections::BTreeMap, time::Duration};

/// The longest time that a statement of the trial may take.
const MAX_STATEMENT_TIME: Duration = Duration::from_secs(5);

/// The most attempts at the trial. An attempt is repeated if locks of other sessions end it.
const MAX_TRIAL_ATTEMPTS: usize = 3;

/// A well-formed hash that no password matches.
const UNMATCHED_HASH: &str = "$argon2id$v=19$m=19456,t=2,p=1$dXNlcmQgY2hlY2s$bm8gcGFzc3dvcmQ";

/// The result that a statement of the trial has to have. Another result is a finding.
#[derive(Clone, Copy, PartialEq)]
enum ExpectedResult {
    /// A plan that uses an index. The statement is planned, but not executed.
    Plan,
    /// A row whose version and time of change are new. Later steps use the values in this row.
    NewRow,
    /// A row. A missing row is accepted in a read-only transaction, in which the trial cannot create a user.
    Row,
    /// No row, or a row that begins with null.
    NoRow,
}
use ExpectedResult::*;

/// A step of the trial, in five parts: the finding if the result is not the expected one; the SQL, which is empty if
/// the step only looks for a trigger; the arguments, in which `:name` stands for a value of the user; the expected
/// result; and the remedy, which is a statement, a command, or the name of a trigger or index that the migrations
/// create.
type TrialStep<'a> = (&'a str, &'a str, &'a str, ExpectedResult, &'a str);

/// The arguments with which [`CREATE_WITH_KEYS`] creates the trial's user, in the form that [`TrialStep`] explains.
const CREATE_ARGUMENTS: &str = r#"('{n}', '{:key@userd.invalid}', '{":password_hash"}', '{:key}', '{:key}')"#;
/// The arguments with which [`UPDATE_MANY`] changes the name of the trial's user.
const RENAME_ARGUMENTS: &str = "('{:id}', '{true}', '{null}', '{null}', '{n}', '{null}')";
/// The arguments with which [`UPDATE_PASSWORD`] stores a hash for the trial's user.
const NEW_PASSWORD_ARGUMENTS: &str = "(:id, true, null, null, null, null, ':password_hash')";
/// The remedy that creates anew the unique index of addresses.
const EMAIL_INDEX: &str = "unique index users_email_key";
/// The remedy that creates anew the trigger that gives a changed user a new ETag.
const ETAG_TRIGGER: &str = "trigger zz_user_version";
const REINDEX_REMEDY: &str = "reindex table users";
const FOREIGN_KEY_REMEDY: &str = "alter table credentials drop constraint if exists credentials_user_id_fkey, \
    add foreign key (user_id) references users (id) on delete cascade";

/// The statement with which the trigger function `idempotency_erase()` erases the kept answers of deleted users.
const ERASE_KEPT_ANSWERS: &str =
    "update idempotency_keys set answer = null where user_id = any (array(select $1::bigint))";

/// An insert that PostgreSQL can plan only if the table has its primary key, because `on conflict` needs a unique
/// index. The next two constants are such inserts for the other tables.
const INSERT_USER: &str = "insert into users default values on conflict (id) do nothing";
const INSERT_CREDENTIAL: &str = "insert into credentials default values on conflict (user_id) do nothing";
const INSERT_KEY: &str = "insert into idempotency_keys default values on conflict (key) do nothing";

/// Finds by how much the count in `user_counts` exceeds the number of rows of `users`, for the block of ids that
/// contains the id $1. Returns no row if the excess is $2, the expected one.
const FIND_COUNT_EXCESS: &str = "\
    select counted.n - stored.n as excess \
    from (select coalesce(sum(n), 0)::bigint as n from user_counts where block = $1::bigint >> 12) counted, \
        (select count(*) as n from users where id >= ($1 >> 12) << 12 and id < (($1 >> 12) + 1) << 12) stored \
    where counted.n - stored.n is distinct from $2::bigint";

/// The steps of the trial. First come triggers whose effect no statement of the trial shows, then statements that are
/// only planned, then statements of requests, which use the rows that earlier steps have made.
const STEPS: [TrialStep; 29] = [
    ("SQL may change the id of a user", "", "", Plan, "trigger user_id_is_fixed"),
    ("totals are wrong after a TRUNCATE", "", "", Plan, "trigger user_counts_truncate"),
    ("a TRUNCATE leaves values of users", "", "", Plan, "trigger idempotency_erase_all"),
    ("two users may have one id", INSERT_USER, "", Plan, "alter table users add primary key (id)"),
    (
        "a user may have two hashes",
        INSERT_CREDENTIAL,
        "",
        Plan,
        "alter table credentials add primary key (user_id)",
    ),
    ("a key may be used twice", INSERT_KEY, "", Plan, "alter table idempotency_keys add primary key (key)"),
    ("two users may have one address", CREATE_MANY, "('{n}', '{:key}')", Plan, EMAIL_INDEX),
    ("keys that have expired stay", EXPIRE_IDEMPOTENCY_KEYS, "", Plan, "index idempotency_keys_expires_at"),
    ("deletes are slow", ERASE_KEPT_ANSWERS, "(:id)", Plan, "index idempotency_keys_user_id"),
    ("creates store nothing", CREATE_WITH_KEYS, CREATE_ARGUMENTS, NewRow, ""),
    ("creates cannot be counted", FIND_COUNT_EXCESS, "(:id, null)", NewRow, ""),
    ("two users may have one address", CREATE, "('n', ':key@USERD.INVALID')", NoRow, EMAIL_INDEX),
    ("reads by id miss a user", FIND_BY_ID, "('{:id}')", Row, REINDEX_REMEDY),
    ("searches by address miss a user", FIND_BY_EMAIL, "('{:key@userd.invalid}')", Row, REINDEX_REMEDY),
    ("searches by prefix miss a user", FIND_BY_EMAIL_PREFIX, "(':key', 1)", Row, REINDEX_REMEDY),
    ("lists miss a user", FIND_AFTER_IDS, "(array[:id - 1], '{1}')", Row, REINDEX_REMEDY),
    ("pages fail", FIND_PAGES, "('{0}', '{1}', '{false}')", Plan, ""),
    ("passwords are not stored", FIND_CREDENTIAL, "(:id)", Row, ""),
    ("logins miss a user", FIND_USER_WITH_CREDENTIAL, "(':key@userd.invalid')", Row, REINDEX_REMEDY),
    ("idempotency keys are not stored", FIND_KEPT_ANSWER, "(':key')", Row, ""),
    ("a change leaves the old ETag", UPDATE, "(:id, true, null, null, 'm', null)", NewRow, ETAG_TRIGGER),
    ("a batch leaves the old ETag", UPDATE_MANY, RENAME_ARGUMENTS, NewRow, ETAG_TRIGGER),
    ("a new password leaves the old ETag", UPDATE_PASSWORD, NEW_PASSWORD_ARGUMENTS, NewRow, ETAG_TRIGGER),
    ("logins fail", REPLACE_HASH, "(:id, ':password_hash', ':password_hash')", NoRow, ""),
    ("deletes keep a user", DELETE, "(:id, true, null, null)", Row, ""),
    ("deletes fail", DELETE_MANY, "('{:id}', '{true}', '{null}', '{null}')", Row, ""),
    ("deletes leave hashes of passwords", FIND_CREDENTIAL, "(:id)", NoRow, FOREIGN_KEY_REMEDY),
    ("deletes leave values of users", FIND_KEPT_ANSWER, "(':key')", NoRow, "trigger idempotency_erase"),
    ("deletes are not counted", FIND_COUNT_EXCESS, "(:id, :excess)", NoRow, "trigger user_counts_delete"),
];

/// Steps that are executed after the rollback of [`STEPS`], which removes the created user and its count together. The
/// first step checks that the excess of the count over the stored users ([`FIND_COUNT_EXCESS`]) is the same as after the
/// create; the second, that the excess is 0.
const STEPS_AFTER_ROLLBACK: [TrialStep; 2] = [
    ("creates are not counted", FIND_COUNT_EXCESS, "(:id, :excess)", NoRow, "trigger user_counts_insert"),
    ("totals and pages are wrong", FIND_COUNT_EXCESS, "(:id, 0)", NoRow, "userd recount"),
];

/// Finds the enabled triggers of the tables $1. Columns: the trigger's name; its name with its table; its function,
/// which is empty if the function is in another schema; the function's body.
const FIND_ENABLED_TRIGGERS: &str = "\
    select tgname::text, format('%I on %s', tgname, tgrelid::regclass), case \
        when tgfoid = to_regprocedure(format('%I()', proname))::oid then format('%s()', proname) else '' end, prosrc \
    from pg_trigger join pg_proc on pg_proc.oid = tgfoid \
    where tgrelid = any (array(select to_regclass(name)::oid from unnest($1::text[]) name)) \
        and not tgisinternal and tgenabled in ('O', 'A')";

/// Finds the `security definer` functions whose owner lacks a right that the function sometimes needs, to add up counts
/// or to clear a table after a TRUNCATE. Columns: the problem, and the remedy, which makes the owner of `users` the
/// owner of the function and of its table.
const FIND_FUNCTIONS_WITHOUT_RIGHTS: &str = "\
    select format('changes get 500 at times, as the owner of %s() may not use %s so', f, t), \
        format('alter table %2$s owner to %3$I; alter function %1$s() owner to %3$I', f, t, pg_get_userbyid(relowner)) \
    from (values ('user_counts_record', 'user_counts', 'SELECT,INSERT,UPDATE,DELETE'), \
        ('user_counts_reset', 'user_counts', 'TRUNCATE,INSERT'), ('user_counts_reset', 'users', 'SELECT'), \
        ('idempotency_erase', 'idempotency_keys', 'SELECT,UPDATE')) as needs (f, t, rights), pg_proc p, pg_class u \
    where p.oid = to_regprocedure(f || '()')::oid and prosecdef and u.oid = to_regclass('users')::oid \
        and (not has_schema_privilege(proowner, u.relnamespace, 'USAGE') or exists (select \
            from unnest(string_to_array(rights, ',')) one where not has_table_privilege(proowner, to_regclass(t)::oid, one)))";

/// Finds the name of the sequence that ids are drawn from, and whether the role of the session may read the sequence.
const FIND_ID_SEQUENCE: &str = "select name, has_sequence_privilege(name, 'SELECT') \
    from pg_get_serial_sequence('users', 'id') name where name is not null";

/// Finds the last value of the sequence of ids if the next id is taken, or if there is no next id, so that creates
/// fail. `SEQUENCE` stands for the name of the sequence.
const FIND_UNUSABLE_NEXT_ID: &str = "select last_value from SEQUENCE where last_value = bigint '9223372036854775807' \
    or exists (select from users where id >= last_value and (id > last_value or not is_called))";

/// The remedy if the next id cannot be used: sets the sequence to the largest id of a stored user.
const ID_SEQUENCE_REMEDY: &str =
    "select setval(pg_get_serial_sequence('users', 'id'), coalesce(max(id), bigint '1')) from users";

/// Finds the process ids of the sessions that have, or have requested, a lock on one of the tables $1 which blocks
/// reads or changes. Returns the ids in one text.
const FIND_LOCK_HOLDERS: &str = "\
    select coalesce(string_agg(distinct pid::text, ', '), 'gone now') from pg_locks \
    where relation = any (array(select to_regclass(name)::oid from unnest($1::text[]) name)) and pid <> pg_backend_pid() \
        and mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')";

/// One attempt at the steps, in a transaction that is rolled back.
struct Trial<'a> {
    transaction: Transaction<'a>,
    migrations: &'a Migrations,
    /// The name of the schema, quoted for SQL.
    schema: String,
    /// Values of the trial's user by column. The version is missing until the trial has created the user.
    user_columns: BTreeMap<String, String>,
    /// The triggers of the migrations that are unaltered: they are enabled, and execute the function of the migrations.
    intact_triggers: Vec<String>,
    /// True if the transaction refuses changes.
    is_read_only: bool,
    findings: Vec<Finding>,
}

/// Executes the statements of a service in a transaction that is rolled back, and returns the findings. If locks of
/// other sessions end each of three attempts, the only finding is a note that names these sessions. Fails if another
/// error ends the trial.
pub(super) fn execute_trial(
    client: &mut Client,
    migrations: &Migrations,
    changes: TriedChanges,
) -> Result<Vec<Finding>, Error> {
    // Checks deferred constraints after each statement, because the commit, which would check them, never comes. Reads
    // null in the text of an array as null, whatever the role's setting is, because a service sends no such text.
    const SET_UP_TRANSACTION: &str = "set local application_name = 'userd check'; set local array_nulls = on; \
        set local idle_in_transaction_session_timeout = '5s'; set constraints all immediate";
    /// Returns a random key for the trial's user, the schema, and whether the transaction refuses changes.
    const READ_KEY_AND_SCHEMA: &str = "select gen_random_uuid()::text, quote_ident(current_schema()::text), \
        current_setting('transaction_read_only') = 'on'";
    for _ in 0..MAX_TRIAL_ATTEMPTS {
        let isolated = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted);
        let mut transaction = isolated.start()?;
        transaction.batch_execute(&(setup_sql("set local", MAX_STATEMENT_TIME) + SET_UP_TRANSACTION))?;
        let row = transaction.query_typed_one(READ_KEY_AND_SCHEMA, &[])?;
        let values = [("id", "0"), ("key", row.get(0)), ("password_hash", UNMATCHED_HASH)];
        let user_columns = values.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let (schema, is_read_only) = (row.get(1), row.get(2));
        let (intact_triggers, findings) = (Vec::new(), Vec::new());
        let mut trial =
            Trial { transaction, migrations, schema, user_columns, intact_triggers, is_read_only, findings };
        match trial.execute_steps(changes) {
            Ok(()) => return Ok(trial.findings),
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error),
        }
    }
    let pids: String = client.query_typed_one(FIND_LOCK_HOLDERS, &[(&ALL_TABLES, Type::TEXT_ARRAY)])?.get(0);
    let line = format!("locks of other sessions end this part of the check; pid: {pids}");
    Ok(vec![Finding { severity: Note, subject: "service", line }])
}

impl Trial<'_> {
    /// Executes all steps. Ends early if a finding would make later findings misleading.
    fn execute_steps(&mut self, changes: TriedChanges) -> Result<(), Error> {
        self.make_read_only_if_needed(changes)?;
        for row in self.transaction.query_typed(FIND_FUNCTIONS_WITHOUT_RIGHTS, &[])? {
            self.add_problem(row.get(0), "", row.get(1));
        }
        for row in self.transaction.query_typed(FIND_ID_SEQUENCE, &[])? {
            let (sql, count) = (FIND_UNUSABLE_NEXT_ID.replace("SEQUENCE", row.get(0)), self.findings.len());
            let what = "the sequence of ids is behind them or at its end, so that creates fail";
            if !row.get::<_, bool>(1) {
                let line = "the role may not see the sequence of ids, which may be behind them";
                add_findings(&mut self.findings, Note, "service", [line]);
                continue;
            }
            self.execute_step(&(what, &sql, "", NoRow, ID_SEQUENCE_REMEDY))?;
            // Ends the trial if the next id is not available, because a create of the trial would draw an id. A
            // rollback does not put the sequence back, so that the next check might not find the fault any more.
            if self.findings.len() > count {
                return Ok(());
            }
        }
        self.transaction.batch_execute("savepoint before")?;
        for step in &STEPS {
            if !self.execute_step(step)? {
                return Ok(());
            }
        }
        self.transaction.batch_execute("rollback to savepoint before")?;
        STEPS_AFTER_ROLLBACK.iter().try_for_each(|step| self.execute_step(step).map(drop))
    }

    /// Adds each trigger of the migrations to `intact_triggers` if neither the trigger nor its function was altered.
    /// Adds a problem for each further trigger that executes a function of the migrations. Returns the triggers of other
    /// programs.
    fn read_foreign_triggers(&mut self) -> Result<Vec<String>, Error> {
        let mut foreign = Vec::new();
        for row in self.transaction.query_typed(FIND_ENABLED_TRIGGERS, &[(&ALL_TABLES, Type::TEXT_ARRAY)])? {
            let [name, label, function, body] = [0, 1, 2, 3].map(|at| row.get::<_, &str>(at));
            let made_by = |what: String| self.migrations.find_statement(&format!("create {what} "));
            let made = made_by(format!("function {function}"));
            let body = format!("$$ {} $$", in_one_line(body).trim());
            let is_made = made.as_ref().is_some_and(|made| made.ends_with(&body));
            match made_by(format!("trigger {name}")) {
                Some(trigger) if is_made && trigger.ends_with(&format!(" {function}")) => {
                    self.intact_triggers.push(format!("trigger {name}"));
                }
                // Adds no finding here: the step that needs this trigger adds one if `intact_triggers` lacks it.
                Some(_) => {}
                None if made.is_some() => {
                    let what = format!("a further trigger executes {function}");
                    self.add_problem(&what, "", &format!("drop trigger {label}"));
                }
                None => foreign.push(label.to_owned()),
            }
        }
        Ok(foreign)
    }

    /// Makes the transaction read-only if the trial is not to try changes, and adds a note with the reason.
    fn make_read_only_if_needed(&mut self, changes: TriedChanges) -> Result<(), Error> {
        let foreign = self.read_foreign_triggers()?.join(", ");
        let why = match changes {
            TriedChanges::None => "--read-only leaves them out".to_owned(),
            TriedChanges::UnlessForeignTriggers if !foreign.is_empty() => format!(
                "no rollback may undo what triggers of another program do; --fire-triggers fires them: {foreign}"
            ),
            _ if self.is_read_only => "it is a standby, or default_transaction_read_only is on".to_owned(),
            _ => return Ok(()),
        };
        self.is_read_only = true;
        add_findings(&mut self.findings, Note, "service", [format!("changes were not tried: {why}")]);
        self.transaction.batch_execute("set transaction read only")
    }

    /// Plans the statement of a step, executes the statement if more than a plan is expected, and adds the findings.
    /// Returns false if later steps cannot be executed, because this statement was refused or has not made the user
    /// that later steps need.
    fn execute_step(&mut self, &(flaw, sql, arguments, expected, remedy): &TrialStep) -> Result<bool, Error> {
        if remedy.starts_with("trigger ") && !self.intact_triggers.iter().any(|trigger| trigger == remedy) {
            self.add_problem(flaw, "", remedy);
        }
        if sql.is_empty() {
            return Ok(true);
        }
        let plan_remedy = if expected == Plan { remedy } else { "" };
        let messages = match self.try_statement(sql, arguments, expected != Plan) {
            Ok(messages) => messages,
            Err(error) if error.as_db_error().is_none() || is_transient(&error) => return Err(error),
            Err(error) if self.is_read_only && is_read_only_error(&error) => return Ok(true),
            Err(error) => {
                let hint = if lacks_right(&error) { GRANTS_REMEDY } else { "" };
                let lacks_index = is_missing_index(&error);
                let (flaw, remedy) = if lacks_index { (flaw, plan_remedy) } else { ("requests get 500", "") };
                self.add_problem(flaw, &(explain(&error) + hint), remedy);
                return Ok(false);
            }
        };
        let mut rows = messages.iter().filter_map(|message| match message {
            Message::Row(row) => Some(row),
            _ => None,
        });
        // Ignores the plan of a step that expects no row, because the step that looks at the sequence of ids may read
        // all users.
        let plan = rows.next().filter(|_| expected != NoRow);
        let plan = plan.and_then(|row| serde_json::from_str(row.get(0)?).ok());
        for table in fully_scanned_tables(&plan.unwrap_or_default()) {
            self.add_problem(&format!("requests read all of {table}"), "", plan_remedy);
        }
        let row = rows.next().filter(|row| row.get(0).is_some());
        if !self.check_row(expected, row) {
            self.add_problem(flaw, "", remedy);
        }
        Ok(expected != NewRow || row.is_some())
    }

    /// Prepares a statement as a session of a service does. Returns its plan and, if `executes` is set, its rows.
    fn try_statement(&mut self, sql: &str, arguments: &str, executes: bool) -> Result<Vec<Message>, Error> {
        let fill = |text: String, (name, value): (&String, &String)| text.replace(&format!(":{name}"), value);
        let execute = self.user_columns.iter().fold(format!("execute userd_check {arguments}"), fill);
        let executed = if executes { &*execute } else { "" };
        let mut savepoint = self.transaction.transaction()?;
        let answer = savepoint.simple_query(&format!(
            "prepare userd_check as {sql}; explain (format json) {execute}; {executed}; deallocate userd_check"
        ));
        if answer.is_ok() {
            savepoint.commit()?;
        } else {
            drop(savepoint);
            // Deallocates the prepared statement, because a prepared statement outlives a rollback, and a pooler may
            // lend the session to other clients.
            let _ = self.transaction.transaction()?.batch_execute("deallocate userd_check");
        }
        answer
    }

    /// Returns whether a statement has returned the expected row. Keeps the values of a new row for later steps.
    fn check_row(&mut self, expected: ExpectedResult, row: Option<&SimpleQueryRow>) -> bool {
        match (expected, row) {
            (Plan, _) => true,
            (NoRow, row) => row.is_none(),
            (Row, row) => row.is_some() || !self.user_columns.contains_key("version"),
            (NewRow, None) => false,
            (NewRow, Some(row)) => {
                let mut is_new = true;
                for (at, column) in row.columns().iter().enumerate() {
                    let Some(value) = row.get(at) else { continue };
                    let earlier = self.user_columns.insert(column.name().to_owned(), value.to_owned());
                    let changes = ["version", "updated_at"].contains(&column.name());
                    is_new &= !changes || earlier.as_deref() != Some(value);
                }
                is_new
            }
        }
    }

    /// Adds a problem, unless an earlier finding has the same remedy, or the same cause if the problem has no remedy.
    fn add_problem(&mut self, flaw: &str, cause: &str, remedy: &str) {
        let text = self.remedy_text(remedy).unwrap_or_default();
        let parts = [&*text, cause, flaw];
        let mark = parts.into_iter().find(|part| !part.is_empty()).unwrap_or_default();
        if !self.findings.iter().any(|finding| finding.line.contains(mark)) {
            let parts = parts.into_iter().rev().filter(|part| !part.is_empty());
            add_findings(&mut self.findings, Problem, "service", [parts.collect::<Vec<_>>().join(": ")]);
        }
    }

    /// Returns the remedy of a [`TrialStep`] as text to paste: a command, or statements that begin with setting the
    /// schema, so that any session may execute them. `None` if the step has no remedy.
    fn remedy_text(&self, remedy: &str) -> Option<String> {
        let made = |name: &str| self.migrations.find_statement(&format!("create {name} "));
        let (kind, name) = remedy.rsplit_once(' ')?;
        let statement = match kind {
            "userd" => return Some(format!("`{remedy}`")),
            "index" | "unique index" => format!("drop index if exists {name}; {}", made(remedy)?),
            "trigger" => {
                let trigger = made(remedy)?;
                let function =
                    made(trigger.split_once("execute ")?.1)?.replacen("create", "create or replace", 1);
                format!("{function}; drop trigger if exists {name} on users; {trigger}")
            }
            _ => remedy.to_owned(),
        };
        Some(format!("`set search_path = {}, pg_temp; {statement}`", self.schema))
    }
}

/// Returns the tables of userd of which a plan reads all rows: without an index, or by an index without a condition on
/// its columns.
fn fully_scanned_tables(plan: &Value) -> Vec<&str> {
    let node = plan["Node Type"].as_str().unwrap_or_default();
    let is_whole = node == "Seq Scan" || node.starts_with("Index") && plan["Index Cond"].is_null();
    let table = plan["Relation Name"].as_str().filter(|table| is_whole && WRITTEN_TABLES.contains(table));
    let parts =
        [plan, &plan["Plans"]].into_iter().filter_map(Value::as_array).flatten().chain(plan.get("Plan"));
    table.into_iter().chain(parts.flat_map(fully_scanned_tables)).collect()
}
