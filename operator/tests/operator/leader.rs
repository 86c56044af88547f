//! Leader election against an API server in memory: one leads, the next follows at once when the
//! lease is given up, and a leader whose lease another holds stops.

use std::time::Duration;

use ballast_operator::leader::Candidate;
use serde_json::json;

use crate::support::fake_kube::FakeKube;

const LEASES: &str = "apis/coordination.k8s.io/v1/namespaces/default/leases";
/// Long enough for two tries, short enough for a test.
const A_WHILE: Duration = Duration::from_secs(4);

fn candidate(kube: &FakeKube, identity: &str) -> Candidate {
    Candidate::new(kube.client(), "default", "lease", identity)
}

fn holder(kube: &FakeKube) -> serde_json::Value {
    kube.get(LEASES, "lease").unwrap()["spec"]["holderIdentity"].clone()
}

#[tokio::test]
async fn a_lease_that_is_given_up_is_taken_at_once_and_not_before() {
    let kube = FakeKube::default();
    let (mut first, mut second) = (candidate(&kube, "a"), candidate(&kube, "b"));
    first.acquire().await;
    assert_eq!(holder(&kube), "a");
    let waited = tokio::time::timeout(Duration::from_millis(500), second.acquire()).await;
    assert!(waited.is_err(), "two operators lead");
    first.release().await.unwrap();
    assert!(holder(&kube).is_null());
    tokio::time::timeout(A_WHILE, second.acquire())
        .await
        .unwrap();
    assert_eq!(holder(&kube), "b");
    assert_eq!(
        kube.get(LEASES, "lease").unwrap()["spec"]["leaseTransitions"],
        1
    );
}

#[tokio::test]
async fn a_leader_whose_lease_another_holds_stops_and_does_not_release_it() {
    let kube = FakeKube::default();
    let mut leader = candidate(&kube, "a");
    leader.acquire().await;
    let other = json!({ "spec": { "holderIdentity": "b", "leaseDurationSeconds": 15 } });
    kube.change(LEASES, "lease", other);
    tokio::time::timeout(A_WHILE, leader.keep())
        .await
        .expect("it goes on leading");
    leader.release().await.unwrap();
    assert_eq!(holder(&kube), "b");
}

#[tokio::test]
async fn a_leader_renews() {
    let kube = FakeKube::default();
    let mut leader = candidate(&kube, "a");
    leader.acquire().await;
    kube.writes();
    let kept = tokio::time::timeout(A_WHILE, leader.keep()).await;
    assert!(kept.is_err(), "it stopped leading");
    assert!(kube.writes().iter().any(|w| w.starts_with("PUT")));
}
