//! Members that come and go, and those that are kept out.

use ballast_api::etcdserverpb as pb;
use tonic::Code;

use crate::harness::{Cluster, Member, eventually, is};

#[tokio::test(flavor = "multi_thread")]
async fn one_grows_to_three_and_five_through_learners_and_shrinks_again() {
    let mut cluster = Cluster::start(1, &[]).await;
    cluster.members[0].put("first", "1").await.unwrap();
    for count in 2..=5 {
        let at = cluster.grow().await;
        let member = &cluster.members[at];
        eventually("an answer of the new voter", || async {
            member.get("first").await.ok().flatten()
        })
        .await;
        member.put(&format!("by{count}"), "x").await.unwrap();
    }
    cluster.agree().await;
    for _ in 0..2 {
        let leader = cluster.leader().await;
        // The leader first, then one that follows.
        let id = cluster.members[leader].id().await;
        let asked = (leader + 1) % cluster.members.len();
        let request = pb::MemberRemoveRequest { id };
        eventually("a removal", || async {
            let removed = cluster.members[asked]
                .cluster()
                .member_remove(request)
                .await;
            match removed {
                Ok(response) => Some(response),
                // Of an attempt before, whose answer was lost.
                Err(status) if status.code() == Code::NotFound => {
                    Some(tonic::Response::new(pb::MemberRemoveResponse::default()))
                }
                Err(_) => None,
            }
        })
        .await;
        assert!(cluster.members[leader].ended().await.success());
        cluster.members.remove(leader);
        cluster.members[0].put_eventually("after", "x").await;
    }
    let request = pb::MemberListRequest { linearizable: true };
    let listed = cluster.members[0].cluster().member_list(request).await;
    assert_eq!(listed.unwrap().into_inner().members.len(), 3);
    cluster.agree().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_learner_answers_what_learners_answer() {
    let mut cluster = Cluster::start(1, &[]).await;
    cluster.members[0].put("k", "v").await.unwrap();
    let at = cluster.add_member();
    let request = pb::MemberAddRequest {
        peer_ur_ls: vec![cluster.members[at].peer_url()],
        is_learner: true,
    };
    let mut leader = cluster.members[0].cluster();
    let added = leader.member_add(request.clone()).await.unwrap();
    let id = added.into_inner().member.unwrap().id;
    // The same URL alone would be the same id within the second.
    let mut twice = request;
    twice.peer_ur_ls.push("http://127.0.0.1:1".to_owned());
    let refused = leader.member_add(twice).await.unwrap_err();
    assert!(
        is(
            &refused,
            Code::FailedPrecondition,
            "etcdserver: Peer URLs already exists"
        ),
        "{refused:?}"
    );
    let another = pb::MemberAddRequest {
        peer_ur_ls: vec!["http://127.0.0.1:1".to_owned()],
        is_learner: true,
    };
    let refused = leader.member_add(another).await.unwrap_err();
    assert!(is(
        &refused,
        Code::FailedPrecondition,
        "etcdserver: too many learner members in cluster"
    ));
    // Not started, it has nothing of the log.
    let promote = pb::MemberPromoteRequest { id };
    let refused = leader.member_promote(promote).await.unwrap_err();
    assert!(is(
        &refused,
        Code::FailedPrecondition,
        "etcdserver: can only promote a learner member which is in sync with leader"
    ));
    cluster.run(at, "existing");
    let learner = &cluster.members[at];
    eventually("the learner", || async {
        learner.get_serializable("k").await.ok().flatten()
    })
    .await;
    assert!(learner.status().await.unwrap().is_learner);
    let text = "etcdserver: rpc not supported for learner";
    for refused in [
        learner.get("k").await.unwrap_err(),
        learner.put("k", "w").await.unwrap_err(),
        learner
            .cluster()
            .member_list(pb::MemberListRequest::default())
            .await
            .unwrap_err(),
    ] {
        assert!(is(&refused, Code::FailedPrecondition, text), "{refused:?}");
    }
    // Other URLs make no voter of it.
    let update = pb::MemberUpdateRequest {
        id,
        peer_ur_ls: vec![learner.peer_url(), "http://127.0.0.1:1".to_owned()],
    };
    let updated = leader.member_update(update).await.unwrap().into_inner();
    let row = updated.members.iter().find(|row| row.id == id).unwrap();
    assert!(row.is_learner && row.peer_ur_ls.len() == 2, "{row:?}");
    let refused = leader
        .member_promote(pb::MemberPromoteRequest { id: 1 })
        .await
        .unwrap_err();
    assert!(is(&refused, Code::NotFound, "etcdserver: member not found"));
}

/// Added as a voter, it counts once it runs: until then the one there is goes on alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_voter_that_does_not_run_yet_stops_nobody() {
    let mut cluster = Cluster::start(1, &[]).await;
    let at = cluster.add_member();
    let request = pb::MemberAddRequest {
        peer_ur_ls: vec![cluster.members[at].peer_url()],
        is_learner: false,
    };
    let mut client = cluster.members[0].cluster();
    let added = client.member_add(request).await.unwrap().into_inner();
    assert!(added.members.iter().all(|member| !member.is_learner));
    cluster.members[0].put("k", "v").await.unwrap();
    cluster.run(at, "existing");
    cluster.ready().await;
    // Now there are two, and each is needed.
    cluster.members[at].put("k", "w").await.unwrap();
    let status = cluster.members[at].status().await.unwrap();
    assert!(!status.is_learner);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_member_stays_out() {
    let mut cluster = Cluster::start(3, &["--strict-reconfig-check=false"]).await;
    let leader = cluster.leader().await;
    let gone = (leader + 1) % 3;
    let id = cluster.members[gone].id().await;
    let own = cluster.members[leader].id().await;
    let other = cluster.members[3 - leader - gone].id().await;
    let known = async |member: &Member| {
        let told = member.metrics().await;
        [own, other, id].map(|id| {
            let series = format!("known_peers{{Local=\"{own:x}\",Remote=\"{id:x}\"}} 1");
            told.contains(&series)
        })
    };
    assert_eq!(known(&cluster.members[leader]).await, [true, true, true]);
    let request = pb::MemberRemoveRequest { id };
    let mut client = cluster.members[leader].cluster();
    client.member_remove(request).await.unwrap();
    assert_eq!(known(&cluster.members[leader]).await, [true, true, false]);
    let refused = client.member_remove(request).await.unwrap_err();
    assert!(is(&refused, Code::NotFound, "etcdserver: member not found"));
    let text = "the member has been permanently removed from the cluster";
    assert!(cluster.members[gone].ended().await.success());
    assert!(cluster.members[gone].log().contains(text));
    cluster.run(gone, "existing");
    assert!(cluster.members[gone].ended().await.success());
    assert!(cluster.members[gone].log().contains(text));
    // Not with an empty disk either: nobody has its URL any more.
    cluster.members[gone].lose_data();
    cluster.run(gone, "existing");
    assert!(!cluster.members[gone].ended().await.success());
    assert!(cluster.members[gone].log().contains("add it with"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_founder_that_lost_its_data_is_no_founder_again() {
    let mut cluster = Cluster::start(3, &[]).await;
    cluster.members[2].kill();
    cluster.members[2].lose_data();
    cluster.run(2, "new");
    assert!(!cluster.members[2].ended().await.success());
    let log = cluster.members[2].log();
    assert!(log.contains("has already been bootstrapped"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_of_another_cluster_is_refused_on_both_sides() {
    let mut cluster = Cluster::start(3, &[]).await;
    cluster.members[2].kill();
    cluster.members[2].lose_data();
    cluster.set_token("another");
    cluster.run(2, "new");
    cluster.members[2]
        .logged("request cluster ID mismatch")
        .await;
    eventually("a refusal", || async {
        let told = "request cluster ID mismatch";
        let others = &cluster.members[..2];
        others
            .iter()
            .any(|member| member.log().contains(told))
            .then_some(())
    })
    .await;
    // The one that was killed may have led: a write passed on to it is of unknown fate.
    cluster.members[0].put_eventually("k", "v").await;
}
