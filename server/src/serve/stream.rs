//! A connection, accepted or made: plain or under TLS, over TCP or a socket file.
//!
//! One type for all, so that what serves connections is compiled once.
//!
//! etcd: client/pkg/transport/listener_tls.go.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::RecvFlags;
use rustls::server::Acceptor;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::{LazyConfigAcceptor, TlsStream};

use crate::config::tls::Side;
use crate::tls::names::Names;
use crate::tls::{self, Tls};

/// A client that begins no handshake, or does not end it, is not waited for.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The first byte of every TLS connection, and of none that speaks HTTP.
const HANDSHAKE_RECORD: u8 = 0x16;

/// What is asked of connections to a listener.
#[derive(Clone, Debug)]
pub enum Security {
    Plain,
    Tls(Arc<Tls>),
    /// Two URLs, http and https, have the same address.
    Either(Arc<Tls>),
}

/// As the kernel gave it, or whatever stands for the kernel's network.
#[derive(Debug)]
pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
    Other(Box<dyn Wire>),
}

/// Bytes both ways.
pub trait Wire: AsyncRead + AsyncWrite + std::fmt::Debug + Send + Sync + Unpin {}

impl<T: AsyncRead + AsyncWrite + std::fmt::Debug + Send + Sync + Unpin> Wire for T {}

/// As it is read and written.
#[derive(Debug)]
pub enum Stream {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

impl Socket {
    /// The other end; None for a socket file.
    pub fn remote(&self) -> Option<SocketAddr> {
        match self {
            Socket::Tcp(stream) => stream.peer_addr().ok(),
            Socket::Unix(_) | Socket::Other(_) => None,
        }
    }

    /// True when the other end begins with a handshake. Takes nothing off the stream.
    async fn begins_with_handshake(&self) -> io::Result<bool> {
        let mut first = [0];
        let peeked = match self {
            Socket::Tcp(stream) => stream.peek(&mut first).await?,
            Socket::Unix(stream) => {
                let peek = || Ok(rustix::net::recv(stream, &mut first, RecvFlags::PEEK)?.0);
                stream.async_io(Interest::READABLE, peek).await?
            }
            // Nobody listens on one.
            Socket::Other(_) => return Ok(false),
        };
        Ok(peeked == 1 && first[0] == HANDSHAKE_RECORD)
    }
}

impl Stream {
    pub fn is_secure(&self) -> bool {
        matches!(self, Stream::Tls(_))
    }

    /// Does the handshake if there is one to do. None when it failed, which the log was told.
    pub async fn open(socket: Socket, security: Security) -> Option<Self> {
        let (tls, either) = match security {
            Security::Plain => return Some(Stream::Plain(socket)),
            Security::Tls(tls) => (tls, false),
            Security::Either(tls) => (tls, true),
        };
        let remote = socket.remote();
        let mut server_name = String::new();
        let opening = async {
            if either && !socket.begins_with_handshake().await? {
                return Ok(Stream::Plain(socket));
            }
            let secure = handshake(socket, &tls, &mut server_name).await?;
            Ok(Stream::Tls(Box::new(secure)))
        };
        let opened: io::Result<Stream> = match tokio::time::timeout(HANDSHAKE, opening).await {
            Ok(opened) => opened,
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "i/o timeout")),
        };
        match opened {
            Ok(stream) => Some(stream),
            Err(error) => {
                told(tls.side(), remote, &server_name, &error);
                None
            }
        }
    }
}

async fn handshake(
    socket: Socket,
    tls: &Arc<Tls>,
    server_name: &mut String,
) -> io::Result<TlsStream<Socket>> {
    let remote = socket.remote();
    let hello = LazyConfigAcceptor::new(Acceptor::default(), socket).await?;
    if let Some(name) = hello.client_hello().server_name() {
        name.clone_into(server_name);
    }
    let stream = hello.into_stream(tls.server().await?).await?;
    if let Some(remote) = remote
        && tls.checks_addresses()
        && let Some(shown) = stream.get_ref().1.peer_certificates()
        && let Some(names) = shown.first().and_then(Names::of)
    {
        let checked = names.check(remote.ip()).await;
        checked.map_err(io::Error::other)?;
    }
    Ok(stream.into())
}

fn told(side: Side, remote: Option<SocketAddr>, server_name: &str, error: &io::Error) {
    let remote = remote.map_or_else(|| "@".to_owned(), |remote| remote.to_string());
    let error_text = tls::words(error);
    // Health checks of load balancers connect and go away.
    if error.kind() == io::ErrorKind::UnexpectedEof {
        tracing::debug!(remote_addr = %remote, server_name, side = side.name(), "a connection ended before its handshake");
        return;
    }
    match side {
        Side::Client | Side::Tool => tracing::warn!(
            "remote-addr" = %remote, "server-name" = server_name, error = %error_text,
            "rejected connection on client endpoint"
        ),
        Side::Peer => tracing::warn!(
            "remote-addr" = %remote, "server-name" = server_name, error = %error_text,
            "rejected connection on peer endpoint"
        ),
    }
}

/// Calls the same method on whichever stream it is.
macro_rules! either {
    ($self:expr, $enum:ident :: { $($variant:ident),+ }, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            $($enum::$variant($stream) => {
                let $stream = Pin::new($stream);
                $call
            })+
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, Socket::{Tcp, Unix, Other}, stream => stream.poll_read(cx, buffer))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self, Socket::{Tcp, Unix, Other}, stream => stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, Socket::{Tcp, Unix, Other}, stream => stream.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, Socket::{Tcp, Unix, Other}, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, Socket::{Tcp, Unix, Other}, stream => stream.poll_shutdown(cx))
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, Stream::{Plain, Tls}, stream => stream.poll_read(cx, buffer))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self, Stream::{Plain, Tls}, stream => stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, Stream::{Plain, Tls}, stream => stream.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, Stream::{Plain, Tls}, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, Stream::{Plain, Tls}, stream => stream.poll_shutdown(cx))
    }
}
