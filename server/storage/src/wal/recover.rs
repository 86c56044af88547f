//! Opening a log: read it, and decide whether a bad record is a torn tail or damage.
//!
//! ```text
//!   good records ... | bad | ...        bad at B
//!                                       S = the greatest synced offset that any evidence names:
//!                                           marks read, marks found behind B (their own checksum needs no chain), the sidecar
//!   B <  S   damage: acknowledged records are unreadable. Error with file and offset, nothing is touched.
//!   B >= S   a group that was being written. It was acknowledged to nobody: it is cut.
//! ```
//!
//! All but the last segment were synced to their end before the next began: there a bad record is always damage. After a clean
//! stop the sidecar names the exact end, the chain there and the file's length: any difference is damage.
//!
//! A segment repeats the state before it, so that reading begins at the newest one that starts before the snapshot marker. Nothing is
//! written before the decision.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::LogPosition;
use crate::error::StorageError;
use crate::wal::record::{FORMAT, Identity, MARK_OVERLAP, Metadata, Record, WalVote, find_marks};
use crate::wal::segment::{self, Placed, Reader, Segment, Step};
use crate::wal::sidecar::{self, Sidecar, Synced};
use crate::wal::writer::{Beginning, Tail, begin, nonce};
use crate::wal::{EntryRef, Place, State, WalOptions};

/// Reads the log of `options.dir`, or makes one.
pub(crate) fn open(options: &WalOptions) -> Result<(State, Tail), StorageError> {
    let Some(found) = read(options, Access::Write)? else {
        return create(options);
    };
    let Found {
        segments,
        mut replay,
        end,
        ..
    } = found;
    let newest = Arc::clone(segments.last().expect("there is at least one segment"));
    if end.cut {
        tracing::warn!(
            path = %newest.path.display(),
            offset = end.offset,
            "cutting off a torn group of log records that was acknowledged to nobody"
        );
        cut(&newest, end.offset, options.segment_bytes)?;
    }
    if replay.committed.index > replay.last.index {
        // The sync that a commit waits for may have been another member's.
        replay.committed = replay.last;
    }
    let tail = Tail {
        segment: newest,
        offset: end.offset,
        crc: replay.crc,
        last: replay.last,
        sidecar: Sidecar::open(&options.dir)?,
        sealed: end.sealed,
    };
    Ok((replay.into_state(segments), tail))
}

/// A log in figures.
#[derive(Clone, Debug)]
pub struct LogFacts {
    pub dir: PathBuf,
    pub identity: Identity,
    pub segments: usize,
    /// Entries up to here need not exist.
    pub purged: LogPosition,
    pub last: LogPosition,
    /// File and offset of a torn group, which the next open cuts.
    pub torn: Option<(PathBuf, u64)>,
    terms: Vec<u64>,
}

impl LogFacts {
    /// The term of an entry that is in the log, or of the last purged one.
    pub fn term_of(&self, index: u64) -> Option<u64> {
        if index == self.purged.index {
            return Some(self.purged.term);
        }
        let slot = index.checked_sub(self.purged.index + 1)?;
        self.terms.get(slot as usize).copied()
    }
}

/// Judges a log as an open would, and reads its older segments too. Opens nothing for writing. None when there is no log.
pub fn inspect(dir: &Path) -> Result<Option<LogFacts>, StorageError> {
    let Some((_, oldest)) = segment::list(dir)?.into_iter().next() else {
        // A log whose segments are all gone is no new one.
        read(&WalOptions::new(dir, Identity::default()), Access::Read)?;
        return Ok(None);
    };
    let file = File::open(&oldest).map_err(|error| StorageError::io("open", &oldest, error))?;
    let identity = read_metadata(&file, &oldest)?.identity;
    let Some(found) = read(&WalOptions::new(dir, identity), Access::Read)? else {
        return Ok(None);
    };
    for pair in found.segments[..=found.start].windows(2) {
        let mut reader = Reader::new(&pair[0].file, &pair[0].path)?;
        let mut sealed = false;
        let what = loop {
            match reader.step()? {
                Step::Record(placed) => sealed = matches!(placed.record, Record::Seal),
                Step::End => break "nothing is written here",
                Step::Bad(what) => break what,
            }
        };
        if !sealed {
            let what = format!("{what}, and a later segment exists");
            return Err(damaged(&pair[0].path, reader.offset, what));
        }
        if pair[1].metadata.previous_crc != reader.crc {
            let what = "the segment does not belong behind the one before it";
            return Err(damaged(&pair[1].path, 0, what.to_owned()));
        }
    }
    let newest = found.segments.last().map(|segment| segment.path.clone());
    Ok(Some(LogFacts {
        dir: dir.to_owned(),
        identity,
        segments: found.segments.len(),
        purged: found.replay.purged,
        last: found.replay.last,
        torn: newest
            .filter(|_| found.end.cut)
            .map(|path| (path, found.end.offset)),
        terms: found
            .replay
            .entries
            .iter()
            .map(|entry| entry.term)
            .collect(),
    }))
}

/// What an open or a look finds.
struct Found {
    segments: Vec<Arc<Segment>>,
    /// Reading began with this one.
    start: usize,
    replay: Replay,
    end: End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// Reads and judges; None when there is no log. Writes nothing.
fn read(options: &WalOptions, access: Access) -> Result<Option<Found>, StorageError> {
    let mut segments = Vec::new();
    for (sequence, path) in segment::list(&options.dir)? {
        segments.push(open_segment(options, sequence, path, access)?);
    }
    let synced = sidecar::read(&options.dir)?;
    if segments.is_empty() {
        if let Some(synced) = synced {
            let what = format!("segment {:016x} is missing", synced.sequence);
            return Err(damaged(&options.dir, 0, what));
        }
        return Ok(None);
    }
    check_none_missing(options, &segments, synced.as_ref())?;

    let start = start_segment(&segments)?;
    let mut replay = Replay::new(&segments[start]);
    let mut end = None;
    for (number, segment) in segments.iter().enumerate().skip(start) {
        let last = number + 1 == segments.len();
        if number > start && segment.metadata.previous_crc != replay.crc {
            let what = "the segment does not belong behind the one before it";
            return Err(damaged(&segment.path, 0, what.to_owned()));
        }
        end = Some(read_segment(segment, &mut replay, last, synced.as_ref())?);
    }
    let end = end.expect("there is at least one segment");
    check_covered(&segments[start], &replay)?;
    Ok(Some(Found {
        segments,
        start,
        replay,
        end,
    }))
}

fn damaged(path: &Path, offset: u64, what: String) -> StorageError {
    StorageError::Damaged {
        path: path.to_owned(),
        offset,
        what,
    }
}

fn create(options: &WalOptions) -> Result<(State, Tail), StorageError> {
    let file = segment::prepare(&options.dir, options.segment_bytes)?;
    let metadata = Metadata {
        format: FORMAT,
        identity: options.identity,
        nonce: nonce(),
        sequence: 0,
        previous: options.start,
        previous_crc: 0,
    };
    let beginning = Beginning {
        vote: None,
        committed: options.start,
        purged: options.start,
    };
    let (segment, offset, crc) = begin(options, file, metadata, &beginning)?;
    let tail = Tail {
        segment: Arc::clone(&segment),
        offset,
        crc,
        last: options.start,
        sidecar: Sidecar::open(&options.dir)?,
        sealed: false,
    };
    let mut replay = Replay::new(&segment);
    replay.purged = options.start;
    replay.committed = options.start;
    Ok((replay.into_state(vec![segment]), tail))
}

/// Opens a segment and reads its first record.
fn open_segment(
    options: &WalOptions,
    sequence: u64,
    path: PathBuf,
    access: Access,
) -> Result<Arc<Segment>, StorageError> {
    let file = OpenOptions::new()
        .read(true)
        .write(access == Access::Write)
        .open(&path)
        .map_err(|error| StorageError::io("open", &path, error))?;
    let metadata = read_metadata(&file, &path)?;
    if metadata.format > FORMAT {
        let why = format!(
            "its log has format {}, this version knows {FORMAT}; use a newer ballast",
            metadata.format
        );
        return Err(StorageError::Refused { path, why });
    }
    if metadata.sequence != sequence {
        let what = format!("the file's name says segment {sequence}, its content another");
        return Err(damaged(&path, 0, what));
    }
    if metadata.identity != options.identity {
        let (found, wanted) = (metadata.identity, options.identity);
        let why = format!(
            "the log belongs to member {:x} of cluster {:x}, not to member {:x} of cluster {:x}; start with the \
             --initial-cluster and --initial-cluster-token it was made with, or use an empty data directory",
            found.member_id, found.cluster_id, wanted.member_id, wanted.cluster_id
        );
        return Err(StorageError::Refused { path, why });
    }
    Ok(Arc::new(Segment {
        path,
        file,
        metadata,
    }))
}

pub(crate) fn read_metadata(file: &File, path: &Path) -> Result<Metadata, StorageError> {
    let mut reader = Reader::new(file, path)?;
    let what = match reader.step()? {
        Step::Record(Placed {
            record: Record::Metadata(metadata),
            ..
        }) => return Ok(metadata),
        Step::Record(_) => "the first record is not metadata",
        Step::End => "the file is empty",
        Step::Bad(what) => what,
    };
    Err(damaged(path, 0, what.to_owned()))
}

fn check_none_missing(
    options: &WalOptions,
    segments: &[Arc<Segment>],
    synced: Option<&Synced>,
) -> Result<(), StorageError> {
    for pair in segments.windows(2) {
        let expected = pair[0].metadata.sequence + 1;
        if pair[1].metadata.sequence != expected {
            let what = format!("segment {expected:016x} is missing");
            return Err(damaged(&options.dir, 0, what));
        }
    }
    let newest = segments.last().map_or(0, |s| s.metadata.sequence);
    if let Some(synced) = synced.filter(|synced| synced.sequence > newest) {
        let what = format!("segment {:016x} is missing", synced.sequence);
        return Err(damaged(&options.dir, 0, what));
    }
    Ok(())
}

/// The newest segment that begins at or before the snapshot marker known when the newest one was begun, else the oldest.
fn start_segment(segments: &[Arc<Segment>]) -> Result<usize, StorageError> {
    let newest = segments.last().expect("there is at least one segment");
    let mut reader = Reader::new(&newest.file, &newest.path)?;
    let mut marker = newest.metadata.previous;
    // The marker is the second record; a segment whose beginning is bad is judged by `read_segment`.
    for _ in 0..2 {
        if let Step::Record(Placed {
            record: Record::Snapshot(position),
            ..
        }) = reader.step()?
        {
            marker = position;
        }
    }
    Ok(segments
        .iter()
        .rposition(|segment| segment.metadata.previous.index <= marker.index)
        .unwrap_or(0))
}

/// Segments are deleted when a marker covers them; without one, somebody else removed them.
fn check_covered(first: &Segment, replay: &Replay) -> Result<(), StorageError> {
    let (begins, marker) = (first.metadata.previous.index, replay.marker);
    if begins > marker {
        let what = format!(
            "the log begins behind index {begins}, the engine holds only up to {marker}: older segments are missing"
        );
        return Err(damaged(&first.path, 0, what));
    }
    Ok(())
}

struct End {
    offset: u64,
    /// Something lies behind the end that must go.
    cut: bool,
    sealed: bool,
}

/// Replays one segment. The error says that it is damaged.
fn read_segment(
    segment: &Segment,
    replay: &mut Replay,
    last: bool,
    synced: Option<&Synced>,
) -> Result<End, StorageError> {
    let path = &segment.path;
    let mut reader = Reader::new(&segment.file, path)?;
    let mut sealed = false;
    let what = loop {
        match reader.step()? {
            Step::Record(placed) => {
                let offset = placed.offset;
                if sealed {
                    let what = "a record behind the end of a finished segment";
                    return Err(damaged(path, offset, what.to_owned()));
                }
                sealed = matches!(placed.record, Record::Seal);
                replay
                    .record(placed, segment)
                    .map_err(|what| damaged(path, offset, what.to_owned()))?;
            }
            Step::End => break "nothing is written here",
            Step::Bad(what) => break what,
        }
    };
    replay.crc = reader.crc;
    let (offset, file_bytes) = (reader.offset, reader.file_bytes);
    if !last && !sealed {
        let what = format!("{what}, and a later segment exists");
        return Err(damaged(path, offset, what));
    }
    if !last {
        return Ok(End {
            offset,
            cut: false,
            sealed,
        });
    }

    let synced = synced.filter(|synced| synced.nonce == segment.metadata.nonce);
    if let Some(clean) = synced.filter(|synced| synced.clean) {
        if clean.offset != offset || clean.crc != replay.crc {
            let what = format!(
                "{what}; the log was closed in good order at byte {}",
                clean.offset
            );
            return Err(damaged(path, offset, what));
        }
        if clean.file_bytes != file_bytes {
            let what = format!(
                "the file has {file_bytes} bytes, and had {} when the log was closed",
                clean.file_bytes
            );
            return Err(damaged(path, clean.file_bytes.min(file_bytes), what));
        }
        return Ok(End {
            offset,
            cut: false,
            sealed,
        });
    }

    let rest = search_rest(segment, offset, file_bytes)?;
    let evidence = rest.mark.max(synced.map(|synced| synced.offset));
    if let Some(evidence) = evidence.filter(|&evidence| evidence > offset) {
        let mut what = format!("{what}; the log was synced up to byte {evidence}");
        if rest.mark < Some(evidence) {
            // Only the file beside says so. Damage, in all likelihood; but a copy of a running member's directory looks the same.
            what.push_str(
                " (says synced.mark, which a copy of a log in use must take before the segments)",
            );
        }
        return Err(damaged(path, offset, what));
    }
    if sealed && rest.written {
        let what = "something lies behind the end of a finished segment";
        return Err(damaged(path, offset, what.to_owned()));
    }
    Ok(End {
        offset,
        cut: rest.written,
        sealed,
    })
}

#[derive(Default)]
struct Rest {
    /// Some byte is not zero.
    written: bool,
    /// The greatest offset a mark names.
    mark: Option<u64>,
}

/// Looks through what lies behind the last good record.
fn search_rest(segment: &Segment, from: u64, file_bytes: u64) -> Result<Rest, StorageError> {
    const PIECE_BYTES: u64 = 1 << 20;
    let mut rest = Rest::default();
    let mut at = from;
    let mut piece = Vec::new();
    while at < file_bytes {
        // Pieces overlap, so that a mark across their border is seen.
        let count = (PIECE_BYTES + MARK_OVERLAP as u64).min(file_bytes - at);
        piece.resize(count as usize, 0);
        segment
            .file
            .read_exact_at(&mut piece, at)
            .map_err(|error| StorageError::io("read", &segment.path, error))?;
        if piece.iter().any(|&byte| byte != 0) {
            rest.written = true;
            rest.mark = rest.mark.max(find_marks(&piece, segment.metadata.nonce));
        }
        at += PIECE_BYTES;
    }
    Ok(rest)
}

/// Makes everything from `offset` on zeros again.
fn cut(segment: &Segment, offset: u64, segment_bytes: u64) -> Result<(), StorageError> {
    let io = |error| StorageError::io("cut", &segment.path, error);
    segment.file.set_len(offset).map_err(io)?;
    if let Err(error) = segment::allocate(&segment.file, segment_bytes.max(offset)) {
        tracing::warn!(path = %segment.path.display(), %error, "cannot allocate the rest of a log segment");
    }
    segment.file.sync_all().map_err(io)
}

/// The term of an entry in a segment that was not read.
const UNREAD_TERM: u64 = u64::MAX;

/// The state that the records read so far amount to.
struct Replay {
    entries: VecDeque<EntryRef>,
    purged: LogPosition,
    /// Index of the newest snapshot marker read.
    marker: u64,
    last: LogPosition,
    vote: Option<WalVote>,
    committed: LogPosition,
    serial: u64,
    crc: u32,
}

impl Replay {
    fn new(first: &Segment) -> Self {
        Self {
            entries: VecDeque::new(),
            purged: first.metadata.previous,
            marker: 0,
            last: first.metadata.previous,
            vote: None,
            committed: LogPosition::default(),
            serial: 0,
            crc: 0,
        }
    }

    fn record(&mut self, placed: Placed, segment: &Segment) -> Result<(), &'static str> {
        match placed.record {
            Record::Metadata(metadata) => {
                if placed.offset != 0 || metadata != segment.metadata {
                    return Err("metadata where none belongs");
                }
                if self.last.term == UNREAD_TERM && metadata.previous.index == self.last.index {
                    self.last = metadata.previous;
                    self.purged = metadata.previous;
                }
                if metadata.previous != self.last {
                    return Err("the segment does not begin where the one before it ended");
                }
            }
            Record::Entry(entry) => {
                if entry.position.index != self.last.index + 1 {
                    return Err("an entry does not follow the one before it");
                }
                self.last = entry.position;
                self.entries.push_back(EntryRef {
                    term: entry.position.term,
                    serial: self.serial,
                    place: Some(Place {
                        sequence: segment.metadata.sequence,
                        offset: placed.offset,
                        length: (placed.end - placed.offset) as u32,
                        crc_before: placed.crc_before,
                    }),
                });
                self.serial += 1;
            }
            Record::Vote(vote) => self.vote = Some(vote),
            Record::Committed(position) => self.committed = position,
            Record::Snapshot(position) => self.snapshot(position),
            Record::Truncate { after } if after < self.purged.index => {
                // Reading began behind what is cut here. It was written again, up to the marker at least: else reading had
                // begun earlier.
                self.entries.clear();
                self.purged = LogPosition {
                    index: after,
                    term: UNREAD_TERM,
                };
                self.last = self.purged;
            }
            Record::Truncate { after } => {
                let keep = after.saturating_sub(self.purged.index) as usize;
                self.entries.truncate(keep);
                self.last = match self.entries.back() {
                    Some(entry) => LogPosition {
                        index: self.purged.index + self.entries.len() as u64,
                        term: entry.term,
                    },
                    None => self.purged,
                };
            }
            Record::Seal | Record::Mark { .. } => {}
        }
        Ok(())
    }

    fn snapshot(&mut self, position: LogPosition) {
        self.marker = self.marker.max(position.index);
        if position.index <= self.purged.index {
            return;
        }
        let gone = (position.index - self.purged.index) as usize;
        self.entries.drain(..gone.min(self.entries.len()));
        self.purged = position;
        if position.index > self.last.index {
            self.last = position;
        }
    }

    fn into_state(self, segments: Vec<Arc<Segment>>) -> State {
        State {
            queue: VecDeque::new(),
            entries: self.entries,
            cache: VecDeque::new(),
            cache_bytes: 0,
            serial: self.serial,
            purged: self.purged,
            vote: self.vote,
            committed: self.committed,
            committed_unwritten: false,
            segments: segments.into(),
            failed: None,
            on_failure: None,
            stopping: false,
        }
    }
}
