//! The member's volume and pod: made, watched, replaced.
//!
//! A pod that ended is replaced on the same volume; a volume is never replaced, since an empty one
//! under a store that ran before would be a silent, empty store.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;

use super::{Decision, PodFault, Step, Wait, active_backup, obstacle, restore};
use crate::cluster::build::HASH_ANNOTATION;
use crate::cluster::build::pod::{Start, pod_hash};
use crate::cluster::observe::{Observed, is_ready};
use crate::cluster::validate::Desired;

/// The volume comes first: a pod without one would wait for it anyway.
pub(super) fn volume(desired: &Desired, observed: &Observed) -> Option<Decision> {
    let Some(live) = &observed.volume else {
        let ran_before = observed.history.cluster_id.is_some();
        return Some(if ran_before {
            Decision::wait(Wait::VolumeLost {
                volume: desired.volume_name(),
            })
        } else {
            Decision::act(Step::CreateVolume)
        });
    };
    obstacle(desired, "PersistentVolumeClaim", live).map(Decision::wait)
}

/// The pod: there, of today's spec, and on its way to being ready.
pub(super) fn pod(desired: &Desired, observed: &Observed) -> Option<Decision> {
    let Some(pod) = &observed.pod else {
        return Some(match start(desired, observed) {
            Ok(start) => Decision::act(Step::CreatePod(start)),
            Err(wait) => Decision::wait(wait),
        });
    };
    if let Some(wait) = obstacle(desired, "Pod", pod) {
        return Some(Decision::wait(wait));
    }
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return Some(Decision::act(Step::DeletePod(PodFault::Terminated)));
    }
    let ready = is_ready(pod);
    let current = pod.annotations().get(HASH_ANNOTATION) == Some(&pod_hash(desired));
    // A healthy pod that is being backed up is left alone until the backup ends; its deadline
    // bounds the wait.
    let left_alone = ready && active_backup(observed).is_some();
    if !current && !left_alone {
        return Some(Decision::act(Step::DeletePod(PodFault::OutOfDate)));
    }
    if ready {
        return None;
    }
    Some(Decision::wait(not_ready(pod)))
}

fn start(desired: &Desired, observed: &Observed) -> Result<Start, Wait> {
    if observed.history.cluster_id.is_some() {
        return Ok(Start::Existing);
    }
    match &desired.restore {
        None => Ok(Start::New),
        Some(spec) => restore::resolve(spec, observed.restore_backup.as_ref())
            .map(Start::Restore)
            .map_err(|detail| Wait::RestoreSource { detail }),
    }
}

/// Why a pod is not ready, in the kubelet's or the scheduler's own words.
fn not_ready(pod: &Pod) -> Wait {
    let starting = |detail: &str| Wait::PodStarting {
        detail: detail.to_owned(),
    };
    let Some(status) = &pod.status else {
        return starting("waiting for the pod to be scheduled");
    };
    let unschedulable = status
        .conditions
        .iter()
        .flatten()
        .find(|c| c.type_ == "PodScheduled" && c.status == "False");
    if let Some(condition) = unschedulable {
        let why = condition.message.as_deref().unwrap_or("no reason given");
        return starting(&format!("the pod cannot be scheduled: {why}"));
    }
    let containers = status
        .init_container_statuses
        .iter()
        .chain(&status.container_statuses);
    containers
        .flatten()
        .find_map(container_trouble)
        .unwrap_or_else(|| starting("waiting for the pod to become ready"))
}

/// A container that waits for anything but its turn has failed before, or lacks something.
fn container_trouble(status: &ContainerStatus) -> Option<Wait> {
    let waiting = status.state.as_ref().and_then(|s| s.waiting.as_ref());
    let reason = waiting.and_then(|w| w.reason.as_deref())?;
    if matches!(reason, "PodInitializing" | "ContainerCreating") {
        return None;
    }
    let last = status
        .last_state
        .as_ref()
        .and_then(|s| s.terminated.as_ref());
    let said = last
        .and_then(|t| t.message.as_deref())
        .or_else(|| waiting.and_then(|w| w.message.as_deref()))
        .unwrap_or("no message");
    let (name, restarts) = (&status.name, status.restart_count);
    let said = said.trim();
    let detail = format!("container {name}: {reason} after {restarts} restarts: {said}");
    Some(Wait::PodFailing { detail })
}
