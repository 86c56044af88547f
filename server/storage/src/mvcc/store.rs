//! The store: what apply, rpc, watch and raft ask of it.
//!
//!     begin --> WriteTxn --commit--> [committer] , then --> newest picture --> View
//!                                        |                                      |
//!     compact (thread) --steps---------->+--> engine <--- values, overlay ------+
//!
//! Promises: one writer at a time; a view is published when the entry is complete and never changes; whatever a view
//! names is found in the value cache, in the overlay or in the engine, in this order.
//! Lock order: writer, then committer, then everything else; a step or a hold before writer.
//! Not here: opening (recover.rs), reading (read.rs), writing (write.rs), maintenance (compact.rs, hash.rs, defrag.rs).
//!
//! etcd: server/storage/mvcc/kvstore.go.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::JoinHandle;

use arc_swap::ArcSwap;
use ballast_api::mvccpb::KeyValue;
use bytes::Bytes;
use parking_lot::Mutex;

use crate::LogPosition;
use crate::backend::current::Name;
use crate::backend::{Closed, Kind};
use crate::committer::{Committer, FlushCall};
use crate::error::StorageError;
use crate::mvcc::compact::CompactQueue;
use crate::mvcc::hash::StoredHashes;
use crate::mvcc::hold::Holds;
use crate::mvcc::key_index::KeyIndex;
use crate::mvcc::revision::Revision;
use crate::mvcc::tree::Tree;
use crate::mvcc::values::Values;
use crate::observer::StoreObserver;
use crate::schema::Table;

pub use crate::mvcc::compact::Compaction;
pub use crate::mvcc::defrag::{DefragReport, Pace};
pub use crate::mvcc::hash::HashKv;
pub use crate::mvcc::install::{InstallOptions, Receiving};
pub use crate::mvcc::read::{RangeOptions, RangeResult, View};
pub use crate::mvcc::write::{Committed, Touched, WriteTxn};

/// How to open a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The directory of the database (`member/db`). Made when absent.
    pub dir: PathBuf,
    /// The engine of a new database, and of the one that a defragmentation makes. One that is there is opened whatever its engine.
    pub engine: Kind,
    /// Bytes of current values kept in memory.
    pub value_cache_bytes: u64,
    /// Bytes of the engine's own page cache.
    pub engine_cache_bytes: u64,
    /// Records looked at per step of a compaction, and the pause between steps (etcd: compaction-batch-limit, -sleep-interval).
    pub compaction_batch_limit: usize,
    pub compaction_sleep: std::time::Duration,
    /// What the committer waits for more writes before it commits (etcd: backend-batch-interval), and how many writes are enough.
    pub batch_interval: std::time::Duration,
    pub batch_limit: usize,
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
    /// What the key was before the transaction, for prev_kv: read it by [`View::record`]. None when it did not exist, or when this is a put
    /// that creates it.
    pub prev: Option<Revision>,
}

/// Bytes. `allocated` is what etcd calls dbSize, `in_use` dbSizeInUse.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    pub allocated: u64,
    pub in_use: u64,
}

impl Sizes {
    /// About what a copy of the live data takes, at most: pages are never quite full.
    pub fn copy_bytes(self) -> u64 {
        (self.in_use + self.in_use / 4).min(self.allocated)
    }
}

/// The replica's state. One writer ([`Store::begin`] from the apply path), any number of readers.
#[derive(Debug)]
pub struct Store {
    pub(super) shared: Arc<Shared>,
    pub(super) threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The key space at one moment.
#[derive(Clone, Debug)]
pub(super) struct Picture {
    pub(super) tree: Tree<KeyIndex>,
    pub(super) revision: i64,
    /// -1 when nothing was ever compacted, as etcd counts.
    pub(super) compact_revision: i64,
}

/// What the store, its views and its threads share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: StoreOptions,
    pub(super) committer: Committer,
    pub(super) newest: ArcSwap<Picture>,
    pub(super) values: Values,
    /// Held by a transaction from begin to end, and by whoever changes the index beside it.
    pub(super) writer: Mutex<()>,
    pub(super) applied: Mutex<LogPosition>,
    /// The small tables as of the newest view, by engine key.
    pub(super) small: Mutex<BTreeMap<Bytes, Bytes>>,
    /// Bytes of keys and values that the engine holds or is about to.
    pub(super) live_bytes: AtomicI64,
    /// Of whoever needs all records up to a revision to stay.
    pub(super) holds: Arc<Holds>,
    pub(super) compact_queue: CompactQueue,
    pub(super) hashes: StoredHashes,
    /// Held over a defragmentation.
    pub(super) defragmenting: Mutex<()>,
    /// The directory's live database is another one than this store has open (install.rs).
    pub(super) superseded: AtomicBool,
    /// Whether somebody is receiving a snapshot or installing it.
    pub(super) receives: Arc<AtomicBool>,
    /// The live database.
    pub(super) database: Mutex<Name>,
}

impl Store {
    /// Where the live database is.
    pub fn database_path(&self) -> PathBuf {
        let name = *self.shared.database.lock();
        name.path(&self.shared.options.dir)
    }

    /// The last entry applied in memory.
    pub fn applied(&self) -> LogPosition {
        *self.shared.applied.lock()
    }

    /// The last entry whose effects are synced in the engine: the log may be purged up to here.
    pub fn durable(&self) -> LogPosition {
        self.shared.committer.durable()
    }

    /// Tells the committer that the log is synced here up to `index`: it writes no entry beyond (rule one of durability).
    pub fn set_log_synced(&self, index: u64) {
        self.shared.committer.set_log_synced(index);
    }

    /// Waits until everything applied so far is in the engine. Blocking.
    pub fn flush(&self) -> Result<LogPosition, StorageError> {
        self.shared.committer.flush()
    }

    /// As [`Self::flush`], without waiting: calls once it is so.
    pub fn on_flushed(&self, call: FlushCall) {
        self.shared.committer.on_flushed(call);
    }

    /// The newest view.
    pub fn view(&self) -> Arc<View> {
        Arc::new(View::new(
            self.shared.newest.load_full(),
            Arc::clone(&self.shared),
        ))
    }

    /// Begins the transaction of one log entry. One at a time; the caller is the apply path. Waits while too much is on its
    /// way to the engine.
    ///
    /// An entry has one transaction: a batch is cut between transactions, and must not be cut inside an entry.
    pub fn begin(&self, at: LogPosition) -> WriteTxn<'_> {
        self.shared.committer.wait_for_room();
        WriteTxn::new(&self.shared, at)
    }

    pub fn sizes(&self) -> Sizes {
        self.shared.sizes()
    }

    /// The engine of the database as it is now.
    pub fn engine(&self) -> Kind {
        self.shared.database.lock().kind
    }

    /// The engine that the next defragmentation converts to, if that is another one.
    pub fn converts_to(&self) -> Option<Kind> {
        let wanted = self.shared.options.engine;
        (wanted != self.engine()).then_some(wanted)
    }

    /// Whether a compaction's records are still being deleted.
    pub fn is_compacting(&self) -> bool {
        self.shared.compact_queue.is_busy()
    }

    /// Whether somebody needs all records to stay, so that a compaction waits.
    pub fn is_held(&self) -> bool {
        self.shared.holds.is_held()
    }

    /// A small table as of now (memory included), ascending: for loading lessor, alarms, members at start.
    pub fn table(&self, table: Table) -> Result<Vec<(Bytes, Bytes)>, StorageError> {
        let small = self.shared.small.lock();
        let start = Bytes::copy_from_slice(&[table.prefix()]);
        Ok(small
            .range(start..)
            .take_while(|(key, _)| key[0] == table.prefix())
            .map(|(key, value)| (key.slice(1..), value.clone()))
            .collect())
    }

    /// Keys that hang on a lease, for rebuilding the lessor: (key, lease).
    pub fn leased_keys(&self) -> Vec<(Bytes, i64)> {
        let picture = self.shared.newest.load_full();
        picture
            .tree
            .live_from(b"")
            .filter(|(_, index)| index.lease() != 0)
            .map(|(key, index)| (Bytes::copy_from_slice(key), index.lease()))
            .collect()
    }

    /// Tells `observer` what happens from here on. Only the first one counts.
    pub fn set_observer(&self, observer: Arc<dyn StoreObserver>) {
        self.shared.committer.set_observer(observer);
    }

    /// The error that stopped the committer, if one did. The node must stop.
    pub fn failure(&self) -> Option<Arc<StorageError>> {
        self.shared.committer.failure()
    }

    /// Called once, from the thread that finds it, when the storage fails; at once when it has failed already.
    pub fn on_failure(&self, call: Box<dyn FnOnce(Arc<StorageError>) + Send>) {
        self.shared.committer.on_failure(call);
    }

    /// Flushes and stops the threads. Idempotent. What the log has not synced is not written: it comes again from the log.
    pub fn close(&self) -> Result<(), StorageError> {
        self.shared.compact_queue.stop();
        self.shared.holds.stop();
        self.shared.committer.close();
        self.join();
        match self.failure() {
            Some(failure) => Err(StorageError::Stopped {
                first: failure.to_string(),
            }),
            None => Ok(()),
        }
    }

    /// Stops without a flush, as a crash would. Idempotent.
    pub fn abandon(&self) {
        self.shared.compact_queue.stop();
        self.shared.holds.stop();
        self.shared.committer.abandon();
        self.join();
    }

    fn join(&self) {
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!("a storage thread panicked");
            }
        }
        // It stops at its next step, and must not touch the directory after us.
        drop(self.shared.defragmenting.lock());
        // Views may outlive the store; the database must not stay open with them.
        let closed = Arc::new(Closed(self.shared.options.dir.clone()));
        self.shared
            .committer
            .between_batches(|_, swap| swap(closed));
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.abandon();
    }
}

impl Shared {
    pub(super) fn live_bytes(&self) -> u64 {
        u64::try_from(self.live_bytes.load(Ordering::Relaxed)).unwrap_or(0)
    }

    pub(super) fn sizes(&self) -> Sizes {
        let allocated = self.committer.allocated();
        // What is still on its way to the file counts as live before it is allocated.
        Sizes {
            allocated,
            in_use: self.live_bytes().min(allocated),
        }
    }
}
