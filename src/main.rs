//! The command `userd`. All that touches the process as a whole is here and in [`cli`]; the library never
//! reads the environment, installs a logger or exits.

mod cli;

/// Gives memory back to the system that is free: what compiling schemas took at the start, and what clients made the
/// service hold. Otherwise it would stay until it is allocated again.
fn give_back_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: any thread may call it at any time.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

/// Large blocks, above all those of Argon2, go back to the system when they are freed.
const LARGE: i32 = 4 << 20;

/// glibc makes an arena for each thread, 64 MiB of addresses, and what is free in one is of no use to the others. It
/// would keep blocks of up to 32 MiB for itself, once one of them was freed.
fn limit_what_is_kept() {
    #[cfg(target_env = "gnu")]
    // SAFETY: there is no other thread yet.
    unsafe {
        nix::libc::mallopt(nix::libc::M_ARENA_MAX, 1);
        nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, LARGE);
    }
}

fn main() -> std::process::ExitCode {
    limit_what_is_kept();
    cli::run()
}
