//! Spec to `Desired`: everything parsed, every default filled, names derived.
//!
//! What CEL already refused is not asked again; what it cannot see (sizes, schedules, time zones) is
//! checked here, and a spec that fails becomes a condition, never a panic or an endless retry.

use k8s_openapi::api::core::v1::{ObjectReference, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};

use crate::crd::{
    BackupSpec, CompactionSpec, DefragmentationMode, PodSecurity, PvcTarget, Resources,
    RestoreSpec, StorageSpec, StoreCluster,
};
use crate::quantity::{self, QuantityError};
use crate::schedule::{Schedule, ScheduleError};

/// Smallest quota the store can start with.
const QUOTA_MIN_BYTES: i64 = 1 << 20;

/// A spec the operator cannot follow.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ValidateError {
    #[error("the object has no {0}")]
    Incomplete(&'static str),
    #[error("{field}: {source}")]
    Size {
        field: &'static str,
        source: QuantityError,
    },
    #[error("quota {quota} must be smaller than the volume of {volume}")]
    QuotaOverVolume { quota: String, volume: String },
    #[error("quota {0} must be at least 1 MiB")]
    QuotaTooSmall(String),
    #[error("backup.schedule: {0}")]
    Schedule(#[from] ScheduleError),
}

/// What the operator is told when it starts, as far as objects depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Repository of the store's image; a StoreCluster's version is the tag.
    pub store_repository: String,
    /// The operator's own image: pods of backups take the agent from it.
    pub agent_image: String,
    /// Pull policy of the operator's own image in those pods.
    pub agent_pull_policy: String,
}

/// A StoreCluster that was understood.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub generation: Option<i64>,
    /// Seconds since the epoch.
    pub created: i64,
    pub owner: OwnerReference,
    pub reference: ObjectReference,
    pub replicas: i32,
    pub image: String,
    pub pull_policy: &'static str,
    pub storage: StorageSpec,
    pub storage_bytes: i64,
    pub quota_bytes: i64,
    pub resources: Option<ResourceRequirements>,
    pub compaction: Option<CompactionSpec>,
    pub backup: Option<DesiredBackup>,
    pub defragmentation: DesiredDefragmentation,
    pub restore: Option<RestoreSpec>,
    pub security: PodSecurity,
    pub paused: bool,
    pub settings: Settings,
}

/// The backup half of a spec.
#[derive(Clone, Debug, PartialEq)]
pub struct DesiredBackup {
    pub schedule: Option<Schedule>,
    pub suspend: bool,
    pub keep: usize,
    pub deadline_secs: i64,
    /// Name of the claim, given or derived.
    pub claim: String,
    /// How to make the claim, when it is the operator's to make.
    pub make: Option<PvcTarget>,
}

/// The rule of defragmentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredDefragmentation {
    pub automatic: bool,
    pub min_bytes: i64,
    pub min_free_percent: i64,
    pub min_interval_secs: i64,
}

impl Desired {
    /// The one member's pod, and its volume.
    pub fn member_name(&self) -> String {
        format!("{}-0", self.name)
    }

    /// Volume of the member.
    pub fn volume_name(&self) -> String {
        format!("data-{}-0", self.name)
    }

    /// Service that clients use: only members that are ready stand behind it.
    pub fn client_service(&self) -> String {
        format!("{}-client", self.name)
    }

    /// Headless Service that gives members their names.
    pub fn peer_service(&self) -> String {
        self.name.clone()
    }

    /// Never reused, so that a member of an older cluster of that name cannot join this one.
    pub fn cluster_token(&self) -> String {
        format!("{}-{}-{}", self.namespace, self.name, self.uid)
    }

    /// URL for clients inside the Kubernetes cluster.
    pub fn endpoint(&self) -> String {
        format!(
            "http://{}.{}.svc:2379",
            self.client_service(),
            self.namespace
        )
    }
}

/// Understands a StoreCluster, or says what is wrong with it.
pub fn validate(cluster: &StoreCluster, settings: &Settings) -> Result<Desired, ValidateError> {
    let spec = &cluster.spec;
    let incomplete = ValidateError::Incomplete;
    let storage_bytes = size("storage.size", &spec.storage.size)?;
    let quota_bytes = size("quota", &spec.quota)?;
    if quota_bytes < QUOTA_MIN_BYTES {
        return Err(ValidateError::QuotaTooSmall(spec.quota.0.clone()));
    }
    if quota_bytes >= storage_bytes {
        return Err(ValidateError::QuotaOverVolume {
            quota: spec.quota.0.clone(),
            volume: spec.storage.size.0.clone(),
        });
    }
    let name = cluster.meta().name.clone().ok_or(incomplete("name"))?;
    let image = spec.image.clone().unwrap_or_else(|| {
        format!(
            "{}:{}",
            settings.store_repository,
            spec.version.as_deref().unwrap_or("latest")
        )
    });
    let backup = spec.backup.as_ref().map(|b| backup(b, &name)).transpose()?;
    if let Some(PvcTarget { size: Some(q), .. }) = backup.as_ref().and_then(|b| b.make.as_ref()) {
        size("backup.storage.pvc.size", q)?;
    }
    let defrag = &spec.defragmentation;
    Ok(Desired {
        namespace: cluster.namespace().ok_or(incomplete("namespace"))?,
        uid: cluster.uid().ok_or(incomplete("uid"))?,
        generation: cluster.meta().generation,
        created: cluster
            .creation_timestamp()
            .ok_or(incomplete("creationTimestamp"))?
            .0
            .as_second(),
        owner: cluster.controller_owner_ref(&()).ok_or(incomplete("uid"))?,
        reference: cluster.object_ref(&()),
        name,
        replicas: spec.replicas,
        image,
        pull_policy: spec.image_pull_policy.as_str(),
        storage: spec.storage.clone(),
        storage_bytes,
        quota_bytes,
        resources: spec.resources.as_ref().map(requirements),
        compaction: spec.compaction.clone(),
        backup,
        defragmentation: DesiredDefragmentation {
            automatic: defrag.mode == DefragmentationMode::Automatic,
            min_bytes: size("defragmentation.minSize", &defrag.min_size)?,
            min_free_percent: i64::from(defrag.min_free_ratio_percent),
            min_interval_secs: i64::from(defrag.min_interval_seconds),
        },
        restore: spec.bootstrap.as_ref().map(|b| b.restore.clone()),
        security: spec.security.clone(),
        paused: spec.paused,
        settings: settings.clone(),
    })
}

/// The claim a cluster's backups go to.
pub fn backup_claim(cluster_name: &str, target: &PvcTarget) -> String {
    target
        .claim_name
        .clone()
        .unwrap_or_else(|| format!("{cluster_name}-backup"))
}

fn size(field: &'static str, quantity: &Quantity) -> Result<i64, ValidateError> {
    quantity::bytes(quantity).map_err(|source| ValidateError::Size { field, source })
}

fn backup(spec: &BackupSpec, name: &str) -> Result<DesiredBackup, ValidateError> {
    let schedule = match &spec.schedule {
        Some(text) => Some(Schedule::parse(text, spec.time_zone.as_deref())?),
        None => None,
    };
    let target = &spec.storage.pvc;
    Ok(DesiredBackup {
        schedule,
        suspend: spec.suspend,
        keep: usize::try_from(spec.retention.count).unwrap_or(1).max(1),
        deadline_secs: i64::from(spec.deadline_seconds),
        claim: backup_claim(name, target),
        make: target.size.is_some().then(|| target.clone()),
    })
}

fn requirements(resources: &Resources) -> ResourceRequirements {
    let some = |map: &std::collections::BTreeMap<_, _>| (!map.is_empty()).then(|| map.clone());
    ResourceRequirements {
        requests: some(&resources.requests),
        limits: some(&resources.limits),
        claims: None,
    }
}
