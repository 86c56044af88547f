//! StoreBackup: one backup of one StoreCluster, taken once.
//!
//! The operator makes one per scheduled moment; one made by hand is a backup on demand. The object
//! is the backup's record and its handle: deleting it deletes the file.
#![expect(
    unreachable_pub,
    reason = "KubeSchema copies each struct into a function's body"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What to back up. Immutable.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "ballast.dev",
    version = "v1alpha1",
    kind = "StoreBackup",
    plural = "storebackups",
    shortname = "stb",
    category = "ballast",
    namespaced,
    status = "StoreBackupStatus",
    derive = "PartialEq",
    cel,
    doc = "One backup of a StoreCluster. Deleting the object deletes the backup's file.",
    validation = Rule::new("self.metadata.name.size() <= 56").message("metadata.name must be no longer than 56 characters, since a pod is named after it"),
    validation = Rule::new("self.spec == oldSelf.spec").message("spec must not change after creation"),
    printcolumn(name = "Cluster", type_ = "string", json_path = ".spec.clusterRef.name"),
    printcolumn(name = "Succeeded", type_ = "string", json_path = ".status.conditions[?(@.type=='Succeeded')].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type=='Succeeded')].reason"),
    printcolumn(name = "Revision", type_ = "integer", json_path = ".status.revision"),
    printcolumn(name = "Size", type_ = "integer", json_path = ".status.sizeBytes"),
    printcolumn(name = "Completed", type_ = "date", json_path = ".status.completionTime"),
    printcolumn(name = "Path", type_ = "string", json_path = ".status.location.path", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct StoreBackupSpec {
    /// The StoreCluster to back up, in the same namespace. It says where backups are kept.
    pub cluster_ref: ClusterRef,
}

/// A StoreCluster in the same namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterRef {
    /// Name of the StoreCluster.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// How the backup went.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoreBackupStatus {
    /// Generation of the spec this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// Succeeded: Unknown while pending or running, then True or False for good.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,

    /// UID of the StoreCluster that was backed up.
    #[serde(
        default,
        rename = "clusterUID",
        skip_serializing_if = "Option::is_none"
    )]
    pub cluster_uid: Option<String>,

    /// Pods that were started for it and failed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub failed_attempts: i32,

    /// When the work began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,

    /// When it ended, either way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,

    /// Revision the backup holds, read from the file itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,

    /// Number of records in the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_keys: Option<i64>,

    /// Size of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<i64>,

    /// SHA-256 of the whole file, hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,

    /// Where the file is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<BackupLocation>,

    /// One sentence for people: what it waits for, or why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(n: &i32) -> bool {
    *n == 0
}

/// A file on a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BackupLocation {
    /// Name of the PersistentVolumeClaim.
    pub claim_name: String,
    /// Path below the claim's root.
    pub path: String,
}
