//! What a member tells of itself in its log, and how much.

use ballast_api::etcdserverpb as pb;
use base64::Engine;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::harness::{Server, eventually, free_port, get, put};

/// A value as nobody else would write it.
const SECRET: &str = "Zk3-not-for-any-log-9Qx";

fn op(request: pb::request_op::Request) -> pb::RequestOp {
    pb::RequestOp {
        request: Some(request),
    }
}

/// Everything that carries a value, or answers one.
async fn everything_with_a_secret(server: &Server) {
    let mut kv = server.kv().await;
    let mut leases = server.leases().await;
    for key in ["log/a", "log/b"] {
        kv.put(put(key, SECRET)).await.unwrap();
    }
    let before = pb::PutRequest {
        prev_kv: true,
        ..put("log/a", SECRET)
    };
    kv.put(before).await.unwrap();
    kv.range(get("log/a")).await.unwrap();
    kv.range(crate::harness::prefix("log/")).await.unwrap();
    let compare = pb::Compare {
        target: pb::compare::CompareTarget::Value as i32,
        key: "log/a".into(),
        target_union: Some(pb::compare::TargetUnion::Value(SECRET.into())),
        ..Default::default()
    };
    let inner = pb::TxnRequest {
        success: vec![op(pb::request_op::Request::RequestPut(put(
            "log/d", SECRET,
        )))],
        ..Default::default()
    };
    let txn = pb::TxnRequest {
        compare: vec![compare.clone()],
        success: vec![
            op(pb::request_op::Request::RequestPut(put("log/c", SECRET))),
            op(pb::request_op::Request::RequestTxn(inner)),
        ],
        ..Default::default()
    };
    kv.txn(txn).await.unwrap();
    let reading = pb::TxnRequest {
        compare: vec![compare],
        success: vec![op(pb::request_op::Request::RequestRange(get("log/a")))],
        ..Default::default()
    };
    kv.txn(reading).await.unwrap();
    let on_unknown_lease = pb::PutRequest {
        lease: 4242,
        ..put("log/e", SECRET)
    };
    kv.put(on_unknown_lease).await.unwrap_err();
    leases
        .lease_grant(pb::LeaseGrantRequest { ttl: 60, id: 7 })
        .await
        .unwrap();
    leases
        .lease_revoke(pb::LeaseRevokeRequest { id: 7 })
        .await
        .unwrap();
    let deleting = pb::DeleteRangeRequest {
        key: "log/a".into(),
        prev_kv: true,
        ..Default::default()
    };
    kv.delete_range(deleting).await.unwrap();
}

/// etcd: PR#9821 and the tests of its redaction.
#[tokio::test]
async fn slow_requests_and_applies_are_told_and_values_never() {
    let server = Server::start_with(&[
        "--log-level=debug",
        "--warning-unary-request-duration=1ns",
        "--warning-apply-duration=1ns",
    ]);
    everything_with_a_secret(&server).await;
    let (_, metrics) = crate::http::http_get(&server, "/metrics").await;
    let slow = metrics
        .lines()
        .find_map(|line| line.strip_prefix("etcd_server_slow_apply_total "))
        .unwrap();
    assert!(slow.parse::<f64>().unwrap() >= 8.0, "{slow}");
    // The deletion came last.
    let last = r#"delete_range:<key:\"log/a\" prev_kv:true > "#;
    let log = eventually("the last request is told", || async {
        let log = server.log();
        let told = |message: &str| {
            log.lines()
                .any(|line| line.contains(message) && line.contains(last.trim_end()))
        };
        (told("request stats") && told("apply request took too long")).then_some(log)
    })
    .await;
    let line = |message: &str, part: &str| {
        let wanted = format!(r#""msg":"{message}""#);
        assert!(
            log.lines()
                .any(|line| line.contains(&wanted) && line.contains(part)),
            "no {message} with {part} in\n{log}"
        );
    };
    line("request stats", "/etcdserverpb.KV/Put");
    line("request stats", r#"key:\"log/a\" value_size:23"#);
    line("request stats", r#""remote":"127.0.0.1:"#);
    line("request stats", "/etcdserverpb.KV/Range");
    line("request stats", "/etcdserverpb.Lease/LeaseGrant");
    line(
        "apply request took too long",
        r#"put:<key:\"log/b\" value_size:23"#,
    );
    line("apply request took too long", "read-only range ");
    line("apply request took too long", "read-only txn ");
    line(
        "apply request took too long",
        "lease_revoke:<id:0000000000000007>",
    );
    let bytes = SECRET.as_bytes();
    let numbers: Vec<String> = bytes.iter().map(ToString::to_string).collect();
    for hidden in [
        SECRET.to_owned(),
        base64::prelude::BASE64_STANDARD.encode(bytes),
        hex::encode(bytes),
        numbers.join(", "),
    ] {
        let leak = log.lines().find(|line| line.contains(&hidden));
        assert!(leak.is_none(), "{leak:?}");
    }
}

#[tokio::test]
async fn a_flood_of_slow_requests_does_not_flood_the_log() {
    let server = Server::start_with(&["--warning-unary-request-duration=1ns"]);
    let mut kv = server.kv().await;
    for _ in 0..500 {
        kv.range(get("nothing")).await.unwrap();
    }
    let told = server.log().matches("request stats").count();
    // Twenty a second; five hundred requests take no minute.
    assert!((1..400).contains(&told), "{told} lines");
}

async fn log_level(port: u16, set: Option<&str>) -> (u16, String) {
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let request = http::Request::builder()
        .method(if set.is_some() { "PUT" } else { "GET" })
        .uri(format!("http://127.0.0.1:{port}/debug/log-level"))
        .body(Full::from(set.unwrap_or_default().to_owned()))
        .unwrap();
    let answer = client.request(request).await.unwrap();
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn the_level_of_the_log_is_set_while_it_runs() {
    let port = free_port();
    let metrics = format!("--listen-metrics-urls=http://127.0.0.1:{port}");
    let server = Server::start_with(&[&metrics, "--warning-unary-request-duration=1ns"]);
    let level = |name: &str| (200, format!("{{\"level\":\"{name}\"}}\n"));
    assert_eq!(log_level(port, None).await, level("info"));
    assert_eq!(
        log_level(port, Some(r#"{"level":"error"}"#)).await,
        level("error")
    );
    let told = || server.log().matches("request stats").count();
    let before = told();
    let mut kv = server.kv().await;
    kv.range(get("a")).await.unwrap();
    assert_eq!(told(), before, "warnings are below the level");
    assert_eq!(
        log_level(port, Some(r#"{"level":"debug"}"#)).await,
        level("debug")
    );
    eventually("a warning is told again", || async {
        kv.clone().range(get("a")).await.unwrap();
        (told() > before).then_some(())
    })
    .await;
    assert_eq!(log_level(port, Some("loud")).await.0, 400);
    assert_eq!(log_level(port, None).await, level("debug"));
    // Nobody's business on the clients' port.
    let (status, _) = crate::http::http_get(&server, "/debug/log-level").await;
    assert_eq!(status, 404);
}
