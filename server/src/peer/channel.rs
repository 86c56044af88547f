//! One connection to a member: HTTP/2 over the first of its URLs that answers, made when needed and again when it broke.
//!
//! Promises: names are resolved at each attempt, so that one that appears late or moves is found; a peer that stopped answering is noticed by
//! pings, whether requests are under way or not.
//! The only place where connections to peers are built: what encrypts them belongs here, and what lies under all that, which is the operating
//! system's network or a simulated one.
//!
//! etcd: server/etcdserver/api/rafthttp/{peer,urlpick}.go.

use std::io;
use std::time::Duration;

use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::Dial;
use crate::config::urls::{Scheme, Url};
use crate::serve::stream::{Socket, Stream};
use crate::tls;

/// Between pings.
const PING_INTERVAL: Duration = Duration::from_millis(500);
/// What one attempt at one URL may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Whom the certificate of a peer behind a socket file must name.
const SOCKET_FILE_HOST: &str = "localhost";
/// Room for entries and pieces of snapshots under way.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;

/// What connections are made over.
pub trait Network: std::fmt::Debug + Send + Sync {
    fn connect<'a>(&'a self, url: &'a Url) -> BoxFuture<'a, io::Result<Socket>>;
}

/// TCP, and socket files.
#[derive(Clone, Copy, Debug)]
pub struct OperatingSystem;

impl Network for OperatingSystem {
    fn connect<'a>(&'a self, url: &'a Url) -> BoxFuture<'a, io::Result<Socket>> {
        Box::pin(async move {
            match url.scheme {
                Scheme::Http | Scheme::Https => {
                    let stream = TcpStream::connect(url.address.as_str()).await?;
                    stream.set_nodelay(true)?;
                    Ok(Socket::Tcp(stream))
                }
                Scheme::Unix | Scheme::Unixs => {
                    Ok(Socket::Unix(UnixStream::connect(&url.address).await?))
                }
            }
        })
    }
}

/// A connection to whoever listens at one of the URLs, not made yet.
pub fn open(urls: &[Url], dial: &Dial) -> Channel {
    let (urls, dial) = (urls.to_vec(), dial.clone());
    Endpoint::from_static("http://peer")
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(dial.ping_timeout)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(service_fn(move |_| {
            let (urls, dial) = (urls.clone(), dial.clone());
            async move { connect_any(&urls, &dial).await.map(TokioIo::new) }
        }))
}

async fn connect_any(urls: &[Url], dial: &Dial) -> io::Result<Stream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the member has no peer URL");
    for url in urls {
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connect(url, dial)).await;
        last = match connected {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => error,
            Err(_) => io::Error::new(io::ErrorKind::TimedOut, format!("{url}: timed out")),
        };
    }
    Err(last)
}

/// One attempt at one URL; an error says at which, in etcd's words where it has some.
pub async fn connect(url: &Url, dial: &Dial) -> io::Result<Stream> {
    let connected = connect_once(url, dial).await;
    connected
        .map_err(|error| io::Error::new(error.kind(), format!("{url}: {}", tls::words(&error))))
}

async fn connect_once(url: &Url, dial: &Dial) -> io::Result<Stream> {
    let socket = dial.network.connect(url).await?;
    if !url.is_secure() {
        return Ok(Stream::Plain(socket));
    }
    let tls = dial.tls.as_ref().ok_or(io::ErrorKind::Unsupported)?;
    let host = url.host().unwrap_or(SOCKET_FILE_HOST);
    let stream = tls.connect(host, socket).await?;
    Ok(Stream::Tls(Box::new(stream.into())))
}
