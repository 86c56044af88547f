//! redb as the engine: the only file that names it.
//!
//!     key          the engine key, whose first byte is below 0xff
//!       -> value   and four bytes more: CRC32C over key and value, little-endian
//!     0xff 't'     the tally of all pairs: in every batch
//!
//! Promises: each batch is one transaction, with immediate durability unless it is written lazily, the tally inside; `quick_repair` keeps the open after a crash
//! short (its allocator state is saved with each commit) and makes the commit two-phase, so that a torn
//! commit is never taken for a whole one (a database that is not published yet does without). What redb lacks is made up for here:
//!
//! - It checks its pages' sums only when it repairs a file, never when it reads: each value has a sum of its own, and whoever reads all
//!   pairs compares them with the tally. So a bit that turned over in a value or a key is found when that is read, one in redb's own
//!   pages when a pair is not found or is found twice.
//! - It follows its pages wherever they lead: a scan whose keys do not ascend is damage, and so is one that gives a key it was not asked for.
//! - It may panic over damage: a panic becomes an error, and the engine answers nothing from then on. So it may as it closes, which writes.
//!
//! After an I/O error redb refuses further use of the handle, which suits us: a failed write stops the node.

#![expect(
    clippy::disallowed_types,
    reason = "this file is the one place where the engine is named"
)]

use std::fmt::Display;
use std::fs::File;
use std::ops::Bound;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use crc32c::{crc32c, crc32c_append};
use parking_lot::Mutex;
use redb::{CursorError, Database, Durability, ReadableDatabase, Table as Tree, TableDefinition};

use self::filling::Filling;
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

/// Puts in a row whose keys ascend go in by a cursor, which fills pages and changes those above them once. For fewer, the search for each is cheaper.
const RUN_MIN: usize = 8;

/// What a commit promises.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Commit {
    /// It is on the disk, and the open after a crash is short.
    Synced,
    /// Nothing yet.
    Lazy,
    /// Nothing, not even that the database is sound after a crash.
    Unpublished,
}

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
    file: File,
    /// None once it is closed: in the drop.
    database: Option<Database>,
    /// Of one that is being filled: whether what is synced now is relied on.
    relies: Option<Arc<AtomicBool>>,
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
        let file = File::open(path).map_err(|e| StorageError::io("open", path, e))?;
        let mut engine = Self {
            path: path.to_owned(),
            file,
            database: Some(database),
            relies: None,
            tally: Mutex::default(),
            broken: OnceLock::new(),
        };
        if !is_new {
            engine.tally = Mutex::new(engine.read_tally()?);
        }
        engine.write(&Batch::default())?; // the table, and the tally, so that no database is without
        Ok(engine)
    }

    /// Makes a database that counts for nothing before the last write.
    pub(super) fn create_to_fill(path: &Path, cache_bytes: u64) -> Result<Self, StorageError> {
        let io = |e| StorageError::io("create", path, e);
        let relies = Arc::new(AtomicBool::new(true));
        let filling = Filling::create(path, Arc::clone(&relies)).map_err(io)?;
        let created = Database::builder()
            .set_cache_size(usize::try_from(cache_bytes).unwrap_or(usize::MAX))
            .create_with_backend(filling);
        Ok(Self {
            path: path.to_owned(),
            file: File::open(path).map_err(io)?,
            database: Some(created.map_err(|e| StorageError::Engine {
                op: "create",
                path: path.to_owned(),
                detail: e.to_string(),
            })?),
            relies: Some(relies),
            tally: Mutex::default(),
            broken: OnceLock::new(),
        })
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
            file: File::open(path).map_err(io)?,
            database: Some(database),
            relies: None,
            tally: Mutex::default(),
            broken: OnceLock::new(),
        };
        engine.tally = Mutex::new(engine.read_tally()?);
        Ok(engine)
    }

    fn database(&self) -> &Database {
        self.database.as_ref().expect("only the drop takes it")
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

    fn out_of_order(&self, key: &[u8]) -> StorageError {
        StorageError::DamagedRecord {
            path: self.path.clone(),
            record: schema::name_of(key),
            what: "it is out of order".to_owned(),
        }
    }

    fn write_batch(
        &self,
        batch: &Batch,
        commit: Commit,
        tally: &mut Tally,
    ) -> Result<(), StorageError> {
        let fail = |error: &dyn Display| self.error("write", error);
        if batch.ops.iter().any(|(key, _)| !is_of_store(key)) {
            return Err(fail(&"a key lies outside of what is the store's"));
        }
        let mut txn = self.database().begin_write().map_err(|e| fail(&e))?;
        txn.set_durability(match commit {
            Commit::Synced | Commit::Unpublished => Durability::Immediate,
            Commit::Lazy => Durability::None,
        })
        .map_err(|e| fail(&e))?;
        txn.set_quick_repair(commit != Commit::Unpublished);
        {
            let mut tree = txn.open_table(TABLE).map_err(|e| fail(&e))?;
            let mut left = &batch.ops[..];
            while !left.is_empty() {
                let (run, after) = left.split_at(run_len(left));
                let appended = if run.len() < RUN_MIN {
                    0
                } else {
                    append(&mut tree, run, tally).map_err(|e| fail(&e))?
                };
                self.change(&mut tree, &run[appended..], tally)?;
                left = after;
            }
            let mut sealed = Vec::new();
            seal(&TALLY_KEY, &tally.to_bytes(), &mut sealed);
            let put = tree.insert(&TALLY_KEY[..], &sealed[..]);
            put.map(drop).map_err(|e| fail(&e))?;
        }
        txn.commit().map_err(|e| self.error("commit", &e))
    }

    /// One by one, whatever is there.
    fn change(
        &self,
        tree: &mut Tree<'_, &[u8], &[u8]>,
        ops: &[(Bytes, Option<Bytes>)],
        tally: &mut Tally,
    ) -> Result<(), StorageError> {
        let mut sealed = Vec::new();
        for (key, value) in ops {
            let old = match value {
                Some(value) => {
                    seal(key, value, &mut sealed);
                    tally.add(key, Digest::of(value));
                    tree.insert(&key[..], &sealed[..])
                }
                None => tree.remove(&key[..]),
            };
            if let Some(old) = old.map_err(|e| self.error("write", &e))? {
                tally.remove(key, Digest::of(self.open_seal(key, old.value())?));
            }
        }
        Ok(())
    }

    fn write_with(&self, batch: &Batch, commit: Commit) -> Result<(), StorageError> {
        let mut tally = self.tally.lock();
        let mut after = *tally;
        if let Some(relies) = &self.relies {
            relies.store(commit != Commit::Unpublished, Ordering::Release);
        }
        self.run("write", || self.write_batch(batch, commit, &mut after))?;
        *tally = after;
        Ok(())
    }

    fn values(
        &self,
        keys: &mut dyn Iterator<Item = &[u8]>,
    ) -> Result<Vec<Option<Bytes>>, StorageError> {
        let fail = |error: &dyn Display| self.error("get", error);
        let txn = self.database().begin_read().map_err(|e| fail(&e))?;
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
        let txn = self.database().begin_read().map_err(|e| fail(&e))?;
        let table = txn.open_table(TABLE).map_err(|e| fail(&e))?;
        let mut bytes = 0;
        let mut last = Vec::new();
        for pair in table.range::<&[u8]>(start..end).map_err(|e| fail(&e))? {
            let (key, stored) = pair.map_err(|e| fail(&e))?;
            let key = key.value();
            let follows = last.is_empty() || &last[..] < key;
            if !follows || key < start || key >= end {
                return Err(self.out_of_order(key));
            }
            last.clear();
            last.extend_from_slice(key);
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

impl Drop for Redb {
    fn drop(&mut self) {
        let database = self.database.take();
        if let Err(reason) = caught(move || drop(database)) {
            // All that was acknowledged was synced before; the next open sees to the rest.
            tracing::error!(path = %self.path.display(), reason, "closing the database");
        }
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
        self.write_with(batch, Commit::Synced)
    }

    fn write_lazily(&self, batch: &Batch) -> Result<(), StorageError> {
        self.write_with(batch, Commit::Lazy)
    }

    fn write_unpublished(&self, batch: &Batch) -> Result<(), StorageError> {
        self.write_with(batch, Commit::Unpublished)
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

fn is_of_store(key: &[u8]) -> bool {
    key.first().is_some_and(|first| *first != OWN_PREFIX)
}

/// How many of the first ones are puts whose keys ascend; 1 for anything else.
fn run_len(ops: &[(Bytes, Option<Bytes>)]) -> usize {
    let follows = |pair: &&[(Bytes, Option<Bytes>)]| match pair {
        [(before, Some(_)), (key, Some(_))] => before < key,
        _ => false,
    };
    1 + ops.windows(2).take_while(follows).count()
}

/// Puts a run between two keys of the tree. Answers how many had room there: where one is there already, it ends.
fn append(
    tree: &mut Tree<'_, &[u8], &[u8]>,
    run: &[(Bytes, Option<Bytes>)],
    tally: &mut Tally,
) -> Result<usize, redb::Error> {
    let first = run.first().map_or(&[][..], |(key, _)| key);
    let mut cursor = tree.lower_bound_mut(Bound::Included(first))?;
    let mut sealed = Vec::new();
    let mut appended = 0;
    for (key, value) in run {
        let Some(value) = value else { break };
        seal(key, value, &mut sealed);
        match cursor.insert_before(&key[..], &sealed[..]) {
            Ok(()) => tally.add(key, Digest::of(value)),
            Err(CursorError::UnorderedKey) => break,
            Err(error) => return Err(error.into()),
        }
        appended += 1;
    }
    cursor.close()?;
    Ok(appended)
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

mod filling;
#[cfg(test)]
mod tests;
