//! What the log and the store say of themselves: times of syncs, writes, commits, compactions, defragmentations.
//!
//! etcd: server/storage/{wal,backend,mvcc}/metrics.go.

use std::sync::LazyLock;
use std::time::{Duration, UNIX_EPOCH};

use ballast_storage::observer::StoreObserver;
use ballast_storage::wal::WalObserver;
use prometheus::{Histogram, HistogramOpts, IntCounter, IntGauge, exponential_buckets};

use crate::clock::Clock;
use crate::logging::Limit;

/// A sync that takes longer is told (etcd's warnSyncDuration).
const SLOW_SYNC: Duration = Duration::from_secs(1);
/// Of the same complaint so many a second: a bad disk must not fill itself with its own log.
const SLOW_SYNC_LINES_PER_SECOND_MAX: u32 = 5;

macro_rules! histograms {
    ($($name:ident = $metric:literal, $help:literal, $first:literal, $count:literal;)*) => {
        $(pub static $name: LazyLock<Histogram> = LazyLock::new(|| {
            let buckets = exponential_buckets($first, 2.0, $count).expect("the numbers are constants");
            let options = HistogramOpts::new($metric, $help).buckets(buckets);
            let histogram = Histogram::with_opts(options).expect("names are constants");
            super::add(histogram.clone());
            histogram
        });)*
        fn touch_histograms() { $(LazyLock::force(&$name);)* }
    };
}

histograms! {
    WAL_FSYNC = "etcd_disk_wal_fsync_duration_seconds", "The latency distributions of fsync called by WAL.", 0.001, 14;
    WAL_WRITE = "etcd_disk_wal_write_duration_seconds", "The latency distributions of write called by WAL.", 0.001, 14;
    COMMIT = "etcd_disk_backend_commit_duration_seconds", "The latency distributions of commit called by backend.", 0.001, 14;
    DEFRAG = "etcd_disk_backend_defrag_duration_seconds", "The latency distribution of backend defragmentation.", 0.1, 13;
    SNAPSHOT = "etcd_disk_backend_snapshot_duration_seconds", "The latency distribution of backend snapshots.", 0.01, 17;
    HASH = "etcd_mvcc_hash_duration_seconds", "The latency distribution of storage hash operation.", 0.01, 15;
    HASH_REV = "etcd_mvcc_hash_rev_duration_seconds", "The latency distribution of storage hash by revision operation.", 0.01, 15;
    INDEX_COMPACTION = "etcd_debugging_mvcc_index_compaction_pause_duration_milliseconds", "Bucketed histogram of index compaction pause duration.", 0.5, 14;
    COMPACTION_STEP = "etcd_debugging_mvcc_db_compaction_pause_duration_milliseconds", "Bucketed histogram of db compaction pause duration.", 1.0, 13;
    COMPACTION = "etcd_debugging_mvcc_db_compaction_total_duration_milliseconds", "Bucketed histogram of db compaction total duration.", 100.0, 14;
}

static WAL_WRITE_BYTES: LazyLock<IntGauge> = LazyLock::new(|| {
    super::gauge(
        "etcd_disk_wal_write_bytes_total",
        "Total number of bytes written in WAL.",
    )
});
static DEFRAG_IN_FLIGHT: LazyLock<IntGauge> = LazyLock::new(|| {
    super::gauge(
        "etcd_disk_defrag_inflight",
        "Whether or not defrag is active on the member. 1 means active, 0 means not.",
    )
});
static COMPACTION_LAST: LazyLock<IntGauge> = LazyLock::new(|| {
    super::gauge(
        "etcd_debugging_mvcc_db_compaction_last",
        "The unix time of the last db compaction. Resets to 0 on start.",
    )
});
static COMPACTED_RECORDS: LazyLock<IntCounter> = LazyLock::new(|| {
    super::counter(
        "etcd_debugging_mvcc_db_compaction_keys_total",
        "Total number of db keys compacted.",
    )
});

pub(super) fn start() {
    touch_histograms();
    LazyLock::force(&WAL_WRITE_BYTES);
    LazyLock::force(&DEFRAG_IN_FLIGHT);
    LazyLock::force(&COMPACTION_LAST);
    LazyLock::force(&COMPACTED_RECORDS);
}

fn seconds(took: Duration, histogram: &Histogram) {
    histogram.observe(took.as_secs_f64());
}

fn milliseconds(took: Duration, histogram: &Histogram) {
    histogram.observe(took.as_secs_f64() * 1e3);
}

/// Times the log's writes and syncs, and complains of slow ones.
#[derive(Debug, Default)]
pub struct WalMetrics {
    clock: Clock,
    slow: Limit<SLOW_SYNC_LINES_PER_SECOND_MAX>,
}

impl WalObserver for WalMetrics {
    fn around_sync(&self, sync: &mut dyn FnMut()) {
        let before = self.clock.now();
        sync();
        let now = self.clock.now();
        let took = now - before;
        seconds(took, &WAL_FSYNC);
        if took > SLOW_SYNC
            && let Some(suppressed) = self.slow.pass(now)
        {
            tracing::warn!(took = ?took, expected_duration = ?SLOW_SYNC, suppressed, "slow fdatasync");
        }
    }

    fn around_write(&self, write: &mut dyn FnMut()) {
        let before = self.clock.now();
        write();
        seconds(self.clock.now() - before, &WAL_WRITE);
    }

    fn wrote(&self, _entries: usize, bytes: usize) {
        WAL_WRITE_BYTES.add(bytes as i64);
    }
}

/// Takes what the store's threads tell.
#[derive(Debug, Default)]
pub struct StoreMetrics {
    clock: Clock,
}

impl StoreObserver for StoreMetrics {
    fn committed(&self, took: Duration) {
        seconds(took, &COMMIT);
    }

    fn index_compacted(&self, took: Duration) {
        milliseconds(took, &INDEX_COMPACTION);
    }

    fn compaction_stepped(&self, took: Duration) {
        milliseconds(took, &COMPACTION_STEP);
    }

    fn compacted(&self, took: Duration, records: usize) {
        milliseconds(took, &COMPACTION);
        COMPACTED_RECORDS.inc_by(records as u64);
        let since = self.clock.wall().duration_since(UNIX_EPOCH);
        COMPACTION_LAST.set(since.map_or(0, |since| since.as_secs() as i64));
    }

    fn defragmenting(&self) {
        DEFRAG_IN_FLIGHT.set(1);
    }

    fn defragmented(&self, took: Duration) {
        DEFRAG_IN_FLIGHT.set(0);
        seconds(took, &DEFRAG);
    }
}
