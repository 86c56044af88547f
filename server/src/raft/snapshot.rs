//! A snapshot from the leader to a member that is behind the log.
//!
//!     leader:  pin the store as it is -> head (position, membership), the file in pieces
//!     member:  pieces into a new database, SHA-256 compared -> the library takes it -> the database is published -> the process begins anew on it
//!
//! Promises: neither side holds the file in memory; what does not arrive whole counts for nothing. While one is on its way, and a while after, the
//! leader keeps its log, so that the member can go on from where the snapshot ends.
//! Beginning anew is how everything in memory comes to be that of the new database: index, leases, watchers. Clients connect again.
//!
//! etcd: server/etcdserver/api/rafthttp/snapshot_sender.go, snapshotHandler in http.go, and the inflightSnapshots of the server.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ballast_api::ballastpeerpb as pb;
use ballast_storage::mvcc::{Receiving, Store};
use ballast_storage::{LogPosition, StorageError};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use openraft::alias::SnapshotMetaOf;
use openraft::storage::Snapshot;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tonic::Status;

use crate::raft::command::{TypeConfig, decode_stored, log_id};
use crate::raft::node::RaftNode;
use crate::raft::state_machine::Content;
use crate::raft::wire;
use crate::tasks::blocking;

/// What this release sends and takes.
const FORMAT: u32 = 0;
/// One piece of the file.
const PIECE_BYTES: usize = 256 << 10;
/// Pieces read ahead of the connection.
const PIECES_AHEAD: usize = 4;
const SHA_BYTES: u64 = 32;
/// How long the log is kept for a member after a snapshot was sent (etcd: releaseDelayAfterSnapshot).
const KEEP_LOG: Duration = Duration::from_secs(30);
const ENDED_STEP: Duration = Duration::from_millis(100);

/// Snapshots on their way to others: the log is not purged meanwhile.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sending(Arc<AtomicUsize>);

impl Sending {
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }

    /// Waits until none is.
    pub(crate) async fn ended(&self) {
        while self.any() {
            tokio::time::sleep(ENDED_STEP).await;
        }
    }

    pub(crate) fn begin(&self) -> OnItsWay {
        self.0.fetch_add(1, Ordering::AcqRel);
        OnItsWay(Arc::clone(&self.0))
    }
}

/// Keeps the log for a while after its end.
pub(crate) struct OnItsWay(Arc<AtomicUsize>);

impl Drop for OnItsWay {
    fn drop(&mut self) {
        // At the end of the process there is nothing to keep it for.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let count = Arc::clone(&self.0);
        runtime.spawn(async move {
            tokio::time::sleep(KEEP_LOG).await;
            count.fetch_sub(1, Ordering::AcqRel);
        });
    }
}

/// The parts of a snapshot of the store as it is now, as they are read.
pub(crate) fn parts(store: Arc<Store>, vote: pb::Vote) -> mpsc::Receiver<pb::SnapshotPart> {
    let (sender, parts) = mpsc::channel(PIECES_AHEAD);
    tokio::spawn(async move {
        if let Err(error) = read_parts(store, vote, &sender).await {
            // The other side finds it too short.
            crate::node::stop_if_damaged(&error);
        }
    });
    parts
}

/// Reads until the end, or until nobody wants any more.
async fn read_parts(
    store: Arc<Store>,
    vote: pb::Vote,
    sender: &mpsc::Sender<pb::SnapshotPart>,
) -> Result<(), StorageError> {
    let wanted = sender.clone();
    let made = match blocking(move || store.snapshot(&|| !wanted.is_closed())).await {
        Ok(Ok(Some(made))) => made,
        Ok(Err(error)) => {
            tracing::error!(%error, "cannot make a snapshot for another member");
            return Ok(());
        }
        // Nobody wants it any more, or the runtime is ending.
        Ok(Ok(None)) | Err(_) => return Ok(()),
    };
    let applied = made.applied();
    let mut part = pb::SnapshotPart {
        head: Some(pb::SnapshotHead {
            vote: Some(vote),
            applied: Some(pb::LogPosition {
                term: applied.term,
                index: applied.index,
            }),
            membership: made.membership(),
            size: made.size(),
            format: FORMAT,
            records_from: made.record_pages().start,
            records_to: made.record_pages().end,
        }),
        chunk: Bytes::new(),
    };
    let mut stream = made;
    while sender.send(part).await.is_ok() {
        let read = blocking(move || {
            let chunk = stream.next_chunk(PIECE_BYTES);
            (stream, chunk)
        });
        let Ok((back, chunk)) = read.await else { break };
        stream = back;
        let Some(chunk) = chunk? else { break };
        part = pb::SnapshotPart { head: None, chunk };
    }
    Ok(())
}

fn broken(why: impl std::fmt::Display) -> Status {
    Status::aborted(format!("the snapshot did not arrive whole: {why}"))
}

impl RaftNode {
    /// The parts of a snapshot for a member that is rebuilt. The log stays meanwhile, so that the member can go on from there.
    pub fn snapshot_for_rebuild(
        &self,
        store: Arc<Store>,
    ) -> impl Stream<Item = Result<pb::SnapshotPart, Status>> + Send + use<> {
        let on_its_way = self.sending.begin();
        let parts = parts(store, pb::Vote::default());
        tokio_stream::wrappers::ReceiverStream::new(parts).map(move |part| {
            let _keeps_the_log = &on_its_way;
            Ok(part)
        })
    }

    /// Takes a snapshot of the leader. One at a time.
    pub async fn receive_snapshot<S>(
        self: &Arc<Self>,
        store: &Arc<Store>,
        from: u64,
        parts: S,
    ) -> Result<pb::SnapshotReply, Status>
    where
        S: Stream<Item = Result<pb::SnapshotPart, Status>> + Send,
    {
        let Ok(_one_at_a_time) = self.receiving.try_lock() else {
            return Err(Status::unavailable("another snapshot is being received"));
        };
        futures::pin_mut!(parts);
        let first = parts.next().await.ok_or_else(|| broken("it is empty"))??;
        let head = first.head.ok_or_else(|| broken("it has no head"))?;
        check_format(&head)?;
        tracing::info!(
            remote_peer_id = %format!("{from:x}"),
            incoming_snapshot_index = head.applied.map_or(0, |applied| applied.index),
            size = head.size,
            "receiving database snapshot"
        );
        let receiving = receive(store, &self.snapshot_path, &head, parts).await?;
        let applied = head.applied.unwrap_or_default();
        let applied = LogPosition {
            term: applied.term,
            index: applied.index,
        };
        let last_membership = decode_stored(&head.membership).map_err(broken)?;
        let vote = wire::vote_in(head.vote).map_err(broken)?;
        let snapshot = Snapshot {
            meta: SnapshotMetaOf::<TypeConfig> {
                last_log_id: log_id(applied),
                last_membership,
            },
            snapshot: Content::received(receiving),
        };
        let answer = self
            .raft()
            .install_full_snapshot(vote, snapshot)
            .await
            .map_err(|error| Status::unavailable(error.to_string()))?;
        Ok(pb::SnapshotReply {
            vote: Some(wire::vote_out(&answer.vote)),
        })
    }
}

/// What a newer release sends may mean something else.
pub(crate) fn check_format(head: &pb::SnapshotHead) -> Result<(), Status> {
    if head.format == FORMAT {
        return Ok(());
    }
    Err(Status::failed_precondition(format!(
        "the snapshot has format {} and this release knows {FORMAT}: a newer release made it",
        head.format
    )))
}

/// A snapshot as it arrives.
struct Arriving {
    receiving: Receiving,
    sha: Sha256,
    /// Bytes of the file that are missing.
    left: u64,
    /// Behind it: its SHA-256.
    trailer: Vec<u8>,
}

impl Arriving {
    fn take(&mut self, mut chunk: Bytes) -> Result<(), Status> {
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        let body = chunk.split_to(chunk.len().min(left));
        self.left -= body.len() as u64;
        self.sha.update(&body);
        self.receiving.take(&body).map_err(broken)?;
        self.trailer.extend_from_slice(&chunk);
        if self.trailer.len() as u64 > SHA_BYTES {
            return Err(broken("it is longer than it says"));
        }
        Ok(())
    }

    fn finish(self) -> Result<Receiving, Status> {
        if self.left > 0 || self.trailer.len() as u64 != SHA_BYTES {
            return Err(broken(format!("{} bytes are missing", self.left)));
        }
        if self.sha.finalize()[..] != self.trailer[..] {
            return Err(broken("its SHA-256 is another"));
        }
        Ok(self.receiving)
    }
}

/// Takes all parts behind the head; the trailer is compared. What is no record lies in `file` meanwhile.
pub(crate) async fn receive<S>(
    store: &Arc<Store>,
    file: &Path,
    head: &pb::SnapshotHead,
    parts: S,
) -> Result<Receiving, Status>
where
    S: Stream<Item = Result<pb::SnapshotPart, Status>> + Send,
{
    futures::pin_mut!(parts);
    let (store, file, size) = (Arc::clone(store), file.to_owned(), head.size);
    let records = head.records_from..head.records_to;
    let receiving = blocking(move || store.receive(&file, size, records)).await;
    let mut arriving = Arriving {
        receiving: receiving.map_err(broken)?.map_err(broken)?,
        sha: Sha256::new(),
        left: size,
        trailer: Vec::new(),
    };
    while let Some(part) = parts.next().await {
        let chunk = part?.chunk;
        let taken = blocking(move || {
            let taken = arriving.take(chunk);
            (arriving, taken)
        });
        let (back, taken) = taken.await.map_err(broken)?;
        taken?;
        arriving = back;
    }
    arriving.finish()
}
