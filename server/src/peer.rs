//! The other members: where they are, connections to them, and who may speak.
//!
//!     channel.rs   one connection, by the URLs of a member      identity.rs  who asks, and whether of this cluster
//!
//!     probe.rs     who answers, and how quickly
//!
//! Promises: log, heartbeats and votes, snapshots, and requests passed on have a connection each, so that none waits behind another.
//! Not here: what Raft says (`raft/transport.rs`, `raft/receive.rs`), what the others ask of this member (`rpc/peer.rs`).
//!
//! etcd: server/etcdserver/api/rafthttp.

pub mod channel;
pub mod identity;
pub mod probe;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_api::ballastpeerpb::peer_client::PeerClient;
use parking_lot::RwLock;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;

use crate::clock::Clock;
use crate::config::urls::Url;
use crate::metrics::peer::PeerMetrics;
use crate::tls::Tls;
use channel::{Network, OperatingSystem};
use identity::{Introduce, Whose};

/// A member as somebody to ask.
pub type Client = PeerClient<InterceptedService<Channel, Introduce>>;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Log,
    /// Heartbeats, votes, transfers.
    Control,
    Snapshot,
    /// Proposals, reads, leases and membership changes passed on to the leader.
    Forward,
}

const PURPOSES: [Purpose; 4] = [
    Purpose::Log,
    Purpose::Control,
    Purpose::Snapshot,
    Purpose::Forward,
];

/// How connections are made.
#[derive(Clone, Debug)]
pub struct Dial {
    /// None where no peer is asked over TLS.
    pub tls: Option<Arc<Tls>>,
    /// A peer that does not answer a ping within this is gone.
    pub ping_timeout: Duration,
    /// What they are made over.
    pub network: Arc<dyn Network>,
}

impl Dial {
    /// Over the operating system's network.
    pub fn new(tls: Option<Arc<Tls>>, ping_timeout: Duration) -> Self {
        Self {
            tls,
            ping_timeout,
            network: Arc::new(OperatingSystem),
        }
    }
}

/// The other members, by id.
#[derive(Debug)]
pub struct Peers {
    pub whose: Whose,
    dial: Dial,
    clock: Clock,
    known: RwLock<HashMap<u64, Known>>,
}

#[derive(Debug)]
struct Known {
    urls: Vec<String>,
    clients: Vec<Client>,
    /// When the connection to it began to work.
    active_since: Option<Instant>,
    /// It has not answered since a request to it failed.
    unanswered: bool,
    metrics: PeerMetrics,
}

impl Peers {
    pub fn new(whose: Whose, dial: Dial, clock: Clock) -> Self {
        Self {
            whose,
            dial,
            clock,
            known: RwLock::default(),
        }
    }

    /// Says where a member is. Its connections are made anew when that is news.
    pub fn set(&self, id: u64, urls: &[String]) {
        if id == self.whose.member_id || urls.is_empty() {
            return;
        }
        let mut known = self.known.write();
        if known.get(&id).is_some_and(|peer| peer.urls == urls) {
            return;
        }
        let parsed: Vec<Url> = urls.iter().filter_map(|url| Url::parse(url).ok()).collect();
        let clients = PURPOSES
            .iter()
            .map(|_| {
                let channel = channel::open(&parsed, &self.dial);
                let introduce = Introduce::new(self.whose, id);
                PeerClient::with_interceptor(channel, introduce)
                    .max_decoding_message_size(usize::MAX)
                    .max_encoding_message_size(usize::MAX)
            })
            .collect();
        tracing::info!(remote_peer_id = %format!("{id:x}"), urls = %urls.join(","), "added remote peer");
        known.insert(
            id,
            Known {
                urls: urls.to_vec(),
                clients,
                active_since: None,
                unanswered: false,
                metrics: PeerMetrics::new(self.whose.member_id, id),
            },
        );
    }

    pub fn remove(&self, id: u64) {
        if let Some(peer) = self.known.write().remove(&id) {
            if peer.active_since.is_some() {
                peer.metrics.became_inactive();
            }
            tracing::info!(removed_remote_peer_id = %format!("{id:x}"), "removed remote peer");
        }
    }

    /// Forgets all but these.
    pub fn retain(&self, ids: &dyn Fn(u64) -> bool) {
        let gone: Vec<u64> = self
            .known
            .read()
            .keys()
            .copied()
            .filter(|id| !ids(*id))
            .collect();
        for id in gone {
            self.remove(id);
        }
    }

    /// None when nobody said where it is.
    pub fn client(&self, id: u64, purpose: Purpose) -> Option<Client> {
        let known = self.known.read();
        let slot = PURPOSES.iter().position(|other| *other == purpose)?;
        Some(known.get(&id)?.clients[slot].clone())
    }

    pub fn ids(&self) -> Vec<u64> {
        self.known.read().keys().copied().collect()
    }

    /// A member answered.
    pub fn heard(&self, id: u64) {
        self.reachable(id, true);
    }

    /// A member asked. That says nothing of the way to it: where a request to it failed, only an answer makes up for that.
    pub fn asked_by(&self, id: u64) {
        self.reachable(id, false);
    }

    fn reachable(&self, id: u64, answered: bool) {
        let is_news = |peer: &Known| peer.active_since.is_none() && (answered || !peer.unanswered);
        if !self.known.read().get(&id).is_some_and(is_news) {
            return;
        }
        if let Some(peer) = self.known.write().get_mut(&id)
            && is_news(peer)
        {
            peer.active_since = Some(self.clock.now());
            peer.unanswered = false;
            peer.metrics.became_active();
            tracing::info!(peer_id = %format!("{id:x}"), "peer became active");
        }
    }

    /// A member did not answer.
    pub fn lost(&self, id: u64, why: &dyn std::fmt::Display) {
        if let Some(peer) = self.known.write().get_mut(&id) {
            peer.unanswered = true;
            peer.metrics.send_failed();
            if peer.active_since.take().is_some() {
                peer.metrics.became_inactive();
                tracing::warn!(peer_id = %format!("{id:x}"), error = %why, "peer became inactive (message send to peer failed)");
            }
        }
    }

    /// Counts bytes on their way to a member, and from it.
    pub fn sent(&self, id: u64, bytes: usize) {
        if let Some(peer) = self.known.read().get(&id) {
            peer.metrics.sent(bytes);
        }
    }

    pub fn received(&self, id: u64, bytes: usize) {
        if let Some(peer) = self.known.read().get(&id) {
            peer.metrics.received(bytes);
        }
    }

    fn answered_in(&self, id: u64, took: Duration) {
        if let Some(peer) = self.known.read().get(&id) {
            peer.metrics.answered_in(took);
        }
    }

    /// Since when the member is reachable; None when it is not.
    pub fn active_since(&self, id: u64) -> Option<Instant> {
        self.known.read().get(&id)?.active_since
    }

    /// How many are reachable.
    pub fn active(&self) -> usize {
        let known = self.known.read();
        known
            .values()
            .filter(|peer| peer.active_since.is_some())
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where one direction alone works, the member would come and go with every message.
    #[tokio::test]
    async fn who_asks_and_does_not_answer_is_not_reachable() {
        let whose = Whose {
            cluster_id: 1,
            member_id: 2,
        };
        let dial = Dial::new(None, Duration::from_secs(1));
        let peers = Peers::new(whose, dial, Clock::default());
        peers.set(3, &["http://127.0.0.1:1".to_owned()]);
        peers.asked_by(3);
        assert_eq!(peers.active(), 1);
        peers.lost(3, &"refused");
        peers.asked_by(3);
        assert_eq!(peers.active(), 0);
        peers.heard(3);
        assert_eq!(peers.active(), 1);
    }
}
