//! Which processor cores the threads of a server run on, and whether they interrupt each other.
//!
//! A request is handed over four times: frontend, tiny_http, worker, PostgreSQL, worker. Each wakes a thread, and where
//! that thread sleeps on another core, waking it takes longer than its work: one client at a time got 6,661 reads a second
//! on separate cores and 7,533 on one (an idle machine with two cores, medians of five rounds in one run), and 7,520 and
//! 18,446 on a machine that other processes kept busy. Under load there is nothing to wake, and one core is not enough. So
//! the threads share a core while requests come one at a time, and are free to run on all of them otherwise. Knows no
//! requests, only whether they overlap.
//!
//! Under load the first of several requests would wake the next thread, which interrupts the one that is handing over the
//! rest, and so on for each. So the threads have the system's policy for batches (`SCHED_BATCH`), under which a thread that
//! wakes runs on a free core, or when the running thread has ended its turn: 32 connections got 71,500 reads a second
//! instead of 57,500, and 128 connections 95,400 instead of 84,100 and 39,600 creates instead of 34,000, with a third of the
//! context switches (two cores, PostgreSQL and the clients on them, medians of three rounds in one run).

use nix::{
    libc,
    sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
    unistd::{Pid, gettid},
};
use std::{
    fs, mem,
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
    /// Whether the threads that are known by name were found.
    found: bool,
    /// Since when they share a core.
    shared_since: Option<Instant>,
    /// When requests last overlapped, or the threads were last allowed on all cores.
    spread_at: Instant,
}

impl Placement {
    /// On all cores.
    pub fn new(now: Instant) -> Placement {
        Placement { found: false, shared_since: None, spread_at: now }
    }

    /// The threads are allowed on all cores.
    fn spread(&mut self, now: Instant) {
        (self.shared_since, self.spread_at) = (None, now);
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
        self.add(gettid());
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
        numbers.map(Pid::from_raw).for_each(|thread| self.add(thread));
    }

    fn add(&self, thread: Pid) {
        hand_over_in_batches(thread);
        self.threads().push(thread);
    }

    /// A request has come; `overlaps` where another one was in flight. A few system calls where that changes the
    /// placement, at most every [`QUIET`]; else none.
    pub fn place(&self, placement: &mut Placement, overlaps: bool, now: Instant) {
        if !mem::replace(&mut placement.found, true) {
            self.find_named();
        }
        let Some(all) = &self.all else {
            return;
        };
        match placement.shared_since {
            Some(since) if overlaps || now >= since + STAY => {
                placement.spread(now);
                self.set(all);
            }
            Some(_) => {}
            None if overlaps => placement.spread_at = now,
            None if now >= placement.spread_at + QUIET => {
                // The core that this thread runs on is as good as any.
                let mut one = CpuSet::new();
                if sched_getcpu().is_ok_and(|cpu| one.set(cpu).is_ok()) {
                    placement.shared_since = Some(now);
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

/// Gives a thread the policy for batches, for which nix has no function. An error is ignored: it affects nothing but speed.
fn hand_over_in_batches(thread: Pid) {
    // SAFETY: a number, and a structure that is only read during the call. The priority is 0 for this policy.
    unsafe {
        let priority: libc::sched_param = mem::zeroed();
        libc::sched_setscheduler(thread.as_raw(), libc::SCHED_BATCH, &priority);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(thread: Pid) -> libc::c_int {
        // SAFETY: it takes a number.
        unsafe { libc::sched_getscheduler(thread.as_raw()) }
    }

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
        assert_eq!((policy(tid), policy(gettid())), (libc::SCHED_BATCH, libc::SCHED_OTHER));
        drop(end);
        thread.unwrap().join().unwrap();
    }
}
