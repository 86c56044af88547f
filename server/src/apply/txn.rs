//! Transactions: which branch at each depth, whether it can be carried out, and carrying it out.
//!
//!     compare (state before, every depth)  ->  path of branches  ->  check (state before)  ->  execute
//!
//! Promises: all compares and checks see the state before the entry; after them nothing fails, so that a transaction is
//! whole or absent.
//!
//! etcd: server/etcdserver/txn/txn.go.

use std::cmp::Ordering;

use ballast_api::etcdserverpb as pb;
use ballast_api::mvccpb::KeyValue;
use ballast_storage::mvcc::{RangeOptions, View, WriteTxn};
use ballast_storage::{MvccError, ReadError};
use pb::compare::{CompareResult, CompareTarget, TargetUnion};
use pb::request_op::Request;
use pb::response_op::Response;

use super::{ApplyError, Failure, kv, range};
use crate::lease::Lessor;

/// True when no branch writes and none is nested: it needs no log entry.
pub fn is_read_only(request: &pb::TxnRequest) -> bool {
    ops(request).all(|op| matches!(op.request, Some(Request::RequestRange(_))))
}

/// True when every range is content with what this member has.
pub fn is_serializable(request: &pb::TxnRequest) -> bool {
    ops(request)
        .all(|op| matches!(&op.request, Some(Request::RequestRange(range)) if range.serializable))
}

fn ops(request: &pb::TxnRequest) -> impl Iterator<Item = &pb::RequestOp> {
    request.success.iter().chain(&request.failure)
}

/// Answers a read-only transaction on one view; one whose ranges hold more than `bytes_max` together is not answered. 0 is no bound.
pub fn read(
    view: &View,
    request: &pb::TxnRequest,
    bytes_max: u64,
) -> Result<pb::TxnResponse, Failure> {
    let path = choose(view, request);
    let mut responses = Vec::new();
    let mut bytes = 0;
    for op in path.ops(request) {
        let Some(Request::RequestRange(range)) = &op.request else {
            return Err(ApplyError::Unknown("write in a read-only txn".to_owned()).into());
        };
        check_range(view, range)?;
        // Each is bounded by what the others left, and at least by a byte, since 0 is no bound.
        let left = bytes_max
            .saturating_sub(bytes)
            .max(u64::from(bytes_max > 0));
        let response = match range::range_within(view, range, left) {
            Ok(response) => response,
            Err(ReadError::TooLarge { .. }) => return Err(whole_size(view, request, &path)),
            Err(error) => return Err(error.into()),
        };
        bytes += response.kvs.iter().map(record_bytes).sum::<u64>();
        responses.push(response);
    }
    // A comparison is a range of the same transaction.
    let ranges = request.compare.len() + responses.len();
    count(ranges, ranges);
    Ok(pb::TxnResponse {
        header: Some(super::header_at(view.revision())),
        succeeded: path.succeeded,
        responses: responses
            .into_iter()
            .map(|range| pb::ResponseOp {
                response: Some(Response::ResponseRange(range)),
            })
            .collect(),
    })
}

fn record_bytes(kv: &KeyValue) -> u64 {
    (kv.key.len() + kv.value.len()) as u64
}

/// How large the answer is. A range that is read again says it by not answering.
fn whole_size(view: &View, request: &pb::TxnRequest, path: &Path) -> Failure {
    let mut total = 0;
    for op in path.ops(request) {
        if let Some(Request::RequestRange(range)) = &op.request {
            match range::range_within(view, range, 1) {
                Err(ReadError::TooLarge { bytes }) => total += bytes,
                Ok(_) => {}
                Err(error) => return error.into(),
            }
        }
    }
    Failure::TooLarge { bytes: total }
}

/// Applies a transaction; `view` is the state before it.
pub fn apply(
    view: &View,
    txn: &mut WriteTxn<'_>,
    lessor: &Lessor,
    request: &pb::TxnRequest,
) -> Result<pb::TxnResponse, Failure> {
    let path = choose(view, request);
    check(view, lessor, request, &path)?;
    let mut response = execute(txn, lessor, request, &path)?;
    response.header = Some(super::header_at(txn.revision()));
    let ranges = path
        .ops(request)
        .iter()
        .filter(|op| matches!(op.request, Some(Request::RequestRange(_))));
    count(
        request.compare.len() + ranges.count(),
        path.ops(request).len(),
    );
    Ok(response)
}

/// As etcd counts: one operation alone is no transaction.
fn count(ranges: usize, ops: usize) {
    crate::metrics::RANGES.inc_by(ranges as u64);
    if ops > 1 {
        crate::metrics::TXNS.inc();
    }
}

/// The branch taken, and those of the transactions nested in it, in order.
struct Path {
    succeeded: bool,
    nested: Vec<Path>,
}

impl Path {
    fn ops<'a>(&self, request: &'a pb::TxnRequest) -> &'a [pb::RequestOp] {
        if self.succeeded {
            &request.success
        } else {
            &request.failure
        }
    }
}

fn choose(view: &View, request: &pb::TxnRequest) -> Path {
    let mut path = Path {
        succeeded: request.compare.iter().all(|compare| holds(view, compare)),
        nested: Vec::new(),
    };
    for op in path.ops(request) {
        if let Some(Request::RequestTxn(txn)) = &op.request {
            path.nested.push(choose(view, txn));
        }
    }
    path
}

fn check(
    view: &View,
    lessor: &Lessor,
    request: &pb::TxnRequest,
    path: &Path,
) -> Result<(), Failure> {
    let mut nested = path.nested.iter();
    for op in path.ops(request) {
        match &op.request {
            Some(Request::RequestRange(range)) => check_range(view, range)?,
            Some(Request::RequestPut(put)) => kv::check_put(view, lessor, put)?,
            Some(Request::RequestTxn(txn)) => {
                let path = nested.next().expect("choose made one path per nested txn");
                check(view, lessor, txn, path)?;
            }
            Some(Request::RequestDeleteRange(_)) | None => {}
        }
    }
    Ok(())
}

fn check_range(view: &View, request: &pb::RangeRequest) -> Result<(), Failure> {
    if request.revision > view.revision() {
        let current = view.revision();
        return Err(ApplyError::from(MvccError::FutureRevision { current }).into());
    }
    if request.revision != 0 && request.revision < view.compact_revision() {
        let compact_revision = view.compact_revision();
        return Err(ApplyError::from(MvccError::Compacted { compact_revision }).into());
    }
    Ok(())
}

fn execute(
    txn: &mut WriteTxn<'_>,
    lessor: &Lessor,
    request: &pb::TxnRequest,
    path: &Path,
) -> Result<pb::TxnResponse, Failure> {
    let mut nested = path.nested.iter();
    let mut responses = Vec::with_capacity(path.ops(request).len());
    for op in path.ops(request) {
        let response = match &op.request {
            Some(Request::RequestRange(range)) => {
                Some(Response::ResponseRange(range::range(txn, range)?))
            }
            Some(Request::RequestPut(put)) => {
                Some(Response::ResponsePut(kv::put(txn, lessor, put)?))
            }
            Some(Request::RequestDeleteRange(delete)) => Some(Response::ResponseDeleteRange(
                kv::delete_range(txn, lessor, delete)?,
            )),
            Some(Request::RequestTxn(inner)) => {
                let path = nested.next().expect("choose made one path per nested txn");
                Some(Response::ResponseTxn(execute(txn, lessor, inner, path)?))
            }
            None => None,
        };
        responses.push(pb::ResponseOp { response });
    }
    Ok(pb::TxnResponse {
        header: Some(pb::ResponseHeader::default()),
        succeeded: path.succeeded,
        responses,
    })
}

/// A compare over a range holds when it holds for every key of it. Over no key at all it is judged on a key that was never
/// written, save that a comparison of values is false: an absent value cannot be told from an empty one.
fn holds(view: &View, compare: &pb::Compare) -> bool {
    let options = RangeOptions {
        // All but the value and the lease stand in the index.
        keys_only: !matches!(
            CompareTarget::try_from(compare.target),
            Ok(CompareTarget::Value | CompareTarget::Lease)
        ),
        ..RangeOptions::default()
    };
    let Ok(result) = view.range(&compare.key, &compare.range_end, &options) else {
        return false;
    };
    if result.kvs.is_empty() {
        return compare.target != CompareTarget::Value as i32
            && holds_for(compare, &KeyValue::default());
    }
    result.kvs.iter().all(|kv| holds_for(compare, kv))
}

fn holds_for(compare: &pb::Compare, kv: &KeyValue) -> bool {
    let operand = compare.target_union.as_ref();
    let ordering = match CompareTarget::try_from(compare.target) {
        Ok(CompareTarget::Value) => {
            let value = match operand {
                Some(TargetUnion::Value(value)) => value.as_ref(),
                _ => &[],
            };
            kv.value.as_ref().cmp(value)
        }
        Ok(CompareTarget::Create) => kv.create_revision.cmp(&match operand {
            Some(TargetUnion::CreateRevision(revision)) => *revision,
            _ => 0,
        }),
        Ok(CompareTarget::Mod) => kv.mod_revision.cmp(&match operand {
            Some(TargetUnion::ModRevision(revision)) => *revision,
            _ => 0,
        }),
        Ok(CompareTarget::Version) => kv.version.cmp(&match operand {
            Some(TargetUnion::Version(version)) => *version,
            _ => 0,
        }),
        Ok(CompareTarget::Lease) => kv.lease.cmp(&match operand {
            Some(TargetUnion::Lease(lease)) => *lease,
            _ => 0,
        }),
        Err(_) => Ordering::Equal,
    };
    match CompareResult::try_from(compare.result) {
        Ok(CompareResult::Equal) => ordering.is_eq(),
        Ok(CompareResult::NotEqual) => ordering.is_ne(),
        Ok(CompareResult::Greater) => ordering.is_gt(),
        Ok(CompareResult::Less) => ordering.is_lt(),
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(target: CompareTarget, result: CompareResult, operand: TargetUnion) -> pb::Compare {
        pb::Compare {
            target: target as i32,
            result: result as i32,
            key: "k".into(),
            target_union: Some(operand),
            range_end: "".into(),
        }
    }

    #[test]
    fn every_target_compares_with_its_own_operand() {
        let kv = KeyValue {
            key: "k".into(),
            create_revision: 3,
            mod_revision: 5,
            version: 2,
            value: "v".into(),
            lease: 7,
        };
        for (target, equal, less) in [
            (
                CompareTarget::Version,
                TargetUnion::Version(2),
                TargetUnion::Version(1),
            ),
            (
                CompareTarget::Create,
                TargetUnion::CreateRevision(3),
                TargetUnion::CreateRevision(2),
            ),
            (
                CompareTarget::Mod,
                TargetUnion::ModRevision(5),
                TargetUnion::ModRevision(4),
            ),
            (
                CompareTarget::Value,
                TargetUnion::Value("v".into()),
                TargetUnion::Value("u".into()),
            ),
            (
                CompareTarget::Lease,
                TargetUnion::Lease(7),
                TargetUnion::Lease(6),
            ),
        ] {
            let check = |result, operand: &TargetUnion| {
                holds_for(&compare(target, result, operand.clone()), &kv)
            };
            assert!(check(CompareResult::Equal, &equal), "{target:?}");
            assert!(!check(CompareResult::NotEqual, &equal), "{target:?}");
            assert!(check(CompareResult::Greater, &less), "{target:?}");
            assert!(!check(CompareResult::Less, &less), "{target:?}");
            assert!(check(CompareResult::NotEqual, &less), "{target:?}");
        }
    }

    #[test]
    fn an_operand_of_another_target_counts_as_zero() {
        let kv = KeyValue {
            version: 0,
            ..Default::default()
        };
        let compare = compare(
            CompareTarget::Version,
            CompareResult::Equal,
            TargetUnion::Lease(9),
        );
        assert!(holds_for(&compare, &kv));
    }
}
