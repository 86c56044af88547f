//! What a put waits while a compaction goes through a large index.

#![expect(clippy::unwrap_used, reason = "a test's helpers may panic")]
#![expect(clippy::print_stdout, reason = "the figures are worth seeing")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ballast_storage::LogPosition;
use ballast_storage::backend::Kind;
use ballast_storage::clock;
use ballast_storage::mvcc::{Store, StoreOptions};

const KEYS: u64 = 200_000;
/// Keys of one entry while the store is filled.
const ENTRY_KEYS: u64 = 2_000;
/// To compact the index of so many keys in one go takes several times as long, even optimized.
const STALL_MAX: Duration = Duration::from_millis(400);

fn key(i: u64) -> bytes::Bytes {
    format!("/registry/things/{i:08}").into()
}

struct Writer {
    store: Arc<Store>,
    index: u64,
}

impl Writer {
    fn entry(&mut self, keys: std::ops::Range<u64>, value: &'static str) {
        self.index += 1;
        let mut txn = self.store.begin(LogPosition {
            term: 1,
            index: self.index,
        });
        for i in keys {
            txn.put(key(i), value.into(), 0).unwrap();
        }
        txn.commit();
        self.store.set_log_synced(self.index);
    }
}

#[test]
fn a_compaction_of_many_keys_never_holds_a_put_up_for_long() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(StoreOptions {
        dir: dir.path().to_owned(),
        engine: Kind::Redb,
        value_cache_bytes: 1 << 20,
        engine_cache_bytes: 64 << 20,
        compaction_batch_limit: 1_000,
        compaction_sleep: Duration::from_millis(1),
        batch_interval: Duration::from_millis(100),
        batch_limit: 10_000,
    })
    .unwrap();
    let mut writer = Writer {
        store: Arc::clone(&store),
        index: 0,
    };
    for value in ["first", "second"] {
        for from in (0..KEYS).step_by(ENTRY_KEYS as usize) {
            writer.entry(from..from + ENTRY_KEYS, value);
        }
    }
    store.flush().unwrap();

    let head = store.view().revision();
    let mut txn = store.begin(LogPosition {
        term: 1,
        index: writer.index + 1,
    });
    writer.index += 1;
    let compaction = txn.compact(head).unwrap();
    txn.commit();
    store.set_log_synced(writer.index);
    let done = Arc::new(AtomicBool::new(false));
    compaction.on_done(Box::new({
        let done = Arc::clone(&done);
        move |result| {
            result.unwrap();
            done.store(true, Ordering::Release);
        }
    }));
    let mut waits = Vec::new();
    let started = clock::now();
    while !done.load(Ordering::Acquire) {
        let at = waits.len() as u64 * 7919 % KEYS;
        let before = clock::now();
        writer.entry(at..at + 1, "third");
        waits.push(before.elapsed());
    }
    waits.sort_unstable();
    let longest = waits[waits.len() - 1];
    println!(
        "{} puts during a compaction of {:?}: median {:?}, p99.9 {:?}, longest {longest:?}",
        waits.len(),
        started.elapsed(),
        waits[waits.len() / 2],
        waits[waits.len() - 1 - waits.len() / 1000],
    );
    assert!(waits.len() > 100, "nothing was measured");
    assert!(longest < STALL_MAX, "{longest:?}");
    store.close().unwrap();
}
