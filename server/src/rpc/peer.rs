//! Peer: what the other members ask of this one.
//!
//! Promises: nobody is answered who is not a member of this cluster, but for the question who its members are.
//!
//! etcd: server/etcdserver/api/rafthttp/http.go, server/etcdserver/api/etcdhttp/peer.go.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use ballast_api::ballastpeerpb as peerpb;
use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use futures::{FutureExt, Stream, StreamExt};
use http::header::CONTENT_TYPE;
use http::{Request as HttpRequest, Response as HttpResponse};
use hyper::body::Incoming;
use peerpb::peer_server::{Peer, PeerServer};
use prost::Message;
use tonic::body::Body;
use tonic::{Request, Response, Status, Streaming};
use tower::Service;

use super::{Context, lease, members};
use crate::health::{Endpoints, Http};
use crate::metrics::peer::SnapshotTimer;
use crate::peer::identity::{self, Whose};
use crate::raft::snapshot;
use crate::version::Version;

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The Peer service.
#[derive(Clone, Debug)]
pub struct PeerService(pub Arc<Context>);

impl PeerService {
    /// Lets members of this cluster pass.
    fn admit<T>(&self, request: Request<T>) -> Result<T, Status> {
        self.who(&request)?;
        Ok(request.into_inner())
    }

    fn who<T>(&self, request: &Request<T>) -> Result<u64, Status> {
        let cluster = &self.0.cluster;
        let own = Whose {
            cluster_id: cluster.cluster_id,
            member_id: cluster.member_id,
        };
        let from = identity::check(request.metadata(), own, |id| cluster.is_removed(id))?;
        self.0.raft.peers().asked_by(from);
        Ok(from)
    }
}

#[tonic::async_trait]
impl Peer for PeerService {
    type AppendStream = Answers<peerpb::AppendReply>;

    async fn append(
        &self,
        request: Request<Streaming<peerpb::AppendRequest>>,
    ) -> Result<Response<Self::AppendStream>, Status> {
        let from = self.who(&request)?;
        let peers = Arc::clone(self.0.raft.peers());
        let requests = request.into_inner().inspect(move |request| {
            if let Ok(request) = request {
                peers.received(from, request.encoded_len());
            }
        });
        let answers = Arc::clone(&self.0.raft).append_stream(requests);
        Ok(Response::new(Box::pin(answers)))
    }

    async fn heartbeat(
        &self,
        request: Request<peerpb::AppendRequest>,
    ) -> Result<Response<peerpb::AppendReply>, Status> {
        let request = self.admit(request)?;
        self.0.raft.heartbeat(request).await.map(Response::new)
    }

    async fn vote(
        &self,
        request: Request<peerpb::VoteRequest>,
    ) -> Result<Response<peerpb::VoteReply>, Status> {
        let request = self.admit(request)?;
        self.0.raft.vote(request).await.map(Response::new)
    }

    async fn pre_vote(
        &self,
        request: Request<peerpb::VoteRequest>,
    ) -> Result<Response<peerpb::VoteReply>, Status> {
        let request = self.admit(request)?;
        self.0.raft.pre_vote(request).await.map(Response::new)
    }

    async fn transfer_leader(
        &self,
        request: Request<peerpb::TransferLeaderRequest>,
    ) -> Result<Response<peerpb::TransferLeaderReply>, Status> {
        let request = self.admit(request)?;
        self.0.raft.transfer(request).await.map(Response::new)
    }

    async fn snapshot(
        &self,
        request: Request<Streaming<peerpb::SnapshotPart>>,
    ) -> Result<Response<peerpb::SnapshotReply>, Status> {
        let from = self.who(&request)?;
        let timed = SnapshotTimer::receiving(&format!("{from:x}"));
        let received = self
            .0
            .raft
            .receive_snapshot(&self.0.store, from, request.into_inner())
            .await;
        match received {
            Ok(reply) => {
                timed.done();
                Ok(Response::new(reply))
            }
            Err(status) => {
                tracing::error!(remote_peer_id = %format!("{from:x}"), error = %status, "failed to receive a snapshot");
                Err(status)
            }
        }
    }

    type ProposeStream = Answers<peerpb::Refusal>;

    async fn propose(
        &self,
        request: Request<Streaming<peerpb::Proposals>>,
    ) -> Result<Response<Self::ProposeStream>, Status> {
        let batches = self.admit(request)?;
        let refusals = Arc::clone(&self.0.raft).propose_stream(batches);
        Ok(Response::new(Box::pin(refusals)))
    }

    async fn read_index(
        &self,
        request: Request<peerpb::ReadIndexRequest>,
    ) -> Result<Response<peerpb::ReadIndexReply>, Status> {
        self.admit(request)?;
        match self.0.raft.read_index().await {
            Some(index) => Ok(Response::new(peerpb::ReadIndexReply { index })),
            None => Err(Error::NotLeader.into()),
        }
    }

    async fn lease_keep_alive(
        &self,
        request: Request<pb::LeaseKeepAliveRequest>,
    ) -> Result<Response<pb::LeaseKeepAliveResponse>, Status> {
        let request = self.admit(request)?;
        let answer = lease::keep_alive_as_leader(&self.0, request.id).await?;
        Ok(Response::new(answer))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<pb::LeaseTimeToLiveRequest>,
    ) -> Result<Response<pb::LeaseTimeToLiveResponse>, Status> {
        let request = self.admit(request)?;
        let answer = lease::time_to_live_as_leader(&self.0, request).await?;
        Ok(Response::new(answer))
    }

    async fn change_members(
        &self,
        request: Request<peerpb::ChangeMembersRequest>,
    ) -> Result<Response<peerpb::ChangeMembersReply>, Status> {
        let asked = self.admit(request)?.change;
        let asked = asked.ok_or_else(|| Status::invalid_argument("no change is asked for"))?;
        let reply = members::change_as_leader(&self.0, asked).await?;
        Ok(Response::new(reply))
    }

    async fn ping(
        &self,
        request: Request<peerpb::PingRequest>,
    ) -> Result<Response<peerpb::PingReply>, Status> {
        self.admit(request)?;
        Ok(Response::new(peerpb::PingReply {
            snapshot_format: snapshot::FORMAT,
        }))
    }

    async fn versions(
        &self,
        request: Request<peerpb::VersionsRequest>,
    ) -> Result<Response<peerpb::VersionsReply>, Status> {
        self.admit(request)?;
        Ok(Response::new(peerpb::VersionsReply {
            server: Version::own().to_string(),
            release: env!("CARGO_PKG_VERSION").to_owned(),
        }))
    }

    type FetchSnapshotStream = Answers<peerpb::SnapshotPart>;

    async fn fetch_snapshot(
        &self,
        request: Request<peerpb::FetchSnapshotRequest>,
    ) -> Result<Response<Self::FetchSnapshotStream>, Status> {
        let known = self.admit(request)?.format;
        // Whoever only believes that it leads is found out.
        if self.0.raft.confirmed_index().await.is_none() {
            return Err(Error::NotLeader.into());
        }
        let store = Arc::clone(&self.0.store);
        let parts = self.0.raft.snapshot_for_rebuild(store, known);
        Ok(Response::new(Box::pin(parts)))
    }

    async fn hash_kv(
        &self,
        request: Request<pb::HashKvRequest>,
    ) -> Result<Response<pb::HashKvResponse>, Status> {
        let request = self.admit(request)?;
        let hash = self.0.hash_kv(request.revision).await?;
        Ok(Response::new(pb::HashKvResponse {
            header: Some(self.0.headers.at(hash.current_revision)),
            hash: hash.hash,
            compact_revision: hash.compact_revision,
            hash_revision: hash.hash_revision,
        }))
    }

    async fn members(
        &self,
        _request: Request<peerpb::MembersRequest>,
    ) -> Result<Response<peerpb::MembersReply>, Status> {
        let cluster = &self.0.cluster;
        Ok(Response::new(peerpb::MembersReply {
            cluster_id: cluster.cluster_id,
            members: cluster.members(),
            removed: cluster.removed(),
        }))
    }
}

/// Everything served on a peer port: the service, and HTTP for what is not gRPC.
#[derive(Clone, Debug)]
pub struct PeerMux {
    peer: PeerServer<PeerService>,
    http: Arc<Http>,
}

impl PeerMux {
    pub fn new(context: &Arc<Context>, http: Arc<Http>) -> Self {
        let service = PeerService(Arc::clone(context));
        Self {
            // What a request may hold was decided where it was taken from a client.
            peer: PeerServer::new(service)
                .max_decoding_message_size(usize::MAX)
                .max_encoding_message_size(usize::MAX),
            http,
        }
    }
}

impl Service<HttpRequest<Incoming>> for PeerMux {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Incoming>) -> Self::Future {
        let grpc = request
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
        if grpc {
            return self.peer.call(request).boxed();
        }
        let http = Arc::clone(&self.http);
        async move { Ok(http.serve(request, Endpoints::Peer).await) }.boxed()
    }
}
