//! Which records there are, as two numbers: by them a reader of all records knows whether it was given all.
//!
//! An engine whose own pages are damaged may leave records out of a scan and not know it. The index knows them all.
//!
//! etcd: none; bbolt trusts the disk.

use crate::mvcc::key_index::KeyIndex;
use crate::mvcc::revision::Revision;
use crate::mvcc::tree::Tree;

/// Of a set of revisions, in any order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Census {
    pub(super) count: u64,
    sum: u64,
}

impl Census {
    pub(super) fn of(tree: &Tree<KeyIndex>) -> Self {
        let mut census = Self::default();
        for (_, index) in tree.from(b"") {
            index.for_each_record(|record| census.add(record.revision()));
        }
        census
    }

    pub(super) fn add(&mut self, revision: Revision) {
        // The finalizer of splitmix64, so that one record missing and another doubled do not cancel out.
        let mut x = revision.main.cast_unsigned() ^ revision.sub.cast_unsigned().rotate_left(40);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.count += 1;
        self.sum = self.sum.wrapping_add(x ^ (x >> 31));
    }
}
