//! The bytes of one record, and of the mark that proves what was synced.
//!
//! ```text
//!  0        4      5      8         12
//! | length | type | 0 0 0 | checksum | data ... | zeros up to a multiple of 8 |
//! ```
//!
//! Numbers are little-endian. `length` counts the data. `checksum` is CRC32C over length, type, zeros and data, begun
//! with the checksum of the record before it, so that a record only fits behind its predecessor. A segment's first record
//! begins with 0 and holds a random nonce, on which the whole chain then hangs.
//!
//! A mark has, besides its place in the chain, a checksum of its own over the nonce. It can therefore be recognised behind a
//! damaged stretch, at any byte, where the chain and the alignment are lost.
//!
//! Not here: files (`segment.rs`), what a bad record means (`recover.rs`).

use bytes::Bytes;

use crate::LogPosition;

/// Bytes before a record's data.
pub(crate) const HEADER_BYTES: usize = 12;
const ALIGN: usize = 8;

/// Layout of everything in the log. A greater one than ours is refused.
pub(crate) const FORMAT: u32 = 1;
const METADATA_MAGIC: [u8; 8] = *b"blstwal\x01";
const MARK_MAGIC: [u8; 8] = [0xb5, 0x1a, 0x57, 0xed, 0x5c, 0xac, 0x0f, 0xe1];
/// magic, own checksum, four zeros, synced offset.
const MARK_BYTES: usize = 24;

/// What a record is. The numbers are on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordType {
    /// First of each segment.
    Metadata = 1,
    Entry = 2,
    Vote = 3,
    Committed = 4,
    /// The engine holds everything up to here; entries up to here need not exist.
    Snapshot = 5,
    /// Entries behind the index given are gone.
    Truncate = 6,
    /// Last of a finished segment.
    Seal = 7,
    /// Everything before the offset given is synced.
    Mark = 8,
}

impl RecordType {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Metadata,
            2 => Self::Entry,
            3 => Self::Vote,
            4 => Self::Committed,
            5 => Self::Snapshot,
            6 => Self::Truncate,
            7 => Self::Seal,
            8 => Self::Mark,
            _ => return None,
        })
    }
}

/// Bytes that a record with `data` bytes of data takes.
pub(crate) const fn record_bytes(data: usize) -> usize {
    (HEADER_BYTES + data).next_multiple_of(ALIGN)
}

/// Whose log this is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    pub cluster_id: u64,
    pub member_id: u64,
}

/// The first record of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Metadata {
    pub(crate) format: u32,
    pub(crate) identity: Identity,
    /// Random, one for each segment.
    pub(crate) nonce: u64,
    pub(crate) sequence: u64,
    /// The last entry before this segment.
    pub(crate) previous: LogPosition,
    /// The last checksum of the segment before, 0 in the first.
    pub(crate) previous_crc: u32,
}

/// A vote as openraft keeps it: one candidate a term, granted or decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalVote {
    pub term: u64,
    pub voted_for: Option<u64>,
    pub committed: bool,
}

/// An entry of the replicated log, its content opaque here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalEntry {
    pub position: LogPosition,
    /// What the payload is, in the words of the layer above.
    pub kind: u8,
    pub payload: Bytes,
}

/// Bytes of an entry record's data before the payload.
pub(crate) const ENTRY_FIXED_BYTES: usize = 17;

/// A record's data, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Metadata(Metadata),
    Entry(WalEntry),
    Vote(WalVote),
    Committed(LogPosition),
    Snapshot(LogPosition),
    Truncate { after: u64 },
    Seal,
    Mark { synced: u64 },
}

/// Appends records to a buffer and carries the chain.
#[derive(Debug)]
pub(crate) struct Encoder {
    pub(crate) out: Vec<u8>,
    pub(crate) crc: u32,
}

impl Encoder {
    pub(crate) fn new(crc: u32) -> Self {
        Self {
            out: Vec::new(),
            crc,
        }
    }

    fn begin(&mut self) -> usize {
        let start = self.out.len();
        self.out.extend_from_slice(&[0; HEADER_BYTES]);
        start
    }

    fn end(&mut self, start: usize, kind: RecordType) {
        let data = start + HEADER_BYTES;
        let length = (self.out.len() - data) as u32;
        self.out[start..start + 4].copy_from_slice(&length.to_le_bytes());
        self.out[start + 4] = kind as u8;
        self.crc = chain(self.crc, &self.out[start..start + 8], &self.out[data..]);
        self.out[start + 8..data].copy_from_slice(&self.crc.to_le_bytes());
        self.out.resize(start + record_bytes(length as usize), 0);
    }

    pub(crate) fn metadata(&mut self, metadata: &Metadata) {
        let start = self.begin();
        let out = &mut self.out;
        out.extend_from_slice(&METADATA_MAGIC);
        out.extend_from_slice(&metadata.format.to_le_bytes());
        out.extend_from_slice(&metadata.previous_crc.to_le_bytes());
        for number in [
            metadata.identity.cluster_id,
            metadata.identity.member_id,
            metadata.nonce,
            metadata.sequence,
            metadata.previous.index,
            metadata.previous.term,
        ] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        self.end(start, RecordType::Metadata);
    }

    /// Gives the data's offset within the buffer.
    pub(crate) fn entry(&mut self, entry: &WalEntry) {
        let start = self.begin();
        self.out
            .extend_from_slice(&entry.position.index.to_le_bytes());
        self.out
            .extend_from_slice(&entry.position.term.to_le_bytes());
        self.out.push(entry.kind);
        self.out.extend_from_slice(&entry.payload);
        self.end(start, RecordType::Entry);
    }

    pub(crate) fn vote(&mut self, vote: &WalVote) {
        let start = self.begin();
        self.out.extend_from_slice(&vote.term.to_le_bytes());
        self.out
            .extend_from_slice(&vote.voted_for.unwrap_or_default().to_le_bytes());
        self.out.push(u8::from(vote.voted_for.is_some()));
        self.out.push(u8::from(vote.committed));
        self.end(start, RecordType::Vote);
    }

    fn position(&mut self, kind: RecordType, position: LogPosition) {
        let start = self.begin();
        self.out.extend_from_slice(&position.index.to_le_bytes());
        self.out.extend_from_slice(&position.term.to_le_bytes());
        self.end(start, kind);
    }

    pub(crate) fn committed(&mut self, position: LogPosition) {
        self.position(RecordType::Committed, position);
    }

    pub(crate) fn snapshot(&mut self, position: LogPosition) {
        self.position(RecordType::Snapshot, position);
    }

    pub(crate) fn truncate(&mut self, after: u64) {
        let start = self.begin();
        self.out.extend_from_slice(&after.to_le_bytes());
        self.end(start, RecordType::Truncate);
    }

    pub(crate) fn seal(&mut self) {
        let start = self.begin();
        self.end(start, RecordType::Seal);
    }

    pub(crate) fn mark(&mut self, nonce: u64, synced: u64) {
        let start = self.begin();
        self.out.extend_from_slice(&MARK_MAGIC);
        self.out
            .extend_from_slice(&mark_checksum(nonce, synced).to_le_bytes());
        self.out.extend_from_slice(&[0; 4]);
        self.out.extend_from_slice(&synced.to_le_bytes());
        self.end(start, RecordType::Mark);
    }
}

/// The checksum behind `previous` of a record whose first eight bytes are `head`.
fn chain(previous: u32, head: &[u8], data: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c_append(previous, head), data)
}

fn mark_checksum(nonce: u64, synced: u64) -> u32 {
    let crc = crc32c::crc32c(&nonce.to_le_bytes());
    crc32c::crc32c_append(crc, &synced.to_le_bytes())
}

/// The greatest synced offset that any mark within `bytes` speaks of, wherever it lies.
pub(crate) fn find_marks(bytes: &[u8], nonce: u64) -> Option<u64> {
    let mut best = None;
    let mut at = 0;
    while let Some(found) = bytes[at..].iter().position(|&b| b == MARK_MAGIC[0]) {
        at += found;
        if let Some(synced) = bytes.get(at..at + MARK_BYTES).and_then(|m| mark(m, nonce)) {
            best = best.max(Some(synced));
        }
        at += 1;
    }
    best
}

/// Bytes that two pieces searched by [`find_marks`] must share.
pub(crate) const MARK_OVERLAP: usize = MARK_BYTES - 1;

fn mark(data: &[u8], nonce: u64) -> Option<u64> {
    if data.len() != MARK_BYTES || data[..8] != MARK_MAGIC {
        return None;
    }
    let synced = u64_at(data, 16)?;
    (u32_at(data, 8)? == mark_checksum(nonce, synced)).then_some(synced)
}

fn u64_at(data: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(data.get(at..at + 8)?.try_into().ok()?))
}

fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(data.get(at..at + 4)?.try_into().ok()?))
}

/// A record's first twelve bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) length: usize,
    pub(crate) crc: u32,
}

impl Header {
    /// None when all is zero: nothing was written here.
    pub(crate) fn read(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        if bytes.iter().all(|&b| b == 0) {
            return None;
        }
        Some(Self {
            length: u32_at(bytes, 0)? as usize,
            crc: u32_at(bytes, 8)?,
        })
    }
}

/// Checks a whole record (header, data, padding) against the chain and decodes it. The error says what is wrong.
pub(crate) fn decode(record: &[u8], previous_crc: u32) -> Result<(Record, u32), &'static str> {
    let Some(header) = record.first_chunk().and_then(Header::read) else {
        return Err("no record");
    };
    let Some(data) = record.get(HEADER_BYTES..HEADER_BYTES + header.length) else {
        return Err("the record is cut short");
    };
    let crc = chain(previous_crc, &record[..8], data);
    if crc != header.crc {
        return Err("the checksum does not match");
    }
    if record[HEADER_BYTES + header.length..]
        .iter()
        .any(|&b| b != 0)
    {
        return Err("the padding is not zero");
    }
    let kind = RecordType::from_byte(record[4]).ok_or("unknown record type")?;
    let record = decode_data(kind, data).ok_or("the record's data does not parse")?;
    Ok((record, crc))
}

fn decode_data(kind: RecordType, data: &[u8]) -> Option<Record> {
    let position = || {
        Some(LogPosition {
            index: u64_at(data, 0)?,
            term: u64_at(data, 8)?,
        })
    };
    Some(match kind {
        RecordType::Metadata => {
            if data.get(..8)? != METADATA_MAGIC {
                return None;
            }
            Record::Metadata(Metadata {
                format: u32_at(data, 8)?,
                previous_crc: u32_at(data, 12)?,
                identity: Identity {
                    cluster_id: u64_at(data, 16)?,
                    member_id: u64_at(data, 24)?,
                },
                nonce: u64_at(data, 32)?,
                sequence: u64_at(data, 40)?,
                previous: LogPosition {
                    index: u64_at(data, 48)?,
                    term: u64_at(data, 56)?,
                },
            })
        }
        RecordType::Entry => Record::Entry(WalEntry {
            position: position()?,
            kind: *data.get(16)?,
            payload: Bytes::copy_from_slice(&data[ENTRY_FIXED_BYTES..]),
        }),
        RecordType::Vote => Record::Vote(WalVote {
            term: u64_at(data, 0)?,
            voted_for: (*data.get(16)? != 0).then_some(u64_at(data, 8)?),
            committed: *data.get(17)? != 0,
        }),
        RecordType::Committed => Record::Committed(position()?),
        RecordType::Snapshot => Record::Snapshot(position()?),
        RecordType::Truncate => Record::Truncate {
            after: u64_at(data, 0)?,
        },
        RecordType::Seal => Record::Seal,
        RecordType::Mark => Record::Mark {
            synced: u64_at(data, 16).filter(|_| data.len() == MARK_BYTES)?,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (Vec<Record>, Vec<u8>) {
        let entry = WalEntry {
            position: LogPosition { index: 7, term: 3 },
            kind: 1,
            payload: Bytes::from_static(b"payload"),
        };
        let vote = WalVote {
            term: 3,
            voted_for: Some(0),
            committed: true,
        };
        let metadata = Metadata {
            format: FORMAT,
            identity: Identity {
                cluster_id: 1,
                member_id: 2,
            },
            nonce: 99,
            sequence: 4,
            previous: LogPosition { index: 6, term: 2 },
            previous_crc: 5,
        };
        let mut encoder = Encoder::new(0);
        encoder.metadata(&metadata);
        encoder.entry(&entry);
        encoder.vote(&vote);
        encoder.committed(entry.position);
        encoder.snapshot(entry.position);
        encoder.truncate(6);
        encoder.mark(99, 4096);
        encoder.seal();
        let records = vec![
            Record::Metadata(metadata),
            Record::Entry(entry.clone()),
            Record::Vote(vote),
            Record::Committed(entry.position),
            Record::Snapshot(entry.position),
            Record::Truncate { after: 6 },
            Record::Mark { synced: 4096 },
            Record::Seal,
        ];
        (records, encoder.out)
    }

    #[test]
    fn records_come_back_and_every_changed_byte_is_noticed() {
        let (records, bytes) = sample();
        let mut crc = 0;
        let mut at = 0;
        for expected in records {
            let head = bytes[at..].first_chunk().and_then(Header::read).unwrap();
            let whole = &bytes[at..at + record_bytes(head.length)];
            for changed in 0..whole.len() {
                let mut copy = whole.to_vec();
                copy[changed] ^= 0x10;
                assert!(decode(&copy, crc).is_err(), "byte {changed}");
            }
            let (record, next) = decode(whole, crc).unwrap();
            assert_eq!(record, expected);
            assert!(decode(whole, crc ^ 1).is_err(), "not behind another record");
            crc = next;
            at += whole.len();
        }
        assert_eq!(at, bytes.len());
    }

    #[test]
    fn marks_are_found_at_any_byte_and_only_with_their_nonce() {
        let (_, mut bytes) = sample();
        assert_eq!(find_marks(&bytes, 99), Some(4096));
        assert_eq!(find_marks(&bytes, 98), None);
        bytes.drain(..7);
        assert_eq!(find_marks(&bytes, 99), Some(4096));
    }
}
