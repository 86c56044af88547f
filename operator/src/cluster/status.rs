//! What was seen and done, as a status: pure, so that the words are tested as words.
//!
//! A status is rewritten only when it says something new. Sizes move all the time, so they are
//! refreshed when they differ noticeably, or the status would be a write per pass.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use super::apply::{ApplyError, Outcome};
use super::observe::{Observed, StoreView, is_ready};
use super::plan::{Decision, Step, Wait, active_backup, next_backup};
use super::validate::{Desired, ValidateError};
use crate::clock;
use crate::crd::conditions::{self, Status, Verdict, reason};
use crate::crd::{
    LastBackup, LastDefragmentation, RestoreStatus, StoreBackup, StoreClusterStatus, StoreSizes,
};
use crate::quantity::human;
use crate::store_client::StoreReport;

/// Failures after which a person should look.
const DEFRAGMENTATION_FAILURES_DEGRADED: i32 = 3;
/// Sizes closer than this to the last ones are not worth a write.
const SIZE_NOTICE_BYTES: i64 = 1 << 20;

/// The status of a cluster whose spec cannot be followed.
pub fn invalid(
    old: &StoreClusterStatus,
    generation: Option<i64>,
    error: &ValidateError,
) -> StoreClusterStatus {
    let now = clock::now();
    let mut status = old.clone();
    let message = error.to_string();
    let verdicts = [
        (conditions::PROGRESSING, Status::False),
        (conditions::DEGRADED, Status::True),
    ];
    for (type_, value) in verdicts {
        let verdict = Verdict::new(value, reason::INVALID_SPEC, &message);
        conditions::set(&mut status.conditions, type_, verdict, generation, &now);
    }
    if conditions::get(&status.conditions, conditions::READY).is_none() {
        let verdict = Verdict::new(Status::False, reason::INVALID_SPEC, &message);
        conditions::set(
            &mut status.conditions,
            conditions::READY,
            verdict,
            generation,
            &now,
        );
    }
    status.observed_generation = generation;
    status.message = Some(message);
    status
}

/// The status after a pass.
pub fn compute(
    desired: &Desired,
    observed: &Observed,
    decision: &Decision,
    result: Result<&Outcome, &ApplyError>,
) -> StoreClusterStatus {
    let now = clock::at(observed.now);
    let mut status = observed.history.clone();
    status.observed_generation = desired.generation;
    status.endpoint = Some(desired.endpoint());
    if let StoreView::Up(report) = &observed.store {
        facts(&mut status, desired, observed, report, &now);
    }
    history(&mut status, observed, decision, result, &now);
    status.next_backup_time = next_backup(desired, observed).map(clock::at);

    let ready = ready(desired, observed, decision);
    status.ready_replicas = i32::from(ready.status == Status::True);
    let degraded = degraded(&status, decision, result);
    let no_space = no_space(observed);
    status.message = Some(message(&ready, &degraded, &no_space, decision, observed));
    let verdicts = [
        (conditions::READY, ready),
        (conditions::PROGRESSING, progressing(decision)),
        (conditions::BACKUP_READY, backup_ready(desired, observed)),
        (conditions::NO_SPACE, no_space),
        (conditions::DEGRADED, degraded),
    ];
    for (type_, verdict) in verdicts {
        conditions::set(
            &mut status.conditions,
            type_,
            verdict,
            desired.generation,
            &now,
        );
    }
    status
}

fn facts(
    status: &mut StoreClusterStatus,
    desired: &Desired,
    observed: &Observed,
    report: &StoreReport,
    now: &Time,
) {
    // Recorded once: from then on an empty volume is a loss, and another ID a stranger.
    status
        .cluster_id
        .get_or_insert_with(|| format!("{:x}", report.cluster_id));
    status.member_id = Some(format!("{:x}", report.member_id));
    status.leader = report.leader_name().map(str::to_owned);
    status.version = Some(report.version.clone());
    status.image = observed
        .pod
        .as_ref()
        .and_then(|p| p.spec.as_ref()?.containers.first()?.image.clone());
    let alarms = [(report.no_space, "NOSPACE"), (report.corrupt, "CORRUPT")];
    status.alarms = alarms
        .into_iter()
        .filter(|(raised, _)| *raised)
        .map(|(_, n)| n.to_owned())
        .collect();
    let sizes = StoreSizes {
        db_size: report.db_size,
        db_size_in_use: report.db_size_in_use,
        quota: report.quota,
    };
    if status.sizes.as_ref().is_none_or(|old| differs(old, &sizes)) {
        status.sizes = Some(sizes);
    }
    if status.restore.is_none()
        && let Some(restore) = &desired.restore
    {
        let backup = observed.restore_backup.as_ref();
        let revision = backup.and_then(|b| b.status.as_ref()?.revision);
        status.restore = Some(RestoreStatus {
            backup_name: restore.backup_ref.name.clone(),
            backup_revision: revision.unwrap_or_default(),
            time: now.clone(),
        });
    }
}

fn differs(old: &StoreSizes, new: &StoreSizes) -> bool {
    let far = |a: i64, b: i64| (a - b).abs() >= SIZE_NOTICE_BYTES.max(a.abs() / 20);
    old.quota != new.quota
        || far(old.db_size, new.db_size)
        || far(old.db_size_in_use, new.db_size_in_use)
}

fn history(
    status: &mut StoreClusterStatus,
    observed: &Observed,
    decision: &Decision,
    result: Result<&Outcome, &ApplyError>,
    now: &Time,
) {
    if let Step::Defragment(_) = decision.step {
        // The pass began before the call, which may have taken minutes.
        let ended = clock::now().max(now.clone());
        status.last_defragmentation_attempt_time = Some(ended.clone());
        match result {
            Ok(Outcome::Defragmented { before, after }) => {
                status.defragmentation_failures = 0;
                status.last_defragmentation = Some(LastDefragmentation {
                    time: ended,
                    before_bytes: *before,
                    after_bytes: *after,
                });
                if let Some(sizes) = &mut status.sizes {
                    sizes.db_size = *after;
                }
            }
            _ => {
                status.defragmentation_failures = status.defragmentation_failures.saturating_add(1);
            }
        }
    }
    if let Ok(Outcome::BackupCreated { due, .. }) = result {
        status.last_schedule_time = Some(clock::at(*due));
    }
    if let Some(last) = newest_success(&observed.backups) {
        status.last_backup = Some(last);
    }
}

fn newest_success(backups: &[StoreBackup]) -> Option<LastBackup> {
    backups
        .iter()
        .filter_map(|backup| {
            let status = backup.status.as_ref()?;
            if !conditions::is_true(&status.conditions, conditions::SUCCEEDED) {
                return None;
            }
            Some(LastBackup {
                name: backup.name_any(),
                time: status.completion_time.clone()?,
                revision: status.revision?,
            })
        })
        .max_by(|a, b| a.time.cmp(&b.time))
}

/// Whether clients are served: a linearizable answer of the right store, and a pod in the Service.
fn ready(desired: &Desired, observed: &Observed, decision: &Decision) -> Verdict {
    let serving = observed.pod.as_ref().is_some_and(is_ready);
    match (&observed.store, &decision.step) {
        (StoreView::Up(_), Step::Wait(wait @ (Wait::WrongCluster { .. } | Wait::Corrupt))) => {
            Verdict::new(Status::False, wait.name(), wait.sentence())
        }
        (StoreView::Up(_), _) if serving => {
            let sentence = format!("{} answers linearizable reads", desired.member_name());
            Verdict::new(Status::True, reason::STORE_READY, sentence)
        }
        (StoreView::Unreachable(detail), _) if serving => {
            let sentence = format!("the store does not answer: {detail}");
            Verdict::new(Status::Unknown, reason::STORE_UNREACHABLE, sentence)
        }
        (_, Step::Wait(wait)) => Verdict::new(Status::False, wait.name(), wait.sentence()),
        (_, step) => Verdict::new(
            Status::False,
            step.name(),
            "the store is being brought into shape",
        ),
    }
}

fn progressing(decision: &Decision) -> Verdict {
    match &decision.step {
        Step::Wait(wait) if wait.needs_a_person() || *wait == Wait::Paused => {
            Verdict::new(Status::False, wait.name(), wait.sentence())
        }
        Step::Wait(wait) => Verdict::new(Status::True, wait.name(), wait.sentence()),
        Step::ApplyService(_)
        | Step::CreateVolume
        | Step::UpdateVolume
        | Step::CreateBackupVolume
        | Step::CreatePod(_)
        | Step::DeletePod(_) => Verdict::new(
            Status::True,
            decision.step.name(),
            "bringing objects into shape",
        ),
        Step::Idle
        | Step::Defragment(_)
        | Step::DisarmNoSpace
        | Step::CreateBackup { .. }
        | Step::DeleteBackup { .. } => Verdict::new(
            Status::False,
            reason::UP_TO_DATE,
            "every part of the spec is in force",
        ),
    }
}

fn backup_ready(desired: &Desired, observed: &Observed) -> Verdict {
    let Some(backup) = &desired.backup else {
        return Verdict::new(
            Status::False,
            reason::NOT_CONFIGURED,
            "spec.backup is not set",
        );
    };
    let finished = observed
        .backups
        .iter()
        .filter_map(|b| {
            let status = b.status.as_ref()?;
            let c = conditions::get(&status.conditions, conditions::SUCCEEDED)?;
            (c.status != "Unknown").then(|| (status.completion_time.clone(), b, c))
        })
        .max_by(|a, b| a.0.cmp(&b.0));
    let Some((time, last, condition)) = finished else {
        let waiting = reason::WAITING_FOR_FIRST_BACKUP;
        return Verdict::new(Status::Unknown, waiting, "no backup has ended yet");
    };
    let name = last.name_any();
    if condition.status == "False" {
        let message = format!("{name} failed: {}", condition.message);
        return Verdict::new(Status::False, reason::LAST_BACKUP_FAILED, message);
    }
    if backup.suspend {
        let message = format!("no backup is scheduled; the last was {name}");
        return Verdict::new(Status::False, reason::SUSPENDED, message);
    }
    let ended = time.map_or(0, |t| t.0.as_second());
    let overdue = backup.schedule.as_ref().and_then(|schedule| {
        let first = schedule.next_after(ended, desired.created)?;
        let second = schedule.next_after(first, desired.created)?;
        (observed.now > second + backup.deadline_secs && active_backup(observed).is_none())
            .then_some(second)
    });
    if overdue.is_some() {
        let message = format!("two backups were missed since {name}");
        return Verdict::new(Status::False, reason::BACKUP_OVERDUE, message);
    }
    Verdict::new(
        Status::True,
        reason::LAST_BACKUP_SUCCEEDED,
        format!("{name} succeeded"),
    )
}

fn no_space(observed: &Observed) -> Verdict {
    let Some(report) = observed.store.report() else {
        let message = "the store was not asked or did not answer";
        return Verdict::new(Status::Unknown, reason::STORE_UNREACHABLE, message);
    };
    let figures = format!("{} of {}", human(report.db_size), human(report.quota));
    if report.no_space {
        let message = format!("the store refuses writes (NOSPACE): {figures} used");
        return Verdict::new(Status::True, reason::ALARM_RAISED, message);
    }
    if report.quota > 0 && report.db_size >= report.quota {
        let message = format!("the next write raises NOSPACE: {figures} used");
        return Verdict::new(Status::True, reason::QUOTA_REACHED, message);
    }
    // No figures here: they move, and the status would be rewritten for them.
    Verdict::new(
        Status::False,
        reason::SPACE_AVAILABLE,
        "the database is below its quota",
    )
}

fn degraded(
    status: &StoreClusterStatus,
    decision: &Decision,
    result: Result<&Outcome, &ApplyError>,
) -> Verdict {
    if let Step::Wait(wait) = &decision.step
        && wait.needs_a_person()
    {
        return Verdict::new(Status::True, wait.name(), wait.sentence());
    }
    if let Err(error) = result
        && error.is_refusal()
    {
        let name = format!("{}Refused", decision.step.name());
        return Verdict::new(Status::True, &name, error.to_string());
    }
    if status.defragmentation_failures >= DEFRAGMENTATION_FAILURES_DEGRADED {
        let message = format!(
            "{} defragmentations failed",
            status.defragmentation_failures
        );
        return Verdict::new(Status::True, reason::DEFRAGMENTATION_FAILING, message);
    }
    Verdict::new(Status::False, reason::AS_EXPECTED, "nothing needs a person")
}

/// The sentence in `kubectl get`.
fn message(
    ready: &Verdict,
    degraded: &Verdict,
    no_space: &Verdict,
    decision: &Decision,
    observed: &Observed,
) -> String {
    match &decision.step {
        Step::Wait(wait) => wait.sentence(),
        _ if ready.status != Status::True => format!("{} under way", decision.step.name()),
        _ if degraded.status == Status::True => degraded.message.clone(),
        _ if no_space.status == Status::True => no_space.message.clone(),
        _ => match active_backup(observed) {
            Some(backup) => format!("ready, taking backup {}", backup.name_any()),
            None => "ready".to_owned(),
        },
    }
}
