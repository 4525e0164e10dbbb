//! The commands and the table of settings as `--help`, as a manual page, and as the completion of a shell.

use super::{
    Failure,
    arguments::Given,
    commands::{TABLE, command},
    print,
};
use clap_complete::Shell;
use clap_mangen::{
    Man,
    roff::{Roff, roman},
};
use std::io;
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
    let rows = SETTINGS.iter().map(|setting| {
        let default = Some(setting.default()).filter(|default| !default.is_empty());
        let default = default.unwrap_or_else(|| "-".to_owned());
        format!("  {:<19} {default:<12} {}\n", setting.variable, setting.help)
    });
    help.to_string().replace(TABLE, &rows.collect::<String>())
}

/// Lines that each section begins with.
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
    Roff::new().control("SH", ["COMMANDS"]).to_writer(&mut page)?;
    for verb in command.get_subcommands() {
        let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
        Roff::new().control("SS", [verb.get_name()]).text([roman(about)]).to_writer(&mut page)?;
        let mut options = Vec::new();
        Man::new(verb.clone()).render_options_section(&mut options)?;
        page.extend(String::from_utf8_lossy(&options).replace(".SH OPTIONS\n", "").bytes());
    }
    let mut rest = Roff::new();
    rest.control("SH", ["ENVIRONMENT"]).text([roman("An empty variable counts as unset.")]);
    let settings = SETTINGS.iter().map(|setting| {
        let default = Some(setting.default()).filter(|default| !default.is_empty());
        let default = default.map(|default| format!(" (default {default})")).unwrap_or_default();
        (setting.variable, setting.help.replace('`', "") + &default)
    });
    define(&mut rest, settings);
    rest.control("SH", ["EXIT", "STATUS"]);
    define(&mut rest, EXIT_CODES.map(|(code, meaning)| (code, meaning.to_owned())));
    rest.to_writer(&mut page)?;
    let page = String::from_utf8_lossy(&page).replace(PREAMBLE, "");
    let (title, rest) = page.split_once('\n').unwrap_or_default();
    Ok(format!("{title}\n{PREAMBLE}{rest}"))
}

/// Adds a list of terms and their meanings.
fn define(page: &mut Roff, terms: impl IntoIterator<Item = (&'static str, String)>) {
    for (term, meaning) in terms {
        page.control("TP", []).control("B", [term]).text([roman(meaning)]);
    }
}

/// Prints what makes the operand's shell complete the arguments.
pub fn completion(given: &Given) -> Result<(), Failure> {
    let shell: Shell = given.word()?.parse().map_err(Failure::argument)?;
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
