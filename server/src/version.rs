//! The cluster version: that of the oldest member, so that nobody is told what it does not understand.
//!
//! The leader asks all members which version they run, and raises the cluster's to the lowest of them; one that does not answer holds it where it is.
//! A downgrade that was asked for lowers it by one minor version, and ends by itself once all members run the target.
//! Versions are etcd's API levels. What lies on the disk has a format of its own, which these map to (docs/format.md).
//!
//! For tests of rolling changes the variable `BALLAST_PRETEND_VERSION` makes a build say that it is another one.
//!
//! Not here: what the RPC answers (`rpc/maintenance.rs`), formats of entries (`raft/command.rs`) and of the database.
//!
//! etcd: server/etcdserver/version.

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ballast_api::ballastpeerpb as peerpb;
use ballast_api::{API_VERSION, etcdserverpb as pb, membershippb};
use tokio_util::sync::CancellationToken;

use crate::node::StartError;
use crate::peer::Purpose;
use crate::rpc::Context;

/// Between two looks at the members (etcd's monitorVersionInterval); shorter while the cluster's version is not this member's.
const INTERVAL: Duration = Duration::from_secs(4);
const INTERVAL_SHORT: Duration = Duration::from_millis(500);
/// What one member may take to say which version it runs.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Of a cluster of which not all members are known (etcd's MinClusterVersion).
const UNKNOWN: Version = Version { major: 3, minor: 0 };

/// The part of a version that matters between members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u64,
    pub minor: u64,
}

impl Version {
    /// Of "3.7", "3.7.0" and the like.
    pub fn parse(text: &str) -> Option<Self> {
        let numbers: Option<Vec<u64>> = text.split('.').map(|part| part.parse().ok()).collect();
        match numbers?.as_slice() {
            [major, minor] | [major, minor, _] => Some(Self {
                major: *major,
                minor: *minor,
            }),
            _ => None,
        }
    }

    /// This build's.
    pub fn own() -> Self {
        static OWN: LazyLock<Version> = LazyLock::new(|| {
            let pretended = std::env::var("BALLAST_PRETEND_VERSION").ok();
            let pretended = pretended.and_then(|text| Version::parse(&text));
            let own = || Version::parse(API_VERSION).expect("the API version is a version");
            pretended.unwrap_or_else(own)
        });
        *OWN
    }

    /// What it may be downgraded to.
    fn one_down(self) -> Option<Self> {
        Some(Self {
            minor: self.minor.checked_sub(1)?,
            ..self
        })
    }

    /// As answers have it.
    pub fn short(self) -> String {
        format!("{}.{}", self.major, self.minor)
    }
}

/// As it is stored.
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.0", self.major, self.minor)
    }
}

/// True when `target` is the version right below.
pub fn is_downgrade(from: Version, target: Version) -> bool {
    from.one_down() == Some(target)
}

/// What the cluster's version becomes; None when it stays. `lowest` of all members, None when one does not say.
fn decide(
    cluster: Option<Version>,
    lowest: Option<Version>,
    target: Option<Version>,
) -> Option<Version> {
    let Some(cluster) = cluster else {
        return Some(lowest.unwrap_or(UNKNOWN));
    };
    let lowest = lowest?;
    if let Some(target) = target {
        let possible = is_downgrade(cluster, target) && is_downgrade(lowest, target);
        return possible.then_some(target);
    }
    (cluster.major == lowest.major && cluster < lowest).then_some(lowest)
}

/// On the leader, until `stop`: raises the cluster's version, and ends downgrades that are done. `check_downgrades` of 0 never ends one.
pub async fn run(context: Arc<Context>, check_downgrades: Duration, stop: CancellationToken) {
    let mut since_check = Duration::ZERO;
    let mut changes = context.raft.changes();
    let mut led = false;
    loop {
        let settled = context.cluster.version_parsed() == Some(Version::own());
        let pause = if settled { INTERVAL } else { INTERVAL_SHORT };
        let pause = match check_downgrades {
            Duration::ZERO => pause,
            every => pause.min(every),
        };
        // A new leader does not wait, so that a cluster has a version about as soon as it serves.
        let elected = async {
            while led || !context.raft.is_leader() {
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                led &= context.raft.is_leader();
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => since_check += pause,
            () = elected => {}
        }
        led = context.raft.is_leader();
        if !led {
            continue;
        }
        let versions = ask_all(&context).await;
        update(&context, &versions).await;
        if !check_downgrades.is_zero() && since_check >= check_downgrades {
            since_check = Duration::ZERO;
            end_downgrade(&context, &versions).await;
        }
    }
}

/// Of all members; None for one that does not say.
async fn ask_all(context: &Context) -> Vec<Option<Version>> {
    let members = context.cluster.members();
    let asked = members.iter().map(|member| async {
        if member.id == context.cluster.member_id {
            return Some(Version::own());
        }
        let mut client = context.raft.peers().client(member.id, Purpose::Forward)?;
        let asked = client.versions(peerpb::VersionsRequest {});
        let answer = tokio::time::timeout(ANSWER_MAX, asked).await.ok()?;
        let version = Version::parse(&answer.ok()?.into_inner().server)?;
        if version > Version::own() {
            tracing::warn!(
                local_member_version = %Version::own(),
                remote_member_id = %format!("{:x}", member.id),
                remote_member_version = %version,
                "leader found higher-versioned member"
            );
        }
        Some(version)
    });
    futures::future::join_all(asked).await
}

async fn update(context: &Context, versions: &[Option<Version>]) {
    let lowest: Option<Vec<Version>> = versions.iter().copied().collect();
    let lowest = lowest.and_then(|versions| versions.into_iter().min());
    let cluster = context.cluster.version_parsed();
    let target = context.cluster.downgrade_target();
    if let Some(next) = decide(cluster, lowest, target) {
        set(context, next).await;
    }
}

/// Proposes a cluster version.
pub async fn set(context: &Context, next: Version) {
    let from = context.cluster.version();
    let request = pb::InternalRaftRequest {
        header: Some(context.ids.header()),
        cluster_version_set: Some(membershippb::ClusterVersionSetRequest {
            ver: next.to_string(),
        }),
        ..Default::default()
    };
    match context.raft.propose(request).await {
        Ok(_) => tracing::info!(
            from = from.as_deref().unwrap_or("not_decided"),
            to = %next,
            "cluster version is updated"
        ),
        Err(error) => tracing::warn!(%error, "failed to update cluster version"),
    }
}

async fn end_downgrade(context: &Context, versions: &[Option<Version>]) {
    let Some(target) = context.cluster.downgrade_target() else {
        return;
    };
    if versions.iter().all(|version| *version == Some(target)) {
        tracing::info!(cluster_version = %target, "the cluster has been downgraded");
        if let Err(error) = set_downgrade(context, None).await {
            tracing::warn!(%error, "failed to cancel downgrade");
        }
    }
}

/// Proposes a downgrade to `target`, or its end.
pub async fn set_downgrade(
    context: &Context,
    target: Option<Version>,
) -> Result<(), crate::raft::ProposeError> {
    let request = pb::InternalRaftRequest {
        header: Some(context.ids.header()),
        downgrade_info_set: Some(membershippb::DowngradeInfoSetRequest {
            enabled: target.is_some(),
            ver: target.map_or_else(String::new, |target| target.to_string()),
        }),
        ..Default::default()
    };
    context.raft.propose(request).await.map(|_| ())
}

/// The cluster has a version that this build does not speak.
pub fn stop_as_too_old(determined: Version) -> ! {
    let own = Version::own();
    let error = StartError::TooOld { own, determined };
    tracing::error!(%error, "stopping this member");
    std::process::exit(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Option<Version> {
        Version::parse(text)
    }

    #[test]
    fn the_oldest_member_decides_and_a_downgrade_lowers_by_one() {
        for (cluster, lowest, target, expected) in [
            // A new cluster, before and after all are known.
            ("", "", "", "3.0"),
            ("", "3.7.3", "", "3.7"),
            ("3.0.0", "3.7.3", "", "3.7"),
            ("3.6.0", "", "", ""),
            ("3.6.0", "3.6.9", "", ""),
            ("3.6.0", "3.7.0", "", "3.7"),
            // Never down by itself, and not over a major version.
            ("3.7.0", "3.6.0", "", ""),
            ("3.7.0", "4.0.0", "", ""),
            ("3.7.0", "3.7.3", "3.6.0", "3.6"),
            // Done, or not possible any more.
            ("3.6.0", "3.6.9", "3.6.0", ""),
            ("3.7.0", "3.8.0", "3.6.0", ""),
            ("3.7.0", "3.7.0", "3.5.0", ""),
        ] {
            assert_eq!(
                decide(version(cluster), version(lowest), version(target)),
                version(expected),
                "{cluster} {lowest} {target}"
            );
        }
    }

    #[test]
    fn versions_are_two_or_three_numbers() {
        for (text, expected) in [
            ("3.7", Some("3.7.0")),
            ("3.7.3", Some("3.7.0")),
            ("3", None),
            ("3.x", None),
            ("3.7.3.1", None),
            ("", None),
        ] {
            let got = version(text).map(|version| version.to_string());
            assert_eq!(got.as_deref(), expected, "{text}");
        }
    }
}
