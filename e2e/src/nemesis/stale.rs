//! The judges of what porcupine does not see: serializable reads, which may be late but never wrong, and leases that are left to run out.

use std::collections::BTreeMap;

use super::record::{Event, Kind, Kv, Op};
use super::reference::{Reference, within};
use super::traffic::{EXPIRING, Expiring};

/// Every serializable read is what the store held at the revision it names.
pub fn serializable(ops: &[Op], reference: &Reference) -> Vec<String> {
    let mut complaints = Vec::new();
    for op in ops.iter().filter(|op| op.known && op.kind == Kind::Stale) {
        let Some(state) = reference.at(op.revision) else {
            complaints.push(format!(
                "a serializable read of revision {}, the head is {}",
                op.revision,
                reference.head()
            ));
            continue;
        };
        let there: Vec<&Kv> = state
            .values()
            .filter(|kv| within(&kv.key, &op.key, &op.end))
            .collect();
        if there != op.kvs.iter().collect::<Vec<_>>() {
            complaints.push(format!(
                "a serializable read on member {} at revision {}: {:?}, right is {there:?}",
                op.member, op.revision, op.kvs
            ));
        }
    }
    complaints
}

/// Leases that are left to run out, over the run.
#[derive(Debug, Default)]
pub struct Leases {
    /// Keys that must be gone some windows after the last keepalive.
    waiting: BTreeMap<String, (i64, usize)>,
    /// When a key's deletion was told first.
    gone: BTreeMap<String, i64>,
    pub judged: u64,
    /// Keys that the calm after this window has to see go.
    pub overdue: Vec<String>,
}

/// A leader that is new begins a lease anew, so few windows are too short. All of them may have had one: then there is time in the calm.
const WINDOWS: usize = 6;

impl Leases {
    /// A watcher was told at this time.
    pub fn told(&mut self, event: &Event, at: i64) {
        if event.deleted && event.kv.key.starts_with(EXPIRING) {
            let first = self.gone.entry(event.kv.key.clone()).or_insert(at);
            *first = at.min(*first);
        }
    }

    /// No key went before its lease could have run out. Those that are late are noted in `overdue`.
    pub fn judge(
        &mut self,
        window: usize,
        leases: Vec<Expiring>,
        reference: &Reference,
    ) -> Vec<String> {
        let mut complaints = Vec::new();
        for lease in leases {
            self.waiting.insert(lease.key, (lease.not_before, window));
        }
        let gone = &mut self.gone;
        let (judged, overdue) = (&mut self.judged, &mut self.overdue);
        self.waiting.retain(|key, (not_before, since)| {
            if let Some(at) = gone.remove(key) {
                *judged += 1;
                if at < *not_before {
                    complaints.push(format!(
                        "{key} was gone {} ms before its lease could run out",
                        (*not_before - at) / 1_000_000
                    ));
                }
                return false;
            }
            if !reference.state().contains_key(key) {
                // Its put was never done.
                return false;
            }
            if *since + WINDOWS <= window {
                overdue.push(key.clone());
            }
            true
        });
        complaints
    }
}

#[cfg(test)]
mod tests {
    use super::super::reference::tests::{delete, put};
    use super::*;

    #[test]
    fn a_read_of_what_was_never_there_is_found() {
        let mut reference = Reference::default();
        let first = put("k/1", "1", 2, None);
        reference.add(2, std::slice::from_ref(&first));
        reference.add(3, &[put("k/1", "2", 3, Some(&first))]);
        let mut op = Op::new(0, 0, Kind::Stale, "k/1");
        op.known = true;
        op.revision = 2;
        op.kvs = vec![first.kv];
        assert!(serializable(std::slice::from_ref(&op), &reference).is_empty());
        op.revision = 3;
        assert_eq!(serializable(std::slice::from_ref(&op), &reference).len(), 1);
        op.revision = 4;
        assert_eq!(serializable(&[op], &reference).len(), 1);
    }

    #[test]
    fn a_lease_that_ran_out_early_or_never_is_found() {
        let mut reference = Reference::default();
        let first = put("ttl/1", "1", 2, None);
        reference.add(2, std::slice::from_ref(&first));
        let lease = |not_before| Expiring {
            key: "ttl/1".to_owned(),
            not_before,
        };
        for (not_before, complaints) in [(5, 0), (50, 1)] {
            let mut leases = Leases::default();
            leases.told(&delete(&first, 3), 10);
            let found = leases.judge(0, vec![lease(not_before)], &reference);
            assert_eq!(found.len(), complaints, "{found:?}");
        }
        let mut leases = Leases::default();
        assert!(leases.judge(0, vec![lease(5)], &reference).is_empty());
        assert!(leases.judge(5, Vec::new(), &reference).is_empty());
        assert!(leases.overdue.is_empty());
        assert!(leases.judge(6, Vec::new(), &reference).is_empty());
        assert_eq!(leases.overdue, ["ttl/1"]);
    }
}
