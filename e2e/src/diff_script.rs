//! Random scripts for the differential suite: one operation after the other, from a seed.
//!
//! Promises: the same seed and the same observed revisions give the same script. Keys are few, so that operations meet; there are twelve of
//! them because etcd's sort keeps the order of equal elements only up to twelve. Leases live long enough never to expire by themselves.
//! Not here: sending them and comparing the answers (`diff`).

use ballast_api::etcdserverpb::{
    CompactionRequest, Compare, DeleteRangeRequest, HashKvRequest, LeaseGrantRequest,
    LeaseKeepAliveRequest, LeaseRevokeRequest, LeaseTimeToLiveRequest, PutRequest, RangeRequest,
    RequestOp, TxnRequest, WatchCreateRequest, compare, request_op,
};
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

const KEYS: [&str; 12] = [
    "a", "a/1", "a/2", "a/b/c", "b", "b/1", "c", "d", "d/x", "e", "f", "f\u{7f}",
];
const VALUES: [&str; 6] = [
    "",
    "0",
    "1",
    "2",
    "ten",
    "a longer value, of more than thirty bytes",
];
const LEASES: std::ops::RangeInclusive<i64> = 101..=106;
/// Depth of transactions inside transactions.
const NESTING_MAX: u32 = 2;

/// One operation.
#[derive(Clone, Debug)]
pub enum Op {
    Range(RangeRequest),
    Put(PutRequest),
    Delete(DeleteRangeRequest),
    Txn(TxnRequest),
    Compact(CompactionRequest),
    Grant(LeaseGrantRequest),
    Revoke(LeaseRevokeRequest),
    KeepAlive(LeaseKeepAliveRequest),
    TimeToLive(LeaseTimeToLiveRequest),
    Leases,
    HashKv(HashKvRequest),
    Status,
    Alarms,
    /// Several watches on one stream, read up to the head.
    Watch(Vec<WatchCreateRequest>),
}

/// What the script knows of the store when it makes up the next operation.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub head: i64,
    pub compacted: i64,
}

/// A script in the making.
pub struct Script {
    random: StdRng,
}

impl Script {
    pub fn new(seed: u64) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
        }
    }

    pub fn next(&mut self, seen: Seen) -> Op {
        match self.random.random_range(0..100) {
            0..28 => Op::Put(self.put()),
            28..38 => Op::Delete(self.delete()),
            38..58 => Op::Range(self.range(seen)),
            58..78 => Op::Txn(self.txn(seen, NESTING_MAX)),
            78..80 => Op::Compact(self.compact(seen)),
            80..84 => Op::Grant(LeaseGrantRequest {
                id: self.lease(),
                ttl: self.random.random_range(1_000..100_000),
            }),
            84..86 => Op::Revoke(LeaseRevokeRequest { id: self.lease() }),
            86..88 => Op::KeepAlive(LeaseKeepAliveRequest { id: self.lease() }),
            88..91 => Op::TimeToLive(LeaseTimeToLiveRequest {
                id: self.lease(),
                keys: self.chance(2),
            }),
            91 => Op::Leases,
            92..95 => Op::HashKv(HashKvRequest {
                revision: self.revision(seen),
            }),
            95 => Op::Status,
            96 => Op::Alarms,
            _ => Op::Watch(
                (0..self.random.random_range(1..4))
                    .map(|_| self.watch(seen))
                    .collect(),
            ),
        }
    }

    /// True once in `n` times.
    fn chance(&mut self, n: u32) -> bool {
        self.random.random_range(0..n) == 0
    }

    fn key(&mut self) -> Bytes {
        // An empty key is refused everywhere but in ranges.
        if self.chance(60) {
            return Bytes::new();
        }
        KEYS[self.random.random_range(0..KEYS.len())].into()
    }

    fn value(&mut self) -> Bytes {
        VALUES[self.random.random_range(0..VALUES.len())].into()
    }

    fn lease(&mut self) -> i64 {
        self.random.random_range(LEASES)
    }

    /// A key and an end: one key, a prefix, from a key on, two keys in either order.
    fn interval(&mut self) -> (Bytes, Bytes) {
        let key = self.key();
        let end = match self.random.random_range(0..10) {
            0..4 => Bytes::new(),
            4..6 => prefix_end(&key),
            6..8 => Bytes::from_static(b"\0"),
            _ => self.key(),
        };
        (key, end)
    }

    /// Mostly now; else something between long compacted and not yet there.
    fn revision(&mut self, seen: Seen) -> i64 {
        match self.random.random_range(0..10) {
            0..5 => 0,
            5..9 => self.random.random_range(seen.compacted.max(1)..=seen.head),
            _ => self
                .random
                .random_range((seen.compacted - 3).max(0)..=seen.head + 3),
        }
    }

    fn range(&mut self, seen: Seen) -> RangeRequest {
        let (key, range_end) = self.interval();
        let mut request = RangeRequest {
            key,
            range_end,
            revision: self.revision(seen),
            serializable: self.chance(4),
            keys_only: self.chance(6),
            count_only: self.chance(8),
            ..RangeRequest::default()
        };
        if self.chance(3) {
            request.limit = self.random.random_range(0..6);
        }
        if self.chance(3) {
            request.sort_order = self.random.random_range(0..3);
            request.sort_target = self.random.random_range(0..5);
        }
        for bound in [
            &mut request.min_mod_revision,
            &mut request.max_mod_revision,
            &mut request.min_create_revision,
            &mut request.max_create_revision,
        ] {
            if self.random.random_range(0..12) == 0 {
                *bound = self.random.random_range(1..=seen.head + 1);
            }
        }
        request
    }

    fn put(&mut self) -> PutRequest {
        let mut request = PutRequest {
            key: self.key(),
            value: self.value(),
            prev_kv: self.chance(2),
            ignore_value: self.chance(12),
            ignore_lease: self.chance(12),
            ..PutRequest::default()
        };
        if self.chance(4) {
            request.lease = self.lease();
        }
        // Both at once are refused, which one in a while is enough to see.
        if request.ignore_value && !self.chance(5) {
            request.value = Bytes::new();
        }
        if request.ignore_lease && !self.chance(5) {
            request.lease = 0;
        }
        request
    }

    fn delete(&mut self) -> DeleteRangeRequest {
        let (key, mut range_end) = self.interval();
        // Emptying the store again and again would leave little to compare.
        if range_end == b"\0"[..] && !self.chance(5) {
            range_end = Bytes::new();
        }
        DeleteRangeRequest {
            key,
            range_end,
            prev_kv: self.chance(2),
        }
    }

    fn compact(&mut self, seen: Seen) -> CompactionRequest {
        let revision = if self.chance(6) {
            self.random
                .random_range((seen.compacted - 2).max(0)..=seen.head + 2)
        } else {
            self.random.random_range(seen.compacted..=seen.head)
        };
        CompactionRequest {
            revision,
            physical: self.chance(2),
        }
    }

    fn txn(&mut self, seen: Seen, depth: u32) -> TxnRequest {
        let compare = (0..self.random.random_range(0..4))
            .map(|_| self.compare(seen))
            .collect();
        let success = self.ops(seen, depth);
        let failure = self.ops(seen, depth);
        TxnRequest {
            compare,
            success,
            failure,
        }
    }

    fn ops(&mut self, seen: Seen, depth: u32) -> Vec<RequestOp> {
        let count = self.random.random_range(0..4);
        (0..count)
            .map(|_| {
                let request = match self.random.random_range(0..10) {
                    0..4 => request_op::Request::RequestPut(self.put()),
                    4..7 => request_op::Request::RequestRange(self.range(seen)),
                    7..9 => request_op::Request::RequestDeleteRange(self.delete()),
                    _ if depth > 0 => request_op::Request::RequestTxn(self.txn(seen, depth - 1)),
                    _ => request_op::Request::RequestPut(self.put()),
                };
                RequestOp {
                    request: Some(request),
                }
            })
            .collect()
    }

    fn compare(&mut self, seen: Seen) -> Compare {
        let key = self.key();
        let range_end = if self.chance(5) {
            prefix_end(&key)
        } else {
            Bytes::new()
        };
        let number = self.random.random_range(0..=seen.head);
        let (target, union) = match self.random.random_range(0..5) {
            0 => (
                compare::CompareTarget::Version,
                compare::TargetUnion::Version(self.random.random_range(0..4)),
            ),
            1 => (
                compare::CompareTarget::Create,
                compare::TargetUnion::CreateRevision(number),
            ),
            2 => (
                compare::CompareTarget::Mod,
                compare::TargetUnion::ModRevision(number),
            ),
            3 => (
                compare::CompareTarget::Value,
                compare::TargetUnion::Value(self.value()),
            ),
            _ => (
                compare::CompareTarget::Lease,
                compare::TargetUnion::Lease(self.lease()),
            ),
        };
        Compare {
            result: self.random.random_range(0..4),
            target: target.into(),
            key,
            range_end,
            target_union: Some(union),
        }
    }

    fn watch(&mut self, seen: Seen) -> WatchCreateRequest {
        let (key, range_end) = self.interval();
        let mut request = WatchCreateRequest {
            key,
            range_end,
            start_revision: self.revision(seen).min(seen.head),
            prev_kv: self.chance(2),
            ..WatchCreateRequest::default()
        };
        if self.chance(4) {
            request.filters.push(self.random.random_range(0..2));
        }
        request
    }
}

/// The end of the interval of all keys that begin with `prefix`.
pub fn prefix_end(prefix: &[u8]) -> Bytes {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return end.into();
        }
    }
    Bytes::from_static(b"\0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_is_one_script() {
        let script = |seed| {
            let mut script = Script::new(seed);
            (0..200)
                .map(|n| {
                    format!(
                        "{:?}",
                        script.next(Seen {
                            head: n + 1,
                            compacted: n / 2
                        })
                    )
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(script(7), script(7));
        assert_ne!(script(7), script(8));
    }

    #[test]
    fn the_end_of_a_prefix_is_the_next_string_of_its_length() {
        assert_eq!(prefix_end(b"a/1"), "a/2");
        assert_eq!(prefix_end(&[0x61, 0xff]), "b");
        assert_eq!(prefix_end(&[0xff]), "\0");
    }
}
