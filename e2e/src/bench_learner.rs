//! The row of a learner that catches up: a gigabyte from a leader that serves clients meanwhile.
//!
//! Promises: the log no longer reaches back to the beginning, so that the store itself has to be sent; the learner has caught up when it
//! has applied what the leader had when the learner's process began, and holds every key.
//! Not here: the other rows of several members (`bench_members.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ballast_api::etcdserverpb as pb;
use bytes::Bytes;

use crate::bench_kube;
use crate::bench_table::Bound::{AtMost, Ratio};
use crate::bench_table::{Bounds, Metric, Samples};
use crate::load::{self, Kind, Plan};
use crate::members::Members;
use crate::wait;

pub const ROW: &str = "learner-catch-up";
/// The time is etcd's at most; the puts of the meanwhile take at most twice as long as the quiet ones.
pub const BOUNDS: Bounds = &[
    (Metric::Seconds, Ratio(1.0, 1.0)),
    (Metric::Rise, AtMost(2.0)),
];
/// A gigabyte: the values are of 1 KiB.
const KEYS: u64 = 1 << 20;
const PREFIX: &str = "/registry/filled/";
/// Before the learner begins. More entries than either program keeps in its log by default.
const QUIET: Duration = Duration::from_secs(15);
const PERIOD: Duration = Duration::from_millis(1);
/// Puts are sent at least so long beside the learner, so that their p99 is one of thousands.
const BESIDE_MIN: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_mins(5);
const POLL: Duration = Duration::from_millis(20);

pub async fn fill(members: &Members, divide: u64) -> Result<()> {
    let leader = members.leader().await?;
    let server = &members.all[leader].server;
    bench_kube::fill(server, PREFIX, 0..KEYS / divide).await
}

/// One learner is added, measured and removed.
pub async fn measure(members: &mut Members, divide: u64) -> Result<Samples> {
    let leader = members.leader().await?;
    let clients = [members.client(leader)?];
    let puts = Plan {
        kind: Kind::Put {
            prefix: "/registry/beside/".to_owned(),
            keys: 1_000,
            value: Bytes::from(vec![b'v'; 256]),
        },
        period: PERIOD,
    };
    let quiet = load::run_for(&clients, &puts, QUIET).await?;
    let index = members.add_unstarted(true).await?;
    let goal = members.status(leader).await?.raft_index;
    let begun = wait::now();
    members.all[index].server.spawn()?;
    let stop = Arc::new(AtomicBool::new(false));
    let caught_up = async {
        let took = wait_applied(members, index, goal, begun).await;
        tokio::time::sleep(BESIDE_MIN.saturating_sub(begun.elapsed())).await;
        stop.store(true, Ordering::Release);
        took
    };
    let (beside, took) = tokio::join!(load::run(&clients, &puts, Arc::clone(&stop)), caught_up);
    let (beside, took) = (beside?, took?);
    ensure!(quiet.failed + beside.failed == 0, "puts failed");
    let held = held(members, index).await?;
    ensure!(held == KEYS / divide, "the learner holds {held} keys");
    let id = members.id(index).await?;
    members.remove(index, id).await?;
    let p99 = |measured: &load::Measured| measured.quantile(0.99).as_secs_f64() * 1e3;
    let mut samples = Samples::of(Metric::Seconds, took.as_secs_f64());
    samples.set(Metric::P99, p99(&beside));
    samples.set(Metric::Rise, p99(&beside) / p99(&quiet));
    samples.set(Metric::Max, beside.max().as_secs_f64() * 1e3);
    Ok(samples)
}

async fn wait_applied(
    members: &Members,
    index: usize,
    goal: u64,
    begun: std::time::Instant,
) -> Result<Duration> {
    loop {
        // It does not answer before it has joined.
        if let Ok(status) = members.status(index).await
            && status.raft_applied_index >= goal
        {
            return Ok(begun.elapsed());
        }
        ensure!(
            begun.elapsed() < DEADLINE,
            "not caught up within {DEADLINE:?}"
        );
        tokio::time::sleep(POLL).await;
    }
}

/// How many of the filled keys the learner holds, by its own word.
async fn held(members: &Members, index: usize) -> Result<u64> {
    let mut kv = members.client(index)?.kv;
    let request = pb::RangeRequest {
        key: PREFIX.into(),
        // The prefix with its last byte one higher.
        range_end: "/registry/filled0".into(),
        serializable: true,
        count_only: true,
        ..pb::RangeRequest::default()
    };
    let count = kv.range(request).await.context("count")?.into_inner().count;
    Ok(u64::try_from(count)?)
}
