//! The command `userd`. All that touches the process as a whole is here and in [`command_line`]; the library never
//! reads the environment, installs a logger or exits.

mod command_line;

use std::sync::{Mutex, PoisonError};

/// 73,100 users read a second instead of 64,800 with glibc's (32 connections, in one run), for 3 MiB more.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

unsafe extern "C" {
    /// mimalloc's; any thread may call it at any time.
    safe fn mi_collect(force: bool);
}

/// Gives memory back to the system that is free, and was freed by this thread: 0.7 MiB after a start, above all of
/// compiling schemas, and what clients made the service hold. Otherwise it would stay until the thread allocates again.
fn give_back_memory() {
    // Of several threads at once it would only serve one.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    mi_collect(true);
}

/// glibc makes an arena for each thread, 64 MiB of addresses and two pages, for the bytes that starting a thread takes.
/// All else is mimalloc's.
fn share_one_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: there is no other thread yet.
    unsafe {
        nix::libc::mallopt(nix::libc::M_ARENA_MAX, 1);
    }
}

fn main() -> std::process::ExitCode {
    share_one_arena();
    command_line::run()
}
