//! The leader's loops: propose the revocation of leases past their deadline and what remains of long ones, and follow leadership.
//!
//! Promises: nothing is revoked but by the log; at most 1000 proposals a second, 16 in flight. Checkpoints travel up to 1000 in one entry,
//! one entry after the other.
//!
//! etcd: the lessor's runLoop and the server's revokeExpiredLeases.

use std::sync::Arc;
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::Lessor;
use super::lessor::REVOKES_PER_SECOND_MAX;
use crate::raft::RaftNode;
use crate::rpc::RequestIds;

const LOOP_INTERVAL: Duration = Duration::from_millis(500);
const REVOKES_IN_FLIGHT_MAX: usize = 16;
/// Checkpoints in one log entry (etcd's).
const CHECKPOINTS_PER_ENTRY_MAX: usize = 1000;

/// Promotes and demotes the lessor as leadership changes, until `stop`.
pub async fn follow_leadership(
    lessor: Arc<Lessor>,
    raft: Arc<RaftNode>,
    extend: Duration,
    stop: CancellationToken,
) {
    let mut changes = raft.changes();
    let mut led_term = None;
    let mut leader = 0;
    loop {
        let now = raft.status().leader;
        if now != leader && now != 0 {
            crate::metrics::leader_changed();
            tracing::info!(leader_id = %format!("{now:x}"), "raft leader changed");
        }
        leader = now;
        let term = raft.is_leader().then(|| raft.status().term);
        if term != led_term {
            match term {
                Some(_) => lessor.promote(extend),
                None => lessor.demote(),
            }
            led_term = term;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}

/// Proposes revocations while this node leads, until `stop`.
pub async fn revoke_expired(
    lessor: Arc<Lessor>,
    raft: Arc<RaftNode>,
    ids: Arc<RequestIds>,
    stop: CancellationToken,
) {
    let in_flight = Arc::new(Semaphore::new(REVOKES_IN_FLIGHT_MAX));
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOP_INTERVAL) => {}
        }
        if !raft.is_leader() {
            continue;
        }
        // Taken before the clock is asked: whoever was paused meanwhile proposes as the leader of a term that is over, which is refused.
        let term = raft.status().term;
        for id in lessor.expired(REVOKES_PER_SECOND_MAX / 2) {
            let Ok(permit) = Arc::clone(&in_flight).acquire_owned().await else {
                return;
            };
            let raft = Arc::clone(&raft);
            let request = pb::InternalRaftRequest {
                header: Some(ids.header()),
                lease_revoke: Some(pb::LeaseRevokeRequest { id }),
                ..Default::default()
            };
            tokio::spawn(async move {
                match raft.propose_as_leader(term, request).await {
                    Ok(_) => {
                        crate::metrics::LEASE_EXPIRED.inc();
                        tracing::debug!(lease_id = %format!("{id:016x}"), "revoked expired lease");
                    }
                    Err(error) => {
                        tracing::warn!(lease_id = %format!("{id:016x}"), error = %error, "failed to revoke lease");
                    }
                }
                drop(permit);
            });
        }
    }
}

/// Proposes what remains of long leases while this node leads, until `stop`.
pub async fn checkpoint_remaining(
    lessor: Arc<Lessor>,
    raft: Arc<RaftNode>,
    ids: Arc<RequestIds>,
    stop: CancellationToken,
) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOP_INTERVAL) => {}
        }
        while raft.is_leader() && !stop.is_cancelled() {
            let term = raft.status().term;
            let checkpoints = lessor.due_checkpoints(CHECKPOINTS_PER_ENTRY_MAX);
            if checkpoints.is_empty() {
                break;
            }
            let count = checkpoints.len();
            let request = pb::InternalRaftRequest {
                header: Some(ids.header()),
                lease_checkpoint: Some(pb::LeaseCheckpointRequest { checkpoints }),
                ..Default::default()
            };
            // What is lost here is due again after another interval.
            match raft.propose_as_leader(term, request).await {
                Ok(_) => tracing::debug!(count, "checkpointed leases"),
                Err(error) => {
                    tracing::warn!(count, error = %error, "failed to checkpoint leases");
                    break;
                }
            }
        }
    }
}
