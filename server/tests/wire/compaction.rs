//! What compaction leaves, and what a restart makes of it.

use ballast_api::etcdserverpb as pb;
use pb::watch_client::WatchClient;
use pb::watch_request::RequestUnion;
use tonic::Code;

use crate::harness::{Server, get, put, refused};

const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";
const FUTURE: &str = "etcdserver: mvcc: required revision is a future revision";

fn at(revision: i64) -> pb::RangeRequest {
    pb::RangeRequest {
        revision,
        ..get("kb/1")
    }
}

fn compact(revision: i64) -> pb::CompactionRequest {
    pb::CompactionRequest {
        revision,
        physical: true,
    }
}

/// P12: k3s-io/kine PR#747, k3s-io/kine#215, etcd-io/etcd#11370.
#[tokio::test]
async fn p12_the_compacted_revision_itself_is_still_readable() {
    let mut server = Server::start();
    let mut kv = server.kv().await;
    for i in 0..6 {
        kv.put(put("kb/1", i.to_string())).await.unwrap();
    }
    let head = 7;
    kv.compact(compact(4)).await.unwrap();
    for round in ["running", "restarted"] {
        refused(kv.range(at(3)).await, Code::OutOfRange, COMPACTED);
        let answer = kv.range(at(4)).await.unwrap().into_inner();
        assert_eq!(answer.kvs[0].value.as_ref(), b"2", "{round}");
        refused(kv.range(at(head + 5)).await, Code::OutOfRange, FUTURE);
        refused(kv.compact(compact(4)).await, Code::OutOfRange, COMPACTED);
        refused(
            kv.compact(compact(head + 5)).await,
            Code::OutOfRange,
            FUTURE,
        );
        if round == "running" {
            server.restart();
            kv = server.kv().await;
        }
    }
}

/// P13: etcd-io/etcd PR#6633.
#[tokio::test]
async fn p13_the_head_is_readable_after_its_delete_was_compacted() {
    let mut server = Server::start();
    let mut kv = server.kv().await;
    kv.put(put("hd/1", "v")).await.unwrap();
    kv.delete_range(pb::DeleteRangeRequest {
        key: "hd/1".into(),
        ..Default::default()
    })
    .await
    .unwrap();
    kv.compact(compact(3)).await.unwrap();
    for restart in [false, true] {
        if restart {
            server.restart();
            kv = server.kv().await;
        }
        let answer = kv.range(get("hd/1")).await.unwrap().into_inner();
        assert_eq!(
            (answer.count, answer.header.unwrap().revision),
            (0, 3),
            "restart: {restart}"
        );
    }
}

/// Kubernetes takes an update without the record it replaced as the sign that it watches from too far back.
#[tokio::test]
async fn the_event_at_the_compacted_revision_comes_without_what_it_replaced() {
    let server = Server::start();
    let mut kv = server.kv().await;
    for value in ["1", "2", "3"] {
        kv.put(put("w", value)).await.unwrap();
    }
    kv.compact(compact(3)).await.unwrap();
    let create = pb::WatchRequest {
        request_union: Some(RequestUnion::CreateRequest(pb::WatchCreateRequest {
            key: "w".into(),
            start_revision: 3,
            prev_kv: true,
            ..Default::default()
        })),
    };
    let requests =
        tokio_stream::StreamExt::chain(tokio_stream::once(create), futures::stream::pending());
    let mut watch = WatchClient::new(server.channel().await);
    let mut answers = watch.watch(requests).await.unwrap().into_inner();
    let mut events = Vec::new();
    while events.len() < 2 {
        events.extend(answers.message().await.unwrap().unwrap().events);
    }
    let prevs: Vec<Option<String>> = events
        .iter()
        .map(|event| {
            let prev = event.prev_kv.as_ref()?;
            Some(String::from_utf8_lossy(&prev.value).into_owned())
        })
        .collect();
    assert_eq!(prevs, [None, Some("2".to_owned())]);
}
