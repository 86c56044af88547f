//! What the library sends to the other members.
//!
//! Each of its clients has a role: the log's stream, heartbeats, a snapshot. They share no connection (`peer.rs`). Votes and transfers go with the
//! heartbeats.
//!
//! etcd: server/etcdserver/api/rafthttp/{stream,pipeline,snapshot_sender}.go.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::ballastpeerpb as pb;
use ballast_storage::mvcc::Store;
use futures::{Stream, StreamExt};
use openraft::alias::{SnapshotOf, VoteOf};
use openraft::base::{BoxFuture, BoxStream};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{Backoff, RPCOption};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendResult,
    TransferLeaderRequest, TransferLeaderResponse, VoteRequest, VoteResponse,
};
use openraft::{OptionalSend, RaftNetworkFactory, RaftNetworkV2};
use prost::Message;
use tonic::Status;

use crate::clock::Clock;
use crate::metrics::peer::SnapshotTimer;
use crate::peer::identity::{says_removed, says_stranger};
use crate::peer::{Client, Peers, Purpose, probe};
use crate::raft::command::{PeerNode, TypeConfig};
use crate::raft::node::Failure;
use crate::raft::snapshot::{self, Sending};
use crate::raft::state_machine::Content;
use crate::raft::wire::{self, WireError};

/// Between attempts at a peer that does not answer.
const RETRY: Duration = Duration::from_millis(100);
/// A member that is to take a snapshot answers within this.
const PING_MAX: Duration = Duration::from_secs(5);

/// Makes connections to members by id.
#[derive(Clone, Debug)]
pub struct Transport {
    pub(crate) peers: Arc<Peers>,
    pub(crate) store: Arc<Store>,
    pub(crate) sending: Sending,
    pub(crate) failure: Failure,
}

/// To one member, for one purpose.
#[derive(Clone, Debug)]
pub struct Peer {
    peers: Arc<Peers>,
    store: Arc<Store>,
    sending: Sending,
    failure: Failure,
    target: u64,
    /// The log's stream, or the heartbeats.
    purpose: Purpose,
}

impl Transport {
    fn client(&self, target: u64, node: &PeerNode, purpose: Purpose) -> Peer {
        // The members' list may not have it yet: a change counts for the library as soon as it is in the log.
        if self.peers.client(target, purpose).is_none() {
            self.peers.set(target, &node.urls);
        }
        Peer {
            peers: Arc::clone(&self.peers),
            store: Arc::clone(&self.store),
            sending: self.sending.clone(),
            failure: self.failure.clone(),
            target,
            purpose,
        }
    }
}

impl RaftNetworkFactory<TypeConfig> for Transport {
    type Network = Peer;

    async fn new_client(&mut self, target: u64, node: &PeerNode) -> Peer {
        self.client(target, node, Purpose::Log)
    }

    async fn new_heartbeat_client(&mut self, target: u64, node: &PeerNode) -> Peer {
        self.client(target, node, Purpose::Control)
    }

    async fn new_snapshot_client(&mut self, target: u64, node: &PeerNode) -> Peer {
        self.client(target, node, Purpose::Snapshot)
    }
}

impl Peer {
    fn reach(&self, purpose: Purpose) -> Result<Client, Unreachable<TypeConfig>> {
        self.peers
            .client(self.target, purpose)
            .ok_or_else(|| Unreachable::from_string("nobody said where this member is"))
    }

    fn heard(&self) {
        self.peers.heard(self.target);
    }

    /// What a refusal means for the library: all but strangers may answer later.
    fn unreachable(&self, status: &Status) -> Unreachable<TypeConfig> {
        self.peers.lost(self.target, status);
        if says_removed(status) {
            self.failure.set_removed();
        } else if says_stranger(status) {
            tracing::error!(
                remote_peer_id = %format!("{:x}", self.target),
                error = status.message(),
                "a peer refuses this member as a stranger"
            );
        }
        Unreachable::from_string(status)
    }
}

fn unreadable(error: &WireError) -> RPCError<TypeConfig> {
    RPCError::Network(NetworkError::from_string(error))
}

type Answers<'s> = BoxStream<'s, Result<StreamAppendResult<TypeConfig>, RPCError<TypeConfig>>>;

impl RaftNetworkV2<TypeConfig> for Peer {
    type SnapshotData = Content;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        Ok(self.beat(rpc).await?.into())
    }

    fn stream_append<'s, S>(
        &'s mut self,
        input: S,
        _option: RPCOption,
    ) -> BoxFuture<'s, Result<Answers<'s>, RPCError<TypeConfig>>>
    where
        S: Stream<Item = AppendEntriesRequest<TypeConfig>> + OptionalSend + Unpin + 'static,
    {
        Box::pin(async move {
            if self.purpose == Purpose::Control {
                let answers = input.then(|request| self.beat(request));
                return Ok(Box::pin(answers) as Answers<'s>);
            }
            self.stream(input).await
        })
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        let mut client = self.reach(Purpose::Control)?;
        let reply = client.vote(wire::vote_request_out(&rpc)).await;
        self.vote_reply(reply)
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        let mut client = self.reach(Purpose::Control)?;
        let reply = client.pre_vote(wire::vote_request_out(&rpc)).await;
        self.vote_reply(reply)
    }

    /// The store as it is now, which may be further than the marker that the library has in mind: it goes on from the marker.
    async fn full_snapshot(
        &mut self,
        vote: VoteOf<TypeConfig>,
        _marker: SnapshotOf<TypeConfig, Content>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let mut client = self.reach(Purpose::Snapshot)?;
        // The library asks again and again while a member does not answer, and to make a snapshot is to read the whole store.
        let answer = probe::ping(&mut client, PING_MAX).await;
        let answer = answer.map_err(|status| {
            tracing::debug!(to = %format!("{:x}", self.target), error = %status, "no snapshot for a member that does not answer");
            StreamingError::Unreachable(self.unreachable(&status))
        })?;
        let _keeps_the_log = self.sending.begin();
        let target = format!("{:x}", self.target);
        tracing::info!(to = %target, "sending merged snapshot");
        let started = Clock::default().now();
        let timed = SnapshotTimer::sending(&target);
        let store = Arc::clone(&self.store);
        let parts = snapshot::parts(store, wire::vote_out(&vote), answer.snapshot_format);
        let parts = tokio_stream::wrappers::ReceiverStream::new(parts);
        let reply = tokio::select! {
            reply = client.snapshot(parts) => reply,
            closed = cancel => return Err(StreamingError::Closed(closed)),
        };
        let reply = match reply {
            Ok(reply) => reply.into_inner(),
            Err(status) => {
                tracing::warn!(to = %target, error = %status, "failed to send merged snapshot");
                return Err(StreamingError::Unreachable(self.unreachable(&status)));
            }
        };
        self.heard();
        timed.done();
        let took = Clock::default().now() - started;
        tracing::info!(to = %target, ?took, "sent merged snapshot");
        let vote = wire::vote_in(reply.vote)
            .map_err(|error| StreamingError::Network(NetworkError::from_string(error)))?;
        Ok(SnapshotResponse::new(vote))
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RPCError<TypeConfig>> {
        let mut client = self.reach(Purpose::Control)?;
        let reply = client.transfer_leader(wire::transfer_out(&request)).await;
        let reply = reply.map_err(|status| self.unreachable(&status))?;
        let refusal = reply.into_inner().refusal;
        if refusal.is_empty() {
            return Ok(Ok(()));
        }
        Err(RPCError::Network(NetworkError::from_string(refusal)))
    }

    fn backoff(&self) -> Option<Backoff> {
        Some(Backoff::new(std::iter::repeat(RETRY)))
    }
}

impl Peer {
    /// One request without entries, and its answer.
    async fn beat(
        &self,
        request: AppendEntriesRequest<TypeConfig>,
    ) -> Result<StreamAppendResult<TypeConfig>, RPCError<TypeConfig>> {
        let mut client = self.reach(Purpose::Control)?;
        let request = wire::append_out(&request);
        self.peers.sent(self.target, request.encoded_len());
        let reply = client.heartbeat(request).await;
        let reply = reply.map_err(|status| self.unreachable(&status))?;
        self.heard();
        wire::append_reply_in(reply.into_inner()).map_err(|error| unreadable(&error))
    }

    /// Requests as they come, answers in their order, as many under way as the connection takes.
    async fn stream<S>(&self, input: S) -> Result<Answers<'_>, RPCError<TypeConfig>>
    where
        S: Stream<Item = AppendEntriesRequest<TypeConfig>> + OptionalSend + Unpin + 'static,
    {
        let opened = match self.reach(Purpose::Log) {
            Ok(mut client) => {
                let (peers, target) = (Arc::clone(&self.peers), self.target);
                let requests = input.map(move |request| {
                    let request = wire::append_out(&request);
                    peers.sent(target, request.encoded_len());
                    request
                });
                let opened = client.append(requests).await;
                opened.map_err(|status| self.unreachable(&status))
            }
            Err(unreachable) => Err(unreachable),
        };
        let replies = match opened {
            Ok(replies) => replies,
            Err(unreachable) => {
                // The library waits between requests, of which there was none.
                tokio::time::sleep(RETRY).await;
                return Err(unreachable.into());
            }
        };
        let answers = replies.into_inner().map(move |reply| {
            let reply = reply.map_err(|status| self.unreachable(&status))?;
            self.heard();
            wire::append_reply_in(reply).map_err(|error| unreadable(&error))
        });
        Ok(Box::pin(answers))
    }

    fn vote_reply(
        &self,
        reply: Result<tonic::Response<pb::VoteReply>, Status>,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        let reply = reply.map_err(|status| self.unreachable(&status))?;
        self.heard();
        wire::vote_reply_in(reply.into_inner()).map_err(|error| unreadable(&error))
    }
}
