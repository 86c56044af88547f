//! Times the store's paths alone: `cargo run --release -p ballast-storage --example paths -- [keys [engine]]`.
//!
//! CPU is that of the whole process, committer included.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a tool for developers"
)]

use std::time::{Duration, Instant};

use ballast_storage::backend::Kind;
use ballast_storage::mvcc::tree::{Live, Tree};
use ballast_storage::mvcc::{Pace, RangeOptions, Store, StoreOptions};
use ballast_storage::{LogPosition, clock};

fn cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = text.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

fn timed(what: &str, ops: usize, work: impl FnOnce()) {
    let (started, cpu_before): (Instant, _) = (clock::now(), cpu());
    work();
    let (wall, cpu) = (started.elapsed(), cpu().checked_sub(cpu_before).unwrap());
    let per = |time: Duration| time.as_nanos() as f64 / ops as f64 / 1000.0;
    println!(
        "{what:40} {:9.3} us/op  {:9.3} us CPU/op",
        per(wall),
        per(cpu)
    );
}

#[derive(Clone)]
struct Entry([u64; 6]);

impl Live for Entry {
    fn is_live(&self) -> bool {
        self.0[0] != u64::MAX
    }
}

fn key(i: usize) -> String {
    // Spread, so that neighbours in time are not neighbours in order.
    format!(
        "/registry/pods/ns-{:03}/pod-{:08}",
        i % 97,
        i.wrapping_mul(0x9E37_79B1) % 100_000_007
    )
}

fn tree(keys: usize) {
    let mut tree = Tree::default();
    let names: Vec<String> = (0..keys).map(key).collect();
    timed("tree: insert, nothing shared", keys, || {
        for name in &names {
            tree.upsert(name.as_bytes(), |_| Entry([1; 6]));
        }
    });
    let overwrites = keys / 4;
    timed("tree: overwrite, a snapshot each", overwrites, || {
        let mut published = tree.clone();
        for name in names.iter().step_by(4) {
            tree.upsert(name.as_bytes(), |_| Entry([2; 6]));
            published = tree.clone();
        }
        drop(published);
    });
    timed("tree: get", keys, || {
        assert!(names.iter().all(|name| tree.get(name.as_bytes()).is_some()));
    });
    timed("tree: count to a key", keys, || {
        let sum: usize = names
            .iter()
            .map(|name| tree.live_before(name.as_bytes()))
            .sum();
        assert!(sum > 0);
    });
    timed("tree: scan", tree.len(), || {
        assert_eq!(
            tree.live_from(b"")
                .filter(|(key, _)| !key.is_empty())
                .count(),
            tree.len()
        );
    });
}

fn store(keys: usize, engine: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let options = StoreOptions {
        dir: dir.path().to_owned(),
        engine,
        value_cache_bytes: 256 << 20,
        engine_cache_bytes: 64 << 20,
        compaction_batch_limit: 1000,
        compaction_sleep: Duration::from_millis(10),
        batch_interval: Duration::from_millis(100),
        batch_limit: 10_000,
    };
    let store = Store::open(options.clone()).unwrap();
    store.set_log_synced(u64::MAX);
    let value = vec![b'v'; 256];
    let mut index = 0;
    let mut put_all = |what: &str| {
        timed(what, keys, || {
            for i in 0..keys {
                index += 1;
                let mut txn = store.begin(LogPosition { term: 1, index });
                txn.put(key(i).into(), value.clone().into(), 0).unwrap();
                txn.commit();
            }
            store.flush().unwrap();
        });
    };
    put_all("store: put new, 256 bytes, flushed");
    put_all("store: put again");
    let view = store.view();
    timed("store: get", keys, || {
        for i in 0..keys {
            let got = store
                .view()
                .range(key(i).as_bytes(), b"", &RangeOptions::default())
                .unwrap();
            assert_eq!(got.count, 1);
        }
    });
    for (what, options) in [
        (
            "page of 500",
            RangeOptions {
                limit: 500,
                ..RangeOptions::default()
            },
        ),
        (
            "page of 500, 5000 revisions back",
            RangeOptions {
                limit: 500,
                revision: view.revision() - 5000,
                ..RangeOptions::default()
            },
        ),
        (
            "page of 500, keys only",
            RangeOptions {
                limit: 500,
                keys_only: true,
                ..RangeOptions::default()
            },
        ),
        (
            "count",
            RangeOptions {
                count_only: true,
                ..RangeOptions::default()
            },
        ),
    ] {
        timed(&format!("store: {what}"), 200, || {
            for _ in 0..200 {
                view.range(b"/registry/pods/", b"/registry/pods0", &options)
                    .unwrap();
            }
        });
    }
    timed("store: hash", 2 * keys, || {
        store.hash_kv(0).unwrap();
    });
    timed("store: compact", 2 * keys, || {
        let mut txn = store.begin(LogPosition {
            term: 1,
            index: 1 << 40,
        });
        let compaction = txn.compact(view.revision()).unwrap();
        txn.commit();
        compaction.wait().unwrap();
    });
    timed("store: defragment", keys, || {
        println!("{:?}", store.defragment(Pace::Background).unwrap());
    });
    store.close().unwrap();
    timed("store: open", keys, || drop(Store::open(options).unwrap()));
}

fn main() {
    let keys = std::env::args()
        .nth(1)
        .map_or(200_000, |text| text.parse().unwrap());
    let engine = std::env::args()
        .nth(2)
        .map_or_else(Kind::default, |name| Kind::named(&name).unwrap());
    tree(keys);
    store(keys, engine);
}
