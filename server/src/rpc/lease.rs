//! Lease: grant and revoke through the log; keepalive by the leader's clock, never logged.
//!
//! A keepalive is acknowledged only after a barrier: a leader that was replaced without knowing acknowledges nothing.
//!
//! etcd: server/etcdserver/api/v3rpc/lease.go.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use futures::{Stream, StreamExt};
use pb::lease_server::Lease;
use tonic::{Request, Response, Status, Streaming};

use super::{Context, call, quota, status};
use crate::apply::{Answer, quota as cost};
use crate::lease::Renewal;
use crate::spans;

/// How long a keepalive of an expired lease waits for the revocation to be decided.
const REVOKE_WAIT: Duration = Duration::from_secs(7);

/// The Lease service.
#[derive(Clone, Debug)]
pub struct LeaseService(pub Arc<Context>);

#[tonic::async_trait]
impl Lease for LeaseService {
    async fn lease_grant(
        &self,
        request: Request<pb::LeaseGrantRequest>,
    ) -> Result<Response<pb::LeaseGrantResponse>, Status> {
        let mut request = request.into_inner();
        quota::check(&self.0, cost::LEASE_COST_BYTES).await?;
        while request.id == 0 {
            request.id = (self.0.ids.next() & i64::MAX.cast_unsigned()).cast_signed();
        }
        // The minimum is configuration, which apply does not read.
        request.ttl = request.ttl.max(self.0.limits.lease_ttl_secs_min);
        let (revision, answer) = self
            .0
            .propose(pb::InternalRaftRequest {
                lease_grant: Some(request),
                ..Default::default()
            })
            .await?;
        let Answer::LeaseGrant(mut response) = answer else {
            return Err(super::unexpected(&answer));
        };
        response.header = Some(self.0.headers.at(revision));
        Ok(Response::new(response))
    }

    async fn lease_revoke(
        &self,
        request: Request<pb::LeaseRevokeRequest>,
    ) -> Result<Response<pb::LeaseRevokeResponse>, Status> {
        let (revision, answer) = self
            .0
            .propose(pb::InternalRaftRequest {
                lease_revoke: Some(request.into_inner()),
                ..Default::default()
            })
            .await?;
        let Answer::LeaseRevoke(mut response) = answer else {
            return Err(super::unexpected(&answer));
        };
        response.header = Some(self.0.headers.at(revision));
        Ok(Response::new(response))
    }

    type LeaseKeepAliveStream =
        Pin<Box<dyn Stream<Item = Result<pb::LeaseKeepAliveResponse, Status>> + Send>>;

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<pb::LeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        let context = Arc::clone(&self.0);
        let answers = request.into_inner().then(move |request| {
            let context = Arc::clone(&context);
            async move { keep_alive(&context, request?.id).await }
        });
        Ok(Response::new(Box::pin(ending_with_the_first_error(
            answers,
        ))))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<pb::LeaseTimeToLiveRequest>,
    ) -> Result<Response<pb::LeaseTimeToLiveResponse>, Status> {
        let request = request.into_inner();
        self.0
            .raft
            .read_barrier()
            .await
            .map_err(status::from_propose)?;
        let header = Some(self.0.headers.at(self.0.store.view().revision()));
        let response = match self.0.lessor.describe(request.id, request.keys) {
            Some(lease) => pb::LeaseTimeToLiveResponse {
                header,
                id: request.id,
                ttl: lease.remaining_secs,
                granted_ttl: lease.granted_secs,
                keys: lease.keys,
            },
            None => pb::LeaseTimeToLiveResponse {
                header,
                id: request.id,
                ttl: -1,
                ..Default::default()
            },
        };
        Ok(Response::new(response))
    }

    async fn lease_leases(
        &self,
        _request: Request<pb::LeaseLeasesRequest>,
    ) -> Result<Response<pb::LeaseLeasesResponse>, Status> {
        let leases = self.0.lessor.ids();
        Ok(Response::new(pb::LeaseLeasesResponse {
            header: Some(self.0.headers.at(self.0.store.view().revision())),
            leases: leases
                .into_iter()
                .map(|id| pb::LeaseStatus { id })
                .collect(),
        }))
    }
}

/// Renews one lease. The header is taken before, so that its revision is not above that of a revocation that came first.
async fn keep_alive(context: &Context, id: i64) -> Result<pb::LeaseKeepAliveResponse, Status> {
    let _span = call::child(|| spans::lease_renew(id));
    let header = Some(context.headers.at(context.store.view().revision()));
    context
        .raft
        .read_barrier()
        .await
        .map_err(status::from_propose)?;
    let ttl = loop {
        let changed = context.lessor.changed();
        match context.lessor.renew(id) {
            Renewal::Renewed(ttl) => {
                crate::metrics::LEASES_RENEWED.inc();
                break ttl;
            }
            Renewal::Unknown => break 0,
            Renewal::Checkpointed => {
                let checkpoint = pb::LeaseCheckpoint {
                    id,
                    remaining_ttl: 0,
                };
                context
                    .propose(pb::InternalRaftRequest {
                        lease_checkpoint: Some(pb::LeaseCheckpointRequest {
                            checkpoints: vec![checkpoint],
                        }),
                        ..Default::default()
                    })
                    .await?;
            }
            // Just elected: the lessor is told in a moment.
            Renewal::NotLeading if context.raft.is_leader() => {
                if tokio::time::timeout(REVOKE_WAIT, changed).await.is_err() {
                    return Err(Error::LeaderChanged.into());
                }
            }
            Renewal::NotLeading => return Err(Error::LeaderChanged.into()),
            Renewal::Expired => {
                if tokio::time::timeout(REVOKE_WAIT, changed).await.is_err() {
                    return Err(Error::Timeout.into());
                }
            }
        }
    };
    Ok(pb::LeaseKeepAliveResponse { header, id, ttl })
}

/// Passes answers on up to and with the first error.
fn ending_with_the_first_error<T, S>(answers: S) -> impl Stream<Item = Result<T, Status>>
where
    S: Stream<Item = Result<T, Status>>,
{
    answers.scan(false, |ended, answer| {
        let pass = !*ended;
        *ended = answer.is_err();
        futures::future::ready(pass.then_some(answer))
    })
}
