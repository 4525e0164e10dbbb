//! The table of subcommands and options, as clap's commands. Parsing, `--help`, the manual page and the completion of
//! shells are made from it.
//!
//! To add an option: a row here; the file of its subcommand asks `Args` for it. To add a subcommand: a row here, and an
//! arm in `execute` of the module above.

use super::test;
use crate::config::SETTINGS;
use clap::builder::{OsStringValueParser, PathBufValueParser, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgAction, Command};
use std::path::PathBuf;

/// Identifier of a subcommand's operand.
pub const OPERAND: &str = "operand";

/// Options that stand for variables, and have their help.
pub const VARIABLES: [(&str, &str); 3] =
    [("--host", "HOST"), ("--port", "PORT"), ("--postgres", "POSTGRES_BIN")];

/// Columns of the help.
const HELP_COLUMNS: usize = 100;

/// Placeholder of the table of settings, which clap would wrap.
const TABLE: &str = "{settings}";

/// Meanings of the exit code.
pub const EXIT_STATUS: &str = "\
0: done; of the service: SIGTERM, SIGHUP or Ctrl-C has ended it, and all requests in flight were answered (a signal a \
second later ends it at once). 1: the service could not start or go on; a line was refused by an import; a check found a \
problem. 2: an argument or a variable cannot be used. Of `userd test`: the code of COMMAND, 128 + n for a signal n; 125: \
`userd test` itself failed, 126: COMMAND cannot be executed, 127: COMMAND was not found. 130, 143: ended by SIGINT or SIGTERM; nothing of an export or an \
import is left. 141: the reader of an export's standard output has closed it.";

/// Each subcommand, with its operand if it has one, and its help. `a|b`: the operand is one of these words.
const VERBS: &str = "\
export [FILE]: write all users to FILE, which is complete once it is there, or to standard output
import [FILE]: create the users of FILE, or of standard input: all of them, or none if a line is refused
migrate: apply the migrations that the database lacks, and end
check: say if userd could start, or what is wrong with settings and database; changes nothing; exit code 0 or 1
recount: count all users anew, if triggers were disabled and totals are wrong; writers wait meanwhile
grants ROLE: print the GRANT statements that ROLE needs to run the service on tables that another role owns
test [COMMAND]: run COMMAND, as in `userd test -- pytest -q`, beside a service that is thrown away: USERD_URL, \
    USERD_CONTROL and USERD_DATABASE_URL say where; without COMMAND print them, and serve until standard input ends
config: print the settings in force and where each comes from, without secrets
healthcheck: exit code 0 if the service that these variables start answers GET /readyz with 200, else 1
man: print the manual page, userd(1)
completion bash|zsh|fish: print what makes a shell complete arguments
";

/// Subcommands (`userd` is the service), an option that each of them has, and its help. An empty help is that of the
/// option's setting. `[=DIR]`: the value may be missing; `on|off`: the value is one of these words.
const OPTIONS: &str = "\
userd: --embedded[=DIR]: run a private PostgreSQL cluster in DIR (default ./userd-data; of root /var/lib/userd)
userd: --postgres=POSTGRES_BIN:
test: --seed=FILE: begin with the users of FILE, as userd import reads it; CSV if it ends in .csv
test: --set=NAME=VALUE: a setting of the service, which reads no variable; may be given several times
export import migrate check recount grants config: --embedded[=DIR]: work on the cluster that \
    `userd --embedded[=DIR]` makes, whether that runs or not
userd config healthcheck: --host=HOST:
userd config healthcheck: --port=PORT:
test: --host=HOST: address to listen on (default localhost)
test: --port=PORT: port to listen on (default: a free one)
test: --until-signal: without COMMAND: serve until a signal, not until standard input ends
test: --control=NAME: with --until-signal: path of the controls, of 16 characters at least (default: a secret one)
userd check: --migrate=on|off: off: applies no migration, and refuses to start if one is missing (default on)
userd: --env-file=FILE: take variables that the environment lacks from FILE, in the form of systemd's EnvironmentFile=
export import: --format=ndjson|csv: a JSON object a line, or RFC 4180 with a header; the default is csv if FILE ends \
    in .csv, else ndjson, or for an import what the users look like
export: --with-password-hashes: each user's hash, too, as passwordHash
export: --for-spreadsheets: CSV with an apostrophe before names and addresses that are formulas to a spreadsheet
import: --map=FIELD=MEMBER,...: which member or column is which field, as in email=emails.0.value; leave out others
import: --ignore-unknown: leave out members and columns that are no field of a user
import: --skip-invalid: leave out lines that are refused, and import the others
import: --skip-existing: leave out users whose e-mail address is in the database
import: --dry-run: check everything, change nothing
import: --as-is: accept every name and address that the database can hold, not only what the create schema accepts
import: --clear-passwords: hash the passwords of the file, which are clear; else lines with a password are refused
import: --keep-ids: give users the ids of their lines, not new ones
check: --counts: compare the counts behind pages with the table, too
";

/// Returns the command with its subcommands.
pub fn command() -> Command {
    Command::new("userd")
        .version(version())
        .about("A user-management HTTP service over PostgreSQL. Without a command it runs the service.")
        .after_help(format!(
            "Environment variables, with their defaults:\n{TABLE}\nExit codes: {EXIT_STATUS}"
        ))
        .term_width(HELP_COLUMNS)
        .args_override_self(true)
        .args_conflicts_with_subcommands(true)
        .args(options("userd"))
        .mut_arg("--postgres", |arg| arg.requires("--embedded"))
        .mut_arg("--env-file", |arg| arg.global(true))
        .subcommands(VERBS.lines().map(verb))
        .mut_subcommand(test::VERB, |test| {
            let command = |arg: Arg| arg.last(true).num_args(1..).value_parser(OsStringValueParser::new());
            test.mut_arg(OPERAND, command)
                .mut_arg("--until-signal", |arg| arg.conflicts_with(OPERAND))
                .mut_arg("--control", |arg| arg.requires("--until-signal").conflicts_with(OPERAND))
        })
}

/// Returns the version, the commit if the build was given one, and the machine.
fn version() -> &'static str {
    let [(_, version), (_, commit), (_, machine)] = crate::metrics::build();
    let separator = if commit.is_empty() { "" } else { ", " };
    format!("{version} ({commit}{separator}{machine})").leak()
}

/// Returns the subcommand of a row.
fn verb(row: &'static str) -> Command {
    let (usage, about) = row.split_once(": ").expect("a row has its help");
    let (name, operand) = usage.split_once(' ').unwrap_or((usage, ""));
    let arg = Arg::new(OPERAND).required(!operand.starts_with('['));
    let arg = (!operand.is_empty()).then(|| with_value(arg, operand.trim_matches(['[', ']'])));
    Command::new(name)
        .about(about)
        .after_help("Settings are variables of the environment: `userd --help` lists them.")
        .args_override_self(true)
        .args(options(name))
        .args(arg)
}

/// Returns the options of a subcommand.
fn options(verb: &str) -> impl Iterator<Item = Arg> {
    OPTIONS.lines().filter_map(move |row| {
        let (verbs, option) = row.split_once(": ")?;
        verbs.split(' ').any(|name| name == verb).then(|| self::option(option))
    })
}

/// Returns the option of a row. An empty value is refused.
fn option(row: &'static str) -> Arg {
    let (usage, help) = row.split_once(':').expect("a row has its help");
    let (name, value) = usage.split_once(['=', '[']).unwrap_or((usage, ""));
    let setting = SETTINGS.iter().find(|setting| setting.variable == value);
    let help = setting.map_or(help.trim_start(), |setting| setting.help);
    let arg = Arg::new(name).long(&name[2..]).help(help);
    if value.is_empty() {
        return arg.action(ArgAction::SetTrue);
    }
    let least = usize::from(!value.starts_with('='));
    let arg = arg.action(ArgAction::Append).num_args(least..=1).require_equals(least == 0);
    with_value(arg, value.trim_matches(['=', ']']))
}

/// Returns an argument with a value of this name: a path, or one of the words of `on|off`.
fn with_value(arg: Arg, name: &'static str) -> Arg {
    let arg = arg.value_name(name);
    if name.contains('|') {
        return arg.value_parser(PossibleValuesParser::new(name.split('|')).map(PathBuf::from));
    }
    arg.value_parser(PathBufValueParser::new())
}

/// Returns clap's help, with the table of settings in its place.
pub fn with_settings(help: &clap::Error) -> String {
    let rows = SETTINGS.iter().map(|setting| {
        let default = setting.default().unwrap_or_else(|| "-".to_owned());
        format!("  {:<19} {default:<12} {}\n", setting.variable, setting.help)
    });
    help.to_string().replace(TABLE, &rows.collect::<String>())
}
