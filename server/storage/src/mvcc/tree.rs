//! All keys in order: a persistent B-tree that can count.
//!
//!                  inner   separators | children | counts of each child
//!                 /     \
//!              inner    inner
//!             /     \
//!          leaf     leaf   keys packed in one buffer | values
//!
//! A clone shares every node; a write copies the nodes on its path that are shared and changes the others in place.
//! Keys lie packed, so that copying a leaf is copying bytes, and a search stays within one buffer.
//!
//! Promises: `clone`, `len` and `live_len` are O(1); `get`, `upsert`, `remove` and `live_before` are O(log n); a
//! clone never changes. An entry that is not live (a deleted key, waiting for compaction) is found by
//! `get` and skipped by `live_from`, whole subtrees at a time.
//! Not here: what a value is (key_index.rs).
//!
//! etcd: server/storage/mvcc/index.go with k8s.io/utils' btree, behind a lock and without counts.

use std::ops::{AddAssign, SubAssign};
use std::sync::Arc;

/// Entries of a leaf and children of an inner node.
const ENTRIES_MAX: usize = 64;
/// Two neighbours that fit together in this many become one.
const ENTRIES_MERGED_MAX: usize = 48;
/// Packed key bytes that split a node before its entries do: it bounds what one write copies when keys are long.
const KEY_BYTES_MAX: usize = 16 * 1024;

/// Tells live entries from those that only history needs.
pub trait Live {
    fn is_live(&self) -> bool;
}

/// An ordered map from byte keys to `V`.
#[derive(Debug)]
pub struct Tree<V> {
    root: Arc<Node<V>>,
    counts: Counts,
}

impl<V> Clone for Tree<V> {
    fn clone(&self) -> Self {
        Self {
            root: Arc::clone(&self.root),
            counts: self.counts,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    all: usize,
    live: usize,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.all += other.all;
        self.live += other.live;
    }
}

impl SubAssign for Counts {
    fn sub_assign(&mut self, other: Self) {
        self.all -= other.all;
        self.live -= other.live;
    }
}

#[derive(Clone, Debug)]
enum Node<V> {
    Leaf(Leaf<V>),
    Inner(Inner<V>),
}

#[derive(Clone, Debug)]
struct Leaf<V> {
    keys: Keys,
    values: Vec<V>,
}

#[derive(Debug)]
struct Inner<V> {
    /// One fewer than children: every key of `children[i]` is below `separators[i]`, which is not above any key of `children[i + 1]`.
    separators: Keys,
    children: Vec<Arc<Node<V>>>,
    counts: Vec<Counts>,
}

impl<V> Clone for Inner<V> {
    fn clone(&self) -> Self {
        Self {
            separators: self.separators.clone(),
            children: self.children.clone(),
            counts: self.counts.clone(),
        }
    }
}

/// Keys one after another in one buffer.
#[derive(Clone, Debug, Default)]
struct Keys {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Keys {
    fn len(&self) -> usize {
        self.ends.len()
    }

    fn start(&self, i: usize) -> usize {
        if i == 0 { 0 } else { self.ends[i - 1] as usize }
    }

    fn get(&self, i: usize) -> &[u8] {
        &self.bytes[self.start(i)..self.ends[i] as usize]
    }

    fn search(&self, key: &[u8]) -> Result<usize, usize> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            match self.get(middle).cmp(key) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Equal => return Ok(middle),
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        Err(low)
    }

    fn insert(&mut self, i: usize, key: &[u8]) {
        let start = self.start(i);
        self.bytes.reserve_exact(key.len());
        self.bytes.extend_from_slice(key);
        self.bytes[start..].rotate_right(key.len());
        self.ends.insert(i, start as u32);
        for end in &mut self.ends[i..] {
            *end += key.len() as u32;
        }
    }

    fn push(&mut self, key: &[u8]) {
        self.insert(self.len(), key);
    }

    fn remove(&mut self, i: usize) {
        let (start, end) = (self.start(i), self.ends[i] as usize);
        self.bytes.drain(start..end);
        self.ends.remove(i);
        for later in &mut self.ends[i..] {
            *later -= (end - start) as u32;
        }
    }

    fn split_off(&mut self, at: usize) -> Self {
        let cut = self.start(at);
        let mut ends = self.ends.split_off(at);
        for end in &mut ends {
            *end -= cut as u32;
        }
        Self {
            bytes: self.bytes.split_off(cut),
            ends,
        }
    }

    fn append(&mut self, other: &Keys) {
        let cut = self.bytes.len() as u32;
        self.bytes.extend_from_slice(&other.bytes);
        self.ends.extend(other.ends.iter().map(|end| end + cut));
    }
}

/// The right half of a node that grew too large, and the key that separates it from the left.
struct Split<V> {
    separator: Vec<u8>,
    right: Arc<Node<V>>,
    counts: Counts,
}

/// What an upsert changed in the counts of the node it went through.
struct Upserted<V> {
    added: Counts,
    removed: Counts,
    split: Option<Split<V>>,
}

impl<V> Default for Tree<V> {
    fn default() -> Self {
        Self {
            root: Arc::new(Node::Leaf(Leaf {
                keys: Keys::default(),
                values: Vec::new(),
            })),
            counts: Counts::default(),
        }
    }
}

impl<V: Live + Clone> Tree<V> {
    /// Entries, live or not.
    pub fn len(&self) -> usize {
        self.counts.all
    }

    pub fn is_empty(&self) -> bool {
        self.counts.all == 0
    }

    pub fn live_len(&self) -> usize {
        self.counts.live
    }

    pub fn get(&self, key: &[u8]) -> Option<&V> {
        let mut node = &*self.root;
        loop {
            match node {
                Node::Leaf(leaf) => return leaf.keys.search(key).ok().map(|i| &leaf.values[i]),
                Node::Inner(inner) => node = &inner.children[inner.child_of(key)],
            }
        }
    }

    /// Replaces the value of `key` by what `change` makes of it, in one descent.
    pub fn upsert(&mut self, key: &[u8], change: impl FnOnce(Option<&V>) -> V) {
        let done = upsert(&mut self.root, key, change);
        self.counts += done.added;
        self.counts -= done.removed;
        if let Some(split) = done.split {
            let mut left = self.counts;
            left -= split.counts;
            let mut separators = Keys::default();
            separators.push(&split.separator);
            self.root = Arc::new(Node::Inner(Inner {
                separators,
                children: vec![Arc::clone(&self.root), split.right],
                counts: vec![left, split.counts],
            }));
        }
    }

    pub fn remove(&mut self, key: &[u8]) -> Option<V> {
        self.get(key)?; // a miss must copy nothing
        let value = remove(&mut self.root, key);
        self.counts -= count_of(&value);
        while let Node::Inner(inner) = &*self.root {
            match inner.children.len() {
                0 => *self = Self::default(),
                1 => self.root = Arc::clone(&inner.children[0]),
                _ => break,
            }
        }
        Some(value)
    }

    /// How many live entries lie before `key`.
    pub fn live_before(&self, key: &[u8]) -> usize {
        let mut node = &*self.root;
        let mut before = 0;
        loop {
            match node {
                Node::Leaf(leaf) => {
                    let (Ok(i) | Err(i)) = leaf.keys.search(key);
                    return before + leaf.values[..i].iter().filter(|v| v.is_live()).count();
                }
                Node::Inner(inner) => {
                    let i = inner.child_of(key);
                    before += inner.counts[..i].iter().map(|c| c.live).sum::<usize>();
                    node = &inner.children[i];
                }
            }
        }
    }

    /// Entries from `start` on, ascending.
    pub fn from<'a>(&'a self, start: &[u8]) -> Iter<'a, V> {
        Iter::new(self, start, false)
    }

    /// Live entries from `start` on, ascending.
    pub fn live_from<'a>(&'a self, start: &[u8]) -> Iter<'a, V> {
        Iter::new(self, start, true)
    }
}

impl<V> Inner<V> {
    fn child_of(&self, key: &[u8]) -> usize {
        match self.separators.search(key) {
            Ok(i) => i + 1,
            Err(i) => i,
        }
    }

    fn total(&self) -> Counts {
        let mut total = Counts::default();
        for counts in &self.counts {
            total += *counts;
        }
        total
    }

    fn is_too_large(&self) -> bool {
        self.children.len() > ENTRIES_MAX
            || (self.separators.bytes.len() > KEY_BYTES_MAX && self.children.len() >= 4)
    }

    fn drop_child(&mut self, i: usize) {
        self.children.remove(i);
        self.counts.remove(i);
        if self.separators.len() > 0 {
            self.separators.remove(i.saturating_sub(1));
        }
    }
}

fn count_of<V: Live>(value: &V) -> Counts {
    Counts {
        all: 1,
        live: usize::from(value.is_live()),
    }
}

fn upsert<V: Live + Clone>(
    node: &mut Arc<Node<V>>,
    key: &[u8],
    change: impl FnOnce(Option<&V>) -> V,
) -> Upserted<V> {
    match Arc::make_mut(node) {
        Node::Leaf(leaf) => match leaf.keys.search(key) {
            Ok(i) => {
                let value = change(Some(&leaf.values[i]));
                let (added, removed) = (count_of(&value), count_of(&leaf.values[i]));
                leaf.values[i] = value;
                Upserted {
                    added,
                    removed,
                    split: None,
                }
            }
            Err(i) => {
                let value = change(None);
                let added = count_of(&value);
                leaf.keys.insert(i, key);
                leaf.values.reserve_exact(1);
                leaf.values.insert(i, value);
                Upserted {
                    added,
                    removed: Counts::default(),
                    split: leaf.split_if_large(i),
                }
            }
        },
        Node::Inner(inner) => {
            let i = inner.child_of(key);
            let mut done = upsert(&mut inner.children[i], key, change);
            inner.counts[i] += done.added;
            inner.counts[i] -= done.removed;
            if let Some(split) = done.split.take() {
                inner.counts[i] -= split.counts;
                inner.separators.insert(i, &split.separator);
                inner.children.insert(i + 1, split.right);
                inner.counts.insert(i + 1, split.counts);
                done.split = inner.split_if_large(i + 1);
            }
            done
        }
    }
}

/// Where to cut a node of `len` that grew at `grown`: keys that arrive in order would otherwise leave every node half full.
fn cut_of(len: usize, grown: usize) -> usize {
    if grown + 1 == len { len - 1 } else { len / 2 }
}

impl<V: Live> Leaf<V> {
    fn split_if_large(&mut self, grown: usize) -> Option<Split<V>> {
        let len = self.values.len();
        if len <= ENTRIES_MAX && (self.keys.bytes.len() <= KEY_BYTES_MAX || len < 2) {
            return None;
        }
        let at = cut_of(len, grown);
        let right = Leaf {
            keys: self.keys.split_off(at),
            values: self.values.split_off(at),
        };
        let mut counts = Counts::default();
        for value in &right.values {
            counts += count_of(value);
        }
        Some(Split {
            separator: right.keys.get(0).to_vec(),
            right: Arc::new(Node::Leaf(right)),
            counts,
        })
    }
}

impl<V> Inner<V> {
    fn split_if_large(&mut self, grown: usize) -> Option<Split<V>> {
        if !self.is_too_large() {
            return None;
        }
        // Both halves keep two children, so that neither is a mere link.
        let len = self.children.len();
        let at = cut_of(len, grown).clamp(2, len - 2);
        let separator = self.separators.get(at - 1).to_vec();
        let right = Inner {
            separators: self.separators.split_off(at),
            children: self.children.split_off(at),
            counts: self.counts.split_off(at),
        };
        self.separators.remove(at - 1);
        let counts = right.total();
        Some(Split {
            separator,
            right: Arc::new(Node::Inner(right)),
            counts,
        })
    }
}

/// Removes a key that is there.
fn remove<V: Live + Clone>(node: &mut Arc<Node<V>>, key: &[u8]) -> V {
    match Arc::make_mut(node) {
        Node::Leaf(leaf) => {
            let i = leaf
                .keys
                .search(key)
                .expect("the caller has looked the key up");
            leaf.keys.remove(i);
            leaf.values.remove(i)
        }
        Node::Inner(inner) => {
            let i = inner.child_of(key);
            let value = remove(&mut inner.children[i], key);
            inner.counts[i] -= count_of(&value);
            if inner.counts[i].all == 0 {
                inner.drop_child(i);
            } else if i + 1 < inner.children.len() {
                inner.merge_if_small(i);
            } else if i > 0 {
                inner.merge_if_small(i - 1);
            }
            value
        }
    }
}

impl<V: Clone> Inner<V> {
    /// Joins child `i` with its right neighbour when both fit in one.
    fn merge_if_small(&mut self, i: usize) {
        let (left, right) = self.children.split_at_mut(i + 1);
        let (left, right) = (&mut left[i], &right[0]);
        let fits = match (&**left, &**right) {
            (Node::Leaf(a), Node::Leaf(b)) => {
                a.values.len() + b.values.len() <= ENTRIES_MERGED_MAX
                    && a.keys.bytes.len() + b.keys.bytes.len() <= KEY_BYTES_MAX
            }
            (Node::Inner(a), Node::Inner(b)) => {
                a.children.len() + b.children.len() <= ENTRIES_MERGED_MAX
                    && a.separators.bytes.len() + b.separators.bytes.len() <= KEY_BYTES_MAX / 2
            }
            _ => unreachable!("all leaves lie at one depth"),
        };
        if !fits {
            return;
        }
        match (Arc::make_mut(left), &**right) {
            (Node::Leaf(a), Node::Leaf(b)) => {
                a.keys.append(&b.keys);
                a.values.extend_from_slice(&b.values);
            }
            (Node::Inner(a), Node::Inner(b)) => {
                a.separators.push(self.separators.get(i));
                a.separators.append(&b.separators);
                a.children.extend_from_slice(&b.children);
                a.counts.extend_from_slice(&b.counts);
            }
            _ => unreachable!("all leaves lie at one depth"),
        }
        let right = self.counts[i + 1];
        self.counts[i] += right;
        self.drop_child(i + 1);
    }
}

/// Entries in ascending order.
#[derive(Debug)]
pub struct Iter<'a, V> {
    /// The inner nodes above the leaf, each with the child to visit next.
    path: Vec<(&'a Inner<V>, usize)>,
    leaf: Option<(&'a Leaf<V>, usize)>,
    live_only: bool,
}

impl<'a, V: Live> Iter<'a, V> {
    fn new(tree: &'a Tree<V>, start: &[u8], live_only: bool) -> Self {
        let mut iter = Self {
            path: Vec::with_capacity(8),
            leaf: None,
            live_only,
        };
        let mut node = &*tree.root;
        loop {
            match node {
                Node::Leaf(leaf) => {
                    let (Ok(i) | Err(i)) = leaf.keys.search(start);
                    iter.leaf = Some((leaf, i));
                    return iter;
                }
                Node::Inner(inner) => {
                    let i = inner.child_of(start);
                    iter.path.push((inner, i + 1));
                    node = &inner.children[i];
                }
            }
        }
    }

    /// Goes to the next leaf that may hold something.
    fn advance(&mut self) -> Option<&'a Leaf<V>> {
        loop {
            let (inner, next) = self.path.last_mut()?;
            let inner: &'a Inner<V> = inner;
            while self.live_only && inner.counts.get(*next).is_some_and(|c| c.live == 0) {
                *next += 1;
            }
            let Some(child) = inner.children.get(*next) else {
                self.path.pop();
                continue;
            };
            *next += 1;
            match &**child {
                Node::Leaf(leaf) => {
                    self.leaf = Some((leaf, 0));
                    return Some(leaf);
                }
                Node::Inner(inner) => self.path.push((inner, 0)),
            }
        }
    }
}

impl<'a, V: Live> Iterator for Iter<'a, V> {
    type Item = (&'a [u8], &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (leaf, i) = self.leaf.as_mut()?;
            let leaf: &'a Leaf<V> = leaf;
            if let Some(value) = leaf.values.get(*i) {
                let at = *i;
                *i += 1;
                if self.live_only && !value.is_live() {
                    continue;
                }
                return Some((leaf.keys.get(at), value));
            }
            if self.advance().is_none() {
                self.leaf = None;
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests;
