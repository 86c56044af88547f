//! Status, hashes, members and the answers of a cluster of one.

use ballast_api::etcdserverpb as pb;
use pb::auth_client::AuthClient;
use tonic::Code;

use crate::harness::{Server, eventually, put, refused};

#[tokio::test]
async fn status_has_every_field() {
    let server = Server::start();
    let mut kv = server.kv().await;
    kv.put(put("a", "v")).await.unwrap();
    // The version of the cluster is decided at about the time of the first request, by an entry of its own.
    let told = eventually("the storage version", || async {
        let mut maintenance = server.maintenance().await;
        let told = maintenance.status(pb::StatusRequest {}).await;
        let told = told.unwrap().into_inner();
        (!told.storage_version.is_empty()).then_some(told)
    })
    .await;
    let header = told.header.unwrap();
    assert_eq!(told.version, "3.7.3");
    assert_eq!(told.storage_version, "3.7.0");
    assert_eq!(told.leader, header.member_id);
    assert_eq!(header.revision, 2);
    assert!(
        told.db_size > 0 && told.db_size_in_use > 0 && told.db_size_in_use <= told.db_size,
        "{told:?}"
    );
    assert!(
        told.raft_index > 0 && told.raft_applied_index > 0 && told.raft_term > 0,
        "{told:?}"
    );
    assert_eq!(told.db_size_quota, 2 * 1024 * 1024 * 1024);
    assert!(
        !told.is_learner && told.errors.is_empty() && told.downgrade_info.is_some(),
        "{told:?}"
    );
}

#[tokio::test]
async fn the_member_list_names_this_member() {
    let server = Server::start();
    let listed = server
        .cluster()
        .await
        .member_list(pb::MemberListRequest { linearizable: true })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(listed.members.len(), 1);
    let member = &listed.members[0];
    assert_eq!(member.name, "one");
    assert_eq!(member.id, listed.header.unwrap().member_id);
    assert_eq!(member.client_ur_ls, [server.url()]);
    assert_eq!(member.peer_ur_ls, ["http://localhost:2380"]);
    // As etcd derives them from the name, the peer URL and the token.
    assert_eq!(format!("{:x}", member.id), "8e9e05c52164694d");
}

#[tokio::test]
async fn equal_histories_have_equal_hashes_across_a_restart() {
    let mut server = Server::start();
    let mut kv = server.kv().await;
    for i in 0..20 {
        kv.put(put(format!("h/{}", i % 5), i.to_string()))
            .await
            .unwrap();
    }
    kv.compact(pb::CompactionRequest {
        revision: 10,
        physical: true,
    })
    .await
    .unwrap();
    let hash = |revision| pb::HashKvRequest { revision };
    let first = server
        .maintenance()
        .await
        .hash_kv(hash(0))
        .await
        .unwrap()
        .into_inner();
    assert_eq!((first.compact_revision, first.hash_revision), (10, 21));
    refused(
        server.maintenance().await.hash_kv(hash(9)).await,
        Code::OutOfRange,
        "etcdserver: mvcc: required revision has been compacted",
    );
    refused(
        server.maintenance().await.hash_kv(hash(22)).await,
        Code::OutOfRange,
        "etcdserver: mvcc: required revision is a future revision",
    );
    server.restart();
    let second = server
        .maintenance()
        .await
        .hash_kv(hash(21))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(first.hash, second.hash);
}

#[tokio::test]
async fn a_store_without_users_says_so() {
    let server = Server::start();
    let mut auth = AuthClient::new(server.channel().await);
    let told = auth
        .auth_status(pb::AuthStatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert!(!told.enabled);
    refused(
        auth.authenticate(pb::AuthenticateRequest::default()).await,
        Code::FailedPrecondition,
        "etcdserver: authentication is not enabled",
    );
    let mut maintenance = server.maintenance().await;
    refused(
        maintenance
            .move_leader(pb::MoveLeaderRequest { target_id: 5 })
            .await,
        Code::FailedPrecondition,
        "etcdserver: bad leader transferee",
    );
}

async fn hash(server: &Server) -> (u32, i64) {
    let mut maintenance = server.maintenance().await;
    let told = maintenance.hash(pb::HashRequest {}).await.unwrap();
    let told = told.into_inner();
    (told.hash, told.header.unwrap().revision)
}

#[tokio::test]
async fn the_hash_of_everything_changes_with_what_is_stored_and_only_then() {
    let mut server = Server::start();
    let mut kv = server.kv().await;
    let mut seen = vec![hash(&server).await];
    for i in 0..5 {
        kv.put(put("k", i.to_string())).await.unwrap();
    }
    seen.push(hash(&server).await);
    server
        .leases()
        .await
        .lease_grant(pb::LeaseGrantRequest { ttl: 1000, id: 5 })
        .await
        .unwrap();
    seen.push(hash(&server).await);
    let compaction = pb::CompactionRequest {
        revision: 6,
        physical: true,
    };
    kv.compact(compaction).await.unwrap();
    seen.push(hash(&server).await);
    for (i, one) in seen.iter().enumerate() {
        assert!(
            seen[i + 1..].iter().all(|other| other.0 != one.0),
            "{seen:?}"
        );
    }
    let last = seen[3];
    assert_eq!(last.1, 6);
    let mut maintenance = server.maintenance().await;
    maintenance
        .defragment(pb::DefragmentRequest {})
        .await
        .unwrap();
    assert_eq!(hash(&server).await, last);
    server.restart();
    assert_eq!(hash(&server).await, last);
    server.kill_and_restart();
    assert_eq!(hash(&server).await, last);
}

#[tokio::test]
async fn alarms_are_kept_by_member_and_kind() {
    use pb::alarm_request::AlarmAction::{Activate, Deactivate, Get};

    let mut server = Server::start();
    let mut maintenance = server.maintenance().await;
    let (none, no_space, corrupt) = (0, 1, 2);
    for (action, member_id, alarm, expected) in [
        // A kind is needed to raise one; what is not raised cannot be disarmed.
        (Activate, 7, none, vec![]),
        (Deactivate, 7, no_space, vec![]),
        (Activate, 7, no_space, vec![(7, no_space)]),
        (Activate, 7, no_space, vec![(7, no_space)]),
        // A member nobody knows, and a kind nobody knows.
        (Activate, 99, no_space, vec![(99, no_space)]),
        (Activate, 7, 9, vec![(7, 9)]),
        (Activate, 8, corrupt, vec![(8, corrupt)]),
        (Get, 0, none, vec![(7, 1), (99, 1), (8, 2), (7, 9)]),
        (Get, 7, no_space, vec![(7, 1), (99, 1)]),
        (Get, 0, corrupt, vec![(8, 2)]),
        (Deactivate, 8, no_space, vec![]),
        (Deactivate, 0, none, vec![]),
        (Deactivate, 8, corrupt, vec![(8, corrupt)]),
        (Deactivate, 8, corrupt, vec![]),
        (Get, 0, none, vec![(7, 1), (99, 1), (7, 9)]),
    ] {
        let request = pb::AlarmRequest {
            action: action as i32,
            member_id,
            alarm,
        };
        let told = maintenance.alarm(request).await.unwrap().into_inner();
        let alarms: Vec<_> = told.alarms.iter().map(|a| (a.member_id, a.alarm)).collect();
        assert_eq!(alarms, expected, "{request:?}");
        assert!(told.header.is_some_and(|header| header.revision == 1));
    }
    server.restart();
    let maintenance = server.maintenance().await;
    let errors = eventually("there is a leader", || {
        let mut maintenance = maintenance.clone();
        async move {
            let told = maintenance.status(pb::StatusRequest {}).await.unwrap();
            let told = told.into_inner();
            if told.leader == 0 {
                assert_eq!(told.errors[0], "etcdserver: no leader");
                return None;
            }
            Some(told.errors)
        }
    })
    .await;
    let expected = [
        "memberID:7 alarm:NOSPACE",
        "memberID:99 alarm:NOSPACE",
        "memberID:7 alarm:9",
    ];
    assert_eq!(errors, expected);
    // One member's alarm is all members'.
    refused(
        server.kv().await.put(put("a", "v")).await,
        Code::ResourceExhausted,
        "etcdserver: mvcc: database space exceeded",
    );
}

#[tokio::test]
async fn the_leader_hands_over_to_itself_and_a_negative_quota_is_told_as_given() {
    let server = Server::start_with(&["--quota-backend-bytes", "-7"]);
    let mut maintenance = server.maintenance().await;
    let told = maintenance.status(pb::StatusRequest {}).await.unwrap();
    let told = told.into_inner();
    assert_eq!(told.db_size_quota, -7);
    let request = pb::MoveLeaderRequest {
        target_id: told.leader,
    };
    // etcd answers without a header.
    let moved = maintenance.move_leader(request).await.unwrap();
    assert_eq!(moved.into_inner(), pb::MoveLeaderResponse::default());
}

/// A snapshot's reader holds compactions up; when it goes away, they go on, and the disk is free of what it held.
#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_left_halfway_holds_nothing_up() {
    let server = Server::start();
    let mut kv = server.kv().await;
    for i in 0..60 {
        kv.put(put("k", vec![i; 100_000])).await.unwrap();
    }
    let mut maintenance = server.maintenance().await;
    let mut pieces = maintenance
        .snapshot(pb::SnapshotRequest {})
        .await
        .unwrap()
        .into_inner();
    pieces.message().await.unwrap().unwrap();
    let compaction = pb::CompactionRequest {
        revision: 61,
        physical: true,
    };
    let mut compacting = tokio::spawn(async move { kv.compact(compaction).await });
    // While it is read, writes, defragmentations and hashes go on, and the compaction waits.
    let mut kv = server.kv().await;
    kv.put(put("other", "v")).await.unwrap();
    let mut other = server.maintenance().await;
    other.defragment(pb::DefragmentRequest {}).await.unwrap();
    other
        .hash_kv(pb::HashKvRequest { revision: 0 })
        .await
        .unwrap();
    let soon = std::time::Duration::from_millis(300);
    assert!(tokio::time::timeout(soon, &mut compacting).await.is_err());
    drop(pieces);
    compacting.await.unwrap().unwrap();
    maintenance
        .defragment(pb::DefragmentRequest {})
        .await
        .unwrap();
    let told = maintenance.status(pb::StatusRequest {}).await.unwrap();
    assert!(told.into_inner().db_size < 1_000_000);
}
