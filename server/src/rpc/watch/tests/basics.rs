//! Each rule of the protocol on its own.

use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use tonic::Code;

use super::harness::{Server, told, watch_range};
use crate::raft::node::RaftStatus;

#[tokio::test]
async fn events_come_in_order_and_only_of_the_range() {
    let server = Server::start();
    let mut client = server.connect();
    let created = client.created(watch_range("a", "b", 0)).await;
    assert_eq!((created.watch_id, created.canceled), (0, false));
    let header = created.header.unwrap();
    assert_eq!(
        (
            header.cluster_id,
            header.member_id,
            header.raft_term,
            header.revision
        ),
        (11, 7, 2, 1)
    );
    server.put("a1", b"x");
    server.put("b", b"x");
    server.delete("a1");
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let response = client.next().await;
        assert_eq!(response.watch_id, 0);
        seen.extend(told(&response));
        assert_eq!(response.header.unwrap().revision, seen.last().unwrap().1);
    }
    assert_eq!(
        seen,
        [("a1".to_owned(), 2, false), ("a1".to_owned(), 4, true)]
    );
}

#[tokio::test]
async fn ids_are_chosen_wanted_or_refused_as_in_etcd() {
    let server = Server::start();
    let mut client = server.connect();
    let wanted = |id| pb::WatchCreateRequest {
        watch_id: id,
        ..watch_range("a", "", 0)
    };
    for (asked, given) in [(0, 0), (1, 1), (0, 2), (7, 7)] {
        assert_eq!(client.created(wanted(asked)).await.watch_id, given);
    }
    let twice = client.created(wanted(7)).await;
    assert_eq!((twice.watch_id, twice.canceled), (-1, true));
    assert_eq!(
        twice.cancel_reason,
        "mvcc: duplicate watch ID provided on the WatchStream"
    );
    client.cancel(7);
    let canceled = client.next().await;
    assert_eq!(
        (canceled.watch_id, canceled.canceled, canceled.created),
        (7, true, false)
    );
    // An unknown id is not answered: the next answer is that of the create.
    client.cancel(99);
    assert_eq!(client.created(wanted(7)).await.watch_id, 7);
}

#[tokio::test]
async fn bad_ranges_and_revisions_are_created_and_canceled() {
    let server = Server::start();
    let mut client = server.connect();
    for (key, end, start, reason) in [
        ("b", "a", 0, "mvcc: watcher range is empty"),
        ("a", "a", 0, "mvcc: watcher range is empty"),
        (
            "a",
            "",
            -1,
            "etcdserver: mvcc: required revision has been compacted",
        ),
    ] {
        let response = client.created(watch_range(key, end, start)).await;
        assert_eq!((response.watch_id, response.canceled), (-1, true));
        assert_eq!(response.cancel_reason, reason);
    }
}

/// P04: an empty key with an open end is everything; alone it is the smallest key.
#[tokio::test]
async fn p04_empty_key_and_open_end() {
    let server = Server::start();
    let mut client = server.connect();
    client.created(watch_range("", "\0", 1)).await;
    client.created(watch_range("", "", 1)).await;
    client.created(watch_range("p", "\0", 1)).await;
    for key in ["\0", "o", "p\u{7f}", "q"] {
        server.put(key, b"");
    }
    let mut seen: [Vec<String>; 3] = Default::default();
    while seen.iter().map(Vec::len).sum::<usize>() < 7 {
        let response = client.next().await;
        let keys = told(&response).into_iter().map(|(key, ..)| key);
        seen[response.watch_id as usize].extend(keys);
    }
    assert_eq!(seen[0], ["\0", "o", "p\u{7f}", "q"]);
    assert_eq!(seen[1], ["\0"]);
    assert_eq!(seen[2], ["p\u{7f}", "q"]);
}

/// P07 (etcd-io/etcd#18089): the event at the compacted revision itself is still told.
#[tokio::test]
async fn p07_a_delete_at_the_compacted_revision_is_told_also_after_a_restart() {
    let mut server = Server::start();
    server.put("w/a", b"1");
    server.put("w/b", b"1");
    let revision = server.delete("w/a");
    server.compact(revision);
    for _ in 0..2 {
        let mut client = server.connect();
        client.created(watch_range("w/", "w0", revision)).await;
        assert_eq!(
            told(&client.next().await),
            [("w/a".to_owned(), revision, true)]
        );
        server = server.restart();
    }
}

/// P12: below the compacted revision a watch is created, then canceled; a future one waits.
#[tokio::test]
async fn p12_boundaries_of_compaction() {
    let server = Server::start();
    for _ in 0..6 {
        server.put("kb/1", b"v");
    }
    server.compact(4);
    let mut client = server.connect();
    client.created(watch_range("kb/1", "", 3)).await;
    let canceled = client.next().await;
    assert_eq!(
        (
            canceled.watch_id,
            canceled.canceled,
            canceled.created,
            canceled.compact_revision
        ),
        (0, true, false, 4)
    );
    assert_eq!(canceled.cancel_reason, "");
    assert_eq!(canceled.header.unwrap().revision, 0);
    // The client's own cancel is answered once more, as in etcd, and frees the id.
    client.cancel(0);
    assert!(client.next().await.canceled);

    client.created(watch_range("kb/1", "", 4)).await;
    let revisions: Vec<_> = told(&client.next().await).iter().map(|e| e.1).collect();
    assert_eq!(revisions, [4, 5, 6, 7]);

    let mut future = server.connect();
    future.created(watch_range("kb/1", "", 9)).await;
    server.put("kb/1", b"too early");
    let revision = server.put("kb/1", b"now");
    assert_eq!(
        told(&future.next().await),
        [("kb/1".to_owned(), revision, false)]
    );
}

#[tokio::test]
async fn a_fresh_store_compacted_at_one_can_be_watched_from_one() {
    let server = Server::start();
    server.compact(1);
    let mut client = server.connect();
    client.created(watch_range("x", "", 1)).await;
    let revision = server.put("x", b"v");
    assert_eq!(
        told(&client.next().await),
        [("x".to_owned(), revision, false)]
    );
}

#[tokio::test]
async fn replaced_records_come_to_those_who_ask_live_and_from_history() {
    let server = Server::start();
    let with_prev = |start| pb::WatchCreateRequest {
        prev_kv: true,
        ..watch_range("k", "", start)
    };
    let mut live = server.connect();
    live.created(with_prev(0)).await;
    live.created(watch_range("k", "", 0)).await;
    server.put("k", b"1");
    server.put("k", b"2");
    server.delete("k");
    server.put("k", b"3");
    let mut late = server.connect();
    late.created(with_prev(1)).await;
    for client in [&mut live, &mut late] {
        let mut prevs = Vec::new();
        while prevs.len() < 4 {
            let response = client.next().await;
            for event in response.events {
                if response.watch_id == 0 {
                    prevs.push(event.prev_kv.map(|kv| (kv.value.to_vec(), kv.mod_revision)));
                } else {
                    assert_eq!(event.prev_kv, None);
                }
            }
        }
        assert_eq!(
            prevs,
            [
                None,
                Some((b"1".to_vec(), 2)),
                Some((b"2".to_vec(), 3)),
                None
            ]
        );
    }
}

#[tokio::test]
async fn filters_leave_out_puts_or_deletes() {
    let server = Server::start();
    let mut client = server.connect();
    for filter in [0, 1] {
        client
            .created(pb::WatchCreateRequest {
                filters: vec![filter],
                ..watch_range("k", "", 0)
            })
            .await;
    }
    server.put("k", b"1");
    server.delete("k");
    let mut seen = [client.next().await, client.next().await];
    seen.sort_by_key(|r| r.watch_id);
    assert_eq!(told(&seen[0]), [("k".to_owned(), 3, true)]);
    assert_eq!(told(&seen[1]), [("k".to_owned(), 2, false)]);
}

/// P09 (etcd-io/etcd#15220): a reply to a progress request never contradicts the events around it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p09_progress_agrees_with_events() {
    let server = Server::start();
    let mut client = server.connect();
    client.created(watch_range("pr/", "pr0", 0)).await;
    client.created(watch_range("other", "", 0)).await;
    let last = 1 + 3000;
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for n in 0..3000 {
                server.put(&format!("pr/{}", n % 7), b"v");
            }
        });
        let read = async {
            let (mut seen, mut told_progress, mut replies) = (0, 0, 0);
            client.ask_progress();
            while seen < last || told_progress < last {
                let response = client.next().await;
                let revision = response.header.as_ref().unwrap().revision;
                if response.events.is_empty() {
                    assert_eq!(response.watch_id, -1);
                    assert!(revision >= seen, "progress {revision} after event {seen}");
                    told_progress = revision;
                    replies += 1;
                    client.ask_progress();
                }
                for (_, event, _) in told(&response) {
                    assert!(
                        event > told_progress,
                        "event {event} after progress {told_progress}"
                    );
                    assert!(event == seen + 1 || seen == 0, "event {event} after {seen}");
                    seen = event;
                }
            }
            replies
        };
        let replies =
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(read));
        assert!(replies > 0);
        writer.join().unwrap();
    });
}

/// What kube-apiserver's consistent reads from its cache rest on: a revision read before is reached by the next reply.
#[tokio::test]
async fn progress_reaches_what_was_committed_before_it_was_asked() {
    let server = Server::start();
    let mut client = server.connect();
    client.created(watch_range("k", "", 0)).await;
    for _ in 0..200 {
        let revision = server.put("elsewhere", b"v");
        client.ask_progress();
        let reply = client.next().await;
        assert_eq!((reply.watch_id, reply.events.len()), (-1, 0));
        assert!(reply.header.unwrap().revision >= revision);
    }
}

#[tokio::test]
async fn an_empty_stream_and_a_watch_of_the_future_are_told_no_progress() {
    let server = Server::start();
    let mut client = server.connect();
    client.ask_progress();
    client.created(watch_range("k", "", 50)).await;
    client.ask_progress();
    client.cancel(0);
    assert!(client.next().await.canceled);
}

#[tokio::test]
async fn progress_notify_ticks_when_nothing_happens() {
    let server = Server::start();
    let mut client = server.connect();
    client
        .created(pb::WatchCreateRequest {
            progress_notify: true,
            ..watch_range("k", "", 0)
        })
        .await;
    client.created(watch_range("k", "", 0)).await;
    server.put("elsewhere", b"v");
    for _ in 0..2 {
        let tick = client.next().await;
        assert_eq!((tick.watch_id, tick.events.len()), (0, 0));
        assert_eq!(tick.header.unwrap().revision, 2);
    }
}

/// P10 (etcd-io/etcd#19441): without fragments one large response; with them pieces below the limit, nothing lost.
#[tokio::test]
async fn p10_fragments_stay_below_the_limit() {
    let server = Server::start();
    let value = vec![7; 100_000];
    for txn in 0..4 {
        server.write(|t| {
            for op in 0..12 {
                let key = format!("f/{txn}/{op:02}");
                t.put(key.into(), value.clone().into(), 0).unwrap();
            }
        });
    }
    let mut whole = server.connect();
    whole.created(watch_range("f/", "f0", 2)).await;
    let (response, size) = whole.next_sized().await;
    assert_eq!(response.events.len(), 48);
    assert!(size > 4_800_000 && !response.fragment);

    let mut cut = server.connect();
    cut.created(pb::WatchCreateRequest {
        fragment: true,
        ..watch_range("f/", "f0", 2)
    })
    .await;
    let mut events = Vec::new();
    loop {
        let (piece, size) = cut.next_sized().await;
        assert!(size < 2_097_152 && piece.events.len() > 1, "{size}");
        let more = piece.fragment;
        events.extend(piece.events);
        if !more {
            break;
        }
    }
    assert_eq!(events, response.events);
}

/// P11: a stream that requires a leader is refused without one, and ends when there has been none for long.
#[tokio::test]
async fn p11_streams_that_require_a_leader() {
    let server = Server::start();
    let mut patient = server.connect();
    let mut strict = server.try_connect(true).unwrap();
    patient.created(watch_range("k", "", 0)).await;
    strict.created(watch_range("k", "", 0)).await;
    let status = *server.leadership.borrow();
    server
        .leadership
        .send(RaftStatus {
            leader: 0,
            ..status
        })
        .unwrap();
    let end = strict.end().await;
    assert_eq!(
        (end.code(), end.message()),
        (Code::Unavailable, "etcdserver: no leader")
    );
    let refused = server.try_connect(true).err().unwrap();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::Unavailable, "etcdserver: no leader")
    );
    let revision = server.put("k", b"v");
    assert_eq!(
        told(&patient.next().await),
        [("k".to_owned(), revision, false)]
    );
}

#[tokio::test]
async fn a_leader_that_comes_back_in_time_ends_no_stream() {
    let server = Server::start();
    let mut strict = server.try_connect(true).unwrap();
    strict.created(watch_range("k", "", 0)).await;
    let status = *server.leadership.borrow();
    server
        .leadership
        .send(RaftStatus {
            leader: 0,
            ..status
        })
        .unwrap();
    server.put("k", b"v");
    strict.next().await;
    server.leadership.send(status).unwrap();
    // Longer than three election timeouts of this server.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let revision = server.put("k", b"v");
    assert_eq!(
        told(&strict.next().await),
        [("k".to_owned(), revision, false)]
    );
}

#[tokio::test]
async fn streams_end_when_the_hub_closes_and_leave_no_counts_behind() {
    let server = Server::start();
    let mut client = server.connect();
    client.created(watch_range("k", "", 0)).await;
    client.created(watch_range("k", "", 0)).await;
    assert_eq!(
        (server.metrics.streams.get(), server.metrics.watchers.get()),
        (1, 2)
    );
    server.put("k", b"v");
    server.hub.close();
    let end = client.end().await;
    assert_eq!(
        (end.code(), end.message()),
        (Code::Unavailable, "etcdserver: server stopped")
    );
    drop(client);
    let metrics = &server.metrics;
    assert_eq!(
        (
            metrics.streams.get(),
            metrics.watchers.get(),
            metrics.pending_events.get()
        ),
        (0, 0, 0)
    );
}

/// P08 (etcd-io/etcd#17529): a client that stops reading costs bounded memory, and is told everything or of the compaction.
#[tokio::test]
async fn p08_a_slow_reader_is_never_skipped() {
    const WATCHERS: usize = 200;
    const REVISIONS: i64 = 1500;
    let server = Server::start();
    let mut client = server.connect();
    for _ in 0..WATCHERS {
        client
            .created(pb::WatchCreateRequest {
                prev_kv: true,
                ..watch_range("s/", "s0", 0)
            })
            .await;
    }
    let value = vec![7; 4096];
    for n in 0..REVISIONS {
        server.put(&format!("s/{}", n % 10), &value);
    }
    let head = 1 + REVISIONS;
    server.wait_until(|| server.metrics.slow_watchers.get() == WATCHERS as i64);
    // The bound of a mailbox is 4 MiB of commits, of which each weighs 8 KiB here; one dispatch may go beyond.
    assert!(server.metrics.pending_events.get() < (WATCHERS * 700) as i64);
    server.compact(head - 5);

    let mut at = vec![1; WATCHERS];
    let mut canceled = 0;
    while canceled < WATCHERS {
        let response = client.next().await;
        let at = &mut at[response.watch_id as usize];
        for event in &response.events {
            let kv = event.kv.as_ref().unwrap();
            assert_eq!(kv.mod_revision, *at + 1);
            *at = kv.mod_revision;
        }
        if response.canceled {
            assert_eq!(response.compact_revision, head - 5);
            assert!(*at > 1 && *at < head - 5);
            canceled += 1;
        }
    }
    assert_eq!(server.metrics.slow_watchers.get(), 0);
    // The same stream serves the next watch.
    let created = client.created(watch_range("s/", "s0", head - 5)).await;
    assert_eq!(created.watch_id, WATCHERS as i64);
    assert_eq!(told(&client.next().await).len(), 6);
}

/// The leader's snapshot replaced the state: what happened in between is told from history.
#[tokio::test]
async fn a_restored_state_is_caught_up_by_history() {
    let server = Server::start();
    let mut client = server.connect();
    client.created(watch_range("k", "", 0)).await;
    let index = server.put("elsewhere", b"v") as u64;
    for n in 0..3 {
        // Not notified, as nothing is while a snapshot is installed.
        let at = ballast_storage::LogPosition {
            term: 1,
            index: 100 + index + n,
        };
        let mut txn = server.store.begin(at);
        txn.put("k".into(), "v".into(), 0).unwrap();
        txn.commit();
    }
    server.hub.restored(server.store.clone());
    let mut revisions = Vec::new();
    while revisions.len() < 3 {
        revisions.extend(told(&client.next().await).into_iter().map(|e| e.1));
    }
    assert_eq!(revisions, [3, 4, 5]);
    client.ask_progress();
    assert_eq!(client.next().await.header.unwrap().revision, 5);
}

/// A client spends more on a response than on an event: what many watchers of a stream get in quick succession shares a response each.
#[tokio::test(start_paused = true)]
async fn a_stream_of_many_watchers_rests_between_their_responses() {
    const WATCHERS: usize = 100;
    let server = Server::start();
    let all = WATCHERS as i64;
    let mut client = server.connect();
    for _ in 0..WATCHERS {
        client.created(watch_range("a", "", 0)).await;
    }
    // Nobody waits for the first event after a pause.
    server.put("a", b"1");
    pending_is(&server, all);
    for _ in 0..WATCHERS {
        assert_eq!(client.next().await.events.len(), 1);
    }
    server.put("a", b"2");
    pending_is(&server, all);
    assert!(futures::poll!(std::pin::pin!(client.next())).is_pending());
    server.put("a", b"3");
    pending_is(&server, 2 * all);
    for _ in 0..WATCHERS {
        assert_eq!(client.next().await.events.len(), 2);
    }
    // Few are never made to wait.
    let mut other = server.connect();
    other.created(watch_range("b", "", 0)).await;
    for _ in 0..2 {
        server.put("b", b"1");
        pending_is(&server, 1);
        assert!(futures::poll!(std::pin::pin!(other.next())).is_ready());
    }
}

/// Waits until so many events wait for a client.
fn pending_is(server: &Server, count: i64) {
    server.wait_until(|| server.metrics.pending_events.get() == count);
}
