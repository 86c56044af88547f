//! Listening: TCP or a socket file, plain or under TLS, HTTP/1 and HTTP/2 on one port, and a clean end.
//!
//! etcd: server/embed/{etcd,serve}.go.

pub mod pings;
pub mod stream;

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::Either;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use socket2::{Domain, Protocol, Type};
use tokio::net::{TcpListener, UnixListener};
use tokio_util::sync::CancellationToken;
use tower::Service;

use crate::clock::Clock;
use crate::config::Config;
use crate::config::urls::{Endpoint, Url};
use crate::gather::{self, Gather};
use crate::health::{self, Endpoints, Http};
use crate::rpc::mux::{Mux, Remote};
use crate::rpc::peer::PeerMux;
use crate::tasks::Tasks;
use pings::Calm;
use stream::{Security, Socket, Stream};

const BACKLOG: i32 = 1024;
/// Room for a few of the largest requests in flight on one stream, and several streams on a connection.
const STREAM_WINDOW_BYTES: u32 = 2 * 1024 * 1024;
/// A piece of a snapshot fits: each frame is a system call on both sides.
const PEER_FRAME_BYTES: u32 = 512 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 8 * 1024 * 1024;
/// What one stream may buffer towards the client.
const SEND_BUFFER_BYTES: usize = 1024 * 1024;
/// Streams a client may reset before we call it an attack: deadlines reset streams in honest clients.
const PENDING_RESETS_MAX: usize = 100_000;
/// After a failed accept (mostly: too many open files) the loop rests.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// An open listener.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// Settings of every connection.
#[derive(Clone, Copy, Debug)]
pub struct Connections {
    pub concurrent_streams_max: u32,
    pub keepalive_interval: Option<Duration>,
    pub keepalive_timeout: Duration,
    /// Between two pings of a client, if that matters.
    pub keepalive_min_time: Option<Duration>,
}

/// What is served on a listener.
#[derive(Clone, Debug)]
pub enum Served {
    /// gRPC, and HTTP unless it has listeners of its own.
    Grpc(Box<Mux>),
    HttpOnly(HttpOnly),
    /// What members ask each other.
    Peer(Box<PeerMux>),
}

/// HTTP alone.
#[derive(Clone, Debug)]
pub struct HttpOnly {
    pub http: Arc<Http>,
    pub endpoints: Endpoints,
    /// Of one client.
    pub secure: bool,
}

impl Served {
    /// What one client is served.
    fn of(self, remote: Remote, secure: bool) -> Self {
        match self {
            Served::Grpc(mux) => Served::Grpc(Box::new(mux.of(remote, secure))),
            Served::HttpOnly(only) => Served::HttpOnly(HttpOnly { secure, ..only }),
            other @ Served::Peer(_) => other,
        }
    }
}

impl Listener {
    pub fn bind(url: &Url, config: &Config) -> std::io::Result<Self> {
        let endpoint = url
            .endpoint()
            .map_err(|why| std::io::Error::new(std::io::ErrorKind::InvalidInput, why))?;
        match endpoint {
            Endpoint::Unix(path) => {
                // A socket file outlives its server.
                let _ = std::fs::remove_file(&path);
                Ok(Listener::Unix(UnixListener::bind(path)?))
            }
            Endpoint::Tcp { host, port } => {
                let address: SocketAddr = (host.as_str(), port)
                    .to_socket_addrs()?
                    .find(|address| host != "localhost" || address.is_ipv4())
                    .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::AddrNotAvailable))?;
                let socket = socket2::Socket::new(
                    Domain::for_address(address),
                    Type::STREAM,
                    Some(Protocol::TCP),
                )?;
                // Go's listeners have it always: a restart must not wait for old connections.
                socket.set_reuse_address(true)?;
                if config.reuse_port {
                    socket.set_reuse_port(true)?;
                }
                socket.set_nonblocking(true)?;
                socket.bind(&address.into())?;
                socket.listen(BACKLOG)?;
                Ok(Listener::Tcp(TcpListener::from_std(socket.into())?))
            }
        }
    }

    /// Accepts until `stop`; each connection is a task of `tasks`.
    pub async fn serve(
        self,
        served: Served,
        security: Security,
        settings: Connections,
        tasks: Tasks,
        stop: CancellationToken,
    ) {
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => return,
                accepted = self.accept() => accepted,
            };
            match accepted {
                Ok(socket) => {
                    let (served, security) = (served.clone(), security.clone());
                    let stop = stop.clone();
                    tasks.spawn(async move {
                        let remote = socket.remote();
                        let opened = tokio::select! {
                            () = stop.cancelled() => return,
                            opened = Stream::open(socket, security) => opened,
                        };
                        if let Some(stream) = opened {
                            let served = served.of(remote, stream.is_secure());
                            connection(stream, served, settings, stop).await;
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(error = %error, "failed to accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    async fn accept(&self) -> std::io::Result<Socket> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok(Socket::Tcp(stream))
            }
            Listener::Unix(listener) => Ok(Socket::Unix(listener.accept().await?.0)),
        }
    }
}

async fn connection(
    stream: Stream,
    served: Served,
    settings: Connections,
    stop: CancellationToken,
) {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new());
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_concurrent_streams(settings.concurrent_streams_max)
        .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
        .max_local_error_reset_streams(PENDING_RESETS_MAX)
        .keep_alive_interval(settings.keepalive_interval)
        .keep_alive_timeout(settings.keepalive_timeout);
    if matches!(served, Served::Peer(_)) {
        builder.http2().max_frame_size(PEER_FRAME_BYTES);
    }
    let service = service_fn(move |request: hyper::Request<Incoming>| match &served {
        Served::Grpc(mux) => Either::Left(mux.clone().call(request)),
        Served::HttpOnly(only) => {
            Either::Right(health::serve_http_only(only.clone(), request).boxed())
        }
        Served::Peer(mux) => Either::Right(mux.clone().call(request)),
    });
    let stream = Gather::new(stream);
    let calm = Calm::new(
        stream.clone(),
        Clock::default(),
        settings.keepalive_min_time,
    );
    let connection = builder.serve_connection(TokioIo::new(calm), service);
    let outcome = gather::drive(stream, async {
        tokio::pin!(connection);
        tokio::select! {
            outcome = connection.as_mut() => outcome,
            () = stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    })
    .await;
    if let Err(error) = outcome {
        // Clients go away as they like.
        tracing::debug!(error = %error, "a connection ended with an error");
    }
}
