//! Every table and the byte layout of its keys. All state lies in one key space of the engine, since a batch is atomic
//! there only: one prefix byte, then the key within the table.
//!
//!     'k' | revision, 17 bytes [, 't']   -> mvccpb.KeyValue          (as etcd's bucket "key")
//!     'm' | name                         -> see the `meta` constants
//!     'l' | lease id, u64 big-endian     -> leasepb.Lease            (as etcd's bucket "lease")
//!     'a' | AlarmMember message          -> empty                    (as etcd's bucket "alarm")
//!     'n' | member id, u64 big-endian    -> etcdserverpb.Member
//!     'r' | member id, u64 big-endian    -> empty: a removed member, whose id is never used again
//!
//! docs/format.md says the same for people.

use crate::mvcc::revision::Revision;

/// A table of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Table {
    /// Revisioned records.
    Key,
    Meta,
    Lease,
    Alarm,
    Member,
    MemberRemoved,
    Auth,
    AuthUser,
    AuthRole,
}

impl Table {
    /// The small tables: all but the revisioned records.
    pub const SMALL: [Table; 8] = [
        Table::Meta,
        Table::Lease,
        Table::Alarm,
        Table::Member,
        Table::MemberRemoved,
        Table::Auth,
        Table::AuthUser,
        Table::AuthRole,
    ];

    pub const fn prefix(self) -> u8 {
        match self {
            Table::Key => b'k',
            Table::Meta => b'm',
            Table::Lease => b'l',
            Table::Alarm => b'a',
            Table::Member => b'n',
            Table::MemberRemoved => b'r',
            Table::Auth => b'A',
            Table::AuthUser => b'U',
            Table::AuthRole => b'R',
        }
    }

    /// The engine's key for `key` of this table.
    pub fn key(self, key: &[u8]) -> Vec<u8> {
        let mut full = Vec::with_capacity(key.len() + 1);
        full.push(self.prefix());
        full.extend_from_slice(key);
        full
    }
}

/// An engine key as a person may read it in a report of damage: a record by its revision.
pub fn name_of(key: &[u8]) -> String {
    match key.split_first() {
        Some((prefix, rest)) if *prefix == Table::Key.prefix() => {
            match Revision::from_bytes(rest) {
                Some((revision, _)) => format!("{}_{}", revision.main, revision.sub),
                None => key.escape_ascii().to_string(),
            }
        }
        _ => key.escape_ascii().to_string(),
    }
}

/// Names in [`Table::Meta`].
pub mod meta {
    /// u64 little-endian: the layout of everything in the engine. A greater one than ours is refused.
    pub const FORMAT: &[u8] = b"format";
    /// Index and term of the last entry in the engine, two u64 big-endian. In every batch.
    pub const APPLIED: &[u8] = b"applied";
    /// Revision (i64 big-endian) of the last write in the engine. In every batch that has one.
    pub const CURRENT_REVISION: &[u8] = b"currentRevision";
    /// i64 big-endian: history before it is gone for readers.
    pub const SCHEDULED_COMPACT: &[u8] = b"scheduledCompactRev";
    /// i64 big-endian: history before it is gone from the engine.
    pub const FINISHED_COMPACT: &[u8] = b"finishedCompactRev";
    /// The Raft membership in force, in the Raft layer's own bytes.
    pub const RAFT_MEMBERSHIP: &[u8] = b"raftMembership";
    /// u64 big-endian each.
    pub const CLUSTER_ID: &[u8] = b"clusterId";
    pub const MEMBER_ID: &[u8] = b"memberId";
    /// Live bytes by the counters kept, u64 big-endian.
    pub const LIVE_BYTES: &[u8] = b"liveBytes";
    /// Where in the log the last snapshot of another member stood that was installed: as `APPLIED`. The log may end before it, if nothing came since.
    pub const INSTALLED: &[u8] = b"installed";
    /// The cluster version, as "3.7.0".
    pub const CLUSTER_VERSION: &[u8] = b"clusterVersion";
    /// A downgrade under way, as etcd's JSON; absent when there is none.
    pub const DOWNGRADE: &[u8] = b"downgrade";
}
