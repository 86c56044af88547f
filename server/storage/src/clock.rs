//! The clock of this layer: only for pauses, deadlines and reports. No time enters the state (invariant 5).

use std::time::Instant;

/// The monotonic clock.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place of this crate where time is read"
)]
pub fn now() -> Instant {
    Instant::now()
}
