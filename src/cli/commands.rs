//! The subcommands and options, as clap's commands. Parsing, `--help`, the manual page and the completion of shells follow.
//!
//! To add an option: an argument here; the file of its subcommand asks `Given` for it. To add a subcommand: a command
//! here, and an arm in `execute` of the module above.

use clap::{
    Arg, ArgAction, Command,
    builder::{OsStringValueParser, PossibleValuesParser, TypedValueParser},
};
use std::ffi::OsString;
use userd::config::SETTINGS;

/// The argument of a subcommand that is no option.
pub const OPERAND: &str = "operand";

/// Options that stand for variables, whose help they have.
pub const VARIABLES: [(&str, &str); 3] =
    [("--host", "HOST"), ("--port", "PORT"), ("--postgres", "POSTGRES_BIN")];

/// Columns of the help.
const WIDTH: usize = 100;

/// Stands in the help for the table of settings.
pub const TABLE: &str = "{settings}";

const SIGNALS: &str = "SIGTERM, SIGHUP or Ctrl-C: answers the requests in flight, then ends; a signal a second later \
                       ends at once.";

/// Returns the command with its subcommands.
pub fn command() -> Command {
    let env_file = "read variables from FILE, as systemd's EnvironmentFile= has them; those of the environment go \
                    before them";
    let settings = "the name of a variable that is meant as a setting: refuses to start if it is misspelt";
    let end = "end when standard input does, and so with the process that holds its other end; with PID: end when \
               that process does; may be given twice";
    let cluster = "run a private PostgreSQL cluster in DIR from this machine's own programs (default ./userd-data; \
                   /var/lib/userd when started by root); listens on 127.0.0.1 unless HOST is set";
    let users =
        "with --ephemeral: begin with the users of FILE, as userd import reads it; CSV if it ends in .csv";
    let commands = "with --ephemeral: read commands from standard input, each answered by a line on standard output: \
                    reset, fail, faults, advance (docs/testing.md)";
    Command::new("userd")
        .version(env!("CARGO_PKG_VERSION"))
        .about("A user-management HTTP service over PostgreSQL. Without a command it runs the service.")
        .after_help(format!("Environment variables, with their defaults:\n{TABLE}\n{SIGNALS}"))
        .term_width(WIDTH)
        .args_override_self(true)
        .args_conflicts_with_subcommands(true)
        .args([
            optional("--embedded", "DIR", cluster),
            flag("--ephemeral", "with --embedded: on a fresh database that is dropped at the end")
                .requires("--embedded"),
            variable("--postgres").requires("--embedded"),
            flag("--commands", commands).requires("--ephemeral"),
            option("--seed", "FILE", users).requires("--ephemeral"),
            variable("--host"),
            variable("--port"),
            migrate(),
            optional("--with-parent", "PID", end).action(ArgAction::Append),
            option("--settings", "NAME", settings).action(ArgAction::Append).hide(true),
            option("--env-file", "FILE", env_file).global(true),
        ])
        .subcommands(transfers())
        .subcommands(upkeep())
        .subcommand(verb("man", "print the manual page, userd(1)"))
        .subcommand(
            verb("completion", "print what makes a shell complete arguments")
                .arg(Arg::new(OPERAND).value_name("SHELL").required(true).value_parser(words(&SHELLS))),
        )
}

/// Shells that `userd completion` is for.
const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

/// Returns the subcommands for all users.
fn transfers() -> [Command; 2] {
    let format = one_of(
        "--format",
        &["ndjson", "csv"],
        "a JSON object a line, or RFC 4180 with a header; the default is csv if FILE ends in .csv, else ndjson, or for \
         an import what the users look like",
    );
    let as_is =
        "accept every name and address that the database can hold, not only what the create schema accepts";
    let map = "which member or column is which field, as in name=displayName,email=emails.0.value; leave out all others";
    let formulas =
        "in CSV, an apostrophe before names and addresses that a spreadsheet would take for formulas";
    [
        verb("export", "write all users to FILE, which is complete once it is there, or to standard output")
            .args([
                embedded(),
                format.clone(),
                flag("--with-password-hashes", "each user's hash, too, as passwordHash"),
                flag("--for-spreadsheets", formulas),
                operand("FILE"),
            ]),
        verb(
            "import",
            "create the users of FILE, or of standard input: all of them, or none if a line is refused",
        )
        .args([
            embedded(),
            format,
            option("--map", "FIELD=MEMBER,...", map),
            flag("--ignore-unknown", "leave out members and columns that are no field of a user"),
            flag("--skip-invalid", "leave out lines that are refused, and import the others"),
            flag("--skip-existing", "leave out users whose e-mail address is in the database"),
            flag("--dry-run", "check everything, change nothing"),
            flag("--as-is", as_is),
            flag("--keep-ids", "give users the ids of their lines, not new ones"),
            operand("FILE"),
        ]),
    ]
}

/// Returns the subcommands of operators.
fn upkeep() -> [Command; 6] {
    [
        verb("migrate", "apply the migrations that the database lacks, and end").arg(embedded()),
        verb(
            "check",
            "say if userd could start: configuration, address, database, migrations, privileges, tables; changes \
             nothing; exit code 0 or 1",
        )
        .args([
            embedded(),
            variable("--host"),
            variable("--port"),
            migrate(),
            flag("--counts", "compare the counts behind pages with the table, too"),
        ]),
        verb(
            "recount",
            "count all users anew, if triggers were disabled and totals are wrong; writers wait meanwhile",
        )
        .arg(embedded()),
        verb(
            "grants",
            "print the GRANT statements that ROLE needs to run the service on tables that another role owns",
        )
        .args([embedded(), operand("ROLE").required(true)]),
        verb("config", "print the settings in force and where each comes from, without secrets").args([
            embedded(),
            variable("--host"),
            variable("--port"),
        ]),
        verb(
            "healthcheck",
            "exit code 0 if the service that these variables start answers GET /readyz with 200, else 1: for images \
             without curl",
        )
        .args([variable("--host"), variable("--port")]),
    ]
}

fn verb(name: &'static str, about: &'static str) -> Command {
    Command::new(name)
        .about(about)
        .after_help("Settings are variables of the environment: `userd --help` lists them.")
        .args_override_self(true)
}

fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(&name[2..]).action(ArgAction::SetTrue).help(help)
}

/// Returns an option with a value, which is not empty.
fn option(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    let text = OsStringValueParser::new().try_map(|text: OsString| match text.is_empty() {
        true => Err("it needs a value"),
        false => Ok(text),
    });
    Arg::new(name).long(&name[2..]).value_name(value).value_parser(text).help(help)
}

/// Returns an option with or without `=VALUE`.
fn optional(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    option(name, value, help).num_args(0..=1).require_equals(true)
}

fn one_of(name: &'static str, values: &'static [&'static str], help: &'static str) -> Arg {
    option(name, "WORD", help).value_parser(words(values))
}

/// Returns an option that stands for a variable.
fn variable(name: &'static str) -> Arg {
    let variable = VARIABLES.iter().find(|(option, _)| *option == name).map(|(_, variable)| variable);
    let setting = SETTINGS.iter().find(|setting| variable == Some(&setting.variable));
    let setting = setting.expect("each stands for a setting");
    option(name, setting.variable, setting.help)
}

/// Returns the option for the private cluster of a service.
fn embedded() -> Arg {
    let help = "work on the cluster that `userd --embedded[=DIR]` makes, whether that runs or not";
    optional("--embedded", "DIR", help)
}

fn migrate() -> Arg {
    let help = "off: applies no migration, and refuses to start if one is missing (default on)";
    one_of("--migrate", &["on", "off"], help)
}

fn operand(name: &'static str) -> Arg {
    Arg::new(OPERAND).value_name(name).value_parser(OsStringValueParser::new())
}

fn words(words: &'static [&'static str]) -> impl TypedValueParser<Value = OsString> {
    PossibleValuesParser::new(words).map(OsString::from)
}
