//! Who watches a key: a map for single keys and a tree of intervals for ranges.
//!
//! The tree is a treap ordered by (start, end); each node knows the greatest end below it, so that a lookup visits only
//! nodes that may hold the key.
//!
//!     start       [----------)            node: its own interval
//!     max_end     [-------------------)   the furthest that anything in its subtree reaches
//!
//! etcd: watcherGroup in server/storage/mvcc/watcher_group.go, pkg/adt/interval_tree.go.

use std::cmp::Ordering;
use std::collections::HashMap;

use bytes::Bytes;

use super::hub::WatcherId;

/// What a watcher watches, in etcd's form: no end = the key alone, an end of one zero byte = to the end of the key space.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeyRange {
    pub(crate) key: Bytes,
    pub(crate) end: Bytes,
}

impl KeyRange {
    pub(crate) fn is_single(&self) -> bool {
        self.end.is_empty()
    }

    /// A range that can hold no key.
    pub(crate) fn is_empty(&self) -> bool {
        !self.is_single() && !self.is_open() && self.key >= self.end
    }

    fn is_open(&self) -> bool {
        self.end.as_ref() == [0]
    }

    fn bound(&self) -> End {
        if self.is_open() {
            End::Open
        } else {
            End::Before(self.end.clone())
        }
    }
}

/// A watcher as the dispatcher meets it: everything needed to decide on an event without another lookup.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) id: WatcherId,
    pub(crate) stream: u32,
    /// The watcher within its stream.
    pub(crate) slot: u32,
    /// Older events are not for it, or have been delivered.
    pub(crate) min_revision: i64,
    pub(crate) no_put: bool,
    pub(crate) no_delete: bool,
    pub(crate) prev_kv: bool,
}

/// Where an interval ends; `Open` is greater than all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Before(Bytes),
    Open,
}

impl End {
    fn is_after(&self, key: &[u8]) -> bool {
        match self {
            Self::Before(end) => end.as_ref() > key,
            Self::Open => true,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct WatcherSet {
    keys: HashMap<Bytes, Vec<Target>>,
    ranges: Treap,
    len: usize,
}

impl WatcherSet {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn insert(&mut self, range: &KeyRange, target: Target) {
        self.len += 1;
        if range.is_single() {
            self.keys.entry(range.key.clone()).or_default().push(target);
        } else {
            self.ranges.insert(&range.key, &range.bound(), target);
        }
    }

    /// Removes the range's watchers that `gone` names; says how many there were.
    pub(crate) fn remove(&mut self, range: &KeyRange, gone: impl Fn(&Target) -> bool) -> usize {
        let removed = if range.is_single() {
            let Some(targets) = self.keys.get_mut(&range.key) else {
                return 0;
            };
            let before = targets.len();
            targets.retain(|t| !gone(t));
            let removed = before - targets.len();
            if targets.is_empty() {
                self.keys.remove(&range.key);
            }
            removed
        } else {
            self.ranges.remove(&range.key, &range.bound(), gone)
        };
        self.len -= removed;
        removed
    }

    /// Calls `visit` for every watcher of the key.
    pub(crate) fn visit(&self, key: &[u8], mut visit: impl FnMut(&Target)) {
        if let Some(targets) = self.keys.get(key) {
            targets.iter().for_each(&mut visit);
        }
        self.ranges.visit(self.ranges.root, key, &mut visit);
    }

    /// Takes every watcher out.
    pub(crate) fn drain_ids(&mut self) -> Vec<WatcherId> {
        let set = std::mem::take(self);
        let keyed = set.keys.into_values().flatten();
        let ranged = set.ranges.nodes.into_iter().flat_map(|n| n.targets);
        keyed.chain(ranged).map(|t| t.id).collect()
    }
}

const NIL: u32 = u32::MAX;

#[derive(Debug)]
struct Treap {
    nodes: Vec<Node>,
    free: Vec<u32>,
    root: u32,
    seed: u32,
}

#[derive(Debug)]
struct Node {
    start: Bytes,
    end: End,
    max_end: End,
    priority: u32,
    left: u32,
    right: u32,
    targets: Vec<Target>,
}

impl Default for Treap {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            free: Vec::new(),
            root: NIL,
            // Any seed but zero: priorities need no secrecy, only spread.
            seed: 0x9e37_79b9,
        }
    }
}

impl Treap {
    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    fn compare(&self, start: &Bytes, end: &End, at: u32) -> Ordering {
        let node = self.node(at);
        start.cmp(&node.start).then_with(|| end.cmp(&node.end))
    }

    fn find(&self, start: &Bytes, end: &End) -> Option<u32> {
        let mut at = self.root;
        while at != NIL {
            match self.compare(start, end, at) {
                Ordering::Less => at = self.node(at).left,
                Ordering::Greater => at = self.node(at).right,
                Ordering::Equal => return Some(at),
            }
        }
        None
    }

    fn insert(&mut self, start: &Bytes, end: &End, target: Target) {
        if let Some(at) = self.find(start, end) {
            self.node_mut(at).targets.push(target);
            return;
        }
        let node = Node {
            start: start.clone(),
            end: end.clone(),
            max_end: end.clone(),
            priority: self.next_priority(),
            left: NIL,
            right: NIL,
            targets: vec![target],
        };
        let new = if let Some(at) = self.free.pop() {
            *self.node_mut(at) = node;
            at
        } else {
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        };
        self.root = self.insert_at(self.root, new);
    }

    fn insert_at(&mut self, at: u32, new: u32) -> u32 {
        if at == NIL {
            return new;
        }
        let (start, end) = (self.node(new).start.clone(), self.node(new).end.clone());
        if self.node(new).priority > self.node(at).priority {
            let (left, right) = self.split(at, &start, &end);
            self.node_mut(new).left = left;
            self.node_mut(new).right = right;
            self.update(new);
            return new;
        }
        if self.compare(&start, &end, at) == Ordering::Less {
            let left = self.insert_at(self.node(at).left, new);
            self.node_mut(at).left = left;
        } else {
            let right = self.insert_at(self.node(at).right, new);
            self.node_mut(at).right = right;
        }
        self.update(at);
        at
    }

    /// Splits into what is below and what is above an interval that is not in the tree.
    fn split(&mut self, at: u32, start: &Bytes, end: &End) -> (u32, u32) {
        if at == NIL {
            return (NIL, NIL);
        }
        if self.compare(start, end, at) == Ordering::Less {
            let (low, high) = self.split(self.node(at).left, start, end);
            self.node_mut(at).left = high;
            self.update(at);
            (low, at)
        } else {
            let (low, high) = self.split(self.node(at).right, start, end);
            self.node_mut(at).right = low;
            self.update(at);
            (at, high)
        }
    }

    fn merge(&mut self, low: u32, high: u32) -> u32 {
        if low == NIL {
            return high;
        }
        if high == NIL {
            return low;
        }
        if self.node(low).priority > self.node(high).priority {
            let right = self.merge(self.node(low).right, high);
            self.node_mut(low).right = right;
            self.update(low);
            low
        } else {
            let left = self.merge(low, self.node(high).left);
            self.node_mut(high).left = left;
            self.update(high);
            high
        }
    }

    fn remove(&mut self, start: &Bytes, end: &End, gone: impl Fn(&Target) -> bool) -> usize {
        let Some(at) = self.find(start, end) else {
            return 0;
        };
        let targets = &mut self.node_mut(at).targets;
        let before = targets.len();
        targets.retain(|t| !gone(t));
        let removed = before - targets.len();
        if targets.is_empty() {
            self.root = self.unlink(self.root, at);
            self.free.push(at);
            // The freed node must not pin the keys' memory.
            let node = self.node_mut(at);
            node.start = Bytes::new();
            node.end = End::Open;
            node.max_end = End::Open;
        }
        removed
    }

    fn unlink(&mut self, at: u32, gone: u32) -> u32 {
        if at == gone {
            let node = self.node(at);
            return self.merge(node.left, node.right);
        }
        let (start, end) = (self.node(gone).start.clone(), self.node(gone).end.clone());
        if self.compare(&start, &end, at) == Ordering::Less {
            let left = self.unlink(self.node(at).left, gone);
            self.node_mut(at).left = left;
        } else {
            let right = self.unlink(self.node(at).right, gone);
            self.node_mut(at).right = right;
        }
        self.update(at);
        at
    }

    fn update(&mut self, at: u32) {
        let node = self.node(at);
        let mut max = &node.end;
        for child in [node.left, node.right] {
            if child != NIL {
                max = max.max(&self.node(child).max_end);
            }
        }
        let max = max.clone();
        self.node_mut(at).max_end = max;
    }

    fn visit(&self, at: u32, key: &[u8], visit: &mut impl FnMut(&Target)) {
        let mut at = at;
        while at != NIL {
            let node = self.node(at);
            if !node.max_end.is_after(key) {
                return;
            }
            self.visit(node.left, key, visit);
            if node.start.as_ref() > key {
                return;
            }
            if node.end.is_after(key) {
                node.targets.iter().for_each(&mut *visit);
            }
            at = node.right;
        }
    }

    /// xorshift32.
    fn next_priority(&mut self) -> u32 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 17;
        self.seed ^= self.seed << 5;
        self.seed
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn target(id: u64) -> Target {
        Target {
            id: WatcherId(id),
            stream: 0,
            slot: id as u32,
            min_revision: 0,
            no_put: false,
            no_delete: false,
            prev_kv: false,
        }
    }

    fn range(key: &[u8], end: &[u8]) -> KeyRange {
        KeyRange {
            key: Bytes::copy_from_slice(key),
            end: Bytes::copy_from_slice(end),
        }
    }

    fn holds(range: &KeyRange, key: &[u8]) -> bool {
        if range.is_single() {
            range.key == key
        } else {
            range.key.as_ref() <= key && (range.end.as_ref() == [0] || key < range.end.as_ref())
        }
    }

    fn found(set: &WatcherSet, key: &[u8]) -> Vec<u64> {
        let mut ids = Vec::new();
        set.visit(key, |t| ids.push(t.id.0));
        ids.sort_unstable();
        ids
    }

    #[test]
    fn ends_follow_etcd() {
        let mut set = WatcherSet::default();
        set.insert(&range(b"a", b""), target(1));
        set.insert(&range(b"a", b"b"), target(2));
        set.insert(&range(b"a", b"\0"), target(3));
        set.insert(&range(b"\0", b"\0"), target(4));
        assert_eq!(found(&set, b"a"), [1, 2, 3, 4]);
        assert_eq!(found(&set, b"az"), [2, 3, 4]);
        assert_eq!(found(&set, b"b"), [3, 4]);
        assert_eq!(found(&set, b"\xff\xff"), [3, 4]);
        assert_eq!(found(&set, b"\0"), [4]);
        assert!(range(b"b", b"a").is_empty());
        assert!(range(b"a", b"a").is_empty());
        assert!(!range(b"a", b"\0").is_empty());
    }

    #[test]
    fn random_changes_find_what_a_scan_finds() {
        let mut rng = StdRng::seed_from_u64(7);
        let mut set = WatcherSet::default();
        let mut all: Vec<(KeyRange, u64)> = Vec::new();
        let word = |rng: &mut StdRng| -> Vec<u8> {
            let len = rng.random_range(1..4);
            (0..len).map(|_| rng.random_range(b'a'..b'f')).collect()
        };
        for step in 0..4000 {
            if all.is_empty() || rng.random_bool(0.55) {
                let key = word(&mut rng);
                let end = match rng.random_range(0..4) {
                    0 => Vec::new(),
                    1 => vec![0],
                    _ => word(&mut rng),
                };
                let range = range(&key, &end);
                if range.is_empty() {
                    continue;
                }
                set.insert(&range, target(step));
                all.push((range, step));
            } else {
                let (range, id) = all.swap_remove(rng.random_range(0..all.len()));
                assert_eq!(set.remove(&range, |t| t.id.0 == id), 1);
                assert_eq!(set.remove(&range, |t| t.id.0 == id), 0);
            }
            assert_eq!(set.len(), all.len());
            let key = word(&mut rng);
            let mut expected: Vec<u64> = all
                .iter()
                .filter(|(range, _)| holds(range, &key))
                .map(|(_, id)| *id)
                .collect();
            expected.sort_unstable();
            assert_eq!(found(&set, &key), expected, "step {step}");
        }
        assert_eq!(set.drain_ids().len(), all.len());
        assert_eq!(set.len(), 0);
    }
}
