//! Committed entries, handed to `apply` in log order.
//!
//! A snapshot is a marker: the engine flushed up to an applied position. Its bytes are made when somebody asks (`snapshot.rs` for another member,
//! `rpc/maintenance.rs` for a client).
//! Not here: what a request does (`apply`), deletion of log segments (`ballast_storage::wal`).
//!
//! etcd: the apply loop of server/etcdserver/server.go.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ballast_storage::LogPosition;
use ballast_storage::mvcc::{InstallOptions, Receiving, Store};
use ballast_storage::schema::{Table, meta};
use futures::{Stream, StreamExt};
use openraft::alias::{SnapshotMetaOf, SnapshotOf};
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder, StoredMembership};
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

use crate::apply::{Apply, GroupMember};
use crate::raft::command::{
    CommandError, LogId, PeerNode, Reply, Stored, TypeConfig, decode_stored, encode_stored, log_id,
    position,
};
use crate::raft::forward::Waiting;
use crate::raft::node::{ApplyObserver, End, Failure};
use crate::tasks::blocking;

/// Entries after which watchers are told, even if more are at hand: a millisecond's work or less.
const SETTLE_ENTRIES: u32 = 64;

/// A snapshot's content.
#[derive(Clone, Debug)]
pub enum Content {
    /// The engine is it: the bytes are made when they are sent.
    Engine,
    /// What another member sent, until it is installed.
    Received(Arc<Mutex<Option<Receiving>>>),
}

impl Content {
    pub fn received(receiving: Receiving) -> Self {
        Self::Received(Arc::new(Mutex::new(Some(receiving))))
    }
}

type Snapshot = SnapshotOf<TypeConfig, Content>;

/// Time for the answer to reach the leader, before this process begins anew.
const RESTART_DELAY: Duration = Duration::from_millis(200);

/// The replica, as the library sees it.
#[derive(Debug)]
pub struct StateMachine {
    store: Arc<Store>,
    apply: Arc<dyn Apply>,
    observer: Arc<dyn ApplyObserver>,
    /// Who waits for a proposal that was passed on to the leader.
    waiting: Arc<Waiting>,
    membership: Stored,
    current: Arc<Mutex<Option<SnapshotMetaOf<TypeConfig>>>>,
    /// The last index applied, for those who wait.
    applied: watch::Sender<u64>,
    failure: Failure,
    /// A snapshot was installed: what is in memory is of the past.
    superseded: bool,
}

impl StateMachine {
    pub(crate) fn new(
        store: Arc<Store>,
        apply: Arc<dyn Apply>,
        observer: Arc<dyn ApplyObserver>,
        waiting: Arc<Waiting>,
        failure: Failure,
    ) -> Result<Self, StateError> {
        let membership = store
            .table(Table::Meta)?
            .into_iter()
            .find(|(name, _)| name == meta::RAFT_MEMBERSHIP)
            .map(|(_, bytes)| decode_stored(&bytes))
            .transpose()?
            .unwrap_or_default();
        let (applied, _) = watch::channel(store.applied().index);
        Ok(Self {
            store,
            apply,
            observer,
            waiting,
            membership,
            current: Arc::default(),
            applied,
            failure,
            superseded: false,
        })
    }

    pub(crate) fn applied(&self) -> watch::Receiver<u64> {
        self.applied.subscribe()
    }

    fn apply_membership(&mut self, at: LogPosition, id: LogId, membership: Membership) {
        self.membership = StoredMembership::new(Some(id), membership);
        let members = group(self.membership.membership());
        self.apply
            .apply_membership(at, &members, encode_stored(&self.membership));
    }
}

/// The membership without the library's types.
pub(crate) fn group(membership: &Membership) -> Vec<GroupMember> {
    let voters: BTreeSet<u64> = membership.voter_ids().collect();
    membership
        .nodes()
        .map(|(id, node)| GroupMember {
            id: *id,
            peer_urls: node.urls.clone(),
            is_learner: !node.votes && !voters.contains(id),
        })
        .collect()
}

type Membership = openraft::Membership<u64, PeerNode>;

/// The engine's record of the group cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error(transparent)]
    Storage(#[from] ballast_storage::StorageError),
    #[error("the membership in the engine: {0}")]
    Membership(#[from] CommandError),
}

impl RaftStateMachine<TypeConfig> for StateMachine {
    type SnapshotData = Content;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, Stored), io::Error> {
        Ok((log_id(self.store.applied()), self.membership.clone()))
    }

    async fn apply<Strm>(&mut self, mut entries: Strm) -> Result<(), io::Error>
    where
        Strm: Stream<Item = Result<EntryResponder<TypeConfig>, io::Error>> + Unpin + OptionalSend,
    {
        if self.superseded {
            std::future::pending::<()>().await;
        }
        let mut last = None;
        let mut unsettled = 0;
        while let Some(next) = entries.next().await {
            let (entry, responder) = match next {
                Ok(next) => next,
                Err(error) => {
                    self.apply.settle();
                    return Err(error);
                }
            };
            let at = position(&entry.log_id);
            let mut request = None;
            let reply = match entry.payload {
                EntryPayload::Blank => {
                    self.apply.apply_empty(at);
                    Reply(None)
                }
                EntryPayload::Normal(command) => {
                    let mut apply = || self.apply.apply(at, &command.0);
                    let applied = self.observer.around(&command.0, &mut apply);
                    request = Some(command.0);
                    Reply(Some(applied))
                }
                EntryPayload::Membership(membership) => {
                    self.apply_membership(at, entry.log_id, membership);
                    Reply(None)
                }
            };
            debug_assert_eq!(self.store.applied(), at, "apply moves the position");
            last = Some(at.index);
            // Whoever is answered finds the index in the status; those who wait for one are woken once, below.
            self.applied.send_if_modified(|applied| {
                *applied = at.index;
                false
            });
            match (responder, request, &reply.0) {
                (Some(responder), ..) => responder.send(reply),
                (None, Some(request), Some(applied)) => self.waiting.applied(&request, applied),
                _ => {}
            }
            unsettled += 1;
            if unsettled == SETTLE_ENTRIES {
                unsettled = 0;
                self.apply.settle();
            }
        }
        self.apply.settle();
        if let Some(last) = last {
            self.applied.send_replace(last);
        }
        if let Some(error) = self.store.failure() {
            self.failure.set(&error);
            return Err(io::Error::other(error));
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        Builder {
            store: Arc::clone(&self.store),
            meta: SnapshotMetaOf::<TypeConfig> {
                last_log_id: log_id(self.store.applied()),
                last_membership: self.membership.clone(),
            },
            current: Arc::clone(&self.current),
            failure: self.failure.clone(),
        }
    }

    /// Makes a database of it. What is in memory is of the past from then on: nothing is applied to it any more, and the process begins anew.
    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMetaOf<TypeConfig>,
        snapshot: Content,
    ) -> Result<(), io::Error> {
        let Content::Received(received) = snapshot else {
            return Err(io::Error::other("a snapshot of this member's own engine"));
        };
        let received = received.lock().take();
        let received =
            received.ok_or_else(|| io::Error::other("a snapshot that was installed before"))?;
        let store = Arc::clone(&self.store);
        let options = InstallOptions {
            applied: meta.last_log_id.as_ref().map(position).unwrap_or_default(),
            membership: encode_stored(&meta.last_membership),
        };
        crate::metrics::SNAPSHOTS_APPLYING.inc();
        let installed = blocking(move || store.install(received, &options)).await;
        crate::metrics::SNAPSHOTS_APPLYING.dec();
        installed?.map_err(|error| {
            self.failure.set(&error);
            io::Error::other(error)
        })?;
        self.superseded = true;
        let failure = self.failure.clone();
        tokio::spawn(async move {
            tokio::time::sleep(RESTART_DELAY).await;
            failure.end(End::Anew);
        });
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        Ok(self.current.lock().clone().map(|meta| Snapshot {
            meta,
            snapshot: Content::Engine,
        }))
    }
}

/// Flushes the engine up to the position it was made at.
#[derive(Debug)]
pub struct Builder {
    store: Arc<Store>,
    meta: SnapshotMetaOf<TypeConfig>,
    current: Arc<Mutex<Option<SnapshotMetaOf<TypeConfig>>>>,
    failure: Failure,
}

impl RaftSnapshotBuilder<TypeConfig> for Builder {
    type SnapshotData = Content;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        let (sender, flushed) = oneshot::channel();
        self.store.on_flushed(Box::new(move |result| {
            // Nobody waits any more when the library is shutting down.
            let _ = sender.send(result);
        }));
        let flushed = flushed.await.map_err(io::Error::other)?;
        let durable = flushed.map_err(|error| {
            self.failure.set(&error);
            io::Error::other(error)
        })?;
        // The log is purged up to the marker: it must not promise more than the engine has.
        if log_id(durable) < self.meta.last_log_id {
            return Err(io::Error::other("the engine flushed less than was applied"));
        }
        *self.current.lock() = Some(self.meta.clone());
        Ok(Snapshot {
            meta: self.meta.clone(),
            snapshot: Content::Engine,
        })
    }
}
