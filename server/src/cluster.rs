//! Who is in the cluster, as clients see it, and how ids are derived.
//!
//! Promises: changes only through apply. Not here: the Raft membership (`raft/`), which follows its own rules.
//!
//! etcd: server/etcdserver/api/membership.

use std::collections::{BTreeMap, BTreeSet};

use ballast_api::etcdserverpb::Member;
use parking_lot::RwLock;
use sha1::{Digest, Sha1};
use tokio::sync::watch;

use crate::config::urls::Url;
use crate::metrics;
use crate::version::Version;

/// The members and the cluster version.
#[derive(Debug)]
pub struct Cluster {
    pub cluster_id: u64,
    /// This member.
    pub member_id: u64,
    state: RwLock<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    members: BTreeMap<u64, Member>,
    /// Their ids are never used again.
    removed: BTreeSet<u64>,
    version: Option<String>,
    /// The version that the cluster is downgraded to.
    downgrade: Option<String>,
}

impl Cluster {
    pub fn new(cluster_id: u64, member_id: u64) -> Self {
        Self {
            cluster_id,
            member_id,
            state: RwLock::default(),
            changed: watch::channel(()).0,
        }
    }

    /// Replaces everything by what the store holds.
    pub fn load(
        &self,
        members: Vec<Member>,
        removed: Vec<u64>,
        version: Option<String>,
        downgrade: Option<String>,
    ) {
        *self.state.write() = State {
            members: by_id(members),
            removed: removed.into_iter().collect(),
            version: None,
            downgrade,
        };
        if let Some(version) = version {
            self.set_version(&version);
        }
        self.changed.send_replace(());
    }

    /// The members are these; those who were and are not among them are removed.
    pub fn set_members(&self, members: Vec<Member>) {
        let mut state = self.state.write();
        let now = by_id(members);
        let before = std::mem::replace(&mut state.members, now);
        for (id, member) in before {
            if !state.members.contains_key(&id) {
                tracing::info!(
                    removed_remote_peer_id = %format!("{id:x}"),
                    removed_remote_peer_urls = %member.peer_ur_ls.join(","),
                    "removed member"
                );
                state.removed.insert(id);
            }
        }
        drop(state);
        self.changed.send_replace(());
    }

    /// Changes with the list of members.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub fn is_removed(&self, id: u64) -> bool {
        self.state.read().removed.contains(&id)
    }

    pub fn removed(&self) -> Vec<u64> {
        self.state.read().removed.iter().copied().collect()
    }

    /// True when this member is in the list and learns only.
    pub fn is_learner(&self) -> bool {
        let state = self.state.read();
        let own = state.members.get(&self.member_id);
        own.is_some_and(|member| member.is_learner)
    }

    /// Ascending by id.
    pub fn members(&self) -> Vec<Member> {
        self.state.read().members.values().cloned().collect()
    }

    pub fn member(&self, id: u64) -> Option<Member> {
        self.state.read().members.get(&id).cloned()
    }

    /// The cluster version, once one is agreed on.
    pub fn version(&self) -> Option<String> {
        self.state.read().version.clone()
    }

    pub fn version_parsed(&self) -> Option<Version> {
        Version::parse(self.state.read().version.as_deref()?)
    }

    /// What the data may be read by: the format on disk is that of all versions a cluster can have (docs/format.md), so it follows the cluster's.
    /// Empty until that is decided, as etcd's.
    pub fn storage_version(&self) -> String {
        self.version_parsed()
            .map_or_else(String::new, |version| version.to_string())
    }

    /// Where a downgrade under way leads.
    pub fn downgrade_target(&self) -> Option<Version> {
        Version::parse(self.state.read().downgrade.as_deref()?)
    }

    pub fn set_downgrade(&self, target: Option<String>) {
        self.state.write().downgrade = target;
    }

    pub fn set_version(&self, version: &str) {
        let before = self.version_parsed().map(Version::short);
        self.state.write().version = Some(version.to_owned());
        if let Some(now) = Version::parse(version) {
            metrics::cluster_version(before.as_deref(), &now.short());
        }
    }

    /// Gives the changed member, None when it is not known.
    pub fn set_attributes(
        &self,
        id: u64,
        name: String,
        client_urls: Vec<String>,
    ) -> Option<Member> {
        let mut state = self.state.write();
        let member = state.members.get_mut(&id)?;
        member.name = name;
        member.client_ur_ls = client_urls;
        Some(member.clone())
    }
}

fn by_id(members: Vec<Member>) -> BTreeMap<u64, Member> {
    members
        .into_iter()
        .map(|member| (member.id, member))
        .collect()
}

/// The founding members, with the names the flags give them.
pub fn founders(initial_cluster: &BTreeMap<String, Vec<Url>>, token: &str) -> Vec<Member> {
    let founder = |(name, urls): (&String, &Vec<Url>)| {
        let peer_urls: Vec<String> = urls.iter().map(ToString::to_string).collect();
        Member {
            id: member_id(&peer_urls, token),
            name: name.clone(),
            peer_ur_ls: peer_urls,
            ..Default::default()
        }
    };
    initial_cluster.iter().map(founder).collect()
}

/// A founding member's id: of its peer URLs in order and the cluster's token.
pub fn member_id(peer_urls: &[String], token: &str) -> u64 {
    let mut urls: Vec<&str> = peer_urls.iter().map(String::as_str).collect();
    urls.sort_unstable();
    first_eight(&format!("{}{token}", urls.concat()).into_bytes())
}

/// The cluster's id: of the founding members' ids.
pub fn cluster_id(member_ids: &[u64]) -> u64 {
    let mut ids = member_ids.to_vec();
    ids.sort_unstable();
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_be_bytes()).collect();
    first_eight(&bytes)
}

fn first_eight(bytes: &[u8]) -> u64 {
    let digest = Sha1::digest(bytes);
    u64::from_be_bytes(digest[..8].try_into().expect("a SHA-1 digest has 20 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ids of an etcd started with defaults, well known from its documentation and logs.
    #[test]
    fn the_ids_of_a_default_etcd() {
        let member = member_id(&["http://localhost:2380".to_owned()], "etcd-cluster");
        assert_eq!(format!("{member:x}"), "8e9e05c52164694d");
        assert_eq!(format!("{:x}", cluster_id(&[member])), "cdf818194e3a8c32");
    }
}
