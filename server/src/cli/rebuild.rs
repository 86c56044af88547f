//! `ballast rebuild`: replaces the data of a member that does not run by the leader's.
//!
//!     1 lock and open the member's data       who it is, where the others are
//!     2 the leader's hash against the others' most members must have what the leader has
//!     3 the leader's snapshot, as it comes      sums compared
//!     4 install                               CURRENT names the new database: that is the moment it counts
//!
//! Promises: the member stays who it is, and keeps its log and its vote: it took part in decisions, and a member that forgets them could give its
//! voice twice, or for a log without entries that it had acknowledged. Only what was applied is replaced, by a state that is no older than what this
//! member had applied, so the log behind it joins on. A crash leaves the old database or the new one; then it is run again.
//! Not here: the same for a running member that is behind the log (`raft/snapshot.rs`).
//!
//! etcd has no such command: there a member is removed, its directory deleted, and a new member added.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::ballastpeerpb as peerpb;
use ballast_api::etcdserverpb::Member;
use ballast_storage::mvcc::{InstallOptions, Receiving, Store};
use ballast_storage::schema::{Table, meta};
use ballast_storage::{LogPosition, StorageError};
use prost::Message as _;
use tonic::{Status, Streaming};
use tracing_subscriber::filter::LevelFilter;

use crate::clock::Clock;
use crate::config::{Asked, Config, Stop, Values};
use crate::data_dir::{DataDir, DataDirError};
use crate::logging::{self, LogFormat, Outputs};
use crate::peer::identity::Whose;
use crate::peer::{Dial, Peers, Purpose};
use crate::raft::snapshot;
use crate::tls::{Tls, TlsError};
use crate::{corrupt, node};

const HELP: &str = "Replaces the data of a member that does not run by the leader's, and leaves it the member it is.

Usage: ballast rebuild <the member's own flags>

Needed are --data-dir (or --config-file), --wal-dir if it has one, and the flags of peers' TLS.
The other members are found from the member's own list. Most of them must agree with the leader. The member's log and vote stay.
Afterwards start the member, and disarm the alarm: etcdctl alarm disarm.
";

/// While the leader has applied less than this member had.
const ATTEMPTS_MAX: u32 = 30;
const RETRY: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}")]
    BadArgs(String),
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error(transparent)]
    Start(#[from] node::StartError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("{path} does not say which member of which cluster it is of")]
    NoIdentity { path: PathBuf },
    #[error("no other member says that it leads: {0}")]
    NoLeader(String),
    #[error(
        "most members do not agree with the leader {leader:x}: move leadership to a member that is right first"
    )]
    LeaderWrong { leader: u64 },
    #[error("the leader's snapshot: {0}")]
    Snapshot(String),
    #[error("the leader has applied less than this member had: try again once it has caught up")]
    LeaderBehind,
}

/// Runs `ballast rebuild` with what follows on the command line.
pub(super) fn run(args: &[String]) -> ExitCode {
    let config = match config(args) {
        Ok(Some(config)) => config,
        Ok(None) => {
            super::print(HELP);
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            super::complain(&format!("Error: {why}"));
            return ExitCode::from(2);
        }
    };
    logging::start(LevelFilter::INFO, LogFormat::Json, Outputs::stderr());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(rebuild(&config)),
        Err(error) => Err(Failure::BadArgs(error.to_string())),
    };
    let dir = config.data_dir.display();
    match outcome {
        Ok(at) => {
            super::print(&format!(
                "rebuilt {dir} as of entry {} of the log; start the member, then disarm the alarm\n",
                at.index
            ));
            ExitCode::SUCCESS
        }
        Err(error) => {
            super::complain(&format!("Error: cannot rebuild {dir}: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// By the server's rules. None when help is asked for.
fn config(args: &[String]) -> Result<Option<Config>, Failure> {
    let stopped = |stop| match stop {
        Stop::Told(text) | Stop::BadFlag(text) | Stop::BadConfig(text) => Failure::BadArgs(text),
    };
    match Values::from_args(args).map_err(stopped)? {
        Asked::Run(values) => {
            let values = values.complete(&[]).map_err(stopped)?;
            Config::from_values(&values)
                .map(Some)
                .map_err(Failure::BadArgs)
        }
        Asked::Help | Asked::Version => Ok(None),
    }
}

async fn rebuild(config: &Config) -> Result<LogPosition, Failure> {
    if !config.data_dir.join("member").exists() {
        return Err(Failure::NoIdentity {
            path: config.data_dir.clone(),
        });
    }
    let data_dir = DataDir::open(&config.data_dir, config.wal_dir.as_deref())?;
    let tls = Tls::load(config.peer_tls.clone(), &config.data_dir, &[])?;
    let store = node::open_store(config, &data_dir).await?;
    let replaced = replace(config, &store, &tls).await;
    let closing = Arc::clone(&store);
    // What it would say of the old database is of no consequence any more.
    let _ = tokio::task::spawn_blocking(move || closing.close()).await;
    replaced
}

async fn replace(
    config: &Config,
    store: &Arc<Store>,
    tls: &Arc<Tls>,
) -> Result<LogPosition, Failure> {
    let whose = whose(store, &config.data_dir)?;
    let mut others = Vec::new();
    let dial = Dial::new(Some(Arc::clone(tls)), config.election);
    let peers = Peers::new(whose, dial, Clock::default());
    for (_, stored) in store.table(Table::Member)? {
        let Ok(member) = Member::decode(stored) else {
            continue;
        };
        if member.id != whose.member_id {
            peers.set(member.id, &member.peer_ur_ls);
            others.push(member.id);
        }
    }
    let had = store.applied();
    for attempt in 0..ATTEMPTS_MAX {
        if attempt > 0 {
            tokio::time::sleep(RETRY).await;
        }
        let (leader, mut parts) = leaders_snapshot(&peers, &others).await?;
        check_leader(&peers, leader, &others, config.corruption.patience).await?;
        let head = first_part(&mut parts).await?;
        let applied = head.applied.unwrap_or_default();
        let applied = LogPosition {
            term: applied.term,
            index: applied.index,
        };
        if applied.index < had.index {
            continue;
        }
        let file = config.data_dir.join("member/snapshot.received");
        let received = snapshot::receive(store, &file, head.clone(), parts).await;
        let received = received.map_err(|status| Failure::Snapshot(status.message().to_owned()))?;
        let options = InstallOptions {
            applied,
            membership: head.membership,
        };
        return install(store, received, options).await.map(|()| applied);
    }
    Err(Failure::LeaderBehind)
}

fn whose(store: &Store, path: &Path) -> Result<Whose, Failure> {
    let stored = store.table(Table::Meta)?;
    let id = |name: &[u8]| {
        let (_, value) = stored.iter().find(|(key, _)| key == name)?;
        Some(u64::from_be_bytes(value.as_ref().try_into().ok()?))
    };
    match (id(meta::CLUSTER_ID), id(meta::MEMBER_ID)) {
        (Some(cluster_id), Some(member_id)) => Ok(Whose {
            cluster_id,
            member_id,
        }),
        _ => Err(Failure::NoIdentity {
            path: path.to_owned(),
        }),
    }
}

/// Of the one that answers as the leader.
async fn leaders_snapshot(
    peers: &Peers,
    others: &[u64],
) -> Result<(u64, Streaming<peerpb::SnapshotPart>), Failure> {
    let mut refusals = Vec::new();
    for id in others {
        let Some(mut client) = peers.client(*id, Purpose::Snapshot) else {
            continue;
        };
        let request = peerpb::FetchSnapshotRequest {
            format: snapshot::FORMAT,
        };
        match client.fetch_snapshot(request).await {
            Ok(parts) => return Ok((*id, parts.into_inner())),
            Err(status) => refusals.push(format!("{id:x}: {}", status.message())),
        }
    }
    Err(Failure::NoLeader(refusals.join("; ")))
}

/// Most members, the leader among them, must have the same at the leader's revision. This one is not asked.
async fn check_leader(
    peers: &Peers,
    leader: u64,
    others: &[u64],
    patience: Duration,
) -> Result<(), Failure> {
    // That of the leader first, for the revision.
    let revision = corrupt::ask(peers, &[leader], 0, patience).await;
    let revision = match revision.first().map(|answer| &answer.hash) {
        Some(Ok(hash)) => hash.current_revision,
        Some(Err(why)) => return Err(Failure::NoLeader(why.clone())),
        None => return Err(Failure::NoLeader(String::new())),
    };
    let answers = corrupt::ask(peers, others, revision, patience).await;
    let agreeing = corrupt::agreeing_with(leader, &answers);
    // Of all, this member included.
    if agreeing > others.len().div_ceil(2) {
        return Ok(());
    }
    Err(Failure::LeaderWrong { leader })
}

async fn first_part(
    parts: &mut Streaming<peerpb::SnapshotPart>,
) -> Result<peerpb::SnapshotHead, Failure> {
    let told = |status: Status| Failure::Snapshot(status.message().to_owned());
    let first = parts.message().await.map_err(told)?;
    let head = first.and_then(|part| part.head);
    let head = head.ok_or_else(|| Failure::Snapshot("it has no head".to_owned()))?;
    snapshot::check_format(&head).map_err(told)?;
    Ok(head)
}

async fn install(
    store: &Arc<Store>,
    received: Receiving,
    options: InstallOptions,
) -> Result<(), Failure> {
    let store = Arc::clone(store);
    let installed = tokio::task::spawn_blocking(move || store.install(received, &options)).await;
    match installed {
        Ok(installed) => Ok(installed?),
        // Only a panic ends it otherwise.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
