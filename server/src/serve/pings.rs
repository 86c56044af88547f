//! A limit on how often a client may ping: `--grpc-keepalive-min-time`.
//!
//!     client --bytes--> follow frames --> hyper        PING: too early? a strike; the third ends the connection
//!     client <--bytes-- follow frames <-- hyper        HEADERS, DATA: strikes are forgotten
//!
//! The HTTP/2 library answers pings by itself and tells nobody, so this stands between it and the socket and follows the frames'
//! headers, nine bytes of each. A client that floods is told GOAWAY, ENHANCE_YOUR_CALM, "too_many_pings", as Go's gRPC does,
//! and its connection ends: clients know that answer and ping less often.
//!
//! Not here: the pings that the server sends (`--grpc-keepalive-interval`), which are the library's.
//!
//! etcd: grpc-go's http2Server.handlePing, with the policy set in server/embed/etcd.go.

use std::collections::HashSet;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::clock::Clock;

/// What a client of HTTP/2 sends first. Anything else is HTTP/1, which has no pings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER_BYTES: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
/// END_STREAM of DATA and HEADERS, ACK of PING.
const FLAG_ONE: u8 = 1;
const ENHANCE_YOUR_CALM: u32 = 0xb;
const REASON: &[u8] = b"too_many_pings";

/// Pings that may come too early before the connection ends.
const STRIKES_MAX: u32 = 2;
/// Between pings of a client that has no call open.
const IDLE_MIN_TIME: Duration = Duration::from_hours(2);

/// A connection whose client may not ping more often than `min_time`; without one, as it likes.
#[derive(Debug)]
pub struct Calm<S> {
    io: S,
    clock: Clock,
    min_time: Option<Duration>,
    /// How much of the preface was seen; None for a client that speaks something else.
    preface: Option<usize>,
    inbound: Frames,
    outbound: Frames,
    /// Calls that the server has not finished.
    open: HashSet<u32>,
    newest: u32,
    last_ping: Option<Instant>,
    strikes: u32,
    /// Something was sent since the last ping: whoever gets data may well ask how far away we are.
    sent: bool,
    /// The last words of this connection, as far as they are not written yet; empty once all is said.
    farewell: Option<Vec<u8>>,
}

/// Follows the frames of one direction.
#[derive(Debug, Default)]
struct Frames {
    header: [u8; FRAME_HEADER_BYTES],
    header_len: usize,
    payload_left: usize,
}

/// What matters of a frame's header.
#[derive(Clone, Copy, Debug)]
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
}

impl Frames {
    fn follow(&mut self, mut data: &[u8], mut seen: impl FnMut(Frame)) {
        while !data.is_empty() {
            if self.payload_left > 0 {
                let step = self.payload_left.min(data.len());
                self.payload_left -= step;
                data = &data[step..];
                continue;
            }
            let step = (FRAME_HEADER_BYTES - self.header_len).min(data.len());
            self.header[self.header_len..self.header_len + step].copy_from_slice(&data[..step]);
            self.header_len += step;
            data = &data[step..];
            if self.header_len == FRAME_HEADER_BYTES {
                self.header_len = 0;
                let [a, b, c, kind, flags, stream @ ..] = self.header;
                self.payload_left = u32::from_be_bytes([0, a, b, c]) as usize;
                seen(Frame {
                    kind,
                    flags,
                    stream: u32::from_be_bytes(stream) & 0x7fff_ffff,
                });
            }
        }
    }

    /// Nothing of a frame is left open.
    fn between(&self) -> bool {
        self.header_len == 0 && self.payload_left == 0
    }

    /// Bytes that certainly belong to the frame under way.
    fn left(&self) -> usize {
        match self.header_len {
            0 => self.payload_left,
            some => FRAME_HEADER_BYTES - some,
        }
    }
}

impl<S> Calm<S> {
    pub fn new(io: S, clock: Clock, min_time: Option<Duration>) -> Self {
        Self {
            io,
            clock,
            min_time,
            preface: Some(0),
            inbound: Frames::default(),
            outbound: Frames::default(),
            open: HashSet::new(),
            newest: 0,
            last_ping: None,
            strikes: 0,
            sent: false,
            farewell: None,
        }
    }

    fn received(&mut self, mut data: &[u8]) {
        let Some(seen) = self.preface else {
            return;
        };
        if seen < PREFACE.len() {
            let step = (PREFACE.len() - seen).min(data.len());
            if data[..step] != PREFACE[seen..seen + step] {
                self.preface = None;
                return;
            }
            self.preface = Some(seen + step);
            data = &data[step..];
        }
        let mut inbound = std::mem::take(&mut self.inbound);
        inbound.follow(data, |frame| match frame.kind {
            HEADERS if frame.stream > self.newest => {
                self.newest = frame.stream;
                self.open.insert(frame.stream);
            }
            RST_STREAM => {
                self.open.remove(&frame.stream);
            }
            PING if frame.flags & FLAG_ONE == 0 => self.pinged(),
            _ => {}
        });
        self.inbound = inbound;
    }

    fn pinged(&mut self) {
        // Peers ping as they need to.
        let Some(min_time) = self.min_time else {
            return;
        };
        let now = self.clock.now();
        let last = self.last_ping.replace(now);
        if std::mem::take(&mut self.sent) {
            self.strikes = 0;
            return;
        }
        let least = if self.open.is_empty() {
            IDLE_MIN_TIME
        } else {
            min_time
        };
        if last.is_some_and(|last| last + least > now) {
            self.strikes += 1;
        }
        if self.strikes > STRIKES_MAX && self.farewell.is_none() {
            tracing::warn!(
                newest_stream = self.newest,
                "got too many pings from the client, closing the connection"
            );
            self.farewell = Some(goaway(self.newest));
        }
    }

    fn wrote(&mut self, data: &[u8]) {
        if self.preface.is_none() {
            return;
        }
        let mut outbound = std::mem::take(&mut self.outbound);
        outbound.follow(data, |frame| match frame.kind {
            DATA | HEADERS => {
                self.sent = true;
                if frame.flags & FLAG_ONE != 0 {
                    self.open.remove(&frame.stream);
                }
            }
            RST_STREAM => {
                self.open.remove(&frame.stream);
            }
            _ => {}
        });
        self.outbound = outbound;
    }
}

fn goaway(newest: u32) -> Vec<u8> {
    let length = (8 + REASON.len()) as u32;
    let mut frame = length.to_be_bytes()[1..].to_vec();
    frame.extend([GOAWAY, 0, 0, 0, 0, 0]);
    frame.extend(newest.to_be_bytes());
    frame.extend(ENHANCE_YOUR_CALM.to_be_bytes());
    frame.extend(REASON);
    frame
}

impl<S: AsyncWrite + Unpin> Calm<S> {
    /// Says the last words and closes our side. Only between two frames.
    fn poll_farewell(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(rest) = self.farewell.as_mut().filter(|rest| !rest.is_empty()) {
            let written = ready!(Pin::new(&mut self.io).poll_write(cx, rest))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            rest.drain(..written);
        }
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Calm<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.farewell.is_none() {
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
            this.received(&buf.filled()[before..]);
            if this.farewell.is_none() {
                return Poll::Ready(Ok(()));
            }
            // What came with the last ping is not answered any more.
            buf.set_filled(before);
        }
        if !this.outbound.between() {
            // Whoever writes the rest of that frame wakes this.
            return Poll::Pending;
        }
        // To the library this is the client's end.
        this.poll_farewell(cx)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Calm<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.farewell.is_none() {
            let written = ready!(Pin::new(&mut this.io).poll_write(cx, data))?;
            this.wrote(&data[..written]);
            return Poll::Ready(Ok(written));
        }
        if this.outbound.between() {
            ready!(this.poll_farewell(cx))?;
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let data = &data[..data.len().min(this.outbound.left())];
        let written = ready!(Pin::new(&mut this.io).poll_write(cx, data))?;
        this.wrote(&data[..written]);
        cx.waker().wake_by_ref();
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.farewell.is_some() {
            let first = slices.iter().find(|slice| !slice.is_empty());
            return self.poll_write(cx, first.map_or(&[][..], |slice| slice));
        }
        let this = &mut *self;
        let written = ready!(Pin::new(&mut this.io).poll_write_vectored(cx, slices))?;
        let mut left = written;
        for slice in slices {
            let step = left.min(slice.len());
            this.wrote(&slice[..step]);
            left -= step;
            if left == 0 {
                break;
            }
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        frame
    }

    fn ping() -> Vec<u8> {
        frame(PING, 0, 0, &[7; 8])
    }

    /// Sends through a limit of `min_time`; gives what the server's side read, and what came back after it.
    async fn exchange(min_time: Duration, sent: &[u8], answers: &[&[u8]]) -> (Vec<u8>, Vec<u8>) {
        let (mut client, server) = tokio::io::duplex(1 << 16);
        let mut server = Calm::new(server, Clock::default(), Some(min_time));
        let mut read = Vec::new();
        client.write_all(PREFACE).await.unwrap();
        for answer in answers {
            server.write_all(answer).await.unwrap();
        }
        client.write_all(sent).await.unwrap();
        client.shutdown().await.unwrap();
        server.read_to_end(&mut read).await.unwrap();
        drop(server);
        let mut got = Vec::new();
        client.read_to_end(&mut got).await.unwrap();
        (read, got)
    }

    #[tokio::test]
    async fn a_flood_of_pings_is_told_to_be_calm_whatever_the_call() {
        for open in [vec![], frame(HEADERS, 4, 1, b"x")] {
            // The first ping and two early ones are borne.
            let borne = [open.clone(), ping(), ping(), ping()].concat();
            let (read, got) = exchange(Duration::from_secs(60), &borne, &[]).await;
            assert_eq!(read.len(), PREFACE.len() + borne.len());
            assert!(got.is_empty());
            let flood = [borne, ping()].concat();
            let (_, got) = exchange(Duration::from_secs(60), &flood, &[]).await;
            let newest = u8::from(!open.is_empty());
            let expected = [
                &[
                    0, 0, 22, GOAWAY, 0, 0, 0, 0, 0, 0, 0, 0, newest, 0, 0, 0, 0xb,
                ][..],
                b"too_many_pings",
            ]
            .concat();
            assert_eq!(got, expected);
        }
    }

    #[tokio::test]
    async fn who_keeps_the_time_with_a_call_open_may_ping_and_without_one_may_not() {
        let pings = [ping(), ping(), ping(), ping(), ping()].concat();
        let call = [frame(HEADERS, 4, 1, b"x"), pings.clone()].concat();
        let (read, got) = exchange(Duration::ZERO, &call, &[]).await;
        assert_eq!((read.len(), got.len()), (PREFACE.len() + call.len(), 0));
        let (_, got) = exchange(Duration::ZERO, &pings, &[]).await;
        assert_eq!(got[3], GOAWAY);
        // A call that its client gave up is none.
        let reset = [
            frame(HEADERS, 4, 1, b"x"),
            frame(RST_STREAM, 0, 1, &[0; 4]),
            pings,
        ]
        .concat();
        let (_, got) = exchange(Duration::ZERO, &reset, &[]).await;
        assert_eq!(got[3], GOAWAY);
    }

    #[tokio::test]
    async fn answers_of_pings_and_other_protocols_are_not_counted() {
        let acks = frame(PING, FLAG_ONE, 0, &[7; 8]).repeat(10);
        let (read, got) = exchange(Duration::from_secs(60), &acks, &[]).await;
        assert_eq!((read.len(), got.len()), (PREFACE.len() + acks.len(), 0));
        let (mut client, server) = tokio::io::duplex(1 << 16);
        let mut server = Calm::new(server, Clock::default(), Some(Duration::from_secs(60)));
        let text = [b"GET / HTTP/1.1\r\n\r\n".to_vec(), ping().repeat(9)].concat();
        client.write_all(&text).await.unwrap();
        drop(client);
        let mut read = Vec::new();
        server.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, text);
    }

    #[tokio::test]
    async fn data_sent_between_forgives_early_pings() {
        let (mut client, server) = tokio::io::duplex(1 << 16);
        let mut server = Calm::new(server, Clock::default(), Some(Duration::from_secs(60)));
        client.write_all(PREFACE).await.unwrap();
        client.write_all(&frame(HEADERS, 4, 1, b"x")).await.unwrap();
        let mut seen = vec![0; PREFACE.len() + FRAME_HEADER_BYTES + 1];
        server.read_exact(&mut seen).await.unwrap();
        for _ in 0..20 {
            client.write_all(&ping()).await.unwrap();
            server.read_exact(&mut seen[..17]).await.unwrap();
            server
                .write_all(&frame(DATA, 0, 1, b"events"))
                .await
                .unwrap();
        }
        assert!(server.farewell.is_none());
    }

    #[test]
    fn the_last_words_wait_for_the_end_of_a_frame_under_way() {
        let waker = std::task::Waker::noop();
        let mut cx = Context::from_waker(waker);
        // So narrow that the answer stands in the middle of its frame when the flood comes.
        let (mut client, server) = tokio::io::duplex(128);
        let mut server = Calm::new(server, Clock::default(), Some(Duration::from_secs(60)));
        let answer = frame(DATA, 0, 1, &[9; 200]);
        let opened = [PREFACE.to_vec(), frame(HEADERS, 4, 1, b"x")].concat();
        let mut space = [0; 256];
        let mut step = |client: &mut tokio::io::DuplexStream, server: &mut Calm<_>, sent: &[u8]| {
            let sent_whole = Pin::new(client).poll_write(&mut cx, sent);
            assert!(matches!(sent_whole, Poll::Ready(Ok(n)) if n == sent.len()));
            let mut buf = ReadBuf::new(&mut space);
            Pin::new(server).poll_read(&mut cx, &mut buf)
        };
        assert!(step(&mut client, &mut server, &opened).is_ready());
        let mut cx = Context::from_waker(waker);
        let Poll::Ready(Ok(first)) = Pin::new(&mut server).poll_write(&mut cx, &answer) else {
            panic!("the pipe has room");
        };
        assert!(first < answer.len());
        assert!(step(&mut client, &mut server, &ping()).is_ready());
        assert!(step(&mut client, &mut server, &ping().repeat(3)).is_pending());
        // The client takes what was written; the library goes on, with another frame behind this one.
        let mut got = Vec::new();
        let mut written = first;
        let more = [answer.clone(), frame(DATA, 0, 1, b"never")].concat();
        loop {
            let mut space = [0; 64];
            let mut buf = ReadBuf::new(&mut space);
            if let Poll::Ready(Ok(())) = Pin::new(&mut client).poll_read(&mut cx, &mut buf) {
                if buf.filled().is_empty() {
                    break;
                }
                got.extend_from_slice(buf.filled());
            }
            match Pin::new(&mut server).poll_write(&mut cx, &more[written..]) {
                Poll::Ready(Ok(n)) => written += n,
                Poll::Ready(Err(error)) => assert_eq!(error.kind(), io::ErrorKind::BrokenPipe),
                Poll::Pending => {}
            }
        }
        assert_eq!(written, answer.len());
        assert_eq!(got, [answer, goaway(1)].concat());
    }
}
