//! etcd's gRPC services, one file each: check, propose or read, header.
//!
//!     mux.rs      which service a request is for; the limit on its size
//!     check.rs    validation      status.rs  our errors as etcd's      header.rs  response headers
//!
//! Not here: what a request does (`apply/`).
//!
//! etcd: server/etcdserver/api/v3rpc.

pub mod auth;
pub mod budget;
pub mod call;
pub mod check;
pub mod cluster;
pub mod header;
mod http2_debug;
pub mod kv;
pub mod lease;
pub mod limit;
pub mod maintenance;
pub mod members;
pub mod mux;
pub mod peer;
mod quota;
mod snapshot;
pub mod status;
pub mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use ballast_storage::StorageError;
use ballast_storage::mvcc::Store;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use crate::apply::{Alarms, Answer, Applied};
use crate::clock::Clock;
use crate::cluster::Cluster;
use crate::defrag::Defragmenter;
use crate::lease::Lessor;
use crate::loggable;
use crate::metrics::{self, Op, PROPOSALS_PENDING};
use crate::raft::{ProposeError, RaftNode};
use crate::spans;
use crate::watch::Hub;
use budget::Budget;
use call::Stats;
use header::Headers;
use watch::WatchConfig;

/// Bounds on requests, from the flags.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub txn_ops_max: usize,
    pub request_bytes_max: usize,
    /// None when the quota is switched off.
    pub quota_bytes: Option<u64>,
    /// As Status tells it: a negative quota is told as it was given.
    pub quota_told: i64,
    /// How long a request may wait for its answer.
    pub request_timeout: std::time::Duration,
    pub lease_ttl_secs_min: i64,
    /// `--warning-unary-request-duration` and `--warning-apply-duration`.
    pub slow_request: Duration,
    pub slow_apply: Duration,
}

/// Requests that read the whole database at the same time: each has a thread, of which everybody's blocking work has only so many.
const WHOLE_READS_MAX: usize = 8;

/// Hands out the right to read the whole database; others wait, and a client that goes away waits no more.
#[derive(Clone, Debug)]
pub struct WholeReads(Arc<Semaphore>);

impl Default for WholeReads {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(WHOLE_READS_MAX)))
    }
}

impl WholeReads {
    async fn begin(&self) -> Result<OwnedSemaphorePermit, Error> {
        let permit = Arc::clone(&self.0).acquire_owned().await;
        permit.map_err(|_| Error::Stopped)
    }
}

/// What the services share.
#[derive(Debug)]
pub struct Context {
    pub store: Arc<Store>,
    pub raft: Arc<RaftNode>,
    pub lessor: Arc<Lessor>,
    pub alarms: Arc<Alarms>,
    pub cluster: Arc<Cluster>,
    pub hub: Arc<Hub>,
    pub headers: Headers,
    pub ids: Arc<RequestIds>,
    pub limits: Limits,
    pub rules: members::MemberRules,
    pub budget: Budget,
    pub watch: WatchConfig,
    pub wide_reads: kv::WideReads,
    pub defragmenter: Arc<Defragmenter>,
    pub whole_reads: WholeReads,
}

impl Context {
    /// This member leads, a majority says so, and everything that was acknowledged is applied here. `NotLeader` when it does not.
    async fn confirm_leads(&self) -> Result<(), Status> {
        if !self.raft.is_leader() {
            return Err(Error::NotLeader.into());
        }
        let barrier = self.raft.read_barrier().await;
        barrier.map_err(status::from_propose)
    }

    /// Replicates a request; gives the revision after it and its answer.
    fn propose(
        &self,
        mut request: pb::InternalRaftRequest,
    ) -> impl Future<Output = Result<(i64, Answer), Status>> + Send + '_ {
        request.header = Some(self.ids.header());
        let request_bytes = request.encoded_len();
        self.answer(Arc::new(request), request_bytes)
    }

    async fn answer(
        &self,
        request: Arc<pb::InternalRaftRequest>,
        request_bytes: usize,
    ) -> Result<(i64, Answer), Status> {
        if request_bytes > self.limits.request_bytes_max {
            return Err(Error::RequestTooLarge.into());
        }
        let clock = Clock::default();
        let started = clock.now();
        let _span = call::child(|| spans::proposal(&request));
        PROPOSALS_PENDING.inc();
        let outcome = self.raft.propose(Arc::clone(&request)).await;
        PROPOSALS_PENDING.dec();
        let now = clock.now();
        metrics::timed::requested(Op::of(&request), outcome.is_ok(), now - started);
        call::with(|call| {
            call.note(now, || proposal_stats(&request, request_bytes, &outcome));
        });
        let Applied { revision, result } = outcome.map_err(|error| {
            metrics::PROPOSALS_FAILED.inc();
            status::from_propose(error)
        })?;
        match result {
            Ok(answer) => Ok((revision, answer)),
            Err(error) => Err(status::from_apply(&error)),
        }
    }

    /// Notes a read that was answered: how long it took, and when it was slow what it asked and got.
    fn note_read(
        &self,
        op: Op,
        started: Instant,
        success: bool,
        describe: impl FnOnce() -> (Stats, &'static str),
    ) {
        let now = Clock::default().now();
        let took = now - started;
        metrics::timed::requested(op, success, took);
        let slow_apply = took > self.limits.slow_apply;
        let slow_request = call::with(|call| call.is_slow(now)).unwrap_or_default();
        if !slow_apply && !slow_request {
            return;
        }
        let (stats, prefix) = describe();
        if slow_apply {
            let response = format!(
                "count:{} size:{}",
                stats.response_count, stats.response_bytes
            );
            metrics::slow_apply(
                now,
                took,
                self.limits.slow_apply,
                prefix,
                &stats.content,
                &response,
            );
        }
        call::with(|call| call.note(now, || stats));
    }
}

/// Ids of requests, unique in the cluster: member, a random beginning, counter. etcd begins with the time; but a clock that was set back would
/// give out ids anew that stand in the log already, and who waits for such a one would be answered for another.
#[derive(Debug)]
pub struct RequestIds(AtomicU64);

impl RequestIds {
    pub fn new(member_id: u64) -> Self {
        let beginning = rand::random::<u64>() >> 17;
        Self(AtomicU64::new((member_id & 0xffff) << 48 | beginning))
    }

    pub fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn header(&self) -> pb::RequestHeader {
        pb::RequestHeader {
            id: self.next(),
            ..Default::default()
        }
    }
}

/// Runs storage work that blocks. Damage stops the node.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StorageError> + Send + 'static,
) -> Result<T, Status> {
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => crate::node::stop_on_damage(&error),
        Err(_) => Err(Error::Stopped.into()),
    }
}

/// What the log says of a slow proposal: etcd's counts and sizes.
fn proposal_stats(
    request: &pb::InternalRaftRequest,
    request_bytes: usize,
    outcome: &Result<Applied, ProposeError>,
) -> Stats {
    let answer = outcome
        .as_ref()
        .ok()
        .and_then(|applied| applied.result.as_ref().ok());
    let mut stats = Stats {
        request_bytes: request_bytes as i64,
        content: loggable::proposal(request),
        ..Stats::default()
    };
    (
        stats.request_count,
        stats.response_count,
        stats.response_bytes,
    ) = match answer {
        Some(Answer::Put(response)) => (1, 0, response.encoded_len() as i64),
        Some(Answer::DeleteRange(response)) => (0, response.deleted, response.encoded_len() as i64),
        Some(Answer::Txn(response)) => {
            let count = request.txn.as_ref().map_or(0, |txn| {
                if response.succeeded {
                    txn.success.len()
                } else {
                    txn.failure.len()
                }
            });
            (count as i64, 0, response.encoded_len() as i64)
        }
        _ => (-1, -1, -1),
    };
    stats
}

/// The log answered another command than was proposed: a bug, told rather than hidden.
fn unexpected(answer: &Answer) -> Status {
    tracing::error!(
        answer = answer.kind(),
        "the log gave the answer of another command"
    );
    Status::internal("ballast: the log gave the answer of another command")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_two_runs_of_a_member_are_not_the_same_whatever_the_clock_says() {
        let (first, second) = (RequestIds::new(0x1_0007), RequestIds::new(0x1_0007));
        let (a, b) = (first.next(), second.next());
        assert_eq!((a >> 48, b >> 48), (7, 7));
        // Neither reaches the other's within any number of requests that a run has.
        assert!(a.abs_diff(b) > 1 << 20, "{a:x} {b:x}");
        assert_eq!(first.next(), a + 1);
    }
}
