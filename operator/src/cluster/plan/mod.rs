//! The planner: what a store should be, what was seen of it, and the one next step.
//!
//! Pure: no clock, no network, no memory but the status. One step per pass, so that "never two
//! things at once" holds by construction and every rule is a row of a table test. The order of the
//! rules below is the order of precedence.
//!
//! ```text
//! paused > more than one replica > objects > volume > pod > store > space > backups > rest
//! ```

mod backup;
mod defrag;
mod member;
mod quota;
mod restore;

pub use backup::{SCHEDULED_AT_ANNOTATION, SCHEDULED_LABEL, active_backup, next_backup};
pub use restore::resolve as resolve_restore;

use super::build::CLUSTER_LABEL;
use super::build::pod::Start;
use super::build::service::{build_client_service, build_peer_service};
use super::build::volume::{build_backup_volume, build_data_volume};
use super::observe::{Observed, StoreView, is_going, is_up_to_date};
use super::validate::Desired;

/// Shortest time between two looks at a store that needs nothing.
const IDLE_SECS: i64 = 30;
/// Time until the next look at something that is on its way.
const WAIT_SECS: i64 = 5;

/// Which of the two Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceKind {
    Client,
    Peer,
}

/// Why a pod has to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodFault {
    /// It ended and would never come back by itself, as after a node was shut down.
    Terminated,
    /// It was built from an older spec.
    OutOfDate,
}

/// Why a store is defragmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefragCause {
    /// The rule of the spec.
    Rule,
    /// NOSPACE is raised and the live data would fit.
    NoSpace,
}

/// Why nothing is done, although something is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    Paused,
    ReplicasNotSupported {
        wanted: i32,
    },
    /// An object of that name belongs to somebody else.
    NameTaken {
        kind: &'static str,
        name: String,
    },
    /// The store ran before and its volume is gone: an empty one must not take its place.
    VolumeLost {
        volume: String,
    },
    ObjectTerminating {
        kind: &'static str,
        name: String,
    },
    RestoreSource {
        detail: String,
    },
    PodStarting {
        detail: String,
    },
    /// It fails again and again, or what it needs cannot be had.
    PodFailing {
        detail: String,
    },
    StoreUnreachable {
        detail: String,
    },
    /// The cluster ID is not the one that was recorded.
    WrongCluster {
        seen: u64,
        recorded: String,
    },
    Corrupt,
}

/// The next thing to do. Its name is the event's reason and the metric's label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Everything is as it should be.
    Idle,
    Wait(Wait),
    ApplyService(ServiceKind),
    CreateVolume,
    UpdateVolume,
    CreateBackupVolume,
    CreatePod(Start),
    DeletePod(PodFault),
    Defragment(DefragCause),
    DisarmNoSpace,
    CreateBackup {
        name: String,
        due: i64,
    },
    DeleteBackup {
        name: String,
    },
}

impl Step {
    /// Name of the step, as events and metrics show it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Idle => "Idle",
            Self::Wait(wait) => wait.name(),
            Self::ApplyService(_) => "ApplyService",
            Self::CreateVolume => "CreateVolume",
            Self::UpdateVolume => "UpdateVolume",
            Self::CreateBackupVolume => "CreateBackupVolume",
            Self::CreatePod(Start::Restore(_)) => "RestorePod",
            Self::CreatePod(_) => "CreatePod",
            Self::DeletePod(_) => "ReplacePod",
            Self::Defragment(_) => "Defragment",
            Self::DisarmNoSpace => "DisarmNoSpace",
            Self::CreateBackup { .. } => "CreateBackup",
            Self::DeleteBackup { .. } => "DeleteBackup",
        }
    }

    /// Whether the step changes anything.
    pub fn acts(&self) -> bool {
        !matches!(self, Self::Idle | Self::Wait(_))
    }
}

impl Wait {
    /// Name of what is waited for: the reason in the conditions.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Paused => "Paused",
            Self::ReplicasNotSupported { .. } => "ReplicasNotSupported",
            Self::NameTaken { .. } => "NameTaken",
            Self::VolumeLost { .. } => "VolumeLost",
            Self::ObjectTerminating { .. } => "ObjectTerminating",
            Self::RestoreSource { .. } => "RestoreSourceNotReady",
            Self::PodStarting { .. } => "PodStarting",
            Self::PodFailing { .. } => "PodFailing",
            Self::StoreUnreachable { .. } => "StoreUnreachable",
            Self::WrongCluster { .. } => "WrongCluster",
            Self::Corrupt => "Corrupt",
        }
    }

    /// Whether only a person can help.
    pub fn needs_a_person(&self) -> bool {
        match self {
            Self::ReplicasNotSupported { .. }
            | Self::NameTaken { .. }
            | Self::VolumeLost { .. }
            | Self::PodFailing { .. }
            | Self::WrongCluster { .. }
            | Self::Corrupt => true,
            Self::Paused
            | Self::ObjectTerminating { .. }
            | Self::RestoreSource { .. }
            | Self::PodStarting { .. }
            | Self::StoreUnreachable { .. } => false,
        }
    }

    /// The sentence for the status.
    pub fn sentence(&self) -> String {
        match self {
            Self::Paused => "paused: the operator changes nothing while spec.paused is true".into(),
            Self::ReplicasNotSupported { wanted } => {
                format!("replicas {wanted} is not served yet: set replicas to 1")
            }
            Self::NameTaken { kind, name } => {
                format!(
                    "{kind} {name} belongs to another owner: rename the StoreCluster or remove it"
                )
            }
            Self::VolumeLost { volume } => format!(
                "volume {volume} is gone and an empty one must not take its place: \
                 restore a StoreBackup into a new StoreCluster"
            ),
            Self::ObjectTerminating { kind, name } => {
                format!("waiting until {kind} {name} is gone")
            }
            Self::RestoreSource { detail }
            | Self::PodStarting { detail }
            | Self::PodFailing { detail } => detail.clone(),
            Self::StoreUnreachable { detail } => format!("the store does not answer: {detail}"),
            Self::WrongCluster { seen, recorded } => {
                format!("the store answers as cluster {seen:x}, but {recorded} was recorded")
            }
            Self::Corrupt => "the store raised CORRUPT: compare it with a backup".into(),
        }
    }
}

/// A step, and when to look again if nothing happens in between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub step: Step,
    pub again_secs: i64,
}

impl Decision {
    fn act(step: Step) -> Self {
        Self {
            step,
            again_secs: 1,
        }
    }

    fn wait(wait: Wait) -> Self {
        Self {
            step: Step::Wait(wait),
            again_secs: WAIT_SECS,
        }
    }
}

/// The one next step.
pub fn plan(desired: &Desired, observed: &Observed) -> Decision {
    gate(desired)
        .or_else(|| services(desired, observed))
        .or_else(|| member::volume(desired, observed))
        .or_else(|| backup_volume(desired, observed))
        .or_else(|| member::pod(desired, observed))
        .or_else(|| store(observed))
        .or_else(|| quota::plan(desired, observed))
        .or_else(|| defrag::plan(desired, observed))
        .or_else(|| backup::plan(desired, observed))
        .or_else(|| volume_update(desired, observed))
        .unwrap_or_else(|| idle(desired, observed))
}

fn gate(desired: &Desired) -> Option<Decision> {
    if desired.paused {
        return Some(Decision::wait(Wait::Paused));
    }
    (desired.replicas != 1).then(|| {
        Decision::wait(Wait::ReplicasNotSupported {
            wanted: desired.replicas,
        })
    })
}

fn services(desired: &Desired, observed: &Observed) -> Option<Decision> {
    let wanted = [
        (
            ServiceKind::Peer,
            build_peer_service(desired),
            &observed.peer_service,
        ),
        (
            ServiceKind::Client,
            build_client_service(desired),
            &observed.client_service,
        ),
    ];
    wanted.into_iter().find_map(|(kind, built, live)| {
        if let Some(live) = live {
            if let Some(wait) = obstacle(desired, "Service", live) {
                return Some(Decision::wait(wait));
            }
            if is_up_to_date(&built, live) {
                return None;
            }
        }
        Some(Decision::act(Step::ApplyService(kind)))
    })
}

fn backup_volume(desired: &Desired, observed: &Observed) -> Option<Decision> {
    let backup = desired.backup.as_ref()?;
    build_backup_volume(desired, backup)?;
    observed
        .backup_volume
        .is_none()
        .then(|| Decision::act(Step::CreateBackupVolume))
}

/// Last of all, since a StorageClass that cannot expand volumes refuses it every time, and nothing
/// else may wait for that.
fn volume_update(desired: &Desired, observed: &Observed) -> Option<Decision> {
    let live = observed.volume.as_ref()?;
    (!is_up_to_date(&build_data_volume(desired), live)).then_some(Decision {
        step: Step::UpdateVolume,
        again_secs: IDLE_SECS,
    })
}

fn store(observed: &Observed) -> Option<Decision> {
    match &observed.store {
        StoreView::NotAsked => Some(Decision::wait(Wait::PodStarting {
            detail: "waiting for the pod's address".to_owned(),
        })),
        StoreView::Unreachable(detail) => Some(Decision::wait(Wait::StoreUnreachable {
            detail: detail.clone(),
        })),
        StoreView::Up(report) => {
            if let Some(recorded) = &observed.history.cluster_id
                && *recorded != format!("{:x}", report.cluster_id)
            {
                return Some(Decision::wait(Wait::WrongCluster {
                    seen: report.cluster_id,
                    recorded: recorded.clone(),
                }));
            }
            report.corrupt.then(|| Decision::wait(Wait::Corrupt))
        }
    }
}

fn idle(desired: &Desired, observed: &Observed) -> Decision {
    let next = next_backup(desired, observed).map_or(IDLE_SECS, |next| next - observed.now);
    Decision {
        step: Step::Idle,
        again_secs: next.clamp(1, IDLE_SECS),
    }
}

/// What forbids touching a live object: it is going, or it is somebody else's.
///
/// Ours carries the StoreCluster's name as a label; server-side apply would otherwise take over a
/// Service that happens to have the same name.
fn obstacle<K: kube::Resource>(desired: &Desired, kind: &'static str, live: &K) -> Option<Wait> {
    let meta = live.meta();
    let name = meta.name.clone().unwrap_or_default();
    if is_going(live) {
        return Some(Wait::ObjectTerminating { kind, name });
    }
    let label = meta.labels.as_ref().and_then(|l| l.get(CLUSTER_LABEL));
    let owners = meta.owner_references.iter().flatten();
    let foreign = label != Some(&desired.name)
        || owners
            .into_iter()
            .any(|o| o.controller == Some(true) && o.uid != desired.uid);
    foreign.then_some(Wait::NameTaken { kind, name })
}
