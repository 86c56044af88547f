//! Builds of two releases in one cluster, one member changed at a time, up and down again.

use ballast_api::ballastpeerpb as peerpb;
use ballast_api::{etcdserverpb as pb, membershippb};
use futures::StreamExt as _;
use pb::downgrade_request::DowngradeAction;
use prost::Message as _;
use tonic::{Code, Status};

use crate::harness::{Cluster, Member, eventually, introduced};

async fn ask(member: &Member, action: DowngradeAction, version: &str) -> Result<String, Status> {
    let request = pb::DowngradeRequest {
        action: action as i32,
        version: version.to_owned(),
    };
    let answer = member.maintenance().downgrade(request).await?;
    Ok(answer.into_inner().version)
}

/// That of the cluster, as a member knows it.
async fn version(member: &Member) -> String {
    let status = eventually("status", || async { member.status().await.ok() }).await;
    status.storage_version
}

async fn until_version(cluster: &Cluster, expected: &str) {
    for member in &cluster.members {
        eventually(expected, || async {
            (version(member).await == expected).then_some(())
        })
        .await;
    }
}

/// The metric says that this, without the patch, is the cluster's version, and no other.
async fn version_is_measured(member: &Member, expected: &str) {
    let metrics = member.metrics().await;
    let line = |line: &&str| line.starts_with("etcd_cluster_version{") && line.ends_with(" 1");
    let told: Vec<&str> = metrics.lines().filter(line).collect();
    let expected = format!("etcd_cluster_version{{cluster_version=\"{expected}\"}} 1");
    assert_eq!(told, [expected]);
}

/// Another build takes a member's place, and the cluster serves.
async fn change(cluster: &mut Cluster, at: usize, pretended: Option<&str>) {
    cluster.stop(at).await;
    cluster.pretend(pretended);
    cluster.run(at, "new");
    cluster.members[at]
        .logged("ready to serve client requests")
        .await;
    let writer = &cluster.members[at];
    writer.put_eventually(&format!("k{at}"), &writer.name).await;
    cluster.agree().await;
}

#[tokio::test]
async fn releases_are_changed_one_member_at_a_time() {
    let mut cluster = Cluster::prepare(3, &["--downgrade-check-time=1s"]);
    cluster.pretend(Some("3.6.9"));
    for at in 0..3 {
        cluster.run(at, "new");
    }
    cluster.ready().await;
    until_version(&cluster, "3.6.0").await;

    // Up: the oldest decides.
    change(&mut cluster, 0, None).await;
    change(&mut cluster, 1, None).await;
    assert_eq!(version(&cluster.members[0]).await, "3.6.0");
    change(&mut cluster, 2, None).await;
    until_version(&cluster, "3.7.0").await;
    version_is_measured(&cluster.members[0], "3.7").await;

    // The older one does not come back by itself.
    cluster.stop(0).await;
    cluster.pretend(Some("3.6.9"));
    cluster.run(0, "new");
    assert_eq!(cluster.members[0].ended().await.code(), Some(1));
    let why = "server version is lower than determined cluster version";
    cluster.members[0].logged(why).await;
    cluster.pretend(None);
    cluster.run(0, "new");
    cluster.ready().await;

    // Down, when it is asked for.
    let asked = &cluster.members[1];
    let valid = ask(asked, DowngradeAction::Validate, "3.6").await;
    assert_eq!(valid.unwrap(), "3.7");
    for (target, code, text) in [
        (
            "3.5.0",
            Code::InvalidArgument,
            "etcdserver: invalid downgrade target version",
        ),
        (
            "3.7.0",
            Code::InvalidArgument,
            "etcdserver: invalid downgrade target version",
        ),
        (
            "x",
            Code::InvalidArgument,
            "etcdserver: wrong downgrade target version format",
        ),
    ] {
        let refusal = ask(asked, DowngradeAction::Validate, target)
            .await
            .unwrap_err();
        assert_eq!(
            (refusal.code(), refusal.message()),
            (code, text),
            "{target}"
        );
    }
    ask(asked, DowngradeAction::Enable, "3.6.0").await.unwrap();
    let told = asked.status().await.unwrap().downgrade_info.unwrap();
    assert!(told.enabled && told.target_version == "3.6.0", "{told:?}");
    until_version(&cluster, "3.6.0").await;
    let asked = &cluster.members[1];
    let refusal = ask(asked, DowngradeAction::Enable, "3.5")
        .await
        .unwrap_err();
    let expected = "etcdserver: cluster has a downgrade job in progress";
    assert_eq!(
        (refusal.code(), refusal.message()),
        (Code::FailedPrecondition, expected)
    );
    // Given up, it goes up again.
    ask(asked, DowngradeAction::Cancel, "").await.unwrap();
    until_version(&cluster, "3.7.0").await;

    // Done, it ends by itself.
    let asked = &cluster.members[1];
    ask(asked, DowngradeAction::Enable, "3.6").await.unwrap();
    until_version(&cluster, "3.6.0").await;
    for at in [2, 1, 0] {
        change(&mut cluster, at, Some("3.6.9")).await;
    }
    eventually("the end of the downgrade", || async {
        let status = cluster.members[0].status().await.ok()?;
        (!status.downgrade_info?.enabled).then_some(())
    })
    .await;
    until_version(&cluster, "3.6.0").await;
    version_is_measured(&cluster.members[0], "3.6").await;
}

/// Somebody who knows better, and is believed: what it raised the cluster to, this release does not speak.
#[tokio::test]
async fn a_member_stops_when_the_cluster_outgrows_it() {
    let mut cluster = Cluster::start(1, &[]).await;
    until_version(&cluster, "3.7.0").await;
    let member = &mut cluster.members[0];
    let header = member.status().await.unwrap().header.unwrap();
    let raised = pb::InternalRaftRequest {
        header: Some(pb::RequestHeader {
            id: 1,
            ..Default::default()
        }),
        cluster_version_set: Some(membershippb::ClusterVersionSetRequest {
            ver: "3.8.0".to_owned(),
        }),
        ..Default::default()
    };
    let proposal = peerpb::Proposal {
        number: 1,
        request: raised.encode_to_vec().into(),
    };
    let batch = peerpb::Proposals {
        proposals: vec![proposal],
    };
    // Open until the member is gone.
    let batches = futures::stream::iter([batch]).chain(futures::stream::pending());
    let request = introduced(batches, 0xabc, &header);
    let mut peer = member.peer();
    let proposing = tokio::spawn(async move { peer.propose(request).await.map(drop) });
    let why = "server version is lower than determined cluster version";
    assert_eq!(member.ended().await.code(), Some(1));
    member.logged(why).await;
    proposing.abort();
    // Nor does it go on as if nothing had been.
    cluster.run(0, "new");
    assert_eq!(cluster.members[0].ended().await.code(), Some(1));
    cluster.members[0].logged(why).await;
    // A release that speaks it does.
    cluster.pretend(Some("3.8.0"));
    cluster.run(0, "new");
    cluster.ready().await;
    until_version(&cluster, "3.8.0").await;
}
