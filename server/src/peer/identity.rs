//! Who asks, in each request's metadata, and whether it may.
//!
//!     ballast-cluster    the cluster's id          ballast-from   the asking member
//!     ballast-to         whom it means to ask
//!
//! Promises: a member of another cluster, one that was removed and one that means somebody else are refused, and both sides say so.
//!
//! etcd: checkClusterCompatibilityFromHeader in server/etcdserver/api/rafthttp.

use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Code, Request, Status};

const CLUSTER: &str = "ballast-cluster";
const FROM: &str = "ballast-from";
const TO: &str = "ballast-to";

/// What a removed member is told, by which it knows.
pub const REMOVED: &str = "the member has been permanently removed from the cluster";
const OTHER_CLUSTER: &str = "cluster ID mismatch";
const SOMEBODY_ELSE: &str = "member ID mismatch";

/// A member of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whose {
    pub cluster_id: u64,
    pub member_id: u64,
}

/// Puts into each request who asks whom.
#[derive(Clone, Debug)]
pub struct Introduce {
    cluster: MetadataValue<Ascii>,
    from: MetadataValue<Ascii>,
    to: MetadataValue<Ascii>,
}

impl Introduce {
    pub fn new(whose: Whose, to: u64) -> Self {
        let value = |id: u64| {
            MetadataValue::try_from(format!("{id:x}")).expect("hexadecimal digits are ASCII")
        };
        Self {
            cluster: value(whose.cluster_id),
            from: value(whose.member_id),
            to: value(to),
        }
    }
}

impl Interceptor for Introduce {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let metadata = request.metadata_mut();
        metadata.insert(CLUSTER, self.cluster.clone());
        metadata.insert(FROM, self.from.clone());
        metadata.insert(TO, self.to.clone());
        Ok(request)
    }
}

/// The asking member, or why it is not answered.
pub fn check(
    metadata: &MetadataMap,
    own: Whose,
    is_removed: impl FnOnce(u64) -> bool,
) -> Result<u64, Status> {
    let id = |name: &str| {
        let value = metadata.get(name)?.to_str().ok()?;
        u64::from_str_radix(value, 16).ok()
    };
    let (Some(cluster), Some(from), Some(to)) = (id(CLUSTER), id(FROM), id(TO)) else {
        return Err(Status::unauthenticated("a member says who it is"));
    };
    if cluster != own.cluster_id {
        tracing::error!(
            remote_peer_id = %format!("{from:x}"),
            remote_cluster_id = %format!("{cluster:x}"),
            local_cluster_id = %format!("{:x}", own.cluster_id),
            "request cluster ID mismatch"
        );
        return Err(Status::failed_precondition(OTHER_CLUSTER));
    }
    if is_removed(from) {
        tracing::warn!(
            remote_peer_id = %format!("{from:x}"),
            "rejected a request of a member that was removed from the cluster"
        );
        return Err(Status::failed_precondition(REMOVED));
    }
    if to != own.member_id {
        tracing::error!(
            remote_peer_id = %format!("{from:x}"),
            requested_member_id = %format!("{to:x}"),
            local_member_id = %format!("{:x}", own.member_id),
            "request meant for another member: its peer URL leads here"
        );
        return Err(Status::failed_precondition(SOMEBODY_ELSE));
    }
    Ok(from)
}

/// True when the status says that this member was removed.
pub fn says_removed(status: &Status) -> bool {
    status.code() == Code::FailedPrecondition && status.message() == REMOVED
}

/// True when the other side takes us for a stranger: nothing that time mends.
pub fn says_stranger(status: &Status) -> bool {
    status.code() == Code::FailedPrecondition
        && matches!(status.message(), OTHER_CLUSTER | SOMEBODY_ELSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_and_the_removed_are_refused() {
        let own = Whose {
            cluster_id: 1,
            member_id: 2,
        };
        let asked = |cluster_id, member_id, to| {
            let whose = Whose {
                cluster_id,
                member_id,
            };
            let request = Introduce::new(whose, to).call(Request::new(())).unwrap();
            check(request.metadata(), own, |id| id == 9)
        };
        assert_eq!(asked(1, 7, 2).unwrap(), 7);
        assert!(says_stranger(&asked(3, 7, 2).unwrap_err()));
        assert!(says_stranger(&asked(1, 7, 4).unwrap_err()));
        assert!(says_removed(&asked(1, 9, 2).unwrap_err()));
        assert!(check(&MetadataMap::new(), own, |_| false).is_err());
    }
}
