//! The index of a database that was just filled, in a file beside it, so that its first open need not read every value again.
//!
//!     db/000002.redb     filled, and not opened since
//!     db/000002.index    what the index keeps of each of its records, in their order
//!
//!     | "BLSTIDX2" | tally of the database: 24 bytes | number of entries: u64 LE | CRC32C of what is before: u32 LE |
//!     | bytes: u32 LE | CRC32C of all entries up to here: u32 LE | entries | ...
//!     entry = main | sub | bytes of the value | create | version | lease | bytes of the key (varints each) | the key
//!
//! Promises: it only saves time: where it cannot be written or read, the database is opened without. It is believed when all of it is as it was written and the database's tally is the one that it was left with;
//! otherwise it is as if there were none. The open that finds it removes it. It is never synced.
//!
//! etcd: none; it reads all records at each start.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ballast_api::mvccpb::KeyValue;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use crc32c::{crc32c, crc32c_append};
use prost::Message;
use prost::encoding::{decode_varint, encode_varint};

use crate::backend::{Tally, current};
use crate::mvcc::key_index::Record;
use crate::mvcc::revision::{REVISION_BYTES, Revision};

const MAGIC: [u8; 8] = *b"BLSTIDX2";
const HEAD_BYTES: usize = MAGIC.len() + Tally::LEN + 8 + 4;
/// Entries of about so many bytes have a sum of their own.
const CHUNK_BYTES: usize = 64 << 10;
/// A longer chunk was not written here: one entry has a key of a few megabytes at most.
const CHUNK_BYTES_MAX: usize = 64 << 20;

/// What the index keeps of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub key: Bytes,
    pub head: Record,
    pub lease: i64,
}

impl Entry {
    /// Of a record as it stands in the table of records, or what is wrong with it.
    pub(super) fn of(key: &[u8], value: Bytes) -> Result<Self, String> {
        let (revision, tombstone) = Revision::from_bytes(key).ok_or("its key is no revision")?;
        let bytes = value.len() as u32;
        let kv = KeyValue::decode(value).map_err(|e| e.to_string())?;
        // A restore that bumps the revision leaves an empty record there, which etcd takes for a put of the empty key.
        let is_bump = bytes == 0 && !tombstone;
        if kv.key.is_empty() && !is_bump {
            return Err("it has no key".to_owned());
        }
        if !is_bump && !tombstone && (kv.mod_revision != revision.main || kv.version < 1) {
            let (revision, version) = (kv.mod_revision, kv.version);
            return Err(format!(
                "its value says revision {revision} version {version}"
            ));
        }
        let sub = u32::try_from(revision.sub).map_err(|_| "its sub revision is too large")?;
        let (create, version) = match (tombstone, is_bump) {
            (true, _) => (0, 0),
            (_, true) => (revision.main, 1),
            _ => (kv.create_revision, kv.version),
        };
        Ok(Self {
            key: kv.key,
            head: Record {
                main: revision.main,
                sub,
                bytes,
                create,
                version,
            },
            lease: kv.lease,
        })
    }

    /// Of the record's key and value in the engine.
    pub(super) fn live_bytes(&self) -> i64 {
        let mark = usize::from(self.head.is_tombstone());
        (1 + REVISION_BYTES + mark) as i64 + i64::from(self.head.bytes)
    }

    fn encode(&self, out: &mut BytesMut) {
        let head = &self.head;
        for number in [
            head.main.cast_unsigned(),
            head.sub.into(),
            head.bytes.into(),
            head.create.cast_unsigned(),
            head.version.cast_unsigned(),
            self.lease.cast_unsigned(),
            self.key.len() as u64,
        ] {
            encode_varint(number, out);
        }
        out.put_slice(&self.key);
    }

    fn decode(from: &mut Bytes) -> Option<Self> {
        let mut number = || decode_varint(from).ok();
        let head = Record {
            main: number()?.cast_signed(),
            sub: number()?.try_into().ok()?,
            bytes: number()?.try_into().ok()?,
            create: number()?.cast_signed(),
            version: number()?.cast_signed(),
        };
        let lease = number()?.cast_signed();
        let len = usize::try_from(number()?).ok()?;
        (len <= from.len()).then(|| Self {
            key: from.split_to(len),
            head,
            lease,
        })
    }
}

/// With its database, which gets another name. The one there is of another database.
pub(super) fn rename(from: &Path, to: &Path) {
    let (from, to) = (current::index_path(from), current::index_path(to));
    match std::fs::rename(&from, &to) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => useless(&from, &error),
    }
}

/// One that stays is removed at the next start, or known as another database's by the tally.
fn useless(path: &Path, error: &std::io::Error) {
    tracing::warn!(path = %path.display(), %error, "no index file: the next start reads all records");
    if let Err(error) = current::remove(path) {
        tracing::warn!(%error, "what is left of an index file stays");
    }
}

/// Writes the file, as long as that works.
#[derive(Debug)]
pub(super) struct IndexWriter {
    file: File,
    path: PathBuf,
    chunk: BytesMut,
    /// Of the chunks that are written.
    crc: u32,
    entries: u64,
}

impl IndexWriter {
    pub(super) fn new(path: PathBuf) -> Option<Self> {
        let created = File::create(&path).and_then(|mut file| {
            // Until `finish` it has no head that anybody believes.
            file.write_all(&[0; HEAD_BYTES])?;
            Ok(file)
        });
        let file = created.map_err(|error| useless(&path, &error)).ok()?;
        Some(Self {
            file,
            path,
            chunk: BytesMut::with_capacity(2 * CHUNK_BYTES),
            crc: 0,
            entries: 0,
        })
    }

    /// None once it failed: the file is gone then.
    pub(super) fn add(mut self, entry: &Entry) -> Option<Self> {
        entry.encode(&mut self.chunk);
        self.entries += 1;
        if self.chunk.len() < CHUNK_BYTES {
            return Some(self);
        }
        match self.write_chunk() {
            Ok(()) => Some(self),
            Err(error) => {
                useless(&self.path, &error);
                None
            }
        }
    }

    fn write_chunk(&mut self) -> std::io::Result<()> {
        self.crc = crc32c_append(self.crc, &self.chunk);
        let mut head = [0; 8];
        head[..4].copy_from_slice(&(self.chunk.len() as u32).to_le_bytes());
        head[4..].copy_from_slice(&self.crc.to_le_bytes());
        self.file.write_all(&head)?;
        self.file.write_all(&self.chunk)?;
        self.chunk.clear();
        Ok(())
    }

    /// The database is complete, and its pairs sum up to `tally`.
    pub(super) fn finish(mut self, tally: Tally) {
        let written = if self.chunk.is_empty() {
            Ok(())
        } else {
            self.write_chunk()
        };
        let head = head(tally, self.entries);
        if let Err(error) = written.and_then(|()| self.file.write_all_at(&head, 0)) {
            useless(&self.path, &error);
        }
    }
}

fn head(tally: Tally, entries: u64) -> [u8; HEAD_BYTES] {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    head.put_slice(&MAGIC);
    head.put_slice(&tally.to_bytes());
    head.put_u64_le(entries);
    head.put_u32_le(crc32c(&head));
    head.try_into().expect("the parts have these lengths")
}

/// Hands on all entries, if there is a file and it is of a database whose pairs sum up to `tally`. When it answers false, those that it handed on mean nothing.
pub(super) fn read(path: &Path, tally: Tally, each: &mut dyn FnMut(&Entry)) -> bool {
    let read = File::open(path).and_then(|mut file| read_from(&mut file, tally, each));
    match read {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "an index file is of no use, all records are read");
            false
        }
    }
}

fn read_from(file: &mut File, tally: Tally, each: &mut dyn FnMut(&Entry)) -> std::io::Result<()> {
    let invalid = |why| std::io::Error::new(ErrorKind::InvalidData, why);
    let mut first = [0; HEAD_BYTES];
    file.read_exact(&mut first)?;
    let mut entries = (&first[MAGIC.len() + Tally::LEN..]).get_u64_le();
    if first != head(tally, entries) {
        return Err(invalid("it is not of this database as it is"));
    }
    let mut sum = 0;
    while entries > 0 {
        let mut head = [0; 8];
        file.read_exact(&mut head)?;
        let (len, crc) = ((&head[..4]).get_u32_le(), (&head[4..]).get_u32_le());
        if len == 0 || len as usize > CHUNK_BYTES_MAX {
            return Err(invalid("a chunk has no such length"));
        }
        let mut chunk = vec![0; len as usize];
        file.read_exact(&mut chunk)?;
        sum = crc32c_append(sum, &chunk);
        if sum != crc {
            return Err(invalid("a checksum does not match"));
        }
        let mut chunk = Bytes::from(chunk);
        while !chunk.is_empty() {
            let entry = Entry::decode(&mut chunk).ok_or_else(|| invalid("an entry is cut"))?;
            each(&entry);
            entries = entries
                .checked_sub(1)
                .ok_or_else(|| invalid("it has too many entries"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(main: i64, key: &str) -> Entry {
        Entry {
            key: key.to_owned().into(),
            head: Record {
                main,
                sub: 3,
                bytes: 70_000,
                create: main - 1,
                version: 2,
            },
            lease: -5,
        }
    }

    fn written(path: &Path, tally: Tally) -> Vec<Entry> {
        let mut writer = IndexWriter::new(path.to_owned()).unwrap();
        let entries: Vec<_> = (1..5_000).map(|n| entry(n, &format!("key-{n}"))).collect();
        for entry in &entries {
            writer = writer.add(entry).unwrap();
        }
        writer.finish(tally);
        entries
    }

    fn read_all(path: &Path, tally: Tally) -> Option<Vec<Entry>> {
        let mut all = Vec::new();
        read(path, tally, &mut |entry| all.push(entry.clone())).then_some(all)
    }

    #[test]
    fn what_was_written_is_read_for_the_same_database_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("1.index");
        let tally = Tally {
            pairs: 7,
            bytes: 8,
            sum: 9,
        };
        let entries = written(&path, tally);
        assert_eq!(read_all(&path, tally), Some(entries));
        assert_eq!(read_all(&path, Tally { sum: 10, ..tally }), None);
        assert_eq!(read_all(&dir.path().join("2.index"), tally), None);
    }

    #[test]
    fn a_changed_byte_or_a_missing_end_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("1.index");
        written(&path, Tally::default());
        let whole = std::fs::read(&path).unwrap();
        for at in (0..whole.len()).step_by(997) {
            let mut flipped = whole.clone();
            flipped[at] ^= 1;
            std::fs::write(&path, &flipped).unwrap();
            assert_eq!(read_all(&path, Tally::default()), None, "byte {at}");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(read_all(&path, Tally::default()), None, "{at} bytes");
        }
    }
}
