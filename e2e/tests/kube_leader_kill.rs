//! A kube-apiserver on three members, whose leader is killed while two hundred pods are rolled out. Budget: six minutes.
//!
//! Everything lies in the store as JSON, so that what the API server tells can be compared with what each member holds, field by field:
//! any list is of one revision, and at that revision the store must hold just that. A watch that was open before must have told each
//! change of a pod once, in order, as the store's history has it.
//! There is no node: the test itself says that pods are ready, as a kubelet would.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_api::etcdserverpb as pb;
use ballast_api::mvccpb::event::EventType;
use ballast_e2e::cluster::{Cluster, Guard, Options};
use ballast_e2e::control_plane::{store_address, store_name};
use ballast_e2e::progress::Progress;
use ballast_e2e::store_server::Client as Store;
use ballast_e2e::up::say;
use ballast_e2e::wait::{now, wait_for};
use ballast_e2e::{addons, forward};
use futures::StreamExt as _;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, WatchEvent};
use pb::watch_request::RequestUnion;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};

const BUDGET: Duration = Duration::from_mins(6);
const MEMBERS: u16 = 3;
const REPLICAS: i32 = 200;
/// Of the second version's pods, when the leader is killed.
const KILL_AT: usize = 60;
const ROLLOUT: Duration = Duration::from_mins(2);
const SOON: Duration = Duration::from_secs(30);
/// Pods that are made ready at the same time.
const READY_AT_ONCE: usize = 8;

const PODS: &str = "/api/v1/namespaces/default/pods";
const PODS_STORED: &str = "pods/default/";
/// What is compared: where the API has it, and where it lies below `/registry/`.
const KINDS: [(&str, &str); 9] = [
    ("/api/v1/pods", "pods/"),
    ("/apis/apps/v1/replicasets", "replicasets/"),
    ("/apis/apps/v1/deployments", "deployments/"),
    ("/api/v1/events", "events/"),
    ("/api/v1/namespaces", "namespaces/"),
    ("/api/v1/serviceaccounts", "serviceaccounts/"),
    ("/api/v1/configmaps", "configmaps/"),
    ("/api/v1/services", "services/specs/"),
    (
        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "clusterroles/",
    ),
];

const WORKLOAD: &str = r"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 200
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web, version: v1}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: web, image: ballast.dev/e2e/web:1}]
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leaders_death_in_a_rollout_of_two_hundred_pods_leaves_every_object_and_watch_right()
-> Result<()> {
    let _guard = Guard("members".to_owned());
    tokio::time::timeout(BUDGET, run())
        .await
        .context("over the budget")?
}

async fn run() -> Result<()> {
    let mut options = Options::api_only("members", 1)?;
    options.store_members = MEMBERS;
    options.api_flags = vec![
        "--storage-media-type=application/json".to_owned(),
        // The whole history is read at the end.
        "--etcd-compaction-interval=0".to_owned(),
    ];
    let cluster = Cluster::up(options, &Progress::new()).await?;
    let stores = doors(&cluster)?;
    cluster.start_controllers(&["--kube-api-qps=100", "--kube-api-burst=200"])?;
    let client = cluster.client(0).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
    wait_for("the default ServiceAccount", SOON, || async {
        Ok(accounts.get_opt("default").await?.map(|_| ()))
    })
    .await?;

    let begin = list(&client, PODS, "").await?.revision;
    let (new_pods, pods_to_be_ready) = unbounded_channel();
    let told = Arc::new(Told::default());
    let watching = tokio::spawn({
        let watch = watch_pods(client.clone(), begin, Arc::clone(&told), new_pods);
        async move { say(&format!("the watch ended: {:?}", watch.await)) }
    });
    let kubelet = tokio::spawn(make_ready(client.clone(), pods_to_be_ready));

    addons::apply(&cluster.kubeconfig(0), WORKLOAD)?;
    rolled_out(&client, "v1").await?;
    roll_out_second(&client).await?;
    let count = || told.count(|change| change.is_new("v2"));
    wait_for("the rollout is under way", ROLLOUT, || async {
        Ok((count() >= KILL_AT).then_some(()))
    })
    .await?;
    let leader = leader(&stores).await?;
    let pods_at_kill = count();
    cluster.process(&store_name(leader))?.kill()?;
    let killed = now();
    let others: Vec<usize> = (0..stores.len())
        .filter(|&index| index != usize::from(leader))
        .collect();
    wait_for("the rollout goes on", SOON, || async {
        Ok((count() > pods_at_kill).then_some(()))
    })
    .await?;
    let stood = killed.elapsed();
    // In the middle of it any list is of one revision too.
    compare(&client, &stores, &others, &KINDS[..1]).await?;
    rolled_out(&client, "v2").await?;
    let took = killed.elapsed();
    compare(&client, &stores, &others, &KINDS).await?;

    cluster.restart_store_member(leader)?;
    let all: Vec<usize> = (0..stores.len()).collect();
    compare(&client, &stores, &all, &KINDS).await?;
    equal_hashes(&stores).await?;
    let changes = judge_watch(&stores[usize::from(leader)], begin, &told).await?;
    ensure!(!watching.is_finished(), "the watch ended");
    watching.abort();
    kubelet.abort();
    say(&format!(
        "the leader was killed with {pods_at_kill} new pods; the next one came {stood:?} later, the last {took:?}; \
         {changes} changes of pods told, the watch resumed {} times",
        told.resumed()
    ));
    Ok(())
}

/// Clients of all members, through doors into the cluster's namespace.
fn doors(cluster: &Cluster) -> Result<Vec<Store>> {
    (0..MEMBERS)
        .map(|index| {
            let name = format!("door-{}", store_name(index));
            let to = store_address(index);
            let (_, door) = forward::start(cluster.state(), &name, cluster.namespace(), to)?;
            Store::at(&door.to_string())
        })
        .collect()
}

/// The place of the member that leads.
async fn leader(stores: &[Store]) -> Result<u16> {
    wait_for("a leader", SOON, || async {
        for (index, store) in (0..).zip(stores) {
            let mut maintenance = store.maintenance.clone();
            let status = maintenance.status(pb::StatusRequest {}).await?.into_inner();
            if status.leader == status.header.context("a header")?.member_id {
                return Ok(Some(index));
            }
        }
        Ok(None)
    })
    .await
}

// The rollout.

async fn roll_out_second(client: &Client) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), "default");
    let labels = json!({ "app": "web", "version": "v2" });
    let patch = json!({ "spec": { "template": { "metadata": { "labels": labels } } } });
    let patch = Patch::Merge(patch);
    deployments
        .patch("web", &PatchParams::default(), &patch)
        .await?;
    Ok(())
}

/// Waits until there are as many ready pods of this version as were asked for, and no others.
async fn rolled_out(client: &Client, version: &str) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), "default");
    wait_for(&format!("{version} is rolled out"), ROLLOUT, || async {
        let deployment = deployments.get("web").await?;
        let status = deployment.status.unwrap_or_default();
        ensure!(
            status.observed_generation == deployment.metadata.generation
                && status.updated_replicas == Some(REPLICAS)
                && status.available_replicas == Some(REPLICAS)
                && status.replicas == Some(REPLICAS),
            "{status:?}"
        );
        Ok(Some(()))
    })
    .await?;
    let pods = list(client, PODS, "").await?.objects;
    let label = |pod: &Value| pod["metadata"]["labels"]["version"] == version;
    let right = pods.values().filter(|(_, pod)| label(pod)).count();
    ensure!(
        (right, pods.len()) == (REPLICAS as usize, REPLICAS as usize),
        "{right} of {} pods are of {version}",
        pods.len()
    );
    Ok(())
}

/// Says of each new pod that it runs, as its kubelet would.
async fn make_ready(client: Client, names: UnboundedReceiver<String>) {
    let pods: Api<Pod> = Api::namespaced(client, "default");
    let names = UnboundedReceiverStream::new(names);
    names
        .for_each_concurrent(READY_AT_ONCE, |name| {
            let pods = pods.clone();
            async move {
                let ready = json!({ "type": "Ready", "status": "True" });
                let patch = Patch::Merge(
                    json!({ "status": { "phase": "Running", "conditions": [ready] } }),
                );
                // Also while nobody leads the store.
                loop {
                    match pods
                        .patch_status(&name, &PatchParams::default(), &patch)
                        .await
                    {
                        Ok(_) => return,
                        Err(kube::Error::Api(status)) if status.code == 404 => return,
                        Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
                    }
                }
            }
        })
        .await;
}

// The watch.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Added,
    Modified,
    Deleted,
}

/// One change of a pod.
#[derive(Clone, Debug, PartialEq)]
struct Change {
    kind: Kind,
    name: String,
    revision: i64,
    /// As it lies in the store; nothing of one that was deleted.
    object: Value,
}

impl Change {
    /// The first of a pod of this version.
    fn is_new(&self, version: &str) -> bool {
        self.kind == Kind::Added && self.object["metadata"]["labels"]["version"] == version
    }
}

/// What a watch was told, over all of its streams.
#[derive(Debug, Default)]
struct Told(Mutex<(Vec<Change>, usize)>);

impl Told {
    fn add(&self, change: Change) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.0.push(change);
    }

    fn resume(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1 += 1;
    }

    fn resumed(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    fn count(&self, is: impl Fn(&Change) -> bool) -> usize {
        let told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.0.iter().filter(|change| is(change)).count()
    }

    fn changes(&self) -> Vec<Change> {
        let told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.0.clone()
    }
}

/// Watches all pods after `from`; a stream that ends is resumed behind what was told, as clients do. Ends only with an error.
async fn watch_pods(
    client: Client,
    mut from: i64,
    told: Arc<Told>,
    new_pods: UnboundedSender<String>,
) -> Result<()> {
    loop {
        let path = format!("{PODS}?watch=1&allowWatchBookmarks=true&resourceVersion={from}");
        let request = http::Request::get(path).body(Vec::new())?;
        let Ok(stream) = client.request_events::<Value>(request).await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let mut stream = std::pin::pin!(stream);
        // What cannot be read any more is the end of a stream.
        while let Some(Ok(event)) = stream.next().await {
            let (kind, object) = match event {
                WatchEvent::Added(object) => (Kind::Added, object),
                WatchEvent::Modified(object) => (Kind::Modified, object),
                WatchEvent::Deleted(object) => (Kind::Deleted, object),
                WatchEvent::Bookmark(mark) => {
                    let at = mark.metadata.resource_version.parse()?;
                    ensure!(at >= from, "a bookmark of {at} after {from}");
                    from = at;
                    continue;
                }
                WatchEvent::Error(status) => bail!("after {from} the watch was told {status:?}"),
            };
            let change = Change {
                kind,
                name: name_of(&object)?,
                revision: revision_of(&object)?,
                object: match kind {
                    Kind::Deleted => Value::Null,
                    _ => as_stored(object),
                },
            };
            ensure!(
                change.revision > from,
                "after {from} the watch told {change:?}"
            );
            from = change.revision;
            if kind == Kind::Added {
                // Nobody to tell is for the rollout to notice.
                let _ = new_pods.send(change.name.clone());
            }
            told.add(change);
        }
        told.resume();
    }
}

/// Holds what the watch told against the store's history; gives the number of changes.
async fn judge_watch(store: &Store, from: i64, told: &Told) -> Result<usize> {
    let held = history(store, from).await?;
    let last = held.last().context("there were pods")?.revision;
    wait_for("the watch has told the last change", SOON, || async {
        let reached = told.count(|change| change.revision >= last) > 0;
        Ok(reached.then_some(()))
    })
    .await?;
    let told = told.changes();
    for (index, change) in held.iter().enumerate() {
        ensure!(
            told.get(index) == Some(change),
            "change {index} of {}: the store's history has\n{change:?}\nand the watch told\n{:?}",
            held.len(),
            told.get(index)
        );
    }
    ensure!(
        told.len() == held.len(),
        "the watch told {} changes, the store has {}",
        told.len(),
        held.len()
    );
    Ok(held.len())
}

/// All changes of pods after `from`, as one member has them.
async fn history(store: &Store, from: i64) -> Result<Vec<Change>> {
    let any = pb::RangeRequest {
        count_only: true,
        ..below(PODS_STORED)
    };
    let head = store.kv.clone().range(any).await?.into_inner();
    let head = head.header.context("a header")?.revision;
    let range = below(PODS_STORED);
    let create = pb::WatchCreateRequest {
        key: range.key,
        range_end: range.range_end,
        start_revision: from + 1,
        ..pb::WatchCreateRequest::default()
    };
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let ask = async |union| {
        let request_union = Some(union);
        sender.send(pb::WatchRequest { request_union }).await
    };
    ask(RequestUnion::CreateRequest(create)).await?;
    let requests = ReceiverStream::new(receiver);
    let mut stream = store.watch.clone().watch(requests).await?.into_inner();
    let mut changes = Vec::new();
    let end = now() + SOON;
    loop {
        ensure!(now() < end, "the history does not end");
        let Ok(next) = tokio::time::timeout(Duration::from_millis(500), stream.next()).await else {
            // Answered when everything up to then was told; etcd answers none that comes before.
            ask(RequestUnion::ProgressRequest(pb::WatchProgressRequest {})).await?;
            continue;
        };
        let response = next.context("the store's watch ended")??;
        ensure!(!response.canceled, "{}", response.cancel_reason);
        if response.events.is_empty() && !response.created {
            let at = response.header.context("a header")?.revision;
            ensure!(at >= head, "told up to {at} of {head}");
            return Ok(changes);
        }
        for event in response.events {
            let kv = event.kv.context("an event has a key")?;
            let key = String::from_utf8(kv.key.to_vec())?;
            let kind = match event.r#type {
                deleted if deleted == EventType::Delete as i32 => Kind::Deleted,
                _ if kv.create_revision == kv.mod_revision => Kind::Added,
                _ => Kind::Modified,
            };
            let name = key.rsplit('/').next().unwrap_or_default();
            changes.push(Change {
                kind,
                name: name.to_owned(),
                revision: kv.mod_revision,
                object: match kind {
                    Kind::Deleted => Value::Null,
                    _ => as_stored(serde_json::from_slice(&kv.value)?),
                },
            });
        }
    }
}

// What there is.

/// Objects by their keys below the kind's, each with the revision it was written at.
type Objects = BTreeMap<String, (i64, Value)>;

/// A list, and the revision it is of.
struct List {
    revision: i64,
    objects: Objects,
}

/// What the API server says: from its watch cache where the query lets it.
async fn list(client: &Client, path: &str, query: &str) -> Result<List> {
    let request = http::Request::get(format!("{path}?{query}")).body(Vec::new())?;
    let mut list: Value = client.request(request).await?;
    let revision = revision_of(&list)?;
    let items = match list["items"].take() {
        Value::Array(items) => items,
        other => bail!("{path} has items {other}"),
    };
    let mut objects = Objects::new();
    for item in items {
        let name = name_of(&item)?;
        let key = match item["metadata"]["namespace"].as_str() {
            Some(namespace) => format!("{namespace}/{name}"),
            None => name,
        };
        let at = revision_of(&item)?;
        let twice = objects.insert(key, (at, as_stored(item)));
        ensure!(twice.is_none(), "{path} has {twice:?} twice");
    }
    Ok(List { revision, objects })
}

/// What one member holds at a revision.
async fn held(store: &Store, prefix: &str, revision: i64) -> Result<Objects> {
    let request = pb::RangeRequest {
        revision,
        // It answers by itself, once it has come so far.
        serializable: true,
        ..below(prefix)
    };
    let read = || async { Ok(Some(store.kv.clone().range(request.clone()).await?)) };
    let answer = wait_for("a member answers", SOON, read).await?.into_inner();
    let stem = format!("/registry/{prefix}");
    let objects = answer.kvs.into_iter().map(|kv| {
        let key = String::from_utf8(kv.key.to_vec())?;
        let key = key.strip_prefix(&stem).context("the prefix")?.to_owned();
        let object = as_stored(serde_json::from_slice(&kv.value)?);
        Ok((key, (kv.mod_revision, object)))
    });
    objects.collect()
}

fn below(prefix: &str) -> pb::RangeRequest {
    let key = format!("/registry/{prefix}");
    let end = format!("{}0", key.trim_end_matches('/'));
    pb::RangeRequest {
        key: key.into(),
        range_end: end.into(),
        ..pb::RangeRequest::default()
    }
}

/// Lists each kind from the watch cache, consistently, and from the store behind it, and compares each list with what these members hold
/// at its revision.
async fn compare(
    client: &Client,
    stores: &[Store],
    members: &[usize],
    kinds: &[(&str, &str)],
) -> Result<()> {
    for (path, prefix) in kinds {
        let consistent = wait_for("a list", SOON, || async {
            Ok(Some(list(client, path, "").await?))
        })
        .await?;
        let exact = format!(
            "resourceVersion={}&resourceVersionMatch=Exact",
            consistent.revision
        );
        let newest = consistent.objects.values().map(|(at, _)| *at).max();
        // It may lag, but not for long.
        let cached = wait_for("the watch cache has come so far", SOON, || async {
            let cached = list(client, path, "resourceVersion=0").await?;
            Ok((Some(cached.revision) >= newest).then_some(cached))
        })
        .await?;
        let exact = list(client, path, &exact).await?;
        for (how, told) in [
            ("consistent", consistent),
            ("cached", cached),
            ("exact", exact),
        ] {
            for &member in members {
                let held = held(&stores[member], prefix, told.revision).await?;
                if let Some(difference) = difference(&told.objects, &held) {
                    bail!(
                        "{path}, {how}, at revision {}, and member {member}: {difference}",
                        told.revision
                    );
                }
            }
        }
    }
    Ok(())
}

/// The first object that is not the same.
fn difference(told: &Objects, held: &Objects) -> Option<String> {
    let keys = told.keys().chain(held.keys());
    let key = keys
        .into_iter()
        .find(|key| told.get(*key) != held.get(*key))?;
    Some(format!(
        "{key} is told as\n{:?}\nand held as\n{:?}",
        told.get(key),
        held.get(key)
    ))
}

async fn equal_hashes(stores: &[Store]) -> Result<()> {
    let mut kv = stores[0].kv.clone();
    let header = kv.range(below(PODS_STORED)).await?.into_inner().header;
    let revision = header.context("a header")?.revision;
    wait_for("equal hashes", SOON, || async {
        let mut hashes = Vec::new();
        for store in stores {
            let mut maintenance = store.maintenance.clone();
            let answer = maintenance.hash_kv(pb::HashKvRequest { revision }).await?;
            hashes.push(answer.into_inner().hash);
        }
        ensure!(
            hashes.iter().all(|hash| *hash == hashes[0]),
            "at revision {revision}: {hashes:x?}"
        );
        Ok(Some(()))
    })
    .await
}

/// Without what the API server makes of the key's revision, and what lists leave out.
fn as_stored(mut object: Value) -> Value {
    if let Some(fields) = object.as_object_mut() {
        fields.remove("apiVersion");
        fields.remove("kind");
    }
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("resourceVersion");
    }
    object
}

fn name_of(object: &Value) -> Result<String> {
    let name = object["metadata"]["name"].as_str().context("a name")?;
    Ok(name.to_owned())
}

fn revision_of(object: &Value) -> Result<i64> {
    let revision = object["metadata"]["resourceVersion"].as_str();
    Ok(revision.context("a revision")?.parse()?)
}
