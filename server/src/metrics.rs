//! Metrics under etcd's names, types, labels and buckets, those of them that are true here.
//!
//!     grpc.rs    calls by method         timed.rs   requests and applies by kind
//!     disk.rs    log, engine, compaction  peer.rs    the other members
//!     here       the rest, and the text of a scrape
//!
//! Counters are kept as things happen, through handles that are looked up once; what can be read off the state is read when somebody
//! scrapes. `e2e/expected/etcd-metrics.txt` lists what etcd has and this does not, with the reasons.

pub mod disk;
pub mod grpc;
pub mod peer;
pub mod timed;

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use ballast_api::{API_VERSION, CLUSTER_VERSION, etcdserverpb as pb};
use ballast_storage::MvccError;
use ballast_storage::mvcc::RangeOptions;
use http::HeaderMap;
use parking_lot::Mutex;
use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts,
    Registry, TextEncoder, exponential_buckets,
};

use crate::apply::{Applied, ApplyError};
use crate::clock::Clock;
use crate::config::{Config, flags};
use crate::logging::Limit;
use crate::raft::node::ApplyObserver;
use crate::rpc::Context;
use grpc::{Kind, Method};
pub use timed::Op;

/// Lines about slow applies, so many a second.
const SLOW_LINES_PER_SECOND_MAX: u32 = 20;
/// Client versions counted by name; more share one series, so that a client cannot make many.
const CLIENT_VERSIONS_MAX: usize = 16;

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

/// Registers a metric; a name is used once in this program.
fn add(metric: impl Collector + 'static) {
    REGISTRY
        .register(Box::new(metric))
        .expect("each name is used once");
}

fn counter(name: &str, help: &str) -> IntCounter {
    let counter = IntCounter::new(name, help).expect("names are constants");
    add(counter.clone());
    counter
}

fn gauge(name: &str, help: &str) -> IntGauge {
    let gauge = IntGauge::new(name, help).expect("names are constants");
    add(gauge.clone());
    gauge
}

fn gauges_of(name: &str, help: &str, labels: &[&str]) -> GaugeVec {
    let gauges = GaugeVec::new(Opts::new(name, help), labels).expect("names are constants");
    add(gauges.clone());
    gauges
}

macro_rules! counters {
    ($($name:ident = $metric:literal, $help:literal;)*) => {
        $(pub static $name: LazyLock<IntCounter> = LazyLock::new(|| counter($metric, $help));)*
        fn touch_counters() { $(LazyLock::force(&$name);)* }
    };
}

macro_rules! gauges {
    ($($name:ident = $metric:literal, $help:literal;)*) => {
        $(pub static $name: LazyLock<IntGauge> = LazyLock::new(|| gauge($metric, $help));)*
        fn touch_gauges() { $(LazyLock::force(&$name);)* }
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
    LEADER_CHANGES = "etcd_server_leader_changes_seen_total", "The number of leader changes seen.";
    PROPOSALS_FAILED = "etcd_server_proposals_failed_total", "The total number of failed proposals seen.";
    HEARTBEAT_FAILURES = "etcd_server_heartbeat_send_failures_total", "The total number of leader heartbeat send failures (likely overloaded from slow disk).";
    LEARNERS_PROMOTED = "etcd_server_learner_promote_successes", "The total number of successful learner promotions while this member is leader.";
    SLOW_APPLIES = "etcd_server_slow_apply_total", "The total number of slow apply requests (likely overloaded from slow disk).";
    SLOW_READ_INDEXES = "etcd_server_slow_read_indexes_total", "The total number of pending read indexes not in sync with leader's or timed out read index requests.";
    READ_INDEXES_FAILED = "etcd_server_read_indexes_failed_total", "The total number of failed read indexes seen.";
    HEALTH_SUCCESS = "etcd_server_health_success", "The total number of successful health checks.";
    HEALTH_FAILURES = "etcd_server_health_failures", "The total number of failed health checks.";
}

gauges! {
    PROPOSALS_PENDING = "etcd_server_proposals_pending", "The current number of pending proposals to commit.";
    SNAPSHOTS_APPLYING = "etcd_server_snapshot_apply_in_progress_total", "1 if the server is applying the incoming snapshot. 0 if none.";
    PUT_BYTES = "etcd_debugging_mvcc_total_put_size_in_bytes", "The total size of put kv pairs seen by this member.";
    AUTH_REVISION = "etcd_debugging_auth_revision", "The current revision of auth store.";
    FD_USED = "os_fd_used", "The number of used file descriptors.";
    FD_LIMIT = "os_fd_limit", "The file descriptor limit.";
}

pub static LEASE_TTLS: LazyLock<Histogram> = LazyLock::new(|| {
    let buckets = exponential_buckets(1.0, 2.0, 24).expect("the numbers are constants");
    let options = HistogramOpts::new(
        "etcd_debugging_lease_ttl_total",
        "Bucketed histogram of lease TTLs.",
    );
    let histogram = Histogram::with_opts(options.buckets(buckets)).expect("names are constants");
    add(histogram.clone());
    histogram
});
static DEFRAGS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    let options = Opts::new(
        "ballast_defragmentations_total",
        "Defragmentations by cause (asked, rule, quota, engine) and outcome.",
    );
    let counters = IntCounterVec::new(options, &["cause", "outcome"]).expect("names are constants");
    add(counters.clone());
    counters
});
static CLUSTER_VERSIONS: LazyLock<GaugeVec> = LazyLock::new(|| {
    gauges_of(
        "etcd_cluster_version",
        "Which version is running. 1 for 'cluster_version' label with current cluster version.",
        &["cluster_version"],
    )
});
static HEALTH_CHECK: LazyLock<GaugeVec> = LazyLock::new(|| {
    gauges_of(
        "etcd_server_healthcheck",
        "The result of each kind of healthcheck.",
        &["type", "name"],
    )
});
static HEALTH_CHECKS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    let options = Opts::new(
        "etcd_server_healthchecks_total",
        "The total number of each kind of healthcheck.",
    );
    let counters =
        IntCounterVec::new(options, &["type", "name", "status"]).expect("names are constants");
    add(counters.clone());
    counters
});
static CLIENTS: LazyLock<Clients> = LazyLock::new(Clients::new);
static STATE: LazyLock<State> = LazyLock::new(State::new);

/// Requests by the version that the client says it has.
struct Clients {
    family: IntCounterVec,
    /// Unary and streams of those that say what this release's clients say, and of those that say nothing.
    newest: [IntCounter; 2],
    unknown: [IntCounter; 2],
    others: Mutex<HashMap<String, [IntCounter; 2]>>,
}

/// What etcd's client 3.7 says.
const NEWEST_CLIENT: &str = "3.7";

impl Clients {
    fn new() -> Self {
        let options = Opts::new(
            "etcd_server_client_requests_total",
            "The total number of client requests per client version.",
        );
        let family = IntCounterVec::new(options, &["type", "client_api_version"])
            .expect("names are constants");
        add(family.clone());
        Self {
            newest: Self::both(&family, NEWEST_CLIENT),
            unknown: Self::both(&family, "unknown"),
            others: Mutex::default(),
            family,
        }
    }

    fn both(family: &IntCounterVec, version: &str) -> [IntCounter; 2] {
        ["unary", "stream"].map(|kind| family.with_label_values(&[kind, version]))
    }

    fn count(&self, version: Option<&[u8]>, kind: usize) {
        let Some(version) = version else {
            self.unknown[kind].inc();
            return;
        };
        if version == NEWEST_CLIENT.as_bytes() {
            self.newest[kind].inc();
            return;
        }
        let version = String::from_utf8_lossy(version);
        let mut others = self.others.lock();
        if !others.contains_key(version.as_ref()) && others.len() >= CLIENT_VERSIONS_MAX {
            self.unknown[kind].inc();
            return;
        }
        others
            .entry(version.into_owned())
            .or_insert_with_key(|version| Self::both(&self.family, version))[kind]
            .inc();
    }
}

/// Counts a call by its client's version.
pub fn count_client(headers: &HeaderMap, method: Option<&Method>) {
    if let Some(method) = method {
        let version = headers.get("client-api-version");
        let kind = usize::from(method.kind != Kind::Unary);
        CLIENTS.count(version.map(http::HeaderValue::as_bytes), kind);
    }
}

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
    keys: Gauge,
    alarms: GaugeVec,
}

impl State {
    fn new() -> Self {
        let gauge = |name: &str, help: &str| {
            let gauge = Gauge::new(name, help).expect("names are constants");
            add(gauge.clone());
            gauge
        };
        Self {
            alarms: gauges_of(
                "etcd_debugging_server_alarms",
                "Alarms for every member in cluster.",
                &["server_id", "alarm_type"],
            ),
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
            keys: gauge("etcd_debugging_mvcc_keys_total", "Total number of keys."),
        }
    }
}

/// The cluster's version, without the patch, is `now` and no longer `before`.
pub fn cluster_version(before: Option<&str>, now: &str) {
    if let Some(before) = before {
        CLUSTER_VERSIONS.with_label_values(&[before]).set(0.0);
    }
    CLUSTER_VERSIONS.with_label_values(&[now]).set(1.0);
}

/// Registers everything, so that a scrape shows counters that are still zero, and sets what never changes.
pub fn start(member_id: u64, config: &Config) {
    touch_counters();
    touch_gauges();
    LazyLock::force(&LEASE_TTLS);
    LazyLock::force(&CLIENTS);
    LazyLock::force(&DEFRAGS);
    grpc::start(config.extensive_metrics);
    timed::start();
    disk::start();
    // Of a store that never had a user.
    AUTH_REVISION.set(1);
    let id = format!("{member_id:x}");
    constant(
        "etcd_server_id",
        "Server or member ID in hexadecimal format. 1 for 'server_id' label with current ID.",
        &[("server_id", &id)],
    );
    constant(
        "etcd_server_version",
        "Which version is running. 1 for 'server_version' label with current version.",
        &[("server_version", API_VERSION)],
    );
    LazyLock::force(&CLUSTER_VERSIONS);
    constant(
        "ballast_version",
        "Which version of Ballast is running.",
        &[("version", env!("CARGO_PKG_VERSION"))],
    );
    constant(
        "ballast_storage_version",
        "Which storage format the data has.",
        &[("version", CLUSTER_VERSION)],
    );
    let gates = GaugeVec::new(
        Opts::new(
            "etcd_server_feature_enabled",
            "Whether or not a feature is enabled. 1 is enabled, 0 is not.",
        ),
        &["name", "stage"],
    )
    .expect("names are constants");
    for (gate, _) in flags::GATES {
        let stage = match *gate {
            "AllBeta" | "FastLeaseKeepAlive" | "TxnModeWriteWithSharedBuffer" => "BETA",
            _ => "ALPHA",
        };
        let is = f64::from(u8::from(config.gate(gate)));
        gates.with_label_values(&[*gate, stage]).set(is);
    }
    add_or_keep(gates);
}

fn constant(name: &str, help: &str, labels: &[(&str, &str)]) {
    let (names, values): (Vec<&str>, Vec<&str>) = labels.iter().copied().unzip();
    let gauge = GaugeVec::new(Opts::new(name, help), &names).expect("names are constants");
    gauge.with_label_values(&values).set(1.0);
    add_or_keep(gauge);
}

/// A second start in one process (tests) keeps the first one's.
fn add_or_keep(metric: impl Collector + 'static) {
    let _ = REGISTRY.register(Box::new(metric));
}

/// Adds metrics that live elsewhere. A second member in one process (tests) keeps the first one's.
pub fn register(add: impl FnOnce(&Registry) -> prometheus::Result<()>) {
    if let Err(error) = add(&REGISTRY) {
        tracing::debug!(error = %error, "metrics are registered already");
    }
}

/// Times what is applied, and tells of what was slow or refused.
#[derive(Debug)]
pub struct ApplyMetrics {
    clock: Clock,
    /// `--warning-apply-duration`.
    slow_after: Duration,
}

impl ApplyMetrics {
    pub fn new(slow_after: Duration) -> Self {
        Self {
            clock: Clock::default(),
            slow_after,
        }
    }
}

impl ApplyObserver for ApplyMetrics {
    fn around(
        &self,
        request: &pb::InternalRaftRequest,
        apply: &mut dyn FnMut() -> Applied,
    ) -> Applied {
        let started = self.clock.now();
        let applied = apply();
        let now = self.clock.now();
        let took = now - started;
        // As etcd counts: what was compacted before is no failure.
        let success = matches!(
            applied.result,
            Ok(_) | Err(ApplyError::Mvcc(MvccError::Compacted { .. }))
        );
        timed::applied(Op::of(request), success, took);
        if took > self.slow_after {
            let content = crate::loggable::proposal(request);
            let response = applied
                .result
                .as_ref()
                .map_or_else(ToString::to_string, |answer| answer.kind().to_owned());
            slow_apply(now, took, self.slow_after, "", &content, &response);
        }
        applied
    }
}

/// Counts and tells that something took longer than `--warning-apply-duration`.
pub fn slow_apply(
    now: Instant,
    took: Duration,
    expected: Duration,
    prefix: &str,
    request: &str,
    response: &str,
) {
    static SLOW: Limit<SLOW_LINES_PER_SECOND_MAX> = Limit::new();
    SLOW_APPLIES.inc();
    if let Some(suppressed) = SLOW.pass(now) {
        tracing::warn!(
            took = ?took,
            expected_duration = ?expected,
            prefix,
            request,
            response,
            suppressed,
            "apply request took too long"
        );
    }
}

pub fn count_defrag(cause: &str, ok: bool) {
    let outcome = if ok { "done" } else { "failed" };
    DEFRAGS.with_label_values(&[cause, outcome]).inc();
}

pub fn leader_changed() {
    LEADER_CHANGES.inc();
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
    STATE.quota.set(context.limits.quota_told as f64);
    STATE.size.set(sizes.allocated as f64);
    STATE.size_in_use.set(sizes.in_use as f64);
    STATE.revision.set(view.revision() as f64);
    STATE.compact_revision.set(view.compact_revision() as f64);
    let all = RangeOptions {
        count_only: true,
        ..RangeOptions::default()
    };
    if let Ok(counted) = view.range(b"\0", b"\0", &all) {
        STATE.keys.set(counted.count as f64);
    }
    STATE.alarms.reset();
    for alarm in context.alarms.get(0) {
        let name = pb::AlarmType::try_from(alarm.alarm).map_or("NONE", |alarm| alarm.as_str_name());
        STATE
            .alarms
            .with_label_values(&[format!("{:x}", alarm.member_id).as_str(), name])
            .set(1.0);
    }
    let members: Vec<u64> = context.cluster.members().iter().map(|m| m.id).collect();
    peer::know(
        context.cluster.member_id,
        &members,
        &context.cluster.removed(),
    );
    count_files();
    grpc::collect_sent_bytes();
    let mut text = Vec::new();
    if let Err(error) = TextEncoder::new().encode(&REGISTRY.gather(), &mut text) {
        tracing::warn!(error = %error, "failed to encode metrics");
    }
    text
}

fn count_files() {
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        FD_USED.set(files.count() as i64);
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    FD_LIMIT.set(limit.map_or(i64::MAX, |limit| limit as i64));
}

#[cfg(test)]
pub fn gather_family(name: &str) -> Vec<prometheus::proto::Metric> {
    let families = REGISTRY.gather();
    let found = families.iter().find(|family| family.name() == name);
    found.map_or_else(Vec::new, |family| family.get_metric().to_vec())
}
