//! Clients: each asks one member after the other for one thing at a time, over etcd's API.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use ballast_server::config::urls::Url;
use ballast_server::peer::channel;
use parking_lot::Mutex;
use pb::kv_client::KvClient;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tonic::Status;
use tonic::transport::Channel;

use crate::findings::Findings;
use crate::history::{Asked, History, Told};
use crate::net;

const KEYS: usize = 3;
/// Between two requests of a client, at most.
const PAUSE_MILLIS_MAX: u64 = 80;
/// How long a client waits for an answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// What all clients of a run share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) history: History,
    /// Whom to ask: hosts' names.
    pub(crate) members: Mutex<Vec<String>>,
    pub(crate) stop: AtomicBool,
}

pub(crate) async fn run(
    number: usize,
    seed: u64,
    shared: Arc<Shared>,
    findings: Arc<Findings>,
) -> turmoil::Result {
    let mut rng = StdRng::seed_from_u64(seed ^ ((number as u64 + 1) << 40));
    let mut clients: BTreeMap<String, KvClient<Channel>> = BTreeMap::new();
    // What this client saw last, by key: what it swaps.
    let mut seen = BTreeMap::new();
    let mut written = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(
            rng.random_range(0..=PAUSE_MILLIS_MAX),
        ))
        .await;
        let member = {
            let members = shared.members.lock();
            members[rng.random_range(0..members.len())].clone()
        };
        let client = clients
            .entry(member)
            .or_insert_with_key(|member| connect(member));
        let key = format!("k{}", rng.random_range(0..KEYS));
        written += 1;
        let value = format!("c{number}-{written}");
        let asked = match rng.random_range(0..100) {
            0..40 => Asked::Put { key, value },
            40..70 => Asked::Get { key },
            70..90 => Asked::Swap {
                at: seen.get(&key).copied().unwrap_or(0),
                key,
                value,
            },
            _ => Asked::Delete { key },
        };
        let op = shared.history.begin(asked.clone());
        let answer = tokio::time::timeout(PATIENCE, ask(client, &asked)).await;
        let told = match answer {
            Ok(Ok(told)) => told,
            Ok(Err(_)) | Err(_) => Told::Nothing,
        };
        match (&asked, &told) {
            (Asked::Put { key, .. } | Asked::Swap { key, .. }, Told::Wrote(at))
            | (Asked::Get { key } | Asked::Swap { key, .. }, Told::Read(_, Some((at, _)))) => {
                seen.insert(key.clone(), *at);
            }
            (Asked::Get { key } | Asked::Swap { key, .. }, Told::Read(_, None))
            | (Asked::Delete { key }, Told::Wrote(_)) => {
                seen.insert(key.clone(), 0);
            }
            _ => {}
        }
        shared.history.end(op, told, &findings);
    }
    Ok(())
}

fn connect(member: &str) -> KvClient<Channel> {
    let url = Url::parse(&net::url(member)).unwrap();
    KvClient::new(channel::open(&[url], &net::dial()))
}

async fn ask(client: &mut KvClient<Channel>, asked: &Asked) -> Result<Told, Status> {
    let revision = |header: Option<pb::ResponseHeader>| header.map_or(0, |header| header.revision);
    match asked {
        Asked::Put { key, value } => {
            let response = client.put(put(key, value)).await?.into_inner();
            Ok(Told::Wrote(revision(response.header)))
        }
        Asked::Get { key } => {
            let response = client.range(get(key)).await?.into_inner();
            Ok(Told::Read(revision(response.header), found(&response.kvs)))
        }
        Asked::Delete { key } => {
            let request = pb::DeleteRangeRequest {
                key: key.clone().into(),
                ..Default::default()
            };
            let response = client.delete_range(request).await?.into_inner();
            let revision = revision(response.header);
            Ok(match response.deleted {
                0 => Told::Read(revision, None),
                _ => Told::Wrote(revision),
            })
        }
        Asked::Swap { key, at, value } => {
            let response = client.txn(swap(key, *at, value)).await?.into_inner();
            let revision = revision(response.header);
            if response.succeeded {
                return Ok(Told::Wrote(revision));
            }
            let read = response.responses.first();
            let read = match read.and_then(|read| read.response.as_ref()) {
                Some(pb::response_op::Response::ResponseRange(range)) => found(&range.kvs),
                _ => return Err(Status::internal("no range in the answer")),
            };
            Ok(Told::Read(revision, read))
        }
    }
}

fn found(kvs: &[ballast_api::mvccpb::KeyValue]) -> Option<(i64, String)> {
    let kv = kvs.first()?;
    let value = String::from_utf8_lossy(&kv.value).into_owned();
    Some((kv.mod_revision, value))
}

fn put(key: &str, value: &str) -> pb::PutRequest {
    pb::PutRequest {
        key: key.to_owned().into(),
        value: value.to_owned().into(),
        ..Default::default()
    }
}

fn get(key: &str) -> pb::RangeRequest {
    pb::RangeRequest {
        key: key.to_owned().into(),
        ..Default::default()
    }
}

fn swap(key: &str, at: i64, value: &str) -> pb::TxnRequest {
    let compare = pb::Compare {
        result: pb::compare::CompareResult::Equal as i32,
        target: pb::compare::CompareTarget::Mod as i32,
        key: key.to_owned().into(),
        target_union: Some(pb::compare::TargetUnion::ModRevision(at)),
        ..Default::default()
    };
    let op = |request| pb::RequestOp {
        request: Some(request),
    };
    pb::TxnRequest {
        compare: vec![compare],
        success: vec![op(pb::request_op::Request::RequestPut(put(key, value)))],
        failure: vec![op(pb::request_op::Request::RequestRange(get(key)))],
    }
}
