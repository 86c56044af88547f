//! What a watch stream tells.

use std::collections::BTreeMap;

use ballast_api::error::Error;
use ballast_api::etcdserverpb as pb;
use ballast_api::mvccpb::{Event, event::EventType};
use bytes::Bytes;
use pb::watch_create_request::FilterType;

use super::super::perform::Answer;
use super::super::script::{Op, Step};
use super::super::watch::{Due, Plan, Point, Session, compaction_text, settles};
use super::kv::contains;
use super::{Change, Model, header};

/// A watch of the stream, by where it stands in the session.
struct Watch {
    at: usize,
    key: Bytes,
    end: Bytes,
    /// As asked; 0 is now.
    start: i64,
    /// The next revision to tell.
    next: i64,
    filters: Vec<i32>,
    prev_kv: bool,
    compacted: bool,
}

#[derive(Default)]
struct Stream {
    session: Session,
    watches: BTreeMap<i64, Watch>,
    next_id: i64,
}

impl Model {
    pub(super) fn watch(&mut self, steps: &[Step]) -> (Answer, Plan) {
        let mut stream = Stream::default();
        let mut plan = Plan::default();
        for step in steps {
            let blocking = !self.blocking(&stream).is_empty();
            if settles(step) {
                let compaction = matches!(step, Step::Write(Op::Compact(_)));
                let provable = compaction && !blocking && !stream.watches.is_empty();
                plan.points.push(Point {
                    due: stream.due(),
                    progress: provable.then(|| self.head()),
                });
            }
            let answered = match step {
                Step::Create(request) => {
                    self.create(&mut stream, request);
                    true
                }
                Step::Cancel(id) => self.cancel(&mut stream, *id),
                Step::Progress => false,
                Step::Write(Op::Compact(_)) if blocking => false,
                Step::Write(op) => {
                    let answer = self.write(op);
                    stream.session.replies.push(answer.text);
                    true
                }
            };
            plan.answered.push(answered);
            self.tell(&mut stream);
        }
        plan.points.push(Point {
            due: stream.due(),
            progress: None,
        });
        plan.blocking = self.blocking(&stream);
        for &id in &plan.blocking {
            self.cancel(&mut stream, id);
        }
        plan.progress = (!stream.watches.is_empty()).then(|| self.head());
        (stream.session.answer(), plan)
    }

    /// The watches because of which etcd tells the stream no progress.
    fn blocking(&self, stream: &Stream) -> Vec<i64> {
        let watches = stream.watches.iter();
        watches
            .filter(|(_, watch)| watch.compacted || watch.start > self.head())
            .map(|(id, _)| *id)
            .collect()
    }

    fn write(&mut self, op: &Op) -> Answer {
        self.unary(op)
            .unwrap_or_else(|status| Answer::refused(&status))
    }

    fn create(&self, stream: &mut Stream, request: &pb::WatchCreateRequest) {
        let reply = pb::WatchResponse {
            header: header(self.head()),
            created: true,
            ..pb::WatchResponse::default()
        };
        let key = if request.key.is_empty() {
            Bytes::from_static(b"\0")
        } else {
            request.key.clone()
        };
        let refusal = if request.start_revision < 0 {
            Some(Error::Compacted.text())
        } else if !request.range_end.is_empty()
            && request.range_end != b"\0"[..]
            && key >= request.range_end
        {
            Some("mvcc: watcher range is empty")
        } else if request.watch_id != 0 && stream.watches.contains_key(&request.watch_id) {
            Some("mvcc: duplicate watch ID provided on the WatchStream")
        } else {
            None
        };
        if let Some(reason) = refusal {
            stream.session.reply(pb::WatchResponse {
                watch_id: -1,
                canceled: true,
                cancel_reason: reason.to_owned(),
                ..reply
            });
            return;
        }
        let mut watch_id = request.watch_id;
        if watch_id == 0 {
            while stream.watches.contains_key(&stream.next_id) {
                stream.next_id += 1;
            }
            watch_id = stream.next_id;
            stream.next_id += 1;
        }
        stream.watches.insert(
            watch_id,
            Watch {
                at: stream.session.watches.len(),
                key,
                end: request.range_end.clone(),
                start: request.start_revision,
                next: if request.start_revision == 0 {
                    self.head() + 1
                } else {
                    request.start_revision
                },
                filters: request.filters.clone(),
                prev_kv: request.prev_kv,
                compacted: false,
            },
        );
        stream.session.begin(watch_id);
        stream
            .session
            .reply(pb::WatchResponse { watch_id, ..reply });
    }

    /// False when there is no such watch: nobody answers then.
    fn cancel(&self, stream: &mut Stream, watch_id: i64) -> bool {
        let there = stream.watches.remove(&watch_id).is_some();
        if there {
            stream.session.reply(pb::WatchResponse {
                header: header(self.head()),
                watch_id,
                canceled: true,
                ..pb::WatchResponse::default()
            });
        }
        there
    }

    /// Brings every watch up to the head.
    fn tell(&self, stream: &mut Stream) {
        for (&watch_id, watch) in &mut stream.watches {
            let told = &mut stream.session.watches[watch.at];
            if watch.compacted || watch.next > self.head() {
                continue;
            }
            if watch.next < self.compacted {
                watch.compacted = true;
                told.compacted = Some(compaction_text(pb::WatchResponse {
                    // Of no revision.
                    header: header(0),
                    watch_id,
                    canceled: true,
                    compact_revision: self.compacted,
                    ..pb::WatchResponse::default()
                }));
                continue;
            }
            for change in self.changes.iter().filter(|c| c.main >= watch.next) {
                let filter = if change.deletion {
                    FilterType::Nodelete
                } else {
                    FilterType::Noput
                };
                let wanted = contains(&watch.key, &watch.end, &change.kv.key)
                    && !watch.filters.contains(&(filter as i32));
                if wanted {
                    told.events.push(self.event(change, watch.prev_kv));
                }
            }
            watch.next = self.head() + 1;
        }
    }

    fn event(&self, change: &Change, prev_kv: bool) -> Event {
        let kind = if change.deletion {
            EventType::Delete
        } else {
            EventType::Put
        };
        // What was before the revision, if a compaction left that readable.
        let before = change.main - 1;
        let created = !change.deletion && change.kv.create_revision == change.main;
        let readable = prev_kv && !created && before >= self.compacted;
        Event {
            r#type: kind.into(),
            kv: Some(change.kv.clone()),
            prev_kv: readable
                .then(|| self.states[before as usize].get(&change.kv.key).cloned())
                .flatten(),
        }
    }
}

impl Stream {
    fn due(&self) -> Vec<Due> {
        let watches = self.session.watches.iter();
        watches
            .map(|told| Due {
                events: told.events.len(),
                compacted: told.compacted.is_some(),
            })
            .collect()
    }
}
