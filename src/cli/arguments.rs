//! The arguments, by the table of `commands`. Knows no variable but those that an argument replaces.

use super::{
    Failure,
    commands::{ANYWHERE, HELP, NAMED, Opt, Takes, VERBS, VERSION, Verb},
    env_file,
};
use std::{
    env,
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};
use userd::{nearest::nearest, transfer::Format};

/// Options that stand for variables.
const VARIABLES: [(&str, &str); 3] = [("--host", "HOST"), ("--port", "PORT"), ("--postgres", "POSTGRES_BIN")];

/// The subcommand that was given, its options, each a row of the table, and its operand.
pub struct Given {
    pub verb: &'static Verb,
    options: Vec<(&'static str, Option<OsString>)>,
    pub operand: Option<OsString>,
}

impl Given {
    /// The error is a line without `userd: ` before it.
    pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Given, String> {
        let mut arguments = arguments.peekable();
        let named = |argument: &OsString| NAMED.iter().find(|verb| *argument == *verb.name);
        let verb = arguments.peek().and_then(named);
        if verb.is_some() {
            arguments.next();
        }
        let verb = verb.unwrap_or(&VERBS[0]);
        let mut given = Given { verb, options: Vec::new(), operand: None };
        while let Some(argument) = arguments.next() {
            match option(&argument) {
                None if verb.operand.is_some() && given.operand.is_none() && !argument.is_empty() => {
                    given.operand = Some(argument);
                }
                None => return Err(unknown(verb, &argument)),
                Some(("--help" | "-h", None)) => {
                    return Ok(Given { verb: &HELP, options: Vec::new(), operand: Some(verb.name.into()) });
                }
                Some(("--version" | "-V", None)) => return Ok(Given { verb: &VERSION, ..given }),
                Some((name, value)) => {
                    let known = verb.options.iter().chain(ANYWHERE).find(|known| known.name == name);
                    let known = known.ok_or_else(|| unknown(verb, &argument))?;
                    given.options.push((known.name, known.value(value, &mut arguments)?));
                }
            }
        }
        Ok(given)
    }

    /// Sets the variables that options stand for, and of the others those of `--env-file` that the environment lacks.
    /// To be called while this is the only thread.
    pub fn set_variables(&self) -> Result<(), Failure> {
        for (option, variable) in VARIABLES {
            if let Some(value) = self.value(option) {
                // SAFETY: no other thread reads or writes the environment.
                unsafe { env::set_var(variable, value) };
            }
        }
        match self.value("--env-file") {
            None => Ok(()),
            Some(file) => env_file::read(Path::new(file))
                .map_err(|problem| Failure::usage(format!("--env-file: {problem}"))),
        }
    }

    /// Whether an option was given.
    pub fn has(&self, name: &str) -> bool {
        self.options.iter().any(|(given, _)| *given == name)
    }

    /// The value of an option; of the last one, where it was given more than once.
    pub fn value(&self, name: &str) -> Option<&OsStr> {
        let given = self.options.iter().rev().find(|(given, _)| *given == name);
        given.and_then(|(_, value)| value.as_deref())
    }

    /// Whether an option stands for this variable.
    pub fn replaces(&self, variable: &str) -> bool {
        VARIABLES.iter().any(|(option, replaced)| *replaced == variable && self.has(option))
    }

    /// The directory of the private cluster that a verb works on; `None`: the database of the variables.
    pub fn dir(&self) -> Option<PathBuf> {
        let dir = || self.value("--embedded").map_or_else(default_dir, PathBuf::from);
        self.has("--embedded").then(dir)
    }

    /// Whether missing migrations are applied.
    pub fn migrate(&self) -> bool {
        self.value("--migrate").is_none_or(|value| value == "on")
    }

    /// The operand as a file. `None`: `-`, or none, is standard output, or standard input.
    pub fn file(&self) -> Option<&Path> {
        self.operand.as_deref().filter(|file| *file != "-").map(Path::new)
    }

    /// `None` where neither an option nor the file's name says it.
    pub fn format(&self) -> Option<Format> {
        match self.value("--format") {
            Some(format) if format == "csv" => Some(Format::Csv),
            Some(_) => Some(Format::Ndjson),
            None => self.file().and_then(format_of),
        }
    }
}

/// The format that a file's name tells.
pub fn format_of(file: &Path) -> Option<Format> {
    let is_csv = file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
    is_csv.then_some(Format::Csv)
}

/// The name of an option, and its value where there is a `=`. `None` where the argument is no option.
fn option(argument: &OsStr) -> Option<(&str, Option<OsString>)> {
    let bytes = argument.as_bytes();
    if bytes.first() != Some(&b'-') || bytes == b"-" {
        return None;
    }
    let end = bytes.iter().position(|byte| *byte == b'=').unwrap_or(bytes.len());
    let value = bytes.get(end + 1..).map(|value| OsStr::from_bytes(value).to_owned());
    // What is not UTF-8 is no name of an option.
    Some((str::from_utf8(&bytes[..end]).unwrap_or_default(), value))
}

fn unknown(verb: &Verb, argument: &OsStr) -> String {
    let text = argument.to_string_lossy();
    let name = text.split('=').next().unwrap_or_default();
    let line = match verb.name {
        "" => format!("unknown argument {argument:?}"),
        verb_name if verb.arguments().is_empty() => {
            format!("{verb_name} takes no argument, not {argument:?}")
        }
        verb_name => format!("{verb_name} takes {}, not {argument:?}", verb.arguments().join(" ")),
    };
    let options = verb.options.iter().chain(ANYWHERE).map(|option| option.name);
    let verbs = NAMED.iter().map(|verb| verb.name);
    match nearest(name, options.chain(verbs)) {
        Some(meant) if meant == name => format!("{line} ({name} goes before everything else)"),
        Some(meant) => format!("{line} (did you mean {meant}?)"),
        None => line,
    }
}

impl Opt {
    /// The value of this option, which may be the next argument.
    fn value(
        &self,
        value: Option<OsString>,
        rest: &mut impl Iterator<Item = OsString>,
    ) -> Result<Option<OsString>, String> {
        let name = self.name;
        match (self.takes, value) {
            (Takes::Nothing | Takes::Optional(_), None) => Ok(None),
            (Takes::Nothing, Some(_)) => Err(format!("{name} takes no value")),
            (Takes::Optional(what), Some(value)) if value.is_empty() => {
                Err(format!("{name}= needs {what} after it"))
            }
            (Takes::Optional(_), value) => Ok(value),
            (Takes::Value(_), value) => {
                let value = value.or_else(|| rest.next()).filter(|value| !value.is_empty());
                value.map(Some).ok_or_else(|| format!("{name} needs a value"))
            }
            (Takes::OneOf(words), value) => {
                let value = value.or_else(|| rest.next()).unwrap_or_default();
                match words.iter().any(|word| value == *word) {
                    true => Ok(Some(value)),
                    false => Err(format!("{name} must be {}, not {value:?}", words.join(" or "))),
                }
            }
        }
    }
}

/// Root's PostgreSQL runs as another user, who could not enter most directories that root works in.
fn default_dir() -> PathBuf {
    let root = nix::unistd::Uid::effective().is_root();
    PathBuf::from(if root { "/var/lib/userd" } else { "userd-data" })
}

#[cfg(test)]
mod tests {
    use super::{super::export, *};

    fn parse(line: &str) -> Result<Given, String> {
        Given::parse(line.split_whitespace().map(OsString::from))
    }

    /// The line of a command that does not begin.
    fn refused(line: &str) -> String {
        let done = parse(line).map_err(Failure::argument).and_then(|given| crate::cli::execute(&given));
        let Err(Failure { code: 2, line: problem }) = done else { panic!("{line}") };
        problem
    }

    #[test]
    fn what_may_have_been_meant() {
        for (line, end) in [
            ("exprot", "unknown argument \"exprot\" (did you mean export?)"),
            ("--embeded", "unknown argument \"--embeded\" (did you mean --embedded?)"),
            ("--embeded=/srv", "unknown argument \"--embeded=/srv\" (did you mean --embedded?)"),
            ("--port 1 check", "unknown argument \"check\" (check goes before everything else)"),
            ("import --skip-exist", "not \"--skip-exist\" (did you mean --skip-existing?)"),
            ("config --prot=1", "not \"--prot=1\" (did you mean --port?)"),
            ("something", "unknown argument \"something\""),
            ("help exprot", "there is no command \"exprot\" (did you mean export?)"),
            ("completion", "mkdir -p ~/.local/share/bash-completion/completions && userd completion bash > "),
        ] {
            let problem = refused(line);
            let problem = problem.strip_suffix("; `userd --help` lists what there is").unwrap();
            assert!(problem.ends_with(end) || (line == "completion" && problem.contains(end)), "{problem}");
        }
    }

    #[test]
    fn the_table_has_each_name_once() {
        for verb in VERBS {
            assert_eq!(VERBS.iter().filter(|other| other.name == verb.name).count(), 1, "{}", verb.name);
            for option in verb.options {
                let same = verb.options.iter().chain(ANYWHERE).filter(|other| other.name == option.name);
                assert_eq!(same.count(), 1, "{} {}", verb.name, option.name);
            }
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
            ("export ./--format", Format::Ndjson, Some("./--format")),
        ];
        for (line, format, file) in rows {
            let Ok(given) = parse(line) else { panic!("{line}") };
            let Ok(export) = export::what(&given) else { panic!("{line}") };
            assert_eq!(
                (export.format, given.file(), given.dir()),
                (format, file.map(Path::new), None),
                "{line}"
            );
        }
        let wrong = [
            "export a b",
            "export --format xml",
            "export --format",
            "export --skip-invalid",
            "export --for-spreadsheets",
            "export --for-spreadsheets users.ndjson",
            "import --with-password-hashes",
            "import --dry-run=no",
            "migrate now",
            "completion",
            "completion tcsh",
            "export --embedded=",
            "healthcheck --embedded",
            "grants",
            "recount users",
            "--counts",
            "config --migrate=off",
            "--migrate",
            "--migrate=maybe",
            "--format csv",
        ];
        for line in wrong {
            refused(line);
        }
    }
}
