//! A provisioner of node-local volumes: the hidden subcommand `provision`.
//!
//! Each claim gets a folder of the node as a `local` volume bound to it. Kubernetes' own host-path
//! provisioner would make folders that only root may write to, and volumes without a node.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, ResourceExt as _};
use serde_json::json;

/// The name under which StorageClasses call this provisioner.
pub const PROVISIONER: &str = "ballast.dev/e2e-local";
const STEP: Duration = Duration::from_millis(500);

/// Serves claims until it is killed. Volumes lie below `folder`, which the node sees at the same path.
pub async fn run(kubeconfig: &Path, class: &str, folder: &Path) -> Result<()> {
    let config = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
    let client = Client::try_from(config)?;
    loop {
        // Asking twice a second is simpler than watching, and cannot miss anything. The API may be
        // away for a while: a test may have killed it.
        if let Err(error) = pass(&client, class, folder).await {
            tracing::warn!("{error:#}");
        }
        tokio::time::sleep(STEP).await;
    }
}

async fn pass(client: &Client, class: &str, folder: &Path) -> Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::all(client.clone());
    for claim in claims.list(&ListParams::default()).await? {
        let spec = claim.spec.clone().unwrap_or_default();
        let waiting =
            spec.volume_name.is_none() && spec.storage_class_name.as_deref() == Some(class);
        if let (true, Some(node)) = (waiting, selected_node(&claim)) {
            provision(client, class, folder, &claim, &node)
                .await
                .context(claim.name_any())?;
        }
    }
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    for volume in volumes.list(&ListParams::default()).await? {
        let spec = volume.spec.clone().unwrap_or_default();
        let released = volume
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref())
            == Some("Released");
        let ours = spec.storage_class_name.as_deref() == Some(class);
        if ours && released && spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete") {
            let path = spec.local.context("our volumes are local")?.path;
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error.into());
                }
                _ => {
                    volumes
                        .delete(&volume.name_any(), &DeleteParams::default())
                        .await?
                }
            };
        }
    }
    Ok(())
}

/// The node the scheduler chose for the first pod that uses the claim.
fn selected_node(claim: &PersistentVolumeClaim) -> Option<String> {
    claim
        .annotations()
        .get("volume.kubernetes.io/selected-node")
        .cloned()
}

async fn provision(
    client: &Client,
    class: &str,
    folder: &Path,
    claim: &PersistentVolumeClaim,
    node: &str,
) -> Result<()> {
    let uid = claim.uid().context("a claim has a uid")?;
    let name = format!("pvc-{uid}");
    let path: PathBuf = folder.join(&name);
    fs::create_dir_all(&path)?;
    let spec = claim.spec.clone().unwrap_or_default();
    let size = spec.resources.and_then(|resources| resources.requests);
    let size = size
        .and_then(|requests| requests.get("storage").cloned())
        .context("a size")?;
    let volume: PersistentVolume = serde_json::from_value(json!({
        "metadata": {
            "name": name,
            "annotations": { "pv.kubernetes.io/provisioned-by": PROVISIONER },
        },
        "spec": {
            "capacity": { "storage": size },
            "accessModes": spec.access_modes.unwrap_or_default(),
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": class,
            "local": { "path": path },
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": claim.namespace(),
                "name": claim.name_any(),
                "uid": uid,
            },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [
                { "key": "kubernetes.io/hostname", "operator": "In", "values": [node] },
            ] }] } },
        },
    }))?;
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    match volumes.create(&PostParams::default(), &volume).await {
        // Made in an earlier pass, and not bound yet.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        result => result.map(|_| ()).context("the volume"),
    }
}
