//! Many watchers join at random revisions while a writer writes, deletes and compacts; some read late. Each must be told
//! exactly the events of its range, in order, or that its history is gone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::harness::{Client, PATIENCE, Server, told, watch_range};

type Told = (String, i64, bool);

/// What was written, as the model of all streams.
#[derive(Default)]
struct Script {
    events: Mutex<Vec<Told>>,
    head: AtomicI64,
    finished: AtomicBool,
}

struct Plan {
    revisions: i64,
    value: Vec<u8>,
    compact_every: i64,
}

fn key(rng: &mut StdRng) -> String {
    format!("k{:02}", rng.random_range(0..20))
}

fn write_all(server: &Server, script: &Script, plan: &Plan, mut rng: StdRng) {
    for n in 0..plan.revisions {
        let committed = server.write(|txn| {
            let mut keys: Vec<String> =
                (0..rng.random_range(1..4)).map(|_| key(&mut rng)).collect();
            keys.sort();
            keys.dedup();
            for key in keys {
                if rng.random_bool(0.2) {
                    txn.delete_range(key.as_bytes(), b"").unwrap();
                } else {
                    txn.put(key.into(), plan.value.clone().into(), 0).unwrap();
                }
            }
        });
        script
            .events
            .lock()
            .extend(committed.events.iter().map(|event| {
                let key = String::from_utf8(event.kv.key.to_vec()).unwrap();
                (key, event.kv.mod_revision, event.kv.version == 0)
            }));
        script.head.store(committed.revision, Ordering::SeqCst);
        if plan.compact_every > 0 && n % plan.compact_every == plan.compact_every - 1 {
            let at = committed.revision - rng.random_range(0..plan.compact_every / 2);
            server.write(|txn| {
                txn.compact(at).unwrap();
            });
        }
    }
    script.finished.store(true, Ordering::SeqCst);
}

/// One watcher's request and what it has been told.
struct Seen {
    request: pb::WatchCreateRequest,
    /// 0 until created, then the first revision it is owed.
    from: i64,
    events: Vec<Told>,
    compacted: i64,
}

fn random_request(rng: &mut StdRng, head: i64) -> pb::WatchCreateRequest {
    let (key, end) = match rng.random_range(0..4) {
        0 => (key(rng), String::new()),
        1 => ("k".to_owned(), "l".to_owned()),
        2 => (key(rng), "\0".to_owned()),
        _ => {
            let key = key(rng);
            let end = format!("{key}~");
            (key, end)
        }
    };
    let start = match rng.random_range(0..4) {
        0 => 0,
        1 => head + rng.random_range(0..20),
        _ => rng.random_range(1..head + 2),
    };
    pb::WatchCreateRequest {
        prev_kv: rng.random_bool(0.3),
        fragment: rng.random_bool(0.3),
        ..watch_range(&key, &end, start)
    }
}

/// Opens watchers as the writer moves on, then reads until all that is owed has come.
async fn follow(mut client: Client, script: &Script, late: bool, mut rng: StdRng) -> Vec<Seen> {
    let mut watchers: HashMap<i64, Seen> = HashMap::new();
    for id in 0..rng.random_range(1..12) {
        let head = script.head.load(Ordering::SeqCst).max(1);
        let request = random_request(&mut rng, head);
        client.create(request.clone());
        let seen = Seen {
            request,
            from: 0,
            events: Vec::new(),
            compacted: 0,
        };
        watchers.insert(id, seen);
        // Some join at once, some only when the writer has gone on.
        let wait_for = head + rng.random_range(0..2) * rng.random_range(0..200);
        while script.head.load(Ordering::SeqCst) < wait_for
            && !script.finished.load(Ordering::SeqCst)
        {
            tokio::task::yield_now().await;
        }
        if !late {
            take(&mut client, &mut watchers).await;
        }
    }
    while late && !script.finished.load(Ordering::SeqCst) {
        tokio::task::yield_now().await;
    }
    let all_told = async {
        while !watchers.values().all(|seen| done(seen, script)) {
            take(&mut client, &mut watchers).await;
        }
    };
    tokio::time::timeout(PATIENCE, all_told)
        .await
        .expect("everything owed comes");
    watchers.into_values().collect()
}

fn done(seen: &Seen, script: &Script) -> bool {
    seen.compacted > 0
        || script.finished.load(Ordering::SeqCst)
            && seen.from > 0
            && seen.events.len() >= owed(seen, &script.events.lock()).len()
}

fn owed(seen: &Seen, all: &[Told]) -> Vec<Told> {
    let (start, end) = (&seen.request.key, &seen.request.range_end);
    all.iter()
        .filter(|(key, revision, _)| {
            let key = key.as_bytes();
            let inside = if end.is_empty() {
                key == start
            } else {
                key >= start.as_ref() && (end.as_ref() == [0] || key < end.as_ref())
            };
            inside && *revision >= seen.from
        })
        .cloned()
        .collect()
}

/// Takes a response if one comes soon.
async fn take(client: &mut Client, watchers: &mut HashMap<i64, Seen>) {
    let Ok(response) = tokio::time::timeout(Duration::from_millis(20), client.next()).await else {
        return;
    };
    let seen = watchers.get_mut(&response.watch_id).unwrap();
    if response.created {
        assert!(!response.canceled);
        seen.from = match seen.request.start_revision {
            0 => response.header.unwrap().revision + 1,
            start => start,
        };
        return;
    }
    if response.canceled {
        seen.compacted = response.compact_revision;
        assert!(seen.compacted > 0);
        return;
    }
    let events = told(&response);
    assert!(response.header.unwrap().revision >= events.last().unwrap().1);
    for event in &response.events {
        let kv = event.kv.as_ref().unwrap();
        let replaced = event.r#type == 1 || kv.version > 1;
        if let Some(prev) = &event.prev_kv {
            assert!(seen.request.prev_kv && replaced && prev.key == kv.key);
            assert!(prev.mod_revision < kv.mod_revision);
        }
    }
    seen.events.extend(events);
}

fn check(seen: &Seen, all: &[Told]) {
    let owed = owed(seen, all);
    if seen.compacted == 0 {
        assert_eq!(seen.events, owed, "{:?}", seen.request);
        return;
    }
    assert_eq!(seen.events, owed[..seen.events.len()], "{:?}", seen.request);
    // Who was cancelled had not yet been told something below the compacted revision, or asked for less.
    let next = owed.get(seen.events.len()).map_or(seen.from, |e| e.1);
    assert!(seen.from.min(next) < seen.compacted);
}

fn run(seed: u64, plan: &Plan, streams: u64, late_share: f64) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let server = Server::start();
    let script = Script::default();
    let mut rng = StdRng::seed_from_u64(seed);
    std::thread::scope(|scope| {
        let writer_rng = StdRng::seed_from_u64(rng.random());
        let (server, script) = (&server, &script);
        let writer = scope.spawn(move || write_all(server, script, plan, writer_rng));
        let followers: Vec<_> = (0..streams)
            .map(|_| {
                let rng = StdRng::seed_from_u64(rng.random());
                let late = rng.clone().random_bool(late_share);
                let handle = runtime.handle().clone();
                scope.spawn(move || {
                    let _inside = handle.enter();
                    let client = server.connect();
                    handle.block_on(follow(client, script, late, rng))
                })
            })
            .collect();
        writer.join().unwrap();
        for follower in followers {
            for seen in follower.join().unwrap() {
                check(&seen, &script.events.lock());
            }
        }
    });
}

#[test]
fn random_joins_while_writing() {
    for seed in 0..4 {
        run(
            seed,
            &Plan {
                revisions: 2500,
                value: vec![1; 16],
                compact_every: 0,
            },
            6,
            0.2,
        );
    }
}

#[test]
fn random_joins_while_writing_and_compacting() {
    for seed in 10..14 {
        run(
            seed,
            &Plan {
                revisions: 2500,
                value: vec![1; 16],
                compact_every: 200,
            },
            6,
            0.3,
        );
    }
}

/// Values so large that late readers overflow their mailboxes and the ring.
#[test]
fn slow_readers_are_caught_up_without_a_gap() {
    for seed in 20..22 {
        run(
            seed,
            &Plan {
                revisions: 4000,
                value: vec![1; 4096],
                compact_every: 0,
            },
            4,
            0.7,
        );
    }
}
