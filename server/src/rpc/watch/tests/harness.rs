//! A store with its hub, and clients that speak to the service in memory.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use ballast_api::etcdserverpb::watch_request::RequestUnion;
use ballast_storage::LogPosition;
use ballast_storage::backend::Kind;
use ballast_storage::mvcc::{Committed, Store, StoreOptions};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::StreamExt;
use http::Request;
use http_body::{Body as _, Frame};
use http_body_util::StreamBody;
use prost::Message;
use tokio::sync::{mpsc, watch};
use tonic::Status;
use tonic::body::Body;

use crate::clock::Clock;
use crate::raft::node::RaftStatus;
use crate::rpc::watch::{WatchConfig, WatchService};
use crate::watch::{Hub, Speaker, WatchMetrics};

/// Longer than any of these tests takes on a loaded machine.
pub(super) const PATIENCE: Duration = Duration::from_mins(1);

pub(super) struct Server {
    pub(super) store: Arc<Store>,
    pub(super) hub: Arc<Hub>,
    pub(super) service: WatchService,
    pub(super) leadership: watch::Sender<RaftStatus>,
    pub(super) metrics: WatchMetrics,
    index: AtomicU64,
    dir: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.hub.close();
    }
}

impl Server {
    pub(super) fn start() -> Self {
        Self::open(tempfile::tempdir().unwrap(), 0)
    }

    fn open(dir: tempfile::TempDir, index: u64) -> Self {
        let store = Store::open(StoreOptions {
            dir: dir.path().join("db"),
            engine: Kind::Redb,
            value_cache_bytes: 1 << 20,
            engine_cache_bytes: 4 << 20,
            compaction_batch_limit: 1000,
            compaction_sleep: Duration::from_millis(1),
            batch_interval: Duration::from_millis(20),
            batch_limit: 10_000,
        })
        .unwrap();
        let metrics = WatchMetrics::default();
        let hub = Hub::new(store.clone(), metrics.clone());
        let (leadership, receiver) = watch::channel(RaftStatus {
            leader: 7,
            term: 2,
            ..RaftStatus::default()
        });
        let service = WatchService::new(
            hub.clone(),
            receiver,
            Speaker {
                cluster_id: 11,
                member_id: 7,
            },
            WatchConfig {
                progress_interval: Duration::from_millis(100),
                fragment_bytes: (1 << 20) + (1 << 20),
                election_timeout: Duration::from_millis(50),
            },
        );
        Self {
            store,
            hub,
            service,
            leadership,
            metrics,
            index: AtomicU64::new(index),
            dir,
        }
    }

    /// Stops and opens the same directory again.
    pub(super) fn restart(mut self) -> Self {
        self.hub.close();
        self.store.flush().unwrap();
        self.store.close().unwrap();
        let index = self.index.load(Ordering::Relaxed);
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        drop(self);
        Self::open(dir, index)
    }

    /// One transaction, told to the hub as apply does.
    pub(super) fn write(
        &self,
        fill: impl FnOnce(&mut ballast_storage::mvcc::WriteTxn<'_>),
    ) -> Committed {
        let index = self.index.fetch_add(1, Ordering::Relaxed) + 1;
        self.store.set_log_synced(index);
        let mut txn = self.store.begin(LogPosition { term: 1, index });
        fill(&mut txn);
        let committed = txn.commit();
        self.hub.notify(&committed);
        self.hub.wake();
        committed
    }

    pub(super) fn put(&self, key: &str, value: &[u8]) -> i64 {
        let (key, value) = (
            Bytes::copy_from_slice(key.as_bytes()),
            Bytes::copy_from_slice(value),
        );
        self.write(|txn| {
            txn.put(key, value, 0).unwrap();
        })
        .revision
    }

    pub(super) fn delete(&self, key: &str) -> i64 {
        self.write(|txn| {
            txn.delete_range(key.as_bytes(), b"").unwrap();
        })
        .revision
    }

    /// Compacts and waits until the records are gone.
    pub(super) fn compact(&self, revision: i64) {
        let mut compaction = None;
        self.write(|txn| compaction = Some(txn.compact(revision).unwrap()));
        compaction.unwrap().wait().unwrap();
    }

    /// Waits for what the hub's threads bring about.
    pub(super) fn wait_until(&self, reached: impl Fn() -> bool) {
        let started = Clock::default().now();
        while !reached() {
            assert!(started.elapsed() < PATIENCE, "{:?}", self.metrics);
            std::thread::yield_now();
        }
    }

    pub(super) fn connect(&self) -> Client {
        self.try_connect(false).unwrap()
    }

    pub(super) fn try_connect(&self, needs_leader: bool) -> Result<Client, Status> {
        let (sender, receiver) = mpsc::unbounded_channel::<Bytes>();
        let frames = tokio_stream::wrappers::UnboundedReceiverStream::new(receiver)
            .map(|bytes| Ok::<_, Status>(Frame::data(bytes)));
        let mut request = Request::builder().uri("/etcdserverpb.Watch/Watch");
        if needs_leader {
            request = request.header("hasleader", "true");
        }
        let request = request.body(StreamBody::new(frames)).unwrap();
        let response = self.service.answer(request);
        if let Some(status) = Status::from_header_map(response.headers()) {
            return Err(status);
        }
        Ok(Client {
            requests: sender,
            body: response.into_body(),
            buffer: BytesMut::new(),
        })
    }
}

pub(super) struct Client {
    requests: mpsc::UnboundedSender<Bytes>,
    body: Body,
    buffer: BytesMut,
}

impl Client {
    pub(super) fn send(&self, union: RequestUnion) {
        let message = pb::WatchRequest {
            request_union: Some(union),
        };
        let mut frame = BytesMut::new();
        frame.put_u8(0);
        frame.put_u32(message.encoded_len() as u32);
        message.encode(&mut frame).unwrap();
        self.requests.send(frame.freeze()).unwrap();
    }

    pub(super) fn create(&self, request: pb::WatchCreateRequest) {
        self.send(RequestUnion::CreateRequest(request));
    }

    pub(super) fn cancel(&self, watch_id: i64) {
        self.send(RequestUnion::CancelRequest(pb::WatchCancelRequest {
            watch_id,
        }));
    }

    pub(super) fn ask_progress(&self) {
        self.send(RequestUnion::ProgressRequest(pb::WatchProgressRequest {}));
    }

    /// Creates a watcher and takes its `created`.
    pub(super) async fn created(&mut self, request: pb::WatchCreateRequest) -> pb::WatchResponse {
        self.create(request);
        let response = self.next().await;
        assert!(response.created, "{response:?}");
        response
    }

    pub(super) async fn next(&mut self) -> pb::WatchResponse {
        self.next_sized().await.0
    }

    /// The next response and its size on the wire, less the frame.
    pub(super) async fn next_sized(&mut self) -> (pb::WatchResponse, usize) {
        tokio::time::timeout(PATIENCE, self.next_or_end())
            .await
            .expect("a response in time")
            .expect("the stream goes on")
    }

    /// The status that the stream ends with.
    pub(super) async fn end(&mut self) -> Status {
        loop {
            match tokio::time::timeout(PATIENCE, self.next_or_end())
                .await
                .unwrap()
            {
                Ok(_) => {}
                Err(status) => return status,
            }
        }
    }

    async fn next_or_end(&mut self) -> Result<(pb::WatchResponse, usize), Status> {
        loop {
            if let Some(message) = self.buffered() {
                let size = message.len();
                return Ok((pb::WatchResponse::decode(message).unwrap(), size));
            }
            let frame = std::future::poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await;
            match frame
                .expect("a status ends the stream")
                .unwrap()
                .into_data()
            {
                Ok(data) => self.buffer.extend_from_slice(&data),
                Err(trailers) => {
                    let trailers = trailers.into_trailers().unwrap();
                    return Err(Status::from_header_map(&trailers).unwrap());
                }
            }
        }
    }

    fn buffered(&mut self) -> Option<Bytes> {
        let mut head = self.buffer.get(..5)?;
        assert_eq!(head.get_u8(), 0, "not compressed");
        let len = head.get_u32() as usize;
        if self.buffer.len() < 5 + len {
            return None;
        }
        self.buffer.advance(5);
        Some(self.buffer.split_to(len).freeze())
    }
}

/// A watch on [key, end).
pub(super) fn watch_range(key: &str, end: &str, start_revision: i64) -> pb::WatchCreateRequest {
    pb::WatchCreateRequest {
        key: Bytes::copy_from_slice(key.as_bytes()),
        range_end: Bytes::copy_from_slice(end.as_bytes()),
        start_revision,
        ..pb::WatchCreateRequest::default()
    }
}

/// Key, value, revision and whether it is a delete, for comparing.
pub(super) fn told(response: &pb::WatchResponse) -> Vec<(String, i64, bool)> {
    response
        .events
        .iter()
        .map(|event| {
            let kv = event.kv.as_ref().unwrap();
            let key = String::from_utf8(kv.key.to_vec()).unwrap();
            (key, kv.mod_revision, event.r#type == 1)
        })
        .collect()
}
