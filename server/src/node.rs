//! A member: the one place where its parts are built, joined, started and stopped.
//!
//! etcd: server/embed/etcd.go, server/etcdserver/{bootstrap,server}.go.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::{API_VERSION, etcdserverpb as pb, leasepb, membershippb};
use ballast_storage::StorageError;
use ballast_storage::mvcc::{Pace, Store, StoreOptions};
use ballast_storage::schema::{Table, meta};
use prost::Message;
use tokio_util::sync::CancellationToken;

use crate::apply::{Alarms, Applier};
use crate::bootstrap::{self, BootstrapError, Identity};
use crate::clock::Clock;
use crate::cluster::Cluster;
use crate::config::Config;
use crate::config::urls::{Endpoint, Url};
use crate::data_dir::{DataDir, DataDirError};
use crate::defrag::{self, Cause, Defragmenter};
use crate::health::{Endpoints, Http};
use crate::lease::{Lessor, expiry};
use crate::peer::identity::Whose;
use crate::peer::{Dial, Peers, probe};
use crate::raft::{End, PeerNode, ProposeError, RaftNode, RaftOptions};
use crate::rpc::budget::Budget;
use crate::rpc::header::Headers;
use crate::rpc::kv::WideReads;
use crate::rpc::members::MemberRules;
use crate::rpc::mux::Mux;
use crate::rpc::peer::PeerMux;
use crate::rpc::{Context, Limits, RequestIds, WholeReads};
use crate::serve::stream::Security;
use crate::serve::{Connections, HttpOnly, Listener, Served};
use crate::spans::Exporting;
use crate::tasks::Group;
use crate::tls::{Tls, TlsError};
use crate::version::Version;
use crate::watch::{Hub, WatchMetrics};
use crate::{compactor, corrupt, logging, metrics, version};

/// How long open requests may go on once the member stops.
const DRAIN: Duration = Duration::from_secs(2);
/// And requests of the others, after that.
const PEERS_DRAIN: Duration = Duration::from_millis(200);
/// Between pings of connections that peers made.
const PEER_PING_INTERVAL: Duration = Duration::from_secs(1);
/// How long a member that was removed still takes part.
const REMOVED_LINGER: Duration = Duration::from_secs(1);
/// Between attempts to publish this member's name.
const PUBLISH_RETRY: Duration = Duration::from_millis(100);
/// The engine's own page cache; current values have a cache of their own. Half of it is for pages not yet written: a batch of the committer's
/// fits (its `BATCH_BYTES_MAX`).
const ENGINE_CACHE_BYTES: u64 = 16 * 1024 * 1024;

/// Why a member does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("listen on {url}: {source}")]
    Listen { url: Url, source: std::io::Error },
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    #[error("{path} holds a member record that cannot be read: {why}")]
    Unreadable { path: PathBuf, why: String },
    #[error(transparent)]
    Raft(#[from] crate::raft::node::StartError),
    #[error("--enable-distributed-tracing: {0}")]
    Tracing(String),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(
        "invalid downgrade; server version is lower than determined cluster version (current-server-version {own}, determined-cluster-version {determined})"
    )]
    TooOld { own: Version, determined: Version },
    #[error("checkInitialHashKV failed: {0}")]
    Corrupt(String),
    #[error("stopped while starting: {0}")]
    Stopped(String),
    #[error(transparent)]
    Ended(End),
}

/// A running member.
#[derive(Debug)]
pub struct Node {
    context: Arc<Context>,
    serving: Group,
    /// What the others ask. It goes on while clients are answered, who may wait for it.
    peering: Group,
    spans: Option<Exporting>,
    /// Held to the end.
    _data_dir: DataDir,
}

impl Node {
    /// Opens the data, joins the parts and serves. Returns once clients are answered.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let listeners = Listeners::bind(&config)?;
        let spans = config.tracing.as_ref().map(Exporting::start).transpose();
        let spans = spans.map_err(StartError::Tracing)?;
        let data_dir = DataDir::open(&config.data_dir, config.wal_dir.as_deref())?;
        let security = Securities::load(&config)?;
        let store = open_store(&config, &data_dir).await?;
        let identity = bootstrap::identity(&config, &security.peer, &store, &data_dir.db).await?;
        let clock = Clock::default();
        let lessor = Lessor::new(clock, config.lease_checkpoint_interval());
        let member = Parts::load(&identity, Arc::clone(&store), lessor)?;
        metrics::start(identity.member_id, &config);

        let raft = member
            .start_raft(&config, &identity, &security.peer, &data_dir)
            .await?;
        let context = Arc::new(Context {
            headers: Headers::new(&raft, &member.cluster),
            ids: Arc::new(RequestIds::new(identity.member_id)),
            limits: Limits {
                txn_ops_max: config.txn_ops_max,
                request_bytes_max: config.request_bytes_max,
                quota_bytes: config.quota_bytes,
                quota_told: config.quota_told,
                request_timeout: config.request_timeout(),
                lease_ttl_secs_min: config.lease_ttl_secs_min(),
                slow_request: config.warn_request_after,
                slow_apply: config.warn_apply_after,
            },
            rules: MemberRules {
                strict: config.strict_reconfig_check,
                learners_max: config.learners_max,
                clock,
            },
            budget: Budget::new(config.response_memory_bytes),
            watch: config.watch_config(),
            wide_reads: WideReads::default(),
            defragmenter: Arc::new(Defragmenter::new(
                Arc::clone(&store),
                clock,
                config.quota_bytes,
            )),
            whole_reads: WholeReads::default(),
            store,
            raft,
            lessor: member.lessor,
            alarms: member.alarms,
            cluster: member.cluster,
            hub: member.hub,
        });
        let node = Self {
            context,
            serving: Group::default(),
            peering: Group::default(),
            spans,
            _data_dir: data_dir,
        };
        node.start_loops(&config);
        // The others must reach this member before there can be a leader.
        let http = node.serve_peers(&security, &config)?;
        tokio::select! {
            published = node.publish(&config) => published?,
            end = node.failed() => return Err(StartError::Ended(end)),
        }
        node.serve(listeners, &security, &config, &http);
        node.convert();
        Ok(node)
    }

    /// Resolves when the member cannot go on, and says why.
    pub async fn failed(&self) -> End {
        self.context.raft.failed().await
    }

    fn start_loops(&self, config: &Config) {
        let context = &self.context;
        self.serving.tasks.spawn(probe_peers(
            Arc::clone(&context.raft),
            config.heartbeat,
            self.serving.stop.clone(),
        ));
        self.serving.tasks.spawn(follow_members(
            Arc::clone(&context.cluster),
            Arc::clone(&context.raft),
            self.serving.stop.clone(),
        ));
        self.serving.tasks.spawn(expiry::follow_leadership(
            Arc::clone(&context.lessor),
            Arc::clone(&context.raft),
            config.election,
            self.serving.stop.clone(),
        ));
        self.serving.tasks.spawn(expiry::revoke_expired(
            Arc::clone(&context.lessor),
            Arc::clone(&context.raft),
            Arc::clone(&context.ids),
            self.serving.stop.clone(),
        ));
        if config.lease_checkpoint_interval().is_some() {
            self.serving.tasks.spawn(expiry::checkpoint_remaining(
                Arc::clone(&context.lessor),
                Arc::clone(&context.raft),
                Arc::clone(&context.ids),
                self.serving.stop.clone(),
            ));
        }
        self.serving.tasks.spawn(version::run(
            Arc::clone(context),
            config.downgrade_check_every,
            self.serving.stop.clone(),
        ));
        self.serving.tasks.spawn(corrupt::run(
            Arc::clone(context),
            config.corruption,
            self.serving.stop.clone(),
        ));
        self.serving.tasks.spawn(compactor::run(
            Arc::clone(context),
            config.auto_compaction,
            self.serving.stop.clone(),
        ));
        self.serving.tasks.spawn(defrag::follow(
            Arc::clone(&context.defragmenter),
            config.auto_defrag,
            self.serving.stop.clone(),
        ));
    }

    /// Tells the cluster this member's name and client URLs, and the version, where they are not known yet.
    async fn publish(&self, config: &Config) -> Result<(), StartError> {
        let cluster = &self.context.cluster;
        let client_urls: Vec<String> = texts(&config.advertise_client_urls);
        let known = cluster.member(cluster.member_id);
        if known
            .is_none_or(|member| member.name != config.name || member.client_ur_ls != client_urls)
        {
            let request = membershippb::ClusterMemberAttrSetRequest {
                member_id: cluster.member_id,
                member_attributes: Some(membershippb::Attributes {
                    name: config.name.clone(),
                    client_urls,
                }),
            };
            self.propose(pb::InternalRaftRequest {
                cluster_member_attr_set: Some(request),
                ..Default::default()
            })
            .await?;
            tracing::info!(
                local_member_id = %format!("{:x}", cluster.member_id),
                "published local member to cluster through raft"
            );
        }
        // Of several members the leader decides, once it has asked them.
        if cluster.version().is_none() && cluster.members().len() == 1 {
            self.wait_for_leader().await?;
            version::set(&self.context, Version::own()).await;
        }
        self.wait_for_leader().await
    }

    /// A restart may have nothing to tell. It still is ready only once there is a leader, as etcd, which publishes every time.
    async fn wait_for_leader(&self) -> Result<(), StartError> {
        loop {
            match self.context.raft.read_barrier().await {
                Ok(()) => return Ok(()),
                Err(ProposeError::Stopping) => {
                    return Err(StartError::Stopped(ProposeError::Stopping.to_string()));
                }
                Err(_) => tokio::time::sleep(PUBLISH_RETRY).await,
            }
        }
    }

    /// Proposes until there is a leader to take it.
    async fn propose(&self, mut request: pb::InternalRaftRequest) -> Result<(), StartError> {
        loop {
            request.header = Some(self.context.ids.header());
            match self.context.raft.propose(request.clone()).await {
                Ok(_) => return Ok(()),
                Err(ProposeError::Stopping) => {
                    return Err(StartError::Stopped(ProposeError::Stopping.to_string()));
                }
                Err(error) => {
                    tracing::debug!(error = %error, "cannot publish yet");
                    tokio::time::sleep(PUBLISH_RETRY).await;
                }
            }
        }
    }

    fn serve_peers(&self, security: &Securities, config: &Config) -> Result<Arc<Http>, StartError> {
        let http = Arc::new(Http::new(
            Arc::clone(&self.context),
            config.request_timeout(),
            config.http_access.clone(),
        ));
        let mux = PeerMux::new(&self.context, Arc::clone(&http));
        let settings = Connections {
            concurrent_streams_max: config.concurrent_streams_max,
            keepalive_interval: Some(PEER_PING_INTERVAL),
            keepalive_timeout: config.election,
            // Peers ping as often as they need to.
            keepalive_min_time: None,
        };
        for url in &config.listen_peer_urls {
            let listener = Listeners::bind_one(url, config)?;
            let serving = listener.serve(
                Served::Peer(Box::new(mux.clone())),
                security.of(std::slice::from_ref(url), Traffic::Http(Endpoints::Peer)),
                settings,
                self.peering.tasks.clone(),
                self.peering.stop.clone(),
            );
            self.peering.tasks.spawn(serving);
            tracing::info!(address = %url, "serving peer traffic");
        }
        Ok(http)
    }

    fn serve(
        &self,
        listeners: Listeners,
        security: &Securities,
        config: &Config,
        http: &Arc<Http>,
    ) {
        let split = !config.listen_client_http_urls.is_empty();
        let mux = Mux::new(&self.context, (!split).then(|| Arc::clone(http)));
        let settings = Connections {
            concurrent_streams_max: config.concurrent_streams_max,
            keepalive_interval: config.keepalive_interval,
            keepalive_timeout: config.keepalive_timeout,
            keepalive_min_time: Some(config.keepalive_min_time),
        };
        for Bound {
            listener,
            urls,
            traffic,
        } in listeners.0
        {
            let served = match traffic {
                Traffic::Grpc => Served::Grpc(Box::new(mux.clone())),
                Traffic::Http(endpoints) => Served::HttpOnly(HttpOnly {
                    http: Arc::clone(http),
                    endpoints,
                    secure: false,
                }),
            };
            let serving = listener.serve(
                served,
                security.of(&urls, traffic),
                settings,
                self.serving.tasks.clone(),
                self.serving.stop.clone(),
            );
            self.serving.tasks.spawn(serving);
            for url in urls {
                traffic.tell(&url, split);
            }
        }
        tracing::info!(
            etcd_version = API_VERSION,
            ballast_version = env!("CARGO_PKG_VERSION"),
            "ready to serve client requests"
        );
    }

    /// Begins to bring the database to the engine that the flag names, when it has another one. Nobody waits for it; it is given up at
    /// the stop, and begun anew at the next start.
    fn convert(&self) {
        let store = Arc::clone(&self.context.store);
        let Some(to) = store.converts_to() else {
            return;
        };
        let from = store.engine();
        tracing::warn!(
            %from, %to,
            "the database has another engine than --storage-engine names; serving from it while it is converted"
        );
        let defragmenter = Arc::clone(&self.context.defragmenter);
        // Not one of the tasks that the stop waits for: the store's close ends it.
        tokio::spawn(async move {
            match defragmenter.run(Cause::Engine).await {
                Ok(report) => tracing::info!(
                    %from, %to,
                    size_before = report.before.allocated,
                    size_after = report.after.allocated,
                    took = ?report.took,
                    "converted the database"
                ),
                Err(error) => tracing::warn!(
                    %from, %to, %error,
                    "the database was not converted; a defragmentation or the next start tries again"
                ),
            }
        });
    }

    /// Stops taking requests, lets open ones end, and leaves everything on the disk.
    pub async fn stop(mut self) -> Result<(), StorageError> {
        tracing::info!("stopping");
        self.context.raft.hand_over().await;
        self.context.hub.close();
        if !self.serving.end(DRAIN).await {
            tracing::warn!("closing connections that did not end by themselves");
        }
        logging::library_stops();
        self.context.raft.shutdown().await;
        // Their streams end with Raft, not before: they are as long as this member's life.
        self.peering.end(PEERS_DRAIN).await;
        let store = Arc::clone(&self.context.store);
        let spans = self.spans.take();
        let closed = tokio::task::spawn_blocking(move || {
            if let Some(spans) = spans {
                spans.stop();
            }
            store.close()
        })
        .await;
        closed.unwrap_or(Ok(()))?;
        tracing::info!("stopped");
        Ok(())
    }
}

/// What goes through a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traffic {
    /// And HTTP, unless that has listeners of its own.
    Grpc,
    Http(Endpoints),
}

impl Traffic {
    /// Tells the log what is served where; `split` when HTTP has listeners of its own.
    fn tell(self, url: &Url, split: bool) {
        let traffic = match self {
            Traffic::Grpc if split => "grpc",
            Traffic::Grpc => "grpc+http",
            Traffic::Http(Endpoints::Client) => "http",
            Traffic::Http(Endpoints::Metrics) => {
                tracing::info!(address = %url, "serving metrics");
                return;
            }
            Traffic::Http(Endpoints::Peer) => {
                tracing::info!(address = %url, "serving peer traffic");
                return;
            }
        };
        if url.is_secure() {
            tracing::info!(address = %url, traffic, "serving client traffic securely");
        } else {
            tracing::info!(address = %url, traffic, "serving client traffic insecurely; this is strongly discouraged!");
        }
    }
}

/// TLS of clients and of peers.
struct Securities {
    client: Arc<Tls>,
    peer: Arc<Tls>,
}

impl Securities {
    fn load(config: &Config) -> Result<Self, TlsError> {
        let hosts = |lists: &[&[Url]]| -> Vec<String> {
            let urls = lists.iter().flat_map(|list| list.iter());
            urls.filter_map(|url| url.host().map(str::to_owned))
                .collect()
        };
        let clients = hosts(&[&config.listen_client_urls, &config.listen_client_http_urls]);
        let peers = hosts(&[&config.listen_peer_urls]);
        let (client, peer) = (config.client_tls.clone(), config.peer_tls.clone());
        Ok(Self {
            client: Tls::load(client, &config.data_dir, &clients)?,
            peer: Tls::load(peer, &config.data_dir, &peers)?,
        })
    }

    /// What the URLs of one listener ask for.
    fn of(&self, urls: &[Url], traffic: Traffic) -> Security {
        let tls = match traffic {
            Traffic::Http(Endpoints::Peer) => &self.peer,
            _ => &self.client,
        };
        let secure = urls.iter().filter(|url| url.is_secure()).count();
        match secure {
            0 => Security::Plain,
            all if all == urls.len() => Security::Tls(Arc::clone(tls)),
            _ => Security::Either(Arc::clone(tls)),
        }
    }
}

/// An open listener, and the URLs it is for: two when one address is given with and without TLS.
struct Bound {
    listener: Listener,
    urls: Vec<Url>,
    traffic: Traffic,
}

/// Bound before anything else: an address in use must not cost a start.
struct Listeners(Vec<Bound>);

impl Listeners {
    fn bind(config: &Config) -> Result<Self, StartError> {
        let mut bound: Vec<Bound> = Vec::new();
        // For now only to know that they are free: whoever asks for this member is to be refused, not left waiting, until it answers.
        for url in &config.listen_peer_urls {
            Self::bind_one(url, config)?;
        }
        for (urls, traffic) in [
            (&config.listen_client_urls, Traffic::Grpc),
            (
                &config.listen_client_http_urls,
                Traffic::Http(Endpoints::Client),
            ),
            (
                &config.listen_metrics_urls,
                Traffic::Http(Endpoints::Metrics),
            ),
        ] {
            for url in urls {
                let same = bound
                    .iter_mut()
                    .find(|other| other.traffic == traffic && same_address(&other.urls[0], url));
                if let Some(same) = same {
                    same.urls.push(url.clone());
                    continue;
                }
                bound.push(Bound {
                    listener: Self::bind_one(url, config)?,
                    urls: vec![url.clone()],
                    traffic,
                });
            }
        }
        Ok(Self(bound))
    }

    fn bind_one(url: &Url, config: &Config) -> Result<Listener, StartError> {
        Listener::bind(url, config).map_err(|source| StartError::Listen {
            url: url.clone(),
            source,
        })
    }
}

/// Asks the others whether they are there, until `stop`, or they say that this member is none of them any more.
async fn probe_peers(raft: Arc<RaftNode>, slow_after: Duration, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = probe::run(Arc::clone(raft.peers()), slow_after) => raft.removed(),
    }
}

/// Keeps the connections to the others in step with the list of members, until `stop`, or this member is none any more.
pub async fn follow_members(cluster: Arc<Cluster>, raft: Arc<RaftNode>, stop: CancellationToken) {
    let peers = Arc::clone(raft.peers());
    let mut changes = cluster.changes();
    loop {
        changes.mark_unchanged();
        let members = cluster.members();
        for member in &members {
            peers.set(member.id, &member.peer_ur_ls);
        }
        peers.retain(&|id| !cluster.is_removed(id));
        if cluster.is_removed(cluster.member_id) {
            // The others may need this member's word for the change to be known to all of them.
            tokio::time::sleep(REMOVED_LINGER).await;
            return raft.removed();
        }
        tokio::select! {
            () = stop.cancelled() => return,
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}

/// True for one address with and without TLS. The same URL twice is still an address in use.
fn same_address(one: &Url, other: &Url) -> bool {
    // A port of 0 is a new one each time.
    let named = |url: &Url| match url.endpoint() {
        Ok(Endpoint::Tcp { port: 0, .. }) | Err(_) => None,
        Ok(endpoint) => Some(endpoint),
    };
    one.is_secure() != other.is_secure() && named(one).is_some_and(|at| named(other) == Some(at))
}

pub(crate) async fn open_store(
    config: &Config,
    data_dir: &DataDir,
) -> Result<Arc<Store>, StartError> {
    let options = StoreOptions {
        dir: data_dir.db.clone(),
        engine: config.storage_engine,
        value_cache_bytes: config.value_cache_bytes,
        engine_cache_bytes: ENGINE_CACHE_BYTES,
        compaction_batch_limit: config.compaction_batch_limit,
        compaction_sleep: config.compaction_sleep,
        batch_interval: config.batch_interval,
        batch_limit: config.batch_limit,
    };
    let freed_min = config.bootstrap_defrag_bytes;
    let store = tokio::task::spawn_blocking(move || {
        let store = Store::open(options)?;
        if let Some(freed_min) = freed_min {
            defragment_first(&store, freed_min)?;
        }
        Ok::<_, StorageError>(store)
    })
    .await
    .map_err(|error| StartError::Stopped(error.to_string()))??;
    store.set_observer(Arc::new(metrics::disk::StoreMetrics::default()));
    Ok(store)
}

/// `--bootstrap-defrag-threshold-megabytes`: nobody is served yet.
fn defragment_first(store: &Store, freed_min: u64) -> Result<(), StorageError> {
    let sizes = store.sizes();
    let free = sizes.allocated.saturating_sub(sizes.in_use);
    if free < freed_min {
        tracing::info!(
            current_db_size_bytes = sizes.allocated,
            current_db_size_in_use_bytes = sizes.in_use,
            defrag_threshold_bytes = freed_min,
            "skipping defragmentation"
        );
        return Ok(());
    }
    let report = match store.defragment(Pace::Urgent) {
        Err(error @ StorageError::NoRoom { .. }) => {
            // It changed nothing, and a member that serves is better than none.
            tracing::warn!(error = %error, "failed to defragment");
            return Ok(());
        }
        done => done?,
    };
    tracing::info!(
        size_before = report.before.allocated,
        size_after = report.after.allocated,
        took = ?report.took,
        "defragmented the database before serving"
    );
    Ok(())
}

/// The replicated state's parts in memory.
#[derive(Debug)]
pub struct Parts {
    pub store: Arc<Store>,
    pub lessor: Arc<Lessor>,
    pub alarms: Arc<Alarms>,
    pub cluster: Arc<Cluster>,
    pub hub: Arc<Hub>,
}

impl Parts {
    pub fn load(
        identity: &Identity,
        store: Arc<Store>,
        lessor: Lessor,
    ) -> Result<Self, StartError> {
        lessor.load(
            decode::<leasepb::Lease>(&store, Table::Lease)?,
            store.leased_keys(),
        );
        let alarms = Alarms::default();
        alarms.load(&store.table(Table::Alarm)?);
        let cluster = Cluster::new(identity.cluster_id, identity.member_id);
        let notes = store.table(Table::Meta)?;
        let note = |name: &[u8]| {
            let found = notes.iter().find(|(key, _)| key == name);
            found.map(|(_, value)| value)
        };
        let version = note(meta::CLUSTER_VERSION)
            .map(|version| String::from_utf8_lossy(version).into_owned());
        let removed = store
            .table(Table::MemberRemoved)?
            .into_iter()
            .filter_map(|(id, _)| Some(u64::from_be_bytes(id[..].try_into().ok()?)))
            .collect();
        let members = decode::<pb::Member>(&store, Table::Member)?;
        let downgrade = note(meta::DOWNGRADE)
            .and_then(|json| serde_json::from_slice::<serde_json::Value>(json).ok())
            .and_then(|json| Some(json.get("target-version")?.as_str()?.to_owned()));
        cluster.load(members, removed, version, downgrade);
        if let Some(determined) = cluster
            .version_parsed()
            .filter(|known| *known > Version::own())
        {
            return Err(StartError::TooOld {
                own: Version::own(),
                determined,
            });
        }
        let watch_metrics = WatchMetrics::default();
        metrics::register(|registry| watch_metrics.register(registry));
        Ok(Self {
            hub: Hub::new(Arc::clone(&store), watch_metrics),
            lessor: Arc::new(lessor),
            alarms: Arc::new(alarms),
            cluster: Arc::new(cluster),
            store,
        })
    }

    /// What changes them.
    pub fn applier(&self) -> Applier {
        Applier {
            store: Arc::clone(&self.store),
            lessor: Arc::clone(&self.lessor),
            alarms: Arc::clone(&self.alarms),
            cluster: Arc::clone(&self.cluster),
            hub: Arc::clone(&self.hub),
        }
    }

    async fn start_raft(
        &self,
        config: &Config,
        identity: &Identity,
        tls: &Arc<Tls>,
        data_dir: &DataDir,
    ) -> Result<Arc<RaftNode>, StartError> {
        let applier = Arc::new(self.applier());
        let whose = Whose {
            cluster_id: self.cluster.cluster_id,
            member_id: self.cluster.member_id,
        };
        let dial = Dial::new(Some(Arc::clone(tls)), config.election);
        let peers = Arc::new(Peers::new(whose, dial, Clock::default()));
        for member in identity.known.iter().chain(&self.cluster.members()) {
            peers.set(member.id, &member.peer_ur_ls);
        }
        if config.gate("InitialCorruptCheck") && self.store.applied().index > 0 {
            let own_id = self.cluster.member_id;
            let members = self.cluster.members();
            let ids: Vec<u64> = members
                .iter()
                .map(|member| member.id)
                .filter(|id| *id != own_id)
                .collect();
            let patience = config.corruption.patience;
            let checked = corrupt::check_at_start(own_id, &self.store, &peers, &ids, patience);
            checked.await.map_err(StartError::Corrupt)?;
        }
        let founders = identity.founds.then(|| {
            let node = |member: &pb::Member| (member.id, PeerNode::at(member.peer_ur_ls.clone()));
            self.cluster.members().iter().map(node).collect()
        });
        let options = RaftOptions {
            founders,
            peers,
            max_wals: config.wals_max as usize,
            unsafe_no_fsync: config.unsafe_no_fsync,
            heartbeat: config.heartbeat,
            election: config.election,
            lease_reads: config.lease_reads,
            force_alone: config.force_new_cluster,
            snapshot_count: config.snapshot_count,
            catchup_entries: config.snapshot_catchup_entries,
            wal_observer: Arc::new(metrics::disk::WalMetrics::default()),
            apply_observer: Arc::new(metrics::ApplyMetrics::new(config.warn_apply_after)),
            ..RaftOptions::new(
                self.cluster.member_id,
                self.cluster.cluster_id,
                &data_dir.wal,
            )
        };
        Ok(RaftNode::start(options, Arc::clone(&self.store), applier).await?)
    }
}

fn decode<M: Message + Default>(store: &Store, table: Table) -> Result<Vec<M>, StartError> {
    store
        .table(table)?
        .into_iter()
        .map(|(_, value)| {
            M::decode(value).map_err(|error| StartError::Unreadable {
                path: PathBuf::from(format!("{table:?}")),
                why: error.to_string(),
            })
        })
        .collect()
}

fn texts(urls: &[Url]) -> Vec<String> {
    urls.iter().map(ToString::to_string).collect()
}

/// [`stop_on_damage`], unless the store is only being closed, or stops already because of another error.
pub fn stop_if_damaged(error: &StorageError) {
    if !matches!(error, StorageError::Stopped { .. }) {
        stop_on_damage(error);
    }
}

/// The disk cannot be trusted any more: say so, and end the process before anything is acknowledged on top of it.
pub fn stop_on_damage(error: &StorageError) -> ! {
    tracing::error!(error = %error, "storage failed; stopping this member");
    std::process::exit(1);
}
