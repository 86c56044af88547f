//! The rules of durability, against an engine in memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::backend::{EngineSize, Pairs, Tally};

/// Remembers its batches; fails when told to.
#[derive(Debug, Default)]
struct Memory {
    batches: Mutex<Vec<Batch>>,
    broken: AtomicBool,
}

impl Memory {
    fn contents(&self) -> BTreeMap<Bytes, Bytes> {
        let mut out = BTreeMap::new();
        for (key, value) in self
            .batches
            .lock()
            .iter()
            .flat_map(|batch| batch.ops.clone())
        {
            match value {
                Some(value) => drop(out.insert(key, value)),
                None => drop(out.remove(&key)),
            }
        }
        out
    }
}

impl Engine for Memory {
    fn write(&self, batch: &Batch) -> Result<(), StorageError> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(StorageError::Engine {
                op: "commit",
                path: "memory".into(),
                detail: "no space left".to_owned(),
            });
        }
        self.batches.lock().push(batch.clone());
        Ok(())
    }
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StorageError> {
        Ok(self.contents().get(key).cloned())
    }
    fn get_many(&self, keys: &[Bytes]) -> Result<Vec<Option<Bytes>>, StorageError> {
        keys.iter().map(|key| self.get(key)).collect()
    }
    fn scan(&self, _: &[u8], _: &[u8], _: usize) -> Result<Pairs, StorageError> {
        Ok(self.contents().into_iter().collect())
    }
    fn size(&self) -> Result<EngineSize, StorageError> {
        Ok(EngineSize::default())
    }
    fn tally(&self) -> Result<Option<Tally>, StorageError> {
        Ok(None)
    }
}

fn entry(index: u64) -> Pending {
    let kv = KeyValue {
        key: format!("k{index}").into(),
        ..KeyValue::default()
    };
    let record = |sub| PendingRecord {
        revision: Revision::new(index as i64 + 1, sub),
        tombstone: false,
        kv: Arc::new(kv.clone()),
    };
    Pending {
        position: LogPosition { term: 1, index },
        revision: index as i64 + 1,
        live_bytes: 0,
        records: vec![record(0), record(1)],
        ops: Vec::new(),
        bytes: 100,
    }
}

/// Runs `test` beside the committer's thread.
fn with_committer(limits: Limits, test: impl FnOnce(&Committer, &Memory)) {
    let engine = Arc::new(Memory::default());
    let committer = Committer::new(
        Arc::clone(&engine) as Arc<dyn Engine>,
        LogPosition::default(),
        limits,
    );
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| while committer.step(Wait::ForWork) {});
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&committer, &engine)));
        committer.abandon();
        thread.join().unwrap();
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
}

const LAZY: Limits = Limits {
    batch_interval: Duration::from_hours(1),
    batch_limit: 1_000_000,
};

#[test]
fn a_batch_says_how_far_it_goes_and_never_passes_the_synced_log() {
    with_committer(LAZY, |committer, engine| {
        for index in 1..=3 {
            committer.push(entry(index));
        }
        committer.set_log_synced(2);
        committer.wait_written(2).unwrap();
        assert_eq!(committer.durable(), LogPosition { term: 1, index: 2 });
        let contents = engine.contents();
        let applied = &contents[&Table::Meta.key(meta::APPLIED)[..]];
        assert_eq!(
            decode_position(applied),
            Some(LogPosition { term: 1, index: 2 })
        );
        assert_eq!(
            contents[&Table::Meta.key(meta::CURRENT_REVISION)[..]],
            3i64.to_be_bytes()[..]
        );
        assert_eq!(contents.keys().filter(|key| key[0] == b'k').count(), 4);
        // The third is still found in the overlay, the others are not.
        let found = committer.records(&[
            Revision::new(4, 1),
            Revision::new(3, 0),
            Revision::new(4, 2),
        ]);
        assert_eq!(
            found.iter().map(Option::is_some).collect::<Vec<_>>(),
            [true, false, false]
        );
        assert_eq!(committer.records_between(Revision::new(2, 0), 9).len(), 2);
        committer.set_log_synced(3);
        assert_eq!(committer.flush().unwrap().index, 3);
    });
}

#[test]
fn many_writes_do_not_wait_for_the_interval() {
    let limits = Limits {
        batch_limit: 10,
        ..LAZY
    };
    with_committer(limits, |committer, engine| {
        committer.set_log_synced(u64::MAX);
        let mut last = 0;
        for index in 1..=5 {
            last = committer.push(entry(index));
        }
        let mut state = committer.state.lock();
        while state.written < last {
            committer.progress.wait(&mut state);
        }
        assert!(!engine.batches.lock().is_empty());
    });
}

#[test]
fn a_failed_write_is_final_and_told_to_everyone() {
    with_committer(LAZY, |committer, engine| {
        let (told, hears) = std::sync::mpsc::channel();
        committer.on_failure(Box::new(move |error| told.send(error.to_string()).unwrap()));
        engine.broken.store(true, Ordering::Relaxed);
        committer.set_log_synced(u64::MAX);
        committer.push(entry(1));
        assert!(matches!(
            committer.flush(),
            Err(StorageError::Stopped { .. })
        ));
        assert!(hears.recv().unwrap().contains("no space left"));
        engine.broken.store(false, Ordering::Relaxed);
        committer.push(entry(2));
        assert!(committer.flush().is_err(), "nothing is tried again");
        assert!(committer.write_now(&Batch::default(), false).is_err());
        committer.wait_for_room(); // must not block a node that is stopping
        assert!(engine.batches.lock().is_empty());
        assert_eq!(committer.durable(), LogPosition::default());
    });
}

#[test]
fn too_much_pending_makes_the_writer_wait_until_it_is_written() {
    with_committer(LAZY, |committer, _| {
        let mut index = 0;
        while committer.state.lock().bytes <= PENDING_BYTES_MAX {
            index += 1;
            committer.push(Pending {
                bytes: 1 << 20,
                ..entry(index)
            });
        }
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| committer.wait_for_room());
            assert!(!writer.is_finished());
            committer.set_log_synced(u64::MAX);
            writer.join().unwrap();
        });
        assert!(committer.state.lock().bytes <= PENDING_BYTES_MAX);
    });
}

#[test]
fn who_follows_learns_every_key_written() {
    with_committer(LAZY, |committer, _| {
        committer.set_log_synced(u64::MAX);
        committer.between_batches(|follow, _| *follow = Some(Follow::default()));
        committer.push(entry(1));
        committer.flush().unwrap();
        let mut batch = Batch::default();
        batch.delete(b"gone".to_vec());
        committer.write_now(&batch, false).unwrap();
        let keys = committer
            .between_batches(|follow, _| follow.take())
            .unwrap()
            .keys;
        assert!(keys.contains(&Bytes::from_static(b"gone")));
        assert_eq!(keys.iter().filter(|key| key[0] == b'k').count(), 2);
    });
}

#[test]
fn without_a_thread_a_step_writes_what_may_go_and_calls_those_who_asked_for_it() {
    let engine = Arc::new(Memory::default());
    let committer = Committer::new(
        Arc::clone(&engine) as Arc<dyn Engine>,
        LogPosition::default(),
        LAZY,
    );
    let (told, hears) = std::sync::mpsc::channel();
    let ask = |what: &'static str| {
        let told = told.clone();
        committer.on_flushed(Box::new(move |result| {
            told.send((what, result.map(|at| at.index).ok())).unwrap();
        }));
    };
    ask("nothing waits");
    committer.push(entry(1));
    ask("the first");
    committer.push(entry(2));
    ask("both");
    assert!(committer.step(Wait::No), "the log is not synced");
    committer.set_log_synced(1);
    assert!(committer.step(Wait::No));
    assert_eq!(engine.batches.lock().len(), 1);
    committer.abandon();
    assert!(!committer.step(Wait::No));
    ask("too late");
    let heard: Vec<_> = hears.try_iter().collect();
    assert_eq!(
        heard,
        [
            ("nothing waits", Some(0)),
            ("the first", Some(1)),
            ("both", None),
            ("too late", None)
        ]
    );
}
