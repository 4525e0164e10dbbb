//! The framing of requests (`cargo fuzz run framing`): `checks.rs` says what is checked.
#![no_main]

#[path = "../checks.rs"]
mod checks;

use userd::{
    Limits, Request,
    internals::{FramedRequest, Framing, Progress},
};

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::check_all(data));
