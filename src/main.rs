//! The command `userd`. All that touches the process as a whole is here and in [`cli`]; the library never
//! reads the environment, installs a logger or exits.

mod cli;

/// Blocks of this size and more go back to the system when they are freed. Without the call, glibc keeps blocks of up to
/// 32 MiB, above all those of Argon2, once one of them was freed.
const LARGE: i32 = 128 << 10;

fn main() -> std::process::ExitCode {
    #[cfg(target_env = "gnu")]
    // SAFETY: the process has no other thread yet.
    unsafe {
        nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, LARGE);
    }
    cli::run()
}
