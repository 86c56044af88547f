//! Round trips, and damage that must end in an error.

use std::collections::BTreeMap;
use std::io::Write as _;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::error::StorageError;

type Buckets = BTreeMap<Vec<u8>, BTreeMap<Vec<u8>, Vec<u8>>>;

fn build(buckets: &Buckets) -> Vec<u8> {
    let mut planner = Planner::new();
    for (name, entries) in buckets {
        planner.begin_bucket(name.len()).unwrap();
        for (key, value) in entries {
            planner.entry(key.len(), value.len()).unwrap();
        }
    }
    let plan = planner.finish().unwrap();
    let mut writer = Writer::new(plan);
    for (name, entries) in buckets {
        writer.begin_bucket(Bytes::copy_from_slice(name)).unwrap();
        for (key, value) in entries {
            writer
                .entry(Bytes::copy_from_slice(key), Bytes::copy_from_slice(value))
                .unwrap();
        }
    }
    let bytes = writer.finish().unwrap();
    assert_eq!(bytes.len() as u64, plan.file_len());
    bytes.to_vec()
}

fn open(bytes: &[u8]) -> Result<BoltFile, StorageError> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    BoltFile::from_file(file, std::path::Path::new("test.db"))
}

/// Everything in the file, nested buckets refused.
fn dump(file: &BoltFile) -> Result<Buckets, StorageError> {
    let mut out = Buckets::new();
    let mut names = file.cursor(&file.root());
    while let Some((name, value)) = names.next()? {
        let Value::Bucket(bucket) = value else {
            return Err(file.damaged(0, "a value in the root bucket"));
        };
        let entries = out.entry(name.to_vec()).or_default();
        let mut cursor = file.cursor(&bucket);
        while let Some((key, value)) = cursor.next()? {
            let Value::Bytes(value) = value else {
                return Err(file.damaged(0, "a nested bucket"));
            };
            entries.insert(key.to_vec(), value.to_vec());
        }
    }
    Ok(out)
}

fn sequential(count: u32, value_len: usize) -> BTreeMap<Vec<u8>, Vec<u8>> {
    (0..count)
        .map(|i| (i.to_be_bytes().to_vec(), vec![i as u8; value_len]))
        .collect()
}

#[test]
fn buckets_of_every_size_come_back_and_pass_the_check() {
    let mut buckets = Buckets::new();
    buckets.insert(b"empty".to_vec(), BTreeMap::new());
    buckets.insert(b"inline".to_vec(), sequential(3, 10));
    buckets.insert(b"large values".to_vec(), sequential(20, 10_000));
    buckets.insert(b"many".to_vec(), sequential(100_000, 20));
    buckets.insert(b"one leaf".to_vec(), sequential(30, 100));
    for count in 170..190 {
        buckets.insert(
            format!("two leaves {count}").into_bytes(),
            sequential(count, 3),
        );
    }
    let file = open(&build(&buckets)).unwrap();
    check(&file).unwrap();
    assert_eq!(dump(&file).unwrap(), buckets);
}

#[test]
fn a_bucket_is_inline_up_to_a_quarter_of_a_page() {
    for (value_len, inline) in [(988, true), (989, false)] {
        let mut buckets = Buckets::new();
        buckets.insert(b"b".to_vec(), sequential(1, value_len));
        let file = open(&build(&buckets)).unwrap();
        let bucket = file.bucket(b"b").unwrap().unwrap();
        assert_eq!(bucket.root_page().is_none(), inline, "{value_len}");
    }
}

#[test]
fn no_branch_page_has_fewer_than_two_children() {
    // Long keys: a branch is full after four children, so that there are several levels.
    for count in 1..150 {
        let entries = (0..count)
            .map(|i: u32| (format!("{i:01000}").into_bytes(), vec![0; 2_500]))
            .collect();
        let bytes = build(&Buckets::from([(b"b".to_vec(), entries)]));
        for page in bytes.chunks(PAGE_SIZE) {
            if u16_at(page, 8) == FLAG_BRANCH {
                assert!(u16_at(page, 10) >= 2, "{count} entries");
            }
        }
        check(&open(&bytes).unwrap()).unwrap();
    }
}

#[test]
fn the_writer_refuses_what_bbolt_would_not_hold() {
    let plan = Planner::new().finish().unwrap();
    let mut writer = Writer::new(plan);
    let entry = |writer: &mut Writer, key: &'static [u8]| {
        writer.entry(Bytes::from_static(key), Bytes::new())
    };
    assert!(matches!(
        entry(&mut writer, b"k"),
        Err(WriteError::NoBucket)
    ));
    writer.begin_bucket(Bytes::from_static(b"b")).unwrap();
    assert!(matches!(
        entry(&mut writer, b""),
        Err(WriteError::KeyLen(0))
    ));
    entry(&mut writer, b"k").unwrap();
    assert!(matches!(
        entry(&mut writer, b"k"),
        Err(WriteError::Order { .. })
    ));
    assert!(matches!(
        writer.begin_bucket(Bytes::from_static(b"a")),
        Err(WriteError::Order { .. })
    ));
}

#[test]
fn a_second_pass_that_differs_from_the_first_is_refused() {
    let mut planner = Planner::new();
    planner.begin_bucket(1).unwrap();
    planner.entry(1, 5_000).unwrap();
    let plan = planner.finish().unwrap();
    let mut writer = Writer::new(plan);
    writer.begin_bucket(Bytes::from_static(b"b")).unwrap();
    writer
        .entry(Bytes::from_static(b"k"), Bytes::from(vec![0; 9_000]))
        .unwrap();
    assert!(matches!(writer.finish(), Err(WriteError::Changed { .. })));
}

#[test]
fn one_damaged_meta_page_leaves_the_other() {
    let mut buckets = Buckets::new();
    buckets.insert(b"b".to_vec(), sequential(300, 50));
    let bytes = build(&buckets);
    for meta in 0..2 {
        let mut damaged = bytes.clone();
        damaged[meta * PAGE_SIZE + 40] ^= 1;
        assert_eq!(dump(&open(&damaged).unwrap()).unwrap(), buckets);
    }
    let mut damaged = bytes.clone();
    damaged[40] ^= 1;
    damaged[PAGE_SIZE + 40] ^= 1;
    assert!(matches!(open(&damaged), Err(StorageError::Damaged { .. })));
    for len in [0, 15, 79, 80, PAGE_SIZE, 2 * PAGE_SIZE, bytes.len() - 1] {
        assert!(
            matches!(open(&bytes[..len]), Err(StorageError::Damaged { .. })),
            "{len}"
        );
    }
}

#[test]
fn a_branch_that_points_to_itself_ends_in_an_error() {
    let mut buckets = Buckets::new();
    buckets.insert(b"b".to_vec(), sequential(2_000, 50));
    let mut bytes = build(&buckets);
    let mut loops = 0;
    for page in bytes.chunks_mut(PAGE_SIZE) {
        if u16_at(page, 8) == FLAG_BRANCH {
            let own = u64_at(page, 0);
            let at = PAGE_HEADER + 8;
            page[at..at + 8].copy_from_slice(&own.to_le_bytes());
            loops += 1;
        }
    }
    assert!(loops > 0);
    let file = open(&bytes).unwrap();
    assert!(matches!(dump(&file), Err(StorageError::Damaged { .. })));
    assert!(matches!(check(&file), Err(StorageError::Damaged { .. })));
}

fn any_buckets() -> impl Strategy<Value = Buckets> {
    let key = prop_oneof![
        8 => prop::collection::vec(any::<u8>(), 1..24),
        1 => prop::collection::vec(any::<u8>(), 1..1_500),
    ];
    let value = prop_oneof![
        8 => prop::collection::vec(any::<u8>(), 0..200),
        1 => prop::collection::vec(any::<u8>(), 0..9_000),
    ];
    let entries = prop_oneof![
        prop::collection::btree_map(key.clone(), value.clone(), 0..8),
        prop::collection::btree_map(key.clone(), value, 0..150),
    ];
    prop::collection::btree_map(key, entries, 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_buckets_come_back(buckets in any_buckets()) {
        let file = open(&build(&buckets)).unwrap();
        check(&file).unwrap();
        prop_assert_eq!(dump(&file).unwrap(), buckets);
    }

    /// Damage of structure is an error or other data, never a panic, a loop or a huge allocation.
    #[test]
    fn damage_never_panics(
        buckets in any_buckets(),
        hits in prop::collection::vec((any::<prop::sample::Index>(), 0..64_usize, any::<u8>()), 1..12),
    ) {
        let mut bytes = build(&buckets);
        let pages = bytes.len() / PAGE_SIZE;
        for (page, at, byte) in hits {
            bytes[page.index(pages) * PAGE_SIZE + at] = byte;
        }
        if let Ok(file) = open(&bytes) {
            let _ = dump(&file);
            let _ = check(&file);
        }
    }
}
