//! What is kept in memory of the records: current values, and the last events.
//!
//! A record never changes, so the cache by revision is trivially coherent. Of each key it holds the current record and the one before (for
//! prev_kv); the writer takes the third out.
//!
//! etcd reads the engine's mapped pages for every value.

use std::collections::VecDeque;
use std::sync::Arc;

use ballast_api::mvccpb::KeyValue;
use parking_lot::RwLock;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::mvcc::revision::Revision;
use crate::mvcc::store::Event;

/// Memory of a cached record beside its key and value: the message, its Arc, the cache's entry.
const RECORD_OVERHEAD_BYTES: usize = 192;
/// Events kept for watches that are a little behind, and for counts a little back.
const RECENT_EVENTS_MAX: usize = 8192;
/// Bytes of values those events may hold alive.
const RECENT_BYTES_MAX: usize = 8 << 20;

#[derive(Clone, Debug)]
struct ByBytes;

impl Weighter<Revision, Arc<KeyValue>> for ByBytes {
    fn weight(&self, _: &Revision, kv: &Arc<KeyValue>) -> u64 {
        weight(kv) as u64
    }
}

fn weight(kv: &KeyValue) -> usize {
    kv.key.len() + kv.value.len() + RECORD_OVERHEAD_BYTES
}

/// Records in memory by revision, up to a number of bytes, and the last events.
#[derive(Debug)]
pub(super) struct Values {
    cache: Cache<Revision, Arc<KeyValue>, ByBytes>,
    recent: RwLock<Recent>,
}

/// The events of the last transactions, each with its revision, none left out from `complete_from` on.
#[derive(Debug)]
struct Recent {
    txns: VecDeque<(i64, Arc<[Event]>)>,
    complete_from: i64,
    events: usize,
    bytes: usize,
}

impl Values {
    /// An empty one; `revision` is the store's current one.
    pub(super) fn new(cache_bytes: u64, revision: i64) -> Self {
        // An estimate for the cache's first allocation only.
        let items = usize::try_from(cache_bytes / 1024)
            .unwrap_or(usize::MAX)
            .clamp(16, 1 << 16);
        Self {
            cache: Cache::with_weighter(items, cache_bytes, ByBytes),
            recent: RwLock::new(Recent {
                txns: VecDeque::new(),
                complete_from: revision + 1,
                events: 0,
                bytes: 0,
            }),
        }
    }

    pub(super) fn get(&self, revision: Revision) -> Option<Arc<KeyValue>> {
        self.cache.get(&revision)
    }

    pub(super) fn insert(&self, revision: Revision, kv: Arc<KeyValue>) {
        self.cache.insert(revision, kv);
    }

    pub(super) fn remove(&self, revision: Revision) {
        self.cache.remove(&revision);
    }

    /// Remembers what the transaction of `revision` did. In order of revision.
    pub(super) fn remember(&self, revision: i64, events: &Arc<[Event]>) {
        let bytes = events.iter().map(|event| weight(&event.kv)).sum::<usize>();
        let mut recent = self.recent.write();
        recent.txns.push_back((revision, Arc::clone(events)));
        recent.events += events.len();
        recent.bytes += bytes;
        while recent.events > RECENT_EVENTS_MAX || recent.bytes > RECENT_BYTES_MAX {
            let Some((revision, events)) = recent.txns.pop_front() else {
                break;
            };
            recent.events -= events.len();
            recent.bytes -= events.iter().map(|event| weight(&event.kv)).sum::<usize>();
            recent.complete_from = revision + 1;
        }
    }

    /// The transactions with `from <= revision <= to`, if all of them are remembered.
    pub(super) fn recent(&self, from: i64, to: i64) -> Option<Vec<(i64, Arc<[Event]>)>> {
        let recent = self.recent.read();
        if from < recent.complete_from {
            return None;
        }
        let first = recent
            .txns
            .partition_point(|(revision, _)| *revision < from);
        let last = recent.txns.partition_point(|(revision, _)| *revision <= to);
        (first <= last).then(|| recent.txns.range(first..last).cloned().collect())
    }
}
