//! Public bug reports about watching, over the wire. What needs a member without a leader, or a client that does not read, stands
//! in `rpc::watch::tests` and in `e2e/tests/cases.rs`.

use std::collections::BTreeSet;
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use ballast_api::mvccpb::event::EventType;
use pb::request_op::Request;
use pb::watch_request::RequestUnion;
use prost::Message;

use crate::harness::{Server, Watching, put};

fn watch(
    key: &'static str,
    range_end: &'static str,
    start_revision: i64,
) -> pb::WatchCreateRequest {
    pb::WatchCreateRequest {
        key: key.into(),
        range_end: range_end.into(),
        start_revision,
        ..Default::default()
    }
}

fn compact(revision: i64) -> pb::CompactionRequest {
    pb::CompactionRequest {
        revision,
        physical: true,
    }
}

/// P04: etcd-io/etcd#9833, zhongwencool/eetcd#18.
#[tokio::test]
async fn p04_the_edges_of_the_key_space_are_watched_too() {
    let server = Server::start();
    let mut kv = server.kv().await;
    let keys = [&b"\0"[..], b"p\xfe", b"p\xff", b"p\xff\xff", b"q"];
    for key in keys {
        kv.put(put(key, "v")).await.unwrap();
    }
    let mut all = Watching::open(&server).await;
    all.create(watch("", "\0", 1)).await;
    let events = all.next().await.events;
    let told: Vec<_> = events
        .iter()
        .map(|event| event.kv.as_ref().unwrap().key.clone())
        .collect();
    assert_eq!(told, keys);
    let mut smallest = Watching::open(&server).await;
    smallest.create(watch("", "", 1)).await;
    let events = smallest.next().await.events;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].kv.as_ref().unwrap().key.as_ref(), b"\0");
}

/// P07: etcd-io/etcd#18089.
#[tokio::test]
async fn p07_a_delete_at_the_compacted_revision_is_told() {
    let mut server = Server::start();
    let mut kv = server.kv().await;
    kv.put(put("w/a", "1")).await.unwrap();
    kv.put(put("w/b", "1")).await.unwrap();
    let delete = pb::DeleteRangeRequest {
        key: "w/a".into(),
        ..Default::default()
    };
    let deleted = kv.delete_range(delete).await.unwrap().into_inner();
    let revision = deleted.header.unwrap().revision;
    kv.compact(compact(revision)).await.unwrap();
    for restarted in [false, true] {
        if restarted {
            server.restart();
        }
        let mut watching = Watching::open(&server).await;
        watching.create(watch("w/", "w0", revision)).await;
        let events = watching.next().await.events;
        assert_eq!(events.len(), 1, "restarted: {restarted}");
        assert_eq!(events[0].r#type(), EventType::Delete);
        let record = events[0].kv.as_ref().unwrap();
        assert_eq!(
            (record.key.as_ref(), record.mod_revision),
            (b"w/a".as_ref(), revision)
        );
    }
}

/// P09: etcd-io/etcd#15220.
#[tokio::test]
async fn p09_progress_agrees_with_the_events_around_it() {
    const WRITES: i64 = 300;
    let server = Server::start();
    let mut kv = server.kv().await;
    let mut watching = Watching::open(&server).await;
    watching.create(watch("pr/", "pr0", 0)).await;
    let writer = tokio::spawn(async move {
        for i in 0..WRITES {
            kv.put(put(format!("pr/{}", i % 7), i.to_string()))
                .await
                .unwrap();
        }
    });
    let (mut seen, mut told, mut answers) = (1, 1, 0);
    let mut tick = tokio::time::interval(Duration::from_millis(5));
    while seen < WRITES + 1 || answers == 0 {
        let response = tokio::select! {
            _ = tick.tick() => {
                watching.ask(RequestUnion::ProgressRequest(pb::WatchProgressRequest {}));
                continue;
            }
            response = watching.next() => response,
        };
        let header = response.header.unwrap().revision;
        if response.events.is_empty() {
            assert_eq!(response.watch_id, -1);
            assert!(header >= seen, "told {header} after an event of {seen}");
            told = told.max(header);
            answers += 1;
        }
        for event in response.events {
            let revision = event.kv.unwrap().mod_revision;
            assert!(revision > told, "an event of {revision} after told {told}");
            assert_eq!(revision, seen + 1, "no event is left out");
            seen = revision;
        }
    }
    writer.await.unwrap();
}

/// P10: etcd-io/etcd#19441, #9294.
#[tokio::test]
async fn p10_a_large_history_comes_whole_or_in_pieces_for_those_who_ask() {
    const PIECE_BYTES_MAX: usize = 1_572_864 + 512 * 1024;
    let server = Server::start();
    let mut kv = server.kv().await;
    for txn in 0..4 {
        let puts = (0..12).map(|i| pb::RequestOp {
            request: Some(Request::RequestPut(put(
                format!("f/{txn}-{i:02}"),
                vec![b'x'; 100_000],
            ))),
        });
        let request = pb::TxnRequest {
            success: puts.collect(),
            ..Default::default()
        };
        kv.txn(request).await.unwrap();
    }
    let mut small = Watching::open_limited(&server, 4 << 20).await;
    small.create(watch("f/", "f0", 2)).await;
    assert!(small.try_next().await.is_err(), "it takes no 4.8 MB");
    let mut large = Watching::open(&server).await;
    large.create(watch("f/", "f0", 2)).await;
    let whole = large.next().await;
    assert_eq!((whole.events.len(), whole.fragment), (48, false));
    assert!(whole.encoded_len() > 4_800_000);
    let mut pieces = Watching::open_limited(&server, 4 << 20).await;
    let fragments = pb::WatchCreateRequest {
        fragment: true,
        ..watch("f/", "f0", 2)
    };
    pieces.create(fragments).await;
    let (mut seen, mut count) = (Vec::new(), 0);
    loop {
        let piece = pieces.next().await;
        assert!(piece.encoded_len() < PIECE_BYTES_MAX);
        assert!(piece.events.len() > 1);
        seen.extend(piece.events.into_iter().map(|event| event.kv.unwrap().key));
        count += 1;
        if !piece.fragment {
            break;
        }
    }
    assert_eq!(count, 3, "as few pieces as may be");
    assert_eq!(seen.len(), 48);
    assert_eq!(seen.iter().collect::<BTreeSet<_>>().len(), 48);
    let told: Vec<_> = whole
        .events
        .into_iter()
        .map(|event| event.kv.unwrap().key)
        .collect();
    assert_eq!(seen, told);
}

/// P11, the one member's part: etcd-io/etcd#10743. Without a leader: `p11_streams_that_require_a_leader`.
#[tokio::test]
async fn p11_watch_ids_are_told_and_not_given_twice() {
    let server = Server::start();
    let mut watching = Watching::open(&server).await;
    let of = |watch_id| pb::WatchCreateRequest {
        watch_id,
        ..watch("jk/1", "", 0)
    };
    assert_eq!(watching.create(of(0)).await.watch_id, 0);
    assert_eq!(watching.create(of(7)).await.watch_id, 7);
    let refused = watching.create(of(7)).await;
    assert_eq!((refused.watch_id, refused.canceled), (-1, true));
    assert_eq!(
        refused.cancel_reason,
        "mvcc: duplicate watch ID provided on the WatchStream"
    );
    assert_eq!(watching.create(of(0)).await.watch_id, 1);
    let mut kv = server.kv().await;
    kv.put(put("jk/1", "v")).await.unwrap();
    let mut told = BTreeSet::new();
    while told.len() < 3 {
        told.insert(watching.next().await.watch_id);
    }
    assert_eq!(told, BTreeSet::from([0, 1, 7]));
}

/// P12: k3s-io/kine PR#747, k3s-io/kine#215, etcd-io/etcd#11370.
#[tokio::test]
async fn p12_a_watch_begins_at_the_compacted_revision_or_is_told_why_not() {
    let server = Server::start();
    let mut kv = server.kv().await;
    kv.compact(compact(1)).await.unwrap();
    let mut fresh = Watching::open(&server).await;
    fresh.create(watch("kb/1", "", 1)).await;
    for i in 0..6 {
        kv.put(put("kb/1", i.to_string())).await.unwrap();
        let event = fresh.next().await.events.remove(0);
        assert_eq!(event.kv.unwrap().mod_revision, 2 + i64::from(i));
    }
    let (compacted, head) = (4, 7);
    kv.compact(compact(compacted)).await.unwrap();

    let mut late = Watching::open(&server).await;
    late.create(watch("kb/1", "", compacted - 1)).await;
    let gone = late.next().await;
    assert!(gone.canceled && gone.events.is_empty(), "{gone:?}");
    assert_eq!(
        (gone.compact_revision, gone.cancel_reason.as_str()),
        (compacted, "")
    );

    let mut at = Watching::open(&server).await;
    at.create(watch("kb/1", "", compacted)).await;
    let events = at.next().await.events;
    let revisions: Vec<i64> = events
        .iter()
        .map(|event| event.kv.as_ref().unwrap().mod_revision)
        .collect();
    assert_eq!(revisions, (compacted..=head).collect::<Vec<_>>());

    let mut future = Watching::open(&server).await;
    future.create(watch("kb/1", "", head + 5)).await;
    for i in 0..6 {
        kv.put(put("kb/1", i.to_string())).await.unwrap();
    }
    let event = future.next().await.events.remove(0);
    assert_eq!(event.kv.unwrap().mod_revision, head + 5);
}

/// `--watch-progress-notify-interval`.
#[tokio::test]
async fn a_quiet_watcher_that_asked_is_told_progress_as_often_as_the_flag_says() {
    let server = Server::start_with(&["--watch-progress-notify-interval", "200ms"]);
    let mut watching = Watching::open(&server).await;
    let notified = pb::WatchCreateRequest {
        progress_notify: true,
        ..watch("n", "", 0)
    };
    let id = watching.create(notified).await.watch_id;
    let begin = tokio::time::Instant::now();
    for _ in 0..3 {
        let told = watching.next().await;
        assert_eq!((told.watch_id, told.events.len()), (id, 0), "{told:?}");
        assert_eq!(told.header.unwrap().revision, 1);
    }
    assert!(begin.elapsed() >= Duration::from_millis(600));
}
