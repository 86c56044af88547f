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
