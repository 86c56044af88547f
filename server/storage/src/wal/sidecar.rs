//! `synced.mark`: how far the last segment is synced, outside the segment.
//!
//! Rewritten in place after each sync, before anybody is told, and itself synced only when the log goes idle. So after a
//! kill it names the last acknowledged byte; after a power cut it may name an older one, never a newer one. At a clean stop it
//! also states that nothing follows, and the file's length: any difference then is damage.
//!
//! ```text
//! | magic 8 | nonce 8 | sequence 8 | synced 8 | file length 8 | chain 4 | clean 4 | zeros 8 | zeros 4 | checksum 4 |
//! ```

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::StorageError;

const NAME: &str = "synced.mark";
const MAGIC: [u8; 8] = *b"blstsyn\x01";
const BYTES: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Synced {
    /// The segment's, so that a mark of another log says nothing here.
    pub(crate) nonce: u64,
    pub(crate) sequence: u64,
    pub(crate) offset: u64,
    pub(crate) file_bytes: u64,
    /// The checksum chain at `offset`.
    pub(crate) crc: u32,
    /// The log was closed at `offset`.
    pub(crate) clean: bool,
}

/// The open file.
#[derive(Debug)]
pub(crate) struct Sidecar {
    path: PathBuf,
    file: File,
}

impl Sidecar {
    pub(crate) fn open(dir: &Path) -> Result<Self, StorageError> {
        let path = dir.join(NAME);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|error| StorageError::io("open", &path, error))?;
        Ok(Self { path, file })
    }

    pub(crate) fn write(&self, synced: &Synced) -> Result<(), StorageError> {
        self.file
            .write_all_at(&encode(synced), 0)
            .map_err(|error| StorageError::io("write", &self.path, error))
    }

    pub(crate) fn sync(&self) -> Result<(), StorageError> {
        self.file
            .sync_data()
            .map_err(|error| StorageError::io("sync", &self.path, error))
    }
}

/// Reads the mark of a directory; None when there is none or it is torn: it then proves nothing.
pub(crate) fn read(dir: &Path) -> Result<Option<Synced>, StorageError> {
    let path = dir.join(NAME);
    match std::fs::read(&path) {
        Ok(bytes) => Ok(decode(&bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(StorageError::io("read", &path, error)),
    }
}

fn encode(synced: &Synced) -> [u8; BYTES] {
    let mut out = [0; BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..16].copy_from_slice(&synced.nonce.to_le_bytes());
    out[16..24].copy_from_slice(&synced.sequence.to_le_bytes());
    out[24..32].copy_from_slice(&synced.offset.to_le_bytes());
    out[32..40].copy_from_slice(&synced.file_bytes.to_le_bytes());
    out[40..44].copy_from_slice(&synced.crc.to_le_bytes());
    out[44..48].copy_from_slice(&u32::from(synced.clean).to_le_bytes());
    let checksum = crc32c::crc32c(&out[..60]);
    out[60..].copy_from_slice(&checksum.to_le_bytes());
    out
}

fn decode(bytes: &[u8]) -> Option<Synced> {
    if bytes.len() != BYTES || bytes[..8] != MAGIC {
        return None;
    }
    let u64_at = |at: usize| Some(u64::from_le_bytes(bytes[at..at + 8].try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(bytes[at..at + 4].try_into().ok()?));
    if u32_at(60)? != crc32c::crc32c(&bytes[..60]) {
        return None;
    }
    Some(Synced {
        nonce: u64_at(8)?,
        sequence: u64_at(16)?,
        offset: u64_at(24)?,
        file_bytes: u64_at(32)?,
        crc: u32_at(40)?,
        clean: u32_at(44)? != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_comes_back_and_a_torn_one_proves_nothing() {
        let mark = Synced {
            nonce: 1,
            sequence: 2,
            offset: 3,
            file_bytes: 4,
            crc: 5,
            clean: true,
        };
        let bytes = encode(&mark);
        assert_eq!(decode(&bytes), Some(mark));
        for at in 0..BYTES {
            let mut torn = bytes;
            torn[at] ^= 1;
            assert_eq!(decode(&torn), None, "byte {at}");
        }
        assert_eq!(decode(&bytes[..BYTES - 1]), None);
    }
}
