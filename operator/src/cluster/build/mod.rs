//! Pure builders: `Desired` in, Kubernetes objects out. One file per kind.
//!
//! Promises: the same input gives the same bytes, since a hash of them decides whether a live object
//! is up to date; no builder reads a clock or the network.

pub mod pod;
pub mod service;
pub mod volume;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::validate::Desired;

/// Field manager of every write, and `managed-by` of every object.
pub const MANAGER: &str = "ballast-operator";
/// Hash of the object as built; a live object with another one is out of date.
pub const HASH_ANNOTATION: &str = "ballast.dev/spec-hash";
/// Name of the StoreCluster.
pub const CLUSTER_LABEL: &str = "ballast.dev/cluster";
/// UID of the StoreCluster: names come back, UIDs do not.
pub const CLUSTER_UID_LABEL: &str = "ballast.dev/cluster-uid";
/// What a pod is for: `store` or `backup`.
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";

/// Labels by which a member of the store is found.
pub fn store_selector(name: &str) -> BTreeMap<String, String> {
    [
        ("app.kubernetes.io/name", "ballast"),
        ("app.kubernetes.io/instance", name),
        (COMPONENT_LABEL, "store"),
    ]
    .map(|(k, v)| (k.to_owned(), v.to_owned()))
    .into()
}

/// Labels of every object of a store.
pub fn store_labels(desired: &Desired) -> BTreeMap<String, String> {
    let mut labels = store_selector(&desired.name);
    labels.insert(
        "app.kubernetes.io/managed-by".to_owned(),
        MANAGER.to_owned(),
    );
    labels.insert(CLUSTER_LABEL.to_owned(), desired.name.clone());
    labels.insert(CLUSTER_UID_LABEL.to_owned(), desired.uid.clone());
    labels
}

/// Metadata of an object that goes when the StoreCluster goes.
fn owned(desired: &Desired, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: Some(desired.namespace.clone()),
        labels: Some(store_labels(desired)),
        owner_references: Some(vec![desired.owner.clone()]),
        ..ObjectMeta::default()
    }
}

/// A short hash of what was built, stable between runs.
pub fn hash(object: &impl Serialize) -> String {
    let json = serde_json::to_vec(object).expect("a built object is plain data");
    hex(&Sha256::digest(json)[..8])
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
            let _ = write!(out, "{byte:02x}");
            out
        })
}

/// Stamps an object with its hash.
fn stamp(meta: &mut ObjectMeta, hash: String) {
    meta.annotations
        .get_or_insert_default()
        .insert(HASH_ANNOTATION.to_owned(), hash);
}
