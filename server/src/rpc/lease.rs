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
use tonic::{Code, Request, Response, Status, Streaming};

use super::{Context, call, quota, status};
use crate::apply::{Answer, quota as cost};
use crate::lease::Renewal;
use crate::peer::{Client, Purpose};
use crate::spans;

/// How long a keepalive of an expired lease waits for the revocation to be decided.
const REVOKE_WAIT: Duration = Duration::from_secs(7);

/// Between attempts at a leader.
const LEADER_RETRY: Duration = Duration::from_millis(50);

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
        let answer = time_to_live(&self.0, request.into_inner()).await?;
        Ok(Response::new(answer))
    }

    async fn lease_leases(
        &self,
        _request: Request<pb::LeaseLeasesRequest>,
    ) -> Result<Response<pb::LeaseLeasesResponse>, Status> {
        self.0
            .raft
            .read_barrier()
            .await
            .map_err(status::from_propose)?;
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

/// Asks the leader, whoever it is: only its clock counts. One that does not answer, or leads no longer, is asked again, or its successor, until
/// the request's time is over.
async fn ask_leader<T, Here, There>(
    context: &Context,
    here: impl Fn() -> Here,
    there: impl Fn(Client) -> There,
) -> Result<T, Status>
where
    Here: Future<Output = Result<T, Status>>,
    There: Future<Output = Result<T, Status>>,
{
    if context.raft.is_leader() {
        match here().await {
            Err(status) if may_ask_again(&status) => {}
            answer => return answer,
        }
    }
    let asked = async {
        loop {
            let leader = context.raft.wait_for_leader().await;
            let leader = leader.map_err(status::from_propose)?;
            let answer = if leader == context.cluster.member_id {
                here().await
            } else if let Some(client) = context.raft.peers().client(leader, Purpose::Forward) {
                there(client).await
            } else {
                Err(Error::NotLeader.into())
            };
            match answer {
                Err(status) if may_ask_again(&status) => {
                    tokio::time::sleep(LEADER_RETRY).await;
                }
                answer => return answer,
            }
        }
    };
    // Large, and on the leader seldom needed.
    tokio::time::timeout(context.limits.request_timeout, Box::pin(asked))
        .await
        .map_err(|_| Error::Timeout)?
}

/// Another leader may answer.
fn may_ask_again(status: &Status) -> bool {
    let is = |error: Error| status.message() == error.text();
    is(Error::NotLeader)
        || is(Error::LeaderChanged)
        || (status.code() == Code::Unavailable && !is(Error::Stopped) && !is(Error::Timeout))
}

async fn keep_alive(context: &Context, id: i64) -> Result<pb::LeaseKeepAliveResponse, Status> {
    let _span = call::child(|| spans::lease_renew(id));
    // Before, so that its revision is not above that of a revocation that came first.
    let header = Some(context.headers.at(context.store.view().revision()));
    let answer = ask_leader(
        context,
        || keep_alive_as_leader(context, id),
        |mut client| async move {
            let request = pb::LeaseKeepAliveRequest { id };
            Ok(client.lease_keep_alive(request).await?.into_inner())
        },
    )
    .await?;
    Ok(pb::LeaseKeepAliveResponse { header, ..answer })
}

/// Renews one lease, on the leader.
pub(super) async fn keep_alive_as_leader(
    context: &Context,
    id: i64,
) -> Result<pb::LeaseKeepAliveResponse, Status> {
    context.confirm_leads().await?;
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
    Ok(pb::LeaseKeepAliveResponse {
        header: None,
        id,
        ttl,
    })
}

async fn time_to_live(
    context: &Context,
    request: pb::LeaseTimeToLiveRequest,
) -> Result<pb::LeaseTimeToLiveResponse, Status> {
    let answer = ask_leader(
        context,
        || time_to_live_as_leader(context, request),
        |mut client| async move { Ok(client.lease_time_to_live(request).await?.into_inner()) },
    )
    .await?;
    let header = Some(context.headers.at(context.store.view().revision()));
    Ok(pb::LeaseTimeToLiveResponse { header, ..answer })
}

/// What remains of a lease, on the leader.
pub(super) async fn time_to_live_as_leader(
    context: &Context,
    request: pb::LeaseTimeToLiveRequest,
) -> Result<pb::LeaseTimeToLiveResponse, Status> {
    context.confirm_leads().await?;
    Ok(match context.lessor.describe(request.id, request.keys) {
        Some(lease) => pb::LeaseTimeToLiveResponse {
            header: None,
            id: request.id,
            ttl: lease.remaining_secs,
            granted_ttl: lease.granted_secs,
            keys: lease.keys,
        },
        None => pb::LeaseTimeToLiveResponse {
            header: None,
            id: request.id,
            ttl: -1,
            ..Default::default()
        },
    })
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
