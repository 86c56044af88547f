//! One member, from its log to its answers: with a store and the plainest applier.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::etcdserverpb::{InternalRaftRequest, PutRequest, PutResponse};
use ballast_storage::LogPosition;
use ballast_storage::backend::Kind;
use ballast_storage::mvcc::{RangeOptions, Store, StoreOptions};
use ballast_storage::schema::{Table, meta};
use bytes::Bytes;

use super::command::restored_membership;
use super::node::RaftOptions;
use super::open::begin_restored_log;
use super::{PeerNode, ProposeError, RaftNode};
use crate::apply::{Answer, Applied, Apply, GroupMember};

/// Puts, and nothing else.
#[derive(Debug)]
struct Puts(Arc<Store>);

impl Apply for Puts {
    fn apply(&self, at: LogPosition, request: &InternalRaftRequest) -> Applied {
        let mut txn = self.0.begin(at);
        if let Some(put) = &request.put {
            txn.put(put.key.clone(), put.value.clone(), 0).unwrap();
        }
        Applied {
            revision: txn.commit().revision,
            result: Ok(Answer::Put(PutResponse::default())),
        }
    }

    fn apply_empty(&self, at: LogPosition) {
        self.0.begin(at).commit();
    }

    fn apply_membership(&self, at: LogPosition, _members: &[GroupMember], stored: Bytes) {
        let mut txn = self.0.begin(at);
        txn.table_put(Table::Meta, meta::RAFT_MEMBERSHIP, stored);
        txn.commit();
    }
}

struct Member {
    node: Arc<RaftNode>,
    store: Arc<Store>,
}

pub(super) fn store(dir: &Path) -> Arc<Store> {
    Store::open(StoreOptions {
        dir: dir.join("db"),
        engine: Kind::Redb,
        value_cache_bytes: 1 << 20,
        engine_cache_bytes: 1 << 20,
        compaction_batch_limit: 1000,
        compaction_sleep: Duration::from_millis(1),
        batch_interval: Duration::from_millis(10),
        batch_limit: 1000,
    })
    .unwrap()
}

fn options(dir: &Path) -> RaftOptions {
    RaftOptions {
        snapshot_count: 50,
        catchup_entries: 10,
        ..RaftOptions::new(7, 0xc1, dir.join("wal"))
    }
}

async fn start(dir: &Path) -> Member {
    start_with(dir, options(dir)).await
}

async fn start_with(dir: &Path, options: RaftOptions) -> Member {
    let store = store(dir);
    let apply = Arc::new(Puts(Arc::clone(&store)));
    let node = RaftNode::start(options, Arc::clone(&store), apply)
        .await
        .unwrap();
    Member { node, store }
}

impl Member {
    async fn put(&self, key: &str, value: &str) -> Result<i64, ProposeError> {
        let put = PutRequest {
            key: Bytes::copy_from_slice(key.as_bytes()),
            value: Bytes::copy_from_slice(value.as_bytes()),
            ..PutRequest::default()
        };
        let request = InternalRaftRequest {
            put: Some(put),
            ..InternalRaftRequest::default()
        };
        Ok(self.node.propose(request).await?.revision)
    }

    async fn get(&self, key: &str) -> Option<Bytes> {
        self.node.read_barrier().await.unwrap();
        let view = self.store.view();
        let found = view
            .range(key.as_bytes(), b"", &RangeOptions::default())
            .unwrap();
        found.kvs.first().map(|kv| kv.value.clone())
    }

    async fn stop(self) {
        self.node.shutdown().await;
        self.store.close().unwrap();
    }
}

/// force-new-cluster: what a member holds goes on without those it was one of three with.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_left_alone_is_forced_to_be_a_group_and_stays_one() {
    let dir = tempfile::tempdir().unwrap();
    let of_three = RaftOptions {
        founders: Some([7, 8, 9].map(|id| (id, PeerNode::default())).into()),
        ..options(dir.path())
    };
    let member = start_with(dir.path(), of_three).await;
    let patience = Duration::from_secs(2);
    let alone = tokio::time::timeout(patience, member.put("a", "1")).await;
    assert!(alone.is_err(), "two of three are not there: {alone:?}");
    member.stop().await;
    for round in 0..2 {
        let forced = RaftOptions {
            force_alone: true,
            ..options(dir.path())
        };
        let member = start_with(dir.path(), forced).await;
        member.put(&format!("k{round}"), "v").await.unwrap();
        member.stop().await;
    }
    let member = start(dir.path()).await;
    for key in ["k0", "k1"] {
        assert_eq!(member.get(key).await.as_deref(), Some(&b"v"[..]), "{key}");
    }
    member.put("k2", "v").await.unwrap();
    member.stop().await;
}

/// Who leads was told before the member might act as the leader, and then nothing more: leases never ran out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_begins_to_lead_says_so() {
    for _ in 0..10 {
        let dir = tempfile::tempdir().unwrap();
        let member = start(dir.path()).await;
        let mut changes = member.node.changes();
        while !member.node.is_leader() {
            tokio::time::timeout(Duration::from_secs(20), changes.changed())
                .await
                .expect("leading is news")
                .unwrap();
        }
        member.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_answered_is_read_now_and_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let member = start(dir.path()).await;
    for n in 0..20 {
        member.put(&format!("k{n}"), "v").await.unwrap();
    }
    assert_eq!(member.get("k19").await.as_deref(), Some(&b"v"[..]));
    let status = member.node.status();
    assert!(member.node.is_leader());
    assert_eq!(status.leader, 7);
    // A membership, a new leader's entry, and the puts.
    assert_eq!(status.last_index, 22);
    assert_eq!(status.applied_index, 22);
    let term = status.term;
    member.stop().await;

    let member = start(dir.path()).await;
    assert_eq!(member.get("k0").await.as_deref(), Some(&b"v"[..]));
    assert_eq!(member.get("k19").await.as_deref(), Some(&b"v"[..]));
    let status = member.node.status();
    assert!(status.term > term);
    assert_eq!(status.last_index, 23);
    member.put("after", "x").await.unwrap();
    member.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_killed_before_its_engine_was_written_gets_it_from_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let copy = tempfile::tempdir().unwrap();
    let member = start(dir.path()).await;
    member.put("a", "1").await.unwrap();
    // The log as it was when `b` was answered, with an engine from long before: a kill at the worst moment.
    member.put("b", "2").await.unwrap();
    std::fs::create_dir(copy.path().join("wal")).unwrap();
    let mut files: Vec<_> = std::fs::read_dir(dir.path().join("wal"))
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    // A kill stops everything at once. A copy that takes its time must not take the proof of a sync later than what was synced.
    files.sort_by_key(|path| path.extension().is_some_and(|ext| ext == "wal"));
    for file in files {
        let name = file.file_name().unwrap();
        std::fs::copy(&file, copy.path().join("wal").join(name)).unwrap();
    }
    member.stop().await;

    let member = start(copy.path()).await;
    assert_eq!(member.get("a").await.as_deref(), Some(&b"1"[..]));
    assert_eq!(member.get("b").await.as_deref(), Some(&b"2"[..]));
    member.stop().await;
}

impl Member {
    /// Writes until entries at the log's beginning are gone.
    async fn put_until_purged(&self) {
        for n in 0..300 {
            let (key, value) = (format!("k{}", n % 7), n.to_string());
            self.put(&key, &value).await.unwrap();
        }
        let deadline = tokio::time::sleep(Duration::from_secs(30));
        tokio::pin!(deadline);
        let mut changed = self.node.applied();
        while self.node.purged_index() < 100 {
            tokio::select! {
                () = &mut deadline => panic!("the log was not purged"),
                _ = changed.changed() => {}
                _ = self.put("more", "x") => {}
            }
        }
    }
}

/// As sled leaves it when a record of its own log is damaged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_ends_before_its_log_begins_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (db, old) = (dir.path().join("db"), dir.path().join("old"));
    let member = start(dir.path()).await;
    member.put("a", "1").await.unwrap();
    member.stop().await;
    std::fs::create_dir(&old).unwrap();
    for entry in std::fs::read_dir(&db).unwrap().flatten() {
        std::fs::copy(entry.path(), old.join(entry.file_name())).unwrap();
    }
    let member = start(dir.path()).await;
    member.put_until_purged().await;
    member.stop().await;
    std::fs::remove_dir_all(&db).unwrap();
    std::fs::rename(&old, &db).unwrap();
    let store = store(dir.path());
    let apply = Arc::new(Puts(Arc::clone(&store)));
    let refused = RaftNode::start(options(dir.path()), store, apply).await;
    let error = refused.unwrap_err().to_string();
    assert!(
        error.contains("the end of the engine is missing"),
        "{error}"
    );
    assert!(error.contains("db/000001.redb"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_purged_behind_the_engine_and_a_restart_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let member = start(dir.path()).await;
    member.put_until_purged().await;
    let purged = member.node.purged_index();
    assert!(member.store.durable().index >= purged);
    member.stop().await;
    let member = start(dir.path()).await;
    assert_eq!(member.get("k0").await.as_deref(), Some(&b"294"[..]));
    assert!(member.node.purged_index() >= purged);
    member.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_made_from_a_snapshot_goes_on_behind_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = LogPosition {
        term: 4,
        index: 1000,
    };
    {
        let store = store(dir.path());
        store.set_log_synced(at.index);
        let mut txn = store.begin(at);
        txn.put("old".into(), "1".into(), 0).unwrap();
        txn.table_put(
            Table::Meta,
            meta::RAFT_MEMBERSHIP,
            restored_membership([7], at),
        );
        txn.commit();
        store.flush().unwrap();
        store.close().unwrap();
        begin_restored_log(&options(dir.path()), at).unwrap();
    }
    let member = start(dir.path()).await;
    assert_eq!(member.get("old").await.as_deref(), Some(&b"1"[..]));
    member.put("new", "2").await.unwrap();
    let status = member.node.status();
    assert_eq!(status.term, 5);
    assert_eq!(status.last_index, 1002);
    member.stop().await;
    let member = start(dir.path()).await;
    assert_eq!(member.get("new").await.as_deref(), Some(&b"2"[..]));
    member.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_without_its_log_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let member = start(dir.path()).await;
    member.put("a", "1").await.unwrap();
    member.stop().await;
    std::fs::remove_dir_all(dir.path().join("wal")).unwrap();
    let store = store(dir.path());
    let apply = Arc::new(Puts(Arc::clone(&store)));
    let refused = RaftNode::start(options(dir.path()), store, apply).await;
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("log is missing"), "{error}");
    assert!(!dir.path().join("wal").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proposals_after_a_stop_are_refused_and_not_left_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let member = start(dir.path()).await;
    member.put("a", "1").await.unwrap();
    member.node.shutdown().await;
    assert_eq!(member.put("b", "2").await, Err(ProposeError::Stopping));
    member.store.close().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_proposals_at_once_are_all_answered_in_one_order() {
    let dir = tempfile::tempdir().unwrap();
    let member = Arc::new(start(dir.path()).await);
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..500 {
        let member = Arc::clone(&member);
        tasks.spawn(async move { member.put(&format!("k{n}"), "v").await.unwrap() });
    }
    let mut revisions = Vec::new();
    while let Some(revision) = tasks.join_next().await {
        revisions.push(revision.unwrap());
    }
    revisions.sort_unstable();
    // The first write of a store is revision 2.
    assert_eq!(revisions, (2..502).collect::<Vec<i64>>());
    Arc::into_inner(member).unwrap().stop().await;
}
