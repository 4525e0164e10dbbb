//! The arguments, by the table of `verbs`. Knows no variable but those that an argument replaces.

use super::{
    ending::Parent,
    verbs::{ANYWHERE, Opt, SHELLS, Takes, VERBS, Verb},
};
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};
use userd::{
    nearest::nearest,
    transfer::{Export, Format, Import},
};

/// The directory of the private cluster that a verb works on; `None`: the database of the variables.
pub type Dir = Option<PathBuf>;

/// What the command is to do.
pub enum Arguments {
    Help(&'static Verb),
    Version,
    Healthcheck(Address),
    Serve(Serve),
    /// To a file; `None`: to standard output.
    Export(Export, Option<PathBuf>, Dir),
    /// From a file; `None`: from standard input.
    Import(Import, Option<PathBuf>, Dir),
    Migrate(Dir),
    Check {
        address: Address,
        migrate: bool,
        /// Whether the counts are compared with the table.
        counts: bool,
        dir: Dir,
    },
    Recount(Dir),
    /// For this role.
    Grants(String, Dir),
    Config(Address, Dir),
    Man,
    Completion(String),
}

/// How the service is to run.
pub struct Serve {
    /// The directory of a private cluster.
    pub dir: Option<PathBuf>,
    /// On a database that is dropped at the end.
    pub ephemeral: bool,
    /// The directory of PostgreSQL's programs.
    pub postgres: Option<PathBuf>,
    /// The users that a database to be dropped begins with.
    pub seed: Option<(PathBuf, Format)>,
    /// The process whose end is the end of this one.
    pub parent: Option<Parent>,
    /// Whether missing migrations are applied.
    pub migrate: bool,
    pub address: Address,
}

impl Serve {
    /// Whether the database is one that the command starts.
    pub fn embedded(&self) -> bool {
        self.dir.is_some() || self.ephemeral
    }
}

/// Where the service listens, as far as the arguments say.
#[derive(Default)]
pub struct Address {
    host: Option<OsString>,
    port: Option<OsString>,
}

impl Address {
    /// What the arguments say instead of the variables.
    pub fn variable(&self, name: &str) -> Option<OsString> {
        match name {
            "HOST" => self.host.clone(),
            "PORT" => self.port.clone(),
            _ => None,
        }
    }
}

/// The options that were given, each a row of the table, and the operand.
#[derive(Default)]
struct Given {
    options: Vec<(&'static str, Option<OsString>)>,
    operand: Option<OsString>,
}

impl Given {
    fn has(&self, name: &str) -> bool {
        self.options.iter().any(|(given, _)| *given == name)
    }

    /// The value of an option; of the last one, where it was given more than once.
    fn value(&self, name: &str) -> Option<&OsStr> {
        let given = self.options.iter().rev().find(|(given, _)| *given == name);
        given.and_then(|(_, value)| value.as_deref())
    }

    fn address(&self) -> Address {
        let value = |name| self.value(name).map(OsStr::to_owned);
        Address { host: value("--host"), port: value("--port") }
    }

    fn dir(&self) -> Dir {
        let dir = || self.value("--embedded").map_or_else(default_dir, PathBuf::from);
        self.has("--embedded").then(dir)
    }

    fn migrate(&self) -> bool {
        self.value("--migrate").is_none_or(|value| value == "on")
    }

    /// `-` is standard output, or standard input, as without an operand.
    fn file(&self) -> Option<PathBuf> {
        self.operand.as_ref().filter(|file| *file != "-").map(PathBuf::from)
    }

    /// `None` where neither an option nor the file's name says it.
    fn format(&self) -> Option<Format> {
        match self.value("--format") {
            Some(format) if format == "csv" => Some(Format::Csv),
            Some(_) => Some(Format::Ndjson),
            None => self.file().and_then(|file| format_of(&file)),
        }
    }
}

fn format_of(file: &Path) -> Option<Format> {
    let is_csv = file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
    is_csv.then_some(Format::Csv)
}

impl Arguments {
    /// And the file of variables. The error is a line without `userd: ` before it.
    pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<(Arguments, Option<PathBuf>), String> {
        let mut arguments = arguments.peekable();
        let named =
            |argument: &OsString| VERBS.iter().find(|verb| !verb.name.is_empty() && *argument == *verb.name);
        let verb = arguments.peek().and_then(named);
        if verb.is_some() {
            arguments.next();
        }
        let verb = verb.unwrap_or(&VERBS[0]);
        let mut given = Given::default();
        while let Some(argument) = arguments.next() {
            match option(&argument) {
                None if verb.operand.is_some() && given.operand.is_none() && !argument.is_empty() => {
                    given.operand = Some(argument);
                }
                None => return Err(unknown(verb, &argument)),
                Some(("--help" | "-h", None)) => return Ok((Arguments::Help(verb), None)),
                Some(("--version" | "-V", None)) => return Ok((Arguments::Version, None)),
                Some((name, value)) => {
                    let known = verb.options.iter().chain(ANYWHERE).find(|known| known.name == name);
                    let known = known.ok_or_else(|| unknown(verb, &argument))?;
                    given.options.push((known.name, known.value(value, &mut arguments)?));
                }
            }
        }
        let env_file = given.value("--env-file").map(PathBuf::from);
        let arguments = match verb.name {
            "healthcheck" => Arguments::Healthcheck(given.address()),
            "export" => {
                let what = Export {
                    format: given.format().unwrap_or(Format::Ndjson),
                    with_password_hashes: given.has("--with-password-hashes"),
                    for_spreadsheets: given.has("--for-spreadsheets"),
                };
                if what.for_spreadsheets && what.format != Format::Csv {
                    return Err("--for-spreadsheets goes with --format csv".to_owned());
                }
                Arguments::Export(what, given.file(), given.dir())
            }
            "import" => {
                let what = Import {
                    format: given.format(),
                    skip_invalid: given.has("--skip-invalid"),
                    skip_existing: given.has("--skip-existing"),
                    dry_run: given.has("--dry-run"),
                    as_is: given.has("--as-is"),
                    keep_ids: given.has("--keep-ids"),
                };
                Arguments::Import(what, given.file(), given.dir())
            }
            "migrate" => Arguments::Migrate(given.dir()),
            "check" => Arguments::Check {
                address: given.address(),
                migrate: given.migrate(),
                counts: given.has("--counts"),
                dir: given.dir(),
            },
            "recount" => Arguments::Recount(given.dir()),
            "grants" => {
                let dir = given.dir();
                Arguments::Grants(role(given.operand)?, dir)
            }
            "config" => Arguments::Config(given.address(), given.dir()),
            "man" => Arguments::Man,
            "completion" => Arguments::Completion(shell(given.operand)?),
            "help" => Arguments::Help(command(given.operand)?),
            _ => Arguments::Serve(serve(&given)?),
        };
        Ok((arguments, env_file))
    }
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
    let verbs = VERBS.iter().map(|verb| verb.name).filter(|name| !name.is_empty());
    match nearest(name, options.chain(verbs)) {
        Some(meant) if meant == name => format!("{line} ({name} goes before everything else)"),
        Some(meant) => format!("{line} (did you mean {meant}?)"),
        None => line,
    }
}

/// What `userd help` is asked about.
fn command(operand: Option<OsString>) -> Result<&'static Verb, String> {
    let given = operand.unwrap_or_default();
    let name = given.to_string_lossy();
    let verbs = || VERBS.iter().map(|verb| verb.name);
    VERBS.iter().find(|verb| verb.name == name).ok_or_else(|| {
        let meant = nearest(&name, verbs()).map(|meant| format!(" (did you mean {meant}?)"));
        format!("there is no command {given:?}{}", meant.unwrap_or_default())
    })
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
            (Takes::Nothing, None) => Ok(None),
            (Takes::Nothing, Some(_)) => Err(format!("{name} takes no value")),
            (Takes::Optional(_), None) => Ok(None),
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

/// The line that installs the completion of a shell.
pub fn completion_is_installed_by(shell: &str) -> String {
    let (directory, file) = match shell {
        "zsh" => ("~/.zfunc", "_userd"),
        "fish" => ("~/.config/fish/completions", "userd.fish"),
        _ => ("~/.local/share/bash-completion/completions", "userd"),
    };
    format!("mkdir -p {directory} && userd completion {shell} > {directory}/{file}")
}

fn shell(operand: Option<OsString>) -> Result<String, String> {
    let given = operand.unwrap_or_default();
    let known = SHELLS.iter().find(|shell| given == **shell);
    known.map(|shell| (*shell).to_owned()).ok_or_else(|| {
        let lines: Vec<String> = SHELLS.iter().map(|shell| completion_is_installed_by(shell)).collect();
        format!("completion is for {}: {}", SHELLS.join(", "), lines.join("; "))
    })
}

fn role(operand: Option<OsString>) -> Result<String, String> {
    let role = operand.ok_or("grants needs the name of a role")?;
    role.into_string().map_err(|role| format!("{role:?} is no name of a role"))
}

fn serve(given: &Given) -> Result<Serve, String> {
    let mut serve = Serve {
        dir: given.dir(),
        ephemeral: given.has("--ephemeral"),
        postgres: given.value("--postgres").map(PathBuf::from),
        seed: given.value("--seed").map(PathBuf::from).map(|file| {
            let format = format_of(&file).unwrap_or(Format::Ndjson);
            (file, format)
        }),
        parent: None,
        migrate: given.migrate(),
        address: given.address(),
    };
    if given.has("--with-parent") {
        serve.parent = Some(match given.value("--with-parent") {
            None => Parent::StandardInput,
            Some(pid) => {
                let pid = pid.to_str().and_then(|pid| pid.parse().ok()).filter(|pid| *pid > 0);
                Parent::Process(pid.ok_or("--with-parent= names no process")?)
            }
        });
    }
    if serve.seed.is_some() && !serve.ephemeral {
        return Err("--seed goes with --ephemeral".to_owned());
    }
    if serve.postgres.is_some() && !given.has("--embedded") {
        return Err("--postgres goes with --embedded".to_owned());
    }
    if serve.ephemeral {
        if serve.dir.take().is_none() {
            return Err("--ephemeral goes with --embedded".to_owned());
        }
        if given.value("--embedded").is_some() {
            return Err("--ephemeral keeps nothing: it goes without a directory".to_owned());
        }
    }
    Ok(serve)
}

/// Root's PostgreSQL runs as another user, who could not enter most directories that root works in.
fn default_dir() -> PathBuf {
    let root = nix::unistd::Uid::effective().is_root();
    PathBuf::from(if root { "/var/lib/userd" } else { "userd-data" })
}

#[cfg(test)]
mod tests {
    use super::{super::verbs::ANYWHERE, *};

    fn parse(line: &str) -> Result<Arguments, String> {
        Arguments::parse(line.split_whitespace().map(OsString::from)).map(|(arguments, _)| arguments)
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
            let Err(problem) = parse(line) else { panic!("{line}") };
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
            let Ok(Arguments::Export(export, given, None)) = parse(line) else { panic!("{line}") };
            assert_eq!((export.format, given), (format, file.map(PathBuf::from)), "{line}");
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
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
