//! Asks each member now and then whether it is there: a follower would not know of the others otherwise, and the day it leads is too late.
//!
//! etcd: server/etcdserver/api/rafthttp/probing_status.go.

use std::sync::Arc;
use std::time::Duration;

use ballast_api::ballastpeerpb::{PingReply, PingRequest};
use tonic::{Response, Status};

use super::identity::says_removed;
use super::{Client, Peers, Purpose};
use crate::clock::Clock;
use crate::logging::Limit;

/// Between two questions to the same member.
const INTERVAL: Duration = Duration::from_secs(1);
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// Lines about slow members, so many a second.
const SLOW_LINES_PER_SECOND_MAX: u32 = 1;

static SLOW: Limit<SLOW_LINES_PER_SECOND_MAX> = Limit::new();

/// Probes until it turns out that this member is none any more.
pub async fn run(peers: Arc<Peers>, slow_after: Duration) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let probes = peers
            .ids()
            .into_iter()
            .map(|id| probe(&peers, id, slow_after));
        let answers = futures::future::join_all(probes).await;
        if answers.into_iter().any(|removed| removed) {
            return;
        }
    }
}

/// Whether the member answers within `patience`, and what it says of itself.
pub(crate) async fn ping(client: &mut Client, patience: Duration) -> Result<PingReply, Status> {
    let answer = tokio::time::timeout(patience, client.ping(PingRequest {})).await;
    let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer to a ping")));
    answer.map(Response::into_inner)
}

/// True when the member says that this one was removed.
async fn probe(peers: &Peers, id: u64, slow_after: Duration) -> bool {
    let Some(mut client) = peers.client(id, Purpose::Control) else {
        return false;
    };
    let clock = Clock::default();
    let began = clock.now();
    let answer = ping(&mut client, ANSWER_MAX).await;
    let now = clock.now();
    let took = now - began;
    match answer {
        Ok(_) => {
            peers.heard(id);
            peers.answered_in(id, took);
            if took > slow_after
                && let Some(suppressed) = SLOW.pass(now)
            {
                tracing::warn!(
                    remote_peer_id = %format!("{id:x}"),
                    ?took,
                    suppressed,
                    "peer is slow to answer"
                );
            }
            false
        }
        Err(status) => {
            peers.lost(id, &status);
            says_removed(&status)
        }
    }
}
