//! The last few thousand commits, so that who is a little behind reads no disk.
//!
//! Promises: the revisions in it follow each other without a gap; it is bounded by number and by bytes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::commit::Commit;

/// Commits kept: a watcher that reconnects after a network hiccup should find all it missed.
const RING_COMMITS_MAX: usize = 8192;
/// Bytes pinned by them.
const RING_BYTES_MAX: usize = 16 << 20;

#[derive(Debug, Default)]
pub(crate) struct Ring {
    commits: VecDeque<Arc<Commit>>,
    bytes: usize,
    /// The newest revision heard of, in the ring or not.
    head: i64,
}

impl Ring {
    pub(crate) fn new(head: i64) -> Self {
        Self {
            head,
            ..Self::default()
        }
    }

    pub(crate) fn push(&mut self, commit: Arc<Commit>) {
        if commit.revision != self.head + 1 {
            // The state was replaced by a snapshot: what is in between stands in history only.
            self.commits.clear();
            self.bytes = 0;
        }
        self.head = commit.revision;
        self.bytes += commit.bytes;
        self.commits.push_back(commit);
        while self.commits.len() > RING_COMMITS_MAX || self.bytes > RING_BYTES_MAX {
            // One commit may be larger than the whole ring; it is read from history then.
            let Some(old) = self.commits.pop_front() else {
                break;
            };
            self.bytes -= old.bytes;
        }
    }

    pub(crate) fn head(&self) -> i64 {
        self.head
    }

    /// Forgets everything: the state was replaced.
    pub(crate) fn reset(&mut self, head: i64) {
        self.commits.clear();
        self.bytes = 0;
        self.head = head;
    }

    /// Whether every commit from `start` to the head is here.
    pub(crate) fn covers(&self, start: i64) -> bool {
        start > self.head || self.commits.front().is_some_and(|c| c.revision <= start)
    }

    /// Commits from `start` on, as many as wanted; None when `start` is no longer here.
    pub(crate) fn from(
        &self,
        start: i64,
        commits_max: usize,
        bytes_max: usize,
    ) -> Option<Vec<Arc<Commit>>> {
        if !self.covers(start) {
            return None;
        }
        let Some(first) = self.commits.front() else {
            return Some(Vec::new());
        };
        let skip = usize::try_from(start - first.revision).ok()?;
        let mut bytes = 0;
        let taken = self
            .commits
            .iter()
            .skip(skip)
            .take(commits_max)
            .take_while(|c| {
                let before = bytes;
                bytes += c.bytes;
                before < bytes_max
            })
            .cloned()
            .collect();
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(revision: i64) -> Arc<Commit> {
        Arc::new(Commit::new(revision, Arc::new([])))
    }

    fn revisions(commits: &[Arc<Commit>]) -> Vec<i64> {
        commits.iter().map(|c| c.revision).collect()
    }

    #[test]
    fn old_commits_leave_and_the_rest_has_no_gap() {
        let mut ring = Ring::new(1);
        let last = RING_COMMITS_MAX as i64 + 11;
        for revision in 2..=last {
            ring.push(commit(revision));
        }
        assert!(ring.from(11, 9, usize::MAX).is_none());
        assert_eq!(
            revisions(&ring.from(12, 3, usize::MAX).unwrap()),
            [12, 13, 14]
        );
        assert_eq!(revisions(&ring.from(last, 3, usize::MAX).unwrap()), [last]);
        assert!(ring.from(last + 1, 3, usize::MAX).unwrap().is_empty());
    }

    #[test]
    fn a_jump_of_revisions_empties_it() {
        let mut ring = Ring::new(1);
        ring.push(commit(2));
        ring.push(commit(9));
        assert!(!ring.covers(2));
        assert!(!ring.covers(8));
        assert_eq!(revisions(&ring.from(9, 3, usize::MAX).unwrap()), [9]);
    }
}
