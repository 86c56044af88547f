//! Memory for large responses under construction and on their way: many at once wait for each other.
//!
//!     range too large for nothing --> take(bytes) --waits--> read, encode --> body, piece by piece --> given back
//!
//! Promises: what large reads hold, values and encoded bytes together, stays within the budget, save that one alone may be larger than it. A
//! client that stops taking its response loses it after a while, so that it cannot keep others waiting for ever.
//! Not here: small responses, which need no permit; streams, which hold a part each; what a write answers.
//!
//! etcd has no such bound.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use ballast_api::error::Error;
use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use tonic::body::Body;

use crate::clock::Clock;

/// A response up to this size takes no permit.
pub const SMALL_RESPONSE_BYTES: u64 = 1 << 20;
/// A response is there twice: as values, and encoded.
const COPIES: u64 = 2;
/// How long a read waits for its turn before it is refused.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// A client that takes nothing for so long loses its response.
const STALL_MAX: Duration = Duration::from_secs(60);
/// What is handed to the connection at once.
const PIECE_BYTES: usize = 256 * 1024;
/// Permits are counted in these, since one asks for less than 2^32 of them.
const UNIT_BYTES: u64 = 4096;

/// The budget of a member. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Budget {
    units: Arc<Semaphore>,
    units_max: u32,
    wait_max: Duration,
}

impl Budget {
    pub fn new(bytes: u64) -> Self {
        let units_max = u32::try_from(bytes / UNIT_BYTES)
            .unwrap_or(u32::MAX)
            .clamp(1, Semaphore::MAX_PERMITS as u32);
        Self {
            units: Arc::new(Semaphore::new(units_max as usize)),
            units_max,
            wait_max: WAIT_MAX,
        }
    }

    /// Waits for room for a response of so many bytes.
    pub async fn take(&self, response_bytes: u64) -> Result<Share, Status> {
        let units = response_bytes.saturating_mul(COPIES) / UNIT_BYTES;
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        // One that is larger than everything goes alone.
        let waiting = Arc::clone(&self.units).acquire_many_owned(units.clamp(1, self.units_max));
        match tokio::time::timeout(self.wait_max, waiting).await {
            Ok(Ok(permit)) => Ok(Share(Arc::new(permit))),
            _ => Err(Error::RequestTooManyRequests.into()),
        }
    }
}

/// Room in the budget; given back when the last clone goes. Travels from the handler to the body among the response's extensions.
#[derive(Clone, Debug)]
pub struct Share(#[expect(dead_code, reason = "held, not read")] Arc<OwnedSemaphorePermit>);

/// A response's body that holds its share until the client has taken it.
#[derive(Debug)]
pub struct HeldBody {
    held: Arc<Mutex<Held>>,
    source: Option<Body>,
}

#[derive(Debug)]
struct Held {
    /// Encoded and not yet handed to the connection.
    data: Bytes,
    trailers: Option<HeaderMap>,
    share: Option<Share>,
    last_taken: Instant,
    stalled: bool,
}

impl HeldBody {
    /// Must be called within a runtime.
    pub fn new(source: Body, share: Share) -> Self {
        Self::with_patience(source, share, STALL_MAX)
    }

    fn with_patience(source: Body, share: Share, stall_max: Duration) -> Self {
        let held = Arc::new(Mutex::new(Held {
            data: Bytes::new(),
            trailers: None,
            share: Some(share),
            last_taken: Clock::default().now(),
            stalled: false,
        }));
        tokio::spawn(take_from_the_stalled(Arc::downgrade(&held), stall_max));
        Self {
            held,
            source: Some(source),
        }
    }
}

/// The body is not asked while the client takes nothing, so somebody else has to look.
async fn take_from_the_stalled(held: std::sync::Weak<Mutex<Held>>, stall_max: Duration) {
    loop {
        tokio::time::sleep(stall_max / 4).await;
        let Some(held) = held.upgrade() else {
            return;
        };
        let mut held = held.lock();
        let now = Clock::default().now();
        if now.saturating_duration_since(held.last_taken) >= stall_max {
            tracing::warn!(
                left_bytes = held.data.len(),
                "a client does not take its response; dropping it"
            );
            held.stalled = true;
            held.data = Bytes::new();
            held.share = None;
            return;
        }
    }
}

impl http_body::Body for HeldBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            {
                let mut held = this.held.lock();
                if held.stalled {
                    this.source = None;
                    return Poll::Ready(Some(Err(Status::cancelled(
                        "ballast: the response was not taken in time",
                    ))));
                }
                held.last_taken = Clock::default().now();
                if !held.data.is_empty() {
                    let length = held.data.len().min(PIECE_BYTES);
                    let piece = held.data.split_to(length);
                    return Poll::Ready(Some(Ok(Frame::data(piece))));
                }
                if let Some(trailers) = held.trailers.take() {
                    held.share = None;
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
            }
            let Some(source) = &mut this.source else {
                return Poll::Ready(None);
            };
            match Pin::new(source).poll_frame(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => this.source = None,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(Some(Ok(frame))) => {
                    let mut held = this.held.lock();
                    match frame.into_data() {
                        Ok(data) => held.data = data,
                        Err(frame) => held.trailers = frame.into_trailers().ok(),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    #[tokio::test]
    async fn large_responses_wait_for_each_other_and_one_alone_may_be_larger() {
        let budget = Budget::new(1 << 20);
        let huge = budget.take(1 << 30).await.unwrap();
        let mut next = Box::pin(budget.take(4096));
        assert!(futures::poll!(next.as_mut()).is_pending());
        let clone = huge.clone();
        drop(huge);
        assert!(futures::poll!(next.as_mut()).is_pending());
        drop(clone);
        next.await.unwrap();
    }

    #[tokio::test]
    async fn waiting_ends_in_a_refusal() {
        let budget = Budget {
            wait_max: Duration::from_millis(20),
            ..Budget::new(1 << 20)
        };
        let _all = budget.take(1 << 20).await.unwrap();
        let refused = budget.take(4096).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert_eq!(refused.message(), "etcdserver: too many requests");
    }

    #[tokio::test]
    async fn a_body_gives_its_share_back_when_it_was_taken() {
        let budget = Budget::new(1 << 20);
        let share = budget.take(1 << 20).await.unwrap();
        let bytes = Bytes::from(vec![7; 3 * PIECE_BYTES + 1]);
        let source = Body::new(http_body_util::Full::new(bytes.clone()));
        let mut body = HeldBody::new(source, share);
        let mut taken = Vec::new();
        while let Some(frame) = body.frame().await {
            taken.push(frame.unwrap().into_data().unwrap());
        }
        assert_eq!(taken.len(), 4);
        assert_eq!(taken.concat(), bytes);
        drop(body);
        budget.take(1 << 20).await.unwrap();
    }

    #[tokio::test]
    async fn a_client_that_takes_nothing_loses_its_response() {
        let budget = Budget::new(1 << 20);
        let share = budget.take(1 << 20).await.unwrap();
        let source = Body::new(http_body_util::Full::new(Bytes::from(vec![
            7;
            2 * PIECE_BYTES
        ])));
        let mut body = HeldBody::with_patience(source, share, Duration::from_millis(40));
        body.frame().await.unwrap().unwrap();
        // It comes free although nobody touches the body.
        budget.take(1 << 20).await.unwrap();
        assert!(body.frame().await.unwrap().is_err());
    }
}
