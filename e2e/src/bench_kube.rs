//! The benchmark's rows on a store of Kubernetes' size: 200,000 keys of 1 KiB, each written three times, then compacted and defragmented
//! while a put and a get are due every two milliseconds.
//!
//! Promises: latencies count from when a request was due; a quiet run on the same data precedes each disturbed one; sizes are allocated
//! bytes of everything but the log.

use std::ops::Range;
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

use crate::bench::{MIB, Rows, beside};
use crate::bench_objects;
use crate::bench_process::{Cost, database_bytes};
use crate::bench_table::{Bound, Metric, Samples};
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
/// Changes between the first page of a list and its second.
const CHANGES: u64 = 5_000;
/// How far the latencies under maintenance may be above the quiet ones.
const QUIET: Bound = Bound::Above("kube-quiet", 10.0);

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
        fill(&server, PREFIX, 0..keys).await?;
    }
    let mut filled = Samples::of(Metric::Seconds, begun.elapsed().as_secs_f64());
    let cost = Cost::of(server.pid()?)?;
    filled.set(Metric::Anonymous, cost.anonymous as f64 / MIB);
    filled.set(Metric::Rss, cost.rss as f64 / MIB);
    filled.set(
        Metric::File,
        database_bytes(&server.data_dir())? as f64 / MIB,
    );
    rows.push((
        "kube-fill",
        &[
            (Metric::File, Bound::Ratio(1.2, 1.0)),
            (Metric::Anonymous, Bound::AtMost(450.0)),
        ],
        filled,
    ));
    rows.push((
        "kube-page-500",
        &[(Metric::P50, Bound::Ratio(0.2, 0.05))],
        pages(&client, keys, 500).await?,
    ));
    rows.push((
        "kube-page-10000",
        &[(Metric::P50, Bound::Ratio(0.7, 0.4))],
        pages(&client, keys, 10_000).await?,
    ));
    rows.push((
        "kube-list-pinned",
        &[(Metric::P50, Bound::Ratio(0.2, 0.05))],
        pinned_list(&server, keys).await?,
    ));

    let clients = [server.client()?, server.client()?];
    let quiet = load_beside(&clients, load(keys), async {
        tokio::time::sleep(QUIET_TIME).await;
        Ok(())
    })
    .await?;
    rows.push(("kube-quiet", &[], latencies(&quiet.0)));

    let head = head(&client).await?;
    let compacting = load_beside(&clients, load(keys), compact(client.clone(), head)).await?;
    let mut samples = latencies(&compacting.0);
    samples.set(Metric::Seconds, compacting.1.as_secs_f64());
    rows.push(("kube-compaction", &[(Metric::P999, QUIET)], samples));

    let defragmenting = load_beside(&clients, load(keys), defragment(client.clone())).await?;
    let mut samples = latencies(&defragmenting.0);
    samples.set(Metric::Seconds, defragmenting.1.as_secs_f64());
    samples.set(
        Metric::File,
        database_bytes(&server.data_dir())? as f64 / MIB,
    );
    rows.push((
        "kube-defragment",
        &[
            (Metric::P999, QUIET),
            (Metric::File, Bound::Ratio(1.1, 0.9)),
        ],
        samples,
    ));

    let begun = wait::now();
    let bytes = snapshot(&client).await?;
    let mut samples = Samples::of(Metric::Seconds, begun.elapsed().as_secs_f64());
    samples.set(Metric::File, bytes as f64 / MIB);
    rows.push((
        "kube-snapshot",
        &[(Metric::Seconds, Bound::Ratio(1.0, 0.5))],
        samples,
    ));

    // What was written last is on the disk or in the log; a restart has to read both.
    server.kill()?;
    let begun = wait::now();
    server.restart().await?;
    let mut samples = Samples::of(Metric::Seconds, begun.elapsed().as_secs_f64());
    samples.set(
        Metric::Anonymous,
        Cost::of(server.pid()?)?.anonymous as f64 / MIB,
    );
    rows.push((
        "kube-restart",
        &[(Metric::Seconds, Bound::Ratio(0.7, 0.3))],
        samples,
    ));
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
    drop(server);
    if program.name != "etcd" {
        rows.push((
            "kube-without-cache",
            &[(Metric::Anonymous, Bound::AtMost(200.0))],
            without_cache(program, &flags, keys).await?,
        ));
    }
    Ok(rows)
}

/// Memory of the filled store when values are not kept in it.
async fn without_cache(program: &Program, flags: &[&str], keys: u64) -> Result<Samples> {
    let mut flags = flags.to_vec();
    flags.push("--value-cache-bytes=0");
    let server = StoreServer::start(program, &flags).await?;
    for _ in 0..WRITES {
        fill(&server, PREFIX, 0..keys).await?;
    }
    let cost = Cost::of(server.pid()?)?;
    let mut samples = Samples::of(Metric::Anonymous, cost.anonymous as f64 / MIB);
    samples.set(Metric::Rss, cost.rss as f64 / MIB);
    Ok(samples)
}

/// A whole list in pages of 500 as kube-apiserver reads it: all pages at the revision of the first, while others write.
async fn pinned_list(server: &StoreServer, keys: u64) -> Result<Samples> {
    let client = server.client()?;
    let first = client.kv.clone().range(all_keys(500)).await?.into_inner();
    let revision = first.header.context("an answer has a header")?.revision;
    let mut seen = first.kvs.len() as i64;
    let mut next = first.kvs.last().context("a page holds keys")?.key.clone();
    bench_objects::closed_loop(
        std::slice::from_ref(&client),
        CHANGES,
        |client, n| async move {
            let request = PutRequest {
                key: key(PREFIX, n * 7_919 % keys),
                value: value(),
                ..PutRequest::default()
            };
            client.kv.clone().put(request).await?;
            Ok(())
        },
    )
    .await?;
    let mut times = Vec::new();
    let clients = [server.client()?];
    let reading = async {
        let mut kv = client.kv.clone();
        loop {
            let mut request = all_keys(500);
            request.key = [&next[..], b"\0"].concat().into();
            request.revision = revision;
            let begun = wait::now();
            let page = kv.range(request).await?.into_inner();
            times.push(begun.elapsed());
            if page.count + seen != keys as i64 {
                bail!("{} keys are left after {seen} of {keys}", page.count);
            }
            seen += page.kvs.len() as i64;
            if !page.more {
                return Ok(());
            }
            next = page.kvs.last().context("a page holds keys")?.key.clone();
        }
    };
    let (_, time) = load_beside(&clients, load(keys), reading).await?;
    if seen != keys as i64 {
        bail!("the list holds {seen} keys of {keys}");
    }
    times.sort_unstable();
    let mut samples = Samples::of(Metric::Seconds, time.as_secs_f64());
    samples.set(Metric::P50, milliseconds(quantile(&times, 0.5)));
    samples.set(Metric::P99, milliseconds(quantile(&times, 0.99)));
    Ok(samples)
}

pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn load(keys: u64) -> Load {
    Load {
        prefix: PREFIX,
        keys,
        period: LOAD_PERIOD,
    }
}

fn all_keys(limit: i64) -> RangeRequest {
    RangeRequest {
        key: PREFIX.into(),
        range_end: prefix_end(PREFIX.as_bytes()),
        limit,
        ..RangeRequest::default()
    }
}

/// Writes every key of these numbers once.
pub async fn fill(server: &StoreServer, prefix: &'static str, keys: Range<u64>) -> Result<()> {
    let mut fillers = Vec::new();
    let count = keys.end - keys.start;
    for filler in 0..FILLERS {
        let mut kv = server.client()?.kv;
        let mut from = keys.start + count * filler / FILLERS;
        let end = keys.start + count * (filler + 1) / FILLERS;
        fillers.push(tokio::spawn(async move {
            while from < end {
                let to = end.min(from + BATCH);
                let success = (from..to).map(|n| put(key(prefix, n))).collect();
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
pub fn value() -> Bytes {
    let mut value = vec![0; VALUE_BYTES];
    rand::rng().fill_bytes(&mut value);
    value.into()
}

pub async fn head(client: &Client) -> Result<i64> {
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
    let mut samples = Samples::of(Metric::P50, milliseconds(quantile(&times, 0.5)));
    samples.set(Metric::P99, milliseconds(quantile(&times, 0.99)));
    Ok(samples)
}

/// The load that maintenance is measured under: a put and a get of these keys every `period`.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub prefix: &'static str,
    pub keys: u64,
    pub period: Duration,
}

/// Puts and gets while `work` runs, and how long it took.
pub async fn load_beside(
    clients: &[Client],
    load: Load,
    work: impl Future<Output = Result<()>>,
) -> Result<([Measured; 2], Duration)> {
    let plans = [
        Plan {
            kind: Kind::Put {
                prefix: load.prefix.to_owned(),
                keys: load.keys,
                value: value(),
            },
            period: load.period,
        },
        Plan {
            kind: Kind::Get {
                prefix: load.prefix.to_owned(),
                keys: load.keys,
            },
            period: load.period,
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
        milliseconds(worst)
    };
    let mut samples = Samples::of(Metric::P50, worst(0.5));
    samples.set(Metric::P99, worst(0.99));
    samples.set(Metric::P999, worst(0.999));
    samples.set(Metric::Max, worst(1.0));
    samples
}

/// Compacts to the head and returns when the revisions are gone from the database.
pub async fn compact(client: Client, revision: i64) -> Result<()> {
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

pub async fn defragment(client: Client) -> Result<()> {
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
