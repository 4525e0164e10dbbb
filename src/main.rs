//! The command `userd`. All that touches the process as a whole is here and in [`command_line`]; the library never
//! reads the environment, installs a logger or exits.

mod command_line;

/// Gives memory back to the system that is free: what compiling schemas took at the start, and what clients made the
/// service hold. Otherwise it would stay until it is allocated again.
fn give_back_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: any thread may call it at any time.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

/// glibc makes an arena for each thread, 64 MiB of addresses, and what is free in one is of no use to the others.
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
