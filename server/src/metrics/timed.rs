//! How long requests and applies take, by kind and outcome; series are made when first needed and looked up once.
//!
//! etcd: server/etcdserver/metrics.go, server/etcdserver/txn/metrics.go.

use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use ballast_api::etcdserverpb::InternalRaftRequest;
use prometheus::{Histogram, HistogramOpts, HistogramVec, exponential_buckets};

/// Kinds of requests, under etcd's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Range,
    ReadonlyTxn,
    Put,
    DeleteRange,
    Txn,
    Compaction,
    LeaseGrant,
    LeaseRevoke,
    LeaseCheckpoint,
    Alarm,
    ClusterVersionSet,
    ClusterMemberAttrSet,
    DowngradeVersionTest,
    Unknown,
}

const OPS: usize = Op::Unknown as usize + 1;

impl Op {
    pub fn of(request: &InternalRaftRequest) -> Self {
        if request.put.is_some() {
            Op::Put
        } else if request.txn.is_some() {
            Op::Txn
        } else if request.delete_range.is_some() {
            Op::DeleteRange
        } else if request.compaction.is_some() {
            Op::Compaction
        } else if request.lease_grant.is_some() {
            Op::LeaseGrant
        } else if request.lease_revoke.is_some() {
            Op::LeaseRevoke
        } else if request.lease_checkpoint.is_some() {
            Op::LeaseCheckpoint
        } else if request.alarm.is_some() {
            Op::Alarm
        } else if request.cluster_version_set.is_some() {
            Op::ClusterVersionSet
        } else if request.cluster_member_attr_set.is_some() {
            Op::ClusterMemberAttrSet
        } else if request.downgrade_version_test.is_some() {
            Op::DowngradeVersionTest
        } else {
            Op::Unknown
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Op::Range => "Range",
            Op::ReadonlyTxn => "ReadonlyTxn",
            Op::Put => "Put",
            Op::DeleteRange => "DeleteRange",
            Op::Txn => "Txn",
            Op::Compaction => "Compaction",
            Op::LeaseGrant => "LeaseGrant",
            Op::LeaseRevoke => "LeaseRevoke",
            Op::LeaseCheckpoint => "LeaseCheckpoint",
            Op::Alarm => "Alarm",
            Op::ClusterVersionSet => "ClusterVersionSet",
            Op::ClusterMemberAttrSet => "ClusterMemberAttrSet",
            Op::DowngradeVersionTest => "DowngradeVersionTest",
            Op::Unknown => "unknown",
        }
    }
}

/// A histogram for each kind and outcome.
struct ByOp {
    family: HistogramVec,
    /// Failed, succeeded.
    slots: [[OnceLock<Histogram>; 2]; OPS],
    labels: fn(&HistogramVec, Op, bool) -> Histogram,
}

impl ByOp {
    fn new(
        options: HistogramOpts,
        names: &[&str],
        labels: fn(&HistogramVec, Op, bool) -> Histogram,
    ) -> Self {
        let family = HistogramVec::new(options, names).expect("names are constants");
        super::add(family.clone());
        Self {
            family,
            slots: Default::default(),
            labels,
        }
    }

    fn observe(&self, op: Op, success: bool, took: Duration) {
        self.slots[op as usize][usize::from(success)]
            .get_or_init(|| (self.labels)(&self.family, op, success))
            .observe(took.as_secs_f64());
    }
}

const fn text(success: bool) -> &'static str {
    if success { "true" } else { "false" }
}

fn options(name: &str, help: &str, first: f64, count: usize) -> HistogramOpts {
    let buckets = exponential_buckets(first, 2.0, count).expect("the numbers are constants");
    HistogramOpts::new(name, help).buckets(buckets)
}

static REQUESTS: LazyLock<ByOp> = LazyLock::new(|| {
    ByOp::new(
        options(
            "etcd_server_request_duration_seconds",
            "Response latency distribution in seconds for each type.",
            0.001,
            14,
        ),
        &["type", "success"],
        |family, op, success| family.with_label_values(&[op.name(), text(success)]),
    )
});
static APPLIES: LazyLock<ByOp> = LazyLock::new(|| {
    ByOp::new(
        options(
            "etcd_server_apply_duration_seconds",
            "The latency distributions of v2 apply called by backend.",
            0.0001,
            20,
        ),
        &["version", "op", "success"],
        |family, op, success| family.with_label_values(&["v3", op.name(), text(success)]),
    )
});
static RANGES: LazyLock<ByOp> = LazyLock::new(|| {
    ByOp::new(
        options(
            "etcd_server_range_duration_seconds",
            "The latency distributions of txn.Range",
            0.0001,
            20,
        ),
        &["success"],
        |family, _, success| family.with_label_values(&[text(success)]),
    )
});

/// From the check of a request to its answer.
pub fn requested(op: Op, success: bool, took: Duration) {
    REQUESTS.observe(op, success, took);
}

/// One command's effect on the state.
pub fn applied(op: Op, success: bool, took: Duration) {
    APPLIES.observe(op, success, took);
}

/// A range alone, without the barrier before it.
pub fn ranged(success: bool, took: Duration) {
    RANGES.observe(Op::Range, success, took);
}

pub(super) fn start() {
    LazyLock::force(&REQUESTS);
    LazyLock::force(&APPLIES);
    LazyLock::force(&RANGES);
}
