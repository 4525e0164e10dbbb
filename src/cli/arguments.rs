//! The arguments of the command line, parsed by clap.

use super::commands::{self, OPERAND, OptionName, Subcommand, clap_command, help_with_settings};
use super::{Failure, print};
use crate::{config::is_connection_string, transfer::Format};
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use clap::{ArgMatches, parser::ValueSource};
use std::path::{Path, PathBuf};
use std::{borrow::Cow, collections::BTreeMap, ffi::OsString};

/// The parsed command line: the subcommand, its options and its operand.
pub struct Args {
    pub subcommand: Subcommand,
    matches: ArgMatches,
    /// Environment variables that options or `--env-file` have set, each with its source: `argument`, or `--env-file`.
    pub variable_sources: BTreeMap<String, &'static str>,
}

impl Args {
    /// Parses the name of the program and the arguments. If the arguments ask for the help or the version, prints it
    /// and returns `None`.
    pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Option<Args>, Failure> {
        let arguments: Vec<OsString> = arguments.collect();
        // Leaves out the arguments behind `--`, which are the command that `userd test` runs.
        let mut own = arguments.iter().take_while(|argument| *argument != "--");
        if own.any(|argument| is_connection_string(&argument.to_string_lossy())) {
            return Err(Failure::usage(
                "no argument is a connection string: DATABASE_URL names the database",
            ));
        }
        let is_home = |text: &str| text.starts_with("--") && (text.ends_with("=~") || text.contains("=~/"));
        if arguments.iter().any(|argument| is_home(&argument.to_string_lossy())) {
            return Err(Failure::usage("a shell does not expand the ~ behind '=': write \"$HOME/…\""));
        }
        let mut matches = match clap_command().try_get_matches_from(&arguments) {
            Ok(matches) => matches,
            Err(error) if !error.use_stderr() => return print(help_with_settings(&error)).map(|()| None),
            Err(error) => return Err(Failure::usage(describe_problem(error))),
        };
        let (subcommand, matches) = matches.remove_subcommand().unwrap_or((String::new(), matches));
        let subcommand = commands::find_subcommand(&subcommand);
        Ok(Some(Args { subcommand, matches, variable_sources: BTreeMap::new() }))
    }

    /// Returns whether the command line has this option.
    pub fn has(&self, option: OptionName) -> bool {
        let known = self.matches.try_contains_id(option.id()).unwrap_or_default();
        known && self.matches.value_source(option.id()) == Some(ValueSource::CommandLine)
    }

    /// Returns the value of an option or the operand. Returns the last value of an option that is there several times.
    pub fn value(&self, option: OptionName) -> Option<&Path> {
        self.occurrences(option).flatten().last()
    }

    /// Returns a value for each time that the command line has the option: `None` if the option has no value there.
    pub fn occurrences(&self, option: OptionName) -> impl Iterator<Item = Option<&Path>> {
        let occurrences = self.matches.try_get_occurrences::<PathBuf>(option.id()).ok().flatten();
        occurrences.into_iter().flatten().map(|mut values| values.next().map(PathBuf::as_path))
    }

    /// Returns the command that `userd test` runs, with its arguments.
    pub fn test_command(&self) -> Vec<&OsString> {
        self.matches.get_many(OPERAND.id()).into_iter().flatten().collect()
    }

    /// Returns the operand as text, or an empty text if there is no operand.
    pub fn operand_text(&self) -> Cow<'_, str> {
        self.value(OPERAND).map(Path::to_string_lossy).unwrap_or_default()
    }

    /// Returns the directory of the private PostgreSQL cluster, or `None` without `--embedded`. The default for root is
    /// a directory that PostgreSQL's account can enter.
    pub fn embedded_dir(&self) -> Option<PathBuf> {
        let is_root = nix::unistd::Uid::effective().is_root();
        let default = Path::new(if is_root { "/var/lib/userd" } else { "userd-data" });
        self.has(commands::EMBEDDED).then(|| self.value(commands::EMBEDDED).unwrap_or(default).to_owned())
    }

    /// Returns the operand as a file, or `None` for standard input or output (`-`, or no operand).
    pub fn operand_file(&self) -> Option<&Path> {
        self.value(OPERAND).filter(|file| *file != "-")
    }

    /// Returns the file format: the value of `--format`, or CSV if the name of the file ends in `.csv`, or else `None`.
    pub fn file_format(&self) -> Option<Format> {
        match self.value(commands::FORMAT) {
            Some(format) if format == "csv" => Some(Format::Csv),
            Some(_) => Some(Format::Ndjson),
            None => {
                let extension = self.operand_file().and_then(Path::extension);
                extension.filter(|end| end.eq_ignore_ascii_case("csv")).map(|_| Format::Csv)
            }
        }
    }
}

/// Returns clap's message about wrong arguments. The message repeats no argument, because an argument may be a secret.
fn describe_problem(mut error: Error) -> String {
    let kind = match error.kind() {
        ErrorKind::UnknownArgument => ContextKind::InvalidArg,
        ErrorKind::InvalidSubcommand | ErrorKind::ArgumentConflict => ContextKind::InvalidSubcommand,
        _ => ContextKind::InvalidValue,
    };
    // Hides the argument behind `…`, but leaves an empty text: by an empty text clap says that the value is missing.
    if error.get(kind).is_some_and(|argument| !argument.to_string().is_empty()) {
        error.insert(kind, ContextValue::String("…".to_owned()));
    }
    // Removes clap's tip to write the argument behind `--`, because the tip repeats the argument.
    error.remove(ContextKind::Suggested);
    let text = error.to_string().replace("'…' cannot be used with", "'…' has to come before");
    text.trim_start_matches("error: ").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::{super::export, *};

    fn parse(line: &str) -> Result<Args, String> {
        let parsed = Args::parse(format!("userd {line}").split_whitespace().map(OsString::from));
        parsed.map(|args| args.expect("no help was asked for")).map_err(|failure| failure.message)
    }

    #[test]
    fn arguments_that_are_none() {
        for (line, expected) in [
            ("exprot", "unrecognized subcommand '…' tip: a similar subcommand exists: 'export'"),
            ("--embeded", "unexpected argument '…' found tip: a similar argument exists: '--embedded'"),
            ("--embeded=/srv", "unexpected argument '…' found tip: a similar argument exists: '--embedded'"),
            ("import --skip-exist", "found tip: a similar argument exists: '--skip-existing'"),
            ("config --prot=1", "found tip: a similar argument exists: '--port'"),
            ("hunter2", "unrecognized subcommand '…'"),
            ("--embedded hunter2", "the subcommand '…' has to come before '--embedded[=<DIR>]'"),
            ("--port 1 hunter2", "the subcommand '…' has to come before '--port <PORT>'"),
            ("--env-file hunter2 check", "the subcommand '…' has to come before '--env-file <FILE>'"),
            ("--Hunter2", "unexpected argument '…' found"),
            ("-xhunter2", "unexpected argument '…' found"),
            ("export a hunter2", "unexpected argument '…' found"),
            ("export a --hunter2", "unexpected argument '…' found"),
            (
                "export --format hunter2",
                "invalid value '…' for '--format <ndjson|csv>' [possible values: ndjson, csv]",
            ),
            ("help hunter2", "unrecognized subcommand '…'"),
            (
                "completion hunter2",
                "invalid value '…' for '<bash|zsh|fish>' [possible values: bash, zsh, fish]",
            ),
            ("grants", "the following required arguments were not provided: <ROLE>"),
        ] {
            let problem = parse(line).err().unwrap_or_else(|| panic!("{line}"));
            let problem = problem.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(problem.contains(expected), "{line}: {problem}");
            assert!(problem.ends_with("For more information, try '--help'."), "{line}: {problem}");
            assert!(!problem.to_lowercase().contains("hunter2"), "{problem}");
        }
    }

    #[test]
    fn directories_that_no_option_gets() {
        let home = "a shell does not expand the ~ behind '=': write";
        for (line, expected) in [
            ("--embedded=~/x", home),
            ("--embedded=~", home),
            ("--env-file=~/x check", home),
            ("export --embedded=~/x", home),
            ("--embedded ./data", "the subcommand '…' has to come before '--embedded[=<DIR>]'"),
            ("check --embedded ../data", "unexpected argument '…' found"),
            ("--embedded --seed=./data", "unexpected argument '…' found"),
            ("--embedded export", "the subcommand '…' has to come before"),
        ] {
            let problem = parse(line).err().unwrap_or_else(|| panic!("{line}"));
            assert!(problem.starts_with(expected), "{line}: {problem}");
        }
        for line in ["--embedded=./~x", "export --embedded ./users.csv", "import --map name=~,email=e x"] {
            assert!(parse(line).is_ok(), "{line}");
        }
    }

    #[test]
    fn connection_strings_are_not_repeated() {
        for before in ["", "check ", "export ", "grants ", "import --map ", "--seed=", "--host "] {
            for address in ["postgres://u:hunter2@h/d", "postgres:///?password=hunter2", "x://u:hunter2@h"] {
                let problem = parse(&format!("{before}{address}")).err().expect(before);
                assert!(
                    problem.contains("DATABASE_URL") && !problem.contains("hunter2"),
                    "{before}: {problem}"
                );
            }
        }
        let words = ["userd", "import", "host=h password=hunter2"].map(OsString::from);
        let problem = Args::parse(words.into_iter()).err().expect("no file").message;
        assert!(problem.contains("DATABASE_URL") && !problem.contains("hunter2"), "{problem}");
        assert!(parse("import --map name=https://x.org/name,email=@email users").is_ok());
    }

    #[test]
    fn files_and_formats() {
        let rows = [
            ("export", Format::Ndjson, None),
            ("export -", Format::Ndjson, None),
            ("export --format csv", Format::Csv, None),
            ("export users.csv", Format::Csv, Some("users.csv")),
            ("export users.CSV", Format::Csv, Some("users.CSV")),
            ("export --format=ndjson users.csv", Format::Ndjson, Some("users.csv")),
            ("export --format=csv --format=ndjson", Format::Ndjson, None),
            ("export ./--format", Format::Ndjson, Some("./--format")),
            ("export --for-spreadsheets users", Format::Csv, Some("users")),
        ];
        for (line, format, file) in rows {
            let args = parse(line).unwrap_or_else(|problem| panic!("{line}: {problem}"));
            let found = (export::export_options(&args).format, args.operand_file(), args.embedded_dir());
            assert_eq!(found, (format, file.map(Path::new), None), "{line}");
        }
        let wrong = [
            "--verbose",
            "serve",
            "--embedded=/nowhere more",
            "-- --help",
            "export a b",
            "export --format xml",
            "export --format",
            "export --skip-invalid",
            "import --with-password-hashes",
            "import --dry-run=no",
            "migrate now",
            "completion",
            "completion tcsh",
            "export --embedded=",
            "--port=",
            "healthcheck --embedded",
            "grants",
            "recount users",
            "--counts",
            "--port 1 check",
            "config --migrate=off",
            "--migrate",
            "--migrate=maybe",
            "--format csv",
            "test pytest",
            "test --until-signal -- true",
            "test --control=0123456789abcdef",
        ];
        for line in wrong {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_commands_are_consistent() {
        clap_command().debug_assert();
    }
}
