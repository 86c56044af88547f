//! Who this member is: from its data, from the flags of a new cluster, or from the members of the cluster it joins.
//!
//!     data with an identity                       that one, whatever the flags say
//!     none, --initial-cluster-state=new           a founder: ids derived from the flags, equal on all founders
//!     none, --initial-cluster-state=existing      the live members are asked who has these peer URLs
//!
//! Promises: a founder that lost its data does not come back as if it had never been; a joining member needs no exact list of the others.
//!
//! etcd: server/etcdserver/bootstrap.go, server/etcdserver/cluster_util.go.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ballast_api::ballastpeerpb::MembersRequest;
use ballast_api::ballastpeerpb::peer_client::PeerClient;
use ballast_api::etcdserverpb::Member;
use ballast_storage::mvcc::Store;
use ballast_storage::schema::{Table, meta};
use ballast_storage::{LogPosition, StorageError};
use bytes::Bytes;
use prost::Message;

use crate::cluster;
use crate::config::Config;
use crate::config::urls::Url;
use crate::peer::{Dial, channel};
use crate::tls::Tls;

/// How often a cluster to join is asked, and how long one answer may take. Names may resolve late, and members start together.
const JOIN_ATTEMPTS_MAX: u32 = 60;
const JOIN_RETRY: Duration = Duration::from_secs(1);
const ANSWER_MAX: Duration = Duration::from_secs(3);

/// Why a member does not know who it is.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("{path} holds entries but no cluster and member id")]
    NoIdentity { path: PathBuf },
    #[error("member {id:x} has already been bootstrapped")]
    AlreadyBootstrapped { id: u64 },
    #[error(
        "--initial-cluster-state=existing: no member of the cluster has the peer URL {urls}; add it with `member add` first"
    )]
    NotAdded { urls: String },
    #[error(
        "--initial-cluster-state=existing: cannot fetch cluster info from peer urls: none of {urls} answers"
    )]
    NobodyAnswers { urls: String },
    #[error(
        "--initial-cluster-state=existing needs data, or another member in --initial-cluster to ask"
    )]
    NobodyToAsk,
}

/// Who this member is.
#[derive(Clone, Debug)]
pub struct Identity {
    pub cluster_id: u64,
    pub member_id: u64,
    /// With the others in the list of members it makes the group, unless there is one.
    pub founds: bool,
    /// Members that are known before the first entry is applied.
    pub known: Vec<Member>,
}

/// From the store, or, for a new member, from elsewhere: then it is written there.
pub async fn identity(
    config: &Config,
    tls: &Arc<Tls>,
    store: &Store,
    path: &Path,
) -> Result<Identity, BootstrapError> {
    if let Some(identity) = stored(config, store)? {
        return Ok(identity);
    }
    if store.applied() != LogPosition::default() {
        return Err(BootstrapError::NoIdentity {
            path: path.to_owned(),
        });
    }
    let identity = if config.initial_cluster_is_new {
        found(config, tls).await?
    } else {
        join(config, tls).await?
    };
    remember(store, &identity)?;
    tracing::info!(
        cluster_id = %format!("{:x}", identity.cluster_id),
        local_member_id = %format!("{:x}", identity.member_id),
        "starting local member"
    );
    Ok(identity)
}

/// Writes who a new member is, and of a founder also with whom it begins. Blocking.
pub fn remember(store: &Store, identity: &Identity) -> Result<(), StorageError> {
    let mut txn = store.begin(LogPosition::default());
    let bytes = |id: u64| Bytes::copy_from_slice(&id.to_be_bytes());
    txn.table_put(Table::Meta, meta::CLUSTER_ID, bytes(identity.cluster_id));
    txn.table_put(Table::Meta, meta::MEMBER_ID, bytes(identity.member_id));
    if identity.founds {
        for member in &identity.known {
            txn.table_put(
                Table::Member,
                &member.id.to_be_bytes(),
                member.encode_to_vec().into(),
            );
        }
    }
    txn.commit();
    store.flush().map(drop)
}

fn stored(config: &Config, store: &Store) -> Result<Option<Identity>, BootstrapError> {
    let stored = store.table(Table::Meta)?;
    let id = |name: &[u8]| {
        let (_, value) = stored.iter().find(|(key, _)| key == name)?;
        Some(u64::from_be_bytes(value.as_ref().try_into().ok()?))
    };
    let (Some(cluster_id), Some(member_id)) = (id(meta::CLUSTER_ID), id(meta::MEMBER_ID)) else {
        return Ok(None);
    };
    if config.force_new_cluster {
        forget_others(store, member_id)?;
    }
    let own = member_id.to_be_bytes();
    let is_listed = store
        .table(Table::Member)?
        .iter()
        .any(|(id, _)| id[..] == own);
    Ok(Some(Identity {
        cluster_id,
        member_id,
        // One that joins has an empty list until it hears from the others.
        founds: is_listed,
        known: Vec::new(),
    }))
}

/// The founding members are the state before the first entry, equal on all of them.
async fn found(config: &Config, tls: &Arc<Tls>) -> Result<Identity, BootstrapError> {
    let founders = cluster::founders(&config.initial_cluster, &config.initial_cluster_token);
    let ids: Vec<u64> = founders.iter().map(|member| member.id).collect();
    let own = founders
        .iter()
        .find(|member| member.name == config.name)
        .map_or(0, |member| member.id);
    let cluster_id = cluster::cluster_id(&ids);
    let asked = ask_each(others(config), tls).await;
    let started = asked
        .iter()
        .filter(|known| known.cluster_id == cluster_id)
        .flat_map(|known| &known.members)
        .any(|member| member.id == own && !member.client_ur_ls.is_empty());
    if started {
        return Err(BootstrapError::AlreadyBootstrapped { id: own });
    }
    Ok(Identity {
        cluster_id,
        member_id: own,
        founds: true,
        // Name and client URLs are published once the member runs, as etcd does.
        known: founders
            .into_iter()
            .map(|member| Member {
                name: String::new(),
                ..member
            })
            .collect(),
    })
}

async fn join(config: &Config, tls: &Arc<Tls>) -> Result<Identity, BootstrapError> {
    let own: Vec<String> = texts(&config.advertise_peer_urls);
    let others = others(config);
    if others.is_empty() {
        return Err(BootstrapError::NobodyToAsk);
    }
    let asked = texts(&others).join(",");
    let mut answered = false;
    for attempt in 0..JOIN_ATTEMPTS_MAX {
        if attempt > 0 {
            tokio::time::sleep(JOIN_RETRY).await;
        }
        for known in ask_each(others.clone(), tls).await {
            // One that waits to join itself knows nobody.
            if known.members.is_empty() {
                continue;
            }
            answered = true;
            let me = known
                .members
                .iter()
                .find(|member| member.peer_ur_ls.iter().any(|url| own.contains(url)));
            if let Some(me) = me {
                return Ok(Identity {
                    cluster_id: known.cluster_id,
                    member_id: me.id,
                    founds: false,
                    known: known.members,
                });
            }
        }
        if answered {
            break;
        }
        tracing::warn!(urls = %asked, "no member of the cluster to join answers yet");
    }
    if answered {
        return Err(BootstrapError::NotAdded {
            urls: own.join(","),
        });
    }
    Err(BootstrapError::NobodyAnswers { urls: asked })
}

/// What a member says of its cluster.
struct KnownCluster {
    cluster_id: u64,
    members: Vec<Member>,
}

/// The peer URLs of all but this member.
fn others(config: &Config) -> Vec<Url> {
    let others = config
        .initial_cluster
        .iter()
        .filter(|(name, _)| **name != config.name);
    others.flat_map(|(_, urls)| urls.clone()).collect()
}

/// Those who answer, all asked at once.
async fn ask_each(urls: Vec<Url>, tls: &Arc<Tls>) -> Vec<KnownCluster> {
    let asked = urls.into_iter().map(|url| async move {
        match tokio::time::timeout(ANSWER_MAX, ask(&url, tls)).await {
            Ok(Ok(known)) => Some(known),
            Ok(Err(error)) => {
                tracing::debug!(%url, %error, "a member does not say who is in its cluster");
                None
            }
            Err(_) => None,
        }
    });
    let answers = futures::future::join_all(asked).await;
    answers.into_iter().flatten().collect()
}

async fn ask(url: &Url, tls: &Arc<Tls>) -> Result<KnownCluster, tonic::Status> {
    let dial = Dial::new(Some(Arc::clone(tls)), ANSWER_MAX);
    let channel = channel::open(std::slice::from_ref(url), &dial);
    let reply = PeerClient::new(channel).members(MembersRequest {}).await?;
    let reply = reply.into_inner();
    Ok(KnownCluster {
        cluster_id: reply.cluster_id,
        members: reply.members,
    })
}

/// Leaves this member alone in the list of members; the others' ids are never used again.
fn forget_others(store: &Store, member_id: u64) -> Result<(), StorageError> {
    let at = store.applied();
    let members = store.table(Table::Member)?;
    let mut txn = store.begin(at);
    for (id, _) in members {
        if id != member_id.to_be_bytes().as_slice() {
            txn.table_delete(Table::Member, &id);
            txn.table_put(Table::MemberRemoved, &id, Bytes::new());
        }
    }
    txn.commit();
    // What the engine holds was synced in the log before.
    store.set_log_synced(at.index);
    store.flush().map(drop)
}

fn texts(urls: &[Url]) -> Vec<String> {
    urls.iter().map(ToString::to_string).collect()
}
