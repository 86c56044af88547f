//! The library's log, over the write-ahead log.
//!
//! Promises: what the library is told to be flushed is synced; the store learns how far the log is synced before anybody is answered
//! (the first rule of durability).
//! Recent entries are kept decoded, so that applying them costs neither a read nor a parse.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_storage::mvcc::Store;
use ballast_storage::wal::{Done, Wal};
use ballast_storage::{LogPosition, StorageError};
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{OptionalSend, RaftLogReader};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::raft::command::{
    Entry, LogId, TypeConfig, Vote, decode_entry, decode_vote, encode_entry, encode_vote, log_id,
    position,
};
use crate::raft::node::Failure;

/// Decoded entries kept: enough for everything between append and apply.
const RECENT_ENTRIES_MAX: usize = 2048;
/// And their bytes.
const RECENT_BYTES_MAX: usize = 16 << 20;
/// What one read for replication may carry.
const READ_BYTES_MAX: usize = 1 << 20;

#[derive(Debug, Default)]
struct Recent {
    entries: VecDeque<(Entry, usize)>,
    bytes: usize,
}

impl Recent {
    fn push(&mut self, entry: Entry, bytes: usize) {
        self.entries.push_back((entry, bytes));
        self.bytes += bytes;
        while self.entries.len() > RECENT_ENTRIES_MAX || self.bytes > RECENT_BYTES_MAX {
            let Some((_, bytes)) = self.entries.pop_front() else {
                return;
            };
            self.bytes -= bytes;
        }
    }

    fn truncate_after(&mut self, index: u64) {
        while self
            .entries
            .back()
            .is_some_and(|(entry, _)| position(&entry.log_id).index > index)
        {
            if let Some((_, bytes)) = self.entries.pop_back() {
                self.bytes -= bytes;
            }
        }
    }

    fn purge(&mut self, upto: u64) {
        while self
            .entries
            .front()
            .is_some_and(|(entry, _)| position(&entry.log_id).index <= upto)
        {
            if let Some((_, bytes)) = self.entries.pop_front() {
                self.bytes -= bytes;
            }
        }
    }

    /// Entries from `first` on if the first one is here: that one, and as many more as fit into `bytes_max`.
    fn from(&self, first: u64, last: u64, bytes_max: usize) -> Option<Vec<Entry>> {
        let (front, _) = self.entries.front()?;
        let slot = first.checked_sub(position(&front.log_id).index)? as usize;
        if slot >= self.entries.len() {
            return None;
        }
        let count = (last - first + 1) as usize;
        let mut found = Vec::new();
        let mut left = bytes_max;
        for (entry, bytes) in self.entries.range(slot..).take(count) {
            if *bytes > left && !found.is_empty() {
                break;
            }
            left = left.saturating_sub(*bytes);
            found.push(entry.clone());
        }
        Some(found)
    }
}

/// One log, as many handles as the library wants.
#[derive(Clone, Debug)]
pub struct LogStore {
    wal: Arc<Wal>,
    store: Arc<Store>,
    recent: Arc<Mutex<Recent>>,
    committed: Arc<AtomicU64>,
    failure: Failure,
}

impl LogStore {
    pub(crate) fn new(wal: Arc<Wal>, store: Arc<Store>, failure: Failure) -> Self {
        store.set_log_synced(wal.last().index);
        Self {
            committed: Arc::new(AtomicU64::new(wal.committed().index)),
            wal,
            store,
            recent: Arc::default(),
            failure,
        }
    }

    /// The last index known to be committed.
    pub(crate) fn committed_index(&self) -> u64 {
        self.committed.load(Ordering::Acquire)
    }

    fn read(&self, first: u64, last: u64, bytes_max: usize) -> io::Result<Vec<Entry>> {
        if first > last {
            return Ok(Vec::new());
        }
        if let Some(found) = self.recent.lock().from(first, last, bytes_max) {
            return Ok(found);
        }
        let entries = self.wal.read(first, last, bytes_max).map_err(|error| {
            self.failure.set(&error);
            io::Error::other(error)
        })?;
        entries
            .iter()
            .map(|entry| {
                decode_entry(entry).map_err(|error| {
                    self.failure.set(&error);
                    io::Error::other(error)
                })
            })
            .collect()
    }

    /// A callback of the log, and what it will say.
    fn waiter(&self) -> (Done, oneshot::Receiver<Result<(), Arc<StorageError>>>) {
        let (sender, receiver) = oneshot::channel();
        let failure = self.failure.clone();
        let done = Box::new(move |result: Result<(), Arc<StorageError>>| {
            if let Err(error) = &result {
                failure.set(error);
            }
            // Nobody waits any more when the library is shutting down.
            drop(sender.send(result));
        });
        (done, receiver)
    }

    async fn wait(
        receiver: oneshot::Receiver<Result<(), Arc<StorageError>>>,
    ) -> Result<(), io::Error> {
        match receiver.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(io::Error::other(error)),
            Err(_) => Err(io::Error::other("the log's thread is gone")),
        }
    }
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry>, io::Error> {
        // The library's indexes are one less than the log's.
        let first = match range.start_bound() {
            Bound::Included(start) => start + 1,
            Bound::Excluded(start) => start + 2,
            Bound::Unbounded => 1,
        }
        .max(self.wal.purged().index + 1);
        let last = match range.end_bound() {
            Bound::Included(end) => end + 1,
            Bound::Excluded(end) => *end,
            Bound::Unbounded => self.wal.last().index,
        };
        let mut out = self.read(first, last, usize::MAX)?;
        // The recent entries may begin where the file's part ends.
        while let Some(next) = out.last().map(|entry| position(&entry.log_id).index + 1) {
            if next > last {
                break;
            }
            let more = self.read(next, last, usize::MAX)?;
            if more.is_empty() {
                break;
            }
            out.extend(more);
        }
        Ok(out)
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.wal.vote().map(|vote| decode_vote(&vote)))
    }

    async fn limited_get_log_entries(
        &mut self,
        start: u64,
        end: u64,
    ) -> Result<Vec<Entry>, io::Error> {
        self.read(start + 1, end, READ_BYTES_MAX)
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig>, io::Error> {
        Ok(LogState {
            last_purged_log_id: log_id(self.wal.purged()),
            last_log_id: log_id(self.wal.last()),
        })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        let (done, receiver) = self.waiter();
        self.wal.save_vote(encode_vote(vote), done);
        Self::wait(receiver).await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        if let Some(committed) = committed {
            let committed = position(&committed);
            self.committed.store(committed.index, Ordering::Release);
            self.wal.save_committed(committed);
        }
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        Ok(log_id(self.wal.committed()))
    }

    async fn append<I>(
        &mut self,
        entries: I,
        callback: IOFlushed<TypeConfig>,
    ) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut encoded = Vec::new();
        {
            let mut recent = self.recent.lock();
            for entry in entries {
                let bytes = encode_entry(&entry);
                recent.push(entry, bytes.payload.len());
                encoded.push(bytes);
            }
        }
        let last = encoded.last().map_or(0, |entry| entry.position.index);
        let store = Arc::clone(&self.store);
        let failure = self.failure.clone();
        let done: Done = Box::new(move |result| match result {
            Ok(()) => {
                store.set_log_synced(last);
                callback.io_completed(Ok(()));
            }
            Err(error) => {
                failure.set(&error);
                callback.io_completed(Err(io::Error::other(error)));
            }
        });
        self.wal.append(encoded, done);
        Ok(())
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> Result<(), io::Error> {
        let index = last_log_id.as_ref().map_or(0, |id| position(id).index);
        self.recent.lock().truncate_after(index);
        let (done, receiver) = self.waiter();
        self.wal.truncate_after(index, done);
        Self::wait(receiver).await
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        let upto: LogPosition = position(&upto);
        self.recent.lock().purge(upto.index);
        // The library's loop need not stand still for the sync: until it is done the segments are there.
        let (done, _) = self.waiter();
        self.wal.purge(upto, done);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use openraft::EntryPayload;

    use super::*;

    #[test]
    fn what_one_message_carries_is_bounded_by_bytes_and_never_nothing() {
        let mut recent = Recent::default();
        for index in 1..=10 {
            let at = LogPosition { term: 1, index };
            let entry = Entry {
                log_id: log_id(at).unwrap(),
                payload: EntryPayload::Blank,
            };
            recent.push(entry, 100);
        }
        let count = |first, bytes_max| recent.from(first, 10, bytes_max).map(|found| found.len());
        assert_eq!(count(1, usize::MAX), Some(10));
        assert_eq!(count(1, 350), Some(3));
        assert_eq!(count(9, 50), Some(1));
        assert_eq!(count(11, 350), None);
    }
}
