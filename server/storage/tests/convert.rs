//! From one engine to the other and back, by defragmentation.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ballast_storage::backend::Kind;
use ballast_storage::mvcc::{HashKv, Pace, Store, StoreOptions};
use ballast_storage::schema::Table;
use ballast_storage::{LogPosition, StorageError};

fn open(dir: &Path, engine: Kind) -> Arc<Store> {
    let store = Store::open(StoreOptions {
        dir: dir.to_owned(),
        engine,
        value_cache_bytes: 0,
        engine_cache_bytes: 1 << 20,
        compaction_batch_limit: 100,
        compaction_sleep: Duration::from_millis(1),
        batch_interval: Duration::from_millis(2),
        batch_limit: 1000,
    })
    .unwrap();
    store.set_log_synced(u64::MAX);
    store
}

fn write(store: &Store, number: u64) {
    let index = store.applied().index + 1;
    let mut txn = store.begin(LogPosition { term: 1, index });
    let key = format!("k{:04}", number % 700);
    if number.is_multiple_of(13) {
        txn.delete_range(key.as_bytes(), b"").unwrap();
    } else {
        let value =
            vec![
                b'v';
                300 + (number % 7) as usize * 40_000 * usize::from(number.is_multiple_of(100))
            ];
        txn.put(key.into(), value.into(), 0).unwrap();
    }
    txn.table_put(
        Table::Lease,
        &number.to_be_bytes()[7..],
        key_of(number).into(),
    );
    if number.is_multiple_of(500) {
        let _ = txn.compact(txn.revision() - 100);
    }
    txn.commit();
}

fn key_of(number: u64) -> Vec<u8> {
    number.to_string().into_bytes()
}

/// All that a replica is compared by.
fn picture(store: &Store) -> (HashKv, Vec<(bytes::Bytes, bytes::Bytes)>, LogPosition) {
    store.flush().unwrap();
    (
        store.hash_kv(0).unwrap(),
        store.table(Table::Lease).unwrap(),
        store.applied(),
    )
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_database_goes_from_redb_to_sled_and_back_with_writes_going_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut number = 0;
    let store = open(dir.path(), Kind::Redb);
    for _ in 0..1500 {
        number += 1;
        write(&store, number);
    }
    let mut before = picture(&store);
    store.close().unwrap();
    drop(store);
    for (from, to) in [(Kind::Redb, Kind::Sled), (Kind::Sled, Kind::Redb)] {
        // What is there is served, whatever the options name.
        let store = open(dir.path(), to);
        assert_eq!((store.engine(), store.converts_to()), (from, Some(to)));
        assert_eq!(picture(&store), before);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let converter = scope.spawn(|| {
                let report = store.defragment(Pace::Background);
                done.store(true, Ordering::Relaxed);
                report.unwrap()
            });
            let mut after = 0;
            while after < 50 {
                number += 1;
                write(&store, number);
                if number.is_multiple_of(20) {
                    // As the log would: memory alone takes writes faster than any engine follows.
                    store.flush().unwrap();
                }
                after += u64::from(done.load(Ordering::Relaxed));
            }
            let report = converter.join().unwrap();
            assert_eq!((report.from, report.to), (from, to));
        });
        assert_eq!((store.engine(), store.converts_to()), (to, None));
        before = picture(&store);
        store.close().unwrap();
        drop(store);
        // From the disk alone.
        let store = open(dir.path(), to);
        assert_eq!(picture(&store), before);
        store.close().unwrap();
    }
    assert_eq!(names(dir.path()), ["000003.redb", "CURRENT"]);
}

/// A close gives the conversion up, at whatever step it is: the next open finds one database, whole, and the log's writes come again.
#[test]
fn a_conversion_that_is_cut_short_leaves_one_engine_or_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let mut to = Kind::Sled;
    let store = open(dir.path(), Kind::Redb);
    for number in 1..=4000 {
        write(&store, number);
    }
    let expected = picture(&store);
    store.close().unwrap();
    drop(store);
    let mut given_up = 0;
    for round in 0..12 {
        let store = open(dir.path(), to);
        let from = store.engine();
        let report = std::thread::scope(|scope| {
            let converter = scope.spawn(|| store.defragment(Pace::Background));
            std::thread::sleep(Duration::from_millis(round * 4));
            store.close().unwrap();
            converter.join().unwrap()
        });
        drop(store);
        let left = names(dir.path());
        assert_eq!(left.len(), 2, "{left:?}");
        let store = open(dir.path(), to);
        match report {
            Ok(_) => assert_eq!(store.engine(), to),
            Err(StorageError::Stopped { .. } | StorageError::Engine { .. }) => {
                given_up += 1;
                assert_eq!(store.engine(), from);
            }
            Err(error) => panic!("{error}"),
        }
        assert_eq!(picture(&store), expected);
        if store.engine() == to {
            to = if to == Kind::Sled {
                Kind::Redb
            } else {
                Kind::Sled
            };
        }
        store.close().unwrap();
    }
    assert!(given_up > 0);
}
