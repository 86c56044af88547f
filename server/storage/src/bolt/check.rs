//! The whole-file check: each page reached once or free once, keys in order.
//!
//! Not here: checks of one page, which every reader makes (`read.rs`).
//!
//! etcd: bbolt's tx_check.go.

use std::cell::RefCell;

use super::read::{BoltFile, Bucket, PageSet, Value};
use crate::error::StorageError;

/// Buckets within buckets; etcd has none.
const NESTING_MAX: usize = 32;

/// Walks every bucket and accounts for every page. The first thing found wrong is the error.
pub fn check(file: &BoltFile) -> Result<(), StorageError> {
    let seen = RefCell::new(PageSet::default());
    let mut free = PageSet::default();
    let freelist = file.freelist()?;
    if let Some(list) = &freelist {
        for page in list.own.clone() {
            seen.borrow_mut().insert(page);
        }
        for id in &list.ids {
            if !(2..file.high_water()).contains(id) || !free.insert(*id) {
                return Err(file.damaged(0, format!("page {id}: already freed or no page")));
            }
        }
    }
    check_bucket(file, &file.root(), &seen, 0)?;
    // Without a free list every page that nothing reaches is free.
    let has_freelist = freelist.is_some();
    for page in 2..file.high_water() {
        let offset = page * u64::from(file.page_size());
        match (seen.borrow().contains(page), free.contains(page)) {
            (true, true) => {
                return Err(file.damaged(offset, format!("page {page}: reachable freed")));
            }
            (false, false) if has_freelist => {
                return Err(file.damaged(offset, format!("page {page}: unreachable unfreed")));
            }
            _ => {}
        }
    }
    Ok(())
}

fn check_bucket(
    file: &BoltFile,
    bucket: &Bucket,
    seen: &RefCell<PageSet>,
    depth: usize,
) -> Result<(), StorageError> {
    if depth == NESTING_MAX {
        return Err(file.damaged(0, "buckets nested too deeply"));
    }
    let mut cursor = file.cursor_noting(bucket, seen);
    while let Some((_, value)) = cursor.next()? {
        if let Value::Bucket(inner) = value {
            if bucket.root_page().is_none() {
                return Err(file.damaged(0, "a bucket within an inline bucket"));
            }
            check_bucket(file, &inner, seen, depth + 1)?;
        }
    }
    Ok(())
}
