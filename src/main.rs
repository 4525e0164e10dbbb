//! The command `userd`. All that touches the process as a whole is here and in [`command_line`]; the library never
//! reads the environment, installs a logger or exits.

mod command_line;

/// 73,100 users read a second instead of 64,800 with glibc's (32 connections, in one run), for 3 MiB more.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    command_line::run()
}
