//! The example of a test in Python, as it is run by its reader.

use std::{path::Path, process::Command};

#[test]
fn the_example_of_a_python_test_passes() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/test_users.py");
    // Settings of other programs with the names of this one's.
    let foreign = [("HOST", "x86_64-conda-linux-gnu"), ("API_TOKEN", "theirs"), ("SCHEMA", "strict")];
    let output =
        Command::new("python3").arg(file).env("USERD", env!("CARGO_BIN_EXE_userd")).envs(foreign).output();
    let output = output.expect("python3 runs");
    let said = String::from_utf8_lossy(&output.stderr);
    // The test's own result, and no line of a log.
    assert!(output.status.success() && said.ends_with("OK\n") && !said.contains('['), "{said}");
}
