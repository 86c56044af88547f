//! Gathers what a connection writes: HTTP/2 frames that are due together leave in one system call.
//!
//! The library writes each frame of more than 256 bytes by itself, and asks for a flush after each: a put that a hundred watchers see
//! cost a hundred calls. Here a write goes to a buffer, and the buffer to the socket after each turn of the connection.
//!
//! Promises: bounded by [`GATHERED_BYTES_MAX`]: beyond it a write waits for the socket, so a client that does not read is noticed as before.
//! What was written is sent before the connection is shut down.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Gathered before the socket has to take it.
const GATHERED_BYTES_MAX: usize = 64 * 1024;
/// A write of this size gains nothing by being copied.
const DIRECT_BYTES: usize = 32 * 1024;
/// What an idle connection keeps of its buffer.
const KEPT_BYTES_MAX: usize = 4 * 1024;

/// A stream whose writes are gathered. A clone is the same stream: the connection's task has one, [`drive`] the other.
#[derive(Debug)]
pub struct Gather<S>(Arc<Mutex<Inner<S>>>);

impl<S> Clone for Gather<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

#[derive(Debug)]
struct Inner<S> {
    stream: S,
    out: Vec<u8>,
    /// Of `out`.
    sent: usize,
    /// The stream was written to and not flushed: TLS keeps what the socket did not take.
    unflushed: bool,
}

/// Polls a connection over `stream`, and sends what each turn of it wrote.
pub async fn drive<S, T, E>(
    stream: Gather<S>,
    connection: impl Future<Output = Result<T, E>>,
) -> Result<T, E>
where
    S: AsyncWrite + Unpin,
    E: From<io::Error>,
{
    let mut connection = pin!(connection);
    let mut due = false;
    poll_fn(|cx| {
        // The runtime runs what was woken last first: the connection, woken by the first of the calls that are answered, would be sent
        // back and forth between them, a system call each. It goes behind them once.
        due = !due;
        if due {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let turn = connection.as_mut().poll(cx);
        match stream.0.lock().poll_send(cx) {
            Poll::Ready(Err(error)) if turn.is_pending() => Poll::Ready(Err(error.into())),
            _ => turn,
        }
    })
    .await
}

impl<S> Gather<S> {
    pub fn new(stream: S) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            stream,
            out: Vec::new(),
            sent: 0,
            unflushed: false,
        })))
    }
}

impl<S: AsyncWrite + Unpin> Inner<S> {
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.sent < self.out.len() {
            let left = &self.out[self.sent..];
            self.unflushed = true;
            let sent = ready!(Pin::new(&mut self.stream).poll_write(cx, left))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.sent += sent;
        }
        self.sent = 0;
        self.out.clear();
        if self.out.capacity() > KEPT_BYTES_MAX {
            self.out = Vec::new();
        }
        if self.unflushed {
            ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    /// Makes room, or waits for the socket.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.out.len() >= GATHERED_BYTES_MAX {
            ready!(self.poll_send(cx))?;
        }
        Poll::Ready(Ok(GATHERED_BYTES_MAX - self.out.len()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gather<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gather<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.0.lock();
        let bytes: usize = slices.iter().map(|slice| slice.len()).sum();
        if inner.out.is_empty() && bytes >= DIRECT_BYTES {
            inner.unflushed = true;
            return Pin::new(&mut inner.stream).poll_write_vectored(cx, slices);
        }
        let room = ready!(inner.poll_room(cx))?;
        let mut taken = 0;
        for slice in slices {
            let part = &slice[..slice.len().min(room - taken)];
            inner.out.extend_from_slice(part);
            taken += part.len();
        }
        Poll::Ready(Ok(taken))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// [`drive`] sends, once for all that asked for it.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.0.lock();
        ready!(inner.poll_send(cx))?;
        Pin::new(&mut inner.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

    use super::*;

    async fn read(stream: &mut DuplexStream, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        stream.read_exact(&mut bytes).await.unwrap();
        bytes
    }

    #[tokio::test]
    async fn what_is_written_leaves_after_the_turn_and_not_before() {
        let (ours, mut theirs) = duplex(1024);
        let mut gather = Gather::new(ours);
        let handle = gather.clone();
        let connection = async {
            gather.write_all(b"one ").await?;
            gather.flush().await?;
            gather.write_all(b"two").await?;
            assert_eq!(gather.0.lock().out, b"one two");
            tokio::task::yield_now().await;
            assert!(gather.0.lock().out.is_empty());
            gather.write_all(b"!").await?;
            gather.shutdown().await
        };
        drive(handle, connection).await.unwrap();
        assert_eq!(read(&mut theirs, 8).await, b"one two!");
        assert_eq!(theirs.read(&mut [0]).await.unwrap(), 0);
    }

    /// TLS keeps what the socket has not taken yet, until it is flushed.
    #[tokio::test]
    async fn a_stream_that_keeps_what_it_is_given_is_flushed_after_the_turn() {
        let (ours, mut theirs) = duplex(1024);
        let mut gather = Gather::new(tokio::io::BufWriter::new(ours));
        let handle = gather.clone();
        let connection = async {
            gather.write_all(b"one").await?;
            std::future::pending::<io::Result<()>>().await
        };
        let reading = async { read(&mut theirs, 3).await };
        tokio::select! {
            _ = drive(handle, connection) => panic!("the connection goes on"),
            read = reading => assert_eq!(read, b"one"),
        }
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_holds_the_writer_up() {
        let (ours, mut theirs) = duplex(1024);
        let mut gather = Gather::new(ours);
        let handle = gather.clone();
        let sent = vec![7; 3 * GATHERED_BYTES_MAX];
        let all = sent.len();
        let writing = tokio::spawn(drive(handle, async move {
            for piece in sent.chunks(1_000) {
                gather.write_all(piece).await?;
            }
            gather.shutdown().await
        }));
        tokio::task::yield_now().await;
        assert!(!writing.is_finished());
        assert!(read(&mut theirs, all).await.iter().all(|byte| *byte == 7));
        writing.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_socket_that_fails_ends_the_connection() {
        let (ours, theirs) = duplex(1024);
        drop(theirs);
        let mut gather = Gather::new(ours);
        let handle = gather.clone();
        let connection = async {
            gather.write_all(b"lost").await?;
            std::future::pending::<io::Result<()>>().await
        };
        let error = drive(handle, connection).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
