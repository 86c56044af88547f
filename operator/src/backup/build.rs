//! The pods of a StoreBackup: one that writes the file, one that removes it. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};

use super::plan::View;
use crate::cluster::build::pod::{
    AGENT_BINARY, BACKUP_MOUNT, OPERATOR_BINARY, STORE_BINARY, agent_container, agent_volume,
    claim_volume, container_security, mount, pod_security,
};
use crate::cluster::build::{CLUSTER_LABEL, CLUSTER_UID_LABEL, COMPONENT_LABEL, MANAGER};
use crate::cluster::validate::{Settings, validate};
use crate::crd::{BackupLocation, PodSecurity, StoreBackup};

/// The pod that writes the file.
pub fn run_pod_name(backup: &str) -> String {
    format!("{backup}-run")
}

/// The pod that removes it.
pub fn remove_pod_name(backup: &str) -> String {
    format!("{backup}-remove")
}

/// Writes one backup: the agent runs the store's own `snapshot save` and checks what came.
pub fn build_backup_pod(view: &View, settings: &Settings) -> Option<Pod> {
    let desired = validate(view.cluster.as_ref()?, settings).ok()?;
    let status = view.backup.status.as_ref()?;
    let location = status.location.as_ref()?;
    let name = view.backup.name_any();
    let mut metadata = metadata(
        &view.backup,
        run_pod_name(&name),
        status.cluster_uid.clone(),
    );
    metadata.owner_references = Some(vec![view.backup.controller_owner_ref(&())?]);
    let backup = Container {
        name: "backup".to_owned(),
        image: Some(desired.image.clone()),
        image_pull_policy: Some(desired.pull_policy.to_owned()),
        command: Some(vec![AGENT_BINARY.to_owned()]),
        args: Some(vec![
            "agent".to_owned(),
            "backup".to_owned(),
            format!("--ballast={STORE_BINARY}"),
            format!("--endpoint={}", desired.endpoint()),
            format!("--file={BACKUP_MOUNT}/{}", location.path),
        ]),
        security_context: Some(container_security()),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(vec![
            mount("backup", BACKUP_MOUNT, false),
            mount("agent", "/agent", true),
        ]),
        ..Container::default()
    };
    let volumes = vec![
        claim_volume("backup", &location.claim_name, false),
        agent_volume(),
    ];
    Some(Pod {
        metadata,
        spec: Some(PodSpec {
            init_containers: Some(vec![agent_container(settings)]),
            containers: vec![backup],
            volumes: Some(volumes),
            active_deadline_seconds: desired.backup.as_ref().map(|b| b.deadline_secs),
            ..one_shot(&desired.security)
        }),
        status: None,
    })
}

/// Removes one file.
///
/// The pod has no owner: its StoreBackup is being deleted, and a foreground deletion would take the
/// pod away before it did its work.
pub fn build_remove_pod(
    backup: &StoreBackup,
    location: &BackupLocation,
    security: &PodSecurity,
    settings: &Settings,
) -> Pod {
    let container = Container {
        name: "remove".to_owned(),
        image: Some(settings.agent_image.clone()),
        image_pull_policy: Some(settings.agent_pull_policy.clone()),
        command: Some(vec![OPERATOR_BINARY.to_owned()]),
        args: Some(vec![
            "agent".to_owned(),
            "remove".to_owned(),
            format!("--file={BACKUP_MOUNT}/{}", location.path),
        ]),
        security_context: Some(container_security()),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(vec![mount("backup", BACKUP_MOUNT, false)]),
        ..Container::default()
    };
    Pod {
        // Not the cluster's UID: removal goes on when the StoreCluster is deleted.
        metadata: metadata(backup, remove_pod_name(&backup.name_any()), None),
        spec: Some(PodSpec {
            containers: vec![container],
            volumes: Some(vec![claim_volume("backup", &location.claim_name, false)]),
            active_deadline_seconds: Some(120),
            ..one_shot(security)
        }),
        status: None,
    }
}

fn one_shot(security: &PodSecurity) -> PodSpec {
    PodSpec {
        restart_policy: Some("Never".to_owned()),
        security_context: Some(pod_security(security)),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        termination_grace_period_seconds: Some(5),
        ..PodSpec::default()
    }
}

fn metadata(backup: &StoreBackup, name: String, cluster_uid: Option<String>) -> ObjectMeta {
    let mut labels: BTreeMap<String, String> = [
        ("app.kubernetes.io/name", "ballast"),
        ("app.kubernetes.io/managed-by", MANAGER),
        (COMPONENT_LABEL, "backup"),
        (CLUSTER_LABEL, &backup.spec.cluster_ref.name),
    ]
    .map(|(k, v)| (k.to_owned(), v.to_owned()))
    .into();
    if let Some(uid) = cluster_uid {
        labels.insert(CLUSTER_UID_LABEL.to_owned(), uid);
    }
    ObjectMeta {
        name: Some(name),
        namespace: backup.namespace(),
        labels: Some(labels),
        ..ObjectMeta::default()
    }
}
