//! `propose`, `read_barrier`, who leads, and when the log is purged.
//!
//! Promises: an answered proposal is committed and applied here. A read after `read_barrier` sees every write that was answered
//! before the barrier was asked for.
//! Not here: what commands mean (`apply`), bytes (`command.rs`).
//!
//! etcd: server/etcdserver/v3_server.go (the proposing half), server/etcdserver/raft.go.

use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use ballast_api::ballastpeerpb::refusal::Reason;
use ballast_api::etcdserverpb::InternalRaftRequest;
use ballast_storage::StorageError;
use ballast_storage::mvcc::Store;
use ballast_storage::runner::{Runner, Threads};
use ballast_storage::wal::{Identity, SEGMENT_BYTES, Unobserved, Wal, WalObserver, WalOptions};
use openraft::errors::{ClientWriteError, RaftError};
use openraft::impls::ProgressResponder;
use openraft::raft::ClientWriteResult;
use openraft::{Config, Raft, SnapshotPolicy, StepDownPolicy};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::apply::{Applied, Apply};
use crate::clock::Clock;
use crate::peer::identity::Whose;
use crate::peer::{Dial, Peers};
use crate::raft::barrier::Barrier;
use crate::raft::command::{Command, Nodes, PeerNode, TypeConfig, committed_leader, position};
use crate::raft::forward::{Forwarder, Outcome, Waiting, request_id};
use crate::raft::leadership::Heard;
use crate::raft::lease_read::{Fresh, LeaseReads, trust};
use crate::raft::log_store::LogStore;
use crate::raft::open::open_parts;
use crate::raft::snapshot::Sending;
use crate::raft::state_machine::{StateError, StateMachine};
use crate::raft::transport::Transport;
use crate::tasks::blocking;

/// Entries committed but not applied before proposals are refused (etcd: maxGapBetweenApplyAndCommitIndex).
const APPLY_GAP_MAX: u64 = 5000;

/// A read that waits longer for its barrier is counted as slow (etcd: readIndexRetryTime).
const SLOW_BARRIER: Duration = Duration::from_millis(500);

/// Between a refusal and the next attempt at whoever leads then.
const REFUSED_RETRY: Duration = Duration::from_millis(10);

/// Called around each command that is applied: the place to time it, since `apply` reads no clock.
pub trait ApplyObserver: Send + Sync + std::fmt::Debug {
    fn around(
        &self,
        _request: &InternalRaftRequest,
        apply: &mut dyn FnMut() -> Applied,
    ) -> Applied {
        apply()
    }
}

impl ApplyObserver for Unobserved {}

/// This node cannot answer now; the client may retry. Not an answer of the replicated state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    #[error("no leader")]
    NoLeader,
    #[error("request timed out")]
    Timeout,
    /// The leader was lost while it was under way.
    #[error("request timed out, possibly due to previous leader failure")]
    LeaderFailed,
    /// The leader, or a majority, was not reached all the time.
    #[error("request timed out, possibly due to connection lost")]
    ConnectionLost,
    #[error("too many requests")]
    Overloaded,
    /// The disk has no space for the next segment of the log.
    #[error("no space left for the log")]
    NoSpace,
    #[error("server stopped")]
    Stopping,
}

/// What is known of the group, for headers, Status and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RaftStatus {
    /// 0 when unknown.
    pub leader: u64,
    pub term: u64,
    /// Last index in the log.
    pub last_index: u64,
    pub committed_index: u64,
    pub applied_index: u64,
    pub is_learner: bool,
}

/// How to start a member.
#[derive(Clone, Debug)]
pub struct RaftOptions {
    pub member_id: u64,
    pub cluster_id: u64,
    /// The voters of a new group, equal on all of them; only looked at when the log is empty. None joins a group that there is.
    pub founders: Option<Nodes>,
    pub peers: Arc<Peers>,
    /// From here on this member alone votes, whoever did before: etcd's force-new-cluster. A new member has nobody to leave.
    pub force_alone: bool,
    /// `member/wal`.
    pub wal_dir: PathBuf,
    /// Where a snapshot of another member is kept while it arrives.
    pub snapshot_path: PathBuf,
    pub wal_segment_bytes: u64,
    pub max_wals: usize,
    pub unsafe_no_fsync: bool,
    /// Who takes the steps of the log's writer.
    pub runner: Arc<dyn Runner>,
    pub wal_observer: Arc<dyn WalObserver>,
    pub apply_observer: Arc<dyn ApplyObserver>,
    pub heartbeat: Duration,
    /// etcd's election-timeout.
    pub election: Duration,
    /// Whether the leader answers reads by its lease.
    pub lease_reads: bool,
    /// Entries applied between two purges of the log, and entries kept behind the marker.
    pub snapshot_count: u64,
    pub catchup_entries: u64,
}

impl RaftOptions {
    pub fn new(member_id: u64, cluster_id: u64, wal_dir: impl Into<PathBuf>) -> Self {
        let whose = Whose {
            cluster_id,
            member_id,
        };
        let dial = Dial::new(None, Duration::from_secs(1));
        let wal_dir = wal_dir.into();
        Self {
            member_id,
            cluster_id,
            snapshot_path: wal_dir.with_file_name("snapshot.received"),
            founders: Some(Nodes::from([(member_id, PeerNode::default())])),
            peers: Arc::new(Peers::new(whose, dial, Clock::default())),
            force_alone: false,
            wal_dir,
            wal_segment_bytes: SEGMENT_BYTES,
            max_wals: 5,
            unsafe_no_fsync: false,
            runner: Arc::new(Threads),
            wal_observer: Arc::new(Unobserved),
            apply_observer: Arc::new(Unobserved),
            heartbeat: Duration::from_millis(100),
            election: Duration::from_millis(1000),
            lease_reads: false,
            snapshot_count: 10_000,
            catchup_entries: 5_000,
        }
    }

    pub(crate) fn wal(&self) -> WalOptions {
        let identity = Identity {
            cluster_id: self.cluster_id,
            member_id: self.member_id,
        };
        WalOptions {
            segment_bytes: self.wal_segment_bytes,
            max_wals: self.max_wals,
            unsafe_no_fsync: self.unsafe_no_fsync,
            observer: Arc::clone(&self.wal_observer),
            // Recent entries are kept decoded by the log store; here only what is not yet written.
            cache_bytes: 0,
            ..WalOptions::new(&self.wal_dir, identity)
        }
    }

    /// Nobody is a candidate sooner after it last heard the leader, or began.
    fn shortest_election_millis(&self) -> u64 {
        let heartbeat = self.heartbeat.as_millis() as u64;
        let election = self.election.as_millis() as u64;
        (election * 2 / 5).max(heartbeat + 1)
    }

    /// The library elects after a lease of its greatest timeout and then the timeout itself: 0.4 to 0.6 of etcd's figure makes the
    /// same time without a leader.
    fn config(&self) -> Config {
        let heartbeat = self.heartbeat.as_millis() as u64;
        let election = self.election.as_millis() as u64;
        let election_timeout_min = self.shortest_election_millis();
        let election_timeout_max = (election * 3 / 5).max(election_timeout_min + 1);
        Config {
            cluster_name: format!("{:x}", self.cluster_id),
            heartbeat_interval: heartbeat.max(1),
            election_timeout_min,
            election_timeout_max,
            quorum_loss_probe_interval: Some(election_timeout_max * 2 + heartbeat),
            enable_pre_vote: Some(true),
            // Leading again without an election would need a state machine that flushes before it answers.
            enable_leader_restore: Some(false),
            snapshot_policy: SnapshotPolicy::Never,
            max_in_snapshot_log_to_keep: self.catchup_entries,
            replication_lag_threshold: self.catchup_entries,
            removed_leader_step_down: StepDownPolicy::After(heartbeat),
            ..Config::default()
        }
    }
}

/// A member could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error("raft: {0}")]
    Raft(String),
}

pub(super) fn raft_error(error: impl Display) -> StartError {
    StartError::Raft(error.to_string())
}

/// Why a member cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    #[error("{0}")]
    Failed(String),
    /// By the others: nothing is wrong here.
    #[error("the member has been permanently removed from the cluster")]
    Removed,
    /// Another member's snapshot is the database now: the process begins anew on it.
    #[error("a snapshot took the database's place")]
    Anew,
}

/// The first error after which this member must stop. Set once.
#[derive(Clone, Debug)]
pub(crate) struct Failure(watch::Sender<Option<End>>);

impl Failure {
    pub(crate) fn new() -> Self {
        Self(watch::channel(None).0)
    }

    pub(crate) fn set(&self, error: &impl Display) {
        self.end(End::Failed(error.to_string()));
    }

    /// The others say that this member is none of them any more.
    pub(crate) fn set_removed(&self) {
        self.end(End::Removed);
    }

    pub(crate) fn end(&self, end: End) {
        self.0.send_if_modified(|held| {
            if held.is_some() {
                return false;
            }
            *held = Some(end);
            true
        });
    }
}

/// A running member of the group.
pub struct RaftNode {
    raft: Raft<TypeConfig, StateMachine>,
    pub(super) wal: Arc<Wal>,
    log: LogStore,
    pub(super) member_id: u64,
    peers: Arc<Peers>,
    forwarder: Forwarder,
    waiting: Arc<Waiting>,
    pub(super) barrier: Barrier,
    pub(super) lease_reads: LeaseReads,
    pub(super) fresh: Fresh,
    pub(super) heard: Heard,
    pub(super) wake_leadership: Notify,
    /// When the leader that is known began to lead.
    pub(super) elected_at: parking_lot::Mutex<Option<std::time::Instant>>,
    applied: watch::Receiver<u64>,
    pub(super) published: watch::Sender<RaftStatus>,
    /// This member leads, is the only voter, and has applied everything of earlier terms: nobody else can commit anything.
    pub(super) leads_alone: AtomicBool,
    pub(super) leads: AtomicBool,
    /// Membership changes under way: from before they are proposed.
    pub(super) changing: AtomicUsize,
    pub(super) changes_lock: tokio::sync::Mutex<()>,
    /// What is no record of a snapshot of another member, while it is received.
    pub(super) snapshot_path: PathBuf,
    pub(super) sending: Sending,
    stopping: watch::Sender<bool>,
    pub(super) failure: Failure,
    pub(super) timeout: Duration,
    pub(super) heartbeat: Duration,
    pub(super) election: Duration,
}

impl std::fmt::Debug for RaftNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RaftNode")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

/// How a proposal to this member's own log ended, when it was not applied.
enum NotApplied {
    /// It is not in the log and will not be.
    Refused,
    Error(ProposeError),
}

impl RaftNode {
    /// Opens the log, makes a group of the founders when there is none, and takes part. Returns when the log is recovered; a leader is
    /// known later.
    pub async fn start(
        options: RaftOptions,
        store: Arc<Store>,
        apply: Arc<dyn Apply>,
    ) -> Result<Arc<Self>, StartError> {
        let parts = open_parts(&options, &store, apply).await?;
        let applied = parts.machine.applied();
        let sending = Sending::default();
        let shortest_election = Duration::from_millis(options.shortest_election_millis());
        let trust = options.lease_reads.then(|| trust(shortest_election));
        let heard_leader = parts.wal.vote().is_some_and(|vote| vote.committed);
        let config = options.config().validate().map_err(raft_error)?;
        let transport = Transport {
            peers: Arc::clone(&options.peers),
            store,
            sending: sending.clone(),
            failure: parts.failure.clone(),
        };
        let raft = Raft::new(
            options.member_id,
            Arc::new(config),
            transport,
            parts.log.clone(),
            parts.machine,
        )
        .await
        .map_err(raft_error)?;

        if let Some(founders) = &options.founders
            && !raft.is_initialized().await.map_err(raft_error)?
        {
            raft.initialize(founders.clone())
                .await
                .map_err(raft_error)?;
        }

        let node = Arc::new(Self {
            raft,
            wal: parts.wal,
            log: parts.log,
            member_id: options.member_id,
            forwarder: Forwarder::new(Arc::clone(&options.peers), Arc::clone(&parts.waiting)),
            peers: options.peers,
            waiting: parts.waiting,
            barrier: Barrier::default(),
            lease_reads: LeaseReads::new(trust, Clock::default()),
            fresh: Fresh::new(heard_leader, shortest_election),
            heard: Heard::default(),
            wake_leadership: Notify::new(),
            elected_at: parking_lot::Mutex::default(),
            applied,
            published: watch::channel(RaftStatus::default()).0,
            leads_alone: AtomicBool::default(),
            leads: AtomicBool::default(),
            changing: AtomicUsize::default(),
            changes_lock: tokio::sync::Mutex::default(),
            snapshot_path: options.snapshot_path,
            sending,
            stopping: watch::channel(false).0,
            failure: parts.failure,
            // etcd's: 5 s for the disk's queue, and time for an election.
            timeout: Duration::from_secs(5) + 2 * options.election,
            heartbeat: options.heartbeat,
            election: options.election,
        });
        tokio::spawn(Arc::clone(&node).follow_leadership());
        tokio::spawn(Arc::clone(&node).run_barriers());
        tokio::spawn(Arc::clone(&node).admit_pending_voters());
        tokio::spawn(Arc::clone(&node).purge_regularly(options.snapshot_count));
        node.elect_at_once_when_alone().await?;
        Ok(node)
    }

    /// Replicates a command and waits until it is applied here, whoever leads.
    ///
    /// The command, with room for each kind of request nearly two kilobytes long, is on the heap before a future has to carry it.
    pub fn propose(
        &self,
        request: impl Into<Arc<InternalRaftRequest>>,
    ) -> impl Future<Output = Result<Applied, ProposeError>> + Send {
        let command = Command(request.into());
        self.propose_command(command)
    }

    async fn propose_command(&self, command: Command) -> Result<Applied, ProposeError> {
        self.room_for_proposals()?;
        let started = self.heard.clock().now();
        timeout(self.timeout, async {
            // Mostly this member leads, and nothing need be looked up.
            if self.leads.load(Ordering::Acquire) {
                match self.write(command.clone()).await {
                    Ok(applied) => return Ok(applied),
                    Err(NotApplied::Error(error)) => return Err(error),
                    Err(NotApplied::Refused) => {}
                }
            }
            Box::pin(self.propose_to_whoever_leads(command)).await
        })
        .await
        .map_err(|_| self.why_late(started))?
    }

    /// Until a leader takes it. What was taken is never proposed again.
    async fn propose_to_whoever_leads(&self, command: Command) -> Result<Applied, ProposeError> {
        loop {
            let leader = self.wait_for_leader().await?;
            let outcome = if leader == self.member_id {
                self.write(command.clone()).await
            } else {
                self.pass_on(leader, &command.0).await
            };
            match outcome {
                Ok(applied) => return Ok(applied),
                Err(NotApplied::Error(error)) => return Err(error),
                // Another leader is being made, or this one is about to know that it leads.
                Err(NotApplied::Refused) => tokio::time::sleep(REFUSED_RETRY).await,
            }
        }
    }

    /// To this member's own log.
    async fn write(&self, command: Command) -> Result<Applied, NotApplied> {
        let written = self.raft.client_write(command).await;
        self.written(written)
    }

    fn written(
        &self,
        written: Result<
            openraft::raft::ClientWriteResponse<TypeConfig>,
            RaftError<TypeConfig, ClientWriteError<TypeConfig>>,
        >,
    ) -> Result<Applied, NotApplied> {
        match written {
            Ok(response) => response
                .data
                .0
                .ok_or(NotApplied::Error(ProposeError::Stopping)),
            Err(RaftError::APIError(ClientWriteError::ForwardToLeader(_))) => {
                Err(NotApplied::Refused)
            }
            // It may still be committed by another leader.
            Err(RaftError::APIError(error)) => {
                tracing::warn!(%error, "the outcome of a proposal is unknown");
                Err(NotApplied::Error(ProposeError::Timeout))
            }
            Err(RaftError::Fatal(error)) => {
                if !*self.stopping.borrow() {
                    self.failure.set(&error);
                }
                Err(NotApplied::Error(ProposeError::Stopping))
            }
        }
    }

    /// To the log of another member, which leads.
    async fn pass_on(
        &self,
        leader: u64,
        request: &InternalRaftRequest,
    ) -> Result<Applied, NotApplied> {
        let mut expected = self.waiting.expect(request_id(request));
        self.forwarder.send(leader, request).await;
        let mut stopping = self.stopping.subscribe();
        let outcome = tokio::select! {
            outcome = expected.outcome() => outcome,
            _ = stopping.wait_for(|stopping| *stopping) => None,
        };
        match outcome {
            Some(Outcome::Applied(applied)) => Ok(applied),
            Some(Outcome::Refused(Reason::Overloaded)) => {
                Err(NotApplied::Error(ProposeError::Overloaded))
            }
            Some(Outcome::Refused(Reason::NoSpace)) => {
                Err(NotApplied::Error(ProposeError::NoSpace))
            }
            Some(Outcome::Refused(_)) => Err(NotApplied::Refused),
            None => Err(NotApplied::Error(ProposeError::Stopping)),
        }
    }

    /// To this member's own log, and only as the leader of `term`: for what only that leader may decide. Never passed on.
    pub async fn propose_as_leader(
        &self,
        term: u64,
        request: impl Into<Arc<InternalRaftRequest>>,
    ) -> Result<Applied, ProposeError> {
        self.room_for_proposals()?;
        let command = Command(request.into());
        let (responder, outcome) =
            ProgressResponder::<TypeConfig, ClientWriteResult<TypeConfig>>::complete_only();
        let proposed = self
            .raft
            .write(command)
            .with_leader(committed_leader(term))
            .responder(responder)
            .await;
        if proposed.is_err() {
            return Err(ProposeError::Stopping);
        }
        let written = timeout(self.timeout, outcome)
            .await
            .map_err(|_| ProposeError::Timeout)?
            .map_err(|_| ProposeError::Stopping)?;
        match self.written(written.map_err(RaftError::APIError)) {
            Ok(applied) => Ok(applied),
            Err(NotApplied::Refused) => Err(ProposeError::NoLeader),
            Err(NotApplied::Error(error)) => Err(error),
        }
    }

    /// Whether this member takes proposals now.
    pub(super) fn room_for_proposals(&self) -> Result<(), ProposeError> {
        let gap = self
            .log
            .committed_index()
            .saturating_sub(*self.applied.borrow());
        if gap > APPLY_GAP_MAX {
            return Err(ProposeError::Overloaded);
        }
        if !self.wal.has_room() {
            return Err(ProposeError::NoSpace);
        }
        Ok(())
    }

    /// Who leads, once anybody does.
    pub async fn wait_for_leader(&self) -> Result<u64, ProposeError> {
        let mut changes = self.changes();
        let mut stopping = self.stopping.subscribe();
        tokio::select! {
            known = changes.wait_for(|status| status.leader != 0) => {
                known.map(|status| status.leader).map_err(|_| ProposeError::Stopping)
            }
            _ = stopping.wait_for(|stopping| *stopping) => Err(ProposeError::Stopping),
        }
    }

    /// Returns once every write acknowledged before the call is visible in `store.view()`.
    ///
    /// The only voter need not ask anybody or wait: a write is acknowledged after it was applied here.
    pub async fn read_barrier(&self) -> Result<(), ProposeError> {
        if self.leads_alone.load(Ordering::Acquire) {
            return Ok(());
        }
        // Seldom needed, and large.
        Box::pin(self.wait_for_barrier()).await
    }

    async fn wait_for_barrier(&self) -> Result<(), ProposeError> {
        let asked = async {
            timeout(self.timeout, self.barrier.pass())
                .await
                .map_err(|_| ProposeError::Timeout)?
        };
        tokio::pin!(asked);
        if let Ok(answered) = timeout(SLOW_BARRIER, asked.as_mut()).await {
            return answered;
        }
        crate::metrics::SLOW_READ_INDEXES.inc();
        let answered = asked.await;
        if answered.is_err() {
            crate::metrics::READ_INDEXES_FAILED.inc();
        }
        answered
    }

    /// The last index applied here, for those who wait for one.
    pub fn applied(&self) -> watch::Receiver<u64> {
        self.applied.clone()
    }

    /// Entries up to this index are gone from the log.
    pub fn purged_index(&self) -> u64 {
        self.wal.purged().index
    }

    pub fn status(&self) -> RaftStatus {
        RaftStatus {
            last_index: self.wal.last().index,
            committed_index: self.log.committed_index(),
            applied_index: *self.applied.borrow(),
            ..*self.published.borrow()
        }
    }

    /// True while this node leads and may act as a leader (expire leases).
    pub fn is_leader(&self) -> bool {
        self.leads.load(Ordering::Acquire)
    }

    /// Changes whenever the leader, the term or [`Self::is_leader`] does. Its indexes are as of then; `status` has the newest.
    pub fn changes(&self) -> watch::Receiver<RaftStatus> {
        self.published.subscribe()
    }

    pub fn member_id(&self) -> u64 {
        self.member_id
    }

    pub fn peers(&self) -> &Arc<Peers> {
        &self.peers
    }

    pub(super) fn raft(&self) -> &Raft<TypeConfig, StateMachine> {
        &self.raft
    }

    pub(super) fn stopping(&self) -> watch::Receiver<bool> {
        self.stopping.subscribe()
    }

    /// Waits for something after which this member must stop, and says what it was.
    pub async fn failed(&self) -> End {
        let mut failure = self.failure.0.subscribe();
        let held = failure.wait_for(Option::is_some).await;
        match held.as_deref() {
            Ok(Some(end)) => end.clone(),
            // The sender lives in self.
            _ => std::future::pending().await,
        }
    }

    /// This member is none of the group any more.
    pub fn removed(&self) {
        self.failure.set_removed();
    }

    /// Stops taking part and closes the log. Proposals under way end with `Stopping`.
    pub async fn shutdown(&self) {
        self.stopping.send_replace(true);
        self.leads.store(false, Ordering::Release);
        self.leads_alone.store(false, Ordering::Release);
        if let Err(error) = self.raft.shutdown().await {
            tracing::error!(%error, "raft did not stop in good order");
        }
        let wal = Arc::clone(&self.wal);
        match blocking(move || wal.close()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "closing the write-ahead log"),
            Err(error) => tracing::error!(%error, "closing the write-ahead log"),
        }
    }

    /// Every `snapshot_count` entries: flush the engine, then let the log go up to there, less what laggards may need.
    async fn purge_regularly(self: Arc<Self>, snapshot_count: u64) {
        let mut applied = self.applied.clone();
        let mut stopping = self.stopping.subscribe();
        let mut last = *applied.borrow();
        loop {
            tokio::select! {
                reached = applied.wait_for(|applied| *applied >= last + snapshot_count) => {
                    match reached {
                        Ok(index) => last = *index,
                        Err(_) => return,
                    }
                }
                _ = stopping.wait_for(|stopping| *stopping) => return,
            }
            // Whoever gets a snapshot goes on from the log as it was then.
            if self.sending.any() {
                tokio::select! {
                    () = self.sending.ended() => {}
                    _ = stopping.wait_for(|stopping| *stopping) => return,
                }
            }
            if self.raft.trigger().snapshot().await.is_err() {
                return;
            }
            // The library ignores an order that comes while it still works on the last one.
            let marked = self.raft.wait(None);
            let marked = marked.metrics(
                |metrics| {
                    metrics
                        .snapshot
                        .is_some_and(|at| position(&at).index >= last)
                },
                "the marker",
            );
            tokio::select! {
                marked = marked => if marked.is_err() { return },
                _ = stopping.wait_for(|stopping| *stopping) => return,
            }
        }
    }

    /// A single voter has nobody to wait for.
    async fn elect_at_once_when_alone(&self) -> Result<(), StartError> {
        let me = self.member_id;
        // Asked of the library's loop: its metrics may not have been filled in yet.
        let alone = self
            .raft
            .with_raft_state(move |state| {
                let mut voters = state.membership_state.effective().membership().voter_ids();
                voters.next() == Some(me) && voters.next().is_none()
            })
            .await
            .map_err(raft_error)?;
        if alone {
            self.raft.trigger().elect(false).await.map_err(raft_error)?;
        }
        Ok(())
    }
}
