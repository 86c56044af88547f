//! Pods, a Service and names, on a cluster whose control plane lies in the store under test.
//!
//! What passes here went through everything: controllers, scheduler, kubelet, kube-proxy and
//! CoreDNS all read and watch the store. Budget: five minutes.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_e2e::addons;
use ballast_e2e::cluster::{Cluster, Guard, Options};
use ballast_e2e::control_plane::http_get;
use ballast_e2e::progress::Progress;
use ballast_e2e::wait::wait_for;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::api::{Api, DeleteParams, ListParams};

const BUDGET: Duration = Duration::from_mins(5);

const WORKLOAD: &str = r"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: web
          image: ballast.dev/e2e/web:1
          imagePullPolicy: Never
          readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
";

#[tokio::test]
async fn two_pods_answer_behind_a_service_by_address_and_by_name() -> Result<()> {
    let _guard = Guard("pods".to_owned());
    tokio::time::timeout(BUDGET, run())
        .await
        .context("over the budget")?
}

async fn run() -> Result<()> {
    let cluster = Cluster::up(Options::full("pods")?, &Progress::new()).await?;
    addons::apply(&cluster.kubeconfig(0), WORKLOAD)?;
    cluster
        .wait_available("default", "web", Duration::from_secs(90))
        .await?;

    let client = cluster.client(0).await?;
    let service: Api<Service> = Api::namespaced(client.clone(), "default");
    let address = service
        .get("web")
        .await?
        .spec
        .and_then(|spec| spec.cluster_ip);
    let address = address.context("the Service has an address")?;
    let service = SocketAddr::new(address.parse()?, 80);
    let pods: Api<Pod> = Api::namespaced(client, "default");
    let names = pod_names(&pods).await?;
    ensure!(
        names.len() == 2,
        "two pods were asked for, there are {names:?}"
    );

    wait_for(
        "both pods answer through the Service",
        Duration::from_secs(30),
        || async { Ok((answers(&cluster, service)? == names).then_some(())) },
    )
    .await?;

    let get = |path: &str| cluster.namespace().inside(|| http_get(service, path))?;
    let lookup = get("/lookup?name=web.default.svc.cluster.local")?;
    ensure!(
        lookup.trim() == address,
        "CoreDNS says {lookup} where the Service has {address}"
    );
    let through_name = get("/get?url=http://web/")?;
    ensure!(
        names.contains(through_name.trim()),
        "a pod asked for http://web/ and got {through_name}"
    );
    ensure!(
        get("/lookup?name=nobody.default.svc.cluster.local").is_err(),
        "a name that is not there"
    );

    let victim = names.first().context("there are two")?;
    pods.delete(victim, &DeleteParams::default()).await?;
    wait_for(
        "a new pod answers in place of a deleted one",
        Duration::from_mins(1),
        || async {
            let now = answers(&cluster, service)?;
            Ok((now.len() == 2 && !now.contains(victim)).then_some(()))
        },
    )
    .await
}

async fn pod_names(pods: &Api<Pod>) -> Result<BTreeSet<String>> {
    let listed = pods.list(&ListParams::default().labels("app=web")).await?;
    Ok(listed
        .items
        .into_iter()
        .filter_map(|pod| pod.metadata.name)
        .collect())
}

/// The names of the pods that answer twenty requests.
fn answers(cluster: &Cluster, service: SocketAddr) -> Result<BTreeSet<String>> {
    cluster.namespace().inside(|| {
        (0..20)
            .map(|_| Ok(http_get(service, "/")?.trim().to_owned()))
            .collect::<Result<_>>()
    })?
}
