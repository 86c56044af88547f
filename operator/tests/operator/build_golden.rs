//! Built objects against golden YAML: what a reviewer sees when a builder changes.
//! `UPDATE=1 cargo test -p ballast-operator` rewrites the files.

use std::path::PathBuf;

use crate::support::{CREATED, NOW, UID, backup, cluster, desired, desired_with, settings};
use ballast_operator::backup::build::{build_backup_pod, build_remove_pod};
use ballast_operator::backup::plan::View;
use ballast_operator::cluster::apply::build_scheduled_backup;
use ballast_operator::cluster::build::pod::{RestoreSource, Start, build_pod, pod_hash};
use ballast_operator::cluster::build::service::{build_client_service, build_peer_service};
use ballast_operator::cluster::build::volume::{build_backup_volume, build_data_volume};
use ballast_operator::crd::PodSecurity;
use serde::Serialize;
use serde_json::json;

fn golden(name: &str, object: &impl Serialize) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name);
    let built = serde_yaml_ng::to_string(object).unwrap();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &built).unwrap();
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(built, wanted, "{name} changed; UPDATE=1 rewrites it");
}

fn restore() -> Start {
    Start::Restore(RestoreSource {
        backup_name: "before".to_owned(),
        claim: "old-backup".to_owned(),
        path: "uid-of-old/before-1234.db".to_owned(),
        sha256: "00ff".to_owned(),
        revision: 1000,
        bump_revision: 1_000_000_000,
    })
}

#[test]
fn services_and_volumes_are_as_written_down() {
    let d = desired();
    golden("client-service.yaml", &build_client_service(&d));
    golden("peer-service.yaml", &build_peer_service(&d));
    golden("data-volume.yaml", &build_data_volume(&d));
    golden(
        "backup-volume.yaml",
        &build_backup_volume(&d, d.backup.as_ref().unwrap()),
    );
}

#[test]
fn pods_of_a_store_are_as_written_down() {
    golden("pod-new.yaml", &build_pod(&desired(), &Start::New));
    let d = desired_with(json!({
        "image": "registry.example/ballast:1",
        "imagePullPolicy": "Always",
        "resources": { "requests": { "cpu": "100m" }, "limits": { "memory": "512Mi" } },
        "compaction": { "mode": "Periodic", "retention": "1h" },
        "security": { "runAsUser": 1000, "fsGroup": 2000 },
    }));
    golden("pod-restore.yaml", &build_pod(&d, &restore()));
}

#[test]
fn pods_of_a_backup_are_as_written_down() {
    let backup = backup("sample-20260301000100", UID, None);
    let location = backup.status.as_ref().unwrap().location.clone().unwrap();
    let view = View {
        now: NOW,
        namespace: "default".to_owned(),
        backup: backup.clone(),
        cluster: Some(cluster()),
        pod: None,
        others: Vec::new(),
    };
    golden("backup-pod.yaml", &build_backup_pod(&view, &settings()));
    let remove = build_remove_pod(&backup, &location, &PodSecurity::default(), &settings());
    golden("remove-pod.yaml", &remove);
    let due = build_scheduled_backup(&desired(), "sample-20260301000100", CREATED + 60);
    golden("scheduled-backup.yaml", &due);
}

#[test]
fn how_a_pod_began_is_no_reason_to_replace_it() {
    let d = desired();
    let hash = |start: &Start| build_pod(&d, start).metadata.annotations.unwrap();
    assert_eq!(hash(&Start::New), hash(&Start::Existing));
    assert_eq!(hash(&restore()), hash(&Start::Existing));
}

#[test]
fn what_a_running_pod_cannot_take_over_changes_its_hash() {
    let before = pod_hash(&desired());
    for change in [
        json!({ "quota": "1500Mi" }),
        json!({ "version": "0.2.0" }),
        json!({ "compaction": { "mode": "Revision", "retention": "1000" } }),
        json!({ "resources": { "limits": { "memory": "1Gi" } } }),
    ] {
        assert_ne!(pod_hash(&desired_with(change.clone())), before, "{change}");
    }
    for change in [
        json!({ "backup": { "schedule": "@hourly" } }),
        json!({ "defragmentation": { "minSize": "1Gi" } }),
        json!({ "storage": { "size": "8Gi" } }),
    ] {
        assert_eq!(pod_hash(&desired_with(change.clone())), before, "{change}");
    }
}

#[test]
fn a_retained_volume_has_no_owner_and_backups_never_have_one() {
    let owners = |volume: k8s_openapi::api::core::v1::PersistentVolumeClaim| {
        volume.metadata.owner_references.unwrap_or_default().len()
    };
    let retain = desired_with(json!({ "storage": { "whenDeleted": "Retain" } }));
    assert_eq!(owners(build_data_volume(&desired())), 1);
    assert_eq!(owners(build_data_volume(&retain)), 0);
    let backup = desired().backup.unwrap();
    assert_eq!(owners(build_backup_volume(&desired(), &backup).unwrap()), 0);
}
