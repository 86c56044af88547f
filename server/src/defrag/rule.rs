//! The rule of `--auto-defrag`, and the pauses between two runs. Pure.

use std::time::{Duration, Instant};

use crate::config::AutoDefrag;

/// A database that grows back at once, or a disk without room, is tried less and less often, down to this.
const PAUSE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Whether a file of `allocated` bytes that could have `expected` is worth rewriting.
pub(super) fn holds(rule: AutoDefrag, allocated: u64, expected: u64) -> bool {
    let free = u128::from(allocated.saturating_sub(expected));
    allocated >= rule.size_min_bytes
        && free * 100 >= u128::from(allocated) * u128::from(rule.free_min_percent)
}

/// The time from the end of one run to the next. It doubles when the rule holds again soon after, and after failures.
#[derive(Debug)]
pub(super) struct Pause {
    interval: Duration,
    current: Duration,
    last_end: Option<Instant>,
}

impl Pause {
    pub(super) fn new(interval: Duration) -> Self {
        Self {
            interval,
            current: interval,
            last_end: None,
        }
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.last_end.is_none_or(|end| now - end >= self.current)
    }

    /// A run began and ended.
    pub(super) fn begin(&mut self, began: Instant, end: Instant) {
        let soon = self
            .last_end
            .is_some_and(|last| began - last < 2 * self.current);
        self.current = if soon {
            (2 * self.current).min(PAUSE_MAX.max(self.interval))
        } else {
            self.interval
        };
        self.last_end = Some(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_file_is_rewritten_when_it_is_large_and_empty_enough() {
        let rule = AutoDefrag {
            size_min_bytes: 100 * MIB,
            free_min_percent: 50,
            interval: Duration::from_secs(1),
        };
        for (allocated, expected, worth_it) in [
            (0, 0, false),
            (99 * MIB, 0, false),
            (100 * MIB, 0, true),
            (100 * MIB, 50 * MIB, true),
            (100 * MIB, 50 * MIB + 1, false),
            // More live than allocated: what is on its way to the file counts already.
            (100 * MIB, 120 * MIB, false),
            (u64::MAX, u64::MAX / 3, true),
        ] {
            assert_eq!(
                holds(rule, allocated, expected),
                worth_it,
                "{allocated} {expected}"
            );
        }
    }

    #[test]
    fn a_store_that_grows_back_at_once_is_left_alone_longer_and_longer() {
        let start = Clock::default().now();
        let at = |minutes: u64| start + Duration::from_secs(60 * minutes);
        let mut pause = Pause::new(Duration::from_secs(600));
        assert!(pause.is_over(at(0)));
        pause.begin(at(0), at(1));
        assert!(!pause.is_over(at(10)) && pause.is_over(at(11)));
        // (due at, the pause that follows), in minutes
        for (now, after) in [(11, 20), (31, 40), (71, 80)] {
            assert!(
                !pause.is_over(at(now - 1)) && pause.is_over(at(now)),
                "{now}"
            );
            pause.begin(at(now), at(now));
            assert_eq!(pause.current, Duration::from_secs(60 * after), "{now}");
        }
        // A long quiet time, and the pause is the short one again.
        pause.begin(at(1000), at(1000));
        assert_eq!(pause.current, Duration::from_secs(600));
        let mut now = 1000;
        for _ in 0..20 {
            now += pause.current.as_secs() / 60;
            pause.begin(at(now), at(now));
        }
        assert_eq!(pause.current, PAUSE_MAX);
    }
}
