//! The judge of case P08: a client that does not read in time is told every event in order, or that a compaction took them away.
//!
//! Each revision is one event of what is watched, beginning with the second.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use ballast_api::etcdserverpb::WatchResponse;

/// What so many watchers, with ids from 0, have been told.
#[derive(Debug)]
pub struct SlowReader {
    head: i64,
    /// The last revision told to each of those that wait for more.
    seen: BTreeMap<i64, i64>,
    /// Told of the compaction.
    pub canceled: usize,
    /// Told everything.
    pub whole: usize,
    pub events: usize,
}

impl SlowReader {
    pub fn new(watchers: usize, head: i64) -> Self {
        Self {
            head,
            seen: (0..).take(watchers).map(|id| (id, 1)).collect(),
            canceled: 0,
            whole: 0,
            events: 0,
        }
    }

    /// Nobody waits for more.
    pub fn is_done(&self) -> bool {
        self.seen.is_empty()
    }

    pub fn told(&mut self, told: WatchResponse) -> Result<()> {
        let id = told.watch_id;
        let last = self.seen.get_mut(&id).context("a watcher of ours")?;
        if told.canceled {
            ensure!(told.compact_revision > *last, "{told:?} after {last}");
            self.canceled += 1;
            self.seen.remove(&id);
            return Ok(());
        }
        for event in told.events {
            let revision = event.kv.context("an event has a record")?.mod_revision;
            ensure!(revision == *last + 1, "{revision} after {last}: a gap");
            *last = revision;
            self.events += 1;
        }
        if *last == self.head {
            self.whole += 1;
            self.seen.remove(&id);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ballast_api::mvccpb::{Event, KeyValue};

    use super::*;

    fn events(revisions: &[i64]) -> WatchResponse {
        let event = |revision: &i64| Event {
            kv: Some(KeyValue {
                mod_revision: *revision,
                ..KeyValue::default()
            }),
            ..Event::default()
        };
        WatchResponse {
            events: revisions.iter().map(event).collect(),
            ..WatchResponse::default()
        }
    }

    #[test]
    fn a_gap_is_found_and_a_compaction_must_be_of_what_is_missing() {
        let compacted = |revision| WatchResponse {
            canceled: true,
            compact_revision: revision,
            ..WatchResponse::default()
        };
        let mut judge = SlowReader::new(1, 5);
        judge.told(events(&[2, 3])).unwrap();
        assert!(judge.told(events(&[5])).is_err());
        assert!(judge.told(compacted(3)).is_err());
        judge.told(events(&[4, 5])).unwrap();
        assert!(judge.is_done());
        assert_eq!((judge.whole, judge.canceled, judge.events), (1, 0, 4));
        let mut judge = SlowReader::new(1, 5);
        judge.told(compacted(3)).unwrap();
        assert!(judge.is_done());
    }
}
