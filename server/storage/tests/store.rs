//! The store's promises, one by one, through its public face.

#![expect(clippy::unwrap_used, reason = "a test's helpers may panic")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

mod engines;

use ballast_storage::backend::{Batch, Kind};
use ballast_storage::mvcc::{EventKind, Pace, RangeOptions, Store, StoreOptions, View, WriteTxn};
use ballast_storage::schema::{Table, meta};
use ballast_storage::{LogPosition, MvccError, ReadError, Revision, StorageError};
use bytes::Bytes;

fn options(kind: Kind, dir: &Path) -> StoreOptions {
    StoreOptions {
        dir: dir.to_owned(),
        engine: kind,
        value_cache_bytes: 1 << 20,
        engine_cache_bytes: 1 << 20,
        compaction_batch_limit: 10,
        compaction_sleep: Duration::from_millis(1),
        batch_interval: Duration::from_millis(5),
        batch_limit: 1000,
    }
}

fn open(kind: Kind, dir: &Path) -> Arc<Store> {
    let store = Store::open(options(kind, dir)).unwrap();
    store.set_log_synced(u64::MAX);
    store
}

/// Runs one entry.
fn apply<T>(store: &Store, work: impl FnOnce(&mut WriteTxn<'_>) -> T) -> T {
    let at = LogPosition {
        term: 1,
        index: store.applied().index + 1,
    };
    let mut txn = store.begin(at);
    let out = work(&mut txn);
    txn.commit();
    out
}

fn put(store: &Store, key: &str, value: &str) -> i64 {
    apply(store, |txn| {
        txn.put(key.to_owned().into(), value.to_owned().into(), 0)
            .unwrap();
        txn.revision()
    })
}

fn delete(store: &Store, key: &str) -> i64 {
    apply(store, |txn| {
        txn.delete_range(key.as_bytes(), b"").unwrap();
        txn.revision()
    })
}

fn compact(store: &Store, revision: i64) {
    apply(store, |txn| txn.compact(revision))
        .unwrap()
        .wait()
        .unwrap();
}

/// "key=value@mod" of everything at a revision.
fn dump(view: &View, revision: i64) -> Vec<String> {
    let options = RangeOptions {
        revision,
        ..RangeOptions::default()
    };
    let result = view.range(b"\0", b"\0", &options).unwrap();
    assert_eq!(result.count, result.kvs.len() as i64);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    result
        .kvs
        .iter()
        .map(|kv| format!("{}={}@{}", text(&kv.key), text(&kv.value), kv.mod_revision))
        .collect()
}

fn events(view: &View, start: i64) -> Vec<String> {
    let (events, next) = view.events(start, usize::MAX).unwrap();
    assert_eq!(next, view.revision() + 1);
    events
        .iter()
        .map(|event| {
            let sign = if event.kind == EventKind::Put {
                '+'
            } else {
                '-'
            };
            format!(
                "{sign}{}@{}",
                String::from_utf8_lossy(&event.kv.key),
                event.kv.mod_revision
            )
        })
        .collect()
}

fn a_new_store_is_at_revision_one_and_each_write_adds_one(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    assert_eq!(store.view().revision(), 1);
    assert_eq!(put(&store, "a", "1"), 2);
    assert_eq!(delete(&store, "missing"), 2);
    assert_eq!(put(&store, "a", "2"), 3);
    assert_eq!(delete(&store, "a"), 4);
    assert_eq!(dump(&store.view(), 0), [""; 0]);
    assert_eq!(dump(&store.view(), 3), ["a=2@3"]);
    assert_eq!(dump(&store.view(), 2), ["a=1@2"]);
    assert_eq!(dump(&store.view(), 1), [""; 0]);
}

fn create_revision_and_version_start_again_after_a_delete(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    put(&store, "k", "1");
    put(&store, "k", "2");
    delete(&store, "k");
    put(&store, "k", "3");
    let kvs = |revision| {
        let options = RangeOptions {
            revision,
            ..RangeOptions::default()
        };
        let kv = store
            .view()
            .range(b"k", b"", &options)
            .unwrap()
            .kvs
            .remove(0);
        (kv.create_revision, kv.mod_revision, kv.version)
    };
    assert_eq!(kvs(3), (2, 3, 2));
    assert_eq!(kvs(0), (5, 5, 1));
}

fn a_transaction_sees_its_own_writes_and_nobody_else_does_before_commit(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    put(&store, "a", "1");
    let mut txn = store.begin(LogPosition { term: 1, index: 2 });
    txn.put("b".into(), "2".into(), 7).unwrap();
    let touched = txn.put("a".into(), "3".into(), 0).unwrap();
    assert_eq!((touched.key, touched.old_lease), (Bytes::from("a"), 0));
    let all = txn.range(b"\0", b"\0", &RangeOptions::default()).unwrap();
    assert_eq!(
        all.kvs
            .iter()
            .map(|kv| kv.value.clone())
            .collect::<Vec<_>>(),
        ["3", "2"]
    );
    assert_eq!(all.revision, 3);
    assert_eq!(dump(&store.view(), 0), ["a=1@2"]);
    let old = RangeOptions {
        revision: 2,
        count_only: true,
        ..RangeOptions::default()
    };
    assert_eq!(txn.range(b"\0", b"\0", &old).unwrap().count, 1);
    let committed = txn.commit();
    assert_eq!(committed.revision, 3);
    assert_eq!(committed.events.len(), 2);
    assert_eq!(committed.events[1].prev, Some(Revision::new(2, 0)));
    assert_eq!(dump(&committed.view, 0), ["a=3@3", "b=2@3"]);
    assert_eq!(store.leased_keys(), [(Bytes::from("b"), 7)]);
}

fn a_dropped_transaction_changes_nothing(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    put(&store, "a", "1");
    let mut txn = store.begin(LogPosition { term: 1, index: 2 });
    txn.put("a".into(), "2".into(), 0).unwrap();
    let compaction = txn.compact(2).unwrap();
    drop(txn);
    assert_eq!(dump(&store.view(), 0), ["a=1@2"]);
    assert_eq!(store.view().compact_revision(), -1);
    assert_eq!(store.applied().index, 1);
    assert!(compaction.wait().is_err(), "nobody may wait for ever");
}

fn limit_count_and_keys_only_answer_as_etcd(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    for i in 0..10 {
        put(&store, &format!("k{i}"), "v");
    }
    delete(&store, "k3");
    let view = store.view();
    let get = |options| view.range(b"k", b"l", &options).unwrap();
    let page = get(RangeOptions {
        limit: 3,
        ..RangeOptions::default()
    });
    assert_eq!((page.kvs.len(), page.count), (3, 9));
    let old = get(RangeOptions {
        limit: 3,
        revision: 6,
        ..RangeOptions::default()
    });
    assert_eq!((old.kvs.len(), old.count, old.revision), (3, 5, 12));
    let counted = get(RangeOptions {
        count_only: true,
        ..RangeOptions::default()
    });
    assert_eq!((counted.kvs.len(), counted.count), (0, 9));
    let keys = get(RangeOptions {
        keys_only: true,
        limit: 1,
        ..RangeOptions::default()
    });
    assert!(keys.kvs[0].value.is_empty());
    assert_eq!(
        (keys.kvs[0].mod_revision, keys.kvs[0].version, keys.count),
        (2, 1, 9)
    );
    assert_eq!(
        view.range(b"k5", b"\0", &RangeOptions::default())
            .unwrap()
            .count,
        5
    );
    assert_eq!(
        view.range(b"l", b"k", &RangeOptions::default())
            .unwrap()
            .count,
        0
    );
}

fn revisions_out_of_bounds_are_answers(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    for i in 0..6 {
        put(&store, "kb/1", &i.to_string());
    }
    compact(&store, 4);
    let get = |revision| {
        let options = RangeOptions {
            revision,
            ..RangeOptions::default()
        };
        store
            .view()
            .range(b"kb/1", b"", &options)
            .map(|result| result.kvs[0].value.clone())
    };
    assert!(matches!(
        get(3),
        Err(ReadError::Mvcc(MvccError::Compacted {
            compact_revision: 4
        }))
    ));
    assert_eq!(get(4).unwrap(), "2");
    assert_eq!(get(-5).unwrap(), "5");
    assert!(matches!(
        get(8),
        Err(ReadError::Mvcc(MvccError::FutureRevision { current: 7 }))
    ));
    assert!(matches!(
        store.view().events(3, 1),
        Err(ReadError::Mvcc(MvccError::Compacted {
            compact_revision: 4
        }))
    ));
    assert_eq!(events(&store.view(), 4).len(), 4);
    assert_eq!(store.view().events(12, 1).unwrap().1, 12);
    let again = apply(&store, |txn| txn.compact(4).map(drop));
    assert_eq!(
        again,
        Err(MvccError::Compacted {
            compact_revision: 4
        })
    );
    let future = apply(&store, |txn| txn.compact(12).map(drop));
    assert_eq!(future, Err(MvccError::FutureRevision { current: 7 }));
}

fn etcd_18089_a_delete_at_the_compact_revision_is_still_told(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    put(&store, "w/a", "1");
    put(&store, "w/b", "1");
    let deleted = delete(&store, "w/a");
    compact(&store, deleted);
    assert_eq!(events(&store.view(), deleted), [format!("-w/a@{deleted}")]);
    store.close().unwrap();
    let store = open(kind, dir.path());
    assert_eq!(events(&store.view(), deleted), [format!("-w/a@{deleted}")]);
    assert_eq!(dump(&store.view(), 0), ["w/b=1@3"]);
}

fn etcd_6633_the_head_is_readable_after_all_of_it_was_compacted(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    put(&store, "hd/1", "v");
    delete(&store, "hd/1");
    compact(&store, 3);
    store.close().unwrap();
    let store = open(kind, dir.path());
    let result = store
        .view()
        .range(b"hd/1", b"", &RangeOptions::default())
        .unwrap();
    assert_eq!((result.count, result.revision), (0, 3));
    assert_eq!(put(&store, "hd/1", "v"), 4);
}

fn what_is_flushed_is_there_after_a_crash_and_the_rest_comes_from_the_log(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(options(kind, dir.path())).unwrap();
    put(&store, "a", "1");
    put(&store, "b", "2");
    store.set_log_synced(1); // the second entry is not synced in the log
    let deadline = std::time::Duration::from_secs(10);
    wait_until(deadline, || store.durable().index == 1);
    assert_eq!(store.applied(), LogPosition { term: 1, index: 2 });
    drop(store);
    let store = Store::open(options(kind, dir.path())).unwrap();
    assert_eq!(store.applied(), LogPosition { term: 1, index: 1 });
    assert_eq!(dump(&store.view(), 0), ["a=1@2"]);
}

fn wait_until(deadline: Duration, holds: impl Fn() -> bool) {
    let (done, ended) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || ended.recv_timeout(deadline).is_ok());
    while !holds() {
        assert!(!watchdog.is_finished(), "it did not happen in {deadline:?}");
        std::thread::yield_now();
    }
    drop(done);
}

fn small_tables_come_back_in_order(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    apply(&store, |txn| {
        txn.table_put(Table::Lease, b"2", "b".into());
        txn.table_put(Table::Lease, b"1", "a".into());
        txn.table_put(Table::Alarm, b"x", Bytes::new());
        txn.table_put(Table::Meta, meta::CLUSTER_VERSION, "3.7.0".into());
    });
    apply(&store, |txn| txn.table_delete(Table::Alarm, b"x"));
    let check = |store: &Store| {
        let leases = store.table(Table::Lease).unwrap();
        assert_eq!(leases, [("1".into(), "a".into()), ("2".into(), "b".into())]);
        assert_eq!(store.table(Table::Alarm).unwrap(), []);
        let meta_table = store.table(Table::Meta).unwrap();
        assert!(meta_table.contains(&(Bytes::from_static(meta::CLUSTER_VERSION), "3.7.0".into())));
    };
    check(&store);
    store.close().unwrap();
    check(&open(kind, dir.path()));
}

fn history_is_the_same_from_memory_and_from_the_engine(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    for i in 0..50 {
        put(&store, &format!("k{}", i % 7), &i.to_string());
        if i % 5 == 0 {
            delete(&store, &format!("k{}", i % 7));
        }
    }
    let live = events(&store.view(), 10);
    let dumps: Vec<_> = (1..=store.view().revision())
        .map(|rev| dump(&store.view(), rev))
        .collect();
    let prevs = |store: &Store| -> Vec<Option<Bytes>> {
        let view = store.view();
        let (events, _) = view.events(2, usize::MAX).unwrap();
        let prev = |revision| view.record(revision).unwrap().map(|kv| kv.value.clone());
        events
            .iter()
            .map(|event| event.prev.and_then(prev))
            .collect()
    };
    let live_prevs = prevs(&store);
    store.close().unwrap();
    let store = open(kind, dir.path());
    assert_eq!(events(&store.view(), 10), live);
    assert_eq!(prevs(&store), live_prevs);
    for (revision, expected) in (1..).zip(&dumps) {
        assert_eq!(&dump(&store.view(), revision), expected);
    }
    // In pieces, whole revisions each.
    let view = store.view();
    let mut next = 10;
    let mut pieces = Vec::new();
    while next <= view.revision() {
        let (events, further) = view.events(next, 1).unwrap();
        assert!(
            events
                .iter()
                .all(|event| event.kv.mod_revision == events[0].kv.mod_revision)
        );
        pieces.extend(events);
        next = further;
    }
    assert_eq!(pieces.len(), live.len());
}

fn defragmentation_gives_space_back_and_keeps_everything(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    let value = "v".repeat(10_000);
    for i in 0..500 {
        put(&store, &format!("k{i}"), &value);
    }
    for i in 0..490 {
        delete(&store, &format!("k{i}"));
    }
    compact(&store, store.view().revision());
    let before = dump(&store.view(), 0);
    let hash = store.hash_kv(0).unwrap().hash;
    let report = store.defragment(Pace::Background).unwrap();
    assert!(
        report.after.allocated * 4 < report.before.allocated,
        "{report:?}"
    );
    assert!(report.after.in_use <= report.after.allocated);
    assert_eq!(dump(&store.view(), 0), before);
    assert_eq!(store.hash_kv(0).unwrap().hash, hash);
    put(&store, "after", "1");
    store.close().unwrap();
    let files: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(files.len(), 2, "{files:?}");
    let store = open(kind, dir.path());
    assert_eq!(dump(&store.view(), 0).len(), before.len() + 1);
}

fn an_unknown_format_and_a_lost_current_are_refused(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    apply(&store, |txn| {
        txn.table_put(
            Table::Meta,
            meta::FORMAT,
            vec![9, 0, 0, 0, 0, 0, 0, 0].into(),
        );
    });
    store.close().unwrap();
    let error = Store::open(options(kind, dir.path())).unwrap_err();
    assert!(matches!(error, StorageError::Refused { .. }), "{error}");
    std::fs::remove_file(dir.path().join("CURRENT")).unwrap();
    let error = Store::open(options(kind, dir.path())).unwrap_err();
    assert!(error.to_string().contains("no CURRENT"), "{error}");
}

/// The numbers are those of etcd v3.7.3 for the same requests.
fn hash_kv_is_etcds_before_during_and_after_compactions(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path());
    let hash = |store: &Store, revision| {
        let found = store.hash_kv(revision).unwrap();
        (found.hash, found.compact_revision, found.hash_revision)
    };
    assert_eq!(hash(&store, 0), (1_084_519_789, -1, 1));
    for i in 0..10 {
        put(&store, &format!("k{}", i % 4), &format!("v{i}"));
    }
    delete(&store, "k1");
    put(&store, "k1", "again");
    delete(&store, "k2");
    put(&store, "k9", "x");
    apply(&store, |txn| {
        txn.put("t1".into(), "a".into(), 0).unwrap();
        txn.put("t2".into(), "b".into(), 0).unwrap();
        txn.delete_range(b"k3", b"").unwrap();
    });
    assert_eq!(hash(&store, 0), (3_278_287_977, -1, 16));
    assert_eq!(hash(&store, 5), (3_089_800_181, -1, 5));
    assert_eq!(hash(&store, 12), (1_346_548_316, -1, 12));
    assert!(matches!(
        store.hash_kv(99),
        Err(ReadError::Mvcc(MvccError::FutureRevision { current: 16 }))
    ));
    compact(&store, 6);
    assert_eq!(hash(&store, 0), (2_180_145_497, 6, 16));
    assert!(matches!(
        store.hash_kv(5),
        Err(ReadError::Mvcc(MvccError::Compacted {
            compact_revision: 6
        }))
    ));
    assert_eq!(hash(&store, 6), (3_315_412_638, -1, 6));
    assert_eq!(hash(&store, 7), (2_056_901_753, 6, 7));
    compact(&store, 14);
    assert_eq!(hash(&store, 0), (3_986_828_997, 14, 16));
    assert_eq!(hash(&store, 14), (2_924_371_619, 6, 14));
    assert_eq!(hash(&store, 15), (4_165_521_935, 14, 15));
    put(&store, "k0", "more");
    delete(&store, "t1");
    assert_eq!(hash(&store, 0), (692_884_540, 14, 18));
    compact(&store, 18);
    assert_eq!(hash(&store, 0), (2_251_615_204, 18, 18));
    assert_eq!(hash(&store, 18), (692_884_540, 14, 18));
    store.close().unwrap();
    let store = open(kind, dir.path());
    assert_eq!(hash(&store, 0), (2_251_615_204, 18, 18));
    assert_eq!(hash(&store, 18), (2_251_615_204, 18, 18));
}

fn a_damaged_record_stops_the_open_and_is_named(kind: Kind) {
    for (key, value, expected) in [
        (
            Revision::new(3, 0).to_bytes().to_vec(),
            vec![0x0a, 0xff],
            "record 3_0",
        ),
        (b"no revision".to_vec(), Vec::new(), "no revision"),
        (
            Revision::new(3, 0).to_bytes().to_vec(),
            vec![0x0a, 1, b'k'],
            "says revision 0",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = open(kind, dir.path());
        put(&store, "a", "1");
        store.close().unwrap();
        let path = dir.path().join(format!("000001.{kind}"));
        let engine = kind.open(&path, 1 << 20).unwrap();
        let mut batch = Batch::default();
        batch.put(Table::Key.key(&key), value);
        engine.write(&batch).unwrap();
        drop(engine);
        let error = Store::open(options(kind, dir.path()))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("damaged") && error.contains(expected),
            "{error}"
        );
    }
}

fn an_interrupted_compaction_goes_on_at_the_next_open(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let slow = StoreOptions {
        compaction_batch_limit: 1,
        compaction_sleep: Duration::from_hours(1),
        ..options(kind, dir.path())
    };
    let store = Store::open(slow).unwrap();
    store.set_log_synced(u64::MAX);
    for i in 0..40 {
        put(&store, &format!("k{}", i % 3), &i.to_string());
    }
    delete(&store, "k2");
    let revision = put(&store, "k0", "last");
    let compaction = apply(&store, |txn| txn.compact(revision)).unwrap();
    let hash = store.hash_kv(0).unwrap();
    let expected = dump(&store.view(), 0);
    store.flush().unwrap();
    drop(store);
    assert!(compaction.wait().is_err());
    let store = open(kind, dir.path());
    assert_eq!(store.view().compact_revision(), revision);
    assert_eq!(dump(&store.view(), 0), expected);
    assert_eq!(store.hash_kv(0).unwrap(), hash);
    let finished = (
        Bytes::from_static(meta::FINISHED_COMPACT),
        revision.to_be_bytes().to_vec().into(),
    );
    wait_until(Duration::from_secs(30), || {
        store.table(Table::Meta).unwrap().contains(&finished)
    });
    assert!(store.sizes().in_use < 500);
    store.close().unwrap();
    let store = open(kind, dir.path());
    assert!(store.table(Table::Meta).unwrap().contains(&finished));
    assert_eq!(dump(&store.view(), 0), expected);
    assert_eq!(store.hash_kv(0).unwrap(), hash);
}

fn a_close_ends_a_defragmentation_and_leaves_no_orphan(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let value = "v".repeat(1 << 20);
    for round in 0..3 {
        let store = open(kind, dir.path());
        for i in 0..20 {
            put(&store, &format!("k{i}"), &value);
        }
        store.flush().unwrap();
        let (told, begun) = std::sync::mpsc::channel();
        let running = std::thread::spawn({
            let store = Arc::clone(&store);
            move || {
                told.send(()).unwrap();
                store.defragment(Pace::Background)
            }
        });
        begun.recv().unwrap();
        let deadline = Duration::from_secs(10);
        let copying = || std::fs::read_dir(dir.path()).unwrap().count() > 2;
        // The last round closes as soon as it can, the others in the middle.
        if round < 2 && !running.is_finished() {
            wait_until(deadline, || copying() || running.is_finished());
        }
        store.close().unwrap();
        match running.join().unwrap() {
            Ok(_) | Err(StorageError::Stopped { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        let mut names: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names.len(), 2, "{names:?}");
        assert_eq!(names[1], "CURRENT");
    }
    let store = open(kind, dir.path());
    assert_eq!(store.view().revision(), 61);
}

on_each_engine!(
    a_new_store_is_at_revision_one_and_each_write_adds_one,
    create_revision_and_version_start_again_after_a_delete,
    a_transaction_sees_its_own_writes_and_nobody_else_does_before_commit,
    a_dropped_transaction_changes_nothing,
    limit_count_and_keys_only_answer_as_etcd,
    revisions_out_of_bounds_are_answers,
    etcd_18089_a_delete_at_the_compact_revision_is_still_told,
    etcd_6633_the_head_is_readable_after_all_of_it_was_compacted,
    what_is_flushed_is_there_after_a_crash_and_the_rest_comes_from_the_log,
    small_tables_come_back_in_order,
    history_is_the_same_from_memory_and_from_the_engine,
    defragmentation_gives_space_back_and_keeps_everything,
    an_unknown_format_and_a_lost_current_are_refused,
    hash_kv_is_etcds_before_during_and_after_compactions,
    a_damaged_record_stops_the_open_and_is_named,
    an_interrupted_compaction_goes_on_at_the_next_open,
    a_close_ends_a_defragmentation_and_leaves_no_orphan,
);
