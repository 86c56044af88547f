//! The status of a StoreBackup after a step. Pure.

use kube::Resource;

use super::plan::{BackupStep, View};
use crate::clock;
use crate::crd::StoreBackupStatus;
use crate::crd::conditions::{self, SUCCEEDED, Status, Verdict, backup_reason};
use crate::quantity::human;

/// What was known, and what the step adds.
pub fn compute(view: &View, step: &BackupStep) -> StoreBackupStatus {
    let now = clock::at(view.now);
    let generation = view.backup.meta().generation;
    let mut status = view.backup.status.clone().unwrap_or_default();
    let verdict = match step {
        BackupStep::Done | BackupStep::DeletePod => return status,
        BackupStep::Wait { message } => {
            let started = status.start_time.is_some();
            let reason = if started {
                backup_reason::RUNNING
            } else {
                backup_reason::PENDING
            };
            Verdict::new(Status::Unknown, reason, message)
        }
        BackupStep::Begin {
            cluster_uid,
            location,
        } => {
            status.start_time = Some(now.clone());
            status.cluster_uid = Some(cluster_uid.clone());
            status.location = Some(location.clone());
            Verdict::new(
                Status::Unknown,
                backup_reason::RUNNING,
                "the backup has begun",
            )
        }
        BackupStep::CreatePod => Verdict::new(
            Status::Unknown,
            backup_reason::RUNNING,
            "the backup pod was started",
        ),
        BackupStep::Retry { message } => {
            status.failed_attempts += 1;
            let message = format!("attempt {} failed: {message}", status.failed_attempts);
            Verdict::new(Status::Unknown, backup_reason::RUNNING, message)
        }
        BackupStep::Complete(report) => {
            status.completion_time = Some(now.clone());
            status.revision = Some(report.revision);
            status.total_keys = Some(report.total_keys);
            status.size_bytes = Some(report.size_bytes);
            status.sha256 = Some(report.sha256.clone());
            let size = human(report.size_bytes);
            let message = format!("revision {} in {size}, hash verified", report.revision);
            Verdict::new(Status::True, backup_reason::COMPLETED, message)
        }
        BackupStep::Fail { reason, message } => {
            status.completion_time = Some(now.clone());
            Verdict::new(Status::False, reason, message)
        }
    };
    status.observed_generation = generation;
    status.message = Some(verdict.message.clone());
    conditions::set(&mut status.conditions, SUCCEEDED, verdict, generation, &now);
    status
}
