//! Writing: one transaction assigns its revision, changes a tree of its own and, at commit, publishes it.
//!
//! Promises: a dropped transaction changes nothing. At commit the batch is queued before the view is published, so that a
//! reader of the view finds every record it names.
//! Not here: whether the request may do this (server/src/apply).
//!
//! etcd: server/storage/mvcc/kvstore_txn.go.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ballast_api::mvccpb::KeyValue;
use bytes::{Bytes, BytesMut};
use parking_lot::MutexGuard;
use prost::Message;

use crate::LogPosition;
use crate::committer::{Pending, PendingRecord};
use crate::error::{MvccError, ReadError, StorageError};
use crate::mvcc::compact::{CompactJob, Compaction};
use crate::mvcc::key_index::{KeyIndex, Record};
use crate::mvcc::read::{self, RangeOptions, RangeResult, ReadStop, Span, View};
use crate::mvcc::revision::{REVISION_BYTES, Revision};
use crate::mvcc::store::{Event, EventKind, Picture, Shared};
use crate::schema::{Table, meta};

/// Values up to this are copied out of the frame they came in, or a small one would keep all of a large frame alive.
const VALUE_COPIED_MAX: usize = 256 << 10;

/// The writes of one log entry. Dropped without [`commit`](Self::commit) it changes nothing (a failed txn still must be committed empty, so
/// that the applied position moves).
#[derive(Debug)]
pub struct WriteTxn<'a> {
    shared: &'a Arc<Shared>,
    _writer: MutexGuard<'a, ()>,
    at: LogPosition,
    /// The revision before the transaction.
    base: i64,
    picture: Picture,
    records: Vec<PendingRecord>,
    events: Vec<Event>,
    /// Records that nobody is likely to ask for any more.
    stale: Vec<Revision>,
    ops: Vec<(Bytes, Option<Bytes>)>,
    compact: Option<CompactJob>,
    live_bytes: i64,
}

/// What a put or delete touched, for the lessor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touched {
    pub key: Bytes,
    /// The lease the key hung on before, or 0.
    pub old_lease: i64,
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

impl<'a> WriteTxn<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>, at: LogPosition) -> Self {
        let writer = shared.writer.lock();
        debug_assert!(
            at.index >= shared.applied.lock().index,
            "an entry is applied once"
        );
        let picture = Picture::clone(&shared.newest.load());
        Self {
            shared,
            _writer: writer,
            at,
            base: picture.revision,
            picture,
            records: Vec::new(),
            events: Vec::new(),
            stale: Vec::new(),
            ops: Vec::new(),
            compact: None,
            live_bytes: 0,
        }
    }

    /// The current revision, the txn's own writes included.
    pub fn revision(&self) -> i64 {
        self.picture.revision
    }

    /// As [`View::range`], and sees the txn's own writes (when reading at revision 0 or its own).
    pub fn range(
        &self,
        key: &[u8],
        end: &[u8],
        options: &RangeOptions,
    ) -> Result<RangeResult, ReadError> {
        match read::range(&self.picture, self.shared, &self.records, key, end, options) {
            Ok(result) => Ok(result),
            Err(ReadStop::Error(error)) => Err(error),
            // No compaction can overtake the writer.
            Err(ReadStop::Missing { record, .. }) => Err(self.shared.lost(record).into()),
        }
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "the copy of a key is made here, so that no caller has to know"
    )]
    pub fn put(&mut self, key: Bytes, value: Bytes, lease: i64) -> Result<Touched, StorageError> {
        let (key, value) = compact_copy(&key, value);
        let revision = self.next_revision();
        let mut prev = None;
        let mut old_lease = 0;
        let mut written = None;
        let stale = &mut self.stale;
        let live_bytes = &mut self.live_bytes;
        self.picture.tree.upsert(&key, |old| {
            let live = old.filter(|index| !index.head().is_tombstone());
            let (create, version) = live.map_or((revision.main, 1), |old| {
                (old.head().create, old.head().version + 1)
            });
            let kv = KeyValue {
                key: key.clone(),
                create_revision: create,
                mod_revision: revision.main,
                version,
                value,
                lease,
            };
            let bytes = kv.encoded_len();
            *live_bytes += (1 + REVISION_BYTES + bytes) as i64;
            written = Some(kv);
            if let Some(old) = live {
                prev = Some(old.head().revision());
                old_lease = old.lease();
            }
            let head = Record {
                main: revision.main,
                sub: revision.sub as u32,
                bytes: bytes as u32,
                create,
                version,
            };
            successor(old, head, lease, stale)
        });
        let kv = written.expect("upsert calls its change");
        self.note(EventKind::Put, revision, kv.clone(), kv, prev);
        Ok(Touched { key, old_lease })
    }

    /// Deletes every live key in the range; the answer lists them ascending.
    pub fn delete_range(&mut self, key: &[u8], end: &[u8]) -> Result<Vec<Touched>, StorageError> {
        let span = Span::new(key, end);
        let keys: Vec<Bytes> = self
            .picture
            .tree
            .live_from(key)
            .map(|(key, _)| key)
            .take_while(|key| span.is_before_end(key))
            .map(Bytes::copy_from_slice)
            .collect();
        Ok(keys.into_iter().map(|key| self.delete(key)).collect())
    }

    /// Deletes a live key.
    fn delete(&mut self, key: Bytes) -> Touched {
        let revision = self.next_revision();
        let stored = KeyValue {
            key: key.clone(),
            ..KeyValue::default()
        };
        let bytes = stored.encoded_len();
        let mut prev = None;
        let mut old_lease = 0;
        let stale = &mut self.stale;
        self.picture.tree.upsert(&key, |old| {
            if let Some(old) = old {
                // Nested transactions may put a key and then delete it: what was there before is that of the revision before.
                prev = if old.head().main == revision.main {
                    old.before(Revision::new(revision.main, 0))
                        .map(|record| record.revision())
                } else {
                    Some(old.head().revision())
                };
                old_lease = old.lease();
            }
            let head = Record {
                main: revision.main,
                sub: revision.sub as u32,
                bytes: bytes as u32,
                create: 0,
                version: 0,
            };
            successor(old, head, 0, stale)
        });
        self.live_bytes += (1 + REVISION_BYTES + 1 + bytes) as i64;
        let told = KeyValue {
            mod_revision: revision.main,
            ..stored.clone()
        };
        self.note(EventKind::Delete, revision, stored, told, prev);
        Touched { key, old_lease }
    }

    fn next_revision(&self) -> Revision {
        Revision::new(self.base + 1, self.records.len() as i64)
    }

    fn note(
        &mut self,
        kind: EventKind,
        revision: Revision,
        stored: KeyValue,
        told: KeyValue,
        prev: Option<Revision>,
    ) {
        self.picture.revision = revision.main;
        let tombstone = kind == EventKind::Delete;
        self.records.push(PendingRecord {
            revision,
            tombstone,
            kv: Arc::new(stored),
        });
        self.events.push(Event {
            kind,
            kv: told,
            prev,
        });
    }

    /// Writes a record of a small table in the same batch.
    pub fn table_put(&mut self, table: Table, key: &[u8], value: Bytes) {
        self.ops.push((table.key(key).into(), Some(value)));
    }

    pub fn table_delete(&mut self, table: Table, key: &[u8]) {
        self.ops.push((table.key(key).into(), None));
    }

    /// Forgets history before `revision`, for readers at once, physically in the background.
    pub fn compact(&mut self, revision: i64) -> Result<Compaction, MvccError> {
        let compact_revision = self.picture.compact_revision;
        if revision <= compact_revision {
            return Err(MvccError::Compacted { compact_revision });
        }
        if revision > self.picture.revision {
            return Err(MvccError::FutureRevision {
                current: self.picture.revision,
            });
        }
        self.table_put(
            Table::Meta,
            meta::SCHEDULED_COMPACT,
            Bytes::copy_from_slice(&revision.to_be_bytes()),
        );
        let (job, compaction) = CompactJob::new(revision, compact_revision);
        self.picture.compact_revision = revision;
        self.compact = Some(job);
        Ok(compaction)
    }

    /// Publishes the view and hands the batch, with its log position, to the committer.
    pub fn commit(self) -> Committed {
        let shared = self.shared;
        let revision = self.picture.revision;
        let puts: Vec<(Revision, Arc<KeyValue>)> = self
            .records
            .iter()
            .filter(|record| !record.tombstone)
            .map(|record| (record.revision, Arc::clone(&record.kv)))
            .collect();
        let live_bytes = self.live_bytes + shared.apply_small(&self.ops);
        shared.live_bytes.fetch_add(live_bytes, Ordering::Relaxed);
        let bytes = self
            .records
            .iter()
            .map(|r| r.kv.key.len() + r.kv.value.len() + 160)
            .sum::<usize>()
            + self
                .ops
                .iter()
                .map(|(k, v)| k.len() + v.as_ref().map_or(0, Bytes::len))
                .sum::<usize>();
        let number = shared.committer.push(Pending {
            position: self.at,
            revision,
            live_bytes: shared.live_bytes(),
            records: self.records,
            ops: self.ops,
            bytes,
        });
        for (revision, kv) in puts {
            shared.values.insert(revision, kv);
        }
        for revision in self.stale {
            shared.values.remove(revision);
        }
        let events: Arc<[Event]> = self.events.into();
        if !events.is_empty() {
            shared.values.remember(revision, &events);
        }
        let picture = Arc::new(self.picture);
        shared.newest.store(Arc::clone(&picture));
        *shared.applied.lock() = self.at;
        if let Some(job) = self.compact {
            shared.compact_queue.push(job.after(number));
        }
        Committed {
            revision,
            events,
            view: Arc::new(View::new(picture, Arc::clone(shared))),
        }
    }
}

/// The key with one more record. What was before the record that is now the last but one goes from the cache.
fn successor(
    old: Option<&KeyIndex>,
    head: Record,
    lease: i64,
    stale: &mut Vec<Revision>,
) -> KeyIndex {
    match old {
        Some(old) => {
            stale.extend(old.second().map(Record::revision));
            old.with(head, lease)
        }
        None => KeyIndex::new(head, lease),
    }
}

/// Key and value in one allocation of their own, unless the value is so large that it is most of its frame.
fn compact_copy(key: &[u8], value: Bytes) -> (Bytes, Bytes) {
    if value.len() > VALUE_COPIED_MAX {
        return (Bytes::copy_from_slice(key), value);
    }
    let mut both = BytesMut::with_capacity(key.len() + value.len());
    both.extend_from_slice(key);
    both.extend_from_slice(&value);
    let mut both = both.freeze();
    let copied = both.split_to(key.len());
    (copied, both)
}

impl Shared {
    /// Applies writes of small tables to the copy in memory. Answers by how much the live bytes grow.
    fn apply_small(&self, ops: &[(Bytes, Option<Bytes>)]) -> i64 {
        let mut grown = 0;
        let mut small = self.small.lock();
        for (key, value) in ops {
            let old = match value {
                Some(value) => {
                    grown += (key.len() + value.len()) as i64;
                    small.insert(key.clone(), value.clone())
                }
                None => small.remove(key),
            };
            grown -= old.map_or(0, |old| (key.len() + old.len()) as i64);
        }
        grown
    }
}
