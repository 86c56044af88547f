//! The rules that a database's revisioned records obey, checked one record after the other in their order.
//!
//! After the compact revision nothing is missing: revisions follow each other without a gap, subs from 0 on, and of each key the
//! versions count from 1 at its creation. At or before it only what a reader sees is kept, and an interrupted compaction may have
//! left more; what is there must fit together all the same.
//!
//! Not here: where the records come from (a database, `crate::check`; a snapshot file, `crate::bolt::verify`).

use std::collections::HashMap;

use ballast_api::mvccpb::KeyValue;
use bytes::Bytes;
use prost::Message;

use crate::mvcc::revision::Revision;

/// What was seen so far.
#[derive(Debug)]
pub struct History {
    /// Up to here records may be missing; -1 when nothing was ever compacted.
    compact_revision: i64,
    last: Option<Revision>,
    keys: HashMap<Bytes, Newest>,
    records: u64,
}

/// A key's newest record.
#[derive(Clone, Copy, Debug)]
pub struct Newest {
    pub revision: Revision,
    pub tombstone: bool,
    pub create: i64,
    pub version: i64,
    pub lease: i64,
}

impl History {
    pub fn new(compact_revision: i64) -> Self {
        Self {
            compact_revision,
            last: None,
            keys: HashMap::new(),
            records: 0,
        }
    }

    pub fn records(&self) -> u64 {
        self.records
    }

    /// The revision that a store of these records is at. (etcd's is 1 before the first write.)
    pub fn revision(&self) -> i64 {
        let last = self.last.map_or(0, |last| last.main);
        last.max(self.compact_revision).max(1)
    }

    /// Keys with their newest record, those that live, in no order.
    pub fn live(&self) -> impl Iterator<Item = (&Bytes, &Newest)> {
        self.keys.iter().filter(|(_, newest)| !newest.tombstone)
    }

    /// Takes the next record. The error says what is wrong with it; it is taken as it is then, so that one fault is told once.
    /// `key` is etcd's: without our table's prefix.
    pub fn record(&mut self, key: &[u8], value: &[u8]) -> Result<(), String> {
        let (revision, tombstone) =
            Revision::from_bytes(key).ok_or("its key is no revision".to_owned())?;
        self.records += 1;
        let order = self.check_order(revision);
        self.last = Some(revision);
        let kv = KeyValue::decode(value).map_err(|error| error.to_string())?;
        if value.is_empty() && !tombstone {
            // A restore that bumped the revision left it there; it is nobody's.
            return order;
        }
        let newest = Newest {
            revision,
            tombstone,
            create: kv.create_revision,
            version: kv.version,
            lease: kv.lease,
        };
        let own = check_own(&kv, newest);
        // A slice of the page would keep the page.
        let before = self.keys.insert(Bytes::copy_from_slice(&kv.key), newest);
        let story = match before {
            Some(before) => check_successor(before, newest),
            None if revision.main > self.compact_revision => check_first(newest),
            None => Ok(()),
        };
        order.and(own).and(story)
    }

    fn check_order(&self, revision: Revision) -> Result<(), String> {
        let complete_from = self.compact_revision.max(1);
        let last = self
            .last
            .unwrap_or(Revision::new(i64::MIN, 0))
            .max(Revision::new(complete_from, i64::MAX));
        if self.last.is_some_and(|last| revision <= last) {
            return Err("it stands behind a later one".to_owned());
        }
        if revision.main <= complete_from {
            return Ok(());
        }
        let follows = if revision.main == last.main {
            revision.sub == last.sub + 1
        } else {
            revision.main == last.main + 1 && revision.sub == 0
        };
        if follows {
            return Ok(());
        }
        Err(format!(
            "the records between {} and it are missing",
            last.main
        ))
    }
}

/// What a record says of itself.
fn check_own(kv: &KeyValue, newest: Newest) -> Result<(), String> {
    let main = newest.revision.main;
    if kv.key.is_empty() {
        return Err("it has no key".to_owned());
    }
    if newest.tombstone {
        return Ok(());
    }
    if kv.mod_revision != main {
        return Err(format!("its value says mod revision {}", kv.mod_revision));
    }
    let fits = kv.version >= 1
        && (1..=main).contains(&kv.create_revision)
        && (kv.version > 1 || kv.create_revision == main);
    if !fits {
        let (create, version) = (kv.create_revision, kv.version);
        return Err(format!(
            "its value says create revision {create} and version {version}"
        ));
    }
    Ok(())
}

fn check_first(newest: Newest) -> Result<(), String> {
    if newest.tombstone {
        return Err("it deletes a key that is not there".to_owned());
    }
    if newest.version != 1 {
        return Err(format!(
            "its value says version {}, and no earlier one is there",
            newest.version
        ));
    }
    Ok(())
}

fn check_successor(before: Newest, newest: Newest) -> Result<(), String> {
    let fits = match (before.tombstone, newest.tombstone) {
        (true, _) => return check_first(newest),
        (false, true) => true,
        (false, false) => newest.version == before.version + 1 && newest.create == before.create,
    };
    if fits {
        return Ok(());
    }
    Err(format!(
        "its value says create revision {} and version {}; the key's record before says {} and {}",
        newest.create, newest.version, before.create, before.version
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str, main: i64, create: i64, version: i64) -> (Vec<u8>, Vec<u8>) {
        let kv = KeyValue {
            key: Bytes::copy_from_slice(key.as_bytes()),
            create_revision: create,
            mod_revision: main,
            version,
            ..KeyValue::default()
        };
        (
            Revision::new(main, 0).to_bytes().to_vec(),
            kv.encode_to_vec(),
        )
    }

    fn delete(key: &str, main: i64) -> (Vec<u8>, Vec<u8>) {
        let kv = KeyValue {
            key: Bytes::copy_from_slice(key.as_bytes()),
            ..KeyValue::default()
        };
        let mut at = Revision::new(main, 0).to_bytes().to_vec();
        at.push(b't');
        (at, kv.encode_to_vec())
    }

    /// What is found wrong, in order.
    fn check(compact_revision: i64, records: &[(Vec<u8>, Vec<u8>)]) -> Vec<String> {
        let mut history = History::new(compact_revision);
        records
            .iter()
            .filter_map(|(key, value)| history.record(key, value).err())
            .collect()
    }

    #[test]
    fn a_sound_history_has_nothing_wrong() {
        let whole = [
            put("a", 2, 2, 1),
            put("a", 3, 2, 2),
            delete("a", 4),
            put("a", 5, 5, 1),
        ];
        assert_eq!(check(-1, &whole), [""; 0]);
        // Compacted at 3: what was before is gone.
        assert_eq!(check(3, &whole[1..]), [""; 0]);
        // A compaction at 5 was interrupted.
        assert_eq!(check(5, &whole[1..]), [""; 0]);
        assert_eq!(check(5, &whole[3..]), [""; 0]);
        assert_eq!(check(9, &[]), [""; 0]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let bump = (Revision::new(3, 0).to_bytes().to_vec(), Vec::new());
        for (compact, records, what) in [
            (-1, vec![put("a", 3, 3, 1)], "between 1 and it are missing"),
            (
                -1,
                vec![put("a", 2, 2, 1), put("b", 4, 4, 1)],
                "between 2 and it are missing",
            ),
            (
                5,
                vec![put("a", 5, 5, 1), put("b", 4, 4, 1)],
                "stands behind a later one",
            ),
            (-1, vec![put("a", 2, 2, 2)], "no earlier one is there"),
            (
                -1,
                vec![put("a", 2, 1, 1)],
                "create revision 1 and version 1",
            ),
            (
                -1,
                vec![put("a", 2, 3, 2)],
                "create revision 3 and version 2",
            ),
            (-1, vec![delete("a", 2)], "not there"),
            (
                -1,
                vec![put("a", 2, 2, 1), put("a", 3, 2, 3)],
                "before says 2 and 1",
            ),
            (
                9,
                vec![put("a", 8, 2, 3), put("a", 9, 3, 4)],
                "before says 2 and 3",
            ),
            (
                -1,
                vec![
                    put("a", 2, 2, 1),
                    (put("a", 3, 2, 2).0, put("a", 4, 2, 2).1),
                ],
                "mod revision 4",
            ),
            (-1, vec![put("", 2, 2, 1)], "no key"),
            (-1, vec![(b"short".to_vec(), vec![])], "no revision"),
            (-1, vec![(put("a", 2, 2, 1).0, vec![0xff])], "varint"),
            (
                -1,
                vec![put("a", 2, 2, 1), bump.clone(), bump],
                "behind a later",
            ),
        ] {
            let found = check(compact, &records);
            assert_eq!(found.len(), 1, "{what}: {found:?}");
            assert!(found[0].contains(what), "{what}: {found:?}");
        }
    }
}
