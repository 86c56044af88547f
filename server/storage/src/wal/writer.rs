//! The worker that writes: it takes everything queued, writes it at once, syncs once, tells everybody.
//!
//! ```text
//! | group | mark | group | mark | ...            each mark: everything before me is synced
//!         ^ sync ^ mark and sidecar written, callbacks; the mark itself is synced with the next group, or when idle
//! ```
//!
//! The next segment is allocated in advance. When the disk is too full for that, `Wal::has_room` turns false as the present segment
//! fills, requests are refused above, and the little that still comes (votes, what was accepted) goes past the segment's
//! planned size.
//!
//! Not here: the queue (`wal.rs`), what the marks decide at open (`recover.rs`).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use crate::LogPosition;
use crate::error::StorageError;
use crate::files;
use crate::runner::{Runner, Wait, Worker};
use crate::wal::record::{Encoder, FORMAT, Metadata};
use crate::wal::segment::{self, Segment, TMP_NAME};
use crate::wal::sidecar::{Sidecar, Synced};
use crate::wal::{Done, Job, Place, Queued, Shared, WalOptions, WalVote};

/// Where writing goes on, as recovery found it.
pub(crate) struct Tail {
    pub(crate) segment: Arc<Segment>,
    pub(crate) offset: u64,
    pub(crate) crc: u32,
    /// The last entry written.
    pub(crate) last: LogPosition,
    pub(crate) sidecar: Sidecar,
    /// Set when the last segment is finished and a new one must be begun.
    pub(crate) sealed: bool,
}

struct Writer {
    shared: Arc<Shared>,
    tail: Tail,
    /// A mark was written that no sync has covered yet.
    mark_unsynced: bool,
    next: Option<File>,
    /// The last attempt to allocate it failed, and groups until it is tried again.
    next_failed: bool,
    next_retry_groups: u32,
    /// What each segment repeats at its beginning.
    vote: Option<WalVote>,
    committed: LogPosition,
    purged: LogPosition,
}

/// What there is to do.
enum Work {
    /// What is queued, up to the cap.
    Group(Vec<Queued>),
    /// The log has been idle for a while.
    Idle,
    Nothing,
    /// To stop.
    End,
}

/// Where the entries of a group came to lie, by their serial.
type Placed = Vec<(u64, u64, Place)>;

const RETRY_GROUPS: u32 = 256;
/// What a group brings besides what was queued (committed index, mark), and the segment's last record: all within what was allocated.
const GROUP_EXTRA_BYTES: u64 = 256;

/// Begins to write. Gives the thread that does, if it has one.
pub(crate) fn start(
    shared: &Arc<Shared>,
    tail: Tail,
    runner: &dyn Runner,
) -> Result<Option<JoinHandle<()>>, StorageError> {
    let dir = shared.options.dir.clone();
    let mut writer = {
        let state = shared.state.lock();
        Writer {
            vote: state.vote,
            committed: state.committed,
            purged: state.purged,
            tail,
            mark_unsynced: false,
            next: None,
            next_failed: false,
            next_retry_groups: 0,
            shared: Arc::clone(shared),
        }
    };
    if writer.tail.sealed {
        writer.begin_segment()?;
    }
    // What recovery read may only have been in the page cache. And before the segment grows, the sidecar must no longer say that
    // the log is closed, or a crash in between would look like damage.
    writer.sync_segment()?;
    writer.write_sidecar(writer.tail.offset, false)?;
    writer.tail.sidecar.sync()?;
    writer.write_mark()?;
    runner
        .start("wal", Box::new(writer))
        .map_err(|error| StorageError::io("start a thread for", &dir, error))
}

impl Worker for Writer {
    fn run(&mut self) {
        let shared = Arc::clone(&self.shared);
        // A panic here is a bug; without this the node would wait for ever instead of stopping.
        let run = std::panic::AssertUnwindSafe(|| while self.step(Wait::ForWork) {});
        if std::panic::catch_unwind(run).is_err() {
            let source = std::io::Error::other("its thread panicked");
            let dir = &shared.options.dir;
            shared.fail(
                StorageError::io("write the log in", dir, source),
                Vec::new(),
            );
        }
    }

    fn step(&mut self, wait: Wait) -> bool {
        let (done, goes_on) = match self.next_work(wait) {
            Work::Group(group) => match self.write_group(&group) {
                Ok(placed) => {
                    self.publish(&placed, group);
                    if self.next_retry_groups == 0 || !self.next_failed {
                        self.prepare_next();
                    } else {
                        self.next_retry_groups -= 1;
                    }
                    return true;
                }
                Err(error) => {
                    self.shared.fail(error, group);
                    return false;
                }
            },
            Work::Idle => (self.go_idle(), true),
            Work::Nothing => return true,
            Work::End => (self.close(), false),
        };
        if let Err(error) = done {
            self.shared.fail(error, Vec::new());
            return false;
        }
        goes_on
    }
}

impl Writer {
    fn next_work(&mut self, wait: Wait) -> Work {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.state.lock();
        while state.queue.is_empty() {
            if state.stopping {
                return Work::End;
            }
            let wanting = self.next.is_none() && self.half_full();
            let put_off = self.mark_unsynced || state.committed_unwritten || wanting;
            match (wait, put_off) {
                (Wait::ForWork, true) => {
                    let idle = shared
                        .work
                        .wait_for(&mut state, shared.options.idle_after)
                        .timed_out();
                    if idle && state.queue.is_empty() && !state.stopping {
                        return Work::Idle;
                    }
                }
                (Wait::ForWork, false) => shared.work.wait(&mut state),
                (Wait::No, true) => return Work::Idle,
                (Wait::No, false) => return Work::Nothing,
            }
        }
        let mut bytes = 0;
        let mut group = Vec::with_capacity(state.queue.len().min(1024));
        while let Some(front) = state.queue.front() {
            if !group.is_empty() && bytes + front.bytes > shared.options.group_bytes_max {
                break;
            }
            bytes += front.bytes;
            group.extend(state.queue.pop_front());
        }
        if state.committed_unwritten {
            state.committed_unwritten = false;
            self.committed = state.committed;
        }
        Work::Group(group)
    }

    fn write_group(&mut self, group: &[Queued]) -> Result<Placed, StorageError> {
        let bytes: usize = group.iter().map(|queued| queued.bytes).sum();
        let end = self.tail.offset + bytes as u64 + GROUP_EXTRA_BYTES;
        let full = end > self.shared.options.segment_bytes;
        if full && self.next.is_none() && !self.next_failed {
            self.prepare_next();
        }
        if full && self.next.is_some() {
            self.finish_segment()?;
        }

        let mut placed = Vec::new();
        let mut encoder = Encoder::new(self.tail.crc);
        encoder.out.reserve(bytes + 128);
        for queued in group {
            match &queued.job {
                Job::Entries(entries, serial) => {
                    for (serial, entry) in (*serial..).zip(entries) {
                        let crc_before = encoder.crc;
                        let start = encoder.out.len();
                        encoder.entry(entry);
                        let place = Place {
                            sequence: self.tail.segment.metadata.sequence,
                            offset: self.tail.offset + start as u64,
                            length: (encoder.out.len() - start) as u32,
                            crc_before,
                        };
                        placed.push((entry.position.index, serial, place));
                        self.tail.last = entry.position;
                    }
                }
                Job::Vote(vote) => {
                    encoder.vote(vote);
                    self.vote = Some(*vote);
                }
                Job::Snapshot(upto) => {
                    encoder.snapshot(*upto);
                    self.purged = *upto;
                    if upto.index > self.tail.last.index {
                        self.tail.last = *upto;
                    }
                }
                Job::Truncate(last) => {
                    encoder.truncate(last.index);
                    self.tail.last = *last;
                }
            }
        }
        encoder.committed(self.committed);
        let observer = Arc::clone(&self.shared.options.observer);
        observer.wrote(placed.len(), encoder.out.len());
        self.write(&encoder)?;
        if !self.shared.options.unsafe_no_fsync {
            self.sync_segment()?;
            self.write_mark()?;
        }
        Ok(placed)
    }

    fn write(&mut self, encoder: &Encoder) -> Result<(), StorageError> {
        let segment = &self.tail.segment;
        let mut result = Ok(());
        self.shared.options.observer.around_write(&mut || {
            result = segment.file.write_all_at(&encoder.out, self.tail.offset);
        });
        result.map_err(|error| StorageError::io("write", &segment.path, error))?;
        self.tail.offset += encoder.out.len() as u64;
        self.tail.crc = encoder.crc;
        Ok(())
    }

    fn sync_segment(&mut self) -> Result<(), StorageError> {
        let segment = &self.tail.segment;
        let mut result = Ok(());
        self.shared.options.observer.around_sync(&mut || {
            result = segment.file.sync_data();
        });
        self.mark_unsynced = false;
        result.map_err(|error| StorageError::io("sync", &segment.path, error))
    }

    /// States, in the segment and beside it, that everything up to the tail is synced.
    fn write_mark(&mut self) -> Result<(), StorageError> {
        let synced = self.tail.offset;
        let mut encoder = Encoder::new(self.tail.crc);
        encoder.mark(self.tail.segment.metadata.nonce, synced);
        self.write(&encoder)?;
        self.mark_unsynced = true;
        self.write_sidecar(synced, false)
    }

    fn write_sidecar(&self, offset: u64, clean: bool) -> Result<(), StorageError> {
        let segment = &self.tail.segment;
        let file_bytes = if clean {
            let metadata = segment.file.metadata();
            metadata
                .map_err(|error| StorageError::io("stat", &segment.path, error))?
                .len()
        } else {
            0
        };
        self.tail.sidecar.write(&Synced {
            nonce: segment.metadata.nonce,
            sequence: segment.metadata.sequence,
            offset,
            file_bytes,
            crc: self.tail.crc,
            clean,
        })
    }

    /// Remembers where the group lies, deletes what it purged, and calls back, in this order.
    fn publish(&mut self, placed: &Placed, group: Vec<Queued>) {
        {
            let mut state = self.shared.state.lock();
            for (index, serial, place) in placed {
                if let Some(slot) = state.slot(*index) {
                    let entry = &mut state.entries[slot];
                    if entry.serial == *serial {
                        entry.place = Some(*place);
                    }
                }
            }
            state.shrink_cache(self.shared.options.cache_bytes);
        }
        self.shared
            .synced_index
            .store(self.tail.last.index, Ordering::Release);
        if group
            .iter()
            .any(|queued| matches!(queued.job, Job::Snapshot(_)))
        {
            self.delete_segments();
        }
        for queued in group {
            if let Some(done) = queued.done {
                done(Ok(()));
            }
        }
    }

    /// Deletes the oldest segments while there are more than asked for and all their entries are purged.
    fn delete_segments(&mut self) {
        let keep = self.shared.options.max_wals;
        let mut gone = Vec::new();
        {
            let mut state = self.shared.state.lock();
            while keep > 0
                && state.segments.len() > keep.max(1)
                && state.segments[1].metadata.previous.index <= self.purged.index
            {
                gone.extend(state.segments.pop_front());
            }
        }
        for segment in &gone {
            // A segment left behind is deleted after the next purge's restart; it does no harm.
            if let Err(error) = std::fs::remove_file(&segment.path) {
                tracing::warn!(path = %segment.path.display(), %error, "cannot delete a purged log segment");
            }
        }
        if !gone.is_empty() {
            // Nobody should wait for the log meanwhile. Without a thread it is done here, at once.
            let freeing = std::thread::Builder::new().name("wal-free".to_owned());
            drop(freeing.spawn(move || {
                for segment in gone.into_iter().filter_map(Arc::into_inner) {
                    files::free(&segment.file, |time| {
                        std::thread::sleep(time);
                        true
                    });
                }
            }));
        }
    }

    fn half_full(&self) -> bool {
        self.tail.offset > self.shared.options.segment_bytes / 2
    }

    /// Allocates the next segment once the present one is half full. Says whether requests still have room.
    fn prepare_next(&mut self) {
        let options = &self.shared.options;
        if self.next.is_none() && self.half_full() {
            match segment::prepare(&options.dir, options.segment_bytes) {
                Ok(file) => {
                    self.next = Some(file);
                    self.next_failed = false;
                }
                Err(error) => {
                    if !self.next_failed {
                        tracing::warn!(%error, "cannot allocate the next log segment");
                    }
                    self.next_failed = true;
                    self.next_retry_groups = RETRY_GROUPS;
                }
            }
        }
        let reserve = options.segment_bytes / 4;
        let room = self.next.is_some() || self.tail.offset + reserve < options.segment_bytes;
        if self.shared.room.swap(room, Ordering::AcqRel) != room {
            tracing::warn!(room, "room in the log changed");
        }
    }

    /// One sync makes the last mark proof against a power cut too.
    fn go_idle(&mut self) -> Result<(), StorageError> {
        self.write_committed()?;
        if self.mark_unsynced {
            self.sync_segment()?;
        }
        self.prepare_next();
        Ok(())
    }

    /// Writes what is known to be committed, if no group has carried it yet. Nobody waits for it: it rides with the next sync.
    fn write_committed(&mut self) -> Result<(), StorageError> {
        {
            let mut state = self.shared.state.lock();
            if !std::mem::take(&mut state.committed_unwritten) {
                return Ok(());
            }
            self.committed = state.committed;
        }
        let mut encoder = Encoder::new(self.tail.crc);
        encoder.committed(self.committed);
        self.write(&encoder)
    }

    fn finish_segment(&mut self) -> Result<(), StorageError> {
        let mut encoder = Encoder::new(self.tail.crc);
        encoder.seal();
        self.write(&encoder)?;
        self.sync_segment()?;
        self.begin_segment()
    }

    /// Begins the segment after the present one, which is sealed and synced.
    fn begin_segment(&mut self) -> Result<(), StorageError> {
        let options = &self.shared.options;
        let file = match self.next.take() {
            Some(file) => file,
            None => segment::prepare(&options.dir, options.segment_bytes)?,
        };
        let metadata = Metadata {
            format: FORMAT,
            identity: options.identity,
            nonce: nonce(),
            sequence: self.tail.segment.metadata.sequence + 1,
            previous: self.tail.last,
            previous_crc: self.tail.crc,
        };
        let beginning = Beginning {
            vote: self.vote,
            committed: self.committed,
            purged: self.purged,
        };
        let (segment, offset, crc) = begin(options, file, metadata, &beginning)?;
        self.tail.segment = Arc::clone(&segment);
        self.tail.offset = offset;
        self.tail.crc = crc;
        self.shared.state.lock().segments.push_back(segment);
        Ok(())
    }

    fn close(&mut self) -> Result<(), StorageError> {
        self.write_committed()?;
        // A log that acknowledged without syncing still ends in good order.
        self.sync_segment()?;
        self.write_mark()?;
        self.sync_segment()?;
        self.write_sidecar(self.tail.offset, true)?;
        self.tail.sidecar.sync()?;
        drop(self.next.take());
        // It holds nothing; a leftover is truncated when the next one is prepared.
        drop(std::fs::remove_file(self.shared.options.dir.join(TMP_NAME)));
        Ok(())
    }
}

impl Shared {
    /// Nothing is written after this. Everybody waiting is told.
    fn fail(&self, error: StorageError, group: Vec<Queued>) {
        let error = Arc::new(error);
        tracing::error!(%error, "the write-ahead log failed");
        let (queued, call) = {
            let mut state = self.state.lock();
            state.failed = Some(Arc::clone(&error));
            let queued: Vec<Queued> = group.into_iter().chain(state.queue.drain(..)).collect();
            (queued, state.on_failure.take())
        };
        if let Some(call) = call {
            call(Arc::clone(&error));
        }
        let dones: Vec<Done> = queued.into_iter().filter_map(|q| q.done).collect();
        for done in dones {
            done(Err(Arc::clone(&error)));
        }
    }
}

/// What a segment repeats at its beginning, so that older ones can go.
pub(crate) struct Beginning {
    pub(crate) vote: Option<WalVote>,
    pub(crate) committed: LogPosition,
    pub(crate) purged: LogPosition,
}

/// Writes and syncs a segment's beginning, then gives the file its name. Returns where it goes on, and the chain there.
pub(crate) fn begin(
    options: &WalOptions,
    file: File,
    metadata: Metadata,
    beginning: &Beginning,
) -> Result<(Arc<Segment>, u64, u32), StorageError> {
    let mut encoder = Encoder::new(0);
    encoder.metadata(&metadata);
    encoder.snapshot(beginning.purged);
    encoder.committed(beginning.committed);
    if let Some(vote) = &beginning.vote {
        encoder.vote(vote);
    }
    let tmp = options.dir.join(TMP_NAME);
    file.write_all_at(&encoder.out, 0)
        .map_err(|error| StorageError::io("write", &tmp, error))?;
    file.sync_all()
        .map_err(|error| StorageError::io("sync", &tmp, error))?;
    let path = options.dir.join(segment::name(
        metadata.sequence,
        metadata.previous.index + 1,
    ));
    std::fs::rename(&tmp, &path).map_err(|error| StorageError::io("rename", &tmp, error))?;
    segment::sync_dir(&options.dir)?;
    let offset = encoder.out.len() as u64;
    let segment = Arc::new(Segment {
        path,
        file,
        metadata,
    });
    Ok((segment, offset, encoder.crc))
}

/// A number that no other segment has.
pub(crate) fn nonce() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
}
