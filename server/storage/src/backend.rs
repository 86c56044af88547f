//! The engine behind a narrow trait: atomic batch, get, chunked ordered scan, size, flush.
//!
//! Promises: a batch is all there or not at all, and synced to the disk when `write` returns.
//! Not here: what the bytes mean (`schema.rs`), when they are written (`committer.rs`).
//!
//! etcd: server/storage/backend, without read transactions: revision records never change, so a reader needs none.

use bytes::Bytes;

use crate::error::StorageError;

/// Writes in order; a later one to the same key wins.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Engine keys (with table prefix) and their new value; None deletes.
    pub ops: Vec<(Bytes, Option<Bytes>)>,
}

/// Bytes on disk, and bytes of them that hold something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineSize {
    /// Blocks allocated to the file, in bytes (its length runs ahead).
    pub allocated: u64,
}

/// Key and value pairs, ascending.
pub type Pairs = Vec<(Bytes, Bytes)>;

/// A store of ordered byte keys.
pub trait Engine: Send + Sync + std::fmt::Debug {
    /// Writes all of the batch, durably, or none of it.
    fn write(&self, batch: &Batch) -> Result<(), StorageError>;
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StorageError>;
    /// Pairs with `start <= key < end`, ascending, at least one if there is one, stopping after `bytes_max` of keys and values.
    fn scan(&self, start: &[u8], end: &[u8], bytes_max: usize) -> Result<Pairs, StorageError>;
    fn size(&self) -> Result<EngineSize, StorageError>;
}
