//! What the operator's tests share: a StoreCluster of the sample's shape, and the world around it
//! when all is well. Each test says only what is different.

pub(crate) mod fake_kube;

use ballast_operator::cluster::build::pod::{Start, build_pod};
use ballast_operator::cluster::build::service::{build_client_service, build_peer_service};
use ballast_operator::cluster::build::volume::{build_backup_volume, build_data_volume};
use ballast_operator::cluster::observe::{Observed, StoreView};
use ballast_operator::cluster::validate::{Desired, Settings, validate};
use ballast_operator::crd::{StoreBackup, StoreCluster, StoreClusterStatus};
use ballast_operator::store_client::{MemberReport, StoreReport};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

/// When the cluster of these tests was created: 2026-03-01T00:00:00Z.
pub(crate) const CREATED: i64 = 1_772_323_200;
/// A moment between two backups.
pub(crate) const NOW: i64 = CREATED + 90;
pub(crate) const UID: &str = "11111111-2222-3333-4444-555555555555";

pub(crate) fn settings() -> Settings {
    Settings {
        store_repository: "ballast".to_owned(),
        agent_image: "ballast-operator:0.1.0".to_owned(),
        agent_pull_policy: "IfNotPresent".to_owned(),
    }
}

/// The sample, with `change` merged into its spec.
pub(crate) fn cluster_with(change: Value) -> StoreCluster {
    let mut object = json!({
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "StoreCluster",
        "metadata": {
            "name": "sample",
            "namespace": "default",
            "uid": UID,
            "generation": 1,
            "creationTimestamp": "2026-03-01T00:00:00Z",
        },
        "spec": {
            "version": "0.1.0",
            "storage": { "size": "4Gi" },
            "quota": "1Gi",
            "backup": {
                "schedule": "@every 60s",
                "retention": { "count": 2 },
                "storage": { "pvc": { "size": "2Gi" } },
            },
        },
    });
    merge(&mut object["spec"], change);
    serde_json::from_value(object).unwrap()
}

pub(crate) fn cluster() -> StoreCluster {
    cluster_with(json!({}))
}

pub(crate) fn desired_with(change: Value) -> Desired {
    validate(&cluster_with(change), &settings()).unwrap()
}

pub(crate) fn desired() -> Desired {
    desired_with(json!({}))
}

/// A JSON merge patch: null removes.
pub(crate) fn merge(into: &mut Value, change: Value) {
    match change {
        Value::Object(map) => {
            if !into.is_object() {
                *into = json!({});
            }
            for (key, value) in map {
                if value.is_null() {
                    into.as_object_mut().unwrap().remove(&key);
                } else {
                    merge(&mut into[key], value);
                }
            }
        }
        other => *into = other,
    }
}

/// A store that needs nothing: 200 MiB, nearly all of it live.
pub(crate) fn report() -> StoreReport {
    StoreReport {
        cluster_id: 0xabc,
        member_id: 0x1,
        leader_id: 0x1,
        version: "3.7.3".to_owned(),
        revision: 1000,
        db_size: 200 << 20,
        db_size_in_use: 190 << 20,
        quota: 1 << 30,
        members: vec![MemberReport {
            id: 0x1,
            name: "sample-0".to_owned(),
            learner: false,
        }],
        no_space: false,
        corrupt: false,
    }
}

/// A running, ready pod of today's spec.
pub(crate) fn ready_pod(desired: &Desired) -> Pod {
    let mut pod = build_pod(desired, &Start::Existing);
    pod.status = Some(
        serde_json::from_value(json!({
            "phase": "Running",
            "podIP": "10.0.0.7",
            "conditions": [{ "type": "Ready", "status": "True" }],
        }))
        .unwrap(),
    );
    pod
}

/// Everything as it should be, with one backup behind it.
pub(crate) fn healthy(desired: &Desired) -> Observed {
    let backup = desired.backup.as_ref();
    Observed {
        now: NOW,
        client_service: Some(build_client_service(desired)),
        peer_service: Some(build_peer_service(desired)),
        volume: Some(build_data_volume(desired)),
        backup_volume: backup.and_then(|b| build_backup_volume(desired, b)),
        pod: Some(ready_pod(desired)),
        store: StoreView::Up(report()),
        backups: Vec::new(),
        restore_backup: None,
        history: StoreClusterStatus {
            cluster_id: Some("abc".to_owned()),
            last_schedule_time: Some(ballast_operator::clock::at(CREATED + 60)),
            ..StoreClusterStatus::default()
        },
    }
}

/// A scheduled backup of the sample. `succeeded`: Some(true), Some(false), None while running.
pub(crate) fn backup(name: &str, uid: &str, succeeded: Option<bool>) -> StoreBackup {
    let (status, reason) = match succeeded {
        Some(true) => ("True", "Completed"),
        Some(false) => ("False", "Failed"),
        None => ("Unknown", "Running"),
    };
    serde_json::from_value(json!({
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "StoreBackup",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": format!("backup-uid-of-{name}"),
            "creationTimestamp": "2026-03-01T00:01:00Z",
            "labels": { "ballast.dev/scheduled": "true", "ballast.dev/cluster-uid": uid },
        },
        "spec": { "clusterRef": { "name": "sample" } },
        "status": {
            "clusterUID": uid,
            "revision": 1000,
            "sha256": "00ff",
            "startTime": "2026-03-01T00:01:00Z",
            "completionTime": "2026-03-01T00:01:02Z",
            "location": { "claimName": "sample-backup", "path": format!("{uid}/{name}.db") },
            "conditions": [{
                "type": "Succeeded",
                "status": status,
                "reason": reason,
                "message": "as the test wants it",
                "lastTransitionTime": "2026-03-01T00:01:02Z",
            }],
        },
    }))
    .unwrap()
}
