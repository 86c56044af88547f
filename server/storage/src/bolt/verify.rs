//! Everything that can be wrong with a snapshot file, without restoring it: `ballast snapshot verify`.
//!
//!     the SHA-256 at its end -> the pages, as bbolt's own check -> each record -> the story they tell
//!
//! Not here: figures (`status.rs`), the rules of records (`mvcc/history.rs`).
//!
//! etcd: etcdutl snapshot status, which checks the pages' order only.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::Path;

use ballast_api::etcdserverpb::AlarmMember;
use ballast_api::leasepb::Lease;
use bytes::Bytes;
use prost::Message;

use super::etcd::{self, MetaEntry};
use super::{BoltFile, Trailer, Value, check, verify_trailer};
use crate::check::Problems;
use crate::error::StorageError;
use crate::mvcc::history::History;

/// What was checked.
#[derive(Clone, Debug, Default)]
pub struct Verified {
    /// The file has its SHA-256.
    pub hashed: bool,
    pub revision: i64,
    /// -1 when nothing was ever compacted.
    pub compact_revision: i64,
    pub records: u64,
    pub keys: u64,
    pub leases: u64,
}

/// Reads all of the file. A file whose pages cannot be read is an error; what is wrong with its records is told in `problems`.
pub fn verify(path: &Path, problems: &mut Problems) -> Result<Verified, StorageError> {
    let mut out = Verified {
        compact_revision: -1,
        ..Verified::default()
    };
    let place = path.display();
    match verify_trailer(path)? {
        Trailer::Good => out.hashed = true,
        Trailer::Missing => {}
        Trailer::Bad { expected, got } => problems.add(format!(
            "{place}: expected sha256 {}, got {}",
            hex(&expected),
            hex(&got)
        )),
    }
    let file = BoltFile::open(path)?;
    check(&file)?;
    let mut told = |record: &str, what: &str| problems.add(format!("{place}: {record}: {what}"));
    for name in [etcd::KEY, etcd::META] {
        if file.bucket(name.as_bytes())?.is_none() {
            told(
                name,
                "the bucket is not there, so it is no snapshot of etcd",
            );
        }
    }
    let mut leases = HashSet::new();
    each(
        &file,
        etcd::META,
        &mut |key, value| match etcd::meta_entry(key, &value) {
            Ok(MetaEntry::ScheduledCompact(revision) | MetaEntry::FinishedCompact(revision)) => {
                out.compact_revision = out.compact_revision.max(revision);
            }
            Ok(MetaEntry::Replaced | MetaEntry::Unknown) => {}
            Err(what) => told(&record(etcd::META, key), &what),
        },
    )?;
    each(&file, "lease", &mut |key, value| {
        let id = <[u8; 8]>::try_from(key).map(i64::from_be_bytes);
        match (id, Lease::decode(value)) {
            (Ok(id), Ok(lease)) if lease.id == id => drop(leases.insert(id)),
            (_, Err(error)) => told(&record("lease", key), &error.to_string()),
            _ => told(&record("lease", key), "its value is another lease's"),
        }
    })?;
    each(&file, "alarm", &mut |key, _| {
        if let Err(error) = AlarmMember::decode(key) {
            told(&record("alarm", key), &error.to_string());
        }
    })?;
    let mut history = History::new(out.compact_revision);
    each(&file, etcd::KEY, &mut |key, value| {
        if let Err(what) = history.record(key, &value) {
            told(&record(etcd::KEY, key), &what);
        }
    })?;
    for (key, newest) in history.live() {
        out.keys += 1;
        if newest.lease != 0 && !leases.contains(&newest.lease) {
            let what = format!("it hangs on lease {:x}, which is not there", newest.lease);
            told(&format!("key {}", key.escape_ascii()), &what);
        }
    }
    out.revision = history.revision();
    out.records = history.records();
    out.leases = leases.len() as u64;
    Ok(out)
}

/// `key 512_0t`, `lease 2a`: a record as people name it.
fn record(bucket: &str, key: &[u8]) -> String {
    match crate::Revision::from_bytes(key) {
        Some((revision, tombstone)) => {
            let mark = if tombstone { "t" } else { "" };
            format!("{bucket} {}_{}{mark}", revision.main, revision.sub)
        }
        None => format!("{bucket} {}", key.escape_ascii()),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn each(
    file: &BoltFile,
    bucket: &str,
    each: &mut dyn FnMut(&[u8], Bytes),
) -> Result<(), StorageError> {
    let Some(bucket) = file.bucket(bucket.as_bytes())? else {
        return Ok(());
    };
    let mut entries = file.cursor(&bucket);
    while let Some((key, value)) = entries.next()? {
        if let Value::Bytes(value) = value {
            each(&key, value);
        }
    }
    Ok(())
}
