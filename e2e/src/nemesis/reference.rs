//! The one true history: every change in order, put together from all watchers of everything, and the states it leads to.
//!
//! Promises: no revision is missing up to [`Reference::head`]; two members that tell different changes at one revision are a complaint, as is
//! a change that does not fit what was there before it (creation, version, the key before).

use std::collections::BTreeMap;

use super::record::{Event, Kv};

/// States are kept this far apart.
const STATE_EVERY: i64 = 500;

pub type State = BTreeMap<String, Kv>;

/// What is known of it.
#[derive(Debug)]
pub struct Reference {
    log: BTreeMap<i64, Vec<Event>>,
    /// Everything up to here is there, and was replayed.
    head: i64,
    state: State,
    states: BTreeMap<i64, State>,
    pub complaints: Vec<String>,
}

impl Default for Reference {
    /// That of an empty store.
    fn default() -> Self {
        Self {
            log: BTreeMap::new(),
            head: 1,
            state: State::new(),
            states: BTreeMap::from([(1, State::new())]),
            complaints: Vec::new(),
        }
    }
}

impl Reference {
    pub fn head(&self) -> i64 {
        self.head
    }

    /// The state at the head.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Takes in all changes of one revision, as one watcher of everything was told them.
    pub fn add(&mut self, revision: i64, events: &[Event]) {
        if let Some(known) = self.log.get(&revision) {
            if known != events {
                self.complaints.push(format!(
                    "members differ at revision {revision}: {known:?} and {events:?}"
                ));
            }
            return;
        }
        self.log.insert(revision, events.to_vec());
        while let Some(events) = self.log.get(&(self.head + 1)) {
            self.head += 1;
            let events = events.clone();
            for event in &events {
                self.replay(event);
            }
            if self.head % STATE_EVERY == 0 {
                self.states.insert(self.head, self.state.clone());
            }
        }
    }

    fn replay(&mut self, event: &Event) {
        let before = self.state.get(&event.kv.key).cloned();
        if event.prev != before {
            self.complaints.push(format!(
                "prev_kv at revision {}: {:?} was told, {before:?} was there",
                self.head, event.prev
            ));
        }
        if event.kv.modified != self.head {
            self.complaints.push(format!(
                "revision {} is told as {}",
                self.head, event.kv.modified
            ));
        }
        if event.deleted {
            if before.is_none() {
                self.complaints.push(format!(
                    "revision {} deletes {}, which is not there",
                    self.head, event.kv.key
                ));
            }
            self.state.remove(&event.kv.key);
            return;
        }
        let (create, version) = match &before {
            Some(before) => (before.create, before.version + 1),
            None => (self.head, 1),
        };
        if (event.kv.create, event.kv.version) != (create, version) {
            self.complaints.push(format!(
                "revision {}: {:?} must be created at {create} and be version {version}",
                self.head, event.kv
            ));
        }
        self.state.insert(event.kv.key.clone(), event.kv.clone());
    }

    /// Changes in (`after`, `to`], revision by revision.
    pub fn between(&self, after: i64, to: i64) -> impl Iterator<Item = (i64, &Vec<Event>)> {
        self.log
            .range(after + 1..)
            .take_while(move |(revision, _)| **revision <= to)
            .map(|(&revision, events)| (revision, events))
    }

    /// What was there at a revision up to the head.
    pub fn at(&self, revision: i64) -> Option<State> {
        if revision > self.head {
            return None;
        }
        let (&from, state) = self.states.range(..=revision).next_back()?;
        let mut state = state.clone();
        for (_, events) in self.between(from, revision) {
            for event in events {
                if event.deleted {
                    state.remove(&event.kv.key);
                } else {
                    state.insert(event.kv.key.clone(), event.kv.clone());
                }
            }
        }
        Some(state)
    }
}

/// Whether a key lies in a range: of one key when `end` is empty, without a bound when it is the zero byte.
pub fn within(key: &str, from: &str, end: &str) -> bool {
    match end {
        "" => key == from,
        "\0" => key >= from,
        _ => key >= from && key < end,
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A put, as told right.
    pub fn put(key: &str, value: &str, revision: i64, prev: Option<&Event>) -> Event {
        let prev = prev.map(|event| event.kv.clone());
        Event {
            deleted: false,
            kv: Kv {
                key: key.to_owned(),
                value: value.to_owned(),
                create: prev.as_ref().map_or(revision, |prev| prev.create),
                modified: revision,
                version: prev.as_ref().map_or(1, |prev| prev.version + 1),
                lease: 0,
            },
            prev,
        }
    }

    pub fn delete(prev: &Event, revision: i64) -> Event {
        Event {
            deleted: true,
            kv: Kv {
                key: prev.kv.key.clone(),
                modified: revision,
                ..Kv::default()
            },
            prev: Some(prev.kv.clone()),
        }
    }

    #[test]
    fn a_history_is_replayed_as_far_as_it_has_no_gap() {
        let mut reference = Reference::default();
        let first = put("a", "1", 2, None);
        let second = put("a", "2", 3, Some(&first));
        reference.add(4, &[delete(&second, 4)]);
        reference.add(2, std::slice::from_ref(&first));
        assert_eq!(reference.head(), 2);
        reference.add(3, &[second]);
        assert_eq!(reference.head(), 4);
        assert!(reference.state().is_empty());
        assert_eq!(reference.at(3).unwrap()["a"].value, "2");
        assert_eq!(reference.at(5), None);
        assert!(reference.complaints.is_empty());
    }

    #[test]
    fn what_does_not_fit_is_a_complaint() {
        let first = put("a", "1", 2, None);
        let cases = [
            // Another member tells another value.
            (2, put("a", "9", 2, None)),
            // A key before that was not there.
            (3, put("b", "2", 3, Some(&first))),
            // A deletion of nothing.
            (
                3,
                Event {
                    prev: None,
                    ..delete(&put("c", "1", 2, None), 3)
                },
            ),
        ];
        for (revision, event) in cases {
            let mut reference = Reference::default();
            reference.add(2, std::slice::from_ref(&first));
            reference.add(revision, &[event]);
            assert!(!reference.complaints.is_empty(), "{reference:?}");
        }
    }
}
