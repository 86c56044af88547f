//! A reader of any bbolt file, page by page.
//!
//! Promises: every number read from the file is checked before it is used as a place or a length; an error names the file
//! and the byte. Keys come in strictly ascending order within the bounds their branches give, or there is an error: so a
//! loop among pages ends too. At most one page of each level is held (a page with its overflow pages).
//! Not here: pages that nothing reaches (`check.rs`).
//!
//! etcd: bbolt's page.go and cursor.go, without the memory map.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::{
    BUCKET_HEADER, ELEMENT, ELEMENT_BUCKET, FLAG_BRANCH, FLAG_FREELIST, FLAG_LEAF, Handed,
    META_BYTES, Meta, NO_FREELIST, PAGE_HEADER, u16_at, u32_at, u64_at,
};
use crate::error::StorageError;

/// A tree with two children a branch and 2^64 pages is lower than this.
const DEPTH_MAX: usize = 64;
/// bbolt's own list of page sizes to look for the second meta page at: 1 KiB to 32 MiB, of which we allow up to 1 MiB.
const PAGE_SIZE_SHIFTS: std::ops::RangeInclusive<u32> = 9..=20;

/// A database open for reading.
#[derive(Debug)]
pub struct BoltFile {
    file: File,
    path: PathBuf,
    meta: Meta,
}

/// A bucket's place in the file.
#[derive(Clone, Debug)]
pub struct Bucket {
    place: Place,
    sequence: u64,
}

#[derive(Clone, Debug)]
enum Place {
    Page(u64),
    /// A leaf page inside of an element, and where in the file.
    Inline {
        page: Bytes,
        offset: u64,
    },
}

/// What a key holds.
#[derive(Clone, Debug)]
pub enum Value {
    Bytes(Bytes),
    Bucket(Bucket),
}

impl Bucket {
    /// The counter that bbolt keeps for users of a bucket.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Its first page; None when it lies inline.
    pub(super) fn root_page(&self) -> Option<u64> {
        match self.place {
            Place::Page(page) => Some(page),
            Place::Inline { .. } => None,
        }
    }
}

impl BoltFile {
    /// Opens a file for reading and checks its meta pages.
    pub fn open(path: &Path) -> Result<Self, StorageError> {
        let file = File::open(path).map_err(|source| StorageError::io("open", path, source))?;
        Self::from_file(file, path)
    }

    /// `path` is for messages.
    pub fn from_file(file: File, path: &Path) -> Result<Self, StorageError> {
        let len = file
            .metadata()
            .map_err(|source| StorageError::io("stat", path, source))?
            .len();
        let damaged = |offset, what: String| StorageError::Damaged {
            path: path.to_owned(),
            offset,
            what,
        };
        let meta = find_meta(&file, len).map_err(|what| damaged(0, what.to_owned()))?;
        let page_size = u64::from(meta.page_size);
        if meta.high_water > len / page_size {
            let what = format!(
                "it ends before page {}, the high-water mark of its meta page",
                meta.high_water
            );
            return Err(damaged(len, what));
        }
        let is_page = |page| (2..meta.high_water).contains(&page);
        if !is_page(meta.root) {
            return Err(damaged(0, format!("root bucket at page {}", meta.root)));
        }
        if meta.freelist != NO_FREELIST && !is_page(meta.freelist) {
            return Err(damaged(0, format!("free list at page {}", meta.freelist)));
        }
        Ok(Self {
            file,
            path: path.to_owned(),
            meta,
        })
    }

    /// Bytes of the database, without whatever follows it in the file.
    pub fn size(&self) -> u64 {
        self.meta.high_water * u64::from(self.meta.page_size)
    }

    pub fn page_size(&self) -> u32 {
        self.meta.page_size
    }

    /// Of the newest transaction in the file.
    pub fn txid(&self) -> u64 {
        self.meta.txid
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bucket of all buckets.
    pub fn root(&self) -> Bucket {
        Bucket {
            place: Place::Page(self.meta.root),
            sequence: self.meta.sequence,
        }
    }

    /// A top-level bucket by name.
    pub fn bucket(&self, name: &[u8]) -> Result<Option<Bucket>, StorageError> {
        let mut buckets = self.cursor(&self.root());
        while let Some((key, value)) = buckets.next()? {
            if let Value::Bucket(bucket) = value
                && key == name
            {
                return Ok(Some(bucket));
            }
        }
        Ok(None)
    }

    /// The entries of a bucket, ascending.
    pub fn cursor(&self, bucket: &Bucket) -> Cursor<'_> {
        Cursor {
            file: self,
            start: Some(bucket.place.clone()),
            stack: Vec::new(),
            last_key: None,
            seen: None,
        }
    }

    /// As [`cursor`](Self::cursor), and notes each page it visits; a page noted before is an error.
    pub(super) fn cursor_noting<'a>(
        &'a self,
        bucket: &Bucket,
        seen: &'a RefCell<PageSet>,
    ) -> Cursor<'a> {
        Cursor {
            seen: Some(seen),
            ..self.cursor(bucket)
        }
    }

    /// Whether the leaves of a bucket are those that were handed on, all of them and in their order. Reads its branches alone. None when the
    /// bucket lies inline.
    pub(crate) fn has_leaves(
        &self,
        bucket: &Bucket,
        handed: &Handed,
    ) -> Result<Option<bool>, StorageError> {
        let Place::Page(root) = bucket.place else {
            return Ok(None);
        };
        let mut walk = Walk { last: 0, count: 0 };
        let all = self.walk(root, handed, &mut walk, 0)?;
        Ok(Some(all && walk.count == handed.count))
    }

    fn walk(
        &self,
        id: u64,
        handed: &Handed,
        walk: &mut Walk,
        depth: usize,
    ) -> Result<bool, StorageError> {
        if !(2..self.meta.high_water).contains(&id) || depth == DEPTH_MAX {
            return Err(self.damaged(0, format!("a reference to page {id}")));
        }
        if handed.contains(id) {
            // Ascending, so each is met once and a loop ends.
            let ascends = id > walk.last;
            walk.last = id;
            walk.count += 1;
            return Ok(ascends);
        }
        let page = self.page(id)?;
        let damaged = |what| self.damaged(page.offset, what);
        if page.is_leaf().map_err(damaged)? {
            return Ok(false);
        }
        for index in 0..page.count {
            let (_, child) = page.branch(index).map_err(damaged)?;
            if !self.walk(child, handed, walk, depth + 1)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn high_water(&self) -> u64 {
        self.meta.high_water
    }

    /// None when the file has none.
    pub(super) fn freelist(&self) -> Result<Option<FreeList>, StorageError> {
        if self.meta.freelist == NO_FREELIST {
            return Ok(None);
        }
        let page = self.page(self.meta.freelist)?;
        if page.flags != FLAG_FREELIST {
            return Err(self.damaged(page.offset, "a page that is no free list"));
        }
        // 0xFFFF says that the count did not fit: it is the first number then.
        let (count, start) = if page.count == 0xFFFF {
            if page.bytes.len() < PAGE_HEADER + 8 {
                return Err(self.damaged(page.offset, "a free list beyond its pages"));
            }
            (u64_at(&page.bytes, PAGE_HEADER), PAGE_HEADER + 8)
        } else {
            (page.count as u64, PAGE_HEADER)
        };
        if count > ((page.bytes.len() - start) / 8) as u64 {
            return Err(self.damaged(page.offset, "a free list beyond its pages"));
        }
        let ids = (0..count as usize)
            .map(|i| u64_at(&page.bytes, start + i * 8))
            .collect();
        let pages = page.bytes.len() as u64 / u64::from(self.meta.page_size);
        Ok(Some(FreeList {
            own: self.meta.freelist..self.meta.freelist + pages,
            ids,
        }))
    }

    /// A page with its overflow pages. Checks the header only.
    fn page(&self, id: u64) -> Result<Page, StorageError> {
        let size = u64::from(self.meta.page_size);
        if !(2..self.meta.high_water).contains(&id) {
            return Err(self.damaged(0, format!("a reference to page {id}")));
        }
        // The high-water mark lies within the file, so neither product overflows.
        let offset = id * size;
        let mut bytes = vec![0; size as usize];
        self.read(&mut bytes, offset)?;
        let overflow = u64::from(u32_at(&bytes, 12));
        if u64_at(&bytes, 0) != id {
            let what = format!("page {id} is marked as page {}", u64_at(&bytes, 0));
            return Err(self.damaged(offset, what));
        }
        if overflow >= self.meta.high_water - id {
            let what = format!("page {id} with {overflow} overflow pages");
            return Err(self.damaged(offset, what));
        }
        if overflow > 0 {
            bytes.resize(((overflow + 1) * size) as usize, 0);
            self.read(&mut bytes[size as usize..], offset + size)?;
        }
        Page::parse(Bytes::from(bytes), offset).map_err(|what| self.damaged(offset, what))
    }

    fn read(&self, bytes: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.file
            .read_exact_at(bytes, offset)
            .map_err(|source| StorageError::io("read", &self.path, source))
    }

    pub(crate) fn damaged(&self, offset: u64, what: impl Into<String>) -> StorageError {
        StorageError::Damaged {
            path: self.path.clone(),
            offset,
            what: what.into(),
        }
    }
}

/// Leaves met on a walk over branches.
struct Walk {
    last: u64,
    count: u64,
}

/// The meta page of the later transaction, of those that are whole.
fn find_meta(file: &File, len: u64) -> Result<Meta, &'static str> {
    let read = |offset: u64| {
        let mut bytes = [0; META_BYTES];
        if offset + (PAGE_HEADER + META_BYTES) as u64 > len {
            return Err("a file too short for a database");
        }
        file.read_exact_at(&mut bytes, offset + PAGE_HEADER as u64)
            .map_err(|_| "a meta page that cannot be read")?;
        Meta::from_bytes(&bytes)
    };
    let second = |page_size: u64| {
        read(page_size).and_then(|meta| {
            if u64::from(meta.page_size) == page_size {
                Ok(meta)
            } else {
                Err("a meta page of another page size")
            }
        })
    };
    match read(0) {
        Ok(first) => Ok(match second(u64::from(first.page_size)) {
            Ok(second) if second.txid > first.txid => second,
            _ => first,
        }),
        Err(what) => PAGE_SIZE_SHIFTS
            .map(|shift| second(1 << shift))
            .find_map(Result::ok)
            .ok_or(what),
    }
}

/// The free list as written.
#[derive(Debug)]
pub(super) struct FreeList {
    /// The pages it lies on.
    pub(super) own: std::ops::Range<u64>,
    /// The pages free by it.
    pub(super) ids: Vec<u64>,
}

/// Pages visited: a bit for each up to the last of them.
#[derive(Debug, Default)]
pub(super) struct PageSet {
    bits: Vec<u64>,
}

impl PageSet {
    /// True when it was not there.
    pub(super) fn insert(&mut self, page: u64) -> bool {
        let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        let new = self.bits[word] & bit == 0;
        self.bits[word] |= bit;
        new
    }

    pub(super) fn contains(&self, page: u64) -> bool {
        (self.bits.get((page / 64) as usize)).is_some_and(|word| word & (1 << (page % 64)) != 0)
    }
}

/// A page in memory, its header read.
#[derive(Clone, Debug)]
pub(super) struct Page {
    bytes: Bytes,
    /// In the file.
    offset: u64,
    flags: u16,
    count: usize,
}

#[derive(Debug)]
pub(super) struct LeafElement {
    pub(super) is_bucket: bool,
    pub(super) key: Bytes,
    pub(super) value: Bytes,
    value_offset: u64,
}

impl Page {
    /// `bytes` holds a header; checks that the element table of a branch or leaf fits.
    pub(super) fn parse(bytes: Bytes, offset: u64) -> Result<Self, String> {
        let (flags, count) = (u16_at(&bytes, 8), usize::from(u16_at(&bytes, 10)));
        if flags != FLAG_FREELIST && PAGE_HEADER + count * ELEMENT > bytes.len() {
            return Err(format!("a page of {count} elements, more than it can hold"));
        }
        Ok(Self {
            bytes,
            offset,
            flags,
            count,
        })
    }

    fn is_leaf(&self) -> Result<bool, String> {
        match self.flags {
            FLAG_LEAF => Ok(true),
            FLAG_BRANCH => Ok(false),
            flags => Err(format!("a page of type {flags:#x} in a bucket")),
        }
    }

    /// Bytes `pos..pos + len`, counted from the element at `element`.
    fn slice(&self, element: usize, pos: usize, len: usize) -> Result<Bytes, String> {
        let start = element + pos;
        let end = start.checked_add(len);
        match end {
            Some(end) if start >= PAGE_HEADER + self.count * ELEMENT && end <= self.bytes.len() => {
                Ok(self.bytes.slice(start..end))
            }
            _ => Err(format!(
                "an element of {len} bytes at {start} of a page of {}",
                self.bytes.len()
            )),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn leaf(&self, index: usize) -> Result<LeafElement, String> {
        let at = PAGE_HEADER + index * ELEMENT;
        let flags = u32_at(&self.bytes, at);
        let pos = u32_at(&self.bytes, at + 4) as usize;
        let key_len = u32_at(&self.bytes, at + 8) as usize;
        let value_len = u32_at(&self.bytes, at + 12) as usize;
        let key = self.slice(at, pos, key_len)?;
        let value_pos = pos + key_len;
        Ok(LeafElement {
            is_bucket: flags & ELEMENT_BUCKET != 0,
            key,
            value: self.slice(at, value_pos, value_len)?,
            value_offset: self.offset + (at + value_pos) as u64,
        })
    }

    /// Key and child.
    fn branch(&self, index: usize) -> Result<(Bytes, u64), String> {
        let at = PAGE_HEADER + index * ELEMENT;
        let pos = u32_at(&self.bytes, at) as usize;
        let key_len = u32_at(&self.bytes, at + 4) as usize;
        Ok((self.slice(at, pos, key_len)?, u64_at(&self.bytes, at + 8)))
    }
}

/// Entries of one bucket, ascending.
#[derive(Debug)]
pub struct Cursor<'a> {
    file: &'a BoltFile,
    start: Option<Place>,
    stack: Vec<Frame>,
    last_key: Option<Bytes>,
    seen: Option<&'a RefCell<PageSet>>,
}

#[derive(Debug)]
struct Frame {
    page: Page,
    is_leaf: bool,
    next: usize,
    /// What the branches above say of the keys below: `min <= key < max`.
    min: Option<Bytes>,
    max: Option<Bytes>,
}

impl Cursor<'_> {
    /// The next key and what it holds. After an error the cursor is at its end.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator of results would have to say what follows an error"
    )]
    pub fn next(&mut self) -> Result<Option<(Bytes, Value)>, StorageError> {
        let next = self.advance();
        if next.is_err() {
            self.start = None;
            self.stack.clear();
        }
        next
    }

    fn advance(&mut self) -> Result<Option<(Bytes, Value)>, StorageError> {
        if let Some(place) = self.start.take() {
            match place {
                Place::Page(id) => self.descend(id, None, None)?,
                Place::Inline { page, offset } => {
                    let page = Page::parse(page, offset)
                        .map_err(|what| self.file.damaged(offset, what))?;
                    if page.flags != FLAG_LEAF {
                        let what = "an inline bucket that is no leaf page";
                        return Err(self.file.damaged(offset, what));
                    }
                    self.stack.push(Frame {
                        page,
                        is_leaf: true,
                        next: 0,
                        min: None,
                        max: None,
                    });
                }
            }
        }
        while let Some(frame) = self.stack.last_mut() {
            if frame.next == frame.page.count {
                self.stack.pop();
                continue;
            }
            let index = frame.next;
            frame.next += 1;
            if frame.is_leaf {
                return self.entry(index).map(Some);
            }
            let (id, min, max) = self.child(index)?;
            self.descend(id, Some(min), max)?;
        }
        Ok(None)
    }

    /// The child at `index` of the branch on top, with the bounds of its keys.
    fn child(&self, index: usize) -> Result<(u64, Bytes, Option<Bytes>), StorageError> {
        let frame = self.top();
        let damaged = |what: String| self.file.damaged(frame.page.offset, what);
        let (key, id) = frame.page.branch(index).map_err(damaged)?;
        let max = if index + 1 < frame.page.count {
            Some(frame.page.branch(index + 1).map_err(damaged)?.0)
        } else {
            frame.max.clone()
        };
        // The keys below bound the rest: `min` is passed down and `max` of one child is `min` of the next.
        if max.as_ref().is_some_and(|max| key >= *max) {
            return Err(damaged(format!("branch key {index} out of order")));
        }
        if index == 0 && frame.min.as_ref().is_some_and(|min| key < *min) {
            return Err(damaged("a branch key below its parent's".to_owned()));
        }
        Ok((id, key, max))
    }

    fn descend(
        &mut self,
        id: u64,
        min: Option<Bytes>,
        max: Option<Bytes>,
    ) -> Result<(), StorageError> {
        let page = self.file.page(id)?;
        if let Some(seen) = self.seen {
            let pages = page.bytes.len() as u64 / u64::from(self.file.meta.page_size);
            for id in id..id + pages {
                if !seen.borrow_mut().insert(id) {
                    let what = format!("page {id}: multiple references");
                    return Err(self.file.damaged(page.offset, what));
                }
            }
        }
        let is_leaf = page
            .is_leaf()
            .map_err(|what| self.file.damaged(page.offset, what))?;
        // Only a bucket's root may be empty: then it is a leaf.
        if page.count == 0 && !(is_leaf && self.stack.is_empty()) {
            return Err(self.file.damaged(page.offset, "an empty page in a tree"));
        }
        if self.stack.len() == DEPTH_MAX {
            return Err(self.file.damaged(page.offset, "a loop among branch pages"));
        }
        self.stack.push(Frame {
            page,
            is_leaf,
            next: 0,
            min,
            max,
        });
        Ok(())
    }

    fn entry(&mut self, index: usize) -> Result<(Bytes, Value), StorageError> {
        let frame = self.top();
        let offset = frame.page.offset;
        let leaf = frame
            .page
            .leaf(index)
            .map_err(|what| self.file.damaged(offset, what))?;
        if self.last_key.as_ref().is_some_and(|last| leaf.key <= *last)
            || frame.min.as_ref().is_some_and(|min| leaf.key < *min)
            || frame.max.as_ref().is_some_and(|max| leaf.key >= *max)
        {
            let what = format!("key {index} of a leaf out of order");
            return Err(self.file.damaged(offset, what));
        }
        self.last_key = Some(leaf.key.clone());
        let value = if leaf.is_bucket {
            Value::Bucket(self.bucket(&leaf)?)
        } else {
            Value::Bytes(leaf.value)
        };
        Ok((leaf.key, value))
    }

    fn bucket(&self, leaf: &LeafElement) -> Result<Bucket, StorageError> {
        if leaf.value.len() < BUCKET_HEADER {
            let what = "a bucket's element too short for its header";
            return Err(self.file.damaged(leaf.value_offset, what));
        }
        let place = match u64_at(&leaf.value, 0) {
            0 if leaf.value.len() < BUCKET_HEADER + PAGE_HEADER => {
                let what = "an inline bucket too short for its page";
                return Err(self.file.damaged(leaf.value_offset, what));
            }
            0 => Place::Inline {
                page: leaf.value.slice(BUCKET_HEADER..),
                offset: leaf.value_offset + BUCKET_HEADER as u64,
            },
            page => Place::Page(page),
        };
        Ok(Bucket {
            place,
            sequence: u64_at(&leaf.value, 8),
        })
    }

    fn top(&self) -> &Frame {
        self.stack
            .last()
            .expect("the caller has just looked at the top frame")
    }
}
