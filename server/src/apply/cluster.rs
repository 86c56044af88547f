//! What the log says of the cluster itself: members' names and client URLs, and the cluster version.
//!
//! etcd: server/etcdserver/api/membership.

use ballast_api::etcdserverpb::Member;
use ballast_api::membershippb;
use ballast_storage::mvcc::WriteTxn;
use ballast_storage::schema::{Table, meta};
use bytes::Bytes;
use prost::Message;

use super::GroupMember;
use crate::cluster::Cluster;
use crate::version::{self, Version};

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

/// The members are these. Whoever is not among them any more was removed, and its id is never used again.
pub(super) fn set_members(txn: &mut WriteTxn<'_>, cluster: &Cluster, members: &[GroupMember]) {
    let known = cluster.members();
    let mut now = Vec::with_capacity(members.len());
    for member in members {
        let mut row = known
            .iter()
            .find(|row| row.id == member.id)
            .cloned()
            .unwrap_or_else(|| Member {
                id: member.id,
                ..Default::default()
            });
        if !member.peer_urls.is_empty() {
            row.peer_ur_ls.clone_from(&member.peer_urls);
        }
        row.is_learner = member.is_learner;
        txn.table_put(
            Table::Member,
            &row.id.to_be_bytes(),
            row.encode_to_vec().into(),
        );
        now.push(row);
    }
    let gone = known
        .iter()
        .filter(|row| members.iter().all(|member| member.id != row.id));
    for row in gone {
        txn.table_delete(Table::Member, &row.id.to_be_bytes());
        txn.table_put(Table::MemberRemoved, &row.id.to_be_bytes(), Bytes::new());
    }
    cluster.set_members(now);
}

/// What the cluster speaks from here on, this build may not understand: it stops before it has taken the entry in, as it would at its next start.
pub(super) fn stop_if_outgrown(request: &membershippb::ClusterVersionSetRequest) {
    if let Some(determined) = Version::parse(&request.ver).filter(|ver| *ver > Version::own()) {
        version::stop_as_too_old(determined);
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

/// A downgrade that is asked for, or the end of one.
pub(super) fn set_downgrade(
    txn: &mut WriteTxn<'_>,
    cluster: &Cluster,
    request: &membershippb::DowngradeInfoSetRequest,
) {
    if request.enabled {
        let json = format!(r#"{{"target-version":"{}","enabled":true}}"#, request.ver);
        txn.table_put(Table::Meta, meta::DOWNGRADE, json.into());
        cluster.set_downgrade(Some(request.ver.clone()));
    } else {
        txn.table_delete(Table::Meta, meta::DOWNGRADE);
        cluster.set_downgrade(None);
    }
}
