//! Maintenance: what is asked of this member.
//!
//! etcd: server/etcdserver/api/v3rpc/maintenance.go.

use std::pin::Pin;
use std::sync::Arc;

use ballast_api::error::Error;
use ballast_api::{API_VERSION, etcdserverpb as pb};
use futures::Stream;
use pb::alarm_request::AlarmAction;
use pb::downgrade_request::DowngradeAction;
use pb::maintenance_server::Maintenance;
use tonic::{Request, Response, Status};

use super::{Context, snapshot, status};
use crate::apply::Answer;
use crate::clock::Clock;
use crate::defrag::Cause;
use crate::metrics::disk as metrics;
use crate::version::{self, Version};

/// The Maintenance service.
#[derive(Clone, Debug)]
pub struct MaintenanceService(pub Arc<Context>);

#[tonic::async_trait]
impl Maintenance for MaintenanceService {
    async fn alarm(
        &self,
        request: Request<pb::AlarmRequest>,
    ) -> Result<Response<pb::AlarmResponse>, Status> {
        let request = request.into_inner();
        if request.action == AlarmAction::Get as i32 {
            // etcd sends it through the log; a barrier tells as much.
            self.0
                .raft
                .read_barrier()
                .await
                .map_err(status::from_propose)?;
            return Ok(Response::new(pb::AlarmResponse {
                header: Some(self.0.headers.at(self.0.store.view().revision())),
                alarms: self.0.alarms.get(request.alarm),
            }));
        }
        let (revision, answer) = self
            .0
            .propose(pb::InternalRaftRequest {
                alarm: Some(request),
                ..Default::default()
            })
            .await?;
        let Answer::Alarm(mut response) = answer else {
            return Err(super::unexpected(&answer));
        };
        response.header = Some(self.0.headers.at(revision));
        Ok(Response::new(response))
    }

    async fn status(
        &self,
        _request: Request<pb::StatusRequest>,
    ) -> Result<Response<pb::StatusResponse>, Status> {
        let context = &self.0;
        let raft = context.raft.status();
        let sizes = context.store.sizes();
        let mut errors = Vec::new();
        if raft.leader == 0 {
            errors.push(Error::NoLeader.text().to_owned());
        }
        errors.extend(
            context
                .alarms
                .get(pb::AlarmType::None as i32)
                .iter()
                .map(alarm_text),
        );
        Ok(Response::new(pb::StatusResponse {
            header: Some(context.headers.at(context.store.view().revision())),
            version: API_VERSION.to_owned(),
            db_size: sizes.allocated as i64,
            leader: raft.leader,
            raft_index: raft.committed_index,
            raft_term: raft.term,
            raft_applied_index: raft.applied_index,
            errors,
            db_size_in_use: sizes.in_use as i64,
            is_learner: raft.is_learner,
            storage_version: context.cluster.storage_version(),
            db_size_quota: context.limits.quota_told,
            downgrade_info: Some(match context.cluster.downgrade_target() {
                Some(target) => pb::DowngradeInfo {
                    enabled: true,
                    target_version: target.to_string(),
                },
                None => pb::DowngradeInfo::default(),
            }),
        }))
    }

    async fn defragment(
        &self,
        _request: Request<pb::DefragmentRequest>,
    ) -> Result<Response<pb::DefragmentResponse>, Status> {
        match self.0.defragmenter.run(Cause::Asked).await {
            // etcd answers without a header here.
            Ok(_) => Ok(Response::new(pb::DefragmentResponse::default())),
            Err(error) => Err(Status::unknown(error.to_string())),
        }
    }

    async fn hash(
        &self,
        _request: Request<pb::HashRequest>,
    ) -> Result<Response<pb::HashResponse>, Status> {
        let store = Arc::clone(&self.0.store);
        let turn = self.0.whole_reads.begin().await?;
        let started = Clock::default().now();
        let (hash, revision) = super::blocking(move || {
            let _turn = turn;
            store.hash()
        })
        .await?;
        metrics::HASH.observe((Clock::default().now() - started).as_secs_f64());
        Ok(Response::new(pb::HashResponse {
            header: Some(self.0.headers.at(revision)),
            hash,
        }))
    }

    async fn hash_kv(
        &self,
        request: Request<pb::HashKvRequest>,
    ) -> Result<Response<pb::HashKvResponse>, Status> {
        let revision = request.into_inner().revision;
        let hash = self.0.hash_kv(revision).await?;
        Ok(Response::new(pb::HashKvResponse {
            header: Some(self.0.headers.at(hash.current_revision)),
            hash: hash.hash,
            compact_revision: hash.compact_revision,
            hash_revision: hash.hash_revision,
        }))
    }

    type SnapshotStream = Pin<Box<dyn Stream<Item = Result<pb::SnapshotResponse, Status>> + Send>>;

    async fn snapshot(
        &self,
        _request: Request<pb::SnapshotRequest>,
    ) -> Result<Response<Self::SnapshotStream>, Status> {
        let store = Arc::clone(&self.0.store);
        let version = self.0.cluster.storage_version();
        let turn = self.0.whole_reads.begin().await?;
        Ok(Response::new(Box::pin(snapshot::stream(
            store, version, turn,
        ))))
    }

    async fn move_leader(
        &self,
        request: Request<pb::MoveLeaderRequest>,
    ) -> Result<Response<pb::MoveLeaderResponse>, Status> {
        let target = request.into_inner().target_id;
        if !self.0.raft.is_leader() {
            return Err(Error::NotLeader.into());
        }
        match self.0.cluster.member(target) {
            Some(member) if !member.is_learner => {}
            _ => return Err(Error::BadLeaderTransferee.into()),
        }
        if target != self.0.cluster.member_id {
            let moved = self.0.raft.transfer_leadership(target);
            let moved = tokio::time::timeout(self.0.limits.request_timeout, moved).await;
            if !moved.unwrap_or_default() {
                return Err(Status::unknown(
                    "etcdserver: request timed out, leader transfer took too long",
                ));
            }
        }
        Ok(Response::new(pb::MoveLeaderResponse::default()))
    }

    async fn downgrade(
        &self,
        request: Request<pb::DowngradeRequest>,
    ) -> Result<Response<pb::DowngradeResponse>, Status> {
        let request = request.into_inner();
        let action = DowngradeAction::try_from(request.action)
            .map_err(|_| Status::unknown("etcdserver: unknown method"))?;
        let context = &self.0;
        match action {
            DowngradeAction::Cancel => context.cancel_downgrade().await?,
            DowngradeAction::Validate => {
                context.check_downgrade(&request.version).await?;
            }
            DowngradeAction::Enable => {
                let target = context.check_downgrade(&request.version).await?;
                let enabled = version::set_downgrade(context, Some(target)).await;
                enabled.map_err(status::from_propose)?;
            }
        }
        let current = context.cluster.version_parsed();
        let current = current.ok_or(Error::ClusterVersionUnavailable)?;
        Ok(Response::new(pb::DowngradeResponse {
            header: Some(context.headers.at(context.store.view().revision())),
            version: current.short(),
        }))
    }
}

impl Context {
    /// Exactly one minor version down, and one at a time.
    async fn check_downgrade(&self, target: &str) -> Result<Version, Status> {
        let target = Version::parse(target).ok_or(Error::WrongDowngradeVersionFormat)?;
        let known = self.cluster.version_parsed();
        known.ok_or(Error::ClusterVersionUnavailable)?;
        // What is known here may be of yesterday.
        let barrier = self.raft.read_barrier().await;
        barrier.map_err(status::from_propose)?;
        let current = self.cluster.version_parsed();
        let current = current.ok_or(Error::ClusterVersionUnavailable)?;
        if !version::is_downgrade(current, target) {
            return Err(Error::InvalidDowngradeTargetVersion.into());
        }
        if self.cluster.downgrade_target().is_some() {
            return Err(Error::DowngradeInProcess.into());
        }
        Ok(target)
    }

    /// With nothing under way it passes too, as in etcd.
    async fn cancel_downgrade(&self) -> Result<(), Status> {
        let barrier = self.raft.read_barrier().await;
        barrier.map_err(status::from_propose)?;
        if self.cluster.downgrade_target().is_none() {
            tracing::warn!(
                error = Error::NoInflightDowngrade.text(),
                "failed to cancel downgrade"
            );
            return Ok(());
        }
        let cancelled = version::set_downgrade(self, None).await;
        cancelled.map_err(status::from_propose)
    }
}

impl Context {
    pub(super) async fn hash_kv(
        &self,
        revision: i64,
    ) -> Result<ballast_storage::mvcc::HashKv, Status> {
        let store = Arc::clone(&self.store);
        let turn = self.whole_reads.begin().await?;
        let started = Clock::default().now();
        let hashed = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            store.hash_kv(revision)
        });
        let hash = hashed
            .await
            .map_err(|_| Error::Stopped)?
            .map_err(status::from_read)?;
        metrics::HASH_REV.observe((Clock::default().now() - started).as_secs_f64());
        Ok(hash)
    }
}

/// An alarm as it reads in Status.errors: protobuf's text form, which leaves out what is zero.
fn alarm_text(alarm: &pb::AlarmMember) -> String {
    let name = match pb::AlarmType::try_from(alarm.alarm) {
        Ok(known) => known.as_str_name().to_owned(),
        Err(_) => alarm.alarm.to_string(),
    };
    match alarm.member_id {
        0 => format!("alarm:{name}"),
        member => format!("memberID:{member} alarm:{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_reads_as_in_protobufs_text_form() {
        for (member_id, alarm, text) in [
            (7, 1, "memberID:7 alarm:NOSPACE"),
            (0, 2, "alarm:CORRUPT"),
            (7, 9, "memberID:7 alarm:9"),
        ] {
            assert_eq!(alarm_text(&pb::AlarmMember { member_id, alarm }), text);
        }
    }
}
