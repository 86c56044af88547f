//! Linearizable reads: many wait for one answer of the leader.
//!
//!     reads wait --> round: the leader confirms that it leads, and says its commit index --> applied here --> reads go on
//!
//! With `--leader-lease-reads` the leader need not confirm while its lease holds (`lease_read.rs`).
//!
//! Promises: a read joins only a round that has not been sent yet. A round that fails is made again, as a new one, until each of those who wait runs out
//! of time.
//!
//! etcd: linearizableReadLoop in server/etcdserver/v3_server.go.

use std::sync::Arc;
use std::time::Duration;

use ballast_api::ballastpeerpb as pb;
use openraft::ReadPolicy;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::peer::Purpose;
use crate::raft::node::{ProposeError, RaftNode};

/// What the leader's answer may take before it is asked again (etcd: readIndexRetryTime).
const ROUND_MAX: Duration = Duration::from_millis(500);
/// Between a round that failed and the next.
const RETRY: Duration = Duration::from_millis(10);

type Waiter = oneshot::Sender<Result<(), ProposeError>>;

/// Reads that wait for the next round.
#[derive(Debug, Default)]
pub(crate) struct Barrier {
    waiting: Mutex<Vec<Waiter>>,
    wake: Notify,
}

impl Barrier {
    /// Joins the next round.
    pub(crate) async fn pass(&self) -> Result<(), ProposeError> {
        let (waiter, passed) = oneshot::channel();
        self.waiting.lock().push(waiter);
        self.wake.notify_one();
        passed.await.unwrap_or(Err(ProposeError::Stopping))
    }

    /// Everybody who waits now and did not give up.
    fn take(&self) -> Vec<Waiter> {
        let mut waiting = std::mem::take(&mut *self.waiting.lock());
        waiting.retain(|waiter| !waiter.is_closed());
        waiting
    }

    fn join_again(&self, mut round: Vec<Waiter>) {
        let mut waiting = self.waiting.lock();
        round.append(&mut waiting);
        *waiting = round;
    }
}

fn answer(round: Vec<Waiter>, result: Result<(), ProposeError>) {
    for waiter in round {
        // Who gave up waiting needs no answer.
        let _ = waiter.send(result);
    }
}

impl RaftNode {
    /// Makes rounds as long as anybody waits for one.
    pub(crate) async fn run_barriers(self: Arc<Self>) {
        let mut stopping = self.stopping();
        loop {
            tokio::select! {
                () = self.barrier.wake.notified() => {}
                _ = stopping.wait_for(|stopping| *stopping) => {
                    return answer(self.barrier.take(), Err(ProposeError::Stopping));
                }
            }
            while !self.barrier.waiting.lock().is_empty() {
                let leader = tokio::select! {
                    leader = self.wait_for_leader() => leader,
                    // Those who gave up meanwhile are not kept.
                    () = tokio::time::sleep(ROUND_MAX) => {
                        let waiting = self.barrier.take();
                        self.barrier.join_again(waiting);
                        continue;
                    }
                };
                let Ok(leader) = leader else {
                    return answer(self.barrier.take(), Err(ProposeError::Stopping));
                };
                let round = self.barrier.take();
                let asked = timeout(ROUND_MAX, self.ask_read_index(leader)).await;
                if let Ok(Some(index)) = asked {
                    tokio::spawn(Arc::clone(&self).answer_at(round, index));
                } else {
                    self.barrier.join_again(round);
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn answer_at(self: Arc<Self>, round: Vec<Waiter>, index: u64) {
        let mut applied = self.applied();
        let reached = applied.wait_for(|applied| *applied >= index).await;
        let result = reached.map(drop).map_err(|_| ProposeError::Stopping);
        answer(round, result);
    }

    /// What must be applied here before a read; None when the leader does not say.
    async fn ask_read_index(&self, leader: u64) -> Option<u64> {
        if leader == self.member_id() {
            return self.read_index().await;
        }
        let mut client = self.peers().client(leader, Purpose::Forward)?;
        match client.read_index(pb::ReadIndexRequest {}).await {
            Ok(reply) => Some(reply.into_inner().index),
            Err(status) => {
                tracing::debug!(error = %status, "the leader does not say its read index");
                None
            }
        }
    }

    /// As the leader: the index that covers all that was acknowledged before the call, by the leader's lease if that is to be used and holds, else
    /// confirmed by a majority. None when this member does not lead.
    pub async fn read_index(&self) -> Option<u64> {
        match self.index_by_lease().await {
            Some(index) => Some(index),
            None => self.confirmed_index().await,
        }
    }

    /// The same, confirmed by a majority in any case.
    pub async fn confirmed_index(&self) -> Option<u64> {
        let linearizer = self
            .raft()
            .get_read_linearizer(ReadPolicy::ReadIndex)
            .await
            .ok()?;
        // The library counts from 0.
        Some(linearizer.read_log_id().index() + 1)
    }
}
