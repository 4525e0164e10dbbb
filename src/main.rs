//! The command `userd`: how this process gives memory back. All else is in the library's module `cli`.

/// Blocks of this size and more go back to the system when they are freed: bodies, pages, hashes. glibc alone would keep
/// blocks of up to 32 MiB; with 128 KiB here, the bodies of clients that had left took 52 MiB for good. A smaller block
/// than a page of the system's memory, which has up to 64 KiB on arm64, would take a whole page.
const LARGE: i32 = 16 << 10;

fn main() -> std::process::ExitCode {
    #[cfg(target_env = "gnu")]
    // SAFETY: the process has no other thread yet.
    unsafe {
        let page = nix::libc::sysconf(nix::libc::_SC_PAGESIZE);
        nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, LARGE.max(page as i32));
    }
    userd::run()
}
