//! The benchmark's rows that ask as kube-apiserver does: create when absent, update by revision, watch with what was before.
//!
//! Promises: each row checks the answers it measures, so that a server cannot win by doing less.
//! Not here: lists (`bench_kube`).

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use ballast_api::etcdserverpb::{
    Compare, PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest,
    WatchProgressRequest, WatchRequest, compare, request_op, watch_request,
};
use tokio_stream::StreamExt as _;

use crate::bench::Rows;
use crate::bench_kube::{milliseconds, value};
use crate::bench_process::Cost;
use crate::bench_table::Bound::Ratio;
use crate::bench_table::{Bounds, Metric, Samples};
use crate::diff::prefix_end;
use crate::load::{key, quantile};
use crate::store_server::{Client, Program, StoreServer};
use crate::wait;

const PREFIX: &str = "/registry/configmaps/ns/";
const OBJECTS: u64 = 20_000;
const CONNECTIONS: usize = 8;
/// Requests under way at once in a closed loop.
const WORKERS: usize = 256;
/// Watchers of the whole prefix, a stream each.
const WATCHERS: usize = 100;
const WATCH_CONNECTIONS: usize = 10;
const WATCH_PUT_PERIOD: Duration = Duration::from_millis(5);
const WATCH_PUTS: u64 = 1_000;
/// kube-apiserver asks as often when a consistent list is served from its cache.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);
/// After the last put its events must have come.
const EVENTS_DEADLINE: Duration = Duration::from_secs(30);
const WRITE_BOUNDS: Bounds = &[
    (Metric::Throughput, Ratio(1.3, 2.0)),
    (Metric::Cpu, Ratio(0.7, 0.4)),
    (Metric::P99, Ratio(1.0, 1.0)),
];

/// All rows on one server.
pub async fn run(program: &Program, flags: &[&str], divide: u64) -> Result<Rows> {
    let server = StoreServer::start(program, flags).await?;
    let clients = (0..CONNECTIONS)
        .map(|_| server.client())
        .collect::<Result<Vec<_>>>()?;
    let objects = (OBJECTS / divide).max(100);
    // What each object was last written at.
    let revisions: Arc<Vec<AtomicI64>> = Arc::new((0..objects).map(|_| 0.into()).collect());
    let mut rows: Rows = Vec::new();
    for name in ["kube-create", "kube-update"] {
        let before = Cost::of(server.pid()?)?;
        let begun = wait::now();
        let times = closed_loop(&clients, objects, |client, n| {
            write(client, n, Arc::clone(&revisions))
        })
        .await
        .context(name)?;
        let took = begun.elapsed().as_secs_f64();
        let after = Cost::of(server.pid()?)?;
        let mut samples = Samples::of(Metric::Throughput, objects as f64 / took);
        samples.set(Metric::P50, milliseconds(quantile(&times, 0.5)));
        samples.set(Metric::P99, milliseconds(quantile(&times, 0.99)));
        samples.costs(before, after, objects, true);
        rows.push((name, WRITE_BOUNDS, samples));
    }
    let watched: Bounds = &[
        (Metric::P99, Ratio(0.8, 0.5)),
        (Metric::Cpu, Ratio(0.7, 0.3)),
    ];
    let puts = (WATCH_PUTS / divide).max(20);
    rows.push((
        "kube-watch",
        watched,
        watch(&server, &clients[0], puts).await?,
    ));
    Ok(rows)
}

/// Sends `total` requests, [`WORKERS`] at a time; the times that they took, sorted.
pub async fn closed_loop<F, T>(clients: &[Client], total: u64, ask: F) -> Result<Vec<Duration>>
where
    F: Fn(Client, u64) -> T,
    T: Future<Output = Result<()>>,
{
    let next = AtomicU64::new(0);
    let workers = (0..WORKERS).map(|worker| {
        let client = &clients[worker % clients.len()];
        let (next, ask) = (&next, &ask);
        async move {
            let mut times = Vec::new();
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= total {
                    return anyhow::Ok(times);
                }
                let begun = wait::now();
                ask(client.clone(), n).await?;
                times.push(begun.elapsed());
            }
        }
    });
    let mut times = futures::future::try_join_all(workers).await?.concat();
    times.sort_unstable();
    Ok(times)
}

/// Writes an object if it is as it was last seen: absent, or at its last revision.
async fn write(client: Client, n: u64, revisions: Arc<Vec<AtomicI64>>) -> Result<()> {
    let seen = &revisions[n as usize];
    let request = TxnRequest {
        compare: vec![Compare {
            result: compare::CompareResult::Equal as i32,
            target: compare::CompareTarget::Mod as i32,
            key: key(PREFIX, n),
            target_union: Some(compare::TargetUnion::ModRevision(
                seen.load(Ordering::Relaxed),
            )),
            ..Compare::default()
        }],
        success: vec![RequestOp {
            request: Some(request_op::Request::RequestPut(PutRequest {
                key: key(PREFIX, n),
                value: value(),
                ..PutRequest::default()
            })),
        }],
        failure: vec![RequestOp {
            request: Some(request_op::Request::RequestRange(RangeRequest {
                key: key(PREFIX, n),
                ..RangeRequest::default()
            })),
        }],
    };
    let response = client.kv.clone().txn(request).await?.into_inner();
    if !response.succeeded {
        bail!("object {n} is not as it was written");
    }
    let header = response.header.context("an answer has a header")?;
    seen.store(header.revision, Ordering::Relaxed);
    Ok(())
}

/// What a watcher saw.
#[derive(Default)]
struct Seen {
    latencies: Vec<Duration>,
    progress: u64,
}

/// Many watchers of one prefix that want what was before, and ask for progress; puts at a steady pace.
async fn watch(server: &StoreServer, writer: &Client, puts: u64) -> Result<Samples> {
    let clients = (0..WATCH_CONNECTIONS)
        .map(|_| server.client())
        .collect::<Result<Vec<_>>>()?;
    let epoch = wait::now();
    let created = Arc::new(tokio::sync::Barrier::new(WATCHERS + 1));
    let watchers: Vec<_> = (0..WATCHERS)
        .map(|n| {
            let client = clients[n % clients.len()].clone();
            let created = Arc::clone(&created);
            tokio::spawn(watch_one(client, epoch, puts, created))
        })
        .collect();
    created.wait().await;
    let before = Cost::of(server.pid()?)?;
    let begun = wait::now();
    let mut writes = Vec::new();
    for n in 0..puts {
        let due = begun + WATCH_PUT_PERIOD * n as u32;
        tokio::time::sleep_until(due.into()).await;
        let mut bytes = value().to_vec();
        bytes[..8].copy_from_slice(&nanoseconds(epoch, due).to_be_bytes());
        let request = PutRequest {
            key: key(PREFIX, n % 20),
            value: bytes.into(),
            ..PutRequest::default()
        };
        let mut kv = writer.kv.clone();
        writes.push(tokio::spawn(async move { kv.put(request).await }));
    }
    for write in writes {
        write.await??;
    }
    let mut latencies = Vec::new();
    let mut progress = 0;
    for watcher in watchers {
        let seen = tokio::time::timeout(EVENTS_DEADLINE, watcher)
            .await
            .context("events are missing")???;
        latencies.extend(seen.latencies);
        progress += seen.progress;
    }
    let elapsed = begun.elapsed();
    let after = Cost::of(server.pid()?)?;
    if progress == 0 {
        bail!("nobody was told of progress");
    }
    latencies.sort_unstable();
    let mut samples = Samples::of(
        Metric::Throughput,
        latencies.len() as f64 / elapsed.as_secs_f64(),
    );
    samples.set(Metric::P50, milliseconds(quantile(&latencies, 0.5)));
    samples.set(Metric::P99, milliseconds(quantile(&latencies, 0.99)));
    samples.costs(before, after, puts, true);
    Ok(samples)
}

async fn watch_one(
    client: Client,
    epoch: Instant,
    puts: u64,
    created: Arc<tokio::sync::Barrier>,
) -> Result<Seen> {
    let (requests, receiver) = tokio::sync::mpsc::channel(4);
    requests
        .send(request(watch_request::RequestUnion::CreateRequest(
            WatchCreateRequest {
                key: PREFIX.into(),
                range_end: prefix_end(PREFIX.as_bytes()),
                prev_kv: true,
                progress_notify: true,
                ..WatchCreateRequest::default()
            },
        )))
        .await?;
    let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut stream = client.watch.clone().watch(stream).await?.into_inner();
    let first = stream.next().await.context("the stream ended")??;
    if !first.created {
        bail!("the watch was not created");
    }
    created.wait().await;
    let asking = tokio::spawn(async move {
        loop {
            tokio::time::sleep(PROGRESS_PERIOD).await;
            let ask = watch_request::RequestUnion::ProgressRequest(WatchProgressRequest {});
            if requests.send(request(ask)).await.is_err() {
                return;
            }
        }
    });
    let mut seen = Seen::default();
    let mut revision = 0;
    while (seen.latencies.len() as u64) < puts {
        let response = stream.next().await.context("the stream ended")??;
        seen.progress += u64::from(response.events.is_empty());
        for event in response.events {
            let now = nanoseconds(epoch, wait::now());
            let kv = event.kv.context("an event has its record")?;
            if kv.mod_revision <= revision || event.prev_kv.is_none() {
                bail!("an event out of order, or without what was before");
            }
            revision = kv.mod_revision;
            let due = kv
                .value
                .first_chunk()
                .context("the value begins with when")?;
            let late = now.saturating_sub(u64::from_be_bytes(*due));
            seen.latencies.push(Duration::from_nanos(late));
        }
    }
    asking.abort();
    Ok(seen)
}

fn request(union: watch_request::RequestUnion) -> WatchRequest {
    WatchRequest {
        request_union: Some(union),
    }
}

fn nanoseconds(epoch: Instant, at: Instant) -> u64 {
    at.saturating_duration_since(epoch).as_nanos() as u64
}
