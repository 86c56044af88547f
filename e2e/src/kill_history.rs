//! Writes under kill -9: clients that record what was acknowledged, and the judge of what the store holds afterwards.
//!
//! Every write carries a value of its own, so that each event of the store's history names the one attempt it came from. A put writes one
//! key, a transaction several keys with the same value.
//! Promises of the judge: an acknowledged write is in the history at the revision that its answer named; a transaction is there with all of
//! its keys in one revision, or not at all; nothing is there twice, nothing that nobody wrote, no revision is missing.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ballast_api::etcdserverpb::watch_request::RequestUnion;
use ballast_api::etcdserverpb::{
    Compare, PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest, WatchRequest,
    compare, request_op,
};
use bytes::Bytes;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use crate::store_server::Client;

const HISTORY_DEADLINE: Duration = Duration::from_mins(1);
/// A request to a killed server must not hold the round up.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// Keys of one client, over which its puts go round.
const KEYS: u64 = 8;

/// One write that was sent.
#[derive(Clone, Debug)]
pub struct Attempt {
    pub value: String,
    pub keys: Vec<String>,
    /// The revision of its answer; none when there was no answer.
    pub acknowledged: Option<i64>,
}

/// One key's change, as a watch tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub revision: i64,
    pub key: String,
    pub value: String,
}

/// What one client does until the server is gone: puts, or transactions over three keys.
pub async fn write(
    client: Client,
    name: String,
    transactions: bool,
    stop: &AtomicBool,
) -> Vec<Attempt> {
    let mut kv = client.kv;
    let mut attempts = Vec::new();
    for number in 0.. {
        if stop.load(Ordering::Acquire) {
            break;
        }
        let value = format!("{name}-{number}");
        let keys: Vec<String> = if transactions {
            ["x", "y", "z"]
                .iter()
                .map(|part| format!("txn/{name}/{part}"))
                .collect()
        } else {
            vec![format!("put/{name}/{}", number % KEYS)]
        };
        let put = |key: &String| PutRequest {
            key: key.clone().into(),
            value: value.clone().into(),
            ..PutRequest::default()
        };
        let answer = tokio::time::timeout(WRITE_DEADLINE, async {
            if transactions {
                let ops = |keys: &[String]| {
                    keys.iter()
                        .map(|key| RequestOp {
                            request: Some(request_op::Request::RequestPut(put(key))),
                        })
                        .collect()
                };
                let response = kv
                    .txn(TxnRequest {
                        // Holds always: versions are never negative.
                        compare: vec![Compare {
                            result: compare::CompareResult::Greater.into(),
                            target: compare::CompareTarget::Version.into(),
                            key: keys[0].clone().into(),
                            target_union: Some(compare::TargetUnion::Version(-1)),
                            ..Compare::default()
                        }],
                        success: ops(&keys),
                        failure: Vec::new(),
                    })
                    .await?;
                anyhow::Ok(response.into_inner().header)
            } else {
                anyhow::Ok(kv.put(put(&keys[0])).await?.into_inner().header)
            }
        })
        .await;
        let acknowledged = match answer {
            Ok(Ok(header)) => header.map(|header| header.revision),
            _ => None,
        };
        attempts.push(Attempt {
            value,
            keys,
            acknowledged,
        });
        if acknowledged.is_none() {
            break;
        }
    }
    attempts
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
            let kv = event.kv.context("an event has a key")?;
            changes.push(Change {
                revision: kv.mod_revision,
                key: String::from_utf8(kv.key.to_vec())?,
                value: String::from_utf8(kv.value.to_vec())?,
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
    let by_value: HashMap<&str, &Attempt> = attempts
        .iter()
        .map(|attempt| (attempt.value.as_str(), attempt))
        .collect();

    for attempt in attempts {
        let Some(revision) = attempt.acknowledged else {
            continue;
        };
        let there = revisions
            .get(&revision)
            .is_some_and(|changes| changes.iter().any(|c| c.value == attempt.value));
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
        let mut keys: Vec<&str> = changes
            .iter()
            .filter(|change| change.value == value)
            .map(|change| change.key.as_str())
            .collect();
        keys.sort_unstable();
        if changes.len() != keys.len()
            || keys != attempt.keys.iter().map(String::as_str).collect::<Vec<_>>()
        {
            complaints.push(format!(
                "torn: revision {revision} of {value} holds {changes:?}"
            ));
        }
        if let Some(before) = found.insert(value, revision) {
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
            keys: vec![format!("k/{value}")],
            acknowledged,
        }
    }

    fn txn(value: &str, acknowledged: Option<i64>) -> Attempt {
        Attempt {
            value: value.to_owned(),
            keys: vec!["t/x".to_owned(), "t/y".to_owned()],
            acknowledged,
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
}
