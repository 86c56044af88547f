//! Whole passes against an API server in memory and a store that says what the test wants.
//! One scenario per test: what a user does, and what is there afterwards.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::fake_kube::FakeKube;
use crate::support::{cluster_with, report, settings};
use async_trait::async_trait;
use ballast_operator::context::Context;
use ballast_operator::crd::{StoreBackup, StoreCluster};
use ballast_operator::events::Events;
use ballast_operator::metrics::Metrics;
use ballast_operator::store_client::{StoreClient, StoreError, StoreReport};
use ballast_operator::{backup, cluster};
use kube::core::DeserializeGuard;
use serde_json::{Value, json};

const CLUSTERS: &str = "apis/ballast.dev/v1alpha1/namespaces/default/storeclusters";
const BACKUPS: &str = "apis/ballast.dev/v1alpha1/namespaces/default/storebackups";
const PODS: &str = "api/v1/namespaces/default/pods";
const CLAIMS: &str = "api/v1/namespaces/default/persistentvolumeclaims";
const SERVICES: &str = "api/v1/namespaces/default/services";
const EVENTS: &str = "apis/events.k8s.io/v1/namespaces/default/events";

/// A store in memory: what it reports, and what it was asked to do.
#[derive(Default)]
struct FakeStore {
    report: Mutex<Option<StoreReport>>,
    calls: Mutex<Vec<&'static str>>,
}

impl FakeStore {
    fn says(&self, report: Option<StoreReport>) {
        *self.report.lock().unwrap() = report;
    }

    fn calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

#[async_trait]
impl StoreClient for FakeStore {
    async fn report(&self, endpoint: &str) -> Result<StoreReport, StoreError> {
        self.report
            .lock()
            .unwrap()
            .clone()
            .ok_or_else(|| StoreError::Connect {
                endpoint: endpoint.to_owned(),
                reason: "connection refused".to_owned(),
            })
    }

    async fn defragment(&self, _: &str) -> Result<(), StoreError> {
        self.calls.lock().unwrap().push("defragment");
        if let Some(report) = self.report.lock().unwrap().as_mut() {
            report.db_size = report.db_size_in_use;
        }
        Ok(())
    }

    async fn disarm_no_space(&self, _: &str, _: u64) -> Result<(), StoreError> {
        self.calls.lock().unwrap().push("disarm");
        if let Some(report) = self.report.lock().unwrap().as_mut() {
            report.no_space = false;
        }
        Ok(())
    }
}

struct World {
    kube: FakeKube,
    store: Arc<FakeStore>,
    ctx: Arc<Context>,
}

impl World {
    fn new() -> Self {
        let kube = FakeKube::default();
        let store = Arc::new(FakeStore::default());
        let ctx = Arc::new(Context {
            client: kube.client(),
            store: store.clone(),
            settings: settings(),
            events: Events::new(kube.client(), Some("test".to_owned())),
            metrics: Arc::new(Metrics::new()),
            resync: Duration::from_secs(30),
            retry_after: Duration::from_secs(1),
        });
        Self { kube, store, ctx }
    }

    /// A user applies a StoreCluster without a schedule, so that the wall clock decides nothing.
    fn apply(&self, change: Value) {
        let mut object =
            serde_json::to_value(cluster_with(json!({ "backup": { "schedule": null } }))).unwrap();
        crate::support::merge(&mut object["spec"], change);
        object["metadata"]["uid"] = Value::Null;
        self.kube.put(CLUSTERS, object);
    }

    fn cluster(&self) -> Value {
        self.kube
            .get(CLUSTERS, "sample")
            .expect("the StoreCluster is there")
    }

    fn condition(&self, type_: &str) -> Value {
        let cluster = self.cluster();
        let all = cluster["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        all.into_iter()
            .find(|c| c["type"] == type_)
            .unwrap_or(Value::Null)
    }

    /// One pass over the StoreCluster; an error is the text of it.
    async fn pass(&self) -> Result<(), String> {
        let Some(object) = self.kube.get(CLUSTERS, "sample") else {
            return Ok(());
        };
        let guard: DeserializeGuard<StoreCluster> = serde_json::from_value(object).unwrap();
        let result = cluster::reconcile(Arc::new(guard), self.ctx.clone()).await;
        result.map(|_| ()).map_err(|e| e.to_string())
    }

    async fn backup_pass(&self, name: &str) -> Result<(), String> {
        let Some(object) = self.kube.get(BACKUPS, name) else {
            return Ok(());
        };
        let guard: DeserializeGuard<StoreBackup> = serde_json::from_value(object).unwrap();
        let result = backup::reconcile(Arc::new(guard), self.ctx.clone()).await;
        result.map(|_| ()).map_err(|e| e.to_string())
    }

    /// Passes until one writes nothing.
    async fn settle(&self) {
        for _ in 0..30 {
            self.kube.writes();
            self.pass().await.unwrap();
            if self.kube.writes().is_empty() {
                return;
            }
        }
        panic!("the operator never comes to rest");
    }

    /// The kubelet brings the pod up, and the store in it answers.
    fn kubelet_starts(&self) {
        self.kube.change(
            PODS,
            "sample-0",
            json!({ "status": {
                "phase": "Running",
                "podIP": "10.0.0.7",
                "conditions": [{ "type": "Ready", "status": "True" }],
            } }),
        );
        self.store.says(Some(report()));
    }

    async fn running(change: Value) -> Self {
        let world = Self::new();
        world.apply(change);
        world.settle().await;
        world.kubelet_starts();
        world.settle().await;
        world
    }

    fn event_reasons(&self) -> Vec<String> {
        let names = self.kube.names(EVENTS);
        let reason = |name: &String| self.kube.get(EVENTS, name).unwrap()["reason"].clone();
        names
            .iter()
            .map(|n| reason(n).as_str().unwrap_or_default().to_owned())
            .collect()
    }
}

#[tokio::test]
async fn an_applied_store_becomes_ready_and_then_nothing_more_is_written() {
    let world = World::new();
    world.apply(json!({}));
    world.settle().await;
    assert_eq!(world.kube.names(PODS), ["sample-0"]);
    assert_eq!(world.kube.names(CLAIMS), ["data-sample-0", "sample-backup"]);
    assert_eq!(world.kube.names(SERVICES), ["sample", "sample-client"]);
    assert_eq!(world.condition("Ready")["status"], "False");
    assert_eq!(world.condition("Progressing")["reason"], "PodStarting");

    world.kubelet_starts();
    world.settle().await;
    assert_eq!(world.condition("Ready")["status"], "True");
    assert_eq!(world.condition("Progressing")["reason"], "UpToDate");
    assert_eq!(world.condition("Degraded")["status"], "False");
    let status = world.cluster()["status"].clone();
    assert_eq!(status["clusterID"], "abc");
    assert_eq!(status["endpoint"], "http://sample-client.default.svc:2379");
    assert_eq!(status["observedGeneration"], 1);

    world.kube.writes();
    for _ in 0..3 {
        world.pass().await.unwrap();
    }
    assert_eq!(world.kube.writes(), Vec::<String>::new());
}

#[tokio::test]
async fn one_pass_changes_one_object() {
    let world = World::new();
    world.apply(json!({}));
    world.pass().await.unwrap();
    assert!(
        world.kube.names(SERVICES).is_empty(),
        "the first pass only takes the finalizer"
    );
    for _ in 0..10 {
        world.kube.writes();
        world.pass().await.unwrap();
        let objects: Vec<_> = world
            .kube
            .writes()
            .into_iter()
            .filter(|w| !w.contains("/events") && !w.ends_with("/status"))
            .collect();
        assert!(objects.len() <= 1, "{objects:?}");
    }
}

#[tokio::test]
async fn more_replicas_than_one_are_answered_with_a_condition() {
    let world = World::new();
    world.apply(json!({ "replicas": 3 }));
    world.settle().await;
    assert_eq!(world.condition("Ready")["reason"], "ReplicasNotSupported");
    assert_eq!(world.condition("Degraded")["status"], "True");
    assert!(world.kube.names(PODS).is_empty());
}

#[tokio::test]
async fn a_spec_that_cannot_be_followed_is_answered_with_a_condition() {
    let world = World::new();
    world.apply(json!({ "quota": "8Gi" }));
    world.settle().await;
    let degraded = world.condition("Degraded");
    assert_eq!(degraded["reason"], "InvalidSpec");
    assert!(
        degraded["message"]
            .as_str()
            .unwrap()
            .contains("must be smaller than the volume")
    );
}

#[tokio::test]
async fn deletion_waits_for_the_pods_and_then_lets_go() {
    let world = World::running(json!({})).await;
    world.kube.change(
        PODS,
        "sample-0",
        json!({ "metadata": { "finalizers": ["kubelet"] } }),
    );
    world.kube.delete(CLUSTERS, "sample");
    world.kube.writes();
    assert!(world.pass().await.is_err(), "the pod is on its way");
    assert!(world.pass().await.is_err());
    let deletes = world
        .kube
        .writes()
        .iter()
        .filter(|w| w.starts_with("DELETE"))
        .count();
    assert_eq!(deletes, 1, "a pod that is going is not deleted again");
    assert!(world.kube.get(CLUSTERS, "sample").is_some());
    world.kube.vanish(PODS, "sample-0");
    world.pass().await.unwrap();
    assert!(world.kube.get(CLUSTERS, "sample").is_none());
}

#[tokio::test]
async fn a_volume_that_is_to_stay_loses_its_owner_before_the_owner_goes() {
    let world = World::running(json!({})).await;
    let owners =
        || world.kube.get(CLAIMS, "data-sample-0").unwrap()["metadata"]["ownerReferences"].clone();
    assert!(owners().is_array());
    let retain = json!({ "spec": { "storage": { "whenDeleted": "Retain" } } });
    world.kube.change(CLUSTERS, "sample", retain);
    world.kube.delete(CLUSTERS, "sample");
    assert!(world.pass().await.is_err());
    world.pass().await.unwrap();
    assert!(world.kube.get(CLUSTERS, "sample").is_none());
    assert!(owners().is_null());
}

/// A pod that is being deleted must not be replaced under its own name before it is gone.
#[tokio::test]
async fn a_pod_that_is_going_is_waited_for() {
    let world = World::running(json!({})).await;
    world.kube.change(
        PODS,
        "sample-0",
        json!({ "metadata": { "deletionTimestamp": "2026-03-01T00:10:00Z" } }),
    );
    world.kube.writes();
    world.settle().await;
    assert_eq!(
        world.condition("Progressing")["reason"],
        "ObjectTerminating"
    );
    let touched = world.kube.writes().iter().any(|w| w.contains("/pods"));
    assert!(!touched);
}

#[tokio::test]
async fn a_lost_pod_comes_back_on_the_same_volume_as_an_existing_member() {
    let world = World::running(json!({})).await;
    let claim = world.kube.get(CLAIMS, "data-sample-0").unwrap();
    world.kube.vanish(PODS, "sample-0");
    world.store.says(None);
    world.settle().await;
    let pod = world.kube.get(PODS, "sample-0").expect("a new pod");
    let args = pod["spec"]["containers"][0]["args"].to_string();
    assert!(args.contains("--initial-cluster-state=existing"), "{args}");
    assert_eq!(
        world.kube.get(CLAIMS, "data-sample-0").unwrap()["metadata"]["uid"],
        claim["metadata"]["uid"]
    );
    assert_ne!(world.condition("Ready")["status"], "True");
}

#[tokio::test]
async fn a_lost_volume_is_reported_and_never_replaced() {
    let world = World::running(json!({})).await;
    world.kube.vanish(CLAIMS, "data-sample-0");
    world.kube.vanish(PODS, "sample-0");
    world.settle().await;
    assert_eq!(world.condition("Degraded")["reason"], "VolumeLost");
    assert!(world.kube.get(CLAIMS, "data-sample-0").is_none());
}

#[tokio::test]
async fn a_store_that_falls_silent_is_not_called_ready() {
    let world = World::running(json!({})).await;
    world.store.says(None);
    world.settle().await;
    assert_eq!(world.condition("Ready")["status"], "Unknown");
    assert_eq!(world.condition("Ready")["reason"], "StoreUnreachable");
    assert!(
        world
            .event_reasons()
            .contains(&"StoreUnreachable".to_owned())
    );
}

#[tokio::test]
async fn a_changed_quota_replaces_the_pod() {
    let world = World::running(json!({})).await;
    world
        .kube
        .change(CLUSTERS, "sample", json!({ "spec": { "quota": "2Gi" } }));
    world.pass().await.unwrap();
    assert!(world.kube.get(PODS, "sample-0").is_none());
    world.settle().await;
    let pod = world.kube.get(PODS, "sample-0").unwrap();
    let args = pod["spec"]["containers"][0]["args"].to_string();
    assert!(args.contains("--quota-backend-bytes=2147483648"), "{args}");
}

#[tokio::test]
async fn an_empty_database_is_defragmented_once_and_the_figures_are_kept() {
    let world = World::running(json!({})).await;
    world.store.says(Some(StoreReport {
        db_size_in_use: 20 << 20,
        ..report()
    }));
    world.settle().await;
    assert_eq!(world.store.calls(), ["defragment"]);
    let last = world.cluster()["status"]["lastDefragmentation"].clone();
    assert_eq!(last["beforeBytes"], 200 << 20);
    assert_eq!(last["afterBytes"], 20 << 20);
    assert!(world.event_reasons().contains(&"Defragmented".to_owned()));
}

/// The controller's cache lags behind what the last pass wrote.
#[tokio::test]
async fn an_old_copy_of_the_object_does_not_undo_what_was_written_since() {
    let world = World::running(json!({})).await;
    let old = world.cluster();
    world.store.says(Some(StoreReport {
        db_size_in_use: 20 << 20,
        ..report()
    }));
    world.settle().await;
    let guard: DeserializeGuard<StoreCluster> = serde_json::from_value(old).unwrap();
    cluster::reconcile(Arc::new(guard), world.ctx.clone())
        .await
        .unwrap();
    assert!(world.cluster()["status"]["lastDefragmentation"].is_object());
}

#[tokio::test]
async fn no_space_is_shown_while_it_lasts_and_lifted_when_there_is_room() {
    let world = World::running(json!({})).await;
    let full = StoreReport {
        db_size: 1 << 30,
        db_size_in_use: 1 << 30,
        no_space: true,
        ..report()
    };
    world.store.says(Some(full));
    world.settle().await;
    let condition = world.condition("NoSpace");
    assert_eq!(
        (&condition["status"], &condition["reason"]),
        (&json!("True"), &json!("AlarmRaised"))
    );
    assert_eq!(world.cluster()["status"]["alarms"], json!(["NOSPACE"]));
    assert_eq!(
        world.condition("Ready")["status"],
        "True",
        "reads are served"
    );
    assert!(
        world.store.calls().is_empty(),
        "nothing but a person can help"
    );

    world.store.says(Some(StoreReport {
        no_space: true,
        ..report()
    }));
    world.settle().await;
    assert_eq!(world.store.calls(), ["disarm"]);
    assert_eq!(world.condition("NoSpace")["status"], "False");
}

#[tokio::test]
async fn a_refused_change_degrades_and_does_not_hold_up_the_rest() {
    let world = World::running(json!({})).await;
    world
        .kube
        .refuse("persistentvolumeclaims/data-sample-0", 403);
    world.kube.change(
        CLUSTERS,
        "sample",
        json!({ "spec": { "storage": { "size": "8Gi" } } }),
    );
    assert!(world.pass().await.is_err());
    assert_eq!(world.condition("Degraded")["reason"], "UpdateVolumeRefused");
    assert_eq!(world.condition("Ready")["status"], "True");
    world.store.says(Some(StoreReport {
        db_size_in_use: 20 << 20,
        ..report()
    }));
    world.pass().await.unwrap();
    assert_eq!(world.store.calls(), ["defragment"]);
}

fn backup_object(name: &str) -> Value {
    json!({
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "StoreBackup",
        "metadata": {
            "name": name,
            "creationTimestamp": ballast_operator::clock::now().0.to_string(),
        },
        "spec": { "clusterRef": { "name": "sample" } },
    })
}

fn finish_pod(world: &World, pod: &str, phase: &str, message: &str) {
    let code = i32::from(phase == "Failed");
    world.kube.change(
        PODS,
        pod,
        json!({ "status": { "phase": phase, "containerStatuses": [{
            "name": "backup", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "terminated": { "exitCode": code, "message": message } },
        }] } }),
    );
}

#[tokio::test]
async fn a_backup_made_by_hand_runs_is_recorded_and_removes_its_file_when_deleted() {
    let world = World::running(json!({})).await;
    world.kube.put(BACKUPS, backup_object("by-hand"));
    for _ in 0..4 {
        world.backup_pass("by-hand").await.unwrap();
    }
    let status = world.kube.get(BACKUPS, "by-hand").unwrap()["status"].clone();
    assert_eq!(status["conditions"][0]["reason"], "Running");
    assert!(
        status["startTime"].is_string(),
        "intent is recorded before the pod"
    );
    assert_eq!(world.kube.names(PODS), ["by-hand-run", "sample-0"]);

    let said = r#"{"revision":1234,"totalKeys":7,"sizeBytes":20512,"sha256":"aa"}"#;
    finish_pod(&world, "by-hand-run", "Succeeded", said);
    for _ in 0..3 {
        world.backup_pass("by-hand").await.unwrap();
    }
    let status = world.kube.get(BACKUPS, "by-hand").unwrap()["status"].clone();
    assert_eq!(status["conditions"][0]["status"], "True");
    assert_eq!(status["revision"], 1234);
    assert_eq!(
        world.kube.names(PODS),
        ["sample-0"],
        "the pod is tidied away"
    );
    world.settle().await;
    assert_eq!(world.cluster()["status"]["lastBackup"]["name"], "by-hand");
    assert_eq!(world.condition("BackupReady")["status"], "True");

    world.kube.delete(BACKUPS, "by-hand");
    assert!(world.backup_pass("by-hand").await.is_err());
    let pod = world
        .kube
        .get(PODS, "by-hand-remove")
        .expect("a pod removes the file");
    let path = status["location"]["path"].as_str().unwrap();
    assert!(
        pod["spec"]["containers"][0]["args"]
            .to_string()
            .contains(path)
    );
    finish_pod(&world, "by-hand-remove", "Succeeded", "");
    world.backup_pass("by-hand").await.unwrap();
    assert!(world.kube.get(BACKUPS, "by-hand").is_none());
    assert_eq!(world.kube.names(PODS), ["sample-0"]);
}

#[tokio::test]
async fn a_backup_that_fails_three_times_says_why() {
    let world = World::running(json!({})).await;
    world.kube.put(BACKUPS, backup_object("b"));
    world.backup_pass("b").await.unwrap();
    world.backup_pass("b").await.unwrap();
    for _ in 0..3 {
        world.backup_pass("b").await.unwrap();
        finish_pod(&world, "b-run", "Failed", "no space left on device");
        world.backup_pass("b").await.unwrap();
    }
    let status = world.kube.get(BACKUPS, "b").unwrap()["status"].clone();
    assert_eq!(status["conditions"][0]["status"], "False");
    assert_eq!(status["message"], "no space left on device");
    world.settle().await;
    assert_eq!(world.condition("BackupReady")["reason"], "LastBackupFailed");
}

#[tokio::test]
async fn a_backup_of_a_store_without_backup_storage_is_rejected() {
    let world = World::running(json!({ "backup": null })).await;
    world.kube.put(BACKUPS, backup_object("b"));
    world.backup_pass("b").await.unwrap();
    world.backup_pass("b").await.unwrap();
    let status = world.kube.get(BACKUPS, "b").unwrap()["status"].clone();
    assert_eq!(status["conditions"][0]["reason"], "Rejected");
}

#[tokio::test]
async fn a_backup_whose_volume_is_gone_can_be_deleted() {
    let world = World::running(json!({})).await;
    let mut object = serde_json::to_value(crate::support::backup("b", "uid", Some(true))).unwrap();
    object["metadata"]["finalizers"] = json!(["ballast.dev/backup"]);
    world.kube.put(BACKUPS, object);
    world.kube.vanish(CLAIMS, "sample-backup");
    world.kube.delete(BACKUPS, "b");
    world.backup_pass("b").await.unwrap();
    assert!(world.kube.get(BACKUPS, "b").is_none());
    assert!(world.event_reasons().contains(&"FileRemains".to_owned()));
}

#[tokio::test]
async fn a_restored_store_starts_with_the_backup_and_remembers_it() {
    let world = World::new();
    world.kube.put(
        BACKUPS,
        serde_json::to_value(crate::support::backup("before", "uid-of-old", Some(true))).unwrap(),
    );
    world.apply(json!({ "bootstrap": { "restore": { "backupRef": { "name": "before" } } } }));
    world.settle().await;
    let pod = world
        .kube
        .get(PODS, "sample-0")
        .expect("the backup is there");
    let args = pod["spec"]["initContainers"][1]["args"].to_string();
    assert!(args.contains("--bump-revision=1000000000") && args.contains("--mark-compacted"));
    assert!(args.contains("uid-of-old/before.db"), "{args}");
    world.kubelet_starts();
    world.settle().await;
    let restore = world.cluster()["status"]["restore"].clone();
    assert_eq!(restore["backupName"], "before");
    assert_eq!(restore["backupRevision"], 1000);
    assert!(
        world.kube.get(PODS, "sample-0").is_some(),
        "and is not replaced for having begun so"
    );
}

#[tokio::test]
async fn an_object_that_cannot_be_read_is_left_alone() {
    let world = World::new();
    let broken = json!({
        "apiVersion": "ballast.dev/v1alpha1", "kind": "StoreCluster",
        "metadata": { "name": "sample" }, "spec": { "replicas": "many" },
    });
    world.kube.put(CLUSTERS, broken);
    world.kube.writes();
    world.pass().await.unwrap();
    assert!(world.kube.writes().is_empty());
}
