//! Grant, revoke and checkpoint of leases: the lessor's table and the record in one batch.
//!
//! The time to live was raised to the minimum before it was proposed, since the minimum is configuration.
//!
//! etcd: the lessor's Grant, Revoke and Checkpoint.

use ballast_api::etcdserverpb as pb;
use ballast_api::leasepb;
use ballast_storage::mvcc::WriteTxn;
use ballast_storage::schema::Table;
use prost::Message;

use super::{ApplyError, Failure};
use crate::lease::Lessor;

pub(super) fn grant(
    txn: &mut WriteTxn<'_>,
    lessor: &Lessor,
    request: &pb::LeaseGrantRequest,
) -> Result<pb::LeaseGrantResponse, Failure> {
    let lease = lessor.grant(request.id, request.ttl)?;
    store(txn, &lease);
    crate::metrics::LEASES_GRANTED.inc();
    crate::metrics::LEASE_TTLS.observe(lease.ttl as f64);
    Ok(pb::LeaseGrantResponse {
        header: None,
        id: lease.id,
        ttl: lease.ttl,
        error: String::new(),
    })
}

/// Deletes the lease's keys, in order, and the lease: one revision, or none when it had no keys.
pub(super) fn revoke(
    txn: &mut WriteTxn<'_>,
    lessor: &Lessor,
    request: pb::LeaseRevokeRequest,
) -> Result<pb::LeaseRevokeResponse, Failure> {
    let keys = lessor.keys(request.id).ok_or(ApplyError::LeaseNotFound)?;
    for key in &keys {
        txn.delete_range(key, &[])?;
    }
    txn.table_delete(Table::Lease, &request.id.cast_unsigned().to_be_bytes());
    lessor.remove(request.id);
    crate::metrics::LEASES_REVOKED.inc();
    Ok(pb::LeaseRevokeResponse { header: None })
}

pub(super) fn checkpoint(
    txn: &mut WriteTxn<'_>,
    lessor: &Lessor,
    request: &pb::LeaseCheckpointRequest,
) {
    for checkpoint in &request.checkpoints {
        if let Some(lease) = lessor.checkpoint(checkpoint.id, checkpoint.remaining_ttl) {
            store(txn, &lease);
        }
    }
}

fn store(txn: &mut WriteTxn<'_>, lease: &leasepb::Lease) {
    txn.table_put(
        Table::Lease,
        &lease.id.cast_unsigned().to_be_bytes(),
        lease.encode_to_vec().into(),
    );
}
