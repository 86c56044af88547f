//! Moving the leadership to another member.
//!
//! The library takes any target and refuses writes until it has moved or a while has passed, so the target is looked at first: a voter that answers and
//! has nearly all of the log.
//!
//! etcd: MoveLeader and TransferLeadership in server/etcdserver/server.go.

use std::time::Duration;

use tokio::time::timeout;

use crate::clock::Clock;
use crate::raft::node::RaftNode;

/// So many entries behind is near enough: they are sent before the target votes for itself.
const LAG_MAX: u64 = 1000;
/// How long a target may take to get near.
const CATCH_UP_STEP: Duration = Duration::from_millis(20);

impl RaftNode {
    /// As the leader: makes `target` the leader. False when it did not become that within a few elections.
    pub async fn transfer_leadership(&self, target: u64) -> bool {
        let started = Clock::default().now();
        tracing::info!(
            current_leader_member_id = %format!("{:x}", self.member_id()),
            transferee_member_id = %format!("{target:x}"),
            "leadership transfer starting"
        );
        let moved = async {
            while !self.may_take_over(target) {
                tokio::time::sleep(CATCH_UP_STEP).await;
            }
            if self.raft().trigger().transfer_leader(target).await.is_err() {
                return false;
            }
            let mut changes = self.changes();
            changes.wait_for(|now| now.leader == target).await.is_ok()
        };
        let moved = timeout(self.election * 3, moved).await.unwrap_or_default();
        let took = Clock::default().now() - started;
        let target = format!("{target:x}");
        if moved {
            tracing::info!(new_leader_member_id = %target, ?took, "leadership transfer finished");
        } else {
            tracing::warn!(transferee_member_id = %target, ?took, "leadership was not transferred");
        }
        moved
    }

    fn may_take_over(&self, id: u64) -> bool {
        self.peers().active_since(id).is_some()
            && self.other_voters().contains(&id)
            && self
                .progress_of(id)
                .is_some_and(|(matched, last)| matched + LAG_MAX >= last)
    }

    /// Before a stop: nobody shall wait for an election that can be spared.
    pub async fn hand_over(&self) {
        if !self.is_leader() {
            return;
        }
        let ready = self.other_voters().into_iter();
        let target = ready
            .filter(|id| self.may_take_over(*id))
            .min_by_key(|id| self.peers().active_since(*id));
        if let Some(target) = target {
            self.transfer_leadership(target).await;
        } else {
            tracing::info!("no other member to take over the leadership");
        }
    }
}
