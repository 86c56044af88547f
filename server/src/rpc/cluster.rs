//! Cluster: the member list. Changing it comes with clusters of several members.
//!
//! etcd: server/etcdserver/api/v3rpc/member.go.

use std::sync::Arc;

use ballast_api::etcdserverpb as pb;
use pb::cluster_server::Cluster;
use tonic::{Request, Response, Status};

use super::{Context, status};

const ONE_MEMBER: &str = "ballast: this release runs clusters of one member";

/// The Cluster service.
#[derive(Clone, Debug)]
pub struct ClusterService(pub Arc<Context>);

#[tonic::async_trait]
impl Cluster for ClusterService {
    async fn member_add(
        &self,
        _request: Request<pb::MemberAddRequest>,
    ) -> Result<Response<pb::MemberAddResponse>, Status> {
        Err(Status::unimplemented(ONE_MEMBER))
    }

    async fn member_remove(
        &self,
        _request: Request<pb::MemberRemoveRequest>,
    ) -> Result<Response<pb::MemberRemoveResponse>, Status> {
        Err(Status::unimplemented(ONE_MEMBER))
    }

    async fn member_update(
        &self,
        _request: Request<pb::MemberUpdateRequest>,
    ) -> Result<Response<pb::MemberUpdateResponse>, Status> {
        Err(Status::unimplemented(ONE_MEMBER))
    }

    async fn member_list(
        &self,
        request: Request<pb::MemberListRequest>,
    ) -> Result<Response<pb::MemberListResponse>, Status> {
        if request.into_inner().linearizable {
            self.0
                .raft
                .read_barrier()
                .await
                .map_err(status::from_propose)?;
        }
        Ok(Response::new(pb::MemberListResponse {
            // etcd leaves the revision out here.
            header: Some(self.0.headers.at(0)),
            members: self.0.cluster.members(),
        }))
    }

    async fn member_promote(
        &self,
        _request: Request<pb::MemberPromoteRequest>,
    ) -> Result<Response<pb::MemberPromoteResponse>, Status> {
        Err(Status::unimplemented(ONE_MEMBER))
    }
}
