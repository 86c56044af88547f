//! One connection to a member: HTTP/2 over the first of its URLs that answers, made when needed and again when it broke.
//!
//! Promises: names are resolved at each attempt, so that one that appears late or moves is found; a peer that stopped answering is noticed by
//! pings, whether requests are under way or not.
//! The only place where connections to peers are built: what encrypts them belongs here.
//!
//! etcd: server/etcdserver/api/rafthttp/{peer,urlpick}.go.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::Dial;
use crate::config::urls::{Scheme, Url};

/// Between pings.
const PING_INTERVAL: Duration = Duration::from_millis(500);
/// What one attempt at one URL may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Room for entries and pieces of snapshots under way.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;

/// A connection to whoever listens at one of the URLs, not made yet.
pub fn open(urls: &[Url], dial: Dial) -> Channel {
    let urls = urls.to_vec();
    Endpoint::from_static("http://peer")
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(dial.ping_timeout)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(service_fn(move |_| {
            let urls = urls.clone();
            async move { connect_any(&urls).await.map(TokioIo::new) }
        }))
}

async fn connect_any(urls: &[Url]) -> io::Result<Stream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the member has no peer URL");
    for url in urls {
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connect(url)).await;
        match connected {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = io::Error::new(error.kind(), format!("{url}: {error}")),
            Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, format!("{url}: timed out")),
        }
    }
    Err(last)
}

async fn connect(url: &Url) -> io::Result<Stream> {
    match url.scheme {
        Scheme::Http => {
            let stream = TcpStream::connect(url.address.as_str()).await?;
            stream.set_nodelay(true)?;
            Ok(Stream::Tcp(stream))
        }
        Scheme::Unix => Ok(Stream::Unix(UnixStream::connect(&url.address).await?)),
        Scheme::Https | Scheme::Unixs => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this release has no TLS",
        )),
    }
}

/// What a connection runs over.
#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Stream::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write_vectored(context, buffers),
            Stream::Unix(stream) => Pin::new(stream).poll_write_vectored(context, buffers),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}
