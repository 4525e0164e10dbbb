//! The arguments, as clap parses them. Knows no variable but those that an argument replaces.

use super::{
    Failure,
    commands::{OPERAND, VARIABLES, command},
    env_file::{self, Assignment},
    environment, manual, print,
};
use clap::{
    ArgMatches,
    error::{ContextKind, ContextValue, Error, ErrorKind},
    parser::ValueSource,
};
use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
};
use userd::transfer::Format;

/// The subcommand that was given, with its options and its operand.
pub struct Given {
    /// Empty for the service itself.
    pub verb: String,
    matches: ArgMatches,
    /// Variables that `--env-file` has set.
    pub assigned: Vec<Assignment>,
    /// The socket of the service manager (`NOTIFY_SOCKET`), which programs that this one starts do not see.
    pub notify: Option<OsString>,
}

impl Given {
    /// Parses the arguments. `None` if they ask for the help or the version, which is printed.
    pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Option<Given>, Failure> {
        let mut matches = match command()
            .try_get_matches_from([OsString::from("userd")].into_iter().chain(arguments))
        {
            Ok(matches) => matches,
            Err(error) if !error.use_stderr() => return print(&manual::with_settings(&error)).map(|()| None),
            Err(error) => return Err(Failure::argument(problem(error))),
        };
        let (verb, matches) = matches.remove_subcommand().unwrap_or((String::new(), matches));
        Ok(Some(Given { verb, matches, assigned: Vec::new(), notify: None }))
    }

    /// Sets the variables that options stand for, and those of `--env-file` that the environment lacks. To be called
    /// while this is the only thread.
    pub fn set_variables(&mut self) -> Result<(), Failure> {
        for (option, variable) in VARIABLES {
            if let Some(value) = self.value(option) {
                // SAFETY: no other thread reads or writes the environment.
                unsafe { env::set_var(variable, value) };
            }
        }
        self.notify = env::var_os("NOTIFY_SOCKET");
        // SAFETY: as above.
        unsafe { env::remove_var("NOTIFY_SOCKET") };
        if let Some(file) = self.value("--env-file") {
            let read = env_file::read(file);
            self.assigned = read.map_err(|problem| Failure::usage(format!("--env-file: {problem}")))?;
        }
        let misspelt = self.named().find_map(|(place, name)| Some((place, environment::misspelt(name)?)));
        misspelt.map_or(Ok(()), |(place, line)| Err(Failure::usage(format!("{place}: {line}"))))
    }

    /// Returns the variables that `--env-file` has set and those that `--settings` names, each behind its place.
    pub fn named(&self) -> impl Iterator<Item = (&str, &str)> {
        let of_file = self.assigned.iter().map(|Assignment { name, place }| (place.as_str(), name.as_str()));
        let settings = self.occurrences("--settings").flatten();
        of_file.chain(settings.filter_map(|name| Some(("--settings", name.to_str()?))))
    }

    /// Returns whether an option was given.
    pub fn has(&self, name: &str) -> bool {
        let known = self.matches.try_contains_id(name).unwrap_or_default();
        known && self.matches.value_source(name) == Some(ValueSource::CommandLine)
    }

    /// Returns the value of an option, or the operand; the last one if it was given more than once.
    pub fn value(&self, name: &str) -> Option<&Path> {
        self.occurrences(name).flatten().last()
    }

    /// Returns the value of each occurrence of an option that may have none.
    pub fn occurrences(&self, name: &str) -> impl Iterator<Item = Option<&Path>> {
        let known = self.matches.try_contains_id(name).is_ok();
        let occurrences = known.then(|| self.matches.get_occurrences::<PathBuf>(name)).flatten();
        occurrences.into_iter().flatten().map(|mut values| values.next().map(PathBuf::as_path))
    }

    /// Returns whether an option stands for this variable.
    pub fn replaces(&self, variable: &str) -> bool {
        VARIABLES.iter().any(|(option, replaced)| *replaced == variable && self.has(option))
    }

    /// Returns the operand as a word. An error if it is not UTF-8.
    pub fn word(&self) -> Result<&str, Failure> {
        let word = self.value(OPERAND).and_then(Path::to_str);
        word.ok_or_else(|| Failure::argument("the operand is not UTF-8"))
    }

    /// Returns the directory of the private cluster; `None`: the database of the variables. Root's PostgreSQL runs as
    /// another user, who could not enter most directories that root works in.
    pub fn dir(&self) -> Option<PathBuf> {
        let is_root = nix::unistd::Uid::effective().is_root();
        let default = Path::new(if is_root { "/var/lib/userd" } else { "userd-data" });
        self.has("--embedded").then(|| self.value("--embedded").unwrap_or(default).to_owned())
    }

    /// Returns whether missing migrations are applied.
    pub fn migrate(&self) -> bool {
        self.value("--migrate").is_none_or(|value| value == "on")
    }

    /// Returns the operand as a file. `None`: `-`, or none, is standard output, or standard input.
    pub fn file(&self) -> Option<&Path> {
        self.value(OPERAND).filter(|file| *file != "-")
    }

    /// Returns the format that an option or the file's name says.
    pub fn format(&self) -> Option<Format> {
        match self.value("--format") {
            Some(format) if format == "csv" => Some(Format::Csv),
            Some(_) => Some(Format::Ndjson),
            None => self.file().and_then(format_of),
        }
    }
}

/// Returns the format that a file's name tells.
pub fn format_of(file: &Path) -> Option<Format> {
    let is_csv = file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
    is_csv.then_some(Format::Csv)
}

/// Returns clap's message in one line. A stray argument may be a secret: only a name of an option is repeated, and what
/// clap takes for a misspelt subcommand.
fn problem(mut error: Error) -> String {
    let is_option = |text: &str| {
        let name = text.strip_prefix("--").unwrap_or_default();
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')
    };
    for kind in [ContextKind::InvalidArg, ContextKind::InvalidSubcommand, ContextKind::InvalidValue] {
        let Some(ContextValue::String(text)) = error.get(kind) else { continue };
        let is_shown = match kind {
            ContextKind::InvalidArg => error.kind() != ErrorKind::UnknownArgument || is_option(text),
            ContextKind::InvalidSubcommand => error.get(ContextKind::SuggestedSubcommand).is_some(),
            _ => text.is_empty(),
        };
        if !is_shown {
            error.insert(kind, ContextValue::String("…".to_owned()));
        }
    }
    let text = error.render().to_string();
    let lines = text.trim_start_matches("error: ").lines().map(str::trim);
    let lines = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ").replace(":; ", ": ")
}

#[cfg(test)]
mod tests {
    use super::{super::export, *};

    fn parse(line: &str) -> Result<Given, String> {
        let parsed = Given::parse(line.split_whitespace().map(OsString::from));
        parsed.map(|given| given.expect("no help was asked for")).map_err(|failure| failure.line)
    }

    #[test]
    fn arguments_that_are_none() {
        for (line, expected) in [
            ("exprot", "unrecognized subcommand 'exprot'; tip: a similar subcommand exists: 'export'"),
            (
                "--embeded",
                "unexpected argument '--embeded' found; tip: a similar argument exists: '--embedded'",
            ),
            ("--embeded=/srv", "unexpected argument '--embeded' found; tip: a similar argument"),
            (
                "import --skip-exist",
                "'--skip-exist' found; tip: a similar argument exists: '--skip-existing'",
            ),
            ("config --prot=1", "'--prot' found; tip: a similar argument exists: '--port'"),
            ("hunter2", "unrecognized subcommand '…'"),
            ("--Hunter2", "unexpected argument '…' found"),
            ("-xhunter2", "unexpected argument '…' found"),
            ("export a hunter2", "unexpected argument '…' found"),
            (
                "export --format hunter2",
                "invalid value '…' for '--format <WORD>'; [possible values: ndjson, csv]",
            ),
            ("help hunter2", "unrecognized subcommand '…'"),
            ("completion hunter2", "invalid value '…' for '<SHELL>'; [possible values: bash, zsh, fish]"),
            ("grants", "the following required arguments were not provided: <ROLE>"),
        ] {
            let problem = parse(line).err().unwrap_or_else(|| panic!("{line}"));
            assert!(problem.contains(expected), "{line}: {problem}");
            assert!(!problem.to_lowercase().contains("hunter2") && !problem.contains('\n'), "{problem}");
        }
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
        ];
        for (line, format, file) in rows {
            let given = parse(line).unwrap_or_else(|problem| panic!("{line}: {problem}"));
            let Ok(export) = export::what(&given) else { panic!("{line}") };
            let found = (export.format, given.file(), given.dir());
            assert_eq!(found, (format, file.map(Path::new), None), "{line}");
        }
        for line in ["export --for-spreadsheets", "export --for-spreadsheets users.ndjson"] {
            let given = parse(line).unwrap_or_else(|problem| panic!("{line}: {problem}"));
            assert!(export::what(&given).is_err(), "{line}");
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
            "--ephemeral",
        ];
        for line in wrong {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_commands_are_consistent() {
        command().debug_assert();
    }
}
