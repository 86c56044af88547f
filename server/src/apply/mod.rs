//! What each command does to the replica's state. Deterministic: no clock, no randomness, no config, no network.
//!
//! etcd: server/etcdserver/apply.

use ballast_api::etcdserverpb as pb;
use ballast_storage::LogPosition;
use ballast_storage::mvcc::Compaction;

/// What the Raft layer calls for each committed entry, in log order, from one thread at a time.
pub trait Apply: Send + Sync + std::fmt::Debug {
    /// Applies one command. The store's applied position is `at` afterwards, whatever the answer.
    fn apply(&self, at: LogPosition, request: &pb::InternalRaftRequest) -> Applied;
    /// An entry without a command (a new leader's first, a membership change): only the position moves.
    fn apply_empty(&self, at: LogPosition);
}

/// The answer to one command, equal on all replicas.
#[derive(Debug, Clone)]
pub struct Applied {
    /// The store's revision after the command: goes into the response header.
    pub revision: i64,
    pub result: Result<Answer, ApplyError>,
}

/// What a command answers. Headers are left empty here and filled by `rpc/header.rs`.
#[derive(Debug, Clone)]
pub enum Answer {
    Put(pb::PutResponse),
    DeleteRange(pb::DeleteRangeResponse),
    Txn(pb::TxnResponse),
    Compaction(Compaction),
    LeaseGrant(pb::LeaseGrantResponse),
    LeaseRevoke(pb::LeaseRevokeResponse),
    LeaseCheckpoint,
    Alarm(pb::AlarmResponse),
    /// A no-op, a membership change, a cluster version or member attributes.
    Nothing,
}

/// A refusal that every replica gives alike. `rpc/status.rs` maps it to etcd's code and text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    #[error(transparent)]
    Mvcc(#[from] ballast_storage::MvccError),
    #[error("requested lease not found")]
    LeaseNotFound,
    #[error("lease already exists")]
    LeaseExists,
    #[error("too large lease TTL")]
    LeaseTtlTooLarge,
    /// ignore_value or ignore_lease on a key that does not exist.
    #[error("key not found")]
    KeyNotFound,
    #[error("database space exceeded")]
    NoSpace,
    #[error("corrupt cluster")]
    Corrupt,
    #[error("unknown command {0}")]
    Unknown(String),
}
