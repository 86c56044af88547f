//! Spans, as a collector receives them.

use std::sync::{Arc, Mutex};

use ballast_api::etcdserverpb as pb;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::harness::{Server, eventually, get, put};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
const SECRET: &str = "Zk3-not-for-any-span-9Qx";

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap().push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn start() -> (Self, String) {
        let collector = Self::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let service = TraceServiceServer::new(collector.clone());
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        (collector, address)
    }

    fn spans(&self) -> Vec<Span> {
        let requests = self.0.lock().unwrap();
        requests
            .iter()
            .flat_map(|request| &request.resource_spans)
            .flat_map(|resource| &resource.scope_spans)
            .flat_map(|scope| scope.spans.clone())
            .collect()
    }

    fn resource(&self, name: &str) -> Option<String> {
        let requests = self.0.lock().unwrap();
        let resource = requests.first()?.resource_spans.first()?.resource.clone()?;
        attribute(&resource.attributes, name)
    }
}

fn attribute(
    attributes: &[opentelemetry_proto::tonic::common::v1::KeyValue],
    name: &str,
) -> Option<String> {
    let found = attributes.iter().find(|attribute| attribute.key == name)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        Value::BoolValue(is) => Some(is.to_string()),
        _ => None,
    }
}

fn traced<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    let parent = format!("00-{TRACE}-{PARENT}-01").parse().unwrap();
    request.metadata_mut().insert("traceparent", parent);
    request
}

#[tokio::test]
async fn spans_have_the_callers_parent_and_no_values() {
    let (collector, address) = Collector::start().await;
    let address = format!("--distributed-tracing-address={address}");
    let server = Server::start_with(&[
        "--enable-distributed-tracing",
        &address,
        "--distributed-tracing-service-name=store",
        "--distributed-tracing-instance-id=one",
    ]);
    let mut kv = server.kv().await;
    // Nobody asks for a span of this one: the sampling rate is 0.
    kv.range(get("untraced")).await.unwrap();
    kv.put(traced(put("span/a", SECRET))).await.unwrap();
    kv.range(traced(get("span/a"))).await.unwrap();
    let txn = pb::TxnRequest {
        success: vec![pb::RequestOp {
            request: Some(pb::request_op::Request::RequestPut(put("span/b", SECRET))),
        }],
        ..Default::default()
    };
    kv.txn(traced(txn)).await.unwrap();
    let revoke = pb::LeaseRevokeRequest { id: 4242 };
    server
        .leases()
        .await
        .lease_revoke(traced(revoke))
        .await
        .unwrap_err();

    let spans = eventually("all spans have come", || async {
        let spans = collector.spans();
        (spans.len() >= 8).then_some(spans)
    })
    .await;
    assert_eq!(collector.resource("service.name").as_deref(), Some("store"));
    assert_eq!(
        collector.resource("service.instance.id").as_deref(),
        Some("one")
    );
    for span in &spans {
        assert_eq!(hex::encode(&span.trace_id), TRACE, "{span:?}");
    }
    for (call, inner, key) in [
        ("etcdserverpb.KV/Put", "put", Some(("key", "span/a"))),
        (
            "etcdserverpb.KV/Range",
            "range",
            Some(("range_begin", "span/a")),
        ),
        (
            "etcdserverpb.KV/Txn",
            "txn",
            Some(("success_first_key", "span/b")),
        ),
        (
            "etcdserverpb.Lease/LeaseRevoke",
            "lease_revoke",
            Some(("id", "4242")),
        ),
    ] {
        let named = |name: &str| {
            spans
                .iter()
                .find(|span| span.name == name)
                .unwrap_or_else(|| panic!("no span {name}"))
        };
        let outer = named(call);
        assert_eq!(hex::encode(&outer.parent_span_id), PARENT);
        let inner = named(inner);
        assert_eq!(inner.parent_span_id, outer.span_id);
        assert!(inner.start_time_unix_nano >= outer.start_time_unix_nano);
        assert!(inner.end_time_unix_nano <= outer.end_time_unix_nano);
        if let Some((name, value)) = key {
            assert_eq!(attribute(&inner.attributes, name).as_deref(), Some(value));
        }
        let code = if call.ends_with("Revoke") { "5" } else { "0" };
        assert_eq!(
            attribute(&outer.attributes, "rpc.grpc.status_code").as_deref(),
            Some(code)
        );
    }
    assert!(!format!("{spans:?}").contains(SECRET));
}
