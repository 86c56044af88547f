//! What travels through the log, and its bytes.
//!
//! The library's own serialisation is not used: its upgrade must not change what lies on the disk. An entry of the write-ahead log
//! has a kind and a payload:
//!
//! | kind | payload |
//! |---|---|
//! | 0 | nothing: a new leader's first entry |
//! | 1 | one `etcdserverpb.InternalRaftRequest` |
//! | 2 | a membership: `MembershipBytes` |
//!
//! The kind's upper four bits are the format version of kind and payload, 0 being the first. An entry of a version or kind that this release
//! does not know, and a request that holds more than it knows, are refused when they are read: nothing behind them is applied. A release that
//! gives a payload a new meaning raises the version, and writes such entries only once the cluster version says that all members know it.
//!
//! The library counts entries from 0, the log from 1, as etcd does: "index" outside this folder is the log's.
//!
//! etcd: raftpb.Entry.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use ballast_api::etcdserverpb::InternalRaftRequest;
use ballast_storage::LogPosition;
use ballast_storage::wal::{WalEntry, WalVote};
use bytes::Bytes;
use openraft::impls::leader_id_std::LeaderId;
use openraft::{EntryPayload, Membership, StoredMembership, alias};
use prost::Message;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::apply::Applied;

openraft::declare_raft_types!(
    /// The library's types, filled in.
    pub TypeConfig:
        D = Command,
        R = Reply,
        NodeId = u64,
        Node = PeerNode,
        Term = u64,
        LeaderId = LeaderId<u64, u64>,
);

pub(crate) type LogId = alias::LogIdOf<TypeConfig>;
pub(crate) type Entry = alias::EntryOf<TypeConfig>;
pub(crate) type Vote = alias::VoteOf<TypeConfig>;
pub(crate) type Stored = alias::StoredMembershipOf<TypeConfig>;

/// A change on its way through the log. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Command(pub Arc<InternalRaftRequest>);

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.0.header.as_ref().map_or(self.0.id, |header| header.id);
        write!(f, "request {id:x}")
    }
}

/// What applying a command gave. None for entries that carry none.
#[derive(Clone, Debug)]
pub struct Reply(pub Option<Applied>);

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "reply at {:?}", self.0.as_ref().map(|a| a.revision))
    }
}

/// What the group's membership says of a member beside whether it votes: where it is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerNode {
    /// Empty in memberships of releases that ran single members; then the list of members tells.
    pub urls: Vec<String>,
    /// It was added as a voter and becomes one as soon as it has caught up. Until then the group does without it.
    pub votes: bool,
}

impl PeerNode {
    pub fn at(urls: Vec<String>) -> Self {
        Self { urls, votes: false }
    }
}

/// Of whom a group consists, by id.
pub type Nodes = BTreeMap<u64, PeerNode>;

/// The library demands serde of these. Nothing here uses it, and it must stay so: bytes are made below.
macro_rules! never_serialised {
    ($($name:ident),*) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                Err(serde::ser::Error::custom("not a serde type"))
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
                Err(serde::de::Error::custom("not a serde type"))
            }
        }
    )*};
}

never_serialised!(Command, Reply, PeerNode);

/// Where the format version is in a kind.
const FORMAT_SHIFT: u32 = 4;
/// What this release writes and reads.
const FORMAT: u8 = 0;

pub(crate) const KIND_BLANK: u8 = 0;
pub(crate) const KIND_REQUEST: u8 = 1;
pub(crate) const KIND_MEMBERSHIP: u8 = 2;

/// Who votes, as bytes. Two configurations while the group passes from one to the other.
#[derive(Clone, PartialEq, Message)]
struct MembershipBytes {
    #[prost(message, repeated, tag = "1")]
    configurations: Vec<Voters>,
    /// Voters and learners.
    #[prost(uint64, repeated, tag = "2")]
    members: Vec<u64>,
    /// Where it stands in the log; only in the engine, an entry's position is its own.
    #[prost(uint64, tag = "3")]
    term: u64,
    #[prost(uint64, tag = "4")]
    index: u64,
    /// Of `members`, those of whom more is known.
    #[prost(message, repeated, tag = "5")]
    nodes: Vec<NodeBytes>,
}

#[derive(Clone, PartialEq, Message)]
struct NodeBytes {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(string, repeated, tag = "2")]
    urls: Vec<String>,
    #[prost(bool, tag = "3")]
    votes: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Voters {
    #[prost(uint64, repeated, tag = "1")]
    ids: Vec<u64>,
}

/// The log's bytes are not what this version writes.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("log entry {index} has the unknown kind {kind}; a newer version wrote it")]
    Kind { index: u64, kind: u8 },
    #[error(
        "log entry {index} has format {format} and this release knows {FORMAT}; a newer version wrote it"
    )]
    Format { index: u64, format: u8 },
    #[error("log entry {index} holds more than this version knows; a newer version wrote it")]
    Unknown { index: u64 },
    #[error("log entry {index} does not parse: {source}")]
    Decode {
        index: u64,
        source: prost::DecodeError,
    },
    #[error("the membership does not hold together: {0}")]
    Membership(String),
}

/// The library's log id of a position; None before the first entry.
pub(crate) fn log_id(position: LogPosition) -> Option<LogId> {
    let index = position.index.checked_sub(1)?;
    Some(LogId::new(committed_leader(position.term), index))
}

pub(crate) fn committed_leader(term: u64) -> alias::CommittedLeaderIdOf<TypeConfig> {
    use openraft::vote::RaftLeaderId;
    // A committed leader of this kind is its term alone.
    LeaderId { term, voted_for: 0 }.to_committed()
}

pub(crate) fn position(log_id: &LogId) -> LogPosition {
    LogPosition {
        term: **log_id.committed_leader_id(),
        index: log_id.index() + 1,
    }
}

pub(crate) fn encode_entry(entry: &Entry) -> WalEntry {
    let (kind, payload) = match &entry.payload {
        EntryPayload::Blank => (KIND_BLANK, Vec::new()),
        EntryPayload::Normal(command) => (KIND_REQUEST, command.0.encode_to_vec()),
        EntryPayload::Membership(membership) => (
            KIND_MEMBERSHIP,
            membership_bytes(membership, LogPosition::default()).encode_to_vec(),
        ),
    };
    WalEntry {
        position: position(&entry.log_id),
        kind,
        payload: Bytes::from(payload),
    }
}

pub(crate) fn decode_entry(entry: &WalEntry) -> Result<Entry, CommandError> {
    let index = entry.position.index;
    let decode = |source| CommandError::Decode { index, source };
    let format = entry.kind >> FORMAT_SHIFT;
    if format != FORMAT {
        return Err(CommandError::Format { index, format });
    }
    let payload = match entry.kind {
        KIND_BLANK => EntryPayload::Blank,
        KIND_REQUEST => {
            let request = InternalRaftRequest::decode(entry.payload.clone()).map_err(decode)?;
            // Fields that are not known are left out at decoding.
            if request.encoded_len() != entry.payload.len() {
                return Err(CommandError::Unknown { index });
            }
            EntryPayload::Normal(Command(Arc::new(request)))
        }
        KIND_MEMBERSHIP => {
            let bytes = MembershipBytes::decode(entry.payload.clone()).map_err(decode)?;
            EntryPayload::Membership(membership(bytes)?)
        }
        kind => return Err(CommandError::Kind { index, kind }),
    };
    Ok(Entry {
        log_id: log_id(entry.position).ok_or(CommandError::Kind {
            index,
            kind: entry.kind,
        })?,
        payload,
    })
}

fn membership_bytes(membership: &Membership<u64, PeerNode>, at: LogPosition) -> MembershipBytes {
    MembershipBytes {
        configurations: membership
            .get_joint_config()
            .iter()
            .map(|ids| Voters {
                ids: ids.iter().copied().collect(),
            })
            .collect(),
        members: membership.nodes().map(|(id, _)| *id).collect(),
        term: at.term,
        index: at.index,
        nodes: membership
            .nodes()
            .map(|(id, node)| NodeBytes {
                id: *id,
                urls: node.urls.clone(),
                votes: node.votes,
            })
            .collect(),
    }
}

fn membership(bytes: MembershipBytes) -> Result<Membership<u64, PeerNode>, CommandError> {
    let configurations: Vec<BTreeSet<u64>> = bytes
        .configurations
        .into_iter()
        .map(|voters| voters.ids.into_iter().collect())
        .collect();
    if configurations.is_empty() {
        return Ok(Membership::default());
    }
    let mut members: Nodes = bytes
        .members
        .into_iter()
        .map(|id| (id, PeerNode::default()))
        .collect();
    members.extend(bytes.nodes.into_iter().map(|node| {
        let known = PeerNode {
            urls: node.urls,
            votes: node.votes,
        };
        (node.id, known)
    }));
    Membership::new(configurations, members)
        .map_err(|error| CommandError::Membership(error.to_string()))
}

/// The membership in force, for the engine.
pub(crate) fn encode_stored(stored: &Stored) -> Bytes {
    let at = stored.log_id().as_ref().map(position).unwrap_or_default();
    Bytes::from(membership_bytes(stored.membership(), at).encode_to_vec())
}

pub(crate) fn decode_stored(bytes: &[u8]) -> Result<Stored, CommandError> {
    let bytes = MembershipBytes::decode(bytes)
        .map_err(|source| CommandError::Decode { index: 0, source })?;
    let at = LogPosition {
        term: bytes.term,
        index: bytes.index,
    };
    Ok(StoredMembership::new(log_id(at), membership(bytes)?))
}

/// What a directory made from a snapshot holds under `RAFT_MEMBERSHIP`, so that its members begin as a group.
pub fn restored_membership(voters: impl IntoIterator<Item = u64>, at: LogPosition) -> Bytes {
    let members: Nodes = voters
        .into_iter()
        .map(|id| (id, PeerNode::default()))
        .collect();
    encode_stored(&StoredMembership::new(
        log_id(at),
        Membership::from(members),
    ))
}

/// The payload of an entry after which `member_id` alone votes.
pub(crate) fn alone(member_id: u64, node: PeerNode) -> Bytes {
    let members = Nodes::from([(member_id, node)]);
    let membership = Membership::from(members);
    Bytes::from(membership_bytes(&membership, LogPosition::default()).encode_to_vec())
}

pub(crate) fn encode_vote(vote: &Vote) -> WalVote {
    WalVote {
        term: vote.leader_id.term,
        voted_for: Some(vote.leader_id.voted_for),
        committed: vote.committed,
    }
}

pub(crate) fn decode_vote(vote: &WalVote) -> Vote {
    Vote {
        leader_id: LeaderId {
            term: vote.term,
            voted_for: vote.voted_for.unwrap_or_default(),
        },
        committed: vote.committed,
    }
}

#[cfg(test)]
mod tests {
    use ballast_api::etcdserverpb::PutRequest;

    use super::*;

    fn entry(payload: EntryPayload<Command, u64, PeerNode>) -> Entry {
        Entry {
            log_id: log_id(LogPosition { term: 3, index: 7 }).unwrap(),
            payload,
        }
    }

    #[test]
    fn what_a_newer_release_wrote_is_refused() {
        let at = LogPosition { term: 3, index: 7 };
        let refused = |kind, payload: &'static [u8]| {
            let payload = Bytes::from_static(payload);
            let entry = WalEntry {
                position: at,
                kind,
                payload,
            };
            decode_entry(&entry).unwrap_err()
        };
        assert!(matches!(
            refused(0x11, b""),
            CommandError::Format {
                index: 7,
                format: 1
            }
        ));
        assert!(matches!(
            refused(9, b""),
            CommandError::Kind { index: 7, kind: 9 }
        ));
        // Field 2047, with the number 1.
        assert!(matches!(
            refused(KIND_REQUEST, &[0xf8, 0x7f, 1]),
            CommandError::Unknown { index: 7 }
        ));
    }

    #[test]
    fn entries_come_back_and_requests_are_etcds_bytes() {
        let request = InternalRaftRequest {
            put: Some(PutRequest {
                key: "k".into(),
                value: "v".into(),
                ..PutRequest::default()
            }),
            ..InternalRaftRequest::default()
        };
        let bytes = encode_entry(&entry(EntryPayload::Normal(Command(Arc::new(request)))));
        assert_eq!(bytes.position, LogPosition { term: 3, index: 7 });
        // Field 4 of the request, then key and value.
        assert_eq!(&bytes.payload[..], b"\x22\x06\x0a\x01k\x12\x01v");
        let back = decode_entry(&bytes).unwrap();
        assert_eq!(encode_entry(&back), bytes);

        let members = Membership::new(
            vec![BTreeSet::from([1, 2]), BTreeSet::from([2, 3])],
            [1, 2, 3, 4]
                .map(|id| (id, PeerNode::at(vec![format!("http://h:{id}")])))
                .into_iter()
                .collect::<Nodes>(),
        )
        .unwrap();
        let bytes = encode_entry(&entry(EntryPayload::Membership(members.clone())));
        match decode_entry(&bytes).unwrap().payload {
            EntryPayload::Membership(back) => assert_eq!(back, members),
            other => panic!("{other:?}"),
        }
        let stored = StoredMembership::new(log_id(LogPosition { term: 3, index: 7 }), members);
        assert_eq!(decode_stored(&encode_stored(&stored)).unwrap(), stored);
    }

    #[test]
    fn an_entry_of_a_newer_version_is_an_error() {
        let mut bytes = encode_entry(&entry(EntryPayload::Blank));
        decode_entry(&bytes).unwrap();
        bytes.kind = 7;
        assert!(matches!(
            decode_entry(&bytes),
            Err(CommandError::Kind { index: 7, kind: 7 })
        ));
    }
}
