//! The quota and its alarm.

use ballast_api::etcdserverpb as pb;
use pb::request_op::Request;
use tonic::Code;

use crate::harness::{Server, get, put, refused};
use crate::http::http_get;

const NO_SPACE: &str = "etcdserver: mvcc: database space exceeded";

/// P20: etcd-io/etcd#16779, #9992, PR#12880.
#[tokio::test]
async fn p20_a_full_store_reads_deletes_and_compacts_until_disarmed() {
    let server = Server::start_with(&["--quota-backend-bytes", "16777216"]);
    let mut kv = server.kv().await;
    let mut leases = server.leases().await;
    let mut maintenance = server.maintenance().await;
    let mut written = 0;
    let refusal = loop {
        let key = format!("fill/{written:04}");
        match kv.put(put(key, vec![b'x'; 200_000])).await {
            Ok(_) => written += 1,
            Err(status) => break status,
        }
        assert!(written < 1000, "the quota never held");
    };
    assert_eq!(
        (refusal.code(), refusal.message()),
        (Code::ResourceExhausted, NO_SPACE)
    );
    assert!(written > 20, "refused after {written} puts");

    let (status, body) = http_get(&server, "/health").await;
    assert_eq!(
        (status, body.trim()),
        (503, r#"{"health":"false","reason":"ALARM NOSPACE"}"#)
    );
    let (status, _) = http_get(&server, "/health?exclude=NOSPACE").await;
    assert_eq!(status, 200);

    kv.range(get("fill/0000")).await.unwrap();
    let delete = pb::DeleteRangeRequest {
        key: "fill/".into(),
        range_end: "fill0".into(),
        prev_kv: false,
    };
    kv.delete_range(pb::DeleteRangeRequest {
        key: "fill/0001".into(),
        ..Default::default()
    })
    .await
    .unwrap();
    let txn = |request| pb::TxnRequest {
        success: vec![pb::RequestOp {
            request: Some(request),
        }],
        ..Default::default()
    };
    kv.txn(txn(Request::RequestDeleteRange(delete)))
        .await
        .unwrap();
    refused(
        kv.put(put("a", "v")).await,
        Code::ResourceExhausted,
        NO_SPACE,
    );
    refused(
        kv.txn(txn(Request::RequestPut(put("a", "v")))).await,
        Code::ResourceExhausted,
        NO_SPACE,
    );
    refused(
        leases
            .lease_grant(pb::LeaseGrantRequest { ttl: 10, id: 0 })
            .await,
        Code::ResourceExhausted,
        NO_SPACE,
    );
    let head = kv
        .range(get("a"))
        .await
        .unwrap()
        .into_inner()
        .header
        .unwrap()
        .revision;
    kv.compact(pb::CompactionRequest {
        revision: head,
        physical: true,
    })
    .await
    .unwrap();
    maintenance
        .defragment(pb::DefragmentRequest {})
        .await
        .unwrap();
    let told = maintenance
        .status(pb::StatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert!(told.db_size < 16_777_216, "{told:?}");
    assert_eq!(told.errors.len(), 1, "{told:?}");
    refused(
        kv.put(put("a", "v")).await,
        Code::ResourceExhausted,
        NO_SPACE,
    );

    let alarm = |action| pb::AlarmRequest {
        action,
        member_id: 0,
        alarm: 0,
    };
    let raised = maintenance
        .alarm(alarm(0))
        .await
        .unwrap()
        .into_inner()
        .alarms;
    assert_eq!(raised.len(), 1);
    let disarmed = maintenance
        .alarm(pb::AlarmRequest {
            action: pb::alarm_request::AlarmAction::Deactivate as i32,
            member_id: raised[0].member_id,
            alarm: raised[0].alarm,
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(disarmed.alarms, raised);
    kv.put(put("a", "v")).await.unwrap();
    let (status, body) = http_get(&server, "/health").await;
    assert_eq!(
        (status, body.as_str()),
        (200, r#"{"health":"true","reason":""}"#)
    );
}
