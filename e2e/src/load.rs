//! An open-loop load generator: requests leave when they are due, whether earlier ones have been answered or not.
//!
//! Promises: a latency is counted from the moment a request was due, so a server that stalls is charged for everything that queued up
//! behind the stall; the generator spends little, so that the server and not the client is the limit.
//! Not here: etcd's own `benchmark`, a closed loop (`bench`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ballast_api::etcdserverpb::{PutRequest, RangeRequest};
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::store_server::Client;
use crate::wait;

/// Requests that are under way at once, over all connections; reaching it means the server is far behind.
const IN_FLIGHT_MAX: usize = 200_000;
/// After the last request is sent, answers may take this long.
const DRAIN_DEADLINE: Duration = Duration::from_mins(1);

/// What is sent.
#[derive(Clone, Debug)]
pub enum Kind {
    /// Puts over `keys` keys below `prefix`, one after the other.
    Put {
        prefix: String,
        keys: u64,
        value: Bytes,
    },
    /// Linearizable reads of one of the same keys.
    Get { prefix: String, keys: u64 },
}

/// A stream of requests, one every `period`.
#[derive(Clone, Debug)]
pub struct Plan {
    pub kind: Kind,
    pub period: Duration,
}

/// What became of the requests.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Sorted.
    latencies: Vec<Duration>,
    /// When the slowest was due, from the start.
    pub slowest_at: Duration,
    pub failed: usize,
    pub elapsed: Duration,
}

impl Measured {
    pub fn count(&self) -> usize {
        self.latencies.len()
    }

    /// The latency that this share of the requests did not exceed.
    pub fn quantile(&self, share: f64) -> Duration {
        quantile(&self.latencies, share)
    }

    pub fn max(&self) -> Duration {
        self.latencies.last().copied().unwrap_or_default()
    }
}

/// Of sorted values; zero when there are none.
pub fn quantile(sorted: &[Duration], share: f64) -> Duration {
    if sorted.is_empty() {
        return Duration::ZERO;
    }
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// The key of number `n`, as filled by [`crate::bench_kube`] too.
pub fn key(prefix: &str, n: u64) -> Bytes {
    format!("{prefix}{n:08}").into()
}

/// Sends until `stop` is set, over the given connections in turn.
pub async fn run(clients: &[Client], plan: &Plan, stop: Arc<AtomicBool>) -> Result<Measured> {
    if clients.is_empty() {
        bail!("no connection to send over");
    }
    let (sender, mut receiver) = mpsc::unbounded_channel::<Option<(Duration, Duration)>>();
    let collect = tokio::spawn(async move {
        let mut measured = Measured::default();
        let mut slowest = Duration::ZERO;
        while let Some(answer) = receiver.recv().await {
            match answer {
                Some((at, latency)) => {
                    if latency > slowest {
                        slowest = latency;
                        measured.slowest_at = at;
                    }
                    measured.latencies.push(latency);
                }
                None => measured.failed += 1,
            }
        }
        measured
    });
    let permits = Arc::new(tokio::sync::Semaphore::new(IN_FLIGHT_MAX));
    let begun = wait::now();
    let mut sent: u64 = 0;
    while !stop.load(Ordering::Acquire) {
        let due_count = (begun.elapsed().as_nanos() / plan.period.as_nanos()) as u64;
        while sent <= due_count {
            // At the cap the generator itself waits; the latency still counts from the due time.
            let permit = Arc::clone(&permits).acquire_owned().await?;
            let due = begun + nanoseconds(plan.period, sent);
            let client = clients[(sent % clients.len() as u64) as usize].clone();
            let (kind, sender, number) = (plan.kind.clone(), sender.clone(), sent);
            tokio::spawn(async move {
                let answered = send(client, kind, number).await;
                let latency = due.elapsed();
                // The collector outlives all senders.
                let _ = sender.send(answered.then_some((due - begun, latency)));
                drop(permit);
            });
            sent += 1;
        }
        let next: Instant = begun + nanoseconds(plan.period, sent);
        tokio::time::sleep_until(next.into()).await;
    }
    let elapsed = begun.elapsed();
    drop(sender);
    let mut measured = tokio::time::timeout(DRAIN_DEADLINE, collect).await??;
    measured.elapsed = elapsed;
    measured.latencies.sort_unstable();
    Ok(measured)
}

/// Sends for a while.
pub async fn run_for(clients: &[Client], plan: &Plan, time: Duration) -> Result<Measured> {
    let stop = Arc::new(AtomicBool::new(false));
    let timer = {
        let stop = Arc::clone(&stop);
        async move {
            tokio::time::sleep(time).await;
            stop.store(true, Ordering::Release);
        }
    };
    let (measured, ()) = tokio::join!(run(clients, plan, stop), timer);
    measured
}

fn nanoseconds(period: Duration, times: u64) -> Duration {
    Duration::from_nanos(period.as_nanos() as u64 * times)
}

async fn send(client: Client, kind: Kind, number: u64) -> bool {
    let mut kv = client.kv;
    match kind {
        Kind::Put {
            prefix,
            keys,
            value,
        } => {
            let request = PutRequest {
                key: key(&prefix, number % keys),
                value,
                ..PutRequest::default()
            };
            kv.put(request).await.is_ok()
        }
        Kind::Get { prefix, keys } => {
            // A stride that meets all keys without following the puts.
            let request = RangeRequest {
                key: key(&prefix, number.wrapping_mul(7_919) % keys),
                ..RangeRequest::default()
            };
            kv.range(request).await.is_ok()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_rank_above() {
        let values: Vec<Duration> = (1..=1_000).map(Duration::from_millis).collect();
        assert_eq!(quantile(&values, 0.5), Duration::from_millis(500));
        assert_eq!(quantile(&values, 0.99), Duration::from_millis(990));
        assert_eq!(quantile(&values, 0.999), Duration::from_millis(999));
        assert_eq!(quantile(&values, 1.0), Duration::from_secs(1));
        assert_eq!(quantile(&values[..1], 0.999), Duration::from_millis(1));
        assert_eq!(quantile(&[], 0.5), Duration::ZERO);
    }
}
