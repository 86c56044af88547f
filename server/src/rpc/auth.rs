//! Auth on a store without users: what etcd answers then. Users and roles come with a later release.
//!
//! etcd: server/etcdserver/api/v3rpc/auth.go.

use std::sync::Arc;

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use pb::auth_server::Auth;
use tonic::{Request, Response, Status};

use super::Context;

/// The auth revision of a store that never had a user.
const FIRST_AUTH_REVISION: u64 = 1;
const NO_USERS: &str = "ballast: this release has no users and roles";

/// The Auth service.
#[derive(Clone, Debug)]
pub struct AuthService(pub Arc<Context>);

type Answer<T> = Result<Response<T>, Status>;

impl AuthService {
    fn header(&self) -> pb::ResponseHeader {
        self.0.headers.at(self.0.store.view().revision())
    }
}

#[tonic::async_trait]
impl Auth for AuthService {
    async fn auth_enable(
        &self,
        _: Request<pb::AuthEnableRequest>,
    ) -> Answer<pb::AuthEnableResponse> {
        Err(Error::RootUserNotExist.into())
    }

    async fn auth_disable(
        &self,
        _: Request<pb::AuthDisableRequest>,
    ) -> Answer<pb::AuthDisableResponse> {
        Ok(Response::new(pb::AuthDisableResponse {
            header: Some(self.header()),
        }))
    }

    async fn auth_status(
        &self,
        _: Request<pb::AuthStatusRequest>,
    ) -> Answer<pb::AuthStatusResponse> {
        Ok(Response::new(pb::AuthStatusResponse {
            header: Some(self.header()),
            enabled: false,
            auth_revision: FIRST_AUTH_REVISION,
        }))
    }

    async fn authenticate(
        &self,
        _: Request<pb::AuthenticateRequest>,
    ) -> Answer<pb::AuthenticateResponse> {
        Err(Error::AuthNotEnabled.into())
    }

    async fn user_add(
        &self,
        request: Request<pb::AuthUserAddRequest>,
    ) -> Answer<pb::AuthUserAddResponse> {
        if request.get_ref().name.is_empty() {
            return Err(Error::UserEmpty.into());
        }
        Err(Status::unimplemented(NO_USERS))
    }

    async fn user_get(
        &self,
        _: Request<pb::AuthUserGetRequest>,
    ) -> Answer<pb::AuthUserGetResponse> {
        Err(Error::UserNotFound.into())
    }

    async fn user_list(
        &self,
        _: Request<pb::AuthUserListRequest>,
    ) -> Answer<pb::AuthUserListResponse> {
        Ok(Response::new(pb::AuthUserListResponse {
            header: Some(self.header()),
            ..Default::default()
        }))
    }

    async fn user_delete(
        &self,
        _: Request<pb::AuthUserDeleteRequest>,
    ) -> Answer<pb::AuthUserDeleteResponse> {
        Err(Error::UserNotFound.into())
    }

    async fn user_change_password(
        &self,
        _: Request<pb::AuthUserChangePasswordRequest>,
    ) -> Answer<pb::AuthUserChangePasswordResponse> {
        Err(Error::UserNotFound.into())
    }

    async fn user_grant_role(
        &self,
        _: Request<pb::AuthUserGrantRoleRequest>,
    ) -> Answer<pb::AuthUserGrantRoleResponse> {
        Err(Error::UserNotFound.into())
    }

    async fn user_revoke_role(
        &self,
        _: Request<pb::AuthUserRevokeRoleRequest>,
    ) -> Answer<pb::AuthUserRevokeRoleResponse> {
        Err(Error::UserNotFound.into())
    }

    async fn role_add(
        &self,
        request: Request<pb::AuthRoleAddRequest>,
    ) -> Answer<pb::AuthRoleAddResponse> {
        if request.get_ref().name.is_empty() {
            return Err(Error::RoleEmpty.into());
        }
        Err(Status::unimplemented(NO_USERS))
    }

    async fn role_get(
        &self,
        _: Request<pb::AuthRoleGetRequest>,
    ) -> Answer<pb::AuthRoleGetResponse> {
        Err(Error::RoleNotFound.into())
    }

    async fn role_list(
        &self,
        _: Request<pb::AuthRoleListRequest>,
    ) -> Answer<pb::AuthRoleListResponse> {
        Ok(Response::new(pb::AuthRoleListResponse {
            header: Some(self.header()),
            ..Default::default()
        }))
    }

    async fn role_delete(
        &self,
        _: Request<pb::AuthRoleDeleteRequest>,
    ) -> Answer<pb::AuthRoleDeleteResponse> {
        Err(Error::RoleNotFound.into())
    }

    async fn role_grant_permission(
        &self,
        _: Request<pb::AuthRoleGrantPermissionRequest>,
    ) -> Answer<pb::AuthRoleGrantPermissionResponse> {
        Err(Error::RoleNotFound.into())
    }

    async fn role_revoke_permission(
        &self,
        _: Request<pb::AuthRoleRevokePermissionRequest>,
    ) -> Answer<pb::AuthRoleRevokePermissionResponse> {
        Err(Error::RoleNotFound.into())
    }
}
