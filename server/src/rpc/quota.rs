//! The space quota as this member sees it: a request that would exceed it is refused here and raises the alarm, which is
//! what the whole cluster then obeys.
//!
//! etcd: server/etcdserver/api/v3rpc/quota.go.

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;

use super::Context;

/// Refuses a request of this cost when the database has no room for it.
pub(super) async fn check(context: &Context, cost: u64) -> Result<(), Error> {
    let Some(quota) = context.limits.quota_bytes else {
        return Ok(());
    };
    if cost == 0 || context.store.sizes().allocated + cost < quota {
        return Ok(());
    }
    if !context.alarms.no_space() {
        let raise = pb::AlarmRequest {
            action: pb::alarm_request::AlarmAction::Activate as i32,
            member_id: context.cluster.member_id,
            alarm: pb::AlarmType::Nospace as i32,
        };
        let request = pb::InternalRaftRequest {
            header: Some(context.ids.header()),
            alarm: Some(raise),
            ..Default::default()
        };
        match context.raft.propose(request).await {
            Ok(_) => tracing::warn!(quota_bytes = quota, "raised the alarm NOSPACE"),
            Err(error) => tracing::warn!(error = %error, "failed to raise the alarm NOSPACE"),
        }
    }
    Err(Error::NoSpace)
}
