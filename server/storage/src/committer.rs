//! Write-behind: what is applied in memory and not yet in the engine, and the thread that takes it there.
//!
//!     apply --push--> [ entry | entry | entry | entry ] --batch--> engine
//!                        ^                ^
//!                        |                first entry whose log record is not synced: nothing beyond it is written
//!                        overlay: readers find the records here until the engine has them
//!
//! Promises: a batch never cuts inside an entry, and carries the applied position, the current revision and the
//! live bytes of its last one. Two rules keep log and engine honest across a power cut: only entries whose log record is
//! synced here are written (`set_log_synced`), and `durable` says how far the log may be purged.
//! A failed write is never retried: it stops the committer for good, and the node with it (invariant 6).
//! Not here: what a batch means.
//!
//! etcd: server/storage/backend/batch_tx.go, which holds one open transaction of the engine instead.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ballast_api::mvccpb::KeyValue;
use bytes::{BufMut, Bytes, BytesMut};
use parking_lot::{Condvar, Mutex, RwLock};
use prost::Message;

use crate::LogPosition;
use crate::backend::{Batch, Engine};
use crate::clock;
use crate::error::StorageError;
use crate::mvcc::revision::Revision;
use crate::observer::{StoreObserver, Unobserved};
use crate::runner::Wait;
use crate::schema::{Table, meta};

/// Bytes that may wait before the apply path has to: several batches, so that it waits for a slow disk only.
pub const PENDING_BYTES_MAX: usize = 64 << 20;
/// Entries that may wait: the overlay is searched, and each costs memory of its own.
pub const PENDING_ENTRIES_MAX: usize = 200_000;
/// Bytes of one batch: enough to make a sync worth it, few enough to keep it short.
const BATCH_BYTES_MAX: usize = 8 << 20;
/// What an entry costs beside its records.
const ENTRY_OVERHEAD_BYTES: usize = 128;

/// A revisioned record on its way to the engine.
#[derive(Clone, Debug)]
pub struct PendingRecord {
    pub revision: Revision,
    pub tombstone: bool,
    /// For a tombstone only the key, as it will stand in the engine.
    pub kv: Arc<KeyValue>,
}

/// What one log entry changes in the engine.
#[derive(Debug, Default)]
pub struct Pending {
    pub position: LogPosition,
    /// The current revision after it.
    pub revision: i64,
    /// Live bytes after it.
    pub live_bytes: u64,
    /// In order of revision; all of one main revision.
    pub records: Vec<PendingRecord>,
    /// Small tables.
    pub ops: Vec<(Bytes, Option<Bytes>)>,
    /// About what it holds in memory.
    pub bytes: usize,
}

impl Pending {
    fn op_count(&self) -> usize {
        self.records.len() + self.ops.len()
    }
}

/// When to write.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub batch_interval: Duration,
    pub batch_limit: usize,
}

type FailureCall = Box<dyn FnOnce(Arc<StorageError>) + Send>;

/// Called once what was queued is in the engine, or it is known that it never will be.
pub type FlushCall = Box<dyn FnOnce(Result<LogPosition, StorageError>) + Send>;

/// The queue between apply and the engine.
pub struct Committer {
    limits: Limits,
    engine: RwLock<Arc<dyn Engine>>,
    state: Mutex<State>,
    /// There may be something to write.
    work: Condvar,
    /// Something was written, or will never be.
    progress: Condvar,
    /// The engine's allocated bytes after the last write: each put asks for them.
    allocated: AtomicU64,
    /// Held over each write of the engine: whoever takes it sees the engine between two batches.
    writing: Mutex<Option<Follow>>,
    observer: OnceLock<Arc<dyn StoreObserver>>,
}

/// Keys written while a copy of the engine is being made (mvcc/defrag.rs).
#[derive(Debug, Default)]
pub struct Follow {
    pub keys: Vec<Bytes>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Arc<Pending>>,
    bytes: usize,
    ops: usize,
    /// Entries pushed and entries written since the start; the queue holds the difference.
    pushed: u64,
    written: u64,
    /// Somebody waits until this many are written.
    wanted: u64,
    /// Whom to call when so many are written; ascending.
    flushes: VecDeque<(u64, FlushCall)>,
    /// When the oldest waiting entry is due.
    due: Option<Instant>,
    /// Something waits and none of it may go: the log has to be synced first.
    starved: bool,
    log_synced: u64,
    durable: LogPosition,
    closing: bool,
    stopped: bool,
    failure: Option<Arc<StorageError>>,
    on_failure: Option<FailureCall>,
}

impl std::fmt::Debug for Committer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Committer")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl Committer {
    pub fn new(engine: Arc<dyn Engine>, durable: LogPosition, limits: Limits) -> Self {
        let allocated = engine.size().map_or(0, |size| size.allocated);
        Self {
            limits,
            engine: RwLock::new(engine),
            state: Mutex::new(State {
                durable,
                ..State::default()
            }),
            work: Condvar::new(),
            progress: Condvar::new(),
            allocated: AtomicU64::new(allocated),
            writing: Mutex::new(None),
            observer: OnceLock::new(),
        }
    }

    pub fn engine(&self) -> Arc<dyn Engine> {
        Arc::clone(&self.engine.read())
    }

    /// Only the first one counts.
    pub fn set_observer(&self, observer: Arc<dyn StoreObserver>) {
        let _ = self.observer.set(observer);
    }

    pub fn observer(&self) -> &dyn StoreObserver {
        self.observer
            .get()
            .map_or(&Unobserved, |observer| observer.as_ref())
    }

    /// Bytes on disk as of the last write.
    pub fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Waits while too much is pending. Returns at once after a failure or a close: nothing will change any more.
    pub fn wait_for_room(&self) {
        let mut state = self.state.lock();
        while (state.bytes > PENDING_BYTES_MAX || state.queue.len() > PENDING_ENTRIES_MAX)
            && !state.is_over()
        {
            self.progress.wait(&mut state);
        }
    }

    /// Queues an entry; its number is what [`Self::wait_written`] takes.
    pub fn push(&self, pending: Pending) -> u64 {
        let mut state = self.state.lock();
        state.pushed += 1;
        if state.is_over() {
            return state.pushed;
        }
        state.bytes += pending.bytes + ENTRY_OVERHEAD_BYTES;
        state.ops += pending.op_count();
        state.queue.push_back(Arc::new(pending));
        if state.due.is_none() {
            state.due = Some(clock::now() + self.limits.batch_interval);
            self.work.notify_one();
        } else if state.is_full(self.limits.batch_limit) {
            self.work.notify_one();
        }
        state.pushed
    }

    pub fn set_log_synced(&self, index: u64) {
        let mut state = self.state.lock();
        if index > state.log_synced {
            state.log_synced = index;
            // Otherwise the committer sleeps until the next batch is due, or is woken when somebody waits.
            if state.starved || state.wanted > state.written {
                self.work.notify_one();
            }
        }
    }

    pub fn durable(&self) -> LogPosition {
        self.state.lock().durable
    }

    /// Waits until all that is queued now is in the engine.
    pub fn flush(&self) -> Result<LogPosition, StorageError> {
        let upto = self.state.lock().pushed;
        self.wait_written(upto)?;
        Ok(self.durable())
    }

    /// As [`Self::flush`], without waiting. The call comes from the committer's thread, or at once.
    pub fn on_flushed(&self, call: FlushCall) {
        let mut state = self.state.lock();
        let upto = state.pushed;
        if state.written < upto && !state.is_over() {
            state.wanted = upto;
            state.flushes.push_back((upto, call));
            self.work.notify_one();
            return;
        }
        let result = if state.written < upto {
            Err(state.why_over())
        } else {
            Ok(state.durable)
        };
        drop(state);
        call(result);
    }

    /// Nothing is written any more.
    fn refuse_flushes(&self) {
        let refused: Vec<_> = {
            let mut state = self.state.lock();
            let calls = std::mem::take(&mut state.flushes).into_iter();
            calls.map(|(_, call)| (call, state.why_over())).collect()
        };
        for (call, why) in refused {
            call(Err(why));
        }
    }

    /// Waits until entry number `upto` is in the engine.
    pub fn wait_written(&self, upto: u64) -> Result<(), StorageError> {
        let mut state = self.state.lock();
        if state.wanted < upto {
            state.wanted = upto;
            self.work.notify_one();
        }
        while state.written < upto {
            if state.is_over() {
                return Err(state.why_over());
            }
            self.progress.wait(&mut state);
        }
        Ok(())
    }

    pub fn failure(&self) -> Option<Arc<StorageError>> {
        self.state.lock().failure.clone()
    }

    pub fn on_failure(&self, call: FailureCall) {
        let mut state = self.state.lock();
        match state.failure.clone() {
            Some(failure) => {
                drop(state);
                call(failure);
            }
            None => state.on_failure = Some(call),
        }
    }

    /// Stops for good because of `error`, found elsewhere than in a write.
    pub fn fail(&self, error: StorageError) {
        let failure = Arc::new(error);
        let mut state = self.state.lock();
        if state.failure.is_some() {
            return;
        }
        tracing::error!(error = %failure, "storage failed, stopping");
        state.failure = Some(Arc::clone(&failure));
        let call = state.on_failure.take();
        drop(state);
        self.work.notify_all();
        self.progress.notify_all();
        self.refuse_flushes();
        if let Some(call) = call {
            call(failure);
        }
    }

    /// Asks the thread to write what it may and end. What it may not write is in the log.
    pub fn close(&self) {
        self.state.lock().closing = true;
        self.work.notify_all();
    }

    /// Whether it was asked to end, or has ended.
    pub fn is_closing(&self) -> bool {
        let state = self.state.lock();
        state.closing || state.is_over()
    }

    /// Asks the thread to end without writing anything more.
    pub fn abandon(&self) {
        self.state.lock().stopped = true;
        self.work.notify_all();
        self.progress.notify_all();
        self.refuse_flushes();
    }

    /// Those of these records that are still on their way, in their order.
    pub fn records(&self, revisions: &[Revision]) -> Vec<Option<PendingRecord>> {
        let state = self.state.lock();
        revisions
            .iter()
            .map(|revision| state.find(*revision))
            .collect()
    }

    /// Records on their way with `from <= revision` and `main <= to`, ascending. Whoever reads these first and the engine second
    /// misses none between them.
    pub fn records_between(&self, from: Revision, to: i64) -> Vec<PendingRecord> {
        let state = self.state.lock();
        let first = state.queue.partition_point(|p| p.revision < from.main);
        let mut out = Vec::new();
        for pending in state.queue.range(first..) {
            if pending
                .records
                .first()
                .is_some_and(|r| r.revision.main > to)
            {
                break;
            }
            out.extend(
                pending
                    .records
                    .iter()
                    .filter(|r| r.revision >= from)
                    .cloned(),
            );
        }
        out
    }

    /// Runs `work` between two batches, with the engine and with what was written since the last call. The committer waits, the apply path
    /// does not.
    pub fn between_batches<T>(
        &self,
        work: impl FnOnce(&mut Option<Follow>, &mut dyn FnMut(Arc<dyn Engine>)) -> T,
    ) -> T {
        let mut follow = self.writing.lock();
        work(&mut follow, &mut |engine| {
            if let Ok(size) = engine.size() {
                self.allocated.store(size.allocated, Ordering::Relaxed);
            }
            *self.engine.write() = engine;
        })
    }

    /// Writes a batch of maintenance between two of the queue's. It must change nothing that an entry still in the queue is about. `lazily`:
    /// it is on the disk with the next batch that is not.
    pub fn write_now(&self, batch: &Batch, lazily: bool) -> Result<(), StorageError> {
        let stopped = |first: String| Err(StorageError::Stopped { first });
        let mut follow = self.writing.lock();
        if let Some(failure) = self.failure() {
            return stopped(failure.to_string());
        }
        match self.write(&mut follow, batch, lazily) {
            Ok(()) => Ok(()),
            Err(error) => {
                drop(follow);
                let first = error.to_string();
                self.fail(error);
                stopped(first)
            }
        }
    }

    fn write(
        &self,
        follow: &mut Option<Follow>,
        batch: &Batch,
        lazily: bool,
    ) -> Result<(), StorageError> {
        let engine = self.engine();
        let started = clock::now();
        if lazily {
            engine.write_lazily(batch)?;
        } else {
            engine.write(batch)?;
        }
        self.observer().committed(started.elapsed());
        self.allocated
            .store(engine.size()?.allocated, Ordering::Relaxed);
        if let Some(follow) = follow {
            // Copies: a key is a slice of the batch's one buffer, and would keep its values alive.
            follow
                .keys
                .extend(batch.ops.iter().map(|(key, _)| Bytes::copy_from_slice(key)));
        }
        Ok(())
    }

    /// One step of the committer: a batch. False at the end.
    pub fn step(&self, wait: Wait) -> bool {
        let Some(entries) = self.next_entries(wait) else {
            self.abandon();
            return false;
        };
        if entries.is_empty() {
            return true;
        }
        let batch = batch_of(&entries);
        let written = self.write(&mut self.writing.lock(), &batch, false);
        match written {
            Ok(()) => self.finish(&entries),
            Err(error) => self.fail(error),
        }
        true
    }

    /// Entries to write: those due, or all that may go when somebody waits for them or nobody waits here. None at the end.
    fn next_entries(&self, wait: Wait) -> Option<Vec<Arc<Pending>>> {
        let mut state = self.state.lock();
        loop {
            if state.stopped || state.failure.is_some() {
                return None;
            }
            let allowed = state.allowed();
            if allowed == 0 {
                if state.closing {
                    return None;
                }
                if wait == Wait::No {
                    return Some(Vec::new());
                }
                state.starved = !state.queue.is_empty();
                self.work.wait(&mut state);
                state.starved = false;
                continue;
            }
            let urgent = wait == Wait::No
                || state.closing
                || state.wanted > state.written
                || state.is_full(self.limits.batch_limit);
            let due = state.due.unwrap_or_else(clock::now);
            if urgent || due <= clock::now() {
                return Some(state.queue.range(..allowed).cloned().collect());
            }
            self.work.wait_until(&mut state, due);
        }
    }

    fn finish(&self, entries: &[Arc<Pending>]) {
        let mut state = self.state.lock();
        for entry in entries {
            state.queue.pop_front();
            state.bytes -= entry.bytes + ENTRY_OVERHEAD_BYTES;
            state.ops -= entry.op_count();
            state.durable = entry.position;
        }
        state.written += entries.len() as u64;
        state.due = (!state.queue.is_empty()).then(|| clock::now() + self.limits.batch_interval);
        let flushed = state
            .flushes
            .partition_point(|(upto, _)| *upto <= state.written);
        let flushed: Vec<_> = state.flushes.drain(..flushed).collect();
        let durable = state.durable;
        drop(state);
        self.progress.notify_all();
        for (_, call) in flushed {
            call(Ok(durable));
        }
    }
}

impl State {
    fn is_over(&self) -> bool {
        self.failure.is_some() || self.stopped
    }

    /// Why nothing is written any more.
    fn why_over(&self) -> StorageError {
        let failure = self.failure.as_ref();
        StorageError::Stopped {
            first: failure.map_or_else(|| "the store is closed".to_owned(), ToString::to_string),
        }
    }

    fn is_full(&self, batch_limit: usize) -> bool {
        self.bytes >= BATCH_BYTES_MAX || self.ops >= batch_limit
    }

    /// How many entries at the front may be written together now.
    fn allowed(&self) -> usize {
        let mut bytes = 0;
        let mut count = 0;
        for entry in &self.queue {
            if entry.position.index > self.log_synced {
                break;
            }
            bytes += entry.bytes;
            if count > 0 && bytes > BATCH_BYTES_MAX {
                break;
            }
            count += 1;
        }
        count
    }

    fn find(&self, revision: Revision) -> Option<PendingRecord> {
        // Entries without records repeat the revision of the one before; the first of a revision has its records.
        let i = self.queue.partition_point(|p| p.revision < revision.main);
        let pending = self.queue.get(i)?;
        let record = pending.records.get(usize::try_from(revision.sub).ok()?)?;
        (record.revision == revision).then(|| record.clone())
    }
}

/// Puts the engine key of a record at the end of `out`.
pub fn put_record_key(out: &mut BytesMut, revision: Revision, tombstone: bool) {
    out.put_u8(Table::Key.prefix());
    out.put_slice(&revision.to_bytes());
    if tombstone {
        out.put_u8(b't');
    }
}

fn batch_of(entries: &[Arc<Pending>]) -> Batch {
    // One buffer for all encoded records: slices of it are cheaper than an allocation each.
    let records = entries.iter().flat_map(|entry| &entry.records);
    let capacity = records
        .clone()
        .map(|r| r.kv.key.len() + r.kv.value.len() + 64)
        .sum();
    let mut buffer = BytesMut::with_capacity(capacity);
    let mut batch = Batch::default();
    for entry in entries {
        for record in &entry.records {
            put_record_key(&mut buffer, record.revision, record.tombstone);
            let key = buffer.split().freeze();
            record
                .kv
                .encode(&mut buffer)
                .expect("a BytesMut grows as needed");
            batch.ops.push((key, Some(buffer.split().freeze())));
        }
        batch.ops.extend(entry.ops.iter().cloned());
    }
    let last = entries.last().expect("a batch has an entry");
    batch.put(
        Table::Meta.key(meta::APPLIED),
        encode_position(last.position),
    );
    batch.put(
        Table::Meta.key(meta::CURRENT_REVISION),
        last.revision.to_be_bytes().to_vec(),
    );
    batch.put(
        Table::Meta.key(meta::LIVE_BYTES),
        last.live_bytes.to_be_bytes().to_vec(),
    );
    batch
}

/// The bytes under [`meta::APPLIED`]: index, then term.
pub fn encode_position(position: LogPosition) -> Vec<u8> {
    let mut out = Vec::with_capacity(16);
    out.extend_from_slice(&position.index.to_be_bytes());
    out.extend_from_slice(&position.term.to_be_bytes());
    out
}

/// The reverse of [`encode_position`]; None when they are not its bytes.
pub fn decode_position(bytes: &[u8]) -> Option<LogPosition> {
    let bytes: &[u8; 16] = bytes.try_into().ok()?;
    let (index, term) = bytes.split_at(8);
    Some(LogPosition {
        index: u64::from_be_bytes(index.try_into().ok()?),
        term: u64::from_be_bytes(term.try_into().ok()?),
    })
}

#[cfg(test)]
mod tests;
