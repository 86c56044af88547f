//! HashKV: CRC32C over the records up to a revision, equal to etcd's for the same history.
//!
//! Covered are the table's name, then key and value of each record in order, but not
//! - records at or before the compact revision that a compaction at the hashed revision would not keep, gone already or not;
//! - the tombstones exactly at the compact revision, which older etcd members delete and newer ones keep.
//!
//! If a compaction there would keep nothing at all, etcd covers whatever its file has, so that its answer is another before and after the last
//! compaction has come to its end. Here it is the one after.
//!
//! A compaction leaves the hash of what it went through, as etcd's does: until ten newer ones came, HashKV at that
//! revision answers it, with the compact revision that was in force before.
//!
//! [`Store::hash`] covers all tables at one moment: equal while nothing is written, over restarts and defragmentations too.
//!
//! etcd: server/storage/mvcc/hash.go; Hash in server/storage/backend/backend.go.

use parking_lot::Mutex;

use crate::error::{MvccError, ReadError, StorageError};
use crate::mvcc::revision::Revision;
use crate::mvcc::store::Store;
use crate::schema::{Table, meta};

/// etcd's name of the bucket.
const TABLE_NAME: &[u8] = b"key";
/// Hashes of compactions that are kept, as etcd.
const STORED_MAX: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashKv {
    pub hash: u32,
    /// -1 when nothing was ever compacted.
    pub compact_revision: i64,
    pub hash_revision: i64,
    pub current_revision: i64,
}

/// The running hash.
#[derive(Debug)]
pub(super) struct Hasher {
    crc: u32,
    compact_revision: i64,
    revision: i64,
}

impl Hasher {
    pub(super) fn new(compact_revision: i64, revision: i64) -> Self {
        Self {
            crc: crc32c::crc32c(TABLE_NAME),
            compact_revision,
            revision,
        }
    }

    /// Takes a record that is not hidden. `key` without our table's prefix.
    pub(super) fn write(&mut self, revision: Revision, tombstone: bool, key: &[u8], value: &[u8]) {
        if revision.main > self.revision || (tombstone && revision.main == self.compact_revision) {
            return;
        }
        self.crc = crc32c::crc32c_append(self.crc, key);
        self.crc = crc32c::crc32c_append(self.crc, value);
    }

    pub(super) fn finish(&self) -> u32 {
        self.crc
    }
}

/// What a compaction left.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredHash {
    pub(super) revision: i64,
    /// The compact revision before.
    pub(super) compact_revision: i64,
    pub(super) hash: u32,
}

/// The hashes of the last compactions, oldest first.
#[derive(Debug, Default)]
pub(super) struct StoredHashes {
    state: Mutex<StoredState>,
}

#[derive(Debug, Default)]
struct StoredState {
    hashes: Vec<StoredHash>,
    /// The compact revision of the last compaction that came to its end; a hash over what an unfinished one left would not be the others'.
    finished: Option<i64>,
}

impl StoredHashes {
    /// `finished` is the compact revision up to which everything was deleted when the store was opened.
    pub(super) fn new(finished: i64) -> Self {
        Self {
            state: Mutex::new(StoredState {
                hashes: Vec::new(),
                finished: Some(finished),
            }),
        }
    }

    pub(super) fn finish(&self, hash: StoredHash) {
        let mut state = self.state.lock();
        if state.finished == Some(hash.compact_revision) {
            state.hashes.push(hash);
            let excess = state.hashes.len().saturating_sub(STORED_MAX);
            state.hashes.drain(..excess);
        }
        state.finished = Some(hash.revision);
    }

    fn at(&self, revision: i64) -> Option<StoredHash> {
        self.state
            .lock()
            .hashes
            .iter()
            .find(|hash| hash.revision == revision)
            .copied()
    }
}

/// Not part of what is stored: the position in the log (etcd leaves it out too), what is counted, and who this member is.
const NOT_HASHED: [&[u8]; 4] = [
    meta::APPLIED,
    meta::CURRENT_REVISION,
    meta::LIVE_BYTES,
    meta::MEMBER_ID,
];

impl Store {
    /// CRC32C over every table, and the revision it is at. Blocking.
    pub fn hash(&self) -> Result<(u32, i64), StorageError> {
        let shared = &self.shared;
        let _hold = shared.holds.hold();
        let (picture, small) = {
            let _writer = shared.writer.lock();
            (shared.newest.load_full(), shared.small.lock().clone())
        };
        let hidden = NOT_HASHED.map(|name| Table::Meta.key(name));
        let mut crc = 0;
        for (key, value) in small
            .iter()
            .filter(|(key, _)| !hidden.contains(&key.to_vec()))
        {
            crc = crc32c::crc32c_append(crc, key);
            crc = crc32c::crc32c_append(crc, value);
        }
        crc = crc32c::crc32c_append(crc, TABLE_NAME);
        for record in shared.records(Revision::default(), picture.revision) {
            let record = record?;
            crc = crc32c::crc32c_append(crc, &record.key());
            crc = crc32c::crc32c_append(crc, &record.value);
        }
        Ok((crc, picture.revision))
    }

    /// What the last compactions left, the newest first. None of those that a restart came between.
    pub fn compaction_hashes(&self) -> Vec<HashKv> {
        let current_revision = self.shared.newest.load().revision;
        let state = self.shared.hashes.state.lock();
        let newest_first = state.hashes.iter().rev();
        newest_first
            .map(|stored| HashKv {
                hash: stored.hash,
                compact_revision: stored.compact_revision,
                hash_revision: stored.revision,
                current_revision,
            })
            .collect()
    }

    /// CRC32C as etcd's HashKV. Revision 0 = current. Blocking.
    pub fn hash_kv(&self, revision: i64) -> Result<HashKv, ReadError> {
        let shared = &self.shared;
        // After a compaction at revision 0 that is the answer to 0 too, as etcd's.
        if let Some(stored) = shared.hashes.at(revision) {
            return Ok(HashKv {
                hash: stored.hash,
                compact_revision: stored.compact_revision,
                hash_revision: stored.revision,
                current_revision: shared.newest.load().revision,
            });
        }
        // No record may go while the scan is on its way.
        let _hold = shared.holds.hold();
        let picture = shared.newest.load_full();
        let compact_revision = picture.compact_revision;
        if revision > 0 && revision < compact_revision {
            return Err(MvccError::Compacted { compact_revision }.into());
        }
        if revision > picture.revision {
            return Err(MvccError::FutureRevision {
                current: picture.revision,
            }
            .into());
        }
        let at = if revision <= 0 {
            picture.revision
        } else {
            revision
        };

        let mut keeps_any = false;
        let mut kept = Vec::new();
        let mut keep = |revision: Revision| {
            if revision.main <= compact_revision {
                kept.push(revision);
            }
        };
        for (_, index) in picture.tree.from(b"") {
            if let Some(revision) = index.keep(at) {
                keeps_any = true;
                keep(revision);
            }
        }
        if !keeps_any {
            for (_, index) in picture.tree.from(b"") {
                if let Some(left) = index.compact(compact_revision, &mut Vec::new()) {
                    left.for_each_record(|record| keep(record.revision()));
                }
            }
        }
        kept.sort_unstable();
        let mut kept = kept.into_iter().peekable();
        let mut hasher = Hasher::new(compact_revision, at);
        for record in shared.records(Revision::default(), at) {
            let record = record?;
            if record.revision.main <= compact_revision {
                while kept.next_if(|kept| *kept < record.revision).is_some() {}
                if kept.next_if_eq(&record.revision).is_none() {
                    continue;
                }
            }
            let key = record.key();
            hasher.write(record.revision, record.tombstone, &key, &record.value);
        }
        Ok(HashKv {
            hash: hasher.finish(),
            compact_revision,
            hash_revision: at,
            current_revision: picture.revision,
        })
    }
}
