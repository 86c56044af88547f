//! A snapshot from the leader to a member that is behind the log.
//!
//!     leader:  pin the store as it is -> head (position, membership), the file's pages in pieces
//!     member:  pieces into a new database, sums compared -> the library takes it -> the database is published -> the process begins anew on it
//!
//! A member of a release before gets the file front to back, as a client does.
//!
//! Promises: neither side holds the file in memory, and both leave the cores to requests; what does not arrive whole counts for nothing. While one is on its way, and a while after, the
//! leader keeps its log, so that the member can go on from where the snapshot ends.
//! Beginning anew is how everything in memory comes to be that of the new database: index, leases, watchers. Clients connect again.
//!
//! etcd: server/etcdserver/api/rafthttp/snapshot_sender.go, snapshotHandler in http.go, and the inflightSnapshots of the server.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ballast_api::ballastpeerpb as pb;
use ballast_api::ballastpeerpb::snapshot_part::Holds;
use ballast_storage::mvcc::{Pages, Receiving, Store};
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
use crate::tasks::{Aside, blocking};

/// The file front to back and its SHA-256.
const FRONT_TO_BACK: u32 = 0;
/// The newest that this release sends and takes, and it knows all before: pages, the first two last, each piece with a sum.
pub(crate) const FORMAT: u32 = 1;
/// One piece of the file.
const PIECE_BYTES: usize = 256 << 10;
/// Pieces read ahead, of the disk on one side and of the connection on the other.
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

/// The parts of a snapshot of the store as it is now, as they are read, for a member that knows formats up to `known`.
pub(crate) fn parts(
    store: Arc<Store>,
    vote: pb::Vote,
    known: u32,
) -> mpsc::Receiver<pb::SnapshotPart> {
    let (sender, parts) = mpsc::channel(PIECES_AHEAD);
    tokio::spawn(async move {
        let read = if known == FRONT_TO_BACK {
            read_file(store, vote, &sender).await
        } else {
            read_pages(store, vote, &sender).await
        };
        if let Err(error) = read {
            tracing::error!(%error, "cannot make a snapshot for another member");
            // The other side finds it too short.
            crate::node::stop_if_damaged(&error);
        }
    });
    parts
}

type Parts = mpsc::Sender<pb::SnapshotPart>;

fn head(
    vote: pb::Vote,
    applied: LogPosition,
    membership: Bytes,
    size: u64,
    format: u32,
) -> pb::SnapshotPart {
    let head = pb::SnapshotHead {
        vote: Some(vote),
        applied: Some(pb::LogPosition {
            term: applied.term,
            index: applied.index,
        }),
        membership,
        size,
        format,
    };
    pb::SnapshotPart {
        head: Some(head),
        ..pb::SnapshotPart::default()
    }
}

/// Reads until the end, or until nobody wants any more.
async fn read_pages(store: Arc<Store>, vote: pb::Vote, sender: &Parts) -> Result<(), StorageError> {
    // Not aside: for a moment writers wait for it.
    let Ok(pages) = blocking(move || store.pages()).await else {
        return Ok(()); // the runtime is ending
    };
    let mut pages = pages?;
    let aside = match Aside::new("snapshot") {
        Ok(aside) => aside,
        Err(error) => {
            tracing::error!(%error, "no thread for a snapshot for another member");
            return Ok(());
        }
    };
    let mut part = head(vote, pages.applied(), pages.membership(), 0, FORMAT);
    while sender.send(part).await.is_ok() {
        let read = aside.run(move || {
            let next = pages.next_pages(PIECE_BYTES);
            (pages, next)
        });
        let Ok((back, next)) = read.await else { break };
        pages = back;
        let (chunk, holds) = match next? {
            Some(Pages::Other(chunk)) => (chunk, Holds::Other),
            Some(Pages::Records(chunk)) => (chunk, Holds::Records),
            Some(Pages::Metas(chunk)) => (chunk, Holds::Metas),
            None => break,
        };
        part = pb::SnapshotPart {
            head: None,
            crc: crc32c::crc32c(&chunk),
            chunk,
            holds: holds.into(),
        };
    }
    Ok(())
}

/// The same front to back.
async fn read_file(store: Arc<Store>, vote: pb::Vote, sender: &Parts) -> Result<(), StorageError> {
    let wanted = sender.clone();
    // Nobody wants it any more, or the runtime is ending.
    let Ok(made) = blocking(move || store.snapshot(&|| !wanted.is_closed())).await else {
        return Ok(());
    };
    let Some(mut stream) = made? else {
        return Ok(());
    };
    let (applied, membership) = (stream.applied(), stream.membership());
    let mut part = head(vote, applied, membership, stream.size(), FRONT_TO_BACK);
    while sender.send(part).await.is_ok() {
        let read = blocking(move || {
            let chunk = stream.next_chunk(PIECE_BYTES);
            (stream, chunk)
        });
        let Ok((back, chunk)) = read.await else { break };
        stream = back;
        let Some(chunk) = chunk? else { break };
        part = pb::SnapshotPart {
            chunk,
            ..pb::SnapshotPart::default()
        };
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
        known: u32,
    ) -> impl Stream<Item = Result<pb::SnapshotPart, Status>> + Send + use<> {
        let on_its_way = self.sending.begin();
        let parts = parts(store, pb::Vote::default(), known);
        tokio_stream::wrappers::ReceiverStream::new(parts).map(move |part| {
            let _keeps_the_log = &on_its_way;
            Ok(part)
        })
    }

    /// Takes a snapshot of the leader. The store refuses a second one until the first is installed, though its sender may be gone.
    pub async fn receive_snapshot<S>(
        self: &Arc<Self>,
        store: &Arc<Store>,
        from: u64,
        parts: S,
    ) -> Result<pb::SnapshotReply, Status>
    where
        S: Stream<Item = Result<pb::SnapshotPart, Status>> + Send,
    {
        futures::pin_mut!(parts);
        let first = parts.next().await.ok_or_else(|| broken("it is empty"))??;
        let head = first.head.ok_or_else(|| broken("it has no head"))?;
        check_format(&head)?;
        tracing::info!(
            remote_peer_id = %format!("{from:x}"),
            incoming_snapshot_index = head.applied.map_or(0, |applied| applied.index),
            format = head.format,
            "receiving database snapshot"
        );
        let receiving = receive(store, &self.snapshot_path, head.clone(), parts).await?;
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
    if head.format <= FORMAT {
        return Ok(());
    }
    Err(Status::failed_precondition(format!(
        "the snapshot has format {} and this release knows {FORMAT}: a newer release made it",
        head.format
    )))
}

/// A snapshot as it arrives.
struct Incoming {
    receiving: Receiving,
    whole: Whole,
}

/// What says that all has come.
enum Whole {
    /// Behind the file is its SHA-256.
    File {
        sha: Sha256,
        /// Bytes of the file that are missing.
        left: u64,
        trailer: Vec<u8>,
    },
    /// The last piece is known by its kind.
    Pages { ended: bool },
}

impl Incoming {
    /// Blocking.
    fn new(store: &Store, file: &Path, head: &pb::SnapshotHead) -> Result<Self, StorageError> {
        let (receiving, whole) = if head.format == FRONT_TO_BACK {
            let whole = Whole::File {
                sha: Sha256::new(),
                left: head.size,
                trailer: Vec::new(),
            };
            (store.receive(file)?, whole)
        } else {
            let whole = Whole::Pages { ended: false };
            (store.receive_pages(file)?, whole)
        };
        Ok(Self { receiving, whole })
    }

    /// Blocking.
    fn take(&mut self, part: &pb::SnapshotPart) -> Result<(), Status> {
        let mut chunk = part.chunk.clone();
        match &mut self.whole {
            Whole::File { sha, left, trailer } => {
                let missing = usize::try_from(*left).unwrap_or(usize::MAX);
                let body = chunk.split_to(chunk.len().min(missing));
                *left -= body.len() as u64;
                sha.update(&body);
                trailer.extend_from_slice(&chunk);
                if trailer.len() as u64 > SHA_BYTES {
                    return Err(broken("it is longer than it says"));
                }
                self.receiving.take(&body).map_err(broken)
            }
            Whole::Pages { ended } => {
                if *ended {
                    return Err(broken("it goes on behind its end"));
                }
                if crc32c::crc32c(&chunk) != part.crc {
                    return Err(broken("the sum of a piece is another"));
                }
                let pages = match part.holds() {
                    Holds::Other => Pages::Other(chunk),
                    Holds::Records => Pages::Records(chunk),
                    Holds::Metas => {
                        *ended = true;
                        Pages::Metas(chunk)
                    }
                };
                self.receiving.take_pages(&pages).map_err(broken)
            }
        }
    }

    fn finish(self) -> Result<Receiving, Status> {
        match self.whole {
            Whole::File { sha, left, trailer } => {
                if left > 0 || trailer.len() as u64 != SHA_BYTES {
                    return Err(broken(format!("{left} bytes are missing")));
                }
                if sha.finalize()[..] != trailer[..] {
                    return Err(broken("its SHA-256 is another"));
                }
            }
            Whole::Pages { ended: false } => return Err(broken("its end is missing")),
            Whole::Pages { ended: true } => {}
        }
        Ok(self.receiving)
    }
}

/// Takes all parts behind the head. What is no record lies in `file` meanwhile.
pub(crate) async fn receive<S>(
    store: &Arc<Store>,
    file: &Path,
    head: pb::SnapshotHead,
    parts: S,
) -> Result<Receiving, Status>
where
    S: Stream<Item = Result<pb::SnapshotPart, Status>> + Send,
{
    futures::pin_mut!(parts);
    let aside = Aside::new("install").map_err(broken)?;
    let (store, file) = (Arc::clone(store), file.to_owned());
    let begun = aside.run(move || Incoming::new(&store, &file, &head)).await;
    let mut incoming = begun
        .map_err(broken)?
        .map_err(|error| Status::unavailable(error.to_string()))?;
    // Those that come are read from the connection while the ones before are written, or both sides would take turns.
    let (sender, ahead) = mpsc::channel(PIECES_AHEAD);
    let read = async move {
        loop {
            let part = tokio::select! {
                part = parts.next() => part,
                // The other loop has ended with an error.
                () = sender.closed() => return,
            };
            let Some(part) = part else { return };
            if sender.send(part).await.is_err() {
                return;
            }
        }
    };
    let write = async {
        let mut ahead = ahead;
        while let Some(part) = ahead.recv().await {
            let part = part?;
            let taken = aside.run(move || {
                let taken = incoming.take(&part);
                (incoming, taken)
            });
            let (back, taken) = taken.await.map_err(broken)?;
            taken?;
            incoming = back;
        }
        Ok::<_, Status>(incoming)
    };
    let ((), written) = futures::join!(read, write);
    written?.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_storage::mvcc::InstallOptions;

    use crate::raft::tests::store;

    const VALUES: u64 = 500;

    fn filled(dir: &Path) -> Arc<Store> {
        let store = store(dir);
        for index in 1..=VALUES {
            store.set_log_synced(index);
            let mut txn = store.begin(LogPosition { term: 1, index });
            let key = format!("key-{}", index % 300);
            txn.put(key.into(), vec![7; 2_000].into(), 0).unwrap();
            txn.commit();
        }
        store
    }

    /// The head and all parts behind it, for a member that knows formats up to `known`.
    async fn sent(store: &Arc<Store>, known: u32) -> (pb::SnapshotHead, Vec<pb::SnapshotPart>) {
        let mut receiver = parts(Arc::clone(store), pb::Vote::default(), known);
        let head = receiver.recv().await.unwrap().head.unwrap();
        let mut all = Vec::new();
        while let Some(part) = receiver.recv().await {
            all.push(part);
        }
        (head, all)
    }

    async fn take(
        to: &Arc<Store>,
        dir: &Path,
        (head, parts): (pb::SnapshotHead, Vec<pb::SnapshotPart>),
    ) -> Result<Receiving, Status> {
        let parts = futures::stream::iter(parts.into_iter().map(Ok));
        receive(to, &dir.join("snapshot.received"), head, parts).await
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_member_gets_the_newest_format_that_it_knows_and_the_same_store_by_each() {
        let dir = tempfile::tempdir().unwrap();
        let leader = filled(&dir.path().join("leader"));
        for (known, format) in [(0, 0), (1, 1), (9, 1)] {
            let behind = dir.path().join(format!("behind-{known}"));
            let to = store(&behind);
            let sent = sent(&leader, known).await;
            assert_eq!(sent.0.format, format);
            assert_eq!(sent.0.size > 0, format == FRONT_TO_BACK);
            let options = InstallOptions {
                applied: leader.applied(),
                membership: Bytes::new(),
            };
            let received = take(&to, &behind, sent).await.unwrap();
            to.install(received, &options).unwrap();
            to.close().unwrap();
            drop(to);
            let hash = |store: &Store| store.hash_kv(0).unwrap().hash;
            assert_eq!(hash(&store(&behind)), hash(&leader));
        }
    }

    /// The leader sends again what it could not send to the end, while what came whole before is still being installed.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_snapshot_that_is_sent_again_leaves_the_one_before_alone() {
        let dir = tempfile::tempdir().unwrap();
        let leader = filled(&dir.path().join("leader"));
        let behind = dir.path().join("behind");
        let to = store(&behind);
        let whole = sent(&leader, 1).await;
        let options = InstallOptions {
            applied: leader.applied(),
            membership: Bytes::new(),
        };
        let first = take(&to, &behind, whole.clone()).await.unwrap();
        let says = |again: Result<Receiving, Status>| again.unwrap_err().message().to_owned();
        let again = take(&to, &behind, whole.clone()).await;
        assert!(says(again).contains("another snapshot is being received"));
        to.install(first, &options).unwrap();
        let again = take(&to, &behind, whole.clone()).await;
        assert!(says(again).contains("another database took this one's place"));
        to.close().unwrap();
        drop(to);
        let to = store(&behind);
        assert_eq!(to.hash_kv(0).unwrap().hash, leader.hash_kv(0).unwrap().hash);
        // One that is given up leaves room for the next.
        drop(take(&to, &behind, whole.clone()).await.unwrap());
        take(&to, &behind, whole).await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_does_not_arrive_as_it_was_sent_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let leader = filled(&dir.path().join("leader"));
        let behind = dir.path().join("behind");
        let to = store(&behind);
        for known in [0, 1] {
            let whole = sent(&leader, known).await;
            let mut flipped = whole.clone();
            let mut chunk = flipped.1[1].chunk.to_vec();
            chunk[5_000] ^= 4;
            flipped.1[1].chunk = chunk.into();
            let mut cut = whole.clone();
            cut.1.pop();
            let mut longer = whole.clone();
            longer.1.push(whole.1[0].clone());
            for (what, sent) in [("flipped", flipped), ("cut", cut), ("longer", longer)] {
                let refused = take(&to, &behind, sent).await;
                let status = refused.expect_err(what);
                let says = status.message();
                assert!(
                    says.contains("did not arrive whole"),
                    "{known}, {what}: {says}"
                );
            }
        }
        assert_eq!(to.view().revision(), 1);
    }
}
