//! The library's own suite for what it is built on: our log and state machine.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Debug;
use std::io;
use std::ops::RangeBounds;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::etcdserverpb::InternalRaftRequest;
use ballast_server::apply::{Answer, Applied, Apply, GroupMember};
use ballast_server::raft::RaftOptions;
use ballast_server::raft::command::TypeConfig;
use ballast_server::raft::log_store::LogStore;
use ballast_server::raft::open::open_storage;
use ballast_server::raft::state_machine::StateMachine;
use ballast_storage::LogPosition;
use ballast_storage::backend::Kind;
use ballast_storage::mvcc::{Store, StoreOptions};
use ballast_storage::schema::{Table, meta};
use bytes::Bytes;
use openraft::alias::{EntryOf, LogIdOf, VoteOf};
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::testing::log::{StoreBuilder, Suite};
use openraft::{LogId, OptionalSend, RaftLogReader, StorageError};

#[derive(Debug)]
struct Nothing(Arc<Store>);

impl Apply for Nothing {
    fn apply(&self, at: LogPosition, _request: &InternalRaftRequest) -> Applied {
        self.apply_empty(at);
        Applied {
            revision: 0,
            result: Ok(Answer::Nothing),
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

/// The suite begins some logs at the library's second index. Ours have no gaps: fill in what is missing.
struct Padded(LogStore);

impl RaftLogReader<TypeConfig> for Padded {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<EntryOf<TypeConfig>>, io::Error> {
        self.0.try_get_log_entries(range).await
    }

    async fn read_vote(&mut self) -> Result<Option<VoteOf<TypeConfig>>, io::Error> {
        self.0.read_vote().await
    }

    async fn limited_get_log_entries(
        &mut self,
        start: u64,
        end: u64,
    ) -> Result<Vec<EntryOf<TypeConfig>>, io::Error> {
        self.0.limited_get_log_entries(start, end).await
    }
}

impl RaftLogStorage<TypeConfig> for Padded {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig>, io::Error> {
        self.0.get_log_state().await
    }

    async fn get_log_reader(&mut self) -> Self {
        Self(self.0.clone())
    }

    async fn save_vote(&mut self, vote: &VoteOf<TypeConfig>) -> Result<(), io::Error> {
        self.0.save_vote(vote).await
    }

    async fn save_committed(
        &mut self,
        committed: Option<LogIdOf<TypeConfig>>,
    ) -> Result<(), io::Error> {
        self.0.save_committed(committed).await
    }

    async fn read_committed(&mut self) -> Result<Option<LogIdOf<TypeConfig>>, io::Error> {
        self.0.read_committed().await
    }

    async fn append<I>(
        &mut self,
        entries: I,
        callback: IOFlushed<TypeConfig>,
    ) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = EntryOf<TypeConfig>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut entries: Vec<EntryOf<TypeConfig>> = entries.into_iter().collect();
        let next = match self.get_log_state().await?.last_log_id {
            Some(last) => last.index() + 1,
            None => 0,
        };
        let leader = *entries[0].log_id.committed_leader_id();
        for index in (next..entries[0].log_id.index()).rev() {
            entries.insert(
                0,
                EntryOf::<TypeConfig>::new_blank(LogId::new(leader, index)),
            );
        }
        self.0.append(entries, callback).await
    }

    async fn truncate_after(&mut self, last: Option<LogIdOf<TypeConfig>>) -> Result<(), io::Error> {
        self.0.truncate_after(last).await
    }

    async fn purge(&mut self, upto: LogIdOf<TypeConfig>) -> Result<(), io::Error> {
        self.0.purge(upto).await
    }
}

struct Builder(Kind);

impl StoreBuilder<TypeConfig, Padded, StateMachine, tempfile::TempDir> for Builder {
    async fn build(
        &self,
    ) -> Result<(tempfile::TempDir, Padded, StateMachine), StorageError<TypeConfig>> {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(StoreOptions {
            dir: dir.path().join("db"),
            engine: self.0,
            value_cache_bytes: 1 << 20,
            engine_cache_bytes: 1 << 20,
            compaction_batch_limit: 1000,
            compaction_sleep: Duration::from_millis(1),
            batch_interval: Duration::from_millis(1),
            batch_limit: 1000,
        })
        .unwrap();
        let options = RaftOptions::new(1, 1, dir.path().join("wal"));
        let apply = Arc::new(Nothing(Arc::clone(&store)));
        let (log, machine) = open_storage(&options, &store, apply).await.unwrap();
        // The suite applies entries that were never in the log.
        store.set_log_synced(u64::MAX);
        Ok((dir, Padded(log), machine))
    }
}

type Library = Suite<TypeConfig, Padded, StateMachine, Builder, tempfile::TempDir>;

/// All of it but the suite's last part, which hands one machine's marker to another as if it were a snapshot: that is refused, and only that.
/// What members send each other is a file, and has tests of its own (tests/cluster, mvcc/install.rs).
async fn passes_up_to_installing_a_snapshot(kind: Kind) {
    let refused = Library::test_all(Builder(kind)).await.unwrap_err();
    let refused = refused.to_string();
    assert!(
        refused.contains("a snapshot of this member's own engine"),
        "{refused}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_librarys_storage_suite_passes_on_redb() {
    passes_up_to_installing_a_snapshot(Kind::Redb).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_librarys_storage_suite_passes_on_sled() {
    passes_up_to_installing_a_snapshot(Kind::Sled).await;
}
