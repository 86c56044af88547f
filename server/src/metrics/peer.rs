//! Of the other members: whether they are reached, and how long they take.
//!
//! etcd: server/etcdserver/api/rafthttp/metrics.go.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    exponential_buckets,
};

use crate::clock::Clock;

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

fn gauges_of(name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    let gauges = IntGaugeVec::new(Opts::new(name, help), labels).expect("names are constants");
    super::add(gauges.clone());
    gauges
}

fn histograms_of(name: &str, help: &str, label: &str, first: f64, count: usize) -> HistogramVec {
    let buckets = exponential_buckets(first, 2.0, count).expect("the numbers are constants");
    let options = HistogramOpts::new(name, help).buckets(buckets);
    let histograms = HistogramVec::new(options, &[label]).expect("names are constants");
    super::add(histograms.clone());
    histograms
}

static KNOWN: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauges_of(
        "etcd_network_known_peers",
        "The current number of known peers.",
        &["Local", "Remote"],
    )
});
static ACTIVE: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauges_of(
        "etcd_network_active_peers",
        "The current number of active peer connections.",
        &["Local", "Remote"],
    )
});
static DISCONNECTED: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counters_of(
        "etcd_network_disconnected_peers_total",
        "The total number of disconnected peers.",
        &["Local", "Remote"],
    )
});
static SENT: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counters_of(
        "etcd_network_peer_sent_bytes_total",
        "The total number of bytes sent to peers.",
        &["To"],
    )
});
static RECEIVED: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counters_of(
        "etcd_network_peer_received_bytes_total",
        "The total number of bytes received from peers.",
        &["From"],
    )
});
static SEND_FAILURES: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counters_of(
        "etcd_network_peer_sent_failures_total",
        "The total number of send failures from peers.",
        &["To"],
    )
});
static ROUND_TRIPS: LazyLock<HistogramVec> = LazyLock::new(|| {
    histograms_of(
        "etcd_network_peer_round_trip_time_seconds",
        "Round-Trip-Time histogram between peers",
        "To",
        0.0001,
        16,
    )
});

/// What is counted of a snapshot in one direction.
struct Snapshots {
    under_way: IntGaugeVec,
    done: IntCounterVec,
    failed: IntCounterVec,
    took: HistogramVec,
}

static SNAPSHOTS_SENT: LazyLock<Snapshots> = LazyLock::new(|| Snapshots {
    under_way: gauges_of(
        "etcd_network_snapshot_send_inflights_total",
        "Total number of inflight snapshot sends",
        &["To"],
    ),
    done: counters_of(
        "etcd_network_snapshot_send_success",
        "Total number of successful snapshot sends",
        &["To"],
    ),
    failed: counters_of(
        "etcd_network_snapshot_send_failures",
        "Total number of snapshot send failures",
        &["To"],
    ),
    took: histograms_of(
        "etcd_network_snapshot_send_total_duration_seconds",
        "Total latency distributions of v3 snapshot sends",
        "To",
        0.1,
        10,
    ),
});
static SNAPSHOTS_RECEIVED: LazyLock<Snapshots> = LazyLock::new(|| Snapshots {
    under_way: gauges_of(
        "etcd_network_snapshot_receive_inflights_total",
        "Total number of inflight snapshot receives",
        &["From"],
    ),
    done: counters_of(
        "etcd_network_snapshot_receive_success",
        "Total number of successful snapshot receives",
        &["From"],
    ),
    failed: counters_of(
        "etcd_network_snapshot_receive_failures",
        "Total number of snapshot receive failures",
        &["From"],
    ),
    took: histograms_of(
        "etcd_network_snapshot_receive_total_duration_seconds",
        "Total latency distributions of v3 snapshot receives",
        "From",
        0.1,
        10,
    ),
});

/// Counts one snapshot: as failed, unless it is said to be done.
pub struct SnapshotTimer {
    counted: &'static Snapshots,
    peer: String,
    began: Instant,
    done: bool,
}

impl SnapshotTimer {
    pub fn sending(peer: &str) -> Self {
        Self::new(&SNAPSHOTS_SENT, peer)
    }

    pub fn receiving(peer: &str) -> Self {
        Self::new(&SNAPSHOTS_RECEIVED, peer)
    }

    fn new(counted: &'static Snapshots, peer: &str) -> Self {
        counted.under_way.with_label_values(&[peer]).inc();
        Self {
            counted,
            peer: peer.to_owned(),
            began: Clock::default().now(),
            done: false,
        }
    }

    pub fn done(mut self) {
        self.done = true;
        let took = Clock::default().now() - self.began;
        let peer = self.peer.as_str();
        self.counted.done.with_label_values(&[peer]).inc();
        let histogram = self.counted.took.with_label_values(&[peer]);
        histogram.observe(took.as_secs_f64());
    }
}

impl Drop for SnapshotTimer {
    fn drop(&mut self) {
        let peer = self.peer.as_str();
        self.counted.under_way.with_label_values(&[peer]).dec();
        if !self.done {
            self.counted.failed.with_label_values(&[peer]).inc();
        }
    }
}

/// One peer's figures, looked up once.
#[derive(Debug)]
pub struct PeerMetrics {
    active: IntGauge,
    disconnected: IntCounter,
    sent: IntCounter,
    received: IntCounter,
    failures: IntCounter,
    round_trips: Histogram,
}

impl PeerMetrics {
    pub fn new(local: u64, remote: u64) -> Self {
        let (local, remote) = (format!("{local:x}"), format!("{remote:x}"));
        let both = [local.as_str(), remote.as_str()];
        let remote = [remote.as_str()];
        Self {
            active: ACTIVE.with_label_values(&both),
            disconnected: DISCONNECTED.with_label_values(&both),
            sent: SENT.with_label_values(&remote),
            received: RECEIVED.with_label_values(&remote),
            failures: SEND_FAILURES.with_label_values(&remote),
            round_trips: ROUND_TRIPS.with_label_values(&remote),
        }
    }

    pub fn became_active(&self) {
        self.active.set(1);
    }

    pub fn became_inactive(&self) {
        self.active.set(0);
        self.disconnected.inc();
    }

    pub fn sent(&self, bytes: usize) {
        self.sent.inc_by(bytes as u64);
    }

    pub fn received(&self, bytes: usize) {
        self.received.inc_by(bytes as u64);
    }

    pub fn send_failed(&self) {
        self.failures.inc();
    }

    pub fn answered_in(&self, took: Duration) {
        self.round_trips.observe(took.as_secs_f64());
    }
}

/// Who is in the cluster, this member too, and who was; as etcd tells it.
pub fn know(local: u64, members: &[u64], removed: &[u64]) {
    let local = format!("{local:x}");
    for (ids, known) in [(members, 1), (removed, 0)] {
        for id in ids {
            let remote = format!("{id:x}");
            KNOWN
                .with_label_values(&[local.as_str(), remote.as_str()])
                .set(known);
        }
    }
}

pub fn promotion_failed(reason: &str) {
    PROMOTIONS_FAILED.with_label_values(&[reason]).inc();
}
