//! The events of one revision, as all watchers share them: each is put into wire form once.
//!
//! An encoded event is a complete field of `WatchResponse` (tag 11, length, event), so that a response is a header and copies.
//!
//! Not here: the response around them (`frame.rs`).

use std::sync::{Arc, OnceLock};

use ballast_api::mvccpb::KeyValue;
use ballast_storage::mvcc::{Event, EventKind, View};
use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use prost::encoding::{encode_varint, encoded_len_varint};

/// Tag of `WatchResponse.events`: field 11, length-delimited.
const EVENTS_TAG: u8 = 0x5a;
/// Tags of `Event`: type (varint), kv and prev_kv (length-delimited).
const TYPE_TAG: u8 = 0x08;
const KV_TAG: u8 = 0x12;
const PREV_KV_TAG: u8 = 0x1a;
/// What an event costs beside its key and value: revisions, handles, the encoded copy's frame.
const EVENT_OVERHEAD_BYTES: usize = 192;

/// One revision's events, in order of their writes.
#[derive(Debug)]
pub(crate) struct Commit {
    pub(crate) revision: i64,
    pub(crate) events: Arc<[Event]>,
    /// Made when the first watcher wants the revision: most revisions of a busy store have no watcher at all.
    encoded: OnceLock<Box<[Encoded]>>,
    /// About what this commit pins in memory.
    pub(crate) bytes: usize,
}

#[derive(Debug, Default)]
struct Encoded {
    plain: OnceLock<Bytes>,
    with_prev: OnceLock<Bytes>,
}

impl Commit {
    pub(crate) fn new(revision: i64, events: Arc<[Event]>) -> Self {
        let bytes = events
            .iter()
            .map(|e| EVENT_OVERHEAD_BYTES + 2 * (e.kv.key.len() + e.kv.value.len()))
            .sum();
        Self {
            revision,
            events,
            encoded: OnceLock::new(),
            bytes,
        }
    }

    /// Cuts events read from history into their revisions.
    pub(crate) fn from_history(events: Vec<Event>) -> Vec<Arc<Self>> {
        let mut commits = Vec::new();
        let mut current: Vec<Event> = Vec::new();
        for event in events {
            if let Some(last) = current.last()
                && last.kv.mod_revision != event.kv.mod_revision
            {
                let done = std::mem::take(&mut current);
                commits.push(Arc::new(Self::new(done[0].kv.mod_revision, done.into())));
            }
            current.push(event);
        }
        if let Some(first) = current.first() {
            commits.push(Arc::new(Self::new(first.kv.mod_revision, current.into())));
        }
        commits
    }

    fn slot(&self, event: usize) -> &Encoded {
        &self
            .encoded
            .get_or_init(|| (0..self.events.len()).map(|_| Encoded::default()).collect())[event]
    }

    /// The event without the record it replaced.
    pub(crate) fn plain(&self, event: usize) -> &Bytes {
        self.slot(event)
            .plain
            .get_or_init(|| encode(&self.events[event], None))
    }

    /// The event as a watcher that asked for `prev_kv` gets it: plain if [`prepare_prev`](Self::prepare_prev) found nothing.
    pub(crate) fn with_prev(&self, event: usize) -> &Bytes {
        self.slot(event)
            .with_prev
            .get()
            .unwrap_or_else(|| self.plain(event))
    }

    /// Reads the replaced record, once for all watchers. May read the disk: never called where that would hold up others.
    pub(crate) fn prepare_prev(&self, event: usize, view: &View) {
        let Some(prev) = self.events[event].prev else {
            return;
        };
        // etcd reads the key one revision back, and an event at the compacted revision has nothing readable there, whatever is left of
        // the record. Kubernetes takes the missing `prev_kv` as the sign that its watch is too old.
        if self.revision <= view.compact_revision() {
            return;
        }
        let slot = self.slot(event);
        if slot.with_prev.get().is_some() {
            return;
        }
        match view.record(prev) {
            Ok(Some(record)) => {
                let bytes = encode(&self.events[event], Some(&record));
                // Lost to the other thread that reads history: equal bytes.
                let _ = slot.with_prev.set(bytes);
            }
            // Compacted meanwhile: etcd sends such an event without it, too.
            Ok(None) => {}
            // The store has failed and stops the node by itself.
            Err(error) => tracing::error!(%error, ?prev, "cannot read the record before an event"),
        }
    }
}

fn encode(event: &Event, prev: Option<&KeyValue>) -> Bytes {
    let kv_len = event.kv.encoded_len();
    let prev_len = prev.map(Message::encoded_len);
    let type_len = if event.kind == EventKind::Delete {
        2
    } else {
        0
    };
    let len = type_len + delimited(kv_len) + prev_len.map_or(0, delimited);
    let mut out = BytesMut::with_capacity(delimited(len));
    out.put_u8(EVENTS_TAG);
    encode_varint(len as u64, &mut out);
    if event.kind == EventKind::Delete {
        out.put_slice(&[TYPE_TAG, 1]);
    }
    put_kv(KV_TAG, &event.kv, kv_len, &mut out);
    if let (Some(prev), Some(prev_len)) = (prev, prev_len) {
        put_kv(PREV_KV_TAG, prev, prev_len, &mut out);
    }
    out.freeze()
}

/// A tag of one byte, the length, the bytes.
fn delimited(len: usize) -> usize {
    1 + encoded_len_varint(len as u64) + len
}

fn put_kv(tag: u8, kv: &KeyValue, len: usize, out: &mut BytesMut) {
    out.put_u8(tag);
    encode_varint(len as u64, out);
    kv.encode_raw(out);
}

#[cfg(test)]
mod tests {
    use ballast_api::etcdserverpb::WatchResponse;
    use ballast_api::mvccpb;

    use super::*;

    fn event(kind: EventKind, revision: i64) -> Event {
        Event {
            kind,
            kv: KeyValue {
                key: Bytes::from_static(b"k"),
                mod_revision: revision,
                value: Bytes::from(vec![7; 300]),
                ..KeyValue::default()
            },
            prev: None,
        }
    }

    #[test]
    fn an_encoded_event_is_a_field_of_the_response() {
        let delete = event(EventKind::Delete, 9);
        let prev = event(EventKind::Put, 3).kv;
        let response = WatchResponse::decode(encode(&delete, Some(&prev))).unwrap();
        assert_eq!(
            response.events,
            [mvccpb::Event {
                r#type: mvccpb::event::EventType::Delete as i32,
                kv: Some(delete.kv.clone()),
                prev_kv: Some(prev),
            }]
        );
        let expected = WatchResponse {
            events: response.events,
            ..WatchResponse::default()
        };
        assert_eq!(
            expected.encode_to_vec(),
            encode(&delete, expected.events[0].prev_kv.as_ref())
        );
    }

    /// However many watchers there are, live ones and those that catch up: the bytes are made once, whoever is first.
    #[test]
    fn all_watchers_share_one_encoding_of_an_event() {
        let commit = Arc::new(Commit::new(9, Arc::from([event(EventKind::Put, 9)])));
        let pointers: Vec<usize> = std::thread::scope(|scope| {
            let watchers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| commit.plain(0).as_ptr() as usize))
                .collect();
            watchers
                .into_iter()
                .map(|watcher| watcher.join().unwrap())
                .collect()
        });
        assert!(pointers.iter().all(|at| *at == pointers[0]), "{pointers:?}");
        // Without a record before it, the one with it is the same.
        assert_eq!(commit.with_prev(0).as_ptr() as usize, pointers[0]);
    }

    #[test]
    fn history_is_cut_at_revisions() {
        let events = [4, 4, 5, 7].map(|r| event(EventKind::Put, r)).to_vec();
        let commits = Commit::from_history(events);
        let shape: Vec<_> = commits
            .iter()
            .map(|c| (c.revision, c.events.len()))
            .collect();
        assert_eq!(shape, [(4, 2), (5, 1), (7, 1)]);
    }
}
