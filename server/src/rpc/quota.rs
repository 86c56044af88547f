//! The space quota as this member sees it: a request that would exceed it is refused here and raises the alarm, which is
//! what the whole cluster then obeys.
//!
//! Before it raises it, a member returns the space it can: the request that is over the quota waits for that, as long as a request
//! may wait, and is then decided anew. Nothing of it was proposed, so a client may repeat what timed out.
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
    if cost == 0 {
        return Ok(());
    }
    let allocated = || context.store.sizes().allocated;
    let has_room = || allocated() + cost < quota;
    if has_room() {
        context.defragmenter.look_at_quota(allocated(), quota);
        return Ok(());
    }
    if !context.alarms.no_space() {
        let making = context.defragmenter.make_room(quota, cost);
        tokio::time::timeout(context.limits.request_timeout, making)
            .await
            .map_err(|_| Error::Timeout)?;
        if has_room() {
            return Ok(());
        }
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
