//! HashKV compared among the members: before one serves, at intervals, and for each compaction.
//!
//!     at the start     a member whose data most others contradict does not start (gate InitialCorruptCheck)
//!     at intervals     the leader asks all for the hash at its revision (--corrupt-check-time)
//!     at compactions   the leader compares what each compaction left (gate CompactHashCheck, --compact-hash-check-time)
//!
//! Promises: who is wrong is decided by a majority of all members; without one the alarm names nobody (member 0). Hashes are compared only at the
//! same revision and the same compact revision. etcd's check at intervals takes the leader's word, and its check at the start refuses on any
//! difference, also that of another member.
//! Not here: what the alarm forbids (`apply/quota.rs`), how a member is rebuilt (`cli/rebuild.rs`).
//!
//! etcd: server/etcdserver/corrupt.go.

use std::sync::Arc;
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use ballast_storage::ReadError;
use ballast_storage::mvcc::{HashKv, Store};
use pb::alarm_request::AlarmAction;
use tokio_util::sync::CancellationToken;

use crate::peer::{Peers, Purpose};
use crate::rpc::Context;

/// What a member answered; the error as it is told.
#[derive(Clone, Debug)]
pub struct Answer {
    pub member_id: u64,
    pub hash: Result<PeerHash, String>,
}

/// A member's hash at the revision it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerHash {
    pub hash: u32,
    pub compact_revision: i64,
    /// Where the member is.
    pub current_revision: i64,
}

/// Who is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// Nobody who answered.
    Alike,
    Wrong(Vec<u64>),
    /// No hash has a majority.
    Undecided,
}

/// Decides among `hashes`, all of one revision and compact revision, in a cluster of so many members.
fn judge(hashes: &[(u64, u32)], members: usize) -> Verdict {
    let votes = |of: u32| hashes.iter().filter(|(_, hash)| *hash == of).count();
    if hashes.iter().all(|(_, hash)| *hash == hashes[0].1) {
        return Verdict::Alike;
    }
    let right = hashes
        .iter()
        .find(|(_, hash)| votes(*hash) > members / 2)
        .map(|(_, hash)| *hash);
    match right {
        Some(right) => Verdict::Wrong(
            hashes
                .iter()
                .filter(|(_, hash)| *hash != right)
                .map(|(id, _)| *id)
                .collect(),
        ),
        None => Verdict::Undecided,
    }
}

/// Asks the members for their hash at a revision, all at once.
pub async fn ask(peers: &Peers, ids: &[u64], revision: i64, patience: Duration) -> Vec<Answer> {
    let asked = ids.iter().map(|&member_id| async move {
        let hash = match peers.client(member_id, Purpose::Forward) {
            None => Err("nobody said where it is".to_owned()),
            Some(mut client) => {
                let asked = client.hash_kv(pb::HashKvRequest { revision });
                match tokio::time::timeout(patience, asked).await {
                    Ok(Ok(answer)) => Ok(peer_hash(answer.into_inner())),
                    Ok(Err(status)) => Err(status.message().to_owned()),
                    Err(_) => Err("it does not answer in time".to_owned()),
                }
            }
        };
        if let Err(why) = &hash {
            tracing::warn!(
                remote_peer_id = %format!("{member_id:x}"),
                requested_revision = revision,
                error = %why,
                "failed hash kv request"
            );
        }
        Answer { member_id, hash }
    });
    futures::future::join_all(asked).await
}

fn peer_hash(answer: pb::HashKvResponse) -> PeerHash {
    PeerHash {
        hash: answer.hash,
        compact_revision: answer.compact_revision,
        current_revision: answer.header.map_or(0, |header| header.revision),
    }
}

/// How many have what the member of this id has, itself counted.
pub fn agreeing_with(id: u64, answers: &[Answer]) -> usize {
    let of = |answer: &Answer| {
        let hash = answer.hash.as_ref().ok()?;
        Some((hash.hash, hash.compact_revision))
    };
    let wanted = answers.iter().find(|answer| answer.member_id == id);
    match wanted.and_then(of) {
        Some(wanted) => answers
            .iter()
            .filter(|answer| of(answer) == Some(wanted))
            .count(),
        None => 0,
    }
}

/// Those that can be compared with `own`, and it.
fn comparable(own_id: u64, own: &HashKv, answers: &[Answer]) -> Vec<(u64, u32)> {
    let mut hashes = vec![(own_id, own.hash)];
    for answer in answers {
        match &answer.hash {
            Ok(hash) if hash.compact_revision == own.compact_revision => {
                hashes.push((answer.member_id, hash.hash));
            }
            Ok(hash) => tracing::warn!(
                peer_id = %format!("{:x}", answer.member_id),
                compact_revision = hash.compact_revision,
                local_compact_revision = own.compact_revision,
                "skipped peer's hash: its compact revision is another"
            ),
            Err(_) => {}
        }
    }
    hashes
}

/// Refuses, with the reason, a start with data that the others contradict. Whoever does not answer says nothing.
pub async fn check_at_start(
    own_id: u64,
    store: &Arc<Store>,
    peers: &Peers,
    ids: &[u64],
    patience: Duration,
) -> Result<(), String> {
    tracing::info!(
        local_member_id = %format!("{own_id:x}"),
        timeout = ?patience,
        "starting initial corruption check"
    );
    let own = hash(store, 0)
        .await
        .map_err(|error| format!("{own_id:x} failed to fetch hash ({error})"))?;
    let answers = ask(peers, ids, own.hash_revision, patience).await;
    let hashes = comparable(own_id, &own, &answers);
    let mismatches = hashes.iter().filter(|(_, hash)| *hash != own.hash);
    for (id, hash) in mismatches {
        tracing::warn!(
            local_member_id = %format!("{own_id:x}"),
            local_member_revision = own.hash_revision,
            local_member_hash = own.hash,
            remote_peer_id = %format!("{id:x}"),
            remote_peer_hash = hash,
            "found different hash values from remote peer"
        );
    }
    match judge(&hashes, ids.len() + 1) {
        Verdict::Alike => {
            tracing::info!(
                local_member_id = %format!("{own_id:x}"),
                compared_with = hashes.len() - 1,
                "initial corruption checking passed; no corruption"
            );
            Ok(())
        }
        Verdict::Wrong(wrong) if !wrong.contains(&own_id) => {
            tracing::warn!(
                peer_ids = %ids_text(&wrong),
                "most members agree with this one: it starts, and the others named here are wrong"
            );
            Ok(())
        }
        _ => Err(format!(
            "{own_id:x} found data inconsistency with peers; `ballast rebuild` replaces this member's data by the leader's"
        )),
    }
}

/// Which checks run, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Checks {
    /// None: never.
    pub every: Option<Duration>,
    pub compactions_every: Option<Duration>,
    pub patience: Duration,
}

/// On the leader, until `stop`.
pub async fn run(context: Arc<Context>, checks: Checks, stop: CancellationToken) {
    if let Some(interval) = checks.every {
        tracing::info!(
            local_member_id = %format!("{:x}", context.cluster.member_id),
            interval = ?interval,
            "enabled corruption checking"
        );
    }
    let mut checked = i64::MIN;
    let mut periodic = ticks(checks.every);
    let mut compactions = ticks(checks.compactions_every);
    loop {
        let of_compaction = tokio::select! {
            () = stop.cancelled() => return,
            () = tick(&mut periodic) => false,
            () = tick(&mut compactions) => true,
        };
        if !context.raft.is_leader() {
            continue;
        }
        if of_compaction {
            checked = check_compactions(&context, checks.patience, checked).await;
        } else if let Err(why) = check_now(&context, checks.patience).await {
            tracing::warn!(error = %why, "failed to check hash KV");
        }
    }
}

fn ticks(every: Option<Duration>) -> Option<tokio::time::Interval> {
    every.map(|every| {
        let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + every, every);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        ticks
    })
}

async fn tick(ticks: &mut Option<tokio::time::Interval>) {
    match ticks {
        Some(ticks) => {
            ticks.tick().await;
        }
        None => std::future::pending().await,
    }
}

/// All members at the leader's revision.
async fn check_now(context: &Context, patience: Duration) -> Result<(), String> {
    let own_id = context.cluster.member_id;
    let own = hash(&context.store, 0).await.map_err(|e| e.to_string())?;
    let ids = other_ids(context);
    let answers = ask(context.raft.peers(), &ids, own.hash_revision, patience).await;
    // What the others had applied when they answered is applied here too from now on.
    let barrier = context.raft.read_barrier().await;
    barrier.map_err(|error| error.to_string())?;
    let now = hash(&context.store, 0).await.map_err(|e| e.to_string())?;
    let unstable = now.hash_revision == own.hash_revision
        && now.compact_revision == own.compact_revision
        && now.hash != own.hash;
    if unstable {
        tracing::warn!(revision = own.hash_revision, "found hash mismatch");
        raise(context, own_id).await;
        return Ok(());
    }
    for answer in &answers {
        let Ok(hash) = &answer.hash else { continue };
        // A member cannot have more than the leader.
        if hash.current_revision > now.current_revision
            || hash.compact_revision > now.compact_revision
        {
            tracing::warn!(
                leader_revision = now.current_revision,
                leader_compact_revision = now.compact_revision,
                follower_revision = hash.current_revision,
                follower_compact_revision = hash.compact_revision,
                follower_peer_id = %format!("{:x}", answer.member_id),
                "revision from follower must be less than or equal to leader's"
            );
            raise(context, answer.member_id).await;
        }
    }
    let hashes = comparable(own_id, &own, &answers);
    sentence(context, &hashes, ids.len() + 1, &own).await;
    tracing::info!(
        number_of_peers_checked = hashes.len() - 1,
        "finished peer corruption check"
    );
    Ok(())
}

/// The hashes of compactions after `checked`, the newest first, until all members were compared; gives the newest that was.
async fn check_compactions(context: &Context, patience: Duration, checked: i64) -> i64 {
    let own_id = context.cluster.member_id;
    let ids = other_ids(context);
    let left = context.store.compaction_hashes();
    let unchecked = left.iter().filter(|hash| hash.hash_revision > checked);
    for own in unchecked {
        let answers = ask(context.raft.peers(), &ids, own.hash_revision, patience).await;
        let hashes = comparable(own_id, own, &answers);
        if sentence(context, &hashes, ids.len() + 1, own).await {
            return checked;
        }
        if hashes.len() == ids.len() + 1 {
            tracing::info!(
                number_of_peers_checked = ids.len(),
                revision = own.hash_revision,
                compact_revision = own.compact_revision,
                "successfully checked hash on whole cluster"
            );
            return own.hash_revision;
        }
        tracing::warn!(
            number_of_peers_checked = hashes.len() - 1,
            number_of_peers = ids.len(),
            revision = own.hash_revision,
            "skipped revision in compaction hash check; was not able to check all peers"
        );
    }
    checked
}

/// Raises the alarm where it is due. True when somebody is wrong.
async fn sentence(context: &Context, hashes: &[(u64, u32)], members: usize, own: &HashKv) -> bool {
    // Who is known to be wrong says nothing about the others, above all not while one of these is away.
    let known = context.alarms.get(pb::AlarmType::Corrupt as i32);
    let unknown: Vec<(u64, u32)> = hashes
        .iter()
        .filter(|(id, _)| known.iter().all(|alarm| alarm.member_id != *id))
        .copied()
        .collect();
    let wrong = match judge(&unknown, members) {
        Verdict::Alike => return false,
        Verdict::Wrong(wrong) => wrong,
        Verdict::Undecided => vec![0],
    };
    tracing::error!(
        leader_id = %format!("{:x}", context.cluster.member_id),
        leader_revision = own.hash_revision,
        leader_compact_revision = own.compact_revision,
        leader_hash = own.hash,
        peer_ids = %ids_text(&wrong),
        quorum_exist = wrong != [0],
        "Detected hash mismatch"
    );
    for id in wrong {
        raise(context, id).await;
    }
    true
}

async fn raise(context: &Context, member_id: u64) {
    let known = context.alarms.get(pb::AlarmType::Corrupt as i32);
    if known.iter().any(|alarm| alarm.member_id == member_id) {
        return;
    }
    let request = pb::InternalRaftRequest {
        header: Some(context.ids.header()),
        alarm: Some(pb::AlarmRequest {
            action: AlarmAction::Activate as i32,
            member_id,
            alarm: pb::AlarmType::Corrupt as i32,
        }),
        ..Default::default()
    };
    if let Err(error) = context.raft.propose(request).await {
        tracing::warn!(%error, "cannot raise the alarm CORRUPT yet");
    }
}

fn other_ids(context: &Context) -> Vec<u64> {
    let members = context.cluster.members();
    let ids = members.iter().map(|member| member.id);
    ids.filter(|id| *id != context.cluster.member_id).collect()
}

fn ids_text(ids: &[u64]) -> String {
    let texts: Vec<String> = ids.iter().map(|id| format!("{id:x}")).collect();
    texts.join(",")
}

async fn hash(store: &Arc<Store>, revision: i64) -> Result<HashKv, ReadError> {
    let store = Arc::clone(store);
    let hashed = tokio::task::spawn_blocking(move || store.hash_kv(revision)).await;
    match hashed {
        Ok(Err(ReadError::Storage(error))) => crate::node::stop_on_damage(&error),
        Ok(hashed) => hashed,
        // Only a panic ends it otherwise.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_of_all_members_says_who_is_wrong() {
        for (hashes, members, expected) in [
            (&[(1, 7)][..], 1, Verdict::Alike),
            (&[(1, 7), (2, 7)], 3, Verdict::Alike),
            (&[(1, 7), (2, 7), (3, 8)], 3, Verdict::Wrong(vec![3])),
            // The leader may be the one.
            (&[(1, 8), (2, 7), (3, 7)], 3, Verdict::Wrong(vec![1])),
            (&[(1, 7), (2, 8)], 2, Verdict::Undecided),
            (&[(1, 7), (2, 8)], 3, Verdict::Undecided),
            (&[(1, 7), (2, 8), (3, 9)], 3, Verdict::Undecided),
            (
                &[(1, 7), (2, 8), (3, 7), (4, 9), (5, 7)],
                5,
                Verdict::Wrong(vec![2, 4]),
            ),
            // Two that do not answer could be on either side.
            (&[(1, 7), (2, 8), (3, 7)], 5, Verdict::Undecided),
        ] {
            assert_eq!(judge(hashes, members), expected, "{hashes:?} of {members}");
        }
    }

    #[test]
    fn hashes_are_compared_at_the_same_compact_revision_only() {
        let own = HashKv {
            hash: 7,
            compact_revision: 3,
            hash_revision: 5,
            current_revision: 9,
        };
        let answer = |member_id, hash, compact_revision| Answer {
            member_id,
            hash: Ok(PeerHash {
                hash,
                compact_revision,
                current_revision: 9,
            }),
        };
        let silent = Answer {
            member_id: 4,
            hash: Err("compacted".to_owned()),
        };
        let answers = [answer(2, 7, 3), answer(3, 8, 4), silent];
        assert_eq!(comparable(1, &own, &answers), [(1, 7), (2, 7)]);
    }
}
