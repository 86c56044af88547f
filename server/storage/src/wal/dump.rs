//! Reads a log without opening it: for `ballast wal dump`, and for tests that damage one on purpose.
//!
//! Works on a copy taken from a running member: a torn tail simply ends it. Nothing is locked or written.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::StorageError;
use crate::wal::record::{Metadata, Record, RecordType, WalEntry, decode};
use crate::wal::recover::read_metadata;
use crate::wal::segment::{self, Placed, Reader, Step};

/// One record's place in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPlace {
    pub path: PathBuf,
    pub offset: u64,
    pub bytes: u64,
    pub kind: RecordType,
    /// Of an entry.
    pub index: Option<u64>,
}

struct Found {
    file: usize,
    offset: u64,
    bytes: u64,
    crc_before: u32,
}

/// Every record that can be read, in the order of the log.
pub fn records(dir: &Path) -> Result<Vec<RecordPlace>, StorageError> {
    let mut out = Vec::new();
    walk(dir, &mut |path, _, placed| {
        let (kind, index) = match &placed.record {
            Record::Metadata(_) => (RecordType::Metadata, None),
            Record::Entry(entry) => (RecordType::Entry, Some(entry.position.index)),
            Record::Vote(_) => (RecordType::Vote, None),
            Record::Committed(_) => (RecordType::Committed, None),
            Record::Snapshot(_) => (RecordType::Snapshot, None),
            Record::Truncate { .. } => (RecordType::Truncate, None),
            Record::Seal => (RecordType::Seal, None),
            Record::Mark { .. } => (RecordType::Mark, None),
        };
        out.push(RecordPlace {
            path: path.to_owned(),
            offset: placed.offset,
            bytes: placed.end - placed.offset,
            kind,
            index,
        });
    })?;
    Ok(out)
}

/// Every entry still on disk, in log order, purged ones included and overwritten ones left out.
pub fn entries<E: From<StorageError>>(
    dir: &Path,
    each: &mut dyn FnMut(WalEntry) -> Result<(), E>,
) -> Result<(), E> {
    // Which entries stand is known at the end only; their payloads are read in a second pass, one at a time.
    let mut found: VecDeque<Found> = VecDeque::new();
    let mut first = 0;
    let files = walk(dir, &mut |_, file, placed| match &placed.record {
        Record::Entry(entry) => {
            if found.is_empty() {
                first = entry.position.index;
            }
            found.truncate(entry.position.index.saturating_sub(first) as usize);
            found.push_back(Found {
                file,
                offset: placed.offset,
                bytes: placed.end - placed.offset,
                crc_before: placed.crc_before,
            });
        }
        Record::Truncate { after } => {
            found.truncate((after + 1).saturating_sub(first) as usize);
        }
        _ => {}
    })?;
    let mut bytes = Vec::new();
    for entry in found {
        let (path, file) = &files[entry.file];
        bytes.resize(entry.bytes as usize, 0);
        file.read_exact_at(&mut bytes, entry.offset)
            .map_err(|error| StorageError::io("read", path, error))?;
        match decode(&bytes, entry.crc_before) {
            Ok((Record::Entry(entry), _)) => each(entry)?,
            _ => {
                return Err(
                    damaged(path, entry.offset, "the file changed while it was read").into(),
                );
            }
        }
    }
    Ok(())
}

fn damaged(path: &Path, offset: u64, what: &str) -> StorageError {
    StorageError::Damaged {
        path: path.to_owned(),
        offset,
        what: what.to_owned(),
    }
}

type Files = Vec<(PathBuf, File)>;

/// Calls `each` with path, number of the file, and record. A segment may end without its last record when the next one begins
/// just there: it was copied before it was finished.
fn walk(dir: &Path, each: &mut dyn FnMut(&Path, usize, Placed)) -> Result<Files, StorageError> {
    let mut files: Files = Vec::new();
    for (_, path) in segment::list(dir)? {
        let file = File::open(&path).map_err(|error| StorageError::io("open", &path, error))?;
        files.push((path, file));
    }
    let mut last = 0;
    for (number, (path, file)) in files.iter().enumerate() {
        let metadata: Metadata = read_metadata(file, path)?;
        if number > 0 && metadata.previous.index != last {
            let what = "the segment before this one is incomplete";
            return Err(damaged(path, 0, what));
        }
        last = metadata.previous.index;
        let mut reader = Reader::new(file, path)?;
        while let Step::Record(placed) = reader.step()? {
            match &placed.record {
                Record::Entry(entry) => last = entry.position.index,
                Record::Truncate { after } => last = *after,
                Record::Snapshot(position) => last = last.max(position.index),
                _ => {}
            }
            each(path, number, placed);
        }
    }
    Ok(files)
}
