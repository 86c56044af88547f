//! The write-ahead log: votes and entries of the replicated log, synced before anybody is told.
//!
//!     append, save_vote, ... --> queue --> writer thread: one write and one sync for all that waits --> callbacks
//!     read <-- entries not yet written and the most recent ones, in memory; older ones from their segment
//!
//! Promises: a callback's Ok means that the record and everything handed in before it is synced. What was acknowledged is there
//! at the next open, or the open fails and names file and offset (`wal/recover.rs`). After a failed write or sync nothing is
//! acknowledged any more.
//! Not here: what an entry means (`server/src/raft`), when to purge (`server/src/raft/node.rs`).
//!
//! etcd: server/storage/wal, with marks that tell a torn tail from damage.

pub mod dump;
pub mod foreign;
mod record;
mod recover;
mod segment;
mod sidecar;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

pub use record::{Identity, WalEntry, WalVote};
pub use recover::{LogFacts, inspect};
pub(crate) use writer::nonce;

use crate::LogPosition;
use crate::error::StorageError;
use crate::runner::{Runner, Threads};
use record::{ENTRY_FIXED_BYTES, Record, record_bytes};
use segment::Segment;

/// A segment's size, as etcd's.
pub const SEGMENT_BYTES: u64 = 64 << 20;

/// Called once, from the writer's thread: the record is synced, or never will be.
pub type Done = Box<dyn FnOnce(Result<(), Arc<StorageError>>) + Send>;

type FailureCall = Box<dyn FnOnce(Arc<StorageError>) + Send>;

/// What a member's metrics want to know. Called from the writer's thread.
pub trait WalObserver: Send + Sync + std::fmt::Debug {
    /// Runs `sync`, which waits for the disk once: the place to time it.
    fn around_sync(&self, sync: &mut dyn FnMut()) {
        sync();
    }

    /// Runs `write`, which hands a group to the operating system.
    fn around_write(&self, write: &mut dyn FnMut()) {
        write();
    }

    /// A group was written: so many entries, so many bytes.
    fn wrote(&self, _entries: usize, _bytes: usize) {}
}

/// Observes nothing.
#[derive(Clone, Copy, Debug)]
pub struct Unobserved;

impl WalObserver for Unobserved {}

#[derive(Clone, Debug)]
pub struct WalOptions {
    /// `member/wal`. Made when absent.
    pub dir: PathBuf,
    /// Refused when the log belongs to somebody else.
    pub identity: Identity,
    /// Where a log made anew begins: entries up to here are in the engine.
    pub start: LogPosition,
    pub segment_bytes: u64,
    /// Segments to keep at most, when what they hold is purged; 0 keeps all (etcd: max-wals).
    pub max_wals: usize,
    /// What one sync carries at most. Large, since a sync's cost hardly depends on it.
    pub group_bytes_max: usize,
    /// Written entries kept in memory for readers.
    pub cache_bytes: usize,
    /// Acknowledge without syncing: for tests of speed, never for data.
    pub unsafe_no_fsync: bool,
    /// How long the queue must be empty before the log counts as idle and its last mark is synced.
    pub idle_after: Duration,
    pub observer: Arc<dyn WalObserver>,
}

impl WalOptions {
    pub fn new(dir: impl Into<PathBuf>, identity: Identity) -> Self {
        Self {
            dir: dir.into(),
            identity,
            start: LogPosition::default(),
            segment_bytes: SEGMENT_BYTES,
            max_wals: 5,
            group_bytes_max: 16 << 20,
            cache_bytes: 4 << 20,
            unsafe_no_fsync: false,
            idle_after: Duration::from_millis(500),
            observer: Arc::new(Unobserved),
        }
    }
}

/// Where one entry's record is.
#[derive(Clone, Copy, Debug)]
struct EntryRef {
    term: u64,
    /// Distinguishes an entry from an earlier one of the same index that was truncated away.
    serial: u64,
    place: Option<Place>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    sequence: u64,
    offset: u64,
    length: u32,
    crc_before: u32,
}

#[derive(Debug)]
enum Job {
    Entries(Vec<WalEntry>, u64),
    Vote(WalVote),
    Snapshot(LogPosition),
    /// The last entry that stays.
    Truncate(LogPosition),
}

struct Queued {
    job: Job,
    bytes: usize,
    done: Option<Done>,
}

/// What readers, callers and the writer share.
struct State {
    queue: VecDeque<Queued>,
    /// Entries after `purged`, ascending without a gap.
    entries: VecDeque<EntryRef>,
    /// The last so many of `entries`; all that are not written yet are among them.
    cache: VecDeque<WalEntry>,
    cache_bytes: usize,
    serial: u64,
    purged: LogPosition,
    vote: Option<WalVote>,
    committed: LogPosition,
    /// `committed` is newer than what the file says. It rides with the next group.
    committed_unwritten: bool,
    /// Ascending by sequence; the last is being written.
    segments: VecDeque<Arc<Segment>>,
    failed: Option<Arc<StorageError>>,
    on_failure: Option<FailureCall>,
    stopping: bool,
}

impl State {
    fn last(&self) -> LogPosition {
        match self.entries.back() {
            Some(entry) => LogPosition {
                index: self.purged.index + self.entries.len() as u64,
                term: entry.term,
            },
            None => self.purged,
        }
    }

    fn slot(&self, index: u64) -> Option<usize> {
        let slot = index.checked_sub(self.purged.index + 1)? as usize;
        (slot < self.entries.len()).then_some(slot)
    }

    /// Drops cached entries from the front while there are too many bytes and they can be read from their segment.
    fn shrink_cache(&mut self, bytes_max: usize) {
        while self.cache_bytes > bytes_max || self.cache.len() > self.entries.len() {
            let Some(front) = self.cache.front() else {
                return;
            };
            let written = self
                .slot(front.position.index)
                .is_none_or(|slot| self.entries[slot].place.is_some());
            if !written {
                return;
            }
            self.cache_bytes -= front.payload.len();
            self.cache.pop_front();
        }
    }
}

struct Shared {
    options: WalOptions,
    state: Mutex<State>,
    work: Condvar,
    /// Everything up to this index is synced.
    synced_index: AtomicU64,
    /// There is space for more than what is queued.
    room: AtomicBool,
}

/// An open log. Cheap calls, any thread; the disk is waited for on the writer's.
pub struct Wal {
    shared: Arc<Shared>,
    /// None when somebody else takes the writer's steps, and after the end.
    writer: Mutex<Option<JoinHandle<()>>>,
    /// Holds the lock on the directory.
    _lock: File,
}

impl std::fmt::Debug for Wal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wal")
            .field("dir", &self.shared.options.dir)
            .finish_non_exhaustive()
    }
}

impl Wal {
    /// Opens the log of a directory, or begins one at `options.start` when there is none.
    pub fn open(options: WalOptions) -> Result<Arc<Self>, StorageError> {
        Self::open_on(options, &Threads)
    }

    /// As [`Self::open`]; `runner` takes the steps of the writer.
    pub fn open_on(options: WalOptions, runner: &dyn Runner) -> Result<Arc<Self>, StorageError> {
        foreign::check_wal_dir(&options.dir)?;
        crate::dirs::make(&options.dir, 0o700)?;
        let lock = lock_dir(&options.dir)?;
        let (state, tail) = recover::open(&options)?;
        let shared = Arc::new(Shared {
            synced_index: AtomicU64::new(state.last().index),
            room: AtomicBool::new(true),
            state: Mutex::new(state),
            work: Condvar::new(),
            options,
        });
        let writer = writer::start(&shared, tail, runner)?;
        Ok(Arc::new(Self {
            shared,
            writer: Mutex::new(writer),
            _lock: lock,
        }))
    }

    /// True when the directory holds a log.
    pub fn exists(dir: &Path) -> Result<bool, StorageError> {
        Ok(!segment::list(dir)?.is_empty())
    }

    /// Appends entries; they must follow the last one. Readable on return, synced when `done` says so.
    pub fn append(&self, entries: Vec<WalEntry>, done: Done) {
        let mut state = self.shared.state.lock();
        let next = state.last().index + 1;
        let mut bytes = 0;
        let serial = state.serial;
        for (next, entry) in (next..).zip(&entries) {
            assert_eq!(entry.position.index, next, "a log has no gaps");
            bytes += record_bytes(ENTRY_FIXED_BYTES + entry.payload.len());
            let serial = state.serial;
            state.serial += 1;
            state.entries.push_back(EntryRef {
                term: entry.position.term,
                serial,
                place: None,
            });
            state.cache_bytes += entry.payload.len();
            state.cache.push_back(entry.clone());
        }
        self.enqueue(&mut state, Job::Entries(entries, serial), bytes, Some(done));
    }

    pub fn save_vote(&self, vote: WalVote, done: Done) {
        let mut state = self.shared.state.lock();
        state.vote = Some(vote);
        self.enqueue(&mut state, Job::Vote(vote), 64, Some(done));
    }

    /// Remembers what is known to be committed. Written with the next group, or when the log goes idle; not waited for.
    pub fn save_committed(&self, committed: LogPosition) {
        let mut state = self.shared.state.lock();
        if committed > state.committed {
            state.committed = committed;
            state.committed_unwritten = true;
        }
    }

    /// Forgets the entries behind `index`.
    pub fn truncate_after(&self, index: u64, done: Done) {
        let mut state = self.shared.state.lock();
        let keep = index.saturating_sub(state.purged.index) as usize;
        state.entries.truncate(keep);
        while state.cache.back().is_some_and(|e| e.position.index > index) {
            let entry = state.cache.pop_back().expect("it was just looked at");
            state.cache_bytes -= entry.payload.len();
        }
        let last = state.last();
        self.enqueue(&mut state, Job::Truncate(last), 64, Some(done));
    }

    /// Forgets the entries up to `upto`, which the engine holds durably, and deletes segments that hold nothing else. When the
    /// log ends before `upto`, it goes on behind it.
    pub fn purge(&self, upto: LogPosition, done: Done) {
        let mut state = self.shared.state.lock();
        if upto.index > state.purged.index {
            let gone = (upto.index - state.purged.index) as usize;
            let gone = gone.min(state.entries.len());
            state.entries.drain(..gone);
            state.purged = upto;
            while state
                .cache
                .front()
                .is_some_and(|e| e.position.index <= upto.index)
            {
                let entry = state.cache.pop_front().expect("it was just looked at");
                state.cache_bytes -= entry.payload.len();
            }
        }
        let purged = state.purged;
        self.enqueue(&mut state, Job::Snapshot(purged), 64, Some(done));
    }

    fn enqueue(&self, state: &mut State, job: Job, bytes: usize, done: Option<Done>) {
        if let Some(error) = &state.failed {
            let error = Arc::clone(error);
            if let Some(done) = done {
                done(Err(error));
            }
            return;
        }
        if state.stopping {
            if let Some(done) = done {
                let source = std::io::Error::other("the log is closed");
                let path = &self.shared.options.dir;
                done(Err(Arc::new(StorageError::io("append to", path, source))));
            }
            return;
        }
        state.queue.push_back(Queued { job, bytes, done });
        if state.queue.len() == 1 {
            self.shared.work.notify_one();
        }
    }

    /// Entries from `first` to `last`, both included and as far as they exist; at least one if there is one, then as many as
    /// fit into `bytes_max` of payload.
    pub fn read(
        &self,
        first: u64,
        last: u64,
        bytes_max: usize,
    ) -> Result<Vec<WalEntry>, StorageError> {
        let mut out = Vec::new();
        let mut bytes = 0;
        let mut index = first;
        while index <= last {
            // One lock for a stretch of cached entries, none while a file is read.
            let found = {
                let state = self.shared.state.lock();
                let Some(slot) = state.slot(index) else {
                    break;
                };
                let cached_from = state.entries.len() - state.cache.len();
                if slot >= cached_from {
                    for entry in state.cache.range(slot - cached_from..) {
                        let full = !out.is_empty() && bytes + entry.payload.len() > bytes_max;
                        if entry.position.index > last || full {
                            return Ok(out);
                        }
                        bytes += entry.payload.len();
                        out.push(entry.clone());
                        index += 1;
                    }
                    continue;
                }
                let place = state.entries[slot]
                    .place
                    .expect("entries not yet written are cached");
                let segment = state
                    .segments
                    .iter()
                    .find(|segment| segment.metadata.sequence == place.sequence);
                (
                    place,
                    Arc::clone(segment.expect("an entry's segment is kept as long as the entry")),
                )
            };
            let entry = read_entry(&found.1, found.0, index)?;
            if !out.is_empty() && bytes + entry.payload.len() > bytes_max {
                break;
            }
            bytes += entry.payload.len();
            out.push(entry);
            index += 1;
        }
        Ok(out)
    }

    /// The term of an entry that is in the log, or of the last purged one.
    pub fn term_of(&self, index: u64) -> Option<u64> {
        let state = self.shared.state.lock();
        if index == state.purged.index {
            return Some(state.purged.term);
        }
        state.slot(index).map(|slot| state.entries[slot].term)
    }

    /// The last entry, or what was purged when there is none.
    pub fn last(&self) -> LogPosition {
        self.shared.state.lock().last()
    }

    pub fn purged(&self) -> LogPosition {
        self.shared.state.lock().purged
    }

    pub fn vote(&self) -> Option<WalVote> {
        self.shared.state.lock().vote
    }

    pub fn committed(&self) -> LogPosition {
        self.shared.state.lock().committed
    }

    /// Every entry up to this index is synced.
    pub fn synced_index(&self) -> u64 {
        self.shared.synced_index.load(Ordering::Acquire)
    }

    /// False while the next segment cannot be allocated and the present one is nearly full: new requests should be refused.
    /// What was accepted before still fits.
    pub fn has_room(&self) -> bool {
        self.shared.room.load(Ordering::Acquire)
    }

    /// The error after which nothing is written any more. The node must stop.
    pub fn failure(&self) -> Option<Arc<StorageError>> {
        self.shared.state.lock().failed.clone()
    }

    /// Called once when the log fails, from the thread that finds it; at once when it has failed already.
    pub fn on_failure(&self, call: Box<dyn FnOnce(Arc<StorageError>) + Send>) {
        let failed = {
            let mut state = self.shared.state.lock();
            if let Some(error) = &state.failed {
                Arc::clone(error)
            } else {
                state.on_failure = Some(call);
                return;
            }
        };
        call(failed);
    }

    /// Writes what is queued, marks the log as closed and stops the thread. Idempotent.
    pub fn close(&self) -> Result<(), Arc<StorageError>> {
        self.shared.state.lock().stopping = true;
        self.shared.work.notify_one();
        if let Some(writer) = self.writer.lock().take()
            && writer.join().is_err()
        {
            tracing::error!("the log's thread panicked");
        }
        match self.failure() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for Wal {
    fn drop(&mut self) {
        // An error has been told to every waiting caller.
        drop(self.close());
    }
}

fn read_entry(segment: &Segment, place: Place, index: u64) -> Result<WalEntry, StorageError> {
    let mut bytes = vec![0; place.length as usize];
    segment
        .file
        .read_exact_at(&mut bytes, place.offset)
        .map_err(|error| StorageError::io("read", &segment.path, error))?;
    let what = match record::decode(&bytes, place.crc_before) {
        Ok((Record::Entry(entry), _)) if entry.position.index == index => return Ok(entry),
        Ok(_) => "another record than was written here",
        Err(what) => what,
    };
    Err(StorageError::Damaged {
        path: segment.path.clone(),
        offset: place.offset,
        what: what.to_owned(),
    })
}

fn lock_dir(dir: &Path) -> Result<File, StorageError> {
    let file = File::open(dir).map_err(|error| StorageError::io("open", dir, error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(StorageError::Refused {
            path: dir.to_owned(),
            why: "another process has this log open; stop it first".to_owned(),
        }),
        Err(std::fs::TryLockError::Error(error)) => Err(StorageError::io("lock", dir, error)),
    }
}
