//! One stream: its watchers by id, what its client asks, and in which order things are written.
//!
//! Order: a `created` is written before its watcher's events, since both happen in this one task; progress is written only
//! when everything taken from the mailbox has been.
//!
//! etcd: serverWatchStream in server/etcdserver/api/v3rpc/watch.go.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use ballast_api::etcdserverpb::watch_create_request::FilterType;
use ballast_api::etcdserverpb::watch_request::RequestUnion;
use bytes::{Bytes, BytesMut};
use futures::Stream;
use http::HeaderMap;
use tokio::time::Sleep;
use tokio_stream::wrappers::WatchStream;
use tonic::{Status, Streaming};

use super::run::{Run, Voice};
use super::{NO_LEADER_ELECTIONS, Shared};
use crate::raft::node::RaftStatus;
use crate::watch::frame::{self, Head};
use crate::watch::{CreateWatch, Delivery, KeyRange, StreamHandle, WatcherId};

/// Bytes after which a chunk goes out; requests are not read while so much waits, which bounds control responses.
const CHUNK_BYTES: usize = 32 << 10;
/// A run of so many responses is followed by a rest, so that what comes meanwhile shares a response a watcher: a client of that many
/// watchers spends more on responses than on their events.
const REST_RESPONSES_MIN: usize = 64;
/// For each response of the run.
const REST: Duration = Duration::from_micros(100);
const REST_MAX: Duration = Duration::from_millis(20);
/// Progress requests that are remembered while they cannot be answered.
const PROGRESS_REQUESTS_MAX: u32 = 16;
/// The id that speaks for a whole stream, and for watchers that never were.
const INVALID_WATCH_ID: i64 = -1;

/// One watcher as its stream knows it.
#[expect(
    clippy::struct_excessive_bools,
    reason = "three are the client's own flags, one for one"
)]
#[derive(Debug)]
pub(super) struct Watcher {
    id: WatcherId,
    pub(super) watch_id: i64,
    pub(super) prev_kv: bool,
    pub(super) fragment: bool,
    start_revision: i64,
    progress_notify: bool,
    /// No events since the last tick: the next one tells progress.
    pub(super) quiet: bool,
    /// Cancelled as compacted. The id stays taken until the client cancels it, as in etcd.
    gone: bool,
    /// Scratch of `Run::new`.
    pub(super) last_link: u32,
}

/// A stream's watchers by slot and by the client's id.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    slots: HashMap<u32, Watcher, BuildHasherDefault<SlotHasher>>,
    ids: HashMap<i64, u32>,
    next_slot: u32,
    next_id: i64,
}

/// Slots are consecutive numbers of our own: spreading them is enough.
#[derive(Debug, Default)]
struct SlotHasher(u64);

impl Hasher for SlotHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, slot: u32) {
        self.0 = (self.0 ^ u64::from(slot)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Watchers {
    pub(super) fn by_slot_mut(&mut self, slot: u32) -> Option<&mut Watcher> {
        self.slots.get_mut(&slot)
    }

    /// The id for a new watcher: the wanted one, or the next free one.
    fn choose_id(&mut self, wanted: i64) -> Option<i64> {
        if wanted != 0 {
            return (!self.ids.contains_key(&wanted)).then_some(wanted);
        }
        while self.ids.contains_key(&self.next_id) {
            self.next_id += 1;
        }
        self.next_id += 1;
        Some(self.next_id - 1)
    }

    fn living(&self) -> impl Iterator<Item = &Watcher> {
        self.slots.values().filter(|w| !w.gone)
    }

    fn remove(&mut self, watch_id: i64) -> Option<Watcher> {
        let slot = self.ids.remove(&watch_id)?;
        self.slots.remove(&slot)
    }
}

pub(super) struct Session {
    shared: Arc<Shared>,
    metadata: HeaderMap,
    /// None once the client has said all it will; events go on.
    inbound: Option<Streaming<pb::WatchRequest>>,
    stream: StreamHandle,
    watchers: Watchers,
    taken: Vec<Delivery>,
    inbox: VecDeque<Delivery>,
    run: Option<Run>,
    rest: Option<Pin<Box<Sleep>>>,
    /// Progress requests not yet answered, and the revision that an answer must reach.
    progress_requests: u32,
    progress_target: i64,
    /// Slots whose tick is to be answered.
    due: Vec<u32>,
    ticker: Option<(Duration, Pin<Box<Sleep>>)>,
    leader: Option<LeaderGuard>,
}

impl Drop for Session {
    fn drop(&mut self) {
        let ids: Vec<_> = self.watchers.slots.values().map(|w| w.id).collect();
        self.stream.close(ids.into_iter());
    }
}

impl Session {
    pub(super) fn new(
        shared: Arc<Shared>,
        metadata: HeaderMap,
        inbound: Streaming<pb::WatchRequest>,
        needs_leader: bool,
    ) -> Self {
        Self {
            stream: StreamHandle::open(&shared.hub),
            leader: needs_leader.then(|| LeaderGuard {
                changes: WatchStream::new(shared.leadership.clone()),
                patience: shared.config.election_timeout * NO_LEADER_ELECTIONS,
                deadline: None,
            }),
            shared,
            metadata,
            inbound: Some(inbound),
            watchers: Watchers::default(),
            taken: Vec::new(),
            inbox: VecDeque::new(),
            run: None,
            rest: None,
            progress_requests: 0,
            progress_target: 0,
            due: Vec::new(),
            ticker: None,
        }
    }

    /// Appends what there is to write, about a chunk of it; nothing means pending. An error ends the stream after that.
    pub(super) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut BytesMut,
    ) -> Result<(), Status> {
        if let Some(guard) = &mut self.leader {
            guard.poll(cx)?;
        }
        loop {
            self.poll_requests(cx, out)?;
            self.poll_ticker(cx);
            if self.rests(cx) {
                return Ok(());
            }
            self.write_events(out);
            if out.len() >= CHUNK_BYTES || self.rests(cx) {
                return Ok(());
            }
            if self
                .stream
                .mailbox
                .poll_take(cx, &mut self.taken)
                .is_ready()
            {
                self.inbox.extend(self.taken.drain(..));
                continue;
            }
            // After the waker is left, or the close between the two would go unseen.
            if self.stream.mailbox.is_closed() {
                return Err(Error::Stopped.into());
            }
            self.write_progress(out);
            return Ok(());
        }
    }

    fn poll_requests(&mut self, cx: &mut Context<'_>, out: &mut BytesMut) -> Result<(), Status> {
        while out.len() < CHUNK_BYTES {
            let Some(inbound) = &mut self.inbound else {
                return Ok(());
            };
            match Pin::new(inbound).poll_next(cx) {
                Poll::Ready(Some(Ok(request))) => self.handle(request, out),
                Poll::Ready(Some(Err(status))) => return Err(status),
                Poll::Ready(None) => self.inbound = None,
                Poll::Pending => return Ok(()),
            }
        }
        Ok(())
    }

    fn handle(&mut self, request: pb::WatchRequest, out: &mut BytesMut) {
        match request.request_union {
            Some(RequestUnion::CreateRequest(request)) => {
                let head = self.create(request).unwrap_or_else(|reason| Head {
                    revision: self.stream.hub().revision(),
                    watch_id: INVALID_WATCH_ID,
                    created: true,
                    canceled: true,
                    cancel_reason: reason,
                    ..Head::default()
                });
                self.write_control(out, head);
            }
            Some(RequestUnion::CancelRequest(request)) => {
                if let Some(watcher) = self.watchers.remove(request.watch_id) {
                    self.stream.cancel(watcher.id);
                    let head = Head {
                        revision: self.stream.hub().revision(),
                        watch_id: request.watch_id,
                        canceled: true,
                        ..Head::default()
                    };
                    self.write_control(out, head);
                }
            }
            Some(RequestUnion::ProgressRequest(_)) => {
                self.progress_requests = (self.progress_requests + 1).min(PROGRESS_REQUESTS_MAX);
                self.progress_target = self.stream.hub().revision();
            }
            // etcd ignores what it does not know, too.
            None => tracing::info!("watch request without content"),
        }
    }

    /// Registers a watcher; an error is the reason told to the client.
    fn create(&mut self, request: pb::WatchCreateRequest) -> Result<Head, String> {
        if request.start_revision < 0 {
            return Err(Error::Compacted.text().to_owned());
        }
        let key = if request.key.is_empty() {
            // The smallest key: with an end of one zero byte, everything.
            Bytes::from_static(&[0])
        } else {
            request.key
        };
        if let Some(permission) = &self.shared.permission
            && let Err(error) = permission.check(&self.metadata, &key, &request.range_end)
        {
            // etcd tells these in the form that Go's gRPC prints.
            return Err(format!(
                "rpc error: code = {:?} desc = {}",
                error.code(),
                error.text()
            ));
        }
        let range = KeyRange {
            key,
            end: request.range_end,
        };
        if range.is_empty() {
            return Err("mvcc: watcher range is empty".to_owned());
        }
        let Some(watch_id) = self.watchers.choose_id(request.watch_id) else {
            return Err("mvcc: duplicate watch ID provided on the WatchStream".to_owned());
        };
        let slot = self.watchers.next_slot;
        self.watchers.next_slot += 1;
        let filter = |kind: FilterType| request.filters.contains(&(kind as i32));
        let (id, revision) = self.stream.create(
            slot,
            CreateWatch {
                range,
                start_revision: request.start_revision,
                no_put: filter(FilterType::Noput),
                no_delete: filter(FilterType::Nodelete),
                prev_kv: request.prev_kv,
            },
        );
        self.watchers.ids.insert(watch_id, slot);
        self.watchers.slots.insert(
            slot,
            Watcher {
                id,
                watch_id,
                prev_kv: request.prev_kv,
                fragment: request.fragment,
                start_revision: request.start_revision,
                progress_notify: request.progress_notify,
                quiet: true,
                gone: false,
                last_link: u32::MAX,
            },
        );
        if request.progress_notify && self.ticker.is_none() {
            let interval = self.shared.config.progress_interval;
            let period = interval + interval.mul_f64(0.1 * rand::random::<f64>());
            self.ticker = Some((period, Box::pin(tokio::time::sleep(period))));
        }
        Ok(Head {
            revision,
            watch_id,
            created: true,
            ..Head::default()
        })
    }

    fn rests(&mut self, cx: &mut Context<'_>) -> bool {
        if let Some(rest) = &mut self.rest {
            if rest.as_mut().poll(cx).is_pending() {
                return true;
            }
            self.rest = None;
        }
        false
    }

    /// Writes what was taken from the mailbox, up to a chunk.
    fn write_events(&mut self, out: &mut BytesMut) {
        let voice = self.voice();
        while out.len() < CHUNK_BYTES {
            if self.run.is_none() {
                self.run = Run::take(&mut self.inbox, &mut self.watchers);
            }
            if let Some(run) = &mut self.run {
                if !run.write(out, CHUNK_BYTES, voice, &mut self.watchers) {
                    return;
                }
                for events in &run.sources {
                    self.stream.sent(events);
                }
                let responses = run.watchers();
                self.run = None;
                if responses >= REST_RESPONSES_MIN {
                    let rest = (REST * responses as u32).min(REST_MAX);
                    self.rest = Some(Box::pin(tokio::time::sleep(rest)));
                    return;
                }
                continue;
            }
            match self.inbox.pop_front() {
                Some(Delivery::Compacted {
                    slot,
                    compact_revision,
                }) => self.write_compacted(out, slot, compact_revision),
                Some(other) => self.inbox.push_front(other),
                None => return,
            }
        }
    }

    fn write_compacted(&mut self, out: &mut BytesMut, slot: u32, compact_revision: i64) {
        let Some(watcher) = self.watchers.by_slot_mut(slot) else {
            return;
        };
        watcher.gone = true;
        // No revision and no reason, as etcd.
        let head = Head {
            watch_id: watcher.watch_id,
            canceled: true,
            compact_revision,
            ..Head::default()
        };
        self.write_control(out, head);
    }

    fn poll_ticker(&mut self, cx: &mut Context<'_>) {
        let Some((period, sleep)) = &mut self.ticker else {
            return;
        };
        while sleep.as_mut().poll(cx).is_ready() {
            sleep.set(tokio::time::sleep(*period));
            for (slot, watcher) in &mut self.watchers.slots {
                if watcher.progress_notify && !watcher.gone {
                    // Events since the last tick have told as much.
                    if watcher.quiet && !self.due.contains(slot) {
                        self.due.push(*slot);
                    }
                    watcher.quiet = true;
                }
            }
        }
    }

    /// Everything taken has been written: time for progress, asked for or due.
    fn write_progress(&mut self, out: &mut BytesMut) {
        if self.progress_requests > 0
            && let Some(revision) = self.stream.progress(self.progress_target, true)
        {
            // Neither an empty stream nor one with a watch of the future is told, as in etcd: its client would resume there.
            let tell = self.watchers.living().next().is_some()
                && self.watchers.living().all(|w| w.start_revision <= revision);
            let requests = std::mem::take(&mut self.progress_requests);
            if tell {
                for _ in 0..requests {
                    self.write_progress_of(out, INVALID_WATCH_ID, revision);
                }
            }
        }
        if !self.due.is_empty() {
            self.write_due_progress(out);
        }
    }

    fn write_due_progress(&mut self, out: &mut BytesMut) {
        // A watcher that is synced before and after, and was not set aside between, has been told all up to the revision.
        let before: Vec<_> = self
            .due
            .iter()
            .filter_map(|slot| self.watchers.slots.get(slot))
            .map(|w| {
                (
                    w.id,
                    w.watch_id,
                    w.start_revision,
                    self.stream.synced_from(w.id),
                )
            })
            .collect();
        let Some(revision) = self.stream.progress(0, false) else {
            return;
        };
        self.due.clear();
        for (id, watch_id, start_revision, synced_from) in before {
            let synced = synced_from.is_some() && self.stream.synced_from(id) == synced_from;
            if synced && start_revision <= revision {
                self.write_progress_of(out, watch_id, revision);
            }
        }
    }

    fn write_progress_of(&self, out: &mut BytesMut, watch_id: i64, revision: i64) {
        let head = Head {
            revision,
            watch_id,
            ..Head::default()
        };
        self.write_control(out, head);
    }

    fn write_control(&self, out: &mut BytesMut, head: Head) {
        let voice = self.voice();
        let head = Head {
            term: voice.term,
            ..head
        };
        frame::write(out, voice.speaker, &head, std::iter::empty());
    }

    fn voice(&self) -> Voice {
        Voice {
            speaker: self.shared.speaker,
            term: self.shared.leadership.borrow().term,
            fragment_bytes: self.shared.config.fragment_bytes,
        }
    }
}

/// Ends a stream that requires a leader when there has been none for long.
struct LeaderGuard {
    changes: WatchStream<RaftStatus>,
    patience: Duration,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl LeaderGuard {
    fn poll(&mut self, cx: &mut Context<'_>) -> Result<(), Status> {
        while let Poll::Ready(Some(status)) = Pin::new(&mut self.changes).poll_next(cx) {
            if status.leader != 0 {
                self.deadline = None;
            } else if self.deadline.is_none() {
                self.deadline = Some(Box::pin(tokio::time::sleep(self.patience)));
            }
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            return Err(Error::NoLeader.into());
        }
        Ok(())
    }
}
