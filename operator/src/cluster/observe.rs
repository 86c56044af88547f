//! What is there now, read afresh on every pass.
//!
//! Reads go to the API server, not to a cache: a stale cache makes an operator create twice, and a
//! store's pass needs a handful of reads. The store itself is asked through its pod's address, so
//! that the answer is that member's and not whoever stands behind a Service.
//! Nothing here decides anything.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::build::HASH_ANNOTATION;
use super::build::service::CLIENT_PORT;
use super::validate::Desired;
use crate::crd::{StoreBackup, StoreCluster, StoreClusterStatus};
use crate::store_client::{StoreClient, StoreReport};

/// A read that failed.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    #[error("cannot read {kind} {name}: {source}")]
    Read {
        kind: String,
        name: String,
        source: Box<kube::Error>,
    },
    #[error("cannot list {kind}: {source}")]
    List {
        kind: String,
        source: Box<kube::Error>,
    },
}

/// What the store answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StoreView {
    /// There is no pod with an address to ask.
    #[default]
    NotAsked,
    Unreachable(String),
    Up(StoreReport),
}

impl StoreView {
    /// The report, if the store answered.
    pub fn report(&self) -> Option<&StoreReport> {
        match self {
            Self::Up(report) => Some(report),
            Self::NotAsked | Self::Unreachable(_) => None,
        }
    }
}

/// Everything the planner may look at.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Seconds since the epoch.
    pub now: i64,
    pub client_service: Option<Service>,
    pub peer_service: Option<Service>,
    pub volume: Option<PersistentVolumeClaim>,
    pub backup_volume: Option<PersistentVolumeClaim>,
    pub pod: Option<Pod>,
    pub store: StoreView,
    /// Every StoreBackup of this StoreCluster, older ones of the same name left out.
    pub backups: Vec<StoreBackup>,
    /// The backup a new store is to be filled from.
    pub restore_backup: Option<StoreBackup>,
    /// The status as it was written last.
    pub history: StoreClusterStatus,
}

/// Reads everything about one StoreCluster.
pub async fn observe(
    client: &Client,
    store: &dyn StoreClient,
    cluster: &StoreCluster,
    desired: &Desired,
    now: i64,
) -> Result<Observed, ObserveError> {
    let reader = Reader {
        client,
        namespace: &desired.namespace,
    };
    let pod: Option<Pod> = reader.get(&desired.member_name()).await?;
    let backups = reader.backups().await?;
    let history = cluster.status.clone().unwrap_or_default();
    let restore_backup = match &desired.restore {
        Some(restore) if history.restore.is_none() => backups
            .iter()
            .find(|b| b.name_any() == restore.backup_ref.name)
            .cloned(),
        _ => None,
    };
    let backup_volume = match &desired.backup {
        Some(backup) => reader.get(&backup.claim).await?,
        None => None,
    };
    Ok(Observed {
        now,
        client_service: reader.get(&desired.client_service()).await?,
        peer_service: reader.get(&desired.peer_service()).await?,
        volume: reader.get(&desired.volume_name()).await?,
        backup_volume,
        store: ask(store, pod.as_ref()).await,
        pod,
        backups: backups.into_iter().filter(|b| is_of(b, desired)).collect(),
        restore_backup,
        history,
    })
}

/// Names come back, UIDs do not: a backup that ran knows whose it is, one that did not goes by name.
fn is_of(backup: &StoreBackup, desired: &Desired) -> bool {
    let uid = backup.status.as_ref().and_then(|s| s.cluster_uid.as_ref());
    backup.spec.cluster_ref.name == desired.name && uid.is_none_or(|uid| *uid == desired.uid)
}

async fn ask(store: &dyn StoreClient, pod: Option<&Pod>) -> StoreView {
    let Some(endpoint) = pod.and_then(pod_endpoint) else {
        return StoreView::NotAsked;
    };
    match store.report(&endpoint).await {
        Ok(report) => StoreView::Up(report),
        Err(error) => StoreView::Unreachable(error.to_string()),
    }
}

/// URL of the store in that very pod.
pub fn pod_endpoint(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    if is_going(pod) || status.phase.as_deref() != Some("Running") {
        return None;
    }
    let ip = status.pod_ip.as_deref()?;
    // An IPv6 address needs brackets in a URL.
    Some(if ip.contains(':') {
        format!("http://[{ip}]:{CLIENT_PORT}")
    } else {
        format!("http://{ip}:{CLIENT_PORT}")
    })
}

/// Whether the kubelet calls the pod ready.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Whether the object is being deleted: such an object is waited for, never acted on.
pub fn is_going<K: Resource>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_some()
}

/// Whether a live object is what was built: the same hash, and nobody changed what we set since.
pub fn is_up_to_date<K: Resource + Serialize>(built: &K, live: &K) -> bool {
    let hash = |object: &K| object.annotations().get(HASH_ANNOTATION).cloned();
    if hash(built) != hash(live) {
        return false;
    }
    let (Ok(built), Ok(live)) = (serde_json::to_value(built), serde_json::to_value(live)) else {
        return false;
    };
    contains(&live["metadata"]["labels"], &built["metadata"]["labels"])
        && contains(
            &live["metadata"]["ownerReferences"],
            &built["metadata"]["ownerReferences"],
        )
        && contains(&live["spec"], &built["spec"])
}

/// Whether `live` says everything that `built` says. The API server adds defaults, and writes sizes
/// its own way, so that numbers with units are left to the hash.
fn contains(live: &Value, built: &Value) -> bool {
    match (live, built) {
        (_, Value::Null) => true,
        (Value::Object(live), Value::Object(built)) => built
            .iter()
            .filter(|(key, _)| *key != "resources")
            .all(|(key, value)| contains(live.get(key).unwrap_or(&Value::Null), value)),
        (Value::Array(live), Value::Array(built)) => {
            live.len() >= built.len()
                && built
                    .iter()
                    .all(|item| live.iter().any(|l| contains(l, item)))
        }
        (live, built) => live == built,
    }
}

struct Reader<'a> {
    client: &'a Client,
    namespace: &'a str,
}

impl Reader<'_> {
    async fn get<K>(&self, name: &str) -> Result<Option<K>, ObserveError>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        Api::<K>::namespaced(self.client.clone(), self.namespace)
            .get_opt(name)
            .await
            .map_err(|source| ObserveError::Read {
                kind: K::kind(&()).into_owned(),
                name: name.to_owned(),
                source: Box::new(source),
            })
    }

    /// One object that cannot be read must not hide the others.
    async fn backups(&self) -> Result<Vec<StoreBackup>, ObserveError> {
        let api: Api<DeserializeGuard<StoreBackup>> =
            Api::namespaced(self.client.clone(), self.namespace);
        let list = api
            .list(&ListParams::default())
            .await
            .map_err(|source| ObserveError::List {
                kind: "StoreBackup".to_owned(),
                source: Box::new(source),
            })?;
        Ok(list
            .items
            .into_iter()
            .filter_map(|guard| guard.0.ok())
            .collect())
    }
}
