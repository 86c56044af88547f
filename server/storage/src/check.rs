//! Looks a member's data through without changing it: `ballast check`.
//!
//! Promises: nothing is opened for writing. One fault does not hide the others: what can still be read is checked. The log is judged by the
//! very rules of an open (`wal/recover.rs`), and read from its oldest segment.
//! Not here: printing, the lock (`server/src/cli/check.rs`).
//!
//! etcd: etcdutl's check, bbolt's check, tools/etcd-dump-db.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use ballast_api::etcdserverpb::{AlarmMember, Member};
use ballast_api::leasepb::Lease;
use bytes::Bytes;
use prost::Message;

use crate::LogPosition;
use crate::backend::{Engine, OWN_PREFIX, Tally, current};
use crate::committer::decode_position;
use crate::error::StorageError;
use crate::mvcc::FORMAT_VERSION;
use crate::mvcc::history::History;
use crate::schema::{Table, meta};
use crate::wal::Identity;

/// What is wrong, told once each; after so many they are counted only.
const PROBLEMS_MAX: usize = 100;
const SCAN_CHUNK_BYTES: usize = 1 << 20;
/// Of the engine, for reading everything once.
const CACHE_BYTES: u64 = 16 << 20;

/// What was found wrong, each with its place.
#[derive(Clone, Debug, Default)]
pub struct Problems {
    pub told: Vec<String>,
    /// Found after those.
    pub more: usize,
}

impl Problems {
    pub fn add(&mut self, what: impl Into<String>) {
        if self.told.len() < PROBLEMS_MAX {
            self.told.push(what.into());
        } else {
            self.more += 1;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.told.is_empty()
    }

    pub fn len(&self) -> usize {
        self.told.len() + self.more
    }
}

/// A database in figures.
#[derive(Clone, Debug, Default)]
pub struct DatabaseFacts {
    pub path: PathBuf,
    /// 0 when it does not say.
    pub identity: Identity,
    /// The last log entry in it.
    pub applied: LogPosition,
    pub revision: i64,
    /// -1 when nothing was ever compacted.
    pub compact_revision: i64,
    /// A compaction that was ordered is not finished: the next start goes on with it.
    pub is_compacting: bool,
    pub records: u64,
    pub keys: u64,
    pub leases: u64,
}

/// Reads all of the database in `dir` (`member/db`).
pub fn database(dir: &Path, problems: &mut Problems) -> Result<DatabaseFacts, StorageError> {
    let (kind, path) = current::find(dir)?;
    let engine = kind.open_unchanged(&path, CACHE_BYTES)?;
    let mut check = Check {
        engine: &*engine,
        facts: DatabaseFacts {
            path,
            compact_revision: -1,
            ..DatabaseFacts::default()
        },
        problems,
        leases: HashSet::new(),
        current_revision: None,
        tally: Tally::default(),
    };
    // Meta first: what the records must be depends on it.
    let mut scheduled = -1;
    let mut finished = -1;
    check.each(Table::Meta, &mut |check, key, value| {
        check.meta(key, &value, &mut scheduled, &mut finished)
    })?;
    check.facts.compact_revision = scheduled.max(finished);
    check.facts.is_compacting = scheduled > finished;
    check.small()?;
    check.records()?;
    for table in [Table::Auth, Table::AuthUser, Table::AuthRole] {
        check.each(table, &mut |_, _, _| Ok(()))?;
    }
    check.unknown()?;
    check.tally()?;
    Ok(check.facts)
}

type Found = Result<(), String>;

struct Check<'a> {
    engine: &'a dyn Engine,
    facts: DatabaseFacts,
    problems: &'a mut Problems,
    leases: HashSet<i64>,
    current_revision: Option<i64>,
    /// Of everything read; each pair is read once.
    tally: Tally,
}

impl Check<'_> {
    /// Hands each record of a table to `each`; what it finds wrong is a problem of that record.
    fn each(
        &mut self,
        table: Table,
        each: &mut dyn FnMut(&mut Self, &[u8], Bytes) -> Found,
    ) -> Result<(), StorageError> {
        let (start, end) = (table.prefix(), table.prefix() + 1);
        self.range(&[start], &[end], &mut |check, key, value| {
            if let Err(what) = each(check, &key[1..], value) {
                let name = name_of(table, &key[1..]);
                check.problem(&format!("{} {name}: {what}", table_name(table)));
            }
        })
    }

    fn range(
        &mut self,
        start: &[u8],
        end: &[u8],
        each: &mut dyn FnMut(&mut Self, &[u8], Bytes),
    ) -> Result<(), StorageError> {
        let mut next = start.to_vec();
        loop {
            let pairs = self.engine.scan(&next, end, SCAN_CHUNK_BYTES)?;
            let Some((last, _)) = pairs.last() else {
                return Ok(());
            };
            next.clear();
            next.extend_from_slice(last);
            next.push(0);
            self.tally.add_all(&pairs);
            for (key, value) in pairs {
                each(self, &key, value);
            }
        }
    }

    fn problem(&mut self, what: &str) {
        let path = self.facts.path.display();
        self.problems.add(format!("{path}: {what}"));
    }

    fn meta(
        &mut self,
        key: &[u8],
        value: &Bytes,
        scheduled: &mut i64,
        finished: &mut i64,
    ) -> Found {
        match key {
            meta::FORMAT => {
                let format = u64::from_le_bytes(eight(value)?);
                if format != FORMAT_VERSION {
                    return Err(format!(
                        "it is {format}, this release knows {FORMAT_VERSION}"
                    ));
                }
            }
            meta::APPLIED => {
                self.facts.applied =
                    decode_position(value).ok_or("its value is no position".to_owned())?;
            }
            meta::CURRENT_REVISION => self.current_revision = Some(number(value)?),
            meta::SCHEDULED_COMPACT => *scheduled = number(value)?,
            meta::FINISHED_COMPACT => *finished = number(value)?,
            meta::CLUSTER_ID => {
                self.facts.identity.cluster_id = u64::from_be_bytes(eight(value)?);
            }
            meta::MEMBER_ID => self.facts.identity.member_id = u64::from_be_bytes(eight(value)?),
            meta::LIVE_BYTES => drop(eight(value)?),
            meta::CLUSTER_VERSION | meta::DOWNGRADE => {
                std::str::from_utf8(value).map_err(|_| "its value is no text".to_owned())?;
            }
            meta::INSTALLED => {
                decode_position(value).ok_or("its value is no position".to_owned())?;
            }
            meta::RAFT_MEMBERSHIP => {}
            _ => return Err("this release does not know it".to_owned()),
        }
        Ok(())
    }

    /// Leases, alarms, members.
    fn small(&mut self) -> Result<(), StorageError> {
        let no_value = |value: &Bytes| match value.len() {
            0 => Ok(()),
            len => Err(format!("it has a value of {len} bytes")),
        };
        self.each(Table::Lease, &mut |check, key, value| {
            let id = number(key)?;
            let lease = Lease::decode(value).map_err(|error| error.to_string())?;
            check.leases.insert(id);
            check.facts.leases += 1;
            if lease.id != id || lease.ttl <= 0 {
                return Err(format!("its value says id {} ttl {}", lease.id, lease.ttl));
            }
            Ok(())
        })?;
        self.each(Table::Alarm, &mut |_, key, value| {
            AlarmMember::decode(key).map_err(|error| error.to_string())?;
            no_value(&value)
        })?;
        let mut own = false;
        let mut members = HashSet::new();
        self.each(Table::Member, &mut |check, key, value| {
            let id = u64::from_be_bytes(eight(key)?);
            let member = Member::decode(value).map_err(|error| error.to_string())?;
            own |= id == check.facts.identity.member_id;
            members.insert(id);
            if member.id != id {
                return Err(format!("its value says id {:x}", member.id));
            }
            Ok(())
        })?;
        self.each(Table::MemberRemoved, &mut |_, key, value| {
            let id = u64::from_be_bytes(eight(key)?);
            if members.contains(&id) {
                return Err("it is a member still".to_owned());
            }
            no_value(&value)
        })?;
        let member_id = self.facts.identity.member_id;
        if member_id != 0 && !own {
            self.problem(&format!(
                "member {member_id:x}, whose it is, is not among its members"
            ));
        }
        Ok(())
    }

    fn records(&mut self) -> Result<(), StorageError> {
        let mut history = History::new(self.facts.compact_revision);
        self.each(Table::Key, &mut |_, key, value| history.record(key, &value))?;
        self.facts.records = history.records();
        self.facts.revision = history.revision();
        for (key, newest) in history.live() {
            self.facts.keys += 1;
            if newest.lease != 0 && !self.leases.contains(&newest.lease) {
                let (key, lease) = (key.escape_ascii(), newest.lease);
                self.problem(&format!(
                    "key {key}: it hangs on lease {lease:x}, which is not there"
                ));
            }
        }
        if let Some(told) = self
            .current_revision
            .filter(|told| *told != self.facts.revision)
        {
            let revision = self.facts.revision;
            self.problem(&format!(
                "meta currentRevision: it is {told}, the records say {revision}"
            ));
        }
        Ok(())
    }

    /// An engine may say what all that was written sums up to.
    fn tally(&mut self) -> Result<(), StorageError> {
        let read = self.tally;
        if let Some(written) = self.engine.tally()?.filter(|written| *written != read) {
            self.problem(&format!(
                "{} pairs of {} bytes were written and {} of {} bytes can be read, or their contents differ",
                written.pairs, written.bytes, read.pairs, read.bytes
            ));
        }
        Ok(())
    }

    /// Whatever lies between the tables.
    fn unknown(&mut self) -> Result<(), StorageError> {
        let mut prefixes: Vec<u8> = Table::SMALL.iter().map(|table| table.prefix()).collect();
        prefixes.push(Table::Key.prefix());
        prefixes.push(OWN_PREFIX);
        prefixes.sort_unstable();
        let mut from = 0;
        for prefix in prefixes {
            if from < prefix {
                self.range(&[from], &[prefix], &mut |check, key, _| {
                    check.problem(&format!("{}: it belongs to no table", key.escape_ascii()));
                })?;
            }
            from = prefix.saturating_add(1);
        }
        Ok(())
    }
}

fn eight(bytes: &[u8]) -> Result<[u8; 8], String> {
    bytes
        .try_into()
        .map_err(|_| format!("{} bytes are no number of 8", bytes.len()))
}

fn number(bytes: &[u8]) -> Result<i64, String> {
    Ok(i64::from_be_bytes(eight(bytes)?))
}

const fn table_name(table: Table) -> &'static str {
    match table {
        Table::Key => "record",
        Table::Meta => "meta",
        Table::Lease => "lease",
        Table::Alarm => "alarm",
        Table::Member => "member",
        Table::MemberRemoved => "removed member",
        Table::Auth | Table::AuthUser | Table::AuthRole => "auth",
    }
}

fn name_of(table: Table, key: &[u8]) -> String {
    match (table, <[u8; 8]>::try_from(key)) {
        (Table::Lease | Table::Member | Table::MemberRemoved, Ok(id)) => {
            format!("{:x}", u64::from_be_bytes(id))
        }
        (Table::Key, _) => match crate::Revision::from_bytes(key) {
            Some((revision, tombstone)) => {
                let mark = if tombstone { "t" } else { "" };
                format!("{}_{}{mark}", revision.main, revision.sub)
            }
            None => key.escape_ascii().to_string(),
        },
        _ => key.escape_ascii().to_string(),
    }
}

/// Whether database and log belong together, given what each says of itself.
pub fn together(database: &DatabaseFacts, log: &crate::wal::LogFacts, problems: &mut Problems) {
    let (ours, theirs) = (database.identity, log.identity);
    if ours != Identity::default() && ours != theirs {
        problems.add(format!(
            "{}: the log belongs to member {:x} of cluster {:x}, the database to member {:x} of cluster {:x}",
            log.dir.display(),
            theirs.member_id,
            theirs.cluster_id,
            ours.member_id,
            ours.cluster_id
        ));
    }
    let applied = database.applied;
    let place = database.path.display();
    if applied.index < log.purged.index {
        problems.add(format!(
            "{place}: its last entry is {}, and the log begins behind {}: entries are missing between them",
            applied.index, log.purged.index
        ));
    } else if applied.index > log.last.index {
        problems.add(format!(
            "{place}: its last entry is {}, and the log ends at {}",
            applied.index, log.last.index
        ));
    } else if let Some(term) = log
        .term_of(applied.index)
        .filter(|term| *term != applied.term)
    {
        problems.add(format!(
            "{place}: its last entry is {} of term {}, which the log has as of term {term}",
            applied.index, applied.term
        ));
    }
}
