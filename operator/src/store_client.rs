//! What the operator asks of a store: is it healthy, how large is it, make it smaller.
//!
//! Every call has a deadline: a store that hangs must not hold up its own repair. The health gate is
//! a linearizable member list, since a member that lost its quorum still answers Status.
//! No call here can read or write a key, so the operator never needs to see a Secret.

use std::time::Duration;

use async_trait::async_trait;
use ballast_api::etcdserverpb::alarm_request::AlarmAction;
use ballast_api::etcdserverpb::cluster_client::ClusterClient;
use ballast_api::etcdserverpb::maintenance_client::MaintenanceClient;
use ballast_api::etcdserverpb::{
    AlarmRequest, AlarmType, DefragmentRequest, MemberListRequest, StatusRequest,
};
use tonic::transport::{Channel, Endpoint};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// A defragmentation that takes longer is answered as failed, and looked at again by Status.
const DEFRAGMENT_TIMEOUT: Duration = Duration::from_mins(10);

/// A store that did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("store address {0:?} is not a URL")]
    Address(String),
    #[error("cannot connect to {endpoint}: {reason}")]
    Connect { endpoint: String, reason: String },
    #[error("{call} at {endpoint}: {code}: {message}")]
    Call {
        call: &'static str,
        endpoint: String,
        code: String,
        message: String,
    },
}

/// What a store says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreReport {
    pub cluster_id: u64,
    pub member_id: u64,
    pub leader_id: u64,
    /// API version.
    pub version: String,
    pub revision: i64,
    pub db_size: i64,
    pub db_size_in_use: i64,
    pub quota: i64,
    pub members: Vec<MemberReport>,
    pub no_space: bool,
    pub corrupt: bool,
}

/// One member of the store's own list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberReport {
    pub id: u64,
    pub name: String,
    pub learner: bool,
}

impl StoreReport {
    /// Share of the database that holds nothing, in percent.
    pub fn free_percent(&self) -> i64 {
        if self.db_size <= 0 {
            return 0;
        }
        let free = (self.db_size - self.db_size_in_use).max(0);
        i64::try_from(i128::from(free) * 100 / i128::from(self.db_size)).unwrap_or(0)
    }

    /// Name of the leader, if there is one.
    pub fn leader_name(&self) -> Option<&str> {
        let leader = self.members.iter().find(|m| m.id == self.leader_id)?;
        Some(&leader.name)
            .filter(|n| !n.is_empty())
            .map(String::as_str)
    }
}

/// The operator's side of a store. A trait, so that scenario tests bring a store of their own.
#[async_trait]
pub trait StoreClient: Send + Sync {
    /// Health and sizes; an error means that the store cannot serve a linearizable read.
    async fn report(&self, endpoint: &str) -> Result<StoreReport, StoreError>;
    /// Gives free space of the database back to the file system.
    async fn defragment(&self, endpoint: &str) -> Result<(), StoreError>;
    /// Lifts NOSPACE of that member.
    async fn disarm_no_space(&self, endpoint: &str, member_id: u64) -> Result<(), StoreError>;
}

/// The real thing, over gRPC.
#[derive(Clone, Copy, Debug, Default)]
pub struct GrpcStoreClient;

#[async_trait]
impl StoreClient for GrpcStoreClient {
    async fn report(&self, endpoint: &str) -> Result<StoreReport, StoreError> {
        let channel = connect(endpoint).await?;
        let fail = |call| move |status: tonic::Status| failed(call, endpoint, &status);
        let mut maintenance = MaintenanceClient::new(channel.clone());
        let members = ClusterClient::new(channel)
            .member_list(deadline(
                MemberListRequest { linearizable: true },
                CALL_TIMEOUT,
            ))
            .await
            .map_err(fail("member list"))?
            .into_inner();
        let status = maintenance
            .status(deadline(StatusRequest::default(), CALL_TIMEOUT))
            .await
            .map_err(fail("status"))?
            .into_inner();
        let get = AlarmRequest {
            action: AlarmAction::Get.into(),
            ..AlarmRequest::default()
        };
        let alarms = maintenance
            .alarm(deadline(get, CALL_TIMEOUT))
            .await
            .map_err(fail("alarm list"))?
            .into_inner()
            .alarms;
        let header = status.header.unwrap_or_default();
        let raised = |kind: AlarmType| alarms.iter().any(|a| a.alarm() == kind);
        Ok(StoreReport {
            cluster_id: header.cluster_id,
            member_id: header.member_id,
            leader_id: status.leader,
            version: status.version,
            revision: header.revision,
            db_size: status.db_size,
            db_size_in_use: status.db_size_in_use,
            quota: status.db_size_quota,
            members: members
                .members
                .into_iter()
                .map(|m| MemberReport {
                    id: m.id,
                    name: m.name,
                    learner: m.is_learner,
                })
                .collect(),
            no_space: raised(AlarmType::Nospace),
            corrupt: raised(AlarmType::Corrupt),
        })
    }

    async fn defragment(&self, endpoint: &str) -> Result<(), StoreError> {
        MaintenanceClient::new(connect(endpoint).await?)
            .defragment(deadline(DefragmentRequest {}, DEFRAGMENT_TIMEOUT))
            .await
            .map_err(|status| failed("defragment", endpoint, &status))?;
        Ok(())
    }

    async fn disarm_no_space(&self, endpoint: &str, member_id: u64) -> Result<(), StoreError> {
        let request = AlarmRequest {
            action: AlarmAction::Deactivate.into(),
            member_id,
            alarm: AlarmType::Nospace.into(),
        };
        MaintenanceClient::new(connect(endpoint).await?)
            .alarm(deadline(request, CALL_TIMEOUT))
            .await
            .map_err(|status| failed("alarm disarm", endpoint, &status))?;
        Ok(())
    }
}

async fn connect(endpoint: &str) -> Result<Channel, StoreError> {
    Endpoint::from_shared(endpoint.to_owned())
        .map_err(|_| StoreError::Address(endpoint.to_owned()))?
        .connect_timeout(CONNECT_TIMEOUT)
        .connect()
        .await
        .map_err(|error| StoreError::Connect {
            endpoint: endpoint.to_owned(),
            reason: root_cause(&error),
        })
}

fn deadline<T>(message: T, timeout: Duration) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(timeout);
    request
}

fn failed(call: &'static str, endpoint: &str, status: &tonic::Status) -> StoreError {
    StoreError::Call {
        call,
        endpoint: endpoint.to_owned(),
        code: format!("{:?}", status.code()),
        message: status.message().to_owned(),
    }
}

/// tonic says "transport error" and hides why.
fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
