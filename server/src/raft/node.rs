//! `propose`, `read_barrier`, who leads, and when the log is purged.
//!
//! Promises: an answered proposal is committed and applied here. A read after `read_barrier` sees every write that was answered
//! before the barrier was asked for.
//! Not here: what commands mean (`apply`), bytes (`command.rs`).
//!
//! etcd: server/etcdserver/v3_server.go (the proposing half), server/etcdserver/raft.go.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ballast_api::etcdserverpb::InternalRaftRequest;
use ballast_storage::mvcc::Store;
use ballast_storage::wal::{Identity, Unobserved, Wal, WalEntry, WalObserver, WalOptions, WalVote};
use ballast_storage::{LogPosition, StorageError};
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::{ClientWriteError, LinearizableReadError, RaftError};
use openraft::impls::EmptyNode;
use openraft::metrics::RaftServerMetrics;
use openraft::{Config, Raft, ReadPolicy, ServerState, SnapshotPolicy};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::apply::{Applied, Apply};
use crate::raft::command::{Command, KIND_MEMBERSHIP, TypeConfig, alone, position};
use crate::raft::log_store::LogStore;
use crate::raft::state_machine::{StateError, StateMachine};
use crate::raft::transport::Transport;

/// Entries committed but not applied before proposals are refused (etcd: maxGapBetweenApplyAndCommitIndex).
const APPLY_GAP_MAX: u64 = 5000;

/// A read that waits longer for its barrier is counted as slow (etcd: readIndexRetryTime).
const SLOW_BARRIER: Duration = Duration::from_millis(500);

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
    /// The voters of a new group; only looked at when the log is empty.
    pub initial_voters: Vec<u64>,
    /// From here on this member alone votes, whoever did before: etcd's force-new-cluster. A new member has nobody to leave.
    pub force_alone: bool,
    /// `member/wal`.
    pub wal_dir: PathBuf,
    pub max_wals: usize,
    pub unsafe_no_fsync: bool,
    pub wal_observer: Arc<dyn WalObserver>,
    pub apply_observer: Arc<dyn ApplyObserver>,
    pub heartbeat: Duration,
    /// etcd's election-timeout.
    pub election: Duration,
    /// Entries applied between two purges of the log, and entries kept behind the marker.
    pub snapshot_count: u64,
    pub catchup_entries: u64,
}

impl RaftOptions {
    pub fn new(member_id: u64, cluster_id: u64, wal_dir: impl Into<PathBuf>) -> Self {
        Self {
            member_id,
            cluster_id,
            initial_voters: vec![member_id],
            force_alone: false,
            wal_dir: wal_dir.into(),
            max_wals: 5,
            unsafe_no_fsync: false,
            wal_observer: Arc::new(Unobserved),
            apply_observer: Arc::new(Unobserved),
            heartbeat: Duration::from_millis(100),
            election: Duration::from_millis(1000),
            snapshot_count: 10_000,
            catchup_entries: 5_000,
        }
    }

    fn wal(&self) -> WalOptions {
        let identity = Identity {
            cluster_id: self.cluster_id,
            member_id: self.member_id,
        };
        WalOptions {
            max_wals: self.max_wals,
            unsafe_no_fsync: self.unsafe_no_fsync,
            observer: Arc::clone(&self.wal_observer),
            // Recent entries are kept decoded by the log store; here only what is not yet written.
            cache_bytes: 0,
            ..WalOptions::new(&self.wal_dir, identity)
        }
    }

    /// The library elects after a lease of its greatest timeout and then the timeout itself: 0.4 to 0.6 of etcd's figure makes the
    /// same time without a leader.
    fn config(&self) -> Config {
        let heartbeat = self.heartbeat.as_millis() as u64;
        let election = self.election.as_millis() as u64;
        let election_timeout_min = (election * 2 / 5).max(heartbeat + 1);
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

fn raft_error(error: impl Display) -> StartError {
    StartError::Raft(error.to_string())
}

/// Makes the log of a directory written from a snapshot: it begins behind `at`, which the engine holds.
pub fn begin_restored_log(options: &RaftOptions, at: LogPosition) -> Result<(), StorageError> {
    let wal = Wal::open(WalOptions {
        start: at,
        ..options.wal()
    })?;
    let vote = WalVote {
        term: at.term,
        voted_for: Some(options.member_id),
        committed: false,
    };
    // Whether it succeeded shows at closing.
    wal.save_vote(vote, Box::new(|_| ()));
    wal.close().map_err(|error| {
        let source = std::io::Error::other(error);
        StorageError::io("begin a log in", &options.wal_dir, source)
    })
}

/// The first error after which this member must stop. Set once.
#[derive(Clone, Debug)]
pub(crate) struct Failure(watch::Sender<Option<String>>);

impl Failure {
    pub(crate) fn new() -> Self {
        Self(watch::channel(None).0)
    }

    pub(crate) fn set(&self, error: &impl Display) {
        self.0.send_if_modified(|held| {
            if held.is_some() {
                return false;
            }
            *held = Some(error.to_string());
            true
        });
    }
}

/// A running member of the group.
pub struct RaftNode {
    raft: Raft<TypeConfig, StateMachine>,
    wal: Arc<Wal>,
    log: LogStore,
    member_id: u64,
    applied: watch::Receiver<u64>,
    changes: watch::Receiver<RaftStatus>,
    /// This member leads, is the only voter, and has applied everything of earlier terms: nobody else can commit anything.
    leads_alone: Arc<AtomicBool>,
    leads: Arc<AtomicBool>,
    stopping: watch::Sender<bool>,
    failure: Failure,
    timeout: Duration,
}

impl std::fmt::Debug for RaftNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RaftNode")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

impl RaftNode {
    /// Opens the log, makes a group of `initial_voters` when there is none, and takes part. Returns when the log is recovered; a leader is
    /// known later.
    pub async fn start(
        options: RaftOptions,
        store: Arc<Store>,
        apply: Arc<dyn Apply>,
    ) -> Result<Arc<Self>, StartError> {
        let opening = (options.clone(), Arc::clone(&store));
        let (wal, log, machine, failure) = tokio::task::spawn_blocking(move || {
            let (options, store) = opening;
            open_parts(&options, &store, apply)
        })
        .await
        .map_err(raft_error)??;
        let applied = machine.applied();
        let config = options.config().validate().map_err(raft_error)?;
        let raft = Raft::new(
            options.member_id,
            Arc::new(config),
            Transport,
            log.clone(),
            machine,
        )
        .await
        .map_err(raft_error)?;

        if !raft.is_initialized().await.map_err(raft_error)? {
            let voters: BTreeMap<u64, EmptyNode> = options
                .initial_voters
                .iter()
                .map(|id| (*id, EmptyNode::default()))
                .collect();
            raft.initialize(voters).await.map_err(raft_error)?;
        }

        let (sender, changes) = watch::channel(RaftStatus::default());
        let node = Arc::new(Self {
            raft,
            wal,
            log,
            member_id: options.member_id,
            applied,
            changes,
            leads_alone: Arc::default(),
            leads: Arc::default(),
            stopping: watch::channel(false).0,
            failure,
            // etcd's: 5 s for the disk's queue, and time for an election.
            timeout: Duration::from_secs(5) + 2 * options.election,
        });
        tokio::spawn(Arc::clone(&node).follow_leadership(sender));
        tokio::spawn(Arc::clone(&node).purge_regularly(options.snapshot_count));
        node.elect_at_once_when_alone().await?;
        Ok(node)
    }

    /// Replicates a command and waits until it is applied here.
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
        timeout(self.timeout, async {
            if !self.leads.load(Ordering::Acquire) {
                Box::pin(self.wait_for_leader()).await?;
            }
            match self.raft.client_write(command).await {
                Ok(response) => response.data.0.ok_or(ProposeError::Stopping),
                Err(RaftError::APIError(ClientWriteError::ForwardToLeader(_))) => {
                    Err(ProposeError::NoLeader)
                }
                Err(RaftError::APIError(error)) => {
                    tracing::warn!(%error, "a proposal was refused");
                    Err(ProposeError::Timeout)
                }
                Err(RaftError::Fatal(error)) => {
                    if !*self.stopping.borrow() {
                        self.failure.set(&error);
                    }
                    Err(ProposeError::Stopping)
                }
            }
        })
        .await
        .map_err(|_| ProposeError::Timeout)?
    }

    /// Where this member does not lead already.
    async fn wait_for_leader(&self) -> Result<(), ProposeError> {
        let mut changes = self.changes.clone();
        let mut stopping = self.stopping.subscribe();
        tokio::select! {
            known = changes.wait_for(|status| status.leader != 0) => {
                known.map(drop).map_err(|_| ProposeError::Stopping)
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
        let asked = self.ask_for_barrier();
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

    async fn ask_for_barrier(&self) -> Result<(), ProposeError> {
        timeout(self.timeout, async {
            loop {
                if !self.leads.load(Ordering::Acquire) {
                    self.wait_for_leader().await?;
                }
                if self.leads_alone.load(Ordering::Acquire) {
                    return Ok(());
                }
                match self.raft.ensure_linearizable(ReadPolicy::ReadIndex).await {
                    Ok(_) => return Ok(()),
                    Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(_))) => {
                        return Err(ProposeError::NoLeader);
                    }
                    Err(RaftError::APIError(_)) => {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                    Err(RaftError::Fatal(_)) => return Err(ProposeError::Stopping),
                }
            }
        })
        .await
        .map_err(|_| ProposeError::Timeout)?
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
            ..*self.changes.borrow()
        }
    }

    /// True while this node leads and may act as a leader (expire leases).
    pub fn is_leader(&self) -> bool {
        self.leads.load(Ordering::Acquire)
    }

    /// Changes whenever the leader, the term or [`Self::is_leader`] does. Its indexes are as of then; `status` has the newest.
    pub fn changes(&self) -> watch::Receiver<RaftStatus> {
        self.changes.clone()
    }

    /// Waits for an error after which this member must stop, and says what it was.
    pub async fn failed(&self) -> String {
        let mut failure = self.failure.0.subscribe();
        let held = failure.wait_for(Option::is_some).await;
        match held.as_deref() {
            Ok(Some(error)) => error.clone(),
            // The sender lives in self.
            _ => std::future::pending().await,
        }
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
        match tokio::task::spawn_blocking(move || wal.close()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "closing the write-ahead log"),
            Err(error) => tracing::error!(%error, "closing the write-ahead log"),
        }
    }

    /// Keeps `changes` and the two flags in step with the library.
    async fn follow_leadership(self: Arc<Self>, sender: watch::Sender<RaftStatus>) {
        let mut metrics = self.raft.server_metrics();
        let mut applied = self.applied.clone();
        let mut stopping = self.stopping.subscribe();
        loop {
            let now: RaftServerMetrics<TypeConfig> = metrics.borrow_watched().clone();
            let leads = now.state == ServerState::Leader && now.vote.committed;
            if leads {
                // A leader's first entry commits everything before it; until it is applied here, reads would miss some.
                let term = Some(now.vote.leader_id.term);
                tokio::select! {
                    _ = applied.wait_for(|applied| self.wal.term_of(*applied) == term) => {}
                    changed = metrics.changed() => {
                        if changed.is_err() { return; }
                        continue;
                    }
                    _ = stopping.wait_for(|stopping| *stopping) => return,
                }
            }
            let membership = now.committed_membership_config.membership();
            let mut voters = membership.voter_ids();
            let alone = voters.next() == Some(self.member_id) && voters.next().is_none();
            drop(voters);
            // Who leads may be known before this member may act as the leader: both are news.
            let led = self.leads.swap(leads, Ordering::AcqRel);
            self.leads_alone.store(leads && alone, Ordering::Release);
            let is_learner = membership.learner_ids().any(|id| id == self.member_id);
            let status = RaftStatus {
                leader: now.current_leader.unwrap_or_default(),
                term: now.vote.leader_id.term,
                is_learner,
                ..self.status()
            };
            sender.send_if_modified(|held| {
                let news = led != leads
                    || (held.leader, held.term, held.is_learner)
                        != (status.leader, status.term, status.is_learner);
                *held = status;
                news
            });
            tokio::select! {
                changed = metrics.changed() => if changed.is_err() { return; },
                _ = stopping.wait_for(|stopping| *stopping) => return,
            }
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

type Parts = (Arc<Wal>, LogStore, StateMachine, Failure);

fn open_parts(
    options: &RaftOptions,
    store: &Arc<Store>,
    apply: Arc<dyn Apply>,
) -> Result<Parts, StartError> {
    if store.applied().index > 0 && !Wal::exists(&options.wal_dir)? {
        return Err(StartError::Storage(StorageError::Damaged {
            path: options.wal_dir.clone(),
            offset: 0,
            what: "the engine holds entries, and their log is missing".to_owned(),
        }));
    }
    let wal = Wal::open(options.wal())?;
    check_log_reaches_engine(&wal, store, options)?;
    if options.force_alone && wal.last() != LogPosition::default() {
        force_alone(&wal, options)?;
    }
    let failure = Failure::new();
    let on_failure = failure.clone();
    store.on_failure(Box::new(move |error| on_failure.set(&error)));
    let on_failure = failure.clone();
    wal.on_failure(Box::new(move |error| on_failure.set(&error)));
    let log = LogStore::new(Arc::clone(&wal), Arc::clone(store), failure.clone());
    let observer = Arc::clone(&options.apply_observer);
    let machine = StateMachine::new(Arc::clone(store), apply, observer, failure.clone())?;
    Ok((wal, log, machine, failure))
}

/// Ends the group that was: a membership of this member alone is appended as if its leader had said so. Everything in the log
/// stays, since this member cannot know what of it was acknowledged to a client; etcd drops what was not known to be committed.
fn force_alone(wal: &Wal, options: &RaftOptions) -> Result<(), StorageError> {
    let last = wal.last();
    let term = wal
        .vote()
        .map_or(last.term, |vote| vote.term.max(last.term));
    let entry = WalEntry {
        position: LogPosition {
            term,
            index: last.index + 1,
        },
        kind: KIND_MEMBERSHIP,
        payload: alone(options.member_id),
    };
    tracing::warn!(
        local_member_id = %format!("{:x}", options.member_id),
        index = entry.position.index,
        "forcing a new cluster of this member alone"
    );
    let (sender, synced) = std::sync::mpsc::channel();
    wal.append(
        vec![entry],
        Box::new(move |result| {
            // The other end waits below.
            let _ = sender.send(result);
        }),
    );
    let failed = |error: String| {
        let source = std::io::Error::other(error);
        StorageError::io("append a membership to", &options.wal_dir, source)
    };
    match synced.recv() {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// What the library is built on, without the library: for its own storage suite.
pub fn open_storage(
    options: &RaftOptions,
    store: &Arc<Store>,
    apply: Arc<dyn Apply>,
) -> Result<(LogStore, StateMachine), StartError> {
    let (_, log, machine, _) = open_parts(options, store, apply)?;
    Ok((log, machine))
}

/// The engine holds only entries that were synced in the log before. A log that ends earlier is another one, or lost its end.
fn check_log_reaches_engine(
    wal: &Wal,
    store: &Store,
    options: &RaftOptions,
) -> Result<(), StorageError> {
    let (last, applied) = (wal.last(), store.applied());
    if applied.index > last.index && !options.unsafe_no_fsync {
        return Err(StorageError::Damaged {
            path: options.wal_dir.clone(),
            offset: 0,
            what: format!(
                "the log ends at index {}, the engine holds index {}: the end of the log is missing",
                last.index, applied.index
            ),
        });
    }
    Ok(())
}
