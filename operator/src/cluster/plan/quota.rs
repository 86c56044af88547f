//! NOSPACE: lifted when there is room again, and made room for when the live data would fit.
//!
//! Never disarmed without headroom, or the next write raises it again. When the live data itself
//! fills the quota only a person can decide: raise the quota, or delete and compact.

use super::{Decision, DefragCause, Step, defrag};
use crate::cluster::observe::Observed;
use crate::cluster::validate::Desired;
use crate::store_client::StoreReport;

/// Share of the quota below which there is headroom.
const HEADROOM_PERCENT: i64 = 90;

pub(super) fn plan(desired: &Desired, observed: &Observed) -> Option<Decision> {
    let report = observed.store.report().filter(|r| r.no_space)?;
    if has_headroom(report, report.db_size) {
        return Some(Decision::act(Step::DisarmNoSpace));
    }
    // Defragmenting cannot take the database below what is live.
    let would_help = has_headroom(report, report.db_size_in_use);
    (would_help && defrag::may_run(desired, observed))
        .then(|| Decision::act(Step::Defragment(DefragCause::NoSpace)))
}

fn has_headroom(report: &StoreReport, size: i64) -> bool {
    report.quota > 0
        && i128::from(size) * 100 < i128::from(report.quota) * i128::from(HEADROOM_PERCENT)
}
