//! Metrics under etcd's names, those of them that are true here.
//!
//! Counters are kept as things happen; what can be read off the state is read when somebody scrapes.

use std::sync::LazyLock;

use ballast_api::{API_VERSION, CLUSTER_VERSION};
use ballast_storage::wal::WalObserver;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts,
    Registry, TextEncoder, exponential_buckets,
};

use crate::clock::Clock;
use crate::rpc::Context;

static REGISTRY: LazyLock<Registry> = LazyLock::new(|| {
    let registry = Registry::new();
    #[cfg(target_os = "linux")]
    registry
        .register(Box::new(
            prometheus::process_collector::ProcessCollector::for_self(),
        ))
        .expect("nothing else registers process metrics");
    registry
});

/// Makes a metric and registers it; a name is used once, in this file.
macro_rules! metric {
    ($make:expr) => {
        LazyLock::new(|| {
            let metric = $make.expect("names and labels are constants that the library accepts");
            REGISTRY
                .register(Box::new(metric.clone()))
                .expect("each name is used once, in this file");
            metric
        })
    };
}

macro_rules! counters {
    ($($name:ident = $metric:literal, $help:literal;)*) => {
        $(pub static $name: LazyLock<IntCounter> = metric!(IntCounter::new($metric, $help));)*
        fn touch_counters() { $(LazyLock::force(&$name);)* }
    };
}

counters! {
    PUTS = "etcd_mvcc_put_total", "Total number of puts seen by this member.";
    DELETES = "etcd_mvcc_delete_total", "Total number of deletes seen by this member.";
    RANGES = "etcd_mvcc_range_total", "Total number of ranges seen by this member.";
    TXNS = "etcd_mvcc_txn_total", "Total number of txns seen by this member.";
    LEASES_GRANTED = "etcd_debugging_lease_granted_total", "The total number of granted leases.";
    LEASES_REVOKED = "etcd_debugging_lease_revoked_total", "The total number of revoked leases.";
    LEASES_RENEWED = "etcd_debugging_lease_renewed_total", "The number of renewed leases seen by the leader.";
    LEASE_EXPIRED = "etcd_debugging_server_lease_expired_total", "The total number of expired leases.";
    PROPOSALS_FAILED = "etcd_server_proposals_failed_total", "The total number of failed proposals seen.";
    WAL_WRITE_BYTES = "etcd_disk_wal_write_bytes_total", "Total number of bytes written in WAL.";
    HEALTH_SUCCESS = "etcd_server_health_success", "The total number of successful health checks.";
    HEALTH_FAILURES = "etcd_server_health_failures", "The total number of failed health checks.";
}

pub static PROPOSALS_PENDING: LazyLock<IntGauge> = metric!(IntGauge::new(
    "etcd_server_proposals_pending",
    "The current number of pending proposals to commit."
));
static LEADER_CHANGES: LazyLock<IntCounter> = metric!(IntCounter::new(
    "etcd_server_leader_changes_seen_total",
    "The number of leader changes seen."
));
static STARTED: LazyLock<IntCounterVec> = metric!(IntCounterVec::new(
    Opts::new(
        "grpc_server_started_total",
        "Total number of RPCs started on the server."
    ),
    &["grpc_service", "grpc_method"]
));
static HEALTH_CHECK: LazyLock<GaugeVec> = metric!(GaugeVec::new(
    Opts::new(
        "etcd_server_healthcheck",
        "The result of each kind of healthcheck."
    ),
    &["type", "name"]
));
static HEALTH_CHECKS: LazyLock<IntCounterVec> = metric!(IntCounterVec::new(
    Opts::new(
        "etcd_server_healthchecks_total",
        "The total number of each kind of healthcheck."
    ),
    &["type", "name", "status"]
));
static WAL_FSYNC: LazyLock<Histogram> =
    metric!(exponential_buckets(0.001, 2.0, 14).and_then(|buckets| {
        Histogram::with_opts(
            HistogramOpts::new(
                "etcd_disk_wal_fsync_duration_seconds",
                "The latency distributions of fsync called by WAL.",
            )
            .buckets(buckets),
        )
    }));
static STATE: LazyLock<State> = LazyLock::new(State::new);

/// What is read off the state at each scrape.
struct State {
    has_leader: Gauge,
    is_leader: Gauge,
    is_learner: Gauge,
    committed: Gauge,
    applied: Gauge,
    quota: Gauge,
    size: Gauge,
    size_in_use: Gauge,
    revision: Gauge,
    compact_revision: Gauge,
    alarms: GaugeVec,
}

impl State {
    fn new() -> Self {
        let gauge = |name: &str, help: &str| {
            let gauge = Gauge::new(name, help).expect("names are constants");
            REGISTRY
                .register(Box::new(gauge.clone()))
                .expect("each name is used once, in this file");
            gauge
        };
        let alarms = GaugeVec::new(
            Opts::new(
                "etcd_debugging_server_alarms",
                "Alarms for every member in cluster.",
            ),
            &["server_id", "alarm_type"],
        )
        .expect("names are constants");
        REGISTRY
            .register(Box::new(alarms.clone()))
            .expect("each name is used once, in this file");
        Self {
            has_leader: gauge(
                "etcd_server_has_leader",
                "Whether or not a leader exists. 1 is existence, 0 is not.",
            ),
            is_leader: gauge(
                "etcd_server_is_leader",
                "Whether or not this member is a leader. 1 if is, 0 otherwise.",
            ),
            is_learner: gauge(
                "etcd_server_is_learner",
                "Whether or not this member is a learner. 1 if is, 0 otherwise.",
            ),
            committed: gauge(
                "etcd_server_proposals_committed_total",
                "The total number of consensus proposals committed.",
            ),
            applied: gauge(
                "etcd_server_proposals_applied_total",
                "The total number of consensus proposals applied.",
            ),
            quota: gauge(
                "etcd_server_quota_backend_bytes",
                "Current backend storage quota size in bytes.",
            ),
            size: gauge(
                "etcd_mvcc_db_total_size_in_bytes",
                "Total size of the underlying database physically allocated in bytes.",
            ),
            size_in_use: gauge(
                "etcd_mvcc_db_total_size_in_use_in_bytes",
                "Total size of the underlying database logically in use in bytes.",
            ),
            revision: gauge(
                "etcd_debugging_mvcc_current_revision",
                "The current revision of store.",
            ),
            compact_revision: gauge(
                "etcd_debugging_mvcc_compact_revision",
                "The revision of the last compaction in store.",
            ),
            alarms,
        }
    }
}

/// Registers everything, so that a scrape shows counters that are still zero, and sets what never changes.
pub fn start(member_id: u64) {
    touch_counters();
    LazyLock::force(&PROPOSALS_PENDING);
    LazyLock::force(&LEADER_CHANGES);
    LazyLock::force(&WAL_FSYNC);
    let constants = [
        (
            "etcd_server_id",
            "Server or member ID in hexadecimal format. 1 for 'server_id' label with current ID.",
            "server_id",
            format!("{member_id:x}"),
        ),
        (
            "etcd_server_version",
            "Which version is running. 1 for 'server_version' label with current version.",
            "server_version",
            API_VERSION.to_owned(),
        ),
        (
            "etcd_cluster_version",
            "Which version is running. 1 for 'cluster_version' label with current cluster version.",
            "cluster_version",
            "3.7".to_owned(),
        ),
        (
            "ballast_version",
            "Which version of Ballast is running.",
            "version",
            env!("CARGO_PKG_VERSION").to_owned(),
        ),
        (
            "ballast_storage_version",
            "Which storage format the data has.",
            "version",
            CLUSTER_VERSION.to_owned(),
        ),
    ];
    for (name, help, label, value) in constants {
        let gauge = GaugeVec::new(Opts::new(name, help), &[label]).expect("names are constants");
        gauge.with_label_values(&[value.as_str()]).set(1.0);
        // A second start in one process (tests) keeps the first one's.
        let _ = REGISTRY.register(Box::new(gauge));
    }
}

/// Adds metrics that live elsewhere. A second member in one process (tests) keeps the first one's.
pub fn register(add: impl FnOnce(&Registry) -> prometheus::Result<()>) {
    if let Err(error) = add(&REGISTRY) {
        tracing::debug!(error = %error, "metrics are registered already");
    }
}

/// Times the log's syncs and counts its bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct WalMetrics {
    pub clock: Clock,
}

impl WalObserver for WalMetrics {
    fn around_sync(&self, sync: &mut dyn FnMut()) {
        let before = self.clock.now();
        sync();
        WAL_FSYNC.observe((self.clock.now() - before).as_secs_f64());
    }

    fn wrote(&self, _entries: usize, bytes: usize) {
        WAL_WRITE_BYTES.inc_by(bytes as u64);
    }
}

pub fn leader_changed() {
    LEADER_CHANGES.inc();
}

/// Methods counted by name; anything else is under "unknown" so that a client cannot make series.
const METHODS: [(&str, &[&str]); 7] = [
    (
        "etcdserverpb.KV",
        &[
            "Range",
            "RangeStream",
            "Put",
            "DeleteRange",
            "Txn",
            "Compact",
        ],
    ),
    ("etcdserverpb.Watch", &["Watch"]),
    (
        "etcdserverpb.Lease",
        &[
            "LeaseGrant",
            "LeaseRevoke",
            "LeaseKeepAlive",
            "LeaseTimeToLive",
            "LeaseLeases",
        ],
    ),
    (
        "etcdserverpb.Cluster",
        &[
            "MemberAdd",
            "MemberRemove",
            "MemberUpdate",
            "MemberList",
            "MemberPromote",
        ],
    ),
    (
        "etcdserverpb.Maintenance",
        &[
            "Alarm",
            "Status",
            "Defragment",
            "Hash",
            "HashKV",
            "Snapshot",
            "MoveLeader",
            "Downgrade",
        ],
    ),
    (
        "etcdserverpb.Auth",
        &["AuthEnable", "AuthDisable", "AuthStatus", "Authenticate"],
    ),
    ("grpc.health.v1.Health", &["Check", "Watch"]),
];

/// The counter of each of [`METHODS`], looked up once.
static METHOD_COUNTERS: LazyLock<Vec<Vec<IntCounter>>> = LazyLock::new(|| {
    METHODS
        .iter()
        .map(|(service, methods)| {
            methods
                .iter()
                .map(|method| STARTED.with_label_values(&[*service, *method]))
                .collect()
        })
        .collect()
});

pub fn count_request(service: &str, method: &str) {
    let counter = METHODS
        .iter()
        .position(|(name, _)| *name == service)
        .and_then(|s| Some((s, METHODS[s].1.iter().position(|name| *name == method)?)))
        .map(|(s, m)| &METHOD_COUNTERS[s][m]);
    match counter {
        Some(counter) => counter.inc(),
        None => STARTED.with_label_values(&["unknown", "unknown"]).inc(),
    }
}

pub fn count_health_check(kind: &str, name: &str, ok: bool) {
    HEALTH_CHECK
        .with_label_values(&[kind, name])
        .set(if ok { 1.0 } else { 0.0 });
    let status = if ok { "success" } else { "error" };
    HEALTH_CHECKS.with_label_values(&[kind, name, status]).inc();
}

/// The text of a scrape.
pub fn render(context: &Context) -> Vec<u8> {
    let flag = |is: bool| if is { 1.0 } else { 0.0 };
    let raft = context.raft.status();
    let sizes = context.store.sizes();
    let view = context.store.view();
    STATE.has_leader.set(flag(raft.leader != 0));
    STATE.is_leader.set(flag(context.raft.is_leader()));
    STATE.is_learner.set(flag(raft.is_learner));
    STATE.committed.set(raft.committed_index as f64);
    STATE.applied.set(raft.applied_index as f64);
    STATE.quota.set(
        context
            .limits
            .quota_bytes
            .map_or(-1.0, |bytes| bytes as f64),
    );
    STATE.size.set(sizes.allocated as f64);
    STATE.size_in_use.set(sizes.in_use as f64);
    STATE.revision.set(view.revision() as f64);
    STATE.compact_revision.set(view.compact_revision() as f64);
    STATE.alarms.reset();
    for alarm in context.alarms.get(0) {
        let name = ballast_api::etcdserverpb::AlarmType::try_from(alarm.alarm)
            .map_or("NONE", |alarm| alarm.as_str_name());
        STATE
            .alarms
            .with_label_values(&[format!("{:x}", alarm.member_id).as_str(), name])
            .set(1.0);
    }
    let mut text = Vec::new();
    if let Err(error) = TextEncoder::new().encode(&REGISTRY.gather(), &mut text) {
        tracing::warn!(error = %error, "failed to encode metrics");
    }
    text
}
