//! Spans of requests, sent to a collector by OTLP: one for each gRPC call, with what the call asks of the store below it.
//!
//! The parent is taken from the call's `traceparent`; without one the sampling rate decides. Off, which is the default, a call costs one
//! look at an empty cell. Keys are told, values never.
//!
//! etcd: server/embed/config_tracing.go, the spans of server/etcdserver/v3_server.go, otelgrpc.

use std::sync::OnceLock;
use std::time::Duration;

use ballast_api::etcdserverpb as pb;
use http::HeaderMap;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{
    Span as _, SpanKind, Status as SpanStatus, TraceContextExt, Tracer, TracerProvider,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use pb::request_op::Request;

/// Of so many calls without a parent all are traced.
pub const SAMPLING_RATE_MAX: i64 = 1_000_000;
/// What the end of the process waits for the collector.
const SHUTDOWN_MAX: Duration = Duration::from_secs(2);
/// Bytes of a key in an attribute.
const KEY_BYTES_MAX: usize = 1024;

/// `--enable-distributed-tracing` and its companions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracing {
    /// host:port of a collector that speaks OTLP over gRPC.
    pub address: String,
    pub service_name: String,
    /// Empty when not given.
    pub instance_id: String,
    /// Of [`SAMPLING_RATE_MAX`].
    pub sampling_rate: i64,
}

static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// Sends spans as long as it lives.
#[derive(Debug)]
pub struct Exporting(SdkTracerProvider);

impl Exporting {
    /// Must be called within a runtime. Spans that the collector does not take are lost; nobody waits for it.
    pub fn start(tracing: &Tracing) -> Result<Self, String> {
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(format!("http://{}", tracing.address))
            .build()
            .map_err(|error| error.to_string())?;
        let mut resource = Resource::builder().with_service_name(tracing.service_name.clone());
        if !tracing.instance_id.is_empty() {
            resource = resource.with_attribute(KeyValue::new(
                "service.instance.id",
                tracing.instance_id.clone(),
            ));
        }
        let root = if tracing.sampling_rate == 0 {
            Sampler::AlwaysOff
        } else {
            Sampler::TraceIdRatioBased(tracing.sampling_rate as f64 / SAMPLING_RATE_MAX as f64)
        };
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource.build())
            .with_sampler(Sampler::ParentBased(Box::new(root)))
            .build();
        // A second start in one process (tests) keeps the first one's.
        let _ = TRACER.set(provider.tracer("go.etcd.io/etcd"));
        Ok(Self(provider))
    }

    /// Sends what waits. Blocking.
    pub fn stop(self) {
        if let Err(error) = self.0.shutdown_with_timeout(SHUTDOWN_MAX) {
            tracing::debug!(error = %error, "the last spans were not sent");
        }
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

/// The span of a call; None when nobody wants it.
#[derive(Debug)]
pub struct CallSpan(Context);

impl CallSpan {
    pub fn begin(headers: &HeaderMap, service: &'static str, method: &'static str) -> Option<Self> {
        let tracer = TRACER.get()?;
        let parent = TraceContextPropagator::new().extract(&Headers(headers));
        let builder = tracer
            .span_builder(format!("{service}/{method}"))
            .with_kind(SpanKind::Server)
            .with_attributes([
                KeyValue::new("rpc.system.name", "grpc"),
                KeyValue::new("rpc.service", service),
                KeyValue::new("rpc.method", method),
            ]);
        let span = tracer.build_with_context(builder, &parent);
        span.is_recording().then(|| Self(parent.with_span(span)))
    }

    /// What the call asks of the store. Ends when it is dropped.
    pub fn child(&self, describe: impl FnOnce() -> Description) -> Option<Child> {
        let tracer = TRACER.get()?;
        let (name, attributes) = describe();
        let builder = tracer.span_builder(name).with_attributes(attributes);
        let span = tracer.build_with_context(builder, &self.0);
        Some(Child(self.0.with_span(span)))
    }

    pub fn end(&self, code: tonic::Code) {
        let span = self.0.span();
        span.set_attribute(KeyValue::new(
            "rpc.grpc.status_code",
            i64::from(code as i32),
        ));
        if matches!(
            code,
            tonic::Code::Unknown
                | tonic::Code::DeadlineExceeded
                | tonic::Code::Unimplemented
                | tonic::Code::Internal
                | tonic::Code::Unavailable
                | tonic::Code::DataLoss
        ) {
            span.set_status(SpanStatus::error(code.description()));
        }
        span.end();
    }
}

/// A span within a call.
#[derive(Debug)]
pub struct Child(Context);

impl Drop for Child {
    fn drop(&mut self) {
        self.0.span().end();
    }
}

/// Name and attributes, as etcd has them.
pub type Description = (&'static str, Vec<KeyValue>);

fn bytes(name: &'static str, value: &[u8]) -> KeyValue {
    let shown = &value[..value.len().min(KEY_BYTES_MAX)];
    KeyValue::new(name, String::from_utf8_lossy(shown).into_owned())
}

pub fn range(request: &pb::RangeRequest) -> Description {
    let attributes = vec![
        bytes("range_begin", &request.key),
        bytes("range_end", &request.range_end),
        KeyValue::new("rev", request.revision),
        KeyValue::new("limit", request.limit),
        KeyValue::new("count_only", request.count_only),
        KeyValue::new("keys_only", request.keys_only),
    ];
    ("range", attributes)
}

pub fn range_stream(request: &pb::RangeRequest) -> Description {
    let (_, mut attributes) = range(request);
    attributes.truncate(5);
    ("range_streaming", attributes)
}

pub fn txn(request: &pb::TxnRequest, read_only: bool) -> Description {
    let first = request.success.first().and_then(|op| op.request.as_ref());
    let (key, kind, lease): (&[u8], _, _) = match first {
        Some(Request::RequestPut(put)) => (&put.key[..], "put", put.lease),
        Some(Request::RequestRange(range)) => (&range.key[..], "range", 0),
        Some(Request::RequestDeleteRange(delete)) => (&delete.key[..], "delete_range", 0),
        Some(Request::RequestTxn(_)) => (&[], "txn", 0),
        None => (&[], "", 0),
    };
    let compared = request.compare.first().map(|compare| &compare.key[..]);
    let attributes = vec![
        bytes("compare_first_key", compared.unwrap_or_default()),
        bytes("success_first_key", key),
        KeyValue::new("success_first_type", kind),
        KeyValue::new("success_first_lease", lease),
        KeyValue::new("compare_len", request.compare.len() as i64),
        KeyValue::new("success_len", request.success.len() as i64),
        KeyValue::new("failure_len", request.failure.len() as i64),
        KeyValue::new("read_only", read_only),
    ];
    ("txn", attributes)
}

pub fn lease_renew(id: i64) -> Description {
    ("lease_renew", vec![KeyValue::new("id", id)])
}

pub fn proposal(request: &pb::InternalRaftRequest) -> Description {
    if let Some(put) = &request.put {
        return ("put", vec![bytes("key", &put.key)]);
    }
    if let Some(delete) = &request.delete_range {
        let attributes = vec![
            bytes("range_begin", &delete.key),
            bytes("range_end", &delete.range_end),
        ];
        return ("delete_range", attributes);
    }
    if let Some(request) = &request.txn {
        return txn(request, false);
    }
    if let Some(compaction) = &request.compaction {
        let attributes = vec![
            KeyValue::new("is_physical", compaction.physical),
            KeyValue::new("rev", compaction.revision),
        ];
        return ("compact", attributes);
    }
    if let Some(grant) = &request.lease_grant {
        let attributes = vec![
            KeyValue::new("id", grant.id),
            KeyValue::new("ttl", grant.ttl),
        ];
        return ("lease_grant", attributes);
    }
    if let Some(revoke) = &request.lease_revoke {
        return ("lease_revoke", vec![KeyValue::new("id", revoke.id)]);
    }
    (crate::metrics::Op::of(request).name(), Vec::new())
}
