//! What the command can do: ONE table of subcommands, options and their help. Parsing, `--help`, the man page and the
//! completion of shells follow from it.
//!
//! To add an option: a row here; the file of its subcommand looks it up. To add a subcommand: a row here, and an arm in
//! `execute` of the module above.

/// A subcommand; the one without a name runs the service.
pub struct Verb {
    pub name: &'static str,
    pub options: &'static [Opt],
    /// The operand, which may be left out.
    pub operand: Option<&'static str>,
    pub help: &'static str,
}

/// An option with two dashes.
pub struct Opt {
    pub name: &'static str,
    pub takes: Takes,
    pub help: &'static str,
}

/// What an option takes, under the name that its help gives it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    Nothing,
    /// `--name=VALUE`, or `--name` alone.
    Optional(&'static str),
    /// `--name VALUE` or `--name=VALUE`.
    Value(&'static str),
    /// One of these words.
    OneOf(&'static [&'static str]),
}

use Takes::{Nothing, OneOf, Optional, Value};

const fn option(name: &'static str, takes: Takes, help: &'static str) -> Opt {
    Opt { name, takes, help }
}

const HOST: Opt = option("--host", Value("HOST"), "instead of the variable HOST");
const PORT: Opt = option("--port", Value("PORT"), "instead of the variable PORT; 0 takes a free one");
const MIGRATE: Opt = option(
    "--migrate",
    OneOf(&["on", "off"]),
    "off: applies no migration, and refuses to start where one is missing (default on)",
);
const EMBEDDED: Opt = option(
    "--embedded",
    Optional("DIR"),
    "work on the cluster that `userd --embedded[=DIR]` makes, whether that runs or not",
);
const FORMAT: Opt = option(
    "--format",
    OneOf(&["ndjson", "csv"]),
    "a JSON object a line, or RFC 4180 with a header; the default is csv where FILE ends in .csv, else ndjson, or for \
     an import what the users look like",
);

/// What `userd completion` takes.
pub const SHELLS: &[&str] = &["bash", "zsh", "fish"];

/// Options of every subcommand.
pub const ANYWHERE: &[Opt] = &[
    option(
        "--env-file",
        Value("FILE"),
        "read variables from FILE, as systemd's EnvironmentFile= has them; those of the environment go before them",
    ),
    option("--help", Nothing, "print what a command takes; of userd itself: everything"),
    option("--version", Nothing, "print the version"),
];

/// `--help`, too, behind a subcommand, which is its operand then.
pub const HELP: Verb =
    Verb { name: "help", options: &[], operand: Some("COMMAND"), help: "print what a command takes" };

/// `--version`.
pub const VERSION: Verb = Verb { name: "--version", options: &[], operand: None, help: "print the version" };

/// All but the first, which runs the service and has no name.
pub const NAMED: &[Verb] = VERBS.split_first().expect("it runs the service").1;

/// In the order of the help.
pub const VERBS: &[Verb] = &[
    Verb {
        name: "",
        options: &[
            option(
                "--embedded",
                Optional("DIR"),
                "run a private PostgreSQL cluster in DIR from this machine's own programs (default ./userd-data; \
                 /var/lib/userd when started by root); listens on 127.0.0.1 unless HOST is set",
            ),
            option("--ephemeral", Nothing, "with --embedded: on a fresh database that is dropped at the end"),
            option(
                "--postgres",
                Value("DIR"),
                "with --embedded: the directory of PostgreSQL's programs; instead of the variable POSTGRES_BIN",
            ),
            option(
                "--seed",
                Value("FILE"),
                "with --ephemeral: begin with the users of FILE, as userd import reads it; CSV where it ends in .csv",
            ),
            HOST,
            PORT,
            MIGRATE,
            option(
                "--with-parent",
                Optional("PID"),
                "end when standard input does, and so with the process that holds its other end; \
                 --with-parent=PID: end when that process does",
            ),
        ],
        operand: None,
        help: "run the service",
    },
    Verb {
        name: "export",
        options: &[
            EMBEDDED,
            FORMAT,
            option("--with-password-hashes", Nothing, "each user's hash, too, as passwordHash"),
            option(
                "--for-spreadsheets",
                Nothing,
                "in CSV, an apostrophe before names and addresses that a spreadsheet would take for formulas",
            ),
        ],
        operand: Some("FILE"),
        help: "write all users to FILE, which is complete once it is there, or to standard output",
    },
    Verb {
        name: "import",
        options: &[
            EMBEDDED,
            FORMAT,
            option("--skip-invalid", Nothing, "leave out lines that are refused, and import the others"),
            option("--skip-existing", Nothing, "leave out users whose e-mail address is in the database"),
            option("--dry-run", Nothing, "check everything, change nothing"),
            option(
                "--as-is",
                Nothing,
                "accept every name and address that the database can hold, not only what the create schema accepts",
            ),
            option("--keep-ids", Nothing, "give users the ids of their lines, not new ones"),
        ],
        operand: Some("FILE"),
        help: "create the users of FILE, or of standard input: all of them, or none where a line is refused",
    },
    Verb {
        name: "migrate",
        options: &[EMBEDDED],
        operand: None,
        help: "apply the migrations that the database lacks, and end",
    },
    Verb {
        name: "check",
        options: &[
            EMBEDDED,
            HOST,
            PORT,
            MIGRATE,
            option("--counts", Nothing, "compare the counts behind pages with the table, too"),
        ],
        operand: None,
        help: "say whether userd could start: configuration, database, migrations, privileges, tables; changes nothing; \
               exit code 0 or 1",
    },
    Verb {
        name: "recount",
        options: &[EMBEDDED],
        operand: None,
        help: "count all users anew, where triggers were disabled and totals are wrong; writers wait meanwhile",
    },
    Verb {
        name: "grants",
        options: &[EMBEDDED],
        operand: Some("ROLE"),
        help: "print the GRANT statements that ROLE needs to run the service on tables that another role owns",
    },
    Verb {
        name: "config",
        options: &[EMBEDDED, HOST, PORT],
        operand: None,
        help: "print the settings in force and where each comes from, without secrets",
    },
    Verb {
        name: "healthcheck",
        options: &[HOST, PORT],
        operand: None,
        help: "exit code 0 if the service that these variables start answers GET /readyz with 200, else 1: for images \
               without curl",
    },
    HELP,
    Verb { name: "man", options: &[], operand: None, help: "print the manual page, userd(1)" },
    Verb {
        name: "completion",
        options: &[],
        operand: Some("SHELL"),
        help: "print what makes bash, zsh or fish complete arguments",
    },
];

impl Opt {
    /// As a synopsis has it: `--host HOST`, `--embedded[=DIR]`.
    pub fn usage(&self) -> String {
        match self.takes {
            Nothing => self.name.to_owned(),
            Optional(value) => format!("{}[={value}]", self.name),
            Value(value) => format!("{} {value}", self.name),
            OneOf(words) => format!("{}={}", self.name, words.join("|")),
        }
    }
}

impl Verb {
    /// Its options and its operand, as a synopsis has them.
    pub fn arguments(&self) -> Vec<String> {
        let options = self.options.iter().map(|option| format!("[{}]", option.usage()));
        options.chain(self.operand.map(|operand| format!("[{operand}]"))).collect()
    }
}
