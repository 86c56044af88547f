//! What a snapshot file is: its hash, revision, keys and size, and whether its trailing SHA-256 is right.
//!
//! Promises: the figures equal those of `etcdutl snapshot status` for the same file.
//! Not here: printing (`server/src/cli/snapshot.rs`).
//!
//! etcd: etcdutl/snapshot/v3_snapshot.go.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use ballast_api::mvccpb::KeyValue;
use bytes::Bytes;
use prost::Message;
use sha2::{Digest, Sha256};

use super::{BoltFile, Value, check, etcd};
use crate::error::StorageError;
use crate::mvcc::revision::Revision;

/// Bytes of the hash at the end of a snapshot.
pub const SHA256_BYTES: u64 = 32;
/// etcd takes a file for hashed when its length is this over a multiple of a disk's sector.
const SECTOR_BYTES: u64 = 512;
const COPY_BYTES: usize = 1 << 20;

/// The figures of a snapshot file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotStatus {
    /// CRC32C of all buckets' names, keys and values.
    pub hash: u32,
    pub revision: i64,
    /// Keys that live at that revision.
    pub total_keys: usize,
    pub total_size: u64,
    /// Empty when the file says none (etcd before 3.6).
    pub version: String,
}

/// Reads and checks the whole file.
pub fn status(path: &Path) -> Result<SnapshotStatus, StorageError> {
    let file = BoltFile::open(path)?;
    check(&file)?;
    let mut out = SnapshotStatus {
        hash: 0,
        revision: 0,
        total_keys: 0,
        total_size: file.size(),
        version: String::new(),
    };
    let mut live: HashSet<Bytes> = HashSet::new();
    let mut buckets = file.cursor(&file.root());
    while let Some((name, value)) = buckets.next()? {
        let Value::Bucket(bucket) = value else {
            let what = format!("{} is no bucket", name.escape_ascii());
            return Err(file.damaged(0, what));
        };
        out.hash = crc32c::crc32c_append(out.hash, &name);
        let mut entries = file.cursor(&bucket);
        while let Some((key, value)) = entries.next()? {
            out.hash = crc32c::crc32c_append(out.hash, &key);
            // A bucket within the bucket has no value for bbolt's reader.
            let Value::Bytes(value) = value else { continue };
            out.hash = crc32c::crc32c_append(out.hash, &value);
            if name == etcd::KEY {
                let record = |what: String| {
                    file.damaged(0, format!("record {}: {what}", key.escape_ascii()))
                };
                let (revision, tombstone) = Revision::from_bytes(&key)
                    .ok_or_else(|| record("its key is no revision".to_owned()))?;
                let kv = KeyValue::decode(value).map_err(|error| record(error.to_string()))?;
                out.revision = revision.main;
                if tombstone {
                    live.remove(&kv.key);
                } else if !live.contains(&kv.key) {
                    // A slice of the page would keep the page.
                    live.insert(Bytes::copy_from_slice(&kv.key));
                }
            } else if name == etcd::META && key == etcd::meta_key::STORAGE_VERSION {
                out.version = String::from_utf8_lossy(&value).into_owned();
            }
        }
    }
    out.total_keys = live.len();
    Ok(out)
}

/// What the end of a file says of the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trailer {
    /// No hash, by the file's length.
    Missing,
    Good,
    Bad {
        expected: [u8; 32],
        got: [u8; 32],
    },
}

/// Reads the whole file and compares the hash at its end, if there is one.
pub fn verify_trailer(path: &Path) -> Result<Trailer, StorageError> {
    let io = |source| StorageError::io("read", path, source);
    let mut file = File::open(path).map_err(|source| StorageError::io("open", path, source))?;
    let len = file.metadata().map_err(io)?.len();
    if len % SECTOR_BYTES != SHA256_BYTES {
        return Ok(Trailer::Missing);
    }
    let mut hasher = Sha256::new();
    let mut left = len - SHA256_BYTES;
    let mut buffer = vec![0; COPY_BYTES];
    while left > 0 {
        let bytes = left.min(COPY_BYTES as u64) as usize;
        file.read_exact(&mut buffer[..bytes]).map_err(io)?;
        hasher.update(&buffer[..bytes]);
        left -= bytes as u64;
    }
    let mut expected = [0; 32];
    file.read_exact(&mut expected).map_err(io)?;
    let got: [u8; 32] = hasher.finalize().into();
    Ok(if expected == got {
        Trailer::Good
    } else {
        Trailer::Bad { expected, got }
    })
}
