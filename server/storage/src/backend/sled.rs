//! sled as the engine: the only file that names it.
//!
//!     key                 the engine key, whose first byte is below 0xff
//!       -> value 0        a value of up to [`CHUNK_BYTES`], and a zero byte
//!       -> head 1         of a longer one: set number, length, CRC32C
//!     0xff 'c' set index  a chunk of a longer value
//!     0xff 't'            the tally of all pairs, and the next set number: in every batch
//!
//! Promises: each batch is one sled batch, the tally inside, and is flushed when `write` returns. What sled lacks is made up for here:
//!
//! - Its sync is none: the crate linked below replaces it, and an open that finds it not called fails.
//! - It syncs neither its settings nor directories: done after each open.
//! - Records above a quarter of a segment go to files of their own, which it never syncs. A leaf holds about 16 values, so segments are
//!   16 MiB and values are cut at 100 KiB.
//! - Its recovery skips what it cannot read and may call the rest a database. Whoever reads all pairs compares them with the tally.
//! - It panics over damage: a panic becomes an error, and the engine answers nothing from then on.
//! - A flush that waits while a background write fails may never be told: the failure is looked for while it waits.
//!
//! A set of chunks is never changed: an overwrite makes a new set and deletes the old one in the same batch, so a reader between two
//! batches sees a head whose chunks are there, or a chunk missing and another head.

#![expect(
    clippy::disallowed_types,
    reason = "this file is the one place where the engine is named"
)]

use std::any::Any;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use parking_lot::Mutex;
use rustix::fs::FlockOperation;
use sled::Db;

use super::tally::Digest;
use super::{Batch, Engine, EngineSize, OWN_PREFIX, Pairs, Tally};
use crate::error::StorageError;

/// Of sled's log. Fixed when the database is made; sled takes no more.
const SEGMENT_BYTES: usize = 16 << 20;
/// What sled writes about itself into `conf`, a checksum of four bytes behind it.
const CONF: &[u8] = b"segment_size: 16777216\nuse_compression: false\nversion: 0.34\n";
const CONF_CHECKSUM_BYTES: usize = 4;
/// Values above it are stored in pieces of it.
const CHUNK_BYTES: usize = 100 << 10;

const TALLY_KEY: [u8; 2] = [OWN_PREFIX, b't'];
const CHUNK_PREFIX: [u8; 2] = [OWN_PREFIX, b'c'];

/// The last byte of what is stored under a key: the value, or a head.
const WHOLE: u8 = 0;
const HEAD: u8 = 1;

/// `st_blocks` counts these, whatever the file system's block is.
const STAT_BLOCK_BYTES: u64 = 512;
/// What sled keeps for itself when it holds nothing: at each open it fills the last segment of its log with zeros.
const OWN_BYTES: u64 = SEGMENT_BYTES as u64;
/// A database never has no size: etcdctl divides by it.
const SIZE_MIN: u64 = 4096;

/// How often a flush that waits looks for a failed write.
const FLUSH_CHECK: Duration = Duration::from_millis(50);
/// A handle dropped a moment ago may still have a write of its own to end; the file is locked until then.
const LOCK_RETRY: Duration = Duration::from_millis(2);
const LOCK_RETRIES_MAX: usize = 2_500;
/// A reader who finds chunks missing looks at the head again. Each time somebody must have overwritten the value.
const READ_RETRIES_MAX: usize = 1_000;

pub(super) struct Sled {
    path: PathBuf,
    db: Db,
    /// A handle of our own for the size.
    file: File,
    /// Bytes of the small files, which change at an open only.
    small_files: u64,
    written: Mutex<Written>,
    /// Why nothing is answered any more.
    broken: OnceLock<String>,
}

/// As of the last batch.
#[derive(Clone, Copy, Debug, Default)]
struct Written {
    tally: Tally,
    next_set: u64,
}

/// What is stored under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored<'a> {
    Whole(&'a [u8]),
    Chunked(Head),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    set: u64,
    digest: Digest,
}

impl std::fmt::Debug for Sled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sled")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Sled {
    pub(super) fn open(path: &Path, cache_bytes: u64) -> Result<Self, StorageError> {
        let fail = |detail: String| StorageError::Engine {
            op: "open",
            path: path.to_owned(),
            detail,
        };
        let is_new = !path.exists();
        if !is_new {
            check_files(path)?;
            wait_for_lock(path)?;
        }
        let opened = catch_unwind(|| {
            sled::Config::new()
                .path(path)
                .segment_size(SEGMENT_BYTES)
                .cache_capacity(cache_bytes)
                .flush_every_ms(None)
                .open()
        });
        let db = opened
            .map_err(|panic| fail(reason_of(&*panic)))?
            .map_err(|error| fail(error.to_string()))?;
        if !is_new && !db.was_recovered() {
            return Err(fail("none of its data can be read".to_owned()));
        }
        let file = path.join("db");
        let file = File::open(&file).map_err(|e| StorageError::io("open", &file, e))?;
        let mut engine = Self {
            path: path.to_owned(),
            db,
            file,
            small_files: 0,
            written: Mutex::default(),
            broken: OnceLock::new(),
        };
        if !is_new {
            engine.written = Mutex::new(engine.read_written()?);
        }
        let calls = ballast_sync_shim::calls();
        engine.write(&Batch::default())?; // the tally, so that no database is without
        if ballast_sync_shim::calls() == calls {
            return Err(fail(
                "this program was linked without the replacement of sled's sync".to_owned(),
            ));
        }
        engine.sync_names()?;
        engine.small_files = small_files(path)?;
        Ok(engine)
    }

    fn read_written(&self) -> Result<Written, StorageError> {
        let bytes = self.run("open", || self.db.get(TALLY_KEY))?;
        bytes
            .as_deref()
            .and_then(Written::from_bytes)
            .ok_or_else(|| {
                self.error(
                    "open",
                    "it has no tally of its pairs, so the last batches are lost",
                )
            })
    }

    /// What sled made and did not sync.
    fn sync_names(&self) -> Result<(), StorageError> {
        let parent = self.path.parent().unwrap_or(Path::new("."));
        for path in [
            &self.path.join("conf"),
            &self.path.join("blobs"),
            &self.path,
            parent,
        ] {
            File::open(path)
                .and_then(|file| file.sync_all())
                .map_err(|e| StorageError::io("sync", path, e))?;
        }
        Ok(())
    }

    fn error(&self, op: &'static str, detail: impl Into<String>) -> StorageError {
        StorageError::Engine {
            op,
            path: self.path.clone(),
            detail: detail.into(),
        }
    }

    /// Runs `work` unless the engine is broken; a panic breaks it.
    fn run<T>(
        &self,
        op: &'static str,
        work: impl FnOnce() -> Result<T, sled::Error>,
    ) -> Result<T, StorageError> {
        if let Some(first) = self.broken.get() {
            return Err(self.error(op, format!("stopped after: {first}")));
        }
        // Whatever state the panic left is not looked at again.
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(result) => result.map_err(|error| self.error(op, error.to_string())),
            Err(panic) => {
                let reason = reason_of(&*panic);
                let reason = self.broken.get_or_init(|| reason).clone();
                Err(self.error(op, reason))
            }
        }
    }

    /// Waits until all of the log is synced.
    fn flush(&self) -> Result<(), sled::Error> {
        let (send, done) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Nobody is there to take the answer when the failure was found first.
                let _ = send.send(catch_unwind(AssertUnwindSafe(|| self.db.flush())));
            });
            loop {
                match done.recv_timeout(FLUSH_CHECK) {
                    Ok(Ok(flushed)) => return flushed.map(drop),
                    Ok(Err(panic)) => std::panic::resume_unwind(panic),
                    Err(RecvTimeoutError::Timeout) => {
                        if let Err(error) = self.db.context.global_error() {
                            // Fails at once, and wakes the flush that waits.
                            let _ = self.db.flush();
                            return Err(error);
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(sled::Error::ReportableBug("a flush ended early".to_owned()));
                    }
                }
            }
        })
    }

    /// The value under `key`, whole.
    fn read(&self, op: &'static str, key: &[u8]) -> Result<Option<Bytes>, StorageError> {
        let mut seen = None;
        for _ in 0..READ_RETRIES_MAX {
            let Some(found) = self.run(op, || self.db.get(key))? else {
                return Ok(None);
            };
            match self.parse(op, key, &found)? {
                Stored::Whole(value) => return Ok(Some(Bytes::copy_from_slice(value))),
                Stored::Chunked(head) => {
                    if let Some(value) = self.chunks(op, head)? {
                        return Ok(Some(value));
                    }
                    if seen.replace(head) == Some(head) {
                        break;
                    }
                }
            }
        }
        Err(self.damaged(op, key, "a piece of its value is missing or changed"))
    }

    /// The value of a head; None when its chunks are not, or no more, as it says.
    fn chunks(&self, op: &'static str, head: Head) -> Result<Option<Bytes>, StorageError> {
        let Ok(len) = usize::try_from(head.digest.len) else {
            return Ok(None);
        };
        let mut value = BytesMut::new();
        for key in chunk_keys(head) {
            match self.run(op, || self.db.get(key))? {
                Some(chunk) => value.extend_from_slice(&chunk),
                None => return Ok(None),
            }
        }
        Ok((value.len() == len && Digest::of(&value) == head.digest).then(|| value.freeze()))
    }

    fn parse<'a>(
        &self,
        op: &'static str,
        key: &[u8],
        stored: &'a [u8],
    ) -> Result<Stored<'a>, StorageError> {
        Stored::parse(stored).ok_or_else(|| self.damaged(op, key, "it has no form of ours"))
    }

    fn damaged(&self, op: &'static str, key: &[u8], what: &str) -> StorageError {
        self.error(
            op,
            format!("record {} is damaged: {what}", key.escape_ascii()),
        )
    }

    /// Adds what makes `key` hold `value` to the batch.
    fn put(
        &self,
        batch: &mut sled::Batch,
        written: &mut Written,
        key: &[u8],
        value: Option<&Bytes>,
    ) -> Result<(), StorageError> {
        let old = self.run("write", || self.db.get(key))?;
        if let Some(old) = &old {
            let digest = match self.parse("write", key, old)? {
                Stored::Whole(value) => Digest::of(value),
                Stored::Chunked(head) => {
                    for chunk in chunk_keys(head) {
                        batch.remove(&chunk[..]);
                    }
                    head.digest
                }
            };
            written.tally.remove(key, digest);
        }
        let Some(value) = value else {
            if old.is_some() {
                batch.remove(key);
            }
            return Ok(());
        };
        let digest = Digest::of(value);
        written.tally.add(key, digest);
        let mut stored;
        if value.len() <= CHUNK_BYTES {
            stored = Vec::with_capacity(value.len() + 1);
            stored.extend_from_slice(value);
            stored.push(WHOLE);
        } else {
            let head = Head {
                set: written.next_set,
                digest,
            };
            written.next_set += 1;
            for (key, chunk) in chunk_keys(head).zip(value.chunks(CHUNK_BYTES)) {
                batch.insert(&key[..], chunk);
            }
            stored = head.to_bytes();
        }
        batch.insert(key, stored);
        Ok(())
    }
}

impl Drop for Sled {
    /// sled flushes when its last handle goes; after a panic it might wait for ever.
    fn drop(&mut self) {
        if self.broken.get().is_some() {
            std::mem::forget(self.db.clone());
        }
    }
}

impl Engine for Sled {
    fn write(&self, batch: &Batch) -> Result<(), StorageError> {
        // The last write to a key wins.
        let latest: BTreeMap<&[u8], Option<&Bytes>> = batch
            .ops
            .iter()
            .map(|(key, value)| (&key[..], value.as_ref()))
            .collect();
        let mut written = self.written.lock();
        let mut after = *written;
        let mut ops = sled::Batch::default();
        for (key, value) in latest {
            if key.first().is_none_or(|first| *first == OWN_PREFIX) {
                return Err(self.error("write", "a key lies outside of what is the store's"));
            }
            self.put(&mut ops, &mut after, key, value)?;
        }
        ops.insert(&TALLY_KEY, after.to_bytes());
        self.run("write", || self.db.apply_batch(ops))?;
        self.run("flush", || self.flush())?;
        *written = after;
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StorageError> {
        self.read("get", key)
    }

    fn get_many(&self, keys: &[Bytes]) -> Result<Vec<Option<Bytes>>, StorageError> {
        keys.iter().map(|key| self.read("get", key)).collect()
    }

    fn scan(&self, start: &[u8], end: &[u8], bytes_max: usize) -> Result<Pairs, StorageError> {
        let end = end.min(&[OWN_PREFIX][..]);
        if start >= end {
            return Ok(Pairs::new());
        }
        let mut out = Pairs::new();
        let mut bytes = 0;
        let mut range = self.run("scan", || Ok(self.db.range::<&[u8], _>(start..end)))?;
        while bytes < bytes_max || out.is_empty() {
            let Some((key, stored)) = self.run("scan", || range.next().transpose())? else {
                break;
            };
            let value = match self.parse("scan", &key, &stored)? {
                Stored::Whole(value) => Some(Bytes::copy_from_slice(value)),
                Stored::Chunked(_) => self.read("scan", &key)?,
            };
            // Deleted since it was found.
            let Some(value) = value else { continue };
            bytes += key.len() + value.len();
            out.push((Bytes::copy_from_slice(&key), value));
        }
        Ok(out)
    }

    fn size(&self) -> Result<EngineSize, StorageError> {
        let meta = self
            .file
            .metadata()
            .map_err(|e| StorageError::io("stat", &self.path, e))?;
        let allocated = meta.blocks() * STAT_BLOCK_BYTES + self.small_files;
        // The pairs may lie in the segment that is not counted.
        let pairs = self.written.lock().tally.bytes;
        Ok(EngineSize {
            allocated: allocated.saturating_sub(OWN_BYTES).max(pairs).max(SIZE_MIN),
        })
    }

    fn tally(&self) -> Result<Option<Tally>, StorageError> {
        Ok(Some(self.written.lock().tally))
    }
}

impl Written {
    fn to_bytes(self) -> Vec<u8> {
        let mut out = self.tally.to_bytes().to_vec();
        out.put_u64(self.next_set);
        out
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (tally, next_set) = bytes.split_first_chunk::<{ Tally::LEN }>()?;
        Some(Self {
            tally: Tally::from_bytes(tally),
            next_set: u64::from_be_bytes(next_set.try_into().ok()?),
        })
    }
}

impl Head {
    const LEN: usize = 20;

    fn to_bytes(self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::LEN + 1);
        out.put_u64(self.set);
        out.put_u64(self.digest.len);
        out.put_u32(self.digest.crc);
        out.push(HEAD);
        out
    }
}

impl<'a> Stored<'a> {
    /// None when it is neither a value nor a head.
    fn parse(stored: &'a [u8]) -> Option<Self> {
        let (form, rest) = stored.split_last()?;
        match *form {
            WHOLE => Some(Self::Whole(rest)),
            HEAD => {
                let rest: &[u8; Head::LEN] = rest.try_into().ok()?;
                let (set, rest) = rest.split_first_chunk::<8>()?;
                let (len, crc) = rest.split_first_chunk::<8>()?;
                Some(Self::Chunked(Head {
                    set: u64::from_be_bytes(*set),
                    digest: Digest {
                        len: u64::from_be_bytes(*len),
                        crc: u32::from_be_bytes(crc.try_into().ok()?),
                    },
                }))
            }
            _ => None,
        }
    }
}

/// The keys of a head's chunks, in order.
fn chunk_keys(head: Head) -> impl Iterator<Item = [u8; 14]> {
    let chunks = head.digest.len.div_ceil(CHUNK_BYTES as u64);
    (0..u32::try_from(chunks).unwrap_or(u32::MAX)).map(move |index| {
        let mut key = [0; 14];
        key[..2].copy_from_slice(&CHUNK_PREFIX);
        key[2..10].copy_from_slice(&head.set.to_be_bytes());
        key[10..].copy_from_slice(&index.to_be_bytes());
        key
    })
}

/// sled would make anew what it does not find.
fn check_files(path: &Path) -> Result<(), StorageError> {
    let conf = path.join("conf");
    let found = fs::read(&conf).map_err(|e| StorageError::io("read", &conf, e))?;
    if found.len() != CONF.len() + CONF_CHECKSUM_BYTES || !found.starts_with(CONF) {
        return Err(StorageError::Damaged {
            path: conf,
            offset: 0,
            what: "it holds other settings than this store makes".to_owned(),
        });
    }
    for name in ["db", "blobs"] {
        let path = path.join(name);
        fs::metadata(&path).map_err(|e| StorageError::io("find", &path, e))?;
    }
    Ok(())
}

fn wait_for_lock(path: &Path) -> Result<(), StorageError> {
    let path = path.join("db");
    let file = File::open(&path).map_err(|e| StorageError::io("open", &path, e))?;
    for _ in 0..LOCK_RETRIES_MAX {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(LOCK_RETRY),
            Err(error) => return Err(StorageError::io("lock", &path, error.into())),
        }
    }
    Err(StorageError::io(
        "lock",
        &path,
        std::io::Error::other("another process has it open"),
    ))
}

/// Bytes allocated beside the log.
fn small_files(path: &Path) -> Result<u64, StorageError> {
    let fail = |e| StorageError::io("list", path, e);
    let mut bytes = 0;
    for entry in fs::read_dir(path).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if entry.file_name() != "db" {
            bytes += entry.metadata().map_err(fail)?.blocks() * STAT_BLOCK_BYTES;
        }
    }
    Ok(bytes)
}

/// What a panic said.
fn reason_of(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no reason given");
    format!("the engine cannot make sense of its files: {text}")
}

#[cfg(test)]
mod tests;
