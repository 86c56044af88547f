//! Another member's snapshot as the live database, in place of what this one has.
//!
//!     1 receive  records into a database beside the live one, not yet counted; the file's other pages into a file. A file that comes front to back
//!                goes into one whole
//!     2 check    by the branches in the file: all of its records came, in their order
//!     3 complete the database with all else
//!     4 publish  CURRENT names it: that is the moment it counts (backend/current.rs)
//!
//! Promises: there is one snapshot under way at a time, from the first byte to the end of its installation, whoever began it and does not wait for it
//! any more: the files of all have the same names. A crash leaves the old database or the new one. From 4 on this store is of the past: it makes no other database any more, and whoever
//! holds it opens the directory anew. What it still reads comes from the old database, which stays readable while it is open.
//! Not here: the bytes on their way (`server/src/raft/snapshot.rs`), the log, which then ends before the database (`server/src/raft/open.rs`).
//!
//! etcd: applySnapshot in server/etcdserver/server.go, which swaps the backend in place.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

use crate::LogPosition;
use crate::backend::{Kind, current};
use crate::bolt::etcd::{self, meta_key};
use crate::bolt::{Arriving, BoltFile, Value};
use crate::committer::encode_position;
use crate::error::StorageError;
use crate::mvcc::index_file;
use crate::mvcc::pages::Pages;
use crate::mvcc::restore::{self, Filler, SMALL_BATCH_BYTES};
use crate::mvcc::store::{Shared, Store};
use crate::schema::{Table, meta};

/// Where in the log a snapshot stands.
#[derive(Clone, Debug)]
pub struct InstallOptions {
    /// The last entry in it.
    pub applied: LogPosition,
    /// The group there, in the Raft layer's own bytes.
    pub membership: Bytes,
}

/// A snapshot that is being received: its records go into a database as they come, all else into a file. Both go away with this unless
/// [`Store::install`] makes it the live one.
#[derive(Debug)]
pub struct Receiving {
    /// None once they are handed over.
    parts: Option<(Arriving, Filler)>,
    kind: Kind,
    file: PathBuf,
    database: PathBuf,
    /// Given back last, when the files are gone or have become the live database.
    _turn: Turn,
}

/// The right to receive.
#[derive(Debug)]
struct Turn(Arc<AtomicBool>);

impl Turn {
    fn take(receives: &Arc<AtomicBool>) -> Option<Self> {
        let taken = receives.swap(true, Ordering::AcqRel);
        (!taken).then(|| Self(Arc::clone(receives)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The database's name until it has a number: one that the next open removes.
const RECEIVED: &str = "received";

impl Store {
    /// Begins to receive a snapshot page by page; what is no record goes into `file`. Refused while
    /// there is another. Blocking.
    pub fn receive_pages(&self, file: &Path) -> Result<Receiving, StorageError> {
        let mut receiving = self.receive(file)?;
        if let Some((arriving, _)) = &mut receiving.parts {
            arriving.skip_metas();
        }
        Ok(receiving)
    }

    /// The same for one that comes as a file, front to back.
    pub fn receive(&self, file: &Path) -> Result<Receiving, StorageError> {
        let options = &self.shared.options;
        let turn = Turn::take(&self.shared.receives).ok_or_else(|| StorageError::Refused {
            path: options.dir.clone(),
            why: "another snapshot is being received".to_owned(),
        })?;
        self.shared.is_of_now()?;
        let kind = options.engine;
        let database = options.dir.join(format!(
            "{RECEIVED}.{}{}",
            kind.extension(),
            current::UNPUBLISHED
        ));
        current::remove(&database)?; // of an earlier attempt in this run
        Ok(Receiving {
            parts: Some((
                Arriving::new(file)?,
                Filler::open(kind, &database, SMALL_BATCH_BYTES)?,
            )),
            kind,
            file: file.to_owned(),
            database,
            _turn: turn,
        })
    }

    /// Makes the snapshot the live database. Blocking.
    pub fn install(
        &self,
        mut received: Receiving,
        options: &InstallOptions,
    ) -> Result<(), StorageError> {
        let shared = &self.shared;
        let _one_at_a_time = shared.defragmenting.lock();
        shared.is_of_now()?;
        let started = crate::clock::now();
        let Some((arriving, filler)) = received.parts.take() else {
            return Ok(());
        };
        let (file, handed) = arriving.finish()?;
        check_position(&file, options.applied)?;
        let own = |name: &[u8]| shared.small.lock().get(&Table::Meta.key(name)[..]).cloned();
        let mut more = vec![
            (meta::APPLIED, encode_position(options.applied).into()),
            (meta::INSTALLED, encode_position(options.applied).into()),
            (meta::RAFT_MEMBERSHIP, options.membership.clone()),
        ];
        for name in [meta::CLUSTER_ID, meta::MEMBER_ID] {
            more.extend(own(name).map(|id| (name, id)));
        }
        let report = restore::take_over(&file, &handed, filler, more)?;
        let dir = &shared.options.dir;
        let old = *shared.database.lock();
        let next = old.next(received.kind);
        current::remove_database(dir, next)?; // of an earlier attempt in this run
        let unpublished = next.unpublished_path(dir);
        std::fs::rename(&received.database, &unpublished)
            .map_err(|e| StorageError::io("rename", &unpublished, e))?;
        index_file::rename(&received.database, &next.path(dir));
        if let Err(error) = current::publish(dir, next) {
            if let Err(error) = current::remove_database(dir, next) {
                tracing::warn!(%error, "an unfinished database of a snapshot stays until the next start");
            }
            return Err(error);
        }
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

impl Shared {
    /// Refuses once the directory's live database is another one than this store has open.
    pub(super) fn is_of_now(&self) -> Result<(), StorageError> {
        if self.superseded.load(Ordering::Acquire) {
            return Err(StorageError::Stopped {
                first: "another database took this one's place".to_owned(),
            });
        }
        Ok(())
    }
}

impl Receiving {
    /// Of [`Store::receive_pages`]: takes what comes next. Blocking.
    pub fn take_pages(&mut self, pages: &Pages) -> Result<(), StorageError> {
        let Some((arriving, filler)) = &mut self.parts else {
            return Ok(());
        };
        match pages {
            Pages::Other(bytes) => arriving.take(bytes),
            Pages::Records(bytes) => {
                let path = &self.file;
                arriving.take_records(bytes, &mut |key, value| filler.record(path, key, value))
            }
            Pages::Metas(bytes) => arriving.take_metas(bytes),
        }
    }

    /// Of [`Store::receive`]: takes the next bytes of the file. Blocking.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), StorageError> {
        match &mut self.parts {
            Some((arriving, _)) => arriving.take(bytes),
            None => Ok(()),
        }
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        // Closed before it is removed.
        self.parts = None;
        let index = current::index_path(&self.database);
        for path in [&self.file, &self.database, &index] {
            if let Err(error) = current::remove(path) {
                tracing::warn!(%error, "what is left of a snapshot stays until the next start");
            }
        }
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
