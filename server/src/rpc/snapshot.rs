//! The stream of a snapshot: etcd's file, made piece by piece while it is sent.
//!
//! Promises: a part is never taken for the whole; a client that does not read holds nothing up for long.
//!
//! etcd: the Snapshot of server/etcdserver/api/v3rpc/maintenance.go.

use std::sync::Arc;
use std::time::Duration;

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use ballast_storage::StorageError;
use ballast_storage::mvcc::Store;
use futures::{Stream, StreamExt};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::clock::Clock;

/// Several of etcd's pages: fewer messages for the same bytes.
const PIECE_BYTES: usize = 128 * 1024;
/// Pieces made ahead of the client.
const PIECES_MAX: usize = 4;
/// A client that takes no piece for so long gets none any more.
const STALL_MAX: Duration = Duration::from_secs(60);

type Piece = Result<pb::SnapshotResponse, Status>;

/// Keeps `turn` until the last piece is made; each piece says the storage `version`. Must be called within a runtime.
pub(super) fn stream(
    store: Arc<Store>,
    version: String,
    turn: OwnedSemaphorePermit,
) -> impl Stream<Item = Piece> + Send + use<> {
    stream_with_patience(store, version, turn, STALL_MAX)
}

fn stream_with_patience(
    store: Arc<Store>,
    version: String,
    turn: OwnedSemaphorePermit,
    stall_max: Duration,
) -> impl Stream<Item = Piece> + Send + use<> {
    let (pieces, stream) = mpsc::channel(PIECES_MAX);
    let (ended, end) = oneshot::channel();
    let runtime = tokio::runtime::Handle::current();
    tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let wanted = || !pieces.is_closed();
        let send = |piece| match runtime
            .block_on(async { tokio::time::timeout(stall_max, pieces.send(piece)).await })
        {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Unsent::Gone),
            Err(_) => Err(Unsent::Stalled),
        };
        // Nobody hears it when the client is gone.
        let _ = ended.send(send_snapshot(&store, &version, stall_max, &wanted, send));
    });
    whole(stream, end)
}

/// Whoever waits must not take a part for the whole: the failure comes after the pieces that were sent. Without a word of how it
/// ended their maker went away, as at a stop of the member.
fn whole(
    pieces: mpsc::Receiver<pb::SnapshotResponse>,
    end: oneshot::Receiver<Result<(), Status>>,
) -> impl Stream<Item = Piece> + Send + use<> {
    let failure = futures::stream::once(end).filter_map(|end| {
        std::future::ready(match end {
            Ok(Ok(())) => None,
            Ok(Err(status)) => Some(Err(status)),
            Err(_) => Some(Err(Error::Stopped.into())),
        })
    });
    ReceiverStream::new(pieces).map(Ok).chain(failure)
}

/// Why a piece did not go.
enum Unsent {
    Gone,
    Stalled,
}

/// Makes the file piece by piece, as fast as it is read. The last piece is the hash. Compaction waits for the end of it, and so for no client
/// that does not read.
fn send_snapshot(
    store: &Store,
    version: &str,
    stall_max: Duration,
    wanted: &(dyn Fn() -> bool + Sync),
    send: impl Fn(pb::SnapshotResponse) -> Result<(), Unsent>,
) -> Result<(), Status> {
    let failed = |error: StorageError| {
        tracing::error!(error = %error, "failed to make a snapshot");
        crate::node::stop_if_damaged(&error);
        Status::unknown(error.to_string())
    };
    let started = Clock::default().now();
    let gone = || tracing::info!("the client of a snapshot went away");
    let Some(mut snapshot) = store.snapshot(wanted).map_err(failed)? else {
        gone();
        return Ok(());
    };
    let total = snapshot.size();
    tracing::info!(
        total_bytes = total,
        revision = snapshot.revision(),
        "sending database snapshot to client"
    );
    let mut sent = 0;
    while let Some(blob) = snapshot.next_chunk(PIECE_BYTES).map_err(failed)? {
        sent += blob.len() as u64;
        let piece = pb::SnapshotResponse {
            header: None,
            remaining_bytes: total.saturating_sub(sent),
            blob,
            version: version.to_owned(),
        };
        match send(piece) {
            Ok(()) => {}
            Err(Unsent::Gone) => {
                gone();
                return Ok(());
            }
            Err(Unsent::Stalled) => {
                tracing::warn!(
                    waited = ?stall_max,
                    sent_bytes = sent,
                    "a client does not read its snapshot; giving it up"
                );
                return Err(Status::deadline_exceeded(
                    "ballast: the snapshot was not read in time",
                ));
            }
        }
    }
    crate::metrics::disk::SNAPSHOT.observe((Clock::default().now() - started).as_secs_f64());
    tracing::info!(
        total_bytes = total,
        "successfully sent database snapshot to client"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_storage::LogPosition;
    use ballast_storage::mvcc::StoreOptions;

    const VALUES: u64 = 16;
    const VERSION: &str = "3.7.0";

    fn store(dir: &tempfile::TempDir) -> Arc<Store> {
        let store = Store::open(StoreOptions {
            dir: dir.path().join("db"),
            engine: ballast_storage::backend::Kind::default(),
            value_cache_bytes: 0,
            engine_cache_bytes: 1 << 20,
            compaction_batch_limit: 1000,
            compaction_sleep: Duration::from_millis(1),
            batch_interval: Duration::from_millis(1),
            batch_limit: 10_000,
        })
        .unwrap();
        for index in 1..=VALUES {
            store.set_log_synced(index);
            let mut txn = store.begin(LogPosition { term: 1, index });
            txn.put("k".into(), vec![7; 128 * 1024].into(), 0).unwrap();
            txn.commit();
        }
        store.flush().unwrap();
        store
    }

    fn turn() -> OwnedSemaphorePermit {
        let turns = Arc::new(tokio::sync::Semaphore::new(1));
        turns.try_acquire_owned().unwrap()
    }

    #[tokio::test]
    async fn a_snapshot_whose_maker_goes_away_ends_with_an_error() {
        for ended in [true, false] {
            let (pieces, stream) = mpsc::channel(4);
            let (end, ending) = oneshot::channel();
            pieces.send(pb::SnapshotResponse::default()).await.unwrap();
            if ended {
                end.send(Ok(())).unwrap();
            } else {
                drop(end);
            }
            drop(pieces);
            let heard: Vec<Piece> = whole(stream, ending).collect().await;
            let complete = heard.iter().all(Result::is_ok);
            assert_eq!((heard.len(), complete), (if ended { 1 } else { 2 }, ended));
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_snapshot_that_nobody_reads_is_given_up_and_does_not_end_as_if_whole() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(&dir);
        let mut stream = Box::pin(stream_with_patience(
            Arc::clone(&store),
            VERSION.to_owned(),
            turn(),
            Duration::from_millis(50),
        ));
        assert!(stream.next().await.unwrap().is_ok());
        // Compaction has to wait for a snapshot, and this one is not read on.
        let index = VALUES + 1;
        store.set_log_synced(index);
        let mut txn = store.begin(LogPosition { term: 1, index });
        let compaction = txn.compact(VALUES as i64).unwrap();
        txn.commit();
        let waiting = tokio::task::spawn_blocking(move || compaction.wait());
        tokio::time::timeout(Duration::from_secs(30), waiting)
            .await
            .expect("the compaction ends")
            .unwrap()
            .unwrap();
        let rest: Vec<Piece> = stream.collect().await;
        let (last, before) = rest.split_last().unwrap();
        assert!(before.iter().all(Result::is_ok));
        assert_eq!(
            last.as_ref().unwrap_err().code(),
            tonic::Code::DeadlineExceeded
        );
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_snapshot_that_is_read_ends_with_nothing_remaining() {
        let dir = tempfile::tempdir().unwrap();
        let pieces: Vec<Piece> = stream(store(&dir), VERSION.to_owned(), turn())
            .collect()
            .await;
        let last = pieces.last().unwrap().as_ref().unwrap();
        assert_eq!(last.remaining_bytes, 0);
    }
}
