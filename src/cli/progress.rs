//! A progress bar, drawn only if standard error is a terminal.

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::time::Duration;

/// The time between two frames of the spinner.
const TICK: Duration = Duration::from_millis(200);

/// Returns a bar that removes itself from the terminal when dropped. It is not drawn before it moves. Without a length, it
/// is a spinner.
pub fn bar(length: Option<u64>) -> ProgressBar {
    let target = ProgressDrawTarget::stderr_with_hz(5);
    let bar = ProgressBar::with_draw_target(length, target).with_finish(ProgressFinish::AndClear);
    bar.set_style(style(if length.is_some() { "{bar:30} {msg}, {eta} left" } else { "{spinner} {msg}" }));
    bar
}

/// Shows how much is done of what, and how much a second.
pub fn show(bar: &ProgressBar, done: u64, what: &str) {
    if !bar.is_hidden() {
        let rate = HumanCount((done as f64 / bar.elapsed().as_secs_f64().max(0.001)) as u64);
        bar.set_message(format!("{}{what}, {rate} a second", HumanCount(done)));
    }
}

/// Shows that the database stores the users.
pub fn storing(bar: &ProgressBar, users: u64) {
    bar.set_style(style("{spinner} storing {msg} users, {elapsed}"));
    bar.set_message(HumanCount(users).to_string());
    if !bar.is_hidden() {
        bar.enable_steady_tick(TICK);
    }
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).expect("the template is one");
    style.progress_chars("#>-").tick_chars("|/-\\ ")
}
