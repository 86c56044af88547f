//! The pod of a member: etcd's flags, probes, and the two init containers of a restore.
//!
//! The hash that decides whether a running pod is out of date leaves the bootstrap out: what a pod
//! did once, at birth, is no reason to restart it when it is done.
//!
//! An image of the store holds one static binary and no shell, so what a restore needs beside
//! `ballast snapshot restore` (look first, write beside, rename) is done by an agent: the operator's
//! own binary, copied into an empty volume by the first init container and run by the second.

use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, EmptyDirVolumeSource, HTTPGetAction,
    PersistentVolumeClaimVolumeSource, Pod, PodSecurityContext, PodSpec, Probe, SeccompProfile,
    SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::service::{CLIENT_PORT, PEER_PORT};
use super::{hash, owned, stamp};
use crate::cluster::validate::{Desired, Settings};
use crate::crd::PodSecurity;

/// Where the store's image holds its binary.
pub const STORE_BINARY: &str = "/usr/local/bin/ballast";
/// Where the operator's image holds its binary.
pub const OPERATOR_BINARY: &str = "/usr/local/bin/ballast-operator";
/// Where the agent is copied to.
pub const AGENT_BINARY: &str = "/agent/ballast-agent";
/// Where a backup claim is mounted.
pub const BACKUP_MOUNT: &str = "/backup";
const DATA_MOUNT: &str = "/var/lib/ballast";
const DATA_DIR: &str = "/var/lib/ballast/data";

/// How a pod begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// The store never ran: an empty volume becomes a new store.
    New,
    /// The store never ran: an empty volume is filled from a backup.
    Restore(RestoreSource),
    /// The store ran before: an empty volume is an error, never a new store.
    Existing,
}

/// A backup that is there to be restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreSource {
    pub backup_name: String,
    pub claim: String,
    pub path: String,
    pub sha256: String,
    pub revision: i64,
    pub bump_revision: i64,
}

/// The hash a running pod must carry to be up to date.
pub fn pod_hash(desired: &Desired) -> String {
    hash(&unstamped(desired, &Start::Existing))
}

/// The pod of the one member.
pub fn build_pod(desired: &Desired, start: &Start) -> Pod {
    let mut pod = unstamped(desired, start);
    stamp(&mut pod.metadata, pod_hash(desired));
    pod
}

fn unstamped(desired: &Desired, start: &Start) -> Pod {
    let (init_containers, volumes) = match start {
        Start::Restore(source) => (
            Some(restore_containers(desired, source)),
            restore_volumes(source),
        ),
        Start::New | Start::Existing => (None, Vec::new()),
    };
    let mut all_volumes = vec![claim_volume("data", &desired.volume_name(), false)];
    all_volumes.extend(volumes);
    Pod {
        metadata: owned(desired, desired.member_name()),
        spec: Some(PodSpec {
            hostname: Some(desired.member_name()),
            subdomain: Some(desired.peer_service()),
            init_containers,
            containers: vec![store_container(desired, start)],
            volumes: Some(all_volumes),
            security_context: Some(pod_security(&desired.security)),
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            termination_grace_period_seconds: Some(30),
            restart_policy: Some("Always".to_owned()),
            ..PodSpec::default()
        }),
        status: None,
    }
}

fn store_container(desired: &Desired, start: &Start) -> Container {
    Container {
        name: "store".to_owned(),
        image: Some(desired.image.clone()),
        image_pull_policy: Some(desired.pull_policy.to_owned()),
        command: Some(vec![STORE_BINARY.to_owned()]),
        args: Some(store_args(desired, start)),
        ports: Some(vec![port("client", CLIENT_PORT), port("peer", PEER_PORT)]),
        // Recovery of a large store may take long; only a store that has started can be hung.
        startup_probe: Some(probe("/livez", 2, 900)),
        liveness_probe: Some(probe("/livez", 10, 6)),
        readiness_probe: Some(probe("/readyz", 3, 3)),
        resources: desired.resources.clone(),
        security_context: Some(container_security()),
        // The last words of a store that refuses its data directory are what a person needs.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(vec![mount("data", DATA_MOUNT, false)]),
        ..Container::default()
    }
}

/// etcd's flags. Equals signs keep a value that begins with a dash a value.
fn store_args(desired: &Desired, start: &Start) -> Vec<String> {
    let state = match start {
        Start::New | Start::Restore(_) => "new",
        Start::Existing => "existing",
    };
    let mut args = vec![
        format!("--name={}", desired.member_name()),
        format!("--data-dir={DATA_DIR}"),
        format!("--listen-client-urls=http://0.0.0.0:{CLIENT_PORT}"),
        format!(
            "--advertise-client-urls={}",
            member_url(desired, CLIENT_PORT)
        ),
        format!("--listen-peer-urls=http://0.0.0.0:{PEER_PORT}"),
        format!("--initial-cluster-state={state}"),
    ];
    args.extend(cluster_args(desired));
    args.push(format!("--quota-backend-bytes={}", desired.quota_bytes));
    // The rule is ours to follow: we know of backups, and tell in status and events. (Near its quota a member does it by itself.)
    args.push("--auto-defrag=off".to_owned());
    if let Some(compaction) = &desired.compaction {
        args.push(format!(
            "--auto-compaction-mode={}",
            compaction.mode.as_flag()
        ));
        args.push(format!(
            "--auto-compaction-retention={}",
            compaction.retention
        ));
    }
    args
}

/// The flags that server and restore must agree on.
fn cluster_args(desired: &Desired) -> [String; 3] {
    let peer = member_url(desired, PEER_PORT);
    [
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster={}={peer}", desired.member_name()),
        format!("--initial-cluster-token={}", desired.cluster_token()),
    ]
}

fn member_url(desired: &Desired, port: i32) -> String {
    let (pod, service, namespace) = (
        desired.member_name(),
        desired.peer_service(),
        &desired.namespace,
    );
    format!("http://{pod}.{service}.{namespace}.svc:{port}")
}

fn restore_containers(desired: &Desired, source: &RestoreSource) -> Vec<Container> {
    let mut args = vec![
        "agent".to_owned(),
        "restore".to_owned(),
        format!("--ballast={STORE_BINARY}"),
        format!("--snapshot={BACKUP_MOUNT}/{}", source.path),
        format!("--sha256={}", source.sha256),
        format!("--data-dir={DATA_DIR}"),
        "--".to_owned(),
        format!("--name={}", desired.member_name()),
        format!("--bump-revision={}", source.bump_revision),
        "--mark-compacted".to_owned(),
    ];
    args.extend(cluster_args(desired));
    vec![
        agent_container(&desired.settings),
        Container {
            name: "restore".to_owned(),
            image: Some(desired.image.clone()),
            image_pull_policy: Some(desired.pull_policy.to_owned()),
            command: Some(vec![AGENT_BINARY.to_owned()]),
            args: Some(args),
            security_context: Some(container_security()),
            termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
            volume_mounts: Some(vec![
                mount("data", DATA_MOUNT, false),
                mount("backup", BACKUP_MOUNT, true),
                mount("agent", "/agent", true),
            ]),
            ..Container::default()
        },
    ]
}

fn restore_volumes(source: &RestoreSource) -> Vec<Volume> {
    vec![claim_volume("backup", &source.claim, true), agent_volume()]
}

/// Copies the agent to where a container of another image can run it.
pub fn agent_container(settings: &Settings) -> Container {
    Container {
        name: "agent".to_owned(),
        image: Some(settings.agent_image.clone()),
        image_pull_policy: Some(settings.agent_pull_policy.clone()),
        command: Some(vec![OPERATOR_BINARY.to_owned()]),
        args: Some(vec![
            "agent".to_owned(),
            "install".to_owned(),
            format!("--to={AGENT_BINARY}"),
        ]),
        security_context: Some(container_security()),
        volume_mounts: Some(vec![mount("agent", "/agent", false)]),
        ..Container::default()
    }
}

/// The empty volume the agent is copied to.
pub fn agent_volume() -> Volume {
    Volume {
        name: "agent".to_owned(),
        empty_dir: Some(EmptyDirVolumeSource::default()),
        ..Volume::default()
    }
}

/// A claim as a volume.
pub fn claim_volume(name: &str, claim: &str, read_only: bool) -> Volume {
    Volume {
        name: name.to_owned(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: claim.to_owned(),
            read_only: read_only.then_some(true),
        }),
        ..Volume::default()
    }
}

/// A volume in a container.
pub fn mount(name: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

/// What the "restricted" pod security standard asks for.
pub fn pod_security(security: &PodSecurity) -> PodSecurityContext {
    PodSecurityContext {
        run_as_non_root: Some(true),
        run_as_user: Some(security.run_as_user),
        run_as_group: Some(security.fs_group),
        fs_group: Some(security.fs_group),
        fs_group_change_policy: Some("OnRootMismatch".to_owned()),
        seccomp_profile: Some(SeccompProfile {
            type_: "RuntimeDefault".to_owned(),
            localhost_profile: None,
        }),
        ..PodSecurityContext::default()
    }
}

/// The container's half of the "restricted" standard.
pub fn container_security() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        read_only_root_filesystem: Some(true),
        capabilities: Some(Capabilities {
            drop: Some(vec!["ALL".to_owned()]),
            add: None,
        }),
        ..SecurityContext::default()
    }
}

fn port(name: &str, number: i32) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: number,
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

fn probe(path: &str, period_secs: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::Int(CLIENT_PORT),
            scheme: Some("HTTP".to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period_secs),
        timeout_seconds: Some(5),
        failure_threshold: Some(failures),
        ..Probe::default()
    }
}
