//! Leases: bounds, ownership of keys, expiry.

use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use futures::StreamExt;
use tonic::Code;

use crate::harness::{Server, eventually, get, put, refused};

fn grant(ttl: i64, id: i64) -> pb::LeaseGrantRequest {
    pb::LeaseGrantRequest { ttl, id }
}

/// P17: etcd-io/etcd#9374, #14857, #19261, PR#5197.
#[tokio::test]
async fn p17_odd_times_and_unknown_leases_have_etcds_answers() {
    let server = Server::start();
    let mut leases = server.leases().await;
    for ttl in [1, 0, -5] {
        let answer = leases
            .lease_grant(grant(ttl, 0))
            .await
            .unwrap()
            .into_inner();
        assert_eq!(answer.ttl, 2, "asked for {ttl}");
        assert!(answer.id > 0);
    }
    leases.lease_grant(grant(9_000_000_000, 0)).await.unwrap();
    for ttl in [9_000_000_001, 86_400_000_000_000] {
        refused(
            leases.lease_grant(grant(ttl, 0)).await,
            Code::OutOfRange,
            "etcdserver: too large lease TTL",
        );
    }
    leases.lease_grant(grant(100, 42)).await.unwrap();
    refused(
        leases.lease_grant(grant(100, 42)).await,
        Code::FailedPrecondition,
        "etcdserver: lease already exists",
    );
    let mut answers = leases
        .lease_keep_alive(futures::stream::iter([
            pb::LeaseKeepAliveRequest { id: 777 },
            pb::LeaseKeepAliveRequest { id: 42 },
        ]))
        .await
        .unwrap()
        .into_inner();
    let unknown = answers.message().await.unwrap().unwrap();
    assert_eq!((unknown.id, unknown.ttl), (777, 0));
    let renewed = answers.message().await.unwrap().unwrap();
    assert_eq!((renewed.id, renewed.ttl), (42, 100));
    let told = leases
        .lease_time_to_live(pb::LeaseTimeToLiveRequest {
            id: 777,
            keys: false,
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!((told.id, told.ttl), (777, -1));
    refused(
        leases
            .lease_revoke(pb::LeaseRevokeRequest { id: 777 })
            .await,
        Code::NotFound,
        "etcdserver: requested lease not found",
    );
}

/// P18: etcd-io/etcd#6102, #14758.
#[tokio::test]
async fn p18_a_restart_knows_which_lease_owns_a_key() {
    let mut server = Server::start();
    let mut leases = server.leases().await;
    let mut kv = server.kv().await;
    for id in [1, 2] {
        leases.lease_grant(grant(600, id)).await.unwrap();
    }
    let on = |key: &'static str, lease: i64| pb::PutRequest {
        lease,
        ..put(key, "v")
    };
    for request in [
        on("la/x", 1),
        on("la/x", 0),
        on("la/y", 1),
        on("la/y", 2),
        on("la/z", 1),
        pb::PutRequest {
            ignore_lease: true,
            ..put("la/z", "w")
        },
    ] {
        kv.put(request).await.unwrap();
    }
    server.restart();
    let mut leases = server.leases().await;
    let mut kv = server.kv().await;
    let told = leases
        .lease_time_to_live(pb::LeaseTimeToLiveRequest { id: 1, keys: true })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(told.keys, ["la/z"]);
    assert!(
        told.granted_ttl == 600 && told.ttl <= 600 && told.ttl > 500,
        "{told:?}"
    );
    let before = kv
        .range(get("la/x"))
        .await
        .unwrap()
        .into_inner()
        .header
        .unwrap()
        .revision;
    for (lease, left) in [(1, vec!["la/x", "la/y"]), (2, vec!["la/x"])] {
        let answer = leases
            .lease_revoke(pb::LeaseRevokeRequest { id: lease })
            .await
            .unwrap()
            .into_inner();
        assert_eq!(
            answer.header.unwrap().revision,
            before + lease,
            "each revocation is one revision"
        );
        let answer = kv
            .range(crate::harness::prefix("la/"))
            .await
            .unwrap()
            .into_inner();
        assert_eq!(crate::harness::keys(&answer), left, "after lease {lease}");
    }
}

#[tokio::test]
async fn an_expired_lease_takes_its_keys_and_a_kept_one_does_not() {
    let server = Server::start();
    let mut leases = server.leases().await;
    let mut kv = server.kv().await;
    for id in [1, 2] {
        leases.lease_grant(grant(2, id)).await.unwrap();
    }
    for (key, lease) in [("gone", 1), ("kept", 2)] {
        let request = pb::PutRequest {
            lease,
            ..put(key, "v")
        };
        kv.put(request).await.unwrap();
    }
    let keeping = {
        let mut leases = leases.clone();
        tokio::spawn(async move {
            let beats = futures::stream::unfold((), |()| async {
                tokio::time::sleep(Duration::from_millis(300)).await;
                Some((pb::LeaseKeepAliveRequest { id: 2 }, ()))
            });
            let mut answers = leases.lease_keep_alive(beats).await.unwrap().into_inner();
            while let Some(answer) = answers.message().await.unwrap() {
                assert_eq!(answer.ttl, 2);
            }
        })
    };
    let reader = kv.clone();
    eventually("the first lease's key is gone", || {
        let mut kv = reader.clone();
        async move {
            let answer = kv.range(get("gone")).await.unwrap().into_inner();
            (answer.count == 0).then_some(())
        }
    })
    .await;
    let answer = kv.range(get("kept")).await.unwrap().into_inner();
    assert_eq!(answer.count, 1);
    let left = leases
        .lease_leases(pb::LeaseLeasesRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(left.leases, [pb::LeaseStatus { id: 2 }]);
    assert!(!keeping.is_finished(), "{:?}", keeping.await);
    keeping.abort();
}

async fn left(server: &Server, id: i64) -> i64 {
    let request = pb::LeaseTimeToLiveRequest { id, keys: false };
    let mut leases = server.leases().await;
    let told = leases
        .lease_time_to_live(request)
        .await
        .unwrap()
        .into_inner();
    told.ttl
}

/// etcd-io/etcd#9888, #13294.
#[tokio::test]
async fn a_restart_does_not_begin_a_long_lease_anew() {
    let interval = "--lease-checkpoint-interval=1s";
    let mut noted = Server::start_with(&[interval]);
    let mut as_etcd = Server::start_with(&[interval, "--feature-gates=LeaseCheckpoint=false"]);
    for server in [&noted, &as_etcd] {
        let mut leases = server.leases().await;
        leases.lease_grant(grant(60, 1)).await.unwrap();
    }
    for server in [&noted, &as_etcd] {
        eventually("five seconds are gone", || async {
            (left(server, 1).await <= 55).then_some(())
        })
        .await;
    }
    noted.kill_and_restart();
    as_etcd.kill_and_restart();
    // A new leader gives an election's time on top.
    let after = left(&noted, 1).await;
    assert!((40..=58).contains(&after), "{after}");
    let after = left(&as_etcd, 1).await;
    assert!(after >= 59, "{after}");

    // A renewal takes back what was noted, on the disk too.
    let mut answers = noted
        .leases()
        .await
        .lease_keep_alive(futures::stream::iter([pb::LeaseKeepAliveRequest { id: 1 }]))
        .await
        .unwrap()
        .into_inner();
    let renewed = answers.message().await.unwrap().unwrap();
    assert_eq!((renewed.id, renewed.ttl), (1, 60));
    noted.kill_and_restart();
    let after = left(&noted, 1).await;
    assert!(after >= 58, "{after}");
}

#[tokio::test]
async fn a_revocation_is_one_revision_and_deletes_in_order_of_keys() {
    let server = Server::start();
    let mut leases = server.leases().await;
    let mut kv = server.kv().await;
    leases.lease_grant(grant(600, 1)).await.unwrap();
    for key in ["r/c", "r/a", "r/b"] {
        let request = pb::PutRequest {
            lease: 1,
            ..put(key, "v")
        };
        kv.put(request).await.unwrap();
    }
    let told = leases
        .lease_time_to_live(pb::LeaseTimeToLiveRequest { id: 1, keys: true })
        .await
        .unwrap()
        .into_inner();
    let mut keys = told.keys;
    keys.sort();
    assert_eq!(keys, ["r/a", "r/b", "r/c"]);
    let revoked = leases
        .lease_revoke(pb::LeaseRevokeRequest { id: 1 })
        .await
        .unwrap()
        .into_inner();
    let revision = revoked.header.unwrap().revision;
    let create = pb::WatchCreateRequest {
        key: "r/".into(),
        range_end: "r0".into(),
        start_revision: revision,
        ..Default::default()
    };
    let request = pb::WatchRequest {
        request_union: Some(pb::watch_request::RequestUnion::CreateRequest(create)),
    };
    let requests = futures::stream::iter([request]).chain(futures::stream::pending());
    let mut events = pb::watch_client::WatchClient::new(server.channel().await)
        .watch(requests)
        .await
        .unwrap()
        .into_inner();
    let seen = loop {
        let answer = events.message().await.unwrap().unwrap();
        if !answer.events.is_empty() {
            break answer.events;
        }
    };
    let seen: Vec<_> = seen
        .into_iter()
        .map(|event| event.kv.unwrap())
        .map(|kv| (kv.key, kv.mod_revision))
        .collect();
    let expected = ["r/a", "r/b", "r/c"].map(|key| (bytes::Bytes::from(key), revision));
    assert_eq!(seen, expected);
}
