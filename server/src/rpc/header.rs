//! The header of every response: which cluster and member, at which revision and term.
//!
//! etcd: server/etcdserver/api/v3rpc/header.go.

use ballast_api::etcdserverpb as pb;
use tokio::sync::watch;

use crate::cluster::Cluster;
use crate::raft::RaftNode;
use crate::raft::node::RaftStatus;

/// Fills headers. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Headers {
    raft: watch::Receiver<RaftStatus>,
    cluster_id: u64,
    member_id: u64,
}

impl Headers {
    pub fn new(raft: &RaftNode, cluster: &Cluster) -> Self {
        Self {
            raft: raft.changes(),
            cluster_id: cluster.cluster_id,
            member_id: cluster.member_id,
        }
    }

    pub fn at(&self, revision: i64) -> pb::ResponseHeader {
        pb::ResponseHeader {
            cluster_id: self.cluster_id,
            member_id: self.member_id,
            revision,
            raft_term: self.raft.borrow().term,
        }
    }
}
