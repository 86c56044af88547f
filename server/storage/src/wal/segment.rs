//! One file of the log: its name, how it comes into being, and reading it from the front.
//!
//! `SEQUENCE-FIRST.wal`, both as 16 hexadecimal digits; FIRST is the index its first entry has. A segment is allocated under
//! `next.tmp`, gets its first records, is synced, and only then is renamed: a file with a segment's name has a sound beginning.
//!
//! Not here: what is written after the beginning (`writer.rs`), judging a bad record (`recover.rs`).

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use crate::error::StorageError;
use crate::wal::record::{HEADER_BYTES, Header, Metadata, Record, decode, record_bytes};

pub(crate) const TMP_NAME: &str = "next.tmp";

/// A segment open for reading, and for writing while it is the last one.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) metadata: Metadata,
}

pub(crate) fn name(sequence: u64, first_index: u64) -> String {
    format!("{sequence:016x}-{first_index:016x}.wal")
}

fn parse_name(name: &str) -> Option<u64> {
    let (sequence, first) = name.strip_suffix(".wal")?.split_once('-')?;
    if sequence.len() != 16 || first.len() != 16 {
        return None;
    }
    u64::from_str_radix(first, 16).ok()?;
    u64::from_str_radix(sequence, 16).ok()
}

/// The segments of a directory, ascending by sequence. An absent directory has none.
pub(crate) fn list(dir: &Path) -> Result<Vec<(u64, PathBuf)>, StorageError> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(StorageError::io("list", dir, error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| StorageError::io("list", dir, error))?;
        if let Some(sequence) = entry.file_name().to_str().and_then(parse_name) {
            found.push((sequence, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// Allocates the file of a segment to come. Blocks are reserved, so that writing into them cannot find the disk full.
pub(crate) fn prepare(dir: &Path, bytes: u64) -> Result<File, StorageError> {
    let path = dir.join(TMP_NAME);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .map_err(|error| StorageError::io("create", &path, error))?;
    if let Err(error) = allocate(&file, bytes) {
        // Give back what was allocated before the disk was full. Nothing is lost if this fails too.
        drop(std::fs::remove_file(&path));
        return Err(StorageError::io("allocate", &path, error));
    }
    Ok(file)
}

/// Extends a file to `bytes` with blocks that read as zeros.
pub(crate) fn allocate(file: &File, bytes: u64) -> std::io::Result<()> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            // A file system without it: the length alone, and a full disk shows at writing.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
                return file.set_len(bytes);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Makes renames and removals in a directory survive a power cut.
pub(crate) fn sync_dir(dir: &Path) -> Result<(), StorageError> {
    File::open(dir)
        .and_then(|file| file.sync_all())
        .map_err(|error| StorageError::io("sync", dir, error))
}

/// One record in its place.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) record: Record,
    pub(crate) offset: u64,
    /// Where the next record begins.
    pub(crate) end: u64,
    pub(crate) crc_before: u32,
}

/// What a reader meets.
#[derive(Debug)]
pub(crate) enum Step {
    Record(Placed),
    /// Zeros, or the end of the file: nothing was written from here on.
    End,
    Bad(&'static str),
}

/// Reads records from the front, in large pieces.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    file: &'a File,
    path: &'a Path,
    pub(crate) file_bytes: u64,
    pub(crate) offset: u64,
    pub(crate) crc: u32,
    piece: Vec<u8>,
    piece_start: u64,
}

const PIECE_BYTES: u64 = 1 << 20;

impl<'a> Reader<'a> {
    pub(crate) fn new(file: &'a File, path: &'a Path) -> Result<Self, StorageError> {
        let file_bytes = file
            .metadata()
            .map_err(|error| StorageError::io("stat", path, error))?
            .len();
        Ok(Self {
            file,
            path,
            file_bytes,
            offset: 0,
            crc: 0,
            piece: Vec::new(),
            piece_start: 0,
        })
    }

    /// The bytes from `offset` on, None when the file ends before.
    fn bytes(&mut self, offset: u64, count: u64) -> Result<Option<&[u8]>, StorageError> {
        if offset + count > self.file_bytes {
            return Ok(None);
        }
        let held = self.piece_start..=self.piece_start + self.piece.len() as u64;
        if !held.contains(&offset) || !held.contains(&(offset + count)) {
            let wanted = count.max(PIECE_BYTES).min(self.file_bytes - offset);
            self.piece.resize(wanted as usize, 0);
            self.piece_start = offset;
            self.file
                .read_exact_at(&mut self.piece, offset)
                .map_err(|error| StorageError::io("read", self.path, error))?;
        }
        let start = (offset - self.piece_start) as usize;
        Ok(Some(&self.piece[start..start + count as usize]))
    }

    /// The next record; after `End` or `Bad` the same again.
    pub(crate) fn step(&mut self) -> Result<Step, StorageError> {
        let offset = self.offset;
        let Some(head) = self.bytes(offset, HEADER_BYTES as u64)? else {
            return Ok(if offset >= self.file_bytes {
                Step::End
            } else {
                Step::Bad("the file ends within a record")
            });
        };
        let head: &[u8; HEADER_BYTES] = head.first_chunk().expect("as many bytes as asked for");
        let Some(header) = Header::read(head) else {
            return Ok(Step::End);
        };
        let whole = record_bytes(header.length) as u64;
        let crc = self.crc;
        let Some(bytes) = self.bytes(offset, whole)? else {
            return Ok(Step::Bad("the file ends within a record"));
        };
        match decode(bytes, crc) {
            Err(what) => Ok(Step::Bad(what)),
            Ok((record, next)) => {
                self.offset = offset + whole;
                self.crc = next;
                Ok(Step::Record(Placed {
                    record,
                    offset,
                    end: offset + whole,
                    crc_before: crc,
                }))
            }
        }
    }
}
