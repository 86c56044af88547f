//! Bits that turn over in a database's files: whatever is read afterwards is right, or the store says what is damaged. `SEED` replays a run.

#![expect(clippy::unwrap_used, reason = "a test's helpers may panic")]
#![expect(clippy::print_stderr, reason = "a run is replayed by its seed")]

use std::env;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use ballast_storage::backend::Kind;
use ballast_storage::mvcc::{HashKv, Pace, RangeOptions, Store, StoreOptions, WriteTxn};
use ballast_storage::schema::Table;
use ballast_storage::{LogPosition, ReadError, StorageError};
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

const FLIPS: usize = 120;
const KEYS: usize = 300;
const COMPACTED: i64 = 350;
const PAST: [i64; 3] = [COMPACTED, 500, 700];

fn open(kind: Kind, dir: &Path) -> Result<Arc<Store>, StorageError> {
    let store = Store::open(StoreOptions {
        dir: dir.to_owned(),
        engine: kind,
        // Nothing is read from memory that could be read from the disk.
        value_cache_bytes: 0,
        engine_cache_bytes: 0,
        compaction_batch_limit: 100,
        compaction_sleep: Duration::from_millis(1),
        batch_interval: Duration::from_millis(5),
        batch_limit: 1000,
    })?;
    store.set_log_synced(u64::MAX);
    Ok(store)
}

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

fn fill(store: &Store) {
    for round in 0..3 {
        for number in 0..KEYS {
            let key = format!("key-{number:05}");
            let value = if number % 20 == round {
                vec![b'l'; 9_000 + number]
            } else {
                format!("value {round} of {number}").into_bytes()
            };
            apply(store, |txn| txn.put(key.into(), value.into(), 0)).unwrap();
        }
        let (from, to) = (
            format!("key-{:05}", round * 9),
            format!("key-{:05}", round * 9 + 4),
        );
        apply(store, |txn| {
            txn.delete_range(from.as_bytes(), to.as_bytes())
        })
        .unwrap();
    }
    for id in 0..50_u64 {
        let lease = Bytes::from(format!("lease {id}"));
        apply(store, |txn| {
            txn.table_put(Table::Lease, &id.to_be_bytes(), lease);
        });
    }
    let compaction = apply(store, |txn| txn.compact(COMPACTED)).unwrap();
    compaction.wait().unwrap();
}

/// Everything there is to read.
#[derive(Debug, PartialEq)]
struct Contents {
    ranges: Vec<Vec<(Bytes, Bytes, i64)>>,
    events: Vec<(Bytes, i64)>,
    hash: HashKv,
    leases: Vec<(Bytes, Bytes)>,
    snapshot: Vec<u8>,
}

fn read(store: &Store) -> Result<Contents, ReadError> {
    let view = store.view();
    let mut ranges = Vec::new();
    for revision in [0].into_iter().chain(PAST) {
        let options = RangeOptions {
            revision,
            ..RangeOptions::default()
        };
        let kvs = view.range(b"\0", b"\0", &options)?.kvs.into_iter();
        ranges.push(kvs.map(|kv| (kv.key, kv.value, kv.mod_revision)).collect());
    }
    let (events, next) = view.events(COMPACTED, usize::MAX)?;
    assert_eq!(next, view.revision() + 1);
    let mut snapshot = Vec::new();
    let mut stream = store.snapshot(&|| true)?.expect("it is wanted");
    while let Some(chunk) = stream.next_chunk(1 << 20)? {
        snapshot.extend_from_slice(&chunk);
    }
    Ok(Contents {
        ranges,
        events: events
            .into_iter()
            .map(|event| (event.kv.key, event.kv.mod_revision))
            .collect(),
        hash: store.hash_kv(0)?,
        leases: store.table(Table::Lease)?,
        snapshot,
    })
}

/// All files below, and their bytes.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            let bytes = fs::read(&path).unwrap();
            found.push((path, bytes));
        }
    }
    found
}

/// A byte of a sector that holds something.
fn somewhere(random: &mut StdRng, files: &[(PathBuf, Vec<u8>)]) -> (usize, usize) {
    loop {
        let file = random.random_range(0..files.len());
        let bytes = &files[file].1;
        if bytes.is_empty() {
            continue;
        }
        let at = random.random_range(0..bytes.len());
        let sector = at / 512 * 512;
        if bytes[sector..bytes.len().min(sector + 512)]
            .iter()
            .any(|&byte| byte != 0)
        {
            return (file, at);
        }
    }
}

/// How a damaged database was found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    AtTheOpen,
    LaterOn,
    Never,
    /// The engine panicked while it panicked, which ends the process.
    ByTheEnd,
}

fn says_what(error: &dyn std::fmt::Display, dir: &Path) {
    let text = error.to_string();
    assert!(text.contains(dir.to_str().unwrap()), "which file? {text}");
}

/// The directory that [`looks_into_a_directory`] is started for, and what all there should sum up to.
const DIRECTORY: &str = "BALLAST_DAMAGED";
const SUM: &str = "BALLAST_SOUND_SUM";

fn sum(contents: &Contents) -> u32 {
    crc32c::crc32c(format!("{contents:?}").as_bytes())
}

/// In a process of its own.
fn find(dir: &Path, sound_sum: u32) -> Found {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "looks_into_a_directory", "--nocapture"])
        .env(DIRECTORY, dir)
        .env(SUM, sound_sum.to_string())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    if output.status.signal().is_some() {
        assert!(said.contains("/redb-"), "{} with:\n{said}", output.status);
        return Found::ByTheEnd;
    }
    assert!(output.status.success(), "{said}");
    [Found::AtTheOpen, Found::LaterOn, Found::Never]
        .into_iter()
        .find(|found| said.contains(&format!("it was found: {found:?}")))
        .unwrap_or_else(|| panic!("{said}"))
}

/// Of [`find`]; nothing by itself.
#[test]
fn looks_into_a_directory() {
    if let Some(dir) = env::var_os(DIRECTORY) {
        let sound_sum = env::var(SUM).unwrap().parse().unwrap();
        let found = look(Kind::Redb, Path::new(&dir), sound_sum);
        eprintln!("it was found: {found:?}");
    }
}

fn look(kind: Kind, dir: &Path, sound_sum: u32) -> Found {
    let store = match open(kind, dir) {
        Ok(store) => store,
        Err(error) => {
            says_what(&error, dir);
            return Found::AtTheOpen;
        }
    };
    let all = read(&store).and_then(|first| {
        store.defragment(Pace::Background)?;
        Ok((first, read(&store)?))
    });
    match all {
        Ok((first, second)) => {
            assert!(sum(&first) == sound_sum, "what it gives is wrong");
            assert!(
                sum(&second) == sound_sum,
                "what it gives after a defragmentation is wrong"
            );
            Found::Never
        }
        Err(ReadError::Storage(error)) => {
            says_what(&error, dir);
            Found::LaterOn
        }
        Err(error) => panic!("damage is no answer: {error}"),
    }
}

fn seed() -> u64 {
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random);
    eprintln!("SEED={seed}");
    seed
}

fn a_flipped_bit_is_never_given_to_anybody(kind: Kind) {
    let random = &mut StdRng::seed_from_u64(seed());
    let dir = tempfile::tempdir().unwrap();
    let store = open(kind, dir.path()).unwrap();
    fill(&store);
    let expected = sum(&read(&store).unwrap());
    store.close().unwrap();
    drop(store);
    let sound = files(dir.path());
    let mut found = Vec::new();
    for _ in 0..FLIPS {
        let (file, at) = somewhere(random, &sound);
        let bit = random.random_range(0..8);
        let damaged = tempfile::tempdir().unwrap();
        for (number, (path, bytes)) in sound.iter().enumerate() {
            let path = damaged.path().join(path.strip_prefix(dir.path()).unwrap());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let mut bytes = bytes.clone();
            if number == file {
                bytes[at] ^= 1 << bit;
            }
            fs::write(path, bytes).unwrap();
        }
        eprintln!("bit {bit} of byte {at} of {}", sound[file].0.display());
        found.push(find(damaged.path(), expected));
    }
    let times = |how| found.iter().filter(|&&found| found == how).count();
    eprintln!(
        "{kind}: {} at the open, {} later, {} of no consequence, {} by the end of the process",
        times(Found::AtTheOpen),
        times(Found::LaterOn),
        times(Found::Never),
        times(Found::ByTheEnd)
    );
    assert!(times(Found::AtTheOpen) > 0);
}

/// The disk changes under an open store, which reads on.
fn a_bit_that_flips_under_an_open_store_is_never_given_to_anybody(kind: Kind) {
    let random = &mut StdRng::seed_from_u64(seed());
    let mut later = 0;
    for _ in 0..FLIPS / 8 {
        let dir = tempfile::tempdir().unwrap();
        let store = open(kind, dir.path()).unwrap();
        fill(&store);
        let expected = read(&store).unwrap();
        let sound = files(dir.path());
        for _ in 0..4 {
            let (file, at) = somewhere(random, &sound);
            let disk = fs::File::options()
                .write(true)
                .open(&sound[file].0)
                .unwrap();
            let byte = sound[file].1[at] ^ (1 << random.random_range(0..8));
            disk.write_all_at(&[byte], at as u64).unwrap();
        }
        match read(&store) {
            Ok(found) => assert!(found == expected, "what it gives is wrong"),
            Err(ReadError::Storage(error)) => {
                says_what(&error, dir.path());
                later += 1;
            }
            Err(error) => panic!("damage is no answer: {error}"),
        }
    }
    eprintln!("{kind}: {later} of {} noticed", FLIPS / 8);
}

// sled has checksums of its own, and a start that takes too long for so many: `e2e/tests/fault_flip.rs` turns its bits over.
#[test]
fn redb_gives_no_flipped_bit_to_anybody() {
    a_flipped_bit_is_never_given_to_anybody(Kind::Redb);
}

#[test]
fn redb_gives_no_bit_to_anybody_that_flips_under_an_open_store() {
    a_bit_that_flips_under_an_open_store_is_never_given_to_anybody(Kind::Redb);
}
