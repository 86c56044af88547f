//! StoreCluster: one store under a control plane, as its owner wants it.
//!
//! Promises: what CEL can refuse is refused at apply; every default is in the schema, where
//! `kubectl explain` and a dry run show it; nothing here is a verb.
//! Not here: what the operator derives from a spec (`cluster/validate.rs`).
#![expect(
    unreachable_pub,
    reason = "KubeSchema copies each struct into a function's body"
)]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{quantities_schema, size_schema};

/// What a StoreCluster should be.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "ballast.dev",
    version = "v1alpha1",
    kind = "StoreCluster",
    plural = "storeclusters",
    shortname = "stc",
    category = "ballast",
    namespaced,
    status = "StoreClusterStatus",
    derive = "PartialEq",
    cel,
    doc = "A store that speaks etcd's v3 API, kept running, backed up, defragmented and within quota.",
    validation = Rule::new("self.metadata.name.size() <= 40").message("metadata.name must be no longer than 40 characters, since the names of pods and backups are made from it"),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')").message("metadata.name must be a DNS label that begins with a letter, since Services are named after it"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Status", type_ = "string", json_path = ".status.message"),
    printcolumn(name = "Members", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".spec.replicas", priority = 1),
    printcolumn(name = "Leader", type_ = "string", json_path = ".status.leader", priority = 1),
    printcolumn(name = "Version", type_ = "string", json_path = ".status.version"),
    printcolumn(name = "Last-Backup", type_ = "date", json_path = ".status.lastBackup.time"),
    printcolumn(name = "Next-Backup", type_ = "string", json_path = ".status.nextBackupTime", priority = 1),
    printcolumn(name = "DB-Size", type_ = "string", json_path = ".status.sizes.dbSize", priority = 1),
    printcolumn(name = "Quota", type_ = "string", json_path = ".spec.quota", priority = 1),
    printcolumn(name = "No-Space", type_ = "string", json_path = ".status.conditions[?(@.type=='NoSpace')].status", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.version) || has(self.image)").message("must set version or image"),
    validation = Rule::new("has(self.bootstrap) == has(oldSelf.bootstrap)").message("bootstrap must not be added or removed after creation")
)]
pub struct StoreClusterSpec {
    /// Number of voting members. Only 1 is served for now; more is answered with the condition
    /// Ready=False, reason ReplicasNotSupported.
    #[serde(default = "default_replicas")]
    #[schemars(range(min = 1, max = 7))]
    #[x_kube(validation = Rule::new("self % 2 == 1").message("must be odd, since an even member adds a way to fail and no tolerance"))]
    pub replicas: i32,

    /// Version of the store to run. Names the image's tag unless `image` is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(max = 64),
        regex(pattern = r"^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$")
    )]
    pub version: Option<String>,

    /// Image of the store, in place of the operator's default repository and `version`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub image: Option<String>,

    /// When the kubelet pulls the image.
    #[serde(default)]
    pub image_pull_policy: ImagePullPolicy,

    /// The volume of each member.
    pub storage: StorageSpec,

    /// Size of the database from which on the store refuses writes (NOSPACE).
    #[serde(default = "default_quota")]
    #[schemars(schema_with = "size_schema")]
    pub quota: Quantity,

    /// CPU and memory of the store's container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,

    /// Compaction by the store itself. Leave it out under a kube-apiserver, which compacts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compaction: Option<CompactionSpec>,

    /// Backups: where to, how often, how many are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<BackupSpec>,

    /// When the operator defragments without being asked.
    #[serde(default)]
    pub defragmentation: DefragmentationSpec,

    /// How the first data comes to be. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("must not change after creation"))]
    pub bootstrap: Option<BootstrapSpec>,

    /// User and group the pods run as.
    #[serde(default)]
    pub security: PodSecurity,

    /// While true the operator observes and reports but changes nothing.
    #[serde(default)]
    pub paused: bool,
}

fn default_replicas() -> i32 {
    1
}

fn default_quota() -> Quantity {
    Quantity("2Gi".to_owned())
}

/// When the kubelet pulls an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ImagePullPolicy {
    Always,
    #[default]
    IfNotPresent,
    Never,
}

impl ImagePullPolicy {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

/// The volume of a member.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.storageClassName) == has(oldSelf.storageClassName)").message("storageClassName must not be added or removed after creation")
)]
pub struct StorageSpec {
    /// Size of the volume. May grow when the StorageClass can expand volumes; may not shrink.
    #[schemars(schema_with = "size_schema")]
    #[x_kube(validation = Rule::new("quantity(string(self)).compareTo(quantity(string(oldSelf))) >= 0").message("must not shrink"))]
    pub size: Quantity,

    /// StorageClass of the volume; the cluster's default when left out. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("must not change after creation"))]
    pub storage_class_name: Option<String>,

    /// What becomes of the volume when the StoreCluster is deleted.
    #[serde(default)]
    pub when_deleted: WhenDeleted,
}

/// What becomes of a volume when its owner goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WhenDeleted {
    /// The volume is deleted with the StoreCluster. Backups are not.
    #[default]
    Delete,
    /// The volume stays, and a StoreCluster of the same name takes it over.
    Retain,
}

/// CPU and memory, as Kubernetes writes them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    /// What the scheduler sets aside.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "quantities_schema")]
    pub requests: BTreeMap<String, Quantity>,
    /// What the container may not exceed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "quantities_schema")]
    pub limits: BTreeMap<String, Quantity>,
}

/// Compaction by the store itself, as etcd's `--auto-compaction-*` flags.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CompactionSpec {
    /// By age or by number of revisions.
    pub mode: CompactionMode,
    /// How much history stays: a duration such as `1h`, or a number of revisions.
    #[schemars(length(min = 1, max = 16), regex(pattern = r"^[0-9]+(s|m|h)?$"))]
    pub retention: String,
}

/// What the retention of a compaction counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CompactionMode {
    Periodic,
    Revision,
}

impl CompactionMode {
    pub fn as_flag(self) -> &'static str {
        match self {
            Self::Periodic => "periodic",
            Self::Revision => "revision",
        }
    }
}

/// Backups of a StoreCluster.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupSpec {
    /// When backups are taken: five cron fields, `@hourly` and its kin, or `@every 30m`.
    /// Without it only StoreBackups made by hand are taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(validation = Rule::new("self.startsWith('@') || self.split(' ').filter(f, f != '').size() == 5").message("must have five cron fields or begin with @"))]
    pub schedule: Option<String>,

    /// IANA name of the time zone the schedule is read in; UTC when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: Option<String>,

    /// While true no scheduled backup begins.
    #[serde(default)]
    pub suspend: bool,

    /// Which scheduled backups are kept.
    #[serde(default)]
    pub retention: RetentionSpec,

    /// Where backups are kept.
    pub storage: BackupStorage,

    /// Seconds after which a backup that has not ended is given up.
    #[serde(default = "default_backup_deadline")]
    #[schemars(range(min = 10, max = 86400))]
    pub deadline_seconds: i32,
}

fn default_backup_deadline() -> i32 {
    3600
}

/// Which scheduled backups are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RetentionSpec {
    /// Number of successful scheduled backups to keep. Failed ones are not counted, and the newest
    /// successful one always stays.
    #[serde(default = "default_retention_count")]
    #[schemars(range(min = 1, max = 1000))]
    pub count: i32,
}

fn default_retention_count() -> i32 {
    7
}

impl Default for RetentionSpec {
    fn default() -> Self {
        Self {
            count: default_retention_count(),
        }
    }
}

/// Where backups are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BackupStorage {
    /// A PersistentVolumeClaim.
    pub pvc: PvcTarget,
}

/// A claim that backups are written to: one that exists, or one the operator makes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.claimName) != has(self.size)").message("must set exactly one of claimName (a claim that exists) and size (the operator makes one)"),
    validation = Rule::new("!has(self.storageClassName) || has(self.size)").message("storageClassName must come with size")
)]
pub struct PvcTarget {
    /// Name of a claim in the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: Option<String>,

    /// Size of the claim the operator makes. It outlives the StoreCluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "size_schema")]
    pub size: Option<Quantity>,

    /// StorageClass of the claim the operator makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub storage_class_name: Option<String>,
}

/// When the operator defragments: the database is at least `minSize` and at least
/// `minFreeRatioPercent` of it is free.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DefragmentationSpec {
    /// Automatic follows the rule; Disabled leaves it to a person.
    #[serde(default)]
    pub mode: DefragmentationMode,

    /// Size of the database below which it is left alone.
    #[serde(default = "default_min_size")]
    #[schemars(schema_with = "size_schema")]
    pub min_size: Quantity,

    /// Free share of the database below which it is left alone.
    #[serde(default = "default_min_free")]
    #[schemars(range(min = 1, max = 99))]
    pub min_free_ratio_percent: i32,

    /// Seconds between the end of one defragmentation and the start of the next.
    #[serde(default = "default_defrag_interval")]
    #[schemars(range(min = 10, max = 604_800))]
    pub min_interval_seconds: i32,
}

fn default_min_size() -> Quantity {
    Quantity("100Mi".to_owned())
}

fn default_min_free() -> i32 {
    45
}

fn default_defrag_interval() -> i32 {
    600
}

impl Default for DefragmentationSpec {
    fn default() -> Self {
        Self {
            mode: DefragmentationMode::default(),
            min_size: default_min_size(),
            min_free_ratio_percent: default_min_free(),
            min_interval_seconds: default_defrag_interval(),
        }
    }
}

/// Whether the defragmentation rule is followed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DefragmentationMode {
    #[default]
    Automatic,
    Disabled,
}

/// How the first data comes to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BootstrapSpec {
    /// Begin with the contents of a backup.
    pub restore: RestoreSpec,
}

/// A restore into a new StoreCluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestoreSpec {
    /// The backup, in the same namespace.
    pub backup_ref: BackupRef,

    /// How far the revision is raised above the backup's, so that no client of the old store can
    /// mistake an old revision for a new one. Everything below is marked compacted.
    #[serde(default = "default_bump")]
    #[schemars(range(min = 1, max = 1_000_000_000_000_i64))]
    pub bump_revision: i64,
}

fn default_bump() -> i64 {
    1_000_000_000
}

/// A StoreBackup in the same namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BackupRef {
    /// Name of the StoreBackup.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// Who the pods run as.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodSecurity {
    /// User the processes run as.
    #[serde(default = "default_user")]
    #[schemars(range(min = 1, max = 2_147_483_647_i64))]
    pub run_as_user: i64,

    /// Group that owns the volumes, where the volume's kind supports it.
    #[serde(default = "default_user")]
    #[schemars(range(min = 1, max = 2_147_483_647_i64))]
    pub fs_group: i64,
}

fn default_user() -> i64 {
    65532
}

impl Default for PodSecurity {
    fn default() -> Self {
        Self {
            run_as_user: default_user(),
            fs_group: default_user(),
        }
    }
}

/// What the operator last saw of a StoreCluster. Everything but the history of the last backup and
/// defragmentation can be computed again.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoreClusterStatus {
    /// Generation of the spec this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// Ready, Progressing, BackupReady, NoSpace, Degraded.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,

    /// One sentence for people; programs read the conditions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,

    /// Voting members that answer.
    #[serde(default)]
    pub ready_replicas: i32,

    /// URL clients use inside the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,

    /// The store's cluster ID, hexadecimal. Once set, the operator never lets a blank volume start.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,

    /// The member's ID, hexadecimal.
    #[serde(default, rename = "memberID", skip_serializing_if = "Option::is_none")]
    pub member_id: Option<String>,

    /// Name of the leading member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,

    /// API version the store reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,

    /// Image the member runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,

    /// Alarms raised, such as NOSPACE.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub alarms: Vec<String>,

    /// Sizes of the database, refreshed when they change noticeably; the metrics are exact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sizes: Option<StoreSizes>,

    /// The defragmentation that ended last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_defragmentation: Option<LastDefragmentation>,

    /// Defragmentations that failed since the last one that succeeded.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub defragmentation_failures: i32,

    /// When a defragmentation was last begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_defragmentation_attempt_time: Option<Time>,

    /// The newest backup that succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_backup: Option<LastBackup>,

    /// The moment of the schedule that was last acted on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_schedule_time: Option<Time>,

    /// When the next scheduled backup begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_backup_time: Option<Time>,

    /// What the store was restored from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<RestoreStatus>,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(n: &i32) -> bool {
    *n == 0
}

/// Sizes of the database in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StoreSizes {
    /// Bytes the database occupies; the quota is measured against it.
    pub db_size: i64,
    /// Bytes of it that hold live data.
    pub db_size_in_use: i64,
    /// Quota the store reports.
    pub quota: i64,
}

/// A defragmentation that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastDefragmentation {
    /// When it ended.
    pub time: Time,
    /// Size of the database before.
    pub before_bytes: i64,
    /// Size of the database after.
    pub after_bytes: i64,
}

/// A backup that succeeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastBackup {
    /// Name of the StoreBackup.
    pub name: String,
    /// When it ended.
    pub time: Time,
    /// Revision it holds.
    pub revision: i64,
}

/// A restore that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestoreStatus {
    /// Name of the StoreBackup.
    pub backup_name: String,
    /// Revision of the backup, before it was raised.
    pub backup_revision: i64,
    /// When the restored store first answered.
    pub time: Time,
}
