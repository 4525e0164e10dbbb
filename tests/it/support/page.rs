//! Lines of the documents, and the shell that runs them.

use super::USERD;
use std::{
    env,
    path::Path,
    process::{Command, Output, Stdio},
};

/// Exit code, standard output and standard error of a program.
pub type Ended = (i32, String, String);

/// Blocks of shell lines behind a text of a page, to the end of its chapter.
pub fn blocks<'a>(page: &'a str, behind: &str) -> Vec<&'a str> {
    let (_, rest) = page.split_once(behind).unwrap_or_else(|| panic!("the page has {behind:?}"));
    let chapter = rest.split("\n## ").next().expect("all that follows");
    // Behind `sh` is a mark that says where the block runs.
    let blocks = chapter.split("\n```sh").skip(1).filter_map(|block| block.split_once('\n'));
    blocks.map(|(_, block)| block.split_once("```").expect("it ends").0).collect()
}

/// Runs lines of a shell that finds userd, in a directory and with these variables.
pub fn shell(dir: &Path, lines: &str, variables: &[(&str, String)]) -> Ended {
    let mut path = vec![Path::new(USERD).parent().expect("a directory").to_owned()];
    path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let mut shell = Command::new("bash");
    shell.args(["-ec", lines]).current_dir(dir).env_clear().stdin(Stdio::null());
    shell.env("PATH", env::join_paths(path).expect("plain names")).envs(variables.iter().cloned());
    ended(shell.output().expect("bash"))
}

/// Returns how a program has ended.
fn ended(output: Output) -> Ended {
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
    (output.status.code().expect("no signal"), stdout, stderr)
}
