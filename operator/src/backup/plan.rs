//! What a StoreBackup needs next. Pure.
//!
//! One backup of a store runs at a time, in the order of their creation. What it waits for is
//! bounded: a StoreCluster that does not come, a store that is not ready and a pod that does not end
//! all lead to a verdict.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde::{Deserialize, Serialize};

use crate::cluster::observe::is_going;
use crate::cluster::validate::backup_claim;
use crate::crd::conditions::{self, READY, SUCCEEDED, backup_reason};
use crate::crd::{BackupLocation, StoreBackup, StoreCluster};

/// How long a StoreBackup waits for a StoreCluster that does not exist.
const CLUSTER_WAIT_SECS: i64 = 600;
/// How long a backup may run whose StoreCluster no longer says.
const ORPHAN_SECS_MAX: i64 = 3600;
/// Pods that are tried.
const ATTEMPTS_MAX: i32 = 3;

/// What the pod wrote, in its own words: the termination message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupReport {
    pub revision: i64,
    pub total_keys: i64,
    pub size_bytes: i64,
    pub sha256: String,
}

/// Everything the planner may look at.
#[derive(Clone, Debug)]
pub struct View {
    /// Seconds since the epoch.
    pub now: i64,
    pub namespace: String,
    pub backup: StoreBackup,
    pub cluster: Option<StoreCluster>,
    pub pod: Option<Pod>,
    /// The other StoreBackups of that StoreCluster.
    pub others: Vec<StoreBackup>,
}

/// The next thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupStep {
    /// It ended, and nothing is left to tidy.
    Done,
    Wait {
        message: String,
    },
    /// Record where the file will be before anything is written there.
    Begin {
        cluster_uid: String,
        location: BackupLocation,
    },
    CreatePod,
    DeletePod,
    Retry {
        message: String,
    },
    Complete(BackupReport),
    Fail {
        reason: &'static str,
        message: String,
    },
}

/// The one next step.
pub fn plan(view: &View) -> BackupStep {
    if is_over(&view.backup) {
        let pod = view.pod.as_ref().filter(|pod| !is_going(*pod));
        return if pod.is_some() {
            BackupStep::DeletePod
        } else {
            BackupStep::Done
        };
    }
    let started = view
        .backup
        .status
        .as_ref()
        .and_then(|s| s.start_time.as_ref());
    match started {
        None => begin(view),
        Some(time) => run(view, time.0.as_second()),
    }
}

fn is_over(backup: &StoreBackup) -> bool {
    let conditions = backup
        .status
        .as_ref()
        .map(|s| s.conditions.as_slice())
        .unwrap_or_default();
    conditions::get(conditions, SUCCEEDED).is_some_and(|c| c.status != "Unknown")
}

fn begin(view: &View) -> BackupStep {
    let created = view
        .backup
        .creation_timestamp()
        .map_or(view.now, |t| t.0.as_second());
    let waited = view.now - created;
    let name = &view.backup.spec.cluster_ref.name;
    let Some(cluster) = view.cluster.as_ref().filter(|c| !is_going(*c)) else {
        let message = format!("StoreCluster {name} does not exist");
        return if waited > CLUSTER_WAIT_SECS {
            BackupStep::Fail {
                reason: backup_reason::REJECTED,
                message,
            }
        } else {
            BackupStep::Wait { message }
        };
    };
    let Some(spec) = &cluster.spec.backup else {
        let message = format!("StoreCluster {name} has no spec.backup to say where backups go");
        return BackupStep::Fail {
            reason: backup_reason::REJECTED,
            message,
        };
    };
    if waited > i64::from(spec.deadline_seconds) {
        let message = format!("StoreCluster {name} was not ready within {waited}s");
        return BackupStep::Fail {
            reason: backup_reason::DEADLINE_EXCEEDED,
            message,
        };
    }
    if let Some(other) = view
        .others
        .iter()
        .find(|other| goes_before(other, &view.backup))
    {
        let message = format!("waiting for backup {} to end", other.name_any());
        return BackupStep::Wait { message };
    }
    let status = cluster.status.as_ref();
    if !status.is_some_and(|s| conditions::is_true(&s.conditions, READY)) {
        return BackupStep::Wait {
            message: format!("StoreCluster {name} is not ready"),
        };
    }
    let cluster_uid = cluster.uid().unwrap_or_default();
    // The object's own UID in the name: an older file of the same name is never taken for this one.
    let own: String = view
        .backup
        .uid()
        .unwrap_or_default()
        .chars()
        .take(8)
        .collect();
    let path = format!("{cluster_uid}/{}-{own}.db", view.backup.name_any());
    let claim_name = backup_claim(name, &spec.storage.pvc);
    BackupStep::Begin {
        cluster_uid,
        location: BackupLocation { claim_name, path },
    }
}

/// Whether another backup has begun, or was created earlier and may begin first.
fn goes_before(other: &StoreBackup, this: &StoreBackup) -> bool {
    if is_over(other) || is_going(other) {
        return false;
    }
    let begun = other
        .status
        .as_ref()
        .is_some_and(|s| s.start_time.is_some());
    let key = |b: &StoreBackup| (b.creation_timestamp(), b.name_any());
    begun || key(other) < key(this)
}

fn run(view: &View, started: i64) -> BackupStep {
    let Some(cluster) = view.cluster.as_ref().filter(|c| !is_going(*c)) else {
        let message = "the StoreCluster was deleted while the backup ran".to_owned();
        return BackupStep::Fail {
            reason: backup_reason::FAILED,
            message,
        };
    };
    let deadline = cluster
        .spec
        .backup
        .as_ref()
        .map_or(ORPHAN_SECS_MAX, |b| i64::from(b.deadline_seconds));
    if view.now > started + deadline {
        let message = format!("did not end within {deadline}s");
        return BackupStep::Fail {
            reason: backup_reason::DEADLINE_EXCEEDED,
            message,
        };
    }
    let Some(pod) = &view.pod else {
        return BackupStep::CreatePod;
    };
    if is_going(pod) {
        return BackupStep::Wait {
            message: "waiting for the last attempt's pod to go".to_owned(),
        };
    }
    let phase = pod
        .status
        .as_ref()
        .and_then(|s| s.phase.as_deref())
        .unwrap_or("Pending");
    let said = last_words(pod);
    let problem = match phase {
        "Succeeded" => match serde_json::from_str::<BackupReport>(&said) {
            Ok(report) => return BackupStep::Complete(report),
            Err(error) => format!("the pod's report cannot be read: {error}"),
        },
        "Failed" if said.is_empty() => "the pod failed and said nothing".to_owned(),
        "Failed" => said,
        other => {
            return BackupStep::Wait {
                message: format!("the backup pod is {other}"),
            };
        }
    };
    let attempts = view.backup.status.as_ref().map_or(0, |s| s.failed_attempts);
    if attempts + 1 >= ATTEMPTS_MAX {
        return BackupStep::Fail {
            reason: backup_reason::FAILED,
            message: problem,
        };
    }
    BackupStep::Retry { message: problem }
}

/// The termination message of the container that failed, or of the last one.
fn last_words(pod: &Pod) -> String {
    let Some(status) = &pod.status else {
        return String::new();
    };
    let ended: Vec<_> = status
        .init_container_statuses
        .iter()
        .chain(&status.container_statuses)
        .flatten()
        .filter_map(|c| c.state.as_ref()?.terminated.as_ref())
        .collect();
    let culprit = ended.iter().find(|t| t.exit_code != 0).or(ended.last());
    let said = culprit
        .and_then(|t| t.message.clone())
        .or_else(|| status.message.clone());
    said.unwrap_or_default().trim().to_owned()
}
