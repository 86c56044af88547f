//! The API: StoreCluster and StoreBackup, and the words of their conditions.
//!
//! Types only: nothing here talks to a cluster. The CRDs under `crds/` and in the chart are printed
//! from these types (`crdgen.rs`), and a test fails when they differ.

pub mod conditions;
mod store_backup;
mod store_cluster;

pub use store_backup::{
    BackupLocation, ClusterRef, StoreBackup, StoreBackupSpec, StoreBackupStatus,
};
pub use store_cluster::{
    BackupRef, BackupSpec, BackupStorage, BootstrapSpec, CompactionMode, CompactionSpec,
    DefragmentationMode, DefragmentationSpec, ImagePullPolicy, LastBackup, LastDefragmentation,
    PodSecurity, PvcTarget, Resources, RestoreSpec, RestoreStatus, RetentionSpec, StorageSpec,
    StoreCluster, StoreClusterSpec, StoreClusterStatus, StoreSizes, WhenDeleted,
};

/// The API group of every kind here.
pub const GROUP: &str = "ballast.dev";

/// The schema of named quantities, in words shorter than Kubernetes' own.
pub(crate) fn quantities_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "maxProperties": 8,
        "additionalProperties": {
            "x-kubernetes-int-or-string": true,
            "pattern": r"^([0-9]+|[0-9]*\.[0-9]+)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$",
        },
    })
}

/// The schema of a size such as `8Gi`.
///
/// Kubernetes' own Quantity has no pattern, so a typing error would be found by the operator only,
/// long after the apply that could have refused it.
pub(crate) fn size_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "x-kubernetes-int-or-string": true,
        "pattern": r"^[1-9][0-9]{0,15}(\.[0-9]{1,3})?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$",
    })
}
