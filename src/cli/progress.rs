//! A progress bar on a terminal, and nothing where standard error is none.

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{cell::Cell, time::Duration};

/// Between two turns of what turns while nothing is known of the time left; and the most often that it is drawn.
const TICK: Duration = Duration::from_millis(200);

/// How far something is. Removes itself from the terminal when dropped.
pub struct Progress {
    bar: ProgressBar,
    is_styled: Cell<bool>,
}

impl Progress {
    /// Nothing is drawn before the first call of another function.
    pub fn new() -> Progress {
        let target = ProgressDrawTarget::stderr_with_hz(5);
        Progress { bar: ProgressBar::with_draw_target(None, target), is_styled: Cell::new(false) }
    }

    /// `done` of as many users as there are.
    pub fn users(&self, done: u64, of: u64) {
        if !self.is_styled.replace(true) {
            self.bar.set_length(of);
            self.style("{bar:30} {human_pos} of {human_len} users, {per_sec}, {eta} left");
        }
        self.bar.set_position(done);
    }

    /// `lines` were read, `bytes` of as many as there are, where that is known. They may be read again after
    /// [`Progress::storing`].
    pub fn lines(&self, lines: u64, bytes: u64, of: Option<u64>) {
        if !self.is_styled.replace(true) {
            self.bar.disable_steady_tick();
            self.bar.reset_elapsed();
            match of {
                Some(of) => {
                    self.bar.set_length(of);
                    self.style("{bar:30} {msg}, {eta} left");
                }
                None => self.style("{spinner} {msg}"),
            }
        }
        if !self.bar.is_hidden() {
            let rate = lines as f64 / self.bar.elapsed().as_secs_f64().max(0.001);
            self.bar.set_message(format!(
                "{} lines, {} a second",
                HumanCount(lines),
                HumanCount(rate as u64)
            ));
            self.bar.set_position(bytes);
        }
    }

    /// All were read; the database stores them.
    pub fn storing(&self, users: u64) {
        self.is_styled.set(false);
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
