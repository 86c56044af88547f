//! The leases of this replica, and on the leader their deadlines.
//!
//!     apply:   grant, attach, detach, remove, checkpoint      (deterministic)
//!     rpc:     renew, describe, ids                           (leader's clock)
//!     expiry:  expired -> LeaseRevoke is proposed             (expiry.rs)
//!              due     -> LeaseCheckpoint is proposed         (expiry.rs)
//!
//! The heap holds for each lease a time not later than its deadline: a renewal only moves the deadline in the
//! table, and the heap's entry is corrected when it comes up. So a keepalive costs one lookup.
//!
//! A checkpoint writes into the log how much of a long lease is left, so that a restart or a new leader does not begin it anew.
//! A renewal of a lease that has one takes it back first.
//!
//! etcd: server/lease/lessor.go.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::time::{Duration, Instant};

use ballast_api::{etcdserverpb as pb, leasepb};
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
/// Entries of leases that are gone, tolerated in a heap beside one for each lease that is there.
const STALE_TIMERS_MAX: usize = 1024;

#[derive(Debug)]
struct Lease {
    ttl_secs: i64,
    /// What the leader last checkpointed; 0 when never.
    remaining_secs: i64,
    /// None while this node does not lead.
    deadline: Option<Instant>,
    /// When the leader notes what remains; None for short leases. An entry of the heap with another time is stale.
    checkpoint_at: Option<Instant>,
    keys: BTreeSet<Bytes>,
}

impl Lease {
    fn new(ttl_secs: i64, remaining_secs: i64) -> Self {
        Self {
            ttl_secs,
            remaining_secs,
            deadline: None,
            checkpoint_at: None,
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

type Timers = BinaryHeap<Reverse<(Instant, i64)>>;

#[derive(Debug, Default)]
struct Leases {
    by_id: HashMap<i64, Lease>,
    /// Times not later than the lease's deadline.
    heap: Timers,
    /// When the next checkpoint of each long lease is due.
    checkpoints: Timers,
    leading: bool,
}

impl Leases {
    /// Plans the next checkpoint of a lease that has more than `interval` left.
    fn plan_checkpoint(&mut self, id: i64, now: Instant, interval: Option<Duration>) {
        let (Some(interval), Some(lease)) = (interval, self.by_id.get_mut(&id)) else {
            return;
        };
        lease.checkpoint_at = None;
        if self.leading && lease.effective_ttl() > interval {
            let at = now + interval;
            lease.checkpoint_at = Some(at);
            self.checkpoints.push(Reverse((at, id)));
        }
    }

    /// Entries of vanished leases are dropped when they come up, which may be in 285 years: beyond a bound all are sought out.
    fn drop_stale_timers(&mut self) {
        let enough = 2 * self.by_id.len() + STALE_TIMERS_MAX;
        let by_id = &self.by_id;
        if self.heap.len() > enough {
            self.heap.retain(|Reverse((_, id))| by_id.contains_key(id));
        }
        if self.checkpoints.len() > enough {
            self.checkpoints.retain(|Reverse((at, id))| {
                by_id
                    .get(id)
                    .is_some_and(|lease| lease.checkpoint_at == Some(*at))
            });
        }
    }
}

/// How a keepalive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Seconds from now.
    Renewed(i64),
    Unknown,
    /// What remained of it stands in the log: propose a checkpoint of 0, then ask again.
    Checkpointed,
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
    /// None when remaining times are not checkpointed.
    checkpoint_interval: Option<Duration>,
    changed: Notify,
}

impl Lessor {
    pub fn new(clock: Clock, checkpoint_interval: Option<Duration>) -> Self {
        Self {
            leases: Mutex::default(),
            clock,
            checkpoint_interval,
            changed: Notify::new(),
        }
    }

    /// Replaces everything by what the store holds: at start, and after a snapshot was installed.
    pub fn load(&self, stored: Vec<leasepb::Lease>, keys: Vec<(Bytes, i64)>) {
        let mut leases = self.leases.lock();
        leases.heap.clear();
        leases.checkpoints.clear();
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
            self.schedule_all(&mut leases, Duration::ZERO);
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
            let now = self.clock.now();
            let deadline = now + lease.effective_ttl();
            lease.deadline = Some(deadline);
            leases.by_id.insert(id, lease);
            leases.heap.push(Reverse((deadline, id)));
            leases.plan_checkpoint(id, now, self.checkpoint_interval);
        } else {
            leases.by_id.insert(id, lease);
        }
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
        let mut leases = self.leases.lock();
        leases.by_id.remove(&id);
        leases.drop_stale_timers();
        drop(leases);
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
        let record = leasepb::Lease {
            id,
            ttl: lease.ttl_secs,
            remaining_ttl: remaining_secs,
        };
        leases.plan_checkpoint(id, self.clock.now(), self.checkpoint_interval);
        leases.drop_stale_timers();
        Some(record)
    }

    /// What remains of leases whose checkpoint is due, at most `count_max`. Each comes up again once it was applied.
    pub fn due_checkpoints(&self, count_max: usize) -> Vec<pb::LeaseCheckpoint> {
        let now = self.clock.now();
        let mut leases = self.leases.lock();
        let mut due = Vec::new();
        let mut again = Vec::new();
        while again.len() < count_max {
            match leases.checkpoints.peek() {
                Some(Reverse((at, _))) if *at <= now => {}
                _ => break,
            }
            let Some(Reverse((at, id))) = leases.checkpoints.pop() else {
                break;
            };
            let Some(lease) = leases.by_id.get(&id) else {
                continue;
            };
            // Planned anew since, or about to be revoked.
            let Some(end) = lease.deadline.filter(|end| *end > now) else {
                continue;
            };
            if lease.checkpoint_at != Some(at) {
                continue;
            }
            again.push(id);
            let remaining_ttl = (end - now).as_secs_f64().ceil() as i64;
            // Else it was renewed a moment ago.
            if remaining_ttl < lease.ttl_secs {
                due.push(pb::LeaseCheckpoint { id, remaining_ttl });
            }
        }
        // When a proposal is lost, the next one says the same better.
        for id in again {
            leases.plan_checkpoint(id, now, self.checkpoint_interval);
        }
        due
    }

    /// This node leads now: every lease lives its time from here, `extend` longer, and those that would all end
    /// together are spread so that revocation keeps up.
    pub fn promote(&self, extend: Duration) {
        let mut leases = self.leases.lock();
        leases.leading = true;
        self.schedule_all(&mut leases, extend);
        drop(leases);
        self.changed.notify_waiters();
    }

    /// This node leads no more: nothing runs out here.
    pub fn demote(&self) {
        let mut leases = self.leases.lock();
        leases.leading = false;
        leases.heap.clear();
        leases.checkpoints.clear();
        for lease in leases.by_id.values_mut() {
            lease.deadline = None;
            lease.checkpoint_at = None;
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
        if lease.remaining_secs > 0 {
            return Renewal::Checkpointed;
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

    /// Gives every lease a deadline and rebuilds the heaps.
    fn schedule_all(&self, leases: &mut Leases, extend: Duration) {
        let now = self.clock.now();
        leases.heap.clear();
        leases.checkpoints.clear();
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
            leases.plan_checkpoint(id, now, self.checkpoint_interval);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lessor() -> Lessor {
        Lessor::new(Clock::default(), Some(Duration::from_secs(300)))
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

    /// One that checkpoints whatever it may at once.
    fn eager() -> Lessor {
        let lessor = Lessor::new(Clock::default(), Some(Duration::ZERO));
        lessor.promote(Duration::ZERO);
        lessor
    }

    #[test]
    fn what_remains_is_noted_and_a_renewal_takes_it_back() {
        let lessor = eager();
        lessor.grant(1, 600).unwrap();
        // A quarter of its time is gone.
        lessor.load(
            vec![leasepb::Lease {
                id: 1,
                ttl: 600,
                remaining_ttl: 450,
            }],
            vec![],
        );
        let due = lessor.due_checkpoints(10);
        assert_eq!(due.len(), 1);
        let noted = due[0].remaining_ttl;
        assert!((449..=450).contains(&noted), "{noted}");
        let record = lessor.checkpoint(1, noted).unwrap();
        assert_eq!((record.ttl, record.remaining_ttl), (600, noted));

        assert_eq!(lessor.renew(1), Renewal::Checkpointed);
        let record = lessor.checkpoint(1, 0).unwrap();
        assert_eq!((record.ttl, record.remaining_ttl), (600, 0));
        assert_eq!(lessor.renew(1), Renewal::Renewed(600));
        let left = lessor.describe(1, false).unwrap().remaining_secs;
        assert!((599..=600).contains(&left), "{left}");
    }

    #[test]
    fn short_leases_followers_and_a_lessor_without_an_interval_note_nothing() {
        for interval in [None, Some(Duration::from_secs(300))] {
            let lessor = Lessor::new(Clock::default(), interval);
            lessor.promote(Duration::ZERO);
            lessor.grant(1, 300).unwrap();
            lessor.grant(2, 600).unwrap();
            let planned = lessor.leases.lock().checkpoints.len();
            assert_eq!(planned, usize::from(interval.is_some()));
            lessor.demote();
            assert_eq!(lessor.leases.lock().checkpoints.len(), 0);
            assert!(lessor.due_checkpoints(10).is_empty());
        }
    }

    #[test]
    fn timers_of_leases_that_are_gone_do_not_pile_up() {
        let lessor = eager();
        for id in 1..=20_000 {
            lessor.grant(id, LEASE_TTL_SECS_MAX).unwrap();
            lessor.checkpoint(id, 0);
            lessor.remove(id);
        }
        let leases = lessor.leases.lock();
        assert!(leases.heap.len() <= 2 * STALE_TIMERS_MAX);
        assert!(leases.checkpoints.len() <= 2 * STALE_TIMERS_MAX);
    }
}
