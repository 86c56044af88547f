//! A member as the software of a simulated host: the real log, store, state machine, library and peer service, put together as `node.rs` does.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ballast_api::etcdserverpb::{InternalRaftRequest, Member};
use ballast_server::apply::{Applied, Applier, Apply, GroupMember};
use ballast_server::bootstrap::{self, Identity};
use ballast_server::clock::Clock;
use ballast_server::defrag::Defragmenter;
use ballast_server::lease::Lessor;
use ballast_server::node::{Parts, follow_members};
use ballast_server::peer::identity::Whose;
use ballast_server::peer::{Peers, probe};
use ballast_server::raft::members::Change;
use ballast_server::raft::{End, PeerNode, RaftNode, RaftOptions};
use ballast_server::rpc::budget::Budget;
use ballast_server::rpc::header::Headers;
use ballast_server::rpc::kv::WideReads;
use ballast_server::rpc::members::MemberRules;
use ballast_server::rpc::watch::WatchConfig;
use ballast_server::rpc::{Context, Limits, RequestIds, WholeReads};
use ballast_server::watch::Hub;
use ballast_storage::LogPosition;
use ballast_storage::backend::Kind;
use ballast_storage::mvcc::{Store, StoreOptions};
use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::disk::Disk;
use crate::findings::Findings;
use crate::net;

pub(crate) const CLUSTER_ID: u64 = 0xc1;
pub(crate) const ELECTION: Duration = Duration::from_secs(1);
const HEARTBEAT: Duration = Duration::from_millis(100);
/// Small, so that the log is purged and a member that was away needs a snapshot.
const SNAPSHOT_COUNT: u64 = 60;
const CATCHUP_ENTRIES: u64 = 20;
const WAL_SEGMENT_BYTES: u64 = 64 << 10;

/// What is asked of a running member from outside.
#[derive(Debug)]
pub(crate) enum Order {
    Change(Change),
    Transfer(u64),
}

/// What outlives a member's process.
#[derive(Debug)]
pub(crate) struct Machine {
    /// Its place among all of the run.
    pub(crate) number: usize,
    pub(crate) name: String,
    pub(crate) id: u64,
    pub(crate) dir: PathBuf,
    identity: Identity,
    seed: u64,
    boots: AtomicU64,
    pub(crate) slow_disk: Arc<AtomicBool>,
    /// The process that runs now.
    pub(crate) running: Mutex<Option<Arc<Context>>>,
    pub(crate) ended: Mutex<Option<End>>,
    orders: Mutex<Option<mpsc::UnboundedSender<Order>>>,
    findings: Arc<Findings>,
}

pub(crate) fn id_of(number: usize) -> u64 {
    0x10 + number as u64
}

pub(crate) fn name_of(number: usize) -> String {
    format!("m{number}")
}

/// As the list of members has it.
pub(crate) fn row_of(number: usize) -> Member {
    let name = name_of(number);
    Member {
        id: id_of(number),
        peer_ur_ls: vec![net::url(&name)],
        name,
        ..Member::default()
    }
}

impl Machine {
    pub(crate) fn new(
        number: usize,
        known: Vec<Member>,
        founds: bool,
        dir: PathBuf,
        seed: u64,
        findings: &Arc<Findings>,
    ) -> Arc<Self> {
        let id = id_of(number);
        let identity = Identity {
            cluster_id: CLUSTER_ID,
            member_id: id,
            founds,
            known,
        };
        // With threads, since nothing runs yet that could take steps.
        let store = Store::open(options(&dir)).unwrap();
        bootstrap::remember(&store, &identity).unwrap();
        store.close().unwrap();
        Arc::new(Self {
            number,
            name: name_of(number),
            id,
            dir,
            identity,
            seed,
            boots: AtomicU64::default(),
            slow_disk: Arc::default(),
            running: Mutex::default(),
            ended: Mutex::default(),
            orders: Mutex::default(),
            findings: Arc::clone(findings),
        })
    }

    /// Without effect on a member that does not run.
    pub(crate) fn order(&self, order: Order) {
        if let Some(orders) = &*self.orders.lock() {
            // It may be about to end.
            let _ = orders.send(order);
        }
    }

    /// Lets go of the process, which is about to be ended.
    pub(crate) fn let_go(&self) {
        self.running.lock().take();
        self.orders.lock().take();
        self.ended.lock().take();
    }

    /// One process, from its start until somebody ends it.
    pub(crate) async fn run(self: Arc<Self>) -> turmoil::Result {
        let boot = self.boots.fetch_add(1, Ordering::Relaxed);
        let disk = Disk::new(
            self.seed ^ (self.id << 32) ^ boot,
            Arc::clone(&self.slow_disk),
        );
        tokio::spawn(Arc::clone(&disk).run());
        let store = Store::open_on(options(&self.dir), &*disk)?;
        let lessor = Lessor::new(Clock::default(), None);
        let parts = Parts::load(&self.identity, Arc::clone(&store), lessor)?;
        let _process = Process {
            store,
            hub: Arc::clone(&parts.hub),
        };
        let raft = self.start_raft(&parts, disk).await?;
        let context = context(&raft, parts);
        let probed = Arc::clone(&raft);
        tokio::spawn(async move {
            probe::run(Arc::clone(probed.peers()), HEARTBEAT).await;
            probed.removed();
        });
        tokio::spawn(follow_members(
            Arc::clone(&context.cluster),
            Arc::clone(&raft),
            CancellationToken::new(),
        ));
        let (orders, mut ordered) = mpsc::unbounded_channel();
        *self.orders.lock() = Some(orders);
        *self.running.lock() = Some(Arc::clone(&context));
        let serving = net::serve(Arc::clone(&context));
        tokio::pin!(serving);
        loop {
            tokio::select! {
                biased;
                end = raft.failed() => {
                    *self.ended.lock() = Some(end);
                    // Whoever runs the simulation ends the process.
                    std::future::pending::<()>().await;
                }
                Some(order) = ordered.recv() => {
                    let (machine, context) = (Arc::clone(&self), Arc::clone(&context));
                    tokio::spawn(async move { machine.carry_out(&context, order).await });
                }
                served = serving.as_mut() => served?,
            }
        }
    }

    async fn start_raft(&self, parts: &Parts, disk: Arc<Disk>) -> turmoil::Result<Arc<RaftNode>> {
        let whose = Whose {
            cluster_id: CLUSTER_ID,
            member_id: self.id,
        };
        let peers = Arc::new(Peers::new(whose, net::dial(), Clock::default()));
        let members = parts.cluster.members();
        for member in self.identity.known.iter().chain(&members) {
            peers.set(member.id, &member.peer_ur_ls);
        }
        let founder = |member: &Member| (member.id, PeerNode::at(member.peer_ur_ls.clone()));
        let options = RaftOptions {
            founders: self
                .identity
                .founds
                .then(|| members.iter().map(founder).collect()),
            peers,
            wal_segment_bytes: WAL_SEGMENT_BYTES,
            max_wals: 2,
            runner: disk,
            heartbeat: HEARTBEAT,
            election: ELECTION,
            snapshot_count: SNAPSHOT_COUNT,
            catchup_entries: CATCHUP_ENTRIES,
            ..RaftOptions::new(self.id, CLUSTER_ID, self.dir.join("wal"))
        };
        let watched = Watched {
            inner: parts.applier(),
            member: self.name.clone(),
            findings: Arc::clone(&self.findings),
        };
        Ok(RaftNode::start(options, Arc::clone(&parts.store), Arc::new(watched)).await?)
    }

    async fn carry_out(&self, context: &Context, order: Order) {
        let raft = &context.raft;
        let outcome = match &order {
            Order::Transfer(target) => format!("{}", raft.transfer_leadership(*target).await),
            Order::Change(change) => {
                let lock = raft.lock_changes().await;
                // What was committed before is known here after this, and only then is it known whether there is anything to do.
                if raft.read_barrier().await.is_err() || !is_news(context, change) {
                    return;
                }
                format!("{:?}", raft.change(&lock, change).await)
            }
        };
        self.findings
            .note(format!("{} {order:?}: {outcome}", self.name));
    }
}

fn is_news(context: &Context, change: &Change) -> bool {
    let member = |id: &u64| context.cluster.member(*id);
    match change {
        Change::AddVoter { id, .. } | Change::AddLearner { id, .. } => {
            member(id).is_none() && !context.cluster.is_removed(*id)
        }
        Change::Promote { id } => member(id).is_some_and(|member| member.is_learner),
        Change::Remove { id } | Change::Update { id, .. } => member(id).is_some(),
    }
}

/// Ends with its process as the operating system would end it: nothing is written any more, and the files are closed.
struct Process {
    store: Arc<Store>,
    hub: Arc<Hub>,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.hub.close();
        self.store.abandon();
    }
}

fn options(dir: &std::path::Path) -> StoreOptions {
    StoreOptions {
        dir: dir.join("db"),
        engine: Kind::Redb,
        value_cache_bytes: 1 << 20,
        engine_cache_bytes: 1 << 20,
        compaction_batch_limit: 1000,
        compaction_sleep: Duration::from_millis(1),
        // When is the disk's to say.
        batch_interval: Duration::ZERO,
        batch_limit: 1000,
    }
}

fn context(raft: &Arc<RaftNode>, parts: Parts) -> Arc<Context> {
    let second = Duration::from_secs(1);
    Arc::new(Context {
        headers: Headers::new(raft, &parts.cluster),
        ids: Arc::new(RequestIds::new(parts.cluster.member_id)),
        limits: Limits {
            txn_ops_max: 128,
            request_bytes_max: 1 << 20,
            quota_bytes: None,
            quota_told: 0,
            request_timeout: 5 * second + 2 * ELECTION,
            lease_ttl_secs_min: 2,
            slow_request: second,
            slow_apply: second,
        },
        rules: MemberRules {
            strict: false,
            learners_max: 1,
            clock: Clock::default(),
        },
        budget: Budget::new(16 << 20),
        watch: WatchConfig {
            progress_interval: 600 * second,
            fragment_bytes: 1 << 20,
            election_timeout: ELECTION,
        },
        wide_reads: WideReads::default(),
        defragmenter: Arc::new(Defragmenter::new(
            Arc::clone(&parts.store),
            Clock::default(),
            None,
        )),
        whole_reads: WholeReads::default(),
        store: parts.store,
        raft: Arc::clone(raft),
        lessor: parts.lessor,
        alarms: parts.alarms,
        cluster: parts.cluster,
        hub: parts.hub,
    })
}

/// The applier, and a witness of what it is given.
#[derive(Debug)]
struct Watched {
    inner: Applier,
    member: String,
    findings: Arc<Findings>,
}

impl Apply for Watched {
    fn apply(&self, at: LogPosition, request: &InternalRaftRequest) -> Applied {
        self.findings
            .applied(&self.member, at, &request.encode_to_vec());
        self.inner.apply(at, request)
    }

    fn apply_empty(&self, at: LogPosition) {
        self.findings.applied(&self.member, at, b"");
        self.inner.apply_empty(at);
    }

    fn apply_membership(&self, at: LogPosition, members: &[GroupMember], stored: Bytes) {
        self.findings.applied(&self.member, at, &stored);
        self.inner.apply_membership(at, members, stored);
    }

    fn settle(&self) {
        self.inner.settle();
    }
}
