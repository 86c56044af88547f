//! What a request would cost of the quota, and the alarms' effect on what is applied.
//!
//! The size of the database is this member's own and must not change the replicated state: it is compared in `rpc/quota.rs`
//! before proposing. Here only the alarm counts, which is replicated.
//!
//! etcd: server/storage/quota.go, server/etcdserver/apply/{capped,corrupt}.go.

use ballast_api::etcdserverpb as pb;
use pb::request_op::Request;

use super::{Alarms, ApplyError};

/// etcd's estimate for a key's metadata.
const KEY_OVERHEAD_BYTES: u64 = 256;
/// etcd's estimate for a lease.
pub const LEASE_COST_BYTES: u64 = 64;

pub fn put_cost(request: &pb::PutRequest) -> u64 {
    KEY_OVERHEAD_BYTES + request.key.len() as u64 + request.value.len() as u64
}

/// The dearer branch; 0 for a transaction that puts nothing.
pub fn txn_cost(request: &pb::TxnRequest) -> u64 {
    ops_cost(&request.success).max(ops_cost(&request.failure))
}

fn ops_cost(ops: &[pb::RequestOp]) -> u64 {
    ops.iter()
        .map(|op| match &op.request {
            Some(Request::RequestPut(put)) => put_cost(put),
            Some(Request::RequestTxn(txn)) => txn_cost(txn),
            _ => 0,
        })
        .sum()
}

/// Refuses what an active alarm forbids.
pub fn check_alarms(alarms: &Alarms, request: &pb::InternalRaftRequest) -> Result<(), ApplyError> {
    if alarms.corrupt() {
        let refused = request.put.is_some()
            || request.range.is_some()
            || request.delete_range.is_some()
            || request.txn.is_some()
            || request.compaction.is_some()
            || request.lease_grant.is_some()
            || request.lease_revoke.is_some();
        if refused {
            return Err(ApplyError::Corrupt);
        }
    }
    if alarms.no_space() {
        let refused = request.put.is_some()
            || request.lease_grant.is_some()
            || request.txn.as_ref().is_some_and(|txn| txn_cost(txn) > 0);
        if refused {
            return Err(ApplyError::NoSpace);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(bytes: usize) -> pb::RequestOp {
        pb::RequestOp {
            request: Some(Request::RequestPut(pb::PutRequest {
                key: "k".into(),
                value: vec![0; bytes].into(),
                ..Default::default()
            })),
        }
    }

    #[test]
    fn a_txn_costs_its_dearer_branch_nested_ones_included() {
        let inner = pb::TxnRequest {
            success: vec![put(1000)],
            ..Default::default()
        };
        let txn = pb::TxnRequest {
            success: vec![put(10)],
            failure: vec![pb::RequestOp {
                request: Some(Request::RequestTxn(inner)),
            }],
            ..Default::default()
        };
        assert_eq!(txn_cost(&txn), 256 + 1 + 1000);
        assert_eq!(txn_cost(&pb::TxnRequest::default()), 0);
    }
}
