//! etcd's gRPC services, one file each: check, propose or read, header.
//!
//!     mux.rs      which service a request is for; the limit on its size
//!     check.rs    validation      status.rs  our errors as etcd's      header.rs  response headers
//!
//! Not here: what a request does (`apply/`).
//!
//! etcd: server/etcdserver/api/v3rpc.

pub mod auth;
pub mod check;
pub mod cluster;
pub mod header;
pub mod kv;
pub mod lease;
pub mod limit;
pub mod maintenance;
pub mod mux;
mod quota;
pub mod status;
pub mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use ballast_storage::StorageError;
use ballast_storage::mvcc::Store;
use prost::Message;
use tonic::Status;

use crate::apply::{Alarms, Answer, Applied};
use crate::clock::Clock;
use crate::cluster::Cluster;
use crate::lease::Lessor;
use crate::raft::RaftNode;
use crate::raft::node::ProposeError;
use crate::watch::Hub;
use header::Headers;
use watch::WatchConfig;

/// Bounds on requests, from the flags.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub txn_ops_max: usize,
    pub request_bytes_max: usize,
    /// None when the quota is switched off.
    pub quota_bytes: Option<u64>,
    pub lease_ttl_secs_min: i64,
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
    pub watch: WatchConfig,
    pub wide_reads: kv::WideReads,
}

impl Context {
    /// Replicates a request; gives the revision after it and its answer.
    fn propose(
        &self,
        mut request: pb::InternalRaftRequest,
    ) -> impl Future<Output = Result<(i64, Answer), Status>> + Send + '_ {
        request.header = Some(self.ids.header());
        let fits = request.encoded_len() <= self.limits.request_bytes_max;
        let proposing = fits.then(|| self.raft.propose(request));
        self.answer(proposing)
    }

    async fn answer(
        &self,
        proposing: Option<impl Future<Output = Result<Applied, ProposeError>>>,
    ) -> Result<(i64, Answer), Status> {
        let Some(proposing) = proposing else {
            return Err(Error::RequestTooLarge.into());
        };
        crate::metrics::PROPOSALS_PENDING.inc();
        let outcome = proposing.await;
        crate::metrics::PROPOSALS_PENDING.dec();
        let Applied { revision, result } = outcome.map_err(|error| {
            crate::metrics::PROPOSALS_FAILED.inc();
            status::from_propose(error)
        })?;
        match result {
            Ok(answer) => Ok((revision, answer)),
            Err(error) => Err(status::from_apply(&error)),
        }
    }
}

/// Ids of requests, unique in the cluster: member, time of start, counter, as etcd makes them.
#[derive(Debug)]
pub struct RequestIds(AtomicU64);

impl RequestIds {
    pub fn new(member_id: u64, clock: Clock) -> Self {
        let millis = clock
            .wall()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_millis() as u64);
        let time = (millis & 0xff_ffff_ffff) << 8;
        Self(AtomicU64::new((member_id & 0xffff) << 48 | time))
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

/// The log answered another command than was proposed: a bug, told rather than hidden.
fn unexpected(answer: &Answer) -> Status {
    tracing::error!(answer = ?answer, "the log gave the answer of another command");
    Status::internal("ballast: the log gave the answer of another command")
}
