//! Our errors as etcd's codes and texts. The only place that builds a `Status` from them.
//!
//! etcd: server/etcdserver/api/v3rpc/util.go.

use ballast_api::error::Error;
use ballast_storage::{MvccError, ReadError};
use tonic::Status;

use crate::apply::{ApplyError, Failure};
use crate::raft::ProposeError;

pub fn from_propose(error: ProposeError) -> Status {
    match error {
        ProposeError::NoLeader => Error::NoLeader.into(),
        ProposeError::Timeout => Error::Timeout.into(),
        ProposeError::LeaderFailed => Error::TimeoutDueToLeaderFail.into(),
        ProposeError::ConnectionLost => Error::TimeoutDueToConnectionLost.into(),
        ProposeError::Overloaded => Error::RequestTooManyRequests.into(),
        // Of etcd's texts the one that says what to look after. Nothing raises the alarm: once there is space, writes go on.
        ProposeError::NoSpace => Error::NoSpace.into(),
        ProposeError::Stopping => Error::Stopped.into(),
    }
}

pub fn from_apply(error: &ApplyError) -> Status {
    match error {
        ApplyError::Mvcc(error) => from_mvcc(*error),
        ApplyError::LeaseNotFound => Error::LeaseNotFound.into(),
        ApplyError::LeaseExists => Error::LeaseExist.into(),
        ApplyError::LeaseTtlTooLarge => Error::LeaseTTLTooLarge.into(),
        ApplyError::KeyNotFound => Error::KeyNotFound.into(),
        ApplyError::NoSpace => Error::NoSpace.into(),
        ApplyError::Corrupt => Error::Corrupt.into(),
        ApplyError::Unknown(command) => Status::unknown(format!("unknown command {command}")),
    }
}

pub fn from_mvcc(error: MvccError) -> Status {
    match error {
        MvccError::Compacted { .. } => Error::Compacted.into(),
        MvccError::FutureRevision { .. } => Error::FutureRev.into(),
    }
}

/// A read that the disk failed stops the node: it never becomes an answer.
pub fn from_read(error: ReadError) -> Status {
    match error {
        ReadError::Mvcc(error) => from_mvcc(error),
        ReadError::Storage(error) => crate::node::stop_on_damage(&error),
        ReadError::TooLarge { .. } => Error::RequestTooManyRequests.into(),
    }
}

pub fn from_failure(error: Failure) -> Status {
    match error {
        Failure::Refused(error) => from_apply(&error),
        Failure::Fatal(error) => crate::node::stop_on_damage(&error),
        Failure::TooLarge { .. } => Error::RequestTooManyRequests.into(),
    }
}
