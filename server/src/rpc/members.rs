//! Changes of the membership: whether they are allowed, and the leader that makes them.
//!
//!     any member:  pass it on to the leader, answer once the change is applied here
//!     the leader:  one at a time; everything committed is known; etcd's checks in etcd's order; then the Raft layer
//!
//! Promises: an id is never used again. A change whose fate is unknown is not tried again here.
//!
//! etcd: AddMember and the others in server/etcdserver/server.go, ValidateConfigurationChange in server/etcdserver/api/membership/cluster.go.

use std::time::{Duration, UNIX_EPOCH};

use ballast_api::ballastpeerpb as peerpb;
use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use peerpb::change_members_request::Change as Asked;
use tonic::Status;

use super::{Context, status};
use crate::clock::Clock;
use crate::cluster;
use crate::config::urls::Url;
use crate::metrics;
use crate::peer::Purpose;
use crate::raft::ProposeError;
use crate::raft::members::Change;

/// How long a member must have been reachable to count as healthy (etcd: HealthInterval).
const HEALTHY_AFTER: Duration = Duration::from_secs(5);
/// A learner that has so much of the leader's log may vote (etcd: readyPercentThreshold).
const READY_SHARE: f64 = 0.9;
/// Between attempts at a leader that is none.
const RETRY: Duration = Duration::from_millis(50);

/// What the flags say of membership changes.
#[derive(Clone, Copy, Debug)]
pub struct MemberRules {
    /// `--strict-reconfig-check`.
    pub strict: bool,
    /// `--max-learners`.
    pub learners_max: usize,
    pub clock: Clock,
}

/// Has the leader make a change, whoever it is, and waits until it is applied here.
pub(super) async fn change(
    context: &Context,
    asked: Asked,
) -> Result<peerpb::ChangeMembersReply, Status> {
    let made = async {
        let reply = loop {
            let leader = context.raft.wait_for_leader().await;
            let leader = leader.map_err(status::from_propose)?;
            let answer = if leader == context.cluster.member_id {
                change_as_leader(context, asked.clone()).await
            } else if let Some(mut client) = context.raft.peers().client(leader, Purpose::Forward) {
                let request = peerpb::ChangeMembersRequest {
                    change: Some(asked.clone()),
                };
                let answer = client.change_members(request).await;
                answer.map(tonic::Response::into_inner)
            } else {
                Err(Error::NotLeader.into())
            };
            match answer {
                // It says that it did nothing.
                Err(status) if status.message() == Error::NotLeader.text() => {
                    tokio::time::sleep(RETRY).await;
                }
                answer => break answer?,
            }
        };
        let mut applied = context.raft.applied();
        let here = applied.wait_for(|applied| *applied >= reply.index).await;
        here.map_err(|_| Error::Stopped)?;
        Ok(reply)
    };
    tokio::time::timeout(context.limits.request_timeout, made)
        .await
        .map_err(|_| Error::Timeout)?
}

/// Makes a change, or says why not. `NotLeader` says that nothing was done.
pub(super) async fn change_as_leader(
    context: &Context,
    asked: Asked,
) -> Result<peerpb::ChangeMembersReply, Status> {
    let lock = context.raft.lock_changes().await;
    context.confirm_leads().await?;
    let promotes = matches!(asked, Asked::Promote(_));
    let change = match derive(context, asked) {
        Ok(change) => change,
        Err(error) => {
            tracing::warn!(%error, "rejecting a membership change");
            if promotes {
                metrics::peer::promotion_failed(error.text());
            }
            return Err(error.into());
        }
    };
    let known: Vec<(u64, Vec<String>)> = context
        .cluster
        .members()
        .into_iter()
        .map(|member| (member.id, member.peer_ur_ls))
        .collect();
    let made = async {
        context.raft.complete_urls(&lock, &known).await?;
        context.raft.change(&lock, &change).await
    };
    let index = made.await.map_err(|error| match error {
        ProposeError::NoLeader => Error::NotLeader.into(),
        error => status::from_propose(error),
    })?;
    if promotes {
        metrics::LEARNERS_PROMOTED.inc();
    }
    let member = match &change {
        Change::AddVoter { id, urls } | Change::AddLearner { id, urls } => Some(pb::Member {
            id: *id,
            peer_ur_ls: urls.clone(),
            is_learner: matches!(change, Change::AddLearner { .. }),
            ..Default::default()
        }),
        _ => None,
    };
    Ok(peerpb::ChangeMembersReply {
        index,
        member,
        members: context.cluster.members(),
    })
}

/// The change that a request asks for, if it is allowed.
fn derive(context: &Context, asked: Asked) -> Result<Change, Error> {
    let members = context.cluster.members();
    let find = |id: u64| members.iter().find(|member| member.id == id);
    match asked {
        Asked::Add(add) => {
            let urls = peer_urls(&add.peer_ur_ls)?;
            may_add(context, &members, add.is_learner)?;
            let id = new_id(&urls, context.rules.clock);
            if context.cluster.is_removed(id) {
                return Err(Error::MemberNotFound);
            }
            if find(id).is_some() {
                return Err(Error::MemberExist);
            }
            check_urls_are_free(&members, &urls, None)?;
            if !add.is_learner {
                return Ok(Change::AddVoter { id, urls });
            }
            let learners = members.iter().filter(|member| member.is_learner).count();
            if learners >= context.rules.learners_max {
                return Err(Error::TooManyLearners);
            }
            Ok(Change::AddLearner { id, urls })
        }
        Asked::Promote(promote) => {
            let id = promote.id;
            check_ready(context, id)?;
            if context.rules.strict && !enough_started(&members, |_| true, 1, 1) {
                return Err(Error::MemberNotEnoughStarted);
            }
            let member = find(id).ok_or(Error::MemberNotFound)?;
            if !member.is_learner {
                return Err(Error::MemberNotLearner);
            }
            Ok(Change::Promote { id })
        }
        Asked::Remove(remove) => {
            let id = remove.id;
            may_remove(context, &members, id)?;
            find(id).ok_or(Error::MemberNotFound)?;
            Ok(Change::Remove { id })
        }
        Asked::Update(update) => {
            let id = update.id;
            find(id).ok_or(Error::MemberNotFound)?;
            let urls = peer_urls(&update.peer_ur_ls)?;
            check_urls_are_free(&members, &urls, Some(id))?;
            Ok(Change::Update { id, urls })
        }
    }
}

/// Sorted, as the flags have them.
fn peer_urls(texts: &[String]) -> Result<Vec<String>, Error> {
    let parsed: Result<Vec<Url>, String> = texts.iter().map(|text| Url::parse(text)).collect();
    let mut urls = parsed.map_err(|_| Error::MemberBadURLs)?;
    if urls.is_empty() {
        return Err(Error::MemberBadURLs);
    }
    urls.sort();
    Ok(urls.iter().map(ToString::to_string).collect())
}

/// Of a member that joins later: its URLs and the second in which it was added.
fn new_id(urls: &[String], clock: Clock) -> u64 {
    let since = clock.wall().duration_since(UNIX_EPOCH);
    let second = since.map_or(0, |since| since.as_secs());
    cluster::member_id(urls, &second.to_string())
}

fn check_urls_are_free(
    members: &[pb::Member],
    urls: &[String],
    own: Option<u64>,
) -> Result<(), Error> {
    let taken = members
        .iter()
        .filter(|member| Some(member.id) != own)
        .flat_map(|member| &member.peer_ur_ls)
        .any(|url| urls.contains(url));
    if taken {
        Err(Error::PeerURLExist)
    } else {
        Ok(())
    }
}

/// Whether the voters that pass `counts`, with `more` of which `started` run, have a majority that runs.
fn enough_started(
    members: &[pb::Member],
    counts: impl Fn(&pb::Member) -> bool,
    more: usize,
    started: usize,
) -> bool {
    let voters = || {
        members
            .iter()
            .filter(|member| !member.is_learner && counts(member))
    };
    let all = voters().count() + more;
    let running = voters().filter(|member| !member.name.is_empty()).count() + started;
    running > all / 2
}

fn may_add(context: &Context, members: &[pb::Member], is_learner: bool) -> Result<(), Error> {
    if !context.rules.strict {
        return Ok(());
    }
    let voters = members.iter().filter(|member| !member.is_learner).count();
    let started = members
        .iter()
        .filter(|member| !member.is_learner && !member.name.is_empty())
        .count();
    // One that runs may always get a second.
    let second = voters == 1 && started == 1;
    if !is_learner && !second && !enough_started(members, |_| true, 1, 0) {
        return Err(Error::MemberNotEnoughStarted);
    }
    if voters > 1 && healthy(context, members) <= voters.div_ceil(2) {
        return Err(Error::Unhealthy);
    }
    Ok(())
}

fn may_remove(context: &Context, members: &[pb::Member], id: u64) -> Result<(), Error> {
    if !context.rules.strict {
        return Ok(());
    }
    if members
        .iter()
        .any(|member| member.id == id && member.is_learner)
    {
        return Ok(());
    }
    if !enough_started(members, |member| member.id != id, 0, 0) {
        return Err(Error::MemberNotEnoughStarted);
    }
    // One that is down is no part of the majority that works.
    let is_down = context.raft.peers().active_since(id).is_none();
    if id != context.cluster.member_id && is_down {
        return Ok(());
    }
    let voters = members.iter().filter(|member| !member.is_learner).count();
    if healthy(context, members).saturating_sub(1) < 1 + voters.saturating_sub(1) / 2 {
        return Err(Error::Unhealthy);
    }
    Ok(())
}

/// Voters that have been reachable for a while, this one among them.
fn healthy(context: &Context, members: &[pb::Member]) -> usize {
    let now = context.rules.clock.now();
    let reachable = |id: u64| {
        let since = context.raft.peers().active_since(id);
        since.is_some_and(|since| now.saturating_duration_since(since) > HEALTHY_AFTER)
    };
    members
        .iter()
        .filter(|member| !member.is_learner)
        .filter(|member| member.id == context.cluster.member_id || reachable(member.id))
        .count()
}

/// Whether a member has nine tenths of the leader's log.
fn check_ready(context: &Context, id: u64) -> Result<(), Error> {
    let (matched, last) = context.raft.progress_of(id).ok_or(Error::MemberNotFound)?;
    let share = matched as f64 / (last.max(1)) as f64;
    if share < READY_SHARE {
        tracing::error!(
            learner_ready_percent = share,
            ready_percent_threshold = READY_SHARE,
            "rejecting promote learner: learner is not ready"
        );
        return Err(Error::LearnerNotReady);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: u64, name: &str, is_learner: bool) -> pb::Member {
        pb::Member {
            id,
            name: name.to_owned(),
            is_learner,
            ..Default::default()
        }
    }

    /// Of etcd's tables for IsReadyToAddVotingMember, ...RemoveVotingMember, ...PromoteMember.
    #[test]
    fn a_majority_must_run_afterwards() {
        let three = [
            member(1, "a", false),
            member(2, "b", false),
            member(3, "", false),
        ];
        assert!(!enough_started(&three, |_| true, 1, 0));
        assert!(enough_started(&three, |m| m.id != 3, 0, 0));
        assert!(!enough_started(&three, |m| m.id != 2, 0, 0));
        let one = [member(1, "a", false)];
        assert!(!enough_started(&one, |m| m.id != 1, 0, 0));
        assert!(enough_started(&one, |_| true, 1, 1));
        let with_learner = [member(1, "a", false), member(2, "", true)];
        assert!(enough_started(&with_learner, |_| true, 1, 1));
    }

    #[test]
    fn urls_are_free_or_their_owners() {
        let mut owner = member(1, "a", false);
        owner.peer_ur_ls = vec!["http://a:1".to_owned()];
        let members = [owner];
        let urls = ["http://a:1".to_owned()];
        assert_eq!(
            check_urls_are_free(&members, &urls, None),
            Err(Error::PeerURLExist)
        );
        assert_eq!(check_urls_are_free(&members, &urls, Some(1)), Ok(()));
        assert_eq!(peer_urls(&[]), Err(Error::MemberBadURLs));
        assert_eq!(
            peer_urls(&["not a url".to_owned()]),
            Err(Error::MemberBadURLs)
        );
    }
}
