//! `propose`, `read_barrier`, and who leads.

use ballast_api::etcdserverpb::InternalRaftRequest;
use tokio::sync::watch;

use crate::apply::Applied;

/// This node cannot answer now; the client may retry. Not an answer of the replicated state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    #[error("no leader")]
    NoLeader,
    #[error("request timed out")]
    Timeout,
    #[error("too many requests")]
    Overloaded,
    #[error("server stopped")]
    Stopping,
}

/// What is known of the group, for headers, Status and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RaftStatus {
    /// 0 when unknown.
    pub leader: u64,
    pub term: u64,
    /// Last index in the log.
    pub last_index: u64,
    pub committed_index: u64,
    pub applied_index: u64,
    pub is_learner: bool,
}

/// A running member of the group.
#[derive(Debug)]
pub struct RaftNode {}

impl RaftNode {
    /// Replicates a command and waits until it is applied here.
    pub async fn propose(&self, _request: InternalRaftRequest) -> Result<Applied, ProposeError> {
        unimplemented!()
    }
    /// Returns once every write acknowledged before the call is visible in `store.view()`.
    pub async fn read_barrier(&self) -> Result<(), ProposeError> {
        unimplemented!()
    }
    pub fn status(&self) -> RaftStatus {
        unimplemented!()
    }
    /// True while this node leads and may act as a leader (expire leases).
    pub fn is_leader(&self) -> bool {
        unimplemented!()
    }
    /// Changes whenever leadership or term does.
    pub fn changes(&self) -> watch::Receiver<RaftStatus> {
        unimplemented!()
    }
    pub async fn shutdown(&self) {
        unimplemented!()
    }
}
