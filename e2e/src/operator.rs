//! The operator on a cluster of this harness: its images, its chart, the sample StoreCluster, and a
//! second control plane on the store the operator makes of it.
//!
//! Each step does nothing when its result is already there, so `up` may be called again.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt as _};
use serde_json::Value;

use crate::cluster::{Cluster, api_server_name};
use crate::images;
use crate::progress::Progress;
use crate::wait::wait_for;
use crate::{addons, paths, tools};

/// The number of the API server that runs on the sample's store.
pub const SECOND: u16 = 1;
/// Where the operator is installed.
pub const NAMESPACE: &str = "ballast-system";
const CHART: &str = "charts/ballast-operator";
const SAMPLE: &str = "docs/samples/storecluster.yaml";

/// The sample StoreCluster, as it runs.
pub struct Sample {
    pub name: String,
    /// Its client URL inside the cluster's network namespace.
    pub url: String,
}

/// Installs the operator and everything that follows from it.
pub async fn install(cluster: &Cluster, progress: &Progress) -> Result<Sample> {
    progress.stage("Operator");
    install_chart(cluster, progress)?;
    cluster
        .wait_available(NAMESPACE, "ballast-operator", Duration::from_mins(2))
        .await?;

    progress.stage("Sample StoreCluster");
    let manifest = fs::read_to_string(paths::repository().join(SAMPLE)).context(SAMPLE)?;
    addons::apply(&cluster.kubeconfig(0), &manifest)?;
    let manifest: Value = serde_yaml_ng::from_str(&manifest).context(SAMPLE)?;
    let name = manifest["metadata"]["name"]
        .as_str()
        .context("the sample has a name")?
        .to_owned();
    let client = cluster.client(0).await?;
    wait_cluster_ready(&client, &name, Duration::from_mins(3)).await?;

    progress.stage("Its first backup");
    wait_backup(&client, &name, Duration::from_mins(4)).await?;

    progress.stage("A second kube-apiserver on it");
    let url = service_url(&client, &name).await?;
    start_second(cluster, &url).await?;
    Ok(Sample { name, url })
}

/// Brings the images to the node and installs the chart. Also what tests of the operator call.
pub fn install_chart(cluster: &Cluster, progress: &Progress) -> Result<()> {
    tools::ensure(&["helm"], progress)?;
    for archive in images::products()? {
        cluster.node()?.import(&archive)?;
    }
    let chart = paths::repository().join(CHART);
    let tag = format!("image.tag={}", images::RELEASE);
    addons::helm(
        &cluster.kubeconfig(0),
        &[
            "upgrade",
            "--install",
            "ballast-operator",
            chart.to_str().context("the clone's path is not UTF-8")?,
            "--namespace",
            NAMESPACE,
            "--create-namespace",
            "--set",
            &tag,
        ],
    )
    .map(|_| ())
}

/// The API of one of the operator's kinds: `StoreCluster` or `StoreBackup`.
pub fn api(client: Client, kind: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("ballast.dev", "v1alpha1", kind);
    Api::namespaced_with(client, "default", &ApiResource::from_gvk(&kind))
}

/// Whether a condition of the object has this status.
pub fn condition(object: &DynamicObject, kind: &str, status: &str) -> bool {
    let conditions = object.data["status"]["conditions"].as_array();
    conditions
        .into_iter()
        .flatten()
        .any(|c| c["type"] == kind && c["status"] == status)
}

/// Waits until a StoreCluster is Ready; the error tells its status.
pub async fn wait_cluster_ready(client: &Client, name: &str, deadline: Duration) -> Result<()> {
    let clusters = api(client.clone(), "StoreCluster");
    wait_for(
        &format!("StoreCluster {name} is Ready"),
        deadline,
        || async {
            let object = clusters.get(name).await?;
            anyhow::ensure!(
                condition(&object, "Ready", "True"),
                "{}",
                object.data["status"]
            );
            Ok(Some(()))
        },
    )
    .await
}

/// Waits until a StoreCluster has a backup that succeeded, and returns the backup's name.
pub async fn wait_backup(client: &Client, cluster: &str, deadline: Duration) -> Result<String> {
    let backups = api(client.clone(), "StoreBackup");
    wait_for(
        &format!("StoreCluster {cluster} has a backup"),
        deadline,
        || async {
            let listed = backups.list(&ListParams::default()).await?;
            let mut ours = listed
                .items
                .iter()
                .filter(|backup| backup.data["spec"]["clusterRef"]["name"] == cluster)
                .filter(|backup| condition(backup, "Succeeded", "True"));
            let found = ours.next().map(kube::ResourceExt::name_any);
            anyhow::ensure!(
                found.is_some(),
                "the backups there are: {:?}",
                listed
                    .items
                    .iter()
                    .map(|b| (b.name_any(), &b.data["status"]))
                    .collect::<Vec<_>>()
            );
            Ok(found)
        },
    )
    .await
}

/// The store's client Service by address: a program outside of pods does not use cluster names.
pub async fn service_url(client: &Client, cluster: &str) -> Result<String> {
    use k8s_openapi::api::core::v1::Service;
    let services: Api<Service> = Api::namespaced(client.clone(), "default");
    let service = services.get(&format!("{cluster}-client")).await?;
    let address = service
        .spec
        .and_then(|spec| spec.cluster_ip)
        .context("the Service has an address")?;
    Ok(format!("http://{address}:2379"))
}

/// Starts an API server on the sample's store, unless it runs, and proves that it answers.
async fn start_second(cluster: &Cluster, store: &str) -> Result<()> {
    let name = api_server_name(SECOND);
    let process = match cluster.process(&name) {
        Ok(process) if process.alive() => process,
        _ => cluster.start_api_server(&name, SECOND, store)?,
    };
    cluster.wait_ready(SECOND, &process).await?;
    let second = cluster.kubeconfig(SECOND);
    wait_for(
        "the second API server answers",
        Duration::from_mins(1),
        || async {
            let namespaces = addons::kubectl(&second, &["get", "namespaces", "-o", "name"], "")?;
            Ok(namespaces.contains("namespace/default").then_some(()))
        },
    )
    .await
}
