//! What the other members ask of this one's library.
//!
//! Not here: who may ask (`peer/identity.rs`), the service (`rpc/peer.rs`).
//!
//! etcd: server/etcdserver/api/rafthttp/http.go, and Process of the server.

use std::sync::Arc;

use ballast_api::ballastpeerpb as pb;
use ballast_api::etcdserverpb::InternalRaftRequest;
use futures::future::ready;
use futures::{Stream, StreamExt};
use openraft::errors::ClientWriteError;
use pb::refusal::Reason;
use prost::Message;
use tokio::sync::mpsc;
use tonic::Status;

use crate::raft::command::Command;
use crate::raft::node::{ProposeError, RaftNode};
use crate::raft::wire::{self, WireError};

/// Answers to a stream of appends that wait to be sent; the library has as many under way.
const ANSWERS_MAX: usize = 64;
/// Refusals that wait to be sent.
const REFUSALS_MAX: usize = 1024;

fn unreadable(error: &WireError) -> Status {
    tracing::error!(%error, "a peer sent what this version cannot read");
    Status::invalid_argument(error.to_string())
}

fn stopped(error: impl std::fmt::Display) -> Status {
    Status::unavailable(error.to_string())
}

impl RaftNode {
    /// Entries of the leader, in order; answers in the same.
    pub fn append_stream<S>(
        self: Arc<Self>,
        requests: S,
    ) -> impl Stream<Item = Result<pb::AppendReply, Status>> + Send + 'static
    where
        S: Stream<Item = Result<pb::AppendRequest, Status>> + Send + 'static,
    {
        // The stream ends with the first that cannot be read, and the sender begins anew.
        let readable = requests.scan((), |(), request| {
            let request = request.ok().map(wire::append_in);
            ready(match request {
                Some(Ok(request)) => Some(request),
                Some(Err(error)) => {
                    unreadable(&error);
                    None
                }
                None => None,
            })
        });
        let (sender, out) = mpsc::channel(ANSWERS_MAX);
        tokio::spawn(async move {
            let answers = self.raft().stream_append(readable);
            futures::pin_mut!(answers);
            loop {
                let answer = tokio::select! {
                    answer = answers.next() => answer,
                    () = sender.closed() => return,
                };
                let Some(answer) = answer else { return };
                let reply = answer.as_ref().map(wire::append_reply_out);
                if reply
                    .as_ref()
                    .is_ok_and(|reply| reply.higher_vote.is_none())
                {
                    self.heard_leader();
                }
                // The sender of the requests may be gone.
                let _ = sender.send(reply.map_err(stopped)).await;
            }
        });
        tokio_stream::wrappers::ReceiverStream::new(out)
    }

    pub async fn heartbeat(&self, request: pb::AppendRequest) -> Result<pb::AppendReply, Status> {
        let request = wire::append_in(request).map_err(|error| unreadable(&error))?;
        let previous = request.prev_log_id;
        let last = request
            .entries
            .last()
            .map(|entry| entry.log_id)
            .or(previous);
        let answer = self.raft().append_entries(request).await.map_err(stopped)?;
        let reply = wire::append_reply_out(&answer.into_stream_result(previous, last));
        if reply.higher_vote.is_none() {
            self.heard_leader();
        }
        Ok(reply)
    }

    pub async fn vote(&self, request: pb::VoteRequest) -> Result<pb::VoteReply, Status> {
        let request = wire::vote_request_in(request).map_err(|error| unreadable(&error))?;
        // A transfer is the leader's own wish.
        if !request.leadership_transfer {
            self.fresh.passed().await;
        }
        let reply = self.raft().vote(request).await.map_err(stopped)?;
        Ok(wire::vote_reply_out(&reply))
    }

    pub async fn pre_vote(&self, request: pb::VoteRequest) -> Result<pb::VoteReply, Status> {
        let request = wire::vote_request_in(request).map_err(|error| unreadable(&error))?;
        self.fresh.passed().await;
        let reply = self.raft().pre_vote(request).await.map_err(stopped)?;
        Ok(wire::vote_reply_out(&reply))
    }

    pub async fn transfer(
        &self,
        request: pb::TransferLeaderRequest,
    ) -> Result<pb::TransferLeaderReply, Status> {
        let request = wire::transfer_in(request).map_err(|error| unreadable(&error))?;
        let outcome = self
            .raft()
            .handle_transfer_leader(request)
            .await
            .map_err(stopped)?;
        Ok(pb::TransferLeaderReply {
            refusal: outcome
                .err()
                .map_or_else(String::new, |why| why.to_string()),
        })
    }

    /// Proposals of a follower. What is refused is told; what is taken is answered by its application.
    pub fn propose_stream<S>(
        self: Arc<Self>,
        batches: S,
    ) -> impl Stream<Item = Result<pb::Refusal, Status>> + Send + 'static
    where
        S: Stream<Item = Result<pb::Proposals, Status>> + Send + 'static,
    {
        let (refusals, out) = mpsc::channel(REFUSALS_MAX);
        tokio::spawn(async move {
            futures::pin_mut!(batches);
            let mut stopping = self.stopping();
            loop {
                let batch = tokio::select! {
                    batch = batches.next() => batch,
                    _ = stopping.wait_for(|stopping| *stopping) => return,
                    // Nobody listens any more.
                    () = refusals.closed() => return,
                };
                let Some(Ok(batch)) = batch else { return };
                self.propose_batch(batch, &refusals).await;
            }
        });
        tokio_stream::wrappers::ReceiverStream::new(out).map(Ok)
    }

    async fn propose_batch(&self, batch: pb::Proposals, refusals: &mpsc::Sender<pb::Refusal>) {
        let refuse = |number: u64, reason: Reason| pb::Refusal {
            number,
            reason: reason as i32,
        };
        let refused = match self.room_for_proposals() {
            Ok(()) => None,
            Err(ProposeError::Overloaded) => Some(Reason::Overloaded),
            Err(_) => Some(Reason::NoSpace),
        };
        let mut numbers = Vec::with_capacity(batch.proposals.len());
        let mut commands = Vec::with_capacity(batch.proposals.len());
        for proposal in batch.proposals {
            let reason = match (refused, InternalRaftRequest::decode(proposal.request)) {
                (None, Ok(request)) => {
                    numbers.push(proposal.number);
                    commands.push(Command(Arc::new(request)));
                    continue;
                }
                (Some(reason), _) => reason,
                (None, Err(_)) => Reason::Unreadable,
            };
            // Without a listener there is nobody to tell.
            let _ = refusals.send(refuse(proposal.number, reason)).await;
        }
        let Ok(mut results) = self.raft().client_write_many(commands).await else {
            return;
        };
        let refusals = refusals.clone();
        tokio::spawn(async move {
            for number in numbers {
                match results.next().await {
                    Some(Ok(Err(ClientWriteError::ForwardToLeader(_)))) => {
                        let _ = refusals.send(refuse(number, Reason::NotLeader)).await;
                    }
                    // In the log, or unknown.
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return,
                }
            }
        });
    }
}
