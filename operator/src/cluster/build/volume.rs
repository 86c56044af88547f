//! The volume of a member, and the one for backups.
//!
//! Who owns a volume is policy: with `whenDeleted: Delete` the data goes with the StoreCluster, with
//! Retain it has no owner and a StoreCluster of the same name finds it again. Backups are never
//! owned: they are what is left when everything else is gone.

use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimSpec, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{COMPONENT_LABEL, hash, owned, stamp};
use crate::cluster::validate::{Desired, DesiredBackup};
use crate::crd::WhenDeleted;

/// The data of the one member.
pub fn build_data_volume(desired: &Desired) -> PersistentVolumeClaim {
    let mut metadata = owned(desired, desired.volume_name());
    if desired.storage.when_deleted == WhenDeleted::Retain {
        metadata.owner_references = None;
    }
    stamped(PersistentVolumeClaim {
        metadata,
        spec: Some(claim(
            &desired.storage.size,
            desired.storage.storage_class_name.clone(),
        )),
        status: None,
    })
}

/// The claim for backups, when it is the operator's to make.
pub fn build_backup_volume(
    desired: &Desired,
    backup: &DesiredBackup,
) -> Option<PersistentVolumeClaim> {
    let target = backup.make.as_ref()?;
    let mut metadata = owned(desired, backup.claim.clone());
    metadata.owner_references = None;
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(COMPONENT_LABEL.to_owned(), "backup".to_owned());
    Some(stamped(PersistentVolumeClaim {
        metadata,
        spec: Some(claim(
            target.size.as_ref()?,
            target.storage_class_name.clone(),
        )),
        status: None,
    }))
}

fn claim(size: &Quantity, class: Option<String>) -> PersistentVolumeClaimSpec {
    PersistentVolumeClaimSpec {
        access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
        storage_class_name: class,
        resources: Some(VolumeResourceRequirements {
            requests: Some([("storage".to_owned(), size.clone())].into()),
            limits: None,
        }),
        ..PersistentVolumeClaimSpec::default()
    }
}

fn stamped(mut volume: PersistentVolumeClaim) -> PersistentVolumeClaim {
    let hash = hash(&volume);
    stamp(&mut volume.metadata, hash);
    volume
}
