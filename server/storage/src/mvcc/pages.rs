//! The pages of the store's snapshot file for another member, in one pass.
//!
//!     pin -> pages as they become full, each with what it is of -> the file's meta pages, which say where its root is
//!
//! The file is that of `snapshot.rs`. Its size is not known before its end, and it has no sum: whoever sends it adds sums to the pieces.
//!
//! Promises: as there. That every record which the index knows is among them is said by the end: without the meta pages it is no file.
//! Not here: what becomes of them (`install.rs`).
//!
//! etcd: none; it sends its file.

use bytes::{Bytes, BytesMut};

use crate::LogPosition;
use crate::bolt::Writer;
use crate::error::StorageError;
use crate::mvcc::snapshot::{Entries, Pinned, Step};
use crate::mvcc::store::Store;

/// Pages on their way. Blocking; may be dropped at any time.
#[derive(Debug)]
pub struct PageStream {
    entries: Entries,
    stage: Stage,
    /// The pages that are ready are of the bucket of records.
    of_records: bool,
    /// The next ones are, or are not: those that are ready go first.
    turn: Option<bool>,
}

#[derive(Debug)]
enum Stage {
    Writing(Box<Writer>),
    /// The last pages, and the meta pages.
    Rest(BytesMut, Bytes),
    Done,
}

/// Bytes of the file, each piece following the one before, but for the meta pages, which come last and belong at the beginning.
#[derive(Clone, Debug)]
pub enum Pages {
    /// The leaves hold records, but for those of the root bucket.
    Records(Bytes),
    Other(Bytes),
    Metas(Bytes),
}

impl Store {
    /// Pins the newest state. Blocking, not for long.
    pub fn pages(&self) -> Result<PageStream, StorageError> {
        let pinned = Pinned::new(&self.shared)?;
        Ok(PageStream {
            entries: Entries::new(&self.shared, pinned),
            stage: Stage::Writing(Box::new(Writer::without_plan())),
            of_records: false,
            turn: None,
        })
    }
}

impl PageStream {
    /// The last log entry in it.
    pub fn applied(&self) -> LogPosition {
        self.entries.applied()
    }

    /// The group at that entry, in the Raft layer's own bytes; empty when there was none yet.
    pub fn membership(&self) -> Bytes {
        self.entries.membership()
    }

    /// The next piece, of `bytes_max` or fewer. None after the meta pages.
    pub fn next_pages(&mut self, bytes_max: usize) -> Result<Option<Pages>, StorageError> {
        let bytes_max = bytes_max.max(1);
        loop {
            match &mut self.stage {
                Stage::Writing(writer) => {
                    let ready = writer.out_mut();
                    let goes_first = self.turn.is_some() && !ready.is_empty();
                    if goes_first || ready.len() >= bytes_max {
                        return Ok(Some(piece(ready, bytes_max, self.of_records)));
                    }
                    self.of_records = self.turn.take().unwrap_or(self.of_records);
                    self.step()?;
                }
                Stage::Rest(rest, _) if !rest.is_empty() => {
                    return Ok(Some(piece(rest, bytes_max, self.of_records)));
                }
                Stage::Rest(_, metas) => {
                    let metas = std::mem::take(metas);
                    self.stage = Stage::Done;
                    return Ok(Some(Pages::Metas(metas)));
                }
                Stage::Done => return Ok(None),
            }
        }
    }

    fn step(&mut self) -> Result<(), StorageError> {
        let Stage::Writing(writer) = &mut self.stage else {
            return Ok(());
        };
        match self.entries.step(writer)? {
            Step::Entry => {}
            Step::Bucket { of_records } => self.turn = Some(of_records),
            Step::End => {
                if let Stage::Writing(writer) = std::mem::replace(&mut self.stage, Stage::Done) {
                    let ended = writer.finish_with_metas();
                    let (rest, metas) = ended.map_err(|e| self.entries.failed(&e))?;
                    self.stage = Stage::Rest(rest, metas);
                }
            }
        }
        Ok(())
    }
}

fn piece(ready: &mut BytesMut, bytes_max: usize, of_records: bool) -> Pages {
    let bytes = ready.split_to(bytes_max.min(ready.len())).freeze();
    if of_records {
        Pages::Records(bytes)
    } else {
        Pages::Other(bytes)
    }
}
