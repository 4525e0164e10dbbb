//! Which processor cores the threads of a server run on.
//!
//! A request is handed over four times: frontend, tiny_http, worker, PostgreSQL, worker. Each wakes a thread, and where
//! that thread sleeps on another core, waking it takes longer than its work: one client at a time got 6,661 reads a second
//! on separate cores and 7,533 on one (an idle machine with two cores, medians of five rounds in one run), and 7,520 and
//! 18,446 on a machine that other processes kept busy. Under load there is nothing to wake, and one core is not enough. So
//! the threads share a core while requests come one at a time, and are free to run on all of them otherwise. Knows no
//! requests, only whether they overlap.

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
    unistd::{Pid, gettid},
};
use std::{
    fs,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How long requests have come one at a time before the threads share a core.
const QUIET: Duration = Duration::from_millis(50);

/// How long they share it, at most: after that the system may move them to a core that other processes use less.
const STAY: Duration = Duration::from_secs(1);

/// The threads of one server.
pub struct Cores {
    /// Those that the server may use: `None` where there is only one, or the system does not say.
    all: Option<CpuSet>,
    threads: Mutex<Vec<Pid>>,
    /// The name of threads that are looked for when they are first needed.
    named: Mutex<Option<String>>,
}

/// Which cores they use at present. Its owner knows whether requests overlap.
pub struct Placement {
    /// Since when they share a core.
    shared_since: Option<Instant>,
    /// When requests last overlapped, or the threads were last allowed on all cores.
    spread_at: Instant,
}

impl Placement {
    /// On all cores.
    pub fn new(now: Instant) -> Placement {
        Placement { shared_since: None, spread_at: now }
    }
}

impl Cores {
    /// The cores that this thread may use.
    pub fn new() -> Cores {
        let all = sched_getaffinity(Pid::from_raw(0)).ok();
        let several =
            |set: &CpuSet| (0..CpuSet::count()).filter(|&cpu| set.is_set(cpu) == Ok(true)).count() > 1;
        Cores { all: all.filter(several), threads: Mutex::default(), named: Mutex::default() }
    }

    /// The calling thread is one of the server's from now on.
    pub fn add_this_thread(&self) {
        self.threads().push(gettid());
    }

    /// So are the threads of that name, which has at most 15 bytes and which only this server uses.
    pub fn add_threads_named(&self, name: String) {
        *self.named.lock().unwrap_or_else(PoisonError::into_inner) = Some(name);
    }

    fn find_named(&self) {
        let Some(name) = self.named.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let named = tasks.filter(|task| {
            fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        });
        let numbers = named.filter_map(|task| task.file_name().to_str()?.parse().ok());
        self.threads().extend(numbers.map(Pid::from_raw));
    }

    /// A request has come; `overlaps` where another one was in flight. A few system calls where that changes the
    /// placement, at most every [`QUIET`]; else none.
    pub fn place(&self, placement: &mut Placement, overlaps: bool, now: Instant) {
        let Some(all) = &self.all else {
            return;
        };
        match placement.shared_since {
            Some(since) if overlaps || now >= since + STAY => {
                *placement = Placement::new(now);
                self.set(all);
            }
            Some(_) => {}
            None if overlaps => placement.spread_at = now,
            None if now >= placement.spread_at + QUIET => {
                // The core that this thread runs on is as good as any.
                let mut one = CpuSet::new();
                if sched_getcpu().is_ok_and(|cpu| one.set(cpu).is_ok()) {
                    placement.shared_since = Some(now);
                    self.find_named();
                    self.set(&one);
                }
            }
            None => {}
        }
    }

    /// Ignores errors (a thread has ended, the system refuses): the placement affects nothing but speed.
    fn set(&self, cores: &CpuSet) {
        for thread in self.threads().iter() {
            let _ = sched_setaffinity(*thread, cores);
        }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<Pid>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(set: &CpuSet) -> usize {
        (0..CpuSet::count()).filter(|&cpu| set.is_set(cpu) == Ok(true)).count()
    }

    fn mine() -> usize {
        count(&sched_getaffinity(Pid::from_raw(0)).unwrap())
    }

    #[test]
    fn threads_share_a_core_while_requests_do_not_overlap() {
        std::thread::spawn(|| {
            let (cores, start) = (Cores::new(), Instant::now());
            let Some(all) = cores.all.as_ref().map(count) else {
                return; // one core: there is nothing to share
            };
            cores.add_this_thread();
            let mut placement = Placement::new(start);
            let mut at = |milliseconds, overlaps| {
                cores.place(&mut placement, overlaps, start + Duration::from_millis(milliseconds));
                mine()
            };
            let rows = [
                (10, false, all),
                (40, true, all),
                (80, false, all),
                (90, false, 1),
                (100, false, 1),
                (110, true, all),
                (120, false, all),
                (160, false, 1),
                (1150, false, 1),
                (1160, false, all),
                (1220, false, 1),
            ];
            for (time, overlaps, expected) in rows {
                assert_eq!(at(time, overlaps), expected, "after {time} ms");
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn threads_are_found_by_name() {
        let (cores, (end, ended)) = (Cores::new(), std::sync::mpsc::channel::<()>());
        let (told, started) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("cores-test".to_owned()).spawn(move || {
            told.send(gettid()).unwrap();
            let _ = ended.recv();
        });
        let tid = started.recv().unwrap();
        cores.add_threads_named("cores-test".to_owned());
        cores.find_named();
        assert_eq!(*cores.threads(), [tid]);
        drop(end);
        thread.unwrap().join().unwrap();
    }
}
