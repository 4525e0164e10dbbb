//! Which processor cores the threads of a server run on, and whether a thread that wakes preempts another one.
//!
//! A request is handed over four times: frontend, tiny_http, worker, PostgreSQL, worker. Each wakes a thread, and where
//! that thread sleeps on another core, waking it takes longer than its work. Under heavy load the threads rarely sleep,
//! and one core is not enough. So the threads share a core while one suffices, and run on all of them otherwise. Knows
//! no requests, only whether one core suffices to those in flight.
//!
//! With several requests at once, each wake-up under the usual policy could preempt the thread that is handing over the
//! rest. So the threads have the system's policy for batches (`SCHED_BATCH`), under which a woken thread does not
//! preempt a running one. Where other processes keep all cores busy, it would have to wait for the end of their time
//! slices; so the threads have the usual policy for as long as that is the case (`contention`).

mod contention;

use contention::{Contention, Times};
use nix::{
    libc,
    sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
    unistd::{Pid, gettid},
};
use parking_lot::Mutex;
use std::{
    fs, mem,
    time::{Duration, Instant},
};

/// How long one core has sufficed before the threads share one.
const QUIET: Duration = Duration::from_millis(50);

/// How long they share it, at most: after that the system may move them to a core that other processes use less.
const STAY: Duration = Duration::from_secs(1);

/// How long that takes it.
const MOVE: Duration = Duration::from_millis(5);

/// The threads of one server.
pub struct Cores {
    /// Those that the server may use: `None` where there is only one, or the system does not say.
    all: Option<CpuSet>,
    threads: Mutex<Vec<Pid>>,
    /// The name of threads that are looked for when they are first needed.
    named: Mutex<Option<String>>,
}

/// Which cores they use at present. Its owner knows whether one suffices.
pub struct Placement {
    /// Whether the threads that are known by name were found.
    found: bool,
    /// Since when they share a core.
    shared_since: Option<Instant>,
    /// When one core last did not suffice, or the threads were last allowed on all cores.
    spread_at: Instant,
    contention: Contention,
}

impl Placement {
    /// On all cores.
    pub fn new(now: Instant) -> Placement {
        Placement { found: false, shared_since: None, spread_at: now, contention: Contention::new(now) }
    }

    /// The threads are allowed on all cores, as if since then.
    fn spread(&mut self, at: Instant) {
        (self.shared_since, self.spread_at) = (None, at);
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
        *self.named.lock() = Some(name);
    }

    fn find_named(&self) {
        let Some(name) = self.named.lock().take() else {
            return;
        };
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let named = tasks.filter(|task| {
            fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        });
        let numbers = named.filter_map(|task| task.file_name().to_str()?.parse().ok());
        numbers.for_each(|id| self.add(Pid::from_raw(id)));
    }

    fn add(&self, thread: Pid) {
        set_policy(thread, libc::SCHED_BATCH);
        self.threads.lock().push(thread);
    }

    /// A request has come; `one_suffices` where a single core does for those in flight. A few system calls for each
    /// thread where that changes the placement, at most every [`QUIET`], and ten times a second to see whether other
    /// processes keep the threads from running; else none.
    pub fn place(&self, placement: &mut Placement, one_suffices: bool, now: Instant) {
        if !mem::replace(&mut placement.found, true) {
            self.find_named();
        }
        if placement.contention.is_due(now) {
            self.look_at_contention(&mut placement.contention, now);
        }
        let Some(all) = &self.all else {
            return;
        };
        match placement.shared_since {
            Some(since) if !one_suffices || now >= since + STAY => {
                let quiet = if one_suffices { QUIET - MOVE } else { Duration::ZERO };
                placement.spread(now.checked_sub(quiet).unwrap_or(now));
                self.set(all);
            }
            Some(_) => {}
            None if !one_suffices => placement.spread_at = now,
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
        for thread in self.threads.lock().iter() {
            let _ = sched_setaffinity(*thread, cores);
        }
    }

    fn look_at_contention(&self, contention: &mut Contention, now: Instant) {
        let threads = self.threads.lock();
        let times = Times::of(threads.iter().copied());
        if contention.learn(times, now) {
            let policy = if contention.is_found() { libc::SCHED_OTHER } else { libc::SCHED_BATCH };
            threads.iter().for_each(|thread| set_policy(*thread, policy));
        }
    }
}

/// Gives a thread a policy, for which nix has no function. An error is ignored: it affects nothing but speed.
fn set_policy(thread: Pid, policy: libc::c_int) {
    // SAFETY: numbers, and a structure that is only read during the call. The priority is 0 for these policies.
    unsafe {
        let priority: libc::sched_param = mem::zeroed();
        libc::sched_setscheduler(thread.as_raw(), policy, &priority);
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
    fn threads_share_a_core_while_one_suffices() {
        std::thread::spawn(|| {
            let (cores, start) = (Cores::new(), Instant::now());
            let Some(all) = cores.all.as_ref().map(count) else {
                return; // one core: there is nothing to share
            };
            cores.add_this_thread();
            let mut placement = Placement::new(start);
            let mut at = |milliseconds, one_suffices| {
                cores.place(&mut placement, one_suffices, start + Duration::from_millis(milliseconds));
                mine()
            };
            let rows = [
                (10, true, all),
                (40, false, all),
                (80, true, all),
                (90, true, 1),
                (100, true, 1),
                (110, false, all),
                (120, true, all),
                (160, true, 1),
                (1150, true, 1),
                (1160, true, all),
                (1164, true, all),
                (1165, true, 1),
                (1170, false, all),
                (1219, true, all),
                (1220, true, 1),
            ];
            for (time, one_suffices, expected) in rows {
                assert_eq!(at(time, one_suffices), expected, "after {time} ms");
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
        assert_eq!(*cores.threads.lock(), [tid]);
        assert_eq!((policy(tid), policy(gettid())), (libc::SCHED_BATCH, libc::SCHED_OTHER));
        drop(end);
        thread.unwrap().join().unwrap();
    }
}
