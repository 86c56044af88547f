//! redb as the engine: the only file that names it.
//!
//!     key          the engine key, whose first byte is below 0xff
//!       -> value   and four bytes more: CRC32C over key and value, little-endian
//!     0xff 't'     the tally of all pairs: in every batch
//!
//! Promises: each batch is one transaction, with immediate durability unless it is written lazily, the tally inside; `quick_repair` keeps the open after a crash
//! short (its allocator state is saved with each commit) and makes the commit two-phase, so that a torn
//! commit is never taken for a whole one. What redb lacks is made up for here:
//!
//! - It checks its pages' sums only when it repairs a file, never when it reads: each value has a sum of its own, and whoever reads all
//!   pairs compares them with the tally. So a bit that turned over in a value or a key is found when that is read, one in redb's own
//!   pages when a pair is not found or is found twice.
//! - It may panic over damage: a panic becomes an error, and the engine answers nothing from then on.
//!
//! After an I/O error redb refuses further use of the handle, which suits us: a failed write stops the node.

#![expect(
    clippy::disallowed_types,
    reason = "this file is the one place where the engine is named"
)]

use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use bytes::Bytes;
use crc32c::{crc32c, crc32c_append};
use parking_lot::Mutex;
use redb::{Database, Durability, ReadableDatabase, TableDefinition};

use super::overlay::Overlay;
use super::tally::Digest;
use super::{Batch, Engine, EngineSize, OWN_PREFIX, Pairs, Tally};
use crate::error::StorageError;
use crate::schema;

/// Everything lies in one table, since our own prefix byte tells tables apart.
const TABLE: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("ballast");

const TALLY_KEY: [u8; 2] = [OWN_PREFIX, b't'];
/// Of the sum behind each value.
const SEAL_BYTES: usize = 4;

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
    /// As of the last batch.
    tally: Mutex<Tally>,
    /// Why nothing is answered any more.
    broken: OnceLock<String>,
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
        let fail = |detail: &dyn Display| StorageError::Engine {
            op: "open",
            path: path.to_owned(),
            detail: detail.to_string(),
        };
        let is_new = !path.exists();
        let opened = caught(|| {
            Database::builder()
                .set_cache_size(usize::try_from(cache_bytes).unwrap_or(usize::MAX))
                .create(path)
        });
        let database = opened
            .map_err(|reason| fail(&reason))?
            .map_err(|e| fail(&e))?;
        // A second handle for the size alone: it goes on to name our file after a rename.
        let file = std::fs::File::open(path).map_err(|e| StorageError::io("open", path, e))?;
        let mut engine = Self {
            path: path.to_owned(),
            file,
            database,
            tally: Mutex::default(),
            broken: OnceLock::new(),
        };
        if !is_new {
            engine.tally = Mutex::new(engine.read_tally()?);
        }
        engine.write(&Batch::default())?; // the table, and the tally, so that no database is without
        Ok(engine)
    }

    /// Checks every page's checksum, and repairs in memory what an unclean end left.
    pub(super) fn open_unchanged(path: &Path, cache_bytes: u64) -> Result<Self, StorageError> {
        let fail = |detail: &dyn Display| StorageError::Engine {
            op: "check",
            path: path.to_owned(),
            detail: detail.to_string(),
        };
        let io = |e| StorageError::io("open", path, e);
        let overlay = Overlay::open(path).map_err(io)?;
        if overlay.bytes() == 0 {
            return Err(fail(&"the file is empty"));
        }
        let opened = caught(|| {
            Database::builder()
                .set_cache_size(usize::try_from(cache_bytes).unwrap_or(usize::MAX))
                .set_check_integrity_on_open(true)
                .create_with_backend(overlay)
        });
        let database = opened
            .map_err(|reason| fail(&reason))?
            .map_err(|e| fail(&e))?;
        let mut engine = Self {
            path: path.to_owned(),
            file: std::fs::File::open(path).map_err(io)?,
            database,
            tally: Mutex::default(),
            broken: OnceLock::new(),
        };
        engine.tally = Mutex::new(engine.read_tally()?);
        Ok(engine)
    }

    fn read_tally(&self) -> Result<Tally, StorageError> {
        let bytes = self.get(&TALLY_KEY)?;
        bytes
            .as_deref()
            .and_then(|bytes| Some(Tally::from_bytes(bytes.try_into().ok()?)))
            .ok_or_else(|| {
                let what = "it has no tally of its pairs: it is of a version before the first release, or damaged";
                self.error("open", &what)
            })
    }

    fn error(&self, op: &'static str, detail: &dyn Display) -> StorageError {
        StorageError::Engine {
            op,
            path: self.path.clone(),
            detail: detail.to_string(),
        }
    }

    /// Runs `work` unless the engine is broken; a panic breaks it.
    fn run<T>(
        &self,
        op: &'static str,
        work: impl FnOnce() -> Result<T, StorageError>,
    ) -> Result<T, StorageError> {
        if let Some(first) = self.broken.get() {
            return Err(self.error(op, &format!("stopped after: {first}")));
        }
        match caught(work) {
            Ok(result) => result,
            Err(reason) => Err(self.error(op, self.broken.get_or_init(|| reason))),
        }
    }

    /// The value in what is stored under `key`.
    fn open_seal<'a>(&self, key: &[u8], stored: &'a [u8]) -> Result<&'a [u8], StorageError> {
        let opened = stored
            .split_last_chunk::<SEAL_BYTES>()
            .filter(|(value, seal)| seal_of(key, value) == **seal);
        opened.map(|(value, _)| value).ok_or_else(|| {
            let record = schema::name_of(key);
            let what = "its checksum does not match".to_owned();
            let path = self.path.clone();
            StorageError::DamagedRecord { path, record, what }
        })
    }

    fn write_batch(
        &self,
        batch: &Batch,
        durability: Durability,
        tally: &mut Tally,
    ) -> Result<(), StorageError> {
        let fail = |error: &dyn Display| self.error("write", error);
        let mut txn = self.database.begin_write().map_err(|e| fail(&e))?;
        txn.set_durability(durability).map_err(|e| fail(&e))?;
        txn.set_quick_repair(true);
        {
            let mut table = txn.open_table(TABLE).map_err(|e| fail(&e))?;
            let mut sealed = Vec::new();
            for (key, value) in &batch.ops {
                if key.first().is_none_or(|first| *first == OWN_PREFIX) {
                    return Err(fail(&"a key lies outside of what is the store's"));
                }
                let old = match value {
                    Some(value) => {
                        seal(key, value, &mut sealed);
                        tally.add(key, Digest::of(value));
                        table.insert(&key[..], &sealed[..])
                    }
                    None => table.remove(&key[..]),
                };
                if let Some(old) = old.map_err(|e| fail(&e))? {
                    tally.remove(key, Digest::of(self.open_seal(key, old.value())?));
                }
            }
            seal(&TALLY_KEY, &tally.to_bytes(), &mut sealed);
            let put = table.insert(&TALLY_KEY[..], &sealed[..]);
            put.map(drop).map_err(|e| fail(&e))?;
        }
        txn.commit().map_err(|e| self.error("commit", &e))
    }

    fn write_with(&self, batch: &Batch, durability: Durability) -> Result<(), StorageError> {
        let mut tally = self.tally.lock();
        let mut after = *tally;
        self.run("write", || self.write_batch(batch, durability, &mut after))?;
        *tally = after;
        Ok(())
    }

    fn values(
        &self,
        keys: &mut dyn Iterator<Item = &[u8]>,
    ) -> Result<Vec<Option<Bytes>>, StorageError> {
        let fail = |error: &dyn Display| self.error("get", error);
        let txn = self.database.begin_read().map_err(|e| fail(&e))?;
        let table = txn.open_table(TABLE).map_err(|e| fail(&e))?;
        let mut out = Vec::with_capacity(keys.size_hint().0);
        for key in keys {
            out.push(match table.get(key).map_err(|e| fail(&e))? {
                Some(stored) => {
                    let value = self.open_seal(key, stored.value())?;
                    Some(Bytes::copy_from_slice(value))
                }
                None => None,
            });
        }
        Ok(out)
    }

    fn pairs(
        &self,
        start: &[u8],
        end: &[u8],
        bytes_max: usize,
        each: &mut dyn FnMut(&[u8], &[u8]),
    ) -> Result<(), StorageError> {
        let fail = |error: &dyn Display| self.error("scan", error);
        let txn = self.database.begin_read().map_err(|e| fail(&e))?;
        let table = txn.open_table(TABLE).map_err(|e| fail(&e))?;
        let mut bytes = 0;
        for pair in table.range::<&[u8]>(start..end).map_err(|e| fail(&e))? {
            let (key, stored) = pair.map_err(|e| fail(&e))?;
            let key = key.value();
            let value = self.open_seal(key, stored.value())?;
            bytes += key.len() + value.len();
            each(key, value);
            if bytes >= bytes_max {
                break;
            }
        }
        Ok(())
    }
}

impl redb::StorageBackend for Overlay {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.bytes())
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.read_at(offset, out)
    }
    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.resize(len);
        Ok(())
    }
    fn sync_data(&self) -> std::io::Result<()> {
        Ok(())
    }
    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.write_at(offset, data)
    }
}

impl Engine for Redb {
    fn write(&self, batch: &Batch) -> Result<(), StorageError> {
        self.write_with(batch, Durability::Immediate)
    }

    fn write_lazily(&self, batch: &Batch) -> Result<(), StorageError> {
        self.write_with(batch, Durability::None)
    }

    fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StorageError> {
        let found = self.run("get", || self.values(&mut std::iter::once(key)))?;
        Ok(found.into_iter().next().flatten())
    }

    fn get_many(&self, keys: &[Bytes]) -> Result<Vec<Option<Bytes>>, StorageError> {
        self.run("get", || self.values(&mut keys.iter().map(|key| &key[..])))
    }

    fn scan(&self, start: &[u8], end: &[u8], bytes_max: usize) -> Result<Pairs, StorageError> {
        let mut out = Pairs::new();
        self.visit(start, end, bytes_max, &mut |key, value| {
            out.push((Bytes::copy_from_slice(key), Bytes::copy_from_slice(value)));
        })?;
        Ok(out)
    }

    fn visit(
        &self,
        start: &[u8],
        end: &[u8],
        bytes_max: usize,
        each: &mut dyn FnMut(&[u8], &[u8]),
    ) -> Result<(), StorageError> {
        let end = end.min(&[OWN_PREFIX][..]);
        if start >= end {
            return Ok(());
        }
        self.run("scan", || self.pairs(start, end, bytes_max, each))
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
        Ok(Some(*self.tally.lock()))
    }
}

fn seal_of(key: &[u8], value: &[u8]) -> [u8; SEAL_BYTES] {
    crc32c_append(crc32c(key), value).to_le_bytes()
}

/// What is stored for a value, in `out`.
fn seal(key: &[u8], value: &[u8], out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(value);
    out.extend_from_slice(&seal_of(key, value));
}

/// What `work` answers, or why it panicked. Whatever state the panic left is not looked at again.
fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no reason given");
        format!("the engine cannot make sense of the file: {text}")
    })
}

#[cfg(test)]
mod tests;
