//! Status, hashes, members and the answers of a cluster of one.

use ballast_api::etcdserverpb as pb;
use pb::auth_client::AuthClient;
use tonic::Code;

use crate::harness::{Server, put, refused};

#[tokio::test]
async fn status_has_every_field() {
    let server = Server::start();
    let mut kv = server.kv().await;
    kv.put(put("a", "v")).await.unwrap();
    let told = server
        .maintenance()
        .await
        .status(pb::StatusRequest {})
        .await
        .unwrap()
        .into_inner();
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
