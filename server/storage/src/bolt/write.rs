//! A sorted bulk writer of bbolt files that streams.
//!
//!     lengths --> Planner --> Plan (file length, root page) --+
//!     keys and values --------------------------------------> Writer --> bytes, first to last
//!
//! Both passes run the same tree builder, the first over lengths alone, so that they cannot disagree about a page. The
//! meta pages come first in the file and need the root's page and the high-water mark: hence two passes and no seek. A writer without a plan
//! gives the meta pages at its end instead, for a reader that can put them in their place.
//!
//! Promises: memory is one page per level of the tree (and one entry, if it is larger); each branch page has two children
//! or more, since bbolt panics when it later deletes below a branch with one.
//! Not here: changing a file in place.
//!
//! etcd: bbolt's node.go (spill) and bucket.go (inline buckets).

use bytes::{BufMut, Bytes, BytesMut};

use super::{
    BUCKET_HEADER, ELEMENT, ELEMENT_BUCKET, FLAG_BRANCH, FLAG_FREELIST, FLAG_LEAF, FLAG_META,
    KEY_LEN_MAX, Meta, PAGE_HEADER, PAGE_SIZE, VALUE_LEN_MAX,
};

/// A bucket of one leaf no larger than this lies inside its parent's element, as bbolt has it.
const INLINE_MAX: usize = PAGE_SIZE / 4;
/// A file begins with so many.
pub const META_PAGES: u64 = 2;
const FREELIST_PAGE: u64 = META_PAGES;
/// Of the trees.
const FIRST_PAGE: u64 = FREELIST_PAGE + 1;
/// Room made at once for the pages that come.
const RESERVE_BYTES: usize = 256 * 1024;
/// Of the number of further pages, in a page's header.
const OVERFLOW_AT: usize = 12;

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("{what} is not greater than the one before")]
    Order { what: &'static str },
    #[error("a key of {0} bytes, allowed are 1 to {KEY_LEN_MAX}")]
    KeyLen(usize),
    #[error("a value of {0} bytes, allowed are {VALUE_LEN_MAX}")]
    ValueLen(usize),
    #[error("an entry outside of a bucket")]
    NoBucket,
    /// The second pass was given other lengths than the first.
    #[error("the data changed between the two passes: {pages} pages against {planned} planned")]
    Changed { pages: u64, planned: u64 },
}

/// What the first pass found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    root: u64,
    high_water: u64,
}

impl Plan {
    /// Bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        self.high_water * PAGE_SIZE as u64
    }
}

/// The first pass: lengths in, plan out.
#[derive(Debug)]
pub struct Planner {
    builder: Builder<Len>,
    counter: Counter,
}

impl Default for Planner {
    fn default() -> Self {
        Self::new()
    }
}

impl Planner {
    pub fn new() -> Self {
        Self {
            builder: Builder::new(),
            counter: Counter { next: FIRST_PAGE },
        }
    }

    /// Ends the bucket before. Names ascend.
    pub fn begin_bucket(&mut self, name_len: usize) -> Result<(), WriteError> {
        self.builder.begin_bucket(Len(name_len), &mut self.counter)
    }

    pub fn entry(&mut self, key_len: usize, value_len: usize) -> Result<(), WriteError> {
        self.builder
            .entry(Len(key_len), Len(value_len), &mut self.counter)
    }

    pub fn finish(mut self) -> Result<Plan, WriteError> {
        let root = self.builder.finish(&mut self.counter)?;
        Ok(Plan {
            root,
            high_water: self.counter.next,
        })
    }
}

/// The second pass: entries in, the file's bytes out.
#[derive(Debug)]
pub struct Writer {
    builder: Builder<Bytes>,
    sink: PageSink,
    /// None when the meta pages come last.
    plan: Option<Plan>,
    /// The order is checked here, since lengths have none.
    last_bucket: Option<Bytes>,
    last_key: Bytes,
}

impl Writer {
    /// Writes the meta pages and the empty free list.
    pub fn new(plan: Plan) -> Self {
        let mut sink = PageSink::default();
        sink.metas(plan);
        Self::behind_metas(sink, Some(plan))
    }

    /// Begins behind the meta pages, which [`finish_with_metas`](Self::finish_with_metas) gives.
    pub fn without_plan() -> Self {
        Self::behind_metas(PageSink::default(), None)
    }

    fn behind_metas(mut sink: PageSink, plan: Option<Plan>) -> Self {
        sink.begin_page(FREELIST_PAGE, FLAG_FREELIST, 0);
        sink.end_page();
        Self {
            builder: Builder::new(),
            sink,
            plan,
            last_bucket: None,
            last_key: Bytes::new(),
        }
    }

    /// Ends the bucket before. Names ascend.
    pub fn begin_bucket(&mut self, name: Bytes) -> Result<(), WriteError> {
        if self.last_bucket.as_ref().is_some_and(|last| *last >= name) {
            return Err(WriteError::Order { what: "a bucket" });
        }
        self.last_bucket = Some(name.clone());
        self.last_key = Bytes::new();
        self.builder.begin_bucket(name, &mut self.sink)
    }

    /// Keys ascend within their bucket.
    pub fn entry(&mut self, key: Bytes, value: Bytes) -> Result<(), WriteError> {
        // The empty key sorts before all others and is refused by its length.
        if self.last_key >= key && !key.is_empty() {
            return Err(WriteError::Order { what: "a key" });
        }
        self.last_key = key.clone();
        self.builder.entry(key, value, &mut self.sink)
    }

    /// What has been written so far is here: a caller that pulls takes it out between entries.
    pub fn out_mut(&mut self) -> &mut BytesMut {
        &mut self.sink.out
    }

    /// The last pages.
    pub fn finish(self) -> Result<BytesMut, WriteError> {
        Ok(self.end()?.0)
    }

    /// The last pages, and the [`META_PAGES`] that belong before all.
    pub fn finish_with_metas(self) -> Result<(BytesMut, Bytes), WriteError> {
        let (rest, plan) = self.end()?;
        let mut first = PageSink::default();
        first.metas(plan);
        Ok((rest, first.out.freeze()))
    }

    fn end(mut self) -> Result<(BytesMut, Plan), WriteError> {
        let root = self.builder.finish(&mut self.sink)?;
        let found = Plan {
            root,
            high_water: self.sink.next,
        };
        match self.plan {
            Some(plan) if plan != found => Err(WriteError::Changed {
                pages: found.high_water,
                planned: plan.high_water,
            }),
            _ => Ok((self.sink.out, found)),
        }
    }
}

/// Bytes, or only how many.
trait Piece: Clone {
    fn len(&self) -> usize;
    /// The value of a bucket's element.
    fn bucket(root: u64, inline: &[Leaf<Self>]) -> Self;
}

#[derive(Clone, Copy, Debug)]
struct Len(usize);

impl Piece for Len {
    fn len(&self) -> usize {
        self.0
    }
    fn bucket(root: u64, inline: &[Leaf<Self>]) -> Self {
        Self(BUCKET_HEADER + if root == 0 { leaf_bytes(inline) } else { 0 })
    }
}

impl Piece for Bytes {
    fn len(&self) -> usize {
        self.as_ref().len()
    }
    fn bucket(root: u64, inline: &[Leaf<Self>]) -> Self {
        let mut value = BytesMut::with_capacity(BUCKET_HEADER + leaf_bytes(inline));
        value.put_u64_le(root);
        value.put_u64_le(0);
        if root == 0 {
            put_header(&mut value, 0, FLAG_LEAF, inline.len(), 0);
            put_leaves(&mut value, inline);
        }
        value.freeze()
    }
}

#[derive(Clone, Debug)]
struct Leaf<T> {
    is_bucket: bool,
    key: T,
    value: T,
}

#[derive(Clone, Debug)]
struct Branch<T> {
    key: T,
    child: u64,
}

fn leaf_bytes<T: Piece>(leaves: &[Leaf<T>]) -> usize {
    PAGE_HEADER
        + leaves
            .iter()
            .map(|leaf| ELEMENT + leaf.key.len() + leaf.value.len())
            .sum::<usize>()
}

fn branch_bytes<T: Piece>(branches: &[Branch<T>]) -> usize {
    PAGE_HEADER
        + branches
            .iter()
            .map(|branch| ELEMENT + branch.key.len())
            .sum::<usize>()
}

/// Where finished pages go; gives the page's number.
trait Pages<T> {
    fn leaf(&mut self, leaves: &[Leaf<T>]) -> u64;
    fn branch(&mut self, branches: &[Branch<T>]) -> u64;
}

/// The first pass's pages.
#[derive(Debug)]
struct Counter {
    next: u64,
}

impl Counter {
    fn take(&mut self, bytes: usize) -> u64 {
        let page = self.next;
        self.next += bytes.div_ceil(PAGE_SIZE) as u64;
        page
    }
}

impl Pages<Len> for Counter {
    fn leaf(&mut self, leaves: &[Leaf<Len>]) -> u64 {
        self.take(leaf_bytes(leaves))
    }
    fn branch(&mut self, branches: &[Branch<Len>]) -> u64 {
        self.take(branch_bytes(branches))
    }
}

/// The second pass's pages.
#[derive(Debug)]
struct PageSink {
    next: u64,
    /// Where in `out` the page being filled begins.
    begun: usize,
    out: BytesMut,
}

impl Default for PageSink {
    fn default() -> Self {
        Self {
            next: FIRST_PAGE,
            begun: 0,
            out: BytesMut::new(),
        }
    }
}

impl PageSink {
    fn metas(&mut self, plan: Plan) {
        for txid in 0..META_PAGES {
            self.begin_page(txid, FLAG_META, 0);
            let meta = Meta {
                page_size: PAGE_SIZE as u32,
                root: plan.root,
                sequence: 0,
                freelist: FREELIST_PAGE,
                high_water: plan.high_water,
                txid,
            };
            self.out.put_slice(&meta.to_bytes());
            self.end_page();
        }
    }

    fn begin_page(&mut self, id: u64, flags: u16, count: usize) {
        if self.out.capacity() - self.out.len() < PAGE_SIZE {
            self.out.reserve(RESERVE_BYTES);
        }
        self.begun = self.out.len();
        put_header(&mut self.out, id, flags, count, 0);
    }

    /// Pads the page and notes its overflow. Gives how many pages it takes.
    fn end_page(&mut self) -> u64 {
        let pages = (self.out.len() - self.begun).div_ceil(PAGE_SIZE);
        self.out.resize(self.begun + pages * PAGE_SIZE, 0);
        let overflow = self.begun + OVERFLOW_AT;
        self.out[overflow..overflow + 4].copy_from_slice(&(pages as u32 - 1).to_le_bytes());
        pages as u64
    }

    /// The same for a page of a tree, whose number it gives.
    fn end_numbered(&mut self) -> u64 {
        let id = self.next;
        self.next += self.end_page();
        id
    }
}

impl Pages<Bytes> for PageSink {
    fn leaf(&mut self, leaves: &[Leaf<Bytes>]) -> u64 {
        self.begin_page(self.next, FLAG_LEAF, leaves.len());
        put_leaves(&mut self.out, leaves);
        self.end_numbered()
    }

    fn branch(&mut self, branches: &[Branch<Bytes>]) -> u64 {
        self.begin_page(self.next, FLAG_BRANCH, branches.len());
        let mut at = branches.len() * ELEMENT;
        for (i, branch) in branches.iter().enumerate() {
            self.out.put_u32_le((at - i * ELEMENT) as u32);
            self.out.put_u32_le(branch.key.len() as u32);
            self.out.put_u64_le(branch.child);
            at += branch.key.len();
        }
        for branch in branches {
            self.out.put_slice(&branch.key);
        }
        self.end_numbered()
    }
}

fn put_header(out: &mut BytesMut, id: u64, flags: u16, count: usize, overflow: u32) {
    out.put_u64_le(id);
    out.put_u16_le(flags);
    out.put_u16_le(count as u16);
    out.put_u32_le(overflow);
}

fn put_leaves(out: &mut BytesMut, leaves: &[Leaf<Bytes>]) {
    let mut at = leaves.len() * ELEMENT;
    for (i, leaf) in leaves.iter().enumerate() {
        out.put_u32_le(if leaf.is_bucket { ELEMENT_BUCKET } else { 0 });
        out.put_u32_le((at - i * ELEMENT) as u32);
        out.put_u32_le(leaf.key.len() as u32);
        out.put_u32_le(leaf.value.len() as u32);
        at += leaf.key.len() + leaf.value.len();
    }
    for leaf in leaves {
        out.put_slice(&leaf.key);
        out.put_slice(&leaf.value);
    }
}

/// Buckets one after the other, and the root bucket of their names.
#[derive(Debug)]
struct Builder<T> {
    root: Tree<T>,
    open: Option<(T, Tree<T>)>,
}

impl<T: Piece> Builder<T> {
    fn new() -> Self {
        Self {
            root: Tree::new(),
            open: None,
        }
    }

    fn begin_bucket(&mut self, name: T, out: &mut impl Pages<T>) -> Result<(), WriteError> {
        check_key(name.len())?;
        self.end_bucket(out)?;
        self.open = Some((name, Tree::new()));
        Ok(())
    }

    fn entry(&mut self, key: T, value: T, out: &mut impl Pages<T>) -> Result<(), WriteError> {
        check_key(key.len())?;
        if value.len() > VALUE_LEN_MAX {
            return Err(WriteError::ValueLen(value.len()));
        }
        let (_, tree) = self.open.as_mut().ok_or(WriteError::NoBucket)?;
        let leaf = Leaf {
            is_bucket: false,
            key,
            value,
        };
        tree.add(leaf, out)
    }

    /// The root bucket's pages interleave with its buckets' when there are many: page numbers are given as pages are done.
    fn end_bucket(&mut self, out: &mut impl Pages<T>) -> Result<(), WriteError> {
        let Some((name, tree)) = self.open.take() else {
            return Ok(());
        };
        let value = if tree.levels.is_empty() && leaf_bytes(&tree.leaf) <= INLINE_MAX {
            T::bucket(0, &tree.leaf)
        } else {
            T::bucket(tree.finish(out)?, &[])
        };
        let leaf = Leaf {
            is_bucket: true,
            key: name,
            value,
        };
        self.root.add(leaf, out)
    }

    /// The page of the root bucket, which is never inline.
    fn finish(&mut self, out: &mut impl Pages<T>) -> Result<u64, WriteError> {
        self.end_bucket(out)?;
        std::mem::replace(&mut self.root, Tree::new()).finish(out)
    }
}

fn check_key(len: usize) -> Result<(), WriteError> {
    if len == 0 || len > KEY_LEN_MAX {
        return Err(WriteError::KeyLen(len));
    }
    Ok(())
}

/// One bucket's pages from the leaves up: each level holds the page it is filling.
#[derive(Debug)]
struct Tree<T> {
    leaf: Vec<Leaf<T>>,
    leaf_bytes: usize,
    levels: Vec<Vec<Branch<T>>>,
}

impl<T: Piece> Tree<T> {
    fn new() -> Self {
        Self {
            leaf: Vec::new(),
            leaf_bytes: PAGE_HEADER,
            levels: Vec::new(),
        }
    }

    fn add(&mut self, leaf: Leaf<T>, out: &mut impl Pages<T>) -> Result<(), WriteError> {
        let bytes = ELEMENT + leaf.key.len() + leaf.value.len();
        if !self.leaf.is_empty() && self.leaf_bytes + bytes > PAGE_SIZE {
            self.flush_leaf(out)?;
        }
        self.leaf.push(leaf);
        self.leaf_bytes += bytes;
        Ok(())
    }

    /// A leaf is flushed when another entry follows or at the end after such a flush: levels 0 has two children at least.
    fn flush_leaf(&mut self, out: &mut impl Pages<T>) -> Result<(), WriteError> {
        let child = out.leaf(&self.leaf);
        let key = self.leaf[0].key.clone();
        self.leaf.clear();
        self.leaf_bytes = PAGE_HEADER;
        self.add_branch(0, Branch { key, child }, out)
    }

    /// A full branch leaves its last child to the next one, so that neither ever has fewer than two.
    fn add_branch(
        &mut self,
        level: usize,
        branch: Branch<T>,
        out: &mut impl Pages<T>,
    ) -> Result<(), WriteError> {
        if self.levels.len() == level {
            self.levels.push(Vec::new());
        }
        let here = &mut self.levels[level];
        let bytes = branch_bytes(here) + ELEMENT + branch.key.len();
        if here.len() >= 3 && bytes > PAGE_SIZE {
            let kept = here.split_off(here.len() - 1);
            let full = std::mem::replace(here, kept);
            let child = out.branch(&full);
            let key = full[0].key.clone();
            self.add_branch(level + 1, Branch { key, child }, out)?;
        }
        self.levels[level].push(branch);
        Ok(())
    }

    /// The page of the bucket's root.
    fn finish(mut self, out: &mut impl Pages<T>) -> Result<u64, WriteError> {
        if self.levels.is_empty() {
            return Ok(out.leaf(&self.leaf));
        }
        self.flush_leaf(out)?;
        let mut level = 0;
        loop {
            let last = std::mem::take(&mut self.levels[level]);
            debug_assert!(last.len() >= 2, "a branch with one child");
            let child = out.branch(&last);
            if level + 1 == self.levels.len() {
                return Ok(child);
            }
            let key = last[0].key.clone();
            self.add_branch(level + 1, Branch { key, child }, out)?;
            level += 1;
        }
    }
}
