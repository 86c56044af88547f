//! The leases of this replica, and on the leader their deadlines.
//!
//!     apply:   grant, attach, detach, remove, checkpoint      (deterministic)
//!     rpc:     renew, describe, ids                           (leader's clock)
//!     expiry:  expired -> LeaseRevoke is proposed             (expiry.rs)
//!
//! The heap holds for each lease a time not later than its deadline: a renewal only moves the deadline in the
//! table, and the heap's entry is corrected when it comes up. So a keepalive costs one lookup.
//!
//! etcd: server/lease/lessor.go.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::time::{Duration, Instant};

use ballast_api::leasepb;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::apply::ApplyError;
use crate::clock::Clock;

/// etcd's bound; about 285 years.
pub const LEASE_TTL_SECS_MAX: i64 = 9_000_000_000;
/// Revocations proposed per second at most (etcd's).
pub const REVOKES_PER_SECOND_MAX: usize = 1000;
/// A lease whose revocation was proposed is proposed again after this long if it is still there.
const EXPIRED_RETRY: Duration = Duration::from_secs(3);

#[derive(Debug)]
struct Lease {
    ttl_secs: i64,
    /// What the leader last checkpointed; 0 when never.
    remaining_secs: i64,
    /// None while this node does not lead.
    deadline: Option<Instant>,
    keys: BTreeSet<Bytes>,
}

impl Lease {
    fn new(ttl_secs: i64, remaining_secs: i64) -> Self {
        Self {
            ttl_secs,
            remaining_secs,
            deadline: None,
            keys: BTreeSet::new(),
        }
    }

    fn effective_ttl(&self) -> Duration {
        let secs = if self.remaining_secs > 0 {
            self.remaining_secs
        } else {
            self.ttl_secs
        };
        Duration::from_secs(u64::try_from(secs).unwrap_or(0))
    }
}

#[derive(Debug, Default)]
struct Leases {
    by_id: HashMap<i64, Lease>,
    /// Times not later than the lease's deadline. Entries of vanished leases are dropped when they come up.
    heap: BinaryHeap<Reverse<(Instant, i64)>>,
    leading: bool,
}

/// How a keepalive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Seconds from now.
    Renewed(i64),
    Unknown,
    /// Its revocation is under way: wait for [`Lessor::changed`], then ask again.
    Expired,
    NotLeading,
}

/// What LeaseTimeToLive answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    pub remaining_secs: i64,
    pub granted_secs: i64,
    pub keys: Vec<Bytes>,
}

/// All leases. Shared by apply, the RPCs and the expiry loop.
#[derive(Debug)]
pub struct Lessor {
    leases: Mutex<Leases>,
    clock: Clock,
    changed: Notify,
}

impl Lessor {
    pub fn new(clock: Clock) -> Self {
        Self {
            leases: Mutex::default(),
            clock,
            changed: Notify::new(),
        }
    }

    /// Replaces everything by what the store holds: at start, and after a snapshot was installed.
    pub fn load(&self, stored: Vec<leasepb::Lease>, keys: Vec<(Bytes, i64)>) {
        let mut leases = self.leases.lock();
        leases.heap.clear();
        leases.by_id = stored
            .into_iter()
            .map(|lease| (lease.id, Lease::new(lease.ttl, lease.remaining_ttl)))
            .collect();
        for (key, id) in keys {
            if let Some(lease) = leases.by_id.get_mut(&id) {
                lease.keys.insert(key);
            }
        }
        if leases.leading {
            schedule_all(&mut leases, self.clock.now(), Duration::ZERO);
        }
    }

    pub fn exists(&self, id: i64) -> bool {
        self.leases.lock().by_id.contains_key(&id)
    }

    /// Registers a lease; the caller writes its record in the same batch.
    pub fn grant(&self, id: i64, ttl_secs: i64) -> Result<leasepb::Lease, ApplyError> {
        if id == 0 {
            return Err(ApplyError::LeaseNotFound);
        }
        if ttl_secs > LEASE_TTL_SECS_MAX {
            return Err(ApplyError::LeaseTtlTooLarge);
        }
        let mut leases = self.leases.lock();
        if leases.by_id.contains_key(&id) {
            return Err(ApplyError::LeaseExists);
        }
        let mut lease = Lease::new(ttl_secs, 0);
        if leases.leading {
            let deadline = self.clock.now() + lease.effective_ttl();
            lease.deadline = Some(deadline);
            leases.heap.push(Reverse((deadline, id)));
        }
        leases.by_id.insert(id, lease);
        Ok(leasepb::Lease {
            id,
            ttl: ttl_secs,
            remaining_ttl: 0,
        })
    }

    /// The lease's keys, ascending: the order in which every replica deletes them. None when it is not known.
    pub fn keys(&self, id: i64) -> Option<Vec<Bytes>> {
        let leases = self.leases.lock();
        Some(leases.by_id.get(&id)?.keys.iter().cloned().collect())
    }

    pub fn remove(&self, id: i64) {
        self.leases.lock().by_id.remove(&id);
        self.changed.notify_waiters();
    }

    /// A put moved `key` from one lease to another; 0 is none.
    pub fn moved(&self, key: &Bytes, from: i64, to: i64) {
        if from == to {
            return;
        }
        let mut leases = self.leases.lock();
        if let Some(lease) = leases.by_id.get_mut(&from) {
            lease.keys.remove(key);
        }
        if let Some(lease) = leases.by_id.get_mut(&to) {
            lease.keys.insert(key.clone());
        }
    }

    /// Notes what remains of a lease; gives the record to write, or None when the lease is gone.
    pub fn checkpoint(&self, id: i64, remaining_secs: i64) -> Option<leasepb::Lease> {
        let mut leases = self.leases.lock();
        let lease = leases.by_id.get_mut(&id)?;
        lease.remaining_secs = remaining_secs;
        Some(leasepb::Lease {
            id,
            ttl: lease.ttl_secs,
            remaining_ttl: remaining_secs,
        })
    }

    /// This node leads now: every lease lives its time from here, `extend` longer, and those that would all end
    /// together are spread so that revocation keeps up.
    pub fn promote(&self, extend: Duration) {
        let mut leases = self.leases.lock();
        leases.leading = true;
        schedule_all(&mut leases, self.clock.now(), extend);
        drop(leases);
        self.changed.notify_waiters();
    }

    /// This node leads no more: nothing runs out here.
    pub fn demote(&self) {
        let mut leases = self.leases.lock();
        leases.leading = false;
        leases.heap.clear();
        for lease in leases.by_id.values_mut() {
            lease.deadline = None;
        }
        drop(leases);
        self.changed.notify_waiters();
    }

    pub fn renew(&self, id: i64) -> Renewal {
        let now = self.clock.now();
        let mut leases = self.leases.lock();
        if !leases.leading {
            return Renewal::NotLeading;
        }
        let Some(lease) = leases.by_id.get_mut(&id) else {
            return Renewal::Unknown;
        };
        if lease.deadline.is_some_and(|deadline| deadline <= now) {
            return Renewal::Expired;
        }
        lease.deadline = Some(now + lease.effective_ttl());
        Renewal::Renewed(lease.ttl_secs)
    }

    /// Woken when a lease is removed or leadership ends.
    pub fn changed(&self) -> tokio::sync::futures::Notified<'_> {
        self.changed.notified()
    }

    pub fn describe(&self, id: i64, with_keys: bool) -> Option<Described> {
        let now = self.clock.now();
        let leases = self.leases.lock();
        let lease = leases.by_id.get(&id)?;
        let remaining_secs = match lease.deadline {
            Some(deadline) if deadline >= now => (deadline - now).as_secs() as i64,
            Some(deadline) => -((now - deadline).as_secs() as i64),
            None => lease.ttl_secs,
        };
        Some(Described {
            remaining_secs,
            granted_secs: lease.ttl_secs,
            keys: if with_keys {
                lease.keys.iter().cloned().collect()
            } else {
                Vec::new()
            },
        })
    }

    /// All leases, the one that ends first first.
    pub fn ids(&self) -> Vec<i64> {
        let leases = self.leases.lock();
        let mut ids: Vec<_> = leases
            .by_id
            .iter()
            .map(|(id, lease)| (lease.deadline, *id))
            .collect();
        drop(leases);
        ids.sort_unstable();
        ids.into_iter().map(|(_, id)| id).collect()
    }

    /// Leases past their deadline, at most `count_max`. Each is given again after [`EXPIRED_RETRY`] until it is removed.
    pub fn expired(&self, count_max: usize) -> Vec<i64> {
        let now = self.clock.now();
        let mut leases = self.leases.lock();
        let mut expired = Vec::new();
        while expired.len() < count_max {
            match leases.heap.peek() {
                Some(Reverse((at, _))) if *at <= now => {}
                _ => break,
            }
            let Some(Reverse((_, id))) = leases.heap.pop() else {
                break;
            };
            let Some(deadline) = leases.by_id.get(&id).and_then(|lease| lease.deadline) else {
                continue;
            };
            if deadline > now {
                leases.heap.push(Reverse((deadline, id)));
            } else {
                leases.heap.push(Reverse((now + EXPIRED_RETRY, id)));
                expired.push(id);
            }
        }
        expired
    }
}

/// Gives every lease a deadline and rebuilds the heap.
fn schedule_all(leases: &mut Leases, now: Instant, extend: Duration) {
    leases.heap.clear();
    let mut order: Vec<(Duration, i64)> = leases
        .by_id
        .iter()
        .map(|(id, lease)| (lease.effective_ttl() + extend, *id))
        .collect();
    order.sort_unstable();
    // Three quarters of the rate, so that what piled up never takes all of it.
    let per_second = REVOKES_PER_SECOND_MAX * 3 / 4;
    let step = Duration::from_secs(1) / u32::try_from(per_second).unwrap_or(1);
    let spread = order.len() >= REVOKES_PER_SECOND_MAX;
    let mut earliest = Duration::ZERO;
    for (after, id) in order {
        let after = if spread { after.max(earliest) } else { after };
        earliest = after + step;
        let deadline = now + after;
        if let Some(lease) = leases.by_id.get_mut(&id) {
            lease.deadline = Some(deadline);
        }
        leases.heap.push(Reverse((deadline, id)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lessor() -> Lessor {
        Lessor::new(Clock::default())
    }

    #[test]
    fn a_key_belongs_to_the_lease_that_was_put_last() {
        let lessor = lessor();
        lessor.grant(1, 10).unwrap();
        lessor.grant(2, 10).unwrap();
        let key = Bytes::from_static(b"k");
        lessor.moved(&key, 0, 1);
        lessor.moved(&key, 1, 2);
        assert_eq!(lessor.keys(1), Some(vec![]));
        assert_eq!(lessor.keys(2), Some(vec![key.clone()]));
        lessor.moved(&key, 2, 0);
        assert_eq!(lessor.keys(2), Some(vec![]));
        assert_eq!(lessor.keys(3), None);
    }

    #[test]
    fn bounds_of_grant_are_answers() {
        let lessor = lessor();
        assert_eq!(lessor.grant(0, 1), Err(ApplyError::LeaseNotFound));
        assert_eq!(
            lessor.grant(1, LEASE_TTL_SECS_MAX + 1),
            Err(ApplyError::LeaseTtlTooLarge)
        );
        assert!(lessor.grant(1, LEASE_TTL_SECS_MAX).is_ok());
        assert_eq!(lessor.grant(1, 5), Err(ApplyError::LeaseExists));
    }

    #[test]
    fn only_a_leader_renews_and_expires() {
        let lessor = lessor();
        lessor.grant(1, 0).unwrap();
        assert_eq!(lessor.renew(1), Renewal::NotLeading);
        assert!(lessor.expired(10).is_empty());
        lessor.promote(Duration::ZERO);
        assert_eq!(lessor.renew(1), Renewal::Expired);
        assert_eq!(lessor.renew(2), Renewal::Unknown);
        assert_eq!(lessor.expired(10), vec![1]);
        assert!(lessor.expired(10).is_empty(), "not proposed twice at once");
        lessor.demote();
        assert_eq!(lessor.renew(1), Renewal::NotLeading);
        assert!(lessor.expired(10).is_empty());
    }

    #[test]
    fn a_renewed_lease_is_not_expired_by_its_old_deadline() {
        let lessor = lessor();
        lessor.promote(Duration::ZERO);
        lessor.grant(1, 100).unwrap();
        assert_eq!(lessor.renew(1), Renewal::Renewed(100));
        let described = lessor.describe(1, true).unwrap();
        assert!(
            (98..=100).contains(&described.remaining_secs),
            "{described:?}"
        );
        assert!(lessor.expired(10).is_empty());
    }

    #[test]
    fn a_pile_of_equal_leases_is_spread_at_promotion() {
        let lessor = lessor();
        for id in 1..=3000 {
            lessor.grant(id, 1).unwrap();
        }
        lessor.promote(Duration::ZERO);
        let leases = lessor.leases.lock();
        let deadlines: Vec<_> = leases
            .by_id
            .values()
            .filter_map(|lease| lease.deadline)
            .collect();
        let first = deadlines.iter().min().unwrap();
        let last = deadlines.iter().max().unwrap();
        assert!(*last - *first > Duration::from_secs(3));
    }

    #[test]
    fn what_remained_survives_loading() {
        let lessor = lessor();
        lessor.load(
            vec![leasepb::Lease {
                id: 7,
                ttl: 600,
                remaining_ttl: 20,
            }],
            vec![(Bytes::from_static(b"a"), 7), (Bytes::from_static(b"b"), 8)],
        );
        lessor.promote(Duration::ZERO);
        let described = lessor.describe(7, true).unwrap();
        assert!(described.remaining_secs <= 20);
        assert_eq!(described.granted_secs, 600);
        assert_eq!(described.keys, vec![Bytes::from_static(b"a")]);
    }
}
