//! The commands and the table of settings as `--help`, as a manual page, and as the completion of a shell.

use super::{
    Failure,
    arguments::Given,
    commands::{TABLE, command},
    print,
};
use clap_complete::Shell;
use clap_mangen::Man;
use std::{fmt::Write, io};
use userd::config::SETTINGS;

/// Exit codes, for the manual page.
const EXIT_CODES: [(&str, &str); 5] = [
    ("0", "Done; of the service: it was told to end."),
    ("1", "The service could not start or go on; a line was refused by an import; a check found a problem."),
    ("2", "An argument or a variable cannot be used."),
    ("130, 143", "An export or an import was ended by SIGINT or SIGTERM; nothing of it is left."),
    ("141", "The reader of an export's standard output has closed it."),
];

/// Returns clap's help, with the table of settings in its place.
pub fn with_settings(help: &clap::Error) -> String {
    let mut table = String::new();
    for setting in SETTINGS {
        let default = Some(setting.default()).filter(|default| !default.is_empty());
        let default = default.unwrap_or_else(|| "-".to_owned());
        let _ = writeln!(table, "  {:<19} {default:<12} {}", setting.variable, setting.help);
    }
    help.to_string().replace(TABLE, &table)
}

/// Lines that each section of clap_mangen begins with.
const PREAMBLE: &str = ".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n";

/// Prints the manual page. The options of all commands are on it, not on pages of their own.
pub fn man() -> Result<(), Failure> {
    let page = page().map_err(Failure::runtime)?;
    print(&page)
}

fn page() -> io::Result<String> {
    let mut command = command();
    command.build();
    let mut page = Vec::new();
    let man = Man::new(command.clone()).title("USERD");
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    let mut text = String::from(".SH COMMANDS\n");
    for verb in command.get_subcommands() {
        let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
        let mut options = Vec::new();
        Man::new(verb.clone()).render_options_section(&mut options)?;
        let options = String::from_utf8_lossy(&options).replace(".SH OPTIONS\n", "");
        let _ = writeln!(text, ".SS {}\n{}\n{options}", verb.get_name(), roff(&about));
    }
    text.push_str(".SH ENVIRONMENT\nAn empty variable counts as unset.\n");
    for setting in SETTINGS {
        let _ = writeln!(text, ".TP\n.B {}\n{}", setting.variable, roff(setting.help));
        let default = setting.default();
        if !default.is_empty() {
            let _ = writeln!(text, "(default {})", roff(&default));
        }
    }
    text.push_str(".SH EXIT STATUS\n");
    for (code, meaning) in EXIT_CODES {
        let _ = writeln!(text, ".TP\n.B {code}\n{}", roff(meaning));
    }
    text.push_str(".SH SEE ALSO\n.BR postgres (1),\n.BR psql (1),\n.BR pg_dump (1)\n");
    let page = (String::from_utf8_lossy(&page) + text.as_str()).replace(PREAMBLE, "");
    let (title, rest) = page.split_once('\n').unwrap_or_default();
    Ok(format!("{title}\n{PREAMBLE}{rest}"))
}

/// Escapes what roff takes for its own: a minus is one that can be copied, and no line begins with a dot or a quote.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('`', "");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

/// Prints what makes the operand's shell complete the arguments.
pub fn completion(given: &Given) -> Result<(), Failure> {
    let shell = given.operand().and_then(|shell| shell.to_str()?.parse::<Shell>().ok());
    let shell = shell.ok_or_else(|| Failure::argument("completion needs the name of a shell"))?;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "userd", &mut script);
    print(&String::from_utf8_lossy(&script))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_page_has_every_row() {
        let page = page().unwrap();
        for setting in SETTINGS {
            assert!(page.contains(&format!("\n.B {}\n", setting.variable)), "{}", setting.variable);
        }
        for option in ["embedded", "skip\\-existing", "for\\-spreadsheets", "counts"] {
            assert!(page.contains(option), "{option}: {page}");
        }
    }
}
