//! What clients did and saw, as it is written to a history's file for `e2e/go/linearize`, and as the judges here read it.
//!
//! Times are nanoseconds since the run began, by the harness's one clock. A request whose outcome nobody knows has no time of return.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use ballast_api::mvccpb::{self, event::EventType};
use serde::{Deserialize, Serialize};

use crate::wait;

/// The run's clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    pub fn start() -> Self {
        Self(wait::now())
    }

    pub fn now_ns(&self) -> i64 {
        self.0.elapsed().as_nanos() as i64
    }
}

/// As the times of a history are counted.
pub fn nanoseconds(time: Duration) -> i64 {
    time.as_nanos() as i64
}

/// A key and all that a store says of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kv {
    pub key: String,
    pub value: String,
    pub create: i64,
    pub modified: i64,
    pub version: i64,
    pub lease: i64,
}

impl Kv {
    pub fn of(kv: &mvccpb::KeyValue) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            key: text(&kv.key),
            value: text(&kv.value),
            create: kv.create_revision,
            modified: kv.mod_revision,
            version: kv.version,
            lease: kv.lease,
        }
    }

    pub fn all(kvs: &[mvccpb::KeyValue]) -> Vec<Self> {
        kvs.iter().map(Self::of).collect()
    }
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Put,
    Delete,
    /// A linearizable read of a key or a range.
    Read,
    /// A serializable one. The judge of the others does not see it.
    Stale,
    /// If `key` was last changed at `compare`: put it; else read it.
    Cas,
    /// The same, deleting.
    CasDelete,
    /// Puts `key` and deletes `other` in one transaction.
    Pair,
    Grant,
    Revoke,
}

/// One request, and its answer if there was one.
#[expect(
    clippy::struct_excessive_bools,
    reason = "a flat record, as a line of a file is"
)]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Op {
    pub client: usize,
    pub member: usize,
    pub kind: Kind,
    pub key: String,
    /// Of a range, its end.
    pub end: String,
    /// The other key of a pair.
    pub other: String,
    /// Unlike all other values.
    pub value: String,
    pub lease: i64,
    pub compare: i64,
    /// The keys before the change are asked for.
    pub prev: bool,
    pub call: i64,
    /// When it was answered; meaningless unless `known`.
    pub back: i64,
    pub known: bool,
    /// The answer was that there is no such lease.
    pub no_lease: bool,
    /// That of the answer's header.
    pub revision: i64,
    /// A comparison held.
    pub succeeded: bool,
    pub deleted: i64,
    pub kvs: Vec<Kv>,
}

impl Op {
    pub fn new(client: usize, member: usize, kind: Kind, key: &str) -> Self {
        Self {
            client,
            member,
            kind,
            key: key.to_owned(),
            end: String::new(),
            other: String::new(),
            value: String::new(),
            lease: 0,
            compare: 0,
            prev: false,
            call: 0,
            back: 0,
            known: false,
            no_lease: false,
            revision: 0,
            succeeded: false,
            deleted: 0,
            kvs: Vec::new(),
        }
    }

    /// Whether it can have changed the store though nobody was told.
    pub fn may_write_unseen(&self) -> bool {
        !self.known && !matches!(self.kind, Kind::Read | Kind::Stale)
    }
}

/// One key's change, as a watch tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub deleted: bool,
    /// Of a deletion, only key and revision.
    pub kv: Kv,
    pub prev: Option<Kv>,
}

impl Event {
    pub fn of(event: &mvccpb::Event) -> Result<Self> {
        Ok(Self {
            deleted: event.r#type == EventType::Delete as i32,
            kv: Kv::of(event.kv.as_ref().context("an event has a key")?),
            prev: event.prev_kv.as_ref().map(Kv::of),
        })
    }
}

/// A stretch of the run that begins and ends in peace.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Window {
    pub number: usize,
    pub fault: String,
    /// The state before it.
    pub revision: i64,
    pub kvs: Vec<Kv>,
    /// Those of earlier windows whose outcome is unknown come first.
    pub ops: Vec<Op>,
    pub events: Vec<Event>,
    pub begun: i64,
    pub ended: i64,
}
