//! The limit on a message's size, with etcd's answer: tonic's own has another code and text.
//!
//! Follows the frames of a gRPC request body (one byte of flags, four of length, the message) and fails the body with
//! etcd's status when a length is above the limit, before the message is read.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use tonic::Status;

use crate::metrics::grpc::{Method, RECEIVED_BYTES};

const FRAME_HEADER_BYTES: usize = 5;

/// Follows the messages in a gRPC body, however it is cut.
#[derive(Clone, Debug, Default)]
pub struct FrameFollower {
    /// Bytes of the current message still to come.
    message_left: usize,
    /// The frame header under way.
    header: [u8; FRAME_HEADER_BYTES],
    header_len: usize,
}

impl FrameFollower {
    /// Calls `begun` with the length of each message whose header ends in `data`.
    pub fn follow(&mut self, data: &[u8], mut begun: impl FnMut(usize)) {
        let followed = self.try_follow(data, |length| {
            begun(length);
            Ok::<(), std::convert::Infallible>(())
        });
        let Ok(()) = followed;
    }

    /// The same; stops at the first message that `begun` refuses.
    pub fn try_follow<E>(
        &mut self,
        mut data: &[u8],
        mut begun: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        while !data.is_empty() {
            if self.message_left > 0 {
                let step = self.message_left.min(data.len());
                self.message_left -= step;
                data.advance(step);
                continue;
            }
            let step = (FRAME_HEADER_BYTES - self.header_len).min(data.len());
            self.header[self.header_len..self.header_len + step].copy_from_slice(&data[..step]);
            self.header_len += step;
            data.advance(step);
            if self.header_len == FRAME_HEADER_BYTES {
                self.header_len = 0;
                let [_, length @ ..] = self.header;
                let length = u32::from_be_bytes(length) as usize;
                begun(length)?;
                self.message_left = length;
            }
        }
        Ok(())
    }
}

/// A request body whose messages are no longer than a limit, and are counted.
#[derive(Debug)]
pub struct LimitedBody<B> {
    inner: B,
    message_bytes_max: usize,
    follower: FrameFollower,
    method: Option<&'static Method>,
}

impl<B> LimitedBody<B> {
    pub fn new(inner: B, message_bytes_max: usize, method: Option<&'static Method>) -> Self {
        Self {
            inner,
            message_bytes_max,
            follower: FrameFollower::default(),
            method,
        }
    }

    fn follow(&mut self, data: &[u8]) -> Result<(), Status> {
        let (bytes_max, method) = (self.message_bytes_max, self.method);
        self.follower.try_follow(data, |length| {
            if length > bytes_max {
                return Err(Status::resource_exhausted(format!(
                    "grpc: received message larger than max ({length} vs. {bytes_max})"
                )));
            }
            if let Some(method) = method {
                method.received.inc();
                RECEIVED_BYTES.inc_by(length as u64);
            }
            Ok(())
        })
    }
}

impl<B> Body for LimitedBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Ready(Some(Err(error))) => {
                return Poll::Ready(Some(Err(Status::from_error(error.into()))));
            }
            Poll::Ready(Some(Ok(frame))) => frame,
        };
        if let Some(data) = frame.data_ref()
            && let Err(status) = self.follow(data)
        {
            return Poll::Ready(Some(Err(status)));
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bytes: usize) -> Vec<u8> {
        let mut frame = vec![0];
        frame.extend_from_slice(&(bytes as u32).to_be_bytes());
        frame.extend(vec![7; bytes]);
        frame
    }

    #[test]
    fn messages_are_followed_across_any_cut() {
        let stream = [message(10), message(0), message(3)].concat();
        for size in 1..=stream.len() {
            let mut body = LimitedBody::new((), 10, None);
            for piece in stream.chunks(size) {
                body.follow(piece).unwrap();
            }
        }
    }

    #[test]
    fn a_longer_message_is_refused_in_etcds_words() {
        let mut body = LimitedBody::new((), 10, None);
        body.follow(&message(10)).unwrap();
        let status = body.follow(&message(11)[..5]).unwrap_err();
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
        assert_eq!(
            status.message(),
            "grpc: received message larger than max (11 vs. 10)"
        );
    }
}
