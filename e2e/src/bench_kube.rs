//! The benchmark's rows on a store of Kubernetes' size: 200,000 keys of 1 KiB, each written three times, then compacted and defragmented
//! while a put and a get are due every two milliseconds.
//!
//! Promises: latencies count from when a request was due; a quiet run on the same data precedes each disturbed one; sizes are allocated
//! bytes of everything but the log.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ballast_api::etcdserverpb::{
    CompactionRequest, DefragmentRequest, PutRequest, RangeRequest, RequestOp, SnapshotRequest,
    TxnRequest, request_op,
};
use bytes::Bytes;
use rand::{Rng as _, RngCore as _};
use tokio_stream::StreamExt as _;

use crate::bench::beside;
use crate::bench_process::{Cost, database_bytes};
use crate::bench_table::{Bounds, Metric, Samples};
use crate::diff::prefix_end;
use crate::load::{Kind, Measured, Plan, key, quantile};
use crate::store_server::{Client, Program, StoreServer};
use crate::up::say;
use crate::wait;

const PREFIX: &str = "/registry/pods/ns/";
const KEYS: u64 = 200_000;
const WRITES: u64 = 3;
const VALUE_BYTES: usize = 1_024;
/// One transaction of the fill; the limit is 128.
const BATCH: u64 = 100;
/// Fills run side by side over this many connections.
const FILLERS: u64 = 4;
/// Reads of each page size.
const PAGES: usize = 40;
const QUIET_TIME: Duration = Duration::from_secs(10);
const LOAD_PERIOD: Duration = Duration::from_millis(2);
/// The store holds 600 MiB before it is compacted; the default quota is 2 GiB, which leaves room for neither copy.
const QUOTA: &str = "--quota-backend-bytes=8589934592";
const MAINTENANCE_DEADLINE: Duration = Duration::from_mins(5);
const MIB: f64 = 1_048_576.0;

type Rows = Vec<(&'static str, Bounds, Samples)>;

/// All rows on one server.
pub async fn run(program: &Program, flags: &[&str], divide: u64) -> Result<Rows> {
    let mut flags = flags.to_vec();
    flags.push(QUOTA);
    let keys = (KEYS / divide).max(1_000);
    let mut server = StoreServer::start(program, &flags).await?;
    let mut rows: Rows = Vec::new();

    let begun = wait::now();
    let client = server.client()?;
    for _ in 0..WRITES {
        fill(&server, keys).await?;
    }
    let mut filled = Samples::of(Metric::Seconds, begun.elapsed().as_secs_f64());
    let cost = Cost::of(server.pid()?)?;
    filled.set(Metric::Anonymous, cost.anonymous as f64 / MIB);
    filled.set(Metric::Rss, cost.rss as f64 / MIB);
    filled.set(
        Metric::File,
        database_bytes(&server.data_dir())? as f64 / MIB,
    );
    rows.push(("kube-fill", &[("file", 1.2)], filled));

    rows.push((
        "kube-page-500",
        &[("p50", 0.2)],
        pages(&client, keys, 500).await?,
    ));
    rows.push((
        "kube-page-10000",
        &[("p50", 0.7)],
        pages(&client, keys, 10_000).await?,
    ));

    let clients = [server.client()?, server.client()?];
    let quiet = load_beside(&clients, keys, async {
        tokio::time::sleep(QUIET_TIME).await;
        Ok(())
    })
    .await?;
    rows.push(("kube-quiet", &[], latencies(&quiet.0)));

    let head = head(&client).await?;
    let compacting = load_beside(&clients, keys, compact(client.clone(), head)).await?;
    let mut samples = latencies(&compacting.0);
    samples.set(Metric::Seconds, compacting.1.as_secs_f64());
    rows.push(("kube-compaction", &[], samples));

    let defragmenting = load_beside(&clients, keys, defragment(client.clone())).await?;
    let mut samples = latencies(&defragmenting.0);
    samples.set(Metric::Seconds, defragmenting.1.as_secs_f64());
    samples.set(
        Metric::File,
        database_bytes(&server.data_dir())? as f64 / MIB,
    );
    rows.push(("kube-defragment", &[("file", 1.1)], samples));

    let begun = wait::now();
    let bytes = snapshot(&client).await?;
    let mut samples = Samples::of(Metric::Seconds, begun.elapsed().as_secs_f64());
    samples.set(Metric::File, bytes as f64 / MIB);
    rows.push(("kube-snapshot", &[("time", 1.0)], samples));

    // What was written last is on the disk or in the log; a restart has to read both.
    server.kill()?;
    let begun = wait::now();
    server.restart().await?;
    let mut samples = Samples::of(Metric::Seconds, begun.elapsed().as_secs_f64());
    samples.set(
        Metric::Anonymous,
        Cost::of(server.pid()?)?.anonymous as f64 / MIB,
    );
    rows.push(("kube-restart", &[("time", 0.7)], samples));
    let count = server
        .client()?
        .kv
        .range(all_keys(1))
        .await?
        .into_inner()
        .count;
    if count != keys as i64 {
        bail!("{count} keys of {keys} are there after the restart");
    }
    Ok(rows)
}

fn all_keys(limit: i64) -> RangeRequest {
    RangeRequest {
        key: PREFIX.into(),
        range_end: prefix_end(PREFIX.as_bytes()),
        limit,
        ..RangeRequest::default()
    }
}

/// Writes every key once.
async fn fill(server: &StoreServer, keys: u64) -> Result<()> {
    let mut fillers = Vec::new();
    for filler in 0..FILLERS {
        let mut kv = server.client()?.kv;
        fillers.push(tokio::spawn(async move {
            let mut from = keys * filler / FILLERS;
            let end = keys * (filler + 1) / FILLERS;
            while from < end {
                let to = end.min(from + BATCH);
                let success = (from..to).map(|n| put(key(PREFIX, n))).collect();
                kv.txn(TxnRequest {
                    success,
                    ..TxnRequest::default()
                })
                .await?;
                from = to;
            }
            anyhow::Ok(())
        }));
    }
    for filler in fillers {
        filler.await?.context("fill")?;
    }
    Ok(())
}

fn put(key: Bytes) -> RequestOp {
    RequestOp {
        request: Some(request_op::Request::RequestPut(PutRequest {
            key,
            value: value(),
            ..PutRequest::default()
        })),
    }
}

/// Not compressible, as no two objects of Kubernetes are alike.
fn value() -> Bytes {
    let mut value = vec![0; VALUE_BYTES];
    rand::rng().fill_bytes(&mut value);
    value.into()
}

async fn head(client: &Client) -> Result<i64> {
    let response = client.kv.clone().range(all_keys(1)).await?.into_inner();
    Ok(response.header.context("an answer has a header")?.revision)
}

/// Pages that begin anywhere, as a list that is continued reads them.
async fn pages(client: &Client, keys: u64, limit: i64) -> Result<Samples> {
    let mut kv = client.kv.clone();
    let mut times = Vec::new();
    for _ in 0..PAGES {
        let mut request = all_keys(limit);
        request.key = key(PREFIX, rand::rng().random_range(0..keys / 2));
        let begun = wait::now();
        let response = kv.range(request).await?.into_inner();
        times.push(begun.elapsed());
        let expected = limit.min(response.count) as usize;
        if response.kvs.len() != expected {
            bail!("a page of {limit} holds {} keys", response.kvs.len());
        }
    }
    times.sort_unstable();
    let mut samples = Samples::of(Metric::P50, quantile(&times, 0.5).as_secs_f64() * 1e3);
    samples.set(Metric::P99, quantile(&times, 0.99).as_secs_f64() * 1e3);
    Ok(samples)
}

/// Puts and gets while `work` runs, and how long it took.
async fn load_beside(
    clients: &[Client],
    keys: u64,
    work: impl Future<Output = Result<()>>,
) -> Result<([Measured; 2], Duration)> {
    let plans = [
        Plan {
            kind: Kind::Put {
                prefix: PREFIX.to_owned(),
                keys,
                value: value(),
            },
            period: LOAD_PERIOD,
        },
        Plan {
            kind: Kind::Get {
                prefix: PREFIX.to_owned(),
                keys,
            },
            period: LOAD_PERIOD,
        },
    ];
    let stop = Arc::new(AtomicBool::new(false));
    let begun = wait::now();
    let work = async {
        let done = tokio::time::timeout(MAINTENANCE_DEADLINE, work).await;
        let time = begun.elapsed();
        // A second more, so that what queued up behind the work is measured too.
        tokio::time::sleep(Duration::from_secs(1)).await;
        stop.store(true, Ordering::Release);
        done.context("the work did not end")??;
        anyhow::Ok(time)
    };
    let (measured, time) = tokio::try_join!(beside(clients, plans, Arc::clone(&stop)), work)?;
    for (what, measured) in ["put", "get"].iter().zip(&measured) {
        if measured.failed > 0 {
            say(&format!(
                "{} {what}s of {} failed",
                measured.failed,
                measured.count() + measured.failed
            ));
        }
    }
    Ok((measured, time))
}

/// Puts and gets together: the worse of the two.
fn latencies(measured: &[Measured; 2]) -> Samples {
    let worst = |share: f64| {
        let worst = measured
            .iter()
            .map(|m| m.quantile(share))
            .max()
            .unwrap_or_default();
        worst.as_secs_f64() * 1e3
    };
    let mut samples = Samples::of(Metric::P50, worst(0.5));
    samples.set(Metric::P99, worst(0.99));
    samples.set(Metric::P999, worst(0.999));
    samples.set(Metric::Max, worst(1.0));
    samples
}

/// Compacts to the head and returns when the revisions are gone from the database.
async fn compact(client: Client, revision: i64) -> Result<()> {
    client
        .kv
        .clone()
        .compact(CompactionRequest {
            revision,
            physical: true,
        })
        .await?;
    Ok(())
}

async fn defragment(client: Client) -> Result<()> {
    client
        .maintenance
        .clone()
        .defragment(DefragmentRequest {})
        .await?;
    Ok(())
}

/// Reads the whole snapshot and returns its size.
async fn snapshot(client: &Client) -> Result<u64> {
    let mut stream = client
        .maintenance
        .clone()
        .snapshot(SnapshotRequest {})
        .await?
        .into_inner();
    let mut bytes = 0;
    while let Some(response) = stream.next().await {
        bytes += response?.blob.len() as u64;
    }
    Ok(bytes)
}
