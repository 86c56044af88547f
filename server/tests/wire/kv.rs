//! Put, range and delete: bounds, counting, sizes.

use ballast_api::etcdserverpb as pb;
use tonic::Code;

use crate::harness::{Server, get, keys, prefix, put, refused};

#[tokio::test]
async fn what_is_put_is_read_with_etcds_numbers() {
    let server = Server::start();
    let mut kv = server.kv().await;
    let header = kv
        .put(put("a", "1"))
        .await
        .unwrap()
        .into_inner()
        .header
        .unwrap();
    assert_eq!(header.revision, 2);
    assert!(header.raft_term > 0 && header.cluster_id != 0 && header.member_id != 0);
    kv.put(put("a", "2")).await.unwrap();
    let answer = kv.range(get("a")).await.unwrap().into_inner();
    let record = &answer.kvs[0];
    assert_eq!(answer.header.unwrap().revision, 3);
    assert_eq!(
        (
            record.create_revision,
            record.mod_revision,
            record.version,
            record.value.as_ref()
        ),
        (2, 3, 2, b"2".as_ref())
    );
    let old = pb::RangeRequest {
        revision: 2,
        ..get("a")
    };
    let answer = kv.range(old).await.unwrap().into_inner();
    assert_eq!(answer.kvs[0].value.as_ref(), b"1");
    assert_eq!(answer.header.unwrap().revision, 3);
    let deleted = kv
        .delete_range(pb::DeleteRangeRequest {
            key: "a".into(),
            prev_kv: true,
            ..Default::default()
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!((deleted.deleted, deleted.prev_kvs.len()), (1, 1));
    assert_eq!(deleted.header.unwrap().revision, 4);
    let again = kv
        .delete_range(pb::DeleteRangeRequest {
            key: "a".into(),
            ..Default::default()
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!((again.deleted, again.header.unwrap().revision), (0, 4));
}

/// P03: etcd-io/etcd#18267, #20745.
#[tokio::test]
async fn p03_count_ignores_revision_filters_and_limit() {
    let server = Server::start();
    let mut kv = server.kv().await;
    let mut revisions = Vec::new();
    for key in ["c/1", "c/2", "c/3"] {
        let answer = kv.put(put(key, "v")).await.unwrap().into_inner();
        revisions.push(answer.header.unwrap().revision);
    }
    let last = pb::RangeRequest {
        min_mod_revision: revisions[2],
        ..prefix("c/")
    };
    let answer = kv.range(last.clone()).await.unwrap().into_inner();
    assert_eq!((answer.kvs.len(), answer.count, answer.more), (1, 3, false));
    let limited = pb::RangeRequest {
        min_mod_revision: revisions[1],
        limit: 1,
        ..prefix("c/")
    };
    let answer = kv.range(limited).await.unwrap().into_inner();
    assert_eq!((answer.kvs.len(), answer.count, answer.more), (1, 3, true));
    let counted = pb::RangeRequest {
        count_only: true,
        ..last
    };
    let answer = kv.range(counted).await.unwrap().into_inner();
    assert_eq!((answer.kvs.len(), answer.count), (0, 3));
}

/// P04: etcd-io/etcd#9833, #4697.
#[tokio::test]
async fn p04_the_edges_of_the_key_space_are_ranges_too() {
    let server = Server::start();
    let mut kv = server.kv().await;
    for key in [&b"\0"[..], b"p\xfe", b"p\xff", b"p\xff\xff", b"q"] {
        kv.put(put(key, "v")).await.unwrap();
    }
    let range = |key: &'static [u8], end: &'static [u8]| pb::RangeRequest {
        key: key.into(),
        range_end: end.into(),
        ..Default::default()
    };
    let empty = "etcdserver: key is not provided";
    refused(
        kv.range(range(b"", b"")).await,
        Code::InvalidArgument,
        empty,
    );
    refused(
        kv.range(range(b"", b"\0")).await,
        Code::InvalidArgument,
        empty,
    );
    for (key, end, expected) in [
        (&b"\0"[..], &b"\0"[..], 5),
        (b"p\xff", b"q", 2),
        (b"\xff", b"\0", 0),
        (b"q", b"p", 0),
    ] {
        let answer = kv.range(range(key, end)).await.unwrap().into_inner();
        assert_eq!(answer.kvs.len(), expected, "{key:?} to {end:?}");
    }
    refused(kv.put(put("", "v")).await, Code::InvalidArgument, empty);
    refused(
        kv.delete_range(pb::DeleteRangeRequest::default()).await,
        Code::InvalidArgument,
        empty,
    );
    let compare = pb::TxnRequest {
        compare: vec![pb::Compare::default()],
        ..Default::default()
    };
    refused(kv.txn(compare).await, Code::InvalidArgument, empty);
}

/// P05: etcd-io/etcd PR#7968, #10749.
#[tokio::test]
async fn p05_too_large_has_two_answers_and_the_channel_lives_on() {
    let server = Server::start();
    let mut kv = server.kv().await;
    kv.put(put("a", vec![b'x'; 1_400_000])).await.unwrap();
    refused(
        kv.put(put("a", vec![b'x'; 1_700_000])).await,
        Code::InvalidArgument,
        "etcdserver: request is too large",
    );
    let status = kv.put(put("a", vec![b'x'; 2_500_000])).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let text = status.message();
    assert!(
        text.starts_with("grpc: received message larger than max (25000")
            && text.ends_with(" vs. 2097152)"),
        "{text}"
    );
    let answer = kv.range(get("a")).await.unwrap().into_inner();
    assert_eq!(answer.kvs[0].value.len(), 1_400_000);
}

#[tokio::test]
async fn what_ignore_keeps_must_exist() {
    let server = Server::start();
    let mut kv = server.kv().await;
    let keep_value = pb::PutRequest {
        ignore_value: true,
        ..put("k", "")
    };
    refused(
        kv.put(keep_value.clone()).await,
        Code::InvalidArgument,
        "etcdserver: key not found",
    );
    kv.put(put("k", "kept")).await.unwrap();
    let answer = kv
        .put(pb::PutRequest {
            prev_kv: true,
            ..keep_value
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.prev_kv.unwrap().mod_revision, 2);
    let answer = kv.range(get("k")).await.unwrap().into_inner();
    assert_eq!(
        (answer.kvs[0].value.as_ref(), answer.kvs[0].version),
        (b"kept".as_ref(), 2)
    );
    let both = pb::PutRequest {
        ignore_value: true,
        ..put("k", "v")
    };
    refused(
        kv.put(both).await,
        Code::InvalidArgument,
        "etcdserver: value is provided",
    );
    let unknown_order = pb::RangeRequest {
        sort_order: 9,
        ..get("k")
    };
    refused(
        kv.range(unknown_order).await,
        Code::InvalidArgument,
        "etcdserver: invalid sort option",
    );
}

#[tokio::test]
async fn a_streamed_range_is_the_range_in_parts() {
    let server = Server::start();
    let mut kv = server.kv().await;
    for i in 0..35 {
        kv.put(put(format!("s/{i:02}"), "v")).await.unwrap();
    }
    let whole = kv.range(prefix("s/")).await.unwrap().into_inner();
    for limit in [0, 1, 10, 20, 34] {
        let request = pb::RangeRequest {
            limit,
            ..prefix("s/")
        };
        let mut parts = kv.range_stream(request.clone()).await.unwrap().into_inner();
        let mut found = pb::RangeResponse::default();
        while let Some(part) = parts.message().await.unwrap() {
            let part = part.range_response.unwrap();
            assert!(
                found.header.is_none(),
                "the header stands in the last part alone"
            );
            found.header = part.header;
            found.more = part.more;
            found.count = part.count;
            found.kvs.extend(part.kvs);
        }
        let expected = kv.range(request).await.unwrap().into_inner();
        assert_eq!(found, expected, "limit {limit}");
    }
    assert_eq!(keys(&whole).len(), 35);
    let filtered = pb::RangeRequest {
        min_mod_revision: 1,
        ..prefix("s/")
    };
    refused(
        kv.range_stream(filtered).await,
        Code::Unimplemented,
        "RangeStream does not support revision filters",
    );
}

#[tokio::test]
async fn what_was_acknowledged_survives_kill_and_stop() {
    let mut server = Server::start();
    let mut kv = server.kv().await;
    for i in 0..100 {
        kv.put(put(format!("d/{i:03}"), "v")).await.unwrap();
    }
    server.kill_and_restart();
    let mut kv = server.kv().await;
    let answer = kv.range(prefix("d/")).await.unwrap().into_inner();
    assert_eq!((answer.count, answer.header.unwrap().revision), (100, 101));
    kv.put(put("d/last", "v")).await.unwrap();
    server.restart();
    let mut kv = server.kv().await;
    let answer = kv.range(prefix("d/")).await.unwrap().into_inner();
    assert_eq!((answer.count, answer.header.unwrap().revision), (101, 102));
}
