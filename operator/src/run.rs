//! The operator's process: flags, the two controllers, leader election, the end.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use futures::{StreamExt, future};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::core::DeserializeGuard;
use kube::runtime::controller::{Config as ControllerConfig, Controller};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::cluster::validate::Settings;
use crate::context::Context;
use crate::crd::{StoreBackup, StoreCluster};
use crate::events::Events;
use crate::leader::Candidate;
use crate::metrics::Metrics;
use crate::store_client::GrpcStoreClient;
use crate::{backup, cluster, http};

/// Objects worked on at the same time.
const CONCURRENCY: u16 = 16;
/// Gathers the bursts of events that one change causes.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Flags of the operator.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Namespaces to look after, comma separated; all when empty.
    #[arg(
        long,
        env = "WATCH_NAMESPACES",
        value_delimiter = ',',
        default_value = ""
    )]
    pub watch_namespaces: Vec<String>,
    /// Repository of the store's image; a StoreCluster's version is the tag.
    #[arg(long, env = "STORE_REPOSITORY", default_value = "ballast")]
    pub store_repository: String,
    /// The operator's own image, from which pods of backups take the agent.
    #[arg(
        long,
        env = "OPERATOR_IMAGE",
        default_value = "ballast-operator:latest"
    )]
    pub operator_image: String,
    /// Pull policy of the operator's own image in those pods.
    #[arg(long, env = "OPERATOR_PULL_POLICY", default_value = "IfNotPresent")]
    pub operator_pull_policy: String,
    /// Act only while holding a Lease.
    #[arg(long, env = "LEADER_ELECTION", default_value_t = false, action = clap::ArgAction::Set)]
    pub leader_election: bool,
    /// Namespace of the Lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    pub lease_namespace: String,
    /// Name of the Lease.
    #[arg(long, env = "LEASE_NAME", default_value = "ballast-operator")]
    pub lease_name: String,
    /// Name of this instance in the Lease and in events.
    #[arg(long, env = "POD_NAME", default_value = "ballast-operator")]
    pub identity: String,
    /// Address of /metrics, /healthz and /readyz.
    #[arg(long, env = "LISTEN_ADDRESS", default_value = "0.0.0.0:8080")]
    pub listen_address: SocketAddr,
    /// Longest time between two looks at a store.
    #[arg(long, env = "RESYNC_SECONDS", default_value_t = 30)]
    pub resync_seconds: u64,
}

/// Runs until a signal, or until leadership is lost.
pub async fn run(args: RunArgs) -> anyhow::Result<()> {
    let client = Client::try_default().await?;
    let version = client.apiserver_version().await?;
    tracing::info!(kubernetes = %version.git_version, identity = %args.identity, "operator starts");
    let metrics = Arc::new(Metrics::new());
    let server = tokio::spawn(http::serve(args.listen_address, metrics.clone()));
    let stop = CancellationToken::new();
    tokio::spawn(stop_on_signal(stop.clone())?);
    let work = async {
        if args.leader_election {
            lead(&client, &args, &metrics, &stop).await
        } else {
            control(&client, &args, &metrics, &stop).await;
            Ok(())
        }
    };
    tokio::select! {
        result = work => result,
        served = server => Err(anyhow::anyhow!("cannot serve {}: {served:?}", args.listen_address)),
    }
}

async fn lead(
    client: &Client,
    args: &RunArgs,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let mut candidate = Candidate::new(
        client.clone(),
        &args.lease_namespace,
        &args.lease_name,
        &args.identity,
    );
    tokio::select! {
        () = candidate.acquire() => {}
        () = stop.cancelled() => return Ok(()),
    }
    tracing::info!(lease = %args.lease_name, "leading");
    tokio::select! {
        () = control(client, args, metrics, stop) => {}
        () = candidate.keep() => anyhow::bail!("leadership was lost"),
    }
    candidate.release().await?;
    Ok(())
}

/// Runs the controllers of every namespace until `stop`.
async fn control(
    client: &Client,
    args: &RunArgs,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
) {
    let ctx = Arc::new(Context {
        client: client.clone(),
        store: Arc::new(GrpcStoreClient),
        settings: Settings {
            store_repository: args.store_repository.clone(),
            agent_image: args.operator_image.clone(),
            agent_pull_policy: args.operator_pull_policy.clone(),
        },
        events: Events::new(client.clone(), Some(args.identity.clone())),
        metrics: metrics.clone(),
        resync: Duration::from_secs(args.resync_seconds.max(1)),
        retry_after: Duration::from_secs(5),
    });
    let named: Vec<_> = args
        .watch_namespaces
        .iter()
        .filter(|n| !n.is_empty())
        .collect();
    let scopes: Vec<Option<&str>> = if named.is_empty() {
        vec![None]
    } else {
        named.into_iter().map(|n| Some(n.as_str())).collect()
    };
    let all = scopes.into_iter().map(|namespace| {
        let scope = Scope { client, namespace };
        future::join(clusters(&scope, &ctx, stop), backups(&scope, &ctx, stop))
    });
    future::join_all(all).await;
    tracing::info!("controllers stopped");
}

struct Scope<'a> {
    client: &'a Client,
    namespace: Option<&'a str>,
}

impl Scope<'_> {
    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        match self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }
}

fn clusters(
    scope: &Scope<'_>,
    ctx: &Arc<Context>,
    stop: &CancellationToken,
) -> impl Future<Output = ()> + use<> {
    let own = watcher::Config::default().labels(crate::cluster::build::CLUSTER_LABEL);
    Controller::new(
        scope.api::<DeserializeGuard<StoreCluster>>(),
        watcher::Config::default(),
    )
    .with_config(
        ControllerConfig::default()
            .debounce(DEBOUNCE)
            .concurrency(CONCURRENCY),
    )
    .owns(scope.api::<Pod>(), own.clone())
    .owns(scope.api::<Service>(), own.clone())
    .owns(scope.api::<PersistentVolumeClaim>(), own)
    .watches(
        scope.api::<DeserializeGuard<StoreBackup>>(),
        watcher::Config::default(),
        |guard| {
            // A finished backup concerns its cluster, and clusters that wait to restore it.
            let backup = guard.0.ok()?;
            let namespace = backup.namespace()?;
            Some(ObjectRef::new(&backup.spec.cluster_ref.name).within(&namespace))
        },
    )
    .graceful_shutdown_on(stop.clone().cancelled_owned())
    .run(cluster::reconcile, cluster::error_policy, ctx.clone())
    .for_each(|result| async move {
        if let Err(error) = result {
            tracing::debug!(%error, "StoreCluster pass");
        }
    })
}

fn backups(
    scope: &Scope<'_>,
    ctx: &Arc<Context>,
    stop: &CancellationToken,
) -> impl Future<Output = ()> + use<> {
    let own = watcher::Config::default().labels(crate::cluster::build::CLUSTER_LABEL);
    Controller::new(
        scope.api::<DeserializeGuard<StoreBackup>>(),
        watcher::Config::default(),
    )
    .with_config(
        ControllerConfig::default()
            .debounce(DEBOUNCE)
            .concurrency(CONCURRENCY),
    )
    .owns(scope.api::<Pod>(), own)
    .graceful_shutdown_on(stop.clone().cancelled_owned())
    .run(backup::reconcile, backup::error_policy, ctx.clone())
    .for_each(|result| async move {
        if let Err(error) = result {
            tracing::debug!(%error, "StoreBackup pass");
        }
    })
}

fn stop_on_signal(stop: CancellationToken) -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        stop.cancel();
    })
}
