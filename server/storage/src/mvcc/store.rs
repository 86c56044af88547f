//! The store's face: what apply, rpc, watch and raft ask of it.

use std::path::PathBuf;
use std::sync::Arc;

use ballast_api::mvccpb::KeyValue;
use bytes::Bytes;

use crate::LogPosition;
use crate::error::{MvccError, ReadError, StorageError};
use crate::mvcc::revision::Revision;
use crate::schema::Table;

/// How to open a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The directory of the database files (`member/db`). Made when absent.
    pub dir: PathBuf,
    /// Bytes of current values kept in memory.
    pub value_cache_bytes: u64,
    /// Bytes of the engine's own page cache.
    pub engine_cache_bytes: u64,
    /// Records deleted per step of a compaction, and the pause between steps (etcd: compaction-batch-limit, -sleep-interval).
    pub compaction_batch_limit: usize,
    pub compaction_sleep: std::time::Duration,
    /// What the committer waits for more writes before it commits (etcd: backend-batch-interval), and how many writes are enough.
    pub batch_interval: std::time::Duration,
    pub batch_limit: usize,
}

/// The replica's state. One writer ([`Store::begin`], [`Store::compact`] from the apply path), any number of readers.
#[derive(Debug)]
pub struct Store {}

/// An immutable picture of the key space at one moment. Cheap to clone and hold briefly.
#[derive(Clone, Debug)]
pub struct View {}

/// Which part of [key, end) to read. `end` follows etcd: empty = the key alone, one zero byte = to the end.
#[derive(Clone, Copy, Debug, Default)]
pub struct RangeOptions {
    /// 0 = the view's own revision.
    pub revision: i64,
    /// 0 = all.
    pub limit: usize,
    pub count_only: bool,
    /// Key, create, mod and version from the index, no lease and no value (etcd 3.7).
    pub keys_only: bool,
}

#[derive(Clone, Debug, Default)]
pub struct RangeResult {
    /// Ascending by key.
    pub kvs: Vec<KeyValue>,
    /// Keys in the whole range at that revision, untouched by the limit.
    pub count: i64,
    /// The view's current revision (not the one read at).
    pub revision: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    Put,
    Delete,
}

/// One write, as watchers are told. For a delete `kv` holds key and mod_revision only (etcd's form).
#[derive(Clone, Debug)]
pub struct Event {
    pub kind: EventKind,
    pub kv: KeyValue,
    /// The record this write replaced, for prev_kv: read it by [`View::record`]. None when the key did not exist.
    pub prev: Option<Revision>,
}

/// What a transaction did.
#[derive(Clone, Debug)]
pub struct Committed {
    /// The current revision afterwards; grown by one exactly when `events` is not empty.
    pub revision: i64,
    /// In order of sub revision.
    pub events: Arc<[Event]>,
    /// The view that this transaction published.
    pub view: Arc<View>,
}

/// A compaction under way.
#[derive(Clone, Debug)]
pub struct Compaction {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashKv {
    pub hash: u32,
    pub compact_revision: i64,
    pub hash_revision: i64,
    pub current_revision: i64,
}

/// Bytes. `allocated` is what etcd calls dbSize, `in_use` dbSizeInUse.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    pub allocated: u64,
    pub in_use: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct DefragReport {
    pub before: Sizes,
    pub after: Sizes,
    pub took: std::time::Duration,
}

impl Store {
    /// Opens or makes the database and rebuilds the index. An unfinished compaction goes on.
    pub fn open(_options: StoreOptions) -> Result<Arc<Self>, StorageError> {
        unimplemented!()
    }
    /// The last entry applied in memory.
    pub fn applied(&self) -> LogPosition {
        unimplemented!()
    }
    /// The last entry whose effects are synced in the engine: the log may be purged up to here.
    pub fn durable(&self) -> LogPosition {
        unimplemented!()
    }
    /// Tells the committer that the log is synced here up to `index`: it writes no entry beyond (rule one of durability).
    pub fn set_log_synced(&self, _index: u64) {
        unimplemented!()
    }
    /// Waits until everything applied so far is in the engine. Blocking.
    pub fn flush(&self) -> Result<LogPosition, StorageError> {
        unimplemented!()
    }
    /// The newest view.
    pub fn view(&self) -> Arc<View> {
        unimplemented!()
    }
    /// Begins the transaction of one log entry. One at a time; the caller is the apply path.
    pub fn begin(&self, _at: LogPosition) -> WriteTxn<'_> {
        unimplemented!()
    }
    /// CRC32C as etcd's HashKV. Revision 0 = current. Blocking.
    pub fn hash_kv(&self, _revision: i64) -> Result<HashKv, ReadError> {
        unimplemented!()
    }
    pub fn sizes(&self) -> Sizes {
        unimplemented!()
    }
    /// Rewrites the database into a fresh file and swaps it in. Blocking for the caller only.
    pub fn defragment(&self) -> Result<DefragReport, StorageError> {
        unimplemented!()
    }
    /// A small table as of now (memory included), ascending: for loading lessor, alarms, members at start.
    pub fn table(&self, _table: Table) -> Result<Vec<(Bytes, Bytes)>, StorageError> {
        unimplemented!()
    }
    /// Keys that hang on a lease, for rebuilding the lessor: (key, lease).
    pub fn leased_keys(&self) -> Vec<(Bytes, i64)> {
        unimplemented!()
    }
    /// The error that stopped the committer, if one did. The node must stop.
    pub fn failure(&self) -> Option<Arc<StorageError>> {
        unimplemented!()
    }
    /// Called once from the committer's thread when it fails.
    pub fn on_failure(&self, _call: Box<dyn FnOnce(Arc<StorageError>) + Send>) {
        unimplemented!()
    }
    /// Flushes and stops the threads. Idempotent.
    pub fn close(&self) -> Result<(), StorageError> {
        unimplemented!()
    }
}

impl View {
    pub fn revision(&self) -> i64 {
        unimplemented!()
    }
    pub fn compact_revision(&self) -> i64 {
        unimplemented!()
    }
    pub fn range(
        &self,
        _key: &[u8],
        _end: &[u8],
        _options: &RangeOptions,
    ) -> Result<RangeResult, ReadError> {
        unimplemented!()
    }
    /// The record written at exactly this revision, None if compacted away.
    pub fn record(&self, _revision: Revision) -> Result<Option<Arc<KeyValue>>, StorageError> {
        unimplemented!()
    }
    /// Events with `start <= main revision <= self.revision()`, in order, whole revisions only, stopping after about `bytes_max`.
    /// Also gives the revision to go on from (`revision() + 1` at the end). `Compacted` when `start` is below the compacted revision
    /// (start == compact revision is allowed, see etcd#18089).
    pub fn events(&self, _start: i64, _bytes_max: usize) -> Result<(Vec<Event>, i64), ReadError> {
        unimplemented!()
    }
}

/// The writes of one log entry. Dropped without [`commit`](Self::commit) it changes nothing (a failed txn still must be committed empty, so
/// that the applied position moves).
#[derive(Debug)]
pub struct WriteTxn<'a> {
    _store: &'a Store,
}

/// What a put or delete touched, for the lessor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touched {
    pub key: Bytes,
    /// The lease the key hung on before, or 0.
    pub old_lease: i64,
}

impl WriteTxn<'_> {
    /// The current revision, the txn's own writes included.
    pub fn revision(&self) -> i64 {
        unimplemented!()
    }
    /// As [`View::range`], and sees the txn's own writes (when reading at revision 0 or its own).
    pub fn range(
        &self,
        _key: &[u8],
        _end: &[u8],
        _options: &RangeOptions,
    ) -> Result<RangeResult, ReadError> {
        unimplemented!()
    }
    pub fn put(
        &mut self,
        _key: Bytes,
        _value: Bytes,
        _lease: i64,
    ) -> Result<Touched, StorageError> {
        unimplemented!()
    }
    /// Deletes every live key in the range; the answer lists them ascending.
    pub fn delete_range(&mut self, _key: &[u8], _end: &[u8]) -> Result<Vec<Touched>, StorageError> {
        unimplemented!()
    }
    /// Writes a record of a small table in the same batch.
    pub fn table_put(&mut self, _table: Table, _key: &[u8], _value: Bytes) {
        unimplemented!()
    }
    pub fn table_delete(&mut self, _table: Table, _key: &[u8]) {
        unimplemented!()
    }
    /// Forgets history before `revision`, for readers at once, physically in the background.
    pub fn compact(&mut self, _revision: i64) -> Result<Compaction, MvccError> {
        unimplemented!()
    }
    /// Publishes the view and hands the batch, with its log position, to the committer.
    pub fn commit(self) -> Committed {
        unimplemented!()
    }
}

impl Compaction {
    /// Waits until the records are gone from the engine (`physical`). Blocking.
    pub fn wait(&self) -> Result<(), StorageError> {
        unimplemented!()
    }
}
