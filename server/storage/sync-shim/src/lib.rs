//! `sync_file_range` as sled needs it: a sync.
//!
//! sled 0.34 makes its log durable with the C library's `sync_file_range`, which starts the writing of pages and waits for it, but
//! flushes neither the disk's cache nor the file's size. Data that sled reports as flushed is lost in a power cut. The symbol
//! defined here takes the C library's place in the whole program and calls `fdatasync`. Nothing else we link calls it.
//!
//! Promises: the answer and `errno` are those of `fdatasync`, so that a sync that failed is seen. A program that links
//! this crate has the symbol only if it names the crate in its source (`use ballast_sync_shim as _`); `backend/sled.rs` counts calls
//! at each open and refuses to work without them.
//!
//! For tests: with `BALLAST_UNSAFE_SLED_AS_PUBLISHED=1` in the environment the call does what the C library's does, so that the
//! power-cut suite can show what this crate is for; [`fail_from`] makes syncs fail.
//!
//! This crate alone in the workspace has unsafe code: a symbol of the C library cannot be defined without it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, c_uint, off64_t};

/// For tests of power cuts only.
pub const AS_PUBLISHED: &str = "BALLAST_UNSAFE_SLED_AS_PUBLISHED";

static CALLS: AtomicU64 = AtomicU64::new(0);
static FAIL_FROM: AtomicU64 = AtomicU64::new(u64::MAX);
static PUBLISHED: OnceLock<bool> = OnceLock::new();

/// How often this process has called `sync_file_range`.
pub fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// Whether the environment asks for the C library's behaviour. Read once.
pub fn is_as_published() -> bool {
    *PUBLISHED.get_or_init(|| std::env::var_os(AS_PUBLISHED).is_some_and(|value| value == "1"))
}

/// For tests: from the call on that is number `call` (from 1), calls fail with EIO. `u64::MAX` ends it.
pub fn fail_from(call: u64) {
    FAIL_FROM.store(call, Ordering::Relaxed);
}

/// Syncs the data of `fd`, whatever the range.
///
/// # Safety
///
/// As the C library's function: any arguments are sound; a bad descriptor is answered with an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sync_file_range(
    fd: c_int,
    offset: off64_t,
    bytes: off64_t,
    flags: c_uint,
) -> c_int {
    let call = CALLS.fetch_add(1, Ordering::Relaxed) + 1;
    if call >= FAIL_FROM.load(Ordering::Relaxed) {
        // SAFETY: the C library gives each thread a valid place for its error number.
        unsafe { *libc::__errno_location() = libc::EIO };
        return -1;
    }
    if is_as_published() {
        // SAFETY: the kernel checks all four arguments; on 64-bit targets they are passed as they are.
        return unsafe { libc::syscall(libc::SYS_sync_file_range, fd, offset, bytes, flags) }
            as c_int;
    }
    // SAFETY: the kernel checks the descriptor.
    unsafe { libc::fdatasync(fd) }
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("written for 64-bit Linux, where a file offset is one argument of a system call");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_that_fails_says_so_and_why() {
        let before = calls();
        // SAFETY: no descriptor is touched: -1 is none.
        let answer = unsafe { sync_file_range(-1, 0, 0, 0) };
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!((answer, errno), (-1, Some(libc::EBADF)));
        assert_eq!(calls(), before + 1);
    }
}
