//! The figures of the process that every client library of Prometheus has, from Linux's /proc. Without one, or with
//! parts of it hidden, what is missing is left out.

use super::Text;
use nix::{
    sys::resource::{Resource, getrlimit},
    time::{ClockId, clock_gettime},
};
use std::{
    fs,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Ticks a second in /proc/self/stat: Linux gives programs this number, whatever its own is.
const TICKS: f64 = 100.0;

/// What does not change while the process runs.
pub struct Process {
    /// Seconds since 1970.
    started: Option<f64>,
}

impl Process {
    pub fn new() -> Process {
        Process { started: started() }
    }

    pub fn write(&self, text: &mut Text) {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kibibytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        if let Some(size) = kibibytes("VmRSS:") {
            text.gauge("process_resident_memory_bytes", "Resident memory.", size << 10);
        }
        if let Some(size) = kibibytes("VmSize:") {
            text.gauge("process_virtual_memory_bytes", "Virtual memory.", size << 10);
        }
        let ticks = |at: usize| stat(at).map(|ticks| ticks as f64);
        if let (Some(user), Some(system)) = (ticks(14), ticks(15)) {
            let seconds = (user + system) / TICKS;
            text.counter("process_cpu_seconds_total", "Processor time, of the user and the system.", seconds);
        }
        if let Some(open) = open_descriptors() {
            text.gauge("process_open_fds", "Open file descriptors.", open);
        }
        if let Ok((most, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
            text.gauge("process_max_fds", "The most file descriptors that may be open.", most);
        }
        if let Some(started) = self.started {
            let help = "When the process started, in seconds since 1970.";
            text.gauge("process_start_time_seconds", help, format_args!("{started:.2}"));
        }
    }
}

/// A field of /proc/self/stat, by its number in proc(5).
fn stat(number: usize) -> Option<u64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name, in brackets, may hold anything. The third field follows it.
    stat.rsplit_once(") ")?.1.split(' ').nth(number - 3)?.trim_end().parse().ok()
}

/// From the time since the machine's start, which a service may see where /proc/stat is hidden from it.
fn started() -> Option<f64> {
    let after_boot = stat(22)? as f64 / TICKS;
    let up = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?).as_secs_f64();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    Some(now - up + after_boot)
}

/// The size of the directory says it since Linux 6.2; before, the entries have to be counted.
fn open_descriptors() -> Option<u64> {
    const DIRECTORY: &str = "/proc/self/fd";
    match fs::metadata(DIRECTORY).ok()?.len() {
        0 => Some(fs::read_dir(DIRECTORY).ok()?.count() as u64),
        count => Some(count),
    }
}
