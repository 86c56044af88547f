//! Leaders that die, stand still, or leave.

use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use futures::StreamExt;
use rustix::process::Signal;

use crate::harness::{Cluster, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn writes_go_on_after_the_leader_was_killed_and_it_comes_back() {
    let mut cluster = Cluster::start(3, &[]).await;
    cluster.members[0].put("before", "1").await.unwrap();
    let leader = cluster.leader().await;
    cluster.members[leader].kill();
    let next = (leader + 1) % 3;
    cluster.members[next].put_eventually("after", "2").await;
    cluster.run(leader, "new");
    cluster.ready().await;
    let back = &cluster.members[leader];
    assert_eq!(back.get("before").await.unwrap().as_deref(), Some("1"));
    assert_eq!(back.get("after").await.unwrap().as_deref(), Some("2"));
    cluster.agree().await;
}

/// etcd#20418: what a leader is asked while it stands still is not answered from what it knew.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_stood_still_reads_nothing_stale_and_expires_no_lease() {
    let cluster = Cluster::start(3, &[]).await;
    let leader = cluster.leader().await;
    let next = (leader + 1) % 3;
    let paused = &cluster.members[leader];
    let running = &cluster.members[next];
    paused.put("k", "old").await.unwrap();
    let request = pb::LeaseGrantRequest { ttl: 4, id: 9 };
    paused.lease().lease_grant(request).await.unwrap();
    let put = pb::PutRequest {
        key: "leased".into(),
        lease: 9,
        ..Default::default()
    };
    running.kv().put(put).await.unwrap();

    paused.signal(Signal::STOP);
    // Connected before, asked while it stands still.
    let asked = tokio::spawn({
        let mut kv = paused.kv();
        let request = pb::RangeRequest {
            key: "k".into(),
            ..Default::default()
        };
        async move { kv.range(request).await }
    });
    eventually("another leader", || async {
        let status = running.status().await.ok()?;
        let old = status.leader == 0 || status.leader == old_leader(&cluster, leader);
        (!old).then_some(())
    })
    .await;
    running.put_eventually("k", "new").await;
    // Past the lease's first end; the new leader is told that it is wanted still.
    let kept_until = tokio::time::Instant::now() + Duration::from_secs(5);
    while tokio::time::Instant::now() < kept_until {
        let once = futures::stream::iter([pb::LeaseKeepAliveRequest { id: 9 }]);
        let answers = running.lease().lease_keep_alive(once).await.unwrap();
        let answer = answers.into_inner().next().await.unwrap().unwrap();
        assert!(answer.ttl > 0, "the lease is gone");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    paused.signal(Signal::CONT);
    if let Ok(answer) = asked.await.unwrap() {
        let answer = answer.into_inner();
        assert_eq!(&answer.kvs[0].value[..], b"new");
    }
    eventually("an answer of the old leader", || async {
        paused
            .get("k")
            .await
            .ok()
            .filter(|value| value.as_deref() == Some("new"))
    })
    .await;
    let request = pb::LeaseTimeToLiveRequest { id: 9, keys: true };
    let told = paused.lease().lease_time_to_live(request).await.unwrap();
    assert_eq!(told.into_inner().keys, ["leased"]);
    cluster.agree().await;
}

/// The id under which the others knew it.
fn old_leader(cluster: &Cluster, at: usize) -> u64 {
    let log = cluster.members[at].log();
    let (_, id) = log.split_once("\"local-member-id\":\"").unwrap();
    u64::from_str_radix(id.split('"').next().unwrap(), 16).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_stopped_hands_over_first() {
    let mut cluster = Cluster::start(3, &[]).await;
    let leader = cluster.leader().await;
    cluster.members[leader].signal(Signal::TERM);
    cluster.members[leader].ended().await;
    cluster.members[leader]
        .logged("leadership transfer finished")
        .await;
    let next = (leader + 1) % 3;
    cluster.members[next].put("k", "v").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leadership_moves_to_voters_only_and_from_the_leader_only() {
    let cluster = Cluster::start(3, &[]).await;
    let leader = cluster.leader().await;
    let target = (leader + 1) % 3;
    let target_id = cluster.members[target].id().await;
    let asked = |at: usize, target_id: u64| {
        let request = pb::MoveLeaderRequest { target_id };
        let mut client = cluster.members[at].maintenance();
        async move { client.move_leader(request).await }
    };
    let refused = asked(target, target_id).await.unwrap_err();
    assert_eq!(refused.message(), "etcdserver: not leader");
    let refused = asked(leader, 1).await.unwrap_err();
    assert_eq!(refused.message(), "etcdserver: bad leader transferee");
    asked(leader, target_id).await.unwrap();
    let status = cluster.members[leader].status().await.unwrap();
    assert_eq!(status.leader, target_id);
    cluster.members[leader].put("k", "v").await.unwrap();
}
