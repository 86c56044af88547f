//! Ports for servers of tests: no two tests get the same, and no outgoing connection takes one before its server listens.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Below the range from which the kernel takes ports of outgoing connections, and beside that of the suites in `e2e`.
const FIRST: u32 = 2_500;
const COUNT: u32 = 12_000;

static TAKEN: AtomicU32 = AtomicU32::new(0);

pub(crate) fn free_port() -> u16 {
    // Test binaries that run side by side begin at different places.
    let begin = std::process::id().wrapping_mul(997);
    for _ in 0..COUNT {
        let taken = TAKEN.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + begin.wrapping_add(taken) % COUNT;
        let port = u16::try_from(port).expect("the range ends below 65,536");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port is free");
}
