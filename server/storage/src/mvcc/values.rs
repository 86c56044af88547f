//! What is kept in memory of the records: current values, the last events, and which keys came and went.
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
use crate::mvcc::store::{Event, EventKind};

/// Memory of a cached record beside its key and value: the message, its Arc, the cache's entry.
const RECORD_OVERHEAD_BYTES: usize = 192;
/// Events kept for watches that are a little behind.
const RECENT_EVENTS_MAX: usize = 8192;
/// Bytes of values those events may hold alive.
const RECENT_BYTES_MAX: usize = 8 << 20;
/// Keys that came or went, kept for counts at an earlier revision. Most writes of a busy store replace a value and are not among them.
const CHANGES_MAX: usize = 32_768;
/// Bytes of their keys.
const CHANGES_BYTES_MAX: usize = 4 << 20;

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
    changes: RwLock<Changes>,
}

/// Keys that came into being or went, by revision, none left out from `complete_from` on.
#[derive(Debug)]
struct Changes {
    queue: VecDeque<Change>,
    complete_from: i64,
    bytes: usize,
}

#[derive(Debug)]
struct Change {
    revision: i64,
    came: bool,
    key: Box<[u8]>,
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
            changes: RwLock::new(Changes {
                queue: VecDeque::new(),
                complete_from: revision + 1,
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
        self.changes.write().remember(revision, events);
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

    /// By how much the number of keys that `counts` has grown between these revisions, if that is remembered.
    pub(super) fn growth(
        &self,
        after: i64,
        upto: i64,
        counts: impl Fn(&[u8]) -> bool,
    ) -> Option<i64> {
        let changes = self.changes.read();
        if after + 1 < changes.complete_from {
            return None;
        }
        let at = |revision| {
            let queue = &changes.queue;
            queue.partition_point(|change| change.revision <= revision)
        };
        let between = changes.queue.range(at(after)..at(upto).max(at(after)));
        let counted = between.filter(|change| counts(&change.key));
        Some(counted.map(|change| if change.came { 1 } else { -1 }).sum())
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

impl Changes {
    fn remember(&mut self, revision: i64, events: &[Event]) {
        for event in events {
            let came = match event.kind {
                EventKind::Put if event.prev.is_some() => continue,
                EventKind::Put => true,
                EventKind::Delete => false,
            };
            self.bytes += event.kv.key.len();
            // A copy: the event's key shares its memory with the value.
            let key = Box::from(&event.kv.key[..]);
            self.queue.push_back(Change {
                revision,
                came,
                key,
            });
        }
        while self.queue.len() > CHANGES_MAX || self.bytes > CHANGES_BYTES_MAX {
            let Some(gone) = self.queue.pop_front() else {
                return;
            };
            self.bytes -= gone.key.len();
            self.complete_from = gone.revision + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mvcc::revision::Revision;

    fn event(kind: EventKind, key: &str, prev: Option<i64>) -> Event {
        Event {
            kind,
            kv: KeyValue {
                key: key.to_owned().into(),
                ..KeyValue::default()
            },
            prev: prev.map(|main| Revision::new(main, 0)),
        }
    }

    #[test]
    fn growth_counts_keys_that_came_and_went_and_knows_when_it_has_forgotten() {
        let values = Values::new(0, 1);
        let put = |key, prev| event(EventKind::Put, key, prev);
        let txns = [
            vec![put("a", None), put("b", None)],
            vec![put("a", Some(2))],
            vec![event(EventKind::Delete, "a", Some(3)), put("c", None)],
        ];
        for (revision, events) in (2..).zip(txns) {
            values.remember(revision, &events.into());
        }
        let growth = |after, upto| values.growth(after, upto, |key| key != b"b");
        assert_eq!(growth(1, 4), Some(1));
        assert_eq!(growth(1, 3), Some(1));
        assert_eq!(growth(2, 3), Some(0));
        assert_eq!(growth(3, 4), Some(0));
        assert_eq!(growth(4, 4), Some(0));
        assert_eq!(growth(0, 4), None);
        for revision in 5..5 + CHANGES_MAX as i64 {
            values.remember(revision, &vec![put("d", None)].into());
        }
        assert_eq!(growth(3, 4), None);
        assert_eq!(growth(4, 6), Some(2));
    }
}
