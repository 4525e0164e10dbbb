//! What the tables of options and of settings look like as `--help`, as a manual page, and as the completion of a
//! shell.

use super::{
    Failure,
    arguments::Given,
    commands::{ANYWHERE, NAMED, Opt, SHELLS, Takes, VERBS, Verb},
    print,
};
use std::fmt::Write;
use userd::{
    config::{SETTINGS, Setting},
    nearest::nearest,
};

/// Columns of the help.
const WIDTH: usize = 100;

const SUMMARY: &str = "a user-management HTTP service over PostgreSQL";

const SIGNALS: &str =
    "SIGTERM, SIGHUP or Ctrl-C: answers the requests in flight, then ends; a second one ends at once.";

/// What the process ends with, for the manual page.
const EXIT_CODES: [(&str, &str); 5] = [
    ("0", "Done; of the service: it was told to end."),
    ("1", "The service could not start or go on; a line was refused by an import; a check found a problem."),
    ("2", "An argument or a variable cannot be used."),
    ("130, 143", "An export or an import was ended by SIGINT or SIGTERM; nothing of it is left."),
    ("141", "The reader of an export's standard output has closed it."),
];

/// Prints what the operand's subcommand takes; without one, everything.
pub fn help(given: &Given) -> Result<(), Failure> {
    let asked = given.operand.clone().unwrap_or_default();
    let name = asked.to_string_lossy();
    match VERBS.iter().find(|verb| verb.name == name) {
        Some(_) if name.is_empty() => print(&help_of_all()),
        Some(verb) => print(&help_of(verb)),
        None => {
            let meant = nearest(&name, VERBS.iter().map(|verb| verb.name));
            let meant = meant.map(|meant| format!(" (did you mean {meant}?)")).unwrap_or_default();
            Err(Failure::argument(format!("there is no command {asked:?}{meant}")))
        }
    }
}

/// The text of `--help` behind a subcommand.
fn help_of(verb: &Verb) -> String {
    let start = format!("usage: userd {}", verb.name);
    let indent = " ".repeat(start.len() + 1);
    let mut text = filled(&start, &indent, verb.arguments().iter().map(String::as_str));
    text.push_str(&filled(&format!("\nuserd {}:", verb.name), "    ", verb.help.split(' ')));
    text.push_str(&rows(verb.options));
    text.push_str(&rows(ANYWHERE));
    text.push_str("\nSettings are variables of the environment: `userd --help` lists them.\n");
    text
}

/// The text of `--help`.
fn help_of_all() -> String {
    let mut text = format!("userd: {SUMMARY}\n\n");
    for (at, verb) in VERBS.iter().enumerate() {
        let start = format!("{}userd {}", if at == 0 { "usage: " } else { "       " }, verb.name);
        let indent = " ".repeat(start.trim_end().len() + 1);
        text.push_str(&filled(start.trim_end(), &indent, verb.arguments().iter().map(String::as_str)));
    }
    for verb in VERBS {
        let name = if verb.name.is_empty() { "userd".to_owned() } else { format!("userd {}", verb.name) };
        text.push_str(&filled(&format!("\n{name}:"), "    ", verb.help.split(' ')));
        text.push_str(&rows(verb.options));
        if verb.name.is_empty() {
            text.push_str(&rows(ANYWHERE));
        }
    }
    text.push_str("\nEnvironment variables, with their defaults:\n");
    for setting in SETTINGS {
        let _ = writeln!(text, "  {:<19} {:<12} {}", setting.variable, default(setting, "-"), setting.help);
    }
    let _ = writeln!(text, "\n{SIGNALS}");
    text
}

fn default(setting: &Setting, none: &str) -> String {
    let default = setting.default();
    if default.is_empty() { none.to_owned() } else { default }
}

/// Options, each with its help beside it.
fn rows(options: &[Opt]) -> String {
    const COLUMN: usize = 26;
    let indent = " ".repeat(COLUMN);
    let row = |option: &Opt| {
        let (start, help) = (format!("  {}", option.usage()), option.help.split(' '));
        match start.len() < COLUMN {
            true => filled(&format!("{start:<width$}", width = COLUMN - 1), &indent, help),
            false => format!("{start}\n{}", filled(&indent[1..], &indent, help)),
        }
    };
    options.iter().map(row).collect()
}

/// Words in lines of at most `WIDTH` columns: the first behind `start`, the others behind `indent`.
fn filled<'a>(start: &str, indent: &str, words: impl Iterator<Item = &'a str>) -> String {
    let mut text = String::new();
    let mut line = start.to_owned();
    for word in words {
        if line.len() + 1 + word.len() > WIDTH {
            text.push_str(&line);
            text.push('\n');
            // The word brings the last space.
            line = " ".repeat(indent.len() - 1);
        }
        line.push(' ');
        line.push_str(word);
    }
    text.push_str(&line);
    text.push('\n');
    text
}

/// The manual page, in the macros of man(7).
pub fn man() -> String {
    let mut page = format!(".TH USERD 1 \"\" \"userd {}\" \"User Commands\"\n", env!("CARGO_PKG_VERSION"));
    let _ = writeln!(page, ".SH NAME\nuserd \\- {}", roff(SUMMARY));
    page.push_str(".SH SYNOPSIS\n");
    for (at, verb) in VERBS.iter().enumerate() {
        let line = format!("{} {}", verb.name, verb.arguments().join(" "));
        let _ = writeln!(page, "{}.B userd\n{}", if at == 0 { "" } else { ".br\n" }, roff(line.trim()));
    }
    page.push_str(".SH DESCRIPTION\n");
    page.push_str(".B userd\nserves users over HTTP, JSON in and out, and keeps them in PostgreSQL.\n");
    page.push_str("Without a subcommand it runs the service. ");
    let _ = writeln!(page, "{}", roff(SIGNALS));
    page.push_str(".SH OPTIONS\n");
    options(&mut page, VERBS[0].options);
    options(&mut page, ANYWHERE);
    page.push_str(".SH COMMANDS\n");
    for verb in NAMED {
        let _ =
            writeln!(page, ".SS {} {}\n{}.", verb.name, verb.operand.unwrap_or_default(), roff(verb.help));
        options(&mut page, verb.options);
    }
    page.push_str(".SH ENVIRONMENT\nAn empty variable counts as unset.\n");
    for setting in SETTINGS {
        let _ = writeln!(page, ".TP\n.B {}\n{}", roff(setting.variable), roff(setting.help));
        let default = setting.default();
        if !default.is_empty() {
            let _ = writeln!(page, "(default {})", roff(&default));
        }
    }
    page.push_str(".SH EXIT STATUS\n");
    for (code, meaning) in EXIT_CODES {
        let _ = writeln!(page, ".TP\n.B {code}\n{}", roff(meaning));
    }
    page.push_str(".SH SEE ALSO\n.BR postgres (1),\n.BR psql (1),\n.BR pg_dump (1)\n");
    page
}

fn options(page: &mut String, options: &[Opt]) {
    for option in options {
        let _ = writeln!(page, ".TP\n.B {}\n{}", roff(&option.usage()), roff(option.help));
    }
}

/// Text without anything that roff takes for its own: a minus is one that can be copied, and no line begins with a dot
/// or a quote.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('`', "");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

/// Prints what makes the operand's shell complete the arguments.
pub fn completion(given: &Given) -> Result<(), Failure> {
    let asked = given.operand.clone().unwrap_or_default();
    let Some(shell) = SHELLS.iter().find(|shell| asked == **shell) else {
        let lines: Vec<String> = SHELLS.iter().map(|shell| installed_by(shell)).collect();
        let shells = SHELLS.join(", ");
        return Err(Failure::argument(format!("completion is for {shells}: {}", lines.join("; "))));
    };
    let install = installed_by(shell);
    print(&match *shell {
        // zsh looks at the first line.
        "zsh" => format!(
            "#compdef userd\n# {install}\n# and in ~/.zshrc, before compinit: fpath=(~/.zfunc $fpath)\n\
             autoload -U +X bashcompinit && bashcompinit\n{}",
            bash()
        ),
        "fish" => format!("# {install}\n{}", fish()),
        _ => format!("# {install}\n{}", bash()),
    })
}

/// The line that installs the completion of a shell.
fn installed_by(shell: &str) -> String {
    let (directory, file) = match shell {
        "zsh" => ("~/.zfunc", "_userd"),
        "fish" => ("~/.config/fish/completions", "userd.fish"),
        _ => ("~/.local/share/bash-completion/completions", "userd"),
    };
    format!("mkdir -p {directory} && userd completion {shell} > {directory}/{file}")
}

/// The words that may follow an operand's or an option's place; empty for the names of files.
fn words_of(operand: Option<&str>) -> String {
    match operand {
        Some("SHELL") => SHELLS.join(" "),
        Some("COMMAND") => NAMED.iter().map(|verb| verb.name).collect::<Vec<_>>().join(" "),
        _ => String::new(),
    }
}

/// As they are typed; one with a value after `=`.
fn names(verb: &Verb) -> String {
    let anywhere = ANYWHERE.iter().map(|option| option.name.to_owned());
    let own = verb.options.iter().map(|option| match option.takes {
        Takes::OneOf(_) => format!("{}=", option.name),
        _ => option.name.to_owned(),
    });
    own.chain(anywhere).collect::<Vec<_>>().join(" ")
}

/// Bash splits at `=`, so an option and its value come as three words.
fn bash() -> String {
    let mut script = String::from(
        "_userd() {\n\
         \x20   local word=\"${COMP_WORDS[COMP_CWORD]}\" before=\"${COMP_WORDS[COMP_CWORD-1]}\" option=\"\"\n\
         \x20   [ \"$word\" = \"=\" ] && word=\"\" && option=\"$before\"\n\
         \x20   [ \"$before\" = \"=\" ] && option=\"${COMP_WORDS[COMP_CWORD-2]}\"\n\
         \x20   COMPREPLY=()\n\
         \x20   case \"$option\" in\n",
    );
    for (name, words) in values() {
        let _ =
            writeln!(script, "        {name}) COMPREPLY=($(compgen -W \"{words}\" -- \"$word\")); return ;;");
    }
    script.push_str(
        "        ?*) COMPREPLY=($(compgen -f -- \"$word\")); return ;;\n    esac\n    case \"${COMP_WORDS[1]}\" in\n",
    );
    for verb in NAMED {
        let operands = match verb.operand {
            Some("FILE") => " $(compgen -f -- \"$word\")".to_owned(),
            operand => format!(" $(compgen -W \"{}\" -- \"$word\")", words_of(operand)),
        };
        let _ = writeln!(
            script,
            "        {}) [ \"$COMP_CWORD\" -gt 1 ] && COMPREPLY=($(compgen -W \"{}\" -- \"$word\"){operands}) ;;",
            verb.name,
            names(verb)
        );
    }
    let _ = writeln!(script, "        *) COMPREPLY=($(compgen -W \"{}\" -- \"$word\")) ;;", names(&VERBS[0]));
    let _ = writeln!(
        script,
        "    esac\n    [ \"$COMP_CWORD\" -eq 1 ] && COMPREPLY+=($(compgen -W \"{}\" -- \"$word\"))\n    \
         [[ \"${{COMPREPLY[0]}}\" == *= ]] && compopt -o nospace 2>/dev/null\n    return 0\n}}\n\
         complete -F _userd userd",
        words_of(Some("COMMAND"))
    );
    script
}

/// Options that take one of some words, each once.
fn values() -> Vec<(&'static str, String)> {
    let mut values: Vec<(&str, String)> = Vec::new();
    for option in VERBS.iter().flat_map(|verb| verb.options) {
        if let Takes::OneOf(words) = option.takes
            && !values.iter().any(|(name, _)| *name == option.name)
        {
            values.push((option.name, words.join(" ")));
        }
    }
    values
}

fn fish() -> String {
    let quoted = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
    let mut script = String::new();
    for verb in VERBS {
        let condition = match verb.name {
            "" => "__fish_use_subcommand".to_owned(),
            name => {
                let _ = writeln!(
                    script,
                    "complete -c userd -n __fish_use_subcommand -f -a {name} -d {}",
                    quoted(verb.help)
                );
                format!("__fish_seen_subcommand_from {name}")
            }
        };
        let words = words_of(verb.operand);
        if !words.is_empty() {
            let _ = writeln!(script, "complete -c userd -n '{condition}' -f -a {}", quoted(&words));
        }
        for option in verb.options.iter().chain(ANYWHERE) {
            let value = match option.takes {
                Takes::OneOf(words) => format!(" -x -a {}", quoted(&words.join(" "))),
                Takes::Value(_) => " -x".to_owned(),
                _ => String::new(),
            };
            let _ = writeln!(
                script,
                "complete -c userd -n '{condition}' -l {}{value} -d {}",
                option.name.trim_start_matches('-'),
                quoted(option.help)
            );
        }
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_has_lines_that_fit() {
        let help = help_of_all();
        let (before, _) = help.split_once("\nEnvironment variables").expect("it has the table");
        for verb in VERBS {
            let help = help_of(verb);
            assert!(help.lines().count() < 40 && !help.contains("DB_HOST"), "{help}");
            assert!(verb.options.iter().all(|option| help.contains(option.name)), "{help}");
            assert!(help.lines().all(|line| line.len() <= WIDTH && line == line.trim_end()), "{help}");
        }
        for line in before.lines() {
            assert!(line.len() <= WIDTH && line == line.trim_end(), "{line:?}");
        }
    }

    #[test]
    fn the_manual_page_has_every_row() {
        let page = man();
        for setting in SETTINGS {
            assert!(page.contains(&format!("\n.B {}\n", setting.variable)), "{}", setting.variable);
        }
        for option in VERBS.iter().flat_map(|verb| verb.options) {
            assert!(page.contains(&format!("\n.B {}\n", roff(&option.usage()))), "{}", option.name);
        }
        // A line that begins so is a request of roff's.
        for line in page.lines().filter(|line| line.starts_with(['.', '\''])) {
            let request = line.split(' ').next().unwrap_or_default();
            assert!([".TH", ".SH", ".SS", ".TP", ".B", ".BR", ".br"].contains(&request), "{line}");
        }
    }
}
