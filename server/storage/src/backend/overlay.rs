//! A file that can be written to without being changed: what is written stays in memory.
//!
//! For looking at a database whose engine insists on repairing it first. Not here: engines.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use parking_lot::Mutex;

const PAGE_BYTES: u64 = 4096;

/// A file opened for reading, and what was written over it.
#[derive(Debug)]
pub(super) struct Overlay {
    file: File,
    file_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    len: u64,
    /// Changed pages, by number.
    pages: HashMap<u64, Vec<u8>>,
    /// Below it the file counts; a length that was once less leaves zeros behind.
    valid_bytes: u64,
}

impl Overlay {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let file_bytes = file.metadata()?.len();
        Ok(Self {
            file,
            file_bytes,
            state: Mutex::new(State {
                len: file_bytes,
                pages: HashMap::new(),
                valid_bytes: file_bytes,
            }),
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().len
    }

    pub(super) fn resize(&self, len: u64) {
        let mut state = self.state.lock();
        if len < state.len {
            state.valid_bytes = state.valid_bytes.min(len);
            let last = len / PAGE_BYTES;
            state.pages.retain(|page, _| *page <= last);
            if let Some(page) = state.pages.get_mut(&last) {
                page[(len % PAGE_BYTES) as usize..].fill(0);
            }
        }
        state.len = len;
    }

    pub(super) fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.state.lock();
        if offset + out.len() as u64 > state.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let of_file = state
            .valid_bytes
            .saturating_sub(offset)
            .min(out.len() as u64) as usize;
        self.file.read_exact_at(&mut out[..of_file], offset)?;
        out[of_file..].fill(0);
        for (page, within, at, count) in pieces(offset, out.len()) {
            if let Some(bytes) = state.pages.get(&page) {
                out[at..at + count].copy_from_slice(&bytes[within..within + count]);
            }
        }
        Ok(())
    }

    pub(super) fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock();
        if offset + data.len() as u64 > state.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let valid_bytes = state.valid_bytes;
        for (page, within, at, count) in pieces(offset, data.len()) {
            let bytes = match state.pages.entry(page) {
                std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::hash_map::Entry::Vacant(entry) => {
                    let start = page * PAGE_BYTES;
                    let of_file = valid_bytes.min(self.file_bytes).saturating_sub(start);
                    let mut bytes = vec![0; PAGE_BYTES as usize];
                    let of_file = of_file.min(PAGE_BYTES) as usize;
                    self.file.read_exact_at(&mut bytes[..of_file], start)?;
                    entry.insert(bytes)
                }
            };
            bytes[within..within + count].copy_from_slice(&data[at..at + count]);
        }
        Ok(())
    }
}

/// The stretches of pages that `len` bytes from `offset` touch: page, offset in it, offset in the bytes, count.
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at == len {
            return None;
        }
        let place = offset + at as u64;
        let within = (place % PAGE_BYTES) as usize;
        let count = (PAGE_BYTES as usize - within).min(len - at);
        let piece = (place / PAGE_BYTES, within, at, count);
        at += count;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_and_the_file_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let before: Vec<u8> = (0..10_000_u32).map(|i| i as u8).collect();
        std::fs::write(&path, &before).unwrap();
        let overlay = Overlay::open(&path).unwrap();
        let mut model = before.clone();
        let read = |overlay: &Overlay| {
            let mut out = vec![1; overlay.bytes() as usize];
            overlay.read_at(0, &mut out).unwrap();
            out
        };
        assert_eq!(read(&overlay), model);
        overlay.write_at(4090, &[255; 20]).unwrap();
        model[4090..4110].fill(255);
        assert_eq!(read(&overlay), model);
        for len in [12_000, 5_000, 20_000, 4_100, 9_000] {
            overlay.resize(len as u64);
            model.resize(len, 0);
            assert_eq!(read(&overlay), model, "{len}");
            overlay.write_at(len as u64 - 10, b"0123456789").unwrap();
            model[len - 10..].copy_from_slice(b"0123456789");
            assert_eq!(read(&overlay), model, "{len}");
        }
        assert!(overlay.write_at(8_999, b"no").is_err());
        assert!(overlay.read_at(8_999, &mut [0; 2]).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }
}
