//! One port for all: gRPC by service name, and what is not gRPC to the HTTP handler.
//!
//! A match on the path instead of a router: it is on the way of every request.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use ballast_api::error::Error;
use ballast_api::etcdserverpb::{
    auth_server::AuthServer, cluster_server::ClusterServer, kv_server::KvServer,
    lease_server::LeaseServer, maintenance_server::MaintenanceServer,
};
use http::{Request, Response, header::CONTENT_TYPE};
use hyper::body::Incoming;
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic_health::pb::health_server::HealthServer;
use tower::Service;

use super::Context;
use super::auth::AuthService;
use super::call::{Call, Handling};
use super::cluster::ClusterService;
use super::http2_debug;
use super::kv::KvService;
use super::lease::LeaseService;
use super::limit::LimitedBody;
use super::maintenance::MaintenanceService;
use super::watch::WatchService;
use crate::cluster::Cluster;
use crate::health::Http;
use crate::metrics;
use crate::raft::node::RaftStatus;
use crate::watch::Speaker;

/// Metadata of a client that would rather be refused than served by a member without a leader.
const REQUIRE_LEADER: &str = "hasleader";
/// What gRPC itself adds to `--max-request-bytes` in etcd.
pub const GRPC_OVERHEAD_BYTES: usize = 512 * 1024;

/// What a learner answers too; of ranges only the serializable ones (`kv.rs`).
const LEARNERS_TOO: [&str; 3] = [
    "/etcdserverpb.KV/Range",
    "/etcdserverpb.Maintenance/Status",
    "/etcdserverpb.Maintenance/Snapshot",
];

type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// The client at the other end; None for a socket file.
pub type Remote = Option<SocketAddr>;

/// Everything served on a client port. Cloned per connection.
#[derive(Clone, Debug)]
pub struct Mux {
    kv: KvServer<KvService>,
    watch: WatchService,
    lease: LeaseServer<LeaseService>,
    cluster: ClusterServer<ClusterService>,
    maintenance: MaintenanceServer<MaintenanceService>,
    auth: AuthServer<AuthService>,
    health: HealthServer<tonic_health::server::HealthService>,
    /// None when HTTP has listeners of its own.
    http: Option<Arc<Http>>,
    leadership: watch::Receiver<RaftStatus>,
    members: Arc<Cluster>,
    message_bytes_max: usize,
    slow_after: Duration,
    remote: Remote,
    secure: bool,
}

impl Mux {
    pub fn new(context: &Arc<Context>, http: Option<Arc<Http>>) -> Self {
        let share = || Arc::clone(context);
        let any = usize::MAX;
        Self {
            kv: KvServer::new(KvService(share())).max_decoding_message_size(any),
            watch: WatchService::new(
                Arc::clone(&context.hub),
                context.raft.changes(),
                Speaker {
                    cluster_id: context.cluster.cluster_id,
                    member_id: context.cluster.member_id,
                },
                context.watch,
            ),
            lease: LeaseServer::new(LeaseService(share())).max_decoding_message_size(any),
            cluster: ClusterServer::new(ClusterService(share())).max_decoding_message_size(any),
            maintenance: MaintenanceServer::new(MaintenanceService(share()))
                .max_decoding_message_size(any),
            auth: AuthServer::new(AuthService(share())).max_decoding_message_size(any),
            health: HealthServer::new(tonic_health::server::HealthService::from_health_reporter(
                tonic_health::server::HealthReporter::new(),
            )),
            http,
            leadership: context.raft.changes(),
            members: Arc::clone(&context.cluster),
            message_bytes_max: context.limits.request_bytes_max + GRPC_OVERHEAD_BYTES,
            slow_after: context.limits.slow_request,
            remote: None,
            secure: false,
        }
    }

    /// The same for the connection of one client.
    #[must_use]
    pub fn of(self, remote: Remote, secure: bool) -> Self {
        Self {
            remote,
            secure,
            ..self
        }
    }

    fn answer(&mut self, request: Request<Incoming>) -> Handling {
        let grpc = request
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
        if !grpc {
            let Some(http) = self.http.clone() else {
                let mut refusal = Response::new(Body::default());
                *refusal.status_mut() = http::StatusCode::UNSUPPORTED_MEDIA_TYPE;
                return Handling::new(Box::pin(async { Ok(refusal) }), None);
            };
            let secure = self.secure;
            return Handling::new(
                Box::pin(async move { Ok(http.answer(request, secure).await) }),
                None,
            );
        }
        http2_debug::tell(request.uri());
        let path = request.uri().path();
        let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/'))
        else {
            return Handling::new(unknown(format!("malformed method name: {path:?}")), None);
        };
        let method = metrics::grpc::method(service, method);
        metrics::count_client(request.headers(), method);
        let call = method
            .map(|method| Call::begin(method, request.headers(), self.remote, self.slow_after));
        let limit = self.message_bytes_max;
        let request = request.map(|body| LimitedBody::new(body, limit, method));
        Handling::new(self.serve(request), call)
    }

    fn serve(&mut self, request: Request<LimitedBody<Incoming>>) -> Answering {
        let service = request.uri().path().split('/').nth(1).unwrap_or_default();
        let requires_leader = request
            .headers()
            .get(REQUIRE_LEADER)
            .is_some_and(|value| value == "true");
        if !LEARNERS_TOO.contains(&request.uri().path()) && self.members.is_learner() {
            return Box::pin(async { Ok(Status::from(Error::NotSupportedForLearner).into_http()) });
        }
        if requires_leader && self.leadership.borrow().leader == 0 {
            return Box::pin(async { Ok(Status::from(Error::NoLeader).into_http()) });
        }
        match service {
            "etcdserverpb.KV" => self.kv.call(request),
            "etcdserverpb.Lease" => self.lease.call(request),
            "etcdserverpb.Watch" => self.watch.call(request),
            "etcdserverpb.Maintenance" => self.maintenance.call(request),
            "etcdserverpb.Cluster" => self.cluster.call(request),
            "etcdserverpb.Auth" => self.auth.call(request),
            "grpc.health.v1.Health" => self.health.call(request),
            _ => unknown(format!("unknown service {service}")),
        }
    }
}

impl Service<Request<Incoming>> for Mux {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Handling;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Handling {
        self.answer(request)
    }
}

fn unknown(text: String) -> Answering {
    Box::pin(async move { Ok(Status::unimplemented(text).into_http()) })
}
