//! Writes while a store is killed, or its power cut: clients that record what was acknowledged, and the judge of what the store holds
//! afterwards.
//!
//! Every write carries a value of its own, and no key is deleted twice, so that each event of the store's history names the one attempt
//! it came from. A put writes one key, a transaction several keys with the same value, and one that moves a key deletes another.
//! Promises of the judge: an acknowledged write is in the history at the revision that its answer named; a transaction is there with all of
//! its keys in one revision, or not at all; nothing is there twice, nothing that nobody wrote, no revision is missing.
//! Not here: what else goes on meanwhile (`storm.rs`).

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ballast_api::etcdserverpb::watch_request::RequestUnion;
use ballast_api::etcdserverpb::{
    Compare, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
    WatchCreateRequest, WatchRequest, compare, request_op,
};
use ballast_api::mvccpb::event::EventType;
use bytes::Bytes;
use rand::Rng as _;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use crate::store_server::Client;

const HISTORY_DEADLINE: Duration = Duration::from_mins(1);
/// A request to a killed server must not hold the round up.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// Keys of one client, over which its puts go round.
const KEYS: u64 = 8;
/// Of a large value: many sectors, more than one page of an engine.
const LARGE_BYTES_MAX: usize = 24_000;

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Small values, over and over the same keys.
    Puts,
    LargePuts,
    /// Three keys at a time.
    Txns,
    /// A key of its own each time, deleted by the next request.
    Deletes,
    /// A key of its own each time, deleted in the transaction that puts the next one.
    Moves,
}

/// One write that was sent.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// What is put; the name of a deletion otherwise, as [`Change::value`] has it.
    pub value: String,
    /// Sorted.
    pub puts: Vec<String>,
    pub deletes: Vec<String>,
    /// The revision of its answer; none when there was no answer.
    pub acknowledged: Option<i64>,
}

/// One key's change, as a watch tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub revision: i64,
    pub key: String,
    /// Of a deletion, its name: the key behind a minus sign, which no value begins with.
    pub value: String,
}

fn name_of_deletion(key: &str) -> String {
    format!("-{key}")
}

/// What one client does until the server is gone or `stop` is set. `lane` tells the keys of clients that write at the same time apart, `name`
/// the values of all clients there ever were.
pub async fn write(
    client: Client,
    lane: &str,
    name: &str,
    work: Work,
    stop: &AtomicBool,
) -> Vec<Attempt> {
    let mut kv = client.kv;
    let mut attempts: Vec<Attempt> = Vec::new();
    for number in 0.. {
        if stop.load(Ordering::Acquire) {
            break;
        }
        let mut attempt = next_attempt((lane, name), work, number, attempts.last());
        let answer = tokio::time::timeout(WRITE_DEADLINE, async {
            if let ([], [key]) = (&attempt.puts[..], &attempt.deletes[..]) {
                let request = DeleteRangeRequest {
                    key: key.clone().into(),
                    ..DeleteRangeRequest::default()
                };
                return anyhow::Ok(kv.delete_range(request).await?.into_inner().header);
            }
            if let ([key], []) = (&attempt.puts[..], &attempt.deletes[..]) {
                let request = put(key, &attempt.value);
                return Ok(kv.put(request).await?.into_inner().header);
            }
            Ok(kv.txn(txn(&attempt)).await?.into_inner().header)
        })
        .await;
        attempt.acknowledged = match answer {
            Ok(Ok(header)) => header.map(|header| header.revision),
            _ => None,
        };
        let answered = attempt.acknowledged.is_some();
        attempts.push(attempt);
        if !answered {
            break;
        }
    }
    attempts
}

fn next_attempt(
    (lane, name): (&str, &str),
    work: Work,
    number: u64,
    last: Option<&Attempt>,
) -> Attempt {
    let mut value = format!("{name}-{number}");
    let mut deletes = Vec::new();
    let own = |number: u64| format!("own/{name}/{number}");
    let puts = match work {
        Work::Puts => vec![format!("put/{lane}/{}", number % KEYS)],
        Work::LargePuts => {
            let bytes = rand::rng().random_range(0..LARGE_BYTES_MAX);
            value.extend(std::iter::repeat_n('.', bytes));
            vec![format!("put/{lane}/{}", number % KEYS)]
        }
        Work::Txns => ["x", "y", "z"]
            .iter()
            .map(|part| format!("txn/{lane}/{part}"))
            .collect(),
        Work::Deletes if number % 2 == 1 => {
            deletes.extend(last.into_iter().flat_map(|last| last.puts.clone()));
            value = name_of_deletion(&own(number - 1));
            Vec::new()
        }
        Work::Deletes => vec![own(number)],
        Work::Moves => {
            deletes.extend(last.into_iter().flat_map(|last| last.puts.clone()));
            vec![own(number)]
        }
    };
    Attempt {
        value,
        puts,
        deletes,
        acknowledged: None,
    }
}

fn put(key: &str, value: &str) -> PutRequest {
    PutRequest {
        key: key.to_owned().into(),
        value: value.to_owned().into(),
        ..PutRequest::default()
    }
}

fn txn(attempt: &Attempt) -> TxnRequest {
    let puts = attempt.puts.iter().map(|key| RequestOp {
        request: Some(request_op::Request::RequestPut(put(key, &attempt.value))),
    });
    let deletes = attempt.deletes.iter().map(|key| RequestOp {
        request: Some(request_op::Request::RequestDeleteRange(
            DeleteRangeRequest {
                key: key.clone().into(),
                ..DeleteRangeRequest::default()
            },
        )),
    });
    TxnRequest {
        // Holds always: versions are never negative.
        compare: vec![Compare {
            result: compare::CompareResult::Greater.into(),
            target: compare::CompareTarget::Version.into(),
            key: attempt.puts[0].clone().into(),
            target_union: Some(compare::TargetUnion::Version(-1)),
            ..Compare::default()
        }],
        success: puts.chain(deletes).collect(),
        failure: Vec::new(),
    }
}

/// All changes after `from`, up to the present head, which is returned too.
pub async fn history(client: &Client, from: i64) -> Result<(Vec<Change>, i64)> {
    tokio::time::timeout(HISTORY_DEADLINE, read_history(client, from))
        .await
        .context("the history did not end")?
}

async fn read_history(client: &Client, from: i64) -> Result<(Vec<Change>, i64)> {
    let probe = RangeRequest {
        key: Bytes::from_static(b"health"),
        ..RangeRequest::default()
    };
    let head = client
        .kv
        .clone()
        .range(probe)
        .await?
        .into_inner()
        .header
        .context("an answer has a header")?
        .revision;
    let mut changes = Vec::new();
    if head <= from {
        return Ok((changes, head));
    }
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let everything = WatchCreateRequest {
        key: Bytes::from_static(b"\0"),
        range_end: Bytes::from_static(b"\0"),
        start_revision: from + 1,
        ..WatchCreateRequest::default()
    };
    sender
        .send(WatchRequest {
            request_union: Some(RequestUnion::CreateRequest(everything)),
        })
        .await?;
    let mut stream = client
        .watch
        .clone()
        .watch(ReceiverStream::new(receiver))
        .await?
        .into_inner();
    while changes
        .last()
        .is_none_or(|change: &Change| change.revision < head)
    {
        let response = stream.next().await.context("the watch ended")??;
        if response.canceled {
            bail!("the watch was canceled: {}", response.cancel_reason);
        }
        for event in response.events {
            let deleted = event.r#type == EventType::Delete as i32;
            let kv = event.kv.context("an event has a key")?;
            let key = String::from_utf8(kv.key.to_vec())?;
            changes.push(Change {
                revision: kv.mod_revision,
                value: if deleted {
                    name_of_deletion(&key)
                } else {
                    String::from_utf8(kv.value.to_vec())?
                },
                key,
            });
        }
    }
    Ok((changes, head))
}

/// Holds the changes after `from` against all attempts made since. Returns every complaint, the worst kinds first.
pub fn judge(attempts: &[Attempt], changes: &[Change], from: i64) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut revisions: BTreeMap<i64, Vec<&Change>> = BTreeMap::new();
    for change in changes {
        revisions.entry(change.revision).or_default().push(change);
    }
    let mut found: HashMap<&str, i64> = HashMap::new();
    let mut by_value: HashMap<String, &Attempt> = HashMap::new();
    for attempt in attempts {
        by_value.insert(attempt.value.clone(), attempt);
        for key in &attempt.deletes {
            by_value.insert(name_of_deletion(key), attempt);
        }
    }

    for attempt in attempts {
        let Some(revision) = attempt.acknowledged else {
            continue;
        };
        let own = |change: &&Change| {
            change.value == attempt.value
                || (attempt.deletes.iter()).any(|key| change.value == name_of_deletion(key))
        };
        let there = revisions
            .get(&revision)
            .is_some_and(|changes| changes.iter().any(own));
        if !there {
            complaints.push(format!(
                "lost: {} was acknowledged at revision {revision}",
                attempt.value
            ));
        }
    }
    let mut next = from + 1;
    for (&revision, changes) in &revisions {
        if revision != next {
            complaints.push(format!(
                "missing: revisions from {next} to {}",
                revision - 1
            ));
        }
        next = revision + 1;
        let value = changes[0].value.as_str();
        let Some(attempt) = by_value.get(value) else {
            complaints.push(format!(
                "invented: revision {revision} holds {value}, which nobody wrote"
            ));
            continue;
        };
        let mut there: Vec<(&str, &str)> = changes
            .iter()
            .map(|change| (change.key.as_str(), change.value.as_str()))
            .collect();
        there.sort_unstable();
        let deletions: Vec<String> = attempt
            .deletes
            .iter()
            .map(|k| name_of_deletion(k))
            .collect();
        let mut expected: Vec<(&str, &str)> = (attempt.puts.iter())
            .map(|key| (key.as_str(), attempt.value.as_str()))
            .chain((attempt.deletes.iter().zip(&deletions)).map(|(k, v)| (k.as_str(), v.as_str())))
            .collect();
        expected.sort_unstable();
        if there != expected {
            complaints.push(format!(
                "torn: revision {revision} of {value} holds {changes:?}"
            ));
        }
        if let Some(before) = found.insert(attempt.value.as_str(), revision) {
            complaints.push(format!(
                "twice: {value} is at revision {before} and at {revision}"
            ));
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(value: &str, acknowledged: Option<i64>) -> Attempt {
        Attempt {
            value: value.to_owned(),
            puts: vec![format!("k/{value}")],
            deletes: Vec::new(),
            acknowledged,
        }
    }

    fn txn(value: &str, acknowledged: Option<i64>) -> Attempt {
        Attempt {
            value: value.to_owned(),
            puts: vec!["t/x".to_owned(), "t/y".to_owned()],
            deletes: Vec::new(),
            acknowledged,
        }
    }

    fn removal(key: &str, acknowledged: Option<i64>) -> Attempt {
        Attempt {
            value: name_of_deletion(key),
            puts: Vec::new(),
            deletes: vec![key.to_owned()],
            acknowledged,
        }
    }

    /// Puts `value`, deletes `key`.
    fn moved(value: &str, key: &str, acknowledged: Option<i64>) -> Attempt {
        Attempt {
            deletes: vec![key.to_owned()],
            ..put(value, acknowledged)
        }
    }

    fn change(revision: i64, key: &str, value: &str) -> Change {
        Change {
            revision,
            key: key.to_owned(),
            value: value.to_owned(),
        }
    }

    fn sound() -> (Vec<Attempt>, Vec<Change>) {
        let attempts = vec![
            put("a", Some(2)),
            txn("b", Some(3)),
            put("c", None),
            put("d", None),
        ];
        let changes = vec![
            change(2, "k/a", "a"),
            change(3, "t/x", "b"),
            change(3, "t/y", "b"),
            // Written, though its answer was lost with the server.
            change(4, "k/c", "c"),
        ];
        (attempts, changes)
    }

    fn only(complaints: &[String], kind: &str) {
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(complaints[0].starts_with(kind), "{complaints:?}");
    }

    #[test]
    fn a_sound_history_is_no_complaint() {
        let (attempts, changes) = sound();
        assert_eq!(judge(&attempts, &changes, 1), Vec::<String>::new());
    }

    #[test]
    fn an_acknowledged_write_that_is_gone_is_found() {
        let (mut attempts, changes) = sound();
        attempts[3].acknowledged = Some(5);
        only(&judge(&attempts, &changes, 1), "lost");
    }

    #[test]
    fn a_write_that_moved_to_another_revision_is_found() {
        let (mut attempts, changes) = sound();
        attempts[0].acknowledged = Some(4);
        only(&judge(&attempts, &changes, 1), "lost");
    }

    #[test]
    fn a_torn_transaction_is_found() {
        let (attempts, mut changes) = sound();
        changes.remove(2);
        only(&judge(&attempts, &changes, 1), "torn");
    }

    #[test]
    fn two_writes_in_one_revision_are_found() {
        let (attempts, mut changes) = sound();
        changes.push(change(4, "k/d", "d"));
        only(&judge(&attempts, &changes, 1), "torn");
    }

    #[test]
    fn a_write_applied_twice_is_found() {
        let (attempts, mut changes) = sound();
        changes.push(change(5, "k/c", "c"));
        only(&judge(&attempts, &changes, 1), "twice");
    }

    #[test]
    fn a_write_that_nobody_made_is_found() {
        let (attempts, mut changes) = sound();
        changes.push(change(5, "k/e", "e"));
        only(&judge(&attempts, &changes, 1), "invented");
    }

    #[test]
    fn a_hole_in_the_revisions_is_found() {
        let (attempts, mut changes) = sound();
        changes[3].revision = 6;
        only(&judge(&attempts, &changes, 1), "missing");
    }

    fn with_deletions() -> (Vec<Attempt>, Vec<Change>) {
        let (mut attempts, mut changes) = sound();
        attempts.extend([removal("k/a", Some(5)), moved("e", "k/c", Some(6))]);
        changes.extend([
            change(5, "k/a", "-k/a"),
            change(6, "k/e", "e"),
            change(6, "k/c", "-k/c"),
        ]);
        (attempts, changes)
    }

    #[test]
    fn deletions_are_part_of_the_history() {
        let (attempts, mut changes) = with_deletions();
        assert_eq!(judge(&attempts, &changes, 1), Vec::<String>::new());
        let moved = changes.pop();
        only(&judge(&attempts, &changes, 1), "torn");
        changes.extend(moved);
        changes.remove(4);
        let complaints = judge(&attempts, &changes, 1);
        assert!(complaints[0].starts_with("lost"), "{complaints:?}");
    }

    #[test]
    fn a_deletion_that_nobody_asked_for_is_found() {
        let (attempts, mut changes) = with_deletions();
        changes.push(change(7, "t/x", "-t/x"));
        only(&judge(&attempts, &changes, 1), "invented");
    }
}
