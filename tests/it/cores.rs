//! Processor cores that other processes keep busy.

use crate::support::{Database, LONG, Process, eventually};
use nix::{
    libc,
    sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
    unistd::Pid,
};
use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// The threads of a process that have the policy for batches.
fn in_batches(process: &Process) -> usize {
    let threads = fs::read_dir(format!("/proc/{}/task", process.id())).unwrap();
    let ids = threads.filter_map(|thread| thread.unwrap().file_name().to_str()?.parse().ok());
    // SAFETY: it takes a number.
    ids.filter(|id| unsafe { libc::sched_getscheduler(*id) } == libc::SCHED_BATCH).count()
}

/// Under the policy for batches a thread that wakes waits until the running one has ended its turn, some 3 ms where that
/// belongs to a process that never sleeps.
#[test]
fn a_core_that_other_processes_need() {
    let database = Database::create();
    let all = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let mut one = CpuSet::new();
    one.set(sched_getcpu().unwrap()).unwrap();
    // The process gets the one that this thread has.
    sched_setaffinity(Pid::from_raw(0), &one).unwrap();
    let mut process = Process::on(&database, &[("LOG_LEVEL", "warn")]);
    process.wait_for_url();
    let mut client = process.client();
    assert_eq!(client.post("/users", r#"{"name":"Ada","email":"ada@example.com"}"#).status, 201);
    eventually(LONG, "the threads are known", || {
        client.get("/users/1").status == 200 && in_batches(&process) > 2
    });
    let (busy, before) = (AtomicBool::new(true), in_batches(&process));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while busy.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        sched_setaffinity(Pid::from_raw(0), &all).unwrap();
        eventually(LONG, "the usual policy", || {
            client.get("/users/1").status == 200 && in_batches(&process) == 0
        });
        busy.store(false, Ordering::Relaxed);
    });
    let again = || client.get("/users/1").status == 200 && in_batches(&process) >= before;
    eventually(LONG, "the policy for batches, a second later", again);
}
