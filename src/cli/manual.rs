//! Prints the manual page and the scripts for the completion of shells, from the tables of options and settings.

use super::commands::{EXIT_CODES, clap_command};
use super::{Failure, arguments::Args, print};
use crate::config::SETTINGS;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};
use std::io;

/// Prints the manual page userd(1), which has the options of all subcommands.
pub fn print_manual_page() -> Result<(), Failure> {
    print(manual_page().map_err(Failure::runtime)?)
}

/// Returns the manual page in the language of man(1), roff.
fn manual_page() -> io::Result<Vec<u8>> {
    // Shows a version without commit and machine, so that all packages have the same manual page.
    let command = clap_command().version(env!("CARGO_PKG_VERSION"));
    let mut command = command.disable_help_subcommand(true).after_help(None::<&str>);
    command.build();
    let mut page = Vec::new();
    // Hides the subcommands in clap's page, which would refer to a page for each. This page has a section for each
    // instead.
    let service = command.clone().mut_subcommands(|subcommand| subcommand.hide(true));
    Man::new(service).title("USERD").render(&mut page)?;
    page.extend(b".SH COMMANDS\n");
    for subcommand in command.get_subcommands() {
        let mut options = Vec::new();
        Man::new(subcommand.clone()).render_options_section(&mut options)?;
        let about = subcommand.get_about().map(ToString::to_string).unwrap_or_default();
        let heading = format!(".SS {}\n{about}\n", subcommand.get_name());
        page.extend(String::from_utf8_lossy(&options).replace(".SH OPTIONS\n", &heading).bytes());
    }
    let mut rest = Roff::new();
    rest.control("SH", ["ENVIRONMENT"]);
    for setting in SETTINGS {
        let default = setting.default().map(|default| format!(" (default {default})")).unwrap_or_default();
        let meaning = roman(setting.help.replace('`', "") + &default);
        rest.control("TP", []).control("B", [setting.variable]).text([meaning]);
    }
    rest.control("SH", ["EXIT", "STATUS"]).text([roman(EXIT_CODES)]);
    rest.to_writer(&mut page)?;
    Ok(page)
}

/// Prints the script that makes a shell complete userd's arguments, for the shell that the operand names.
pub fn print_completion(args: &Args) -> Result<(), Failure> {
    let shell: Shell = args.operand_text().parse().map_err(Failure::usage)?;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut clap_command(), "userd", &mut script);
    print(script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_page_has_every_row() {
        let page = String::from_utf8(manual_page().unwrap()).unwrap();
        for setting in SETTINGS {
            assert!(page.contains(&format!("\n.B {}\n", setting.variable)), "{}", setting.variable);
        }
        for option in ["embedded", "skip\\-existing", "for\\-spreadsheets", "counts"] {
            assert!(page.contains(option), "{option}: {page}");
        }
    }
}
