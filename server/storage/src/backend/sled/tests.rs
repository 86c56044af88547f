//! sled as the engine, on its own: what the suite for all engines (tests/) does not see.

use super::*;
use crate::backend::batch;

const CACHE: u64 = 1 << 20;

fn open(dir: &Path) -> Sled {
    Sled::open(&dir.join("x.sled"), CACHE).unwrap()
}

fn chunks_stored(engine: &Sled) -> usize {
    engine.db.scan_prefix(CHUNK_PREFIX).count()
}

#[test]
fn each_batch_is_synced_by_our_sync() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path());
    for i in 0..20 {
        let before = ballast_sync_shim::calls();
        engine.write(&batch(&[("k", Some(&[i]))])).unwrap();
        assert!(ballast_sync_shim::calls() > before, "batch {i}");
    }
}

#[test]
fn a_long_value_is_cut_replaced_and_removed_with_its_pieces() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path());
    let long = vec![7_u8; 3 * CHUNK_BYTES + 1];
    engine
        .write(&batch(&[("long", Some(&long)), ("short", Some(b"s"))]))
        .unwrap();
    assert_eq!(chunks_stored(&engine), 4);
    assert_eq!(engine.get(b"long").unwrap().unwrap(), long);
    let just = vec![8_u8; CHUNK_BYTES];
    let more = vec![9_u8; CHUNK_BYTES + 1];
    engine.write(&batch(&[("long", Some(&more))])).unwrap();
    assert_eq!(chunks_stored(&engine), 2);
    drop(engine);
    let engine = open(dir.path());
    let pairs = engine.scan(b"", &[OWN_PREFIX], usize::MAX).unwrap();
    let expected: Pairs = vec![
        ("long".into(), more.clone().into()),
        ("short".into(), "s".into()),
    ];
    assert_eq!(pairs, expected);
    engine.write(&batch(&[("long", Some(&just))])).unwrap();
    assert_eq!(chunks_stored(&engine), 0);
    assert_eq!(engine.get(b"long").unwrap().unwrap(), just);
    engine
        .write(&batch(&[("long", Some(&long)), ("long", None)]))
        .unwrap();
    assert_eq!(chunks_stored(&engine), 0);
    assert_eq!(engine.get(b"long").unwrap(), None);
}

#[test]
fn a_missing_or_changed_piece_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path());
    let long = vec![7_u8; 2 * CHUNK_BYTES];
    engine.write(&batch(&[("long", Some(&long))])).unwrap();
    let key = engine.db.scan_prefix(CHUNK_PREFIX).keys().next().unwrap();
    let key = key.unwrap();
    let changed = vec![6_u8; CHUNK_BYTES];
    engine.db.insert(&key, changed).unwrap();
    let error = engine.get(b"long").unwrap_err().to_string();
    assert!(error.contains("record long is damaged"), "{error}");
    engine.db.remove(&key).unwrap();
    let error = engine
        .scan(b"", &[OWN_PREFIX], usize::MAX)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("record long is damaged") && error.contains("x.sled"),
        "{error}"
    );
}

#[test]
fn the_tally_is_that_of_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path());
    let long = vec![7_u8; CHUNK_BYTES * 2];
    for ops in [
        batch(&[("a", Some(b"1")), ("b", Some(b"2")), ("c", Some(&long))]),
        batch(&[("a", Some(b"3")), ("a", Some(b"4")), ("b", None)]),
        batch(&[("c", Some(b"5")), ("gone", None), ("d", Some(&long))]),
        batch(&[("d", None), ("e", Some(&long))]),
    ] {
        engine.write(&ops).unwrap();
    }
    let check = |engine: &Sled| {
        let mut found = Tally::default();
        for (key, value) in engine.scan(b"", &[OWN_PREFIX], usize::MAX).unwrap() {
            found.add(&key, Digest::of(&value));
        }
        assert_eq!(engine.tally().unwrap(), Some(found));
        assert_eq!(found.pairs, 3);
    };
    check(&engine);
    drop(engine);
    check(&open(dir.path()));
}

#[test]
fn a_database_that_lacks_a_part_is_refused_and_never_made_anew() {
    for (part, length) in [
        ("conf", None),
        ("conf", Some(5)),
        ("db", None),
        ("db", Some(0)),
        ("blobs", None),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let engine = open(dir.path());
        engine.write(&batch(&[("k", Some(b"v"))])).unwrap();
        drop(engine);
        let path = dir.path().join("x.sled").join(part);
        match length {
            Some(length) => {
                let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                file.set_len(length).unwrap();
            }
            None if path.is_dir() => fs::remove_dir(&path).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        let error = Sled::open(&dir.path().join("x.sled"), CACHE).unwrap_err();
        assert!(error.to_string().contains("x.sled"), "{error}");
    }
}

/// Damage anywhere: an error at the open or at a read, or a tally that does not fit. Where it is taken for the tear at the log's end, the
/// database is that after an earlier batch, and its applied position, which is in each batch, says so to the log.
#[test]
fn a_flipped_byte_is_found() {
    const ROUNDS: usize = 24;
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path());
    for i in 0..40 {
        let key = format!("k{i:03}");
        let value = vec![i; 2_000];
        engine.write(&batch(&[(&key, Some(&value))])).unwrap();
    }
    let expected = engine.scan(b"", &[OWN_PREFIX], usize::MAX).unwrap();
    drop(engine);
    drop(open(dir.path()));
    let source = dir.path().join("x.sled");
    let log = fs::read(source.join("db")).unwrap();
    let length = log.iter().rposition(|byte| *byte != 0).unwrap();
    let (mut found, mut rolled_back) = (0, 0);
    for round in 0..ROUNDS {
        let copy = tempfile::tempdir().unwrap();
        let path = copy.path().join("x.sled");
        fs::create_dir_all(path.join("blobs")).unwrap();
        for entry in fs::read_dir(&source).unwrap() {
            let entry = entry.unwrap();
            if entry.path().is_file() {
                fs::copy(entry.path(), path.join(entry.file_name())).unwrap();
            }
        }
        let mut bytes = log.clone();
        bytes[length * round / ROUNDS + round] ^= 0x10;
        fs::write(path.join("db"), bytes).unwrap();
        let read = Sled::open(&path, CACHE).and_then(|engine| {
            let pairs = engine.scan(b"", &[OWN_PREFIX], usize::MAX)?;
            Ok((pairs, engine.tally()?.unwrap()))
        });
        let Ok((pairs, tally)) = read else {
            found += 1;
            continue;
        };
        let mut sum = Tally::default();
        sum.add_all(&pairs);
        if sum != tally {
            found += 1;
        } else if pairs != expected {
            assert!(expected.starts_with(&pairs), "round {round}");
            rolled_back += 1;
        }
    }
    assert!(found > 0, "{found} found, {rolled_back} rolled back");
}
