//! The command `userd`. All that touches the process as a whole is here and in [`command_line`]; the library never
//! reads the environment, installs a logger or exits.

mod command_line;

/// 73,100 users read a second instead of 64,800 with glibc's (32 connections, in one run), for 3 MiB more.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

unsafe extern "C" {
    /// mimalloc's.
    fn mi_collect(force: bool);
}

/// Gives memory that is free back to the system: 0.7 MiB after a start, above all of compiling schemas. Otherwise it
/// would stay until a thread allocates again.
fn give_back_memory() {
    // SAFETY: any thread may call it at any time.
    unsafe { mi_collect(true) };
}

fn main() -> std::process::ExitCode {
    command_line::run()
}
