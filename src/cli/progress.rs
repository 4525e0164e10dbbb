//! A progress bar, drawn only if standard error is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

/// Returns a bar that shows what a template says, and removes itself from the terminal when dropped. It is not drawn before
/// it moves.
pub fn bar(length: Option<u64>, template: &str) -> ProgressBar {
    let target = ProgressDrawTarget::stderr_with_hz(5);
    let style = ProgressStyle::with_template(template).expect("the template is one");
    let bar = ProgressBar::with_draw_target(length, target).with_finish(ProgressFinish::AndClear);
    bar.with_style(style.progress_chars("#>-").tick_chars("|/-\\ "))
}
