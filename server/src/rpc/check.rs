//! Validation of requests before anything else happens, in etcd's order.
//!
//! etcd: server/etcdserver/api/v3rpc/key.go.

use std::collections::HashSet;

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use bytes::Bytes;
use pb::range_request::{SortOrder, SortTarget};
use pb::request_op::Request;
use tonic::Status;

use crate::apply::range::{has_revision_filters, is_default_order};

pub fn range(request: &pb::RangeRequest) -> Result<(), Error> {
    if request.key.is_empty() {
        return Err(Error::EmptyKey);
    }
    if SortOrder::try_from(request.sort_order).is_err()
        || SortTarget::try_from(request.sort_target).is_err()
    {
        return Err(Error::InvalidSortOption);
    }
    Ok(())
}

pub fn range_stream(request: &pb::RangeRequest) -> Result<(), Status> {
    range(request)?;
    if !is_default_order(request) {
        return Err(Status::unimplemented(
            "RangeStream does not support custom sort orders",
        ));
    }
    if has_revision_filters(request) {
        return Err(Status::unimplemented(
            "RangeStream does not support revision filters",
        ));
    }
    Ok(())
}

pub fn put(request: &pb::PutRequest) -> Result<(), Error> {
    if request.key.is_empty() {
        return Err(Error::EmptyKey);
    }
    if request.ignore_value && !request.value.is_empty() {
        return Err(Error::ValueProvided);
    }
    if request.ignore_lease && request.lease != 0 {
        return Err(Error::LeaseProvided);
    }
    Ok(())
}

pub fn delete_range(request: &pb::DeleteRangeRequest) -> Result<(), Error> {
    if request.key.is_empty() {
        return Err(Error::EmptyKey);
    }
    Ok(())
}

/// Checks every operation at every depth; depth consumes the operations allowed.
pub fn txn(request: &pb::TxnRequest, ops_max: usize) -> Result<(), Error> {
    txn_ops(request, ops_max)?;
    // Overlaps are looked for only in what is bounded.
    overlaps(&request.success)?;
    overlaps(&request.failure)?;
    Ok(())
}

fn txn_ops(request: &pb::TxnRequest, ops_max: usize) -> Result<(), Error> {
    let widest = request
        .compare
        .len()
        .max(request.success.len())
        .max(request.failure.len());
    let Some(left) = ops_max.checked_sub(widest) else {
        return Err(Error::TooManyOps);
    };
    if request.compare.iter().any(|compare| compare.key.is_empty()) {
        return Err(Error::EmptyKey);
    }
    for op in request.success.iter().chain(&request.failure) {
        match &op.request {
            Some(Request::RequestRange(inner)) => range(inner)?,
            Some(Request::RequestPut(inner)) => put(inner)?,
            Some(Request::RequestDeleteRange(inner)) => delete_range(inner)?,
            Some(Request::RequestTxn(inner)) => txn_ops(inner, left)?,
            None => return Err(Error::KeyNotFound),
        }
    }
    Ok(())
}

/// The keys that one list of operations writes.
#[derive(Default)]
struct Written {
    puts: HashSet<Bytes>,
    /// Start and end as the request has them: an empty end is the key alone.
    deletes: Vec<(Bytes, Bytes)>,
}

impl Written {
    /// An end of one zero byte, "to the end" everywhere else, is taken as that very key here, as etcd takes it: such a deletion
    /// beside a put of one of its keys is let through.
    fn deletes(&self, key: &Bytes) -> bool {
        self.deletes.iter().any(|(start, end)| {
            if end.is_empty() {
                key == start
            } else {
                key >= start && key < end
            }
        })
    }

    fn add_put(&mut self, key: &Bytes) -> Result<(), Error> {
        if self.deletes(key) || !self.puts.insert(key.clone()) {
            return Err(Error::DuplicateKey);
        }
        Ok(())
    }
}

/// No key may be put twice, or put and deleted, on one path through a transaction. The two branches of a nested one exclude
/// each other, so they may overlap.
fn overlaps(ops: &[pb::RequestOp]) -> Result<Written, Error> {
    let mut written = Written::default();
    for op in ops {
        if let Some(Request::RequestDeleteRange(delete)) = &op.request {
            written
                .deletes
                .push((delete.key.clone(), delete.range_end.clone()));
        }
    }
    for op in ops {
        let Some(Request::RequestTxn(txn)) = &op.request else {
            continue;
        };
        let then = overlaps(&txn.success)?;
        let otherwise = overlaps(&txn.failure)?;
        for key in &then.puts {
            written.add_put(key)?;
        }
        for key in &otherwise.puts {
            if written.deletes(key) {
                return Err(Error::DuplicateKey);
            }
            if !written.puts.insert(key.clone()) && !then.puts.contains(key) {
                return Err(Error::DuplicateKey);
            }
        }
        written.deletes.extend(then.deletes);
        written.deletes.extend(otherwise.deletes);
    }
    for op in ops {
        if let Some(Request::RequestPut(put)) = &op.request {
            written.add_put(&put.key)?;
        }
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(request: Request) -> pb::RequestOp {
        pb::RequestOp {
            request: Some(request),
        }
    }

    fn put_op(key: &'static str) -> pb::RequestOp {
        op(Request::RequestPut(pb::PutRequest {
            key: key.into(),
            ..Default::default()
        }))
    }

    fn delete_op(key: &'static str, end: &'static str) -> pb::RequestOp {
        op(Request::RequestDeleteRange(pb::DeleteRangeRequest {
            key: key.into(),
            range_end: end.into(),
            prev_kv: false,
        }))
    }

    fn nested(success: Vec<pb::RequestOp>, failure: Vec<pb::RequestOp>) -> pb::RequestOp {
        op(Request::RequestTxn(of(success, failure)))
    }

    fn of(success: Vec<pb::RequestOp>, failure: Vec<pb::RequestOp>) -> pb::TxnRequest {
        pb::TxnRequest {
            compare: vec![],
            success,
            failure,
        }
    }

    #[test]
    fn one_path_writes_a_key_once() {
        for (ops, expected) in [
            (vec![put_op("a"), put_op("b")], Ok(())),
            (vec![put_op("a"), put_op("a")], Err(Error::DuplicateKey)),
            (
                vec![put_op("a"), delete_op("a", "")],
                Err(Error::DuplicateKey),
            ),
            (
                vec![put_op("b"), delete_op("a", "c")],
                Err(Error::DuplicateKey),
            ),
            (vec![put_op("c"), delete_op("a", "c")], Ok(())),
            (vec![put_op("z"), delete_op("a", "\0")], Ok(())),
            (vec![delete_op("a", "c"), delete_op("b", "d")], Ok(())),
            (
                vec![put_op("a"), nested(vec![put_op("a")], vec![])],
                Err(Error::DuplicateKey),
            ),
            (vec![nested(vec![put_op("a")], vec![put_op("a")])], Ok(())),
            (
                vec![
                    nested(vec![put_op("a")], vec![]),
                    nested(vec![], vec![put_op("a")]),
                ],
                Err(Error::DuplicateKey),
            ),
            (
                vec![delete_op("a", ""), nested(vec![], vec![put_op("a")])],
                Err(Error::DuplicateKey),
            ),
            (
                vec![put_op("b"), nested(vec![delete_op("a", "c")], vec![])],
                Err(Error::DuplicateKey),
            ),
        ] {
            assert_eq!(txn(&of(ops.clone(), vec![]), 128), expected, "{ops:?}");
            assert_eq!(txn(&of(vec![], ops.clone()), 128), expected, "{ops:?}");
        }
        assert_eq!(txn(&of(vec![put_op("a")], vec![put_op("a")]), 128), Ok(()));
    }

    #[test]
    fn depth_consumes_the_operations_allowed() {
        let deep = of(vec![nested(vec![put_op("a"), put_op("b")], vec![])], vec![]);
        assert_eq!(txn(&deep, 3), Ok(()));
        assert_eq!(txn(&deep, 2), Err(Error::TooManyOps));
    }

    #[test]
    fn an_empty_operation_is_key_not_found() {
        let empty = of(vec![pb::RequestOp { request: None }], vec![]);
        assert_eq!(txn(&empty, 128), Err(Error::KeyNotFound));
    }
}
