//! Changes of the group, one at a time, each one entry of the log.
//!
//!     add a learner      the entry
//!     add a voter        the entry, with the wish to vote; the leader makes it a voter once it has caught up: until then the group does without it
//!     promote, remove    the entry: it counts as soon as it is in the log
//!     update             the entry, with other URLs
//!
//! Promises: a change is proposed only on top of the membership it was derived from, and only when that one is committed.
//! Not here: whether a change is allowed (`rpc/members.rs`), the list that clients see (`apply/cluster.rs`), which each of these entries rewrites.
//!
//! etcd: the ConfChange of the raft library. There a voter that was added counts at once, whether it runs or not.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::{ChangeMembershipError, ClientWriteError, RaftError};
use openraft::raft::{ClientWriteResponse, Precondition};
use openraft::{ChangeMembers, EntryPayload, Membership};
use tokio::time::timeout;

use crate::raft::command::{Nodes, PeerNode, Stored, TypeConfig, position};
use crate::raft::node::{ProposeError, RaftNode};

/// How often the leader looks whether somebody who shall vote has caught up.
const PENDING_INTERVAL: Duration = Duration::from_millis(100);
/// So many entries behind counts as caught up: the rest takes a moment.
const PENDING_LAG_MAX: u64 = 64;
/// Between attempts while an earlier change is not committed yet.
const IN_PROGRESS_RETRY: Duration = Duration::from_millis(50);

/// What is to become of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    AddVoter { id: u64, urls: Vec<String> },
    AddLearner { id: u64, urls: Vec<String> },
    Promote { id: u64 },
    Remove { id: u64 },
    Update { id: u64, urls: Vec<String> },
}

/// Held by whoever derives a change and proposes it.
#[derive(Debug)]
pub struct ChangeLock<'a>(#[expect(dead_code, reason = "held")] tokio::sync::MutexGuard<'a, ()>);

/// Counts a change as under way: the only voter asks for a majority from before its group grows.
struct Changing<'a>(&'a RaftNode);

impl<'a> Changing<'a> {
    fn new(node: &'a RaftNode) -> Self {
        node.changing.fetch_add(1, Ordering::AcqRel);
        node.leads_alone.store(false, Ordering::Release);
        Self(node)
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.changing.fetch_sub(1, Ordering::AcqRel);
        self.0.wake_leadership.notify_one();
    }
}

type Written =
    Result<ClientWriteResponse<TypeConfig>, RaftError<TypeConfig, ClientWriteError<TypeConfig>>>;

impl RaftNode {
    pub async fn lock_changes(&self) -> ChangeLock<'_> {
        ChangeLock(self.changes_lock.lock().await)
    }

    /// Proposes a change as the leader; gives its index once it is applied here. `NoLeader` says that nothing was proposed.
    ///
    /// A change of somebody who is not in the group, or adds who is, changes nothing: the caller has looked.
    pub async fn change(
        &self,
        _lock: &ChangeLock<'_>,
        change: &Change,
    ) -> Result<u64, ProposeError> {
        let _changing = Changing::new(self);
        let proposed = async {
            loop {
                let effective = self.raft().server_metrics().borrow_watched().clone();
                let base = effective.membership_config;
                match self.propose_change(&base, change).await {
                    Ok(response) => return Ok(position(&response.log_id).index),
                    Err(RaftError::APIError(error)) => match error {
                        ClientWriteError::ForwardToLeader(_) => return Err(ProposeError::NoLeader),
                        ClientWriteError::ChangeMembershipError(
                            ChangeMembershipError::InProgress(_)
                            | ChangeMembershipError::UncommittedLeaderLog(_),
                        )
                        | ClientWriteError::PreconditionFailed(_) => {
                            tokio::time::sleep(IN_PROGRESS_RETRY).await;
                        }
                        error => {
                            tracing::error!(%error, ?change, "a membership change failed");
                            return Err(ProposeError::Timeout);
                        }
                    },
                    Err(RaftError::Fatal(_)) => return Err(ProposeError::Stopping),
                }
            }
        };
        let index = timeout(self.timeout, proposed)
            .await
            .map_err(|_| ProposeError::Timeout)??;
        tracing::info!(
            index,
            ?change,
            "applied a configuration change through raft"
        );
        Ok(index)
    }

    async fn propose_change(&self, base: &Stored, change: &Change) -> Written {
        let membership = base.membership();
        let mut voters: BTreeSet<u64> = membership.voter_ids().collect();
        let mut nodes: Nodes = membership
            .nodes()
            .map(|(id, node)| (*id, node.clone()))
            .collect();
        match change {
            Change::Update { id, urls } => {
                let votes = nodes.get(id).is_some_and(|node| node.votes);
                let node = PeerNode {
                    urls: urls.clone(),
                    votes,
                };
                let set = ChangeMembers::SetNodes([(*id, node)].into());
                return self.raft().change_membership(set, true).await;
            }
            Change::AddVoter { id, urls } => {
                let node = PeerNode {
                    urls: urls.clone(),
                    votes: true,
                };
                nodes.insert(*id, node);
            }
            Change::AddLearner { id, urls } => {
                nodes.insert(*id, PeerNode::at(urls.clone()));
            }
            Change::Promote { id } => {
                voters.insert(*id);
            }
            Change::Remove { id } => {
                voters.remove(id);
                nodes.remove(id);
            }
        }
        let proposed = Membership::new(vec![voters], nodes).map_err(|error| {
            tracing::error!(%error, ?change, "a membership change does not hold together");
            let empty = openraft::errors::EmptyMembership {};
            RaftError::APIError(ClientWriteError::ChangeMembershipError(empty.into()))
        })?;
        let last = Precondition::LastMembershipLogId {
            last_membership_log_id: *base.log_id(),
        };
        self.raft()
            .append_membership(proposed, EntryPayload::Blank, [last])
            .await
    }

    /// Says where members are of whom an older release wrote the ids only, before others hear of them.
    pub async fn complete_urls(
        &self,
        lock: &ChangeLock<'_>,
        known: &[(u64, Vec<String>)],
    ) -> Result<(), ProposeError> {
        let server = self.raft().server_metrics().borrow_watched().clone();
        let bare: Vec<u64> = server
            .membership_config
            .nodes()
            .filter(|(_, node)| node.urls.is_empty())
            .map(|(id, _)| *id)
            .collect();
        for id in bare {
            if let Some((_, urls)) = known.iter().find(|(known, _)| *known == id) {
                let urls = urls.clone();
                self.change(lock, &Change::Update { id, urls }).await?;
            }
        }
        Ok(())
    }

    /// As the leader: up to where the member has the log, and the end of it. None of whoever is not in the group.
    pub fn progress_of(&self, id: u64) -> Option<(u64, u64)> {
        let last = self.wal.last().index;
        if id == self.member_id {
            return Some((last, last));
        }
        let data = self.raft().data_metrics();
        let data = data.borrow_watched();
        let matched = data.replication.as_ref()?.get(&id)?;
        Some((matched.as_ref().map_or(0, |at| position(at).index), last))
    }

    /// The other voters, by what the library counts already.
    pub fn other_voters(&self) -> Vec<u64> {
        let server = self.raft().server_metrics().borrow_watched().clone();
        let voters = server.membership_config.membership().voter_ids();
        voters.filter(|id| *id != self.member_id).collect()
    }

    /// Makes voters of those who shall vote and have caught up, as long as this member leads.
    pub(super) async fn admit_pending_voters(self: Arc<Self>) {
        let mut stopping = self.stopping();
        loop {
            tokio::select! {
                () = tokio::time::sleep(PENDING_INTERVAL) => {}
                _ = stopping.wait_for(|stopping| *stopping) => return,
            }
            if !self.is_leader() {
                continue;
            }
            let Some(id) = self.pending_voter() else {
                continue;
            };
            let lock = self.lock_changes().await;
            // Somebody may have removed it meanwhile.
            if self.pending_voter() != Some(id) {
                continue;
            }
            if let Err(error) = self.change(&lock, &Change::Promote { id }).await {
                tracing::warn!(member_id = %format!("{id:x}"), %error, "cannot make a voter of a member that caught up");
            }
        }
    }

    fn pending_voter(&self) -> Option<u64> {
        let server = self.raft().server_metrics().borrow_watched().clone();
        let membership = server.membership_config.membership();
        let voters: BTreeSet<u64> = membership.voter_ids().collect();
        let pending = membership
            .nodes()
            .filter(|(id, node)| node.votes && !voters.contains(id));
        pending
            .map(|(id, _)| *id)
            .find(|id| match self.progress_of(*id) {
                Some((matched, last)) => matched > 0 && matched + PENDING_LAG_MAX >= last,
                None => false,
            })
    }
}
