//! A file of ours as it arrives, front to back: leaves of records are handed on, all else goes to the file.
//!
//! What was handed on is a hole in the file. The branches above it are there, and say afterwards whether it was all: `BoltFile::has_leaves`.
//!
//! Promises: no more than a page with its overflow pages is held; a number of the stream is checked before it is used as a length.
//!
//! etcd: none; it renames the file.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};

use super::read::{Page, PageSet};
use super::{BoltFile, FLAG_LEAF, PAGE_SIZE, u16_at, u32_at, u64_at};
use crate::error::StorageError;

/// Takes a record's key and value.
pub type Each<'a> = &'a mut dyn FnMut(&Bytes, Bytes) -> Result<(), StorageError>;

/// Pages of a file that is being received.
#[derive(Debug)]
pub struct Arriving {
    file: File,
    path: PathBuf,
    /// The page that comes next, and how many there are.
    next: u64,
    pages: u64,
    /// What has come of it.
    begun: BytesMut,
    /// Leaves among these pages hold records.
    records: Range<u64>,
    handed_on: Handed,
}

/// The leaves that were handed on.
#[derive(Debug)]
pub struct Handed {
    seen: PageSet,
    pub(crate) count: u64,
}

impl Handed {
    pub(super) fn contains(&self, page: u64) -> bool {
        self.seen.contains(page)
    }
}

impl Arriving {
    /// `size` of the whole file; leaves of records lie among the pages `records`, nowhere when that is empty.
    pub fn new(path: &Path, size: u64, records: Range<u64>) -> Result<Self, StorageError> {
        let pages = size / PAGE_SIZE as u64;
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = options
            .open(path)
            .map_err(|e| StorageError::io("create", path, e))?;
        // What is handed on leaves a hole, at the end too.
        file.set_len(size)
            .map_err(|e| StorageError::io("create", path, e))?;
        Ok(Self {
            file,
            path: path.to_owned(),
            next: 0,
            pages,
            begun: BytesMut::new(),
            records,
            handed_on: Handed {
                seen: PageSet::new(pages),
                count: 0,
            },
        })
    }

    /// Takes the next bytes.
    pub fn take(&mut self, bytes: &[u8], each: Each<'_>) -> Result<(), StorageError> {
        self.begun.extend_from_slice(bytes);
        while let Some(bytes) = self.whole_page()? {
            let id = self.next;
            let len = bytes.len();
            let is_record_leaf = self.records.contains(&id)
                && u64_at(&bytes, 0) == id
                && u16_at(&bytes, 8) == FLAG_LEAF;
            let handed_on = is_record_leaf && self.hand_on(id, bytes.clone(), each)?;
            if !handed_on {
                self.file
                    .write_all_at(&bytes, id * PAGE_SIZE as u64)
                    .map_err(|e| StorageError::io("write", &self.path, e))?;
            }
            self.next += (len / PAGE_SIZE) as u64;
        }
        Ok(())
    }

    /// The next page with its overflow pages, once all of it has come.
    fn whole_page(&mut self) -> Result<Option<Bytes>, StorageError> {
        if self.begun.len() < PAGE_SIZE {
            return Ok(None);
        }
        let further = u64::from(u32_at(&self.begun, 12));
        if self.next + further >= self.pages {
            let what = format!("page {} with {further} overflow pages", self.next);
            return Err(self.damaged(what));
        }
        let len = (further as usize + 1) * PAGE_SIZE;
        if self.begun.len() < len {
            return Ok(None);
        }
        Ok(Some(self.begun.split_to(len).freeze()))
    }

    /// False for a leaf of buckets, which the root bucket may have among them.
    fn hand_on(&mut self, id: u64, bytes: Bytes, each: Each<'_>) -> Result<bool, StorageError> {
        let page = Page::parse(bytes, id * PAGE_SIZE as u64).map_err(|what| self.damaged(what))?;
        for index in 0..page.count() {
            let element = page.leaf(index).map_err(|what| self.damaged(what))?;
            if element.is_bucket {
                return Ok(false);
            }
            each(&element.key, element.value)?;
        }
        self.handed_on.seen.insert(id);
        self.handed_on.count += 1;
        Ok(true)
    }

    fn damaged(&self, what: String) -> StorageError {
        StorageError::Damaged {
            path: self.path.clone(),
            offset: self.next * PAGE_SIZE as u64,
            what,
        }
    }

    /// The file, and which of its leaves are holes.
    pub fn finish(self) -> Result<(BoltFile, Handed), StorageError> {
        if self.next != self.pages || !self.begun.is_empty() {
            return Err(self.damaged("it ends before its end".to_owned()));
        }
        let file = BoltFile::from_file(self.file, &self.path)?;
        if file.page_size() as usize != PAGE_SIZE {
            return Err(file.damaged(0, "it has pages of another size"));
        }
        Ok((file, self.handed_on))
    }
}
