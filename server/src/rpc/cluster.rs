//! Cluster: the member list, and changing it.
//!
//! Not here: what may be changed (`members.rs`).
//!
//! etcd: server/etcdserver/api/v3rpc/member.go.

use std::sync::Arc;

use ballast_api::ballastpeerpb::change_members_request::Change as Asked;
use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use pb::cluster_server::Cluster;
use tonic::{Request, Response, Status};

use super::{Context, members, status};

/// The Cluster service.
#[derive(Clone, Debug)]
pub struct ClusterService(pub Arc<Context>);

impl ClusterService {
    /// etcd leaves the revision out here.
    fn header(&self) -> pb::ResponseHeader {
        self.0.headers.at(0)
    }
}

#[tonic::async_trait]
impl Cluster for ClusterService {
    async fn member_add(
        &self,
        request: Request<pb::MemberAddRequest>,
    ) -> Result<Response<pb::MemberAddResponse>, Status> {
        let request = request.into_inner();
        let known = request.peer_ur_ls.iter();
        if request.peer_ur_ls.is_empty()
            || known
                .clone()
                .any(|url| crate::config::urls::Url::parse(url).is_err())
        {
            return Err(Error::MemberBadURLs.into());
        }
        let reply = members::change(&self.0, Asked::Add(request)).await?;
        Ok(Response::new(pb::MemberAddResponse {
            header: Some(self.header()),
            member: reply.member,
            members: reply.members,
        }))
    }

    async fn member_remove(
        &self,
        request: Request<pb::MemberRemoveRequest>,
    ) -> Result<Response<pb::MemberRemoveResponse>, Status> {
        let reply = members::change(&self.0, Asked::Remove(request.into_inner())).await?;
        Ok(Response::new(pb::MemberRemoveResponse {
            header: Some(self.header()),
            members: reply.members,
        }))
    }

    async fn member_update(
        &self,
        request: Request<pb::MemberUpdateRequest>,
    ) -> Result<Response<pb::MemberUpdateResponse>, Status> {
        let reply = members::change(&self.0, Asked::Update(request.into_inner())).await?;
        Ok(Response::new(pb::MemberUpdateResponse {
            header: Some(self.header()),
            members: reply.members,
        }))
    }

    async fn member_list(
        &self,
        request: Request<pb::MemberListRequest>,
    ) -> Result<Response<pb::MemberListResponse>, Status> {
        if request.into_inner().linearizable {
            let barrier = self.0.raft.read_barrier().await;
            barrier.map_err(status::from_propose)?;
        }
        Ok(Response::new(pb::MemberListResponse {
            header: Some(self.header()),
            members: self.0.cluster.members(),
        }))
    }

    async fn member_promote(
        &self,
        request: Request<pb::MemberPromoteRequest>,
    ) -> Result<Response<pb::MemberPromoteResponse>, Status> {
        let reply = members::change(&self.0, Asked::Promote(request.into_inner())).await?;
        Ok(Response::new(pb::MemberPromoteResponse {
            header: Some(self.header()),
            members: reply.members,
        }))
    }
}
