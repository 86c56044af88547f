//! redb as the engine, on its own: what the suite for all engines (tests/) does not see.

use std::fs;

use super::*;
use crate::backend::batch;

const CACHE: u64 = 1 << 20;

fn summed(engine: &Redb) -> Tally {
    let mut tally = Tally::default();
    tally.add_all(&engine.scan(b"", &[OWN_PREFIX], usize::MAX).unwrap());
    tally
}

#[test]
fn the_tally_is_that_of_what_can_be_read_across_overwrites_deletes_and_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.redb");
    let engine = Redb::open(&path, CACHE).unwrap();
    assert_eq!(engine.tally().unwrap(), Some(Tally::default()));
    engine
        .write(&batch(&[
            ("a", Some(b"1")),
            ("b", Some(b"2")),
            ("a", Some(b"3")),
        ]))
        .unwrap();
    engine
        .write(&batch(&[("b", None), ("c", None), ("d", Some(b""))]))
        .unwrap();
    let tally = engine.tally().unwrap().unwrap();
    assert_eq!((tally.pairs, tally), (2, summed(&engine)));
    drop(engine);
    let engine = Redb::open(&path, CACHE).unwrap();
    assert_eq!(engine.tally().unwrap(), Some(tally));
    assert_eq!(summed(&engine), tally);
    let own = Batch {
        ops: vec![(Bytes::from_static(&TALLY_KEY), None)],
    };
    engine.write(&own).unwrap_err();
}

/// The file as a kill leaves it: what was written and not synced is there or not, as it happens.
#[test]
fn what_is_written_lazily_is_read_at_once_and_survives_with_the_next_that_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.redb");
    let engine = Redb::open(&path, CACHE).unwrap();
    engine.write(&batch(&[("a", Some(b"1"))])).unwrap();
    let long = vec![7; 300_000];
    let lazily = batch(&[("a", None), ("b", Some(&long))]);
    engine.write_lazily(&lazily).unwrap();
    assert_eq!(engine.get(b"a").unwrap(), None);
    assert_eq!(engine.get(b"b").unwrap().unwrap(), long);
    let killed = |name: &str| {
        let copy = dir.path().join(name);
        fs::copy(&path, &copy).unwrap();
        Redb::open(&copy, CACHE).unwrap()
    };
    let before = killed("before.redb");
    assert_eq!(before.get(b"a").unwrap().unwrap(), &b"1"[..]);
    assert_eq!(before.get(b"b").unwrap(), None);
    assert_eq!(before.tally().unwrap(), Some(summed(&before)));
    engine.write(&batch(&[("c", Some(b"3"))])).unwrap();
    let after = killed("after.redb");
    assert_eq!(after.get(b"a").unwrap(), None);
    assert_eq!(after.get(b"b").unwrap().unwrap(), long);
    assert_eq!(after.get(b"c").unwrap().unwrap(), &b"3"[..]);
    assert_eq!(after.tally().unwrap(), Some(summed(&after)));
}

/// A bit of these bytes, which are in the file once or more, turned over each time they are there.
fn flip(path: &Path, part: &[u8]) {
    let mut bytes = fs::read(path).unwrap();
    let places: Vec<usize> = bytes
        .windows(part.len())
        .enumerate()
        .filter(|(_, window)| *window == part)
        .map(|(at, _)| at)
        .collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at] ^= 1;
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_flipped_bit_in_a_value_or_a_key_is_named_when_it_is_read() {
    for part in [&b"a value of its own"[..], b"key of its own"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.redb");
        let engine = Redb::open(&path, CACHE).unwrap();
        let ops = [
            ("key of its own", Some(&b"a value of its own"[..])),
            ("other", Some(b"sound")),
        ];
        engine.write(&batch(&ops)).unwrap();
        drop(engine);
        flip(&path, part);
        let engine = Redb::open(&path, CACHE).unwrap();
        let error = engine.scan(b"", &[OWN_PREFIX], usize::MAX).unwrap_err();
        assert!(
            matches!(error, StorageError::DamagedRecord { .. }),
            "{error}"
        );
        assert!(error.to_string().contains("ey of its own"), "{error}");
        assert_eq!(engine.get(b"other").unwrap().unwrap(), b"sound"[..]);
        assert!(!matches!(engine.get(b"key of its own"), Ok(Some(_))));
    }
}

#[test]
fn a_file_without_a_tally_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.redb");
    drop(Database::create(&path).unwrap());
    let error = Redb::open(&path, CACHE).unwrap_err().to_string();
    assert!(error.contains("x.redb"), "{error}");
}

/// Each pair of it is as it was written, and so is their sum.
#[test]
fn pages_that_changed_places_are_found_by_whoever_scans() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.redb");
    let engine = Redb::open(&path, CACHE).unwrap();
    let mut all = Batch::default();
    for number in 0..64 {
        all.put(format!("k{number:03}"), vec![b'v'; 900]);
    }
    engine.write(&all).unwrap();
    assert_eq!(engine.scan(b"k", b"l", usize::MAX).unwrap().len(), 64);
    drop(engine);
    let mut bytes = fs::read(&path).unwrap();
    let leaf_of = |bytes: &[u8], key: &[u8]| {
        let holds = |page: &[u8], words: &[u8]| page.windows(words.len()).any(|it| it == words);
        let is_it = |page: &&[u8]| holds(page, key) && holds(page, &[b'v'; 900]);
        let pages = bytes.chunks(4096).enumerate();
        let found = pages.filter(|(_, page)| is_it(page)).map(|(at, _)| at);
        found.collect::<Vec<_>>()
    };
    let (low, high) = (leaf_of(&bytes, b"k005"), leaf_of(&bytes, b"k045"));
    let (&[low], &[high]) = (&low[..], &high[..]) else {
        panic!("{low:?} {high:?}");
    };
    let (front, back) = bytes.split_at_mut(high * 4096);
    front[low * 4096..][..4096].swap_with_slice(&mut back[..4096]);
    fs::write(&path, &bytes).unwrap();
    let engine = Redb::open(&path, CACHE).unwrap();
    let scanned = engine.scan(b"k", b"l", usize::MAX);
    let error = scanned.map(|pairs| pairs.len()).unwrap_err();
    assert!(error.to_string().contains("out of order"), "{error}");
    assert!(error.to_string().contains("x.redb"), "{error}");
}

/// It writes as it closes.
#[derive(Debug)]
struct Spoilt {
    memory: redb::backends::InMemoryBackend,
    closes: Arc<AtomicBool>,
}

impl redb::StorageBackend for Spoilt {
    fn len(&self) -> std::io::Result<u64> {
        self.memory.len()
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.memory.read(offset, out)
    }
    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.memory.set_len(len)
    }
    fn sync_data(&self) -> std::io::Result<()> {
        self.memory.sync_data()
    }
    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        assert!(!self.closes.load(Ordering::Relaxed), "no sense in this");
        self.memory.write(offset, data)
    }
}

#[test]
fn a_panic_at_the_close_ends_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.redb");
    let closes = Arc::new(AtomicBool::new(false));
    let spoilt = || Spoilt {
        memory: redb::backends::InMemoryBackend::new(),
        closes: Arc::clone(&closes),
    };
    for unwinding in [false, true] {
        closes.store(false, Ordering::Relaxed);
        let mut engine = Redb::open(&path, CACHE).unwrap();
        engine.database = Some(Database::builder().create_with_backend(spoilt()).unwrap());
        engine.write(&batch(&[("a", Some(b"1"))])).unwrap();
        closes.store(true, Ordering::Relaxed);
        let ended = caught(move || {
            let _engine = engine;
            assert!(!unwinding, "of something else");
        });
        let reason = ended.err();
        assert_eq!(reason.is_some(), unwinding, "{reason:?}");
        assert!(reason.is_none_or(|reason| reason.contains("something else")));
    }
}
