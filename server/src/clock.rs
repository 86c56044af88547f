//! The one place where time is read. Everything else is handed a [`Clock`] or an instant.
//!
//! Promises: `now` never goes backwards and does not follow the wall clock, so clock jumps change no lease.

#![expect(
    clippy::disallowed_methods,
    reason = "this is the clock that the lint sends everyone to"
)]

use std::time::{Duration, Instant, SystemTime};

use rustix::time::{ClockId, Timespec, clock_gettime};

/// Two clocks that were not read within this cannot be compared.
const TOGETHER: Duration = Duration::from_millis(1);

/// A source of time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock {}

impl Clock {
    /// Monotonic. The runtime's, as sleeping is: the operating system's in a server, one that a simulation moves in a simulation.
    pub fn now(self) -> Instant {
        tokio::time::Instant::now().into_std()
    }

    /// How long the machine has slept since it was started, to within [`Self::SLEPT_PRECISION`]: `now` stands still meanwhile. None when this thread
    /// was held up while it looked.
    pub fn slept(self) -> Option<Duration> {
        let read = |clock| duration(clock_gettime(clock));
        let before = read(ClockId::Monotonic);
        let with_sleep = read(ClockId::Boottime);
        let after = read(ClockId::Monotonic);
        (after.saturating_sub(before) <= TOGETHER).then(|| with_sleep.saturating_sub(before))
    }

    /// What [`Self::slept`] may be off by.
    pub const SLEPT_PRECISION: Duration = TOGETHER;

    /// For logs and backups' names only.
    pub fn wall(self) -> SystemTime {
        SystemTime::now()
    }
}

/// Since the machine was started, which is never before.
fn duration(time: Timespec) -> Duration {
    let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
    Duration::new(u64::try_from(time.tv_sec).unwrap_or_default(), nanos)
}
