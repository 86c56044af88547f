//! The log's promises, each with the way it could be broken.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;

use super::record::RecordType;
use super::*;
use crate::runner::{Wait, Worker};

const IDENTITY: Identity = Identity {
    cluster_id: 0xc1,
    member_id: 0x3e,
};

fn options(dir: &Path) -> WalOptions {
    WalOptions {
        segment_bytes: 64 << 10,
        // Long: no mark is synced behind a test's back.
        idle_after: Duration::from_mins(10),
        ..WalOptions::new(dir, IDENTITY)
    }
}

fn entry(index: u64, term: u64, payload: impl Into<Bytes>) -> WalEntry {
    WalEntry {
        position: LogPosition { term, index },
        kind: 1,
        payload: payload.into(),
    }
}

/// Runs an operation and waits for its callback.
fn wait(call: impl FnOnce(Done)) -> Result<(), Arc<StorageError>> {
    let (sender, receiver) = mpsc::channel();
    call(Box::new(move |result| sender.send(result).unwrap()));
    receiver
        .recv_timeout(Duration::from_mins(1))
        .expect("the callback is called")
}

fn append(wal: &Wal, indexes: std::ops::RangeInclusive<u64>, bytes: usize) {
    for index in indexes {
        let payload = vec![index as u8; bytes];
        wait(|done| wal.append(vec![entry(index, 1, payload)], done)).unwrap();
    }
}

fn all(wal: &Wal) -> Vec<WalEntry> {
    wal.read(wal.purged().index + 1, u64::MAX, usize::MAX)
        .unwrap()
}

fn last_index(wal: &Wal) -> u64 {
    wal.last().index
}

/// What a kill leaves: the files as they are, in another directory.
fn killed_copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), to.path().join(file.file_name())).unwrap();
    }
    to
}

fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|file| {
            let file = file.unwrap();
            (file.file_name().into(), std::fs::read(file.path()).unwrap())
        })
        .collect()
}

#[test]
fn what_was_acknowledged_is_there_after_a_stop_and_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let vote = WalVote {
        term: 4,
        voted_for: Some(9),
        committed: true,
    };
    let wal = Wal::open(options(dir.path())).unwrap();
    append(&wal, 1..=10, 100);
    wait(|done| wal.save_vote(vote, done)).unwrap();
    wal.save_committed(LogPosition { index: 8, term: 1 });
    append(&wal, 11..=11, 0);
    let before = all(&wal);
    assert_eq!(before.len(), 11);
    assert_eq!(wal.synced_index(), 11);

    let copy = killed_copy(dir.path());
    wal.close().unwrap();
    drop(wal);
    for dir in [dir.path(), copy.path()] {
        let wal = Wal::open(options(dir)).unwrap();
        assert_eq!(all(&wal), before);
        assert_eq!(wal.vote(), Some(vote));
        assert_eq!(wal.committed().index, 8);
        assert_eq!(wal.term_of(11), Some(1));
        assert_eq!(wal.term_of(12), None);
        append(&wal, 12..=12, 5);
        drop(wal);
        assert_eq!(last_index(&Wal::open(options(dir)).unwrap()), 12);
    }
}

#[test]
fn a_log_opens_many_times_in_a_row_without_a_write() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        let wal = Wal::open(options(dir.path())).unwrap();
        let copy = killed_copy(dir.path());
        drop(wal);
        drop(Wal::open(options(copy.path())).unwrap());
    }
}

#[test]
fn segments_roll_over_and_old_entries_are_read_from_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(dir.path());
    options.segment_bytes = 4096;
    options.cache_bytes = 1000;
    let wal = Wal::open(options.clone()).unwrap();
    append(&wal, 1..=100, 300);
    let read = all(&wal);
    assert_eq!(read.len(), 100);
    for (index, entry) in (1..).zip(&read) {
        assert_eq!(entry.position.index, index);
        assert_eq!(entry.payload, vec![index as u8; 300]);
    }
    assert_eq!(wal.read(40, 60, 900).unwrap().len(), 3);
    assert_eq!(wal.read(40, 60, 1).unwrap().len(), 1);
    drop(wal);
    assert!(segment::list(dir.path()).unwrap().len() >= 8);
    assert_eq!(all(&Wal::open(options).unwrap()), read);
}

#[test]
fn an_entry_larger_than_a_segment_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(dir.path());
    options.segment_bytes = 4096;
    let wal = Wal::open(options.clone()).unwrap();
    append(&wal, 1..=1, 20_000);
    append(&wal, 2..=3, 20_000);
    drop(wal);
    assert_eq!(all(&Wal::open(options).unwrap()).len(), 3);
}

#[test]
fn purge_deletes_whole_segments_and_keeps_as_many_as_asked() {
    for (max_wals, expect_kept) in [(2, true), (0, false)] {
        let dir = tempfile::tempdir().unwrap();
        let mut options = options(dir.path());
        options.segment_bytes = 4096;
        options.max_wals = max_wals;
        let wal = Wal::open(options.clone()).unwrap();
        append(&wal, 1..=100, 300);
        let before = segment::list(dir.path()).unwrap().len();
        wait(|done| wal.purge(LogPosition { index: 90, term: 1 }, done)).unwrap();
        let after = segment::list(dir.path()).unwrap().len();
        if expect_kept {
            assert_eq!(after, 2);
        } else {
            assert_eq!(after, before);
        }
        assert_eq!(all(&wal).first().unwrap().position.index, 91);
        assert_eq!(wal.term_of(90), Some(1));
        assert_eq!(wal.term_of(89), None);
        let copy = killed_copy(dir.path());
        drop(wal);
        for dir in [dir.path(), copy.path()] {
            options.dir = dir.to_owned();
            let wal = Wal::open(options.clone()).unwrap();
            assert_eq!(wal.purged(), LogPosition { index: 90, term: 1 });
            assert_eq!(all(&wal).len(), 10);
        }
    }
}

#[test]
fn a_log_that_begins_at_a_snapshot_goes_on_behind_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(dir.path());
    options.start = LogPosition {
        index: 500,
        term: 7,
    };
    drop(Wal::open(options.clone()).unwrap());
    assert!(Wal::exists(dir.path()).unwrap());
    options.start = LogPosition::default();
    let wal = Wal::open(options.clone()).unwrap();
    assert_eq!(
        wal.last(),
        LogPosition {
            index: 500,
            term: 7
        }
    );
    assert_eq!(wal.purged(), wal.last());
    append(&wal, 501..=502, 10);
    let beyond = LogPosition {
        index: 900,
        term: 8,
    };
    wait(|done| wal.purge(beyond, done)).unwrap();
    append(&wal, 901..=901, 10);
    drop(wal);
    let wal = Wal::open(options).unwrap();
    assert_eq!(
        wal.purged(),
        LogPosition {
            index: 900,
            term: 8
        }
    );
    assert_eq!(last_index(&wal), 901);
}

#[test]
fn truncated_entries_are_gone_and_overwritten_ones_are_the_new_ones() {
    let dir = tempfile::tempdir().unwrap();
    let wal = Wal::open(options(dir.path())).unwrap();
    append(&wal, 1..=10, 10);
    let (sender, receiver) = mpsc::channel();
    let done = || -> Done {
        let sender = sender.clone();
        Box::new(move |result| sender.send(result).unwrap())
    };
    // All queued at once: the writer must not take the old entry 6 for the new one.
    wal.append(vec![entry(11, 1, "old")], done());
    wal.truncate_after(5, done());
    wal.append(vec![entry(6, 2, "new")], done());
    assert_eq!(wal.last(), LogPosition { index: 6, term: 2 });
    for _ in 0..3 {
        receiver.recv().unwrap().unwrap();
    }
    let read = all(&wal);
    assert_eq!(read.len(), 6);
    assert_eq!(read[5], entry(6, 2, "new"));
    drop(wal);
    assert_eq!(all(&Wal::open(options(dir.path())).unwrap()), read);
    let mut dumped = Vec::new();
    dump::entries::<StorageError>(dir.path(), &mut |entry| {
        dumped.push(entry);
        Ok(())
    })
    .unwrap();
    assert_eq!(dumped, read);
}

/// Hands the writer to whoever wants its steps.
#[derive(Default)]
struct Given(Mutex<Option<Box<dyn Worker>>>);

impl std::fmt::Debug for Given {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Given")
    }
}

impl Runner for Given {
    fn start(&self, _: &str, worker: Box<dyn Worker>) -> std::io::Result<Option<JoinHandle<()>>> {
        *self.0.lock() = Some(worker);
        Ok(None)
    }
}

#[test]
fn without_a_thread_a_step_syncs_what_waits_and_what_no_step_took_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let given = Given::default();
    let wal = Wal::open_on(options(dir.path()), &given).unwrap();
    let mut writer = given.0.lock().take().unwrap();
    let (told, hears) = mpsc::channel();
    let append = |index| {
        let told = told.clone();
        let done = Box::new(move |result: Result<(), _>| {
            result.unwrap();
            told.send(index).unwrap();
        });
        wal.append(vec![entry(index, 1, "x")], done);
    };
    append(1);
    append(2);
    assert_eq!(last_index(&wal), 2);
    assert_eq!((wal.synced_index(), hears.try_iter().count()), (0, 0));
    assert!(writer.step(Wait::No));
    assert_eq!(hears.try_iter().collect::<Vec<_>>(), [1, 2]);
    assert!(writer.step(Wait::No), "the mark is synced");
    append(3);
    // As a crash ends it.
    drop(writer);
    drop(wal);
    let wal = Wal::open(options(dir.path())).unwrap();
    assert_eq!(last_index(&wal), 2);
}

#[test]
fn requests_that_wait_share_one_sync() {
    #[derive(Debug, Default)]
    struct Syncs(AtomicU64);
    impl WalObserver for Syncs {
        fn around_sync(&self, sync: &mut dyn FnMut()) {
            // Long enough for the rest to queue up behind the first.
            std::thread::sleep(Duration::from_millis(50));
            sync();
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let syncs = Arc::new(Syncs::default());
    let mut options = options(dir.path());
    options.observer = Arc::clone(&syncs) as Arc<dyn WalObserver>;
    let wal = Wal::open(options).unwrap();
    let before = syncs.0.load(Ordering::SeqCst);
    let (sender, receiver) = mpsc::channel();
    for index in 1..=200 {
        let sender = sender.clone();
        let done: Done = Box::new(move |result| sender.send((index, result)).unwrap());
        wal.append(vec![entry(index, 1, "x")], done);
    }
    for expected in 1..=200 {
        let (index, result) = receiver.recv().unwrap();
        result.unwrap();
        assert_eq!(index, expected, "callbacks come in order");
    }
    let took = syncs.0.load(Ordering::SeqCst) - before;
    assert!(took <= 4, "{took} syncs for 200 entries");
}

#[test]
fn a_log_of_others_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let wal = Wal::open(options(dir.path())).unwrap();
    let in_use = Wal::open(options(dir.path())).unwrap_err();
    assert!(in_use.to_string().contains("another process"), "{in_use}");
    drop(wal);
    let mut other = options(dir.path());
    other.identity.cluster_id = 0xdead;
    let refusal = Wal::open(other).unwrap_err();
    assert!(matches!(refusal, StorageError::Refused { .. }));
    assert!(refusal.to_string().contains("--initial-cluster-token"));
    Wal::open(options(dir.path())).unwrap();
}

#[test]
fn after_a_failure_nothing_is_acknowledged_and_the_node_is_told() {
    /// A disk that breaks, as far as the writer's thread is concerned.
    #[derive(Debug, Default)]
    struct Breaks(AtomicBool);
    impl WalObserver for Breaks {
        fn around_sync(&self, sync: &mut dyn FnMut()) {
            assert!(!self.0.load(Ordering::SeqCst), "broken on purpose");
            sync();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(Breaks::default());
    let mut options = options(dir.path());
    options.observer = Arc::clone(&disk) as Arc<dyn WalObserver>;
    let wal = Wal::open(options.clone()).unwrap();
    append(&wal, 1..=1, 10);
    let (told, telling) = mpsc::channel();
    wal.on_failure(Box::new(move |error| told.send(error).unwrap()));
    disk.0.store(true, Ordering::SeqCst);
    let (sender, receiver) = mpsc::channel();
    wal.append(
        vec![entry(2, 1, "x")],
        Box::new(move |result| drop(sender.send(result))),
    );
    let error = telling.recv_timeout(Duration::from_mins(1)).unwrap();
    assert!(error.to_string().contains("panicked"), "{error}");
    // Its callback is gone with the thread, or says so: never Ok.
    assert!(!matches!(
        receiver.recv_timeout(Duration::from_mins(1)),
        Ok(Ok(()))
    ));
    assert!(wait(|done| wal.append(vec![entry(3, 1, "x")], done)).is_err());
    assert!(wait(|done| wal.save_vote(WalVote::default(), done)).is_err());
    assert!(wal.failure().is_some());
    assert!(wal.close().is_err());
    drop(wal);
    disk.0.store(false, Ordering::SeqCst);
    assert!(last_index(&Wal::open(options).unwrap()) >= 1);
}

/// Ways to spoil a file, given where its last entry record lies and where an earlier one does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Spoil {
    CutSevenBytesOutOf(Target),
    ZeroFromTheMiddleOf(Target),
    FlipAByteOf(Target),
    AppendZeros,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Target {
    EarlierEntry,
    LastEntry,
    /// Of any kind: a mark.
    LastRecord,
}

fn spoil(dir: &Path, spoil: Spoil) -> PathBuf {
    let records = dump::records(dir).unwrap();
    let entries: Vec<_> = records
        .iter()
        .filter(|record| record.kind == RecordType::Entry)
        .collect();
    let find = |target| match target {
        Target::EarlierEntry => entries[entries.len() / 2],
        Target::LastEntry => entries[entries.len() - 1],
        Target::LastRecord => records.last().unwrap(),
    };
    let (Spoil::CutSevenBytesOutOf(target)
    | Spoil::ZeroFromTheMiddleOf(target)
    | Spoil::FlipAByteOf(target)) = spoil
    else {
        let path = &records.last().unwrap().path;
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        let length = file.metadata().unwrap().len();
        file.set_len(length + (4 << 20)).unwrap();
        return path.clone();
    };
    let record = find(target);
    let middle = (record.offset + record.bytes / 2) as usize;
    let mut bytes = std::fs::read(&record.path).unwrap();
    match spoil {
        Spoil::CutSevenBytesOutOf(_) => drop(bytes.drain(middle..middle + 7)),
        Spoil::ZeroFromTheMiddleOf(_) => bytes[middle..].fill(0),
        _ => bytes[middle] ^= 0x40,
    }
    std::fs::write(&record.path, bytes).unwrap();
    record.path.clone()
}

fn all_spoils() -> Vec<Spoil> {
    let mut all = vec![Spoil::AppendZeros];
    for target in [Target::EarlierEntry, Target::LastEntry, Target::LastRecord] {
        all.push(Spoil::CutSevenBytesOutOf(target));
        all.push(Spoil::ZeroFromTheMiddleOf(target));
        all.push(Spoil::FlipAByteOf(target));
    }
    all
}

fn assert_damaged(dir: &Path, path: &Path, what: Spoil) {
    let before = contents(dir);
    match Wal::open(options(dir)) {
        Err(StorageError::Damaged { path: named, .. }) => assert_eq!(named, path, "{what:?}"),
        other => panic!("{what:?}: {other:?}"),
    }
    assert!(contents(dir) == before, "{what:?}: files were changed");
}

/// P24, the half after a clean stop: whatever was done to the file is reported, and the file is left alone.
#[test]
fn after_a_clean_stop_every_change_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let wal = Wal::open(options(dir.path())).unwrap();
    append(&wal, 1..=20, 100);
    wal.close().unwrap();
    drop(wal);
    for what in all_spoils() {
        let copy = killed_copy(dir.path());
        let path = spoil(copy.path(), what);
        assert_damaged(copy.path(), &path, what);
    }
}

/// P24, the half after a kill: an unsynced end is cut, anything acknowledged is there or is reported.
#[test]
fn after_a_kill_only_what_was_never_synced_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let wal = Wal::open(options(dir.path())).unwrap();
    append(&wal, 1..=20, 100);
    for what in all_spoils() {
        let copy = killed_copy(dir.path());
        let path = spoil(copy.path(), what);
        match what {
            Spoil::CutSevenBytesOutOf(Target::LastRecord)
            | Spoil::ZeroFromTheMiddleOf(Target::LastRecord)
            | Spoil::FlipAByteOf(Target::LastRecord)
            | Spoil::AppendZeros => {
                let wal = Wal::open(options(copy.path())).unwrap();
                assert_eq!(last_index(&wal), 20, "{what:?}");
                append(&wal, 21..=21, 100);
                drop(wal);
                assert_eq!(last_index(&Wal::open(options(copy.path())).unwrap()), 21);
            }
            _ => assert_damaged(copy.path(), &path, what),
        }
    }

    // And a group whose sync never returned, torn in every way: the file has more than was acknowledged.
    let unsynced = killed_copy(dir.path());
    let path = segment::list(unsynced.path()).unwrap()[0].1.clone();
    let end = dump::records(unsynced.path())
        .unwrap()
        .last()
        .map(|record| record.offset + record.bytes)
        .unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let crc = {
        let mut reader = segment::Reader::new(&file, &path).unwrap();
        while let segment::Step::Record(_) = reader.step().unwrap() {}
        reader.crc
    };
    let mut encoder = record::Encoder::new(crc);
    for index in 21..=39 {
        encoder.entry(&entry(index, 1, vec![index as u8; 100]));
    }
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&encoder.out, end).unwrap();
    drop(file);
    for what in all_spoils() {
        let copy = killed_copy(unsynced.path());
        if what == Spoil::FlipAByteOf(Target::EarlierEntry) {
            continue;
        }
        let target_is_new = !matches!(
            what,
            Spoil::CutSevenBytesOutOf(Target::EarlierEntry)
                | Spoil::ZeroFromTheMiddleOf(Target::EarlierEntry)
        );
        let path = spoil(copy.path(), what);
        if target_is_new {
            let wal = Wal::open(options(copy.path())).unwrap();
            let kept = last_index(&wal);
            let expected = if what == Spoil::AppendZeros { 39 } else { 38 };
            assert_eq!(kept, expected, "{what:?}");
            append(&wal, kept + 1..=kept + 1, 10);
            drop(wal);
            let wal = Wal::open(options(copy.path())).unwrap();
            assert_eq!(last_index(&wal), kept + 1);
        } else {
            // Entry 20 was acknowledged.
            assert_damaged(copy.path(), &path, what);
        }
    }
}

/// A power cut loses the sidecar's newest state and the last mark; the marks within the groups still prove the rest.
#[test]
fn marks_in_the_log_prove_damage_without_the_sidecar() {
    let dir = tempfile::tempdir().unwrap();
    let wal = Wal::open(options(dir.path())).unwrap();
    append(&wal, 1..=20, 100);
    for what in all_spoils() {
        let copy = killed_copy(dir.path());
        std::fs::remove_file(copy.path().join("synced.mark")).unwrap();
        let path = spoil(copy.path(), what);
        let reaches_the_end = matches!(what, Spoil::ZeroFromTheMiddleOf(_));
        let last = matches!(
            what,
            Spoil::CutSevenBytesOutOf(Target::LastRecord)
                | Spoil::FlipAByteOf(Target::LastRecord)
                | Spoil::AppendZeros
        );
        if reaches_the_end || last {
            // Nothing is left that could tell it from a torn group.
            drop(Wal::open(options(copy.path())).unwrap());
        } else {
            assert_damaged(copy.path(), &path, what);
        }
    }
}

#[test]
fn damage_in_an_earlier_segment_and_a_missing_one_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(dir.path());
    options.segment_bytes = 4096;
    let wal = Wal::open(options.clone()).unwrap();
    append(&wal, 1..=60, 300);
    drop(wal);
    let segments = segment::list(dir.path()).unwrap();
    assert!(segments.len() > 4);

    let copy = killed_copy(dir.path());
    let path = copy.path().join(segments[1].1.file_name().unwrap());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[2000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    options.dir = copy.path().to_owned();
    match Wal::open(options.clone()) {
        Err(StorageError::Damaged {
            path: named,
            offset,
            ..
        }) => {
            assert_eq!(named, path);
            assert!((1000..=2000).contains(&offset), "{offset}");
        }
        other => panic!("{other:?}"),
    }

    for missing in [0, 1, segments.len() - 1] {
        let copy = killed_copy(dir.path());
        std::fs::remove_file(copy.path().join(segments[missing].1.file_name().unwrap())).unwrap();
        options.dir = copy.path().to_owned();
        let error = Wal::open(options.clone()).unwrap_err();
        assert!(matches!(error, StorageError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains("missing"), "{error}");
    }
}

#[test]
fn without_space_for_the_next_segment_the_log_has_no_room_but_lives() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(dir.path());
    options.segment_bytes = 8192;
    let wal = Wal::open(options.clone()).unwrap();
    // A directory in the way makes the allocation fail as a full disk does.
    let obstacle = dir.path().join(segment::TMP_NAME);
    std::fs::create_dir(&obstacle).unwrap();
    let mut index = 0;
    while wal.has_room() {
        index += 1;
        append(&wal, index..=index, 100);
        assert!(index < 1000, "room never ends");
    }
    append(&wal, index + 1..=index + 50, 100);
    assert!(wal.failure().is_none());
    std::fs::remove_dir(&obstacle).unwrap();
    let mut more = index + 50;
    while !wal.has_room() {
        more += 1;
        append(&wal, more..=more, 1);
        assert!(more < 2000, "room never comes back");
    }
    append(&wal, more + 1..=more + 10, 100);
    drop(wal);
    assert_eq!(last_index(&Wal::open(options).unwrap()), more + 10);
}

/// Reading begins at the newest segment in front of the marker; what it holds may have been cut off and written again.
#[test]
fn a_suffix_cut_before_the_segment_read_first_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let small = WalOptions {
        segment_bytes: 4096,
        max_wals: 2,
        ..options(dir.path())
    };
    let wal = Wal::open(small.clone()).unwrap();
    append(&wal, 1..=12, 400);
    wait(|done| wal.truncate_after(3, done)).unwrap();
    append(&wal, 4..=60, 400);
    for upto in [20, 40, 55] {
        let at = LogPosition {
            index: upto,
            term: 1,
        };
        wait(|done| wal.purge(at, done)).unwrap();
        let copy = killed_copy(dir.path());
        let found = Wal::open(WalOptions {
            dir: copy.path().to_owned(),
            ..small.clone()
        });
        assert_eq!(last_index(&found.unwrap()), 60);
    }
}

/// What the log should hold, kept the simple way.
#[derive(Clone, Debug, Default)]
struct Model {
    entries: BTreeMap<u64, (u64, u8)>,
    purged: u64,
}

impl Model {
    fn last(&self) -> u64 {
        self.entries
            .keys()
            .next_back()
            .copied()
            .unwrap_or(self.purged)
    }
}

#[derive(Clone, Debug)]
enum Op {
    Append(Vec<u16>),
    Truncate(u8),
    Purge(u8),
    Vote(u64),
    Reopen,
    /// Kill, and lose or spoil a part of what was never synced.
    TornKill {
        garbage: Vec<u8>,
        cut: u16,
    },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => prop::collection::vec(0u16..600, 1..6).prop_map(Op::Append),
        1 => any::<u8>().prop_map(Op::Truncate),
        1 => any::<u8>().prop_map(Op::Purge),
        1 => any::<u64>().prop_map(Op::Vote),
        1 => Just(Op::Reopen),
        1 => (prop::collection::vec(any::<u8>(), 0..40), 0u16..300)
            .prop_map(|(garbage, cut)| Op::TornKill { garbage, cut }),
    ];
    prop::collection::vec(op, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_history_is_read_back(ops in ops()) {
        let mut dir = tempfile::tempdir().unwrap();
        let with_dir = |dir: &Path| WalOptions {
            segment_bytes: 4096,
            max_wals: 2,
            cache_bytes: 500,
            unsafe_no_fsync: false,
            ..options(dir)
        };
        let mut wal = Wal::open(with_dir(dir.path())).unwrap();
        let mut model = Model::default();
        let mut vote = None;
        let mut term = 1;
        for op in ops {
            match op {
                Op::Append(sizes) => {
                    let mut batch = Vec::new();
                    for size in sizes {
                        let index = model.last() + 1;
                        let fill = (size as u8) ^ (term as u8);
                        model.entries.insert(index, (term, fill));
                        batch.push(entry(index, term, vec![fill; size as usize]));
                    }
                    wait(|done| wal.append(batch, done)).unwrap();
                }
                Op::Truncate(back) => {
                    let after = model.last().saturating_sub(u64::from(back) % 8).max(model.purged);
                    model.entries.split_off(&(after + 1));
                    term += 1;
                    wait(|done| wal.truncate_after(after, done)).unwrap();
                }
                Op::Purge(back) => {
                    let upto = model.last().saturating_sub(u64::from(back) % 16);
                    if upto <= model.purged { continue; }
                    let upto_term = model.entries[&upto].0;
                    model.entries = model.entries.split_off(&(upto + 1));
                    model.purged = upto;
                    wait(|done| wal.purge(LogPosition { index: upto, term: upto_term }, done)).unwrap();
                }
                Op::Vote(term) => {
                    let new = WalVote { term, voted_for: Some(term ^ 1), committed: term % 2 == 0 };
                    wait(|done| wal.save_vote(new, done)).unwrap();
                    vote = Some(new);
                }
                Op::Reopen => {
                    drop(wal);
                    wal = Wal::open(with_dir(dir.path())).unwrap();
                }
                Op::TornKill { garbage, cut } => {
                    let copy = killed_copy(dir.path());
                    let (_, path) = segment::list(copy.path()).unwrap().pop().unwrap();
                    let end = dump::records(copy.path()).unwrap().last().map(|r| r.offset + r.bytes).unwrap();
                    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
                    file.write_all_at(&garbage, end).unwrap();
                    let length = file.metadata().unwrap().len();
                    file.set_len(length.saturating_sub(u64::from(cut)).max(end)).unwrap();
                    drop(wal);
                    dir = copy;
                    wal = Wal::open(with_dir(dir.path())).unwrap();
                }
            }
            prop_assert_eq!(wal.purged().index, model.purged);
            prop_assert_eq!(wal.last().index, model.last());
            prop_assert_eq!(wal.vote(), vote);
            let read = all(&wal);
            prop_assert_eq!(read.len(), model.entries.len());
            for (entry, (index, (term, fill))) in read.iter().zip(&model.entries) {
                prop_assert_eq!(entry.position, LogPosition { index: *index, term: *term });
                prop_assert!(entry.payload.iter().all(|byte| byte == fill));
            }
        }
    }
}
