//! Transactions over the wire.

use ballast_api::etcdserverpb as pb;
use pb::compare::{CompareResult, CompareTarget, TargetUnion};
use pb::request_op::Request;
use pb::response_op::Response;
use tonic::Code;

use crate::harness::{Server, get, prefix, put, refused};

fn compare(target: CompareTarget, result: CompareResult, operand: TargetUnion) -> pb::Compare {
    pb::Compare {
        key: "cmp/none".into(),
        target: target as i32,
        result: result as i32,
        target_union: Some(operand),
        range_end: "".into(),
    }
}

fn put_op(request: pb::PutRequest) -> pb::RequestOp {
    pb::RequestOp {
        request: Some(Request::RequestPut(request)),
    }
}

fn range_op(request: pb::RangeRequest) -> pb::RequestOp {
    pb::RequestOp {
        request: Some(Request::RequestRange(request)),
    }
}

/// P01: etcd-io/etcd#19678.
#[tokio::test]
async fn p01_a_value_compare_on_a_missing_key_is_false() {
    let server = Server::start();
    let mut kv = server.kv().await;
    let value = || TargetUnion::Value("x".into());
    for range_end in ["", "cmp0"] {
        for (compare, expected) in [
            (
                compare(CompareTarget::Value, CompareResult::NotEqual, value()),
                false,
            ),
            (
                compare(CompareTarget::Value, CompareResult::Equal, value()),
                false,
            ),
            (
                compare(CompareTarget::Value, CompareResult::Less, value()),
                false,
            ),
            (
                compare(CompareTarget::Value, CompareResult::Greater, value()),
                false,
            ),
            (
                compare(
                    CompareTarget::Version,
                    CompareResult::Equal,
                    TargetUnion::Version(0),
                ),
                true,
            ),
            (
                compare(
                    CompareTarget::Lease,
                    CompareResult::Greater,
                    TargetUnion::Lease(0),
                ),
                false,
            ),
        ] {
            let request = pb::TxnRequest {
                compare: vec![pb::Compare {
                    range_end: range_end.into(),
                    ..compare
                }],
                ..Default::default()
            };
            let answer = kv.txn(request.clone()).await.unwrap().into_inner();
            assert_eq!(answer.succeeded, expected, "{request:?}");
        }
    }
}

/// P02: etcd-io/etcd#4656.
#[tokio::test]
async fn p02_a_write_that_names_an_unknown_lease_writes_nothing() {
    let server = Server::start();
    let mut kv = server.kv().await;
    let text = "etcdserver: requested lease not found";
    let leased = |key: &'static str| pb::PutRequest {
        lease: 999,
        ..put(key, "v")
    };
    let unknown = pb::PutRequest {
        lease: 0x3e7,
        ..put("ls/1", "v")
    };
    refused(kv.put(unknown).await, Code::NotFound, text);
    let txn = pb::TxnRequest {
        success: vec![put_op(put("ls/2", "v")), put_op(leased("ls/3"))],
        ..Default::default()
    };
    refused(kv.txn(txn).await, Code::NotFound, text);
    let answer = kv.range(prefix("ls/")).await.unwrap().into_inner();
    assert_eq!((answer.count, answer.header.unwrap().revision), (0, 1));
    kv.put(put("ls/2", "v")).await.unwrap();
}

#[tokio::test]
async fn the_writes_of_a_txn_share_a_revision_and_its_reads_see_them() {
    let server = Server::start();
    let mut kv = server.kv().await;
    kv.put(put("t/1", "old")).await.unwrap();
    let inner = pb::TxnRequest {
        compare: vec![pb::Compare {
            key: "t/1".into(),
            target: CompareTarget::Value as i32,
            result: CompareResult::Equal as i32,
            // Compares see the state before the transaction, at every depth.
            target_union: Some(TargetUnion::Value("old".into())),
            range_end: "".into(),
        }],
        success: vec![put_op(put("t/3", "v"))],
        failure: vec![],
    };
    let txn = pb::TxnRequest {
        success: vec![
            put_op(put("t/1", "new")),
            range_op(get("t/1")),
            pb::RequestOp {
                request: Some(Request::RequestTxn(inner)),
            },
        ],
        ..Default::default()
    };
    let answer = kv.txn(txn).await.unwrap().into_inner();
    assert_eq!(answer.header.as_ref().unwrap().revision, 3);
    let Some(Response::ResponseRange(read)) = &answer.responses[1].response else {
        panic!("{answer:?}");
    };
    assert_eq!(
        (read.kvs[0].value.as_ref(), read.kvs[0].mod_revision),
        (b"new".as_ref(), 3)
    );
    let Some(Response::ResponseTxn(nested)) = &answer.responses[2].response else {
        panic!("{answer:?}");
    };
    assert!(nested.succeeded);
    let third = kv.range(get("t/3")).await.unwrap().into_inner();
    assert_eq!(third.kvs[0].mod_revision, 3);
}

#[tokio::test]
async fn a_txn_has_its_bounds() {
    let server = Server::start_with(&["--max-txn-ops", "2"]);
    let mut kv = server.kv().await;
    let of = |keys: &[&'static str]| pb::TxnRequest {
        success: keys.iter().map(|key| put_op(put(*key, "v"))).collect(),
        ..Default::default()
    };
    refused(
        kv.txn(of(&["a", "b", "c"])).await,
        Code::InvalidArgument,
        "etcdserver: too many operations in txn request",
    );
    refused(
        kv.txn(of(&["a", "a"])).await,
        Code::InvalidArgument,
        "etcdserver: duplicate key given in txn request",
    );
    kv.txn(of(&["a", "b"])).await.unwrap();
    let future = pb::TxnRequest {
        success: vec![
            put_op(put("a", "x")),
            range_op(pb::RangeRequest {
                revision: 1000,
                ..get("a")
            }),
        ],
        ..Default::default()
    };
    refused(
        kv.txn(future).await,
        Code::OutOfRange,
        "etcdserver: mvcc: required revision is a future revision",
    );
    let answer = kv.range(get("a")).await.unwrap().into_inner();
    assert_eq!(answer.kvs[0].value.as_ref(), b"v");
}

#[tokio::test]
async fn what_only_reads_leaves_nothing_in_the_log() {
    let server = Server::start();
    let mut kv = server.kv().await;
    kv.put(put("a", "v")).await.unwrap();
    let index = || async {
        let mut maintenance = server.maintenance().await;
        let told = maintenance.status(pb::StatusRequest {}).await.unwrap();
        told.into_inner().raft_index
    };
    let before = index().await;
    let reads = pb::TxnRequest {
        compare: vec![pb::Compare {
            key: "a".into(),
            ..compare(
                CompareTarget::Version,
                CompareResult::Equal,
                TargetUnion::Version(1),
            )
        }],
        success: vec![range_op(get("a")), range_op(prefix("a"))],
        failure: vec![range_op(get("b"))],
    };
    for serializable in [false, true] {
        let mut txn = reads.clone();
        for op in txn.success.iter_mut().chain(&mut txn.failure) {
            if let Some(Request::RequestRange(range)) = &mut op.request {
                range.serializable = serializable;
            }
        }
        let answer = kv.txn(txn).await.unwrap().into_inner();
        assert!(answer.succeeded);
        assert_eq!(answer.header.unwrap().revision, 2);
        kv.range(pb::RangeRequest {
            serializable,
            ..get("a")
        })
        .await
        .unwrap();
    }
    assert_eq!(index().await, before);
    let write = pb::TxnRequest {
        success: vec![put_op(put("b", "v"))],
        ..reads
    };
    kv.txn(write).await.unwrap();
    assert_eq!(index().await, before + 1);
}
