//! The HTTP endpoints on the client port.

use crate::get;
use crate::harness::{Server, put};

/// Status and body.
pub(crate) async fn http_get(server: &Server, path: &str) -> (u16, String) {
    get::get(&format!("{}{path}", server.url())).await
}

#[tokio::test]
async fn health_and_version_read_as_etcds() {
    let server = Server::start();
    for (path, status, body) in [
        ("/health", 200, r#"{"health":"true","reason":""}"#),
        (
            "/health?serializable=true",
            200,
            r#"{"health":"true","reason":""}"#,
        ),
        ("/livez", 200, "ok\n"),
        ("/readyz", 200, "ok\n"),
        ("/livez?verbose", 200, "[+]serializable_read ok\nok\n"),
        ("/readyz/data_corruption", 200, "ok\n"),
        ("/readyz/nothing", 404, "404 page not found\n"),
        ("/nothing", 404, "404 page not found\n"),
    ] {
        let answer = http_get(&server, path).await;
        assert_eq!((answer.0, answer.1.as_str()), (status, body), "{path}");
    }
    let (_, readyz) = http_get(&server, "/readyz?verbose&exclude=non_learner").await;
    assert!(
        readyz.contains("[+]linearizable_read ok") && !readyz.contains("non_learner"),
        "{readyz}"
    );
    let (_, version) = http_get(&server, "/version").await;
    let version: serde_json::Value = serde_json::from_str(&version).unwrap();
    assert_eq!(version["etcdserver"], "3.7.3");
    assert_eq!(version["etcdcluster"], "3.7.0");
}

#[tokio::test]
async fn metrics_count_what_was_done() {
    let server = Server::start();
    let mut kv = server.kv().await;
    for _ in 0..3 {
        kv.put(put("a", "v")).await.unwrap();
    }
    let (status, text) = http_get(&server, "/metrics").await;
    assert_eq!(status, 200);
    for line in [
        "etcd_mvcc_put_total 3",
        "etcd_server_has_leader 1",
        "etcd_server_is_leader 1",
        "etcd_debugging_mvcc_current_revision 4",
        "etcd_server_quota_backend_bytes 2147483648",
        r#"grpc_server_started_total{grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary"} 3"#,
        r#"etcd_server_version{server_version="3.7.3"} 1"#,
    ] {
        assert!(
            text.lines().any(|found| found == line),
            "no {line} in\n{text}"
        );
    }
}
