//! Opening what the library is built on: the log and the state machine, and what must be true of them together.
//!
//! etcd: server/etcdserver/bootstrap.go.

use std::sync::Arc;

use ballast_api::etcdserverpb::Member;
use ballast_storage::committer::decode_position;
use ballast_storage::mvcc::Store;
use ballast_storage::schema::{Table, meta};
use ballast_storage::wal::{Done, Wal, WalEntry, WalOptions, WalVote};
use ballast_storage::{LogPosition, StorageError};
use prost::Message;
use tokio::sync::oneshot;

use crate::apply::Apply;
use crate::raft::command::{KIND_MEMBERSHIP, PeerNode, alone};
use crate::raft::forward::Waiting;
use crate::raft::log_store::LogStore;
use crate::raft::node::{Failure, RaftOptions, StartError, raft_error};
use crate::raft::state_machine::StateMachine;
use crate::tasks::blocking;

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

pub(crate) struct Parts {
    pub(crate) wal: Arc<Wal>,
    pub(crate) log: LogStore,
    pub(crate) machine: StateMachine,
    pub(crate) waiting: Arc<Waiting>,
    pub(crate) failure: Failure,
}

pub(crate) async fn open_parts(
    options: &RaftOptions,
    store: &Arc<Store>,
    apply: Arc<dyn Apply>,
) -> Result<Parts, StartError> {
    let opening = options.clone();
    let has_entries = store.applied().index > 0;
    let wal = blocking(move || open_wal(&opening, has_entries))
        .await
        .map_err(raft_error)??;
    go_on_behind_snapshot(&wal, store, options).await?;
    check_log_reaches_engine(&wal, store, options)?;
    if options.force_alone && wal.last() != LogPosition::default() {
        force_alone(&wal, store, options).await?;
    }
    let failure = Failure::new();
    let on_failure = failure.clone();
    store.on_failure(Box::new(move |error| on_failure.set(&error)));
    let on_failure = failure.clone();
    wal.on_failure(Box::new(move |error| on_failure.set(&error)));
    let log = LogStore::new(Arc::clone(&wal), Arc::clone(store), failure.clone());
    let observer = Arc::clone(&options.apply_observer);
    let waiting = Arc::default();
    let machine = StateMachine::new(
        Arc::clone(store),
        apply,
        observer,
        Arc::clone(&waiting),
        failure.clone(),
    )?;
    Ok(Parts {
        wal,
        log,
        machine,
        waiting,
        failure,
    })
}

fn open_wal(options: &RaftOptions, has_entries: bool) -> Result<Arc<Wal>, StorageError> {
    if has_entries && !Wal::exists(&options.wal_dir)? {
        return Err(StorageError::Damaged {
            path: options.wal_dir.clone(),
            offset: 0,
            what: "the engine holds entries, and their log is missing".to_owned(),
        });
    }
    // What a crash left of one that did not arrive; mostly there is none.
    let _ = std::fs::remove_file(&options.snapshot_path);
    Wal::open_on(options.wal(), &*options.runner)
}

/// Does something to the log, and waits until it is synced.
async fn synced(
    options: &RaftOptions,
    op: &'static str,
    act: impl FnOnce(Done),
) -> Result<(), StorageError> {
    let (sender, synced) = oneshot::channel();
    act(Box::new(move |result| {
        // The other end waits below.
        let _ = sender.send(result);
    }));
    let failed = |error: String| {
        let source = std::io::Error::other(error);
        StorageError::io(op, &options.wal_dir, source)
    };
    match synced.await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Ends the group that was: a membership of this member alone is appended as if its leader had said so. Everything in the log
/// stays, since this member cannot know what of it was acknowledged to a client; etcd drops what was not known to be committed.
async fn force_alone(wal: &Wal, store: &Store, options: &RaftOptions) -> Result<(), StorageError> {
    let own = store
        .table(Table::Member)?
        .into_iter()
        .find(|(id, _)| id[..] == options.member_id.to_be_bytes())
        .and_then(|(_, bytes)| Member::decode(bytes).ok());
    let node = PeerNode::at(own.map(|member| member.peer_ur_ls).unwrap_or_default());
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
        payload: alone(options.member_id, node),
    };
    tracing::warn!(
        local_member_id = %format!("{:x}", options.member_id),
        index = entry.position.index,
        "forcing a new cluster of this member alone"
    );
    synced(options, "append a membership to", |done| {
        wal.append(vec![entry], done);
    })
    .await
}

/// What the library is built on, without the library: for its own storage suite.
pub async fn open_storage(
    options: &RaftOptions,
    store: &Arc<Store>,
    apply: Arc<dyn Apply>,
) -> Result<(LogStore, StateMachine), StartError> {
    let parts = open_parts(options, store, apply).await?;
    Ok((parts.log, parts.machine))
}

/// A snapshot that was installed is further than the log, until something came after it: the log goes on behind it.
async fn go_on_behind_snapshot(
    wal: &Wal,
    store: &Store,
    options: &RaftOptions,
) -> Result<(), StorageError> {
    let mut tables = store.table(Table::Meta)?.into_iter();
    let installed = tables
        .find(|(name, _)| name == meta::INSTALLED)
        .and_then(|(_, bytes)| decode_position(&bytes));
    let last = wal.last();
    let Some(installed) = installed.filter(|installed| installed.index > last.index) else {
        return Ok(());
    };
    tracing::info!(
        snapshot_index = installed.index,
        last_index = last.index,
        "the log goes on behind the snapshot that was installed"
    );
    synced(options, "purge", |done| wal.purge(installed, done)).await
}

/// The engine holds only entries that were synced in the log before. A log that ends earlier is another one, or lost its end. One that begins later
/// has the engine of another, or one that lost its end.
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
    // What is purged was in the engine before. sled takes a damaged record of its own log for the torn end of it, and goes back to there.
    let purged = wal.purged();
    if applied.index < purged.index {
        return Err(StorageError::Damaged {
            path: store.database_path(),
            offset: 0,
            what: format!(
                "the engine holds index {}, and the log begins behind index {}: the end of the engine is missing",
                applied.index, purged.index
            ),
        });
    }
    Ok(())
}
