//! Reads by the leader's lease: no round, as long as clocks run alike.
//!
//! ```text
//!  leader     s: an append is sent ------------------ s + trust: not trusted any more
//!  follower        t >= s: it accepts, and votes for nobody else before t + 0.6 elections
//! ```
//!
//! While a majority has accepted something that was sent less than [`trust`] ago nobody else can have been elected, so the leader's commit index
//! covers all that was acknowledged. The trust is 0.3 elections, three quarters of the shortest time anything below waits:
//!
//! - The library's followers refuse their vote for 0.6 elections.
//! - One that was restarted has forgotten whom it heard, and when: the library lets it vote at once. Here it votes and is a candidate only after
//!   0.4 elections, the shortest election ([`Fresh`]). That holds on every member, whether it reads by lease or not.
//! - A leader that hands over answers no read from then on; the library sees to that.
//! - A machine that sleeps stops the monotonic clock, by which all of these times are taken. For a follower that is longer than it promised. A
//!   leader that slept trusts nothing that it sent before ([`LeaseReads::awake_since`]).
//!
//! What is assumed: no member's clock runs at more than 4/3 of another's speed, and no machine is stopped without its kernel's knowledge, as a
//! virtual machine that is paused, moved or restored may be. A process that is stopped, or a thread, is no matter: the clock goes on.
//!
//! Not here: rounds (`barrier.rs`). etcd: ReadOnlyLeaseBased of the raft library, which etcd does not offer; it has the gap of the restarted follower.

use std::time::{Duration, Instant};

use openraft::Instant as _;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::raft::linearizable_read::LinearizerOption;
use parking_lot::Mutex;

use crate::clock::Clock;
use crate::raft::node::RaftNode;

/// For how long after it was sent an append that a majority accepted makes this member the only leader.
pub(crate) fn trust(shortest_election: Duration) -> Duration {
    shortest_election * 3 / 4
}

/// Whether and how long the leader may trust its lease.
#[derive(Debug)]
pub(crate) struct LeaseReads {
    /// None when reads are answered by rounds only.
    trust: Option<Duration>,
    clock: Clock,
    awake: Mutex<Awake>,
}

/// The last time that this machine is known to have slept.
#[derive(Clone, Copy, Debug)]
struct Awake {
    slept: Duration,
    since: Instant,
}

impl LeaseReads {
    pub(crate) fn new(trust: Option<Duration>, clock: Clock) -> Self {
        let awake = Awake {
            slept: clock.slept().unwrap_or_default(),
            since: clock.now(),
        };
        Self {
            trust,
            clock,
            awake: Mutex::new(awake),
        }
    }

    /// Since when the monotonic clock has not stood still. None when that is not known now.
    fn awake_since(&self) -> Option<Instant> {
        let slept = self.clock.slept()?;
        Some(self.awake.lock().after(slept, self.clock.now()))
    }
}

impl Awake {
    /// The machine has slept for so long in all, as of now.
    fn after(&mut self, slept: Duration, now: Instant) -> Instant {
        if slept > self.slept + 2 * Clock::SLEPT_PRECISION {
            *self = Self { slept, since: now };
        }
        self.since
    }
}

impl RaftNode {
    /// As the leader whose lease holds: the index that covers all that was acknowledged before the call. None when it does not hold, or is not to be used.
    pub(super) async fn index_by_lease(&self) -> Option<u64> {
        let reads = &self.lease_reads;
        let trust = reads.trust?;
        let awake_since = reads.awake_since()?;
        // Rather too early than too late: what the library goes by is this acknowledgement or a later one.
        let now = reads.clock.now();
        let acked = self
            .raft()
            .data_metrics()
            .borrow_watched()
            .last_quorum_acked?;
        if now.checked_sub(acked.elapsed())? <= awake_since {
            return None;
        }
        let option = LinearizerOption::new(Some(trust), false).with_wait_timeout(Duration::ZERO);
        let linearizer = self.raft().get_read_linearizer(option).await.ok()?;
        // The library's look lies between the two of ours.
        let stayed_awake = reads.awake_since()? == awake_since;
        // The library counts from 0.
        stayed_awake.then(|| linearizer.read_log_id().index() + 1)
    }
}

/// The first moments of a member that may have heard a leader right before it ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fresh(Option<tokio::time::Instant>);

impl Fresh {
    /// `heard` when there was a leader in the member's last life.
    pub(crate) fn new(heard: bool, shortest_election: Duration) -> Self {
        Self(heard.then(|| tokio::time::Instant::now() + shortest_election))
    }

    /// Returns when this member may vote.
    pub(crate) async fn passed(self) {
        if let Some(until) = self.0 {
            tokio::time::sleep_until(until).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleep_is_noticed_once_and_what_the_clocks_are_off_by_is_none() {
        let now = Clock::default().now();
        let at = |millis| now + Duration::from_millis(millis);
        let millis = Duration::from_millis;
        let mut awake = Awake {
            slept: millis(500),
            since: now,
        };
        assert_eq!(awake.after(millis(501), at(1)), now);
        assert_eq!(awake.after(millis(499), at(2)), now);
        assert_eq!(awake.after(millis(700), at(3)), at(3));
        assert_eq!(awake.after(millis(700), at(4)), at(3));
        // Many short ones are one.
        assert_eq!(awake.after(millis(702), at(5)), at(3));
        assert_eq!(awake.after(millis(704), at(6)), at(6));
    }

    #[test]
    fn this_machine_can_say_how_long_it_slept() {
        let clock = Clock::default();
        let told = (0..1_000).filter_map(|_| clock.slept());
        let told: Vec<Duration> = told.collect();
        assert!(!told.is_empty());
        let (least, most) = (told.iter().min().unwrap(), told.iter().max().unwrap());
        assert!(
            most.saturating_sub(*least) <= 2 * Clock::SLEPT_PRECISION,
            "{told:?}"
        );
    }

    #[tokio::test]
    async fn who_heard_a_leader_in_its_last_life_does_not_vote_at_once() {
        let begun = tokio::time::Instant::now();
        let wait = Duration::from_millis(400);
        let fresh = Fresh::new(true, wait);
        // A new member, of whom nobody can have heard.
        Fresh::new(false, Duration::MAX / 4).passed().await;
        fresh.passed().await;
        assert!(begun.elapsed() >= wait);
    }
}
