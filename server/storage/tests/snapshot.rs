//! A store through etcd's snapshot file and back.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

mod engines;

use ballast_api::etcdserverpb::Member;
use ballast_storage::backend::Kind;
use ballast_storage::bolt::{BoltFile, Planner, Trailer, Writer, check, status, verify_trailer};
use ballast_storage::mvcc::{
    HashKv, InstallOptions, Pace, Pages, RangeOptions, Receiving, RestoreOptions, Store,
    StoreOptions, WriteTxn, restore,
};
use ballast_storage::schema::{Table, meta};
use ballast_storage::{LogPosition, ReadError, StorageError};
use bytes::Bytes;
use prost::Message;

fn open(kind: Kind, dir: &Path) -> Arc<Store> {
    Store::open(StoreOptions {
        dir: dir.to_owned(),
        engine: kind,
        value_cache_bytes: 1 << 20,
        engine_cache_bytes: 1 << 20,
        compaction_batch_limit: 100,
        compaction_sleep: Duration::from_millis(1),
        batch_interval: Duration::from_millis(5),
        batch_limit: 1000,
    })
    .unwrap()
}

/// Numbers the entries.
struct Log {
    store: Arc<Store>,
    index: u64,
}

impl Log {
    fn new(store: &Arc<Store>) -> Self {
        Self {
            index: store.applied().index,
            store: Arc::clone(store),
        }
    }

    fn entry<T>(&mut self, work: impl FnOnce(&mut WriteTxn<'_>) -> T) -> T {
        self.index += 1;
        let position = LogPosition {
            term: 2,
            index: self.index,
        };
        let mut txn = self.store.begin(position);
        let out = work(&mut txn);
        txn.commit();
        self.store.set_log_synced(self.index);
        out
    }

    fn put(&mut self, key: &str, value: &[u8], lease: i64) {
        let (key, value) = (Bytes::from(key.to_owned()), Bytes::copy_from_slice(value));
        self.entry(|txn| txn.put(key, value, lease).unwrap());
    }

    fn delete(&mut self, key: &str) {
        self.entry(|txn| txn.delete_range(key.as_bytes(), b"").unwrap());
    }

    fn compact(&mut self, revision: i64) {
        let compaction = self.entry(|txn| txn.compact(revision)).unwrap();
        compaction.wait().unwrap();
    }
}

/// Values of all sizes, deletes, a lease, a member, users; some compacted.
fn fill(store: &Arc<Store>) -> Log {
    let mut log = Log::new(store);
    for i in 0..2_000_usize {
        let value = vec![b'v'; i % 90 + usize::from(i % 500 == 7) * 20_000];
        let lease = if i % 10 == 0 { 77 } else { 0 };
        log.put(&format!("key-{:04}", i % 700), &value, lease);
        if i % 9 == 0 {
            log.delete(&format!("key-{:04}", (i * 31) % 700));
        }
    }
    let member = member(1);
    log.entry(|txn| {
        txn.table_put(
            Table::Lease,
            &77_u64.to_be_bytes(),
            Bytes::from_static(&[8, 77, 16, 60]),
        );
        txn.table_put(
            Table::Member,
            &member.id.to_be_bytes(),
            member.encode_to_vec().into(),
        );
        txn.table_put(Table::MemberRemoved, &9_u64.to_be_bytes(), Bytes::new());
        txn.table_put(
            Table::Meta,
            meta::CLUSTER_VERSION,
            Bytes::from_static(b"3.7.0"),
        );
        txn.table_put(Table::Auth, b"authEnabled", Bytes::from_static(&[1]));
        txn.table_put(Table::AuthUser, b"root", Bytes::from_static(b"user"));
    });
    log.compact(900);
    for i in 0..100 {
        log.put(&format!("late-{i}"), b"value", 0);
    }
    log
}

fn member(id: u64) -> Member {
    Member {
        id,
        name: format!("m{id}"),
        peer_ur_ls: vec![format!("http://m{id}:2380")],
        client_ur_ls: vec![format!("http://m{id}:2379")],
        is_learner: false,
    }
}

/// Saves as a client does; gives the bytes of the database alone.
fn save(store: &Store, path: &Path, chunk_bytes: usize) -> u64 {
    let mut stream = store.snapshot(&|| true).unwrap().unwrap();
    let mut file = Vec::new();
    let mut last = 0;
    while let Some(chunk) = stream.next_chunk(chunk_bytes).unwrap() {
        last = chunk.len();
        file.extend_from_slice(&chunk);
    }
    assert_eq!(last, 32, "the hash comes alone");
    assert_eq!(file.len() as u64, stream.size() + 32);
    fs::write(path, file).unwrap();
    stream.size()
}

fn options(engine: Kind, bump: u64) -> RestoreOptions {
    RestoreOptions {
        cluster_id: 5,
        member_id: 6,
        members: vec![member(6)],
        engine,
        revision_bump: bump,
    }
}

fn hash_at(store: &Store, revision: i64) -> HashKv {
    store.hash_kv(revision).unwrap()
}

fn a_snapshot_passes_the_checks_and_restores_to_the_same_hash(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    fill(&store);
    let path = dir.path().join("snapshot.db");
    for chunk_bytes in [1_000, 32 << 10, 64 << 20] {
        save(&store, &path, chunk_bytes);
        assert_eq!(
            verify_trailer(&path).unwrap(),
            Trailer::Good,
            "{chunk_bytes}"
        );
    }
    let figures = status(&path).unwrap();
    assert_eq!(figures.revision, store.view().revision());
    assert_eq!(figures.version, "3.7.0");
    let all = RangeOptions {
        count_only: true,
        ..Default::default()
    };
    let keys = store.view().range(&[0], &[0], &all).unwrap().count;
    assert_eq!(figures.total_keys as i64, keys);

    let file = BoltFile::open(&path).unwrap();
    let to = dir.path().join("b");
    let report = restore(&file, &to, &options(kind, 0)).unwrap();
    assert_eq!(report.revision, store.view().revision());
    assert_eq!(report.unknown, Vec::<String>::new());
    assert!(report.auth_enabled);
    assert_eq!(report.leases, 1);
    let restored = open(kind, &to);
    // At 900 the store answers what its compaction left, which no other process has.
    for revision in [901, 1_500, 0] {
        let (ours, theirs) = (hash_at(&restored, revision), hash_at(&store, revision));
        assert_eq!(ours.hash, theirs.hash, "{revision}");
    }
    assert_eq!(restored.applied(), LogPosition::default());
    assert_eq!(restored.leased_keys(), store.leased_keys());
    let members = restored.table(Table::Member).unwrap();
    assert_eq!(members.len(), 1);
    assert_eq!(Member::decode(members[0].1.clone()).unwrap(), member(6));
    assert_eq!(restored.table(Table::MemberRemoved).unwrap(), Vec::new());
    assert_eq!(
        restored.table(Table::AuthUser).unwrap(),
        store.table(Table::AuthUser).unwrap()
    );
    // And on: the same write gives the same hash again.
    Log::new(&store).put("after", b"x", 0);
    Log::new(&restored).put("after", b"x", 0);
    assert_eq!(hash_at(&restored, 0).hash, hash_at(&store, 0).hash);
}

fn a_snapshot_is_of_one_moment_whatever_is_written_and_compacted_meanwhile(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    let mut log = fill(&store);
    let before = hash_at(&store, 0);
    let mut stream = store.snapshot(&|| true).unwrap().unwrap();
    let mut bytes = stream.next_chunk(4096).unwrap().unwrap().to_vec();
    for i in 0..300 {
        log.put(&format!("key-{i:04}"), b"meanwhile", 0);
    }
    let revision = store.view().revision();
    let compaction = log.entry(|txn| txn.compact(revision)).unwrap();
    // The rows that the compaction is about to delete are still to come.
    while let Some(chunk) = stream.next_chunk(64 << 10).unwrap() {
        bytes.extend_from_slice(&chunk);
    }
    assert_eq!(stream.revision(), before.current_revision);
    drop(stream);
    compaction.wait().unwrap();
    let path = dir.path().join("snapshot.db");
    fs::write(&path, bytes).unwrap();
    assert_eq!(verify_trailer(&path).unwrap(), Trailer::Good);
    let file = BoltFile::open(&path).unwrap();
    check(&file).unwrap();
    let to = dir.path().join("b");
    restore(&file, &to, &options(kind, 0)).unwrap();
    let restored = hash_at(&open(kind, &to), 0);
    assert_eq!(
        (restored.hash, restored.current_revision),
        (before.hash, before.current_revision)
    );
}

fn a_snapshot_that_nobody_wants_any_more_is_not_made_and_holds_nothing_up(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    let mut log = fill(&store);
    assert!(store.snapshot(&|| false).unwrap().is_none());
    let revision = store.view().revision();
    let compaction = log.entry(|txn| txn.compact(revision)).unwrap();
    compaction.wait().unwrap();
}

/// The index has given up records that the engine still has.
fn a_snapshot_begun_while_a_compaction_waits_is_whole(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    let mut log = fill(&store);
    let held = store.snapshot(&|| true).unwrap().unwrap();
    let revision = store.view().revision();
    let compaction = log.entry(|txn| txn.compact(revision)).unwrap();
    let path = dir.path().join("snapshot.db");
    let size = save(&store, &path, 64 << 10);
    assert_eq!(verify_trailer(&path).unwrap(), Trailer::Good);
    assert_same_file(&all_pages(&store, 64 << 10), &path, size);
    drop(held);
    compaction.wait().unwrap();
    let settled = dir.path().join("settled.db");
    assert!(save(&store, &settled, 64 << 10) < size);
    for (name, path) in [("b", path), ("c", settled)] {
        let file = BoltFile::open(&path).unwrap();
        check(&file).unwrap();
        let to = dir.path().join(name);
        restore(&file, &to, &options(kind, 0)).unwrap();
        let restored = open(kind, &to);
        assert_eq!(restored.view().compact_revision(), revision);
        assert_eq!(hash_at(&restored, 0).hash, hash_at(&store, 0).hash);
    }
}

/// The hash of members whose compactions are not equally far.
fn where_every_key_is_deleted_the_hash_does_not_depend_on_how_far_a_compaction_is(kind: Kind) {
    for compact_at in 3..=7 {
        let dir = tempfile::tempdir().unwrap();
        let store = open(kind, dir.path());
        let mut log = Log::new(&store);
        for (key, value) in [("a", "1"), ("b", "2"), ("a", "3")] {
            log.put(key, value.as_bytes(), 0);
        }
        for key in ["a", "b"] {
            log.delete(key);
        }
        log.put("c", b"", 0);
        log.delete("c");
        let held = store.snapshot(&|| true).unwrap().unwrap();
        let compaction = log.entry(|txn| txn.compact(compact_at)).unwrap();
        let before = hash_at(&store, 0);
        drop(held);
        compaction.wait().unwrap();
        assert_eq!(hash_at(&store, 0), before, "compacted at {compact_at}");
    }
}

fn a_store_closes_while_a_snapshot_holds_up_a_compaction(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    let mut log = fill(&store);
    let stream = store.snapshot(&|| true).unwrap().unwrap();
    let revision = store.view().revision();
    let compaction = log.entry(|txn| txn.compact(revision)).unwrap();
    store.close().unwrap();
    assert!(compaction.wait().is_err());
    drop(stream);
}

/// kubernetes/kubernetes#107457: after a restore no client may see a revision again that it saw before.
fn a_bump_compacts_everything_before_it_and_keeps_the_keys(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    fill(&store);
    let path = dir.path().join("snapshot.db");
    save(&store, &path, 1 << 20);
    let old = store.view();
    let to = dir.path().join("b");
    let report = restore(
        &BoltFile::open(&path).unwrap(),
        &to,
        &options(kind, 1_000_000),
    )
    .unwrap();
    assert_eq!(report.revision, old.revision() + 1_000_000);
    let restored = open(kind, &to);
    let view = restored.view();
    assert_eq!(view.revision(), report.revision);
    assert_eq!(view.compact_revision(), report.revision);
    assert!(matches!(
        view.events(old.revision(), 1 << 20),
        Err(ReadError::Mvcc(_))
    ));
    let all = RangeOptions::default();
    let (before, after) = (
        old.range(&[0], &[0], &all).unwrap(),
        view.range(&[0], &[0], &all).unwrap(),
    );
    assert_eq!(after.kvs, before.kvs);
    assert_eq!(after.count, before.count);
    Log::new(&restored).put("after", b"x", 0);
    assert_eq!(restored.view().revision(), report.revision + 1);
    // A snapshot of it carries the jump on.
    save(&restored, &path, 1 << 20);
    assert_eq!(status(&path).unwrap().revision, report.revision + 1);
}

/// A key with its create and mod revisions and its version.
type Told = (Bytes, i64, i64, i64);

/// What the index says: what every revision sees, without reading values, and how many bytes are live.
fn told_by_index(store: &Store) -> (u64, Vec<Vec<Told>>) {
    let view = store.view();
    let revisions = view.compact_revision().max(1)..=view.revision();
    let seen = revisions.step_by(97).map(|revision| {
        let options = RangeOptions {
            revision,
            keys_only: true,
            ..RangeOptions::default()
        };
        let kvs = view.range(&[0], &[0], &options).unwrap().kvs.into_iter();
        kvs.map(|kv| (kv.key, kv.create_revision, kv.mod_revision, kv.version))
            .collect()
    });
    (store.sizes().in_use, seen.collect())
}

/// The first open takes the index from the file beside the database, the second from the records. A file that is torn, or is of the
/// database before the last write, is passed over.
fn a_filled_database_opens_the_same_by_its_index_file_and_without(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    fill(&store);
    let path = dir.path().join("snapshot.db");
    save(&store, &path, 1 << 20);
    let expected = told_by_index(&store);
    assert!(expected.1.len() > 10 && expected.1.iter().all(|seen| seen.len() > 100));
    let to = dir.path().join("b");
    let index = to.join("000001.index");
    restore(&BoltFile::open(&path).unwrap(), &to, &options(kind, 0)).unwrap();
    let whole = fs::read(&index).unwrap();
    let by_file = told_by_index(&open(kind, &to));
    assert_eq!(by_file.1, expected.1);
    assert!(!index.exists());
    fs::write(&index, &whole[..whole.len() / 2]).unwrap();
    let torn = open(kind, &to);
    assert_eq!(told_by_index(&torn), by_file);
    Log::new(&torn).put("one more", b"x", 0);
    torn.close().unwrap();
    fs::write(&index, &whole).unwrap();
    let late = open(kind, &to);
    let one_more = late
        .view()
        .range(b"one more", b"", &RangeOptions::default());
    assert_eq!(one_more.unwrap().count, 1);
    assert!(!index.exists());
}

fn a_bump_beyond_the_last_revision_is_refused(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    Log::new(&store).put("k", b"v", 0);
    let path = dir.path().join("snapshot.db");
    save(&store, &path, 1 << 20);
    let file = BoltFile::open(&path).unwrap();
    for bump in [u64::MAX, i64::MAX as u64] {
        let refused = restore(
            &file,
            &dir.path().join(bump.to_string()),
            &options(kind, bump),
        );
        assert!(matches!(refused, Err(StorageError::Refused { .. })));
    }
}

fn a_directory_with_a_database_is_not_restored_into(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    Log::new(&store).put("k", b"v", 0);
    let path = dir.path().join("snapshot.db");
    save(&store, &path, 1 << 20);
    store.close().unwrap();
    let refused = restore(
        &BoltFile::open(&path).unwrap(),
        &dir.path().join("a"),
        &options(kind, 0),
    );
    assert!(matches!(refused, Err(StorageError::Refused { .. })));
}

fn an_empty_store_has_a_snapshot_too(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    let path = dir.path().join("snapshot.db");
    save(&store, &path, 1 << 20);
    assert_eq!(status(&path).unwrap().total_keys, 0);
    let to = dir.path().join("b");
    restore(&BoltFile::open(&path).unwrap(), &to, &options(kind, 0)).unwrap();
    assert_eq!(open(kind, &to).view().revision(), 1);
}

fn a_database_of_something_else_is_not_restored(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let mut planner = Planner::new();
    planner.begin_bucket(5).unwrap();
    let mut writer = Writer::new(planner.finish().unwrap());
    writer.begin_bucket(Bytes::from_static(b"other")).unwrap();
    let path = dir.path().join("other.db");
    fs::write(&path, writer.finish().unwrap()).unwrap();
    let to = dir.path().join("b");
    let refused = restore(&BoltFile::open(&path).unwrap(), &to, &options(kind, 0)).unwrap_err();
    assert!(refused.to_string().contains("no bucket key"), "{refused}");
    assert!(!to.exists());
}

/// How a snapshot comes.
#[derive(Clone, Copy, Debug)]
enum Comes {
    InPages,
    FrontToBack,
}

/// Another member's snapshot on its way to `to`.
fn arrived(
    from: &Store,
    to: &Store,
    dir: &Path,
    chunk_bytes: usize,
    comes: Comes,
) -> (Receiving, InstallOptions) {
    let path = dir.join("snapshot.received");
    let receiving = match comes {
        Comes::InPages => {
            let mut receiving = to.receive_pages(&path).unwrap();
            for pages in all_pages(from, chunk_bytes) {
                receiving.take_pages(&pages).unwrap();
            }
            receiving
        }
        Comes::FrontToBack => {
            let mut stream = from.snapshot(&|| true).unwrap().unwrap();
            let mut receiving = to.receive(&path).unwrap();
            let mut left = stream.size();
            while let Some(chunk) = stream.next_chunk(chunk_bytes).unwrap() {
                let of_the_file = chunk.len().min(usize::try_from(left).unwrap());
                receiving.take(&chunk[..of_the_file]).unwrap();
                left -= of_the_file as u64;
            }
            receiving
        }
    };
    let options = InstallOptions {
        applied: from.applied(),
        membership: Bytes::from_static(b"the group"),
    };
    (receiving, options)
}

fn all_pages(from: &Store, chunk_bytes: usize) -> Vec<Pages> {
    let mut stream = from.pages().unwrap();
    assert_eq!(stream.applied(), from.applied());
    let mut all = Vec::new();
    while let Some(pages) = stream.next_pages(chunk_bytes).unwrap() {
        all.push(pages);
    }
    all
}

fn bytes_of(pages: &Pages) -> &Bytes {
    match pages {
        Pages::Records(bytes) | Pages::Other(bytes) | Pages::Metas(bytes) => bytes,
    }
}

fn assert_same_file(all: &[Pages], path: &Path, size: u64) {
    let file = fs::read(path).unwrap();
    let (metas, rest) = all.split_last().unwrap();
    assert!(matches!(metas, Pages::Metas(_)));
    let rest = rest.iter().flat_map(|pages| bytes_of(pages).iter());
    let put_together: Vec<u8> = bytes_of(metas).iter().chain(rest).copied().collect();
    assert!(put_together == file[..usize::try_from(size).unwrap()]);
}

fn pages_are_the_file_with_its_first_two_last(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, &dir.path().join("a"));
    fill(&store);
    let path = dir.path().join("snapshot.db");
    let size = save(&store, &path, 64 << 10);
    for chunk_bytes in [1_000, 64 << 10] {
        let all = all_pages(&store, chunk_bytes);
        assert_same_file(&all, &path, size);
        let records = |pages: &&Pages| matches!(pages, Pages::Records(_));
        assert!(all.iter().filter(records).count() > 3);
    }
}

/// Its records as they come, or all of it as a file.
fn a_snapshot_of_another_member_takes_the_databases_place(kind: Kind) {
    takes_the_databases_place(kind, 64 << 10, Comes::InPages);
    takes_the_databases_place(kind, 1_000, Comes::InPages);
    takes_the_databases_place(kind, 64 << 10, Comes::FrontToBack);
}

fn takes_the_databases_place(kind: Kind, chunk_bytes: usize, comes: Comes) {
    let dir = tempfile::tempdir().unwrap();
    let leader = open(kind, &dir.path().join("a"));
    fill(&leader);
    let behind = dir.path().join("b");
    let store = open(kind, &behind);
    let mut log = Log::new(&store);
    log.put("old", b"x", 0);
    log.entry(|txn| {
        for (name, id) in [(meta::CLUSTER_ID, 5_u64), (meta::MEMBER_ID, 6)] {
            txn.table_put(Table::Meta, name, Bytes::copy_from_slice(&id.to_be_bytes()));
        }
    });
    store.flush().unwrap();
    let (received, options) = arrived(&leader, &store, dir.path(), chunk_bytes, comes);
    store.install(received, &options).unwrap();
    assert!(!dir.path().join("snapshot.received").exists());
    assert!(behind.join("000002.index").exists());
    // What is in memory is of the past, and makes no database any more.
    assert!(store.defragment(Pace::Background).is_err());
    assert_eq!(store.view().revision(), 2);
    // As a crash right afterwards.
    drop(store);
    let store = open(kind, &behind);
    assert_eq!(store.applied(), leader.applied());
    let revision = leader.view().revision();
    assert_eq!(hash_at(&store, revision), hash_at(&leader, revision));
    for table in [
        Table::Lease,
        Table::Member,
        Table::MemberRemoved,
        Table::AuthUser,
    ] {
        assert_eq!(store.table(table).unwrap(), leader.table(table).unwrap());
    }
    let stored = store.table(Table::Meta).unwrap();
    let meta_of = |name: &[u8]| {
        let found = stored.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.clone())
    };
    assert_eq!(
        meta_of(meta::MEMBER_ID).unwrap(),
        6_u64.to_be_bytes().to_vec()
    );
    assert_eq!(meta_of(meta::RAFT_MEMBERSHIP).unwrap(), options.membership);
    assert!(meta_of(meta::INSTALLED).is_some());
    // It goes on as any other.
    let mut log = Log::new(&store);
    log.put("new", b"y", 0);
    assert_eq!(store.view().revision(), revision + 1);
}

fn a_snapshot_that_is_not_what_it_was_sent_as_changes_nothing(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let leader = open(kind, &dir.path().join("a"));
    fill(&leader);
    let behind = dir.path().join("b");
    let store = open(kind, &behind);
    Log::new(&store).put("old", b"x", 0);
    store.flush().unwrap();
    let (received, options) = arrived(&leader, &store, dir.path(), 4096, Comes::InPages);
    let mut elsewhere = options.clone();
    elsewhere.applied.index += 1;
    let refused = store.install(received, &elsewhere).unwrap_err();
    assert!(
        refused.to_string().contains("was sent as that at"),
        "{refused}"
    );
    // A page of records among the others; one left out; one twice; no end; less than a page; a page that is no page.
    let pages = all_pages(&leader, 4096);
    let of_records = |pages: &Pages| matches!(pages, Pages::Records(_));
    let first = pages.iter().position(of_records).unwrap();
    let mut as_others = pages.clone();
    as_others[first] = Pages::Other(bytes_of(&pages[first]).clone());
    let mut left_out = pages.clone();
    left_out.remove(first);
    let mut doubled = pages.clone();
    doubled.insert(first, pages[first].clone());
    let endless = pages[..pages.len() - 1].to_vec();
    let mut cut = pages.clone();
    cut[first] = Pages::Records(bytes_of(&pages[first]).slice(..100));
    let mut grows = pages.clone();
    grows[first] = Pages::Records(Bytes::from(vec![0xff; 4096]));
    for (what, pages) in [
        ("did not come as such", as_others),
        ("before page", left_out),
        ("of another file", doubled),
        ("damaged at byte 0", endless),
        ("its key is no revision", cut),
        ("overflow pages", grows),
    ] {
        let refused = install_of(&store, dir.path(), &pages, &options).unwrap_err();
        assert!(refused.to_string().contains(what), "{what}: {refused}");
    }
    let names: Vec<_> = fs::read_dir(&behind)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert!(
        !names
            .iter()
            .any(|name| name.to_string_lossy().ends_with(".new")),
        "{names:?}"
    );
    drop(store);
    let store = open(kind, &behind);
    assert_eq!(store.view().revision(), 2);
    store.defragment(Pace::Background).unwrap();
}

fn install_of(
    store: &Store,
    dir: &Path,
    pages: &[Pages],
    options: &InstallOptions,
) -> Result<(), StorageError> {
    let mut receiving = store.receive_pages(&dir.join("snapshot.received"))?;
    for pages in pages {
        receiving.take_pages(pages)?;
    }
    store.install(receiving, options)
}

on_each_engine!(
    pages_are_the_file_with_its_first_two_last,
    a_snapshot_of_another_member_takes_the_databases_place,
    a_snapshot_that_is_not_what_it_was_sent_as_changes_nothing,
    a_snapshot_passes_the_checks_and_restores_to_the_same_hash,
    a_snapshot_is_of_one_moment_whatever_is_written_and_compacted_meanwhile,
    a_snapshot_that_nobody_wants_any_more_is_not_made_and_holds_nothing_up,
    a_snapshot_begun_while_a_compaction_waits_is_whole,
    a_store_closes_while_a_snapshot_holds_up_a_compaction,
    where_every_key_is_deleted_the_hash_does_not_depend_on_how_far_a_compaction_is,
    a_bump_compacts_everything_before_it_and_keeps_the_keys,
    a_filled_database_opens_the_same_by_its_index_file_and_without,
    a_bump_beyond_the_last_revision_is_refused,
    a_directory_with_a_database_is_not_restored_into,
    an_empty_store_has_a_snapshot_too,
    a_database_of_something_else_is_not_restored,
);
