//! One gRPC call from its first byte to its answer: counted, timed, and told in the log when it was slow.
//!
//! The call is reachable from the code that handles it by [`with`], as a task-local would be: a handler leaves there what the log should
//! say of a slow request. Nothing of that is made for a quick one.
//!
//! etcd: newLogUnaryInterceptor in server/etcdserver/api/v3rpc/interceptor.go.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::{HeaderMap, Response};
use tonic::Code;
use tonic::body::Body;

use super::budget::{HeldBody, Share};
use crate::clock::Clock;
use crate::logging::Limit;
use crate::metrics::grpc::{CountedBody, Kind, Method, code_in};
use crate::spans::{CallSpan, Child, Description};

/// Lines about slow requests, so many a second: what slows all requests must not be made worse by telling it of each.
const SLOW_LINES_PER_SECOND_MAX: u32 = 20;

static SLOW: Limit<SLOW_LINES_PER_SECOND_MAX> = Limit::new();

/// What the log says of a slow request beside its method. -1 where nobody counted, as etcd has it.
#[derive(Clone, Debug)]
pub struct Stats {
    pub request_count: i64,
    pub request_bytes: i64,
    pub response_count: i64,
    pub response_bytes: i64,
    /// Without values.
    pub content: String,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            request_count: -1,
            request_bytes: -1,
            response_count: -1,
            response_bytes: -1,
            content: String::new(),
        }
    }
}

/// A call under way.
#[derive(Debug)]
pub struct Call {
    method: &'static Method,
    remote: Option<SocketAddr>,
    started: Instant,
    /// `--warning-unary-request-duration`.
    slow_after: Duration,
    stats: Option<Box<Stats>>,
    span: Option<CallSpan>,
}

impl Call {
    pub fn begin(
        method: &'static Method,
        headers: &HeaderMap,
        remote: Option<SocketAddr>,
        slow_after: Duration,
    ) -> Self {
        method.started.inc();
        Self {
            method,
            remote,
            started: Clock::default().now(),
            slow_after,
            stats: None,
            span: CallSpan::begin(headers, method.service, method.name),
        }
    }

    /// A span below the call's; None when nobody wants it.
    pub fn child(&self, describe: impl FnOnce() -> Description) -> Option<Child> {
        self.span.as_ref()?.child(describe)
    }

    pub fn is_slow(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.started) > self.slow_after
    }

    /// Keeps what `stats` says when the call is slow already; otherwise it is not asked.
    pub fn note(&mut self, now: Instant, stats: impl FnOnce() -> Stats) {
        if self.is_slow(now) {
            self.stats = Some(Box::new(stats()));
        }
    }

    fn handled(&mut self, code: Code) {
        let now = Clock::default().now();
        let took = now.saturating_duration_since(self.started);
        self.method.handled(code, took);
        if let Some(span) = self.span.take() {
            span.end(code);
        }
        if self.method.kind == Kind::Unary && took > self.slow_after {
            self.tell_slow(now, took);
        }
    }

    fn tell_slow(&mut self, now: Instant, took: Duration) {
        let Some(suppressed) = SLOW.pass(now) else {
            return;
        };
        let stats = self.stats.take().map(|stats| *stats).unwrap_or_default();
        let remote = self
            .remote
            .map_or_else(|| "No remote client info.".to_owned(), |at| at.to_string());
        tracing::warn!(
            "time spent" = ?took,
            remote,
            "response type" = %format_args!("/{}/{}", self.method.service, self.method.name),
            "request count" = stats.request_count,
            "request size" = stats.request_bytes,
            "response count" = stats.response_count,
            "response size" = stats.response_bytes,
            "request content" = stats.content,
            suppressed,
            "request stats"
        );
    }
}

thread_local! {
    /// The call whose handler runs on this thread now.
    static CURRENT: RefCell<Option<Call>> = const { RefCell::new(None) };
}

/// Gives the call that is being handled, if this code runs for one.
pub fn with<T>(use_it: impl FnOnce(&mut Call) -> T) -> Option<T> {
    CURRENT.with(|current| current.borrow_mut().as_mut().map(use_it))
}

/// A span below that of the call that is being handled, if there is one.
pub fn child(describe: impl FnOnce() -> Description) -> Option<Child> {
    with(|call| call.child(describe)).flatten()
}

type Inner = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// The handling of a call. Dropped before its end, the client went away.
pub struct Handling {
    inner: Inner,
    /// None when nobody serves the method, and after the end.
    call: Option<Call>,
}

impl Handling {
    pub fn new(inner: Inner, call: Option<Call>) -> Self {
        Self { inner, call }
    }
}

/// Puts a call into [`CURRENT`] and takes it out again, whatever happens between.
struct Entered<'a>(&'a mut Option<Call>);

impl<'a> Entered<'a> {
    fn new(call: &'a mut Option<Call>) -> Self {
        CURRENT.with(|current| std::mem::swap(&mut *current.borrow_mut(), call));
        Self(call)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        CURRENT.with(|current| std::mem::swap(&mut *current.borrow_mut(), self.0));
    }
}

impl Future for Handling {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let polled = {
            let _entered = Entered::new(&mut this.call);
            this.inner.as_mut().poll(context)
        };
        let Poll::Ready(Ok(response)) = polled else {
            return polled;
        };
        let Some(mut call) = this.call.take() else {
            return Poll::Ready(Ok(response));
        };
        // An answer that is a refusal has its code among the headers.
        if let Some(code) = code_in(response.headers()) {
            call.handled(code);
            return Poll::Ready(Ok(response));
        }
        if call.method.kind == Kind::Unary {
            call.method.sent.inc();
            call.handled(Code::Ok);
            let mut response = response;
            return Poll::Ready(Ok(match response.extensions_mut().remove::<Share>() {
                Some(share) => response.map(|body| Body::new(HeldBody::new(body, share))),
                None => response,
            }));
        }
        let method = call.method;
        Poll::Ready(Ok(response.map(|body| {
            Body::new(CountedBody::new(body, method, move |code| {
                call.handled(code);
            }))
        })))
    }
}

impl Drop for Handling {
    fn drop(&mut self) {
        if let Some(call) = &mut self.call {
            call.handled(Code::Cancelled);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::grpc::method;

    fn call() -> Call {
        let range = method("etcdserverpb.KV", "Range").unwrap();
        Call::begin(range, &HeaderMap::new(), None, Duration::ZERO)
    }

    #[tokio::test]
    async fn a_handler_reaches_its_own_call_and_nobody_elses() {
        assert!(with(|_| ()).is_none());
        let inner: Inner = Box::pin(async {
            let later = Clock::default().now() + Duration::from_secs(1);
            let noted = with(|call| {
                call.note(later, || Stats {
                    content: "mine".to_owned(),
                    ..Stats::default()
                });
            });
            assert!(noted.is_some());
            tokio::task::yield_now().await;
            let kept = with(|call| call.stats.as_ref().map(|stats| stats.content.clone()));
            assert_eq!(kept, Some(Some("mine".to_owned())));
            Ok(Response::new(Body::empty()))
        });
        let mut handling = Handling::new(inner, Some(call()));
        // Between two polls the thread serves others.
        let first = futures::poll!(&mut handling);
        assert!(first.is_pending());
        assert!(with(|_| ()).is_none());
        handling.await.unwrap();
        assert!(with(|_| ()).is_none());
    }

    #[tokio::test]
    async fn a_call_that_was_given_up_counts_as_cancelled() {
        let method = method("etcdserverpb.Maintenance", "MoveLeader").unwrap();
        let cancelled = || {
            let families = crate::metrics::gather_family("grpc_server_handled_total");
            families
                .iter()
                .filter(|metric| {
                    let is = |value: &str| metric.get_label().iter().any(|l| l.value() == value);
                    is("MoveLeader") && is("Canceled")
                })
                .map(|metric| metric.get_counter().get_value())
                .sum::<f64>()
        };
        let before = cancelled();
        let call = Call::begin(method, &HeaderMap::new(), None, Duration::from_secs(60));
        drop(Handling::new(Box::pin(std::future::pending()), Some(call)));
        assert!((cancelled() - before - 1.0).abs() < 0.1);
    }
}
