//! What waits for one stream: filled by the dispatcher and by catch-up, emptied by the stream's task.
//!
//! Promises: bounded: above [`PENDING_ENTRIES_MAX`] or [`PENDING_BYTES_MAX`] the stream is full, its watchers are set aside
//! instead of queued, and catch-up takes them on once half of it has been sent.
//!
//! etcd: the channel of 128 responses in mvcc.watchStream, and its victims.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use prometheus::IntGauge;

use super::commit::Commit;

/// Entries (an event for a watcher) that may wait for one stream: 12 bytes each.
const PENDING_ENTRIES_MAX: usize = 64 << 10;
/// Bytes of commits pinned by what waits for one stream.
const PENDING_BYTES_MAX: usize = 4 << 20;

/// An event for a watcher: indexes into the delivery's commits and that commit's events.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) slot: u32,
    pub(crate) commit: u32,
    pub(crate) event: u32,
}

/// Events for some watchers of one stream, by watcher in order of revision.
#[derive(Debug, Default)]
pub(crate) struct Events {
    pub(crate) commits: Vec<Arc<Commit>>,
    pub(crate) entries: Vec<Entry>,
}

impl Events {
    pub(crate) fn push(&mut self, slot: u32, commit: &Arc<Commit>, event: usize) {
        if !self
            .commits
            .last()
            .is_some_and(|last| Arc::ptr_eq(last, commit))
        {
            self.commits.push(commit.clone());
        }
        self.entries.push(Entry {
            slot,
            commit: (self.commits.len() - 1) as u32,
            event: event as u32,
        });
    }

    pub(crate) fn bytes(&self) -> usize {
        self.commits.iter().map(|c| c.bytes).sum()
    }
}

#[derive(Debug)]
pub(crate) enum Delivery {
    /// As they are committed.
    Live(Events),
    /// Read from history; `revision` is what the responses' headers say, as in etcd.
    History { events: Events, revision: i64 },
    /// History before the watcher's place is gone.
    Compacted { slot: u32, compact_revision: i64 },
}

#[derive(Debug)]
pub(crate) struct Mailbox {
    inner: Mutex<Inner>,
    entries: AtomicUsize,
    bytes: AtomicUsize,
    /// The metric over all streams.
    pending: IntGauge,
    /// Some watcher was set aside because the mailbox was full.
    pub(crate) lagging: AtomicBool,
    /// Changes under the lock only.
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Inner {
    deliveries: Vec<Delivery>,
    /// Every event up to here of the stream's synced watchers has been put in.
    upto: i64,
    /// History handed out events up to here: no progress below it may be told.
    floor: i64,
    /// Watchers of the stream that are behind.
    unsynced: usize,
    waker: Option<Waker>,
}

/// How far the stream's watchers are, once its mailbox is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) upto: i64,
    pub(crate) floor: i64,
    pub(crate) unsynced: usize,
}

impl Mailbox {
    pub(crate) fn new(pending: IntGauge) -> Self {
        Self {
            inner: Mutex::default(),
            pending,
            entries: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            lagging: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.entries.load(Ordering::SeqCst) >= PENDING_ENTRIES_MAX
            || self.bytes.load(Ordering::SeqCst) >= PENDING_BYTES_MAX
    }

    /// Whether catch-up may put more in: half full is where it starts again, so that it does so in large steps.
    pub(crate) fn has_room(&self) -> bool {
        self.entries.load(Ordering::SeqCst) < PENDING_ENTRIES_MAX / 2
            && self.bytes.load(Ordering::SeqCst) < PENDING_BYTES_MAX / 2
    }

    /// `upto`: the dispatcher has now put in everything of this stream up to that revision.
    pub(crate) fn put_live(&self, events: Events, upto: i64) {
        let mut inner = self.inner.lock();
        if self.is_closed() {
            return;
        }
        self.account(&events);
        inner.upto = inner.upto.max(upto);
        inner.deliveries.push(Delivery::Live(events));
        wake(inner);
    }

    /// `read_to`: the last revision that may be among the events.
    pub(crate) fn put_history(&self, events: Events, revision: i64, read_to: i64) {
        let mut inner = self.inner.lock();
        if self.is_closed() {
            return;
        }
        self.account(&events);
        inner.floor = inner.floor.max(read_to);
        inner
            .deliveries
            .push(Delivery::History { events, revision });
        wake(inner);
    }

    pub(crate) fn put_compacted(&self, slot: u32, compact_revision: i64) {
        let mut inner = self.inner.lock();
        inner.unsynced -= 1;
        inner.deliveries.push(Delivery::Compacted {
            slot,
            compact_revision,
        });
        wake(inner);
    }

    pub(crate) fn add_unsynced(&self) {
        self.inner.lock().unsynced += 1;
    }

    /// A watcher is no longer behind, or gone.
    pub(crate) fn sub_unsynced(&self) {
        let mut inner = self.inner.lock();
        inner.unsynced -= 1;
        if inner.unsynced == 0 {
            // Progress may have been waiting for it.
            wake(inner);
        }
    }

    pub(crate) fn wake(&self) {
        wake(self.inner.lock());
    }

    /// The node stops, or the stream has ended: nothing goes in any more.
    pub(crate) fn close(&self) {
        let mut inner = self.inner.lock();
        self.closed.store(true, Ordering::SeqCst);
        inner.deliveries = Vec::new();
        let left = self.entries.swap(0, Ordering::SeqCst);
        self.pending.sub(left as i64);
        wake(inner);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Takes all that waits, or leaves the waker and says how far the watchers are.
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>, into: &mut Vec<Delivery>) -> Poll<()> {
        let mut inner = self.inner.lock();
        if inner.deliveries.is_empty() {
            if !inner
                .waker
                .as_ref()
                .is_some_and(|w| w.will_wake(cx.waker()))
            {
                inner.waker = Some(cx.waker().clone());
            }
            return Poll::Pending;
        }
        into.append(&mut inner.deliveries);
        Poll::Ready(())
    }

    /// None while deliveries wait.
    pub(crate) fn standing(&self) -> Option<Standing> {
        let inner = self.inner.lock();
        inner.deliveries.is_empty().then_some(Standing {
            upto: inner.upto,
            floor: inner.floor,
            unsynced: inner.unsynced,
        })
    }

    fn account(&self, events: &Events) {
        self.pending.add(events.entries.len() as i64);
        self.entries
            .fetch_add(events.entries.len(), Ordering::SeqCst);
        self.bytes.fetch_add(events.bytes(), Ordering::SeqCst);
    }

    /// What was taken has been written. True when watchers set aside should be taken on again.
    pub(crate) fn sent(&self, events: &Events) -> bool {
        self.pending.sub(events.entries.len() as i64);
        self.entries
            .fetch_sub(events.entries.len(), Ordering::SeqCst);
        self.bytes.fetch_sub(events.bytes(), Ordering::SeqCst);
        self.lagging.load(Ordering::SeqCst)
            && self.has_room()
            && self.lagging.swap(false, Ordering::SeqCst)
    }
}

/// Wakes after the lock is released, so that the woken task does not run into it.
fn wake(mut inner: parking_lot::MutexGuard<'_, Inner>) {
    let waker = inner.waker.take();
    drop(inner);
    if let Some(waker) = waker {
        waker.wake();
    }
}
