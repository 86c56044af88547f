//! The judge of watches, by the guarantees etcd gives and its own robustness tests ask for.
//!
//! | guarantee | here |
//! |---|---|
//! | ordered, unique | revisions never go back, no event comes twice |
//! | atomic | the changes of one revision come in one response |
//! | reliable, resumable | between where it began and the last it was told, nothing is left out |
//! | bookmarkable | after a progress notice at R nothing at or below R comes, and nothing up to R was left out |
//! | filtered | only keys of the range, only the types asked for |
//! | prev_kv | the key as it was before, whenever it was asked for, and never else |
//!
//! Not here: what really happened (`reference.rs`).

use super::record::Event;
use super::reference::{Reference, within};

/// What was asked, and what came, of one watch on one stream.
#[derive(Clone, Debug, Default)]
pub struct Session {
    pub member: usize,
    pub key: String,
    pub end: String,
    /// 0 is from now on.
    pub start: i64,
    pub no_puts: bool,
    pub no_deletes: bool,
    pub prev_kv: bool,
    pub responses: Vec<Response>,
}

/// One message of the stream.
#[derive(Clone, Debug, Default)]
pub struct Response {
    /// When it came.
    pub at: i64,
    /// That of its header.
    pub revision: i64,
    pub created: bool,
    pub canceled: bool,
    pub compact_revision: i64,
    pub events: Vec<Event>,
}

impl Response {
    fn told(&self) -> i64 {
        if self.is_progress() {
            return self.revision;
        }
        let last = self.events.last();
        last.map(|event| event.kv.modified).unwrap_or_default()
    }

    pub fn is_progress(&self) -> bool {
        !self.created && !self.canceled && self.events.is_empty()
    }
}

impl Session {
    /// Up to here everything was told.
    pub fn told(&self) -> i64 {
        self.responses
            .iter()
            .map(Response::told)
            .max()
            .unwrap_or_default()
    }

    /// The same, by the last response alone.
    pub fn told_by_last(&self) -> i64 {
        self.responses
            .last()
            .map(Response::told)
            .unwrap_or_default()
    }

    /// Where the next one goes on.
    pub fn next(&self) -> i64 {
        let told = self.told();
        if told == 0 {
            self.start
        } else {
            // A watch of the future may be told progress before it begins.
            self.start.max(told + 1)
        }
    }

    /// Whether the change is one this watch is told.
    fn wants(&self, event: &Event) -> bool {
        within(&event.kv.key, &self.key, &self.end)
            && !(if event.deleted {
                self.no_deletes
            } else {
                self.no_puts
            })
    }

    pub fn judge(&self, reference: &Reference) -> Vec<String> {
        let mut complaints = Vec::new();
        let mut said = |text: String| {
            complaints.push(format!(
                "watch of {:?}..{:?} from {} on member {}: {text}",
                self.key, self.end, self.start, self.member
            ));
        };
        let mut start = self.start;
        let mut last = 0;
        let mut bookmark = 0;
        let mut events: Vec<&Event> = Vec::new();
        for response in &self.responses {
            if response.created {
                if start == 0 {
                    start = response.revision + 1;
                }
                continue;
            }
            if response.is_progress() {
                if response.revision < last {
                    said(format!(
                        "not bookmarkable: progress {} after events at {last}",
                        response.revision
                    ));
                }
                bookmark = bookmark.max(response.revision);
                continue;
            }
            let Some(first) = response.events.first() else {
                continue;
            };
            if first.kv.modified == last {
                said(format!("not atomic: revision {last} in two responses"));
            }
            for event in &response.events {
                let revision = event.kv.modified;
                if revision < last {
                    said(format!("not ordered: {revision} after {last}"));
                }
                if revision <= bookmark {
                    said(format!(
                        "not bookmarkable: an event at {revision} after progress {bookmark}"
                    ));
                }
                if !self.wants(event) {
                    said(format!("not filtered: {event:?}"));
                }
                if !self.prev_kv && event.prev.is_some() {
                    said(format!("prev_kv was not asked for: {event:?}"));
                }
                last = last.max(revision);
                events.push(event);
            }
            if response.revision < last {
                said(format!(
                    "a header of revision {} with events at {last}",
                    response.revision
                ));
            }
        }
        let to = last.max(bookmark);
        if to > reference.head() {
            said(format!(
                "told of revision {to}, the head is {}",
                reference.head()
            ));
        }
        let mut wanted = reference
            .between((start - 1).max(0), to)
            .flat_map(|(_, events)| events)
            .filter(|event| self.wants(event));
        for event in events {
            let Some(expected) = wanted.next() else {
                said(format!("not unique, or invented: {event:?}"));
                break;
            };
            let as_asked = Event {
                prev: expected.prev.clone().filter(|_| self.prev_kv),
                ..expected.clone()
            };
            if *event != as_asked {
                said(format!("not reliable: {event:?} instead of {as_asked:?}"));
                return complaints;
            }
        }
        if let Some(missing) = wanted.next() {
            said(format!("not reliable: up to {to} without {missing:?}"));
        }
        complaints
    }
}

#[cfg(test)]
mod tests {
    use super::super::reference::tests::{delete, put};
    use super::*;

    fn reference() -> (Reference, Vec<Event>) {
        let a = put("a", "1", 2, None);
        let b = put("b", "1", 3, None);
        let c = put("c", "1", 3, None);
        let a2 = put("a", "2", 4, Some(&a));
        let gone = delete(&b, 5);
        let events = vec![a, b, c, a2, gone];
        let mut reference = Reference::default();
        reference.add(2, &events[..1]);
        reference.add(3, &events[1..3]);
        reference.add(4, &events[3..4]);
        reference.add(5, &events[4..]);
        assert!(reference.complaints.is_empty());
        (reference, events)
    }

    fn response(events: &[Event]) -> Response {
        Response {
            revision: 5,
            events: events.to_vec(),
            ..Response::default()
        }
    }

    fn progress(revision: i64) -> Response {
        Response {
            revision,
            ..Response::default()
        }
    }

    fn session(responses: Vec<Response>) -> Session {
        Session {
            key: "\0".to_owned(),
            end: "\0".to_owned(),
            start: 2,
            prev_kv: true,
            responses,
            ..Session::default()
        }
    }

    #[test]
    fn a_watch_that_was_told_everything_is_no_complaint() {
        let (reference, e) = reference();
        let whole = session(vec![
            response(&e[..1]),
            response(&e[1..3]),
            progress(3),
            response(&e[3..]),
        ]);
        assert_eq!(whole.judge(&reference), Vec::<String>::new());
        assert_eq!(whole.told(), 5);
        // The stream ended early: what it was told is right.
        let early = session(vec![response(&e[..3])]);
        assert_eq!(early.judge(&reference), Vec::<String>::new());
        let later = Session {
            start: 4,
            ..session(vec![response(&e[3..])])
        };
        assert_eq!(later.judge(&reference), Vec::<String>::new());
        let puts = Session {
            no_deletes: true,
            key: "b".to_owned(),
            end: "d".to_owned(),
            ..session(vec![response(&e[1..3]), progress(5)])
        };
        assert_eq!(puts.judge(&reference), Vec::<String>::new());
    }

    #[test]
    fn each_broken_guarantee_is_found() {
        let (reference, e) = reference();
        let mut without_prev = e[3].clone();
        without_prev.prev = None;
        let cases = [
            ("not ordered", vec![response(&e[3..4]), response(&e[..1])]),
            ("not unique", vec![response(&e), response(&e[4..])]),
            ("not atomic", vec![response(&e[..2]), response(&e[2..3])]),
            ("not reliable", vec![response(&e[..1]), response(&e[3..])]),
            ("not reliable", vec![response(&e[..1]), progress(5)]),
            (
                "not bookmarkable",
                vec![response(&e[..1]), progress(4), response(&e[1..3])],
            ),
            (
                "not reliable",
                vec![response(&e[..3]), response(&[without_prev])],
            ),
        ];
        for (kind, responses) in cases {
            let complaints = session(responses).judge(&reference);
            assert!(
                complaints.iter().any(|complaint| complaint.contains(kind)),
                "{kind}: {complaints:?}"
            );
        }
        let filtered = Session {
            no_puts: true,
            ..session(vec![response(&e)])
        };
        assert!(filtered.judge(&reference)[0].contains("not filtered"));
    }
}
