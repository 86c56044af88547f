//! Watchers that are behind: groups of them read history once and are handed over to the dispatcher.
//!
//!     history   a ----------------------- b ......... matched (live)
//!     watchers  |  ^min   ^min                          ^
//!               +-- all between a and b read a..b once; who then stands beyond `matched` is synced
//!
//! The hand-over happens under `core`: at that moment nothing beyond `matched` has been looked up, everything below the
//! watcher's `min_revision` is in its mailbox, and the dispatcher respects `min_revision`: no gap, no repeat.
//!
//! Whoever was served longest ago decides where the next read begins, so that one watcher far behind does not hold up others
//! (etcd-io/etcd#20242).
//!
//! etcd: syncWatchers and moveVictims in server/storage/mvcc/watchable_store.go.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ballast_storage::mvcc::View;
use ballast_storage::{MvccError, ReadError};

use super::commit::Commit;
use super::hub::{Core, Hub, WatcherId, wants};
use super::mailbox::Events;
use super::watcher_set::{KeyRange, Target, WatcherSet};

/// Bytes of history in one step, and so about what one response of catch-up may weigh.
const HISTORY_BYTES_MAX: usize = 8 << 20;
/// Commits from the ring in one step.
const RING_COMMITS_MAX: usize = 4096;
/// Entries made in one step, over all watchers of the group: bounds memory with many watchers of the same keys.
const STEP_ENTRIES_MAX: usize = 256 << 10;
/// Commits that a hand-over may look up under the lock to close the last gap, or a busy store would never be caught up with.
const HANDOVER_COMMITS_MAX: i64 = 32;

/// Commits read, all that there are from the first one asked for up to `read_to`.
struct History {
    commits: Vec<Arc<Commit>>,
    read_to: i64,
    /// The store's revision then: what the responses' headers say.
    current: i64,
}

/// A watcher of the group and what the step found for it: (commit, event).
struct Member {
    range: KeyRange,
    target: Target,
    found: Vec<(u32, u32)>,
}

impl Hub {
    pub(super) fn catch_up_until_closed(&self) {
        while !self.stopping.load(Ordering::SeqCst) {
            if !self.catch_up_once() {
                self.catch_up.wait();
            }
        }
    }

    /// One step. False when there is nothing to do until somebody calls.
    fn catch_up_once(&self) -> bool {
        let view = self.store.load().view();
        let Some(from) = self.begin_turn(view.compact_revision()) else {
            return false;
        };
        let history = match self.read_history(from) {
            Ok(history) => history,
            // Compacted since: the next turn tells the watchers.
            Err(ReadError::Mvcc(MvccError::Compacted { .. })) => return true,
            Err(ReadError::Storage(error)) => {
                tracing::error!(%error, from, "cannot read history for watchers");
                crate::node::stop_if_damaged(&error);
                return false;
            }
            Err(error @ (ReadError::Mvcc(_) | ReadError::TooLarge { .. })) => {
                tracing::error!(%error, from, "cannot read history for watchers");
                return false;
            }
        };
        let group = self.group(from, history.read_to);
        let (group, read_to) = self.find_events(group, &history);
        self.hand_over(group, &history, read_to);
        true
    }

    /// Cancels whose history is gone; says where the one that has waited longest stands.
    fn begin_turn(&self, compact_revision: i64) -> Option<i64> {
        let mut core = self.core.lock();
        core.turn += 1;
        let gone: Vec<_> = core
            .unsynced
            .iter()
            .filter(|id| core.watchers[id].target.min_revision < compact_revision)
            .copied()
            .collect();
        for id in gone {
            core.unsynced.remove(&id);
            if let Some(watcher) = core.watchers.remove(&id) {
                let mailbox = core.mailbox(watcher.target.stream);
                mailbox.put_compacted(watcher.target.slot, compact_revision);
                self.metrics.watchers.dec();
            }
        }
        self.metrics.slow_watchers.set(core.unsynced.len() as i64);
        core.unsynced
            .iter()
            .map(|id| &core.watchers[id])
            .filter(|w| has_room(&core, w.target.stream))
            .min_by_key(|w| (w.served, w.target.min_revision))
            .map(|w| w.target.min_revision)
    }

    fn read_history(&self, from: i64) -> Result<History, ReadError> {
        let view = self.store.load().view();
        let (recent, head) = {
            let state = self.ring.lock();
            let recent = state.ring.from(from, RING_COMMITS_MAX, HISTORY_BYTES_MAX);
            (recent, state.ring.head())
        };
        // The event at the compacted revision goes without the record it replaced, which the ring's may have already.
        if let Some(commits) = recent.filter(|_| from > view.compact_revision()) {
            return Ok(History {
                read_to: commits.last().map_or(head.max(from - 1), |c| c.revision),
                commits,
                current: head,
            });
        }
        if from > view.revision() {
            // Only after the state was replaced by an older one; the watcher waits as for a future revision.
            return Ok(History {
                commits: Vec::new(),
                read_to: from - 1,
                current: view.revision(),
            });
        }
        let (events, next) = view.events(from, HISTORY_BYTES_MAX)?;
        Ok(History {
            commits: Commit::from_history(events),
            read_to: next - 1,
            current: view.revision(),
        })
    }

    /// All who can use what was read.
    fn group(&self, from: i64, read_to: i64) -> Vec<(WatcherId, Member)> {
        let core = self.core.lock();
        core.unsynced
            .iter()
            .filter_map(|id| {
                let watcher = &core.watchers[id];
                let min = watcher.target.min_revision;
                // Beyond the read stands only who waits for a future revision.
                let fits = min >= from && min <= read_to + 1;
                (fits && has_room(&core, watcher.target.stream)).then(|| {
                    let member = Member {
                        range: watcher.range.clone(),
                        target: watcher.target,
                        found: Vec::new(),
                    };
                    (*id, member)
                })
            })
            .collect()
    }

    /// Looks the commits up for the group, stopping between revisions when enough has been found.
    fn find_events(
        &self,
        mut group: Vec<(WatcherId, Member)>,
        history: &History,
    ) -> (Vec<(WatcherId, Member)>, i64) {
        let set = local_set(&group);
        let view = self.store.load().view();
        let mut entries = 0;
        for (ci, commit) in history.commits.iter().enumerate() {
            entries += find_in(&set, &mut group, commit, ci, &view);
            if entries > STEP_ENTRIES_MAX {
                return (group, commit.revision);
            }
        }
        (group, history.read_to)
    }

    /// Fills the mailboxes and moves the watchers on, to `synced` where nothing is left.
    fn hand_over(&self, mut group: Vec<(WatcherId, Member)>, history: &History, read_to: i64) {
        let mut core = self.core.lock();
        self.skip_to(&mut core, read_to);
        let mut commits = history.commits.clone();
        let mut read_to = read_to;
        if (1..=HANDOVER_COMMITS_MAX).contains(&(core.matched - read_to)) {
            let rest = self.ring.lock().ring.from(
                read_to + 1,
                (core.matched - read_to) as usize,
                HISTORY_BYTES_MAX,
            );
            let set = local_set(&group);
            let view = self.store.load().view();
            for commit in rest.into_iter().flatten() {
                find_in(&set, &mut group, &commit, commits.len(), &view);
                read_to = commit.revision;
                commits.push(commit);
            }
        }
        let mut by_stream: HashMap<u32, Events> = HashMap::new();
        let mut synced = Vec::new();
        let Core {
            set,
            matched,
            watchers,
            unsynced,
            turn,
            ..
        } = &mut *core;
        for (id, member) in group {
            // Cancelled meanwhile: nothing goes to its slot any more.
            let Some(watcher) = watchers.get_mut(&id) else {
                continue;
            };
            watcher.served = *turn;
            let target = &mut watcher.target;
            target.min_revision = target.min_revision.max(read_to + 1);
            if target.min_revision > *matched {
                watcher.synced = true;
                unsynced.remove(&id);
                set.insert(&member.range, *target);
                synced.push(target.stream);
            }
            if !member.found.is_empty() {
                let events = by_stream.entry(target.stream).or_default();
                for (commit, event) in member.found {
                    events.push(target.slot, &commits[commit as usize], event as usize);
                }
            }
        }
        for (stream, events) in by_stream {
            core.mailbox(stream)
                .put_history(events, history.current.max(read_to), read_to);
        }
        for stream in synced {
            core.mailbox(stream).sub_unsynced();
        }
        self.set_changed(&core);
    }
}

/// A stream without room calls catch-up when it has some again.
fn has_room(core: &Core, stream: u32) -> bool {
    let mailbox = core.mailbox(stream);
    if mailbox.has_room() {
        return true;
    }
    mailbox.lagging.store(true, Ordering::SeqCst);
    // It may have got room before it could see the mark.
    mailbox.has_room()
}

/// The group as a set whose slots are places in the group.
fn local_set(group: &[(WatcherId, Member)]) -> WatcherSet {
    let mut set = WatcherSet::default();
    for (place, (_, member)) in group.iter().enumerate() {
        let target = Target {
            slot: place as u32,
            ..member.target
        };
        set.insert(&member.range, target);
    }
    set
}

/// Notes the commit's events with the members that want them, and reads replaced records for those who asked.
fn find_in(
    set: &WatcherSet,
    group: &mut [(WatcherId, Member)],
    commit: &Commit,
    ci: usize,
    view: &View,
) -> usize {
    let mut found = 0;
    for (ei, event) in commit.events.iter().enumerate() {
        let mut prev_wanted = false;
        set.visit(&event.kv.key, |t| {
            if wants(t, event.kind, commit.revision) {
                group[t.slot as usize].1.found.push((ci as u32, ei as u32));
                found += 1;
                prev_wanted |= t.prev_kv;
            }
        });
        if prev_wanted {
            commit.prepare_prev(ei, view);
        }
    }
    found
}
