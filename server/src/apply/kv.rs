//! Put, delete and compaction on the transaction of one entry.
//!
//! etcd: server/etcdserver/txn/{put,delete}.go.

use ballast_api::etcdserverpb as pb;
use ballast_api::mvccpb::KeyValue;
use ballast_storage::mvcc::{RangeOptions, View, WriteTxn};

use super::range::Ranged;
use super::{ApplyError, Failure};
use crate::lease::Lessor;

/// What a put must find before it is carried out, judged on the state before the entry.
pub(super) fn check_put(
    view: &View,
    lessor: &Lessor,
    request: &pb::PutRequest,
) -> Result<(), Failure> {
    if request.lease != 0 && !lessor.exists(request.lease) {
        return Err(ApplyError::LeaseNotFound.into());
    }
    if (request.ignore_value || request.ignore_lease) && current(view, &request.key)?.is_none() {
        return Err(ApplyError::KeyNotFound.into());
    }
    Ok(())
}

/// Carries out a put that [`check_put`] let pass.
pub(super) fn put(
    txn: &mut WriteTxn<'_>,
    lessor: &Lessor,
    request: &pb::PutRequest,
) -> Result<pb::PutResponse, Failure> {
    let before = if request.prev_kv || request.ignore_value || request.ignore_lease {
        crate::metrics::RANGES.inc();
        current(txn, &request.key)?
    } else {
        None
    };
    let mut value = request.value.clone();
    let mut lease = request.lease;
    if request.ignore_value || request.ignore_lease {
        // Within one transaction the key may have gone since the check; etcd would crash here.
        let before = before.as_ref().ok_or(ApplyError::KeyNotFound)?;
        if request.ignore_value {
            value = before.value.clone();
        }
        if request.ignore_lease {
            lease = before.lease;
        }
    }
    let touched = txn.put(request.key.clone(), value, lease)?;
    lessor.moved(&touched.key, touched.old_lease, lease);
    crate::metrics::PUTS.inc();
    crate::metrics::PUT_BYTES.add((request.key.len() + request.value.len()) as i64);
    Ok(pb::PutResponse {
        header: Some(super::header_at(txn.revision())),
        prev_kv: before.filter(|_| request.prev_kv),
    })
}

pub(super) fn delete_range(
    txn: &mut WriteTxn<'_>,
    lessor: &Lessor,
    request: &pb::DeleteRangeRequest,
) -> Result<pb::DeleteRangeResponse, Failure> {
    let prev_kvs = if request.prev_kv {
        crate::metrics::RANGES.inc();
        txn.range(&request.key, &request.range_end, &RangeOptions::default())?
            .kvs
    } else {
        Vec::new()
    };
    let touched = txn.delete_range(&request.key, &request.range_end)?;
    for one in &touched {
        lessor.moved(&one.key, one.old_lease, 0);
    }
    crate::metrics::DELETES.inc();
    Ok(pb::DeleteRangeResponse {
        header: Some(super::header_at(txn.revision())),
        deleted: touched.len() as i64,
        prev_kvs,
    })
}

/// The key as it is now.
fn current(source: &impl Ranged, key: &[u8]) -> Result<Option<KeyValue>, Failure> {
    Ok(source
        .range_raw(key, &[], &RangeOptions::default())?
        .kvs
        .pop())
}
