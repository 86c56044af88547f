//! A replica's state, in memory and on disk.
//!
//!     apply --> mvcc::Store --(batches)--> committer --> backend (redb)
//!                   |                                       ^
//!                   +--- reads: index, value cache, overlay +
//!     raft/log_store --> wal
//!
//! Promises: knows neither Raft nor gRPC (invariant 1); a batch carries the position of the log entry it
//! comes from, so that replay after a crash is a no-op (invariant 3).
//! Not here: what a request means (`server/src/apply`), who may ask (`server/src/rpc`).
//!
//! etcd: server/storage.

pub mod backend;
pub mod background;
pub mod bolt;
pub mod check;
pub mod clock;
pub mod committer;
pub mod dirs;
pub mod error;
mod files;
pub mod mvcc;
pub mod observer;
pub mod runner;
pub mod schema;
pub mod wal;

pub use error::{MvccError, ReadError, StorageError};
pub use mvcc::revision::Revision;

/// Where an entry stands in the replicated log. Index 0 is "before the first entry".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogPosition {
    pub term: u64,
    pub index: u64,
}
