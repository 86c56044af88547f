//! HashKV over the list of changes, and what compactions remove from it.
//!
//! A compaction leaves the hash of what it went through, and HashKV at its revision answers that one, until ten newer ones came or the
//! member was restarted.
//!
//! etcd: server/storage/mvcc/hash.go, kvstore_compaction.go, by what they do.

use std::collections::{BTreeMap, BTreeSet};

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use ballast_api::mvccpb::KeyValue;
use bytes::Bytes;
use prost::Message as _;

use super::{Change, Model};

/// Compactions of which the hash is known.
const STORED_MAX: usize = 10;

#[derive(Clone, Copy, Debug)]
struct Stored {
    hash: u32,
    compact_revision: i64,
}

/// The hashes of compactions, by revision.
#[derive(Debug, Default)]
pub(super) struct Hashes {
    stored: BTreeMap<i64, Stored>,
    /// Revisions of compactions before a restart, which may have been carried out once more.
    uncertain: BTreeSet<i64>,
}

impl Hashes {
    fn store(&mut self, revision: i64, stored: Stored) {
        self.stored.insert(revision, stored);
        if self.stored.len() > STORED_MAX {
            self.stored.pop_first();
        }
    }

    pub(super) fn forget(&mut self) {
        let revisions = std::mem::take(&mut self.stored).into_keys();
        self.uncertain.extend(revisions);
    }

    pub(super) fn certain(&self, revision: i64) -> bool {
        !self.uncertain.contains(&revision)
    }
}

impl Model {
    pub(super) fn hash_kv(&self, revision: i64) -> Result<pb::HashKvResponse, Error> {
        let told = |hash, compact_revision, hash_revision| pb::HashKvResponse {
            header: self.header(),
            hash,
            compact_revision,
            hash_revision,
        };
        if let Some(stored) = self.hashes.stored.get(&revision) {
            return Ok(told(stored.hash, stored.compact_revision, revision));
        }
        if revision > 0 && revision < self.compacted {
            return Err(Error::Compacted);
        }
        if revision > self.head() {
            return Err(Error::FutureRev);
        }
        let revision = if revision == 0 { self.head() } else { revision };
        let kept = self.newest(revision, false);
        let hash = self.hash(self.compacted, revision, &kept);
        Ok(told(hash, self.compacted, revision))
    }

    /// Removes what the compaction at the present compact revision does not keep; `before` was the one before.
    pub(super) fn remove_compacted(&mut self, before: i64) {
        let kept = self.newest(self.compacted, true);
        let hash = self.hash(before, self.compacted, &kept);
        let stored = Stored {
            hash,
            compact_revision: before,
        };
        self.hashes.store(self.compacted, stored);
        for change in &mut self.changes {
            let old = change.main <= self.compacted;
            change.removed |= old && !kept.contains(&(change.main, change.sub));
        }
    }

    /// The last change of each key up to a revision, without deletions, or with those exactly there.
    fn newest(&self, revision: i64, with_deletions: bool) -> BTreeSet<(i64, i64)> {
        let mut newest: BTreeMap<&Bytes, &Change> = BTreeMap::new();
        for change in self.changes.iter().filter(|c| c.main <= revision) {
            newest.insert(&change.kv.key, change);
        }
        newest
            .into_values()
            .filter(|c| !c.deletion || (with_deletions && c.main == revision))
            .map(|c| (c.main, c.sub))
            .collect()
    }

    fn hash(&self, compacted: i64, revision: i64, kept: &BTreeSet<(i64, i64)>) -> u32 {
        let mut hash = crc32c::crc32c(b"key");
        for change in self.changes.iter().filter(|c| !c.removed) {
            let at = (change.main, change.sub);
            let hidden = change.main <= compacted && !kept.is_empty() && !kept.contains(&at);
            let last_deletion = change.deletion && change.main == compacted;
            if change.main > revision || hidden || last_deletion {
                continue;
            }
            let (key, value) = record(change);
            hash = crc32c::crc32c_append(hash, &key);
            hash = crc32c::crc32c_append(hash, &value);
        }
        hash
    }
}

/// As etcd stores it.
fn record(change: &Change) -> (Vec<u8>, Vec<u8>) {
    let mut key = change.main.to_be_bytes().to_vec();
    key.push(b'_');
    key.extend(change.sub.to_be_bytes());
    if change.deletion {
        key.push(b't');
        let only_key = KeyValue {
            key: change.kv.key.clone(),
            ..KeyValue::default()
        };
        return (key, only_key.encode_to_vec());
    }
    (key, change.kv.encode_to_vec())
}
