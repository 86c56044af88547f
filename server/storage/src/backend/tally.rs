//! A sum over all pairs of a database, by which whoever reads them all finds that one is missing, doubled or changed.
//!
//! The sum is a number of 64 bits per pair, added up: the order does not matter, and a pair leaves as it came. It is no defence against
//! somebody who means to deceive.
//!
//! etcd: none; bbolt trusts the disk.

use bytes::Bytes;
use crc32c::{crc32c, crc32c_append};

/// What a set of pairs sums up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub pairs: u64,
    /// Of keys and values.
    pub bytes: u64,
    pub sum: u64,
}

/// What a value contributes, so that a pair can leave without its value being read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    pub len: u64,
    pub crc: u32,
}

impl Digest {
    pub fn of(value: &[u8]) -> Self {
        Self {
            len: value.len() as u64,
            crc: crc32c(value),
        }
    }
}

impl Tally {
    /// Bytes of [`Self::to_bytes`].
    pub const LEN: usize = 24;

    pub fn add(&mut self, key: &[u8], value: Digest) {
        self.pairs = self.pairs.wrapping_add(1);
        self.bytes = self.bytes.wrapping_add(key.len() as u64 + value.len);
        self.sum = self.sum.wrapping_add(number_of(key, value));
    }

    pub fn add_all(&mut self, pairs: &[(Bytes, Bytes)]) {
        for (key, value) in pairs {
            self.add(key, Digest::of(value));
        }
    }

    /// That of both sets of pairs.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self {
            pairs: self.pairs.wrapping_add(other.pairs),
            bytes: self.bytes.wrapping_add(other.bytes),
            sum: self.sum.wrapping_add(other.sum),
        }
    }

    pub fn remove(&mut self, key: &[u8], value: Digest) {
        self.pairs = self.pairs.wrapping_sub(1);
        self.bytes = self.bytes.wrapping_sub(key.len() as u64 + value.len);
        self.sum = self.sum.wrapping_sub(number_of(key, value));
    }

    /// Says that this is what was written and that what can be read.
    pub fn differs_from(self, read: Self) -> String {
        format!(
            "{} pairs of {} bytes were written and {} of {} bytes can be read, or their contents differ",
            self.pairs, self.bytes, read.pairs, read.bytes
        )
    }

    /// Three u64 big-endian.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        for (place, number) in out
            .chunks_exact_mut(8)
            .zip([self.pairs, self.bytes, self.sum])
        {
            place.copy_from_slice(&number.to_be_bytes());
        }
        out
    }

    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let mut numbers = bytes.chunks_exact(8).map(|number| {
            u64::from_be_bytes(number.try_into().expect("a chunk has the length asked for"))
        });
        let mut next = || numbers.next().expect("three numbers of eight bytes");
        Self {
            pairs: next(),
            bytes: next(),
            sum: next(),
        }
    }
}

/// Two checksums that a change in key or value must both leave as they are, mixed so that changes in two pairs do not cancel out.
fn number_of(key: &[u8], value: Digest) -> u64 {
    let key_crc = crc32c(key);
    let both = crc32c_append(key_crc, &value.crc.to_be_bytes());
    let mut x = u64::from(both) << 32 | u64::from(value.crc);
    x ^= u64::from(key_crc).rotate_left(17) ^ value.len.rotate_left(47);
    // The finalizer of splitmix64.
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Tally {
        let mut tally = Tally::default();
        for (key, value) in pairs {
            tally.add(key.as_bytes(), Digest::of(value.as_bytes()));
        }
        tally
    }

    #[test]
    fn the_order_does_not_matter_and_a_pair_leaves_as_it_came() {
        let mut tally = of(&[("a", "1"), ("b", "2"), ("c", "3")]);
        assert_eq!(tally, of(&[("c", "3"), ("a", "1"), ("b", "2")]));
        assert_eq!((tally.pairs, tally.bytes), (3, 6));
        tally.remove(b"b", Digest::of(b"2"));
        assert_eq!(tally, of(&[("a", "1"), ("c", "3")]));
        assert_eq!(Tally::from_bytes(&tally.to_bytes()), tally);
    }

    #[test]
    fn swapped_moved_and_changed_bytes_change_the_sum() {
        let right = of(&[("a", "1"), ("b", "2")]);
        for wrong in [
            of(&[("a", "2"), ("b", "1")]),
            of(&[("a1", ""), ("b", "2")]),
            of(&[("a", "1"), ("b", "3")]),
            of(&[("a", "1"), ("c", "2")]),
            of(&[("a", "1"), ("b", "2\0")]),
        ] {
            assert_ne!(wrong.sum, right.sum);
        }
    }
}
