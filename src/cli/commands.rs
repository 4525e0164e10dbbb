//! The tables of subcommands and options, and the functions that describe the command line to clap by these tables.
//! clap parses arguments, and makes `--help`, the manual page and the completion of shells.
//!
//! To add an option, write a row here, and ask `Args` for the option in the file of the subcommand. To add a
//! subcommand, write a row here, and an arm in `execute_subcommand` of `src/cli/mod.rs`.

use crate::config::SETTINGS;
use clap::builder::{OsStringValueParser, PathBufValueParser, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgAction, Command};
use std::path::PathBuf;

/// Options that set an environment variable, each with the name of the variable.
pub const ENV_OPTIONS: [(OptionName, &str); 3] = [(HOST, "HOST"), (PORT, "PORT"), (POSTGRES, "POSTGRES_BIN")];

/// Name of the subcommand `userd test`, whose failures have exit codes of their own.
pub const TEST_SUBCOMMAND: &str = "test";

/// Width of the help in columns.
const HELP_COLUMNS: usize = 100;

/// Placeholder in the help text for the table of settings, which replaces it after clap has wrapped the text.
const SETTINGS_PLACEHOLDER: &str = "{settings}";

/// The meanings of the exit codes, for `--help` and the manual page.
pub const EXIT_CODES: &str = "\
0: done; of the service: SIGTERM, SIGHUP or Ctrl-C has ended it, and all requests in flight were answered (a signal a \
second later ends it at once). 1: the service could not start or go on; a line was refused by an import; a check found a \
problem. 2: an argument or a variable cannot be used. Of `userd test`: the code of COMMAND, 128 + n for a signal n; 125: \
`userd test` itself failed, 126: COMMAND cannot be executed, 127: COMMAND was not found. 130, 143: ended by SIGINT or SIGTERM; nothing of an export or an \
import is left. 141: the reader of an export's standard output has closed it.";

/// Declares the enum of subcommands, and the table with name, operand and help text of each. An operand such as
/// `bash|zsh` must be one of these words.
macro_rules! subcommands {
    ($($subcommand:ident $name:tt $operand:literal: $about:literal;)+) => {
        /// A subcommand, or `Service` if the command line has none.
        #[derive(Clone, Copy, PartialEq)]
        pub enum Subcommand { Service, $($subcommand,)+ }

        /// Each subcommand except the service, with its name, its operand and its help text.
        const SUBCOMMANDS: &[(Subcommand, [&str; 3])] = &[$((Subcommand::$subcommand, [$name, $operand, $about]),)+];
    };
}

subcommands! {
    Export "export" "[FILE]": "write all users to FILE, which is complete once it is there, or to standard output";
    Import "import" "[FILE]": "create the users of FILE, or of standard input: all of them, or none if a line is \
        refused";
    Migrate "migrate" "": "apply the migrations that the database lacks, and end";
    Check "check" "": "say if userd could start and serve, or what is wrong with settings and database; tries changes and \
        rolls them back; exit code 0 or 1";
    Recount "recount" "": "count all users anew, if triggers were disabled and totals are wrong; writers wait \
        meanwhile";
    Grants "grants" "ROLE": "print the GRANT statements that ROLE needs to run the service on tables that another \
        role owns";
    Test TEST_SUBCOMMAND "[COMMAND]": "run COMMAND, as in `userd test -- pytest -q`, beside a service that is thrown \
        away: USERD_URL, USERD_CONTROL and USERD_DATABASE_URL say where; without COMMAND print them, and serve until \
        standard input ends";
    Config "config" "": "print the settings in force and where each comes from, without secrets";
    Healthcheck "healthcheck" "": "exit code 0 if the service that these variables start answers GET /readyz with \
        200, else 1";
    Man "man" "": "print the manual page, userd(1)";
    Completion "completion" "bash|zsh|fish": "print what makes a shell complete arguments";
}

/// The name of an option, such as `--port`, or of the operand.
#[derive(Clone, Copy)]
pub struct OptionName(&'static str);

impl OptionName {
    /// Returns the name by which clap knows the option.
    pub fn id(self) -> &'static str {
        self.0
    }
}

/// The name of the operand of any subcommand.
pub const OPERAND: OptionName = OptionName("operand");

/// Declares a constant for each option, and the table with the subcommands, the value and the help text of each. If
/// the help text is empty, the help shows the text of the setting that is named like the value. The value `[=DIR]` is
/// optional; the value `=on|off` must be one of these words.
macro_rules! options {
    ($($option:ident $name:literal: $([$($subcommand:ident)+] $value:literal $help:literal;)+)+) => {
        $(pub const $option: OptionName = OptionName($name);)+

        /// An option, subcommands that have it, its value and its help text there. An option may have several rows.
        const OPTIONS: &[(OptionName, &[Subcommand], &str, &str)] =
            &[$($(($option, &[$(Subcommand::$subcommand),+], $value, $help),)+)+];
    };
}

options! {
    EMBEDDED "--embedded":
        [Service] "[=DIR]" "run a private PostgreSQL cluster in DIR (default ./userd-data; of root /var/lib/userd)";
        [Export Import Migrate Check Recount Grants Config] "[=DIR]" "work on the cluster that `userd \
            --embedded[=DIR]` makes, whether that runs or not";
    POSTGRES "--postgres": [Service] "=POSTGRES_BIN" "";
    SEED "--seed": [Test] "=FILE" "begin with the users of FILE, as userd import reads it; CSV if it ends in .csv";
    SET "--set": [Test] "=NAME=VALUE" "a setting of the service, which reads no variable; may be given several times";
    HOST "--host":
        [Service Config Healthcheck] "=HOST" "";
        [Test] "=HOST" "Address or name to listen on: `localhost` is 127.0.0.1 and ::1, `0.0.0.0` lets other machines in";
    PORT "--port": [Service Config Healthcheck Test] "=PORT" "";
    UNTIL_SIGNAL "--until-signal": [Test] "" "without COMMAND: serve until a signal, not until standard input ends";
    CONTROL "--control": [Test] "=NAME" "with --until-signal: path of the controls, of 16 characters at least \
        (default: a secret one)";
    MIGRATE "--migrate": [Service Check] "=on|off" "off: applies no migration, and refuses to start if one is missing \
        (default on)";
    ENV_FILE "--env-file": [Service] "=FILE" "take variables that the environment lacks from FILE, in the form of \
        systemd's EnvironmentFile=";
    FORMAT "--format": [Export Import] "=ndjson|csv" "a JSON object a line, or RFC 4180 with a header; the default is \
        csv if FILE ends in .csv, else ndjson, or for an import what the users look like";
    WITH_PASSWORD_HASHES "--with-password-hashes": [Export] "" "each user's hash, too, as passwordHash";
    FOR_SPREADSHEETS "--for-spreadsheets": [Export] "" "CSV with an apostrophe before names and addresses that are \
        formulas to a spreadsheet";
    MAP "--map": [Import] "=FIELD=MEMBER,..." "which member or column is which field, as in email=emails.0.value; \
        leave out others";
    IGNORE_UNKNOWN "--ignore-unknown": [Import] "" "leave out members and columns that are no field of a user";
    SKIP_INVALID "--skip-invalid": [Import] "" "leave out lines that are refused, and import the others";
    SKIP_EXISTING "--skip-existing": [Import] "" "leave out users whose e-mail address is in the database";
    DRY_RUN "--dry-run": [Import] "" "check everything, change nothing";
    AS_IS "--as-is": [Import] "" "accept every name and address that the database can hold, not only what the create \
        schema accepts";
    CLEAR_PASSWORDS "--clear-passwords": [Import] "" "hash the passwords of the file, which are clear; else lines \
        with a password are refused";
    KEEP_IDS "--keep-ids": [Import] "" "give users the ids of their lines, not new ones";
    COUNTS "--counts": [Check] "" "compare the counts behind pages with the table, too";
    READ_ONLY "--read-only": [Check] "" "try no change, not even one that is rolled back";
    FIRE_TRIGGERS "--fire-triggers": [Check] "" "try changes also if they fire another program's triggers, whose mails no \
        rollback takes back";
}

/// Returns the description of the command line of `userd` for clap.
pub fn clap_command() -> Command {
    Command::new("userd")
        .version(version())
        .about("A user-management HTTP service over PostgreSQL. Without a command it runs the service.")
        .after_help(format!(
            "Environment variables, with their defaults:\n{SETTINGS_PLACEHOLDER}\nExit codes: {EXIT_CODES}"
        ))
        .term_width(HELP_COLUMNS)
        .args_override_self(true)
        .args_conflicts_with_subcommands(true)
        .args(clap_options(Subcommand::Service))
        .mut_arg(POSTGRES.0, |arg| arg.requires(EMBEDDED.0))
        .mut_arg(ENV_FILE.0, |arg| arg.global(true))
        .subcommands(SUBCOMMANDS.iter().map(clap_subcommand))
        .mut_subcommand(TEST_SUBCOMMAND, |test| {
            let command = |arg: Arg| arg.last(true).num_args(1..).value_parser(OsStringValueParser::new());
            test.mut_arg(OPERAND.0, command)
                .mut_arg(UNTIL_SIGNAL.0, |arg| arg.conflicts_with(OPERAND.0))
                .mut_arg(CONTROL.0, |arg| arg.requires(UNTIL_SIGNAL.0).conflicts_with(OPERAND.0))
        })
}

/// Returns the text of `--version`: the version, the commit if the build knows one, and the machine (`x86_64-linux`).
fn version() -> &'static str {
    let [(_, version), (_, commit), (_, machine)] = crate::metrics::build_info_labels();
    let separator = if commit.is_empty() { "" } else { ", " };
    format!("{version} ({commit}{separator}{machine})").leak()
}

/// Returns the description of a subcommand for clap.
fn clap_subcommand(&(subcommand, [name, operand, about]): &(Subcommand, [&'static str; 3])) -> Command {
    let arg = Arg::new(OPERAND.0).required(!operand.starts_with('['));
    let arg = (!operand.is_empty()).then(|| with_value_parser(arg, operand.trim_matches(['[', ']'])));
    Command::new(name)
        .about(about)
        .after_help("Settings are variables of the environment: `userd --help` lists them.")
        .args_override_self(true)
        .args(clap_options(subcommand))
        .args(arg)
}

/// Returns the subcommand of this name, or the service for an empty name.
pub fn find_subcommand(name: &str) -> Subcommand {
    SUBCOMMANDS.iter().find(|row| row.1[0] == name).map_or(Subcommand::Service, |row| row.0)
}

/// Returns the descriptions of the options of a subcommand for clap.
fn clap_options(subcommand: Subcommand) -> impl Iterator<Item = Arg> {
    let rows = OPTIONS.iter().filter(move |(_, subcommands, ..)| subcommands.contains(&subcommand));
    rows.map(|&(option, _, value, help)| clap_option(option.0, value, help))
}

/// Returns the description of an option for clap.
fn clap_option(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    let value_name = value.trim_matches(['[', '=', ']']);
    let setting = SETTINGS.iter().find(|setting| setting.variable == value_name);
    let help = setting.filter(|_| help.is_empty()).map_or(help, |setting| setting.help);
    let arg = Arg::new(name).long(&name[2..]).help(help);
    if value.is_empty() {
        return arg.action(ArgAction::SetTrue);
    }
    let least = usize::from(!value.starts_with('['));
    let arg = arg.action(ArgAction::Append).num_args(least..=1).require_equals(least == 0);
    with_value_parser(arg, value_name)
}

/// Makes an argument take a value with this name in the help. If the name is a list such as `on|off`, the value must be
/// one of its words, otherwise a path that is not empty.
fn with_value_parser(arg: Arg, value_name: &'static str) -> Arg {
    let arg = arg.value_name(value_name);
    if value_name.contains('|') {
        return arg.value_parser(PossibleValuesParser::new(value_name.split('|')).map(PathBuf::from));
    }
    arg.value_parser(PathBufValueParser::new())
}

/// Returns the help text with the table of settings in place of its placeholder.
pub fn help_with_settings(help: &clap::Error) -> String {
    let rows = SETTINGS.iter().map(|setting| {
        let default = setting.default().unwrap_or_else(|| "-".to_owned());
        format!("  {:<19} {default:<12} {}\n", setting.variable, setting.help)
    });
    help.to_string().replace(SETTINGS_PLACEHOLDER, &rows.collect::<String>())
}
