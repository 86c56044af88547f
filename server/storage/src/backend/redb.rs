//! redb as the engine: the only file that names it.
//!
//! Promises: each batch is one transaction with immediate durability; `quick_repair` keeps the open after a crash
//! short (its allocator state is saved with each commit) and makes the commit two-phase, so that a torn
//! commit is never taken for a whole one.
//!
//! After an I/O error redb refuses further use of the handle, which suits us: a failed write stops the node.

#![expect(
    clippy::disallowed_types,
    reason = "this file is the one place where the engine is named"
)]

use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use redb::{Database, Durability, ReadableDatabase, TableDefinition};

use super::{Batch, Engine, EngineSize, Pairs, Tally};
use crate::error::StorageError;

/// Everything lies in one table, since our own prefix byte tells tables apart.
const TABLE: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("ballast");

/// `st_blocks` counts these, whatever the file system's block is.
const STAT_BLOCK_BYTES: u64 = 512;
/// What redb keeps for itself: a file that holds next to nothing grows to about this within a few commits (header, two roots, what it
/// knows of its free pages). It does not count towards the quota, or a quota of a few pages, as etcd's own tests set, would be used
/// up by an empty database.
const OWN_BYTES: u64 = 96 * 1024;
/// A database never has no size: etcdctl divides by it.
const PAGE_BYTES: u64 = 4096;

pub(super) struct Redb {
    path: PathBuf,
    file: std::fs::File,
    database: Database,
}

impl std::fmt::Debug for Redb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redb")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Redb {
    pub(super) fn open(path: &Path, cache_bytes: u64) -> Result<Self, StorageError> {
        let fail = |op, detail: &dyn Display| StorageError::Engine {
            op,
            path: path.to_owned(),
            detail: detail.to_string(),
        };
        // redb trusts what it reads and may panic over a damaged file; to the operator of the node both are the same.
        let opened = std::panic::catch_unwind(|| {
            Database::builder()
                .set_cache_size(usize::try_from(cache_bytes).unwrap_or(usize::MAX))
                .create(path)
        });
        let database = opened
            .map_err(|_| fail("open", &"the engine cannot make sense of the file"))?
            .map_err(|e| fail("open", &e))?;
        // A second handle for the size alone: it goes on to name our file after a rename.
        let file = std::fs::File::open(path).map_err(|e| StorageError::io("open", path, e))?;
        let engine = Self {
            path: path.to_owned(),
            file,
            database,
        };
        engine.write(&Batch::default())?; // makes the table
        Ok(engine)
    }

    fn fail(&self, op: &'static str) -> impl Fn(&dyn Display) -> StorageError + '_ {
        move |detail| StorageError::Engine {
            op,
            path: self.path.clone(),
            detail: detail.to_string(),
        }
    }
}

impl Engine for Redb {
    fn write(&self, batch: &Batch) -> Result<(), StorageError> {
        let fail = self.fail("write");
        let mut txn = self.database.begin_write().map_err(|e| fail(&e))?;
        txn.set_durability(Durability::Immediate)
            .map_err(|e| fail(&e))?;
        txn.set_quick_repair(true);
        {
            let mut table = txn.open_table(TABLE).map_err(|e| fail(&e))?;
            for (key, value) in &batch.ops {
                match value {
                    Some(value) => table.insert(&key[..], &value[..]).map(drop),
                    None => table.remove(&key[..]).map(drop),
                }
                .map_err(|e| fail(&e))?;
            }
        }
        txn.commit().map_err(|e| self.fail("commit")(&e))
    }

    fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StorageError> {
        let fail = self.fail("get");
        let txn = self.database.begin_read().map_err(|e| fail(&e))?;
        let table = txn.open_table(TABLE).map_err(|e| fail(&e))?;
        let found = table.get(key).map_err(|e| fail(&e))?;
        Ok(found.map(|value| Bytes::copy_from_slice(value.value())))
    }

    fn get_many(&self, keys: &[Bytes]) -> Result<Vec<Option<Bytes>>, StorageError> {
        let fail = self.fail("get");
        let txn = self.database.begin_read().map_err(|e| fail(&e))?;
        let table = txn.open_table(TABLE).map_err(|e| fail(&e))?;
        let mut out = Vec::with_capacity(keys.len());
        for key in keys {
            let found = table.get(&key[..]).map_err(|e| fail(&e))?;
            out.push(found.map(|value| Bytes::copy_from_slice(value.value())));
        }
        Ok(out)
    }

    fn scan(&self, start: &[u8], end: &[u8], bytes_max: usize) -> Result<Pairs, StorageError> {
        if start >= end {
            return Ok(Pairs::new());
        }
        let fail = self.fail("scan");
        let txn = self.database.begin_read().map_err(|e| fail(&e))?;
        let table = txn.open_table(TABLE).map_err(|e| fail(&e))?;
        let mut out = Pairs::new();
        let mut bytes = 0;
        for pair in table.range::<&[u8]>(start..end).map_err(|e| fail(&e))? {
            let (key, value) = pair.map_err(|e| fail(&e))?;
            let (key, value) = (key.value(), value.value());
            bytes += key.len() + value.len();
            out.push((Bytes::copy_from_slice(key), Bytes::copy_from_slice(value)));
            if bytes >= bytes_max {
                break;
            }
        }
        Ok(out)
    }

    fn size(&self) -> Result<EngineSize, StorageError> {
        let meta = self
            .file
            .metadata()
            .map_err(|e| StorageError::io("stat", &self.path, e))?;
        Ok(EngineSize {
            allocated: (meta.blocks() * STAT_BLOCK_BYTES)
                .saturating_sub(OWN_BYTES)
                .max(PAGE_BYTES),
        })
    }

    fn tally(&self) -> Result<Option<Tally>, StorageError> {
        Ok(None)
    }
}
