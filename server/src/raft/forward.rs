//! Proposals passed on to the leader, and who waits for which.
//!
//!     follower --Proposals--> leader          in the order in which they came, many in one message
//!     follower <--Refusal---- leader          only for what is not in the log and will not be
//!     follower: applied here  -> answered     by the id in the request's header
//!
//! Promises: a proposal is sent once. What was sent and not refused is answered when it is applied here, or not at all: the asker's time runs out, and
//! whether it was done is not known. What was not sent yet when the connection broke counts as refused.
//!
//! etcd: the Propose of a follower in the raft library, and the wait package of the server.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ballast_api::ballastpeerpb as pb;
use ballast_api::etcdserverpb::InternalRaftRequest;
use bytes::Bytes;
use parking_lot::Mutex;
use pb::refusal::Reason;
use prost::Message;
use tokio::sync::{mpsc, oneshot};

use crate::apply::Applied;
use crate::peer::{Client, Peers, Purpose};

/// Proposals that wait to be sent; more wait in front of the queue.
const QUEUE_MAX: usize = 1024;
/// What one message carries.
const BATCH_MAX: usize = 256;
const BATCH_BYTES_MAX: usize = 1 << 20;

/// After a lane broke, before what was not sent is given back.
const BROKEN_REST: Duration = Duration::from_millis(50);

/// How a proposal that was passed on ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Applied(Applied),
    Refused(Reason),
}

/// Who waits for which request to be applied here.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    by_id: Mutex<HashMap<u64, oneshot::Sender<Outcome>>>,
    /// As many as are in the map: seen without its lock.
    count: AtomicUsize,
}

/// Waits for one request.
#[derive(Debug)]
pub(crate) struct Expected {
    waiting: Arc<Waiting>,
    id: u64,
    outcome: oneshot::Receiver<Outcome>,
}

impl Waiting {
    pub(crate) fn expect(self: &Arc<Self>, id: u64) -> Expected {
        let (sender, outcome) = oneshot::channel();
        if self.by_id.lock().insert(id, sender).is_none() {
            self.count.fetch_add(1, Ordering::AcqRel);
        }
        Expected {
            waiting: Arc::clone(self),
            id,
            outcome,
        }
    }

    fn take(&self, id: u64) -> Option<oneshot::Sender<Outcome>> {
        let found = self.by_id.lock().remove(&id)?;
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(found)
    }

    /// A request that was not proposed through this member's own log was applied.
    pub(crate) fn applied(&self, request: &InternalRaftRequest, applied: &Applied) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        if let Some(waiter) = self.take(request_id(request)) {
            // Who gave up waiting needs no answer.
            let _ = waiter.send(Outcome::Applied(applied.clone()));
        }
    }

    fn refuse(&self, id: u64, reason: Reason) {
        if let Some(waiter) = self.take(id) {
            let _ = waiter.send(Outcome::Refused(reason));
        }
    }
}

impl Expected {
    /// None only when the member is stopping.
    pub(crate) async fn outcome(&mut self) -> Option<Outcome> {
        (&mut self.outcome).await.ok()
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.waiting.take(self.id);
    }
}

pub(crate) fn request_id(request: &InternalRaftRequest) -> u64 {
    request
        .header
        .as_ref()
        .map_or(request.id, |header| header.id)
}

/// The way to the leader.
#[derive(Debug)]
pub(crate) struct Forwarder {
    peers: Arc<Peers>,
    waiting: Arc<Waiting>,
    lane: tokio::sync::Mutex<Option<Lane>>,
}

/// An open stream of proposals to one leader.
#[derive(Debug)]
struct Lane {
    leader: u64,
    queue: mpsc::Sender<Queued>,
}

#[derive(Debug)]
struct Queued {
    id: u64,
    request: Bytes,
}

impl Forwarder {
    pub(crate) fn new(peers: Arc<Peers>, waiting: Arc<Waiting>) -> Self {
        Self {
            peers,
            waiting,
            lane: tokio::sync::Mutex::default(),
        }
    }

    /// Passes a request on. Its outcome comes to whoever expects it.
    pub(crate) async fn send(&self, leader: u64, request: &InternalRaftRequest) {
        let queued = Queued {
            id: request_id(request),
            request: request.encode_to_vec().into(),
        };
        let id = queued.id;
        let Some(queue) = self.queue_to(leader).await else {
            return self.waiting.refuse(id, Reason::NotLeader);
        };
        if queue.send(queued).await.is_err() {
            self.waiting.refuse(id, Reason::NotLeader);
        }
    }

    async fn queue_to(&self, leader: u64) -> Option<mpsc::Sender<Queued>> {
        let mut lane = self.lane.lock().await;
        if let Some(open) = &*lane
            && open.leader == leader
            && !open.queue.is_closed()
        {
            return Some(open.queue.clone());
        }
        let client = self.peers.client(leader, Purpose::Forward)?;
        let (queue, queued) = mpsc::channel(QUEUE_MAX);
        let waiting = Arc::clone(&self.waiting);
        let peers = Arc::clone(&self.peers);
        tokio::spawn(async move {
            run_lane(client, queued, &waiting, &peers, leader).await;
        });
        *lane = Some(Lane {
            leader,
            queue: queue.clone(),
        });
        Some(queue)
    }
}

/// Sends what is queued until the leader or the connection ends it.
async fn run_lane(
    mut client: Client,
    queued: mpsc::Receiver<Queued>,
    waiting: &Waiting,
    peers: &Peers,
    leader: u64,
) {
    let queued = Arc::new(tokio::sync::Mutex::new(queued));
    let requests = futures::stream::unfold(Arc::clone(&queued), |queued| async move {
        let proposals = next_batch(&mut *queued.lock().await).await?;
        Some((pb::Proposals { proposals }, queued))
    });
    let ended = async {
        let mut refusals = client.propose(requests).await?.into_inner();
        while let Some(refusal) = refusals.message().await? {
            waiting.refuse(refusal.number, refusal.reason());
        }
        Ok::<_, tonic::Status>(())
    };
    if let Err(status) = ended.await {
        peers.lost(leader, &status);
        // Those who wait would try again at once, as often as a connection can be refused.
        tokio::time::sleep(BROKEN_REST).await;
    }
    // What is left was never sent.
    let mut queued = queued.lock().await;
    queued.close();
    while let Some(left) = queued.recv().await {
        waiting.refuse(left.id, Reason::NotLeader);
    }
}

async fn next_batch(queued: &mut mpsc::Receiver<Queued>) -> Option<Vec<pb::Proposal>> {
    let mut bytes = 0;
    let mut batch = Vec::new();
    let mut next = Some(queued.recv().await?);
    while let Some(queued_one) = next {
        bytes += queued_one.request.len();
        batch.push(pb::Proposal {
            number: queued_one.id,
            request: queued_one.request,
        });
        next = if batch.len() < BATCH_MAX && bytes < BATCH_BYTES_MAX {
            queued.try_recv().ok()
        } else {
            None
        };
    }
    Some(batch)
}
