//! What the log says of the cluster itself: members' names and client URLs, and the cluster version.
//!
//! etcd: server/etcdserver/api/membership.

use ballast_api::membershippb;
use ballast_storage::mvcc::WriteTxn;
use ballast_storage::schema::{Table, meta};
use bytes::Bytes;
use prost::Message;

use crate::cluster::Cluster;

/// A member's name and client URLs. Of a member that is not known nothing is kept.
pub(super) fn set_attributes(
    txn: &mut WriteTxn<'_>,
    cluster: &Cluster,
    request: &membershippb::ClusterMemberAttrSetRequest,
) {
    let Some(attributes) = &request.member_attributes else {
        return;
    };
    let member = cluster.set_attributes(
        request.member_id,
        attributes.name.clone(),
        attributes.client_urls.clone(),
    );
    if let Some(member) = member {
        txn.table_put(
            Table::Member,
            &member.id.to_be_bytes(),
            member.encode_to_vec().into(),
        );
    }
}

pub(super) fn set_version(
    txn: &mut WriteTxn<'_>,
    cluster: &Cluster,
    request: &membershippb::ClusterVersionSetRequest,
) {
    txn.table_put(
        Table::Meta,
        meta::CLUSTER_VERSION,
        Bytes::copy_from_slice(request.ver.as_bytes()),
    );
    cluster.set_version(&request.ver);
}
