//! Scheduled backups: one StoreBackup per due moment, and the pruning of old ones.
//!
//! Only one backup of a store runs at a time; a moment that comes meanwhile waits. Of several missed
//! moments the last is made up for. Retention looks only at scheduled backups of this very
//! StoreCluster (its UID, not its name) and counts only those that succeeded.

use jiff::Timestamp;
use kube::ResourceExt;

use super::{Decision, Step};
use crate::cluster::build::CLUSTER_UID_LABEL;
use crate::cluster::observe::{Observed, is_going};
use crate::cluster::validate::Desired;
use crate::crd::{StoreBackup, conditions};

/// Marks a StoreBackup the schedule made, and that retention may delete.
pub const SCHEDULED_LABEL: &str = "ballast.dev/scheduled";
/// The moment it was made for.
pub const SCHEDULED_AT_ANNOTATION: &str = "ballast.dev/scheduled-at";
/// Failed scheduled backups that stay to be looked at.
const FAILED_KEPT_MAX: usize = 3;

pub(super) fn plan(desired: &Desired, observed: &Observed) -> Option<Decision> {
    due(desired, observed)
        .or_else(|| prune(desired, observed))
        .map(Decision::act)
}

/// When the next scheduled backup begins.
pub fn next_backup(desired: &Desired, observed: &Observed) -> Option<i64> {
    let backup = desired.backup.as_ref().filter(|b| !b.suspend)?;
    backup
        .schedule
        .as_ref()?
        .next_after(observed.now, desired.created)
}

/// The backup of this store that has not ended.
pub fn active_backup(observed: &Observed) -> Option<&StoreBackup> {
    observed
        .backups
        .iter()
        .find(|b| !is_going(*b) && outcome(b).is_none())
}

fn due(desired: &Desired, observed: &Observed) -> Option<Step> {
    let backup = desired.backup.as_ref().filter(|b| !b.suspend)?;
    let schedule = backup.schedule.as_ref()?;
    let last = observed
        .history
        .last_schedule_time
        .as_ref()
        .map(|t| t.0.as_second());
    let since = last.unwrap_or(desired.created).max(desired.created);
    let moment = schedule.last_due(since, observed.now, desired.created)?;
    let name = format!("{}-{}", desired.name, compact_time(moment));
    // A pass that died after the create is continued, not repeated: apply finds it there.
    let running = active_backup(observed).filter(|b| b.name_any() != name);
    running
        .is_none()
        .then_some(Step::CreateBackup { name, due: moment })
}

fn prune(desired: &Desired, observed: &Observed) -> Option<Step> {
    let keep = desired.backup.as_ref()?.keep;
    let scheduled = |succeeded: bool| {
        let mut all: Vec<&StoreBackup> = observed
            .backups
            .iter()
            .filter(|b| !is_going(*b) && is_scheduled_for(b, &desired.uid))
            .filter(|b| outcome(b) == Some(succeeded))
            .collect();
        // Names hold the moment, so that they sort by age.
        all.sort_by_key(|b| std::cmp::Reverse(b.name_any()));
        all
    };
    oldest_beyond(scheduled(true), keep.max(1))
        .or_else(|| oldest_beyond(scheduled(false), FAILED_KEPT_MAX))
        .map(|b| Step::DeleteBackup { name: b.name_any() })
}

fn is_scheduled_for(backup: &StoreBackup, uid: &str) -> bool {
    let labels = backup.labels();
    labels.contains_key(SCHEDULED_LABEL)
        && labels
            .get(CLUSTER_UID_LABEL)
            .is_some_and(|label| label == uid)
}

fn oldest_beyond(newest_first: Vec<&StoreBackup>, keep: usize) -> Option<&StoreBackup> {
    newest_first.into_iter().skip(keep).last()
}

/// Some(true) when it succeeded, Some(false) when it failed, None while it is under way.
pub(super) fn outcome(backup: &StoreBackup) -> Option<bool> {
    let status = backup.status.as_ref()?;
    match conditions::get(&status.conditions, conditions::SUCCEEDED)?
        .status
        .as_str()
    {
        "True" => Some(true),
        "False" => Some(false),
        _ => None,
    }
}

/// `YYYYMMDDhhmmss` in UTC, as Kubernetes' schedulers name what they make.
fn compact_time(moment: i64) -> String {
    Timestamp::from_second(moment)
        .unwrap_or(Timestamp::UNIX_EPOCH)
        .strftime("%Y%m%d%H%M%S")
        .to_string()
}
