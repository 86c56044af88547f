//! Condition types and reasons: the part of the status other programs may rely on.
//!
//! Types and reasons are API: they are listed in `docs/operator.md` and only ever added to.
//! Setting a condition keeps `lastTransitionTime` unless its status really changed.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// The store answers and every part of the spec is in force.
pub const READY: &str = "Ready";
/// The operator is changing something, or waits for a change to land.
pub const PROGRESSING: &str = "Progressing";
/// Backups are configured and the last one that was due succeeded.
pub const BACKUP_READY: &str = "BackupReady";
/// The store refuses writes for want of space, or is about to.
pub const NO_SPACE: &str = "NoSpace";
/// Something needs a person: the operator will not act further on it by itself.
pub const DEGRADED: &str = "Degraded";
/// The one summary of a StoreBackup.
pub const SUCCEEDED: &str = "Succeeded";

/// Reasons of the conditions of a StoreCluster.
pub mod reason {
    pub const STORE_READY: &str = "StoreReady";
    pub const STORE_UNREACHABLE: &str = "StoreUnreachable";
    pub const UP_TO_DATE: &str = "UpToDate";
    pub const AS_EXPECTED: &str = "AsExpected";
    pub const PAUSED: &str = "Paused";
    pub const INVALID_SPEC: &str = "InvalidSpec";
    pub const REPLICAS_NOT_SUPPORTED: &str = "ReplicasNotSupported";
    pub const ALARM_RAISED: &str = "AlarmRaised";
    pub const QUOTA_REACHED: &str = "QuotaReached";
    pub const SPACE_AVAILABLE: &str = "SpaceAvailable";
    pub const NOT_CONFIGURED: &str = "NotConfigured";
    pub const SUSPENDED: &str = "Suspended";
    pub const LAST_BACKUP_SUCCEEDED: &str = "LastBackupSucceeded";
    pub const LAST_BACKUP_FAILED: &str = "LastBackupFailed";
    pub const WAITING_FOR_FIRST_BACKUP: &str = "WaitingForFirstBackup";
    pub const BACKUP_OVERDUE: &str = "BackupOverdue";
    pub const DEFRAGMENTATION_FAILING: &str = "DefragmentationFailing";
}

/// Reasons of the Succeeded condition of a StoreBackup.
pub mod backup_reason {
    pub const PENDING: &str = "Pending";
    pub const RUNNING: &str = "Running";
    pub const COMPLETED: &str = "Completed";
    pub const FAILED: &str = "Failed";
    pub const REJECTED: &str = "Rejected";
    pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
}

/// What a condition should say now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub status: Status,
    pub reason: String,
    pub message: String,
}

/// The three values of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    True,
    False,
    Unknown,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

impl Verdict {
    pub fn new(status: Status, reason: &str, message: impl Into<String>) -> Self {
        Self {
            status,
            reason: reason.to_owned(),
            message: message.into(),
        }
    }
}

/// Puts `verdict` into `conditions` under `type_`.
pub fn set(
    conditions: &mut Vec<Condition>,
    type_: &str,
    verdict: Verdict,
    generation: Option<i64>,
    now: &Time,
) {
    let status = verdict.status.as_str();
    let since = get(conditions, type_)
        .filter(|c| c.status == status)
        .map_or_else(|| now.clone(), |c| c.last_transition_time.clone());
    let next = Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: verdict.reason,
        message: verdict.message,
        observed_generation: generation,
        last_transition_time: since,
    };
    match conditions.iter_mut().find(|c| c.type_ == type_) {
        Some(old) => *old = next,
        None => conditions.push(next),
    }
}

/// The condition of that type, if it was ever set.
pub fn get<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|c| c.type_ == type_)
}

/// Whether the condition of that type is there and True.
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    get(conditions, type_).is_some_and(|c| c.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::Timestamp;

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(second).unwrap())
    }

    #[test]
    fn a_new_message_keeps_the_transition_time_and_a_new_status_moves_it() {
        let mut all = Vec::new();
        set(
            &mut all,
            READY,
            Verdict::new(Status::False, "A", "one"),
            Some(1),
            &at(10),
        );
        set(
            &mut all,
            READY,
            Verdict::new(Status::False, "B", "two"),
            Some(2),
            &at(20),
        );
        let c = get(&all, READY).unwrap();
        assert_eq!(
            (c.last_transition_time.clone(), c.reason.as_str()),
            (at(10), "B")
        );
        assert_eq!(c.observed_generation, Some(2));
        set(
            &mut all,
            READY,
            Verdict::new(Status::True, "C", ""),
            Some(2),
            &at(30),
        );
        assert_eq!(get(&all, READY).unwrap().last_transition_time, at(30));
        assert_eq!(all.len(), 1);
        assert!(is_true(&all, READY));
    }
}
