//! KV: check, propose or read, header.
//!
//! etcd: server/etcdserver/api/v3rpc/key.go, server/etcdserver/v3_server.go.

use std::num::NonZero;
use std::pin::Pin;
use std::sync::Arc;

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use ballast_storage::ReadError;
use bytes::{BufMut, Bytes, BytesMut};
use futures::Stream;
use pb::kv_server::Kv;
use prost::Message;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot};
use tonic::{Request, Response, Status};

use super::budget::{SMALL_RESPONSE_BYTES, Share};
use super::call::{self, Stats};
use super::{Context, check, quota, status};
use crate::apply::{self, Answer, Failure, quota as cost};
use crate::clock::Clock;
use crate::loggable;
use crate::metrics::{Op, RANGES, timed};
use crate::spans;

/// A range that may touch more keys than this leaves the worker to a thread of its own.
const INLINE_KEYS_MAX: i64 = 256;
/// Reads of many keys that are under way at once, for each core: more would only share it.
const WIDE_READS_PER_CORE: usize = 4;
/// Keys in the first part of a streamed range; later parts follow the size of what came before.
const STREAM_FIRST_KEYS: i64 = 10;

/// Whose turn it is to read many keys. A read that has begun goes to its end whatever its client does meanwhile, so those beyond a
/// few wait here, and what is given up while it waits is never begun.
#[derive(Debug)]
pub struct WideReads(Semaphore);

impl Default for WideReads {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self(Semaphore::new(cores * WIDE_READS_PER_CORE))
    }
}

impl WideReads {
    async fn turn(&self) -> Result<SemaphorePermit<'_>, Status> {
        self.0.acquire().await.map_err(|_| Error::Stopped.into())
    }
}

/// The KV service.
#[derive(Clone, Debug)]
pub struct KvService(pub Arc<Context>);

#[tonic::async_trait]
impl Kv for KvService {
    async fn range(
        &self,
        request: Request<pb::RangeRequest>,
    ) -> Result<Response<pb::RangeResponse>, Status> {
        let request = request.into_inner();
        if !request.serializable && self.0.cluster.is_learner() {
            return Err(Error::NotSupportedForLearner.into());
        }
        check::range(&request)?;
        let (response, share) = self.0.range(&request).await?;
        Ok(with_share(response, share))
    }

    type RangeStreamStream =
        Pin<Box<dyn Stream<Item = Result<pb::RangeStreamResponse, Status>> + Send>>;

    async fn range_stream(
        &self,
        request: Request<pb::RangeRequest>,
    ) -> Result<Response<Self::RangeStreamStream>, Status> {
        let request = request.into_inner();
        check::range_stream(&request)?;
        let span = call::child(|| spans::range_stream(&request));
        if !request.serializable {
            self.0
                .raft
                .read_barrier()
                .await
                .map_err(status::from_propose)?;
        }
        let context = Arc::clone(&self.0);
        // Room for one part: the next is read while this one is sent.
        let (parts, stream) = mpsc::channel(1);
        tokio::task::spawn_blocking(move || {
            let _span = span;
            stream_parts(&context, request, &parts);
        });
        Ok(Response::new(Box::pin(
            tokio_stream::wrappers::ReceiverStream::new(stream),
        )))
    }

    async fn put(
        &self,
        request: Request<pb::PutRequest>,
    ) -> Result<Response<pb::PutResponse>, Status> {
        let mut request = request.into_inner();
        quota::check(&self.0, cost::put_cost(&request)).await?;
        check::put(&request)?;
        detach(&mut request);
        let (revision, answer) = self
            .0
            .propose(pb::InternalRaftRequest {
                put: Some(request),
                ..Default::default()
            })
            .await?;
        let Answer::Put(mut response) = answer else {
            return Err(super::unexpected(&answer));
        };
        response.header = Some(self.0.headers.at(revision));
        Ok(Response::new(response))
    }

    async fn delete_range(
        &self,
        request: Request<pb::DeleteRangeRequest>,
    ) -> Result<Response<pb::DeleteRangeResponse>, Status> {
        let request = request.into_inner();
        check::delete_range(&request)?;
        let (revision, answer) = self
            .0
            .propose(pb::InternalRaftRequest {
                delete_range: Some(request),
                ..Default::default()
            })
            .await?;
        let Answer::DeleteRange(mut response) = answer else {
            return Err(super::unexpected(&answer));
        };
        response.header = Some(self.0.headers.at(revision));
        Ok(Response::new(response))
    }

    async fn txn(
        &self,
        request: Request<pb::TxnRequest>,
    ) -> Result<Response<pb::TxnResponse>, Status> {
        let mut request = request.into_inner();
        quota::check(&self.0, cost::txn_cost(&request)).await?;
        check::txn(&request, self.0.limits.txn_ops_max)?;
        if apply::txn::is_read_only(&request) {
            let (response, share) = self.0.read_txn(&request).await?;
            return Ok(with_share(response, share));
        }
        detach_txn(&mut request);
        let (revision, answer) = self
            .0
            .propose(pb::InternalRaftRequest {
                txn: Some(request),
                ..Default::default()
            })
            .await?;
        let Answer::Txn(mut response) = answer else {
            return Err(super::unexpected(&answer));
        };
        response.header = Some(self.0.headers.at(revision));
        Ok(Response::new(response))
    }

    async fn compact(
        &self,
        request: Request<pb::CompactionRequest>,
    ) -> Result<Response<pb::CompactionResponse>, Status> {
        let request = request.into_inner();
        let physical = request.physical;
        let (revision, answer) = self
            .0
            .propose(pb::InternalRaftRequest {
                compaction: Some(request),
                ..Default::default()
            })
            .await?;
        let Answer::Compaction(compaction) = answer else {
            return Err(super::unexpected(&answer));
        };
        if physical {
            let (told, done) = oneshot::channel();
            // A caller that is gone needs no answer; nothing else waits for it.
            compaction.on_done(Box::new(move |result| drop(told.send(result))));
            done.await
                .map_err(|_| Error::Stopped)?
                .map_err(|_| Error::Stopped)?;
        }
        Ok(Response::new(pb::CompactionResponse {
            header: Some(self.0.headers.at(revision)),
        }))
    }
}

impl Context {
    /// A range after the barrier it asks for. Also what the health checks ask.
    pub async fn range(&self, request: &pb::RangeRequest) -> Answered<pb::RangeResponse> {
        let started = Clock::default().now();
        let _span = call::child(|| spans::range(request));
        let answered = self.range_after_barrier(request).await;
        self.note_read(Op::Range, started, answered.is_ok(), || {
            let mut stats = Stats {
                request_count: 0,
                request_bytes: request.encoded_len() as i64,
                content: loggable::range(request),
                ..Stats::default()
            };
            if let Ok((response, _)) = &answered {
                stats.response_count = response.kvs.len() as i64;
                stats.response_bytes = response.encoded_len() as i64;
            }
            (stats, "read-only range ")
        });
        answered
    }

    async fn range_after_barrier(&self, request: &pb::RangeRequest) -> Answered<pb::RangeResponse> {
        if !request.serializable {
            self.raft
                .read_barrier()
                .await
                .map_err(status::from_propose)?;
        }
        let read = |bytes_max| {
            let started = Clock::default().now();
            let answer = apply::range::range_within(&*self.store.view(), request, bytes_max);
            if !matches!(answer, Err(ReadError::TooLarge { .. })) {
                timed::ranged(answer.is_ok(), Clock::default().now() - started);
            }
            answer
        };
        // One value is no larger than a request.
        let many = !request.range_end.is_empty() && !request.count_only;
        let bytes_max = if many { SMALL_RESPONSE_BYTES } else { 0 };
        let mut answer = if is_wide(request) {
            let _turn = self.wide_reads.turn().await?;
            tokio::task::block_in_place(|| read(bytes_max))
        } else {
            read(bytes_max)
        };
        let mut share = None;
        if let Err(ReadError::TooLarge { bytes }) = answer {
            share = Some(self.budget.take(bytes).await?);
            let _turn = self.wide_reads.turn().await?;
            answer = tokio::task::block_in_place(|| read(0));
        }
        let mut response = answer.map_err(status::from_read)?;
        let revision = response.header.as_ref().map_or(0, |header| header.revision);
        response.header = Some(self.headers.at(revision));
        RANGES.inc();
        Ok((response, share))
    }

    async fn read_txn(&self, request: &pb::TxnRequest) -> Answered<pb::TxnResponse> {
        let started = Clock::default().now();
        let _span = call::child(|| spans::txn(request, true));
        let answered = self.read_txn_after_barrier(request).await;
        self.note_read(Op::ReadonlyTxn, started, answered.is_ok(), || {
            let mut stats = Stats {
                request_count: 0,
                request_bytes: request.encoded_len() as i64,
                content: loggable::txn(request),
                ..Stats::default()
            };
            if let Ok((response, _)) = &answered {
                stats.response_count = response.responses.len() as i64;
                stats.response_bytes = response.encoded_len() as i64;
            }
            (stats, "read-only txn ")
        });
        answered
    }

    async fn read_txn_after_barrier(&self, request: &pb::TxnRequest) -> Answered<pb::TxnResponse> {
        if !apply::txn::is_serializable(request) {
            self.raft
                .read_barrier()
                .await
                .map_err(status::from_propose)?;
        }
        let read = |bytes_max| {
            let view = self.store.view();
            let mut response = apply::txn::read(&view, request, bytes_max)?;
            response.header = Some(self.headers.at(view.revision()));
            Ok(response)
        };
        let turn = if reads_widely(request) {
            Some(self.wide_reads.turn().await?)
        } else {
            None
        };
        let mut answer = tokio::task::block_in_place(|| read(SMALL_RESPONSE_BYTES));
        drop(turn);
        let mut share = None;
        if let Err(Failure::TooLarge { bytes }) = answer {
            share = Some(self.budget.take(bytes).await?);
            let _turn = self.wide_reads.turn().await?;
            answer = tokio::task::block_in_place(|| read(0));
        }
        Ok((answer.map_err(status::from_failure)?, share))
    }
}

fn is_wide(request: &pb::RangeRequest) -> bool {
    !request.range_end.is_empty()
        && !request.count_only
        && (request.limit <= 0 || request.limit > INLINE_KEYS_MAX)
}

fn reads_widely(request: &pb::TxnRequest) -> bool {
    let mut ops = request.success.iter().chain(&request.failure);
    ops.any(|op| {
        matches!(&op.request, Some(pb::request_op::Request::RequestRange(range)) if is_wide(range))
    })
}

/// A response, and its share of the budget for large ones.
type Answered<T> = Result<(T, Option<Share>), Status>;

fn with_share<T>(response: T, share: Option<Share>) -> Response<T> {
    let mut response = Response::new(response);
    if let Some(share) = share {
        response.extensions_mut().insert(share);
    }
    response
}

/// Key and value as a buffer of their own: left as slices they would keep the whole network frame alive for as long as the
/// value is in memory.
fn detach(put: &mut pb::PutRequest) {
    let mut buffer = BytesMut::with_capacity(put.key.len() + put.value.len());
    buffer.put_slice(&put.key);
    buffer.put_slice(&put.value);
    let mut both = buffer.freeze();
    put.key = both.split_to(put.key.len());
    put.value = both;
}

fn detach_txn(txn: &mut pb::TxnRequest) {
    for op in txn.success.iter_mut().chain(&mut txn.failure) {
        match &mut op.request {
            Some(pb::request_op::Request::RequestPut(put)) => detach(put),
            Some(pb::request_op::Request::RequestTxn(txn)) => detach_txn(txn),
            _ => {}
        }
    }
}

type Part = Result<pb::RangeStreamResponse, Status>;

fn stream_parts(context: &Context, request: pb::RangeRequest, parts: &mpsc::Sender<Part>) {
    let result = if request.count_only {
        count_part(context, &request).map(|part| {
            // A reader that is gone needs no count.
            let _ = parts.blocking_send(Ok(part));
        })
    } else {
        key_parts(context, request, parts)
    };
    if let Err(error) = result {
        let _ = parts.blocking_send(Err(error));
    }
}

fn count_part(
    context: &Context,
    request: &pb::RangeRequest,
) -> Result<pb::RangeStreamResponse, Status> {
    let answer = apply::range::range(&*context.store.view(), request).map_err(status::from_read)?;
    let revision = answer.header.map_or(0, |header| header.revision);
    Ok(part(pb::RangeResponse {
        header: Some(context.headers.at(revision)),
        count: answer.count,
        ..Default::default()
    }))
}

/// Parts of growing size at one revision, each read on its own, so that a compaction in between ends the stream.
fn key_parts(
    context: &Context,
    mut request: pb::RangeRequest,
    parts: &mpsc::Sender<Part>,
) -> Result<(), Status> {
    // Below zero there is no limit and no cut into parts, as in etcd.
    let total = match request.limit {
        0 => i64::MAX,
        limit => limit,
    };
    request.limit = STREAM_FIRST_KEYS.min(total);
    let mut header_revision = None;
    let mut sent = 0;
    loop {
        let answer =
            apply::range::range(&*context.store.view(), &request).map_err(status::from_read)?;
        let head = answer.header.map_or(0, |header| header.revision);
        let revision = *header_revision.get_or_insert(head);
        if request.revision == 0 {
            request.revision = revision;
        }
        let found = answer.kvs.len() as i64;
        let bytes: usize = answer.kvs.iter().map(Message::encoded_len).sum();
        let next = answer.kvs.last().map(|kv| {
            let mut next = kv.key.to_vec();
            next.push(0);
            next
        });
        sent += found;
        let done = !answer.more || sent == total;
        let mut response = pb::RangeResponse {
            kvs: answer.kvs,
            ..Default::default()
        };
        if done {
            response.header = Some(context.headers.at(revision));
            response.more = answer.more;
            // The count is of the whole range: what was sent, and what comes after the last key of it. With a sort target but no
            // order, each part is sorted for itself and that is not the greatest key; etcd counts so.
            response.count = sent;
            if let (true, Some(next)) = (answer.more, &next) {
                response.count += count_from(context, &request, next)?;
            }
        }
        if parts.blocking_send(Ok(part(response))).is_err() || done {
            return Ok(());
        }
        let Some(next) = next else { return Ok(()) };
        request.key = next.into();
        let target = context.limits.request_bytes_max;
        if bytes < target / 2 {
            request.limit *= 2;
        } else if bytes > target * 2 {
            request.limit = (request.limit / 2).max(1);
        }
        request.limit = request.limit.min(total - sent);
    }
}

/// How many keys of a range are left from `next` on.
fn count_from(context: &Context, request: &pb::RangeRequest, next: &[u8]) -> Result<i64, Status> {
    let rest = pb::RangeRequest {
        key: Bytes::copy_from_slice(next),
        range_end: request.range_end.clone(),
        revision: request.revision,
        count_only: true,
        ..Default::default()
    };
    let answer = apply::range::range(&*context.store.view(), &rest).map_err(status::from_read)?;
    Ok(answer.count)
}

fn part(range_response: pb::RangeResponse) -> pb::RangeStreamResponse {
    pb::RangeStreamResponse {
        range_response: Some(range_response),
    }
}
