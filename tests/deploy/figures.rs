//! The tables and figures of the documents are those that `benches/figures` makes of the data beside them.

use std::{fs, path::Path, process::Command};

#[test]
fn documents_show_the_data() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let written = tempfile::tempdir().expect("a directory");
    fs::create_dir(written.path().join("figures")).expect("an empty directory");
    for data in ["speed", "cost", "pages", "memory", "bulk"] {
        let name = format!("figures/{data}.csv");
        fs::copy(root.join("docs").join(&name), written.path().join(&name)).expect("data of a figure");
    }
    let mut draw = Command::new(root.join("benches/figures"));
    let output = draw.args(["draw", "--into"]).arg(written.path()).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files = [
        ("README.md", "README.md"),
        ("docs/performance.md", "performance.md"),
        ("docs/figures/speed.svg", "figures/speed.svg"),
        ("docs/figures/pages.svg", "figures/pages.svg"),
        ("docs/figures/memory.svg", "figures/memory.svg"),
    ];
    for (committed, drawn) in files {
        let read = |path| fs::read_to_string(path).expect("a text");
        let (committed, drawn) = (root.join(committed), written.path().join(drawn));
        assert_eq!(read(committed.clone()), read(drawn), "{}: run benches/figures draw", committed.display());
    }
}
