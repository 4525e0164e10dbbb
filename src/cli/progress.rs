//! A progress bar, drawn only if standard error is a terminal.

use indicatif::{HumanCount, ProgressBar, ProgressBarIter, ProgressDrawTarget, ProgressStyle};
use std::{fs::File, time::Duration};

/// The time between two frames of the spinner.
const TICK: Duration = Duration::from_millis(200);

/// A bar that removes itself from the terminal when dropped.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Creates a bar that is not drawn before the first call of another function.
    pub fn new() -> Progress {
        let target = ProgressDrawTarget::stderr_with_hz(5);
        Progress { bar: ProgressBar::with_draw_target(None, target) }
    }

    /// Shows that `done` of all users were written.
    pub fn users(&self, done: u64, of: u64) {
        if self.bar.length().is_none() {
            self.bar.set_length(of);
            self.style("{bar:30} {human_pos} of {human_len} users, {per_sec}, {eta} left");
        }
        self.bar.set_position(done);
    }

    /// Shows how much of the input is read; `bytes` is its size, if that is known.
    pub fn reading(&self, input: File, bytes: Option<u64>) -> ProgressBarIter<File> {
        match bytes {
            Some(bytes) => {
                self.bar.set_length(bytes);
                self.style("{bar:30} {msg}, {eta} left");
            }
            None => self.style("{spinner} {msg}"),
        }
        self.bar.wrap_read(input)
    }

    /// Shows that `records` were checked.
    pub fn records(&self, records: u64) {
        if !self.bar.is_hidden() {
            let rate = records as f64 / self.bar.elapsed().as_secs_f64().max(0.001);
            self.bar.set_message(format!(
                "{} lines, {} a second",
                HumanCount(records),
                HumanCount(rate as u64)
            ));
        }
    }

    /// Shows that the database stores the users.
    pub fn storing(&self, users: u64) {
        self.style("{spinner} storing {msg} users, {elapsed}");
        self.bar.set_message(HumanCount(users).to_string());
        if !self.bar.is_hidden() {
            self.bar.enable_steady_tick(TICK);
        }
    }

    fn style(&self, template: &str) {
        let style = ProgressStyle::with_template(template).expect("the template is one");
        self.bar.set_style(style.progress_chars("#>-").tick_chars("|/-\\ "));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
