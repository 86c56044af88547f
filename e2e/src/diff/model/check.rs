//! What is wrong with a request whatever the store holds.
//!
//! etcd: server/etcdserver/api/v3rpc/key.go, by what it refuses.

use std::collections::BTreeSet;

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use bytes::Bytes;
use pb::request_op::Request;

use super::super::script::TXN_OPS_MAX;

pub(super) fn range(request: &pb::RangeRequest) -> Result<(), Error> {
    if request.key.is_empty() {
        return Err(Error::EmptyKey);
    }
    if !(0..=2).contains(&request.sort_order) || !(0..=4).contains(&request.sort_target) {
        return Err(Error::InvalidSortOption);
    }
    Ok(())
}

pub(super) fn put(request: &pb::PutRequest) -> Result<(), Error> {
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

pub(super) fn txn(request: &pb::TxnRequest) -> Result<(), Error> {
    form(request, TXN_OPS_MAX)?;
    writes(&request.success)?;
    writes(&request.failure)?;
    Ok(())
}

fn form(request: &pb::TxnRequest, ops_max: usize) -> Result<(), Error> {
    let lists = [
        request.compare.len(),
        request.success.len(),
        request.failure.len(),
    ];
    let widest = lists.into_iter().max().unwrap_or(0);
    if widest > ops_max {
        return Err(Error::TooManyOps);
    }
    if request.compare.iter().any(|compare| compare.key.is_empty()) {
        return Err(Error::EmptyKey);
    }
    for op in request.success.iter().chain(&request.failure) {
        match &op.request {
            Some(Request::RequestRange(inner)) => range(inner)?,
            Some(Request::RequestPut(inner)) => put(inner)?,
            Some(Request::RequestDeleteRange(inner)) if inner.key.is_empty() => {
                return Err(Error::EmptyKey);
            }
            Some(Request::RequestDeleteRange(_)) => {}
            Some(Request::RequestTxn(inner)) => form(inner, ops_max - widest)?,
            None => return Err(Error::KeyNotFound),
        }
    }
    Ok(())
}

/// Keys that a list of operations puts, and intervals that it deletes.
type Writes = (BTreeSet<Bytes>, Vec<(Bytes, Bytes)>);

fn writes(ops: &[pb::RequestOp]) -> Result<Writes, Error> {
    let mut puts = BTreeSet::new();
    let mut deletes = Vec::new();
    for op in ops {
        if let Some(Request::RequestDeleteRange(delete)) = &op.request {
            deletes.push((delete.key.clone(), delete.range_end.clone()));
        }
    }
    let deleted = |deletes: &[(Bytes, Bytes)], key: &Bytes| {
        deletes.iter().any(|(from, to)| match to.as_ref() {
            [] => key == from,
            // "To the end" is not seen here.
            to => from <= key && key.as_ref() < to,
        })
    };
    for op in ops {
        let Some(Request::RequestTxn(inner)) = &op.request else {
            continue;
        };
        let (then_puts, then_deletes) = writes(&inner.success)?;
        let (else_puts, else_deletes) = writes(&inner.failure)?;
        // The branches exclude each other, so both may put a key; the rest of the list may not put it too.
        for key in then_puts.union(&else_puts) {
            if !puts.insert(key.clone()) || deleted(&deletes, key) {
                return Err(Error::DuplicateKey);
            }
        }
        deletes.extend(then_deletes);
        deletes.extend(else_deletes);
    }
    for op in ops {
        if let Some(Request::RequestPut(put)) = &op.request
            && (!puts.insert(put.key.clone()) || deleted(&deletes, &put.key))
        {
            return Err(Error::DuplicateKey);
        }
    }
    Ok((puts, deletes))
}
