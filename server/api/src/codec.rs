//! Messages to bytes and back on a gRPC stream, in buffers of the message's own size.
//!
//! tonic's own codec begins each message with 8 KiB and doubles from there: most messages need a hundredth of it, and a list of ten
//! megabytes was copied ten times. What is encoded is counted.
//!
//! Not here: bytes received (the server follows the frames of each request anyway).
//!
//! etcd: server/etcdserver/api/v3rpc/codec.go.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, EncodeBuf, Encoder};
use tonic_prost::ProstDecoder;

/// What most requests and answers fit in; a larger one grows it once.
const BUFFER_BYTES: usize = 512;
/// Messages of a stream that wait together are sent when they come to this.
const YIELD_BYTES: usize = 32 * 1024;

/// Bytes of all messages encoded by this process.
pub static ENCODED_BYTES: AtomicU64 = AtomicU64::new(0);

fn settings() -> BufferSettings {
    BufferSettings::new(BUFFER_BYTES, YIELD_BYTES)
}

/// The codec of all generated services.
#[derive(Debug)]
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = Exact<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Exact<T> {
        Exact(PhantomData)
    }

    fn decoder(&mut self) -> ProstDecoder<U> {
        ProstDecoder::new(settings())
    }
}

/// Makes room for the message before it is encoded.
#[derive(Debug)]
pub struct Exact<T>(PhantomData<T>);

impl<T: Message> Encoder for Exact<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let bytes = item.encoded_len();
        buffer.reserve(bytes);
        item.encode_raw(buffer);
        ENCODED_BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        settings()
    }
}
