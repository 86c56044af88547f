//! A database of ours from etcd's snapshot file, whoever made it.
//!
//!     key, lease, alarm, auth*         taken over as they are
//!     cluster version, compactions     taken over
//!     members, removed members         replaced by the new cluster's
//!     index and term of the log        begin anew: the database is the state before the first entry
//!
//! Promises: the file is checked as a whole first; records are decoded before they are written, so that a restored database
//! opens. Nothing counts until the last batch: until then the directory holds an unpublished file.
//! Not here: hashes of the file and what a person may ask for (`server/src/cli/snapshot.rs`).
//!
//! etcd: Restore in etcdutl/snapshot/v3_snapshot.go, and its way of bumping the revision.

use std::path::Path;
use std::sync::Arc;

use ballast_api::etcdserverpb::Member;
use bytes::Bytes;
use prost::Message;

use crate::backend::current::{self, Name};
use crate::backend::{Batch, Engine, Kind};
use crate::bolt::etcd::{self, MetaEntry};
use crate::bolt::{BoltFile, Bucket, Handed, Value, check};
use crate::error::StorageError;
use crate::mvcc::index_file::{self, Entry, IndexWriter};
use crate::mvcc::recover::FORMAT_VERSION;
use crate::mvcc::revision::Revision;
use crate::schema::{Table, meta};

/// Bytes of one batch: on sled a sync each, so not too few.
const BATCH_BYTES: usize = 8 << 20;
/// The same on a machine whose disk somebody else waits for: what is due of one file goes to the disk before the sync of another.
pub(super) const SMALL_BATCH_BYTES: usize = 512 << 10;
/// The engine's cache while it is filled in order.
const CACHE_BYTES: u64 = 64 << 20;

/// Whose database it becomes.
#[derive(Clone, Debug, Default)]
pub struct RestoreOptions {
    pub cluster_id: u64,
    pub member_id: u64,
    /// The new cluster's founders.
    pub members: Vec<Member>,
    pub engine: Kind,
    /// Let the revision jump by so much and count all before as compacted; 0 = neither.
    pub revision_bump: u64,
}

/// What was restored, and what was not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestoreReport {
    /// After the bump.
    pub revision: i64,
    pub records: u64,
    pub leases: u64,
    /// The file's users and roles are in force.
    pub auth_enabled: bool,
    /// Buckets and entries that we do not know and left out, as `bucket` or `bucket/key`.
    pub unknown: Vec<String>,
}

/// Makes the database in `dir`, which is made too and must not hold one.
pub fn restore(
    file: &BoltFile,
    dir: &Path,
    options: &RestoreOptions,
) -> Result<RestoreReport, StorageError> {
    check(file)?;
    check_buckets(file)?;
    crate::dirs::make(dir, 0o700)?;
    if let current::Found::Database(_) = current::recover(dir)? {
        return Err(StorageError::Refused {
            path: dir.to_owned(),
            why: "it holds a database already".to_owned(),
        });
    }
    let name = Name::first(options.engine);
    let database = name.unpublished_path(dir);
    let filler = Filler::open(name.kind, &database, BATCH_BYTES)?;
    let mut restore = Restore::new(file, filler);
    restore.buckets()?;
    let report = restore.finish(options, Vec::new())?;
    index_file::rename(&database, &name.path(dir));
    current::publish(dir, name)?;
    Ok(report)
}

/// What is put into a new database, in batches.
#[derive(Debug)]
pub(super) struct Filler {
    engine: Arc<dyn Engine>,
    batch: Batch,
    batch_bytes: usize,
    batch_bytes_max: usize,
    /// None once it cannot be written: the first open does without.
    index: Option<IndexWriter>,
    /// The last record.
    last: Revision,
    records: u64,
}

impl Filler {
    /// Makes the database.
    pub(super) fn open(
        kind: Kind,
        path: &Path,
        batch_bytes_max: usize,
    ) -> Result<Self, StorageError> {
        Ok(Self {
            engine: kind.create_to_fill(path, CACHE_BYTES)?,
            batch: Batch::default(),
            batch_bytes: 0,
            batch_bytes_max,
            index: IndexWriter::new(current::index_path(path)),
            last: Revision::default(),
            records: 0,
        })
    }

    fn put(&mut self, table: Table, key: &[u8], value: Bytes) -> Result<(), StorageError> {
        self.batch_bytes += key.len() + value.len();
        self.batch.put(table.key(key), value);
        if self.batch_bytes >= self.batch_bytes_max {
            let batch = std::mem::take(&mut self.batch);
            self.engine.write_unpublished(&batch)?;
            self.batch_bytes = 0;
        }
        Ok(())
    }

    /// Records come in ascending order. `path` is that of their file, for messages.
    pub(super) fn record(
        &mut self,
        path: &Path,
        key: &Bytes,
        value: Bytes,
    ) -> Result<(), StorageError> {
        let damaged = |what: String| StorageError::DamagedRecord {
            path: path.to_owned(),
            record: key.escape_ascii().to_string(),
            what,
        };
        let Some((revision, _)) = Revision::from_bytes(key) else {
            return Err(damaged("its key is no revision".to_owned()));
        };
        if self.records > 0 && revision <= self.last {
            return Err(damaged("it does not follow the one before it".to_owned()));
        }
        let entry = Entry::of(key, value.clone()).map_err(damaged)?;
        self.index = self.index.take().and_then(|index| index.add(&entry));
        self.last = revision;
        self.records += 1;
        self.put(Table::Key, key, value)
    }

    /// Now it may be published.
    fn finish(self) -> Result<(), StorageError> {
        self.engine.write(&self.batch)?;
        if let (Some(tally), Some(index)) = (self.engine.tally()?, self.index) {
            index.finish(tally);
        }
        Ok(())
    }
}

/// Completes an unpublished database with the same cluster's snapshot, members and all, and `more` of its own in the table of metadata. The
/// records in the leaves that were handed on are in it already.
pub(super) fn take_over(
    file: &BoltFile,
    handed: &Handed,
    filler: Filler,
    more: Vec<(&'static [u8], Bytes)>,
) -> Result<RestoreReport, StorageError> {
    if handed.count == 0 {
        check(file)?;
    }
    check_buckets(file)?;
    let mut restore = Restore::new(file, filler);
    restore.keeps_members = true;
    restore.handed = Some(handed).filter(|handed| handed.count > 0);
    restore.buckets()?;
    restore.finish(&RestoreOptions::default(), more)
}

fn check_buckets(file: &BoltFile) -> Result<(), StorageError> {
    for name in [etcd::KEY, etcd::META] {
        if file.bucket(name.as_bytes())?.is_none() {
            return Err(StorageError::Refused {
                path: file.path().to_owned(),
                why: format!("it has no bucket {name}, so it is no snapshot of etcd"),
            });
        }
    }
    Ok(())
}

struct Restore<'a> {
    file: &'a BoltFile,
    filler: Filler,
    /// Leaves whose records the database has already.
    handed: Option<&'a Handed>,
    scheduled: i64,
    finished: i64,
    /// The members are the file's.
    keeps_members: bool,
    report: RestoreReport,
}

impl<'a> Restore<'a> {
    fn new(file: &'a BoltFile, filler: Filler) -> Self {
        Self {
            file,
            filler,
            handed: None,
            scheduled: -1,
            finished: -1,
            keeps_members: false,
            report: RestoreReport::default(),
        }
    }

    fn buckets(&mut self) -> Result<(), StorageError> {
        let mut buckets = self.file.cursor(&self.file.root());
        while let Some((name, value)) = buckets.next()? {
            let Value::Bucket(bucket) = value else {
                self.report.unknown.push(name.escape_ascii().to_string());
                continue;
            };
            self.bucket(&name, &bucket)?;
        }
        Ok(())
    }

    fn bucket(&mut self, name: &Bytes, bucket: &Bucket) -> Result<(), StorageError> {
        if name == etcd::MEMBERS || name == etcd::MEMBERS_REMOVED {
            return if self.keeps_members {
                self.members(name, bucket)
            } else {
                Ok(())
            };
        }
        let table = etcd::table_of(name);
        if table == Some(Table::Key)
            && let Some(handed) = self.handed
            && let Some(has_all) = self.file.has_leaves(bucket, handed)?
        {
            let missing = || {
                self.file
                    .damaged(0, "leaves of records that did not come as such")
            };
            return if has_all { Ok(()) } else { Err(missing()) };
        }
        let mut entries = self.file.cursor(bucket);
        while let Some((key, value)) = entries.next()? {
            let unknown = || format!("{}/{}", name.escape_ascii(), key.escape_ascii());
            let Value::Bytes(value) = value else {
                self.report.unknown.push(unknown());
                continue;
            };
            match table {
                Some(Table::Key) => self.filler.record(self.file.path(), &key, value)?,
                Some(table) => {
                    self.report.leases += u64::from(table == Table::Lease);
                    self.report.auth_enabled |= etcd::enables_auth(name, &key, &value);
                    self.put(table, &key, value)?;
                }
                None if name == etcd::META => self.meta(&key, &value)?,
                None if name == etcd::CLUSTER && etcd::is_cluster_version(&key) => {
                    self.put(Table::Meta, meta::CLUSTER_VERSION, value)?;
                }
                // One that is over leaves nothing.
                None if name == etcd::CLUSTER && etcd::is_downgrade(&key) => {
                    if self.keeps_members {
                        self.put(Table::Meta, meta::DOWNGRADE, value)?;
                    }
                }
                None if name == etcd::CLUSTER => self.report.unknown.push(unknown()),
                None => {
                    self.report.unknown.push(name.escape_ascii().to_string());
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn members(&mut self, name: &Bytes, bucket: &Bucket) -> Result<(), StorageError> {
        let mut entries = self.file.cursor(bucket);
        while let Some((key, value)) = entries.next()? {
            let Value::Bytes(value) = value else {
                continue;
            };
            if name == etcd::MEMBERS {
                let member = etcd::member(&value).map_err(|what| self.file.damaged(0, what))?;
                let bytes = member.encode_to_vec().into();
                self.put(Table::Member, &member.id.to_be_bytes(), bytes)?;
            } else {
                let id = etcd::removed_id(&key).map_err(|what| self.file.damaged(0, what))?;
                self.put(Table::MemberRemoved, &id.to_be_bytes(), Bytes::new())?;
            }
        }
        Ok(())
    }

    fn meta(&mut self, key: &[u8], value: &[u8]) -> Result<(), StorageError> {
        let entry = etcd::meta_entry(key, value).map_err(|what| self.file.damaged(0, what))?;
        match entry {
            MetaEntry::ScheduledCompact(revision) => self.scheduled = revision,
            MetaEntry::FinishedCompact(revision) => self.finished = revision,
            MetaEntry::Replaced => {}
            MetaEntry::Unknown => {
                let unknown = format!("{}/{}", etcd::META, key.escape_ascii());
                self.report.unknown.push(unknown);
            }
        }
        Ok(())
    }

    fn put(&mut self, table: Table, key: &[u8], value: Bytes) -> Result<(), StorageError> {
        self.filler.put(table, key, value)
    }

    fn finish(
        mut self,
        options: &RestoreOptions,
        more: Vec<(&'static [u8], Bytes)>,
    ) -> Result<RestoreReport, StorageError> {
        self.report.records = self.filler.records;
        // etcd's revision before the first write is 1; a compaction may have taken the last record (etcd#17780).
        let mut revision = self
            .filler
            .last
            .main
            .max(self.scheduled)
            .max(self.finished)
            .max(1);
        if options.revision_bump > 0 {
            revision = i64::try_from(options.revision_bump)
                .ok()
                .and_then(|bump| revision.checked_add(bump))
                .ok_or_else(|| StorageError::Refused {
                    path: self.file.path().to_owned(),
                    why: format!("revision {revision} has no room for the bump"),
                })?;
            // As etcdutl does, so that HashKV equals that of an etcd restored from the same file: an empty record.
            let key = Bytes::copy_from_slice(&Revision::new(revision, 0).to_bytes());
            self.filler.record(self.file.path(), &key, Bytes::new())?;
            self.scheduled = revision;
        }
        let be = |number: i64| Bytes::copy_from_slice(&number.to_be_bytes());
        if self.scheduled >= 0 {
            self.put(Table::Meta, meta::SCHEDULED_COMPACT, be(self.scheduled))?;
        }
        if self.finished >= 0 {
            self.put(Table::Meta, meta::FINISHED_COMPACT, be(self.finished))?;
        }
        self.put(Table::Meta, meta::CURRENT_REVISION, be(revision))?;
        let id = |id: u64| Bytes::copy_from_slice(&id.to_be_bytes());
        if !self.keeps_members {
            self.put(Table::Meta, meta::CLUSTER_ID, id(options.cluster_id))?;
            self.put(Table::Meta, meta::MEMBER_ID, id(options.member_id))?;
        }
        for (name, value) in more {
            self.put(Table::Meta, name, value)?;
        }
        for member in &options.members {
            let bytes = member.encode_to_vec().into();
            self.put(Table::Member, &member.id.to_be_bytes(), bytes)?;
        }
        let format = Bytes::copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        self.put(Table::Meta, meta::FORMAT, format)?;
        self.filler.finish()?;
        self.report.revision = revision;
        Ok(self.report)
    }
}
