//! Of the other members: whether they are reached, and how long they take.
//!
//! etcd: server/etcdserver/api/rafthttp/metrics.go.

use std::sync::LazyLock;

use prometheus::{IntCounterVec, Opts};

static PROMOTIONS_FAILED: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counters_of(
        "etcd_server_learner_promote_failures",
        "The total number of failed learner promotions (likely learner not ready) while this member is leader.",
        &["Reason"],
    )
});

fn counters_of(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    let counters = IntCounterVec::new(Opts::new(name, help), labels).expect("names are constants");
    super::add(counters.clone());
    counters
}

pub fn promotion_failed(reason: &str) {
    PROMOTIONS_FAILED.with_label_values(&[reason]).inc();
}
