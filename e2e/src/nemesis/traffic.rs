//! Clients: a mixed load on few keys over all members, every request recorded with its times and its answer.
//!
//! Promises: a value is never put twice; a lease belongs to one client, which uses it only after its grant was answered; leases that are
//! left to run out hold keys of `ttl/` only. A request that was not answered, or with an error that does not say what happened, is of unknown
//! outcome; a read then is left out.
//! Not here: watchers (`watching.rs`), what is done to the members meanwhile (`faults.rs`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use ballast_api::etcdserverpb as pb;
use pb::request_op::Request;
use pb::response_op::Response;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use super::record::{Clock, Kind, Kv, Op, nanoseconds};
use crate::store_server::Client;

const CLIENTS: usize = 9;
const KEYS: u32 = 10;
pub const PREFIX: &str = "k/";
pub const PREFIX_END: &str = "k0";
/// What keys begin with whose leases are left to run out; the model knows it too.
pub const EXPIRING: &str = "ttl/";
/// A request has failed by then.
const DEADLINE: Duration = Duration::from_millis(2_500);
const PAUSE_MS: std::ops::Range<u64> = 10..60;
/// Between requests of one that was not answered.
const FAILED_PAUSE_MS: std::ops::Range<u64> = 50..150;
/// Never runs out in a run.
const LONG_TTL_SECS: i64 = 36_000;
const SHORT_TTL_SECS: i64 = 3;
const KEEPALIVE_EVERY: Duration = Duration::from_millis(400);
/// Requests to another member than its own, after its own did not answer.
const AWAY: u32 = 8;

/// A lease that is left to run out, as its owner knows it.
#[derive(Clone, Debug)]
pub struct Expiring {
    pub key: String,
    /// It cannot run out before this.
    pub not_before: i64,
}

/// What all clients of a window share.
#[derive(Debug)]
pub struct Shared {
    pub clock: Clock,
    pub stop: AtomicBool,
    /// The highest revision anybody was told.
    pub head: AtomicI64,
    /// Makes values and leases unlike all others of the run.
    pub next: Arc<AtomicU64>,
    ops: Mutex<Vec<Op>>,
    expiring: Mutex<Vec<Expiring>>,
    counts: Mutex<BTreeMap<(Kind, bool), u64>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub fn new(clock: Clock, next: Arc<AtomicU64>, head: i64) -> Self {
        Self {
            clock,
            stop: AtomicBool::new(false),
            head: AtomicI64::new(head),
            next,
            ops: Mutex::default(),
            expiring: Mutex::default(),
            counts: Mutex::default(),
        }
    }

    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn unique(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn record(&self, op: Op) {
        *lock(&self.counts).entry((op.kind, op.known)).or_default() += 1;
        if op.known {
            self.head.fetch_max(op.revision, Ordering::AcqRel);
        }
        if op.known || op.may_write_unseen() {
            lock(&self.ops).push(op);
        }
    }

    /// Everything recorded so far.
    pub fn take(&self) -> (Vec<Op>, Vec<Expiring>) {
        (
            std::mem::take(&mut *lock(&self.ops)),
            std::mem::take(&mut *lock(&self.expiring)),
        )
    }

    /// Requests by kind and whether their outcome is known.
    pub fn counts(&self) -> BTreeMap<(Kind, bool), u64> {
        lock(&self.counts).clone()
    }
}

/// Lets all clients run until `stop` is set; returns when the last has ended.
pub async fn run(shared: &Arc<Shared>, members: &[Client], seed: u64) {
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let worker = Worker {
            shared: Arc::clone(shared),
            members: members.to_vec(),
            number,
            random: StdRng::seed_from_u64(seed ^ (number as u64 + 1)),
            lease: None,
            away: 0,
            at: number % members.len(),
            seen: BTreeMap::new(),
        };
        tasks.spawn(worker.run());
    }
    for number in 0..2 {
        let keeper = Keeper {
            shared: Arc::clone(shared),
            members: members.to_vec(),
            number: CLIENTS + number,
            random: StdRng::seed_from_u64(seed ^ (0x1ea5e + number as u64)),
            keeps: number == 0,
        };
        tasks.spawn(keeper.run());
    }
    while tasks.join_next().await.is_some() {}
}

/// One client.
struct Worker {
    shared: Arc<Shared>,
    members: Vec<Client>,
    number: usize,
    random: StdRng,
    lease: Option<i64>,
    /// Requests still to be sent to `at`, which is not its own member.
    away: u32,
    at: usize,
    /// When keys were last changed, as far as it knows: most comparisons hold.
    seen: BTreeMap<String, i64>,
}

impl Worker {
    async fn run(mut self) {
        while !self.shared.stopped() {
            let answered = self.once().await;
            let pause = if answered { PAUSE_MS } else { FAILED_PAUSE_MS };
            if !answered {
                self.at = self.random.random_range(0..self.members.len());
                self.away = AWAY;
            } else if self.away > 0 {
                self.away -= 1;
                if self.away == 0 {
                    self.at = self.number % self.members.len();
                }
            }
            let pause = self.random.random_range(pause);
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }

    fn key(&mut self) -> String {
        format!("{PREFIX}{}", self.random.random_range(0..KEYS))
    }

    fn next_op(&mut self) -> Op {
        let key = self.key();
        let kind = match self.random.random_range(0..100) {
            0..24 => Kind::Put,
            24..32 => Kind::Delete,
            32..56 => Kind::Read,
            56..66 => Kind::Stale,
            66..80 => Kind::Cas,
            80..84 => Kind::CasDelete,
            84..90 => Kind::Pair,
            _ if self.lease.is_none() => Kind::Grant,
            90..95 => Kind::Put,
            _ => Kind::Revoke,
        };
        let mut op = Op::new(self.number, self.at, kind, &key);
        op.value = format!("v{}", self.shared.unique());
        match kind {
            Kind::Put => {
                op.prev = self.random.random_bool(0.3);
                if self.random.random_bool(0.3) {
                    op.lease = self.lease.unwrap_or(0);
                }
            }
            Kind::Delete => op.prev = self.random.random_bool(0.5),
            Kind::Read | Kind::Stale => {
                if self.random.random_bool(0.4) {
                    PREFIX.clone_into(&mut op.key);
                    PREFIX_END.clone_into(&mut op.end);
                }
            }
            Kind::Cas | Kind::CasDelete => {
                op.compare = self.seen.get(&key).copied().unwrap_or(0);
            }
            Kind::Pair => {
                while op.other.is_empty() || op.other == key {
                    op.other = self.key();
                }
            }
            Kind::Grant => {
                op.key = String::new();
                op.lease = self.shared.unique() as i64 + 1;
            }
            Kind::Revoke => {
                op.key = String::new();
                op.lease = self.lease.unwrap_or(0);
            }
        }
        op
    }

    /// Whether it was answered.
    async fn once(&mut self) -> bool {
        let mut op = self.next_op();
        let mut client = self.members[self.at].clone();
        op.call = self.shared.clock.now_ns();
        let answer = tokio::time::timeout(DEADLINE, send(&mut client, &mut op)).await;
        op.back = self.shared.clock.now_ns();
        op.known = matches!(answer, Ok(Ok(())));
        let no_lease = matches!(&answer, Ok(Err(status)) if status.code() == Code::NotFound);
        if no_lease && op.lease != 0 {
            op.known = true;
            op.no_lease = true;
        }
        match op.kind {
            Kind::Grant if op.known => self.lease = Some(op.lease),
            Kind::Revoke => self.lease = None,
            _ => {}
        }
        let lasting = match op.kind {
            Kind::Put | Kind::Pair => op.known,
            Kind::Cas => op.known && op.succeeded,
            _ => false,
        };
        if lasting {
            self.seen.insert(op.key.clone(), op.revision);
        }
        for kv in &op.kvs {
            if matches!(op.kind, Kind::Read | Kind::Cas | Kind::CasDelete) {
                self.seen.insert(kv.key.clone(), kv.modified);
            }
        }
        if op.known && op.kvs.is_empty() && matches!(op.kind, Kind::Read | Kind::Cas) {
            self.seen.remove(&op.key);
        }
        let known = op.known;
        self.shared.record(op);
        known
    }
}

fn put(key: &str, value: &str, lease: i64, prev_kv: bool) -> pb::PutRequest {
    pb::PutRequest {
        key: key.to_owned().into(),
        value: value.to_owned().into(),
        lease,
        prev_kv,
        ..pb::PutRequest::default()
    }
}

fn delete(key: &str, prev_kv: bool) -> pb::DeleteRangeRequest {
    pb::DeleteRangeRequest {
        key: key.to_owned().into(),
        prev_kv,
        ..pb::DeleteRangeRequest::default()
    }
}

fn read(op: &Op) -> pb::RangeRequest {
    pb::RangeRequest {
        key: op.key.clone().into(),
        range_end: op.end.clone().into(),
        serializable: op.kind == Kind::Stale,
        ..pb::RangeRequest::default()
    }
}

fn revision(header: Option<pb::ResponseHeader>) -> i64 {
    header.map_or(0, |header| header.revision)
}

async fn send(client: &mut Client, op: &mut Op) -> Result<(), tonic::Status> {
    match op.kind {
        Kind::Put => {
            let request = put(&op.key, &op.value, op.lease, op.prev);
            let answer = client.kv.put(request).await?.into_inner();
            op.revision = revision(answer.header);
            op.kvs = answer.prev_kv.iter().map(Kv::of).collect();
        }
        Kind::Delete => {
            let answer = client.kv.delete_range(delete(&op.key, op.prev)).await?;
            let answer = answer.into_inner();
            op.revision = revision(answer.header);
            op.deleted = answer.deleted;
            op.kvs = Kv::all(&answer.prev_kvs);
        }
        Kind::Read | Kind::Stale => {
            let answer = client.kv.range(read(op)).await?.into_inner();
            op.revision = revision(answer.header);
            op.kvs = Kv::all(&answer.kvs);
        }
        Kind::Cas | Kind::CasDelete | Kind::Pair => {
            let answer = client.kv.txn(txn(op)).await?.into_inner();
            op.revision = revision(answer.header);
            op.succeeded = answer.succeeded;
            for response in answer.responses {
                match response.response {
                    Some(Response::ResponseRange(range)) => op.kvs = Kv::all(&range.kvs),
                    Some(Response::ResponseDeleteRange(deleted)) => op.deleted = deleted.deleted,
                    _ => {}
                }
            }
        }
        Kind::Grant => {
            let request = pb::LeaseGrantRequest {
                ttl: LONG_TTL_SECS,
                id: op.lease,
            };
            client.lease.lease_grant(request).await?;
        }
        Kind::Revoke => {
            let request = pb::LeaseRevokeRequest { id: op.lease };
            client.lease.lease_revoke(request).await?;
        }
    }
    Ok(())
}

fn txn(op: &Op) -> pb::TxnRequest {
    let request = |request| pb::RequestOp {
        request: Some(request),
    };
    let puts = Request::RequestPut(put(&op.key, &op.value, 0, false));
    let compare = pb::Compare {
        result: pb::compare::CompareResult::Equal.into(),
        target: pb::compare::CompareTarget::Mod.into(),
        key: op.key.clone().into(),
        target_union: Some(pb::compare::TargetUnion::ModRevision(op.compare)),
        ..pb::Compare::default()
    };
    let get = Request::RequestRange(pb::RangeRequest {
        key: op.key.clone().into(),
        ..pb::RangeRequest::default()
    });
    let (compare, success, failure) = match op.kind {
        Kind::Pair => (
            Vec::new(),
            vec![
                request(puts),
                request(Request::RequestDeleteRange(delete(&op.other, false))),
            ],
            Vec::new(),
        ),
        Kind::CasDelete => (
            vec![compare],
            vec![request(Request::RequestDeleteRange(delete(&op.key, false)))],
            vec![request(get)],
        ),
        _ => (vec![compare], vec![request(puts)], vec![request(get)]),
    };
    pb::TxnRequest {
        compare,
        success,
        failure,
    }
}

/// Holds leases of few seconds, each with a key: kept alive through all members in turn, or not at all.
struct Keeper {
    shared: Arc<Shared>,
    members: Vec<Client>,
    number: usize,
    random: StdRng,
    keeps: bool,
}

impl Keeper {
    async fn run(mut self) {
        while !self.shared.stopped() {
            if let Some(expiring) = self.lease().await {
                lock(&self.shared.expiring).push(expiring);
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    fn member(&mut self) -> usize {
        self.random.random_range(0..self.members.len())
    }

    async fn lease(&mut self) -> Option<Expiring> {
        let at = self.member();
        let mut client = self.members[at].clone();
        let mut op = Op::new(self.number, at, Kind::Grant, "");
        op.lease = self.shared.unique() as i64 + 1;
        let id = op.lease;
        op.call = self.shared.clock.now_ns();
        let request = pb::LeaseGrantRequest {
            ttl: SHORT_TTL_SECS,
            id,
        };
        let granted = tokio::time::timeout(DEADLINE, client.lease.lease_grant(request)).await;
        op.back = self.shared.clock.now_ns();
        op.known = matches!(granted, Ok(Ok(_)));
        let mut not_before = op.call + nanoseconds(ttl(SHORT_TTL_SECS));
        self.shared.record(op);
        let Ok(Ok(_)) = granted else { return None };

        let key = format!("{EXPIRING}{id}");
        let mut op = Op::new(self.number, at, Kind::Put, &key);
        op.value = format!("v{}", self.shared.unique());
        op.lease = id;
        op.call = self.shared.clock.now_ns();
        let answer = tokio::time::timeout(DEADLINE, send(&mut client, &mut op)).await;
        op.back = self.shared.clock.now_ns();
        op.known = matches!(answer, Ok(Ok(())));
        // When it ran out before the put came, nothing was put.
        let ran_out = matches!(&answer, Ok(Err(status)) if status.code() == Code::NotFound);
        if !ran_out {
            self.shared.record(op);
        }
        while self.keeps && !self.shared.stopped() {
            tokio::time::sleep(KEEPALIVE_EVERY).await;
            let asked = self.shared.clock.now_ns();
            let at = self.member();
            let mut client = self.members[at].clone();
            match tokio::time::timeout(DEADLINE, keep_alive(&mut client, id)).await {
                Ok(Ok(0)) => break,
                Ok(Ok(secs)) => not_before = asked + nanoseconds(ttl(secs)),
                _ => {}
            }
        }
        Some(Expiring { key, not_before })
    }
}

fn ttl(secs: i64) -> Duration {
    Duration::from_secs(secs.unsigned_abs())
}

/// The answered time to live.
pub async fn keep_alive(client: &mut Client, id: i64) -> anyhow::Result<i64> {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    sender.send(pb::LeaseKeepAliveRequest { id }).await?;
    let stream = client.lease.lease_keep_alive(ReceiverStream::new(receiver));
    let answer = stream.await?.into_inner().message().await?;
    Ok(answer.context("the stream ended")?.ttl)
}
