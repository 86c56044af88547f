//! Who leads, and whether this member may act as the leader.
//!
//! The library keeps a leader that lost its majority, and remembers a leader that fell silent. So both are derived here:
//!
//!     this member leads      the library says so, a majority answered within an election timeout, and all of earlier terms is applied
//!     another one leads      the library says so, and it was heard within an election timeout
//!     nobody                 else
//!
//! etcd: the SoftState of the raft library, with CheckQuorum.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use openraft::async_runtime::watch::WatchReceiver;
use openraft::metrics::RaftServerMetrics;
use openraft::{Instant as _, ServerState};

use crate::clock::Clock;
use crate::raft::command::TypeConfig;
use crate::raft::node::{ProposeError, RaftNode, RaftStatus};

/// When the leader was heard last.
#[derive(Debug)]
pub(crate) struct Heard {
    clock: Clock,
    began: Instant,
    /// Milliseconds since `began`, and one: 0 is never.
    at: AtomicU64,
}

impl Default for Heard {
    fn default() -> Self {
        let clock = Clock::default();
        Self {
            clock,
            began: clock.now(),
            at: AtomicU64::default(),
        }
    }
}

impl Heard {
    pub(super) fn clock(&self) -> Clock {
        self.clock
    }

    fn now(&self) -> u64 {
        (self.clock.now() - self.began).as_millis() as u64 + 1
    }

    /// True when it was never, or so long ago, until now: then somebody may wait for this.
    fn note(&self, silence: Duration) -> bool {
        let now = self.now();
        let before = self.at.swap(now, Ordering::AcqRel);
        before == 0 || now - before.min(now) > silence.as_millis() as u64
    }

    fn within(&self, silence: Duration) -> bool {
        let at = self.at.load(Ordering::Acquire);
        at != 0 && self.now().saturating_sub(at) <= silence.as_millis() as u64
    }
}

/// What the library says, and what follows from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is another question")]
struct Seen {
    leader: u64,
    term: u64,
    is_learner: bool,
    leads: bool,
    alone: bool,
    /// The library says that this member leads.
    elected: bool,
}

impl RaftNode {
    /// The leader sent something that was accepted.
    pub(super) fn heard_leader(&self) {
        if self.heard.note(self.election) {
            self.wake_leadership.notify_one();
        }
    }

    /// Keeps the status and the two flags in step with the library.
    pub(super) async fn follow_leadership(self: Arc<Self>) {
        let mut metrics = self.raft().server_metrics();
        let mut applied = self.applied();
        let mut stopping = self.stopping();
        loop {
            let server: RaftServerMetrics<TypeConfig> = metrics.borrow_watched().clone();
            let seen = self.see(&server);
            self.publish(seen);
            // Alone nothing changes by the passing of time.
            let quiet = seen.alone && seen.leads;
            let waits_for_apply = seen.elected && !seen.leads;
            tokio::select! {
                changed = metrics.changed() => if changed.is_err() { return; },
                changed = applied.changed(), if waits_for_apply => if changed.is_err() { return; },
                () = self.wake_leadership.notified() => {}
                () = tokio::time::sleep(self.heartbeat), if !quiet => {}
                _ = stopping.wait_for(|stopping| *stopping) => return,
            }
        }
    }

    fn see(&self, server: &RaftServerMetrics<TypeConfig>) -> Seen {
        let me = self.member_id;
        let term = server.vote.leader_id.term;
        let elected = server.state == ServerState::Leader && server.vote.committed;
        let only_me = |membership: &openraft::Membership<u64, _>| {
            let mut voters = membership.voter_ids();
            voters.next() == Some(me) && voters.next().is_none()
        };
        let membership = server.committed_membership_config.membership();
        // What is in the log counts already.
        let alone = only_me(membership) && only_me(server.membership_config.membership());
        // A leader's first entry commits everything before it; until it is applied here, reads would miss some.
        let leads = elected
            && self.wal.term_of(*self.applied().borrow()) == Some(term)
            && (alone || self.majority_answers());
        let leader = if leads {
            me
        } else {
            let other = server.current_leader.filter(|leader| *leader != me);
            other
                .filter(|_| self.heard.within(self.election))
                .unwrap_or_default()
        };
        let is_learner = membership
            .learner_ids()
            .any(|id| id == me && !membership.get_node(&id).is_some_and(|node| node.votes));
        Seen {
            leader,
            term,
            is_learner,
            leads,
            alone,
            elected,
        }
    }

    /// What a request that began then and was not answered in time is told (etcd: parseProposeCtxErr).
    pub(super) fn why_late(&self, began: Instant) -> ProposeError {
        let elected = *self.elected_at.lock();
        let failed = elected.is_some_and(|elected| {
            began < elected && elected.saturating_duration_since(began) < 2 * self.election
        });
        if failed {
            return ProposeError::LeaderFailed;
        }
        let reached = |id: u64| {
            let since = self.peers().active_since(id);
            since.is_some_and(|since| since < began)
        };
        let leader = self.published.borrow().leader;
        let lost = if leader == self.member_id {
            let others = self.other_voters();
            let reached = others.iter().filter(|id| reached(**id)).count();
            // With this member more than half of all.
            reached < others.len().div_ceil(2)
        } else {
            leader != 0 && !reached(leader)
        };
        if lost {
            ProposeError::ConnectionLost
        } else {
            ProposeError::Timeout
        }
    }

    fn majority_answers(&self) -> bool {
        let data = self.raft().data_metrics();
        let acked = data.borrow_watched().last_quorum_acked;
        acked.is_some_and(|at| at.elapsed() <= self.election)
    }

    fn publish(&self, seen: Seen) {
        if *self.stopping().borrow() {
            return;
        }
        // Who leads may be known before this member may act as the leader: both are news.
        let led = self.leads.swap(seen.leads, Ordering::AcqRel);
        let unchanging = self.changing.load(Ordering::Acquire) == 0;
        self.leads_alone
            .store(seen.leads && seen.alone && unchanging, Ordering::Release);
        let status = RaftStatus {
            leader: seen.leader,
            term: seen.term,
            is_learner: seen.is_learner,
            ..self.status()
        };
        if seen.leader != 0 && seen.leader != self.published.borrow().leader {
            *self.elected_at.lock() = Some(self.heard.clock().now());
        }
        self.published.send_if_modified(|held| {
            let news = led != seen.leads
                || (held.leader, held.term, held.is_learner)
                    != (status.leader, status.term, status.is_learner);
            *held = status;
            news
        });
    }
}
