//! The reference model: what a store that does as etcd does must answer to a script, worked out from a naive history.
//!
//! Every state there ever was is kept whole, every change in a list; nothing is indexed, shared or forgotten. What a compaction removes is
//! only marked, since HashKV needs to know it. On etcd the model is itself under test: `make diff` compares both servers with it.
//! Not here: watches (`watch`), transactions and reads (`kv`), hashes (`hash`).
//!
//! etcd: server/etcdserver/txn, server/storage/mvcc, server/lease, by what they do.

mod check;
mod hash;
mod kv;
mod watch;

use std::collections::BTreeMap;

use ballast_api::error::Error;
use ballast_api::mvccpb::KeyValue;
use ballast_api::{API_VERSION, CLUSTER_VERSION, etcdserverpb as pb};
use bytes::Bytes;
use prost::Message as _;

use super::perform::{self, Answer, answered};
use super::script::{Op, REQUEST_BYTES_MAX};
use super::watch::Plan;

/// gRPC's room for what is around a request.
const MESSAGE_OVERHEAD_BYTES: usize = 512 * 1024;
const LEASE_TTL_SECS_MIN: i64 = 2;
const LEASE_TTL_SECS_MAX: i64 = 9_000_000_000;
const QUOTA_BYTES: i64 = 2 * 1024 * 1024 * 1024;

/// All keys at one revision.
type State = BTreeMap<Bytes, KeyValue>;
type Refused<T> = Result<T, tonic::Status>;

/// One change of one key.
#[derive(Clone, Debug)]
struct Change {
    main: i64,
    sub: i64,
    deletion: bool,
    /// Of a deletion only the key, and the revision as events have it.
    kv: KeyValue,
    /// By a compaction.
    removed: bool,
}

/// What a store must hold.
#[derive(Debug)]
pub struct Model {
    /// By revision; there is no revision 0, and nothing at 1.
    states: Vec<State>,
    changes: Vec<Change>,
    compacted: i64,
    /// Seconds granted, by id.
    leases: BTreeMap<i64, i64>,
    hashes: hash::Hashes,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            states: vec![State::new(), State::new()],
            changes: Vec::new(),
            compacted: -1,
            leases: BTreeMap::new(),
            hashes: hash::Hashes::default(),
        }
    }
}

/// A transaction, or a write of its own, under way.
struct Work {
    state: State,
    changes: Vec<Change>,
    head: i64,
}

impl Work {
    fn revision(&self) -> i64 {
        self.head + i64::from(!self.changes.is_empty())
    }
}

impl Model {
    pub fn head(&self) -> i64 {
        self.states.len() as i64 - 1
    }

    /// -1 when nothing was.
    pub fn compacted(&self) -> i64 {
        self.compacted
    }

    /// The revision of the last deletion, or the head.
    pub fn last_deletion(&self) -> i64 {
        let mut changes = self.changes.iter().rev();
        let last = changes.find(|change| change.deletion);
        last.map_or(self.head(), |change| change.main)
    }

    pub fn current(&self, key: &[u8]) -> Option<KeyValue> {
        self.state().get(key).cloned()
    }

    /// One of the leases, if there are any.
    pub fn any_lease(&self, at: usize) -> Option<i64> {
        let ids: Vec<i64> = self.leases.keys().copied().collect();
        (!ids.is_empty()).then(|| ids[at % ids.len()])
    }

    pub fn lease_ids(&self) -> impl Iterator<Item = i64> {
        self.leases.keys().copied()
    }

    /// How many keys a range goes through.
    pub fn keys_in(&self, request: &pb::RangeRequest) -> usize {
        let revision = request.revision.min(self.head());
        let state = &self.states[if revision <= 0 { self.head() } else { revision } as usize];
        kv::within(state, &request.key, &request.range_end).count()
    }

    /// Whether every server must answer the same to HashKV there: after a restart a member may or may not know a compaction's hash.
    pub fn hash_is_certain(&self, revision: i64) -> bool {
        self.hashes.certain(revision)
    }

    fn state(&self) -> &State {
        self.states.last().expect("there is always one")
    }

    fn header(&self) -> Option<pb::ResponseHeader> {
        header(self.head())
    }

    /// What the operation answers, and what it leaves.
    pub fn answer(&mut self, op: &Op) -> (Answer, Plan) {
        if let Op::Watch(steps) = op {
            return self.watch(steps);
        }
        let answer = self.unary(op);
        let answer = answer.unwrap_or_else(|status| Answer::refused(&status));
        (answer, Plan::default())
    }

    fn unary(&mut self, op: &Op) -> Refused<Answer> {
        fits(op)?;
        Ok(match op {
            Op::Range(request) => answered(self.range(request)?),
            Op::RangeStream(request) => answered(self.range_stream(request)?),
            Op::Put(request) => answered(self.put(request)?),
            Op::Delete(request) => answered(self.delete(request)?),
            Op::Txn(request) => answered(self.txn(request)?),
            Op::Compact(request) => answered(self.compact(request.revision)?),
            Op::Grant(request) => answered(self.grant(request)?),
            Op::ShortLease(request) => {
                let response = self.grant(request)?;
                self.leases.remove(&request.id);
                answered(response)
            }
            Op::Revoke(request) => answered(self.revoke(request.id)?),
            Op::KeepAlive(ids) => {
                let texts = ids.iter().map(|&id| {
                    let ttl = self.leases.get(&id).copied().unwrap_or(0);
                    let header = self.header();
                    answered(pb::LeaseKeepAliveResponse { header, id, ttl }).text
                });
                Answer::text(texts.collect::<Vec<_>>().join("\n    "))
            }
            Op::TimeToLive(request) => answered(self.time_to_live(request)),
            Op::Leases => answered(pb::LeaseLeasesResponse {
                header: self.header(),
                leases: self
                    .leases
                    .keys()
                    .map(|&id| pb::LeaseStatus { id })
                    .collect(),
            }),
            Op::HashKv(request) => answered(self.hash_kv(request.revision)?),
            Op::Hash => answered(pb::HashResponse {
                header: self.header(),
                hash: 0,
            }),
            Op::Status => answered(self.status()),
            Op::Alarms(_) => answered(pb::AlarmResponse {
                header: self.header(),
                alarms: Vec::new(),
            }),
            Op::Snapshot => perform::snapshot_text(&pb::SnapshotResponse {
                version: CLUSTER_VERSION.to_owned(),
                ..pb::SnapshotResponse::default()
            }),
            // Without a header.
            Op::Defragment => answered(pb::DefragmentResponse::default()),
            Op::Members(_) => answered(members()),
            Op::Downgrade(target) => answered(self.downgrade(target)?),
            Op::Restart { .. } => {
                self.hashes.forget();
                Answer::text(String::new())
            }
            Op::Watch(_) => unreachable!("watches are answered apart"),
        })
    }

    fn grant(&mut self, request: &pb::LeaseGrantRequest) -> Refused<pb::LeaseGrantResponse> {
        if request.ttl > LEASE_TTL_SECS_MAX {
            return Err(Error::LeaseTTLTooLarge.into());
        }
        if self.leases.contains_key(&request.id) {
            return Err(Error::LeaseExist.into());
        }
        let ttl = request.ttl.max(LEASE_TTL_SECS_MIN);
        self.leases.insert(request.id, ttl);
        Ok(pb::LeaseGrantResponse {
            header: self.header(),
            id: request.id,
            ttl,
            error: String::new(),
        })
    }

    fn revoke(&mut self, id: i64) -> Refused<pb::LeaseRevokeResponse> {
        if self.leases.remove(&id).is_none() {
            return Err(Error::LeaseNotFound.into());
        }
        let mut work = self.work();
        for key in self.keys_of(id) {
            work.delete(&key, &[]);
        }
        self.commit(work);
        Ok(pb::LeaseRevokeResponse {
            header: self.header(),
        })
    }

    fn keys_of(&self, lease: i64) -> Vec<Bytes> {
        let all = self.state().iter();
        all.filter(|(_, kv)| kv.lease == lease)
            .map(|(key, _)| key.clone())
            .collect()
    }

    fn time_to_live(&self, request: &pb::LeaseTimeToLiveRequest) -> pb::LeaseTimeToLiveResponse {
        let granted = self.leases.get(&request.id);
        pb::LeaseTimeToLiveResponse {
            header: self.header(),
            id: request.id,
            ttl: granted.map_or(-1, |_| 0),
            granted_ttl: granted.copied().unwrap_or(0),
            keys: if request.keys && granted.is_some() {
                self.keys_of(request.id)
            } else {
                Vec::new()
            },
        }
    }

    fn compact(&mut self, revision: i64) -> Refused<pb::CompactionResponse> {
        if revision <= self.compacted {
            return Err(Error::Compacted.into());
        }
        if revision > self.head() {
            return Err(Error::FutureRev.into());
        }
        let before = std::mem::replace(&mut self.compacted, revision);
        self.remove_compacted(before);
        Ok(pb::CompactionResponse {
            header: self.header(),
        })
    }

    fn status(&self) -> pb::StatusResponse {
        pb::StatusResponse {
            header: self.header(),
            version: API_VERSION.to_owned(),
            db_size: 1,
            leader: 1,
            db_size_in_use: 1,
            storage_version: CLUSTER_VERSION.to_owned(),
            db_size_quota: QUOTA_BYTES,
            downgrade_info: Some(pb::DowngradeInfo::default()),
            ..pb::StatusResponse::default()
        }
    }

    /// One minor version down, from 3.7.
    fn downgrade(&self, target: &str) -> Refused<pb::DowngradeResponse> {
        match target {
            "3.6" | "3.6.0" => Ok(pb::DowngradeResponse {
                header: self.header(),
                version: "3.7".to_owned(),
            }),
            "" | "three" => Err(Error::WrongDowngradeVersionFormat.into()),
            _ => Err(Error::InvalidDowngradeTargetVersion.into()),
        }
    }
}

#[expect(clippy::unnecessary_wraps, reason = "messages hold it so")]
fn header(revision: i64) -> Option<pb::ResponseHeader> {
    Some(pb::ResponseHeader {
        revision,
        ..pb::ResponseHeader::default()
    })
}

/// The list of a cluster of one, without the revision.
fn members() -> pb::MemberListResponse {
    pb::MemberListResponse {
        header: header(0),
        members: vec![pb::Member {
            id: 1,
            name: "default".to_owned(),
            peer_ur_ls: vec!["http://127.0.0.1:0".to_owned()],
            client_ur_ls: vec!["http://127.0.0.1:0".to_owned()],
            is_learner: false,
        }],
    }
}

/// The bounds of messages and of requests; scripts stay away from where one byte would matter.
fn fits(op: &Op) -> Refused<()> {
    let bytes = match op {
        Op::Put(request) => request.encoded_len(),
        Op::Txn(request) => request.encoded_len(),
        _ => return Ok(()),
    };
    let message_max = REQUEST_BYTES_MAX + MESSAGE_OVERHEAD_BYTES;
    if bytes > message_max {
        return Err(tonic::Status::resource_exhausted(format!(
            "grpc: received message larger than max ({bytes} vs. {message_max})"
        )));
    }
    if bytes > REQUEST_BYTES_MAX {
        // What is wrong in itself is told first.
        match op {
            Op::Put(request) => check::put(request)?,
            Op::Txn(request) => check::txn(request)?,
            _ => {}
        }
        return Err(Error::RequestTooLarge.into());
    }
    Ok(())
}
