//! Runs the checks of the fuzz target on each file of its corpus, also if the file is cut off or a byte is changed.

#[path = "../../../fuzz/checks.rs"]
pub(super) mod checks;

use super::{FramedRequest, Progress, framing::Framing};
use crate::{config::Limits, http::Request};
use std::{fs, path::Path};

#[test]
fn the_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/framing");
    let files = fs::read_dir(corpus).expect("the repository has a corpus");
    let files = files.map(|file| file.and_then(|file| fs::read(file.path())).expect("a file of the corpus"));
    let files: Vec<_> = files.collect();
    assert!(files.len() > 10);
    for file in &files {
        // Parses the stream cut off after each byte, and with each byte changed.
        (0..=file.len()).for_each(|end| checks::check_all(&file[..end]));
        for at in 0..file.len() {
            for byte in [b'\r', b'\n', b' ', b':', b'0', 0, 0xff] {
                let mut changed = file.clone();
                changed[at] = byte;
                checks::check_all(&changed);
            }
        }
    }
}
