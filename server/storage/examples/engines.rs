//! Measures the store on one engine: `cargo run --release -p ballast-storage --example engines -- redb|sled [keys]`. docs/bench.md section E.
//!
//! Nothing is kept in memory beside the index and the engine's own cache, so that reads are the engine's. CPU, memory and bytes written are
//! those of the whole process; run one engine a process.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a tool for developers"
)]

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ballast_storage::backend::Kind;
use ballast_storage::mvcc::{Pace, RangeOptions, Store, StoreOptions};
use ballast_storage::{LogPosition, clock};

const VALUE_BYTES: usize = 1024;
/// Entries between two waits for the engine, as a log that is synced now and then.
const BURST: usize = 1000;

fn field(path: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(path).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    let mut words = line.split_whitespace();
    words.nth(1).unwrap().parse().unwrap()
}

fn cpu_ms() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = text.rsplit(") ").next().unwrap().split(' ').collect();
    (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()) * 10
}

/// Runs `work`, and prints a line: wall and CPU time an operation, operations a second, MiB written, the peak of memory.
fn row<T>(what: &str, ops: usize, work: impl FnOnce() -> T) -> T {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let (started, cpu) = (clock::now(), cpu_ms());
    let written = field("/proc/self/io", "write_bytes:");
    let out = work();
    let wall = started.elapsed();
    println!(
        "{what:34} {:8.1} ms {:9.0} /s {:8.2} us CPU/op {:7} MiB written {:6} MiB peak",
        wall.as_secs_f64() * 1000.0,
        ops as f64 / wall.as_secs_f64(),
        (cpu_ms() - cpu) as f64 * 1000.0 / ops as f64,
        (field("/proc/self/io", "write_bytes:") - written) >> 20,
        field("/proc/self/status", "VmHWM:") >> 10,
    );
    out
}

fn key(i: usize) -> String {
    // Spread, so that neighbours in time are not neighbours in order.
    let spread = i.wrapping_mul(0x9E37_79B1) % 100_000_007;
    format!("/registry/pods/ns-{:03}/pod-{spread:08}", i % 97)
}

fn options(dir: &Path, engine: Kind) -> StoreOptions {
    StoreOptions {
        dir: dir.to_owned(),
        engine,
        value_cache_bytes: 0,
        engine_cache_bytes: 64 << 20,
        compaction_batch_limit: 1000,
        compaction_sleep: Duration::from_millis(10),
        batch_interval: Duration::from_millis(100),
        batch_limit: 10_000,
    }
}

fn put_all(store: &Store, keys: usize) {
    for i in 0..keys {
        let index = store.applied().index + 1;
        let mut txn = store.begin(LogPosition { term: 1, index });
        // No two alike, and nothing for a compressor.
        let mut value = vec![0_u8; VALUE_BYTES];
        let mut x = index.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for chunk in value.chunks_mut(8) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            chunk.copy_from_slice(&x.to_be_bytes());
        }
        txn.put(key(i).into(), value.into(), 0).unwrap();
        txn.commit();
        if i.is_multiple_of(BURST) {
            store.set_log_synced(index);
        }
    }
    store.set_log_synced(u64::MAX);
    store.flush().unwrap();
}

fn get(store: &Store, i: usize) {
    let key = key(i);
    let view = store.view();
    let found = view.range(key.as_bytes(), b"", &RangeOptions::default());
    assert_eq!(found.unwrap().kvs.len(), 1);
}

/// A get a millisecond while `work` runs: prints how long they took.
fn with_reader(what: &str, store: &Store, keys: usize, work: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    let reads = AtomicU64::new(0);
    let mut micros = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut micros = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let i = reads.fetch_add(1, Ordering::Relaxed) as usize * 7_919 % keys;
                let started = clock::now();
                get(store, i);
                micros.push(started.elapsed().as_micros() as u64);
                std::thread::sleep(Duration::from_millis(1));
            }
            micros
        });
        work();
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    micros.sort_unstable();
    let at = |share: f64| micros[((micros.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
    println!(
        "{what:34} p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms, slowest {:.2} ms of {}",
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0),
        micros.len()
    );
}

fn main() {
    let mut args = std::env::args().skip(1);
    let engine = args.next().and_then(|name| Kind::named(&name));
    let engine = engine.expect("an engine's name comes first");
    let keys = args.next().map_or(300_000, |text| text.parse().unwrap());
    let dir = tempfile::tempdir_in(".").unwrap();
    let open = || Store::open(options(dir.path(), engine)).unwrap();
    println!("{engine}, {keys} keys of {VALUE_BYTES} bytes");
    let store = row("open, new", 1, open);
    row("put, new keys", keys, || put_all(&store, keys));
    row("put, all again", keys, || {
        with_reader("  gets meanwhile", &store, keys, || put_all(&store, keys));
    });
    println!("on disk after it: {} MiB", store.sizes().allocated >> 20);
    row("get, one thread", keys / 4, || {
        for i in 0..keys / 4 {
            get(&store, i * 7_919 % keys);
        }
    });
    row("read all (HashKV)", 2 * keys, || store.hash_kv(0).unwrap());
    row("compact half of it", keys, || {
        with_reader("  gets meanwhile", &store, keys, || {
            let index = store.applied().index + 1;
            let mut txn = store.begin(LogPosition { term: 1, index });
            let compaction = txn.compact(txn.revision()).unwrap();
            txn.commit();
            compaction.wait().unwrap();
        });
    });
    row("defragment", keys, || {
        with_reader("  gets meanwhile", &store, keys, || {
            store.defragment(Pace::Background).unwrap();
        });
    });
    println!("on disk after it: {} MiB", store.sizes().allocated >> 20);
    row("close", 1, || store.close().unwrap());
    drop(store);
    let store = row("open", 1, open);
    store.set_log_synced(u64::MAX);
    put_all(&store, keys / 100);
    drop(store); // as a crash
    let store = row("open after a crash", 1, open);
    store.close().unwrap();
    row("open once more", 1, open).close().unwrap();
}
