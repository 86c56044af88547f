//! etcd's snapshot file: a bbolt database, read and written.
//!
//!     page 0, 1   meta: root, free list, high-water mark, checksum (the later transaction of the two counts)
//!     page 2      free list
//!     page 3..    leaves and branches of each bucket, then of the root bucket
//!
//!     page     | id u64 | flags u16 | count u16 | overflow u32 | elements | keys and values |
//!     leaf     element: flags u32 (1 = bucket) | pos u32 | key length u32 | value length u32
//!     branch   element: pos u32 | key length u32 | child page u64          (pos counts from the element itself)
//!     bucket   value:   root page u64 | sequence u64 [| the leaf page itself, when root is 0]
//!
//! All little-endian. Promises: what [`write`] makes passes bbolt's own check and stays sound when bbolt writes to it
//! afterwards; [`read`] takes any file of bbolt's, and no damage makes it panic, loop or allocate beyond the file's size.
//! Not here: which buckets there are and what they hold (`mvcc/snapshot.rs`, `bolt/etcd.rs`).
//!
//! etcd: go.etcd.io/bbolt.

pub mod arrive;
pub mod check;
pub mod etcd;
pub mod read;
pub mod status;
pub mod verify;
pub mod write;

pub use arrive::{Arriving, Handed};
pub use check::check;
pub use read::{BoltFile, Bucket, Cursor, Value};
pub use status::{SnapshotStatus, Trailer, status, verify_trailer};
pub use verify::{Verified, verify};
pub use write::{META_PAGES, Plan, Planner, WriteError, Writer};

/// What we write. A file of another machine may have larger pages, which the reader takes from its meta page.
pub const PAGE_SIZE: usize = 4096;
/// The longest key bbolt accepts.
pub const KEY_LEN_MAX: usize = 32_768;
/// The longest value bbolt accepts.
pub const VALUE_LEN_MAX: usize = (1 << 31) - 2;

const PAGE_HEADER: usize = 16;
const ELEMENT: usize = 16;
const BUCKET_HEADER: usize = 16;

const FLAG_BRANCH: u16 = 0x01;
const FLAG_LEAF: u16 = 0x02;
const FLAG_META: u16 = 0x04;
const FLAG_FREELIST: u16 = 0x10;

/// A leaf element that holds a bucket.
const ELEMENT_BUCKET: u32 = 1;

const MAGIC: u32 = 0xED0C_DAED;
const VERSION: u32 = 2;
/// In a meta page: the free list was not written, rebuild it from what no bucket reaches.
const NO_FREELIST: u64 = u64::MAX;
/// Bytes of a meta, its checksum included.
const META_BYTES: usize = 64;

/// The part of a meta page that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Meta {
    page_size: u32,
    /// Page of the root bucket.
    root: u64,
    sequence: u64,
    freelist: u64,
    /// Pages in use or free; the next transaction would take new ones from here.
    high_water: u64,
    txid: u64,
}

impl Meta {
    fn to_bytes(self) -> [u8; META_BYTES] {
        let mut out = [0; META_BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..8].copy_from_slice(&VERSION.to_le_bytes());
        out[8..12].copy_from_slice(&self.page_size.to_le_bytes());
        out[16..24].copy_from_slice(&self.root.to_le_bytes());
        out[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        out[32..40].copy_from_slice(&self.freelist.to_le_bytes());
        out[40..48].copy_from_slice(&self.high_water.to_le_bytes());
        out[48..56].copy_from_slice(&self.txid.to_le_bytes());
        let sum = fnv1a(&out[..56]);
        out[56..64].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Reads a meta; the error says what is wrong with it.
    fn from_bytes(bytes: &[u8; META_BYTES]) -> Result<Self, &'static str> {
        if u32_at(bytes, 0) != MAGIC {
            return Err("no bbolt magic number");
        }
        if u32_at(bytes, 4) != VERSION {
            return Err("an unknown bbolt version");
        }
        if u64_at(bytes, 56) != fnv1a(&bytes[..56]) {
            return Err("a wrong checksum of the meta page");
        }
        let page_size = u32_at(bytes, 8);
        if !page_size.is_power_of_two() || !(512..=1 << 20).contains(&page_size) {
            return Err("an impossible page size");
        }
        Ok(Self {
            page_size,
            root: u64_at(bytes, 16),
            sequence: u64_at(bytes, 24),
            freelist: u64_at(bytes, 32),
            high_water: u64_at(bytes, 40),
            txid: u64_at(bytes, 48),
        })
    }
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Callers have checked that the bytes are there.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    let mut out = [0; 2];
    out.copy_from_slice(&bytes[at..at + 2]);
    u16::from_le_bytes(out)
}

/// Callers have checked that the bytes are there.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut out = [0; 4];
    out.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(out)
}

/// Callers have checked that the bytes are there.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut out = [0; 8];
    out.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(out)
}

#[cfg(test)]
mod tests;
