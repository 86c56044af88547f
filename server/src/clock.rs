//! The one place where time is read. Everything else is handed a [`Clock`] or an instant.
//!
//! Promises: `now` never goes backwards and does not follow the wall clock, so clock jumps change no lease.

#![expect(
    clippy::disallowed_methods,
    reason = "this is the clock that the lint sends everyone to"
)]

use std::time::{Instant, SystemTime};

/// A source of time. A type and not a trait: simulation replaces it here.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock {}

impl Clock {
    /// Monotonic.
    pub fn now(self) -> Instant {
        Instant::now()
    }

    /// For logs and backups' names only.
    pub fn wall(self) -> SystemTime {
        SystemTime::now()
    }
}
