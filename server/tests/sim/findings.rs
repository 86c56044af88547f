//! What a run shows as it goes: its trace, and what must never be.
//!
//!     one log     an entry that two members apply at the same index is the same one, and of the same term
//!     one leader  nobody else leads in a term in which one has led
//!
//! The trace is a line for everything that somebody could notice; of two runs that are the same it is the same.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use ballast_storage::LogPosition;
use parking_lot::Mutex;

#[derive(Debug, Default)]
pub(crate) struct Findings(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    trace: Vec<String>,
    violations: Vec<String>,
    /// By index: term and checksum, and who applied it first.
    applied: BTreeMap<u64, (u64, u64, String)>,
    /// By term.
    leaders: BTreeMap<u64, String>,
}

impl Findings {
    /// A line of the trace, with the simulation's time.
    pub(crate) fn note(&self, line: impl AsRef<str>) {
        // Outside of the hosts the driver writes its own time.
        let at = turmoil::sim_elapsed().map_or(String::new(), |at| format!("{} ", at.as_micros()));
        self.0.lock().trace.push(format!("{at}{}", line.as_ref()));
    }

    pub(crate) fn violated(&self, what: impl Into<String>) {
        let what = what.into();
        self.note(&what);
        self.0.lock().violations.push(what);
    }

    pub(crate) fn applied(&self, member: &str, at: LogPosition, bytes: &[u8]) {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        let sum = hasher.finish();
        self.note(format!(
            "{member} applies {} of term {}: {sum:016x}",
            at.index, at.term
        ));
        let first = {
            let mut state = self.0.lock();
            let first = state
                .applied
                .entry(at.index)
                .or_insert_with(|| (at.term, sum, member.to_owned()));
            first.clone()
        };
        if (first.0, first.1) != (at.term, sum) {
            self.violated(format!(
                "{member} applies at {} another entry of term {} than {} did, of term {}",
                at.index, at.term, first.2, first.0
            ));
        }
    }

    pub(crate) fn leads(&self, member: &str, term: u64) {
        let first = {
            let mut state = self.0.lock();
            let first = state.leaders.entry(term);
            first.or_insert_with(|| member.to_owned()).clone()
        };
        if first != member {
            self.violated(format!("in term {term} both {first} and {member} lead"));
        }
    }

    /// Terms in which somebody led.
    pub(crate) fn terms(&self) -> usize {
        self.0.lock().leaders.len()
    }

    pub(crate) fn is_violated(&self) -> bool {
        !self.0.lock().violations.is_empty()
    }

    /// The trace, and what was violated.
    pub(crate) fn take(&self) -> (Vec<String>, Vec<String>) {
        let mut state = self.0.lock();
        (
            std::mem::take(&mut state.trace),
            std::mem::take(&mut state.violations),
        )
    }
}
