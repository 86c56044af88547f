//! What clients asked and were told, and whether one store could have told them that.
//!
//! Every answer names a revision of the whole store, so the order in which everything happened is known, and two things remain to be shown:
//!
//!     real time  an answer's revision is not before one that anybody was told before the request was made; a write's is behind it
//!     truth      at the end the store's events are exactly what writers were told, and what readers saw is what was there at their revision
//!
//! A write whose outcome nobody was told may be among the events or not, once, and behind what was known when it was asked for.

use std::collections::{BTreeMap, BTreeSet};

use ballast_storage::mvcc::{Event, EventKind};
use parking_lot::Mutex;

use crate::findings::Findings;

#[derive(Clone, Debug)]
pub(crate) enum Asked {
    Put {
        key: String,
        value: String,
    },
    Get {
        key: String,
    },
    /// A put if the key is at this revision still, else a read.
    Swap {
        key: String,
        at: i64,
        value: String,
    },
    Delete {
        key: String,
    },
}

impl Asked {
    fn key(&self) -> &str {
        match self {
            Asked::Put { key, .. }
            | Asked::Get { key }
            | Asked::Swap { key, .. }
            | Asked::Delete { key } => key,
        }
    }

    /// Whether it can have been this that wrote a value there; an empty one is a deletion.
    fn could_write(&self, happened: &Happened, revision: i64, key: &str, value: &str) -> bool {
        let before = || value_at(happened, key, revision - 1).map_or(0, |(at, _)| at);
        self.key() == key
            && match self {
                Asked::Put { value: own, .. } => own == value,
                Asked::Swap { value: own, at, .. } => own == value && *at == before(),
                Asked::Delete { .. } => value.is_empty() && before() != 0,
                Asked::Get { .. } => false,
            }
    }
}

/// Key and value by revision.
type Happened = BTreeMap<i64, (String, String)>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// At this revision.
    Wrote(i64),
    /// At this revision the key had this value, of that revision.
    Read(i64, Option<(i64, String)>),
    /// The request may have been carried out, or may yet be.
    Nothing,
}

#[derive(Debug)]
struct Op {
    asked: Asked,
    /// The greatest revision that anybody had been told.
    known: i64,
    told: Option<Told>,
}

#[derive(Debug, Default)]
pub(crate) struct History(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    ops: Vec<Op>,
    known: i64,
}

impl History {
    pub(crate) fn begin(&self, asked: Asked) -> usize {
        let mut state = self.0.lock();
        let known = state.known;
        state.ops.push(Op {
            asked,
            known,
            told: None,
        });
        state.ops.len() - 1
    }

    pub(crate) fn end(&self, number: usize, told: Told, findings: &Findings) {
        let mut state = self.0.lock();
        let op = &mut state.ops[number];
        let (in_time, revision) = match told {
            Told::Wrote(revision) => (revision > op.known, revision),
            Told::Read(revision, _) => (revision >= op.known, revision),
            Told::Nothing => (true, 0),
        };
        let line = format!("op {number} {:?}: {told:?}", op.asked);
        findings.note(&line);
        if !in_time {
            findings.violated(format!("{line}, and {} was known before", op.known));
        }
        op.told = Some(told);
        state.known = state.known.max(revision);
    }

    /// Requests, and those of them whose outcome is known.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.0.lock();
        let known = state
            .ops
            .iter()
            .filter(|op| !matches!(op.told, None | Some(Told::Nothing)));
        (state.ops.len(), known.count())
    }

    /// Holds what was told against all that happened.
    pub(crate) fn judge(&self, events: &[Event], findings: &Findings) {
        let state = self.0.lock();
        let happened: Happened = events
            .iter()
            .map(|event| (event.kv.mod_revision, pair(event)))
            .collect();
        if happened.len() != events.len() {
            findings.violated("two events have the same revision");
        }
        let mut written = BTreeSet::new();
        for (revision, (key, value)) in &happened {
            if !value.is_empty() && !written.insert(value) {
                findings.violated(format!("{value} was written twice, at {revision} again"));
            }
            let asked_for = state.ops.iter().any(|op| {
                op.asked.could_write(&happened, *revision, key, value)
                    && op.known < *revision
                    && !matches!(op.told, Some(Told::Wrote(other)) if other != *revision)
            });
            if !asked_for {
                findings.violated(format!("nobody wrote {value:?} to {key} at {revision}"));
            }
        }
        for (number, op) in state.ops.iter().enumerate() {
            let key = op.asked.key();
            let is_true = match &op.told {
                Some(Told::Wrote(revision)) => {
                    let event = happened.get(revision);
                    event.is_some_and(|(k, v)| op.asked.could_write(&happened, *revision, k, v))
                }
                Some(Told::Read(revision, found)) => *found == value_at(&happened, key, *revision),
                Some(Told::Nothing) | None => true,
            };
            if !is_true {
                findings.violated(format!("op {number} is not what happened: {op:?}"));
            }
        }
    }
}

fn pair(event: &Event) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let value = match event.kind {
        EventKind::Put => text(&event.kv.value),
        EventKind::Delete => String::new(),
    };
    (text(&event.kv.key), value)
}

fn value_at(happened: &Happened, key: &str, revision: i64) -> Option<(i64, String)> {
    let (at, (_, value)) = happened
        .range(..=revision)
        .rev()
        .find(|(_, (of, _))| of == key)?;
    (!value.is_empty()).then(|| (*at, value.clone()))
}
