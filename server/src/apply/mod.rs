//! What each command does to the replica's state. Deterministic: no clock, no randomness, no config, no network.
//!
//! Each entry is one transaction of the store, committed even when the command is refused, so that the applied position
//! moves; then its events go to the watch hub, then the writer is answered.
//!
//! etcd: server/etcdserver/apply.

pub mod alarm;
mod cluster;
mod kv;
mod lease;
pub mod quota;
pub mod range;
pub mod txn;

use std::sync::Arc;

use ballast_api::etcdserverpb as pb;
use ballast_storage::mvcc::{Compaction, Store, WriteTxn};
use ballast_storage::schema::{Table, meta};
use ballast_storage::{LogPosition, ReadError, StorageError};
use bytes::Bytes;

pub use alarm::Alarms;

use crate::cluster::Cluster;
use crate::lease::Lessor;
use crate::watch::Hub;

/// What the Raft layer calls for each committed entry, in log order, from one thread at a time.
pub trait Apply: Send + Sync + std::fmt::Debug {
    /// Applies one command. The store's applied position is `at` afterwards, whatever the answer.
    fn apply(&self, at: LogPosition, request: &pb::InternalRaftRequest) -> Applied;
    /// An entry without a command (a new leader's first): only the position moves.
    fn apply_empty(&self, at: LogPosition);
    /// From here on the group consists of these. `stored` is the Raft layer's record of it, to lie in the engine beside the list.
    fn apply_membership(&self, at: LogPosition, members: &[GroupMember], stored: Bytes);
    /// No further entry is at hand: what was put off for the sake of several goes now.
    fn settle(&self) {}
}

/// A member as the group's membership has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMember {
    pub id: u64,
    /// Empty when an older release wrote the membership: then what the list says stays.
    pub peer_urls: Vec<String>,
    pub is_learner: bool,
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

impl Answer {
    /// For logs, which never hold what the answer holds.
    pub fn kind(&self) -> &'static str {
        match self {
            Answer::Put(_) => "put",
            Answer::DeleteRange(_) => "delete_range",
            Answer::Txn(_) => "txn",
            Answer::Compaction(_) => "compaction",
            Answer::LeaseGrant(_) => "lease_grant",
            Answer::LeaseRevoke(_) => "lease_revoke",
            Answer::LeaseCheckpoint => "lease_checkpoint",
            Answer::Alarm(_) => "alarm",
            Answer::Nothing => "nothing",
        }
    }
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

/// How carrying out a command can end badly.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Equal on all replicas.
    #[error(transparent)]
    Refused(#[from] ApplyError),
    /// This replica cannot go on.
    #[error(transparent)]
    Fatal(#[from] StorageError),
    /// Only a read that asked for it ends so.
    #[error("the answer holds {bytes} bytes")]
    TooLarge { bytes: u64 },
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Mvcc(error) => Failure::Refused(error.into()),
            ReadError::Storage(error) => Failure::Fatal(error),
            ReadError::TooLarge { bytes } => Failure::TooLarge { bytes },
        }
    }
}

/// The one implementation of [`Apply`].
#[derive(Debug)]
pub struct Applier {
    pub store: Arc<Store>,
    pub lessor: Arc<Lessor>,
    pub alarms: Arc<Alarms>,
    pub cluster: Arc<Cluster>,
    pub hub: Arc<Hub>,
}

impl Apply for Applier {
    fn apply(&self, at: LogPosition, request: &pb::InternalRaftRequest) -> Applied {
        let mut txn = self.store.begin(at);
        let result = match self.run(&mut txn, request) {
            Ok(answer) => Ok(answer),
            Err(Failure::Refused(refusal)) => Err(refusal),
            Err(Failure::Fatal(error)) => crate::node::stop_on_damage(&error),
            Err(Failure::TooLarge { .. }) => {
                unreachable!("what is applied reads without a bound")
            }
        };
        Applied {
            revision: self.publish(txn),
            result,
        }
    }

    fn apply_empty(&self, at: LogPosition) {
        self.publish(self.store.begin(at));
    }

    fn apply_membership(&self, at: LogPosition, members: &[GroupMember], stored: Bytes) {
        let mut txn = self.store.begin(at);
        txn.table_put(Table::Meta, meta::RAFT_MEMBERSHIP, stored);
        cluster::set_members(&mut txn, &self.cluster, members);
        self.publish(txn);
    }

    fn settle(&self) {
        self.hub.wake();
    }
}

impl Applier {
    /// First readers, then watchers, and only then (by returning) the writer.
    fn publish(&self, txn: WriteTxn<'_>) -> i64 {
        let committed = txn.commit();
        self.hub.notify(&committed);
        committed.revision
    }

    fn run(
        &self,
        txn: &mut WriteTxn<'_>,
        request: &pb::InternalRaftRequest,
    ) -> Result<Answer, Failure> {
        quota::check_alarms(&self.alarms, request)?;
        if let Some(put) = &request.put {
            if put.lease != 0 || put.ignore_value || put.ignore_lease {
                kv::check_put(&self.store.view(), &self.lessor, put)?;
            }
            return Ok(Answer::Put(kv::put(txn, &self.lessor, put)?));
        }
        if let Some(request) = &request.txn {
            let view = self.store.view();
            let response = txn::apply(&view, txn, &self.lessor, request)?;
            return Ok(Answer::Txn(response));
        }
        if let Some(delete) = &request.delete_range {
            let response = kv::delete_range(txn, &self.lessor, delete)?;
            return Ok(Answer::DeleteRange(response));
        }
        if let Some(compaction) = &request.compaction {
            let compaction = txn.compact(compaction.revision).map_err(ApplyError::from)?;
            return Ok(Answer::Compaction(compaction));
        }
        if let Some(grant) = &request.lease_grant {
            let response = lease::grant(txn, &self.lessor, grant)?;
            return Ok(Answer::LeaseGrant(response));
        }
        if let Some(revoke) = &request.lease_revoke {
            let response = lease::revoke(txn, &self.lessor, *revoke)?;
            return Ok(Answer::LeaseRevoke(response));
        }
        if let Some(checkpoint) = &request.lease_checkpoint {
            lease::checkpoint(txn, &self.lessor, checkpoint);
            return Ok(Answer::LeaseCheckpoint);
        }
        if let Some(alarm) = &request.alarm {
            return Ok(Answer::Alarm(self.alarms.apply(txn, alarm)));
        }
        if let Some(attributes) = &request.cluster_member_attr_set {
            cluster::set_attributes(txn, &self.cluster, attributes);
            return Ok(Answer::Nothing);
        }
        if let Some(version) = &request.cluster_version_set {
            cluster::stop_if_outgrown(version);
            cluster::set_version(txn, &self.cluster, version);
            return Ok(Answer::Nothing);
        }
        if let Some(downgrade) = &request.downgrade_info_set {
            cluster::set_downgrade(txn, &self.cluster, downgrade);
            return Ok(Answer::Nothing);
        }
        if request.downgrade_version_test.is_some() {
            return Ok(Answer::Nothing);
        }
        // Not its content, which may be secret.
        Err(ApplyError::Unknown("of a kind that this version does not know".to_owned()).into())
    }
}

/// The header within an answer: the revision alone, as etcd has it inside transactions.
fn header_at(revision: i64) -> pb::ResponseHeader {
    pb::ResponseHeader {
        revision,
        ..Default::default()
    }
}
