//! The engine behind a narrow trait: atomic batch, get, chunked ordered scan, size.
//!
//! Promises: a batch is all there or not at all, and synced to the disk when `write` returns. After a power cut those that are there are
//! the first ones.
//! Not here: what the bytes mean (`schema.rs`), when they are written (`committer.rs`).
//!
//! etcd: server/storage/backend, without read transactions: revision records never change, so a reader needs none.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use crate::error::StorageError;

mod copied;
pub mod current;
mod overlay;
mod redb;
mod sled;
mod tally;

pub use tally::Tally;

/// Engine keys begin with a byte below this; what lies above is the engine's own.
pub const OWN_PREFIX: u8 = u8::MAX;

/// Writes in order; a later one to the same key wins.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Engine keys (with table prefix) and their new value; None deletes.
    pub ops: Vec<(Bytes, Option<Bytes>)>,
}

impl Batch {
    pub fn put(&mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) {
        self.ops.push((key.into(), Some(value.into())));
    }

    pub fn delete(&mut self, key: impl Into<Bytes>) {
        self.ops.push((key.into(), None));
    }
}

/// A batch from text keys.
#[cfg(test)]
fn batch(ops: &[(&str, Option<&[u8]>)]) -> Batch {
    let own = |bytes: &[u8]| Bytes::copy_from_slice(bytes);
    Batch {
        ops: ops
            .iter()
            .map(|(key, value)| (own(key.as_bytes()), value.map(own)))
            .collect(),
    }
}

/// Bytes on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineSize {
    /// Blocks allocated to the file or files, in bytes (their lengths run ahead), less what the engine needs for itself when it holds nothing.
    pub allocated: u64,
}

/// Key and value pairs, ascending.
pub type Pairs = Vec<(Bytes, Bytes)>;

/// Room made at once for [`Engine::scan_as_one`]: growing is copying. The last pair goes beyond what was asked for.
const AS_ONE_BYTES: usize = 1 << 20;
const LAST_PAIR_BYTES: usize = 16 << 10;

/// A store of ordered byte keys.
pub trait Engine: Send + Sync + std::fmt::Debug {
    /// Writes all of the batch, durably, or none of it.
    fn write(&self, batch: &Batch) -> Result<(), StorageError>;
    /// The same, but a power cut may take it back until the next [`Self::write`] has returned: for what is done again then.
    fn write_lazily(&self, batch: &Batch) -> Result<(), StorageError> {
        self.write(batch)
    }
    /// The same for a database that counts for nothing before a [`Self::write`] has returned: what a crash leaves of it is to be thrown away.
    fn write_unpublished(&self, batch: &Batch) -> Result<(), StorageError> {
        self.write(batch)
    }
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StorageError>;
    /// As many `get`s at the cost of one read transaction. Answers in the order of `keys`.
    fn get_many(&self, keys: &[Bytes]) -> Result<Vec<Option<Bytes>>, StorageError>;
    /// Pairs with `start <= key < end`, ascending, at least one if there is one, stopping after `bytes_max` of keys and values. Not of one
    /// moment: a batch written meanwhile may show in the later pairs only.
    fn scan(&self, start: &[u8], end: &[u8], bytes_max: usize) -> Result<Pairs, StorageError>;
    /// The pairs that [`Self::scan`] gives, in turn, for whoever needs little of each.
    fn visit(
        &self,
        start: &[u8],
        end: &[u8],
        bytes_max: usize,
        each: &mut dyn FnMut(&[u8], &[u8]),
    ) -> Result<(), StorageError> {
        for (key, value) in self.scan(start, end, bytes_max)? {
            each(&key, &value);
        }
        Ok(())
    }
    /// As [`Self::scan`], all pairs in one piece of memory, which lives as long as any of them: for whoever soon drops them all.
    fn scan_as_one(
        &self,
        start: &[u8],
        end: &[u8],
        bytes_max: usize,
    ) -> Result<Pairs, StorageError> {
        let mut all = Vec::with_capacity(bytes_max.min(AS_ONE_BYTES) + LAST_PAIR_BYTES);
        let mut lens = Vec::new();
        self.visit(start, end, bytes_max, &mut |key, value| {
            all.extend_from_slice(key);
            all.extend_from_slice(value);
            lens.push((key.len(), value.len()));
        })?;
        let mut all = Bytes::from(all);
        let lens = lens.into_iter();
        Ok(lens
            .map(|(key, value)| (all.split_to(key), all.split_to(value)))
            .collect())
    }
    fn size(&self) -> Result<EngineSize, StorageError>;
    /// What all pairs written sum up to, for whoever reads them all; None when the engine keeps no such sum.
    fn tally(&self) -> Result<Option<Tally>, StorageError>;
}

/// Which engine. The name is part of the name of the database's file or directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// One file.
    #[default]
    Redb,
    /// A directory.
    Sled,
}

impl Kind {
    pub const ALL: [Kind; 2] = [Kind::Redb, Kind::Sled];

    /// The extension of the engine's files, and the value of `--storage-engine`.
    pub const fn extension(self) -> &'static str {
        match self {
            Kind::Redb => "redb",
            Kind::Sled => "sled",
        }
    }

    /// The engine of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.extension() == name)
    }

    /// Opens the database at `path`, making it when absent.
    pub fn open(self, path: &Path, cache_bytes: u64) -> Result<Arc<dyn Engine>, StorageError> {
        match self {
            Kind::Redb => Ok(Arc::new(redb::Redb::open(path, cache_bytes)?)),
            Kind::Sled => Ok(Arc::new(sled::Sled::open(path, cache_bytes)?)),
        }
    }
}

impl Kind {
    /// Makes a database at `path`, where there is none, to be filled with [`Engine::write_unpublished`] for the most part.
    pub fn create_to_fill(
        self,
        path: &Path,
        cache_bytes: u64,
    ) -> Result<Arc<dyn Engine>, StorageError> {
        match self {
            Kind::Redb => Ok(Arc::new(redb::Redb::create_to_fill(path, cache_bytes)?)),
            Kind::Sled => self.open(path, cache_bytes),
        }
    }

    /// Opens the database at `path` for reading everything once: its checksums are compared, and it is not changed (sled needs
    /// room for a copy where temporary files go).
    pub fn open_unchanged(
        self,
        path: &Path,
        cache_bytes: u64,
    ) -> Result<Arc<dyn Engine>, StorageError> {
        match self {
            Kind::Redb => Ok(Arc::new(redb::Redb::open_unchanged(path, cache_bytes)?)),
            Kind::Sled => Ok(Arc::new(copied::Copied::open(path, |copy| {
                sled::Sled::open(copy, cache_bytes)
            })?)),
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.extension())
    }
}

/// What is left in an engine's place when the store is closed: readers that are late get an error, and the file is free.
#[derive(Debug)]
pub struct Closed(pub PathBuf);

impl Closed {
    fn refuse<T>(&self, op: &'static str) -> Result<T, StorageError> {
        let first = format!("no {op} in {}: the store is closed", self.0.display());
        Err(StorageError::Stopped { first })
    }
}

impl Engine for Closed {
    fn write(&self, _: &Batch) -> Result<(), StorageError> {
        self.refuse("write")
    }
    fn get(&self, _: &[u8]) -> Result<Option<Bytes>, StorageError> {
        self.refuse("get")
    }
    fn get_many(&self, _: &[Bytes]) -> Result<Vec<Option<Bytes>>, StorageError> {
        self.refuse("get")
    }
    fn scan(&self, _: &[u8], _: &[u8], _: usize) -> Result<Pairs, StorageError> {
        self.refuse("scan")
    }
    fn size(&self) -> Result<EngineSize, StorageError> {
        self.refuse("size")
    }
    fn tally(&self) -> Result<Option<Tally>, StorageError> {
        self.refuse("tally")
    }
}
