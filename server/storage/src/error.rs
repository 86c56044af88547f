//! What can go wrong, by fate: an answer that every replica gives alike, or damage that stops the node.
//!
//! Not here: unavailability, which belongs to the Raft layer.

use std::path::{Path, PathBuf};

/// A deterministic answer: part of the applied result, equal on all replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MvccError {
    #[error("required revision has been compacted")]
    Compacted { compact_revision: i64 },
    #[error("required revision is a future revision")]
    FutureRevision { current: i64 },
}

/// The disk or what it holds cannot be trusted. The node stops; this never becomes a gRPC answer.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    #[error("{op} {path}: {source}")]
    Io {
        op: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("engine {op} in {path}: {detail}")]
    Engine {
        op: &'static str,
        path: PathBuf,
        detail: String,
    },
    #[error("{path} is damaged at byte {offset}: {what}")]
    Damaged {
        path: PathBuf,
        offset: u64,
        what: String,
    },
    /// A record of the engine is not what its place promises.
    #[error("{path} is damaged: record {record}: {what}")]
    DamagedRecord {
        path: PathBuf,
        record: String,
        what: String,
    },
    /// Nothing was changed.
    #[error(
        "{path}: {available} bytes are free on its disk, and a copy of the database needs {needed}"
    )]
    NoRoom {
        path: PathBuf,
        needed: u64,
        available: u64,
    },
    /// What was asked cannot happen any more, because of an earlier failure or a close.
    #[error("storage stopped: {first}")]
    Stopped { first: String },
    /// The directory is sound but not ours to open; `why` says what to do.
    #[error("refusing {path}: {why}")]
    Refused { path: PathBuf, why: String },
}

impl StorageError {
    pub fn io(op: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io {
            op,
            path: path.to_owned(),
            source,
        }
    }
}

/// What a read can end in.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error(transparent)]
    Mvcc(#[from] MvccError),
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// More than [`crate::mvcc::RangeOptions::bytes_max`].
    #[error("the range holds {bytes} bytes")]
    TooLarge { bytes: u64 },
}
