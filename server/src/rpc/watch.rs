//! The Watch service: one stream of responses for any number of watchers.
//!
//!     request --> session.rs (create, cancel, progress) --> hub
//!     hub --mailbox--> run.rs (packs a watcher's events) --> bytes
//!
//! A stream is one task, the one that writes its response: the response's body reads the requests too. So a client that does
//! not read is not read from either, and what waits for it is bounded by its mailbox.
//!
//! Written over HTTP bodies instead of tonic's streams: responses are copies of events encoded once for all
//! (`watch/frame.rs`), many in one chunk.
//!
//! etcd: server/etcdserver/api/v3rpc/watch.go.

mod run;
mod session;

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ballast_api::error::Error;
use ballast_api::etcdserverpb::WatchRequest;
use bytes::{Buf, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use prost::Message;
use tonic::Status;
use tonic::Streaming;
use tonic::body::Body;
use tonic::codec::{DecodeBuf, Decoder};
use tonic::server::NamedService;

use crate::raft::node::RaftStatus;
use crate::watch::{Hub, Speaker};
use session::Session;

/// etcd's `WithRequireLeader`.
const REQUIRE_LEADER_HEADER: &str = "hasleader";
/// Floor of the progress interval, as in etcd.
const PROGRESS_INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Election timeouts without a leader after which streams that require one end, as in etcd.
const NO_LEADER_ELECTIONS: u32 = 3;

/// What the flags say about watching.
#[derive(Clone, Copy, Debug)]
pub struct WatchConfig {
    /// `--watch-progress-notify-interval`; up to a tenth is added, so that streams do not tick together.
    pub progress_interval: Duration,
    /// Above this a response is cut for those who asked for fragments: `--max-request-bytes` and gRPC's overhead.
    pub fragment_bytes: usize,
    pub election_timeout: Duration,
}

/// Who may watch what. Asked for each create request, with the metadata that opened the stream.
pub trait WatchPermission: Debug + Send + Sync {
    fn check(&self, metadata: &HeaderMap, key: &[u8], range_end: &[u8]) -> Result<(), Error>;
}

/// `etcdserverpb.Watch`, as an HTTP service.
#[derive(Clone, Debug)]
pub struct WatchService {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    hub: Arc<Hub>,
    leadership: tokio::sync::watch::Receiver<RaftStatus>,
    speaker: Speaker,
    config: WatchConfig,
    permission: Option<Arc<dyn WatchPermission>>,
}

impl WatchService {
    pub fn new(
        hub: Arc<Hub>,
        leadership: tokio::sync::watch::Receiver<RaftStatus>,
        speaker: Speaker,
        config: WatchConfig,
    ) -> Self {
        let config = WatchConfig {
            progress_interval: config.progress_interval.max(PROGRESS_INTERVAL_MIN),
            ..config
        };
        Self {
            shared: Arc::new(Shared {
                hub,
                leadership,
                speaker,
                config,
                permission: None,
            }),
        }
    }

    /// Without one everybody may watch everything.
    #[must_use]
    pub fn with_permission(self, permission: Arc<dyn WatchPermission>) -> Self {
        let shared = &self.shared;
        Self {
            shared: Arc::new(Shared {
                hub: shared.hub.clone(),
                leadership: shared.leadership.clone(),
                speaker: shared.speaker,
                config: shared.config,
                permission: Some(permission),
            }),
        }
    }

    /// Answers one call: a response whose body is the stream.
    pub fn answer<B>(&self, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        match self.open(request) {
            Ok(stream) => {
                let mut response = Response::new(Body::new(stream));
                response
                    .headers_mut()
                    .insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
                response
            }
            Err(status) => status.into_http(),
        }
    }

    fn open<B>(&self, request: Request<B>) -> Result<WatchBody, Status>
    where
        B: http_body::Body + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        if request.uri().path() != "/etcdserverpb.Watch/Watch" {
            return Err(Status::unimplemented(format!(
                "unknown method {} for service {}",
                request.uri().path().rsplit('/').next().unwrap_or_default(),
                Self::NAME
            )));
        }
        let status = *self.shared.leadership.borrow();
        if status.is_learner {
            return Err(Error::NotSupportedForLearner.into());
        }
        let (parts, body) = request.into_parts();
        let needs_leader = parts
            .headers
            .get(REQUIRE_LEADER_HEADER)
            .is_some_and(|value| value == "true");
        if needs_leader && status.leader == 0 {
            return Err(Error::NoLeader.into());
        }
        // The size of requests is limited before they get here, with etcd's answer.
        let inbound = Streaming::new_request(RequestDecoder, body, None, Some(usize::MAX));
        Ok(WatchBody {
            session: Session::new(self.shared.clone(), parts.headers, inbound, needs_leader),
            out: BytesMut::new(),
            end: None,
            finished: false,
        })
    }
}

impl NamedService for WatchService {
    const NAME: &'static str = "etcdserverpb.Watch";
}

impl<B> tower::Service<Request<B>> for WatchService
where
    B: http_body::Body + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let response = self.answer(request);
        Box::pin(std::future::ready(Ok(response)))
    }
}

/// The response's body: chunks of whole messages, then the status.
struct WatchBody {
    session: Session,
    out: BytesMut,
    end: Option<Status>,
    finished: bool,
}

impl http_body::Body for WatchBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if this.finished {
            return Poll::Ready(None);
        }
        if this.end.is_none() {
            this.end = this.session.poll_write(cx, &mut this.out).err();
        }
        if !this.out.is_empty() {
            // A new buffer for each chunk: what is left of an old one would pin it, and a large response with it.
            let chunk = std::mem::take(&mut this.out).freeze();
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        let Some(status) = this.end.take() else {
            return Poll::Pending;
        };
        this.finished = true;
        let mut trailers = HeaderMap::new();
        Poll::Ready(Some(
            status
                .add_header(&mut trailers)
                .map(|()| Frame::trailers(trailers)),
        ))
    }
}

#[derive(Debug)]
struct RequestDecoder;

impl Decoder for RequestDecoder {
    type Item = WatchRequest;
    type Error = Status;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<WatchRequest>, Status> {
        // Keys live as long as their watchers: a copy of their own, or they would pin the frame they came in.
        let bytes = buf.copy_to_bytes(buf.remaining());
        WatchRequest::decode(Bytes::copy_from_slice(&bytes))
            .map(Some)
            .map_err(|error| {
                Status::internal(format!("grpc: error unmarshalling request: {error}"))
            })
    }
}

#[cfg(test)]
mod tests;
