//! What the engine trait promises, on each engine.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test may panic, and says its seed"
)]

mod engines;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ballast_storage::backend::{Batch, Engine, Kind, OWN_PREFIX, Pairs, Tally};
use bytes::Bytes;
use rand::prelude::*;
use rand::rngs::StdRng;

const CACHE_BYTES: u64 = 1 << 20;
/// Beyond all keys.
const END: [u8; 1] = [OWN_PREFIX];

fn open(kind: Kind, dir: &Path) -> Arc<dyn Engine> {
    kind.open(&dir.join(format!("000001.{kind}")), CACHE_BYTES)
        .unwrap()
}

fn put(engine: &dyn Engine, key: &str, value: impl Into<Bytes>) {
    let mut batch = Batch::default();
    batch.put(key.to_owned(), value);
    engine.write(&batch).unwrap();
}

fn keys(pairs: &Pairs) -> Vec<&[u8]> {
    pairs.iter().map(|(key, _)| &key[..]).collect()
}

fn a_scan_begins_at_its_start_ends_before_its_end_and_stops_at_its_limit(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(kind, dir.path());
    for key in ["a", "b", "ba", "c"] {
        put(&*engine, key, "12345678");
    }
    let scan = |start: &[u8], end: &[u8], bytes| engine.scan(start, end, bytes).unwrap();
    assert_eq!(
        keys(&scan(b"", &END, usize::MAX)),
        [&b"a"[..], b"b", b"ba", b"c"]
    );
    assert_eq!(keys(&scan(b"b", b"c", usize::MAX)), [&b"b"[..], b"ba"]);
    assert_eq!(keys(&scan(b"b\0", b"bb", usize::MAX)), [b"ba"]);
    assert_eq!(keys(&scan(b"", &END, 0)), [b"a"]);
    assert_eq!(keys(&scan(b"", &END, 10)), [b"a", b"b"]);
    assert_eq!(scan(b"d", &END, usize::MAX), []);
    assert_eq!(scan(b"b", b"b", usize::MAX), []);
    assert_eq!(scan(b"c", b"a", usize::MAX), []);
}

fn empty_values_are_values_and_the_last_write_of_a_batch_counts(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(kind, dir.path());
    let mut batch = Batch::default();
    batch.put("empty", "");
    batch.put("twice", "1");
    batch.put("twice", "2");
    batch.put("gone", "1");
    batch.delete("gone");
    batch.delete("back");
    batch.put("back", "3");
    engine.write(&batch).unwrap();
    let names = ["empty", "twice", "gone", "back", "never"].map(Bytes::from);
    let expected: Vec<Option<Bytes>> = [Some(""), Some("2"), None, Some("3"), None]
        .map(|value| value.map(Bytes::from))
        .into();
    assert_eq!(engine.get_many(&names).unwrap(), expected);
    for (name, value) in names.iter().zip(&expected) {
        assert_eq!(&engine.get(name).unwrap(), value);
    }
}

/// Batches of all sizes against a map, with the database opened anew now and then.
fn random_batches_match_a_map(kind: Kind) {
    let seed = rand::rng().random();
    eprintln!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let dir = tempfile::tempdir().unwrap();
    let mut engine = open(kind, dir.path());
    let mut model: BTreeMap<Bytes, Bytes> = BTreeMap::new();
    for round in 0..150 {
        let mut batch = Batch::default();
        // Records come so: many, ascending, none of them there before. Here some are.
        if rng.random_ratio(1, 3) {
            let first = rng.random_range(0..400);
            let step = rng.random_range(1..4);
            for key in (first..first + rng.random_range(1..200)).step_by(step) {
                let key = Bytes::from(format!("k{key:03}"));
                if rng.random_ratio(1, 20) || (model.contains_key(&key) && rng.random_ratio(9, 10))
                {
                    continue;
                }
                let value = Bytes::from(vec![round as u8; rng.random_range(0..2_000)]);
                batch.put(key.clone(), value.clone());
                model.insert(key, value);
            }
        }
        for _ in 0..rng.random_range(0..30) {
            let key = Bytes::from(format!("k{:03}", rng.random_range(0..400)));
            if rng.random_ratio(1, 3) {
                batch.delete(key.clone());
                model.remove(&key);
            } else {
                let longest = [10, 3_000, 400_000]
                    [usize::from(rng.random_ratio(1, 5)) + usize::from(rng.random_ratio(1, 20))];
                let value = vec![round as u8; rng.random_range(0..longest)];
                batch.put(key.clone(), value.clone());
                model.insert(key, value.into());
            }
        }
        match rng.random_range(0..3) {
            0 => engine.write(&batch).unwrap(),
            1 => engine.write_lazily(&batch).unwrap(),
            _ => engine.write_unpublished(&batch).unwrap(),
        }
        if rng.random_ratio(1, 15) {
            drop(engine);
            engine = open(kind, dir.path());
        }
        if rng.random_ratio(1, 5) {
            let mut found = Pairs::new();
            let mut next = Vec::new();
            loop {
                let pairs = engine
                    .scan(&next, &END, rng.random_range(0..100_000))
                    .unwrap();
                let Some((last, _)) = pairs.last() else { break };
                next = [last, &b"\0"[..]].concat();
                found.extend(pairs);
            }
            assert!(
                found.iter().map(|(key, value)| (key, value)).eq(&model),
                "round {round}"
            );
            let mut sum = Tally::default();
            sum.add_all(&found);
            assert!(engine.tally().unwrap().is_none_or(|tally| tally == sum));
        }
    }
}

/// However an engine stores what is longer than its pages.
fn a_long_value_is_never_seen_in_parts(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(kind, dir.path());
    let value = |i: u8| vec![i; 250_000 + usize::from(i)];
    put(&*engine, "k", value(0));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers = [true, false].map(|scans| {
            let (engine, stop) = (&engine, &stop);
            scope.spawn(move || {
                let mut reads = 0;
                while !stop.load(Ordering::Relaxed) {
                    let found = if scans {
                        engine.scan(b"k", b"l", 1).unwrap().pop().unwrap().1
                    } else {
                        engine.get(b"k").unwrap().unwrap()
                    };
                    assert_eq!(found, value(found[0]));
                    reads += 1;
                }
                reads
            })
        });
        for i in 1..60 {
            put(&*engine, "k", value(i));
        }
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
    });
}

fn the_size_grows_with_what_is_stored(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(kind, dir.path());
    let empty = engine.size().unwrap().allocated;
    assert!((1..64 << 10).contains(&empty), "{empty}");
    for i in 0..40 {
        put(&*engine, &format!("k{i}"), vec![1; 100_000]);
    }
    let full = engine.size().unwrap().allocated;
    assert!(full >= 4_000_000, "{full}");
    drop(engine);
    let again = open(kind, dir.path()).size().unwrap().allocated;
    assert!((4_000_000..40_000_000).contains(&again), "{again}");
}

fn a_file_that_is_no_database_is_refused_and_named(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(format!("000001.{kind}"));
    std::fs::write(&path, vec![7; 100_000]).unwrap();
    let error = kind.open(&path, CACHE_BYTES).unwrap_err().to_string();
    assert!(error.contains(&format!("000001.{kind}")), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), vec![7; 100_000]);
}

on_each_engine!(
    a_scan_begins_at_its_start_ends_before_its_end_and_stops_at_its_limit,
    empty_values_are_values_and_the_last_write_of_a_batch_counts,
    random_batches_match_a_map,
    a_long_value_is_never_seen_in_parts,
    the_size_grows_with_what_is_stored,
    a_file_that_is_no_database_is_refused_and_named,
);
