//! `--force-new-cluster`: one of three goes on alone with its data, and grows again.

use ballast_api::etcdserverpb as pb;

use crate::harness::{Cluster, eventually};

async fn listed(cluster: &Cluster) -> Vec<u64> {
    let request = pb::MemberListRequest { linearizable: true };
    let listed = cluster.members[0].cluster().member_list(request).await;
    let listed = listed.unwrap().into_inner();
    listed.members.iter().map(|member| member.id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_three_goes_on_alone_keeps_the_others_out_and_grows_again() {
    const FORCE: &str = "--force-new-cluster";
    let mut cluster = Cluster::start(3, &[]).await;
    for n in 0..50 {
        let member = &cluster.members[n % 3];
        member.put_eventually(&format!("k{n}"), "before").await;
    }
    cluster.agree().await;
    let (_, revision) = cluster.members[0].hash().await.unwrap();
    // One that only followed: somebody else's word stands in its log.
    let leader = cluster.leader().await;
    cluster.members.swap(0, (leader + 1) % 3);
    let own = cluster.members[0].id().await;
    let lost = [cluster.members[1].id().await, cluster.members[2].id().await];
    for member in &mut cluster.members {
        member.kill();
    }
    let mut others = cluster.members.split_off(1);

    cluster.add_flag(FORCE);
    cluster.run(0, "new");
    cluster.ready().await;
    let alone = &cluster.members[0];
    assert_eq!(listed(&cluster).await, [own]);
    assert_eq!(alone.id().await, own);
    assert_eq!(alone.get("k49").await.unwrap().as_deref(), Some("before"));
    let put = alone.put("alone", "1").await.unwrap();
    assert_eq!(put, revision + 1);

    // It stays so without the flag.
    cluster.stop(0).await;
    let (code, said) = cluster.members[0].check();
    assert_eq!(code, Some(0), "{said}");
    cluster.drop_flag(FORCE);
    cluster.run(0, "new");
    cluster.ready().await;
    assert_eq!(listed(&cluster).await, [own]);

    // The others, a majority of what was, come back with their data, and are told.
    cluster.members.append(&mut others);
    for at in [1, 2] {
        cluster.run(at, "new");
    }
    for at in [1, 2] {
        let member = &mut cluster.members[at];
        assert!(member.ended().await.success());
        let text = "the member has been permanently removed from the cluster";
        assert!(member.log().contains(text), "{}", member.log());
    }
    // Nor is one let in that asks who it is.
    cluster.members[1].lose_data();
    cluster.run(1, "existing");
    assert!(!cluster.members[1].ended().await.success());
    assert!(cluster.members[1].log().contains("add it with"));
    cluster.members.truncate(1);
    cluster.members[0].put("alone", "2").await.unwrap();

    for _ in 0..2 {
        let at = cluster.grow().await;
        let member = &cluster.members[at];
        eventually("an answer of the new voter", || async {
            member.get("k0").await.ok().flatten()
        })
        .await;
    }
    let members = listed(&cluster).await;
    assert_eq!(members.len(), 3);
    assert!(lost.iter().all(|id| !members.contains(id)));
    // Three again: one may be missed.
    let leader = cluster.leader().await;
    cluster.members[leader].kill();
    let other = &cluster.members[(leader + 1) % 3];
    other.put_eventually("three", "1").await;
    cluster.run(leader, "existing");
    cluster.ready().await;
    for member in &cluster.members {
        assert_eq!(member.get("alone").await.unwrap().as_deref(), Some("2"));
    }
    cluster.agree().await;
}

/// What only a minority had is not known to be lost: it may have been acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_member_has_stays_though_nobody_else_has_it() {
    // Long enough that a leader which has just lost the others still takes a write into its log.
    let mut cluster = Cluster::start(3, &["--election-timeout=5000"]).await;
    cluster.members[0].put_eventually("k", "all").await;
    cluster.agree().await;
    let leader = cluster.leader().await;
    cluster.members.swap(0, leader);
    for at in [1, 2] {
        cluster.members[at].kill();
    }
    // It is in the log of the one that led, and in no other; it is never answered.
    assert!(cluster.members[0].put("k", "one").await.is_err());
    cluster.members[0].kill();
    cluster.members.truncate(1);
    cluster.add_flag("--force-new-cluster");
    cluster.run(0, "new");
    cluster.ready().await;
    let read = cluster.members[0].get("k").await.unwrap();
    assert_eq!(read.as_deref(), Some("one"));
}
