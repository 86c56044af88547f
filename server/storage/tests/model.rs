//! Random transactions, compactions, crashes and defragmentations against a naive map.
//!
//! The seed is printed; `BALLAST_SEED=n` runs one again, `BALLAST_ROUNDS=n` runs more.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test may panic, and says its seed"
)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ballast_storage::backend::Kind;
use ballast_storage::mvcc::{EventKind, Pace, RangeOptions, Store, StoreOptions};
use ballast_storage::{LogPosition, MvccError, ReadError};
use rand::prelude::*;
use rand::rngs::StdRng;

/// One write within an entry.
#[derive(Clone, Debug)]
enum Write {
    Put {
        key: String,
        value: String,
        lease: i64,
    },
    Delete {
        from: String,
        to: String,
    },
}

#[derive(Clone, Debug)]
enum Entry {
    Txn(Vec<Write>),
    Compact(i64),
}

#[derive(Clone, Debug, PartialEq)]
struct Kv {
    value: String,
    create: i64,
    modified: i64,
    version: i64,
    lease: i64,
}

#[derive(Clone, Debug, PartialEq)]
struct ModelEvent {
    revision: i64,
    put: bool,
    key: String,
    value: String,
    prev: Option<String>,
}

/// All states there ever were, by revision.
struct Model {
    states: Vec<BTreeMap<String, Kv>>,
    events: Vec<ModelEvent>,
    compact_revision: i64,
    log: Vec<Entry>,
}

impl Model {
    fn revision(&self) -> i64 {
        self.states.len() as i64 - 1
    }

    fn at(&self, revision: i64) -> &BTreeMap<String, Kv> {
        &self.states[revision as usize]
    }

    fn apply(&mut self, entry: &Entry) {
        self.log.push(entry.clone());
        match entry {
            Entry::Compact(revision) => {
                if *revision > self.compact_revision && *revision <= self.revision() {
                    self.compact_revision = *revision;
                }
            }
            Entry::Txn(writes) => self.write(writes),
        }
    }

    fn write(&mut self, writes: &[Write]) {
        let revision = self.revision() + 1;
        let mut state = self.at(revision - 1).clone();
        let before = self.events.len();
        for write in writes {
            match write {
                Write::Put { key, value, lease } => {
                    let old = state.get(key);
                    self.events.push(ModelEvent {
                        revision,
                        put: true,
                        key: key.clone(),
                        value: value.clone(),
                        prev: old.map(|kv| kv.value.clone()),
                    });
                    let kv = Kv {
                        value: value.clone(),
                        create: old.map_or(revision, |kv| kv.create),
                        modified: revision,
                        version: old.map_or(1, |kv| kv.version + 1),
                        lease: *lease,
                    };
                    state.insert(key.clone(), kv);
                }
                Write::Delete { from, to } => {
                    let gone: Vec<String> = state
                        .range(from.clone()..to.clone().max(from.clone()))
                        .map(|(k, _)| k.clone())
                        .collect();
                    for key in gone {
                        let old = state.remove(&key).unwrap();
                        self.events.push(ModelEvent {
                            revision,
                            put: false,
                            key,
                            value: String::new(),
                            prev: Some(old.value),
                        });
                    }
                }
            }
        }
        if self.events.len() > before {
            self.states.push(state);
        }
    }
}

struct Run {
    rng: StdRng,
    model: Model,
    store: Arc<Store>,
    options: StoreOptions,
    /// Each start names one of them: a defragmentation converts.
    engines: &'static [Kind],
}

fn open(options: &StoreOptions) -> Arc<Store> {
    Store::open(options.clone()).unwrap()
}

impl Run {
    fn new(seed: u64, dir: &Path, engines: &'static [Kind]) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let options = StoreOptions {
            dir: dir.to_owned(),
            engine: engines[0],
            // Sometimes everything is cached, sometimes nothing.
            value_cache_bytes: [0, 4 << 10, 1 << 20][rng.random_range(0..3)],
            engine_cache_bytes: 1 << 20,
            compaction_batch_limit: rng.random_range(1..40),
            compaction_sleep: Duration::from_micros(rng.random_range(0..300)),
            batch_interval: Duration::from_millis(rng.random_range(0..4)),
            batch_limit: rng.random_range(1..50),
        };
        let model = Model {
            states: vec![BTreeMap::new(), BTreeMap::new()],
            events: Vec::new(),
            compact_revision: -1,
            log: Vec::new(),
        };
        let store = open(&options);
        Self {
            rng,
            model,
            store,
            options,
            engines,
        }
    }

    fn key(&mut self) -> String {
        format!("k{:02}", self.rng.random_range(0..30))
    }

    fn entry(&mut self) -> Entry {
        if self.rng.random_ratio(1, 25) {
            let head = self.model.revision();
            return Entry::Compact(self.rng.random_range((head - 20).max(-1)..=head + 1));
        }
        let count = [0, 1, 1, 1, 1, 2, 5][self.rng.random_range(0..7)];
        let mut touched: Vec<String> = Vec::new();
        let mut writes = Vec::new();
        for _ in 0..count {
            let key = self.key();
            if touched.contains(&key) {
                continue; // etcd refuses a transaction that writes a key twice
            }
            if writes.is_empty() && self.rng.random_ratio(1, 4) {
                let to = if self.rng.random() {
                    format!("{key}\0")
                } else {
                    self.key()
                };
                return Entry::Txn(vec![Write::Delete { from: key, to }]);
            }
            touched.push(key.clone());
            let value =
                "v".repeat(self.rng.random_range(0..200)) + &self.model.log.len().to_string();
            let lease = self.rng.random_range(0..3);
            writes.push(Write::Put { key, value, lease });
        }
        Entry::Txn(writes)
    }

    /// What the apply path does with entry number `index` of the log.
    fn apply(&self, index: usize) {
        let mut txn = self.store.begin(LogPosition {
            term: 1,
            index: index as u64,
        });
        match &self.model.log[index - 1] {
            Entry::Compact(revision) => drop(txn.compact(*revision)),
            Entry::Txn(writes) => {
                for write in writes {
                    match write {
                        Write::Put { key, value, lease } => {
                            let (key, value) = (key.clone().into(), value.clone().into());
                            txn.put(key, value, *lease).unwrap();
                        }
                        Write::Delete { from, to } => {
                            txn.delete_range(from.as_bytes(), to.as_bytes()).unwrap();
                        }
                    }
                }
            }
        }
        txn.commit();
    }

    fn step(&mut self) {
        let entry = self.entry();
        self.model.apply(&entry);
        let index = self.model.log.len();
        self.apply(index);
        if self.rng.random_ratio(1, 3) {
            self.store.set_log_synced(index as u64);
        }
        match self.rng.random_range(0..200) {
            0 => self.reopen(true),
            1 | 2 => self.reopen(false),
            3 => {
                self.store.defragment(Pace::Background).unwrap();
                assert_eq!(self.store.engine(), self.options.engine);
            }
            4..=12 => self.check(),
            _ => {}
        }
    }

    /// Closes, or drops as a crash would, and applies from the log what did not reach the engine.
    fn reopen(&mut self, clean: bool) {
        let synced = self.model.log.len() as u64;
        if clean {
            self.store.set_log_synced(synced);
            self.store.close().unwrap();
        }
        let before = self.store.durable();
        // The old store must let go of the file first.
        let scratch = tempfile::tempdir().unwrap();
        self.store = open(&StoreOptions {
            dir: scratch.path().to_owned(),
            ..self.options.clone()
        });
        self.options.engine = self.engines[self.rng.random_range(0..self.engines.len())];
        self.store = open(&self.options);
        let applied = self.store.applied();
        assert!(applied >= before, "the engine lost what it had");
        assert!(!clean || applied.index == synced);
        for index in applied.index as usize + 1..=self.model.log.len() {
            self.apply(index);
        }
        self.store.set_log_synced(synced);
        self.check();
    }

    fn check(&mut self) {
        let view = self.store.view();
        let head = self.model.revision();
        assert_eq!(view.revision(), head);
        assert_eq!(view.compact_revision(), self.model.compact_revision);
        let oldest = self.model.compact_revision.max(1);
        for revision in [oldest, self.rng.random_range(oldest..=head), head, 0] {
            self.check_range(revision);
            self.check_events(if revision == 0 { head } else { revision });
        }
        if oldest > 1 {
            let options = RangeOptions {
                revision: oldest - 1,
                ..RangeOptions::default()
            };
            let answer = view.range(b"k", b"l", &options);
            assert!(matches!(
                answer,
                Err(ReadError::Mvcc(MvccError::Compacted { .. }))
            ));
        }
        // However far a compaction is. 0 would be answered by what a compaction there left, if there was one.
        let hash = || self.store.hash_kv(-1).unwrap().hash;
        assert_eq!(hash(), hash());
    }

    fn check_range(&mut self, revision: i64) {
        let (from, to) = (self.key(), self.key());
        let limit = self.rng.random_range(0..10);
        let keys_only = self.rng.random();
        let options = RangeOptions {
            revision,
            limit,
            keys_only,
            count_only: false,
            ..RangeOptions::default()
        };
        let result = self
            .store
            .view()
            .range(from.as_bytes(), to.as_bytes(), &options)
            .unwrap();
        let at = if revision == 0 {
            self.model.revision()
        } else {
            revision
        };
        let state = self.model.at(at);
        let inside: Vec<_> = state.range(from.clone()..to.max(from)).collect();
        assert_eq!(result.count, inside.len() as i64, "count at {revision}");
        let expected: Vec<_> = inside
            .into_iter()
            .take(if limit == 0 { usize::MAX } else { limit })
            .map(|(key, kv)| {
                let mut kv = kv.clone();
                if keys_only {
                    kv.value.clear();
                    kv.lease = 0;
                }
                (key.clone(), kv)
            })
            .collect();
        let found: Vec<_> = result
            .kvs
            .iter()
            .map(|kv| {
                let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
                let found = Kv {
                    value: text(&kv.value),
                    create: kv.create_revision,
                    modified: kv.mod_revision,
                    version: kv.version,
                    lease: kv.lease,
                };
                (text(&kv.key), found)
            })
            .collect();
        assert_eq!(found, expected, "range at {revision}");
    }

    fn check_events(&mut self, start: i64) {
        let view = self.store.view();
        let bytes_max = self.rng.random_range(1..2000);
        let mut next = start;
        let mut found = Vec::new();
        while next <= view.revision() {
            let (events, further) = view.events(next, bytes_max).unwrap();
            assert!(further > next);
            next = further;
            for event in events {
                let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
                let prev = event
                    .prev
                    .and_then(|revision| view.record(revision).unwrap());
                found.push(ModelEvent {
                    revision: event.kv.mod_revision,
                    put: event.kind == EventKind::Put,
                    key: text(&event.kv.key),
                    value: text(&event.kv.value),
                    prev: prev.map(|kv| text(&kv.value)),
                });
            }
        }
        let mut expected: Vec<_> = self
            .model
            .events
            .iter()
            .filter(|event| event.revision >= start)
            .cloned()
            .collect();
        assert_eq!(found.len(), expected.len(), "events from {start}");
        for (found, expected) in found.iter().zip(&mut expected) {
            // A compaction may have taken what a put replaced.
            if found.prev.is_none()
                && self.model.compact_revision >= start.min(expected.revision) - 1
            {
                expected.prev = None;
            }
            assert_eq!(found, expected, "events from {start}");
        }
    }
}

fn random_histories_match_a_naive_map(engines: &'static [Kind]) {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().unwrap())
    };
    let rounds = number("BALLAST_ROUNDS").unwrap_or(3);
    for _ in 0..rounds {
        let seed = number("BALLAST_SEED").unwrap_or_else(|| rand::rng().random());
        eprintln!("seed {seed}");
        let dir = tempfile::tempdir().unwrap();
        let mut run = Run::new(seed, dir.path(), engines);
        for _ in 0..600 {
            run.step();
        }
        run.reopen(true);
    }
}

#[test]
fn random_histories_match_a_naive_map_on_redb() {
    random_histories_match_a_naive_map(&[Kind::Redb]);
}

#[test]
fn random_histories_match_a_naive_map_on_sled() {
    random_histories_match_a_naive_map(&[Kind::Sled]);
}

#[test]
fn random_histories_match_a_naive_map_while_the_engine_changes() {
    random_histories_match_a_naive_map(&Kind::ALL);
}
