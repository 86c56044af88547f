//! A file of ours as it arrives: leaves of records are handed on, all else goes to the file.
//!
//! What was handed on is a hole in the file. The branches above it are there, and say afterwards whether it was all: `BoltFile::has_leaves`.
//!
//! Promises: no more than a page with its overflow pages is held; a number of the stream is checked before it is used as a length.
//!
//! etcd: none; it renames the file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};

use super::read::{Page, PageSet};
use super::{
    BoltFile, FLAG_LEAF, KEY_LEN_MAX, META_PAGES, PAGE_SIZE, VALUE_LEN_MAX, u16_at, u32_at, u64_at,
};
use crate::error::StorageError;

/// Takes a record's key and value.
pub type Each<'a> = &'a mut dyn FnMut(&Bytes, Bytes) -> Result<(), StorageError>;

/// More than a leaf of one element needs.
const OVERFLOW_MAX: usize = (KEY_LEN_MAX + VALUE_LEN_MAX) / PAGE_SIZE + 1;

/// Pages of a file that is being received.
#[derive(Debug)]
pub struct Arriving {
    file: File,
    path: PathBuf,
    /// Where what comes next belongs.
    at: u64,
    /// Of a page of records, what has come of it.
    begun: BytesMut,
    handed_on: Handed,
}

/// The leaves that were handed on.
#[derive(Debug, Default)]
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
    pub fn new(path: &Path) -> Result<Self, StorageError> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = options
            .open(path)
            .map_err(|e| StorageError::io("create", path, e))?;
        Ok(Self {
            file,
            path: path.to_owned(),
            at: 0,
            begun: BytesMut::new(),
            handed_on: Handed::default(),
        })
    }

    /// What comes next belongs behind the meta pages.
    pub fn skip_metas(&mut self) {
        self.at = META_PAGES * PAGE_SIZE as u64;
    }

    /// Takes the meta pages, which were left out at first.
    pub fn take_metas(&mut self, bytes: &[u8]) -> Result<(), StorageError> {
        if bytes.len() as u64 != META_PAGES * PAGE_SIZE as u64 {
            return Err(self.damaged("meta pages of another length".to_owned()));
        }
        self.write(bytes, 0)
    }

    /// Takes the next bytes, none of a leaf of records.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), StorageError> {
        if !self.begun.is_empty() {
            return Err(self.damaged("a page of records that ends before its end".to_owned()));
        }
        self.write(bytes, self.at)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Takes the next bytes: pages of the bucket of records, maybe a few of the root bucket.
    pub fn take_records(&mut self, bytes: &Bytes, each: Each<'_>) -> Result<(), StorageError> {
        let mut bytes = bytes.clone();
        while !bytes.is_empty() {
            // A page with its overflow pages rarely comes in two parts: only such a one is copied.
            let page = if self.begun.is_empty() {
                match self.whole_page(&bytes)? {
                    Some(len) => bytes.split_to(len),
                    None => break,
                }
            } else {
                let missing = PAGE_SIZE - self.begun.len() % PAGE_SIZE;
                let part = bytes.split_to(missing.min(bytes.len()));
                self.begun.extend_from_slice(&part);
                match self.whole_page(&self.begun)? {
                    Some(len) => self.begun.split_to(len).freeze(),
                    None => continue,
                }
            };
            let id = self.at / PAGE_SIZE as u64;
            let len = page.len() as u64;
            let is_leaf = u64_at(&page, 0) == id && u16_at(&page, 8) == FLAG_LEAF;
            if !(is_leaf && self.hand_on(id, page.clone(), each)?) {
                self.write(&page, self.at)?;
            }
            self.at += len;
        }
        self.begun.extend_from_slice(&bytes);
        Ok(())
    }

    /// The length of the page that `bytes` begin with, with its overflow pages, if they are all there.
    fn whole_page(&self, bytes: &[u8]) -> Result<Option<usize>, StorageError> {
        if bytes.len() < PAGE_SIZE {
            return Ok(None);
        }
        let further = u32_at(bytes, 12) as usize;
        if further > OVERFLOW_MAX || !self.at.is_multiple_of(PAGE_SIZE as u64) {
            return Err(self.damaged(format!("a page of records with {further} overflow pages")));
        }
        let len = (further + 1) * PAGE_SIZE;
        Ok((bytes.len() >= len).then_some(len))
    }

    /// False for a leaf of buckets, which the root bucket may have among them.
    fn hand_on(&mut self, id: u64, bytes: Bytes, each: Each<'_>) -> Result<bool, StorageError> {
        let page = Page::parse(bytes, self.at).map_err(|what| self.damaged(what))?;
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

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), StorageError> {
        self.file
            .write_all_at(bytes, at)
            .map_err(|e| StorageError::io("write", &self.path, e))
    }

    fn damaged(&self, what: String) -> StorageError {
        StorageError::Damaged {
            path: self.path.clone(),
            offset: self.at,
            what,
        }
    }

    /// The file, and which of its leaves are holes.
    pub fn finish(self) -> Result<(BoltFile, Handed), StorageError> {
        if !self.begun.is_empty() {
            return Err(self.damaged("it ends within a page".to_owned()));
        }
        // What was handed on is a hole at the end too.
        self.file
            .set_len(self.at)
            .map_err(|e| StorageError::io("write", &self.path, e))?;
        let file = BoltFile::from_file(self.file, &self.path)?;
        if file.page_size() as usize != PAGE_SIZE {
            return Err(file.damaged(0, "it has pages of another size"));
        }
        if file.size() != self.at {
            return Err(file.damaged(self.at, "its meta pages are of another file"));
        }
        Ok((file, self.handed_on))
    }
}
