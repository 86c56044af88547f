//! The revisions of one key.
//!
//!     put 2.0, put 5.0, delete 7.0, put 9.0, put 9.1
//!
//!     head   9.1 create 9 version 2 lease 0        what most reads ask for, kept at hand
//!     older  [9.0 | 7.0 t | 5.0 | 2.0]             newest chunk first, each behind an Arc
//!
//! Where etcd keeps generations, each record here carries its create revision and version, and version 0 marks a
//! tombstone: a generation is what lies between two of them.
//!
//! Promises: a clone shares its chunks. Adding a record copies at most one chunk of [`CHUNK_MIN`], and two chunks of a size become one, so
//! that a hot key costs O(log n) amortized to write and O(log n) to search.
//! Not here: values (values.rs), which keys exist (tree.rs).
//!
//! etcd: server/storage/mvcc/key_index.go.

use std::sync::Arc;

use crate::mvcc::revision::Revision;
use crate::mvcc::tree::Live;

/// Records of the newest chunk before it is closed.
const CHUNK_MIN: usize = 16;

/// One record of a key: a put, or a tombstone when `version` is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub main: i64,
    pub sub: u32,
    /// Encoded length of the value in the engine.
    pub bytes: u32,
    /// Main revision of the generation's first put; 0 in a tombstone.
    pub create: i64,
    pub version: i64,
}

impl Record {
    pub fn revision(&self) -> Revision {
        Revision::new(self.main, i64::from(self.sub))
    }

    pub fn is_tombstone(&self) -> bool {
        self.version == 0
    }

    fn live(self) -> Option<Self> {
        (!self.is_tombstone()).then_some(self)
    }
}

/// All records of a key that are not compacted away; at least one.
#[derive(Clone, Debug)]
pub struct KeyIndex {
    head: Record,
    lease: i64,
    older: Option<Arc<Chunk>>,
}

/// Records in ascending order, and what is older than they are.
#[derive(Clone, Debug)]
struct Chunk {
    records: Vec<Record>,
    older: Option<Arc<Chunk>>,
}

impl Live for KeyIndex {
    fn is_live(&self) -> bool {
        !self.head.is_tombstone()
    }
}

impl KeyIndex {
    pub fn new(head: Record, lease: i64) -> Self {
        Self {
            head,
            lease,
            older: None,
        }
    }

    /// The newest record, tombstones included.
    pub fn head(&self) -> &Record {
        &self.head
    }

    /// The lease of the newest record; 0 when it has none or is a tombstone.
    pub fn lease(&self) -> i64 {
        self.lease
    }

    /// The record before the newest one.
    pub fn second(&self) -> Option<&Record> {
        self.older.as_ref().and_then(|chunk| chunk.records.last())
    }

    /// This key with one more record, newer than all it has.
    #[must_use]
    pub fn with(&self, head: Record, lease: i64) -> Self {
        debug_assert!(
            head.revision() > self.head.revision(),
            "revisions only grow"
        );
        Self {
            head,
            lease,
            older: Some(push(self.older.as_ref(), self.head)),
        }
    }

    /// What a reader at `revision` sees: the newest record of it or before, if that is a put.
    pub fn at(&self, revision: i64) -> Option<Record> {
        self.last_where(|record| record.main <= revision)?.live()
    }

    /// What the key was before the record at `revision`, if it was there.
    pub fn before(&self, revision: Revision) -> Option<Record> {
        self.last_where(|record| record.revision() < revision)?
            .live()
    }

    /// The newest record for which `holds`, which must hold for all before it.
    fn last_where(&self, holds: impl Fn(&Record) -> bool) -> Option<Record> {
        if holds(&self.head) {
            return Some(self.head);
        }
        let mut chunk = self.older.as_deref();
        while let Some(Chunk { records, older }) = chunk {
            match records.partition_point(&holds) {
                0 => chunk = older.as_deref(),
                n => return Some(records[n - 1]),
            }
        }
        None
    }

    /// Calls `visit` with each record, in no order to rely on.
    pub fn for_each_record(&self, mut visit: impl FnMut(&Record)) {
        visit(&self.head);
        let mut chunk = self.older.as_deref();
        while let Some(Chunk { records, older }) = chunk {
            records.iter().for_each(&mut visit);
            chunk = older.as_deref();
        }
    }

    /// All records, ascending.
    pub fn records(&self) -> Vec<Record> {
        let mut chunks = Vec::new();
        let mut chunk = self.older.as_deref();
        while let Some(c) = chunk {
            chunks.push(c);
            chunk = c.older.as_deref();
        }
        let mut out = Vec::new();
        for chunk in chunks.iter().rev() {
            out.extend_from_slice(&chunk.records);
        }
        out.push(self.head);
        out
    }

    /// Whether a compaction at `revision` would forget anything. Cheap.
    pub fn has_garbage(&self, revision: i64) -> bool {
        if self.head.main <= revision {
            return self.older.is_some() || (self.head.is_tombstone() && self.head.main < revision);
        }
        // The head stays; something goes when the second record is old enough to stand for the first, or the first is a tombstone.
        let Some(mut oldest) = self.older.as_deref() else {
            return false;
        };
        let mut after = &self.head;
        while let Some(older) = oldest.older.as_deref() {
            after = &oldest.records[0];
            oldest = older;
        }
        let first = &oldest.records[0];
        let second = oldest.records.get(1).unwrap_or(after);
        second.main <= revision || (first.is_tombstone() && first.main < revision)
    }

    /// Forgets what no reader at `revision` or later can see. None when nothing is left. The forgotten revisions are added to
    /// `dropped`, oldest first.
    ///
    /// A tombstone exactly at `revision` stays, since a watch may start there (etcd#18089); an older one goes.
    pub fn compact(&self, revision: i64, dropped: &mut Vec<Revision>) -> Option<Self> {
        if !self.has_garbage(revision) {
            return Some(self.clone());
        }
        let records = self.records();
        let seen = records.partition_point(|record| record.main <= revision);
        let kept_from = match seen.checked_sub(1).map(|i| records[i]) {
            None => 0,
            Some(last) if last.is_tombstone() && last.main < revision => seen,
            Some(_) => seen - 1,
        };
        dropped.extend(records[..kept_from].iter().map(Record::revision));
        let kept = &records[kept_from..];
        let (head, older) = kept.split_last()?;
        let older = (!older.is_empty()).then(|| {
            Arc::new(Chunk {
                records: older.to_vec(),
                older: None,
            })
        });
        Some(Self {
            head: *head,
            lease: self.lease,
            older,
        })
    }

    /// Whether a compaction at `revision` leaves a record of it or before.
    pub fn keeps_any(&self, revision: i64) -> bool {
        self.last_where(|record| record.main <= revision)
            .is_some_and(|last| !last.is_tombstone() || last.main == revision)
    }

    /// The record at or before `revision` that a hash at it covers: a put (etcd leaves tombstones out there, so that
    /// members which drop them early and late agree).
    pub fn keep(&self, revision: i64) -> Option<Revision> {
        self.at(revision).map(|record| record.revision())
    }
}

fn push(top: Option<&Arc<Chunk>>, record: Record) -> Arc<Chunk> {
    let mut chunk = match top {
        Some(top) if top.records.len() < CHUNK_MIN => {
            let mut records = Vec::with_capacity(top.records.len() + 1);
            records.extend_from_slice(&top.records);
            records.push(record);
            return Arc::new(Chunk {
                records,
                older: top.older.clone(),
            });
        }
        _ => Chunk {
            records: vec![record],
            older: top.cloned(),
        },
    };
    // As in a binary counter: closed chunks grow towards the past, so that there are O(log n) of them.
    while let Some(older) = chunk.older.take() {
        match &older.older {
            Some(oldest) if oldest.records.len() <= older.records.len() => {
                let mut records = Vec::with_capacity(oldest.records.len() + older.records.len());
                records.extend_from_slice(&oldest.records);
                records.extend_from_slice(&older.records);
                chunk.older = Some(Arc::new(Chunk {
                    records,
                    older: oldest.older.clone(),
                }));
            }
            _ => {
                chunk.older = Some(older);
                break;
            }
        }
    }
    Arc::new(chunk)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(main: i64, create: i64, version: i64) -> Record {
        Record {
            main,
            sub: 0,
            bytes: 0,
            create,
            version,
        }
    }

    fn tombstone(main: i64) -> Record {
        Record {
            main,
            sub: 0,
            bytes: 0,
            create: 0,
            version: 0,
        }
    }

    fn key(records: &[Record]) -> KeyIndex {
        let (first, rest) = records.split_first().unwrap();
        rest.iter()
            .fold(KeyIndex::new(*first, 0), |key, record| key.with(*record, 0))
    }

    /// put 1, put 2, delete 3, put 4, delete 5: the example of etcd's key_index.go.
    fn example() -> KeyIndex {
        key(&[
            put(1, 1, 1),
            put(2, 1, 2),
            tombstone(3),
            put(4, 4, 1),
            tombstone(5),
        ])
    }

    #[test]
    fn a_read_sees_the_newest_record_of_its_generation() {
        let key = example();
        let seen: Vec<_> = (0..=6)
            .map(|rev| key.at(rev).map(|r| (r.main, r.create, r.version)))
            .collect();
        assert_eq!(
            seen,
            [
                None,
                Some((1, 1, 1)),
                Some((2, 1, 2)),
                None,
                Some((4, 4, 1)),
                None,
                None
            ]
        );
        assert_eq!(key.before(Revision::new(2, 0)).map(|r| r.main), Some(1));
        assert_eq!(key.before(Revision::new(4, 0)), None);
        assert_eq!(key.before(Revision::new(1, 0)), None);
    }

    #[test]
    fn compaction_keeps_what_a_reader_at_its_revision_sees() {
        // (compact at, what is left, what is dropped)
        let cases: [(i64, &[i64], &[i64]); 7] = [
            (0, &[1, 2, 3, 4, 5], &[]),
            (1, &[1, 2, 3, 4, 5], &[]),
            (2, &[2, 3, 4, 5], &[1]),
            (3, &[3, 4, 5], &[1, 2]),
            (4, &[4, 5], &[1, 2, 3]),
            (5, &[5], &[1, 2, 3, 4]),
            (6, &[], &[1, 2, 3, 4, 5]),
        ];
        for (at, left, gone) in cases {
            let mut dropped = Vec::new();
            let kept = example().compact(at, &mut dropped);
            let mains = |records: &[Record]| records.iter().map(|r| r.main).collect::<Vec<_>>();
            assert_eq!(
                kept.map(|k| mains(&k.records())).unwrap_or_default(),
                left,
                "at {at}"
            );
            assert_eq!(
                dropped.iter().map(|r| r.main).collect::<Vec<_>>(),
                gone,
                "at {at}"
            );
            assert!(example().has_garbage(at) || gone.is_empty(), "at {at}");
        }
    }

    #[test]
    fn a_hot_key_has_few_chunks_and_loses_nothing() {
        let mut key = KeyIndex::new(put(1, 1, 1), 0);
        for main in 2..=10_000 {
            key = key.with(put(main, 1, main), 0);
        }
        let mut chunks = 0;
        let mut chunk = key.older.as_deref();
        while let Some(c) = chunk {
            chunks += 1;
            chunk = c.older.as_deref();
        }
        assert!(chunks < 20, "{chunks} chunks");
        assert_eq!(key.records().len(), 10_000);
        for main in [1, 2, 15, 16, 17, 5_000, 9_999, 10_000] {
            assert_eq!(key.at(main).unwrap().version, main);
            assert_eq!(
                key.before(Revision::new(main, 0)).map(|r| r.main),
                (main > 1).then(|| main - 1)
            );
        }
    }
}
