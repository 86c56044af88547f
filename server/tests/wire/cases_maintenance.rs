//! Public bug reports about hashes and health.

use ballast_api::etcdserverpb as pb;
use tonic::Code;

use crate::harness::{Server, put, refused};
use crate::http::http_get;

async fn hash(server: &Server, revision: i64) -> Result<pb::HashKvResponse, tonic::Status> {
    let mut maintenance = server.maintenance().await;
    let answer = maintenance.hash_kv(pb::HashKvRequest { revision }).await;
    answer.map(tonic::Response::into_inner)
}

/// P14 with three members that are not joined: etcd-io/etcd PR#14457, #18337. The same history on each, one of them killed in the
/// middle of it. The compaction leaves its hash, made with the compact revision before; a restart has forgotten it, so that hashes
/// are compared where their compact revisions are equal, as etcd's members do.
#[tokio::test]
async fn p14_hashes_agree_around_a_compacted_delete() {
    const KEYS: i64 = 50;
    let mut servers: Vec<Server> = (0..3).map(|_| Server::start()).collect();
    let head = 1 + 2 * KEYS;
    // A delete in the middle of them.
    let compacted = 1 + KEYS + KEYS / 2;
    for (at, server) in servers.iter_mut().enumerate() {
        let mut kv = server.kv().await;
        for i in 0..KEYS {
            kv.put(put(format!("h/{i:02}"), i.to_string()))
                .await
                .unwrap();
        }
        if at == 1 {
            server.kill_and_restart();
            kv = server.kv().await;
        }
        for i in 0..KEYS {
            let delete = pb::DeleteRangeRequest {
                key: format!("h/{i:02}").into(),
                ..Default::default()
            };
            kv.delete_range(delete).await.unwrap();
        }
        kv.compact(pb::CompactionRequest {
            revision: compacted,
            physical: true,
        })
        .await
        .unwrap();
    }
    let mut heads = Vec::new();
    for compact_revision in [-1, compacted] {
        let mut found = Vec::new();
        for server in &servers {
            let at = hash(server, compacted).await.unwrap();
            let last = hash(server, head).await.unwrap();
            let now = hash(server, 0).await.unwrap();
            assert_eq!(
                (at.compact_revision, at.hash_revision),
                (compact_revision, compacted)
            );
            assert_eq!(
                (last.hash, last.hash_revision, last.compact_revision),
                (now.hash, now.hash_revision, compacted)
            );
            refused(
                hash(server, compacted - 1).await,
                Code::OutOfRange,
                "etcdserver: mvcc: required revision has been compacted",
            );
            refused(
                hash(server, head + 1).await,
                Code::OutOfRange,
                "etcdserver: mvcc: required revision is a future revision",
            );
            found.push(at.hash);
            heads.push(last.hash);
        }
        assert!(found.iter().all(|hash| *hash == found[0]), "{found:?}");
        for server in &mut servers {
            server.restart();
        }
    }
    assert!(heads.iter().all(|hash| *hash == heads[0]), "{heads:?}");
}

fn body(path: &str) -> String {
    match path {
        "/health" => r#"{"health":"true","reason":""}"#.to_owned(),
        _ => "ok\n".to_owned(),
    }
}

/// P19, what of it holds without users: etcd-io/etcd#13144. Users and roles come with a later release.
#[tokio::test]
async fn p19_health_asks_for_no_credentials() {
    let mut server = Server::start();
    for restarted in [false, true] {
        if restarted {
            server.restart();
        }
        // And it is healthy as soon as it says that it serves.
        for path in ["/health", "/livez", "/readyz"] {
            assert_eq!(http_get(&server, path).await, (200, body(path)), "{path}");
        }
    }
}
