//! The operator on a real Kubernetes whose control plane lies in the store under test: one
//! StoreCluster through its life. Budget: fifteen minutes, of which it needs four on
//! idle cores.
//!
//! Everything is asked for as a user would, by objects alone; the store's own API is used only to
//! fill it and to look at what came of it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ballast_api::etcdserverpb::kv_client::KvClient;
use ballast_api::etcdserverpb::watch_client::WatchClient;
use ballast_api::etcdserverpb::watch_request::RequestUnion;
use ballast_api::etcdserverpb::{
    CompactionRequest, DeleteRangeRequest, PutRequest, RangeRequest, WatchCreateRequest,
    WatchRequest,
};
use ballast_e2e::cluster::{Cluster, Guard, Options};
use ballast_e2e::operator::{self, condition};
use ballast_e2e::progress::Progress;
use ballast_e2e::wait::wait_for;
use ballast_e2e::{addons, forward};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::events::v1::Event;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tonic::transport::Channel;

const BUDGET: Duration = Duration::from_secs(900);
const MINUTE: Duration = Duration::from_secs(60);
const BUMP: i64 = 1_000_000_000;
/// Values of 100 KiB that are written and deleted: enough for the rule's 16 MiB.
const FILLED: i32 = 240;

const STORE: &str = r#"
apiVersion: ballast.dev/v1alpha1
kind: StoreCluster
metadata: {name: life, namespace: default}
spec:
  version: 0.1.0
  storage: {size: 1Gi}
  quota: 128Mi
  backup:
    schedule: "@every 15s"
    retention: {count: 2}
    storage: {pvc: {size: 1Gi}}
  defragmentation: {minSize: 16Mi, minFreeRatioPercent: 50, minIntervalSeconds: 10}
"#;

const BY_HAND: &str = r"
apiVersion: ballast.dev/v1alpha1
kind: StoreBackup
metadata: {name: by-hand, namespace: default}
spec: {clusterRef: {name: life}}
";

const RESTORED: &str = r"
apiVersion: ballast.dev/v1alpha1
kind: StoreCluster
metadata: {name: again, namespace: default}
spec:
  version: 0.1.0
  storage: {size: 1Gi}
  quota: 128Mi
  bootstrap: {restore: {backupRef: {name: by-hand}, bumpRevision: 1000000000}}
";

#[tokio::test]
async fn a_store_is_backed_up_defragmented_kept_within_quota_and_restored() -> Result<()> {
    let _guard = Guard("operator".to_owned());
    tokio::time::timeout(BUDGET, run())
        .await
        .context("over the budget")?
}

async fn run() -> Result<()> {
    let progress = Progress::new();
    let cluster = Cluster::up(Options::full("operator")?, &progress).await?;
    operator::install_chart(&cluster, &progress)?;
    cluster
        .wait_available(operator::NAMESPACE, "ballast-operator", 2 * MINUTE)
        .await?;
    let world = World {
        client: cluster.client(0).await?,
        cluster,
        doors: AtomicU32::new(0),
    };
    addons::apply(&world.cluster.kubeconfig(0), STORE)?;
    operator::wait_cluster_ready(&world.client, "life", 3 * MINUTE).await?;

    a_third_backup_prunes_the_first(&world)
        .await
        .context("scheduled backups")?;
    world
        .patch(json!({ "backup": { "suspend": true } }))
        .await?;
    the_rule_shrinks_an_emptied_store(&world)
        .await
        .context("defragmentation")?;
    a_lowered_quota_shows_as_no_space(&world)
        .await
        .context("quota")?;
    a_restored_store_holds_the_same_at_a_later_revision(&world)
        .await
        .context("restore")?;
    a_refused_spec_says_why(&world)
}

struct World {
    client: Client,
    cluster: Cluster,
    /// How many were opened.
    doors: AtomicU32,
}

impl World {
    async fn status(&self, kind: &str, name: &str) -> Result<Value> {
        let object = operator::api(self.client.clone(), kind).get(name).await?;
        Ok(object.data["status"].clone())
    }

    async fn patch(&self, spec: Value) -> Result<()> {
        let patch = Patch::Merge(json!({ "spec": spec }));
        operator::api(self.client.clone(), "StoreCluster")
            .patch("life", &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }

    async fn backups(&self) -> Result<Vec<DynamicObject>> {
        let listed = operator::api(self.client.clone(), "StoreBackup");
        Ok(listed.list(&ListParams::default()).await?.items)
    }

    /// A channel to a store's client Service, from outside of the cluster's network.
    async fn connect(&self, name: &str) -> Result<Channel> {
        let url = operator::service_url(&self.client, name).await?;
        let inside: SocketAddr = url.trim_start_matches("http://").parse()?;
        // Earlier channels are used still.
        let doors = self.doors.fetch_add(1, Ordering::Relaxed);
        let forwarder = format!("forward-{name}-{doors}");
        let state = self.cluster.state();
        let (_, outside) = forward::start(state, &forwarder, self.cluster.namespace(), inside)?;
        Ok(Channel::from_shared(format!("http://{outside}"))?.connect_lazy())
    }

    /// Waits until a StoreCluster's status holds what `wanted` looks for.
    async fn wait_status(
        &self,
        name: &str,
        what: &str,
        deadline: Duration,
        wanted: impl Fn(&DynamicObject) -> bool,
    ) -> Result<Value> {
        let clusters = operator::api(self.client.clone(), "StoreCluster");
        wait_for(what, deadline, || async {
            let object = clusters.get(name).await?;
            ensure!(wanted(&object), "{}", object.data["status"]);
            Ok(Some(object.data["status"].clone()))
        })
        .await
    }
}

async fn a_third_backup_prunes_the_first(world: &World) -> Result<()> {
    let succeeded = || async {
        let mut names: Vec<String> = world
            .backups()
            .await?
            .iter()
            .filter(|b| condition(b, "Succeeded", "True"))
            .map(DynamicObject::name_any)
            .collect();
        names.sort();
        anyhow::Ok(names)
    };
    let first_two = wait_for("two scheduled backups", 2 * MINUTE, || async {
        let names = succeeded().await?;
        ensure!(names.len() >= 2, "there are {names:?}");
        Ok(Some(names))
    })
    .await?;
    let first = &first_two[0];
    ensure!(
        first.starts_with("life-20"),
        "{first} is not named after its moment"
    );
    let status = world.status("StoreBackup", first).await?;
    let path = status["location"]["path"].as_str();
    let path = path.context("the backup says where its file is")?;
    wait_for("a third backup, and the first gone", 2 * MINUTE, || async {
        let names = succeeded().await?;
        let newer = names.iter().any(|name| !first_two.contains(name));
        let left = world
            .backups()
            .await?
            .iter()
            .any(|backup| backup.name_any() == *first);
        ensure!(newer && !left, "there are {names:?}");
        Ok(Some(()))
    })
    .await?;
    let folder = backup_folder(world).await?;
    let files = world
        .cluster
        .node()?
        .run(&["find", &folder, "-type", "f"])?;
    ensure!(
        !files.contains(path),
        "the file of {first} is still there: {files}"
    );
    ensure!(
        files.contains(".db"),
        "the files of the others are not there: {files}"
    );
    Ok(())
}

/// Where the node keeps the backup volume.
async fn backup_folder(world: &World) -> Result<String> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(world.client.clone(), "default");
    let claim = claims.get("life-backup").await?;
    let volume = claim.spec.and_then(|s| s.volume_name);
    let volume = volume.context("the claim is bound")?;
    let volumes: Api<PersistentVolume> = Api::all(world.client.clone());
    let spec = volumes.get(&volume).await?.spec;
    let local = spec.and_then(|s| s.local);
    Ok(local.context("the volume is a folder of the node")?.path)
}

async fn the_rule_shrinks_an_emptied_store(world: &World) -> Result<()> {
    let mut kv = KvClient::new(world.connect("life").await?);
    for n in 0..100 {
        let value = format!("value {n}").into_bytes();
        put(&mut kv, &format!("keep/{n:03}"), value).await?;
    }
    fill(&kv, "fill", FILLED).await?;
    let request = DeleteRangeRequest {
        key: "fill/".into(),
        range_end: "fill0".into(),
        ..DeleteRangeRequest::default()
    };
    let deleted = kv.delete_range(request).await?.into_inner();
    ensure!(
        deleted.deleted == i64::from(FILLED),
        "{} keys were deleted",
        deleted.deleted
    );
    let revision = deleted.header.context("an answer has a header")?.revision;
    let compaction = CompactionRequest {
        revision,
        physical: true,
    };
    kv.compact(compaction).await?;
    let status = world
        .wait_status("life", "the rule defragments", 3 * MINUTE, |object| {
            object.data["status"]["lastDefragmentation"].is_object()
        })
        .await?;
    let last = &status["lastDefragmentation"];
    let before = last["beforeBytes"].as_i64();
    let after = last["afterBytes"].as_i64();
    let (before, after) = before.zip(after).context("both sizes are kept")?;
    ensure!(
        before >= 16 << 20 && after < before / 2,
        "it went from {before} to {after}"
    );
    let events: Api<Event> = Api::namespaced(world.client.clone(), "default");
    let told = events.list(&ListParams::default()).await?;
    ensure!(
        told.iter()
            .any(|e| e.reason.as_deref() == Some("Defragmented")),
        "no event tells of it"
    );
    ensure!(
        count(&mut kv, "keep/", "keep0").await? == 100,
        "what was to stay is gone"
    );
    Ok(())
}

async fn a_lowered_quota_shows_as_no_space(world: &World) -> Result<()> {
    let kv = KvClient::new(world.connect("life").await?);
    fill(&kv, "live", 80).await?;
    world.patch(json!({ "quota": "4Mi" })).await?;
    let what = "the store runs with the lower quota";
    world
        .wait_status("life", what, 2 * MINUTE, |object| {
            condition(object, "Ready", "True") && object.data["status"]["sizes"]["quota"] == 4 << 20
        })
        .await?;
    let refused = wait_for("a write is refused for want of space", MINUTE, || async {
        match put(&mut kv.clone(), "one/more", vec![b'z'; 100 << 10]).await {
            Ok(()) => bail!("the write was taken"),
            Err(status) if status.code() == tonic::Code::ResourceExhausted => Ok(Some(status)),
            Err(status) => Err(status.into()),
        }
    })
    .await?;
    ensure!(
        refused.message().contains("database space exceeded"),
        "{refused}"
    );
    let status = world
        .wait_status("life", "NOSPACE is visible", MINUTE, |object| {
            condition(object, "NoSpace", "True")
                && object.data["status"]["alarms"] == json!(["NOSPACE"])
        })
        .await?;
    let message = status["message"].as_str().unwrap_or_default();
    ensure!(message.contains("NOSPACE"), "kubectl shows {message:?}");

    world.patch(json!({ "quota": "128Mi" })).await?;
    world
        .wait_status("life", "room again lifts it", 2 * MINUTE, |object| {
            condition(object, "NoSpace", "False") && condition(object, "Ready", "True")
        })
        .await?;
    wait_for("writes are taken again", MINUTE, || async {
        put(&mut kv.clone(), "one/more", b"z".to_vec()).await?;
        Ok(Some(()))
    })
    .await
}

async fn a_restored_store_holds_the_same_at_a_later_revision(world: &World) -> Result<()> {
    let mut old = KvClient::new(world.connect("life").await?);
    let before = everything(&mut old).await?;
    addons::apply(&world.cluster.kubeconfig(0), BY_HAND)?;
    let taken = wait_for("the backup by hand succeeds", 2 * MINUTE, || async {
        let backups = world.backups().await?;
        let ours = backups.into_iter().find(|b| b.name_any() == "by-hand");
        let ours = ours.context("the backup is there")?;
        ensure!(
            condition(&ours, "Succeeded", "True"),
            "{}",
            ours.data["status"]
        );
        Ok(Some(ours.data["status"].clone()))
    })
    .await?;
    let revision = taken["revision"].as_i64();
    let revision = revision.context("a backup has a revision")?;
    ensure!(
        revision >= before.revision,
        "{revision} is older than the store"
    );
    // What is written afterwards must not be in the restored store.
    put(&mut old, "after/backup", b"x".to_vec()).await?;

    addons::apply(&world.cluster.kubeconfig(0), RESTORED)?;
    operator::wait_cluster_ready(&world.client, "again", 3 * MINUTE).await?;
    let channel = world.connect("again").await?;
    let mut new = KvClient::new(channel.clone());
    let after = everything(&mut new).await?;
    ensure!(
        after.pairs == before.pairs,
        "the restored store holds other data"
    );
    ensure!(
        after.revision >= revision + BUMP,
        "the restored store is at {}, the backup at {revision}",
        after.revision
    );
    watch_is_compacted(channel, revision).await?;
    let status = world.status("StoreCluster", "again").await?;
    ensure!(status["restore"]["backupName"] == "by-hand", "{status}");
    let old_id = world.status("StoreCluster", "life").await?["clusterID"].clone();
    ensure!(
        status["clusterID"] != old_id,
        "a restored store is another cluster"
    );
    Ok(())
}

/// A watcher of the old store's time must learn that it has missed something.
async fn watch_is_compacted(channel: Channel, revision: i64) -> Result<()> {
    let create = WatchCreateRequest {
        key: "keep/".into(),
        range_end: "keep0".into(),
        start_revision: revision,
        ..WatchCreateRequest::default()
    };
    let request = WatchRequest {
        request_union: Some(RequestUnion::CreateRequest(create)),
    };
    let requests = futures::stream::iter([request]).chain(futures::stream::pending());
    let mut answers = WatchClient::new(channel)
        .watch(requests)
        .await?
        .into_inner();
    let compacted = async {
        while let Some(answer) = answers.message().await? {
            if answer.canceled || answer.compact_revision > 0 {
                return anyhow::Ok(answer.compact_revision);
            }
        }
        bail!("the stream ended")
    };
    let told = tokio::time::timeout(MINUTE, compacted).await;
    let at = told.context("the watcher is never told")??;
    ensure!(at >= revision, "it is told of compaction at {at}");
    Ok(())
}

/// The API server itself refuses what the CRD's rules forbid.
fn a_refused_spec_says_why(world: &World) -> Result<()> {
    for (spec, words) in [
        ("replicas: 2", "must be odd"),
        ("storage: {size: 512Mi}", "must not shrink"),
        (
            "backup: {schedule: daily, storage: {pvc: {size: 1Gi}}}",
            "must have five cron fields",
        ),
        (
            "bootstrap: {restore: {backupRef: {name: x}}}",
            "must not be added or removed after creation",
        ),
    ] {
        let patch = ["patch", "storecluster", "life", "--type=merge", "--patch"];
        let json = serde_yaml_ng::from_str::<Value>(&format!("spec: {{{spec}}}"))?.to_string();
        let arguments: Vec<&str> = patch.into_iter().chain([json.as_str()]).collect();
        let Err(refusal) = addons::kubectl(&world.cluster.kubeconfig(0), &arguments, "") else {
            bail!("{spec} was taken");
        };
        let said = format!("{refusal:#}");
        ensure!(said.contains(words), "{spec}: {said}");
    }
    Ok(())
}

/// Writes `count` values of 100 KiB below a prefix, several at a time.
async fn fill(kv: &KvClient<Channel>, prefix: &str, count: i32) -> Result<()> {
    let puts = futures::stream::iter(0..count).map(|n| {
        let mut kv = kv.clone();
        let key = format!("{prefix}/{n:03}");
        async move { put(&mut kv, &key, vec![b'x'; 100 << 10]).await }
    });
    let done: Vec<Result<(), tonic::Status>> = puts.buffer_unordered(16).collect().await;
    done.into_iter().collect::<Result<(), _>>()?;
    Ok(())
}

async fn put(kv: &mut KvClient<Channel>, key: &str, value: Vec<u8>) -> Result<(), tonic::Status> {
    let request = PutRequest {
        key: key.to_owned().into(),
        value: value.into(),
        ..PutRequest::default()
    };
    kv.put(request).await.map(|_| ())
}

async fn count(kv: &mut KvClient<Channel>, from: &str, to: &str) -> Result<i64> {
    let request = RangeRequest {
        key: from.to_owned().into(),
        range_end: to.to_owned().into(),
        count_only: true,
        ..RangeRequest::default()
    };
    Ok(kv.range(request).await?.into_inner().count)
}

/// Keys and values, and the revision they were read at.
struct Contents {
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
    revision: i64,
}

/// All small keys, and some of the large ones: an answer must stay below the limit of a message.
async fn everything(kv: &mut KvClient<Channel>) -> Result<Contents> {
    let mut pairs = Vec::new();
    let mut revision = 0;
    for (from, to) in [
        ("keep/", "keep0"),
        ("one/", "one0"),
        ("after/", "after0"),
        ("live/000", "live/001"),
        ("live/040", "live/041"),
        ("live/079", "live/080"),
    ] {
        let request = RangeRequest {
            key: from.into(),
            range_end: to.into(),
            ..RangeRequest::default()
        };
        let answer = kv.range(request).await?.into_inner();
        revision = answer.header.context("an answer has a header")?.revision;
        let found = answer.kvs.into_iter();
        pairs.extend(found.map(|kv| (kv.key.to_vec(), kv.value.to_vec())));
    }
    ensure!(pairs.len() >= 103, "only {} keys were found", pairs.len());
    Ok(Contents { pairs, revision })
}
