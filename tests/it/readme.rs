//! The README's chapter "With curl and jq": its lines print what it says.

use crate::support::{Service, TempDir, masked};
use std::process::{Command, Stdio};

const README: &str = include_str!("../../README.md");

/// Lines for a shell, and what they print.
fn blocks() -> Vec<(&'static str, &'static str)> {
    let (_, chapter) = README.split_once("\n## With curl and jq\n").expect("the README has the chapter");
    let (chapter, _) = chapter.split_once("\n## ").expect("it is not the last one");
    let block = |text: &'static str| {
        let (lines, rest) = text.split_once("```\n").expect("it ends");
        let printed = rest.split_once("```text\n").and_then(|(_, text)| text.split_once("```\n"));
        (lines, printed.map_or("", |(printed, _)| printed))
    };
    chapter.split("\n```sh\n").skip(1).map(block).collect()
}

#[test]
fn the_lines_print_what_it_says() {
    let (service, dir) = (Service::start(), TempDir::new());
    let url = service.server.base_url();
    let blocks = blocks();
    assert!(blocks.len() > 8, "{blocks:?}");
    // One shell runs them all.
    let script: String = blocks.iter().map(|(lines, _)| format!("{lines}echo '=='\n")).collect();
    let mut shell = Command::new("sh");
    shell.args(["-ec", &script.replace("http://localhost:3000", url)]).current_dir(dir.path());
    let output = shell.env("no_proxy", "*").stdin(Stdio::null()).output().expect("a shell");
    let (printed, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{printed}");
    let printed = printed.replace('\r', "");
    let mut found = printed.split("==\n");
    for (lines, expected) in blocks {
        let found = found.next().unwrap_or_default();
        let masked = |text: &str| text.lines().map(masked).collect::<Vec<_>>();
        assert_eq!(masked(found), masked(expected), "{lines}\n{said}");
    }
    assert_eq!(said, "");
}

/// Each route has a line there.
#[test]
fn each_route_has_a_line() {
    let lines: String = blocks().into_iter().map(|(lines, _)| lines).collect();
    for route in [
        "$users -d",
        "$users/1 ",
        "$users?page=",
        "$users?after=",
        "$users?email=",
        "-I $users/1",
        "-X PUT $users/1",
        "-X PATCH $users/",
        "-X DELETE ",
        "-X OPTIONS ",
        "$users/authenticate -d",
    ] {
        assert!(lines.contains(route), "{route}");
    }
}
