//! Registered watchers, which of them are up to date, and the thread that tells them of each commit.
//!
//!     create --------> synced <------------------+
//!        |               | (mailbox full)        | (catch_up.rs: nothing left to read)
//!        +-----------> unsynced -----------------+---> cancelled (compacted)
//!
//! A commit enters the ring and wakes the dispatcher, all that apply pays for. The dispatcher takes what has gathered, looks
//! up its watchers under `core`, reads replaced records for those who want them under no lock, then fills the mailboxes:
//! under load many commits travel in one step, and a watcher's events in one response.
//!
//!     revision   ... | dispatched | matched | ring head | store's view
//!                      in mailboxes  looked up  notified    published        each at most the next one
//!
//! Locks, outermost first: core, ring, mailbox. The stream's task holds none while it calls in.
//!
//! Promises: every event with start <= revision is delivered once, in order (invariant 4); `notify` never waits for a watcher.
//! Not here: reading history (`catch_up.rs`), the stream (`rpc/watch.rs`).
//!
//! etcd: server/storage/mvcc/watchable_store.go.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use ballast_storage::mvcc::{Committed, EventKind, Store};
use ballast_storage::{MvccError, ReadError};
use parking_lot::{Condvar, Mutex};

use super::commit::Commit;
use super::mailbox::{Events, Mailbox};
use super::metrics::WatchMetrics;
use super::ring::Ring;
use super::watcher_set::{KeyRange, Target, WatcherSet};

/// Commits and bytes that the dispatcher takes at once.
const DISPATCH_COMMITS_MAX: usize = 128;
const DISPATCH_BYTES_MAX: usize = 1 << 20;
/// Lookups after which the dispatcher lets others at `core` (about a millisecond).
const DISPATCH_MATCHES_MAX: usize = 32 << 10;

/// A watcher, for the life of the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct WatcherId(pub(crate) u64);

/// What a client asked to watch, checked.
#[derive(Clone, Debug)]
pub(crate) struct CreateWatch {
    pub(crate) range: KeyRange,
    /// 0 = what comes.
    pub(crate) start_revision: i64,
    pub(crate) no_put: bool,
    pub(crate) no_delete: bool,
    pub(crate) prev_kv: bool,
}

/// All watchers of this member.
#[derive(Debug)]
pub struct Hub {
    pub(super) store: ArcSwap<Store>,
    pub(super) ring: Mutex<RingState>,
    ring_changed: Condvar,
    pub(super) core: Mutex<Core>,
    /// Watchers in `core.set`: without any, a commit wakes nobody.
    synced: AtomicUsize,
    /// Everything up to here is in the mailboxes of synced watchers.
    dispatched: AtomicI64,
    /// Streams whose progress waits for `dispatched` to move.
    progress_waiters: Mutex<Vec<Arc<Mailbox>>>,
    pub(super) catch_up: Signal,
    pub(super) stopping: AtomicBool,
    pub(super) metrics: WatchMetrics,
}

#[derive(Debug)]
pub(super) struct RingState {
    pub(super) ring: Ring,
    dispatcher_sleeps: bool,
}

/// A flag that a thread sleeps on.
#[derive(Debug, Default)]
pub(super) struct Signal {
    raised: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    pub(super) fn raise(&self) {
        *self.raised.lock() = true;
        self.changed.notify_one();
    }

    pub(super) fn wait(&self) {
        let mut raised = self.raised.lock();
        while !*raised {
            self.changed.wait(&mut raised);
        }
        *raised = false;
    }
}

#[derive(Debug)]
pub(super) struct Core {
    /// The synced watchers.
    pub(super) set: WatcherSet,
    /// Events up to here have been looked up in `set`.
    pub(super) matched: i64,
    pub(super) watchers: HashMap<WatcherId, Watcher>,
    pub(super) unsynced: HashSet<WatcherId>,
    pub(super) streams: Vec<Option<StreamEntry>>,
    free_streams: Vec<u32>,
    next_watcher: u64,
    /// Turns of catch-up, for fairness among those behind.
    pub(super) turn: u64,
}

#[derive(Debug)]
pub(super) struct StreamEntry {
    pub(super) mailbox: Arc<Mailbox>,
    /// Filled while the dispatcher looks up, empty otherwise.
    batch: Events,
    /// Whether the stream was full when this look-up met it first. It may get room meanwhile; a watcher that was set aside must not be
    /// told what comes later before what it is owed.
    full: Option<bool>,
}

#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) range: KeyRange,
    /// Its `min_revision` is the first event not yet delivered while the watcher is unsynced.
    pub(super) target: Target,
    pub(super) synced: bool,
    /// The turn of catch-up that served it last.
    pub(super) served: u64,
}

impl Core {
    pub(super) fn mailbox(&self, stream: u32) -> &Arc<Mailbox> {
        let entry = self.streams[stream as usize].as_ref();
        &entry.expect("a watcher's stream is open").mailbox
    }

    /// Sets a synced watcher aside: its next event is `revision`.
    fn demote(&mut self, id: WatcherId, revision: i64) {
        let Some(watcher) = self.watchers.get_mut(&id) else {
            return;
        };
        if !std::mem::replace(&mut watcher.synced, false) {
            return;
        }
        watcher.target.min_revision = watcher.target.min_revision.max(revision);
        let (range, stream) = (watcher.range.clone(), watcher.target.stream);
        self.set.remove(&range, |t| t.id == id);
        self.unsynced.insert(id);
        let mailbox = self.mailbox(stream);
        mailbox.add_unsynced();
        mailbox.lagging.store(true, Ordering::SeqCst);
    }
}

/// What one step of the dispatcher found.
#[derive(Default)]
struct Matched {
    deliveries: Vec<(Arc<Mailbox>, Events)>,
    /// (commit, event) that some watcher wants with its replaced record.
    prevs: Vec<(usize, usize)>,
    upto: i64,
    demoted: bool,
}

impl Hub {
    /// Starts the dispatcher and catch-up; they run until [`close`](Self::close).
    pub fn new(store: Arc<Store>, metrics: WatchMetrics) -> Arc<Self> {
        let revision = store.view().revision();
        let hub = Arc::new(Self {
            store: ArcSwap::new(store),
            ring: Mutex::new(RingState {
                ring: Ring::new(revision),
                dispatcher_sleeps: false,
            }),
            ring_changed: Condvar::new(),
            core: Mutex::new(Core {
                set: WatcherSet::default(),
                matched: revision,
                watchers: HashMap::new(),
                unsynced: HashSet::new(),
                streams: Vec::new(),
                free_streams: Vec::new(),
                next_watcher: 1,
                turn: 0,
            }),
            synced: AtomicUsize::new(0),
            dispatched: AtomicI64::new(revision),
            progress_waiters: Mutex::default(),
            catch_up: Signal::default(),
            stopping: AtomicBool::new(false),
            metrics,
        });
        spawn("watch-dispatch", &hub, Self::dispatch_until_closed);
        spawn("watch-catch-up", &hub, Self::catch_up_until_closed);
        hub
    }

    /// Tells of a commit whose view is published. Called by the apply path, in revision order, before the writer is answered. It need not
    /// be dispatched before [`wake`](Self::wake).
    pub fn notify(&self, committed: &Committed) {
        if committed.events.is_empty() {
            return;
        }
        let commit = Arc::new(Commit::new(committed.revision, committed.events.clone()));
        self.ring.lock().ring.push(commit);
    }

    /// Sends the dispatcher to what was told of: once for entries that are applied together, so that a watcher gets their events together.
    pub fn wake(&self) {
        if self.synced.load(Ordering::SeqCst) > 0 {
            self.wake_dispatcher(self.ring.lock());
        }
    }

    /// The state was replaced by a snapshot of the leader: watchers go on from where they are, by history.
    pub fn restored(&self, store: Arc<Store>) {
        let revision = store.view().revision();
        self.store.store(store);
        let mut state = self.ring.lock();
        state.ring.reset(revision);
        self.wake_dispatcher(state);
        self.catch_up.raise();
    }

    /// Ends every stream and the threads. Idempotent.
    pub fn close(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        for stream in self.core.lock().streams.iter().flatten() {
            stream.mailbox.close();
        }
        drop(self.ring.lock());
        self.ring_changed.notify_all();
        self.catch_up.raise();
    }

    /// The current revision, for headers of control responses.
    pub(crate) fn revision(&self) -> i64 {
        self.store.load().view().revision()
    }

    fn wake_dispatcher(&self, mut state: parking_lot::MutexGuard<'_, RingState>) {
        if state.dispatcher_sleeps && self.synced.load(Ordering::SeqCst) > 0 {
            state.dispatcher_sleeps = false;
            drop(state);
            self.ring_changed.notify_one();
        }
    }

    /// To be called, with `core` held, after `core.set` changed: commits that nobody waited for may matter now.
    pub(super) fn set_changed(&self, core: &Core) {
        self.synced.store(core.set.len(), Ordering::SeqCst);
        self.metrics.slow_watchers.set(core.unsynced.len() as i64);
        let state = self.ring.lock();
        if state.ring.head() > core.matched {
            self.wake_dispatcher(state);
        }
    }

    /// With no synced watcher nobody needs the commits up to `revision`.
    pub(super) fn skip_to(&self, core: &mut Core, revision: i64) {
        if core.set.len() == 0 && core.matched < revision {
            core.matched = revision;
            self.dispatched.fetch_max(revision, Ordering::SeqCst);
        }
    }

    fn dispatch_until_closed(&self) {
        while self.wait_for_commits() {
            self.dispatch_once();
        }
    }

    /// False when the hub closes.
    fn wait_for_commits(&self) -> bool {
        loop {
            if self.stopping.load(Ordering::SeqCst) {
                return false;
            }
            let matched = self.core.lock().matched;
            let mut state = self.ring.lock();
            if state.ring.head() > matched && self.synced.load(Ordering::SeqCst) > 0 {
                return true;
            }
            state.dispatcher_sleeps = true;
            // Checked again under the lock that `close` passes through before it wakes us.
            if !self.stopping.load(Ordering::SeqCst) {
                self.ring_changed.wait(&mut state);
            }
            state.dispatcher_sleeps = false;
        }
    }

    fn dispatch_once(&self) {
        let from = self.core.lock().matched + 1;
        let recent = self
            .ring
            .lock()
            .ring
            .from(from, DISPATCH_COMMITS_MAX, DISPATCH_BYTES_MAX);
        let commits = match recent {
            Some(commits) => commits,
            None => match self.store.load().view().events(from, DISPATCH_BYTES_MAX) {
                Ok((events, _)) => Commit::from_history(events),
                Err(error) => return self.give_up_to_catch_up(from, &error),
            },
        };
        let matched = self.match_commits(&commits);
        if matched.demoted {
            self.catch_up.raise();
        }
        if !matched.prevs.is_empty() {
            let view = self.store.load().view();
            for (commit, event) in matched.prevs {
                commits[commit].prepare_prev(event, &view);
            }
        }
        for (mailbox, events) in matched.deliveries {
            mailbox.put_live(events, matched.upto);
        }
        self.dispatched.fetch_max(matched.upto, Ordering::SeqCst);
        let waiters = std::mem::take(&mut *self.progress_waiters.lock());
        for mailbox in waiters {
            mailbox.wake();
        }
    }

    /// Looks the commits up, as far as one turn with the lock goes.
    fn match_commits(&self, commits: &[Arc<Commit>]) -> Matched {
        let mut core = self.core.lock();
        let Core {
            set,
            matched,
            streams,
            ..
        } = &mut *core;
        let mut out = Matched::default();
        let mut touched: Vec<u32> = Vec::new();
        let mut behind: Vec<(WatcherId, i64)> = Vec::new();
        let mut matches = 0;
        for (ci, commit) in commits.iter().enumerate() {
            if commit.revision <= *matched {
                continue;
            }
            if matches > DISPATCH_MATCHES_MAX {
                break;
            }
            for (ei, event) in commit.events.iter().enumerate() {
                let mut prev_wanted = false;
                set.visit(&event.kv.key, |t| {
                    matches += 1;
                    if !wants(t, event.kind, commit.revision) {
                        return;
                    }
                    let entry = streams[t.stream as usize]
                        .as_mut()
                        .expect("a watcher's stream is open");
                    let full = *entry.full.get_or_insert_with(|| {
                        touched.push(t.stream);
                        entry.mailbox.is_full()
                    });
                    if full {
                        behind.push((t.id, commit.revision));
                    } else {
                        entry.batch.push(t.slot, commit, ei);
                        prev_wanted |= t.prev_kv;
                    }
                });
                if prev_wanted {
                    out.prevs.push((ci, ei));
                }
            }
            *matched = commit.revision;
        }
        out.upto = *matched;
        for stream in touched {
            if let Some(entry) = &mut streams[stream as usize]
                && entry.full.take() == Some(false)
            {
                out.deliveries
                    .push((entry.mailbox.clone(), std::mem::take(&mut entry.batch)));
            }
        }
        out.demoted = !behind.is_empty();
        for (id, revision) in behind {
            core.demote(id, revision);
        }
        if out.demoted {
            self.set_changed(&core);
        }
        out
    }

    /// The commits after the last one matched are neither in memory nor in history: everybody finds out by catch-up.
    fn give_up_to_catch_up(&self, from: i64, error: &ReadError) {
        if !matches!(error, ReadError::Mvcc(MvccError::Compacted { .. })) {
            // The store has failed and stops the node by itself.
            tracing::error!(%error, from, "cannot read history for watchers");
        }
        let mut core = self.core.lock();
        for id in core.set.drain_ids() {
            core.demote(id, from);
        }
        let revision = self.revision();
        self.skip_to(&mut core, revision);
        self.set_changed(&core);
        drop(core);
        self.catch_up.raise();
    }

    fn create(&self, stream: u32, slot: u32, create: CreateWatch) -> (WatcherId, i64) {
        let mut core = self.core.lock();
        // Read under the lock: nothing beyond this view has been matched.
        let current = self.revision();
        self.skip_to(&mut core, current);
        let id = WatcherId(core.next_watcher);
        core.next_watcher += 1;
        let synced = create.start_revision == 0 || create.start_revision > core.matched;
        let target = Target {
            id,
            stream,
            slot,
            min_revision: match create.start_revision {
                0 => current + 1,
                start => start,
            },
            no_put: create.no_put,
            no_delete: create.no_delete,
            prev_kv: create.prev_kv,
        };
        if synced {
            core.set.insert(&create.range, target);
        } else {
            core.unsynced.insert(id);
            core.mailbox(stream).add_unsynced();
        }
        core.watchers.insert(
            id,
            Watcher {
                range: create.range,
                target,
                synced,
                served: 0,
            },
        );
        self.metrics.watchers.inc();
        self.set_changed(&core);
        drop(core);
        if !synced {
            self.catch_up.raise();
        }
        (id, current)
    }

    /// True if the watcher was there (not cancelled as compacted before).
    fn cancel(&self, id: WatcherId) -> bool {
        let mut core = self.core.lock();
        let Some(watcher) = core.watchers.remove(&id) else {
            return false;
        };
        if watcher.synced {
            core.set.remove(&watcher.range, |t| t.id == id);
        } else {
            core.unsynced.remove(&id);
            core.mailbox(watcher.target.stream).sub_unsynced();
        }
        self.metrics.watchers.dec();
        self.set_changed(&core);
        true
    }

    fn close_stream(&self, stream: u32, ids: impl Iterator<Item = WatcherId>) {
        let mut core = self.core.lock();
        // A stream often has many watchers of few ranges: one sweep each.
        let mut ranges = HashSet::new();
        for id in ids {
            if let Some(watcher) = core.watchers.remove(&id) {
                self.metrics.watchers.dec();
                if watcher.synced {
                    ranges.insert(watcher.range);
                } else {
                    core.unsynced.remove(&id);
                }
            }
        }
        for range in ranges {
            core.set.remove(&range, |t| t.stream == stream);
        }
        core.streams[stream as usize] = None;
        core.free_streams.push(stream);
        self.set_changed(&core);
        self.metrics.streams.dec();
    }
}

/// Whether the watcher is to be told of the event.
pub(super) fn wants(target: &Target, kind: EventKind, revision: i64) -> bool {
    let filtered = match kind {
        EventKind::Put => target.no_put,
        EventKind::Delete => target.no_delete,
    };
    !filtered && revision >= target.min_revision
}

fn spawn(name: &str, hub: &Arc<Hub>, run: fn(&Hub)) {
    let hub = hub.clone();
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || run(&hub))
        .expect("the process may start a thread while it starts up");
}

/// One stream's share of the hub. Its watchers go when it does, if [`StreamHandle::close`] is called.
#[derive(Debug)]
pub(crate) struct StreamHandle {
    hub: Arc<Hub>,
    stream: u32,
    pub(crate) mailbox: Arc<Mailbox>,
}

impl StreamHandle {
    pub(crate) fn open(hub: &Arc<Hub>) -> Self {
        let mailbox = Arc::new(Mailbox::new(hub.metrics.pending_events.clone()));
        let mut core = hub.core.lock();
        let entry = Some(StreamEntry {
            mailbox: mailbox.clone(),
            batch: Events::default(),
            full: None,
        });
        let stream = if let Some(free) = core.free_streams.pop() {
            core.streams[free as usize] = entry;
            free
        } else {
            core.streams.push(entry);
            (core.streams.len() - 1) as u32
        };
        drop(core);
        if hub.stopping.load(Ordering::SeqCst) {
            mailbox.close();
        }
        hub.metrics.streams.inc();
        Self {
            hub: hub.clone(),
            stream,
            mailbox,
        }
    }

    pub(crate) fn hub(&self) -> &Hub {
        &self.hub
    }

    /// Registers a watcher; `slot` names it in deliveries and is never used again in this stream. Also says the current revision.
    pub(crate) fn create(&self, slot: u32, create: CreateWatch) -> (WatcherId, i64) {
        self.hub.create(self.stream, slot, create)
    }

    pub(crate) fn cancel(&self, id: WatcherId) -> bool {
        self.hub.cancel(id)
    }

    pub(crate) fn close(&self, ids: impl Iterator<Item = WatcherId>) {
        self.mailbox.close();
        self.hub.close_stream(self.stream, ids);
    }

    /// What was taken from the mailbox has been written.
    pub(crate) fn sent(&self, events: &Events) {
        self.hub.metrics.events.inc_by(events.entries.len() as u64);
        if self.mailbox.sent(events) {
            self.hub.catch_up.raise();
        }
    }

    /// Where the watcher joined the synced ones, if it is among them: unchanged as long as it stays there.
    pub(crate) fn synced_from(&self, id: WatcherId) -> Option<i64> {
        let core = self.hub.core.lock();
        let watcher = core.watchers.get(&id)?;
        watcher.synced.then_some(watcher.target.min_revision)
    }

    /// The revision up to which the stream has been told everything, if that is at least `target`. None while deliveries wait;
    /// otherwise the stream is woken when it is time to ask again. `all`: only when no watcher is behind.
    pub(crate) fn progress(&self, target: i64, all: bool) -> Option<i64> {
        // Before the mailbox: what is dispatched later may be in a mailbox seen empty now.
        let dispatched = self.hub.dispatched.load(Ordering::SeqCst);
        let standing = self.mailbox.standing()?;
        if all && standing.unsynced > 0 {
            return None;
        }
        let revision = standing.upto.max(dispatched);
        if revision >= target.max(standing.floor) {
            return Some(revision);
        }
        let mut waiters = self.hub.progress_waiters.lock();
        if !waiters.iter().any(|w| Arc::ptr_eq(w, &self.mailbox)) {
            waiters.push(self.mailbox.clone());
        }
        drop(waiters);
        if self.hub.dispatched.load(Ordering::SeqCst) > dispatched {
            self.mailbox.wake();
        }
        None
    }
}
