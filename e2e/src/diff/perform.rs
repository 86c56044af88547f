//! One operation on one server, and its answer as text, without what may differ.
//!
//! Promises: left out are ids of cluster and member, terms and counters of Raft, sizes, addresses, what is left of a lease's time, the
//! value of Hash and the bytes of Snapshot (but its own checksum must hold), and how a stream is cut into messages; everything else of an
//! answer is in the text, errors by code and text. A server that is unavailable is an error here, not an answer.
//! Not here: watches (`watch`), what should be answered (`model`).

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ballast_api::etcdserverpb as pb;
use pb::downgrade_request::DowngradeAction;
use pb::response_op::Response as Inner;
use sha2::Digest as _;
use tokio_stream::StreamExt as _;
use tonic::{Response, Status};

use super::script::Op;
use super::watch::{self, Plan};
use crate::store_server::Client;
use crate::wait;

/// A short lease must be revoked within this, or it may have expired before.
const SHORT_LEASE_DEADLINE: Duration = Duration::from_millis(1_500);
/// How long a compaction may go on in the background.
const COMPACTION_DEADLINE: Duration = Duration::from_secs(5);
const COMPACTION_STEP: Duration = Duration::from_millis(1);
const SHA256_BYTES: usize = 32;

/// An answer with everything left out that may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub text: String,
    /// Why it was refused, for the counts: "" when it was not.
    pub code: String,
}

impl Answer {
    pub fn refused(status: &Status) -> Self {
        Self {
            text: format!("{:?}: {}", status.code(), status.message()),
            code: format!("{:?}", status.code()),
        }
    }

    pub fn text(text: String) -> Self {
        Self {
            text,
            code: String::new(),
        }
    }
}

/// A message that says what of it may differ.
pub trait Comparable: Debug {
    fn clear(&mut self);
}

pub fn answered<T: Comparable>(mut response: T) -> Answer {
    response.clear();
    Answer::text(format!("{response:?}"))
}

fn answer<T: Comparable>(result: Result<Response<T>, Status>) -> Result<Answer> {
    match result {
        Ok(response) => Ok(answered(response.into_inner())),
        Err(status) => refusal(&status),
    }
}

fn refusal(status: &Status) -> Result<Answer> {
    if status.code() == tonic::Code::Unavailable {
        bail!("unavailable: {}", status.message());
    }
    Ok(Answer::refused(status))
}

/// Sends one operation. `plan` tells of a watch what it will bring.
pub async fn perform(client: &Client, op: &Op, plan: &Plan) -> Result<Answer> {
    let Client {
        mut kv,
        mut lease,
        mut maintenance,
        mut cluster,
        ..
    } = client.clone();
    match op.clone() {
        Op::Range(request) => answer(kv.range(request).await),
        Op::RangeStream(request) => match kv.range_stream(request).await {
            Ok(stream) => range_stream(stream.into_inner()).await,
            Err(status) => refusal(&status),
        },
        Op::Put(request) => answer(kv.put(request).await),
        Op::Delete(request) => answer(kv.delete_range(request).await),
        Op::Txn(request) => answer(kv.txn(request).await),
        Op::Compact(request) => {
            let answer = answer(kv.compact(request).await)?;
            if answer.code.is_empty() && !request.physical {
                compacted(client, request.revision).await?;
            }
            Ok(answer)
        }
        Op::Grant(request) => answer(lease.lease_grant(request).await),
        Op::ShortLease(request) => short_lease(client, request).await,
        Op::Revoke(request) => answer(lease.lease_revoke(request).await),
        Op::KeepAlive(ids) => keep_alive(client, ids).await,
        Op::TimeToLive(request) => answer(lease.lease_time_to_live(request).await),
        Op::Leases => answer(lease.lease_leases(pb::LeaseLeasesRequest {}).await),
        Op::HashKv(request) => answer(maintenance.hash_kv(request).await),
        Op::Hash => answer(maintenance.hash(pb::HashRequest {}).await),
        Op::Status => answer(maintenance.status(pb::StatusRequest {}).await),
        Op::Alarms(request) => answer(maintenance.alarm(request).await),
        Op::Snapshot => snapshot(client).await,
        Op::Defragment => answer(maintenance.defragment(pb::DefragmentRequest {}).await),
        Op::Members(request) => answer(cluster.member_list(request).await),
        Op::Downgrade(version) => answer(
            maintenance
                .downgrade(pb::DowngradeRequest {
                    action: DowngradeAction::Validate.into(),
                    version,
                })
                .await,
        ),
        Op::Watch(steps) => watch::perform(client, &steps, plan).await,
        Op::Restart { .. } => bail!("a restart is nothing to ask of a server"),
    }
}

/// Waits for a compaction in the background, since HashKV tells whether it is through: it then knows the hash of what was there before.
async fn compacted(client: &Client, revision: i64) -> Result<()> {
    let end = wait::now() + COMPACTION_DEADLINE;
    while wait::now() < end {
        let told = client
            .maintenance
            .clone()
            .hash_kv(pb::HashKvRequest { revision })
            .await?
            .into_inner();
        if told.compact_revision != revision {
            return Ok(());
        }
        tokio::time::sleep(COMPACTION_STEP).await;
    }
    bail!("the compaction at {revision} did not end within {COMPACTION_DEADLINE:?}")
}

/// The parts put together; what only the last may hold is checked to be there alone.
async fn range_stream(mut parts: tonic::Streaming<pb::RangeStreamResponse>) -> Result<Answer> {
    let mut whole: Option<pb::RangeResponse> = None;
    while let Some(part) = parts.next().await {
        let part = match part {
            Ok(part) => part.range_response.unwrap_or_default(),
            Err(status) => return refusal(&status),
        };
        whole = Some(match whole {
            None => part,
            Some(before) => {
                if before.header.is_some() || before.more || before.count != 0 {
                    bail!("a part after the one with the header");
                }
                pb::RangeResponse {
                    kvs: before.kvs.into_iter().chain(part.kvs).collect(),
                    ..part
                }
            }
        });
    }
    Ok(answered(whole.context("a stream without a part")?))
}

async fn short_lease(client: &Client, request: pb::LeaseGrantRequest) -> Result<Answer> {
    let begun = wait::now();
    let granted = answer(client.lease.clone().lease_grant(request).await)?;
    let revoke = pb::LeaseRevokeRequest { id: request.id };
    let revoked = answer(client.lease.clone().lease_revoke(revoke).await)?;
    let slow = begun.elapsed() > SHORT_LEASE_DEADLINE;
    if !revoked.code.is_empty() && !slow {
        bail!("a lease just granted cannot be revoked: {}", revoked.text);
    }
    Ok(granted)
}

async fn keep_alive(client: &Client, ids: Vec<i64>) -> Result<Answer> {
    let count = ids.len();
    let requests = tokio_stream::iter(ids.into_iter().map(|id| pb::LeaseKeepAliveRequest { id }));
    let mut answers = match client.lease.clone().lease_keep_alive(requests).await {
        Ok(answers) => answers.into_inner(),
        Err(status) => return refusal(&status),
    };
    let mut texts = Vec::new();
    while let Some(response) = answers.next().await {
        texts.push(answer(response.map(Response::new))?.text);
    }
    if texts.len() != count {
        bail!("{count} keepalives were answered {} times", texts.len());
    }
    Ok(Answer::text(texts.join("\n    ")))
}

/// What a snapshot says of itself; its last message must be the hash of all before.
async fn snapshot(client: &Client) -> Result<Answer> {
    let request = pb::SnapshotRequest {};
    let mut maintenance = client.maintenance.clone();
    let mut messages = match maintenance.snapshot(request).await {
        Ok(messages) => messages.into_inner(),
        Err(status) => return refusal(&status),
    };
    let mut hash = sha2::Sha256::new();
    let mut before: Option<pb::SnapshotResponse> = None;
    let mut total = None;
    while let Some(message) = messages.next().await {
        let message = message?;
        if let Some(data) = before.replace(message) {
            hash.update(&data.blob);
            let whole = data.remaining_bytes + data.blob.len() as u64;
            if total.is_some_and(|total| total != whole) {
                bail!("the bytes remaining do not add up: {whole} instead of {total:?}");
            }
            total = Some(data.remaining_bytes);
            if data.header.is_some() {
                bail!("a header in a snapshot");
            }
        }
    }
    let last = before.context("an empty snapshot")?;
    if total != Some(0) || last.blob.len() != SHA256_BYTES || last.blob != hash.finalize()[..] {
        bail!("the last message is not the hash of {total:?} remaining bytes: {last:?}");
    }
    Ok(snapshot_text(&last))
}

/// Of the last message.
pub fn snapshot_text(last: &pb::SnapshotResponse) -> Answer {
    Answer::text(format!(
        "a snapshot, version {:?}, {} remain, header {:?}",
        last.version, last.remaining_bytes, last.header
    ))
}

fn header(header: &mut Option<pb::ResponseHeader>) {
    if let Some(header) = header {
        (header.cluster_id, header.member_id, header.raft_term) = (0, 0, 0);
    }
}

macro_rules! comparable {
    ($($response:ty $(, |$it:ident| $clear:expr)?;)*) => {
        $(impl Comparable for $response {
            fn clear(&mut self) {
                header(&mut self.header);
                $(let $it = self; $clear;)?
            }
        })*
    };
}

comparable! {
    pb::RangeResponse;
    pb::PutResponse;
    pb::DeleteRangeResponse;
    pb::TxnResponse, |it| for inner in &mut it.responses {
        match &mut inner.response {
            Some(Inner::ResponseRange(inner)) => inner.clear(),
            Some(Inner::ResponsePut(inner)) => inner.clear(),
            Some(Inner::ResponseDeleteRange(inner)) => inner.clear(),
            Some(Inner::ResponseTxn(inner)) => inner.clear(),
            None => {}
        }
    };
    pb::CompactionResponse;
    pb::LeaseGrantResponse;
    pb::LeaseRevokeResponse;
    pb::LeaseKeepAliveResponse;
    // A second may have passed on one side only.
    // Nor have the keys an order there.
    pb::LeaseTimeToLiveResponse, |it| {
        it.ttl = it.ttl.min(0);
        it.keys.sort();
    };
    // etcd orders them by when they end.
    pb::LeaseLeasesResponse, |it| it.leases.sort_by_key(|lease| lease.id);
    pb::HashKvResponse;
    pb::HashResponse, |it| it.hash = 0;
    pb::StatusResponse, |it| {
        it.db_size = it.db_size.min(1);
        it.db_size_in_use = it.db_size_in_use.min(1);
        it.leader = it.leader.min(1);
        (it.raft_index, it.raft_term, it.raft_applied_index) = (0, 0, 0);
    };
    pb::AlarmResponse, |it| for alarm in &mut it.alarms {
        alarm.member_id = 0;
    };
    pb::DefragmentResponse;
    pb::MemberListResponse, |it| for member in &mut it.members {
        member.id = member.id.min(1);
        for url in member.peer_ur_ls.iter_mut().chain(&mut member.client_ur_ls) {
            // The port is the member's own.
            url.truncate(url.rfind(':').unwrap_or(0));
        }
    };
    pb::DowngradeResponse;
    pb::WatchResponse, |it| it.events.clear();
}
