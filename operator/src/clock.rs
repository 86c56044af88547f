//! The one place where the operator reads a clock.
//!
//! Everything below takes the time as an argument, so that planner tests choose it.
#![expect(clippy::disallowed_methods, reason = "this is the clock module")]

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// Now, to the second, which is all that Kubernetes' times hold.
pub fn now() -> Time {
    let secs = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    at(i64::try_from(secs).unwrap_or(i64::MAX))
}

/// Now, with fractions, for Leases.
pub fn now_micros() -> Timestamp {
    let micros = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_micros());
    Timestamp::from_microsecond(i64::try_from(micros).unwrap_or(i64::MAX)).unwrap_or(Timestamp::MAX)
}

/// A point for measuring how long something took.
pub fn monotonic() -> Instant {
    Instant::now()
}

/// The moment `seconds` after the epoch.
pub fn at(seconds: i64) -> Time {
    Time(Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX))
}
