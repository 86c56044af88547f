//! etcd's buckets, and how their entries become records of our tables and back.
//!
//!     key             revision -> record               = our table of the same bytes
//!     lease, alarm    as ours
//!     auth*           as ours
//!     meta            consistent_index, term, confState, storageVersion, the compact revisions
//!     cluster         clusterVersion
//!     members         hex id -> JSON                   members_removed   hex id -> "removed"
//!
//! Promises: pure functions of bytes. A value that cannot be what its bucket holds is named, not guessed at.
//! Not here: the file's form (`read.rs`, `write.rs`), where the records come from and go (`mvcc/snapshot.rs`,
//! `mvcc/restore.rs`).
//!
//! etcd: server/storage/schema, server/etcdserver/api/membership/member.go.

use std::collections::BTreeMap;

use ballast_api::etcdserverpb::Member;
use bytes::Bytes;
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::LogPosition;
use crate::mvcc::revision::Revision;
use crate::schema::{Table, meta};

/// The revisioned records' bucket.
pub const KEY: &str = "key";
pub const META: &str = "meta";
pub const CLUSTER: &str = "cluster";
pub const MEMBERS: &str = "members";
pub const MEMBERS_REMOVED: &str = "members_removed";
pub const AUTH: &str = "auth";

/// Every bucket etcd makes, ascending.
pub const BUCKETS: [&str; 10] = [
    "alarm",
    AUTH,
    "authRoles",
    "authUsers",
    CLUSTER,
    KEY,
    "lease",
    MEMBERS,
    MEMBERS_REMOVED,
    META,
];

/// The storage version that the file's fields are those of.
pub const STORAGE_VERSION: &str = "3.7.0";

/// Names in the bucket `meta`.
pub mod meta_key {
    pub const CONSISTENT_INDEX: &[u8] = b"consistent_index";
    pub const TERM: &[u8] = b"term";
    pub const CONF_STATE: &[u8] = b"confState";
    pub const STORAGE_VERSION: &[u8] = b"storageVersion";
    pub const SCHEDULED_COMPACT: &[u8] = b"scheduledCompactRev";
    pub const FINISHED_COMPACT: &[u8] = b"finishedCompactRev";
}

const CLUSTER_VERSION: &[u8] = b"clusterVersion";
const DOWNGRADE: &[u8] = b"downgrade";
const AUTH_ENABLED: &[u8] = b"authEnabled";

/// The bucket of a table that etcd has with the same keys and values.
pub fn bucket_of(table: Table) -> Option<&'static str> {
    match table {
        Table::Key => Some(KEY),
        Table::Lease => Some("lease"),
        Table::Alarm => Some("alarm"),
        Table::Auth => Some(AUTH),
        Table::AuthUser => Some("authUsers"),
        Table::AuthRole => Some("authRoles"),
        Table::Meta | Table::Member | Table::MemberRemoved => None,
    }
}

/// The reverse of [`bucket_of`].
pub fn table_of(bucket: &[u8]) -> Option<Table> {
    let mut tables = Table::SMALL.into_iter().chain([Table::Key]);
    tables.find(|table| bucket_of(*table).is_some_and(|name| name.as_bytes() == bucket))
}

/// A bucket's name and its entries, ascending.
pub type SmallBucket = (&'static str, Vec<(Bytes, Bytes)>);

/// What the small buckets hold, in the order of [`BUCKETS`]; `key` is there and empty.
///
/// `tables` holds the small tables by engine key, `finished_compact` is -1 when nothing was compacted. The error names the
/// record that is no value of its table.
pub fn small_buckets(
    tables: &BTreeMap<Bytes, Bytes>,
    position: LogPosition,
    finished_compact: i64,
) -> Result<Vec<SmallBucket>, String> {
    let table = |table: Table| {
        let start = Bytes::copy_from_slice(&[table.prefix()]);
        tables
            .range(start..)
            .take_while(move |(key, _)| key[0] == table.prefix())
            .map(|(key, value)| (key.slice(1..), value.clone()))
    };
    let mut members = Vec::new();
    for (_, value) in table(Table::Member) {
        members.push(Member::decode(value).map_err(|error| format!("a member: {error}"))?);
    }
    let mut out: BTreeMap<&'static str, Vec<(Bytes, Bytes)>> =
        BUCKETS.iter().map(|name| (*name, Vec::new())).collect();
    for small in Table::SMALL {
        if let Some(name) = bucket_of(small) {
            out.insert(name, table(small).collect());
        }
    }
    out.insert(
        META,
        meta_bucket(tables, position, finished_compact, &members)?,
    );
    let of_cluster = [
        (CLUSTER_VERSION, meta::CLUSTER_VERSION),
        (DOWNGRADE, meta::DOWNGRADE),
    ];
    let of_cluster = of_cluster.into_iter().filter_map(|(name, ours)| {
        let value = tables.get(&Table::Meta.key(ours)[..])?;
        Some((Bytes::from_static(name), value.clone()))
    });
    out.insert(CLUSTER, of_cluster.collect());
    let entries = members
        .iter()
        .map(|member| (hex_id(member.id), member_json(member)));
    out.insert(MEMBERS, sorted(entries));
    let mut removed = Vec::new();
    for (key, _) in table(Table::MemberRemoved) {
        let id = <[u8; 8]>::try_from(&key[..])
            .map_err(|_| format!("a removed member of {} bytes", key.len()))?;
        removed.push((
            hex_id(u64::from_be_bytes(id)),
            Bytes::from_static(b"removed"),
        ));
    }
    out.insert(MEMBERS_REMOVED, sorted(removed));
    Ok(out.into_iter().collect())
}

/// Hexadecimal names sort otherwise than the numbers, having no leading zeros.
fn sorted(entries: impl IntoIterator<Item = (Bytes, Bytes)>) -> Vec<(Bytes, Bytes)> {
    entries
        .into_iter()
        .collect::<BTreeMap<_, _>>()
        .into_iter()
        .collect()
}

fn meta_bucket(
    tables: &BTreeMap<Bytes, Bytes>,
    position: LogPosition,
    finished_compact: i64,
    members: &[Member],
) -> Result<Vec<(Bytes, Bytes)>, String> {
    let ids = |learners| {
        let of_kind = members
            .iter()
            .filter(move |member| member.is_learner == learners);
        of_kind.map(|member| member.id).collect::<Vec<_>>()
    };
    let conf_state = ConfState {
        voters: ids(false),
        learners: ids(true),
        auto_leave: false,
    };
    let conf_state = serde_json::to_vec(&conf_state).map_err(|error| error.to_string())?;
    let mut entries = vec![
        (meta_key::CONF_STATE, Bytes::from(conf_state)),
        (meta_key::STORAGE_VERSION, STORAGE_VERSION.into()),
    ];
    // etcd never writes an index of 0: it would mean that nothing was loaded yet.
    if position.index > 0 {
        let (index, term) = (position.index.to_be_bytes(), position.term.to_be_bytes());
        entries.push((meta_key::CONSISTENT_INDEX, Bytes::copy_from_slice(&index)));
        entries.push((meta_key::TERM, Bytes::copy_from_slice(&term)));
    }
    if let Some(scheduled) = tables.get(&Table::Meta.key(meta::SCHEDULED_COMPACT)[..]) {
        let main = <[u8; 8]>::try_from(&scheduled[..])
            .map_err(|_| format!("a compact revision of {} bytes", scheduled.len()))?;
        let main = i64::from_be_bytes(main);
        entries.push((meta_key::SCHEDULED_COMPACT, revision_bytes(main)));
    }
    if finished_compact >= 0 {
        entries.push((meta_key::FINISHED_COMPACT, revision_bytes(finished_compact)));
    }
    Ok(sorted(
        entries
            .into_iter()
            .map(|(key, value)| (Bytes::from_static(key), value)),
    ))
}

fn revision_bytes(main: i64) -> Bytes {
    Bytes::copy_from_slice(&Revision::new(main, 0).to_bytes())
}

/// What an entry of the bucket `meta` tells a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetaEntry {
    ScheduledCompact(i64),
    FinishedCompact(i64),
    /// Of the old cluster's log or members: a restore makes these anew.
    Replaced,
    Unknown,
}

/// Reads an entry of the bucket `meta`.
pub fn meta_entry(key: &[u8], value: &[u8]) -> Result<MetaEntry, String> {
    let revision = || match Revision::from_bytes(value) {
        Some((revision, false)) => Ok(revision.main),
        _ => Err(format!("a compact revision of {} bytes", value.len())),
    };
    Ok(match key {
        meta_key::SCHEDULED_COMPACT => MetaEntry::ScheduledCompact(revision()?),
        meta_key::FINISHED_COMPACT => MetaEntry::FinishedCompact(revision()?),
        meta_key::CONSISTENT_INDEX
        | meta_key::TERM
        | meta_key::CONF_STATE
        | meta_key::STORAGE_VERSION => MetaEntry::Replaced,
        _ => MetaEntry::Unknown,
    })
}

/// True for the entry of `auth` that says requests need a user.
pub fn enables_auth(bucket: &[u8], key: &[u8], value: &[u8]) -> bool {
    bucket == AUTH.as_bytes() && key == AUTH_ENABLED && value == [1]
}

/// True for the entry of `cluster` that is the cluster version.
pub fn is_cluster_version(key: &[u8]) -> bool {
    key == CLUSTER_VERSION
}

/// True for the entry of `cluster` that tells of a downgrade.
pub fn is_downgrade(key: &[u8]) -> bool {
    key == DOWNGRADE
}

fn hex_id(id: u64) -> Bytes {
    format!("{id:x}").into()
}

/// etcd's raftpb.ConfState, as Go's JSON has it.
#[derive(Debug, Serialize)]
struct ConfState {
    voters: Vec<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    learners: Vec<u64>,
    auto_leave: bool,
}

/// etcd's membership.Member, as Go's JSON has it: null for a list that was never set.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MemberJson {
    id: u64,
    #[serde(rename = "peerURLs")]
    peer_urls: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_learner: bool,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    name: String,
    #[serde(rename = "clientURLs", default, skip_serializing_if = "Vec::is_empty")]
    client_urls: Vec<String>,
}

fn member_json(member: &Member) -> Bytes {
    let json = MemberJson {
        id: member.id,
        peer_urls: Some(member.peer_ur_ls.clone()),
        is_learner: member.is_learner,
        name: member.name.clone(),
        client_urls: member.client_ur_ls.clone(),
    };
    serde_json::to_vec(&json)
        .expect("strings and numbers have a JSON form")
        .into()
}

/// Reads a key of the bucket `members_removed`.
pub fn removed_id(key: &[u8]) -> Result<u64, String> {
    let text = std::str::from_utf8(key).ok();
    text.and_then(|text| u64::from_str_radix(text, 16).ok())
        .ok_or_else(|| format!("a removed member {}", key.escape_ascii()))
}

/// Reads a value of the bucket `members`.
pub fn member(value: &[u8]) -> Result<Member, String> {
    let json: MemberJson =
        serde_json::from_slice(value).map_err(|error| format!("a member: {error}"))?;
    Ok(Member {
        id: json.id,
        name: json.name,
        peer_ur_ls: json.peer_urls.unwrap_or_default(),
        client_ur_ls: json.client_urls,
        is_learner: json.is_learner,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_become_buckets_in_etcds_form() {
        let id = 0x0abc_0000_0000_0001_u64;
        let member_record = Member {
            id,
            name: "m1".to_owned(),
            peer_ur_ls: vec!["http://a:2380".to_owned()],
            client_ur_ls: vec!["http://a:2379".to_owned()],
            is_learner: false,
        };
        let tables = BTreeMap::from([
            (
                Bytes::from(Table::Member.key(&id.to_be_bytes())),
                Bytes::from(member_record.encode_to_vec()),
            ),
            (
                Bytes::from(Table::MemberRemoved.key(&7_u64.to_be_bytes())),
                Bytes::new(),
            ),
            (
                Bytes::from(Table::Lease.key(&5_u64.to_be_bytes())),
                Bytes::from_static(b"lease"),
            ),
            (
                Bytes::from(Table::Meta.key(meta::CLUSTER_VERSION)),
                Bytes::from_static(b"3.7.0"),
            ),
            (
                Bytes::from(Table::Meta.key(meta::SCHEDULED_COMPACT)),
                Bytes::copy_from_slice(&9_i64.to_be_bytes()),
            ),
        ]);
        let position = LogPosition {
            term: 3,
            index: 258,
        };
        let buckets: BTreeMap<_, _> = small_buckets(&tables, position, 8)
            .unwrap()
            .into_iter()
            .collect();
        assert_eq!(buckets.keys().copied().collect::<Vec<_>>(), BUCKETS);
        let text = |bucket: &str| {
            let entries = buckets[bucket].iter();
            let lines = entries.map(|(k, v)| format!("{}={}", k.escape_ascii(), v.escape_ascii()));
            lines.collect::<Vec<_>>()
        };
        assert_eq!(
            text("members"),
            [concat!(
                r#"abc000000000001={\"id\":773493236000882689,\"peerURLs\":[\"http://a:2380\"],"#,
                r#"\"name\":\"m1\",\"clientURLs\":[\"http://a:2379\"]}"#
            )]
        );
        assert_eq!(member(&buckets["members"][0].1).unwrap(), member_record);
        assert_eq!(text("members_removed"), ["7=removed"]);
        assert_eq!(text("cluster"), ["clusterVersion=3.7.0"]);
        assert_eq!(text("lease"), [r"\x00\x00\x00\x00\x00\x00\x00\x05=lease"]);
        assert_eq!(
            text("meta"),
            [
                r#"confState={\"voters\":[773493236000882689],\"auto_leave\":false}"#,
                r"consistent_index=\x00\x00\x00\x00\x00\x00\x01\x02",
                r"finishedCompactRev=\x00\x00\x00\x00\x00\x00\x00\x08_\x00\x00\x00\x00\x00\x00\x00\x00",
                r"scheduledCompactRev=\x00\x00\x00\x00\x00\x00\x00\t_\x00\x00\x00\x00\x00\x00\x00\x00",
                r"storageVersion=3.7.0",
                r"term=\x00\x00\x00\x00\x00\x00\x00\x03",
            ]
        );
    }

    #[test]
    fn meta_entries_are_read_or_named() {
        let revision = Revision::new(42, 0).to_bytes();
        let scheduled = meta_entry(meta_key::SCHEDULED_COMPACT, &revision);
        assert_eq!(scheduled, Ok(MetaEntry::ScheduledCompact(42)));
        assert!(meta_entry(meta_key::FINISHED_COMPACT, b"short").is_err());
        assert_eq!(meta_entry(meta_key::TERM, b""), Ok(MetaEntry::Replaced));
        assert_eq!(meta_entry(b"other", b""), Ok(MetaEntry::Unknown));
    }

    #[test]
    fn etcds_own_member_is_read() {
        let json = br#"{"id":10501334649042878790,"peerURLs":null,"isLearner":true}"#;
        let read = member(json).unwrap();
        assert_eq!(
            (read.id, read.is_learner),
            (10_501_334_649_042_878_790, true)
        );
        assert!(member(b"{}").is_err());
    }
}
