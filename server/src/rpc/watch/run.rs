//! What was taken from the mailbox, on its way into responses: a watcher's events are packed into as few as may be.
//!
//! Live events of many revisions share a response up to a size that any client accepts (a revision is never cut); events of
//! catch-up share it up to etcd's thousand revisions, whatever their size. Only who asked for fragments gets pieces of a
//! revision.
//!
//! etcd: sendFragments in server/etcdserver/api/v3rpc/watch.go; batches in watcher_group.go.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::session::Watchers;
use crate::watch::frame::{self, Head, Speaker};
use crate::watch::{Commit, Delivery, Events};

/// A response of live events is closed beyond this: well below the 4 MiB that gRPC libraries accept by default.
const LIVE_BYTES_MAX: usize = 1 << 20;
/// Revisions in one response, as in etcd.
const REVISIONS_MAX: usize = 1000;

/// Frame, header and watch id: ids of members and clusters take ten bytes each.
const HEAD_BYTES_GUESS: usize = 48;

const NIL: u32 = u32::MAX;

/// Deliveries that are written together.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) sources: Vec<Events>,
    /// For events of history: the revision their headers tell.
    history: Option<i64>,
    links: Vec<Link>,
    /// First link of each watcher (by slot), in order of first event.
    order: Vec<(u32, u32)>,
    at: usize,
    /// Where the current watcher's next response begins.
    cursor: u32,
}

/// An entry and the next one of the same watcher.
#[derive(Debug)]
struct Link {
    source: u32,
    entry: u32,
    next: u32,
}

/// What a response says beside its events.
#[derive(Clone, Copy, Debug)]
pub(super) struct Voice {
    pub(super) speaker: Speaker,
    pub(super) term: u64,
    pub(super) fragment_bytes: usize,
}

impl Run {
    pub(super) fn new(sources: Vec<Events>, history: Option<i64>, watchers: &mut Watchers) -> Self {
        let mut links: Vec<Link> =
            Vec::with_capacity(sources.iter().map(|s| s.entries.len()).sum());
        let mut order = Vec::new();
        for (source, events) in sources.iter().enumerate() {
            for (index, entry) in events.entries.iter().enumerate() {
                // Cancelled since.
                let Some(watcher) = watchers.by_slot_mut(entry.slot) else {
                    continue;
                };
                let link = links.len() as u32;
                if watcher.last_link == NIL {
                    order.push((entry.slot, link));
                } else {
                    links[watcher.last_link as usize].next = link;
                }
                watcher.last_link = link;
                links.push(Link {
                    source: source as u32,
                    entry: index as u32,
                    next: NIL,
                });
            }
        }
        for (slot, _) in &order {
            if let Some(watcher) = watchers.by_slot_mut(*slot) {
                watcher.last_link = NIL;
            }
        }
        let cursor = order.first().map_or(NIL, |(_, link)| *link);
        Self {
            sources,
            history,
            links,
            order,
            at: 0,
            cursor,
        }
    }

    /// Takes what can be written together from the front: neighbours of live events, or one step of history.
    pub(super) fn take(
        inbox: &mut std::collections::VecDeque<Delivery>,
        watchers: &mut Watchers,
    ) -> Option<Self> {
        let mut sources = Vec::new();
        while let Some(Delivery::Live(_)) = inbox.front() {
            if let Some(Delivery::Live(events)) = inbox.pop_front() {
                sources.push(events);
            }
        }
        if !sources.is_empty() {
            return Some(Self::new(sources, None, watchers));
        }
        match inbox.pop_front()? {
            Delivery::History { events, revision } => {
                Some(Self::new(vec![events], Some(revision), watchers))
            }
            other => {
                inbox.push_front(other);
                None
            }
        }
    }

    /// How many get something: at least as many responses.
    pub(super) fn watchers(&self) -> usize {
        self.order.len()
    }

    /// Writes responses until `out` holds `bytes_max`. True when the run is done.
    pub(super) fn write(
        &mut self,
        out: &mut BytesMut,
        bytes_max: usize,
        voice: Voice,
        watchers: &mut Watchers,
    ) -> bool {
        self.reserve(out, bytes_max);
        while let Some((slot, _)) = self.order.get(self.at) {
            if out.len() >= bytes_max {
                return false;
            }
            if let Some(watcher) = watchers.by_slot_mut(*slot) {
                watcher.quiet = false;
                let (watch_id, prev_kv, fragment) =
                    (watcher.watch_id, watcher.prev_kv, watcher.fragment);
                self.cursor = self.write_response(out, voice, watch_id, prev_kv, fragment);
            } else {
                // Cancelled between two chunks.
                self.cursor = NIL;
            }
            if self.cursor == NIL {
                self.at += 1;
                self.cursor = self.order.get(self.at).map_or(NIL, |(_, link)| *link);
            }
        }
        true
    }

    /// Room for what is likely to be written: watchers of one stream mostly get events of one size.
    fn reserve(&self, out: &mut BytesMut, bytes_max: usize) {
        if self.cursor != NIL {
            let watchers = self.order.len() - self.at;
            let per_watcher = HEAD_BYTES_GUESS + self.bytes(self.cursor, true).len();
            out.reserve((watchers * per_watcher).min(bytes_max + per_watcher));
        }
    }

    fn resolve(&self, link: &Link) -> (&Arc<Commit>, usize) {
        let source = &self.sources[link.source as usize];
        let entry = source.entries[link.entry as usize];
        (&source.commits[entry.commit as usize], entry.event as usize)
    }

    fn bytes(&self, link: u32, prev_kv: bool) -> &Bytes {
        let (commit, event) = self.resolve(&self.links[link as usize]);
        if prev_kv {
            commit.with_prev(event)
        } else {
            commit.plain(event)
        }
    }

    /// One response from the cursor on; gives the link that the next one begins with.
    fn write_response(
        &self,
        out: &mut BytesMut,
        voice: Voice,
        watch_id: i64,
        prev_kv: bool,
        fragment: bool,
    ) -> u32 {
        let (end, last_revision, bytes) = self.measure(prev_kv);
        let mut head = Head {
            revision: self.history.unwrap_or(0).max(last_revision),
            term: voice.term,
            watch_id,
            ..Head::default()
        };
        let single = self.links[self.cursor as usize].next == end;
        let size = frame::head_len(voice.speaker, &head) + bytes;
        if !fragment || single || size < voice.fragment_bytes {
            out.reserve(size + 5);
            let events = self.chain(self.cursor, end).map(|l| self.bytes(l, prev_kv));
            frame::write(out, voice.speaker, &head, events);
            return end;
        }
        head.fragment = true;
        let mut start = self.cursor;
        while start != end {
            let cut = self.cut(start, end, prev_kv, voice, &head);
            head.fragment = cut != end;
            let events = self.chain(start, cut).map(|l| self.bytes(l, prev_kv));
            frame::write(out, voice.speaker, &head, events);
            start = cut;
        }
        end
    }

    /// The links from one to before another.
    fn chain(&self, start: u32, end: u32) -> impl Iterator<Item = u32> + '_ {
        let mut at = start;
        std::iter::from_fn(move || {
            let here = at;
            if here == end {
                return None;
            }
            at = self.links[here as usize].next;
            Some(here)
        })
    }

    /// How far the response goes that begins at the cursor: (link behind it, last revision, bytes of events).
    fn measure(&self, prev_kv: bool) -> (u32, i64, usize) {
        let mut at = self.cursor;
        let mut last_revision = 0;
        let mut revisions = 0;
        let mut bytes = 0;
        while at != NIL {
            let link = &self.links[at as usize];
            let revision = self.resolve(link).0.revision;
            if revision != last_revision {
                let heavy = self.history.is_none() && bytes > LIVE_BYTES_MAX;
                if heavy || revisions == REVISIONS_MAX {
                    break;
                }
                revisions += 1;
                last_revision = revision;
            }
            bytes += self.bytes(at, prev_kv).len();
            at = link.next;
        }
        (at, last_revision, bytes)
    }

    /// Where a fragment ends: before the event that would bring it to the limit, but never empty.
    fn cut(&self, start: u32, end: u32, prev_kv: bool, voice: Voice, head: &Head) -> u32 {
        let mut size = frame::head_len(voice.speaker, head);
        for link in self.chain(start, end) {
            size += self.bytes(link, prev_kv).len();
            if link != start && size >= voice.fragment_bytes {
                return link;
            }
        }
        end
    }
}
