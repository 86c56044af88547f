//! HTTP beside gRPC: health checks, version, metrics.
//!
//! etcd: server/etcdserver/api/etcdhttp.

use std::convert::Infallible;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::{API_VERSION, CLUSTER_VERSION, etcdserverpb as pb};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use tonic::body::Body;

use crate::metrics;
use crate::rpc::Context;

/// Each check of /livez and /readyz, in the order in which they are told.
const LIVEZ: [Check; 1] = [Check::SerializableRead];
const READYZ: [Check; 4] = [
    Check::DataCorruption,
    Check::LinearizableRead,
    Check::NonLearner,
    Check::SerializableRead,
];

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
}

type Reply = Response<Body>;

impl Http {
    pub fn new(context: Arc<Context>, request_timeout: Duration) -> Self {
        Self {
            context,
            request_timeout,
        }
    }

    pub async fn answer<B>(&self, request: Request<B>) -> Reply {
        let path = request.uri().path();
        let query = Query::of(request.uri().query().unwrap_or_default());
        let known = matches!(path, "/health" | "/version" | "/metrics" | "/debug/vars")
            || path.starts_with("/livez")
            || path.starts_with("/readyz");
        if known && request.method() != Method::GET {
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
                text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned())
            }
        }
    }

    fn version(&self) -> String {
        let cluster = self
            .context
            .cluster
            .version()
            .unwrap_or_else(|| "not_decided".to_owned());
        let own = env!("CARGO_PKG_VERSION");
        format!(
            r#"{{"etcdserver":"{API_VERSION}","etcdcluster":"{cluster}","storage":"{CLUSTER_VERSION}","ballast":"{own}"}}"#
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
            None => text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned()),
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

/// HTTP alone, for `--listen-metrics-urls`.
pub async fn serve_http_only(
    http: Arc<Http>,
    request: Request<hyper::body::Incoming>,
) -> Result<Reply, Infallible> {
    Ok(http.answer(request).await)
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
}
