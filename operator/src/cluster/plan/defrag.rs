//! The rule of defragmentation: large enough, empty enough, not too soon after the last.

use super::{Decision, DefragCause, Step, active_backup};
use crate::cluster::observe::Observed;
use crate::cluster::validate::Desired;

/// Longest pause after failures.
const BACKOFF_SECS_MAX: i64 = 3600;
/// Pause after the first failure; it doubles from there.
const BACKOFF_SECS: i64 = 60;

pub(super) fn plan(desired: &Desired, observed: &Observed) -> Option<Decision> {
    let report = observed.store.report()?;
    let rule = &desired.defragmentation;
    let worth_it =
        report.db_size >= rule.min_bytes && report.free_percent() >= rule.min_free_percent;
    (worth_it && may_run(desired, observed))
        .then(|| Decision::act(Step::Defragment(DefragCause::Rule)))
}

/// Whether one may begin now: not switched off, no backup under way, the pauses kept.
pub(super) fn may_run(desired: &Desired, observed: &Observed) -> bool {
    let rule = &desired.defragmentation;
    if !rule.automatic || active_backup(observed).is_some() {
        return false;
    }
    let history = &observed.history;
    let quiet_since = |time: i64, pause: i64| observed.now >= time + pause;
    let ended = history
        .last_defragmentation
        .as_ref()
        .map(|d| d.time.0.as_second());
    let begun = history
        .last_defragmentation_attempt_time
        .as_ref()
        .map(|t| t.0.as_second());
    let pause_after_failure = match history.defragmentation_failures {
        failures if failures > 0 => (BACKOFF_SECS << (failures - 1).min(10)).min(BACKOFF_SECS_MAX),
        _ => 0,
    };
    ended.is_none_or(|time| quiet_since(time, rule.min_interval_secs))
        && begun.is_none_or(|time| quiet_since(time, pause_after_failure))
}
