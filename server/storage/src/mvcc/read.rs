//! Reading: keys at a revision, records, events between revisions.
//!
//!     index (which revision of which key) --> value cache --> overlay --> engine
//!
//! Promises: never waits for the writer. A compaction that overtakes a read makes it start again on the newest view, or
//! answers `Compacted` when the read named a revision; a record is never silently left out.
//! Not here: what a RangeRequest means beyond that (server/src/apply/kv.rs).
//!
//! etcd: server/storage/mvcc/kvstore_txn.go and index.go.

use std::sync::Arc;

use ballast_api::mvccpb::KeyValue;
use bytes::{Bytes, BytesMut};
use prost::Message;

use crate::backend::{Engine, Pairs};
use crate::committer::{PendingRecord, put_record_key};
use crate::error::{MvccError, ReadError, StorageError};
use crate::mvcc::revision::Revision;
use crate::mvcc::store::{Event, EventKind, Picture, Shared};
use crate::mvcc::values::Values;
use crate::schema::Table;

/// Bytes of one read of the engine in a scan: long enough to amortize it, short enough to pin no pages for long.
const SCAN_CHUNK_BYTES: usize = 1 << 20;

/// An immutable picture of the key space at one moment. Cheap to clone and hold briefly.
#[derive(Clone, Debug)]
pub struct View {
    picture: Arc<Picture>,
    shared: Arc<Shared>,
}

/// Which part of [key, end) to read. `end` follows etcd: empty = the key alone, one zero byte = to the end.
#[derive(Clone, Copy, Debug, Default)]
pub struct RangeOptions {
    /// 0 (or less) = the view's own revision.
    pub revision: i64,
    /// 0 = all.
    pub limit: usize,
    pub count_only: bool,
    /// Key, create, mod and version from the index, no lease and no value (etcd 3.7).
    pub keys_only: bool,
    /// 0 = any; else nothing is read, and the answer is how large it would be, when the records are larger than this together.
    pub bytes_max: u64,
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

/// A range of keys as etcd writes it, made explicit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span<'a> {
    pub(super) start: &'a [u8],
    /// None = to the end of the key space.
    pub(super) end: Option<&'a [u8]>,
    pub(super) single: bool,
}

impl<'a> Span<'a> {
    pub(super) fn new(start: &'a [u8], end: &'a [u8]) -> Self {
        match end {
            [] => Self {
                start,
                end: None,
                single: true,
            },
            [0] => Self {
                start,
                end: None,
                single: false,
            },
            end => Self {
                start,
                end: Some(end),
                single: false,
            },
        }
    }

    fn contains(&self, key: &[u8]) -> bool {
        if self.single {
            key == self.start
        } else {
            key >= self.start && self.is_before_end(key)
        }
    }

    pub(super) fn is_before_end(&self, key: &[u8]) -> bool {
        if self.single {
            key == self.start
        } else {
            self.end.is_none_or(|end| key < end)
        }
    }
}

/// Why a read did not come to an end.
pub(super) enum ReadStop {
    Error(ReadError),
    /// The index named this record and it is nowhere: a compaction overtook the read, or it is lost.
    Missing {
        record: Revision,
        at: i64,
    },
}

impl<E: Into<ReadError>> From<E> for ReadStop {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

impl View {
    pub(super) fn new(picture: Arc<Picture>, shared: Arc<Shared>) -> Self {
        Self { picture, shared }
    }

    pub fn revision(&self) -> i64 {
        self.picture.revision
    }

    /// History before it is gone; -1 when nothing was ever compacted.
    pub fn compact_revision(&self) -> i64 {
        self.picture.compact_revision
    }

    /// Keys and values. When the view is so old that a compaction has taken what it shows, a read of its own revision is made on the
    /// newest view instead (the result says its revision), and one of a named revision answers `Compacted`.
    pub fn range(
        &self,
        key: &[u8],
        end: &[u8],
        options: &RangeOptions,
    ) -> Result<RangeResult, ReadError> {
        let mut picture = Arc::clone(&self.picture);
        loop {
            let (record, at) = match range(&picture, &self.shared, &[], key, end, options) {
                Ok(result) => return Ok(result),
                Err(ReadStop::Error(error)) => return Err(error),
                Err(ReadStop::Missing { record, at }) => (record, at),
            };
            let newest = self.shared.newest.load_full();
            if at >= newest.compact_revision {
                return Err(self.shared.lost(record).into());
            }
            if options.revision > 0 {
                let compact_revision = newest.compact_revision;
                return Err(MvccError::Compacted { compact_revision }.into());
            }
            picture = newest;
        }
    }

    /// The put written at exactly this revision, None if compacted away.
    pub fn record(&self, revision: Revision) -> Result<Option<Arc<KeyValue>>, StorageError> {
        Ok(self.shared.fetch(&[], &[revision], false)?.pop().flatten())
    }

    /// Events with `start <= main revision <= self.revision()`, in order, whole revisions only, stopping after about `bytes_max`.
    /// Also gives the revision to go on from (`revision() + 1` at the end). `Compacted` when `start` is below the compacted revision
    /// (start == compact revision is allowed, see etcd#18089).
    pub fn events(&self, start: i64, bytes_max: usize) -> Result<(Vec<Event>, i64), ReadError> {
        let start = start.max(0);
        let compacted = |picture: &Picture| {
            let compact_revision = picture.compact_revision;
            (start < compact_revision).then_some(MvccError::Compacted { compact_revision })
        };
        if let Some(error) = compacted(&self.picture) {
            return Err(error.into());
        }
        if start > self.revision() {
            return Ok((Vec::new(), start));
        }
        if let Some(txns) = self.shared.values.recent(start, self.revision()) {
            return Ok(self.take_events(&txns, bytes_max));
        }
        let found = self.read_events(start, bytes_max)?;
        // Records may have gone while they were being read; whatever is complete was read before its compaction began.
        match compacted(&self.shared.newest.load()) {
            Some(error) => Err(error.into()),
            None => Ok(found),
        }
    }

    fn take_events(&self, txns: &[(i64, Arc<[Event]>)], bytes_max: usize) -> (Vec<Event>, i64) {
        let mut out = Vec::new();
        let mut bytes = 0;
        for (revision, events) in txns {
            if bytes >= bytes_max && !out.is_empty() {
                return (out, *revision);
            }
            bytes += events
                .iter()
                .map(|e| e.kv.key.len() + e.kv.value.len())
                .sum::<usize>();
            out.extend(events.iter().cloned());
        }
        (out, self.revision() + 1)
    }

    fn read_events(&self, start: i64, bytes_max: usize) -> Result<(Vec<Event>, i64), ReadError> {
        let mut out: Vec<Event> = Vec::new();
        let mut bytes = 0;
        let mut last = 0;
        let mut gaps = Gaps::new(start);
        for record in self
            .shared
            .records(Revision::new(start, 0), self.revision())
        {
            let StoredRecord {
                revision,
                tombstone,
                value,
            } = record?;
            self.check_gap(gaps.see(revision))?;
            if bytes >= bytes_max && revision.main != last {
                return Ok((out, revision.main));
            }
            last = revision.main;
            bytes += value.len();
            let kv = self.shared.decode(revision, value)?;
            let prev = self
                .picture
                .tree
                .get(&kv.key)
                .and_then(|index| index.before(Revision::new(revision.main, 0)))
                .filter(|_| tombstone || kv.create_revision != revision.main)
                .map(|record| record.revision());
            out.push(if tombstone {
                let kv = KeyValue {
                    key: kv.key,
                    mod_revision: revision.main,
                    ..KeyValue::default()
                };
                Event {
                    kind: EventKind::Delete,
                    kv,
                    prev,
                }
            } else {
                Event {
                    kind: EventKind::Put,
                    kv,
                    prev,
                }
            });
        }
        self.check_gap(gaps.see(Revision::new(self.revision() + 1, 0)))?;
        Ok((out, self.revision() + 1))
    }

    /// Every revision behind the compacted one has its records, so that a missing one is damage: nobody may be told a history without it.
    fn check_gap(&self, missing: Option<Revision>) -> Result<(), StorageError> {
        match missing {
            Some(missing) if missing.main > self.shared.newest.load().compact_revision => {
                Err(self.shared.lost(missing))
            }
            _ => Ok(()),
        }
    }
}

/// Watches for a hole in ascending records.
struct Gaps {
    last: Revision,
}

impl Gaps {
    /// Records from main revision `start` on. The first revision of all has none: it is the empty store's.
    fn new(start: i64) -> Self {
        let last = Revision::new(start.max(2) - 1, 0);
        Self { last }
    }

    /// The first record missing before this one, if one is.
    fn see(&mut self, revision: Revision) -> Option<Revision> {
        let last = std::mem::replace(&mut self.last, revision);
        let next = if revision.main > last.main {
            Revision::new(last.main + 1, 0)
        } else {
            Revision::new(last.main, last.sub + 1)
        };
        (revision != next).then_some(next)
    }
}

/// The revision a read is made at.
fn revision_of(picture: &Picture, asked: i64) -> Result<i64, MvccError> {
    if asked > picture.revision {
        return Err(MvccError::FutureRevision {
            current: picture.revision,
        });
    }
    if asked <= 0 {
        return Ok(picture.revision);
    }
    if asked < picture.compact_revision {
        return Err(MvccError::Compacted {
            compact_revision: picture.compact_revision,
        });
    }
    Ok(asked)
}

/// Reads a range of `picture`. `local` are records of a transaction that is not published yet.
pub(super) fn range(
    picture: &Picture,
    shared: &Shared,
    local: &[PendingRecord],
    key: &[u8],
    end: &[u8],
    options: &RangeOptions,
) -> Result<RangeResult, ReadStop> {
    let at = revision_of(picture, options.revision)?;
    let span = Span::new(key, end);
    let revision = picture.revision;
    // The writes of an open transaction are not among the remembered ones.
    let recent = local.is_empty().then_some(&shared.values);
    if options.count_only {
        return Ok(RangeResult {
            kvs: Vec::new(),
            count: count(picture, recent, &span, at),
            revision,
        });
    }
    let limit = if options.limit == 0 {
        usize::MAX
    } else {
        options.limit
    };
    let mut found = Vec::new();
    let mut kvs = Vec::new();
    let mut all = true;
    let mut bytes = 0;
    for_each(picture, &span, at, |key, record| {
        if found.len() + kvs.len() == limit {
            all = false;
            return false;
        }
        if options.keys_only {
            kvs.push(KeyValue {
                key: Bytes::copy_from_slice(key),
                create_revision: record.create,
                mod_revision: record.main,
                version: record.version,
                ..KeyValue::default()
            });
        } else {
            found.push(record.revision());
            bytes += u64::from(record.bytes);
        }
        true
    });
    if options.bytes_max > 0 && bytes > options.bytes_max {
        return Err(ReadError::TooLarge { bytes }.into());
    }
    let seen = (found.len() + kvs.len()) as i64;
    let count = if all {
        seen
    } else {
        count(picture, recent, &span, at)
    };
    if !options.keys_only {
        let current = at == picture.revision;
        for (record, kv) in found.iter().zip(shared.fetch(local, &found, current)?) {
            match kv {
                Some(kv) => kvs.push(KeyValue::clone(&kv)),
                None => {
                    return Err(ReadStop::Missing {
                        record: *record,
                        at,
                    });
                }
            }
        }
    }
    Ok(RangeResult {
        kvs,
        count,
        revision,
    })
}

/// Calls `visit` with the keys of the span that live at `at`, ascending, until it answers false.
fn for_each(
    picture: &Picture,
    span: &Span<'_>,
    at: i64,
    mut visit: impl FnMut(&[u8], crate::mvcc::key_index::Record) -> bool,
) {
    if span.single {
        if let Some(record) = picture.tree.get(span.start).and_then(|index| index.at(at)) {
            visit(span.start, record);
        }
        return;
    }
    let current = at >= picture.revision;
    let entries = if current {
        picture.tree.live_from(span.start)
    } else {
        picture.tree.from(span.start)
    };
    for (key, index) in entries {
        if !span.is_before_end(key) {
            return;
        }
        let record = if current {
            Some(*index.head())
        } else {
            index.at(at)
        };
        if record.is_some_and(|record| !visit(key, record)) {
            return;
        }
    }
}

fn count(picture: &Picture, recent: Option<&Values>, span: &Span<'_>, at: i64) -> i64 {
    if span.single {
        return i64::from(
            picture
                .tree
                .get(span.start)
                .and_then(|index| index.at(at))
                .is_some(),
        );
    }
    if at < picture.revision {
        // The pages of a list pin the revision of the first one.
        let growth =
            |recent: &Values| recent.growth(at, picture.revision, |key| span.contains(key));
        if let Some(growth) = recent.and_then(growth) {
            return count_now(picture, span) - growth;
        }
        let mut count = 0;
        for_each(picture, span, at, |_, _| {
            count += 1;
            true
        });
        return count;
    }
    count_now(picture, span)
}

fn count_now(picture: &Picture, span: &Span<'_>) -> i64 {
    let before_end = span
        .end
        .map_or(picture.tree.live_len(), |end| picture.tree.live_before(end));
    before_end.saturating_sub(picture.tree.live_before(span.start)) as i64
}

/// A record as the engine holds it.
#[derive(Clone, Debug)]
pub(super) struct StoredRecord {
    pub(super) revision: Revision,
    pub(super) tombstone: bool,
    /// The encoded message.
    pub(super) value: Bytes,
}

impl StoredRecord {
    /// Its key as etcd has it: ours without the table's prefix.
    pub(super) fn key(&self) -> Vec<u8> {
        let mut key = self.revision.to_bytes().to_vec();
        if self.tombstone {
            key.push(b't');
        }
        key
    }
}

impl Shared {
    /// Puts by revision, in order: from `local`, the cache, the overlay, the engine. `keep` says that they are current, and worth caching.
    pub(super) fn fetch(
        &self,
        local: &[PendingRecord],
        revisions: &[Revision],
        keep: bool,
    ) -> Result<Vec<Option<Arc<KeyValue>>>, StorageError> {
        let mut out: Vec<Option<Arc<KeyValue>>> = Vec::with_capacity(revisions.len());
        let mut missed = Vec::new();
        for (i, revision) in revisions.iter().enumerate() {
            let found = local
                .get(revision.sub as usize)
                .filter(|record| record.revision == *revision)
                .map(|record| Arc::clone(&record.kv))
                .or_else(|| self.values.get(*revision));
            if found.is_none() {
                missed.push(i);
            }
            out.push(found);
        }
        if missed.is_empty() {
            return Ok(out);
        }
        let wanted: Vec<Revision> = missed.iter().map(|i| revisions[*i]).collect();
        let mut unwritten = Vec::new();
        for (i, pending) in missed.into_iter().zip(self.committer.records(&wanted)) {
            match pending {
                Some(record) if !record.tombstone => out[i] = Some(record.kv),
                Some(_) => {}
                None => unwritten.push(i),
            }
        }
        let keys: Vec<Bytes> = unwritten
            .iter()
            .map(|i| record_key(revisions[*i]))
            .collect();
        if keys.is_empty() {
            return Ok(out);
        }
        for (i, value) in unwritten
            .into_iter()
            .zip(self.committer.engine().get_many(&keys)?)
        {
            if let Some(value) = value {
                let kv = Arc::new(self.decode(revisions[i], value)?);
                if keep {
                    self.values.insert(revisions[i], Arc::clone(&kv));
                }
                out[i] = Some(kv);
            }
        }
        Ok(out)
    }

    pub(super) fn decode(
        &self,
        revision: Revision,
        value: Bytes,
    ) -> Result<KeyValue, StorageError> {
        KeyValue::decode(value).map_err(|error| self.damaged(revision, &error.to_string()))
    }

    fn damaged(&self, revision: Revision, what: &str) -> StorageError {
        StorageError::DamagedRecord {
            path: self.options.dir.clone(),
            record: format!("{}_{}", revision.main, revision.sub),
            what: what.to_owned(),
        }
    }

    /// The error for a record that the index names and nobody has. Stops the store.
    pub(super) fn lost(&self, revision: Revision) -> StorageError {
        let lost = || self.damaged(revision, "the index names it and it is not there");
        self.committer.fail(lost());
        lost()
    }

    /// All records with `from <= revision` and `main <= to`, ascending, overlay included. What a compaction deletes meanwhile is left
    /// out: take a hold where that matters.
    pub(super) fn records(
        &self,
        from: Revision,
        to: i64,
    ) -> impl Iterator<Item = Result<StoredRecord, StorageError>> + '_ {
        let (pending, until) = self.pending_records(from, to);
        let scan = RecordScan::new(self.committer.engine(), from, until);
        let written = scan.map(|pair| self.stored(pair?));
        written.chain(pending.into_iter().map(|record| {
            Ok(StoredRecord {
                revision: record.revision,
                tombstone: record.tombstone,
                value: record.kv.encode_to_vec().into(),
            })
        }))
    }

    /// Those that the engine may not have yet, and the main revision below which it has all. To be asked before the engine: what leaves the
    /// overlay after this is there already.
    pub(super) fn pending_records(&self, from: Revision, to: i64) -> (Vec<PendingRecord>, i64) {
        let pending = self.committer.records_between(from, to);
        let first = pending.first().map(|first| first.revision.main);
        (pending, first.unwrap_or_else(|| to.saturating_add(1)))
    }

    /// Of all records with `main <= to`, as [`Self::records`] gives them: whether it is a tombstone, and the value's length.
    /// False when it ended early because it was not `wanted` any more, which is asked every few records.
    pub(super) fn visit_lengths(
        &self,
        to: i64,
        wanted: &dyn Fn() -> bool,
        each: &mut dyn FnMut(bool, usize) -> Result<(), StorageError>,
    ) -> Result<bool, StorageError> {
        let from = Revision::default();
        let (pending, until) = self.pending_records(from, to);
        let engine = self.committer.engine();
        let end = record_key(Revision::new(until, 0));
        let mut next = Table::Key.key(&from.to_bytes());
        let mut found = true;
        while std::mem::take(&mut found) {
            if !wanted() {
                return Ok(false);
            }
            let mut result = Ok(());
            let start = next.clone();
            engine.visit(&start, &end, SCAN_CHUNK_BYTES, &mut |key, value| {
                found = true;
                next.clear();
                next.extend_from_slice(key);
                next.push(0);
                if result.is_ok() {
                    let record = self.revision_of(key);
                    result = record.and_then(|(_, tombstone)| each(tombstone, value.len()));
                }
            })?;
            result?;
        }
        for record in pending {
            each(record.tombstone, record.kv.encoded_len())?;
        }
        Ok(true)
    }

    pub(super) fn stored(
        &self,
        (key, value): (Bytes, Bytes),
    ) -> Result<StoredRecord, StorageError> {
        let (revision, tombstone) = self.revision_of(&key)?;
        Ok(StoredRecord {
            revision,
            tombstone,
            value,
        })
    }

    /// Of an engine key, and whether it is that of a tombstone.
    pub(super) fn revision_of(&self, key: &[u8]) -> Result<(Revision, bool), StorageError> {
        Revision::from_bytes(&key[1..]).ok_or_else(|| StorageError::DamagedRecord {
            path: self.options.dir.clone(),
            record: format!("{key:02x?}"),
            what: "its key is no revision".to_owned(),
        })
    }
}

/// The engine key of the put at `revision`.
pub(super) fn record_key(revision: Revision) -> Bytes {
    let mut key = BytesMut::with_capacity(1 + crate::mvcc::revision::REVISION_BYTES);
    put_record_key(&mut key, revision, false);
    key.freeze()
}

/// The engine's records with `from <= revision` and `main < until`, ascending, read in chunks.
#[derive(Debug)]
pub(super) struct RecordScan {
    engine: Arc<dyn Engine>,
    next: Vec<u8>,
    end: Bytes,
    chunk: std::vec::IntoIter<(Bytes, Bytes)>,
    /// Those of a chunk share their memory.
    as_one: bool,
    done: bool,
}

impl RecordScan {
    pub(super) fn new(engine: Arc<dyn Engine>, from: Revision, until: i64) -> Self {
        Self {
            engine,
            next: Table::Key.key(&from.to_bytes()),
            end: record_key(Revision::new(until, 0)),
            chunk: Vec::new().into_iter(),
            as_one: false,
            done: false,
        }
    }

    /// For whoever soon drops what it is given.
    pub(super) fn in_one_piece(self) -> Self {
        Self {
            as_one: true,
            ..self
        }
    }

    fn read(&self) -> Result<Pairs, StorageError> {
        let (start, end) = (&self.next, &self.end);
        if self.as_one {
            self.engine.scan_as_one(start, end, SCAN_CHUNK_BYTES)
        } else {
            self.engine.scan(start, end, SCAN_CHUNK_BYTES)
        }
    }
}

impl Iterator for RecordScan {
    type Item = Result<(Bytes, Bytes), StorageError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(pair) = self.chunk.next() {
            return Some(Ok(pair));
        }
        if self.done {
            return None;
        }
        match self.read() {
            Ok(pairs) => {
                match pairs.last() {
                    Some((key, _)) => {
                        self.next.clear();
                        self.next.extend_from_slice(key);
                        self.next.push(0);
                    }
                    None => self.done = true,
                }
                self.chunk = pairs.into_iter();
                self.chunk.next().map(Ok)
            }
            Err(error) => {
                self.done = true;
                Some(Err(error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_in_the_records_is_seen_and_named() {
        let see = |start, revisions: &[(i64, i64)]| {
            let mut gaps = Gaps::new(start);
            let revisions = revisions.iter();
            let mut holes = revisions.filter_map(|&(main, sub)| gaps.see(Revision::new(main, sub)));
            (holes.next(), holes.next())
        };
        let hole = |main, sub| (Some(Revision::new(main, sub)), None);
        let whole = [(2, 0), (3, 0), (3, 1), (3, 2), (4, 0)];
        assert_eq!(see(0, &whole), (None, None));
        assert_eq!(see(2, &whole), (None, None));
        assert_eq!(see(3, &whole[1..]), (None, None));
        assert_eq!(see(2, &whole[1..]), hole(2, 0));
        assert_eq!(see(2, &[(2, 0), (4, 0)]), hole(3, 0));
        assert_eq!(see(2, &[(2, 0), (3, 0), (3, 2), (4, 0)]), hole(3, 1));
        assert_eq!(see(2, &[(2, 0), (3, 1), (4, 0)]), hole(3, 0));
    }
}
