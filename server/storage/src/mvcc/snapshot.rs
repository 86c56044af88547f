//! The store as etcd's snapshot file, made while it is read.
//!
//!     pin    under the writer's lock: view, applied position, a copy of the small tables; no compaction from here on
//!     plan   pass 1: lengths of all records up to the view's revision
//!     pull   pass 2: pages as the reader asks for them, then the SHA-256 of all before
//!
//! Promises: the file is the store at one log position, every record that the index knows in it; memory is a chunk, whatever the store's size; writes go on.
//! Until the stream is dropped, records that a compaction gave up stay in the engine.
//! Not here: the file's form (`bolt/`), reading one (`restore.rs`), sending it (`server/src/rpc/maintenance.rs`).
//!
//! etcd: Snapshot in server/storage/backend/backend.go and api/v3rpc/maintenance.go.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use prost::Message;
use sha2::{Digest, Sha256};

use crate::LogPosition;
use crate::background;
use crate::bolt::{Plan, Planner, WriteError, Writer, etcd};
use crate::committer::PendingRecord;
use crate::error::StorageError;
use crate::mvcc::census::Census;
use crate::mvcc::hold::Hold;
use crate::mvcc::read::RecordScan;
use crate::mvcc::revision::{REVISION_BYTES, Revision};
use crate::mvcc::store::{Picture, Shared, Store};
use crate::schema::{Table, meta};

/// A snapshot file on its way. Blocking; may be dropped at any time.
#[derive(Debug)]
pub struct SnapshotStream {
    shared: Arc<Shared>,
    revision: i64,
    applied: LogPosition,
    membership: Bytes,
    size: u64,
    record_pages: Range<u64>,
    buckets: std::vec::IntoIter<etcd::SmallBucket>,
    feed: Feed,
    stage: Stage,
    sha: Sha256,
    _hold: Hold,
}

#[derive(Debug)]
enum Stage {
    Writing(Box<Writer>),
    /// The last pages.
    Rest(BytesMut),
    Done,
}

/// The entries of the bucket being written.
#[derive(Debug)]
enum Feed {
    Entries(std::vec::IntoIter<(Bytes, Bytes)>),
    Records(Box<Records>),
}

impl Store {
    /// Pins the newest state and plans its file. Reads all records once before it returns, as long as it is `wanted`: None when it was
    /// not any more. Blocking.
    pub fn snapshot(
        &self,
        wanted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<SnapshotStream>, StorageError> {
        let shared = &self.shared;
        // Before the writer's lock, in the order that all take them.
        let hold = shared.holds.hold();
        let (picture, applied, small) = {
            let _writer = shared.writer.lock();
            let small = shared.small.lock().clone();
            (shared.newest.load_full(), *shared.applied.lock(), small)
        };
        let revision = picture.revision;
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
        let planned = background::run("snapshot", || plan(shared, &buckets, revision, wanted))?;
        let Some(Planned {
            plan,
            census,
            record_pages,
        }) = planned
        else {
            return Ok(None);
        };
        // Records of a compaction that has not come to its end are gone from the index and not yet from the engine.
        if finished == picture.compact_revision {
            shared.check_census(census, &picture)?;
        }
        let membership = small.get(&Table::Meta.key(meta::RAFT_MEMBERSHIP)[..]);
        Ok(Some(SnapshotStream {
            revision,
            applied,
            membership: membership.cloned().unwrap_or_default(),
            size: plan.file_len(),
            record_pages,
            buckets: buckets.into_iter(),
            feed: Feed::Entries(Vec::new().into_iter()),
            stage: Stage::Writing(Box::new(Writer::new(plan))),
            sha: Sha256::new(),
            _hold: hold,
            shared: Arc::clone(shared),
        }))
    }
}

/// What the first pass finds.
struct Planned {
    plan: Plan,
    census: Census,
    /// All pages of records are among these.
    record_pages: Range<u64>,
}

/// The first pass.
fn plan(
    shared: &Arc<Shared>,
    buckets: &[etcd::SmallBucket],
    revision: i64,
    wanted: &(dyn Fn() -> bool + Sync),
) -> Result<Option<Planned>, StorageError> {
    let failed = |error| failed(shared, &error);
    let mut planner = Planner::new();
    let mut census = Census::default();
    let (mut first, mut end) = (0, 0);
    for (name, entries) in buckets {
        planner.begin_bucket(name.len()).map_err(failed)?;
        if *name == etcd::KEY {
            first = planner.next_page();
        } else if first > 0 && end == 0 {
            end = planner.next_page();
        }
        for (key, value) in entries {
            planner.entry(key.len(), value.len()).map_err(failed)?;
        }
        if *name == etcd::KEY {
            let read_all =
                shared.visit_lengths(revision, wanted, &mut |revision, tombstone, value_len| {
                    census.add(revision);
                    let key_len = REVISION_BYTES + usize::from(tombstone);
                    planner.entry(key_len, value_len).map_err(failed)
                })?;
            if !read_all {
                return Ok(None);
            }
        }
    }
    Ok(Some(Planned {
        plan: planner.finish().map_err(failed)?,
        census,
        record_pages: first..end,
    }))
}

impl Shared {
    /// A file that lacks a record would be taken for the whole. Stops the store when it would.
    fn check_census(&self, found: Census, picture: &Picture) -> Result<(), StorageError> {
        let known = Census::of(&picture.tree);
        if found == known {
            return Ok(());
        }
        let damaged = || StorageError::DamagedRecord {
            path: self.options.dir.clone(),
            record: "unknown".to_owned(),
            what: format!(
                "the index knows {} records and {} can be read, or others",
                known.count, found.count
            ),
        };
        self.committer.fail(damaged());
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

impl SnapshotStream {
    /// Bytes of the database, the 32 of the hash not counted.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Among which pages of the file all records lie.
    pub fn record_pages(&self) -> Range<u64> {
        self.record_pages.clone()
    }

    /// The revision that the snapshot is at.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// The last log entry in it.
    pub fn applied(&self) -> LogPosition {
        self.applied
    }

    /// The group at that entry, in the Raft layer's own bytes; empty when there was none yet.
    pub fn membership(&self) -> Bytes {
        self.membership.clone()
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
        let entry = match &mut self.feed {
            Feed::Entries(entries) => entries.next(),
            Feed::Records(records) => records.next()?,
        };
        let failed = |error| failed(&self.shared, &error);
        if let Some((key, value)) = entry {
            return writer.entry(key, value).map_err(failed);
        }
        if let Some((name, entries)) = self.buckets.next() {
            self.feed = if name == etcd::KEY {
                Feed::Records(Box::new(Records::new(&self.shared, self.revision)))
            } else {
                Feed::Entries(entries.into_iter())
            };
            let name = Bytes::from_static(name.as_bytes());
            return writer.begin_bucket(name).map_err(failed);
        }
        let Stage::Writing(writer) = std::mem::replace(&mut self.stage, Stage::Done) else {
            return Ok(());
        };
        let rest = writer.finish().map_err(failed)?;
        self.stage = Stage::Rest(rest);
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
            written: RecordScan::new(shared.committer.engine(), from, until),
            pending: pending.into_iter(),
        }
    }

    fn next(&mut self) -> Result<Option<(Bytes, Bytes)>, StorageError> {
        if let Some(pair) = self.written.next() {
            let (key, value) = pair?;
            return Ok(Some((key.slice(1..), value)));
        }
        Ok(self.pending.next().map(|record| {
            let mut key = record.revision.to_bytes().to_vec();
            if record.tombstone {
                key.push(b't');
            }
            (key.into(), record.kv.encode_to_vec().into())
        }))
    }
}
