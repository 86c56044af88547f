//! Calls by method: started, handled by code, messages both ways, and with `--metrics=extensive` how long they took.
//!
//! Every series of a known method exists from the start, as in etcd, and is looked up once: a call costs a few additions.
//! Methods nobody serves are not counted, so that a client cannot make series.
//!
//! etcd: go-grpc-prometheus with etcdserver/api/v3rpc/grpc.go.

use std::pin::Pin;
use std::sync::{LazyLock, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts};
use tonic::body::Body;
use tonic::{Code, Status};

use crate::rpc::limit::FrameFollower;

/// The form of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Unary,
    ServerStream,
    BidiStream,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Kind::Unary => "unary",
            Kind::ServerStream => "server_stream",
            Kind::BidiStream => "bidi_stream",
        }
    }
}

/// All codes by number, as go-grpc-prometheus names them.
const CODES: [&str; 17] = [
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
];

/// Go's default buckets.
const HANDLING_BUCKETS: [f64; 11] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// Services and their methods; what is not unary stands in [`STREAMS`].
const SERVICES: [(&str, &[&str]); 7] = [
    (
        "etcdserverpb.KV",
        &[
            "Range",
            "Put",
            "Txn",
            "DeleteRange",
            "Compact",
            "RangeStream",
        ],
    ),
    (
        "etcdserverpb.Lease",
        &[
            "LeaseKeepAlive",
            "LeaseGrant",
            "LeaseRevoke",
            "LeaseTimeToLive",
            "LeaseLeases",
        ],
    ),
    ("etcdserverpb.Watch", &["Watch"]),
    (
        "etcdserverpb.Cluster",
        &[
            "MemberAdd",
            "MemberRemove",
            "MemberUpdate",
            "MemberList",
            "MemberPromote",
        ],
    ),
    (
        "etcdserverpb.Maintenance",
        &[
            "Alarm",
            "Status",
            "Defragment",
            "Hash",
            "HashKV",
            "Snapshot",
            "MoveLeader",
            "Downgrade",
        ],
    ),
    (
        "etcdserverpb.Auth",
        &[
            "AuthEnable",
            "AuthDisable",
            "AuthStatus",
            "Authenticate",
            "UserAdd",
            "UserGet",
            "UserList",
            "UserDelete",
            "UserChangePassword",
            "UserGrantRole",
            "UserRevokeRole",
            "RoleAdd",
            "RoleGet",
            "RoleList",
            "RoleDelete",
            "RoleGrantPermission",
            "RoleRevokePermission",
        ],
    ),
    ("grpc.health.v1.Health", &["Check", "List", "Watch"]),
];

const STREAMS: [(&str, Kind); 4] = [
    ("RangeStream", Kind::ServerStream),
    ("LeaseKeepAlive", Kind::BidiStream),
    ("Snapshot", Kind::ServerStream),
    ("Watch", Kind::BidiStream),
];

/// One method with its series.
#[derive(Debug)]
pub struct Method {
    pub service: &'static str,
    pub name: &'static str,
    pub kind: Kind,
    pub started: IntCounter,
    pub received: IntCounter,
    pub sent: IntCounter,
    handled: Vec<IntCounter>,
    handling: OnceLock<Histogram>,
}

impl Method {
    pub fn handled(&self, code: Code, took: Duration) {
        self.handled[code as usize].inc();
        if let Some(handling) = self.handling.get() {
            handling.observe(took.as_secs_f64());
        }
    }
}

struct Families {
    started: IntCounterVec,
    handled: IntCounterVec,
    received: IntCounterVec,
    sent: IntCounterVec,
}

const LABELS: [&str; 3] = ["grpc_type", "grpc_service", "grpc_method"];

impl Families {
    fn new() -> Self {
        let family = |name: &str, help: &str, labels: &[&str]| {
            let family =
                IntCounterVec::new(Opts::new(name, help), labels).expect("names are constants");
            super::add(family.clone());
            family
        };
        Self {
            started: family(
                "grpc_server_started_total",
                "Total number of RPCs started on the server.",
                &LABELS,
            ),
            handled: family(
                "grpc_server_handled_total",
                "Total number of RPCs completed on the server, regardless of success or failure.",
                &["grpc_type", "grpc_service", "grpc_method", "grpc_code"],
            ),
            received: family(
                "grpc_server_msg_received_total",
                "Total number of RPC stream messages received on the server.",
                &LABELS,
            ),
            sent: family(
                "grpc_server_msg_sent_total",
                "Total number of gRPC stream messages sent by the server.",
                &LABELS,
            ),
        }
    }

    fn method(&self, service: &'static str, name: &'static str) -> Method {
        let kind = match STREAMS.iter().find(|(stream, _)| *stream == name) {
            // The health check's stream goes one way.
            Some(_) if service == "grpc.health.v1.Health" => Kind::ServerStream,
            Some((_, kind)) => *kind,
            None => Kind::Unary,
        };
        let labels = [kind.name(), service, name];
        Method {
            service,
            name,
            kind,
            started: self.started.with_label_values(&labels),
            received: self.received.with_label_values(&labels),
            sent: self.sent.with_label_values(&labels),
            handled: CODES
                .iter()
                .map(|code| {
                    self.handled
                        .with_label_values(&[kind.name(), service, name, code])
                })
                .collect(),
            handling: OnceLock::new(),
        }
    }
}

/// In the order of [`SERVICES`].
static METHODS: LazyLock<Vec<Vec<Method>>> = LazyLock::new(|| {
    let families = Families::new();
    SERVICES
        .iter()
        .map(|(service, methods)| {
            methods
                .iter()
                .map(|method| families.method(service, method))
                .collect()
        })
        .collect()
});

/// None when nobody serves it.
pub fn method(service: &str, name: &str) -> Option<&'static Method> {
    let at = SERVICES.iter().position(|(known, _)| *known == service)?;
    METHODS[at].iter().find(|method| method.name == name)
}

/// Makes all series; with `extensive` also how long calls take.
pub(super) fn start(extensive: bool) {
    LazyLock::force(&METHODS);
    LazyLock::force(&RECEIVED_BYTES);
    LazyLock::force(&SENT_BYTES);
    if !extensive {
        return;
    }
    let options = HistogramOpts::new(
        "grpc_server_handling_seconds",
        "Histogram of response latency (seconds) of gRPC that had been application-level handled by the server.",
    )
    .buckets(HANDLING_BUCKETS.to_vec());
    let family = HistogramVec::new(options, &LABELS).expect("names are constants");
    super::add(family.clone());
    for method in METHODS.iter().flatten() {
        let labels = [method.kind.name(), method.service, method.name];
        // A second start in one process (tests) keeps the first one's.
        let _ = method.handling.set(family.with_label_values(&labels));
    }
}

pub static RECEIVED_BYTES: LazyLock<IntCounter> = LazyLock::new(|| {
    super::counter(
        "etcd_network_client_grpc_received_bytes_total",
        "The total number of bytes received from grpc clients.",
    )
});
static SENT_BYTES: LazyLock<IntCounter> = LazyLock::new(|| {
    super::counter(
        "etcd_network_client_grpc_sent_bytes_total",
        "The total number of bytes sent to grpc clients.",
    )
});

/// Takes over what the codec counted.
pub(super) fn collect_sent_bytes() {
    static TAKEN: std::sync::Mutex<u64> = std::sync::Mutex::new(0);
    let total = ballast_api::codec::ENCODED_BYTES.load(std::sync::atomic::Ordering::Relaxed);
    // Nothing panics while it is held.
    if let Ok(mut taken) = TAKEN.lock() {
        SENT_BYTES.inc_by(total - *taken);
        *taken = total;
    }
}

/// The code of a call that answered with headers alone; None when a body follows.
pub fn code_in(headers: &HeaderMap) -> Option<Code> {
    headers
        .get("grpc-status")
        .map(|value| Code::from_bytes(value.as_bytes()))
}

/// The body of a streaming call: counts its messages, and the call when it ends.
pub struct CountedBody<E: FnMut(Code) + Unpin> {
    inner: Body,
    method: &'static Method,
    follower: FrameFollower,
    /// The watch service makes its frames itself; those of the others are counted by the codec.
    counts_bytes: bool,
    end: Option<E>,
}

impl<E: FnMut(Code) + Unpin> CountedBody<E> {
    pub fn new(inner: Body, method: &'static Method, end: E) -> Self {
        Self {
            inner,
            method,
            follower: FrameFollower::default(),
            counts_bytes: method.service == "etcdserverpb.Watch",
            end: Some(end),
        }
    }

    fn ended(&mut self, code: Code) {
        if let Some(mut end) = self.end.take() {
            end(code);
        }
    }
}

impl<E: FnMut(Code) + Unpin> http_body::Body for CountedBody<E> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.inner).poll_frame(context);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref() {
                    let (method, counts_bytes) = (this.method, this.counts_bytes);
                    this.follower.follow(data, |length| {
                        method.sent.inc();
                        if counts_bytes {
                            SENT_BYTES.inc_by(length as u64);
                        }
                    });
                } else if let Some(code) = frame.trailers_ref().and_then(code_in) {
                    this.ended(code);
                }
            }
            Poll::Ready(Some(Err(status))) => {
                let code = status.code();
                this.ended(code);
            }
            Poll::Ready(None) => this.ended(Code::Ok),
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl<E: FnMut(Code) + Unpin> Drop for CountedBody<E> {
    /// The client went away.
    fn drop(&mut self) {
        self.ended(Code::Cancelled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_is_found_once_and_unknown_ones_are_not_counted() {
        for (service, methods) in SERVICES {
            for name in methods {
                let found = method(service, name).unwrap();
                assert_eq!((found.service, found.name), (service, *name));
            }
        }
        assert!(method("etcdserverpb.KV", "Watch").is_none());
        assert!(method("etcdserverpb.Nothing", "Range").is_none());
        let watch = |service| method(service, "Watch").unwrap().kind;
        assert_eq!(watch("etcdserverpb.Watch"), Kind::BidiStream);
        assert_eq!(watch("grpc.health.v1.Health"), Kind::ServerStream);
    }
}
