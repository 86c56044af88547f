//! The store as etcd's snapshot file, made while it is read, front to back.
//!
//!     pin    under the writer's lock: view, applied position, a copy of the small tables; no compaction from here on
//!     plan   the lengths of all records, which the index knows. While a compaction is at work it knows fewer than the engine has: then they are read
//!     pull   pages as the reader asks for them, then the SHA-256 of all before
//!
//! Promises: the file is the store at one log position, every record that the index knows in it, or its end does not come; memory is a chunk, and
//! 24 bytes a record while it is planned; writes go on.
//! Until the stream is dropped, records that a compaction gave up stay in the engine.
//! Not here: the same pages in one pass, for another member (`pages.rs`); the file's form (`bolt/`), reading one (`restore.rs`), sending it
//! (`server/src/rpc/maintenance.rs`).
//!
//! etcd: Snapshot in server/storage/backend/backend.go and api/v3rpc/maintenance.go.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use prost::Message;
use sha2::{Digest, Sha256};

use crate::LogPosition;
use crate::background::{self, Priority};
use crate::bolt::{Plan, Planner, WriteError, Writer, etcd};
use crate::committer::PendingRecord;
use crate::error::StorageError;
use crate::mvcc::census::Census;
use crate::mvcc::hold::Hold;
use crate::mvcc::key_index::KeyIndex;
use crate::mvcc::read::RecordScan;
use crate::mvcc::revision::{REVISION_BYTES, Revision};
use crate::mvcc::store::{Picture, Shared, Store};
use crate::mvcc::tree::Tree;
use crate::schema::{Table, meta};

/// A snapshot file on its way. Blocking; may be dropped at any time.
#[derive(Debug)]
pub struct SnapshotStream {
    entries: Entries,
    size: u64,
    stage: Stage,
    sha: Sha256,
}

#[derive(Debug)]
enum Stage {
    Writing(Box<Writer>),
    /// The last pages.
    Rest(BytesMut),
    Done,
}

impl Store {
    /// Pins the newest state and plans its file. May read all records before it returns, as long as it is `wanted`: None when it was
    /// not any more. Blocking.
    pub fn snapshot(
        &self,
        wanted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<SnapshotStream>, StorageError> {
        let shared = &self.shared;
        let pinned = Pinned::new(shared)?;
        let planned = background::run("snapshot", Priority::Lowest, || {
            plan(shared, &pinned, wanted)
        })?;
        let Some(plan) = planned else {
            return Ok(None);
        };
        Ok(Some(SnapshotStream {
            size: plan.file_len(),
            entries: Entries::new(shared, pinned),
            stage: Stage::Writing(Box::new(Writer::new(plan))),
            sha: Sha256::new(),
        }))
    }
}

fn plan(
    shared: &Arc<Shared>,
    pinned: &Pinned,
    wanted: &(dyn Fn() -> bool + Sync),
) -> Result<Option<Plan>, StorageError> {
    if !wanted() {
        return Ok(None);
    }
    let failed = |error| failed(shared, &error);
    let mut planner = Planner::new();
    for (name, entries) in &pinned.buckets {
        planner.begin_bucket(name.len()).map_err(failed)?;
        for (key, value) in entries {
            planner.entry(key.len(), value.len()).map_err(failed)?;
        }
        if *name != etcd::KEY {
            continue;
        }
        let mut entry = |tombstone: bool, value_len: usize| {
            let key_len = REVISION_BYTES + usize::from(tombstone);
            planner.entry(key_len, value_len).map_err(failed)
        };
        if pinned.is_settled() {
            for record in Planned::of(&pinned.picture.tree) {
                entry(record.tombstone, record.value_len as usize)?;
            }
        } else {
            let revision = pinned.picture.revision;
            let read_all =
                shared.visit_lengths(revision, wanted, &mut |tombstone, value_len| {
                    entry(tombstone, value_len)
                })?;
            if !read_all {
                return Ok(None);
            }
        }
    }
    planner.finish().map_err(failed).map(Some)
}

/// A record as a plan needs it, small: there is one for each that the store has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Planned {
    main: i64,
    sub: u32,
    tombstone: bool,
    value_len: u32,
}

impl Planned {
    /// All that the index knows, in the order of the file.
    fn of(tree: &Tree<KeyIndex>) -> Vec<Self> {
        let mut all = Vec::new();
        for (_, index) in tree.from(b"") {
            index.for_each_record(|record| {
                all.push(Self {
                    main: record.main,
                    sub: record.sub,
                    tombstone: record.is_tombstone(),
                    value_len: record.bytes,
                });
            });
        }
        all.sort_unstable();
        all
    }
}

/// The store as it was at one log position.
#[derive(Debug)]
pub(super) struct Pinned {
    picture: Arc<Picture>,
    applied: LogPosition,
    membership: Bytes,
    buckets: Vec<etcd::SmallBucket>,
    /// Of the last compaction that came to its end.
    finished: i64,
    _hold: Hold,
}

impl Pinned {
    pub(super) fn new(shared: &Arc<Shared>) -> Result<Self, StorageError> {
        // Before the writer's lock, in the order that all take them.
        let hold = shared.holds.hold();
        let (picture, applied, small) = {
            let _writer = shared.writer.lock();
            let small = shared.small.lock().clone();
            (shared.newest.load_full(), *shared.applied.lock(), small)
        };
        // Compaction's thread writes it past the tables in memory, and waits until it is in the engine.
        let finished = shared
            .committer
            .engine()
            .get(&Table::Meta.key(meta::FINISHED_COMPACT))?
            .and_then(|bytes| Some(i64::from_be_bytes(bytes[..].try_into().ok()?)))
            .unwrap_or(-1);
        let damaged = |what: String| StorageError::DamagedRecord {
            path: shared.options.dir.clone(),
            record: "of a small table".to_owned(),
            what,
        };
        let buckets = etcd::small_buckets(&small, applied, finished).map_err(damaged)?;
        let membership = small.get(&Table::Meta.key(meta::RAFT_MEMBERSHIP)[..]);
        Ok(Self {
            picture,
            applied,
            membership: membership.cloned().unwrap_or_default(),
            buckets,
            finished,
            _hold: hold,
        })
    }

    /// False while a compaction is at work: its records are gone from the index and not yet from the engine.
    fn is_settled(&self) -> bool {
        self.finished == self.picture.compact_revision
    }

    /// A file that lacks a record would be taken for the whole. Stops the store when it would.
    fn check_census(&self, shared: &Shared, found: Census) -> Result<(), StorageError> {
        if !self.is_settled() {
            return Ok(());
        }
        let known = Census::of(&self.picture.tree);
        if found == known {
            return Ok(());
        }
        let damaged = || StorageError::DamagedRecord {
            path: shared.options.dir.clone(),
            record: "unknown".to_owned(),
            what: format!(
                "the index knows {} records and {} can be read, or others",
                known.count, found.count
            ),
        };
        shared.committer.fail(damaged());
        Err(damaged())
    }
}

fn failed(shared: &Shared, error: &WriteError) -> StorageError {
    StorageError::Engine {
        op: "snapshot",
        path: shared.options.dir.clone(),
        detail: error.to_string(),
    }
}

/// All that goes into the file, in its order, handed to a writer one by one.
#[derive(Debug)]
pub(super) struct Entries {
    shared: Arc<Shared>,
    pinned: Pinned,
    buckets: std::vec::IntoIter<etcd::SmallBucket>,
    feed: Feed,
    /// Of the records so far.
    census: Census,
}

/// The entries of the bucket being written.
#[derive(Debug)]
enum Feed {
    Entries(std::vec::IntoIter<(Bytes, Bytes)>),
    Records(Box<Records>),
}

/// What the writer was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Entry,
    /// All pages before are of other buckets.
    Bucket {
        of_records: bool,
    },
    /// There is nothing more.
    End,
}

impl Entries {
    pub(super) fn new(shared: &Arc<Shared>, mut pinned: Pinned) -> Self {
        Self {
            shared: Arc::clone(shared),
            buckets: std::mem::take(&mut pinned.buckets).into_iter(),
            pinned,
            feed: Feed::Entries(Vec::new().into_iter()),
            census: Census::default(),
        }
    }

    /// Hands one entry to the writer, or begins the next bucket. At the end the records must have been all that the index knows.
    pub(super) fn step(&mut self, writer: &mut Writer) -> Result<Step, StorageError> {
        let entry = match &mut self.feed {
            Feed::Entries(entries) => entries.next(),
            Feed::Records(records) => records.next(&self.shared, &mut self.census)?,
        };
        let failed = |error| failed(&self.shared, &error);
        if let Some((key, value)) = entry {
            writer.entry(key, value).map_err(failed)?;
            return Ok(Step::Entry);
        }
        let Some((name, entries)) = self.buckets.next() else {
            self.pinned.check_census(&self.shared, self.census)?;
            return Ok(Step::End);
        };
        let of_records = name == etcd::KEY;
        self.feed = if of_records {
            let revision = self.pinned.picture.revision;
            Feed::Records(Box::new(Records::new(&self.shared, revision)))
        } else {
            Feed::Entries(entries.into_iter())
        };
        let name = Bytes::from_static(name.as_bytes());
        writer.begin_bucket(name).map_err(failed)?;
        Ok(Step::Bucket { of_records })
    }

    pub(super) fn failed(&self, error: &WriteError) -> StorageError {
        failed(&self.shared, error)
    }

    pub(super) fn revision(&self) -> i64 {
        self.pinned.picture.revision
    }

    pub(super) fn applied(&self) -> LogPosition {
        self.pinned.applied
    }

    pub(super) fn membership(&self) -> Bytes {
        self.pinned.membership.clone()
    }
}

impl SnapshotStream {
    /// Bytes of the database, the 32 of the hash not counted.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The revision that the snapshot is at.
    pub fn revision(&self) -> i64 {
        self.entries.revision()
    }

    /// The last log entry in it.
    pub fn applied(&self) -> LogPosition {
        self.entries.applied()
    }

    /// The group at that entry, in the Raft layer's own bytes; empty when there was none yet.
    pub fn membership(&self) -> Bytes {
        self.entries.membership()
    }

    /// The next piece, of `bytes_max` until the database's end; the last piece is the SHA-256 alone. None after it.
    pub fn next_chunk(&mut self, bytes_max: usize) -> Result<Option<Bytes>, StorageError> {
        let bytes_max = bytes_max.max(1);
        loop {
            let ready = match &mut self.stage {
                Stage::Writing(writer) => {
                    let ready = writer.out_mut();
                    if ready.len() < bytes_max {
                        self.step()?;
                        continue;
                    }
                    ready
                }
                Stage::Rest(rest) => rest,
                Stage::Done => return Ok(None),
            };
            if ready.is_empty() {
                self.stage = Stage::Done;
                let sha = self.sha.finalize_reset();
                return Ok(Some(Bytes::copy_from_slice(&sha)));
            }
            let chunk = ready.split_to(bytes_max.min(ready.len())).freeze();
            self.sha.update(&chunk);
            return Ok(Some(chunk));
        }
    }

    /// Hands one entry to the writer, or begins the next bucket, or ends the file.
    fn step(&mut self) -> Result<(), StorageError> {
        let Stage::Writing(writer) = &mut self.stage else {
            return Ok(());
        };
        if self.entries.step(writer)? != Step::End {
            return Ok(());
        }
        if let Stage::Writing(writer) = std::mem::replace(&mut self.stage, Stage::Done) {
            let rest = writer.finish().map_err(|e| self.entries.failed(&e))?;
            self.stage = Stage::Rest(rest);
        }
        Ok(())
    }
}

/// All records up to a revision, ascending, in etcd's bytes.
#[derive(Debug)]
struct Records {
    written: RecordScan,
    pending: std::vec::IntoIter<PendingRecord>,
}

impl Records {
    fn new(shared: &Shared, revision: i64) -> Self {
        let from = Revision::default();
        let (pending, until) = shared.pending_records(from, revision);
        Self {
            written: RecordScan::new(shared.committer.engine(), from, until).in_one_piece(),
            pending: pending.into_iter(),
        }
    }

    fn next(
        &mut self,
        shared: &Shared,
        census: &mut Census,
    ) -> Result<Option<(Bytes, Bytes)>, StorageError> {
        if let Some(pair) = self.written.next() {
            let (key, value) = pair?;
            census.add(shared.revision_of(&key)?.0);
            return Ok(Some((key.slice(1..), value)));
        }
        Ok(self.pending.next().map(|record| {
            census.add(record.revision);
            let mut key = record.revision.to_bytes().to_vec();
            if record.tombstone {
                key.push(b't');
            }
            (key.into(), record.kv.encode_to_vec().into())
        }))
    }
}
