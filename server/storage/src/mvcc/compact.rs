//! Compaction: forgetting history.
//!
//!     WriteTxn::compact   readers are told at once: the view's compact revision; `scheduledCompactRev` in the entry's batch
//!     the thread          1 the index, some keys at a time, between the writer's transactions
//!                         2 the records, some at a time, in order of revision, as batches between the committer's
//!                         3 `finishedCompactRev` with the last of them
//!
//! Promises: the deletes reach the engine after the entry that ordered the compaction. They go in order of
//! revision, so that a crash between two steps leaves no key with its tombstone gone and its value there. What was not finished goes
//! on at the next open. A tombstone exactly at the revision stays (etcd#18089).
//! Not here: what of one key goes (key_index.rs).
//!
//! etcd: server/storage/mvcc/kvstore_compaction.go.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::backend::Batch;
use crate::background::{self, Priority};
use crate::error::StorageError;
use crate::mvcc::hash::{Hasher, StoredHash};
use crate::mvcc::read::RecordScan;
use crate::mvcc::revision::Revision;
use crate::mvcc::store::{Picture, Shared};
use crate::schema::{Table, meta};

/// Keys whose history is cut in one go: about a tenth of a millisecond during which no transaction begins.
const KEYS_PER_STEP: usize = 64;
/// After so many steps the walk over the index rests for as long as they took: a million keys are seconds of one core.
const STEPS_PER_REST: usize = 16;
/// Bytes of records read in one step, however few they are: what a core hashes and the disk takes in some milliseconds.
const STEP_BYTES_MAX: usize = 512 << 10;
/// One step in so many is synced by itself. The others are synced with it, or sooner with a batch of the committer's: what a power cut takes
/// back is deleted again at the next open.
const STEPS_PER_SYNC: usize = 8;

/// A compaction under way.
#[derive(Clone, Debug)]
pub struct Compaction {
    ticket: Arc<Ticket>,
}

type DoneCall = Box<dyn FnOnce(Result<(), StorageError>) + Send>;

impl Compaction {
    /// Waits until the records are gone from the engine (`physical`). Blocking.
    pub fn wait(&self) -> Result<(), StorageError> {
        let (told, done) = std::sync::mpsc::sync_channel(1);
        self.on_done(Box::new(move |result| {
            // The receiver is in this function.
            let _ = told.send(result);
        }));
        done.recv().unwrap_or_else(|_| Err(stopped(INTERRUPTED)))
    }

    /// Calls once the records are gone from the engine, or it is known that they will not be; at once if that is so
    /// already. A compaction can wait long, for a snapshot's reader, so that nobody's thread should.
    pub fn on_done(&self, call: DoneCall) {
        let mut state = self.ticket.state.lock();
        match state.done.clone() {
            Some(result) => {
                drop(state);
                call(result.map_err(|first| stopped(&first)));
            }
            None => state.calls.push(call),
        }
    }
}

const INTERRUPTED: &str = "the compaction was interrupted and goes on at the next start";

fn stopped(first: &str) -> StorageError {
    StorageError::Stopped {
        first: first.to_owned(),
    }
}

#[derive(Debug, Default)]
struct Ticket {
    state: Mutex<TicketState>,
}

#[derive(Default)]
struct TicketState {
    done: Option<Result<(), String>>,
    calls: Vec<DoneCall>,
}

impl std::fmt::Debug for TicketState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TicketState")
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

impl Ticket {
    fn finish(&self, result: Result<(), String>) {
        let (result, calls) = {
            let mut state = self.state.lock();
            let result = state.done.get_or_insert(result).clone();
            (result, std::mem::take(&mut state.calls))
        };
        for call in calls {
            call(result.clone().map_err(|first| stopped(&first)));
        }
    }
}

/// An order to the compaction's thread. Whoever drops it leaves nobody waiting.
#[derive(Debug)]
pub(super) struct CompactJob {
    revision: i64,
    /// The compact revision before.
    previous: i64,
    /// The number in the committer's queue of the entry that ordered it.
    after: u64,
    ticket: Arc<Ticket>,
}

impl CompactJob {
    pub(super) fn new(revision: i64, previous: i64) -> (Self, Compaction) {
        let ticket = Arc::new(Ticket::default());
        let compaction = Compaction {
            ticket: Arc::clone(&ticket),
        };
        (
            Self {
                revision,
                previous,
                after: 0,
                ticket,
            },
            compaction,
        )
    }

    pub(super) fn after(mut self, number: u64) -> Self {
        self.after = number;
        self
    }
}

impl Drop for CompactJob {
    fn drop(&mut self) {
        self.ticket.finish(Err(INTERRUPTED.to_owned()));
    }
}

/// What the thread has to do, in order.
#[derive(Debug, Default)]
pub(super) struct CompactQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    jobs: VecDeque<CompactJob>,
    /// The thread has one.
    running: bool,
    stopped: bool,
}

impl CompactQueue {
    pub(super) fn push(&self, job: CompactJob) {
        let mut state = self.state.lock();
        if !state.stopped {
            state.jobs.push_back(job);
            self.changed.notify_all();
        }
    }

    /// Ends the thread at the next step.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.stopped = true;
        state.jobs.clear();
        self.changed.notify_all();
    }

    pub(super) fn is_busy(&self) -> bool {
        let state = self.state.lock();
        state.running || !state.jobs.is_empty()
    }

    fn next(&self) -> Option<CompactJob> {
        let mut state = self.state.lock();
        state.running = false;
        while !state.stopped {
            if let Some(job) = state.jobs.pop_front() {
                state.running = true;
                return Some(job);
            }
            self.changed.wait(&mut state);
        }
        None
    }

    /// Sleeps. False when the thread has to end.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let mut state = self.state.lock();
        let until = crate::clock::now() + pause;
        while !state.stopped {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        !state.stopped
    }
}

impl Shared {
    /// The compaction's thread.
    pub(super) fn run_compactions(&self) {
        while let Some(job) = self.compact_queue.next() {
            match self.compact(&job) {
                Ok(true) => job.ticket.finish(Ok(())),
                Ok(false) => return,
                // The committer has the failure already, or the store is closing.
                Err(error @ StorageError::Stopped { .. }) => {
                    job.ticket.finish(Err(error.to_string()));
                }
                Err(error) => {
                    job.ticket.finish(Err(error.to_string()));
                    self.committer.fail(error);
                }
            }
        }
    }

    /// One compaction. False when it was told to stop.
    fn compact(&self, job: &CompactJob) -> Result<bool, StorageError> {
        let started = crate::clock::now();
        self.committer.wait_written(job.after)?;
        let index_started = crate::clock::now();
        let Some(garbage) = self.compact_index(job.revision) else {
            return Ok(false);
        };
        self.committer
            .observer()
            .index_compacted(index_started.elapsed());
        let records = background::run("compaction", Priority::Lowest, || {
            self.compact_records(job, garbage)
        });
        let Some((hash, deleted)) = records? else {
            return Ok(false);
        };
        self.hashes.finish(StoredHash {
            revision: job.revision,
            compact_revision: job.previous,
            hash,
        });
        self.committer
            .observer()
            .compacted(started.elapsed(), deleted);
        tracing::info!(
            revision = job.revision,
            records = deleted,
            took = ?started.elapsed(),
            hash,
            "finished scheduled compaction"
        );
        Ok(true)
    }

    /// Cuts the history of every key, and says which records nobody can see any more. None when it was told to stop.
    fn compact_index(&self, revision: i64) -> Option<Garbage> {
        let walked = self.newest.load_full();
        let mut garbage = Garbage::default();
        let mut keys: Vec<&[u8]> = Vec::with_capacity(KEYS_PER_STEP);
        let mut steps = 0;
        let mut begun = crate::clock::now();
        for (key, index) in walked.tree.from(b"") {
            garbage.keeps_any = garbage.keeps_any || index.keeps_any(revision);
            if index.has_garbage(revision) {
                keys.push(key);
                if keys.len() == KEYS_PER_STEP {
                    self.compact_keys(revision, &keys, &mut garbage.revisions);
                    keys.clear();
                    steps += 1;
                    if steps % STEPS_PER_REST == 0 {
                        if !self.compact_queue.pause(begun.elapsed()) {
                            return None;
                        }
                        begun = crate::clock::now();
                    }
                }
            }
        }
        self.compact_keys(revision, &keys, &mut garbage.revisions);
        garbage.revisions.sort_unstable();
        Some(garbage)
    }

    fn compact_keys(&self, revision: i64, keys: &[&[u8]], dropped: &mut Vec<Revision>) {
        if keys.is_empty() {
            return;
        }
        let writer = self.writer.lock();
        let mut picture = Picture::clone(&self.newest.load());
        for key in keys {
            let Some(index) = picture.tree.get(key) else {
                continue;
            };
            match index.compact(revision, dropped) {
                Some(left) => picture.tree.upsert(key, |_| left),
                None => drop(picture.tree.remove(key)),
            }
        }
        self.newest.store(Arc::new(picture));
        // To a transaction that waits, rather than to the next step.
        MutexGuard::unlock_fair(writer);
    }

    /// Deletes the garbage from the engine, step by step, and hashes all records on the way as etcd does: before they are deleted.
    /// None when it was told to stop.
    fn compact_records(
        &self,
        job: &CompactJob,
        garbage: Garbage,
    ) -> Result<Option<(u32, usize)>, StorageError> {
        let mut hasher = Hasher::new(job.previous, job.revision);
        let mut deleted = 0;
        let mut steps = 0;
        let mut garbage_left = garbage.revisions.into_iter().peekable();
        let mut scan = RecordScan::new(
            self.committer.engine(),
            Revision::default(),
            job.revision + 1,
        )
        .peekable();
        loop {
            let Some(step) = self.holds.step() else {
                return Ok(None);
            };
            let step_started = crate::clock::now();
            let mut batch = Batch::default();
            let mut bytes = 0;
            let (mut records, mut read_bytes) = (0, 0);
            while records < self.options.compaction_batch_limit.max(1)
                && read_bytes < STEP_BYTES_MAX
            {
                let Some(pair) = scan.next() else { break };
                let (key, value) = pair?;
                records += 1;
                read_bytes += key.len() + value.len();
                let record = self.stored((key.clone(), value))?;
                while garbage_left
                    .next_if(|garbage| *garbage < record.revision)
                    .is_some()
                {}
                let is_garbage = garbage_left.next_if_eq(&record.revision).is_some();
                let hidden =
                    garbage.keeps_any && is_garbage && record.revision.main <= job.previous;
                if !hidden {
                    hasher.write(record.revision, record.tombstone, &key[1..], &record.value);
                }
                if is_garbage {
                    bytes += (key.len() + record.value.len()) as i64;
                    deleted += 1;
                    batch.delete(key);
                }
            }
            let last = scan.peek().is_none();
            if last {
                let finished = job.revision.to_be_bytes().to_vec();
                batch.put(Table::Meta.key(meta::FINISHED_COMPACT), finished);
            }
            if !batch.ops.is_empty() {
                self.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
                steps += 1;
                let lazily = !last && steps % STEPS_PER_SYNC != 0;
                self.committer.write_now(&batch, lazily)?;
            }
            if last {
                // Within the step, so that whoever holds sees it here and in the engine, or in neither.
                let finished = Bytes::copy_from_slice(&job.revision.to_be_bytes());
                let key = Bytes::from(Table::Meta.key(meta::FINISHED_COMPACT));
                self.small.lock().insert(key, finished);
            }
            drop(step);
            self.committer
                .observer()
                .compaction_stepped(step_started.elapsed());
            if last {
                return Ok(Some((hasher.finish(), deleted)));
            }
            if !self.compact_queue.pause(self.options.compaction_sleep) {
                return Ok(None);
            }
        }
    }
}

/// Records that no reader at the compact revision or later can see.
#[derive(Debug, Default)]
struct Garbage {
    /// Ascending.
    revisions: Vec<Revision>,
    /// Whether any record at or before the compact revision stays.
    keeps_any: bool,
}
