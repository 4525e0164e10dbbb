//! The README's chapter "With curl and jq": its lines print what it says.

use crate::support::{Service, TOKEN, TempDir, masked};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
};

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

/// The lines with a token, against a service that asks for one.
#[test]
fn the_lines_with_a_token() {
    let service = Service::with(|config| config.api_token = Some(TOKEN.into()));
    let url = service.server.base_url();
    let (lines, _) = blocks().into_iter().find(|(lines, _)| lines.contains("API_TOKEN")).expect("a block");
    for (token, status) in [(TOKEN, "200\n"), ("another", "401\n")] {
        let dir = TempDir::new();
        let mut shell = Command::new("sh");
        shell.args(["-ec", &format!("users={url}/users\n{lines}")]).current_dir(dir.path());
        let output = shell.env("no_proxy", "*").env("API_TOKEN", token).output().expect("a shell");
        assert_eq!(String::from_utf8_lossy(&output.stdout), status);
        let mode = fs::metadata(dir.path().join("token.txt")).expect("a file").permissions().mode();
        assert_eq!(mode & 0o077, 0, "others may read it");
    }
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
