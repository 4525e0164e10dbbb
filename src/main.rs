//! The command `userd`. Sets when freed memory goes back to the system; the library's module `cli` does everything
//! else.

/// The size from which on glibc gives a block of memory, such as a body, a page or a hash, back to the system when the
/// block is freed. By default glibc keeps freed blocks of up to 32 MiB, so that the process would stay large.
const MMAP_THRESHOLD_BYTES: i32 = 16 << 10;

fn main() -> std::process::ExitCode {
    #[cfg(target_env = "gnu")]
    // SAFETY: the process has no other thread yet.
    unsafe {
        // glibc takes whole pages for a block that it can give back, and a page has up to 64 KiB on arm64: a smaller
        // block would waste the rest of its page.
        let page = nix::libc::sysconf(nix::libc::_SC_PAGESIZE);
        nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES.max(page as i32));
    }
    userd::run()
}
