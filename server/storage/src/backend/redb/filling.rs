//! The file of a database that is being filled. Nothing of it counts before the end, so nothing waits for the disk before.
//!
//! The engine writes page by page and in no order: here pages are gathered, and go into the file in long pieces. A sync of a commit that
//! nobody relies on only sends them on their way, so that the last one, which is relied on, finds little left to do.
//!
//! Not here: which commits are relied on (redb.rs).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::fs::Advice;

/// Gathered at most: more than a batch needs.
const GATHERED_MAX: usize = 16 << 20;
/// What is shorter stays in memory until the end: such pages are written again and again.
const SENT_MIN: u64 = 64 << 10;
/// Two parts with no more than this between them are sent as one.
const GAP_MAX: u64 = 16 << 10;

#[derive(Debug)]
pub(super) struct Filling {
    file: File,
    gathered: Mutex<Gathered>,
    relies: Arc<AtomicBool>,
}

/// Pages by their place in the file; none overlaps another.
#[derive(Debug, Default)]
struct Gathered {
    pages: BTreeMap<u64, Vec<u8>>,
    bytes: usize,
    /// Why a part of the file is missing, if one is: then nothing succeeds any more.
    lost: Option<(io::ErrorKind, String)>,
    /// Where the file was written, first bytes and those behind the last, since the last sync.
    written: Vec<(u64, u64)>,
}

impl Filling {
    /// An empty file. Syncs are such while `relies` says so.
    pub(super) fn create(path: &Path, relies: Arc<AtomicBool>) -> io::Result<Self> {
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        Ok(Self {
            file: options.open(path)?,
            gathered: Mutex::default(),
            relies,
        })
    }
}

impl Gathered {
    /// The pages that have bytes of this part, but for one that is of this part alone.
    fn crosses(&self, start: u64, end: u64) -> bool {
        let mut before = self.pages.range(..end).rev();
        before.next().is_some_and(|(at, page)| {
            let page_end = at + page.len() as u64;
            page_end > start && (*at, page_end) != (start, end)
        })
    }

    fn flush(&mut self, file: &File) -> io::Result<()> {
        if let Some((kind, why)) = &self.lost {
            return Err(io::Error::new(*kind, why.clone()));
        }
        // What cannot be written is lost, and the engine was told before that all is well.
        self.write_out(file)
            .inspect_err(|error| self.lost = Some((error.kind(), error.to_string())))
    }

    fn write_out(&mut self, file: &File) -> io::Result<()> {
        let mut run = Vec::with_capacity(self.bytes);
        let mut start = 0;
        self.bytes = 0;
        for (at, page) in std::mem::take(&mut self.pages) {
            if start + run.len() as u64 != at {
                self.write(file, start, &run)?;
                run.clear();
                start = at;
            }
            run.extend_from_slice(&page);
        }
        self.write(file, start, &run)
    }

    fn write(&mut self, file: &File, start: u64, run: &[u8]) -> io::Result<()> {
        let end = start + run.len() as u64;
        if run.is_empty() {
            return Ok(());
        }
        self.written.push((start, end));
        file.write_all_at(run, start)
    }
}

impl redb::StorageBackend for Filling {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.gathered.lock().flush(&self.file)?;
        self.file.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.gathered.lock().flush(&self.file)?;
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut gathered = self.gathered.lock();
        gathered.flush(&self.file)?;
        let written = std::mem::take(&mut gathered.written);
        if self.relies.load(Ordering::Acquire) {
            return self.file.sync_data();
        }
        for (start, end) in joined(written) {
            if let Some(len) = NonZeroU64::new(end - start).filter(|len| len.get() >= SENT_MIN) {
                // Begins to write them, and waits for none. Where that is not known, the last sync has more to do.
                rustix::fs::fadvise(&self.file, start, Some(len), Advice::DontNeed).ok();
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut gathered = self.gathered.lock();
        if gathered.crosses(offset, offset + data.len() as u64) {
            gathered.flush(&self.file)?;
        }
        if gathered.pages.insert(offset, data.to_vec()).is_none() {
            gathered.bytes += data.len();
        }
        if gathered.bytes >= GATHERED_MAX {
            gathered.flush(&self.file)?;
        }
        Ok(())
    }
}

/// Ascending, with those joined that nearly touch.
fn joined(mut parts: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    parts.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::with_capacity(parts.len());
    for (start, end) in parts {
        match out.last_mut() {
            Some(last) if start <= last.1 + GAP_MAX => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::prelude::*;
    use redb::StorageBackend;

    #[test]
    fn parts_that_nearly_touch_are_sent_as_one() {
        let far = 2 * GAP_MAX;
        let parts = vec![
            (4096, 8192),
            (0, 4096),
            (8192 + far, 8192 + 2 * far),
            (1, 2),
        ];
        assert_eq!(joined(parts), [(0, 8192), (8192 + far, 8192 + 2 * far)]);
        assert_eq!(joined(vec![(0, 1), (GAP_MAX, far)]), [(0, far)]);
    }

    #[test]
    fn what_was_written_last_is_read_whatever_overlaps() {
        let seed = rand::rng().random();
        let mut rng = StdRng::seed_from_u64(seed);
        let dir = tempfile::tempdir().unwrap();
        let filling = Filling::create(&dir.path().join("x"), Arc::default()).unwrap();
        let mut model = vec![0; 3 << 20];
        filling.set_len(model.len() as u64).unwrap();
        for round in 0..5_000_u32 {
            let len = 4096 << rng.random_range(0..4);
            let at = rng.random_range(0..=(model.len() - len) / 4096) * 4096;
            let part = at..at + len;
            match rng.random_range(0..50) {
                0 => filling.sync_data().unwrap(),
                1..4 => {
                    let mut out = vec![0; len];
                    filling.read(at as u64, &mut out).unwrap();
                    assert!(out == model[part], "seed {seed}, round {round}");
                }
                _ => {
                    model[part.clone()].fill(round as u8);
                    filling.write(at as u64, &model[part]).unwrap();
                }
            }
        }
        filling.sync_data().unwrap();
        assert!(
            std::fs::read(dir.path().join("x")).unwrap() == model,
            "seed {seed}"
        );
    }
}
