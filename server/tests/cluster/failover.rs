//! Leaders that die, stand still, or leave.

use std::time::Duration;

use ballast_api::{ballastpeerpb as peerpb, etcdserverpb as pb};
use futures::StreamExt;
use rustix::process::Signal;

use crate::harness::{Cluster, eventually, introduced};

const BY_LEASE: &str = "--leader-lease-reads";

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
    stands_still(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_does_one_that_answers_by_its_lease() {
    stands_still(&[BY_LEASE]).await;
}

async fn stands_still(flags: &[&str]) {
    let cluster = Cluster::start(3, flags).await;
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

/// Stops both followers, and gives how long after that the last linearizable read was asked for that the leader answered.
async fn answered_alone(flags: &[&str]) -> Option<Duration> {
    const PATIENCE: Duration = Duration::from_millis(200);
    let cluster = Cluster::start(3, flags).await;
    let leader = cluster.leader().await;
    let member = &cluster.members[leader];
    member.put("k", "v").await.unwrap();
    // The connection is made before.
    let mut kv = member.kv();
    let request = pb::RangeRequest {
        key: "k".into(),
        ..Default::default()
    };
    kv.range(request.clone()).await.unwrap();
    for at in (0..3).filter(|at| *at != leader) {
        cluster.members[at].signal(Signal::STOP);
    }
    let stopped = tokio::time::Instant::now();
    let mut last = None;
    while stopped.elapsed() < 3 * LEASE {
        let asked = stopped.elapsed();
        let answer = tokio::time::timeout(PATIENCE, kv.range(request.clone())).await;
        if matches!(answer, Ok(Ok(_))) {
            last = Some(asked);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for at in (0..3).filter(|at| *at != leader) {
        cluster.members[at].signal(Signal::CONT);
    }
    cluster.agree().await;
    last
}

/// 0.3 elections of five seconds.
const LEASE: Duration = Duration::from_millis(1500);

/// No round: nobody else need run, as long as nobody else can have been elected.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_answers_by_its_lease_alone_and_not_longer() {
    let slow = ["--election-timeout=5000", "--heartbeat-interval=100"];
    let with_lease = [&slow[..], &[BY_LEASE]].concat();
    let (with, without) = tokio::join!(answered_alone(&with_lease), answered_alone(&slow));
    let last = with.expect("no read was answered by the lease");
    assert!(last < LEASE, "the leader answered alone after {last:?}");
    assert_eq!(without, None, "a round was answered by nobody");
}

/// It may have heard the leader right before it ended, and who reads by the leader's lease counts on that.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_was_restarted_votes_for_nobody_at_once() {
    // 0.4 elections.
    const HELD: Duration = Duration::from_secs(2);
    let mut cluster = Cluster::start(3, &["--election-timeout=5000"]).await;
    cluster.members[0].put("k", "v").await.unwrap();
    cluster.agree().await;
    let leader = cluster.leader().await;
    let (restarted, candidate) = ((leader + 1) % 3, (leader + 2) % 3);
    let from = cluster.members[candidate].id().await;
    let status = cluster.members[restarted].status().await.unwrap();
    let header = status.header.unwrap();
    for at in [leader, candidate] {
        cluster.members[at].signal(Signal::STOP);
    }
    cluster.members[restarted].kill();
    let begun = tokio::time::Instant::now();
    cluster.run(restarted, "new");
    // Of a later term and with all of the log: nothing else stands against it.
    let asked = peerpb::VoteRequest {
        vote: Some(peerpb::Vote {
            term: 1_000,
            voted_for: from,
            committed: false,
        }),
        last: Some(peerpb::LogPosition {
            term: 1_000,
            index: 1_000_000,
        }),
        leadership_transfer: false,
    };
    let member = &cluster.members[restarted];
    let reply = eventually("an answer", || async {
        let asked = introduced(asked, from, &header);
        member.peer().pre_vote(asked).await.ok()
    })
    .await;
    assert!(reply.into_inner().granted);
    let took = begun.elapsed();
    assert!(took >= HELD, "it would vote after {took:?}");
}

/// What the others have open with it ends with it, and is not waited for.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_stops_is_gone_at_once() {
    let mut cluster = Cluster::start(3, &[]).await;
    for member in &cluster.members {
        member.put("k", "v").await.unwrap();
    }
    let leader = cluster.leader().await;
    cluster.stop(leader).await;
    let stopped = &cluster.members[leader];
    stopped.logged("\"stopped\"").await;
    let log = stopped.log();
    assert!(!log.contains("did not end by themselves"), "{log}");
    cluster.members.remove(leader);
    cluster.members[0].put_eventually("k", "w").await;
}

/// What was under way with the library when it ended is no error of anybody.
#[tokio::test(flavor = "multi_thread")]
async fn members_that_stop_under_writes_tell_of_no_error() {
    let mut cluster = Cluster::start(3, &[]).await;
    let writers: Vec<_> = (cluster.members.iter())
        .flat_map(|member| std::iter::repeat_with(|| member.kv()).take(8))
        .map(|mut kv| {
            tokio::spawn(async move {
                let put = || pb::PutRequest {
                    key: "k".into(),
                    value: "v".into(),
                    ..Default::default()
                };
                while kv.put(put()).await.is_ok() {}
            })
        })
        .collect();
    let reached = || async { cluster.members[0].put("reached", "v").await.ok() };
    let begun = eventually("a first write", reached).await;
    eventually("writes under way", || async {
        reached().await.filter(|revision| *revision > begun + 500)
    })
    .await;
    for member in &cluster.members {
        member.signal(Signal::TERM);
    }
    for member in &mut cluster.members {
        member.ended().await;
        member.logged("\"stopped\"").await;
        let log = member.log();
        assert!(!log.contains("\"level\":\"error\""), "{log}");
    }
    for writer in writers {
        writer.await.unwrap();
    }
}
