//! Another member's snapshot as the live database, in place of what this one has.
//!
//!     1 check    the file as a whole
//!     2 make     a database of it beside the live one, not yet counted
//!     3 publish  CURRENT names it: that is the moment it counts (backend/current.rs)
//!
//! Promises: a crash leaves the old database or the new one. From 3 on this store is of the past: it makes no other database any more, and whoever
//! holds it opens the directory anew. What it still reads comes from the old database, which stays readable while it is open.
//! Not here: the bytes on their way (`server/src/raft/snapshot.rs`), the log, which then ends before the database (`server/src/raft/open.rs`).
//!
//! etcd: applySnapshot in server/etcdserver/server.go, which swaps the backend in place.

use std::path::Path;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::LogPosition;
use crate::backend::current;
use crate::bolt::etcd::{self, meta_key};
use crate::bolt::{BoltFile, Value};
use crate::committer::encode_position;
use crate::error::StorageError;
use crate::mvcc::restore;
use crate::mvcc::store::Store;
use crate::schema::{Table, meta};

/// Where in the log a snapshot stands.
#[derive(Clone, Debug)]
pub struct InstallOptions {
    /// The last entry in it.
    pub applied: LogPosition,
    /// The group there, in the Raft layer's own bytes.
    pub membership: Bytes,
}

impl Store {
    /// Makes the file the live database. Blocking, and as long as the file is large.
    pub fn install(&self, file: &Path, options: &InstallOptions) -> Result<(), StorageError> {
        let shared = &self.shared;
        let _one_at_a_time = shared.defragmenting.lock();
        let started = crate::clock::now();
        let file = BoltFile::open(file)?;
        check_position(&file, options.applied)?;
        let dir = &shared.options.dir;
        let old = *shared.database.lock();
        let next = old.next(shared.options.engine);
        current::remove_database(dir, next)?; // of an earlier attempt in this run
        let own = |name: &[u8]| shared.small.lock().get(&Table::Meta.key(name)[..]).cloned();
        let mut more = vec![
            (meta::APPLIED, encode_position(options.applied).into()),
            (meta::INSTALLED, encode_position(options.applied).into()),
            (meta::RAFT_MEMBERSHIP, options.membership.clone()),
        ];
        for name in [meta::CLUSTER_ID, meta::MEMBER_ID] {
            more.extend(own(name).map(|id| (name, id)));
        }
        let made = restore::take_over(&file, dir, next, more).and_then(|report| {
            current::publish(dir, next)?;
            Ok(report)
        });
        let report = match made {
            Ok(report) => report,
            Err(error) => {
                if let Err(error) = current::remove_database(dir, next) {
                    tracing::warn!(%error, "an unfinished database of a snapshot stays until the next start");
                }
                return Err(error);
            }
        };
        shared.superseded.store(true, Ordering::Release);
        tracing::info!(
            applied = options.applied.index,
            revision = report.revision,
            records = report.records,
            database = %next,
            took = ?started.elapsed(),
            "installed a snapshot of another member"
        );
        Ok(())
    }
}

/// The file must be of the position that its sender says: what it lacks would be missing for ever.
fn check_position(file: &BoltFile, applied: LogPosition) -> Result<(), StorageError> {
    let mut found = LogPosition::default();
    if let Some(bucket) = file.bucket(etcd::META.as_bytes())? {
        let mut entries = file.cursor(&bucket);
        while let Some((key, value)) = entries.next()? {
            let Value::Bytes(value) = value else { continue };
            let Ok(number) = <[u8; 8]>::try_from(&value[..]) else {
                continue;
            };
            let number = u64::from_be_bytes(number);
            if key == meta_key::CONSISTENT_INDEX {
                found.index = number;
            } else if key == meta_key::TERM {
                found.term = number;
            }
        }
    }
    if found == applied {
        return Ok(());
    }
    Err(StorageError::Refused {
        path: file.path().to_owned(),
        why: format!(
            "it is the store at index {} of term {}, and was sent as that at index {} of term {}",
            found.index, found.term, applied.index, applied.term
        ),
    })
}
