//! Readers, a writer, compactions and defragmentations at the same time.

#![expect(clippy::unwrap_used, reason = "a test's helpers may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

mod engines;

use ballast_storage::backend::Kind;
use ballast_storage::mvcc::{Pace, RangeOptions, Store, StoreOptions};
use ballast_storage::{LogPosition, MvccError, ReadError};

const KEYS: usize = 50;
const ENTRIES: u64 = 800;

/// Each entry writes the same number to all of some keys; so at any revision the keys of a group agree, and no key is ever missing.
fn write(store: &Store) {
    for index in 1..=ENTRIES {
        let mut txn = store.begin(LogPosition { term: 1, index });
        let group = index % 5;
        for i in 0..KEYS {
            txn.put(
                format!("g{group}/{i:03}").into(),
                index.to_string().into(),
                0,
            )
            .unwrap();
        }
        if index % 100 == 0 {
            let _ = txn.compact(txn.revision() - 20);
        }
        txn.commit();
        store.set_log_synced(index);
    }
}

fn read(store: &Store, stop: &AtomicBool, back: i64) -> u64 {
    let mut reads = 0;
    while !stop.load(Ordering::Relaxed) {
        let view = store.view();
        let head = view.revision();
        if head < 100 {
            continue;
        }
        let revision = if back == 0 { 0 } else { head - back };
        let options = RangeOptions {
            revision,
            ..RangeOptions::default()
        };
        for group in 0..5 {
            let (from, to) = (format!("g{group}/"), format!("g{group}0"));
            match view.range(from.as_bytes(), to.as_bytes(), &options) {
                Ok(result) => {
                    assert_eq!(
                        result.kvs.len(),
                        KEYS,
                        "group {group} at {revision} of {head}"
                    );
                    assert!(result.kvs.iter().all(|kv| kv.value == result.kvs[0].value));
                    assert!(revision == 0 || result.kvs[0].mod_revision <= revision);
                }
                Err(ReadError::Mvcc(MvccError::Compacted { .. })) if revision > 0 => {}
                Err(error) => panic!("group {group} at {revision} of {head}: {error}"),
            }
        }
        reads += 1;
    }
    reads
}

/// Every revision from `back` ago to the head has all events of its entry.
fn follow(store: &Store, stop: &AtomicBool) -> u64 {
    let mut seen = 0;
    let mut next = 2;
    while !stop.load(Ordering::Relaxed) {
        let view = store.view();
        match view.events(next, 10_000) {
            Ok((events, further)) => {
                for chunk in events.chunks(KEYS) {
                    assert_eq!(chunk.len(), KEYS);
                    assert!(chunk.iter().all(|event| event.kv.mod_revision == next));
                    next += 1;
                }
                assert_eq!(further, next);
                seen += events.len() as u64;
            }
            Err(ReadError::Mvcc(MvccError::Compacted { compact_revision })) => {
                next = compact_revision;
            }
            Err(error) => panic!("events from {next}: {error}"),
        }
        // At the compact revision only the newest record of a key is sure to be there, so go on after it.
        if view.compact_revision() == next {
            next += 1;
        }
    }
    seen
}

fn nothing_is_missing_torn_or_wrong_while_history_is_deleted_and_the_file_is_changed(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(StoreOptions {
        dir: dir.path().to_owned(),
        engine: kind,
        value_cache_bytes: 0, // so that reads go to the overlay and the engine
        engine_cache_bytes: 4 << 20,
        compaction_batch_limit: 200,
        compaction_sleep: Duration::from_micros(100),
        batch_interval: Duration::from_millis(1),
        batch_limit: 500,
    })
    .unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let stop = &stop;
        let store = &store;
        let readers: Vec<_> = [0, 5, 60]
            .map(|back| scope.spawn(move || read(store, stop, back)))
            .into();
        let follower = scope.spawn(move || follow(store, stop));
        let defragmenter = scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                store.defragment(Pace::Background).unwrap();
                store.hash_kv(0).unwrap();
            }
        });
        write(store);
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
        follower.join().unwrap();
        defragmenter.join().unwrap();
    });
    assert!(store.failure().is_none());
    store.close().unwrap();
}

on_each_engine!(nothing_is_missing_torn_or_wrong_while_history_is_deleted_and_the_file_is_changed,);
