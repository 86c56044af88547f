//! Every member answers, and all have the same.

use ballast_api::etcdserverpb as pb;
use futures::StreamExt;
use rustix::process::Signal;

use crate::harness::{Cluster, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn each_of_three_founders_answers_and_they_agree() {
    let cluster = Cluster::start(3, &[]).await;
    for (at, member) in cluster.members.iter().enumerate() {
        let key = format!("k{at}");
        member.put(&key, "v").await.unwrap();
        // What was answered here is here, and everywhere for whoever asks the leader first.
        assert_eq!(
            member.get_serializable(&key).await.unwrap().as_deref(),
            Some("v")
        );
        for other in &cluster.members {
            assert_eq!(other.get(&key).await.unwrap().as_deref(), Some("v"));
        }
    }
    cluster.agree().await;
    // Everybody knows the same leader, and the members by name.
    let leader = cluster.leader().await;
    let leader = cluster.members[leader].id().await;
    for member in &cluster.members {
        eventually("the leader's name", || async {
            (member.status().await.ok()?.leader == leader).then_some(())
        })
        .await;
        let request = pb::MemberListRequest { linearizable: true };
        let listed = member.cluster().member_list(request).await.unwrap();
        let mut names: Vec<String> = listed
            .into_inner()
            .members
            .into_iter()
            .map(|member| member.name)
            .collect();
        names.sort_unstable();
        assert_eq!(names, ["m1", "m2", "m3"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_kept_alive_through_any_member() {
    let cluster = Cluster::start(3, &[]).await;
    let leader = cluster.leader().await;
    let follower = &cluster.members[(leader + 1) % 3];
    let request = pb::LeaseGrantRequest { ttl: 100, id: 7 };
    follower.lease().lease_grant(request).await.unwrap();
    let put = pb::PutRequest {
        key: "leased".into(),
        lease: 7,
        ..Default::default()
    };
    follower.kv().put(put).await.unwrap();
    for member in &cluster.members {
        let once = futures::stream::iter([pb::LeaseKeepAliveRequest { id: 7 }]);
        let answers = member.lease().lease_keep_alive(once).await.unwrap();
        let answer = answers.into_inner().next().await.unwrap().unwrap();
        assert_eq!((answer.id, answer.ttl), (7, 100));
        let request = pb::LeaseTimeToLiveRequest { id: 7, keys: true };
        let told = member.lease().lease_time_to_live(request).await.unwrap();
        let told = told.into_inner();
        assert!(told.ttl > 90, "{told:?}");
        assert_eq!(told.keys, ["leased"]);
        let unknown = pb::LeaseTimeToLiveRequest { id: 8, keys: false };
        let told = member.lease().lease_time_to_live(unknown).await.unwrap();
        assert_eq!(told.into_inner().ttl, -1);
    }
    follower
        .lease()
        .lease_revoke(pb::LeaseRevokeRequest { id: 7 })
        .await
        .unwrap();
    assert_eq!(cluster.members[leader].get("leased").await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_is_far_behind_gets_a_snapshot() {
    let flags = [
        "--snapshot-count=100",
        "--snapshot-catchup-entries=10",
        "--log-level=debug",
    ];
    let mut cluster = Cluster::start(3, &flags).await;
    let leader = cluster.leader().await;
    let behind = (leader + 1) % 3;
    let other = (behind + 1) % 3;
    cluster.members[behind].put("before", "x").await.unwrap();
    cluster.members[behind].kill();
    for n in 0..500 {
        cluster.members[other]
            .put(&format!("k{}", n % 50), &n.to_string())
            .await
            .unwrap();
    }
    // While it is away nothing is read for it, however often it is tried.
    let leading = &cluster.members[leader];
    leading.logged("no snapshot for a member").await;
    assert!(!leading.log().contains("sending merged snapshot"));
    cluster.run(behind, "new");
    cluster.members[behind].logged("installed a snapshot").await;
    cluster.ready().await;
    let member = &cluster.members[behind];
    assert_eq!(member.get("k49").await.unwrap().as_deref(), Some("499"));
    // It goes on from there, as a follower whose answers count and across a restart.
    member.put("after", "y").await.unwrap();
    cluster.agree().await;
    cluster.members[behind].kill();
    cluster.members[other].put("later", "z").await.unwrap();
    cluster.run(behind, "new");
    cluster.ready().await;
    assert_eq!(
        cluster.members[behind]
            .get("later")
            .await
            .unwrap()
            .as_deref(),
        Some("z")
    );
    cluster.agree().await;
    cluster.stop(behind).await;
    let (code, said) = cluster.members[behind].check();
    assert_eq!(code, Some(0), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_majority_only_serializable_reads_are_answered() {
    let mut cluster = Cluster::start(3, &[]).await;
    cluster.members[0].put("k", "v").await.unwrap();
    cluster.agree().await;
    cluster.members[1].kill();
    cluster.members[2].kill();
    let alone = &cluster.members[0];
    eventually("that nobody leads", || async {
        (alone.status().await.ok()?.leader == 0).then_some(())
    })
    .await;
    let status = alone.status().await.unwrap();
    assert_eq!(status.errors, ["etcdserver: no leader"]);
    assert_eq!(
        alone.get_serializable("k").await.unwrap().as_deref(),
        Some("v")
    );
    assert_eq!(
        alone.get("k").await.unwrap_err().message(),
        "etcdserver: request timed out"
    );
    assert_eq!(
        alone.put("k", "w").await.unwrap_err().message(),
        "etcdserver: request timed out"
    );
    cluster.run(1, "new");
    cluster.members[0].put_eventually("k", "x").await;
    cluster.members[0].signal(Signal::TERM);
    assert!(!cluster.members[0].ended().await.success());
}

/// Also with TLS, and by a member that joins.
#[tokio::test(flavor = "multi_thread")]
async fn members_meet_at_socket_files() {
    for flags in [&[][..], &["--peer-auto-tls"]] {
        let mut cluster = Cluster::start_on_sockets(3, flags).await;
        for writer in &cluster.members {
            writer.put_eventually("k", &writer.name).await;
            for reader in &cluster.members {
                let read = reader.get("k").await.unwrap();
                assert_eq!(read.as_ref(), Some(&writer.name));
            }
        }
        let grown = cluster.grow().await;
        let urls = cluster.members[grown].peer_url();
        assert!(urls.starts_with("unix"), "{urls}");
        // Its file outlives the one that is killed, and is no obstacle.
        let leader = cluster.leader().await;
        cluster.members[leader].kill();
        cluster.run(leader, "existing");
        cluster.ready().await;
        cluster.agree().await;
    }
}
