//! The command `userd`. Sets how the process gives memory back; the library's module `cli` does all else.

/// Size from which on glibc gives a block of memory back to the system once the block is freed, as for a body, a page
/// or a hash. By default glibc keeps freed blocks of up to 32 MiB, so that the process would stay large.
const MMAP_THRESHOLD_BYTES: i32 = 16 << 10;

fn main() -> std::process::ExitCode {
    #[cfg(target_env = "gnu")]
    // SAFETY: the process has no other thread yet.
    unsafe {
        // A block that is given back takes at least a page of memory, which has up to 64 KiB on arm64.
        let page = nix::libc::sysconf(nix::libc::_SC_PAGESIZE);
        nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES.max(page as i32));
    }
    userd::run()
}
