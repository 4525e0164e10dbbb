//! The metrics `process_…`, with the names that Prometheus' client libraries give them. Reads most of them from /proc,
//! and leaves out a metric whose value the system does not tell.

use super::MetricsText;
use nix::sys::resource::{Resource, getrlimit};
use nix::time::{ClockId, clock_gettime};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fs, sync::OnceLock};

/// /proc/self/stat has times in ticks. Linux shows programs the same number of ticks per second on every machine.
const TICKS_PER_SECOND: f64 = 100.0;

/// Writes the metrics of the process as they are now.
pub fn write_metrics(text: &mut MetricsText) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    if let Some(size) = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()) {
        text.add_gauge("process_resident_memory_bytes", "Resident memory.", size << 10);
    }
    if let Ok(time) = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID) {
        text.add_counter("process_cpu_seconds_total", "Processor time.", Duration::from(time).as_secs_f64());
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        text.add_gauge("process_open_fds", "Open file descriptors.", open.count());
    }
    if let Ok((most, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
        text.add_gauge("process_max_fds", "The most file descriptors that may be open.", most);
    }
    // Computes the start time only once: it is the difference of two clocks that differ in their rates, and would
    // change from scrape to scrape.
    /// The result of [`compute_start_time_seconds`] at the first scrape; holds `None` if the time is not known.
    static START_TIME_SECONDS: OnceLock<Option<f64>> = OnceLock::new();
    if let Some(started) = START_TIME_SECONDS.get_or_init(compute_start_time_seconds) {
        let help = "When the process started, in seconds since 1970.";
        text.add_gauge("process_start_time_seconds", help, format_args!("{started:.2}"));
    }
}

/// Computes when the process started, in seconds since 1970. Reads the time since the machine's start from a clock,
/// because /proc/stat, which has that start, may be hidden from a service.
fn compute_start_time_seconds() -> Option<f64> {
    let up = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?).as_secs_f64();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // Skips the program's name, the second field, which is in brackets and may have spaces and brackets. The 22nd field
    // is the start in ticks.
    let ticks: u64 = stat.rsplit_once(") ")?.1.split(' ').nth(22 - 3)?.parse().ok()?;
    Some(now - up + ticks as f64 / TICKS_PER_SECOND)
}
