//! HTTP beside gRPC: health checks, version, metrics, and what peers ask.
//!
//! etcd: server/etcdserver/api/etcdhttp, and the access controller in server/embed/serve.go.

use std::convert::Infallible;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::{API_VERSION, etcdserverpb as pb};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use tonic::body::Body;
use tracing_subscriber::filter::LevelFilter;

use crate::rpc::Context;
use crate::serve::HttpOnly;
use crate::{logging, metrics};

/// Which endpoints a listener has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoints {
    /// `--listen-client-urls`, `--listen-client-http-urls`.
    Client,
    /// `--listen-metrics-urls`: metrics and health.
    Metrics,
    /// `--listen-peer-urls`: who is in the cluster, and which version runs.
    Peer,
}

/// `--cors` and `--host-whitelist`: which pages of other sites a browser lets read answers, and under which names this server
/// may be asked without TLS.
#[derive(Clone, Debug)]
pub struct HttpAccess {
    origins: Vec<String>,
    hosts: Vec<String>,
}

impl HttpAccess {
    /// Of comma-separated texts; an empty one allows all, as `*` does.
    pub fn new(origins: &str, hosts: &str) -> Self {
        let list = |text: &str| -> Vec<String> {
            text.split(',')
                .map(str::trim)
                .filter(|item| !item.is_empty())
                .map(str::to_owned)
                .collect()
        };
        Self {
            origins: list(origins),
            hosts: list(hosts),
        }
    }

    fn allows(list: &[String], item: &str) -> bool {
        list.is_empty() || list.iter().any(|allowed| allowed == "*" || allowed == item)
    }
}

/// Each check of /livez and /readyz, in the order in which they are told.
const LIVEZ: [Check; 1] = [Check::SerializableRead];
const READYZ: [Check; 4] = [
    Check::DataCorruption,
    Check::LinearizableRead,
    Check::NonLearner,
    Check::SerializableRead,
];

/// Bytes of a request for another level of the log.
const LEVEL_BYTES_MAX: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    DataCorruption,
    SerializableRead,
    LinearizableRead,
    NonLearner,
}

impl Check {
    const fn name(self) -> &'static str {
        match self {
            Check::DataCorruption => "data_corruption",
            Check::SerializableRead => "serializable_read",
            Check::LinearizableRead => "linearizable_read",
            Check::NonLearner => "non_learner",
        }
    }
}

/// The HTTP endpoints.
#[derive(Debug)]
pub struct Http {
    context: Arc<Context>,
    /// How long a health check waits for its read: a request's own timeout.
    request_timeout: Duration,
    access: HttpAccess,
}

type Reply = Response<Body>;

impl Http {
    pub fn new(context: Arc<Context>, request_timeout: Duration, access: HttpAccess) -> Self {
        Self {
            context,
            request_timeout,
            access,
        }
    }

    /// Answers on a client URL: without TLS only to known hosts, and with what browsers want to hear.
    pub async fn answer<B>(&self, request: Request<B>, secure: bool) -> Reply {
        let host = host_name(&request);
        if !secure && !HttpAccess::allows(&self.access.hosts, &host) {
            tracing::warn!(%host, "rejecting HTTP request to prevent DNS rebinding attacks");
            return text(StatusCode::MISDIRECTED_REQUEST, unknown_host(&host));
        }
        let origin = self.allowed_origin(&request);
        let mut reply = if request.method() == Method::OPTIONS {
            Response::new(Body::default())
        } else {
            self.serve(request, Endpoints::Client).await
        };
        if let Some(origin) = origin {
            let headers = reply.headers_mut();
            for (name, value) in [
                (
                    header::ACCESS_CONTROL_ALLOW_METHODS,
                    "POST, GET, OPTIONS, PUT, DELETE",
                ),
                (
                    header::ACCESS_CONTROL_ALLOW_HEADERS,
                    "accept, content-type, authorization",
                ),
            ] {
                headers.insert(name, header::HeaderValue::from_static(value));
            }
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        }
        reply
    }

    /// What is told to a browser about the page that asks.
    fn allowed_origin<B>(&self, request: &Request<B>) -> Option<header::HeaderValue> {
        if HttpAccess::allows(&self.access.origins, "*") {
            return Some(header::HeaderValue::from_static("*"));
        }
        let origin = request.headers().get(header::ORIGIN)?;
        HttpAccess::allows(&self.access.origins, origin.to_str().ok()?).then(|| origin.clone())
    }

    /// Answers with the endpoints there are.
    pub async fn serve<B>(&self, request: Request<B>, endpoints: Endpoints) -> Reply {
        let path = request.uri().path();
        let query = Query::of(request.uri().query().unwrap_or_default());
        let health = matches!(path, "/health" | "/metrics")
            || path.starts_with("/livez")
            || path.starts_with("/readyz");
        let known = match endpoints {
            Endpoints::Client => health || matches!(path, "/version" | "/debug/vars"),
            Endpoints::Metrics => health,
            Endpoints::Peer => matches!(path, "/version" | "/members"),
        };
        if !known {
            return not_found();
        }
        if request.method() != Method::GET {
            let mut reply = text(
                StatusCode::METHOD_NOT_ALLOWED,
                "Method Not Allowed\n".to_owned(),
            );
            reply
                .headers_mut()
                .insert(header::ALLOW, header::HeaderValue::from_static("GET"));
            return reply;
        }
        match path {
            "/health" => self.health(&query).await,
            "/version" => json(StatusCode::OK, self.version()),
            "/members" => self.members(),
            "/metrics" => {
                let mut reply = text(StatusCode::OK, String::new());
                *reply.body_mut() =
                    Body::new(Full::new(Bytes::from(metrics::render(&self.context))));
                reply
            }
            "/debug/vars" => json(
                StatusCode::OK,
                format!("{{\"version\": \"{API_VERSION}\"}}\n"),
            ),
            "/livez" => self.checks("livez", &LIVEZ, &query).await,
            "/readyz" => self.checks("readyz", &READYZ, &query).await,
            _ => {
                if let Some(name) = path.strip_prefix("/livez/") {
                    return self.one_check("livez", &LIVEZ, name, &query).await;
                }
                if let Some(name) = path.strip_prefix("/readyz/") {
                    return self.one_check("readyz", &READYZ, name, &query).await;
                }
                not_found()
            }
        }
    }

    /// The members in the form in which etcd's peers tell them to each other.
    fn members(&self) -> Reply {
        let cluster = &self.context.cluster;
        let members: Vec<PeerMember> = cluster
            .members()
            .into_iter()
            .map(PeerMember::from)
            .collect();
        let mut body = serde_json::to_string(&members).unwrap_or_default();
        body.push('\n');
        let mut reply = json(StatusCode::OK, body);
        let id = format!("{:x}", cluster.cluster_id);
        if let Ok(id) = header::HeaderValue::from_str(&id) {
            reply.headers_mut().insert("x-etcd-cluster-id", id);
        }
        reply
    }

    /// What only operators may ask, and all the rest. The level of the log is read by GET and set by PUT, in the form that
    /// etcd's logging library has for it: `{"level":"debug"}`.
    pub async fn answer_operator<B>(&self, request: Request<B>) -> Reply
    where
        B: http_body::Body<Data = Bytes> + Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        if request.uri().path() != "/debug/log-level" {
            return self.serve(request, Endpoints::Metrics).await;
        }
        if request.method() == Method::PUT {
            let body = Limited::new(request.into_body(), LEVEL_BYTES_MAX);
            let asked = match body.collect().await {
                Ok(body) => parse_level(&body.to_bytes()),
                Err(_) => None,
            };
            let Some(level) = asked else {
                let why =
                    r#"{"error":"the body must be {\"level\":\"debug\"}, info, warn or error"}"#;
                return json(StatusCode::BAD_REQUEST, format!("{why}\n"));
            };
            logging::set_level(level);
            tracing::info!(
                level = logging::level_name(level),
                "the log's level was set"
            );
        } else if request.method() != Method::GET {
            return text(
                StatusCode::METHOD_NOT_ALLOWED,
                "Method Not Allowed\n".to_owned(),
            );
        }
        let level = logging::level_name(logging::level());
        json(StatusCode::OK, format!("{{\"level\":\"{level}\"}}\n"))
    }

    fn version(&self) -> String {
        let cluster = self
            .context
            .cluster
            .version()
            .unwrap_or_else(|| "not_decided".to_owned());
        let own = env!("CARGO_PKG_VERSION");
        let storage = self.context.cluster.storage_version();
        format!(
            r#"{{"etcdserver":"{API_VERSION}","etcdcluster":"{cluster}","storage":"{storage}","ballast":"{own}"}}"#
        )
    }

    async fn health(&self, query: &Query) -> Reply {
        let reason = self.unhealthy(query).await;
        let body = serde_json::json!({
            "health": if reason.is_empty() { "true" } else { "false" },
            "reason": reason,
        });
        if reason.is_empty() {
            metrics::HEALTH_SUCCESS.inc();
            let mut reply = text(StatusCode::OK, body.to_string());
            reply.headers_mut().remove("x-content-type-options");
            return reply;
        }
        metrics::HEALTH_FAILURES.inc();
        tracing::warn!(output = %body, "/health error");
        text(StatusCode::SERVICE_UNAVAILABLE, format!("{body}\n"))
    }

    /// Empty when all is well.
    async fn unhealthy(&self, query: &Query) -> String {
        for alarm in self.context.alarms.get(pb::AlarmType::None as i32) {
            let name =
                pb::AlarmType::try_from(alarm.alarm).map_or("UNKNOWN", |alarm| alarm.as_str_name());
            if !query.excluded.iter().any(|excluded| excluded == name) {
                return format!("ALARM {name}");
            }
        }
        if !query.serializable && self.context.raft.status().leader == 0 {
            return "RAFT NO LEADER".to_owned();
        }
        match self.read(query.serializable).await {
            Ok(()) => String::new(),
            Err(why) => format!("RANGE ERROR:{why}"),
        }
    }

    async fn read(&self, serializable: bool) -> Result<(), String> {
        let request = pb::RangeRequest {
            key: Bytes::from_static(b"\0"),
            keys_only: true,
            limit: 1,
            serializable,
            ..Default::default()
        };
        match tokio::time::timeout(self.request_timeout, self.context.range(&request)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) => Err(status.message().to_owned()),
            Err(_) => Err("etcdserver: request timed out".to_owned()),
        }
    }

    async fn checks(&self, kind: &str, checks: &[Check], query: &Query) -> Reply {
        let chosen: Vec<Check> = checks
            .iter()
            .copied()
            .filter(|check| !query.excluded.iter().any(|name| name == check.name()))
            .collect();
        self.run(kind, &chosen, query).await
    }

    async fn one_check(&self, kind: &str, checks: &[Check], name: &str, query: &Query) -> Reply {
        match checks.iter().find(|check| check.name() == name) {
            Some(check) => self.run(kind, &[*check], query).await,
            None => not_found(),
        }
    }

    async fn run(&self, kind: &str, checks: &[Check], query: &Query) -> Reply {
        let mut told = String::new();
        let mut all_ok = true;
        for check in checks {
            let outcome = match check {
                Check::SerializableRead => self.read(true).await,
                Check::LinearizableRead => self.read(false).await,
                Check::DataCorruption if self.context.alarms.corrupt() => {
                    Err("alarm activated: CORRUPT".to_owned())
                }
                Check::NonLearner if self.context.raft.status().is_learner => {
                    Err("not supported for learner".to_owned())
                }
                Check::DataCorruption | Check::NonLearner => Ok(()),
            };
            let name = check.name();
            metrics::count_health_check(kind, name, outcome.is_ok());
            // Writing to a string cannot fail.
            let _ = match &outcome {
                Ok(()) => writeln!(told, "[+]{name} ok"),
                Err(why) => writeln!(told, "[-]{name} failed: {why}"),
            };
            all_ok &= outcome.is_ok();
        }
        if !all_ok {
            tracing::error!(path = kind, reason = %told, "Health check error");
            return text(StatusCode::SERVICE_UNAVAILABLE, format!("{told}\n"));
        }
        if !query.verbose {
            told.clear();
        }
        told.push_str("ok\n");
        text(StatusCode::OK, told)
    }
}

/// A member as `/members` tells it.
#[derive(Debug, serde::Serialize)]
struct PeerMember {
    id: u64,
    #[serde(rename = "peerURLs")]
    peer_urls: Vec<String>,
    #[serde(rename = "isLearner", skip_serializing_if = "std::ops::Not::not")]
    is_learner: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
    #[serde(rename = "clientURLs", skip_serializing_if = "Vec::is_empty")]
    client_urls: Vec<String>,
}

impl From<pb::Member> for PeerMember {
    fn from(member: pb::Member) -> Self {
        Self {
            id: member.id,
            peer_urls: member.peer_ur_ls,
            is_learner: member.is_learner,
            name: member.name,
            client_urls: member.client_ur_ls,
        }
    }
}

/// The name under which this server is asked, without a port and a v6 address's brackets.
fn host_name<B>(request: &Request<B>) -> String {
    let header = request.headers().get(header::HOST);
    let host = match header.and_then(|host| host.to_str().ok()) {
        Some(host) => host,
        // HTTP/2 names it in the request itself.
        None => request.uri().authority().map_or("", |host| host.as_str()),
    };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    name.trim_start_matches('[')
        .trim_end_matches(']')
        .to_owned()
}

/// How to be let in, for people.
fn unknown_host(host: &str) -> String {
    format!(
        "\nThis server received your request, but the Host header was unrecognized.\n\nTo fix this, choose one of the following options:\n- Enable TLS, then any HTTPS request will be allowed.\n- Add the hostname you want to use to the whitelist in settings.\n  - e.g. --host-whitelist {host:?}\n\nThis requirement has been added to help prevent \"DNS Rebinding\" attacks (CVE-2018-5702).\n"
    )
}

fn not_found() -> Reply {
    text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned())
}

/// The query parameters that any endpoint knows.
#[derive(Debug, Default)]
struct Query {
    excluded: Vec<String>,
    serializable: bool,
    verbose: bool,
}

impl Query {
    fn of(query: &str) -> Self {
        let mut found = Query::default();
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            match name.as_ref() {
                "exclude" if !value.is_empty() => found.excluded.push(value.into_owned()),
                "serializable" => found.serializable = value == "true",
                "verbose" => found.verbose = true,
                _ => {}
            }
        }
        found
    }
}

fn parse_level(body: &[u8]) -> Option<LevelFilter> {
    let asked: serde_json::Value = serde_json::from_slice(body).ok()?;
    logging::level_of(asked.get("level")?.as_str()?)
}

fn text(status: StatusCode, body: String) -> Reply {
    reply(status, "text/plain; charset=utf-8", body)
}

fn json(status: StatusCode, body: String) -> Reply {
    reply(status, "application/json", body)
}

fn reply(status: StatusCode, content_type: &'static str, body: String) -> Reply {
    let mut reply = Response::new(Body::new(Full::<Bytes>::from(body)));
    *reply.status_mut() = status;
    let headers = reply.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static(content_type),
    );
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        header::HeaderValue::from_static("nosniff"),
    );
    reply
}

/// HTTP alone, without gRPC.
pub async fn serve_http_only(
    only: HttpOnly,
    request: Request<hyper::body::Incoming>,
) -> Result<Reply, Infallible> {
    let HttpOnly {
        http,
        endpoints,
        secure,
    } = only;
    Ok(match endpoints {
        Endpoints::Client => http.answer(request, secure).await,
        Endpoints::Metrics => http.answer_operator(request).await,
        Endpoints::Peer => http.serve(request, endpoints).await,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_is_read_as_etcd_reads_it() {
        let query = Query::of("exclude=NOSPACE&exclude=CORRUPT&exclude=&serializable=true&verbose");
        assert_eq!(query.excluded, ["NOSPACE", "CORRUPT"]);
        assert!(query.serializable && query.verbose);
        assert!(!Query::of("serializable=1").serializable);
    }

    #[test]
    fn hosts_are_names_without_ports() {
        for (host, expected) in [
            ("example.com:2379", "example.com"),
            ("example.com", "example.com"),
            ("127.0.0.1:80", "127.0.0.1"),
            ("[::1]:2379", "::1"),
            ("[::1]", "::1"),
        ] {
            let request = Request::get("/").header(header::HOST, host).body(());
            assert_eq!(host_name(&request.unwrap()), expected, "{host}");
        }
    }

    #[test]
    fn a_list_allows_what_it_names_and_an_empty_one_all() {
        let access = HttpAccess::new("http://a,http://b", "");
        assert!(HttpAccess::allows(&access.origins, "http://b"));
        assert!(!HttpAccess::allows(&access.origins, "http://c"));
        assert!(HttpAccess::allows(&access.hosts, "anything"));
        assert!(HttpAccess::allows(&HttpAccess::new("*", "*").hosts, "x"));
    }
}
